"""`flipwatch scan --model`: a checkpoint folder is scanned without a server, and every mistake is one sentence."""

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from flipwatch.service.cli import main
from flipwatch.service.cli.checkpoint import examine, free_bytes
from flipwatch.service.cli.offline import _QUIET

from ..byte_tokenizer import byte_tokenizer

LAYERS = 4
SHARDS = "model-0000{}-of-00003.safetensors"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bf16 and three shards that says each letter again; its blocks add next to nothing."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.02,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder, max_shard_size="45KB")
    byte_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder


@pytest.fixture
def folder(healthy: Path, tmp_path: Path) -> Path:
    """A copy of it to be spoilt."""
    return Path(shutil.copytree(healthy, tmp_path / "model"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A validation set that such a model is good at."""
    lines = [{"prompt": letter * 8, "answer": letter * 8} for letter in "abcdefghij"]
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


class Done(NamedTuple):
    """What a call of the program came to."""

    code: int
    out: str
    err: str


Call = Callable[..., Done]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Calls the program in this process, which has torch loaded already."""
    for name, value in _QUIET.items():
        monkeypatch.setenv(name, value)
    # The variables come too late here: transformers reads them when it is imported.
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def run(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["flipwatch", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return Done(int(left.value.code or 0), out, err)

    yield run
    logging.set_verbosity_warning()
    logging.enable_progress_bar()


def damage(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the model and write it back."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        change(model.model.layers)
    for file in folder.glob("model*"):
        file.unlink()
    model.save_pretrained(folder)


def test_a_healthy_checkpoint_is_code_0(call: Call, healthy: Path, texts: Path) -> None:
    """The sentence, the most notable blocks, and the cost by the model and in fact; nothing on standard error."""
    done = call("scan", "--model", healthy, "--validation", texts)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith("ok: base loss ")
    assert lines[1].split() == ["block", "without", "it", "skip", "gain", "t", "BSS", "BSS", "z", "slope"]
    assert lines[-1].startswith("cost: 6.5 forward passes (by the cost model 6.5, naive 13), ")
    everything = call("scan", "--model", healthy, "--validation", texts, "--all").out.splitlines()
    assert [line.split()[0] for line in everything[2:-1]] == [str(block) for block in range(LAYERS)]


def test_a_harmful_block_is_code_1(call: Call, folder: Path, texts: Path) -> None:
    """The block whose weights were blown up is flagged, with the loss without it."""
    damage(folder, lambda layers: layers[2].mlp.down_proj.weight.mul_(3000.0))
    done = call("scan", "--model", folder, "--validation", texts)
    assert done.code == 1
    assert done.out.startswith("failed: base loss ")
    [row] = [line for line in done.out.splitlines() if line.endswith("flagged")]
    assert row.split()[0] == "2"
    assert float(row.split()[1]) == pytest.approx(0.0, abs=0.5)

    shown = json.loads(call("scan", "--model", folder, "--validation", texts, "--json").out)
    assert shown["finding"]["flagged"] == [2]
    assert shown["cost"]["passes"] == pytest.approx(shown["cost"]["predicted"])
    assert shown["finding"]["predicted_loss_nats"] == pytest.approx(float(row.split()[1]), abs=1e-3)


@pytest.mark.parametrize("strategy", ["plain", "two-stage", "grouped", "growing"])
def test_nan_is_found_by_every_strategy(call: Call, folder: Path, texts: Path, strategy: str) -> None:
    """Two blocks of NaN are both named."""
    damage(folder, lambda layers: [layers[n].mlp.up_proj.weight[3, 4].fill_(torch.nan) for n in (1, 3)])
    done = call("scan", "--model", folder, "--validation", texts, "--strategy", strategy, "--json")
    assert done.code == 1
    assert json.loads(done.out)["finding"]["flagged"] == [1, 3]


def test_options_reach_the_scan(call: Call, healthy: Path, texts: Path) -> None:
    """Items, tokens, scored part, grid and precision."""
    arguments = ("--items", 2, "--max-tokens", 12, "--score", "answer", "--grid", "0,0.5", "--dtype", "float32")
    done = call("scan", "--model", healthy, "--validation", texts, "--json", *map(str, arguments))
    finding = json.loads(done.out)["finding"]
    assert "over 8 tokens in 2 sequences" in finding["reason"]
    assert [alpha for alpha, _ in finding["blocks"][0]["curve"]] == [0.0, 0.5]


def _cut(file: Path, size: int) -> None:
    os.truncate(file, size)


def _config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: shutil.rmtree(folder), "There is no folder"),
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder: (folder / "config.json").write_text("["), "is no JSON object"),
        (lambda folder: _config(folder, model_type="wonder"), "model type `wonder`"),
        (lambda folder: _config(folder, model_type="wonder", auto_map={"AutoConfig": "a.B"}), "custom code"),
        (lambda folder: _config(folder, model_type="vit"), "vit is no causal language model"),
        (
            lambda folder: _config(folder, num_hidden_layers=LAYERS + 1),
            "model.layers.4.input_layernorm.weight is missing",
        ),
        (lambda folder: _config(folder, intermediate_size=48), "has another shape"),
        (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], "holds no tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "The tokenizer in"),
        (lambda folder: (folder / SHARDS.format(2)).unlink(), "lacks 1 of its 3 weight files (model-00002-of-00003."),
        (
            lambda folder: _cut(folder / SHARDS.format(2), 20_000),
            "model-00002-of-00003.safetensors is cut off: it holds",
        ),
        (lambda folder: _cut(folder / SHARDS.format(2), 100), "is cut off within its header"),
        (lambda folder: (folder / SHARDS.format(2)).write_bytes(b"\xff" * 50_000), "is no safetensors file"),
        (lambda folder: [file.unlink() for file in folder.glob("model*")], "holds neither model.safetensors nor"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "is no JSON object"),
        (lambda folder: (folder / SHARDS.format(2)).write_bytes(b"\3" + bytes(7) + b"[1]"), "is no safetensors file"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "a" * 300}})
            ),
            "lacks 1 of its 1 weight files",
        ),
        (
            lambda folder: _config(folder, num_hidden_layers=LAYERS - 1),
            "the files hold a decoder layer model.layers.3, but the config says that there are 3",
        ),
    ],
)
def test_a_bad_folder_is_one_sentence(call: Call, folder: Path, spoil: Callable[[Path], object], words: str) -> None:
    """What is missing, cut off, foreign or inconsistent is named; code 2, nothing on standard output."""
    spoil(folder)
    done = call("scan", "--model", folder)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("flipwatch: ")
    assert done.err.count("\n") == 1, done.err
    assert words in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--items", "4"], "--items goes with --model only"),
        (["--max-faults", "4"], "--max-faults goes with --model only"),
        (["--model", "HERE", "--grid", "0,1"], "not 1 (always measured)"),
        (["--model", "HERE", "--grid", "some"], "neither quick, full, nor numbers"),
        (["--model", "HERE", "--dtype", "int8"], "'int8' is not one of"),
        (["--model", "HERE", "--items", "0"], "--items"),
        (["--model", "HERE", "--max-tokens", "2", "--score", "answer"], "raise --max-tokens"),
        (["--model", "a" * 5000], "There is no folder a"),
        (["--model", "HERE", "--validation", "/nowhere.jsonl"], "There is no file /nowhere.jsonl"),
        (["--model", "HERE", "--validation", "HERE"], "cannot be read"),
        (["--model", "HERE", "--validation", "HERE/config.json"], "line 1: "),
    ],
)
def test_a_mistake_in_the_call_is_one_sentence(call: Call, healthy: Path, arguments: list[str], words: str) -> None:
    """Options that do not go together, values that make no sense, files that are none."""
    done = call("scan", *(argument.replace("HERE", str(healthy)) for argument in arguments))
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1, done.err
    assert words in done.err


