"""The judgement half of the alpha-scan: from the readings of one scan to a finding.

A scan has rounds: each measures the model without the blocks that the rounds before have flagged.  In each round are
flagged, by the rule named *harm*,

- the block with the largest skip gain, when that is at least `min_gain_nats` (above its healthy value, where a clean
  profile knows it) and at least `min_gain_t` standard errors;
- blocks whose output is not finite;
- blocks that explode, when the loss without them is lower;
- the block without which a loss that is not finite becomes finite.

The natural reference of the skip gain is 0: a healthy block costs something to leave out.  A z over the blocks cannot
replace it, because healthy blocks cost very different amounts.  Only one block is flagged by its gain in each round: a
strong fault makes other blocks look harmful as well (a neighbour that amplifies the damage), and the next round shows
whether they are.  A model that lacks a block which it cannot do without makes healthy blocks look harmful, too.  So in
a model that lacks any, a gain flags only with a z over tau, unless a profile knows that it can do without them; and
where a profile shows that the one block left out explains everything, nothing more is flagged.

The rule named *drift* needs a clean profile: the base loss is compared with its healthy value, sequence by sequence.
It sees what harms the model anywhere, the embedding and the head included.  Where harm names no block, the rule named
*match* may: when a single block is damaged, the model without it is the healthy model without it, so the loss with that
block left out, and no other, is what the profile says.  It holds for blocks that cannot be left out, too.  Where most
of the drift stays without the blocks that harm has flagged, no skip is suggested: the damage may lie outside them all.

BSS z > tau flags nothing, with a profile or without (`docs/decisions/0005`, `0008`).
"""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from ..finding import Action, Finding, Health, Place
from .profile import Profile
from .reading import AlphaScanReading, rounds
from .scores import MIN_SEQUENCES, PROFILE_RESOLUTION, BlockScore, mean, paired_t, scores

_MATCH_SHARE = 0.02
"""Share of the drift that may be left in a match."""

_MOST = 0.5
"""A skip that leaves more than this share of the drift is not suggested."""

_MILD_COST_NATS = 1.0
"""A healthy model is still much like itself without blocks that cost so little: leaving out any single such block of
SmolLM2-135M made no healthy block look harmful."""


