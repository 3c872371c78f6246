"""What the probe asks of vLLM's engines, and what it makes of their answers; the engines are made up."""

import asyncio
from typing import Any

import pytest

from flipwatch.monitors.wire import Gate, GateChange
from flipwatch.probe.engine import Engine, ProbeError, Reply
from flipwatch.probe.live import LiveServer
from flipwatch.probe.load import Load


class _Namespace:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class _Client:
    """Several engines of one or more workers, each answering with its rank; what is told to be missing is missing."""

    def __init__(self, engines: list[int], workers: int = 1, servers: int = 1) -> None:
        parallel = _Namespace(world_size=workers, _api_process_count=servers)
        self.vllm_config = _Namespace(parallel_config=parallel)
        self.engine_core = self
        self.engine_ranks_managed = engines
        self.workers = workers
        self.asleep: set[int] = set()
        self.silent: set[int] = set()
        self.stale: set[int] = set()
        self.errored = False

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        if method == "is_sleeping":
            return [engine in self.asleep for engine in self.engine_ranks_managed]
        _, timeout, (call, _, _, only), _ = args
        assert timeout is None
        return [self._replies(engine, call, only) for engine in self.engine_ranks_managed]

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        (engine,) = self.engine_ranks_managed
        return self._replies(engine, args[0], args[3])

    async def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def _replies(self, engine: int, call: str, only: int | None) -> list[dict[str, Any]]:
        count = self.workers - (engine in self.silent)
        tag = "of an earlier call" if engine in self.stale else call
        done = {} if only not in (None, engine) else {"boot_id": f"boot of {engine}"}
        first = engine * self.workers
        return [
            {"call": tag, "engine": engine, "rank": first + worker, "ok": True, "result": done}
            for worker in range(count)
        ]


def _ask(client: _Client, **payload: Any) -> list[Reply]:
    return asyncio.run(Engine(client).call("facts", **payload))


def test_replies_of_all_engines_are_told_apart() -> None:
    """Every rank of every engine, in order, each with its place; of one server that has one engine, without it."""
    assert [(r.engine, r.rank, r.place) for r in _ask(_Client([0, 1], workers=2))] == [
        (0, 0, "engine 0 rank 0"),
        (0, 1, "engine 0 rank 1"),
        (1, 2, "engine 1 rank 2"),
        (1, 3, "engine 1 rank 3"),
    ]
    # Behind a load balancer of the operator's own each API server has its own engine.
    assert [(r.engine, r.rank, r.place) for r in _ask(_Client([3]))] == [(3, 3, "rank 3")]


def test_one_engine_can_be_asked_alone() -> None:
    """The others are reached, do nothing, and say nothing."""
    assert [(r.engine, r.result) for r in _ask(_Client([0, 1]), engine=1)] == [(1, {"boot_id": "boot of 1"})]


@pytest.mark.parametrize("fault", ["silent", "stale"])
def test_a_reply_that_is_missing_or_of_another_call_is_an_error(fault: str) -> None:
    """It names the engine, and no other engine's answer stands for it."""
    client = _Client([0, 1], workers=2)
    getattr(client, fault).add(1)
    with pytest.raises(ProbeError, match="Engine 1's replies to facts do not belong to this call, or some are missing"):
        _ask(client)


def test_one_engine_asleep_is_a_server_asleep() -> None:
    """Nothing is read of the engine that is awake."""
    client = _Client([0, 1])
    client.asleep = {1}
    with pytest.raises(ProbeError, match="asleep") as refused:
        _ask(client)
    assert refused.value.problem.status == 503


def test_several_api_servers_are_refused() -> None:
    """What `vllm serve` starts by itself for several engines: the sentence says how to have one."""
    with pytest.raises(ProbeError, match=r"2 API servers .* --api-server-count 1") as refused:
        _ask(_Client([0, 1], servers=2))
    assert refused.value.problem.status == 501


