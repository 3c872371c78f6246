"""The way from the API server to the workers, and changes of the served model between engine steps.

Under data parallelism one API server has several engines, a replica of the model in each.  vLLM's own
`collective_rpc` reaches all of them and hands on the answer of the first (vLLM 0.32, v1/engine/core_client.py); here
every engine answers, or the call has failed.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from ..monitors.wire import ASLEEP, Problem
from .weights_digest import combine
from .worker import RPC

T = TypeVar("T")

# vLLM tells its own requests that the engine has died, and leaves a utility call waiting for ever.
_LOOK_SECONDS = 1.0


class ProbeError(Exception):
    """A request that cannot be answered; becomes problem+json."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.problem = Problem(title=title, status=status, detail=detail)


def problem_of(error: Exception) -> Problem:
    """Of whatever went wrong; what is none of ours is vLLM's own, whose engine did not answer."""
    if isinstance(error, ProbeError):
        return error.problem
    return Problem(title="The engine did not answer", status=503, detail=f"{type(error).__name__}: {error}.")


class Reply(NamedTuple):
    """One rank's answer."""

    engine: int
    """Its data-parallel index."""
    rank: int
    """Among the workers of all engines."""
    place: str
    """For people: "rank 1", or "engine 1 rank 2" where there are several engines."""
    result: dict[str, Any]


