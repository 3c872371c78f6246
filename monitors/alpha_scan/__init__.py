"""alpha-scan: scales each block's contribution in turn and watches the loss.

Which fault: a block whose weights are damaged so that what it adds to the residual stream does harm.

Formulas (design section 2; the method is BitFlipScope, arXiv 2512.22174, as restated in `method.md`).  `L(l, a)` is
the mean loss in nats per scored token of the model in which block `l` adds `a * F_l(h)` instead of `F_l(h)`:

    BSS                sqrt(sum over alpha of (L(l, alpha) - L(1))^2), alpha = 0 left out
    slope              (L(l, 1 + d) - L(l, 1 - d)) / 2d, smallest d of the grid
    skip gain          L(1) - L(l, 0)
    largest deviation  max over alpha of |L(l, alpha) - L(1)|, alpha = 0 left out

Cost: `2 + |A| * (L - 1) / 2` forward passes over the validation set for `|A|` alphas and `L` blocks: one pass for the
base loss, one that walks the prefix, and for block `l` only the blocks behind it, all alphas in one batch.  `rounds`
holds what makes a scan cheaper than that, and what makes it go on when a block was found.

What it cannot see: a block that the model cannot do without (always the first, sometimes the last) costs more
when left out than damaged, so its skip gain stays negative; damage that the validation set does not exercise;
damage outside the blocks (embedding, final norm, head); a block that is gated already.  A clean profile of the model
shows all of these as a drift of the base loss, without saying where.  `docs/detection` has the figures.

    plan       what one pass over the model measures
    measure    the losses, on live weights
    reading    the numbers, and how readings of one scan are joined
    scores     losses -> scores, standard errors, z
    judgement  scores -> flagged blocks
    finding    what is flagged, with every number it rests on
    sentences  and in words
    rounds     which plan follows which reading
    profile    the healthy scores of one model
    scan       the monitor that ties them together
"""

from .finding import AlphaScanFinding, Thresholds
from .plan import FULL_GRID, QUICK_GRID, AlphaScanPlan, alphas_of, chunks, naive_passes, padded, predicted_passes
from .profile import Profile, Provenance, UnusableReading, difference, digest_of, make_profile
from .reading import AlphaScanReading
from .rounds import Strategy
from .scan import AlphaScan
from .scores import BlockScore, paired_t

__all__ = [
    "FULL_GRID",
    "QUICK_GRID",
    "AlphaScan",
    "AlphaScanFinding",
    "AlphaScanPlan",
    "AlphaScanReading",
    "BlockScore",
    "Profile",
    "Provenance",
    "Strategy",
    "Thresholds",
    "UnusableReading",
    "alphas_of",
    "chunks",
    "difference",
    "digest_of",
    "make_profile",
    "naive_passes",
    "padded",
    "paired_t",
    "predicted_passes",
]
