"""`/v1/canary`: the answers that an operator vouched for, and that the canary holds the model against."""

from fastapi import APIRouter, Response

from ...monitors.canary.expectation import Expectation, misfit
from ..problem import Kind, ProblemError, responses
from ..recordings import conditions
from ..records import Event
from ..schemas import Accepted, ExpectationView
from ..sidecar import Sidecar
from .access import GUARDED, READING, Admin, Reader, TheSidecar

router = APIRouter(prefix="/v1/canary", tags=["canary"])


@router.get("", operation_id="getCanary", responses=responses(*GUARDED, Kind.NOT_FOUND), openapi_extra=READING)
async def get_canary(sidecar: TheSidecar, _: Reader) -> ExpectationView:
    """Whose answers are recorded, since when, and how far they may move."""
    recorded = _recorded(sidecar)
    facts = sidecar.live.facts
    return ExpectationView(
        recorded_at=recorded.recorded_at,
        conditions=recorded.conditions,
        prompts=len(recorded.prompts),
        tokens=[len(answer.tokens) for answer in recorded.answers],
        runs=recorded.runs,
        scatter=recorded.scatter,
        tolerance=recorded.tolerance,
        misfit=None if facts is None else misfit(recorded, conditions(facts)),
    )


@router.post(
    "",
    operation_id="recordCanary",
    status_code=202,
    responses=responses(*GUARDED, Kind.CONFLICT, Kind.REFUSED_BY_VLLM, Kind.VLLM_AWAY),
)
async def record_canary(sidecar: TheSidecar, caller: Admin, response: Response) -> Accepted:
    """Record the answers of the model as it is now, known to be good.

    `Location` is the scan; once it has ended, its `recording_refusal` says why nothing new is kept, or is null.
    """
    sidecar.canaries.check_recordable(await sidecar.watcher.look())
    record = sidecar.runner.start(sidecar.canaries.record(caller.name))
    detail = {"scan_id": record.id}
    sidecar.store.add_event(Event(at=sidecar.now(), actor=caller.name, what="answers asked for", detail=detail))
    response.headers["location"] = f"/v1/scans/{record.id}"
    return Accepted(id=record.id, state=record.state)


@router.delete("", operation_id="removeCanary", status_code=204, responses=responses(*GUARDED, Kind.NOT_FOUND))
async def remove_canary(sidecar: TheSidecar, caller: Admin) -> None:
    """Forget the answers."""
    _recorded(sidecar)
    sidecar.expectations.remove(caller.name)


def _recorded(sidecar: Sidecar) -> Expectation:
    recorded = sidecar.expectations.recorded
    if recorded is None:
        raise ProblemError(
            Kind.NOT_FOUND, "There are no recorded answers: record them while the model is known to be good."
        )
    return recorded
