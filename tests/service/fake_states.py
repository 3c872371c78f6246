"""What the fake probe measures for the differential monitor: a toy whose blocks hand on the same numbers each time.

server.states.off[4] = 0.5      # from mlp.down_proj on, block 4 lies so far from what is right (relative L2)
server.states.embedding = 0.5   # the stream in front of the blocks does
server.states.nan.add(2)        # block 2 puts out NaN
server.states.only = 1          # all that holds in this engine alone; None: in all
server.states.drifts = True     # each measurement lies a little elsewhere: nothing can be replayed
server.states.plans             # all plans that were ordered
"""

import math
import struct
from base64 import b64encode
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
from flipwatch.monitors.fingerprint.diagnosis import Change, Diagnosis, Pattern
from flipwatch.monitors.fingerprint.facts import Rank

MODULES = ("self_attn.o_proj", "self_attn", "mlp.down_proj", "mlp", STREAM)
_DAMAGED = MODULES[2:]
ROUNDING = 0.01
WIDTH = 64
TENSORS = 7
"""Of each block."""


class FakeStates:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.plans: list[DifferentialPlan] = []
        self.restart()

    def restart(self) -> None:
        """The weights are good again."""
        self.off: dict[int, float] = {}
        self.only: int | None = None
        self.embedding = 0.0
        self.nan: set[int] = set()
        self.drifts = False

    def order(self, plan: dict[str, Any]) -> DifferentialPlan:
        """Take a plan."""
        self.plans.append(DifferentialPlan.model_validate(plan))
        return self.plans[-1]

    def reading(self, plan: DifferentialPlan, gates: list[float]) -> dict[str, Any]:
        """What it reads at its end."""
        blocks = range(len(gates))
        drift = 0.001 * len(self.plans) if self.drifts else 0.0
        rank = RankStates(
            rank=Rank(rank=0),
            walk=self._walk(plan, len(gates)),
            walk_noise=[_NOISE] * (len(gates) + 1) if plan.noise and plan.walks else [],
            nats=[None if self.nan else 2.0] * len(plan.tokens) if plan.walks else [],
            isolated=[BlockStates(block=block, points=self._points(plan, block, drift)) for block in blocks],
            clean=[self._clean(plan, block) for block in blocks] if plan.checkpoint else [],
            inputs=[b64encode(bytes(4)).decode()] * len(gates) if plan.records else [],
        )
        reading = DifferentialReading(ranks=[rank], gates=gates, dtype="bfloat16")
        return reading.model_dump(mode="json")

    def _far(self, block: int, module: str) -> float:
        if module not in _DAMAGED:
            return 0.0
        return math.nan if block in self.nan else self.off.get(block, 0.0)

    def _walk(self, plan: DifferentialPlan, blocks: int) -> list[Sketch]:
        if not plan.walks:
            return []
        streams = [sketch(plan.size, 100, self.embedding)]
        for block in range(blocks):
            far = self.embedding + sum(self._far(before, STREAM) for before in range(block + 1))
            streams.append(sketch(plan.size, 101 + block, far))
        return streams

    def _points(self, plan: DifferentialPlan, block: int, drift: float) -> list[Point]:
        noise = _NOISE if plan.noise else None
        return [
            Point(module=module, sketch=sketch(plan.size, block, self._far(block, module) + drift), noise=noise)
            for module in MODULES
        ]

    def _clean(self, plan: DifferentialPlan, block: int) -> CleanBlock:
        damaged = block in self.off or block in self.nan
        return CleanBlock(
            block=block,
            points=[Point(module=module, sketch=sketch(plan.size, block, 0.0)) for module in MODULES],
            not_comparable=[],
            comparable=TENSORS,
            tensors=[difference(block)] if damaged else [],
            comparisons=Comparisons(sublayers=2, digests=3, tensors=1)
            if damaged
            else Comparisons(sublayers=0, digests=0, tensors=0),
        )


_NOISE = Noise(repeated=0.0, rounding=ROUNDING)


def sketch(size: int, seed: int, far: float) -> Sketch:
    """One row of numbers that `seed` decides, `far` away from those that are right."""
    row = [1.0 + (7 * seed + 3 * at) % 11 / 10 for at in range(size)]
    moved = [value * (1 + far if at % 2 else 1 - far) for at, value in enumerate(row)]
    return Sketch(width=WIDTH, rows=b64encode(struct.pack(f"<{size}d", *moved)).decode())


def difference(block: int) -> TensorDifference:
    """One flipped bit in the block's down_proj."""
    tensor = f"model.layers.{block}.mlp.down_proj.weight"
    change = Change(
        element=[12, 345], bits=[14], before="0.0123", after="4.2e+36", before_bits="0x3c4a", after_bits="0x7c4a"
    )
    diagnosis = Diagnosis(
        tensor=tensor,
        dtype="bfloat16",
        elements=1,
        bits=1,
        first=[12, 345],
        last=[12, 345],
        pattern=Pattern.SINGLE_FLIP,
        source=None,
        changes=[change],
    )
    return TensorDifference(tensor=tensor, module="mlp.down_proj", parts=[], values=1000, diagnosis=diagnosis)
