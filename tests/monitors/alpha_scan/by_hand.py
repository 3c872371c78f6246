"""Readings of losses that are made up, so that every score can be computed by hand."""

from flipwatch.monitors.alpha_scan import AlphaScanReading, Profile, Provenance, make_profile

ALPHAS = [0.0, 0.6, 0.9, 1.1, 1.4]
SEQUENCES = 8

Curves = list[list[float | None]]

PROVENANCE = Provenance(
    model="toy",
    model_digest="0123",
    architecture="ToyForCausalLM",
    dtype="float32",
    engine="local",
    torch_version="2.13.0",
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    validation_digest="4567",
)


def reading(
    curves: Curves,
    *,
    base: float | None = 2.0,
    alphas: list[float] | None = None,
    gates: list[float] | None = None,
    nonfinite: list[int] | None = None,
    exploding: list[int] | None = None,
    left_out: list[int] | None = None,
    sequences: int = SEQUENCES,
    spread: float = 0.01,
) -> AlphaScanReading:
    """Sequences of 10 scored tokens; one mean loss per block and alpha.

    The sequences lie `spread` above and below the mean in turn, the other way round with a block scaled: for 8
    sequences the standard error of a gain is `2 * spread / sqrt(7)`.
    """

    def losses(loss: float | None, sign: int) -> list[float | None]:
        return [None if loss is None else loss + sign * spread * (-1) ** n for n in range(sequences)]

    return AlphaScanReading(
        alphas=ALPHAS if alphas is None else alphas,
        gates=gates or [1.0] * len(curves),
        left_out=left_out or [],
        scored_tokens=[10] * sequences,
        pass_tokens=11 * sequences,
        base_nats=losses(base, 1),
        nats=[[losses(loss, -1) for loss in curve] for curve in curves],
        nonfinite_blocks=nonfinite or [],
        exploding_blocks=exploding or [],
        passes=12.0,
    )


def gains(*values: float) -> Curves:
    """A curve for each skip gain below a base loss of 2, flat but for it."""
    return [[2.0 - value, 2.0, 2.0, 2.0, 2.0] for value in values]


def healthy(block: int) -> list[float | None]:
    """A flat, symmetric curve; leaving the block out costs a little, each block differently."""
    return [2.1 + 0.01 * block, 2.02, 2.01, 2.01, 2.02]


def profile_of(healthy_reading: AlphaScanReading) -> Profile:
    """The clean profile that this reading makes."""
    return make_profile(healthy_reading, PROVENANCE, 1_800_000_000.0)