class Thresholds(BaseModel):
    """From where on a number counts.  Defaults are chosen by the figures in `docs/detection`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    tau: float = Field(default=6.0, gt=0)
    """A z over this stands out."""
    min_gain_nats: float = Field(default=0.1, ge=0)
    """Rule harm: leaving a harmful block out wins at least so much."""
    min_gain_t: float = Field(default=3.0, ge=0)
    """Rule harm: and at least so many standard errors of the gain."""
    min_drift_nats: float = Field(default=0.05, ge=0)
    """Rule drift: a damaged model's loss is at least so far above its healthy value.  The sequences are the same, so
    that only rounding is to be told apart, and no standard error is asked for."""


class AlphaScanFinding(Finding):
    """The judgement, with every number it rests on."""

    base_loss_nats: float | None
    """Mean loss per scored token as served; None = not finite, or no data."""
    predicted_loss_nats: float | None = None
    """The same with the flagged blocks left out, as measured inside the scan; None when nothing is flagged."""
    drift_nats: float | None = None
    """Base loss above its healthy value; None without a profile."""
    drift_t: float | None = None
    """Drift over its standard error; None for a single sequence."""
    profile_recorded_at: float | None = None
    """Which clean profile was used: UTC epoch seconds of its recording; None: none."""
    thresholds: Thresholds
    blocks: tuple[BlockScore, ...]
    left_out: tuple[int, ...] = ()
    """Blocks without which `blocks` were scored, since there are no curves with them."""
    flagged: tuple[int, ...]
    gates: tuple[float, ...]
    sequences: int = 0
    passes: float = 0.0
    """Forward-pass equivalents that the scan took, all rounds together."""


def judge(
    readings: Sequence[AlphaScanReading], thresholds: Thresholds, profile: Profile | None = None
) -> AlphaScanFinding:
    """Score all blocks, flag those that do harm, and say why in one sentence.  `readings` has at least one."""
    models = rounds(readings)
    served = models[0]
    if profile is not None and len(profile.blocks) != len(served.gates):
        raise ValueError(f"a profile of {len(profile.blocks)} blocks says nothing about a model of {len(served.gates)}")
    base = mean(served.base_nats, served.scored_tokens)
    places: dict[int, Place] = {}
    shadows: list[BlockScore] = []
    for number, model in enumerate(models):
        if not places.keys() >= set(model.left_out):
            # Left out on a suspicion that did not hold.
            continue
        if profile is not None and _explained(model, profile):
            break
        after = models[number + 1] if number + 1 < len(models) else None
        found, shadows = _flags(model, after, thresholds, profile)
        places |= {place.block: place for place in found if place.block not in places}
    shown = next((model for model in models if any(model.nats)), served)
    blocks = scores(shown, None if shown.left_out else profile)
    drift = None if profile is None else _drift(served, profile)
    harmed = bool(places)
    if not places and _drifts(drift, thresholds) and all(gate == 1.0 for gate in served.gates):
        places = {place.block: place for place in _matches(blocks, drift)}
    flagged = tuple(sorted(places))
    blocks = [score.model_copy(update={"flagged": score.block in places}) for score in blocks]
    health, reason = _verdict(served, base, blocks, [places[block] for block in flagged], drift, thresholds)
    reason += "".join(_notes(blocks, shadows, shown, thresholds, drift, profile))
    predicted = _predicted(models, flagged)
    stays = None if profile is None else _stays(predicted, flagged, served, profile)
    if harmed and drift is not None and stays is not None and stays > _MOST * drift[0]:
        harmed = False
        reason += f"; {stays:.3f} nats of that stay without it, so that more is damaged, perhaps outside the blocks"
    action = Action.NONE
    if health is Health.FAILED:
        action = Action.SKIP if harmed else Action.INVESTIGATE
    return AlphaScanFinding(
        monitor="alpha_scan",
        health=health,
        reason=reason,
        places=tuple(places[block] for block in flagged),
        action=action,
        base_loss_nats=base,
        predicted_loss_nats=predicted,
        drift_nats=None if drift is None else drift[0],
        drift_t=None if drift is None else drift[1],
        profile_recorded_at=None if profile is None else profile.recorded_at,
        thresholds=thresholds,
        blocks=tuple(blocks),
        left_out=tuple(shown.left_out),
        flagged=flagged,
        gates=tuple(served.gates),
        sequences=len(served.base_nats),
        passes=sum(model.passes for model in models),
    )


def flagged_in(
    model: AlphaScanReading,
    after: AlphaScanReading | None,
    thresholds: Thresholds,
    profile: Profile | None = None,
) -> list[int]:
    """Blocks that one round flags; `after` is the round without them, if there is one."""
    return [place.block for place in _flags(model, after, thresholds, profile)[0]]


def _flags(
    model: AlphaScanReading, after: AlphaScanReading | None, thresholds: Thresholds, profile: Profile | None
) -> tuple[list[Place], list[BlockScore]]:
    """What one round flags, and blocks that look harmful but may only be in the shadow of those."""
    base = mean(model.base_nats, model.scored_tokens)
    where = f" (with {_names(model.left_out)} left out)" if model.left_out else ""
    found = [
        Place(block=block, reason=f"block {block}: its output is not finite where its input was{where}")
        for block in model.nonfinite_blocks
    ]
    without = None if after is None else mean(after.base_nats, after.scored_tokens)
    if after is None or base is None or (without is not None and without < base):
        found += [
            Place(block=block, reason=f"block {block}: it explodes, adding far more than the stream holds{where}")
            for block in model.exploding_blocks
        ]
    if found or model.group > 1:
        return found, []
    if base is None:
        return _ways_out(model, where), []
    measured = scores(model)
    harm = {score.block: _harm(score, thresholds, profile) for score in measured}
    harmful = sorted((s for s in measured if harm[s.block] > 0), key=lambda s: -harm[s.block])
    crippled = _crippled(model, profile)
    certain = [s for s in harmful if not crippled or (s.skip_gain_z is not None and s.skip_gain_z > thresholds.tau)]
    for score in certain[:1]:
        numbers = f"{score.skip_gain:.3f} nats lower (t {_number(score.skip_gain_t)}, z {_number(score.skip_gain_z)})"
        found.append(Place(block=score.block, reason=f"block {score.block}: without it the loss is {numbers}{where}"))
    return found, [score for score in harmful if score not in certain[:1]]


def _harm(score: BlockScore, thresholds: Thresholds, profile: Profile | None) -> float:
    """The rule harm for one block: nats of harm, 0 for none.  A gain without a standard error proves nothing.

    On texts that are foreign to a model even a healthy block may be better left out; a profile knows by how much.
    """
    gain, t = score.skip_gain, score.skip_gain_t
    if gain is None or t is None:
        return 0.0
    healthy = None if profile is None else profile.blocks[score.block].skip_gain
    above = gain if healthy is None else min(gain, gain - healthy)
    return above if above >= thresholds.min_gain_nats and t >= thresholds.min_gain_t else 0.0


def _ways_out(model: AlphaScanReading, where: str) -> list[Place]:
    """The block without which a loss that is not finite becomes finite, and lowest."""
    losses = [(mean(model.at(block, 0.0), model.scored_tokens), block) for block in range(len(model.nats))]
    finite = [(loss, block) for loss, block in losses if loss is not None]
    if not finite:
        return []
    loss, block = min(finite)
    only = "only " if len(finite) == 1 else ""
    return [Place(block=block, reason=f"block {block}: the loss is finite {only}without it, {loss:.3f} nats{where}")]


def _stays(
    predicted: float | None, flagged: tuple[int, ...], served: AlphaScanReading, profile: Profile
) -> float | None:
    """Nats of damage that stay without the flagged blocks, to first order; None when that is not known.

    Damage outside the blocks makes healthy blocks look harmful as well, and a skip of those would not help much.
    """
    healthy = profile.loss_without(flagged, served.scored_tokens)
    return None if predicted is None or healthy is None else predicted - healthy


def _crippled(model: AlphaScanReading, profile: Profile | None) -> bool:
    """Whether the model may lack a block that it cannot do without."""
    out = {block for block, gate in enumerate(model.gates) if gate != 1.0} | set(model.left_out)
    if profile is None:
        return bool(out)
    cost = profile.cost(out)
    return cost is None or cost > _MILD_COST_NATS


def _explained(model: AlphaScanReading, profile: Profile) -> bool:
    """Without the one block left out, the model is the healthy model without it: nothing else is damaged."""
    if len(model.left_out) != 1:
        return False
    without = mean(model.base_nats, model.scored_tokens)
    healthy = profile.loss_without(model.left_out, model.scored_tokens)
    return without is not None and healthy is not None and abs(without - healthy) <= PROFILE_RESOLUTION


def _predicted(models: Sequence[AlphaScanReading], flagged: tuple[int, ...]) -> float | None:
    """The loss without the flagged blocks, from the round that left them out or the skip that flagged the last one."""
    if not flagged:
        return None
    for model in reversed(models):
        if tuple(model.left_out) == flagged:
            return mean(model.base_nats, model.scored_tokens)
    for model in reversed(models):
        missing = set(flagged) - set(model.left_out)
        if len(missing) == 1 and set(model.left_out) < set(flagged) and model.group == 1:
            return mean(model.at(missing.pop(), 0.0), model.scored_tokens)
    return None


def _drift(served: AlphaScanReading, profile: Profile) -> tuple[float, float | None] | None:
    """Base loss above the profile's on the same sequences, and that over its standard error, which one has not."""
    start = served.first_sequence
    healthy = profile.base_nats[start : start + len(served.base_nats)]
    if len(healthy) < len(served.base_nats):
        return None
    now, then = (mean(nats, served.scored_tokens) for nats in (served.base_nats, healthy))
    if now is None or then is None:
        return None
    test = paired_t(served.base_nats, healthy, served.scored_tokens)
    return now - then, None if test is None else test[1]


