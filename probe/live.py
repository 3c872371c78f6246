"""The served model over all its ranks: what the probe's routes do."""

import asyncio
import uuid
from contextlib import suppress
from typing import Any

import torch

from ..monitors.wire import (
    Fault,
    FaultOrder,
    GateChange,
    GateReport,
    MeasureOrder,
    ModelFacts,
    Progress,
    SelfTest,
    SelfTestState,
)
from .engine import Engine, ProbeError, Reply, boot_id, problem_of
from .kv_cache import KV_CACHE
from .load import Load
from .measurement import OF_BYTES
from .readings import join
from .weights_digest import combine
from .worker import SELF_TEST


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


# A worker holds two at most; those of clients that went away are forgotten here in time.
_MEASUREMENTS = 8


class LiveServer:
    """One vLLM server: all ranks say the same, or the answer is an error."""

    def __init__(self, engine: Engine, load: Load, flipwatch_version: str) -> None:
        """Nothing is asked of the workers until a route is called."""
        self._engine = engine
        self._load = load
        self._flipwatch_version = flipwatch_version
        self._testing = asyncio.Lock()
        self._measurements: dict[str, tuple[str, int | None]] = {}
        """Monitor and engine of each measurement that may be under way."""
        self._known: ModelFacts | None = None
        """The facts as last heard."""

    async def facts(self) -> ModelFacts:
        """The model as it is now, gates read back from every rank."""
        replies = await self._engine.call("facts")
        first = replies[0].result
        refusal = _first_refusal(replies, "refusal")
        for reply in replies[1:]:
            for field in ("mode", *(() if refusal else ("num_blocks",))):
                if reply.result[field] != first[field]:
                    place = reply.place.capitalize()
                    raise ProbeError(502, "A rank failed", f"{place} disagrees with {replies[0].place} about {field}.")
        num_blocks = max(reply.result["num_blocks"] for reply in replies)
        gates = [] if refusal else _merge_gates(replies, num_blocks)
        self._known = ModelFacts.model_validate(
            {
                **{name: value for name, value in first.items() if name != "trial"},
                "armed": refusal is None,
                "refusal": refusal,
                "scan_refusal": _first_refusal(replies, "scan_refusal"),
                "layer_class": _layer_classes(replies),
                "num_blocks": num_blocks,
                "boot_id": boot_id(replies),
                "model_digest": _model_digest(replies),
                "data_parallel_size": max(first["data_parallel_size"], len(self._engine.engines)),
                "engines": self._engine.engines,
                "gates": gates,
                "self_test": _judge_trials([reply.result["trial"] for reply in replies], num_blocks),
                "faults": _merge_faults(replies),
                "flipwatch_version": self._flipwatch_version,
                "vllm_version": _vllm_version(),
                "torch_version": torch.__version__,
            }
        )
        return self._known

    async def self_test(self) -> SelfTest:
        """Try every gate in the code that serves; the workers keep the result for as long as they live."""
        async with self._testing:
            await self._meet()
            name = f"self-test-{uuid.uuid4().hex}"
            await self._engine.call("open", id=name, monitor=SELF_TEST, plan={})
            while (await self._engine.call("advance", id=name, steps=1))[0].result["reading"] is None:
                pass
            return (await self.facts()).self_test

    async def set_gates(self, change: GateChange) -> GateReport:
        """Write gates on all ranks between two engine steps and read them back; undone where a rank fails."""
        # Each question to a busy engine waits for the end of its step.  What is asked here stays the same for as long
        # as vLLM lives; the gates are read when it stands still.
        known = self._known or await self.facts()
        if not known.armed:
            raise ProbeError(501, "Not supported", known.refusal or "No gates are installed.")
        if change.boot_id != known.boot_id:
            raise ProbeError(
                409, "Conflict", "vLLM was restarted since these gates were asked for; read its state again."
            )
        if known.self_test.state is not SelfTestState.PASSED:
            raise ProbeError(409, "Conflict", f"Gates are not changed: {known.self_test.reason}")
        for gate in change.gates:
            if gate.block >= known.num_blocks:
                last = known.num_blocks - 1
                raise ProbeError(404, "Not found", f"Block {gate.block} does not exist; blocks are 0 to {last}.")
        wanted = [[gate.block, gate.alpha] for gate in change.gates]

        async def write() -> list[float]:
            before = _merge_gates(await self._engine.call("facts"), known.num_blocks)
            previous = [[gate.block, before[gate.block]] for gate in change.gates]
            try:
                replies = await self._engine.call("set_gates", gates=wanted)
                after = _merge_gates(replies, known.num_blocks)
                _check(after, wanted)
            except Exception as error:
                # All or nothing, whatever went wrong, also in vLLM: a rank that did write must not stay ahead of the
                # others.
                problem = problem_of(error)
                outcome = "The gates were put back."
                try:
                    replies = await self._engine.call("set_gates", gates=previous)
                    _check(_merge_gates(replies, known.num_blocks), previous)
                except Exception as second:
                    outcome = f"Putting them back failed too, the ranks may differ: {problem_of(second).detail}"
                detail = f"{problem.detail} {outcome}"
                raise ProbeError(problem.status, problem.title, detail) from error
            return after

        gates, seconds = await self._engine.change(write)
        return GateReport(gates=gates, paused_seconds=seconds)

    async def open(self, id: str, order: MeasureOrder) -> Progress:
        """Begin a measurement on every rank, of all engines or of one."""
        self._check_engine(order.engine)
        if order.engine is None and len(self._engine.engines) > 1 and order.monitor not in OF_BYTES:
            # Replicas are not averaged, and none speaks for the others.
            engines = ", ".join(map(str, self._engine.engines))
            raise ProbeError(422, "Wrong request", f"engine: Name the one that is measured; there are {engines}.")
        await self._meet()
        as_if = [[gate.block, gate.alpha] for gate in order.as_if]
        replies = await self._engine.call(
            "open", engine=order.engine, id=id, monitor=order.monitor, plan=order.plan, as_if=as_if
        )
        self._measurements[id] = order.monitor, order.engine
        for forgotten in list(self._measurements)[:-_MEASUREMENTS]:
            del self._measurements[forgotten]
        return Progress(
            id=id,
            steps_done=0,
            steps_total=replies[0].result["steps_total"],
            seconds=0.0,
            requests=self._load.requests(),
            reading=None,
        )

    async def advance(self, id: str, steps: int, patience: float) -> Progress:
        """Go on with it, after up to `patience` seconds in which requests without a first token go first."""
        await self._load.calm(patience)
        before = self._load.requests()
        replies = await self._engine.call("advance", engine=self._engine_of(id), id=id, steps=steps)
        results = [reply.result for reply in replies]
        after = self._load.requests()
        if len({result["steps_done"] for result in results}) > 1:
            raise ProbeError(502, "A rank failed", "The ranks did not do the same work; the measurement is void.")
        return Progress(
            id=id,
            steps_done=results[0]["steps_done"],
            steps_total=results[0]["steps_total"],
            seconds=max(result["seconds"] for result in results),
            dearest_seconds=max(result["dearest_seconds"] for result in results),
            requests=None if before is None or after is None else max(before, after),
            reading=self._reading(id, [result["reading"] for result in results]),
        )

    def _reading(self, id: str, readings: list[dict[str, Any] | None]) -> dict[str, Any] | None:
        """One reading of those of all ranks, once all have one."""
        if None in readings:
            return None
        name, _ = self._measurements.pop(id, (None, None))
        if name is None:
            raise ProbeError(404, "Not found", f"There is no measurement {id}; it was dropped or replaced.")
        return join(name, [reading for reading in readings if reading is not None])

    async def close(self, id: str) -> None:
        """Drop it."""
        engine = self._engine_of(id)
        self._measurements.pop(id, None)
        await self._engine.call("close", engine=engine, id=id)

    def _engine_of(self, id: str) -> int | None:
        _, engine = self._measurements.get(id, (None, None))
        return engine

    def _check_engine(self, engine: int | None) -> None:
        engines = self._engine.engines
        if engine is not None and engine not in engines:
            there = ", ".join(map(str, engines))
            raise ProbeError(404, "Not found", f"There is no engine {engine}; there are {there}.")

    async def add_fault(self, id: str, order: FaultOrder) -> Fault:
        """Damage a tensor on every rank that holds a part of it, of all engines or of one.

        In a KV cache it strikes what is cached there now.
        """
        self._check_engine(order.engine)

        async def damage() -> list[Reply]:
            try:
                return await self._engine.call(
                    "add_fault", engine=order.engine, id=id, order=order.model_dump(mode="json")
                )
            except ProbeError as error:
                # All or nothing: the ranks that did it take it back, those that did not have nothing to take back.
                if error.problem.status == 502:
                    with suppress(ProbeError):
                        await self._engine.call("remove_fault", id=id)
                raise

        await self._meet()
        replies, _ = await self._engine.change(damage, keep_caches=order.tensor == KV_CACHE)
        faults = [reply.result["fault"] for reply in replies]
        return Fault.model_validate(next(fault for fault in faults if fault is not None))

    async def remove_fault(self, id: str) -> None:
        """Put the values back, wherever they are damaged; those of a KV cache become zero, as at any change."""
        replies, _ = await self._engine.change(lambda: self._engine.call("remove_fault", id=id))
        if not any(reply.result["removed"] for reply in replies):
            raise ProbeError(404, "Not found", f"There is no fault {id}.")

    async def _meet(self) -> None:
        """Before ranks wait for each other: all of them have a probe, or this raises."""
        if self._known is None:
            await self.facts()


