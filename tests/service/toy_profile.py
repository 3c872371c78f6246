"""A clean profile of a toy model with one block."""

from flipwatch.monitors.alpha_scan import Profile, Provenance
from flipwatch.monitors.alpha_scan.profile import BlockProfile

PROFILE = Profile(
    provenance=Provenance(
        model="toy",
        model_digest="0123",
        architecture="ToyForCausalLM",
        dtype="bfloat16",
        engine="vllm 0.32.0 eager",
        torch_version="2.12.0",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        validation_digest="4567",
    ),
    recorded_at=1_700_000_000.0,
    alphas=[0.0],
    base_nats=[2.5],
    blocks=[BlockProfile(bss=None, slope=None, skip_gain=-0.5, largest_deviation=None)],
)
