"""Two pipeline stages on CPU, a tiny random Llama of 5 layers: 3 on the first, 2 on the second.

Compiled, since vLLM 0.32's CPU build runs pipelines compiled only.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flipwatch.monitors.fingerprint.facts import COMPARE, CORRECT

from ..vllm_server import VllmServer
from .reference import Reference, largest_difference
from .tiny import make

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEXT = "The quick brown fox jumps over the lazy dog and runs away from the old grey wolf in the woods."
BLOCKS = 5
ALPHAS = [0.0, 0.7]


@pytest.fixture(scope="module")
def folder(smol: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint."""
    return make("llama", smol, tmp_path_factory.mktemp("tiny"), num_hidden_layers=BLOCKS)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """The same model in transformers."""
    return Reference(folder)


@pytest.fixture(scope="module")
def one_rank(folder: Path, test_environment: Callable[..., dict[str, str]]) -> dict[str, Any]:
    """The reading of one scan by the same vLLM on one rank."""
    with VllmServer(folder, ["--enforce-eager", "--dtype", "float32"], test_environment()) as server:
        tokens = [server.tokens(TEXT), server.tokens("Water boils at")]
        return {"tokens": tokens, "reading": server.measure(tokens, ALPHAS)}


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files with this name and something behind it make rank 1 fail."""
    return tmp_path_factory.mktemp("switch") / "fail"


@pytest.fixture(scope="module")
def two_stages(folder: Path, switch: Path, test_environment: Callable[..., dict[str, str]]) -> Iterator[VllmServer]:
    """Pipeline parallel 2, its gates tested in the compiled code."""
    environment = test_environment(
        "failing_rank",
        "failing_block",
        "stuck_gate",
        "flip_on_rank",
        FLIPWATCH_TESTS_FAIL=str(switch),
        VLLM_USE_AOT_COMPILE="0",
    )
    with VllmServer(folder, ["--dtype", "float32", "--pipeline-parallel-size", "2"], environment) as server:
        facts = server.facts()
        assert (facts["refusal"], facts["scan_refusal"], facts["mode"]) == (None, None, "compiled")
        assert (facts["pipeline_parallel_size"], facts["gates"]) == (2, [1.0] * BLOCKS)
        result = server.self_test()
        assert result["state"] == "passed", result
        assert "All 5 gates" in result["reason"]
        yield server


def test_a_scan_equals_that_of_one_rank(two_stages: VllmServer, one_rank: dict[str, Any]) -> None:
    """Base loss and every score of two stages equal those of one rank, and what the compiled code serves."""
    before = two_stages.outputs([TEXT])
    reading = two_stages.measure(one_rank["tokens"], ALPHAS)
    alone = one_rank["reading"]
    assert reading["base_nats"] == pytest.approx(alone["base_nats"], abs=1e-4)
    assert len(reading["nats"]) == BLOCKS
    for ours, theirs in zip(reading["nats"], alone["nats"], strict=True):
        assert ours == [pytest.approx(row, abs=1e-4) for row in theirs]
    served = two_stages.prompt_logprobs(one_rank["tokens"][0])
    assert reading["base_nats"][0] == pytest.approx(-sum(served) / len(served), abs=1e-3)
    assert two_stages.outputs([TEXT]) == before


def test_skip_on_each_stage_and_undo(two_stages: VllmServer, reference: Reference) -> None:
    """A block skipped on either stage equals the model without it; undone, outputs are as before bit for bit."""
    tokens = two_stages.tokens(TEXT)
    before = two_stages.outputs([TEXT])
    for block in (0, 2, 3, 4):
        gates = two_stages.set_gates({block: 0.0})["gates"]
        assert gates == [0.0 if index == block else 1.0 for index in range(BLOCKS)]
        assert largest_difference(two_stages.prompt_logprobs(tokens), reference.logprobs(tokens, block, 0.0)) < 1e-3
        two_stages.set_gates({block: 1.0})
    two_stages.set_gates({2: 0.0, 3: 0.0})
    assert two_stages.facts()["gates"] == [1.0, 1.0, 0.0, 0.0, 1.0]
    two_stages.set_gates({2: 1.0, 3: 1.0})
    assert two_stages.outputs([TEXT]) == before


def test_a_scan_goes_on_under_a_gate_of_the_other_stage(two_stages: VllmServer, reference: Reference) -> None:
    """What is measured is the model as it is gated, whichever stage holds the gate."""
    tokens = two_stages.tokens(TEXT)
    two_stages.set_gates({4: 0.0})
    try:
        reading = two_stages.measure([tokens])
        expected = reference.logprobs(tokens, 4, 0.0)
        assert reading["base_nats"][0] == pytest.approx(-sum(expected) / len(expected), abs=1e-3)
        assert reading["gates"] == [1.0, 1.0, 1.0, 1.0, 0.0]
    finally:
        two_stages.set_gates({4: 1.0})


@pytest.mark.parametrize("block", [1, 4])
def test_a_harmful_block_is_seen_on_either_stage(two_stages: VllmServer, block: int) -> None:
    """NaN in a block is named by the scan, whichever stage holds it; skipped it is gone, healed all is as before."""
    before = two_stages.outputs([TEXT])
    tokens = two_stages.tokens(TEXT)
    fault = two_stages.inject(block=block, tensor="mlp.down_proj", kind="nan", count=1000)
    assert [one["block"] for one in two_stages.facts()["faults"]] == [block]
    reading = two_stages.measure([tokens])
    assert reading["nonfinite_blocks"] == [block]
    assert reading["base_nats"] == [None]
    two_stages.set_gates({block: 0.0})
    assert two_stages.measure([tokens])["base_nats"][0] is not None
    two_stages.heal(fault)
    two_stages.set_gates({block: 1.0})
    assert two_stages.facts()["faults"] == []
    assert two_stages.outputs([TEXT]) == before


def test_a_fault_that_no_stage_can_take(two_stages: VllmServer) -> None:
    """A block or a tensor that is nowhere is refused in words; one outside the blocks goes to the stage that has it."""
    for order, part in (
        ({"block": 9, "tensor": "mlp.down_proj"}, "Block 9 does not exist"),
        ({"block": 4, "tensor": "mlp.nothing"}, "rank 1: Tensor 'mlp.nothing' of block 4 is not there"),
        ({"tensor": "nothing"}, "outside the blocks is not there"),
    ):
        reply = two_stages.probe.post("/faults", json=order | {"kind": "lost"})
        assert (reply.status_code, part in reply.json()["detail"]) == (404, True), reply.text
    assert two_stages.probe.delete("/faults/none").status_code == 404
    before = two_stages.outputs([TEXT])
    for tensor in ("embed_tokens", "lm_head"):
        fault = two_stages.inject(tensor=tensor, kind="lost")
        assert two_stages.outputs([TEXT]) != before
        two_stages.heal(fault)
    assert two_stages.outputs([TEXT]) == before


def test_a_flip_on_the_second_stage_is_found_and_repaired(two_stages: VllmServer, switch: Path) -> None:
    """Each stage sweeps its own weights; a fault is named with its rank and put right there."""
    before = two_stages.outputs([TEXT])
    seals = two_stages.integrity()["ranks"]
    assert [seal["rank"] for seal in seals] == [
        {"rank": rank, "data": 0, "pipeline": rank, "tensor": 0} for rank in (0, 1)
    ]
    assert all(seal["covered_bytes"] > 0 and not seal["not_covered"] for seal in seals)
    Path(f"{switch}-flip").touch()
    two_stages.facts()
    first, second = two_stages.sweep()
    assert (first["bad_chunks"], second["bad_chunks"]) == (0, 1)
    (bad,) = second["bad"]
    assert [piece["tensor"] for piece in bad["pieces"]] == ["model.layers.3.mlp.down_proj.weight"]
    (chunk,) = two_stages.repair([(1, bad["chunk"])])["chunks"]
    assert (chunk["rank"], chunk["intact"], chunk["method"]) == (1, True, "parity")
    assert [rank["bad_chunks"] for rank in two_stages.sweep()] == [0, 0]
    assert two_stages.outputs([TEXT]) == before


def test_memory_against_the_checkpoint(two_stages: VllmServer) -> None:
    """Both stages compare their own blocks, in the same number of steps; one tensor of each can be corrected."""
    ranks = two_stages.reading(COMPARE, {"steps": 4}, steps=1)["ranks"]
    assert [rank["different"] for rank in ranks] == [[], []]
    assert [rank["equal"] > 0 for rank in ranks] == [True, True]
    names = ["model.layers.0.mlp.down_proj.weight", "lm_head.weight"]
    corrected = two_stages.reading(CORRECT, {"tensors": names})["ranks"]
    assert [rank["refused"] for rank in corrected] == [[], []]
    reply = two_stages.probe.post("/measurements", json={"monitor": CORRECT, "plan": {"tensors": ["nothing"]}})
    assert (reply.status_code, "no tensor 'nothing'" in reply.json()["detail"]) == (404, True)


def test_a_stage_that_fails_is_named_and_nobody_waits(two_stages: VllmServer, switch: Path) -> None:
    """A block that fails on one stage while the other waits for it: the error names the rank, and all goes on."""
    before = two_stages.outputs([TEXT])
    tokens = two_stages.tokens(TEXT)
    fails = Path(f"{switch}-block")
    plan = {"alphas": [0.0], "tokens": [tokens], "scored_from": [1], "tokens_per_step": 512}
    for _ in range(2):
        id = two_stages.probe.post("/measurements", json={"monitor": "alpha_scan", "plan": plan}).json()["id"]
        fails.touch()
        try:
            reply = two_stages.probe.post(f"/measurements/{id}/advance", json={"steps": 20})
        finally:
            fails.unlink()
        assert reply.status_code == 502
        assert reply.json()["detail"] == "1 of 2 ranks failed. rank 1: RuntimeError: made to fail by a test"
        # The measurement is gone on both, also where nothing went wrong.
        assert two_stages.probe.post(f"/measurements/{id}/advance", json={"steps": 1}).status_code == 404
    assert two_stages.outputs([TEXT]) == before
    assert two_stages.measure([tokens])["base_nats"][0] is not None
    assert two_stages.self_test()["state"] == "passed"


def test_gates_and_faults_are_never_half_there(two_stages: VllmServer, switch: Path) -> None:
    """A gate that does not move on one stage is caught and the other stage's is put back; a failed fault is lifted."""
    before = two_stages.outputs([TEXT])
    gates = [{"block": block, "alpha": 0.0} for block in (1, 4)]
    body = {"boot_id": two_stages.facts()["boot_id"], "gates": gates}
    Path(f"{switch}-gate").touch()
    try:
        reply = two_stages.probe.put("/gates", json=body)
    finally:
        Path(f"{switch}-gate").unlink()
    assert reply.status_code == 502
    assert reply.json()["detail"] == "Block 4 reads 1.0 after 0.0 was written. The gates were put back."
    assert two_stages.facts()["gates"] == [1.0] * BLOCKS
    switch.touch()
    try:
        reply = two_stages.probe.post("/faults", json={"block": 1, "tensor": "mlp.down_proj", "kind": "lost"})
        assert "1 of 2 ranks failed. rank 1: RuntimeError" in reply.json()["detail"]
    finally:
        switch.unlink()
    assert two_stages.facts()["faults"] == []
    assert two_stages.outputs([TEXT]) == before


def test_blocks_alone_are_refused(two_stages: VllmServer) -> None:
    """The differential monitor says that it does not work over a pipeline."""
    order = {"monitor": "differential", "plan": {"tokens": [[1, 2]], "checkpoint": True}}
    reply = two_stages.probe.post("/measurements", json=order)
    assert (reply.status_code, "2 pipeline stages" in reply.json()["detail"]) == (501, True)
