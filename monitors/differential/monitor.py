"""Differential: every block against a clean one, on the same input, down to the tensor.

Which fault: whatever makes a block compute something else than its reference: changed weights, also those that were
wrong when the fingerprint's baseline was taken, wrong kernels, compute faults.  References: states recorded when the
model was healthy, a peer's, or the checkpoint on disk (one clean block at a time).

Each block is run alone on a given input, so that a fault does not reach into the blocks behind it and one pass finds
several.  A walk through the model as served gives the curve of the divergence behind each block beside it, as in
BitFlipScope's differential localisation (arXiv 2512.22174).

Cost: about two walks of the sequences; against the checkpoint no walk, but each block's tensors are read from the disk
and held beside the live ones, one block at a time.

What it cannot see: what the few tokens that blocks are run on do not reach, such as experts that none of them is routed
to; tensors that the checkpoint has in another layout, which it names; and whether a divergence does any harm, which the
alpha-scan tells.  Recorded states and the checkpoint see no damage outside the blocks, but for the embedding of the
walked tokens and, by the loss, what lies behind the blocks.
"""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, ClassVar

from ..monitor import Monitor
from .facts import NAME, DifferentialPlan, DifferentialReading
from .finding import DifferentialFinding
from .judgement import judge
from .measure import measure, steps
from .reference import ReferenceKind
from .view import DissectedView

if TYPE_CHECKING:
    from ..alpha_scan.profile import Profile


class Differential(Monitor[DissectedView, DifferentialPlan, DifferentialReading, DifferentialFinding]):
    """All blocks of a model, alone and in a walk."""

    name: ClassVar[str] = NAME
    plan_type = DifferentialPlan

    def steps(self, plan: DifferentialPlan, num_blocks: int) -> int:
        """A block each, in each walk and alone."""
        return steps(plan, num_blocks)

    def measure(self, model: DissectedView, plan: DifferentialPlan) -> Generator[None, None, DifferentialReading]:
        """See `measure.measure`."""
        return measure(model, plan)

    def judge(self, readings: Sequence[DifferentialReading], profile: "Profile | None" = None) -> DifferentialFinding:
        """Against the checkpoint, whose states the reading has; against a recording: `judgement.judge`."""
        return judge(readings[-1], ReferenceKind.CHECKPOINT, None)