class _Served(_Client):
    """One engine with gates, that writes down what it is asked while it serves and while it stands still."""

    def __init__(self) -> None:
        super().__init__([0])
        self.gates = [1.0, 0.5, 1.0]
        self.paused = False
        self.serving: list[str] = []
        self.standing: list[str] = []

    def _ask(self, what: str) -> None:
        (self.standing if self.paused else self.serving).append(what)

    async def is_sleeping(self) -> bool:
        self._ask("is_sleeping")
        return self.paused

    async def pause_generation(self, **_: Any) -> None:
        self._ask("pause")
        self.paused = True

    async def reset_prefix_cache(self, **_: Any) -> bool:
        self._ask("reset")
        return True

    async def resume_generation(self) -> None:
        self.paused = False

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        call, operation, payload, _ = args
        self._ask(operation)
        for block, alpha in payload.get("gates", []):
            self.gates[block] = alpha
        result = {
            **dict.fromkeys(("boot_id", "model", "architecture", "layer_class", "mode", "dtype", "hardware"), "x"),
            **dict.fromkeys(("refusal", "scan_refusal", "model_digest"), None),
            **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 1),
            "num_blocks": 3,
            "max_tokens": 64,
            "faults_enabled": False,
            "faults": [],
            "trial": {"inert": [], "wrong": []},
            "gates": [[block, alpha] for block, alpha in enumerate(self.gates)],
        }
        return [{"call": call, "engine": 0, "rank": 0, "ok": True, "result": result}]


@pytest.mark.parametrize("engines", [[0], [0, 1]])
async def test_a_call_ends_with_its_engine(engines: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM leaves a call waiting when its engine dies, and a server that ends waits for its open requests."""
    client = _Client(engines)
    asked = asyncio.Event()

    async def never(*_: Any, **__: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("flipwatch.probe.engine._LOOK_SECONDS", 0.01)
    monkeypatch.setattr(client, "is_sleeping", never)
    monkeypatch.setattr(client, "call_utility_all_async", never)
    call = asyncio.create_task(Engine(client).call("facts"))
    await asked.wait()
    client.errored = True
    with pytest.raises(ProbeError) as gone:
        await call
    assert gone.value.problem.status == 503


def test_a_change_asks_a_serving_engine_nothing_that_is_known() -> None:
    """Each question waits for the end of a step: once the facts are known, there is one, and then the pause."""
    client = _Served()
    live = LiveServer(Engine(client), Load(client), "0.1.0")
    facts = asyncio.run(live.facts())
    client.serving.clear()
    change = GateChange(boot_id=facts.boot_id, gates=[Gate(block=2, alpha=0.0)])
    report = asyncio.run(live.set_gates(change))
    assert report.gates == [1.0, 0.5, 0.0]
    assert client.serving == ["is_sleeping", "pause"]
    assert client.standing == ["reset", "is_sleeping", "clear_kv_cache", "facts", "set_gates"]
    with pytest.raises(ProbeError, match="vLLM was restarted"):
        asyncio.run(live.set_gates(change.model_copy(update={"boot_id": "another"})))
    assert (client.serving, client.paused) == (["is_sleeping", "pause"], False)


class _Replicas(_Served):
    """Two engines; after the first one has written, a question to the second one fails inside vLLM."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.engine_ranks_managed = [0, 1]
        self.each = [[1.0, 0.5, 1.0], [1.0, 0.5, 1.0]]
        self.fails: list[str] = [fails]

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        if method == "is_sleeping":
            return [self.paused, self.paused]
        replies = []
        for engine, gates in enumerate(self.each):
            if engine == 1 and args[2][1] in self.fails:
                self.fails.remove(args[2][1])
                raise RuntimeError("Call to collective_rpc method failed: no space left")
            self.gates = gates
            (reply,) = await self.collective_rpc(args[0], args=args[2])
            replies.append([{**reply, "engine": engine, "rank": engine}])
        return replies


def test_gates_are_put_back_where_vllm_itself_fails_on_one_engine() -> None:
    """One engine has written, the other one's call broke off in vLLM: neither serves under the new gates."""
    client = _Replicas(fails="set_gates")
    live = LiveServer(Engine(client), Load(client), "0.1.0")
    facts = asyncio.run(live.facts())
    change = GateChange(boot_id=facts.boot_id, gates=[Gate(block=2, alpha=0.0)])
    with pytest.raises(ProbeError, match=r"no space left\. The gates were put back\.") as refused:
        asyncio.run(live.set_gates(change))
    assert refused.value.problem.status == 503
    assert (client.each, client.paused) == ([[1.0, 0.5, 1.0]] * 2, False)
    assert asyncio.run(live.set_gates(change)).gates == [1.0, 0.5, 0.0]
