"""Gates and scans on a live vLLM in eager mode, fp32."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flipwatch.monitors.faults import FaultSpec, inject

from ..vllm_server import VllmServer
from .reference import Reference, largest_difference

pytestmark = pytest.mark.vllm


def test_gates_at_one_change_no_bit(
    healthy: VllmServer, prompts: list[str], smol: Path, test_environment: Callable[..., dict[str, str]]
) -> None:
    """With all gates at 1, tokens and logprobs equal those of vLLM without Flipwatch, bit for bit."""
    environment = test_environment("inplace_norm", flipwatch=False)
    with VllmServer(smol, healthy.arguments, environment) as plain:
        assert plain.probe.get("/model").status_code == 404
        expected = plain.outputs(prompts)
    assert healthy.outputs(prompts) == expected


@pytest.mark.parametrize("block", [0, 12, 29])
def test_skip_equals_model_without_the_block(
    healthy: VllmServer, prompts: list[str], reference: Reference, block: int
) -> None:
    """Skipping a block gives the logprobs of the model without that layer, and undo restores every bit."""
    before = healthy.outputs(prompts)
    sequences = [healthy.tokens(prompt) for prompt in prompts]
    report = healthy.set_gates({block: 0.0})
    assert report["gates"] == [0.0 if index == block else 1.0 for index in range(30)]
    for tokens in sequences:
        assert largest_difference(healthy.prompt_logprobs(tokens), reference.logprobs(tokens, block, 0.0)) < 1e-3
    assert healthy.outputs(prompts) != before
    healthy.set_gates({block: 1.0})
    assert healthy.outputs(prompts) == before


def test_attenuation_scales_the_contribution(healthy: VllmServer, prompts: list[str], reference: Reference) -> None:
    """A gate of 0.5 gives the logprobs of the model whose layer adds half as much."""
    tokens = healthy.tokens(prompts[3])
    healthy.set_gates({7: 0.5})
    assert largest_difference(healthy.prompt_logprobs(tokens), reference.logprobs(tokens, 7, 0.5)) < 1e-3


def test_measurement_as_if_other_gates_stood(healthy: VllmServer, prompts: list[str]) -> None:
    """The model of before a skip can still be measured behind it, bit for bit, and the one of after before it."""
    tokens = [healthy.tokens(prompt) for prompt in prompts[:2]]
    whole = healthy.measure(tokens)
    ahead = healthy.measure(tokens, as_if=[{"block": 12, "alpha": 0.0}])
    weaker = healthy.measure(tokens, as_if=[{"block": 12, "alpha": 0.5}])
    healthy.set_gates({12: 0.5})
    # A gate blends both parts of the stream, a view their sum: rounding differs.
    assert healthy.measure(tokens)["base_nats"] == pytest.approx(weaker["base_nats"], abs=1e-5)
    healthy.set_gates({12: 0.0})
    skipped = healthy.measure(tokens)
    assert skipped == ahead
    assert len({loss for reading in (whole, weaker, skipped) for loss in reading["base_nats"]}) == 6
    assert healthy.measure(tokens, as_if=[{"block": 12, "alpha": 1.0}]) == whole
    assert healthy.measure(tokens) == skipped
    healthy.inject(block=12, tensor="mlp.down_proj", kind="nan", count=1000)
    assert None not in healthy.measure(tokens)["base_nats"]
    broken = healthy.measure(tokens, as_if=[{"block": 12, "alpha": 1.0}])
    assert (broken["base_nats"], broken["nonfinite_blocks"]) == ([None, None], [12])
    for monitor, block, status, detail in (
        ("fingerprint", 12, 422, "Only alpha_scan measures a model as if it had other gates, fingerprint does not."),
        ("alpha_scan", 30, 404, "Block 30 does not exist; this model has blocks 0 to 29."),
    ):
        order = {"monitor": monitor, "plan": {"steps": 4}, "as_if": [{"block": block, "alpha": 0.0}]}
        reply = healthy.probe.post("/measurements", json=order)
        assert (reply.status_code, reply.json()["detail"]) == (status, detail)


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_non_finite_block_is_masked(healthy: VllmServer, prompts: list[str], kind: str) -> None:
    """A skipped block full of NaN or Inf leaves no trace, also not in KV blocks written while it was bad."""
    before = healthy.outputs(prompts)
    healthy.set_gates({12: 0.0})
    skipped = healthy.outputs(prompts)
    healthy.set_gates({12: 1.0})
    faults = [
        healthy.inject(block=12, tensor="mlp.down_proj", kind=kind, count=100_000),
        healthy.inject(block=12, tensor="self_attn.qkv_proj", kind=kind, count=100_000),
    ]
    # Logprobs of NaN cannot be written as JSON; vLLM answers without them.
    bad = [healthy.complete(prompt, logprobs=None)["text"] for prompt in prompts]
    assert bad != [text for text, _, _ in before]
    healthy.set_gates({12: 0.0})
    assert healthy.outputs(prompts) == skipped
    for fault in faults:
        healthy.heal(fault)
    healthy.set_gates({12: 1.0})
    assert healthy.outputs(prompts) == before


def test_base_loss_is_the_served_loss(healthy: VllmServer, prompts: list[str], reference: Reference) -> None:
    """The scan's base loss equals vLLM's prompt logprobs and Hugging Face's loss on the same tokens."""
    sequences = [healthy.tokens(prompt) for prompt in prompts]
    base = healthy.measure(sequences)["base_nats"]
    for tokens, nats in zip(sequences, base, strict=True):
        served = healthy.prompt_logprobs(tokens)
        expected = reference.logprobs(tokens)
        assert nats == pytest.approx(-sum(served) / len(served), abs=1e-4)
        assert nats == pytest.approx(-sum(expected) / len(expected), abs=1e-4)


