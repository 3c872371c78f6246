"""The probe's one RPC method in each vLLM worker.

Rules of vLLM's executor (vLLM 0.32, v1/executor/multiproc_executor.py): an exception in an RPC leaves the other
ranks' replies queued and shifts every later reply, and a timeout kills the engine.  So the method never raises, is
called without a timeout, and tags its reply with the call's id.  Operations in which ranks wait for each other are
carried out together (`ranks.Ranks`): where one fails, all give up.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..monitors.wire import FaultOrder
from . import armed as armed_module
from . import switches
from .armed import Armed
from .faults import Faults, find_target
from .gate_trial import try_gates
from .hardware import hardware
from .integrity import Repair
from .kv_cache import KV_CACHE, cache_of, clear
from .live_tensor import LiveTensor, UnknownTensor
from .measurement import OF_BYTES, Steps, begin
from .ranks import PeerFailed, Ranks
from .refused import Refused
from .stack import UnsupportedModel

RPC = "flipwatch_rpc"
SELF_TEST = "self_test"


@dataclass
class Measurement:
    """A measurement between two of its parts."""

    id: str
    steps: Steps
    total: int
    version: int
    done: int = 0


class WorkerProbe:
    """What the probe knows in one worker: the armed model, its faults, the measurement under way."""

    def __init__(self) -> None:
        """Nothing is under way."""
        self._faults = Faults()
        self._measurements: dict[bool, Measurement] = {}
        """One of the bytes (True) and one of the model beside it: a sweep need not wait for the end of a long scan."""
        self._trial: dict[str, list[int]] | None = None
        # Counts changes of the model: a measurement that saw two versions is void.
        self._version = 0

    def facts(self) -> dict[str, Any]:
        """The rank's part of `ModelFacts`."""
        armed = _served()
        config = armed.vllm_config
        parallel = config.parallel_config
        gates = armed.gates.read() if armed.gates is not None else {}
        from vllm.config import CompilationMode

        return {
            "boot_id": armed.boot_id,
            "model": str(config.model_config.served_model_name or config.model_config.model),
            "architecture": type(armed.model).__name__,
            "layer_class": armed.stack.layer_class,
            "num_blocks": armed.stack.num_blocks,
            "model_digest": armed.model_digest,
            "refusal": armed.refusal,
            "scan_refusal": armed.scan_refusal,
            "mode": "eager" if config.compilation_config.mode == CompilationMode.NONE else "compiled",
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "data_parallel_size": parallel.data_parallel_size,
            "max_tokens": min(config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len),
            "gates": [[index, alpha] for index, alpha in sorted(gates.items())],
            "hardware": hardware(armed.device),
            "trial": self._trial,
            "faults_enabled": switches.faults_allowed(),
            "faults": [fault.model_dump(mode="json") for fault in self._faults.active()],
        }

    def set_gates(self, gates: list[list[float]]) -> dict[str, Any]:
        """Write the alphas of this rank's blocks and read all of them back.  The scheduler is paused."""
        armed = _served()
        if armed.gates is None:
            raise Refused(501, armed.refusal or "No gates are installed.")
        alphas = {int(block): float(alpha) for block, alpha in gates}
        unknown = [block for block in alphas if not 0 <= block < armed.stack.num_blocks]
        if unknown:
            raise Refused(
                404, f"Block {unknown[0]} does not exist; this model has blocks 0 to {armed.stack.num_blocks - 1}."
            )
        armed.gates.write(alphas)
        self._version += 1
        return {"gates": [[index, alpha] for index, alpha in sorted(armed.gates.read().items())]}

    def clear_kv_cache(self) -> dict[str, Any]:
        """Zero every KV block.  Only while the scheduler is paused and every request is preempted.

        A block that was bad left NaN in the keys and values of all later layers; freed KV blocks are not cleared, and
        0 x NaN in an attention kernel is NaN, so they would outlive the gate.
        """
        cleared = clear(_served().vllm_config)
        self._faults.forget_cached()
        return {"cleared": cleared}

    def open(
        self, id: str, monitor: str, plan: dict[str, Any], as_if: Sequence[tuple[int, float]] = ()
    ) -> dict[str, Any]:
        """Begin a measurement; one of the same kind that was under way is dropped."""
        armed = _served()
        if monitor == SELF_TEST:
            if armed.gates is None:
                raise Refused(501, armed.refusal or "No gates are installed.")
            steps, total = try_gates(armed, armed.gates), armed.stack.num_blocks + 1
        else:
            try:
                steps, total = begin(armed, monitor, plan, dict(as_if))
            except UnsupportedModel as reason:
                raise Refused(501, str(reason)) from None
            except ValueError as error:
                raise Refused(422, f"The plan is wrong: {error}") from None
        self._measurements[monitor in OF_BYTES] = Measurement(id, steps, total, self._version)
        return {"steps_total": total}

    def advance(self, id: str, steps: int) -> dict[str, Any]:
        """Go on by `steps` units of work; every rank does the same ones."""
        measurement = self._measurement(id)
        if measurement.version != self._version:
            self._forget(measurement)
            raise Refused(409, "The model changed while it was being measured (its gates, or an injected fault).")
        started = last = time.perf_counter()
        dearest = 0.0
        reading = None
        # The step behind the last unit of work only returns the reading.
        behind_last = measurement.done + steps >= measurement.total
        try:
            with torch.inference_mode():
                for _ in range(steps + behind_last):
                    next(measurement.steps)
                    # Work of this step that still runs on the device is not the next one's.
                    _synchronize(_served())
                    now = time.perf_counter()
                    dearest, last = max(dearest, now - last), now
                    measurement.done += 1
        except StopIteration as stop:
            self._forget(measurement)
            if isinstance(stop.value, dict):
                reading = self._trial = stop.value
            else:
                reading = stop.value.model_dump(mode="json")
        except Exception:
            self._forget(measurement)
            raise
        _synchronize(_served())
        return {
            "steps_done": measurement.done,
            "steps_total": measurement.total,
            "seconds": time.perf_counter() - started,
            "dearest_seconds": dearest,
            "reading": reading,
        }

    def close(self, id: str) -> dict[str, Any]:
        """Drop a measurement."""
        self._forget(self._measurement(id))
        return {}

    def _measurement(self, id: str) -> Measurement:
        for measurement in self._measurements.values():
            if measurement.id == id:
                return measurement
        raise Refused(404, f"There is no measurement {id}; it was finished, dropped or replaced.")

    def _forget(self, measurement: Measurement) -> None:
        self._measurements = {kind: one for kind, one in self._measurements.items() if one is not measurement}

    def integrity(self) -> dict[str, Any]:
        """The rank's part of `IntegrityFacts`."""
        armed = _served()
        try:
            seal = armed.bytes().facts().model_dump(mode="json")
        except UnsupportedModel as reason:
            return {"boot_id": armed.boot_id, "refusal": str(reason), "seal": None}
        return {"boot_id": armed.boot_id, "refusal": None, "seal": seal}

    def repair(self, chunks: list[list[int]]) -> dict[str, Any]:
        """Put this rank's chunks of (rank, chunk) right.  The scheduler is paused."""
        armed = _served()
        try:
            sealed = armed.bytes()
        except UnsupportedModel as reason:
            raise Refused(501, str(reason)) from None
        mine = [chunk for rank, chunk in chunks if rank == sealed.rank.rank]
        if unknown := [chunk for chunk in mine if chunk >= sealed.line.num_chunks]:
            raise Refused(404, f"There is no chunk {unknown[0]}; rank {sealed.rank.rank} has {sealed.line.num_chunks}.")
        self._version += 1
        done = Repair(sealed, armed.model, armed.stack, armed.vllm_config, mine).run()
        self._faults.forget_repaired()
        _synchronize(armed)
        return {"chunks": [result.model_dump(mode="json") for result in done]}

    def add_fault(self, id: str, order: dict[str, Any]) -> dict[str, Any]:
        """Damage this rank's part of a tensor, if it has one, or of a block's KV cache.  The scheduler is paused."""
        if not switches.faults_allowed():
            raise Refused(403, "Fault injection is off on this server; start vLLM with FLIPWATCH_FAULTS=1 to allow it.")
        armed = _served()
        wanted = FaultOrder.model_validate(order)
        ranks = armed.vllm_config.parallel_config.tensor_parallel_size
        if wanted.flips is not None and ranks > 1:
            raise Refused(501, f"Flips name values of whole tensors, and this server holds them in {ranks} shards.")
        found: tuple[LiveTensor, LiveTensor | None] | None = None
        problem = ""
        try:
            if wanted.tensor == KV_CACHE:
                found = cache_of(wanted.block, armed.vllm_config, armed.stack), None
            else:
                found = find_target(wanted, armed.model, armed.stack)
        except UnknownTensor as error:
            problem = str(error)
        if not any(Ranks.here().gathered(found is not None)):
            raise Refused(404, problem)
        # Counted whether it works or not: ranks that refuse must not go on with a measurement that others drop.
        self._version += 1
        if found is None:
            # It lies on other pipeline stages.
            return {"fault": None}
        try:
            fault = self._faults.add(id, wanted, *found)
        except ValueError as error:
            raise Refused(422, str(error)) from None
        return {"fault": fault.model_dump(mode="json")}

    def remove_fault(self, id: str) -> dict[str, Any]:
        """Put the damaged values back, bit for bit, where they are damaged.  The scheduler is paused."""
        self._version += 1
        return {"removed": self._faults.remove(id)}


