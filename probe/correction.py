"""The checkpoint's values as the baseline of tensors that were wrong when it was taken.

Nothing is written to the served weights: the next sweep sees that they differ from the corrected baseline, and a repair
puts them right like any other damage, proved by digest.
"""

from collections.abc import Generator

from torch import Tensor

from ..monitors.fingerprint.facts import Corrected, CorrectionPlan, RankCorrection
from ..monitors.fingerprint.sealed import SealedWeights, Unrepairable
from ..monitors.fingerprint.suspicion import suspicion
from .armed import Armed
from .checkpoint import CheckpointUnusable
from .fresh import fresh_tensors


def correct(armed: Armed, plan: CorrectionPlan) -> Generator[None, None, Corrected]:
    """This rank's part of the tensors, those that it has; yields after each.

    Raises:
        UnsupportedModel: the bytes of this model have no baseline.
    """
    sealed = armed.bytes()
    live = {stretch.source.name: stretch.source.tensor for stretch in sealed.line.stretches}
    corrected: list[str] = []
    refused: list[str] = []
    for name in plan.tensors:
        try:
            if name in live:
                fresh = fresh_tensors(armed.model, armed.vllm_config, armed.stack, [name])[name]
                if odd := suspicion(name, fresh.as_subclass(type(live[name]))):
                    refused.append(f"The checkpoint's own values are bad: {odd[0]}")
                elif _correct(sealed, name, fresh):
                    corrected.append(name)
        except (CheckpointUnusable, Unrepairable) as reason:
            refused.append(f"{name}: {reason}")
        yield
    return Corrected(ranks=[RankCorrection(seal=sealed.facts(), corrected=corrected, refused=refused)])


def _correct(sealed: SealedWeights, name: str, fresh: Tensor) -> bool:
    """Whether the baseline was another."""
    line = sealed.line
    wanted = {}
    for chunk in line.chunks_of(stretch for stretch in line.stretches if stretch.source.name == name):
        right = sealed.known_good(chunk)
        line.paste(chunk, right, {name: fresh})
        if not sealed.fits(chunk, right):
            wanted[chunk] = right
    if wanted:
        sealed.correct(name, wanted)
    return bool(wanted)
