"""Gate, scan and undo on tiny random models of many architectures, or a refusal in one sentence."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flipwatch.monitors.differential.facts import DifferentialReading
from flipwatch.monitors.differential.finding import DifferentialFinding
from flipwatch.monitors.differential.judgement import judge
from flipwatch.monitors.differential.reference import Recording, ReferenceKind
from flipwatch.monitors.finding import Health

from ..vllm_server import WITH_THE_TESTS, vllm_environment
from .reference import Reference, largest_difference
from .states import of_facts
from .tiny import FAMILIES

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# What the scan of these cannot do, in the words of the refusal.
NO_SCAN = {"bloom": "ALiBi", "lfm2": "state"}
# vLLM's own tiny models of these differ from Hugging Face's, without any gate: routing that depends on the batch, other
# widths of the feed-forward part.
# Tensors of these have a layout that is made at load: the checkpoint has no value to compare with.
MADE_AT_LOAD = {"mixtral": "rearranges the experts", "qwen3_moe": "rearranges the experts", "deepseek_v2": "W_UV"}
UNLIKE_HUGGING_FACE = {"deepseek_v2", "lfm2"}


@pytest.fixture(scope="module")
def zoo(smol: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Results of zoo.py for all families, from one process."""
    work = tmp_path_factory.mktemp("zoo")
    program = Path(__file__).parent / "zoo.py"
    done = subprocess.run(
        [*WITH_THE_TESTS, sys.executable, str(program), str(smol), str(work), *FAMILIES],
        env=vllm_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = [line.removeprefix("ZOO ") for line in done.stdout.splitlines() if line.startswith("ZOO ")]
    results = {entry["family"]: entry for entry in map(json.loads, lines)}
    assert set(results) == set(FAMILIES), done.stdout[-2000:] + done.stderr[-2000:]
    return work, results


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, zoo: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    """Skip equals the model without the layer, undo restores every bit, the scan equals the scaled model."""
    work, results = zoo
    result = results[family]
    assert "error" not in result, result["error"]
    assert result["facts"]["refusal"] is None
    assert result["self_test"] == {"inert": [], "wrong": []}
    assert result["again"] == result["served"]
    assert result["untouched"], "the scan changed the KV cache or a gate"
    reference = Reference(work / family)
    sequences = result["sequences"]

    def check(served: list[list[float]], block: int | None, alpha: float) -> None:
        for tokens, ours in zip(sequences, served, strict=True):
            assert largest_difference(ours, reference.logprobs(tokens, block, alpha)) < 1e-3

    if family not in UNLIKE_HUGGING_FACE:
        check(result["served"], None, 1.0)
        check(result["skip_0"], 0, 0.0)
        check(result["skip_3"], 3, 0.0)
    assert result["skip_3"] != result["served"]
    if family in NO_SCAN:
        assert NO_SCAN[family] in result["scan"]["refused"]
        assert result["facts"]["scan_refusal"] == result["scan"]["refused"]
        return
    nats = [-sum(row) / len(row) for row in result["served"]]
    assert result["one_sequence"]["base_nats"][0] == pytest.approx(nats[0], abs=1e-3)
    if family in UNLIKE_HUGGING_FACE:
        # One sequence at a time; the routing flips with the batch, which moves the loss by some thousandths, while
        # leaving the block out moves it by 0.05.
        alone = result["one_sequence"]["nats"][3]
        for index, alpha in enumerate(result["scan"]["alphas"]):
            expected = reference.logprobs(sequences[0], 3, alpha)
            assert alone[index][0] == pytest.approx(-sum(expected) / len(expected), abs=0.01)
        skipped = result["skip_3"][0]
        assert alone[0][0] == pytest.approx(-sum(skipped) / len(skipped), abs=0.01)
        return
    assert result["scan"]["base_nats"] == pytest.approx(nats, abs=1e-3)
    for index, alpha in enumerate(result["scan"]["alphas"]):
        for row, tokens in enumerate(sequences):
            expected = reference.logprobs(tokens, 3, alpha)
            assert result["scan"]["nats"][3][index][row] == pytest.approx(-sum(expected) / len(expected), abs=1e-3)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NO_SCAN])
def test_blocks_alone(family: str, zoo: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    """The blocks of any family against states of their own and the checkpoint: no flag, and a fault is named."""
    result = zoo[1][family]
    alone = result["alone"]
    assert (alone["bytes"]["bad_chunks"], alone["bytes"]["replaced"]) == (0, []), "the weights were left changed"
    here = of_facts(result["facts"])
    recording = Recording.model_validate(
        {"recorded_at": 1.0, "conditions": here, "plan": alone["plan"], "reading": alone["recorded"]}, strict=False
    )

    def judged(name: str, kind: ReferenceKind) -> DifferentialFinding:
        reading = DifferentialReading.model_validate(alone[name])
        kept = None if kind is ReferenceKind.CHECKPOINT else recording
        return judge(reading, kind, kept, here, size=recording.plan.size)

    healthy, clean = judged("healthy", ReferenceKind.RECORDED), judged("clean", ReferenceKind.CHECKPOINT)
    assert healthy.health is Health.OK, healthy.reason
    assert clean.places == ()
    if family in MADE_AT_LOAD:
        assert clean.health is Health.UNKNOWN
        assert MADE_AT_LOAD[family] in clean.reason
    else:
        assert clean.health is Health.OK, clean.reason
    assert alone["fault"]["fault"]["block"] == 3, alone["fault"]
    faulty, found = judged("faulty", ReferenceKind.RECORDED), judged("found", ReferenceKind.CHECKPOINT)
    assert [place.block for place in faulty.places] == [3], faulty.reason
    assert [spot.tensor for spot in found.locations] == [alone["fault"]["fault"]["tensor"]], found.reason