def test_scan_equals_scaled_model(healthy: VllmServer, prompts: list[str], reference: Reference) -> None:
    """Each loss of a scan is that of the model whose layer is scaled, by Hugging Face."""
    tokens = healthy.tokens(prompts[0] + " Paris, which lies on the river Seine.")
    alphas = [0.0, 0.7, 1.3]
    reading = healthy.measure([tokens], alphas)
    for block in (0, 1, 15, 29):
        for index, alpha in enumerate(alphas):
            expected = reference.logprobs(tokens, block, alpha)
            assert reading["nats"][block][index][0] == pytest.approx(-sum(expected) / len(expected), abs=1e-3)


def test_scan_measures_the_model_as_served(healthy: VllmServer, prompts: list[str], reference: Reference) -> None:
    """A scan beside a skipped block measures the skipped model and leaves its gate alone."""
    tokens = healthy.tokens(prompts[2])
    healthy.set_gates({5: 0.0})
    reading = healthy.measure([tokens], [0.0])
    expected = reference.logprobs(tokens, 5, 0.0)
    assert reading["base_nats"][0] == pytest.approx(-sum(expected) / len(expected), abs=1e-4)
    assert reading["nats"][5] == []
    assert healthy.facts()["gates"][5] == 0.0


def test_non_finite_block_is_named(healthy: VllmServer, prompts: list[str]) -> None:
    """A first pass names each block whose output is not finite, two at once, and the loss is no number."""
    tokens = [healthy.tokens(prompt) for prompt in prompts[:2]]
    healthy.inject(block=3, tensor="mlp.down_proj", kind="nan", count=5)
    healthy.inject(block=20, tensor="self_attn.o_proj", kind="inf", count=5)
    reading = healthy.measure(tokens, [0.0, 0.7, 1.3])
    assert reading["nonfinite_blocks"] == [3, 20]
    assert reading["base_nats"] == [None, None]