def _first_refusal(replies: list[Reply], field: str) -> str | None:
    """What one rank refuses is refused; named where others do not say the same."""
    texts: list[str | None] = [reply.result[field] for reply in replies]
    if len(set(texts)) == 1:
        return texts[0]
    return next(f"{reply.place.capitalize()}: {reply.result[field]}" for reply in replies if reply.result[field])


def _layer_classes(replies: list[Reply]) -> str:
    """Of all ranks, as `Stack.layer_class` has them: the stages of a pipeline may differ."""
    return " | ".join(sorted({name for reply in replies for name in reply.result["layer_class"].split(" | ") if name}))


def _judge_trials(trials: list[dict[str, list[int]] | None], num_blocks: int) -> SelfTest:
    """One verdict from all ranks' trials of the gates."""
    readings = [trial for trial in trials if trial is not None]
    if len(readings) < len(trials):
        reason = "The gates have not been tested since vLLM started."
        return SelfTest(state=SelfTestState.NOT_RUN, reason=reason)
    inert = sorted({block for reading in readings for block in reading["inert"]})
    wrong = sorted({block for reading in readings for block in reading["wrong"]})
    if inert:
        reason = (
            f"The gates of {len(inert)} of {num_blocks} blocks change nothing in the served code (first: block "
            f"{inert[0]}); a stale compile cache may be the cause: empty vLLM's cache folder and restart it."
        )
        return SelfTest(state=SelfTestState.FAILED, reason=reason)
    if wrong:
        names = ", ".join("all blocks skipped" if block < 0 else f"only block {block} running" for block in wrong[:3])
        reason = f"The served code does not compute what the gates say in {len(wrong)} cases ({names})."
        return SelfTest(state=SelfTestState.FAILED, reason=reason)
    return SelfTest(state=SelfTestState.PASSED, reason=f"All {num_blocks} gates act in the served code.")


