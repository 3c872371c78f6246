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

from ..finding import Action, Health, Place
from .finding import AlphaScanFinding, Drift, Thresholds
from .profile import Profile
from .reading import AlphaScanReading, rounds
from .scores import PROFILE_RESOLUTION, BlockScore, mean, paired_t, scores
from .sentences import names, notes, number, verdict

_MATCH_SHARE = 0.02
"""Share of the drift that may be left in a match."""

_MOST = 0.5
"""A skip that leaves more than this share of the drift is not suggested."""

_MILD_COST_NATS = 1.0
"""A healthy model is still much like itself without blocks that cost so little: leaving out any single such block of
SmolLM2-135M made no healthy block look harmful."""


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
    for at, model in enumerate(models):
        if not places.keys() >= set(model.left_out):
            # Left out on a suspicion that did not hold.
            continue
        if profile is not None and _explained(model, profile):
            break
        after = models[at + 1] if at + 1 < len(models) else None
        found, shadows = _flags(model, after, thresholds, profile)
        places |= {place.block: place for place in found if place.block not in places}
    shown = next((model for model in models if any(model.nats)), served)
    blocks = scores(shown, None if shown.left_out else profile)
    drift = None if profile is None else _drift(served, profile)
    harmed = bool(places)
    whole = all(gate == 1.0 for gate in served.gates)
    if not places and whole and drift is not None and thresholds.drifts(drift[0]):
        places = {place.block: place for place in _matches(blocks, drift[0])}
    flagged = tuple(sorted(places))
    blocks = [score.model_copy(update={"flagged": score.block in places}) for score in blocks]
    health, reason = verdict(served, base, blocks, [places[block] for block in flagged], drift, thresholds)
    reason += "".join(notes(blocks, shadows, shown, thresholds, drift, profile))
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
    where = f" (with {names(model.left_out)} left out)" if model.left_out else ""
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
        numbers = f"{score.skip_gain:.3f} nats lower (t {number(score.skip_gain_t)}, z {number(score.skip_gain_z)})"
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


def _drift(served: AlphaScanReading, profile: Profile) -> Drift | None:
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


def _matches(blocks: Sequence[BlockScore], drift_nats: float) -> list[Place]:
    """The one block without which the loss is the healthy model's, if it is one only."""
    near = max(PROFILE_RESOLUTION, _MATCH_SHARE * drift_nats)
    found = [s for s in blocks if s.without_drift_nats is not None and abs(s.without_drift_nats) <= near]
    if len(found) != 1:
        return []
    (score,) = found
    reason = f"block {score.block}: without it, and without no other, the loss is that of the healthy model without it"
    return [Place(block=score.block, reason=reason)]
