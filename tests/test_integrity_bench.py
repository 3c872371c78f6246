"""The parts of the integrity benchmark that need no vLLM: flips, fault cases, intervals, tables."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flipwatch.monitors.faults import FaultKind, damage, inject
from flipwatch.monitors.fingerprint.facts import Rank
from flipwatch.monitors.fingerprint.line import Line, Source
from flipwatch.monitors.fingerprint.parity import MemoryParity
from flipwatch.monitors.fingerprint.sealed import SealedWeights

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The benchmark's modules by the last part of their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield {name: importlib.import_module(f"integrity_{name}") for name in ("flips", "faults", "tables")}


@pytest.fixture
def sealed() -> SealedWeights:
    """Three tensors, one transposed, one of a single value, on seven chunks of 4 KiB."""
    torch.manual_seed(0)
    sources = [
        Source("a", 0, torch.randn(96, 64).bfloat16()),
        Source("b", 1, torch.randn(64, 48).t()),
        Source("scale", None, torch.ones(())),
    ]
    weights = SealedWeights(
        Line(sources, 4096), Rank(rank=0), device=torch.device("cpu"), group=4, new_parity=MemoryParity
    )
    for _ in weights.record():
        pass
    return weights


def test_flips_are_counted_for_each_detector(modules: dict[str, ModuleType], sealed: SealedWeights) -> None:
    """The fingerprint names all; a detector that looks at one tensor sees only those there, of those it is shown."""
    flips = modules["flips"]
    first = sealed.line.stretches[0].source.tensor
    before = first.clone()

    class OneTensor:
        name = "one tensor"
        most = 100

        def differs(self) -> bool:
            return not torch.equal(first.view(torch.int16), before.view(torch.int16))

    drawn = flips.draw(sealed.line, {id(first)}, 150, 0.3, 1)
    ticks: list[None] = []
    figures, tallies = flips.run(sealed, drawn, [OneTensor()], lambda: ticks.append(None))
    assert figures["named"]["all"] == [150, 150]
    assert figures["not_named"] == []
    assert figures["intact_afterwards"]
    assert figures["tensors_hit"] == 3
    assert tallies["fingerprint"].counts["all"] == [150, 150]
    in_first = sum(flip.source.tensor is first for flip in drawn[:100])
    seen = tallies["one tensor"].counts
    assert seen["all"] == [in_first, 100]
    assert seen[flips.PARAMETER] == [in_first, in_first]
    assert seen[flips.OTHER] == [0, 100 - in_first]
    assert len(ticks) == 150


def test_a_wrong_name_is_no_name(modules: dict[str, ModuleType], sealed: SealedWeights) -> None:
    """A sweep that names another element, bit or chunk than was flipped does not count as named."""
    flips = modules["flips"]
    one, other = flips.draw(sealed.line, set(), 2, 0.0, 2)
    with flips.flipped(one):
        reading = flips.finish(sealed.sweep())
        assert flips.is_named(reading, one)
        assert not flips.is_named(reading, other)
        assert not flips.is_named(reading, one._replace(bit=(one.bit + 1) % 16))
        with flips.flipped(other):
            assert not flips.is_named(flips.finish(sealed.sweep()), one)
    assert not flips.is_named(flips.finish(sealed.sweep()), one)


@pytest.mark.parametrize("kind", list(FaultKind))
def test_a_fault_lies_in_one_chunk(modules: dict[str, ModuleType], sealed: SealedWeights, kind: FaultKind) -> None:
    """What is drawn of any kind changes this chunk and no other."""
    line = sealed.line if kind is not FaultKind.LOST else Line([Source("c", None, torch.ones(64))], 4096)
    cases = modules["faults"].Cases(line, 3)
    source, spec, other, chunk = cases.draw(kind)
    assert damage(spec, source.tensor, other).after.numel()
    if kind is not FaultKind.LOST:
        undo = inject(spec, source.tensor, other)
        assert [bad.chunk for bad in modules["flips"].finish(sealed.sweep()).bad] == [chunk]
        undo()
        assert modules["flips"].finish(sealed.sweep()).bad_chunks == 0


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    # By hand: of none hit, the upper end is z^2 / (n + z^2); half of 100 is the textbook's 0.4038 to 0.5962.
    [(0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0), (50, 100, 0.4038, 0.5962), (0, 0, 0.0, 1.0)],
)
def test_wilson(modules: dict[str, ModuleType], count: int, of: int, low: float, high: float) -> None:
    """Known intervals."""
    assert modules["flips"].wilson(count, of) == pytest.approx((low, high), abs=1e-4)


def test_tables_say_what_was_counted(modules: dict[str, ModuleType]) -> None:
    """Shares, counts, ratios and the wanted values are in the page; without a live server its chapter is left out."""
    page = modules["tables"].markdown(_figures())
    assert "| vLLM's SHA-256 | 50.00 % (1 of 2; 9.45 to 90.55) | none |" in page
    assert "A sweep takes 2.00 (2.00 to 2.00) times as long as `tensor.sum()`" in page
    assert "vLLM's SHA-256 5.00 (5.00 to 5.00) times as long as a sweep" in page
    assert "It takes 12.0 times as long" in page
    assert "NOT that of before" in page
    assert "| burst | 3 | 3 | 2 | 1 |" in page
    assert "live server" not in page


def _figures() -> dict[str, Any]:
    seen = {"all": [1, 2]}
    seconds = {"sweep": [0.02], "tensor.sum()": [0.01], "vLLM's SHA-256": [0.1]}
    ratios = {"tensor.sum()": [0.5], "vLLM's SHA-256": [5.0]}
    return {
        "model": "m",
        "vllm": "1",
        "seed": 0,
        "share_by_tensor": 0.1,
        "flips": {
            "flips": 2,
            "tensors_hit": 1,
            "chunks_hit": 1,
            "named": seen,
            "not_named": [],
            "intact_afterwards": False,
        },
        "detectors": {name: {"seen": seen, "reference_bytes": 32} for name in ("fingerprint", "vLLM's SHA-256")},
        "recording": {
            "seconds": [0.1],
            "chunks": 3,
            "chunk_bytes": 4096,
            "tensors": 3,
            "covered_bytes": 9000,
            "parity_bytes": 4096,
        },
        "healthy": {"idle": [0, 3], "serving": [0, 1], "served_tokens": 9, "peers": {"vLLM's SHA-256": [0, 2]}},
        "speed": {
            "threads": 1,
            "machine": "x",
            "torch": "2",
            "bytes": 9000,
            "seconds": seconds,
            "cpu_seconds": seconds,
            "over_sweep": ratios,
            "cpu_over_sweep": ratios,
        },
        "repair": {
            "parity_seconds": [0.01],
            "checkpoint_seconds": [],
            "checkpoint_refused": 1,
            "reload_seconds": [0.12],
            "reload_changed_chunks": 0,
            "reload_replaced_tensors": 0,
            "reload_over_parity": 12.0,
        },
        "faults": {
            "kinds": {"burst": {"faults": 3, "seen": 3, "by_parity": 2, "same_bits": 1}},
            "pairs": {
                "pairs": 1,
                "seen": 1,
                "by_checkpoint": 1,
                "same_bits": 1,
                "refused": 0,
                "refused_left_as_found": 0,
            },
        },
        "live": None,
    }