def _model_digest(replies: list[Reply]) -> str | None:
    """That of a replica; of replicas that differ, one that is none of theirs."""
    if any(reply.result["model_digest"] is None for reply in replies):
        return None
    engines = dict.fromkeys(reply.engine for reply in replies)
    digests = [combine([r.result["model_digest"] for r in replies if r.engine == engine]) for engine in engines]
    return digests[0] if len(set(digests)) == 1 else combine(digests)


def _merge_faults(replies: list[Reply]) -> list[Fault]:
    """Each once, wherever it stands."""
    faults = (Fault.model_validate(fault) for reply in replies for fault in reply.result["faults"])
    return list({fault.id: fault for fault in faults}.values())


def _merge_gates(replies: list[Reply], num_blocks: int) -> list[float]:
    """All ranks' gates as one list; a block that several ranks hold must stand alike on all of them."""
    merged: dict[int, float] = {}
    answered = {(reply.engine, block) for reply in replies for block, _ in reply.result["gates"]}
    for reply in replies:
        for block, alpha in reply.result["gates"]:
            if merged.setdefault(block, alpha) != alpha:
                detail = f"{reply.place.capitalize()} has block {block} at {alpha}, others at {merged[block]}."
                raise ProbeError(502, "A rank failed", detail)
    for engine in {reply.engine for reply in replies}:
        missing = [block for block in range(num_blocks) if (engine, block) not in answered]
        if missing:
            raise ProbeError(502, "A rank failed", f"No rank of engine {engine} answered for block {missing[0]}.")
    return [merged[block] for block in range(num_blocks)]


def _check(gates: list[float], wanted: list[list[Any]]) -> None:
    for block, alpha in wanted:
        # The device holds fp32.
        if abs(gates[block] - alpha) > 1e-6:
            raise ProbeError(502, "A rank failed", f"Block {block} reads {gates[block]} after {alpha} was written.")
