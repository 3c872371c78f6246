"""What the routes share that record, show and remove what an operator vouches for."""

from typing import Protocol

from fastapi import Response

from ...monitors.wire import ModelFacts
from ..auth import Caller
from ..job import Job
from ..problem import Kind, ProblemError
from ..records import Event
from ..schemas import Accepted
from ..sidecar import Sidecar
from ..vouched import T, Vouched


class _Records(Protocol):
    def check_recordable(self, facts: ModelFacts) -> None: ...

    def record(self, actor: str) -> Job: ...


async def start_recording(
    sidecar: Sidecar, monitor: _Records, what: str, caller: Caller, response: Response
) -> Accepted:
    """Let a monitor record "states" or "answers" of the model as it is now; raises what forbids it."""
    monitor.check_recordable(await sidecar.watcher.look())
    record = sidecar.runner.start(monitor.record(caller.name))
    detail = {"scan_id": record.id}
    sidecar.store.add_event(Event(at=sidecar.now(), actor=caller.name, what=f"{what} asked for", detail=detail))
    response.headers["location"] = f"/v1/scans/{record.id}"
    return Accepted(id=record.id, state=record.state)


def the_current(vouched: Vouched[T]) -> T:
    """What is recorded; `ProblemError` when nothing is."""
    if vouched.current is None:
        raise ProblemError(
            Kind.NOT_FOUND, f"There are no recorded {vouched.what}: record them while the model is known to be good."
        )
    return vouched.current