def test_fault_is_undone_bit_for_bit(healthy: VllmServer, prompts: list[str]) -> None:
    """Overlapping faults come out in any order and leave the model as it was, in blocks and outside of them."""
    before = healthy.outputs(prompts)
    faults = [
        healthy.inject(block=4, tensor="mlp.up_proj", kind="burst", count=18),
        healthy.inject(block=4, tensor="mlp.up_proj", kind="stale", count=400_000, source="mlp.down_proj"),
        healthy.inject(block=4, tensor="mlp.gate_up_proj", kind="lost"),
        healthy.inject(tensor="model.norm", kind="sign", seed=3),
        healthy.inject(tensor="lm_head", kind="neighbours", count=100_000),
    ]
    stood = healthy.facts()["faults"]
    assert [fault["id"] for fault in stood] == faults
    up, stale, _, norm, head = stood
    assert up["tensor"] == stale["tensor"] == "model.layers.4.mlp.gate_up_proj.weight"
    assert stale["source"] == "model.layers.4.mlp.down_proj.weight"
    assert (norm["tensor"], norm["block"], norm["count"]) == ("model.norm.weight", None, 1)
    # SmolLM2's head is its embedding.
    assert (head["tensor"], head["shared_with"]) == ("model.embed_tokens.weight", ["lm_head.weight"])
    damaged = [before]
    for fault in faults[::2] + faults[1::2]:
        damaged.append(healthy.outputs(prompts[:1]))
        healthy.heal(fault)
    assert all(one[0] != before[0] for one in damaged[1:])
    assert healthy.outputs(prompts) == before


def test_found_flips_strike_the_same_values(healthy: VllmServer, prompts: list[str], reference: Reference) -> None:
    """Flips in a checkpoint's tensors do in the packed tensors of the served model what they do in Hugging Face's."""
    tokens = healthy.tokens(prompts[3])
    before = healthy.prompt_logprobs(tokens)
    undo = []
    for part in ("mlp.up_proj", "self_attn.v_proj"):
        name = f"model.layers.4.{part}.weight"
        values = reference.parameter(name)
        # The bit that takes a weight 16 times its size, of the five that become largest.
        larger = (values.view(torch.int32) ^ (1 << 25)).view(torch.float32).abs().flatten()
        flips = [[index, 25] for index in larger.topk(5).indices.tolist()]
        healthy.inject(tensor=name, kind="flips", flips=flips)
        undo.append(inject(FaultSpec.model_validate({"kind": "flips", "flips": flips}), values))
    served, expected = healthy.prompt_logprobs(tokens), reference.logprobs(tokens)
    for back in undo:
        back()
    assert largest_difference(served, expected) < 1e-3
    assert largest_difference(served, before) > 0.05


