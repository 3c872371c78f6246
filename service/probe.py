"""Client of the probe inside vLLM: `monitors/wire.py` spoken over httpx.

ProbeError                anything that went wrong with a request
    ProbeAway             nobody answers
        ProbeLate         it was asked, and did not answer in time
        ProbeAsleep       vLLM sleeps or is paused: nothing is read or changed
        ProbeAbsent       vLLM runs without the probe, or with one that does not know the route
    ProbeUnauthorised     the token is wrong
    ProbeRefused          the probe answered with a problem: `status` and its own detail
    ProbeNonsense         the answer is not what the contract says
"""

from collections.abc import Callable
from typing import TypeVar

import httpx
from pydantic import ValidationError

from ..monitors.fingerprint.facts import (
    CheckpointFacts,
    FileDigest,
    FileOrder,
    IntegrityFacts,
    RepairOrder,
    RepairReport,
)
from ..monitors.wire import (
    ASLEEP,
    PREFIX,
    Advance,
    Fault,
    FaultOrder,
    GateChange,
    GateReport,
    MeasureOrder,
    ModelFacts,
    Problem,
    Progress,
    SelfTest,
    Wire,
)
from .connection import Connection

# A part waits for the engine step that runs and then holds the engine; a change of gates waits for a pause.
# Both may take long on a busy or slow server, and a client that leaves early does not stop them.
_PATIENT_SECONDS = 600.0

W = TypeVar("W", bound=Wire)


class ProbeError(Exception):
    """A request to the probe failed; the message is one sentence."""


class ProbeAway(ProbeError):
    """vLLM does not answer, or it runs without the probe."""


class ProbeLate(ProbeAway):
    """The probe was asked, and did not answer in time."""


class ProbeAsleep(ProbeAway):
    """vLLM sleeps, or somebody else has paused it."""


class ProbeAbsent(ProbeAway):
    """vLLM answers, and nothing of ours is at this route."""


class ProbeUnauthorised(ProbeError):
    """The probe refused the token."""


class ProbeRefused(ProbeError):
    """The probe answered with a problem."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class ProbeNonsense(ProbeError):
    """The probe's answer breaks the contract; most likely its version differs from ours."""


class Probe(Connection):
    """The probe of one vLLM server.

    `timeout` is in seconds and holds for the quick requests.  `heard` is told of each answer that came from the
    engine: it lives.
    """

    away = ProbeAway
    late = ProbeLate

    def __init__(
        self, base_url: str, token: str, *, timeout: float = 30.0, heard: Callable[[], None] | None = None
    ) -> None:
        super().__init__(base_url, token, timeout)
        self._heard = heard
        self._patience = httpx.Timeout(_PATIENT_SECONDS, connect=timeout)

    async def facts(self) -> ModelFacts:
        """The live model as it is now."""
        return _parse(ModelFacts, await self._request("GET", "/model"))

    async def self_test(self) -> SelfTest:
        """Find out whether the gates act in the code that serves."""
        return _parse(SelfTest, await self._request("POST", "/self-test", patient=True))

    async def set_gates(self, change: GateChange) -> GateReport:
        """Write gates between two engine steps; all or nothing."""
        return _parse(GateReport, await self._request("PUT", "/gates", change, patient=True))

    async def repair(self, order: RepairOrder) -> RepairReport:
        """Put the bytes of chunks right between two engine steps; only what its digest proves is written."""
        return _parse(RepairReport, await self._request("POST", "/repairs", order, patient=True))

    async def order(self, order: MeasureOrder) -> Progress:
        """Prepare a measurement; nothing is computed yet."""
        return _parse(Progress, await self._request("POST", "/measurements", order, patient=True))

    async def advance(self, measurement: str, steps: int, patience: float = 0.0) -> Progress:
        """Do the next `steps` units of a measurement; for up to `patience` seconds requests that wait go first."""
        path = f"/measurements/{measurement}/advance"
        order = Advance(steps=steps, patience_seconds=patience)
        return _parse(Progress, await self._request("POST", path, order, patient=True))

    async def drop(self, measurement: str) -> None:
        """Forget a measurement."""
        await self._request("DELETE", f"/measurements/{measurement}")

    async def inject(self, order: FaultOrder) -> Fault:
        """Damage the live model on purpose."""
        return _parse(Fault, await self._request("POST", "/faults", order, patient=True))

    async def heal(self, fault: str) -> None:
        """Undo a fault."""
        await self._request("DELETE", f"/faults/{fault}", patient=True)

    async def integrity(self) -> IntegrityFacts:
        """The baselines of the weights, rank by rank; `ProbeRefused` by a probe that knows of none."""
        try:
            return _parse(IntegrityFacts, await self._request("GET", "/integrity"))
        except ProbeAbsent:
            raise ProbeRefused(
                404, "The probe knows no fingerprints: install the same version of Flipwatch on both sides."
            ) from None

    async def checkpoint(self) -> CheckpointFacts:
        """The files that the model was loaded from."""
        return _parse(CheckpointFacts, await self._request("GET", "/checkpoint"))

    async def file_digest(self, file: str) -> FileDigest:
        """Read one of these files from the disk; takes as long as that takes."""
        order = FileOrder(file=file)
        return _parse(FileDigest, await self._request("POST", "/checkpoint/digests", order, patient=True))

    async def _request(
        self, method: str, path: str, body: Wire | None = None, *, patient: bool = False
    ) -> httpx.Response:
        response = await self.send(
            method,
            PREFIX + path,
            content=None if body is None else body.model_dump_json(),
            headers=None if body is None else {"content-type": "application/json"},
            timeout=self._patience if patient else httpx.USE_CLIENT_DEFAULT,
        )
        if response.is_success:
            # The files are read by the API server, however the engine is.
            if self._heard is not None and not path.startswith("/checkpoint"):
                self._heard()
            return response
        raise self._error(response)

    def _error(self, response: httpx.Response) -> ProbeError:
        status = response.status_code
        try:
            problem = Problem.model_validate_json(response.content)
            detail, asleep = problem.detail, problem.title == ASLEEP
        except ValidationError:
            # Not the probe's own words: vLLM without the plugin, or a proxy in between.
            if status == 404:
                return ProbeAbsent(
                    f"vLLM at {self.shown_url} has no Flipwatch probe: start it with VLLM_PLUGINS=flipwatch and "
                    "FLIPWATCH_PROBE_TOKEN."
                )
            if status in (502, 503, 504):
                return ProbeAway(f"vLLM at {self.shown_url} is not ready: HTTP {status}.")
            detail, asleep = f"vLLM at {self.shown_url} answered HTTP {status} without a problem document.", False
        if status == 401:
            return ProbeUnauthorised(
                "The probe refused the token: FLIPWATCH_PROBE_TOKEN differs between vLLM and the sidecar."
            )
        if status == 503:
            return ProbeAsleep(detail) if asleep else ProbeAway(detail)
        return ProbeRefused(status, detail)


def _parse(kind: type[W], response: httpx.Response) -> W:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ProbeNonsense(
            f"The probe's {kind.__name__} cannot be read ({place}: {first['msg']}): probe and sidecar must be the "
            "same version of Flipwatch."
        ) from None
