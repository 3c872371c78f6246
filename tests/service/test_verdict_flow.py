"""From fault to verdict without anybody's help: monitors with clocks look again when another one sees something."""

import asyncio
from collections.abc import Callable
from typing import Any

from flipwatch.monitors.finding import Health
from flipwatch.monitors.verdict.verdict import Joined, Verdict
from flipwatch.service.records import ScanTrigger

from .fake_server import FakeServer

Start = Callable[..., Any]

RARELY = {"every_minutes": 1000}


class Reached:
    """Waits for verdicts, and keeps those that came."""

    def __init__(self, api: Any) -> None:
        self._live = api.sidecar.live
        self._news = asyncio.Event()
        self.seen: list[tuple[Verdict, Health]] = []
        api.sidecar.verdicts.listen(self._hear)

    async def _hear(self, joined: Joined) -> None:
        self.seen.append((joined.verdict, joined.health))
        self._news.set()

    async def __call__(self, verdict: Verdict, health: Health) -> Joined:
        """The verdict of now, once it is this one."""
        async with asyncio.timeout(30):
            while True:
                joined: Joined = self._live.verdict()
                if (joined.verdict, joined.health) == (verdict, health):
                    return joined
                self._news.clear()
                await self._news.wait()


async def _asked(api: Any) -> None:
    await api.sidecar.runner.run(api.sidecar.canaries.job(ScanTrigger.REQUEST))


async def _swept(api: Any) -> None:
    await api.sidecar.runner.run(api.sidecar.sweeps.sweep(ScanTrigger.REQUEST))


async def test_faults_come_and_go(start: Start, server: FakeServer) -> None:
    """A weight fault, mitigated, repaired, latent, a serving fault: each from one finding and what it sets off."""
    api = await start(fingerprint=RARELY, canary=RARELY, scan=RARELY)
    reached = Reached(api)
    await api.sidecar.schedule.met()
    # A beat that fell on the canary's first question could not tell yet.
    await api.sidecar.heart.feel()
    await reached(Verdict.OK, Health.OK)

    server.weights.damage(7, 4)
    server.harm[4] = 5.0
    server.answers.flip = {4: 3}
    await _asked(api)
    joined = await reached(Verdict.WEIGHT_FAULT, Health.FAILED)
    assert joined.grounds[0] == "fingerprint"
    assert (Verdict.UNKNOWN, Health.FAILED) in reached.seen
    assert not {Verdict.OLD_FAULT, Verdict.SERVING_FAULT} & {verdict for verdict, _ in reached.seen}

    await api.post("/v1/mitigations", {"action": "skip", "blocks": [4], "force": True})
    server.answers.flip = {}
    await api.sidecar.mitigator.settled()
    joined = await reached(Verdict.MITIGATED, Health.DEGRADED)
    assert joined.action.value == "repair"

    server.harm[4] = 0.0
    await api.post("/v1/mitigations", {"action": "repair"})
    await api.sidecar.mitigator.settled()
    await reached(Verdict.OK, Health.OK)

    server.weights.damage(9, 2)
    await _swept(api)
    await reached(Verdict.LATENT_WEIGHT_FAULT, Health.DEGRADED)
    server.weights.bad.clear()
    await _swept(api)
    await reached(Verdict.OK, Health.OK)

    server.answers.stale = 2.0
    await _asked(api)
    joined = await reached(Verdict.SERVING_FAULT, Health.FAILED)
    assert (joined.grounds, joined.blocks) == (("canary",), ())