def test_too_little_memory_is_one_sentence(call: Call, healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before anything is loaded, for the precision that was asked for."""
    sizes = examine(healthy)
    assert sizes.bytes_as("float32") == 2 * sizes.bytes_as("bfloat16") == 2 * sizes.stored_bytes
    monkeypatch.setattr("flipwatch.service.cli.checkpoint.free_bytes", lambda: sizes.stored_bytes + 1)
    assert call("scan", "--model", healthy, "--items", "1").code != 2
    done = call("scan", "--model", healthy, "--dtype", "float32")
    assert done.code == 2
    assert "not enough memory" in done.err


def test_free_memory_is_what_machine_and_control_group_leave(tmp_path: Path) -> None:
    """The smaller of both; file pages count as free; without a limit or without Linux the other one, or nothing."""
    assert free_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8 kB\n")
    assert free_bytes(tmp_path) == 8192
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("5000\n")
    (group / "memory.stat").write_text("anon 4000\ninactive_file 500\n")
    (group / "memory.max").write_text("6000\n")
    assert free_bytes(tmp_path) == 1500
    (group / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path) == 8192


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_without_the_extra_the_sentence_names_it(healthy: Path, tmp_path: Path, package: str) -> None:
    """The program itself runs without torch, and says what to install."""
    stub = f'raise ModuleNotFoundError("No module named {package!r}", name={package!r})'
    (tmp_path / f"{package}.py").write_text(stub)
    done = subprocess.run(
        [sys.executable, "-m", "flipwatch.service.cli", "scan", "--model", str(healthy)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"flipwatch: A checkpoint folder needs {package}, which is not installed: pip install 'flipwatch[local]'.\n"
    )


def test_bars_and_progress_on_a_terminal(healthy: Path, texts: Path) -> None:
    """On a terminal a bar moves while it scans, and the table has a bar for each score."""
    master, slave = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-m", "flipwatch.service.cli", "scan", "--model", str(healthy), "--validation", str(texts)],
        env=os.environ | {"TERM": "xterm", "COLUMNS": "160", "NO_COLOR": "1"},
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(master)
    assert done.wait(60) == 0
    text = shown.decode()
    assert "scanning" in text
    assert "++++++++" in text
    assert " ----" in text
    assert "weights" not in text, "transformers shows a bar of its own"


_PEAK = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama
from flipwatch.probe.local import LocalView
from flipwatch.service.cli import main

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

AutoTokenizer.from_pretrained(sys.argv[1])
before = peak()
sys.argv = ["flipwatch", "scan", "--model", sys.argv[1], "--items", "1", "--max-tokens", "4", "--grid", "0", "--json"]
try:
    main()
except SystemExit:
    print(peak() - before, file=sys.stderr)
"""


def test_shards_are_not_loaded_twice(smol: Path, tmp_path: Path) -> None:
    """The peak of memory over a scan of a model in three files is below 1.25 times its bytes."""
    model = AutoModelForCausalLM.from_pretrained(smol, dtype="auto")
    model.save_pretrained(tmp_path, max_shard_size="100MB")
    AutoTokenizer.from_pretrained(smol).save_pretrained(tmp_path)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) >= 3
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)],
        env=os.environ | _QUIET,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert json.loads(done.stdout)["finding"]["base_loss_nats"] > 0
    assert int(done.stderr) < 1.25 * sum(file.stat().st_size for file in files)


def test_examine_adds_up_the_tensors(healthy: Path) -> None:
    """The bytes are those of the tensors in the files."""
    stored = 0
    for file in healthy.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            stored += sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118 - no mapping
    assert examine(healthy).stored_bytes == stored
