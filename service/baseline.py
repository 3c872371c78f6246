"""The clean profile that scans are judged with: whose it is, whether it fits the live model, how it is made and kept.

BaselineError       it cannot be had; one sentence
    ForeignProfile      it was recorded under other conditions
"""

from collections.abc import Callable

from ..monitors.alpha_scan import (
    AlphaScanFinding,
    AlphaScanPlan,
    Profile,
    Provenance,
    UnusableReading,
    difference,
    digest_of,
    make_profile,
)
from ..monitors.alpha_scan.reading import rounds
from ..monitors.finding import Finding, Health
from ..monitors.moment import utc
from ..monitors.wire import ModelFacts
from .records import Event
from .scan_measure import Measured
from .store import Store


class BaselineError(Exception):
    """The profile cannot be had or used; the message is one sentence."""


class ForeignProfile(BaselineError):
    """A profile of something else than the live model."""


class Baseline:
    """The one clean profile, or none.  It outlives a restart of the sidecar and of vLLM."""

    def __init__(self, store: Store, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self.current: Profile | None = store.profile()
        self.misfit: str | None = None
        """Why the last scan could not use it, one sentence; None when it could, or there was none."""

    def fitting(self, facts: ModelFacts, order: AlphaScanPlan) -> Profile | None:
        """The profile if it belongs to what is measured; else None, and `misfit` says why."""
        profile, self.misfit = self.current, None
        if profile is None:
            return None
        try:
            self.misfit = difference(profile.provenance, provenance(facts, order))
        except BaselineError as error:
            self.misfit = str(error)
        return profile if self.misfit is None else None

    def told(self, last: Finding | None) -> str:
        """Whether a profile is used, one sentence; `last` is the finding of the last scan."""
        if self.current is None:
            return "No clean profile is kept: record one while the model is known to be good."
        at = utc(self.current.recorded_at)
        if self.misfit is not None:
            return f"The clean profile of {at} is not used: {self.misfit}"
        if isinstance(last, AlphaScanFinding) and last.profile_recorded_at == self.current.recorded_at:
            return f"The last scan was judged with the clean profile of {at}."
        return f"The clean profile of {at} waits for the next scan."

    def record(self, measured: Measured, finding: AlphaScanFinding, actor: str) -> Profile:
        """Make a profile of a scan and keep it; only of a whole, undamaged model in which the scan found nothing.

        Raises `BaselineError` or `StoreError`.
        """
        check_recordable(measured.facts)
        of = provenance(measured.facts, measured.order)
        try:
            profile = make_profile(rounds(measured.readings)[0], of, self._now())
        except UnusableReading as error:
            raise BaselineError(str(error)) from error
        if finding.health is not Health.OK:
            found = finding.reason.rstrip(".")
            raise BaselineError(f"No profile is made of a model that is {finding.health.value}: {found}.")
        self._keep(profile, actor, "profile recorded")
        return profile

    def accept(self, profile: Profile, facts: ModelFacts, order: AlphaScanPlan, actor: str) -> None:
        """Keep a profile that was exported somewhere; `order` is what a scan of the live model would measure.

        Raises `ForeignProfile`, `BaselineError` or `StoreError`.
        """
        why = difference(profile.provenance, provenance(facts, order))
        if why is not None:
            raise ForeignProfile(why)
        sizes = len(profile.blocks), len(profile.base_nats)
        if sizes != (facts.num_blocks, len(order.tokens)):
            raise ForeignProfile(
                f"The profile has {sizes[0]} blocks and {sizes[1]} sequences, not {facts.num_blocks} and "
                f"{len(order.tokens)}: it is damaged, or was not written by Flipwatch."
            )
        self._keep(profile, actor, "profile imported")

    def remove(self, actor: str) -> None:
        """Judge without a profile from now on; raises `StoreError`."""
        self._keep(None, actor, "profile removed")

    def _keep(self, profile: Profile | None, actor: str, what: str) -> None:
        shown = profile or self.current
        detail = {} if shown is None else {"recorded_at": shown.recorded_at, **shown.provenance.model_dump()}
        self._store.set_profile(profile, Event(at=self._now(), actor=actor, what=what, detail=detail))
        self.current, self.misfit = profile, None


def provenance(facts: ModelFacts, order: AlphaScanPlan) -> Provenance:
    """What a profile of the live model, measured by this order, belongs to; raises `BaselineError`."""
    return Provenance(
        model=facts.model,
        model_digest=_digest(facts),
        architecture=facts.architecture,
        dtype=facts.dtype,
        engine=f"vllm {facts.vllm_version} {facts.mode}",
        torch_version=facts.torch_version,
        tensor_parallel_size=facts.tensor_parallel_size,
        pipeline_parallel_size=facts.pipeline_parallel_size,
        validation_digest=digest_of(order),
    )


def check_recordable(facts: ModelFacts) -> None:
    """Raises `BaselineError` when a scan of this model could not become a profile, whatever it finds."""
    _digest(facts)
    gated = [str(block) for block, alpha in enumerate(facts.gates) if alpha != 1.0]
    if gated:
        raise BaselineError(f"The model is mitigated (block {', '.join(gated)}): undo that, then record.")
    if facts.faults:
        raise BaselineError(f"{len(facts.faults)} injected faults are in the model: undo them, then record.")


def _digest(facts: ModelFacts) -> str:
    if facts.model_digest is None:
        raise BaselineError(
            "Nothing says which model a profile would belong to: the probe has no digest of its weights"
            + (f" ({facts.refusal.rstrip('.')})." if facts.refusal else ", and vLLM's log says why.")
        )
    return facts.model_digest
