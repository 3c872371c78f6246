"""A live vLLM's blocks run alone: against states recorded when it was healthy, and against its checkpoint."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flipwatch.monitors.differential.finding import DifferentialFinding
from flipwatch.monitors.differential.reference import Recording
from flipwatch.monitors.finding import Action, Health

from ..vllm_server import VllmServer
from .states import against_checkpoint, against_recording, recorded

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def recording(eager: VllmServer) -> Recording:
    """Of the healthy server."""
    return recorded(eager)


@pytest.fixture
def sealed(healthy: VllmServer) -> Iterator[VllmServer]:
    """The eager server; behind the test its bytes are those of the baseline again."""
    yield healthy
    bad = [(rank["rank"]["rank"], chunk["chunk"]) for rank in healthy.sweep() for chunk in rank["bad"]]
    if bad:
        healthy.repair(bad)
    assert [chunk for rank in healthy.sweep() for chunk in rank["bad"]] == []


def test_a_healthy_server_is_that_of_its_references(sealed: VllmServer, recording: Recording) -> None:
    """Bit for bit: nothing is allowed, since the machine repeats itself, and nothing departs."""
    for finding in (against_recording(sealed, recording), against_checkpoint(sealed)):
        assert (finding.health, finding.action, finding.locations) == (Health.OK, Action.NONE, ())
        assert [block.l2 for block in finding.blocks] == [0.0] * 30
        assert [block.allowed for block in finding.blocks] == [0.0] * 30
    assert finding.effort.brute_force == 30 * 6
    assert finding.not_comparable == ()


def test_a_measurement_changes_no_token(sealed: VllmServer, prompts: list[str], recording: Recording) -> None:
    """While requests are served: their output is that of before, and the measurement's that of a quiet server."""
    expected = sealed.outputs(prompts)
    findings: list[DifferentialFinding] = []
    stop = threading.Event()

    def keep_measuring() -> None:
        while not stop.is_set():
            findings.append(against_recording(sealed, recording))
            findings.append(against_checkpoint(sealed))

    thread = threading.Thread(target=keep_measuring)
    thread.start()
    try:
        while len(findings) < 4:
            assert thread.is_alive(), "a measurement failed"
            assert sealed.outputs(prompts) == expected
    finally:
        stop.set()
        thread.join()
    assert {finding.health for finding in findings} == {Health.OK}
    assert sealed.sweep()[0]["bad_chunks"] == 0


def test_several_faults_are_found_in_one_pass(sealed: VllmServer, recording: Recording) -> None:
    """In the first block, in the last one, NaN in between: each named down to its element, and no other block."""
    faults = [
        (0, "self_attn.k_proj", "burst", "self_attn", "self_attn.qkv_proj", ("k_proj",)),
        (9, "input_layernorm", "nan", "input_layernorm", "input_layernorm", ()),
        (17, "mlp.up_proj", "bit", "mlp", "mlp.gate_up_proj", ("up_proj",)),
        (29, "mlp.down_proj", "zeros", "mlp", "mlp.down_proj", ()),
    ]
    for seed, (block, tensor, kind, *_) in enumerate(faults):
        sealed.inject(block=block, tensor=tensor, kind=kind, seed=seed)
    by_states, by_checkpoint = against_recording(sealed, recording), against_checkpoint(sealed)
    for finding in (by_states, by_checkpoint):
        assert finding.health is Health.FAILED
        assert [place.block for place in finding.places] == [0, 9, 17, 29]
        found = [(spot.block, spot.sublayer, spot.module) for spot in finding.locations]
        assert found == [(block, sublayer, module) for block, _, _, sublayer, module, _ in faults]
    assert by_checkpoint.action is Action.REPAIR
    assert [spot.parts for spot in by_checkpoint.locations] == [parts for *_, parts in faults]
    counts = {fault["tensor"]: fault["count"] for fault in sealed.facts()["faults"]}
    for spot in by_checkpoint.locations:
        assert spot.tensor == f"model.layers.{spot.block}.{spot.module}.weight"
        assert spot.diagnosis is not None
        assert spot.diagnosis.elements == counts[spot.tensor]
        # Blocks, the children of one of them, and the tensor.
        assert spot.comparisons <= 30 + 4 + 1


