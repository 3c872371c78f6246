"""What Flipwatch does by itself: the policy decides about each verdict, and here it is done, or said why not."""

import time
from collections.abc import Callable, Collection, Sequence

import structlog
from pydantic import ValidationError

from ..monitors.verdict.verdict import Joined, Verdict
from .automation import Decision, Memory, Refusal, Says, Situation, decide
from .guard import BreakerOpen, MitigationBusy, MitigationError, NothingChanged, OtherProcess, WeightsUnknown
from .mitigation import Mitigator
from .policy import Rule
from .probe import ProbeError
from .records import IN_FLIGHT, ITSELF, Event, Mandate, MitigationAction, MitigationRecord, MitigationState, Mode
from .settings import MitigationSettings
from .store import Store, StoreError

# The next verdict may find it otherwise: no reason for the next rule, which may do more than is needed.
# Where a fresh look finds nothing changed, the verdict is out of date.
_FOR_NOW = (MitigationBusy, OtherProcess, WeightsUnknown, NothingChanged, ProbeError, StoreError)

_IN_EFFECT = IN_FLIGHT | {MitigationState.ACTIVE}

_log = structlog.get_logger(__name__)


class Automatic:
    """Asks the mitigator for what the policy says.  Nothing is raised: a refusal leads to the next rule, or is told.

    Each decision that is new goes into the audit log.  What the counts need is kept in the store, and the cool-downs
    rest on the records of mitigations, so that both outlive the sidecar.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        mitigator: Mitigator,
        store: Store,
        settings: MitigationSettings,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._rules = rules
        self._mitigator = mitigator
        self._store = store
        self._mode = Mode(settings.mode)
        self._now = now
        self._memory: Memory | None = None

    async def consider(
        self, joined: Joined, boot_id: str, confirmed: Collection[int], heard_at: float | None
    ) -> MitigationRecord | None:
        """Take in one verdict on the vLLM process of this boot id; the record of what was started, or None.

        `confirmed` are the blocks that enough scans of this process flag, `heard_at` is when the newest finding that
        the verdict rests on was made, epoch seconds; None where it rests on none.
        """
        if not self._rules:
            return None
        try:
            # Another verdict may come while an order is being checked: it counts on from here.
            self._memory = memory = self._with(joined.verdict, boot_id, heard_at)
            records = self._store.mitigations(limit=1000)
        except StoreError as error:
            _log.error("automation cannot see what it did", reason=str(error))
            return None
        ours = [record for record in records if record.boot_id == boot_id]
        situation = Situation(
            joined=joined,
            memory=memory,
            confirmed=confirmed,
            acts=[record for record in ours if record.rule is not None],
            held={block for record in ours if record.state in _IN_EFFECT for block in record.held},
            mode=self._mode,
            now=self._now(),
        )
        refused: dict[str, Refusal] = {}
        while True:
            decision = decide(self._rules, situation, refused)
            rule = next((rule for rule in self._rules if rule.name == decision.rule), None)
            if rule is None or decision.says not in (Says.ACTS, Says.WOULD_ACT):
                self._conclude(memory, decision)
                return None
            try:
                record = await self._order(rule, decision, boot_id)
            except (MitigationError, ProbeError, StoreError) as error:
                says = Says.BREAKER_OPEN if isinstance(error, BreakerOpen) else Says.REFUSED
                refused[rule.name] = Refusal(says, str(error), later=isinstance(error, _FOR_NOW))
                continue
            self._conclude(memory, decision, record)
            return record

    @property
    def last(self) -> str:
        """What was decided last about the vLLM process of now, one sentence."""
        if not self._rules:
            return "There is no policy: nothing is automatic."
        if self._memory is None or self._memory.said is None:
            return "Nothing has been decided since the sidecar was started."
        return self._memory.said.message

    async def _order(self, rule: Rule, decision: Decision, boot_id: str) -> MitigationRecord:
        reason, mandate = decision.message, Mandate(rule.name, boot_id, rule.dry_run)
        if rule.action is MitigationAction.DRAIN:
            return self._mitigator.drain(boot_id, reason=reason, actor=ITSELF, mandate=mandate)
        if rule.action is MitigationAction.REPAIR:
            return await self._mitigator.repair(None, reason=reason, actor=ITSELF, mandate=mandate)
        return await self._mitigator.apply(
            rule.action,
            decision.blocks,
            alpha=rule.alpha or 0.0,
            reason=reason,
            actor=ITSELF,
            mandate=mandate,
        )

    def _with(self, verdict: Verdict, boot_id: str, heard_at: float | None) -> Memory:
        """What is remembered, this verdict included; of another vLLM process nothing.  Raises `StoreError`."""
        known = self._memory or self._stored()
        if known is None or known.boot_id != boot_id:
            known = Memory(boot_id=boot_id)
        well_at = self._now() if verdict is Verdict.OK else known.well_at
        known = known.model_copy(update={"well_at": well_at})
        counted_at = known.heard_at.get(verdict)
        is_new = heard_at is not None and (counted_at is None or heard_at > counted_at)
        verdicts = list(known.verdicts)
        if not is_new and verdict in verdicts:
            # The same evidence is joined again each time that another monitor finds something, or the probe has been
            # away for a moment: it counts once, also where other verdicts came in between.
            del verdicts[len(verdicts) - 1 - verdicts[::-1].index(verdict)]
        most = max(rule.needs[1] for rule in self._rules)
        heard = {**known.heard_at, verdict: heard_at} if is_new else known.heard_at
        return known.model_copy(update={"verdicts": (*verdicts, verdict)[-most:], "heard_at": heard})

    def _stored(self) -> Memory | None:
        try:
            return self._store.automation()
        except ValidationError as error:
            # Another version of Flipwatch may have remembered other things.
            _log.warning("what automation remembers cannot be read", errors=error.error_count())
            return None

    def _conclude(self, judged: Memory, decision: Decision, record: MitigationRecord | None = None) -> None:
        """Remember the decision and, where it is not the last one, tell it."""
        memory = self._memory or judged
        event = None
        if record is not None or decision != memory.said:
            detail = {
                "verdict": decision.verdict.value,
                "rule": decision.rule,
                "blocks": list(decision.blocks),
                "message": decision.message,
            }
            if record is not None:
                detail["id"] = record.id
            event = Event(at=self._now(), actor=ITSELF, what=f"automation {decision.says.value}", detail=detail)
            _log.info(event.what, **detail)
        self._memory = memory.model_copy(update={"said": decision})
        try:
            self._store.set_automation(self._memory, event)
        except StoreError as error:
            _log.error("decision of automation not stored", reason=str(error))
