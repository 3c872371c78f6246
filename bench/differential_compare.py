"""Two builds of one model held against each other: another precision, and one block rounded to int8."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from differential_healthy import held
from differential_states import Rows, conditions, local, read, record
from torch import nn

from flipwatch.monitors.differential.finding import BlockDivergence
from flipwatch.monitors.differential.judgement import judge
from flipwatch.monitors.differential.reference import ReferenceKind
from flipwatch.service.compared import ranked


def run(model: Path, tokens: Rows, rounded: int, tick: Callable[[], None]) -> dict[str, Any]:
    """The healthy pair both ways; then builds with one block rounded, `rounded` of them from the first to the last."""
    views = {dtype: local(model, getattr(torch, dtype)) for dtype in ("float32", "bfloat16")}
    blocks = views["bfloat16"].num_blocks
    where = {dtype: conditions("transformers", dtype, blocks) for dtype in views}
    recordings = {dtype: record(view, tokens, where[dtype]) for dtype, view in views.items()}
    healthy = {}
    for a, b in (("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        healthy[f"{a} against {b}"] = held(read(views[b], recordings[a].replay()), recordings[a], where[b])
        tick()
    chosen = sorted({round(at * (blocks - 1) / max(rounded - 1, 1)) for at in range(rounded)})
    records = []
    for block in chosen:
        layer = views["bfloat16"].layers[block]
        before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
        errors = [round_to_int8(parameter) for parameter in layer.parameters() if parameter.dim() == 2]
        for dtype, recording in recordings.items():
            reading = read(views["bfloat16"], recording.replay())
            finding = judge(reading, ReferenceKind.PEER, recording, where["bfloat16"])
            there = finding.blocks[block]
            records.append(
                {
                    "block": block,
                    "reference": dtype,
                    "rank": ranked(finding.blocks).index(block) + 1,
                    "second": _second(finding.blocks, block),
                    "l2": there.l2,
                    "allowed": there.allowed,
                    "flagged": sorted(b.block for b in finding.blocks if b.departs),
                    "health": finding.health.value,
                    "weights_l2": max(errors),
                    "nats": finding.nats,
                    "reference_nats": finding.reference_nats,
                }
            )
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(before[name])
        tick()
    return {"healthy": healthy, "rounded": records}


@torch.no_grad()
def round_to_int8(weight: nn.Parameter) -> float:
    """Each row to 255 steps, symmetric; relative L2 distance from before."""
    exact = weight.double()
    step = exact.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    weight.copy_((exact / step).round() * step)
    return float((weight.double() - exact).norm() / exact.norm())


def _second(blocks: Sequence[BlockDivergence], block: int) -> float | None:
    """The largest distance over the allowed one of the other blocks; None where nothing is allowed."""
    shares = [
        other.l2 / other.allowed for other in blocks if other.block != block and other.allowed and other.l2 is not None
    ]
    return max(shares) if shares else None