def test_change_voids_a_measurement(healthy: VllmServer, prompts: list[str]) -> None:
    """A measurement during which the model changed is void, and says so."""
    plan = {"alphas": [0.0], "tokens": [healthy.tokens(prompts[0])], "scored_from": [1]}
    opened = healthy.probe.post("/measurements", json={"monitor": "alpha_scan", "plan": plan}).json()
    assert opened["steps_total"] > 100
    assert healthy.probe.post(f"/measurements/{opened['id']}/advance", json={"steps": 3}).json()["steps_done"] == 3
    healthy.set_gates({5: 0.0})
    reply = healthy.probe.post(f"/measurements/{opened['id']}/advance", json={"steps": 3})
    assert reply.status_code == 409
    assert "changed while it was being measured" in reply.json()["detail"]
    assert healthy.probe.post(f"/measurements/{opened['id']}/advance", json={"steps": 3}).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("PUT", "/gates", {"boot_id": "x", "gates": [{"block": False, "alpha": 0.0}]}, 422, "integer"),
        ("PUT", "/gates", {"boot_id": "x", "gates": [{"block": 1, "alpha": 0.0}], "force": True}, 422, "force"),
        ("PUT", "/gates", {"boot_id": "x", "gates": []}, 422, "gates"),
        ("PUT", "/gates", {"boot_id": "x", "gates": [{"block": 1, "alpha": 3.0}]}, 422, "alpha"),
        ("PUT", "/gates", {"boot_id": "x", "gates": [{"block": 1, "alpha": 0.0}]}, 409, "restarted"),
        ("POST", "/measurements", {"monitor": "x", "plan": {}}, 404, "alpha_scan"),
        ("POST", "/measurements", {"monitor": "alpha_scan", "plan": {"tokens": 1}}, 422, "plan"),
        (
            "POST",
            "/measurements",
            {"monitor": "alpha_scan", "plan": {"alphas": [], "tokens": [[1, 10**7]], "scored_from": [1]}},
            422,
            "vocabulary",
        ),
        (
            "POST",
            "/measurements",
            {"monitor": "alpha_scan", "plan": {"alphas": [], "tokens": [[1] * 1025], "scored_from": [1]}},
            422,
            "shorter",
        ),
        ("POST", "/measurements/none/advance", {"steps": 1}, 404, "none"),
        ("DELETE", "/measurements/none", None, 404, "none"),
        ("POST", "/faults", {"block": 99, "tensor": "mlp.up_proj", "kind": "nan"}, 404, "99"),
        ("POST", "/faults", {"block": 1, "tensor": "nothing", "kind": "nan"}, 404, "mlp.down_proj.weight"),
        ("POST", "/faults", {"block": 1, "tensor": "mlp.up_proj", "kind": "rust"}, 422, "kind"),
        ("POST", "/faults", {"tensor": "nothing", "kind": "nan"}, 404, "model.norm.weight"),
        ("POST", "/faults", {"tensor": "model.layers.99.mlp.up_proj", "kind": "nan"}, 404, "99"),
        ("POST", "/faults", {"block": 1, "tensor": "mlp.up_proj", "kind": "stale"}, 422, "needs a source"),
        ("POST", "/faults", {"block": 1, "tensor": "up_proj", "kind": "stale", "source": "x"}, 404, "'x'"),
        ("POST", "/faults", {"tensor": "lm_head", "kind": "bit", "bit": 40}, 422, "has the bits 0 to 31"),
        ("POST", "/faults", {"tensor": "lm_head", "kind": "flips", "flips": [[10**12, 1]]}, 422, "no value"),
        ("DELETE", "/faults/none", None, 404, "none"),
    ],
)
def test_wrong_requests(healthy: VllmServer, method: str, path: str, body: object, status: int, words: str) -> None:
    """Every wrong request gets problem+json with a sentence that helps, and changes nothing."""
    reply = healthy.probe.request(method, path, json=body)
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    assert words in reply.json()["detail"]
    assert set(healthy.facts()["gates"]) == {1.0}


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic eDp5"}])
def test_token_is_asked_for(healthy: VllmServer, header: dict[str, str]) -> None:
    """No route of the probe answers without its token."""
    routes = [("GET", "/model"), ("PUT", "/gates"), ("POST", "/self-test"), ("POST", "/faults")]
    for method, path in routes:
        reply = healthy.client.request(method, f"/flipwatch/v1{path}", headers=header, json={})
        assert reply.status_code == 401
        assert reply.headers["content-type"] == "application/problem+json"


def test_parts_stay_out_of_the_access_log(healthy: VllmServer, prompts: list[str]) -> None:
    """A scan's parts do not flood vLLM's access log; changes and errors are still there."""
    healthy.measure([healthy.tokens(prompts[0])], steps=1)
    healthy.set_gates({1: 0.0})
    assert healthy.probe.post("/measurements/none/advance", json={"steps": 1}).status_code == 404
    lines = [line for line in healthy.log.splitlines() if "/flipwatch/v1/" in line and "HTTP/1.1" in line]
    assert not [
        line
        for line in lines
        if "/measurements" in line and "404" not in line and "409" not in line and "422" not in line
    ]
    assert any("/gates" in line and "200" in line for line in lines)
    assert any("/measurements/none/advance" in line and "404" in line for line in lines)
