"""Delivers JSON bodies to one webhook, in order, in the background: a receiver that hangs delays nothing else.

The URL may carry a secret: it is never logged.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import structlog

_log = structlog.get_logger(__name__)

# More than this waiting means that nobody has received anything for a long time.
_QUEUE = 100


class Webhook:
    """`async with Webhook(url) as webhook: webhook.send(body)`.

    A body is tried once and again after each pause in `pauses` (seconds), then given up.  Another try makes sense for
    a receiver that does not answer, or answers 429 or 5xx; any other status but 2xx is final.  `sent` and `failures`
    count bodies since the start.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 5.0,
        pauses: Sequence[float] = (1.0, 5.0, 30.0),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._url = url
        self._timeout = timeout
        self._pauses = pauses
        self._sleep = sleep
        self._waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_QUEUE)
        self._worker: asyncio.Task[None] | None = None
        self.sent = 0
        self.failures = 0

    async def __aenter__(self) -> "Webhook":
        self._worker = asyncio.create_task(self._work(), name="webhook")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stops at once; what is still waiting is lost and counted."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})
        self.failures += self._waiting.qsize()

    def send(self, body: dict[str, Any]) -> None:
        """Queue a body; returns at once and never raises."""
        try:
            self._waiting.put_nowait(body)
        except asyncio.QueueFull:
            self.failures += 1
            _log.error("webhook: too many bodies wait, this one is lost", waiting=_QUEUE)

    async def drained(self) -> None:
        """Wait until each body queued so far was sent or given up."""
        await self._waiting.join()

    async def _work(self) -> None:
        # trust_env off: a proxy variable meant for something else must not receive the alerts.
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                body = await self._waiting.get()
                delivered = False
                try:
                    delivered = await self._deliver(client, body)
                except Exception as error:
                    # The one broad catch: whatever one body or the URL does, the next alert goes out.  The text of
                    # the exception may quote the URL.
                    _log.error("webhook: not delivered, Flipwatch itself failed", why=type(error).__name__)
                finally:
                    self._waiting.task_done()
                    self.sent += delivered
                    self.failures += not delivered

    async def _deliver(self, client: httpx.AsyncClient, body: dict[str, Any]) -> bool:
        for pause in (*self._pauses, None):
            why, final = await self._post(client, body)
            if why is None:
                return True
            if final or pause is None:
                break
            _log.warning("webhook: not delivered, will try again", why=why, seconds=pause)
            await self._sleep(pause)
        _log.error("webhook: not delivered, given up", why=why)
        return False

    async def _post(self, client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str | None, bool]:
        """Why it was not delivered (None: it was), and whether that is final."""
        try:
            # httpx's own limit is per read: a receiver that drips bytes would hold us for good.
            async with asyncio.timeout(self._timeout):
                response = await client.post(self._url, json=body)
        except TimeoutError:
            return f"no answer within {self._timeout:g} s", False
        except httpx.HTTPError as error:
            return type(error).__name__, False
        if response.is_success:
            return None, True
        return f"HTTP {response.status_code}", response.status_code != 429 and response.status_code < 500
