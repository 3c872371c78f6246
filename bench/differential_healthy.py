"""Healthy models held against healthy models: what noise makes of the distances, and whether anything is flagged."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import differential_child
import torch
from differential_states import Rows, Served, conditions, local, read, record

from flipwatch.monitors.differential.comparison import REPEATED_FACTOR, ROUNDING_FACTOR, Comparison
from flipwatch.monitors.differential.facts import STREAM, DifferentialReading
from flipwatch.monitors.differential.judgement import judge
from flipwatch.monitors.differential.pair import pairs_with_recording
from flipwatch.monitors.differential.reference import Conditions, Recording, ReferenceKind
from flipwatch.probe.local_dissection import LocalDissection

LOCAL = {
    "transformers bf16, sdpa": (torch.bfloat16, "sdpa"),
    "transformers bf16, eager": (torch.bfloat16, "eager"),
    "transformers fp32, sdpa": (torch.float32, "sdpa"),
}
VLLM = "vLLM bf16"
CHILDREN = {"vLLM bf16, 2 threads": ("bfloat16", 2), "vLLM fp32": ("float32", 1)}


def children(model: Path, sets: list[Rows]) -> dict[str, Any]:
    """What other vLLM processes recorded, as JSON; before there is one in this process."""
    return {
        name: differential_child.recorded(model, dtype, threads, sets) for name, (dtype, threads) in CHILDREN.items()
    }


def run(
    served: Served,
    model: Path,
    sets: list[Rows],
    others: dict[str, Any],
    tick: Callable[[], None],
) -> dict[str, Any]:
    """Each set through each pair of a recording and a replay."""
    engine, blocks = served.engine, len(served.noise)
    own = conditions("vllm", "bfloat16", blocks)

    def live() -> Any:
        return engine.armed.dissection(checkpoint=False)

    locals_: dict[str, tuple[LocalDissection, Conditions]] = {}
    for name, (dtype, attention) in LOCAL.items():
        view = local(model, dtype)
        view.model.set_attn_implementation(attention)  # type: ignore[operator]
        kind = str(dtype).removeprefix("torch.")
        locals_[name] = (view, conditions(f"transformers {attention}", kind, blocks))
    judgements: dict[str, list[dict[str, Any]]] = {}

    def hold(recorded_by: str, recording: Recording, replayed_by: str, view: Any, where: Conditions) -> None:
        reading = read(view, recording.replay())
        pair = f"{recorded_by} -> {replayed_by}"
        judgements.setdefault(pair, []).append(held(reading, recording, where))

    for seed, tokens in enumerate(sets):
        recording = record(live(), tokens, own, seed)
        hold(VLLM, recording, VLLM, live(), own)
        for name, (view, where) in locals_.items():
            hold(VLLM, recording, name, view, where)
            hold(name, record(view, tokens, where, seed), VLLM, live(), own)
        (first, of_first), (second, of_second), *_ = locals_.values()
        names = list(locals_)
        hold(names[0], record(first, tokens, of_first, seed), names[1], second, of_second)
        for name, answer in others.items():
            hold(name, Recording.model_validate(answer["recordings"][seed]), VLLM, live(), own)
        judgements.setdefault("checkpoint -> vLLM bf16", []).append(_against_checkpoint(served, tokens, seed))
        tick()
    return {
        "factors": {"repeated": REPEATED_FACTOR, "rounding": ROUNDING_FACTOR},
        "threads": {VLLM: torch.get_num_threads(), **{name: answer["threads"] for name, answer in others.items()}},
        "pairs": judgements,
    }


def held(reading: DifferentialReading, recording: Recording, where: Conditions) -> dict[str, Any]:
    """One judgement, and the largest distances over what was allowed."""
    kind = ReferenceKind.RECORDED if recording.conditions == where else ReferenceKind.PEER
    finding = judge(reading, kind, recording, where)
    pairs = pairs_with_recording(reading, where, recording)
    blocks = range(len(reading.gates))
    # Inside the children, engines give one name to different things, such as an activation with and without its gate.
    alike = where.engine.split()[0] == recording.conditions.engine.split()[0]
    modules = [path for path in pairs[0].modules(0) if alike or "." not in path]
    return {
        "health": finding.health.value,
        "reason": finding.reason,
        "same_numerics": all(pair.same for pair in pairs),
        "block": largest(pair.compare(block, STREAM) for pair in pairs for block in blocks),
        "module": largest(pair.compare(block, path) for pair in pairs for block in blocks for path in modules),
        "walk": largest(pair.compare_walk(at) for pair in pairs for at in range(len(blocks) + 1)),
        "nats": [finding.nats, finding.reference_nats],
    }


def largest(comparisons: Iterable[Comparison]) -> dict[str, float | None]:
    """The largest distance, and the largest over what is allowed; None where nothing is allowed and nothing was far."""
    most, over = 0.0, 0.0
    for comparison in comparisons:
        if comparison.divergence is None:
            continue  # a module that the other engine does not have
        l2 = math.inf if comparison.l2 is None else comparison.l2
        most = max(most, l2)
        if l2:
            over = max(over, l2 / comparison.allowed if comparison.allowed else math.inf)
    return {"l2": _finite(most), "over_allowed": _finite(over)}


def _against_checkpoint(served: Served, tokens: Rows, seed: int) -> dict[str, Any]:
    finding = served.against_checkpoint(tokens, seed)
    far = [block.l2 for block in finding.blocks]
    most = max(math.inf if l2 is None else l2 for l2 in far)
    nothing = {"l2": 0.0, "over_allowed": 0.0}
    return {
        "health": finding.health.value,
        "reason": finding.reason,
        "same_numerics": True,
        "block": {"l2": _finite(most), "over_allowed": 0.0 if most == 0 else None},
        "module": nothing,
        "walk": nothing,
        "nats": [None, None],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
