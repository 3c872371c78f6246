"""What the live model is held against: states recorded when it was healthy, a peer's, or the checkpoint."""

from enum import StrEnum

from ..strict import Wire
from .facts import DifferentialPlan, DifferentialReading

FORMAT = 1


class ReferenceKind(StrEnum):
    """Where the reference comes from."""

    RECORDED = "recorded"
    CHECKPOINT = "checkpoint"
    PEER = "peer"


class Conditions(Wire):
    """Under which a reading was made."""

    model: str
    """Name of the model for people."""
    model_digest: str | None
    """Of the weights as they were loaded; None where it is not known."""
    architecture: str
    num_blocks: int
    dtype: str
    engine: str
    """What ran the model, with version and mode, e.g. `vllm 0.32.0 eager`."""
    torch_version: str
    hardware: str
    """What computed: the GPU's name, or the CPU's instruction set and model."""
    tensor_parallel_size: int
    flipwatch_version: str


class Recording(Wire):
    """States of a model, with what is needed to take them again; made by a plan that records."""

    format: int = FORMAT
    recorded_at: float
    """Epoch seconds."""
    conditions: Conditions
    plan: DifferentialPlan
    """As it was measured: it records and measures noise."""
    reading: DifferentialReading

    def replay(self) -> DifferentialPlan:
        """The same sequences through another model, each block fed what was recorded."""
        return self.plan.model_copy(
            update={
                "inputs": self.reading.ranks[0].inputs,
                "inputs_dtype": self.reading.dtype,
                "noise": False,
            }
        )


def misfit(recording: Recording, now: Conditions, *, same_weights: bool) -> str | None:
    """Why this recording cannot be held against a model under these conditions, one sentence; None when it can.

    With `same_weights`, another digest of the weights is a misfit too.
    """
    then = recording.conditions
    if recording.format != FORMAT or then.flipwatch_version != now.flipwatch_version:
        return (
            f"The states were recorded by Flipwatch {then.flipwatch_version}, and this is {now.flipwatch_version}: "
            "record them again."
        )
    for what, one, other in (
        ("architecture", then.architecture, now.architecture),
        ("number of blocks", then.num_blocks, now.num_blocks),
    ):
        if one != other:
            return f"The states were recorded on another {what}: {one}, not {other}."
    if same_weights and None in (then.model_digest, now.model_digest):
        return "Nothing says whose states these are: the probe has no digest of the weights, and vLLM's log says why."
    if same_weights and then.model_digest != now.model_digest:
        return (
            f"The states were recorded of {then.model} with other weights than those that {now.model} was loaded with: "
            "record them again."
        )
    return None


def same_numerics(one: Conditions, other: Conditions) -> bool:
    """Whether the two compute with the same kernels, so that equal weights give equal bits but for repetition."""
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("dtype", "engine", "torch_version", "hardware", "tensor_parallel_size", "architecture")
    )
