"""`/v1/alertmanager/{action}`: a webhook receiver for Alertmanager, which orders one action while an alert fires.

The alert is only the occasion.  What is done rests on this sidecar's own evidence, since one receiver may be told of
the alerts of many servers: the changed chunks that a sweep finds, the blocks that its last scan flags, its verdict.

Alertmanager keeps trying while it is answered 5xx, counts any other error as a failed notification and tries again
after `group_interval`; after 2xx it is silent until the group changes or `repeat_interval` is over, and nobody
reads the body.  So an error means: this was wanted, and has not happened.  Decision 0018 has the table.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from fastapi import APIRouter, Response

from ...monitors.alpha_scan import AlphaScan
from ...monitors.finding import Health
from ...monitors.verdict.evidence import Answer, Question
from ..auth import Caller
from ..body import BoundedRoute
from ..gates import names
from ..guard import AlreadyMitigated, MitigationBusy, MitigationError, NothingChanged
from ..notification import PREFIX, AlertReceived, Notification
from ..policy import HELPS
from ..problem import Kind, ProblemError, responses
from ..records import IN_FLIGHT, Event, Mandate, MitigationAction, MitigationRecord, MitigationState
from ..schemas import NotificationOutcome
from ..sidecar import Sidecar
from . import access
from .access import GUARDED, TheSidecar
from .orders import NothingFlagged, drain, flagged, follow

router = APIRouter(prefix="/v1/alertmanager", tags=["mitigations"], route_class=BoundedRoute)

# With what the reason of each order of this route begins: by it the route knows its own.
_BY = "Alertmanager: "
# What stands in the place of a rule of the policy.
_MANDATE = "alertmanager skip"
# A repair that failed is not tried again for so long, as with a rule of the policy: the next one would fail as well,
# and each of them breaks off the scan that names the block to leave out.
_REST_MINUTES = 10.0
# As the longest reason that a person may give.
_LONGEST_REASON = 500


class _Answer(StrEnum):
    """What may be ordered here.  Not `attenuate`: no alert knows an alpha."""

    REPAIR = "repair"
    SKIP = "skip"
    DRAIN = "drain"


@router.post(
    "/{action}",
    operation_id="receiveAlerts",
    status_code=202,
    responses={
        200: {"model": NotificationOutcome, "description": "Nothing is to be done"},
        **responses(
            *GUARDED, Kind.BUSY, Kind.UNKNOWN_BLOCK, Kind.CONFLICT, Kind.INVALID, Kind.REFUSED_BY_VLLM, Kind.VLLM_AWAY
        ),
    },
)
async def receive_alerts(
    sidecar: TheSidecar,
    caller: access.Mitigator,
    response: Response,
    action: _Answer,
    notification: Notification,
) -> NotificationOutcome:
    """Repair all weights, skip the blocks that the last scan flags, or drain, while an alert of Flipwatch fires.

    202 when that was ordered.  200 where nothing is to be done: the alerts are resolved, nothing has changed, no block
    is flagged, it is mitigated already, or the same is on its way.  Blocks that the alerts name count for nothing.
    409 where a person undid the same skip or drain in this vLLM process.
    """
    if not notification.ours:
        raise ProblemError(
            Kind.INVALID,
            f"None of these {len(notification.alerts)} alerts has an alertname that begins with {PREFIX}: route only "
            "those to this receiver.",
        )
    firing = notification.firing
    if not firing:
        response.status_code = 200
        return NotificationOutcome(outcome="The alerts are resolved: nothing is ordered.")
    reason = _reason(firing)
    try:
        ordered = await _order(sidecar, action, reason=reason, actor=caller.name)
    except (MitigationError, ProblemError) as refusal:
        _note(sidecar, caller, "alert received, refused", action, reason, str(refusal))
        raise
    if isinstance(ordered, str):
        # Alertmanager drops the body of a success.
        _note(sidecar, caller, "alert received, nothing ordered", action, reason, ordered)
        response.status_code = 200
        return NotificationOutcome(outcome=ordered)
    await follow(sidecar, ordered, response)
    return NotificationOutcome(outcome=ordered.message, mitigation_id=ordered.id)


async def _order(sidecar: Sidecar, action: _Answer, *, reason: str, actor: str) -> MitigationRecord | str:
    """What was ordered, or why nothing is to be done; raises what forbids what is to be done."""
    try:
        if action is _Answer.REPAIR:
            return await _repair(sidecar, reason=reason, actor=actor)
        if action is _Answer.SKIP:
            return await _skip(sidecar, reason=reason, actor=actor)
        return _drain(sidecar, reason=reason, actor=actor)
    except NothingChanged as nothing:
        return str(nothing)
    except MitigationBusy:
        for record in sidecar.store.open_mitigations():
            # All of the weights, as an alert or a rule orders it: a person may have named one block.  A skip of the
            # same blocks was found before, and one of others does not do the same.
            whole = record.action is MitigationAction.REPAIR and (record.automatic or record.reason.startswith(_BY))
            if whole and action is _Answer.REPAIR and record.state in IN_FLIGHT:
                return f"Mitigation {record.id} is on its way, and does the same."
        # Not a conflict: Alertmanager tries again within seconds, and this is over soon.
        raise ProblemError(Kind.BUSY, f"Another mitigation is on its way: the {action.value} has to wait.") from None


async def _repair(sidecar: Sidecar, *, reason: str, actor: str) -> MitigationRecord:
    for record in _of_this_vllm(sidecar, sidecar.store.mitigations(limit=1000)):
        minutes = (sidecar.now() - record.updated_at) / 60.0
        failed = record.action is MitigationAction.REPAIR and record.state is MitigationState.FAILED
        if failed and minutes < _REST_MINUTES:
            raise ProblemError(
                Kind.CONFLICT,
                f"Mitigation {record.id}, a repair, failed {minutes:.1f} minutes ago: an alert orders no other one for "
                f"{_REST_MINUTES:g} minutes.",
            )
    return await sidecar.mitigator.repair(None, reason=reason, actor=actor)


async def _skip(sidecar: Sidecar, *, reason: str, actor: str) -> MitigationRecord | str:
    try:
        blocks = flagged(sidecar)
    except NothingFlagged:
        known = sidecar.live.state(AlphaScan.name)
        if known.health is Health.UNKNOWN:
            raise ProblemError(Kind.CONFLICT, f"No scan says which block to leave out: {known.reason}") from None
        for sign in sidecar.live.verdict().signs:
            if sign.question is Question.BLOCK_STANDS_OUT and sign.answer is Answer.UNKNOWN:
                # It looked before another monitor saw something, or before a repair: a new scan is due.
                raise ProblemError(
                    Kind.BUSY, f"Whether a block stands out now is not known: {sign.sentence}."
                ) from None
        return "The last scan of this sidecar flags no block: nothing is left out."
    opened = _of_this_vllm(sidecar, sidecar.store.open_mitigations())
    # One that was interrupted may have left the gates as they were: it is refused below, for a person to finish.
    held = {block for record in opened if record.state is not MitigationState.INTERRUPTED for block in record.held}
    if held.issuperset(blocks):
        return f"{names(blocks).capitalize()} mitigated already: nothing more is ordered."
    for record in opened:
        if record.action is MitigationAction.SKIP and record.reason.startswith(_BY):
            raise ProblemError(
                Kind.CONFLICT,
                f"Mitigation {record.id}, which an alert ordered, is open and holds {names(record.blocks)}; the last "
                f"scan flags {names(blocks)}: more damage than that is for a person to look at.",
            )
    if sidecar.mitigator.busy:
        # Its gates may be written already: the scan is out of date because of it, and it is what has to end first.
        raise MitigationBusy("Another mitigation is on its way.")
    if sidecar.live.outdated(AlphaScan.name):
        # What it flags may be whole by now: the scan that follows counts.
        raise ProblemError(
            Kind.BUSY,
            "The model was mitigated or repaired since the last scan, and has not been measured again: nobody knows "
            f"whether {names(blocks)} would be flagged now.",
        )
    _check_not_undone(sidecar, MitigationAction.SKIP, blocks)
    # No person asked, so it is undone at once when it did not help.
    facts = sidecar.live.facts
    mandate = None if facts is None else Mandate(_MANDATE, facts.boot_id)
    return await sidecar.mitigator.apply(MitigationAction.SKIP, blocks, reason=reason, actor=actor, mandate=mandate)


def _drain(sidecar: Sidecar, *, reason: str, actor: str) -> MitigationRecord | str:
    joined = sidecar.live.verdict()
    if joined.verdict not in HELPS and joined.health is not Health.FAILED:
        return f"The verdict of this sidecar is {joined.verdict.value}, which is no reason to drain: {joined.reason}"
    _check_not_undone(sidecar, MitigationAction.DRAIN, [])
    try:
        return drain(sidecar, reason=reason, actor=actor)
    except AlreadyMitigated as drained:
        return str(drained)


def _check_not_undone(sidecar: Sidecar, action: MitigationAction, blocks: Sequence[int]) -> None:
    """Raise `ProblemError` where the same was undone, by a person or because it did not help.

    An alert that goes on firing must not do it again.  A skip that a repair has ended counts for nothing.
    """
    for record in _of_this_vllm(sidecar, sidecar.store.mitigations(limit=1000)):
        same = record.action is action and (not blocks or not set(blocks).isdisjoint(record.blocks))
        undone = record.state is MitigationState.REVERTED and record.undone_by is not None
        if same and undone and record.reason.startswith(_BY):
            raise ProblemError(
                Kind.CONFLICT,
                f"{record.undone_by} undid mitigation {record.id}, which an alert ordered: that stands for alerts "
                "until vLLM restarts.",
            )


def _of_this_vllm(sidecar: Sidecar, records: Iterable[MitigationRecord]) -> list[MitigationRecord]:
    """Those of the vLLM process that was last heard of; none while no process is known."""
    boot_id = sidecar.last_heard_of()
    return [] if boot_id is None else [record for record in records if record.boot_id == boot_id]


def _note(sidecar: Sidecar, caller: Caller, what: str, action: _Answer, reason: str, message: str) -> None:
    detail = {"action": action.value, "reason": reason, "message": message}
    sidecar.store.add_event(Event(at=sidecar.now(), actor=caller.name, what=what, detail=detail))


def _reason(firing: list[AlertReceived]) -> str:
    """For the record and the audit log: each alert once, in the order in which they came."""
    words = _BY + ", ".join(dict.fromkeys(alert.words for alert in firing))
    return words if len(words) <= _LONGEST_REASON else words[: _LONGEST_REASON - 3] + "..."
