"""Fingerprint: every changed byte of the weights is seen, whatever it does to the loss.

Which fault: any difference between the bytes that lie in device memory now and those of the baseline, in parameters,
buffers and derived tensors, in the layout in which the kernels read them.  `digest` says how surely it is seen,
`parity` how the bytes come back, `diagnosis` what is said about them.

Cost: each byte is read once.  On a CPU that is about a plain sum over the same bytes; `bench/integrity.py` measures it.

What it cannot see: damage older than the baseline (the comparison with the checkpoint can, and values that no trained
weight has are named); the KV cache, activations and adapters; weights that no tensor shows, which it names; and whether
a change does any harm, which the alpha-scan tells.
"""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, ClassVar

from ..monitor import Monitor
from .facts import FingerprintPlan, FingerprintReading
from .judgement import NAME, FingerprintFinding, judge
from .sealed import SealedWeights

if TYPE_CHECKING:
    from ..alpha_scan.profile import Profile


class Fingerprint(Monitor[SealedWeights, FingerprintPlan, FingerprintReading, FingerprintFinding]):
    """A sweep over all weights of every rank."""

    name: ClassVar[str] = NAME
    plan_type = FingerprintPlan

    def steps(self, plan: FingerprintPlan, num_blocks: int) -> int:
        """As the plan says."""
        return plan.steps

    def measure(self, model: SealedWeights, plan: FingerprintPlan) -> Generator[None, None, FingerprintReading]:
        """This rank's chunks against its baseline.  See `SealedWeights.sweep`."""
        reading = yield from model.sweep(plan.steps)
        return FingerprintReading(ranks=[reading])

    def judge(self, readings: Sequence[FingerprintReading], profile: "Profile | None" = None) -> FingerprintFinding:
        """Any changed chunk is a failure.  See `judgement.judge`."""
        return judge(readings[-1])
