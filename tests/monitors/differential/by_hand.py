"""States that are made up: sketches of two numbers a row, so that every distance can be computed by hand."""

import base64
import struct
from collections.abc import Sequence
from typing import Any

from flipwatch.monitors.differential.facts import (
    STREAM,
    BlockStates,
    CleanBlock,
    Comparisons,
    DifferentialPlan,
    DifferentialReading,
    Noise,
    Point,
    RankStates,
    Sketch,
    TensorDifference,
)
from flipwatch.monitors.differential.finding import DifferentialFinding
from flipwatch.monitors.differential.judgement import judge
from flipwatch.monitors.differential.reference import Conditions, Recording, ReferenceKind
from flipwatch.monitors.fingerprint.diagnosis import Change, Diagnosis, Pattern
from flipwatch.monitors.fingerprint.facts import Rank

SIZE = 2
NAN = float("nan")
RECORDED = 1_790_000_000.0
BLOCKS = 6

MODULES = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.o_proj",
    "self_attn",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp",
    STREAM,
)
"""Of a block, in the order in which they hand on."""

QUIET = Noise(repeated=0.0, rounding=0.0)
LOUD = Noise(repeated=0.01, rounding=0.02)

Rows = Sequence[tuple[float, float]]
Right: Rows = ((3.0, 4.0), (0.0, 5.0))


def moved(distance: float) -> Rows:
    """`Right` with its second row at this relative distance."""
    return ((3.0, 4.0), (0.0, 5.0 + 5.0 * distance))


def sketch(rows: Rows, width: int = 8) -> Sketch:
    """A sketch of two numbers a row."""
    values = [value for row in rows for value in row]
    return Sketch(width=width, rows=base64.b64encode(struct.pack(f"<{len(values)}d", *values)).decode())


def points(
    wrong: dict[str, Rows] | None = None, noise: Noise | None = None, widths: dict[str, int] | None = None
) -> list[Point]:
    """All modules of a block, right but for those named."""
    wrong, widths = wrong or {}, widths or {}
    return [
        Point(module=module, sketch=sketch(wrong.get(module, Right), widths.get(module, 8)), noise=noise)
        for module in MODULES
    ]


def from_module(first: str, rows: Rows) -> dict[str, Rows]:
    """What a fault in one module does: it departs, and so does all that comes behind it."""
    return dict.fromkeys(MODULES[MODULES.index(first) :], rows)


def states(
    faults: dict[int, dict[str, Rows]] | None = None,
    *,
    rank: int = 0,
    noise: Noise | None = None,
    blocks: int = BLOCKS,
    walk: dict[int, Rows] | None = None,
    walk_noise: Noise | None = None,
    nats: list[float | None] | None = None,
    clean: list[CleanBlock] | None = None,
    widths: dict[str, int] | None = None,
) -> RankStates:
    """One rank, right but for the faults by block and module, and for the walk by its place (0 before the blocks)."""
    return RankStates(
        rank=Rank(rank=rank, tensor=rank),
        walk=[] if clean else [sketch((walk or {}).get(at, Right)) for at in range(blocks + 1)],
        walk_noise=[] if walk_noise is None else [walk_noise] * (blocks + 1),
        nats=[] if clean else nats or [2.0, 4.0],
        isolated=[
            BlockStates(block=block, points=points((faults or {}).get(block), noise, widths)) for block in range(blocks)
        ],
        clean=clean or [],
        inputs=[],
    )


def reading(*ranks: RankStates, gates: dict[int, float] | None = None, blocks: int = BLOCKS) -> DifferentialReading:
    """Ranks, every gate 1 but for those named."""
    alphas = [(gates or {}).get(block, 1.0) for block in range(blocks)]
    return DifferentialReading(ranks=list(ranks), gates=alphas, dtype="bfloat16")


def conditions(**changes: Any) -> Conditions:
    """Of both sides, but for the changes."""
    values: dict[str, Any] = {
        "model": "toy",
        "model_digest": "0123",
        "architecture": "ToyForCausalLM",
        "num_blocks": BLOCKS,
        "dtype": "bfloat16",
        "engine": "vllm 0.32.0 eager",
        "torch_version": "2.13.0",
        "hardware": "cpu AVX512",
        "tensor_parallel_size": 1,
        "flipwatch_version": "0.1.0",
    }
    return Conditions(**values | changes)


def recording(*ranks: RankStates, gates: dict[int, float] | None = None, **changes: Any) -> Recording:
    """A healthy recording, without noise unless the ranks have some."""
    return Recording(
        recorded_at=RECORDED,
        conditions=conditions(**changes),
        plan=DifferentialPlan(tokens=[[1, 2, 3], [4, 5, 6]], size=SIZE, noise=True),
        reading=reading(*(ranks or [states(noise=QUIET, walk_noise=QUIET)]), gates=gates),
    )


def held(
    now: DifferentialReading,
    then: Recording | None = None,
    *,
    kind: ReferenceKind = ReferenceKind.RECORDED,
    limit: float | None = None,
) -> DifferentialFinding:
    """The finding about a reading against a recording."""
    return judge(now, kind, then or recording(), conditions(), limit)


def against_checkpoint(now: DifferentialReading) -> DifferentialFinding:
    """The finding about a reading that has both sides."""
    return judge(now, ReferenceKind.CHECKPOINT, None, conditions(), size=SIZE)


def clean_block(
    block: int,
    *,
    tensors: list[TensorDifference] | None = None,
    not_comparable: list[str] | None = None,
    wrong: dict[str, Rows] | None = None,
    sublayers: int = 0,
    digests: int = 0,
) -> CleanBlock:
    """A block with the checkpoint's 9 tensors."""
    return CleanBlock(
        block=block,
        points=points(wrong),
        not_comparable=not_comparable or [],
        comparable=9,
        tensors=tensors or [],
        comparisons=Comparisons(sublayers=sublayers, digests=digests, tensors=len(tensors or [])),
    )


def difference(block: int, module: str, parts: Sequence[str] = ()) -> TensorDifference:
    """A flipped bit in the weight of a module."""
    tensor = f"model.layers.{block}.{module}.weight"
    change = Change(element=[1, 2], bits=[14], before="0.5", after="1e+38", before_bits="0x3f00", after_bits="0x7f00")
    diagnosis = Diagnosis(
        tensor=tensor,
        dtype="bfloat16",
        elements=1,
        bits=1,
        first=[1, 2],
        last=[1, 2],
        pattern=Pattern.SINGLE_FLIP,
        source=None,
        changes=[change],
    )
    return TensorDifference(tensor=tensor, module=module, parts=list(parts), values=64, diagnosis=diagnosis)