def boot_id(replies: Sequence[Reply]) -> str:
    """One for the server, of those of all its workers: new when any of them is."""
    workers = [reply.result["boot_id"] for reply in replies]
    return str(workers[0]) if len(workers) == 1 else combine(workers)


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
        """Speak through vLLM's own `EngineClient`, an `AsyncLLM`."""
        self._client = client
        self._parallel = client.vllm_config.parallel_config
        self._one_rpc = asyncio.Lock()
        self._changing = False

    @property
    def engines(self) -> list[int]:
        """Data-parallel index of each engine behind this API server, lowest first; without data parallelism, [0]."""
        return list(self._client.engine_core.engine_ranks_managed)

    async def call(self, operation: str, *, engine: int | None = None, **payload: Any) -> list[Reply]:
        """Carry out one operation on every rank of every engine, or of one; the replies in the order of the ranks.

        Raises:
            ProbeError: a rank refused, failed or did not answer; the detail names the ranks.
        """
        servers = getattr(self._parallel, "_api_process_count", 1)
        if servers > 1:
            raise ProbeError(
                501,
                "Not supported",
                f"vLLM runs {servers} API servers on one port, and none knows what another does; start it with "
                "--api-server-count 1.",
            )
        call = uuid.uuid4().hex
        async with self._one_rpc:
            # The gates of a sleeping server lie in memory that is not mapped, and a paused one may be in the middle of
            # a weight update.  Our own pause is neither.
            if not self._changing:
                await self._refuse_asleep()
            raw = await self._ask(call, operation, payload, engine)
        failed = [reply for reply in raw if not reply["ok"]]
        if failed:
            # Those that stopped because of another have nothing to tell.
            failed = [reply for reply in failed if not reply.get("followed")] or failed
            statuses = {reply["status"] for reply in failed}
            # Where all ranks say the same kind of no, nothing has happened, and it is the caller's to hear why.
            status = failed[0]["status"] if len(failed) == len(raw) and len(statuses) == 1 else 502
            details = list(dict.fromkeys(reply["detail"] for reply in failed))
            if len(failed) == len(raw) and len(details) == 1:
                detail = details[0]
            else:
                ranks = "; ".join(f"{self._place(reply)}: {reply['detail']}" for reply in failed)
                detail = f"{len(failed)} of {len(raw)} ranks failed. {ranks}"
            raise ProbeError(status, _TITLES.get(status, "A rank failed"), detail)
        return [Reply(reply["engine"], reply["rank"], self._place(reply), reply["result"]) for reply in raw]

    async def _ask(
        self, call: str, operation: str, payload: dict[str, Any], engine: int | None
    ) -> list[dict[str, Any]]:
        """Every engine's replies to this very call, in one list."""
        # No timeout: it would kill the engine.
        if len(self.engines) == 1:
            answers = [await self._answered(self._client.collective_rpc(RPC, args=(call, operation, payload, engine)))]
        else:
            answers = await self._answered(
                self._client.engine_core.call_utility_all_async(
                    "collective_rpc", RPC, None, (call, operation, payload, engine), None
                )
            )
        for index, replies in zip(self.engines, answers, strict=True):
            tags = [(reply["call"], reply["engine"]) if isinstance(reply, dict) else None for reply in replies]
            if tags != [(call, index)] * self._parallel.world_size:
                whose = f"Engine {index}'s" if len(answers) > 1 else "The workers'"
                detail = f"{whose} replies to {operation} do not belong to this call, or some are missing."
                raise ProbeError(502, "A rank failed", detail)
        # Engines that were not asked have nothing to say.
        return [reply for replies in answers for reply in replies if engine in (None, reply["engine"])]

    async def _answered(self, asked: Awaitable[T]) -> T:
        """What vLLM answers; a `ProbeError` where its engine dies before that.

        A server that ends waits for its open requests: one that nobody will answer would keep it from being restarted.
        """
        task = asyncio.ensure_future(asked)
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_SECONDS))[0]:
                if self._client.errored:
                    raise ProbeError(503, "The engine is gone", "vLLM's engine has died; the server is about to end.")
            return task.result()
        finally:
            task.cancel()

    def _place(self, reply: dict[str, Any]) -> str:
        return f"rank {reply['rank']}" if len(self.engines) == 1 else f"engine {reply['engine']} rank {reply['rank']}"

    async def change(self, act: Callable[[], Awaitable[T]], *, keep_caches: bool = False) -> tuple[T, float]:
        """Run `act` while nothing is computed and no cached state is left; requests in flight are kept and recomputed.

        With `keep_caches` all cached state stays, and requests in flight go on with it: only for damage to that very
        state.  The change is carried through even when the caller goes away.

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
        task = asyncio.ensure_future(self._change(act, keep_caches))
        # A caller that went away leaves nobody to fetch the outcome; it is logged by vLLM's own handler.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _change(self, act: Callable[[], Awaitable[T]], keep_caches: bool) -> tuple[T, float]:
        try:
            started = time.perf_counter()
            async with self._paused(keep_caches):
                if not keep_caches:
                    # First, so that nothing has changed yet where it fails.  Nothing is computed before the end.
                    await self.call("clear_kv_cache")
                result = await act()
            return result, time.perf_counter() - started
        finally:
            self._changing = False

    async def _refuse_asleep(self) -> None:
        if any(await self._asleep()):
            raise ProbeError(503, ASLEEP, "vLLM is asleep, or paused by somebody else; nothing is read or changed.")

    async def _asleep(self) -> list[bool]:
        """Of each engine: it sleeps, or stands still."""
        if len(self.engines) == 1:
            return [await self._answered(self._client.is_sleeping())]
        # vLLM's own answer for all of them is an exception where they differ.
        return list(await self._answered(self._client.engine_core.call_utility_all_async("is_sleeping")))

    @asynccontextmanager
    async def _paused(self, keep_caches: bool) -> AsyncIterator[None]:
        await self._refuse_asleep()
        try:
            # keep: requests stay queued.  clear_cache: running ones are preempted and recomputed, every cache is reset.
            # Pause, reset and resume go to all engines.
            await self._answered(self._client.pause_generation(mode="keep", clear_cache=not keep_caches))
            if not keep_caches and not await self._answered(
                self._client.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            ):
                raise ProbeError(
                    409, "Conflict", "vLLM could not free its KV cache (a transfer may hold it); nothing was changed."
                )
            if not all(await self._asleep()):
                raise ProbeError(502, "A rank failed", "An engine did not stand still; nothing was changed.")
            yield
        finally:
            await self._answered(self._client.resume_generation())
