"""The client of the probe, over real HTTP against the fake server."""

import pytest

from flipwatch.monitors.faults import FaultKind
from flipwatch.monitors.wire import FaultOrder, Gate, GateChange, MeasureOrder, SelfTestState
from flipwatch.service.probe import Probe, ProbeAway, ProbeNonsense, ProbeRefused, ProbeUnauthorised

from .fake_server import PROBE_TOKEN, FakeServer

PLAN = {"alphas": [0.0, 1.3], "tokens": [[1, 2, 3]], "scored_from": [1], "tokens_per_step": 64}


async def test_every_route_of_the_contract_is_spoken(server: FakeServer) -> None:
    """Facts, self-test, gates, measurement and fault go through the wire's models in both directions."""
    async with Probe(server.url, PROBE_TOKEN) as probe:
        facts = await probe.facts()
        assert facts.num_blocks == 8
        assert facts.self_test.state is SelfTestState.NOT_RUN
        assert (await probe.self_test()).state is SelfTestState.PASSED
        report = await probe.set_gates(GateChange(boot_id=facts.boot_id, gates=[Gate(block=2, alpha=0.5)]))
        assert report.gates[2] == 0.5
        order = MeasureOrder(monitor="alpha_scan", plan=PLAN)
        await probe.drop((await probe.order(order)).id)
        progress = await probe.order(order)
        progress = await probe.advance(progress.id, progress.steps_total)
        assert progress.reading is not None
        fault = await probe.inject(FaultOrder(block=1, tensor="mlp.up_proj", kind=FaultKind.BURST))
        await probe.heal(fault.id)
    assert server.measurements == 0
    assert server.faults == {}


async def test_each_failure_has_a_type_of_its_own(server: FakeServer) -> None:
    """Wrong token, refused, nonsense and away are told apart, each with a sentence."""
    async with Probe(server.url, "wrong-token") as probe:
        with pytest.raises(ProbeUnauthorised, match="FLIPWATCH_PROBE_TOKEN differs"):
            await probe.facts()
    async with Probe(server.url, PROBE_TOKEN) as probe:
        server.refuse["GET /model"] = (501, "ToyLayer is not supported.")
        with pytest.raises(ProbeRefused, match="ToyLayer") as caught:
            await probe.facts()
        assert caught.value.status == 501
        server.refuse.clear()
        server.gates = ["one"]  # type: ignore[list-item]
        with pytest.raises(ProbeNonsense, match=r"gates\.0"):
            await probe.facts()
        server.stop()
        with pytest.raises(ProbeAway, match="cannot be reached"):
            await probe.facts()


async def test_vllm_without_the_probe_is_away_and_says_what_to_set(server: FakeServer) -> None:
    """A plain 404 from a vLLM without the plugin is not taken for an answer of the probe."""
    async with Probe(server.url + "/elsewhere", PROBE_TOKEN) as probe:
        with pytest.raises(ProbeAway, match="VLLM_PLUGINS=flipwatch"):
            await probe.facts()


async def test_no_failure_repeats_a_secret(server: FakeServer) -> None:
    """Neither a token that h11 refuses in its own words, nor a password in the URL."""
    async with Probe(server.url, "first-line\nsecret") as probe:
        with pytest.raises(ProbeAway, match="LocalProtocolError") as caught:
            await probe.facts()
        assert "secret" not in str(caught.value)
        assert "first" not in str(caught.value)
    async with Probe(server.url.replace("http://", "http://user:secret@") + "/elsewhere", PROBE_TOKEN) as probe:
        with pytest.raises(ProbeAway, match="has no Flipwatch probe") as caught:
            await probe.facts()
        assert "secret" not in str(caught.value)
        server.stop()
        with pytest.raises(ProbeAway, match=f"vLLM at {server.url}/elsewhere cannot be reached") as caught:
            await probe.facts()
        assert "secret" not in str(caught.value)
