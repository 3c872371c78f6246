"""What a finding of the alpha-scan says: the health and the one sentence with the numbers in it."""

from collections.abc import Sequence

from ..finding import Health, Place
from .finding import Drift, Thresholds
from .profile import Profile
from .reading import AlphaScanReading
from .scores import MIN_SEQUENCES, BlockScore


def verdict(
    served: AlphaScanReading,
    base: float | None,
    blocks: list[BlockScore],
    places: list[Place],
    drift: Drift | None,
    thresholds: Thresholds,
) -> tuple[Health, str]:
    """Health and the first half of the sentence."""
    tokens = sum(served.scored_tokens)
    if not tokens:
        return Health.UNKNOWN, "no sequences were measured"
    measured = sum(1 for block in blocks if block.curve)
    over = f"{tokens} tokens in {len(served.base_nats)} sequences"
    gated = _gated(served.gates)
    reasons = "; ".join(place.reason for place in places)
    if base is None:
        start = f"{gated}the loss over {over} is not finite"
        return Health.FAILED, f"{start}; {reasons}" if places else (
            f"{start}, and none of {measured} blocks measured is the only cause"
        )
    start = f"{gated}base loss {base:.3f} nats over {over}"
    if places:
        return Health.FAILED, f"{start}; {reasons}"
    if drift is not None and thresholds.drifts(drift[0]) and not any(gate != 1.0 for gate in served.gates):
        return Health.FAILED, f"{start}; no block is flagged of {measured}: a skip would not help"
    best = max((s for s in blocks if s.skip_gain is not None), key=lambda s: s.skip_gain or 0.0, default=None)
    if best is None or best.skip_gain is None:
        return Health.UNKNOWN, f"{start}; no block can be judged: {measured} measured at alphas {served.alphas}"
    if best.skip_gain_t is None and best.skip_gain >= thresholds.min_gain_nats:
        return Health.UNKNOWN, (
            f"{start}; block {best.block} looks harmful ({best.skip_gain:+.3f} nats), but fewer than {MIN_SEQUENCES} "
            "sequences prove nothing"
        )
    sentence = (
        f"{start}; no block is flagged of {measured}; strongest by skip gain is block {best.block} "
        f"({best.skip_gain:+.3f} nats, t {number(best.skip_gain_t)}, z {number(best.skip_gain_z)})"
    )
    return (Health.DEGRADED if gated else Health.OK), sentence


def notes(
    blocks: list[BlockScore],
    shadows: list[BlockScore],
    shown: AlphaScanReading,
    thresholds: Thresholds,
    drift: Drift | None,
    profile: Profile | None,
) -> list[str]:
    """What else the sentence says: the published score, shadows, and which claims rest on a clean profile."""
    notes = []
    best = max((s for s in blocks if s.bss is not None), key=lambda s: s.bss or 0.0, default=None)
    if best is not None:
        over = best.bss_z is not None and best.bss_z > thresholds.tau and not best.flagged
        alone = f", over tau {thresholds.tau:g}, which alone is no alarm" if over else ""
        notes.append(f"; by BSS block {best.block} ({best.bss:.3f} nats, z {number(best.bss_z)}{alone})")
    if shadows:
        named = ", ".join(f"block {score.block} ({score.skip_gain:+.3f})" for score in shadows)
        why = "by the same fault"
        if not any(score.flagged for score in blocks):
            why = "for want of the blocks that are out (only a z over tau is certain then): undo them and scan again"
        notes.append(f"; also better without {named}, perhaps {why}")
    if profile is None:
        notes.append("; no clean profile was used")
    elif drift is not None:
        moved = max(
            (s for s in blocks if s.bss_profile_z is not None), key=lambda s: s.bss_profile_z or 0.0, default=None
        )
        most = (
            "" if moved is None else f", most changed by BSS is block {moved.block} (z {number(moved.bss_profile_z)})"
        )
        notes.append(f"; against the clean profile the loss is {drift[0]:+.3f} nats (t {number(drift[1])}){most}")
    else:
        notes.append("; the loss could not be compared with the clean profile")
    return notes


def _gated(gates: Sequence[float]) -> str:
    """`serving without block 4; ` or nothing."""
    skipped = [f"block {block}" for block, gate in enumerate(gates) if gate == 0.0]
    scaled = [f"block {block} at alpha {gate:g}" for block, gate in enumerate(gates) if gate not in (0.0, 1.0)]
    parts = [f"without {', '.join(skipped)}"] * bool(skipped) + [f"with {', '.join(scaled)}"] * bool(scaled)
    return f"serving {' and '.join(parts)}; " if parts else ""


def names(blocks: Sequence[int]) -> str:
    """`block 4, block 7`."""
    return ", ".join(f"block {block}" for block in blocks)


def number(value: float | None) -> str:
    """Too few blocks have no z, too few sequences no t."""
    return "unknown" if value is None else f"{value:.1f}"
