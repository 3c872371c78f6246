"""States of a live server, taken over HTTP and judged as the sidecar does."""

from typing import Any

from flipwatch import __version__
from flipwatch.monitors.differential.facts import DifferentialPlan, DifferentialReading
from flipwatch.monitors.differential.finding import DifferentialFinding
from flipwatch.monitors.differential.judgement import judge
from flipwatch.monitors.differential.reference import Conditions, Recording, ReferenceKind

from ..vllm_server import VllmServer

TEXTS = ["The quick brown fox jumps over the lazy dog and runs away from the old grey wolf.", "Water boils at"]


def conditions(server: VllmServer) -> Conditions:
    """As the sidecar would have them."""
    return of_facts(server.facts())


def of_facts(facts: dict[str, Any]) -> Conditions:
    """The same from what the probe says."""
    return Conditions(
        model=facts["model"],
        model_digest=facts["model_digest"],
        architecture=facts["architecture"],
        num_blocks=facts["num_blocks"],
        dtype=facts["dtype"],
        engine=f"vllm {facts.get('vllm_version')} {facts['mode']}",
        torch_version=facts.get("torch_version", ""),
        hardware=facts["hardware"],
        tensor_parallel_size=facts["tensor_parallel_size"],
        flipwatch_version=facts.get("flipwatch_version", __version__),
    )


def measured(server: VllmServer, plan: DifferentialPlan, engine: int | None = None) -> DifferentialReading:
    """The reading, as it comes over HTTP; of one engine where there are several."""
    reading = server.reading("differential", plan.model_dump(mode="json"), engine=engine)
    return DifferentialReading.model_validate(reading)


def recorded(server: VllmServer) -> Recording:
    """States of now."""
    plan = DifferentialPlan(tokens=[server.tokens(text) for text in TEXTS], noise=True)
    return Recording(recorded_at=1.0, conditions=conditions(server), plan=plan, reading=measured(server, plan))


def against_recording(server: VllmServer, recording: Recording) -> DifferentialFinding:
    """The finding of now."""
    return judge(measured(server, recording.replay()), ReferenceKind.RECORDED, recording, conditions(server))


def against_checkpoint(server: VllmServer, engine: int | None = None) -> DifferentialFinding:
    """The finding of now; of one engine where there are several."""
    plan = DifferentialPlan(tokens=[server.tokens(TEXTS[0])], checkpoint=True, noise=True)
    return judge(measured(server, plan, engine), ReferenceKind.CHECKPOINT, None, conditions(server))
