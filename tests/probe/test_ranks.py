"""Ranks in step, without vLLM: four processes over gloo, two stages of two tensor-parallel ranks each."""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from flipwatch.probe.ranks import PeerFailed, Ranks

STAGES, WIDTH = 2, 2
SIZE = STAGES * WIDTH
# All in one run: each shows that the one before left nobody behind.
Act = Callable[[Ranks, int], Any]


class _Pipeline:
    """vLLM's coordinator, as far as it is used."""

    def __init__(self, group: Any, ranks: list[int]) -> None:
        self._group, self._ranks = group, ranks

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        torch.distributed.broadcast(tensor, self._ranks[src], group=self._group)
        return tensor


def _mine(members: list[list[int]], rank: int) -> tuple[Any, list[int]]:
    groups = [(torch.distributed.new_group(ranks), ranks) for ranks in members]
    return next(pair for pair in groups if rank in pair[1])


def _rank(number: int, store: str, out: Any) -> None:
    """One process."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=number, world_size=SIZE, timeout=timedelta(seconds=100)
    )
    tensor, _ = _mine([[0, 1], [2, 3]], number)
    pipeline, members = _mine([[0, 2], [1, 3]], number)
    ranks = Ranks(number // WIDTH, STAGES, [tensor, pipeline], _Pipeline(pipeline, members))
    said = {}
    for act in ACTS:
        try:
            with ranks.together():
                result = act(ranks, number)
        except PeerFailed:
            result = "followed"
        except Exception as error:
            result = str(error)
        said[act.__name__] = result
    out.put((number, said))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank said of each act."""
    store = str(tmp_path_factory.mktemp("store") / "file")
    spawn = multiprocessing.get_context("spawn")
    out = spawn.Queue()
    processes = [spawn.Process(target=_rank, args=(number, store, out)) for number in range(SIZE)]
    for process in processes:
        process.start()
    try:
        found = dict(out.get(timeout=200) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()
    return {act.__name__: [found[number][act.__name__] for number in range(SIZE)] for act in ACTS}


def shares(ranks: Ranks, number: int) -> list[float]:
    """Stage 1 computes, each of its ranks for its own column."""
    tensor = ranks.share(1, torch.empty(2), lambda: torch.tensor([1.0, number]))
    return [float(x) for x in tensor]


def fails_while_it_computes(ranks: Ranks, number: int) -> None:
    """Rank 2 fails where rank 0 waits for its tensor."""

    def fail() -> torch.Tensor:
        if number == 2:
            raise RuntimeError("boom")
        return torch.ones(2)

    ranks.share(0, torch.empty(2), lambda: torch.ones(2))
    ranks.share(1, torch.empty(2), fail)


def fails_before(ranks: Ranks, number: int) -> None:
    """Rank 3 fails on its own, before the others have come to anything that they do together."""
    if number == 3:
        raise RuntimeError("boom")
    ranks.share(0, torch.empty(2), lambda: torch.ones(2))


def fails_at_the_end(ranks: Ranks, number: int) -> None:
    """Rank 0 fails when the others are done."""
    ranks.share(0, torch.empty(2), lambda: torch.ones(2))
    if number == 0:
        raise RuntimeError("boom")


def makes_another_shape(ranks: Ranks, number: int) -> None:
    """Stage 0 makes something that the others do not wait for."""
    ranks.share(0, torch.empty(2), lambda: torch.ones(3))


def all_fail(ranks: Ranks, number: int) -> None:
    """Every rank refuses by itself."""
    raise ValueError(f"no from {number}")


def gathers(ranks: Ranks, number: int) -> list[int]:
    """Everybody says its number."""
    return ranks.gathered(number)


ACTS: list[Act] = [
    shares,
    fails_while_it_computes,
    fails_before,
    fails_at_the_end,
    makes_another_shape,
    all_fail,
    gathers,
]


def test_what_one_stage_computes_is_on_all(said: dict[str, list[Any]]) -> None:
    """A shared tensor has the values of the stage that computed it, column by column."""
    assert said["shares"] == [[1.0, 2.0], [1.0, 3.0], [1.0, 2.0], [1.0, 3.0]]


@pytest.mark.parametrize(
    ("name", "failing"), [("fails_while_it_computes", 2), ("fails_before", 3), ("fails_at_the_end", 0)]
)
def test_where_one_fails_all_stop(name: str, failing: int, said: dict[str, list[Any]]) -> None:
    """Wherever a rank fails, the others stop with it and nobody waits; the failing one keeps its reason."""
    assert said[name] == ["boom" if number == failing else "followed" for number in range(SIZE)]


def test_a_wrong_shape_is_an_error_not_a_wait(said: dict[str, list[Any]]) -> None:
    """A stage that makes another shape than the others wait for fails by itself."""
    here, there = said["makes_another_shape"][:WIDTH], said["makes_another_shape"][WIDTH:]
    assert all("(3,)" in reason for reason in here)
    assert there == ["followed"] * WIDTH


def test_each_rank_keeps_its_own_reason(said: dict[str, list[Any]]) -> None:
    """Where all refuse, each says why."""
    assert said["all_fail"] == [f"no from {number}" for number in range(SIZE)]


def test_what_all_say_comes_in_the_order_of_the_ranks(said: dict[str, list[Any]]) -> None:
    """After all those failures, everybody still hears everybody."""
    assert said["gathers"] == [[0, 1, 2, 3]] * SIZE


def test_one_rank_needs_nobody() -> None:
    """A single rank works without any group."""
    alone = Ranks(0, 1, [], None)
    with alone.together():
        assert alone.gathered("me") == ["me"]
    with pytest.raises(ValueError, match="mine"), alone.together():
        raise ValueError("mine")
