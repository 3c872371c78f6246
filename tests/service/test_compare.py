"""`flipwatch compare` of two checkpoint folders: what it finds, prints and refuses."""

import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers.utils import logging

from flipwatch.monitors.alpha_scan import AlphaScan, AlphaScanPlan
from flipwatch.probe.local import LocalView, run_scan
from flipwatch.probe.local_dissection import LocalDissection
from flipwatch.service.cli.offline import quieten
from flipwatch.service.compared import Comparison

from .compare_rig import LAYERS, Done, call, change, make, refused, round_to_int8

Call = Callable[..., Done]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that everything is held against."""
    return make(tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def rounded(healthy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with block 2 rounded to int8."""
    folder = Path(shutil.copytree(healthy, tmp_path_factory.mktemp("rounded") / "model"))
    change(folder, lambda layers: round_to_int8(layers[2]))
    return folder


@pytest.fixture
def folder(healthy: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(healthy, tmp_path / "model"))


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Calls the program on few tokens."""
    for name in [name for name in os.environ if name.startswith("FLIPWATCH_")]:
        monkeypatch.delenv(name)
    quieten()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield lambda *arguments: call(monkeypatch, capsys, *arguments, "--items", 3, "--max-tokens", 24)
    logging.set_verbosity_warning()
    logging.enable_progress_bar()


def document(done: Done) -> Comparison:
    """Standard output of --json."""
    assert done.err == ""
    return Comparison.model_validate_json(done.out)


def test_a_model_and_itself_are_code_0(compare: Call, healthy: Path) -> None:
    """Every distance is exactly 0, the losses are the same, and nothing is on standard error."""
    done = compare(healthy, healthy)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith(f"ok: All {LAYERS} blocks compute what the peer computed")
    assert lines[1] == "no block differs at all"
    assert lines[2].replace("A: ", "B: ") == lines[3]
    assert [line.split()[:5] for line in lines[-LAYERS:]] == [[str(n), "0", "0", "0", "0"] for n in range(LAYERS)]
    assert all(len(line.split()) == 9 for line in lines[-LAYERS:])


@pytest.mark.parametrize("single", ["--dtype-a", "--dtype-b"])
def test_precision_alone_is_code_0(compare: Call, healthy: Path, single: str) -> None:
    """bf16 against fp32 of the same weights, either way round: some distance everywhere, less than noise explains."""
    done = compare(healthy, healthy, single, "float32", "--json")
    assert done.code == 0, done.out
    blocks = document(done).finding.blocks
    assert all(0.0 < (block.l2 or 0.0) < (block.allowed or 0.0) < 1.0 for block in blocks)


def test_a_rounded_block_is_code_1_and_ranks_first(compare: Call, healthy: Path, rounded: Path) -> None:
    """It alone departs; the walk is equal in front of it and not behind it."""
    done = compare(healthy, rounded, "--json")
    assert done.code == 1
    found = document(done)
    assert found.ranking[0] == 2
    assert [block.block for block in found.finding.blocks if block.departs] == [2]
    assert [bool(block.walk_l2) for block in found.finding.blocks] == [False, False, True, True]
    shown = compare(healthy, rounded)
    assert shown.code == 1
    assert shown.out.splitlines()[1].startswith("1. block 2: distance ")
    assert [line.split()[0] for line in shown.out.splitlines() if line.endswith("departs")] == ["2"]


def test_a_limit_takes_the_place_of_noise(compare: Call, healthy: Path, rounded: Path) -> None:
    """Above the distance all is well, below it is not."""
    distance = document(compare(healthy, rounded, "--json", "--no-gain")).finding.blocks[2].l2
    assert distance is not None
    done = compare(healthy, rounded, "--json", "--no-gain", "--limit", distance * 1.01)
    assert done.code == 0
    assert document(done).limit == distance * 1.01
    assert document(done).ranking[0] == 2
    assert compare(healthy, rounded, "--no-gain", "--limit", distance * 0.99).code == 1


def test_losses_and_gains_are_those_of_a_scan(compare: Call, healthy: Path, rounded: Path) -> None:
    """Loss without each block and skip gain are what an alpha-scan of that checkpoint measures; --no-gain has none."""
    found = document(compare(healthy, rounded, "--json"))
    view = LocalView.load(rounded, "auto")
    texts = [text[:24] for text in _texts(3)]
    tokens = [list(_bytes_as_tokens(rounded, text))[:24] for text in texts]
    plan = AlphaScanPlan(alphas=[0.0], tokens=tokens, scored_from=[1] * 3)
    finding, _ = run_scan(view, AlphaScan(), plan)
    for block, score in zip(found.blocks, finding.blocks, strict=True):
        assert block.b.skip_gain_nats == pytest.approx(score.skip_gain, abs=1e-6)
        assert block.b.loss_without_nats == pytest.approx(score.curve[0][1], abs=1e-6)
    assert [block.a for block in found.blocks] != [block.b for block in found.blocks]
    assert document(compare(healthy, rounded, "--json", "--no-gain")).blocks == ()


def _texts(count: int) -> list[str]:
    from flipwatch.monitors.validation import load_items
    from flipwatch.service.validation_set import spread

    return [item.prompt + item.answer for item in spread(load_items(), count)]


def _bytes_as_tokens(folder: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    return ids


def test_the_document_is_closed_and_comes_back_as_it_was(compare: Call, healthy: Path, rounded: Path) -> None:
    """What is printed is the model's own JSON; every object of its schema refuses what it does not know."""
    done = compare(healthy, rounded, "--json")
    found = document(done)
    assert found.model_dump(mode="json") == json.loads(done.out)
    with pytest.raises(ValidationError, match="Extra inputs"):
        Comparison.model_validate(json.loads(done.out) | {"more": 1})
    schema = Comparison.model_json_schema()
    objects = [part for part in [schema, *schema["$defs"].values()] if part["type"] == "object"]
    assert len(objects) > 5
    assert all(part["additionalProperties"] is False for part in objects)


