"""`/v1/canary`: the answers that an operator vouched for, and that the canary holds the model against."""

from fastapi import APIRouter, Response

from ...monitors.canary.expectation import misfit
from ..problem import Kind, responses
from ..recordings import conditions
from ..schemas import Accepted, ExpectationView
from .access import GUARDED, READING, Admin, Reader, TheSidecar
from .vouching import start_recording, the_current

router = APIRouter(prefix="/v1/canary", tags=["canary"])


@router.get("", operation_id="getCanary", responses=responses(*GUARDED, Kind.NOT_FOUND), openapi_extra=READING)
async def get_canary(sidecar: TheSidecar, _: Reader) -> ExpectationView:
    """Whose answers are recorded, since when, and how far they may move."""
    recorded = the_current(sidecar.expectations)
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
    return await start_recording(sidecar, sidecar.canaries, "answers", caller, response)


@router.delete("", operation_id="removeCanary", status_code=204, responses=responses(*GUARDED, Kind.NOT_FOUND))
async def remove_canary(sidecar: TheSidecar, caller: Admin) -> None:
    """Forget the answers."""
    the_current(sidecar.expectations)
    sidecar.expectations.remove(caller.name)