def test_a_skipped_block_is_judged_alone(sealed: VllmServer, recording: Recording) -> None:
    """Its gate is taken as 1, whatever is served: that it is right again is seen before it runs again."""
    sealed.set_gates({5: 0.0})
    healthy = [against_recording(sealed, recording), against_checkpoint(sealed)]
    assert [(finding.health, finding.blocks[5].gate, finding.blocks[5].l2) for finding in healthy] == [
        (Health.OK, 0.0, 0.0)
    ] * 2
    sealed.inject(block=5, tensor="mlp.down_proj", kind="burst")
    broken = [against_recording(sealed, recording), against_checkpoint(sealed)]
    assert [[place.block for place in finding.places] for finding in broken] == [[5], [5]]
    assert sealed.facts()["gates"][5] == 0.0


def test_damage_older_than_the_baseline_is_put_right(sealed: VllmServer, prompts: list[str]) -> None:
    """The fingerprint has approved it, the checkpoint has not: corrected, repaired, and greedy output is as it was."""
    expected = sealed.outputs(prompts[:2])
    sealed.inject(block=21, tensor="self_attn.o_proj", kind="burst", seed=8)
    sealed.reading("fingerprint-record", {"steps": 50})
    assert sealed.sweep()[0]["bad_chunks"] == 0
    (spot,) = against_checkpoint(sealed).locations
    assert spot.tensor == "model.layers.21.self_attn.o_proj.weight"
    damaged = sealed.outputs(prompts[:2])
    (rank,) = sealed.reading("fingerprint-correct", {"tensors": [spot.tensor]})["ranks"]
    assert (rank["corrected"], rank["refused"]) == ([spot.tensor], [])
    assert sealed.outputs(prompts[:2]) == damaged, "correcting has changed the served weights"
    bad = [(0, chunk["chunk"]) for chunk in sealed.sweep()[0]["bad"]]
    assert {chunk["method"] for chunk in sealed.repair(bad)["chunks"]} == {"parity"}
    assert sealed.outputs(prompts[:2]) == expected
    assert against_checkpoint(sealed).health is Health.OK
    # A right baseline stays as it is.
    (rank,) = sealed.reading("fingerprint-correct", {"tensors": [spot.tensor]})["ranks"]
    assert (rank["corrected"], rank["refused"]) == ([], [])


def test_wrong_plans_are_refused(sealed: VllmServer, recording: Recording) -> None:
    """Inputs of another model, a type that is none, too many tokens, a tensor that is not there: one sentence each."""
    right: dict[str, Any] = recording.replay().model_dump(mode="json")
    for change, status, words in [
        ({"inputs": right["inputs"][:-1]}, 422, "inputs for 29 blocks"),
        ({"inputs": [text[:8] for text in right["inputs"]]}, 422, "block 0 has"),
        ({"inputs_dtype": "int8"}, 422, "inputs_dtype"),
        ({"checkpoint": True}, 422, "exclude each other"),
        ({"tokens": [[1, 2]] * 5000}, 422, "more than this server takes"),
        ({"tokens": [[1, 10**6]]}, 422, "vocabulary"),
    ]:
        begun = sealed.probe.post("/measurements", json={"monitor": "differential", "plan": {**right, **change}})
        assert (begun.status_code, words in begun.json()["detail"]) == (status, True), begun.text
    reply = sealed.probe.post(
        "/measurements", json={"monitor": "fingerprint-correct", "plan": {"tensors": ["model.x"]}}
    )
    assert (reply.status_code, "There is no tensor 'model.x'" in reply.json()["detail"]) == (404, True)
    assert against_recording(sealed, recording).health is Health.OK
