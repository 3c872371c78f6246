"""Two tensor-parallel ranks on CPU, a tiny random Llama of 8 heads."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flipwatch.monitors.differential.facts import DifferentialPlan
from flipwatch.monitors.differential.monitor import Differential
from flipwatch.monitors.differential.reference import Recording
from flipwatch.monitors.finding import Health
from flipwatch.probe.local import run_measurement
from flipwatch.probe.local_dissection import LocalDissection

from ..vllm_server import VllmServer
from .reference import Reference, largest_difference
from .states import against_checkpoint, against_recording, conditions, recorded
from .tiny import make

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEXT = "The quick brown fox jumps over the lazy dog and runs away from the old grey wolf in the woods."


@pytest.fixture(scope="module")
def folder(smol: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint."""
    return make("llama", smol, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, rank 1 fails."""
    return tmp_path_factory.mktemp("switch") / "fail"


@pytest.fixture(scope="module")
def two_ranks(folder: Path, switch: Path, test_environment: Callable[..., dict[str, str]]) -> Iterator[VllmServer]:
    """Tensor parallel 2, one thread each."""
    arguments = ["--enforce-eager", "--dtype", "float32", "--tensor-parallel-size", "2"]
    environment = test_environment(
        "failing_rank",
        "stuck_gate",
        "flip_on_rank",
        FLIPWATCH_TESTS_FAIL=str(switch),
        # For vLLM's own /pause, with which an operator's weight update begins.  Flipwatch needs no dev mode.
        VLLM_SERVER_DEV_MODE="1",
    )
    with VllmServer(folder, arguments, environment) as server:
        assert server.self_test()["state"] == "passed"
        yield server


def test_skip_and_scan_on_two_ranks(two_ranks: VllmServer, folder: Path) -> None:
    """Gates and losses over two ranks equal Hugging Face's."""
    reference = Reference(folder)
    tokens = two_ranks.tokens(TEXT)
    before = two_ranks.prompt_logprobs(tokens)
    reading = two_ranks.measure([tokens], [0.0, 0.7])
    for block in (0, 3, 5):
        for index, alpha in enumerate([0.0, 0.7]):
            expected = reference.logprobs(tokens, block, alpha)
            assert reading["nats"][block][index][0] == pytest.approx(-sum(expected) / len(expected), abs=1e-3)
    two_ranks.set_gates({3: 0.0})
    assert largest_difference(two_ranks.prompt_logprobs(tokens), reference.logprobs(tokens, 3, 0.0)) < 1e-3
    two_ranks.set_gates({3: 1.0})
    assert two_ranks.prompt_logprobs(tokens) == before


def test_scores_equal_those_of_one_rank(
    two_ranks: VllmServer, folder: Path, test_environment: Callable[..., dict[str, str]]
) -> None:
    """Base loss and every score of two ranks equal those of the same vLLM on one rank."""
    tokens, alphas = [two_ranks.tokens(TEXT), two_ranks.tokens("Water boils at")], [0.0, 0.7]
    with VllmServer(folder, ["--enforce-eager", "--dtype", "float32"], test_environment()) as one_rank:
        alone = one_rank.measure(tokens, alphas)
    reading = two_ranks.measure(tokens, alphas)
    assert reading["base_nats"] == pytest.approx(alone["base_nats"], abs=1e-4)
    for ours, theirs in zip(reading["nats"], alone["nats"], strict=True):
        assert ours == [pytest.approx(row, abs=1e-4) for row in theirs]


def test_failure_of_one_rank_leaves_the_rest_intact(two_ranks: VllmServer, switch: Path) -> None:
    """An RPC that fails on rank 1 is an error that names the rank; later RPCs and serving are as before."""
    before = two_ranks.outputs([TEXT])
    facts = two_ranks.facts()
    assert len(facts["model_digest"]) == 32
    switch.touch()
    try:
        for _ in range(3):
            reply = two_ranks.probe.get("/model")
            assert reply.status_code == 502
            assert "1 of 2 ranks failed" in reply.json()["detail"]
            assert "rank 1: RuntimeError" in reply.json()["detail"]
    finally:
        switch.unlink()
    assert two_ranks.facts() == facts
    assert two_ranks.outputs([TEXT]) == before


def test_gates_are_never_half_applied(two_ranks: VllmServer, switch: Path) -> None:
    """A rank whose gate does not move is caught by the read-back, and the other rank's gate is put back."""
    before = two_ranks.outputs([TEXT])
    boot_id = two_ranks.facts()["boot_id"]
    body = {"boot_id": boot_id, "gates": [{"block": 2, "alpha": 0.0}]}
    Path(f"{switch}-gate").touch()
    try:
        reply = two_ranks.probe.put("/gates", json=body)
        assert reply.status_code == 502
        assert "Rank 1 has block 2 at 1.0" in reply.json()["detail"]
        assert "put back" in reply.json()["detail"]
    finally:
        Path(f"{switch}-gate").unlink()
    assert set(two_ranks.facts()["gates"]) == {1.0}
    assert two_ranks.outputs([TEXT]) == before


def test_faults_are_never_half_there(two_ranks: VllmServer, switch: Path) -> None:
    """A fault that fails on one rank is taken back on the other; one for whole tensors is refused."""
    before = two_ranks.outputs([TEXT])
    order = {"block": 2, "tensor": "mlp.down_proj", "kind": "lost"}
    switch.touch()
    try:
        reply = two_ranks.probe.post("/faults", json=order)
        assert reply.status_code == 502
        assert "rank 1: RuntimeError" in reply.json()["detail"]
    finally:
        switch.unlink()
    assert two_ranks.facts()["faults"] == []
    assert two_ranks.outputs([TEXT]) == before
    two_ranks.heal(two_ranks.inject(**order))
    assert two_ranks.outputs([TEXT]) == before
    reply = two_ranks.probe.post("/faults", json=order | {"kind": "flips", "flips": [[0, 30]]})
    assert reply.status_code == 501
    assert "2 shards" in reply.json()["detail"]


def test_a_flip_on_one_rank_is_named_and_repaired_there(two_ranks: VllmServer, switch: Path) -> None:
    """Bytes are kept apart by rank: the other rank's are neither suspected nor touched."""
    before = two_ranks.outputs([TEXT])
    ranks = [seal["rank"] for seal in two_ranks.integrity()["ranks"]]
    assert ranks == [{"rank": rank, "data": 0, "pipeline": 0, "tensor": rank} for rank in (0, 1)]
    Path(f"{switch}-flip").touch()
    two_ranks.facts()
    assert not Path(f"{switch}-flip").exists()
    assert two_ranks.outputs([TEXT]) != before
    first, second = two_ranks.sweep()
    assert (first["rank"]["rank"], first["bad_chunks"]) == (0, 0)
    assert (second["rank"]["rank"], second["bad_chunks"]) == (1, 1)
    (bad,) = second["bad"]
    assert [piece["tensor"] for piece in bad["pieces"]] == ["model.layers.2.mlp.down_proj.weight"]
    (change,) = bad["diagnoses"][0]["changes"]
    # Byte 1003 is the highest of the fp32 value 250.
    assert change["bits"] == [30]
    (chunk,) = two_ranks.repair([(1, bad["chunk"])])["chunks"]
    assert (chunk["rank"], chunk["intact"], chunk["method"]) == (1, True, "parity")
    assert [rank["bad_chunks"] for rank in two_ranks.sweep()] == [0, 0]
    assert two_ranks.outputs([TEXT]) == before


def test_a_block_on_two_ranks_against_its_references(two_ranks: VllmServer, switch: Path) -> None:
    """Each rank's shards against its own: a flip on one rank is named with block, tensor and element there."""
    recording = recorded(two_ranks)
    assert {against_recording(two_ranks, recording).health, against_checkpoint(two_ranks).health} == {Health.OK}
    Path(f"{switch}-flip").touch()
    two_ranks.facts()
    by_states, by_checkpoint = against_recording(two_ranks, recording), against_checkpoint(two_ranks)
    assert [place.block for place in by_states.places] == [place.block for place in by_checkpoint.places] == [2]
    assert [(spot.sublayer, spot.module) for spot in by_states.locations] == [("mlp", "mlp.down_proj")]
    (spot,) = by_checkpoint.locations
    assert spot.tensor == "model.layers.2.mlp.down_proj.weight"
    assert spot.diagnosis is not None
    assert spot.diagnosis.changes[0].bits == [30]
    two_ranks.repair([(rank["rank"]["rank"], bad["chunk"]) for rank in two_ranks.sweep() for bad in rank["bad"]])
    assert against_checkpoint(two_ranks).health is Health.OK


def test_states_of_another_engine_are_within_rounding(two_ranks: VllmServer, folder: Path) -> None:
    """Recorded by Hugging Face's kernels on one rank: two ranks of vLLM are no fault, and a fault is one."""
    tokens = [two_ranks.tokens(TEXT)]
    here = conditions(two_ranks)
    plan = DifferentialPlan(tokens=tokens, noise=True)
    reading = run_measurement(LocalDissection.load(folder), Differential(), plan)
    there = here.model_copy(update={"engine": "transformers", "tensor_parallel_size": 1})
    recording = Recording(recorded_at=1.0, conditions=there, plan=plan, reading=reading)
    healthy = against_recording(two_ranks, recording)
    assert healthy.health is Health.OK, healthy.reason
    assert all(block.l2 != 0.0 for block in healthy.blocks), "the kernels are the same: this shows nothing"
    fault = two_ranks.inject(block=4, tensor="mlp.gate_up_proj", kind="burst")
    assert [place.block for place in against_recording(two_ranks, recording).places] == [4]
    two_ranks.heal(fault)


def test_a_checkpoint_that_moved_away(two_ranks: VllmServer, folder: Path) -> None:
    """Two bad chunks of one group on each rank need it: without it nothing is written; once it is back all is well."""
    before = two_ranks.outputs([TEXT])
    for block in (1, 2):
        two_ranks.inject(block=block, tensor="mlp.gate_up_proj", kind="burst", seed=block)
    damaged = two_ranks.outputs([TEXT])
    bad = [(rank["rank"]["rank"], chunk["chunk"]) for rank in two_ranks.sweep() for chunk in rank["bad"]]
    assert {rank for rank, _ in bad} == {0, 1}
    away = folder.rename(folder.with_name("moved"))
    try:
        assert two_ranks.probe.get("/checkpoint").json()["refusal"] is not None
        chunks = two_ranks.repair(bad)["chunks"]
        assert not any(chunk["intact"] for chunk in chunks)
        assert all("of the same group" in chunk["reason"] for chunk in chunks)
        assert all("neither a folder" in chunk["reason"] for chunk in chunks)
        assert two_ranks.outputs([TEXT]) == damaged
        order = {"monitor": "differential", "plan": {"tokens": [[1, 2]], "checkpoint": True}}
        reply = two_ranks.probe.post("/measurements", json=order)
        assert (reply.status_code, "neither a folder" in reply.json()["detail"]) == (409, True)
    finally:
        away.rename(folder)
    chunks = two_ranks.repair(bad)["chunks"]
    assert all(chunk["intact"] for chunk in chunks)
    assert {chunk["rank"] for chunk in chunks if chunk["method"] == "checkpoint"} == {0, 1}
    assert [rank["bad_chunks"] for rank in two_ranks.sweep()] == [0, 0]
    assert two_ranks.outputs([TEXT]) == before


def test_paused_server_is_left_alone(two_ranks: VllmServer) -> None:
    """While somebody else has paused vLLM, nothing is read, measured or changed, and the pause stays theirs."""
    before = two_ranks.outputs([TEXT])
    facts = two_ranks.facts()
    body = {"boot_id": facts["boot_id"], "gates": [{"block": 2, "alpha": 0.0}]}
    assert two_ranks.client.post("/pause", params={"mode": "keep"}).status_code == 200
    try:
        for reply in (two_ranks.probe.get("/model"), two_ranks.probe.put("/gates", json=body)):
            assert reply.status_code == 503
            assert "paused by somebody else" in reply.json()["detail"]
        assert two_ranks.client.get("/is_paused").json()["is_paused"]
    finally:
        assert two_ranks.client.post("/resume").status_code == 200
    assert two_ranks.facts() == facts
    assert two_ranks.outputs([TEXT]) == before