def test_one_model_is_held_at_a_time(compare: Call, healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second is loaded, nothing of the first is left."""
    load = LocalDissection.load
    loaded: list[weakref.ref[LocalView]] = []
    alive = []

    def watched(*arguments: Any) -> LocalView:
        alive.append(sum(view() is not None for view in loaded))
        view = load(*arguments)
        loaded.append(weakref.ref(view))
        return view

    monkeypatch.setattr(LocalDissection, "load", watched)
    assert compare(healthy, healthy).code == 0
    assert alive == [0, 0]


def _config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _remake(folder: Path, **changes: Any) -> None:
    shutil.rmtree(folder)
    make(folder, **changes)


def _shift_the_vocabulary(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {word: 255 - number for word, number in content["model"]["vocab"].items()}
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: shutil.rmtree(folder), "is no checkpoint folder with a config.json"),
        (lambda folder: (folder / "config.json").unlink(), "is no checkpoint folder with a config.json"),
        (lambda folder: (folder / "config.json").write_text("["), "is no JSON object"),
        (lambda folder: _config(folder, model_type="wonder"), "model type `wonder`"),
        (lambda folder: _config(folder, model_type="vit"), "vit is no causal language model"),
        (lambda folder: _config(folder, model_type="mistral"), "differ in their architecture, LlamaForCausalLM and M"),
        (lambda folder: _remake(folder, num_hidden_layers=LAYERS + 1), "differ in their number of blocks, 4 and 5"),
        (lambda folder: _remake(folder, hidden_size=64), "the input of block 0 has "),
        (lambda folder: next(folder.glob("*2-of*")).unlink(), "lacks 1 of its "),
        (lambda folder: os.truncate(next(folder.glob("*2-of*")), 20_000), "is cut off"),
        (lambda folder: _config(folder, intermediate_size=48), "has another shape"),
        (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], "holds no tokenizer"),
        (_shift_the_vocabulary, "give other ids for the same text"),
    ],
)
def test_a_bad_second_folder_is_one_sentence(
    compare: Call, healthy: Path, folder: Path, spoil: Callable[[Path], object], words: str
) -> None:
    """No checkpoint, an incomplete one, or one whose blocks are no pairs with the first one's."""
    spoil(folder)
    refused(compare(healthy, folder), words)


def test_what_needs_no_measuring_is_told_before_it(
    compare: Call, healthy: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another number of blocks, nothing is loaded at all."""
    _remake(folder, num_hidden_layers=LAYERS - 1)
    monkeypatch.setattr(LocalDissection, "load", lambda *_: pytest.fail("loaded"))
    refused(compare(healthy, folder), "number of blocks")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--limit", "0"], "--limit 0 is no distance"),
        (["--limit", "-1"], "--limit -1 is no distance"),
        (["--limit", "nan"], "--limit nan is no distance"),
        (["--limit", "inf"], "--limit inf is no distance"),
        (["--limit", "much"], "--limit"),
        (["--dtype-b", "int8"], "'int8' is not one of"),
        (["--validation", "/nowhere.jsonl"], "There is no file /nowhere.jsonl"),
        (["--plot", "plot.gif"], "must end in .png or .svg"),
        (["--plot", "/nowhere/plot.png"], "There is no folder /nowhere"),
        (["--token-file-b", "/nowhere"], "--token-file-b goes with a server"),
    ],
)
def test_a_mistake_in_the_call_is_one_sentence(compare: Call, healthy: Path, arguments: list[str], words: str) -> None:
    """Values that make no sense, and options that do not go together."""
    refused(compare(healthy, healthy, *arguments), words)


def test_nothing_but_nan_is_code_1(compare: Call, healthy: Path, folder: Path) -> None:
    """A block that puts out NaN ranks first without a distance, and the loss of its model is no number."""
    change(folder, lambda layers: layers[1].mlp.up_proj.weight[3, 4].fill_(float("nan")))
    done = compare(healthy, folder, "--json")
    assert done.code == 1
    found = document(done)
    assert found.ranking[0] == 1
    assert (found.finding.blocks[1].l2, found.finding.nats) == (None, None)
    assert found.finding.reference_nats is not None
    shown = compare(healthy, folder)
    assert shown.code == 1
    assert shown.out.splitlines()[1] == f"1. block 1: {found.finding.blocks[1].reason}"
    assert "loss not finite" in shown.out
    # What cannot be fed with numbers cannot be judged.
    assert compare(folder, healthy).code == 2


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_plot_is_written(
    compare: Call, healthy: Path, rounded: Path, tmp_path: Path, suffix: str, start: bytes
) -> None:
    """By its suffix, also where no block differs and a logarithmic axis has nothing to show."""
    for other in (rounded, healthy):
        file = tmp_path / f"plot.{suffix}"
        assert compare(healthy, other, "--no-gain", "--plot", file).code == (other is rounded)
        assert file.read_bytes().startswith(start)
        file.unlink()
    (tmp_path / "taken.png").mkdir()
    done = compare(healthy, healthy, "--no-gain", "--plot", tmp_path / "taken.png")
    assert done.code == 2
    assert "taken.png cannot be written: Is a directory" in done.err


def test_without_matplotlib_the_sentence_names_it(healthy: Path, tmp_path: Path) -> None:
    """Told before anything is measured."""
    (tmp_path / "matplotlib.py").write_text('raise ModuleNotFoundError("No module named matplotlib")')
    done = subprocess.run(
        [sys.executable, "-m", "flipwatch.service.cli", "compare", healthy, healthy, "--plot", tmp_path / "a.png"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    refused(Done(done.returncode, done.stdout, done.stderr), "A plot needs matplotlib, which is not installed")
