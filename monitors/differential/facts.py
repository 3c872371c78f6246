"""What is measured of a model's states: JSON that crosses from the probe to the sidecar, and that a recording keeps."""

from typing import Literal

from pydantic import Field, model_validator

from ..fingerprint.diagnosis import Diagnosis
from ..fingerprint.facts import Rank
from ..strict import Wire

NAME = "differential"
"""The monitor's name."""

STREAM = ""
"""Path of the block itself among its modules: its output is the residual stream behind it."""


class Sketch(Wire):
    """Seeded projections of one activation, see `sketch`: enough to estimate how far two activations lie apart."""

    width: int
    """Values of the activation per row: its last dimension on this rank."""
    rows: str
    """Base64 of (R, K) float64, little-endian: a row per token, or per sequence."""


class Noise(Wire):
    """How far one and the same healthy computation lies from itself, as relative L2 distance, the largest of the rows.

    A value that is not finite means that nothing can be told.
    """

    repeated: float | None = Field(ge=0)
    """Computed once more; 0 where the device repeats itself bit for bit."""
    rounding: float | None = Field(ge=0)
    """With each value of the input moved by one unit in its last place, at random, or in a batch of another size: about
    what another kernel, another parallel size or another order of sums does."""


class Point(Wire):
    """What one module of a block handed on."""

    module: str
    """Path inside the block, e.g. `self_attn.o_proj`; `STREAM` for the block itself."""
    sketch: Sketch
    noise: Noise | None = None
    """None: not measured."""


class BlockStates(Wire):
    """One block run alone on an input of its own, its gate taken as 1."""

    block: int
    points: list[Point]
    """Its modules in the order in which they handed on, containers behind what they hold; the last is `STREAM`."""


class TensorDifference(Wire):
    """A tensor in memory that is not the checkpoint's."""

    tensor: str
    """Full name in the model."""
    module: str
    """The module inside the block that has it."""
    parts: list[str]
    """Of a packed projection: which of its parts hold changed rows, e.g. `k_proj`; empty where it is not packed."""
    values: int
    """How many values the tensor has."""
    diagnosis: Diagnosis
    """From the checkpoint's values to those in memory."""


class Comparisons(Wire):
    """What it took to get from a block to its tensors, besides one comparison of states for each block."""

    sublayers: int
    """Comparisons of what the children of the block handed on."""
    digests: int
    """Tensors whose digests were compared."""
    tensors: int
    """Tensors that were compared value by value."""


class CleanBlock(Wire):
    """The same block with the checkpoint's tensors, on the same input."""

    block: int
    points: list[Point]
    """As in `BlockStates`, without noise."""
    not_comparable: list[str]
    """Why the checkpoint gives no value for some of the block's tensors, a sentence each, the tensor named."""
    comparable: int
    """Tensors that it has."""
    tensors: list[TensorDifference]
    """Those that differ, be the block's output the same."""
    comparisons: Comparisons


class RankStates(Wire):
    """What one rank measured."""

    rank: Rank
    walk: list[Sketch]
    """As served, gates applied: the stream in front of block 0, then behind each block; a row per sequence.  Empty
    where the plan wants no walk."""
    walk_noise: list[Noise]
    """Of each of them; empty where none was measured."""
    nats: list[float | None]
    """(N) mean loss of each sequence, as served; None for one that is not finite, and for all on ranks that have no
    logits.  Empty where the plan wants no walk."""
    isolated: list[BlockStates]
    """All blocks of the model."""
    clean: list[CleanBlock]
    """All blocks, where the plan asks for the checkpoint; else empty."""
    inputs: list[str]
    """Where the plan records: what each block was fed, base64 of (P, D) in the model's type; else empty."""


class DifferentialReading(Wire):
    """All ranks.  Points below the children of a block may be parts of an activation, each rank's own."""

    ranks: list[RankStates]
    gates: list[float]
    """Alpha per block, as served."""
    dtype: str
    """Of the stream, without `torch.`."""


class DifferentialPlan(Wire):
    """What to measure.  Of these, one: record, feed recorded inputs, or compare with the checkpoint."""

    tokens: list[list[int]] = Field(min_length=1)
    """(N) sequences for the walk; the blocks run alone on the first tokens of the first one."""
    prefix: int = Field(default=16, ge=1)
    """P, how many tokens these are."""
    seed: int = Field(default=0, ge=0)
    """Of the projections and of the noise."""
    size: int = Field(default=32, ge=1, le=4096)
    """K, numbers in a row of a sketch."""
    inputs: list[str] | None = None
    """What to feed each block, as an earlier reading recorded it."""
    inputs_dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None
    """Type of the values in `inputs`."""
    checkpoint: bool = False
    """Run each block with the checkpoint's tensors too.  Each is fed what the clean block in front of it handed on."""
    noise: bool = False
    """Measure the noise of all points and of the walk."""

    @model_validator(mode="after")
    def _one_thing(self) -> "DifferentialPlan":
        if self.inputs is not None and self.checkpoint:
            raise ValueError("inputs and checkpoint exclude each other")
        if (self.inputs is None) != (self.inputs_dtype is None):
            raise ValueError("inputs and inputs_dtype go together")
        if any(len(row) < 2 for row in self.tokens):
            raise ValueError("a sequence has at least 2 tokens")
        return self

    @property
    def walks(self) -> bool:
        """The checkpoint is compared block by block only: nothing is recorded, nothing walked."""
        return not self.checkpoint

    @property
    def records(self) -> bool:
        """The reading shall have the inputs of the blocks."""
        return self.inputs is None and not self.checkpoint