def _synchronize(armed: Armed) -> None:
    if armed.device.type != "cpu":
        torch.accelerator.synchronize()


def _served() -> Armed:
    if armed_module.served is None:
        raise Refused(501, "The model was loaded in a way that Flipwatch does not see (a loader of its own).")
    return armed_module.served


_OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "facts": WorkerProbe.facts,
    "set_gates": WorkerProbe.set_gates,
    "clear_kv_cache": WorkerProbe.clear_kv_cache,
    "open": WorkerProbe.open,
    "advance": WorkerProbe.advance,
    "close": WorkerProbe.close,
    "integrity": WorkerProbe.integrity,
    "repair": WorkerProbe.repair,
    "add_fault": WorkerProbe.add_fault,
    "remove_fault": WorkerProbe.remove_fault,
}
_TOGETHER = frozenset({"open", "advance", "add_fault"})
"""Operations in which ranks wait for each other.  Others must be answered by a rank whose peers have no Flipwatch."""


def rpc(worker: Any, call: str, operation: str, payload: dict[str, Any], only: int | None = None) -> dict[str, Any]:
    """Carry out one operation; what goes wrong travels as data.

    Args:
        worker: vLLM's worker, on which this is a method.
        call: Id that the reply must carry.
        operation: Name in the table above.
        payload: Plain data.
        only: Data-parallel index of the one engine that shall do it; the others just reply.
    """
    parallel = worker.vllm_config.parallel_config
    engine = parallel.data_parallel_index
    tag = {"call": call, "engine": engine, "rank": engine * parallel.world_size + worker.rank}
    if only not in (None, engine):
        return {**tag, "ok": True, "result": {}}
    try:
        probe = worker.__dict__.get("_flipwatch_probe")
        if probe is None:
            probe = worker.__dict__["_flipwatch_probe"] = WorkerProbe()
        with Ranks.here().together() if operation in _TOGETHER else nullcontext():
            result = _OPERATIONS[operation](probe, **payload)
        return {**tag, "ok": True, "result": result}
    except PeerFailed as peer:
        return {**tag, "ok": False, "status": 502, "detail": str(peer), "followed": True}
    except Refused as refused:
        return {**tag, "ok": False, "status": refused.status, "detail": refused.detail}
    except Exception as error:
        return {**tag, "ok": False, "status": 502, "detail": f"{type(error).__name__}: {error}"}
