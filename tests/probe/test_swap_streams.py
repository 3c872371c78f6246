"""200 open streams over a skip, an undo and a repair: none fails, and no token rests on anything stale.

Judged by the code of the benchmark (`bench/streams.py`), on a tiny random model.
"""

import asyncio
import importlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..vllm_server import VllmServer
from . import tiny

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BENCH = Path(__file__).resolve().parents[2] / "bench"
STREAMS = 200
LENGTHS = (56, 112, 224)
"""Tokens of each stream, of the first try and of later ones: on a busy machine short ones end before all have begun, or
before the swap has."""
BLOCK = 3
FAULT = {"block": 2, "tensor": "mlp.up_proj", "kind": "burst", "count": 50}


@pytest.fixture(scope="module")
def streams() -> Iterator[ModuleType]:
    """The benchmark's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("streams")


@pytest.fixture(scope="module")
def server(
    smol: Path, tmp_path_factory: pytest.TempPathFactory, test_environment: Callable[..., dict[str, str]]
) -> Iterator[VllmServer]:
    """A tiny Llama in fp32 that takes all streams at once; its caches can be left stale on purpose."""
    folder = tmp_path_factory.mktemp("swap")
    model = tiny.make("llama", smol, folder / "model")
    arguments = ["--enforce-eager", "--dtype", "float32", "--block-size", "32", "--max-num-seqs", "256"]
    environment = test_environment("stale_cache", FLIPWATCH_TESTS_FAIL=str(folder / "told"))
    with VllmServer(model, [*arguments, "--enable-prompt-tokens-details"], environment) as running:
        assert running.self_test()["state"] == "passed"
        yield running


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Token ids of many lengths; half of them share one of ten beginnings, each a block of the KV cache long."""
    drawn = random.Random(0)  # noqa: S311 - not for secrets

    def some(count: int) -> list[int]:
        return [drawn.randrange(10, 40_000) for _ in range(count)]

    shared = [some(32) for _ in range(10)]
    return [(shared[n // 2 % 10] if n % 2 else []) + some(drawn.randint(3, 20)) for n in range(STREAMS)]


@dataclass
class Clients:
    """The streams' side of the server."""

    streams: ModuleType
    api: Any
    prompts: list[list[int]]
    vllm: VllmServer
    measured: list[float]
    """The tolerance of this server, once it has been measured."""

    async def wave(
        self, before: Callable[[], Any], swap: Callable[[], Any], tokens: int, count: int = STREAMS
    ) -> list[Any] | None:
        """Streams that are all open when `swap` is called, or None; `before` makes the model in which they begin.

        Both run in a thread of their own.
        """
        await asyncio.to_thread(before)
        found, all_open = await self.streams.run(
            self.api, self.prompts[:count], tokens, meanwhile=lambda: asyncio.to_thread(swap)
        )
        return list(found) if all_open else None

    def reset(self) -> None:
        """The healthy model, whole."""
        for fault in self.vllm.facts()["faults"]:
            self.vllm.heal(fault["id"])
        self.vllm.set_gates({BLOCK: 1.0})

    async def tolerance(self) -> float:
        """Three times the largest difference from the reference without any swap, or the least one."""
        if not self.measured:
            self.measured.append(await self._tolerance())
        return self.measured[0]

    async def _tolerance(self) -> float:
        found, _ = await self.streams.run(self.api, self.prompts, LENGTHS[0])
        assert not [stream.failed for stream in found if stream.failed]
        known = await self.api.reference(found[:40])
        pairs = zip(found[:40], known, strict=True)
        noise = max(abs(x - y) for stream, row in pairs for x, y in zip(stream.logprobs, row, strict=True))
        return max(3 * noise, float(self.streams.LEAST_TOLERANCE))

    async def judged(self, found: list[Any], before: list[list[float]], after: list[list[float]]) -> Any:
        """The outcome."""
        return self.streams.judge(found, before, after, await self.tolerance())


@pytest.fixture(scope="module")
def measured() -> list[float]:
    """Nothing yet."""
    return []


@pytest.fixture
async def clients(
    streams: ModuleType, server: VllmServer, prompts: list[list[int]], measured: list[float]
) -> AsyncIterator[Clients]:
    """Clients of a healthy server."""
    api = streams.Server(server.url, "smol")
    made = Clients(streams, api, prompts, server, measured)
    yield made
    await api.close()
    made.reset()


Wave = tuple[list[Any], list[list[float]], list[list[float]]]
"""Streams, and their references under the model of before and of after the swap."""


async def _over_a_skip(clients: Clients, tokens: int) -> Wave | None:
    return await _over(clients, tokens, lambda: _gate(clients, 1.0), lambda: _gate(clients, 0.0))


async def _over_an_undo(clients: Clients, tokens: int) -> Wave | None:
    return await _over(clients, tokens, lambda: _gate(clients, 0.0), lambda: _gate(clients, 1.0))


def _gate(clients: Clients, alpha: float) -> None:
    clients.vllm.set_gates({BLOCK: alpha})


async def _over_a_repair(clients: Clients, tokens: int) -> Wave | None:
    def damage() -> None:
        clients.vllm.inject(**FAULT)

    def repair() -> None:
        bad = [(0, chunk["chunk"]) for chunk in clients.vllm.sweep()[0]["bad"]]
        assert bad
        assert all(chunk["intact"] for chunk in clients.vllm.repair(bad)["chunks"])

    return await _over(clients, tokens, damage, repair)


async def _over(clients: Clients, tokens: int, before: Callable[[], Any], swap: Callable[[], Any]) -> Wave | None:
    found = await clients.wave(before, swap, tokens)
    if found is None:
        return None
    after = await clients.api.reference(found)
    before()
    return found, await clients.api.reference(found), after


@pytest.mark.parametrize("over", [_over_a_skip, _over_an_undo, _over_a_repair])
async def test_no_stream_fails_or_is_told_anything_stale(clients: Clients, over: Any) -> None:
    """200 streams over a swap: each ends as asked, and has one position between the two models."""
    across = 0
    for tokens in LENGTHS:
        clients.reset()
        wave = await over(clients, tokens)
        if wave is None:
            continue
        found, before, after = wave
        outcome = await clients.judged(found, before, after)
        assert (outcome.failed, outcome.stale) == ([], [])
        across = outcome.across
        if across == STREAMS:
            break
    assert across == STREAMS, f"too few streams were under way over the swap, also with {tokens} tokens each"
    assert outcome.told_apart > 0.95
    # The same check the other way round finds that no stream went from the second model to the first.
    assert len(clients.streams.judge(found, after, before, 1e-4).stale) == STREAMS


async def test_stale_caches_would_be_seen(clients: Clients, server: VllmServer) -> None:
    """Where a swap leaves the caches as they are, all streams go on, and the check calls them stale."""
    told = Path(server.environment["FLIPWATCH_TESTS_FAIL"] + "-stale")

    def whole() -> None:
        server.set_gates({BLOCK: 1.0})

    def skip_only() -> None:
        told.touch()
        try:
            server.set_gates({BLOCK: 0.0})
        finally:
            told.unlink()

    found = None
    for tokens in LENGTHS:
        found = found or await clients.wave(whole, skip_only, tokens, 40)
    assert found is not None, "not all streams were open at once"
    server.set_gates({BLOCK: 0.0})
    after = await clients.api.reference(found)
    whole()
    before = await clients.api.reference(found)
    outcome = await clients.judged(found, before, after)
    assert outcome.failed == []
    assert len(outcome.stale) > 35