def _drifts(drift: tuple[float, float | None] | None, thresholds: Thresholds) -> bool:
    return drift is not None and drift[0] >= thresholds.min_drift_nats


def _matches(blocks: Sequence[BlockScore], drift: tuple[float, float | None] | None) -> list[Place]:
    """The one block without which the loss is the healthy model's, if it is one only."""
    near = max(PROFILE_RESOLUTION, _MATCH_SHARE * drift[0]) if drift is not None else 0.0
    found = [s for s in blocks if s.without_drift_nats is not None and abs(s.without_drift_nats) <= near]
    if len(found) != 1:
        return []
    (score,) = found
    reason = f"block {score.block}: without it, and without no other, the loss is that of the healthy model without it"
    return [Place(block=score.block, reason=reason)]


def _verdict(
    served: AlphaScanReading,
    base: float | None,
    blocks: list[BlockScore],
    places: list[Place],
    drift: tuple[float, float | None] | None,
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
    if _drifts(drift, thresholds) and not any(gate != 1.0 for gate in served.gates):
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
        f"({best.skip_gain:+.3f} nats, t {_number(best.skip_gain_t)}, z {_number(best.skip_gain_z)})"
    )
    return (Health.DEGRADED if gated else Health.OK), sentence


def _notes(
    blocks: list[BlockScore],
    shadows: list[BlockScore],
    shown: AlphaScanReading,
    thresholds: Thresholds,
    drift: tuple[float, float | None] | None,
    profile: Profile | None,
) -> list[str]:
    """What else the sentence says: the published score, shadows, and which claims rest on a clean profile."""
    notes = []
    best = max((s for s in blocks if s.bss is not None), key=lambda s: s.bss or 0.0, default=None)
    if best is not None:
        over = best.bss_z is not None and best.bss_z > thresholds.tau and not best.flagged
        alone = f", over tau {thresholds.tau:g}, which alone is no alarm" if over else ""
        notes.append(f"; by BSS block {best.block} ({best.bss:.3f} nats, z {_number(best.bss_z)}{alone})")
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
            "" if moved is None else f", most changed by BSS is block {moved.block} (z {_number(moved.bss_profile_z)})"
        )
        notes.append(f"; against the clean profile the loss is {drift[0]:+.3f} nats (t {_number(drift[1])}){most}")
    else:
        notes.append("; the loss could not be compared with the clean profile")
    return notes


def _gated(gates: Sequence[float]) -> str:
    """`serving without block 4; ` or nothing."""
    skipped = [f"block {block}" for block, gate in enumerate(gates) if gate == 0.0]
    scaled = [f"block {block} at alpha {gate:g}" for block, gate in enumerate(gates) if gate not in (0.0, 1.0)]
    parts = [f"without {', '.join(skipped)}"] * bool(skipped) + [f"with {', '.join(scaled)}"] * bool(scaled)
    return f"serving {' and '.join(parts)}; " if parts else ""


def _names(blocks: Sequence[int]) -> str:
    return ", ".join(f"block {block}" for block in blocks)


def _number(value: float | None) -> str:
    """Too few blocks have no z, too few sequences no t."""
    return "unknown" if value is None else f"{value:.1f}"
