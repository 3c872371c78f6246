"""The way from the API server to the workers, and changes of the served model between engine steps."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from ..monitors.wire import Problem
from .worker import RPC

T = TypeVar("T")


class ProbeError(Exception):
    """A request that cannot be answered; becomes problem+json."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.problem = Problem(title=title, status=status, detail=detail)


class Reply(NamedTuple):
    """One rank's answer."""

    rank: int
    result: dict[str, Any]


_TITLES = {
    403: "Not allowed",
    404: "Not found",
    409: "Conflict",
    422: "Wrong request",
    501: "Not supported",
    502: "A rank failed",
}


class Engine:
    """vLLM's engine client, with what the probe needs of it."""

    def __init__(self, client: Any) -> None:
        """Speak through vLLM's own `EngineClient`."""
        self._client = client
        self._one_rpc = asyncio.Lock()
        self._changing = False

    async def call(self, operation: str, **payload: Any) -> list[Reply]:
        """Carry out one operation on every rank.

        Raises:
            ProbeError: a rank refused or failed; the detail names the ranks.
        """
        call = uuid.uuid4().hex
        async with self._one_rpc:
            # The gates of a sleeping server lie in memory that is not mapped, and a paused one may be in the middle of
            # a weight update.  Our own pause is neither.
            if not self._changing:
                await self._refuse_asleep()
            # No timeout: it would kill the engine.
            raw = await self._client.collective_rpc(RPC, args=(call, operation, payload))
        if not raw or any(not isinstance(reply, dict) or reply.get("call") != call for reply in raw):
            raise ProbeError(502, "A rank failed", f"The workers' replies to {operation} do not belong to this call.")
        failed = [reply for reply in raw if not reply["ok"]]
        if failed:
            same = len(failed) == len(raw) and len({(reply["status"], reply["detail"]) for reply in failed}) == 1
            if same:
                status, detail = failed[0]["status"], failed[0]["detail"]
            else:
                status = 502
                ranks = "; ".join(f"rank {reply['rank']}: {reply['detail']}" for reply in failed)
                detail = f"{len(failed)} of {len(raw)} ranks failed. {ranks}"
            raise ProbeError(status, _TITLES.get(status, "A rank failed"), detail)
        return [Reply(reply["rank"], reply["result"]) for reply in raw]

    async def change(self, act: Callable[[], Awaitable[T]]) -> tuple[T, float]:
        """Run `act` while nothing is computed and no cached state is left; requests in flight are kept and recomputed.

        The change is carried through even when the caller goes away.

        Returns:
            What `act` returned, and the seconds for which the scheduler stood still.

        Raises:
            ProbeError: another change is running, or somebody else has paused vLLM.
        """
        if self._changing:
            raise ProbeError(
                409, "Conflict", "Another change of the served model is running; try again when it is done."
            )
        self._changing = True
        task = asyncio.ensure_future(self._change(act))
        # A caller that went away leaves nobody to fetch the outcome; it is logged by vLLM's own handler.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _change(self, act: Callable[[], Awaitable[T]]) -> tuple[T, float]:
        try:
            started = time.perf_counter()
            async with self._paused():
                # First, so that nothing has changed yet where it fails.  Nothing is computed before the end.
                await self.call("clear_kv_cache")
                result = await act()
            return result, time.perf_counter() - started
        finally:
            self._changing = False

    async def _refuse_asleep(self) -> None:
        if await self._client.is_sleeping():
            raise ProbeError(503, "Asleep", "vLLM is asleep, or paused by somebody else; nothing is read or changed.")

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        await self._refuse_asleep()
        try:
            # keep: requests stay queued.  clear_cache: running ones are preempted and recomputed, every cache is reset.
            await self._client.pause_generation(mode="keep", clear_cache=True)
            if not await self._client.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
                raise ProbeError(
                    409, "Conflict", "vLLM could not free its KV cache (a transfer may hold it); nothing was changed."
                )
            yield
        finally:
            await self._client.resume_generation()
