"""The probe over pipeline stages, without an engine: see staged.py.  test_pipeline_parallel.py has the real one."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flipwatch.monitors.wire import FaultOrder, Gate, GateChange, MeasureOrder
from flipwatch.probe.engine import ProbeError

from .staged import BLOCKS, Stages

# Importing vLLM's models warns of what torch will drop.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PLAN = {"alphas": [0.0, 0.7], "tokens": [[1, 2, 3, 4, 5], [7, 8, 9]], "scored_from": [1, 1], "tokens_per_step": 64}


@pytest.fixture(autouse=True, scope="module")
def faults_allowed() -> Iterator[None]:
    """The processes may damage their weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLIPWATCH_FAULTS", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


async def _scan(stages: Stages, steps: int = 7, **order: Any) -> dict[str, Any]:
    """A whole reading."""
    await stages.live.open("scan", MeasureOrder(monitor="alpha_scan", plan=PLAN, **order))
    while (progress := await stages.live.advance("scan", steps, 0.0)).reading is None:
        pass
    return dict(progress.reading)


async def _gate(stages: Stages, block: int, alpha: float) -> list[float]:
    boot_id = (await stages.live.facts()).boot_id
    report = await stages.live.set_gates(GateChange(boot_id=boot_id, gates=[Gate(block=block, alpha=alpha)]))
    return report.gates


async def _everything(stages: Stages) -> dict[str, Any]:
    """Readings that must not depend on the number of stages."""
    facts = await stages.live.facts()
    assert (facts.refusal, facts.scan_refusal, facts.num_blocks, facts.layer_class) == (None, None, BLOCKS, "Layer")
    tested = await stages.live.self_test()
    found = {"self_test": tested.model_dump(), "scan": await _scan(stages)}
    found["as if"] = await _scan(stages, as_if=[Gate(block=3, alpha=0.5)])
    for block in (1, 4):
        found[f"without {block}"] = await _gate(stages, block, 0.0), await _scan(stages)
        await _gate(stages, block, 1.0)
        fault = await stages.live.add_fault("fault", FaultOrder(block=block, tensor="up", kind="nan", count=4))
        assert [one.id for one in (await stages.live.facts()).faults] == [fault.id]
        found[f"fault in {block}"] = await _scan(stages)
        await stages.live.remove_fault(fault.id)
    for tensor in ("embed", "head"):
        fault = await stages.live.add_fault("fault", FaultOrder(tensor=tensor, kind="lost"))
        found[f"fault in {tensor}"] = await _scan(stages)
        await stages.live.remove_fault(fault.id)
    assert await _scan(stages) == found["scan"]
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank measures."""
    with closing(Stages(1, tmp_path_factory.mktemp("one"))) as stages:
        return asyncio.run(_everything(stages))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    """Blocks 0 to 2, and 3 and 4."""
    with closing(Stages(2, tmp_path_factory.mktemp("two"))) as stages:
        yield stages


def test_one_rank_measures_what_the_faults_do(one: dict[str, Any]) -> None:
    """What the stages are held against: gates act, faults show, NaN is named with its block."""
    assert one["self_test"]["state"] == "passed"
    assert one["scan"]["gates"] == [1.0] * BLOCKS
    assert one["as if"]["gates"][3] == 0.5
    assert one["as if"]["base_nats"] != one["scan"]["base_nats"]
    assert [one[f"fault in {block}"]["nonfinite_blocks"] for block in (1, 4)] == [[1], [4]]
    assert one["fault in head"]["base_nats"] != one["scan"]["base_nats"] != one["fault in embed"]["base_nats"]
    for block in (1, 4):
        gates, reading = one[f"without {block}"]
        assert gates == [0.0 if index == block else 1.0 for index in range(BLOCKS)]
        assert reading["base_nats"] == [nats[0] for nats in zip(*one["scan"]["nats"][block][:1], strict=True)]


def test_two_stages_measure_the_same(one: dict[str, Any], two: Stages) -> None:
    """Every number of two stages is that of one rank, bit for bit: gates, scans, faults on either stage."""
    assert asyncio.run(_everything(two)) == one


def test_three_stages_measure_the_same(one: dict[str, Any], tmp_path: Path) -> None:
    """A stage in the middle has neither embedding nor head."""
    with closing(Stages(3, tmp_path)) as three:
        assert asyncio.run(_everything(three)) == one


def test_a_stage_that_fails_is_named_and_nobody_waits(one: dict[str, Any], two: Stages) -> None:
    """Whichever stage fails in the middle of a scan: the error names it, the scan is gone, the next one works."""

    async def act(rank: int) -> None:
        await two.live.open("scan", MeasureOrder(monitor="alpha_scan", plan=PLAN))
        two.fail(rank, now=True)
        with pytest.raises(ProbeError) as caught:
            await two.live.advance("scan", 100, 0.0)
        two.fail(rank, now=False)
        detail = f"1 of 2 ranks failed. rank {rank}: RuntimeError: made to fail by a test"
        assert (caught.value.problem.status, caught.value.problem.detail) == (502, detail)
        with pytest.raises(ProbeError) as caught:
            await two.live.advance("scan", 1, 0.0)
        assert caught.value.problem.status == 404
        assert await _scan(two) == one["scan"]

    for rank in (0, 1):
        asyncio.run(act(rank))


def test_what_no_stage_has_is_refused_in_words(two: Stages) -> None:
    """A block or tensor that is nowhere is the caller's mistake; what lies on one stage is not missed on the other."""

    async def refused(order: dict[str, Any]) -> str:
        with pytest.raises(ProbeError) as caught:
            await two.live.add_fault("fault", FaultOrder(**order, kind="lost"))
        assert caught.value.problem.status == 404
        return caught.value.problem.detail

    assert asyncio.run(refused({"block": 9, "tensor": "up"})) == "Block 9 does not exist; this model has 5 blocks."
    assert "rank 1: Tensor 'down' of block 4 is not there" in asyncio.run(refused({"block": 4, "tensor": "down"}))


def test_what_one_stage_refuses_the_server_refuses(tmp_path: Path) -> None:
    """Layers of an unknown form on the second stage alone: a refusal with the rank's name, and no rank waits."""

    async def act(stages: Stages) -> None:
        facts = await stages.live.facts()
        assert not facts.armed
        assert facts.refusal is not None
        assert facts.refusal.startswith("Rank 1: Layer class Layer returns list")
        with pytest.raises(ProbeError, match="rank 1: Layer class Layer returns list"):
            await _scan(stages)
        with pytest.raises(ProbeError, match="rank 1: Layer class Layer returns list"):
            await stages.live.self_test()
        with pytest.raises(ProbeError, match="Rank 1"):
            await _gate(stages, 0, 0.0)

    with closing(Stages(2, tmp_path, odd_stage=1)) as stages:
        asyncio.run(act(stages))
