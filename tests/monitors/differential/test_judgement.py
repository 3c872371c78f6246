"""Judgement against recorded states and a peer's: what is failed, degraded, unknown, ok, and where it begins."""

import pytest

from flipwatch.monitors.differential.comparison import REPEATED_FACTOR, ROUNDING_FACTOR
from flipwatch.monitors.differential.facts import STREAM, Noise
from flipwatch.monitors.differential.finding import DifferentialFinding
from flipwatch.monitors.differential.judgement import judge
from flipwatch.monitors.differential.reference import ReferenceKind
from flipwatch.monitors.finding import Action, Health

from .by_hand import (
    BLOCKS,
    LOUD,
    NAN,
    QUIET,
    RECORDED,
    conditions,
    from_module,
    held,
    moved,
    reading,
    recording,
    states,
)

NOT_FINITE = ((3.0, 4.0), (0.0, NAN))


def where(finding: DifferentialFinding) -> list[tuple[int, str | None, str | None]]:
    """Block, sublayer and module of each location."""
    return [(found.block, found.sublayer, found.module) for found in finding.locations]


def test_equal_states_are_ok_with_their_numbers() -> None:
    """The sentence has the blocks, the time of the recording, distance, allowance and both losses."""
    finding = held(reading(states()))
    assert (finding.health, finding.action, finding.places) == (Health.OK, Action.NONE, ())
    assert finding.reason == (
        "All 6 blocks compute what was recorded at 2026-09-21 14:13:20 UTC: largest relative distance 0 (block 0), "
        "allowed 0; the loss is 3.000 nats, and was 3.000 nats"
    )
    assert (finding.reference, finding.recorded_at) == (ReferenceKind.RECORDED, RECORDED)
    assert [(b.block, b.gate, b.l2, b.cosine, b.allowed, b.departs) for b in finding.blocks] == [
        (block, 1.0, 0.0, 0.0, 0.0, False) for block in range(BLOCKS)
    ]
    assert finding.blocks[0].reason == "relative distance 0 (1 - cosine 0), allowed 0"
    assert (finding.nats, finding.reference_nats) == (3.0, 3.0)
    assert (finding.first_jump, finding.locations) == (None, ())
    assert (finding.effort.blocks, finding.effort.sublayers, finding.effort.brute_force) == (BLOCKS, 0, 0)


def test_a_peer_is_named_as_such() -> None:
    """Whose states these are stands in the sentence."""
    finding = held(reading(states()), kind=ReferenceKind.PEER)
    assert "All 6 blocks compute what the peer computed at 2026-09-21" in finding.reason


def test_what_noise_explains_is_ok() -> None:
    """Up to the factor times the noise of repetition nothing departs, above it it does."""
    then = recording(states(noise=LOUD, walk_noise=LOUD))
    allowed = REPEATED_FACTOR * 0.01
    below = held(reading(states({3: {STREAM: moved(0.9 * allowed)}})), then)
    assert (below.health, below.blocks[3].departs) == (Health.OK, False)
    assert below.blocks[3].allowed == pytest.approx(allowed)
    assert "largest relative distance 0.036 (block 3), allowed 0.04" in below.reason
    above = held(reading(states({3: {STREAM: moved(1.1 * allowed)}})), then)
    assert (above.health, above.blocks[3].departs) == (Health.FAILED, True)


def test_without_noise_any_difference_departs() -> None:
    """A device that repeats itself bit for bit allows nothing."""
    finding = held(reading(states({3: {STREAM: moved(1e-12)}})))
    assert (finding.health, finding.blocks[3].allowed, finding.blocks[3].departs) == (Health.FAILED, 0.0, True)


def test_other_numerics_are_allowed_their_rounding() -> None:
    """Recorded by another engine, a block may lie as far away as rounding explains, not as repetition does."""
    allowed = ROUNDING_FACTOR * 0.02
    near = reading(states({3: {STREAM: moved(0.9 * allowed)}}))
    then = states(noise=LOUD, walk_noise=LOUD)
    assert held(near, recording(then, engine="local")).health is Health.OK
    assert held(near, recording(then)).health is Health.FAILED
    far = reading(states({3: {STREAM: moved(1.1 * allowed)}}))
    assert held(far, recording(then, engine="local")).health is Health.FAILED


def test_the_larger_noise_counts_for_other_numerics() -> None:
    """Where repetition is noisier than rounding, it is what the factor applies to."""
    then = states(noise=Noise(repeated=0.05, rounding=0.0), walk_noise=QUIET)
    finding = held(reading(states()), recording(then, dtype="float32"))
    assert finding.blocks[0].allowed == pytest.approx(ROUNDING_FACTOR * 0.05)


@pytest.mark.parametrize(
    ("live", "recorded", "coarser"),
    [("bfloat16", "float32", 2.0**16), ("float32", "bfloat16", 1.0), ("bfloat16", "float16", 8.0), ("new", "old", 1.0)],
)
def test_a_coarser_type_is_allowed_its_own_rounding(live: str, recorded: str, coarser: float) -> None:
    """Rounding was measured in the recording's type: a coarser one rounds by so much more, a finer one by no less."""
    noise = Noise(repeated=0.0, rounding=1e-7)
    then = recording(states(noise=noise, walk_noise=noise), dtype=recorded)
    then = then.model_copy(update={"reading": then.reading.model_copy(update={"dtype": recorded})})
    now = reading(states()).model_copy(update={"dtype": live})
    finding = judge(now, ReferenceKind.PEER, then, conditions(dtype=live))
    assert finding.blocks[0].allowed == pytest.approx(ROUNDING_FACTOR * 1e-7 * coarser)
    for factor, health in ((0.9, Health.OK), (1.1, Health.DEGRADED)):
        rows = moved(factor * ROUNDING_FACTOR * 1e-7 * coarser)
        walked = reading(states(walk={4: rows})).model_copy(update={"dtype": live})
        assert judge(walked, ReferenceKind.PEER, then, conditions(dtype=live)).health is health


@pytest.mark.parametrize(
    "noise", [None, Noise(repeated=None, rounding=0.1), Noise(repeated=float("inf"), rounding=0.1)]
)
def test_unknown_noise_is_unknown(noise: Noise | None) -> None:
    """Where no noise is known a distance proves nothing, and no block is ok."""
    finding = held(reading(states({3: {STREAM: moved(0.5)}})), recording(states(noise=noise, walk_noise=QUIET)))
    assert (finding.health, finding.action) == (Health.UNKNOWN, Action.INVESTIGATE)
    assert (finding.blocks[3].l2, finding.blocks[3].allowed, finding.blocks[3].departs) == (0.5, None, None)
    assert "6 blocks cannot be told, first block 0" in finding.reason
    assert "no noise is known" in finding.blocks[3].reason


def test_unknown_rounding_matters_for_other_numerics_only() -> None:
    """The noise of repetition is enough for the same kernels."""
    then = states(noise=Noise(repeated=0.01, rounding=None), walk_noise=QUIET)
    assert held(reading(states()), recording(then)).health is Health.OK
    assert held(reading(states()), recording(then, engine="local")).health is Health.UNKNOWN


def test_not_finite_departs_whatever_the_noise() -> None:
    """A live block that is not finite where its reference is fails without a number, and without a noise."""
    finding = held(reading(states({3: from_module("mlp.down_proj", NOT_FINITE)})), recording(states(walk_noise=QUIET)))
    assert finding.health is Health.FAILED
    assert (finding.blocks[3].l2, finding.blocks[3].cosine, finding.blocks[3].departs) == (None, None, True)
    assert "block 3: its values are not finite" in finding.reason
    assert where(finding) == [(3, "mlp", "mlp.down_proj")]


def test_a_reference_that_is_not_finite_is_unknown() -> None:
    """Nothing can be held against it, not even the same."""
    broken = states({3: {STREAM: ((NAN, 1.0), (NAN, 1.0))}}, noise=QUIET, walk_noise=QUIET)
    finding = held(reading(broken), recording(broken))
    assert (finding.health, finding.blocks[3].departs) == (Health.UNKNOWN, None)
    assert "1 block cannot be told, first block 3: it cannot be told: the reference is not finite" in finding.reason


def test_three_faults_in_one_pass() -> None:
    """Each is followed to its first module, the first and the last block included; a place and a location for each."""
    faults = {
        0: from_module("input_layernorm", moved(0.3)),
        2: from_module("mlp.up_proj", moved(0.2)),
        5: from_module("self_attn.o_proj", NOT_FINITE),
    }
    walk = {at: moved(0.3) for at in range(1, BLOCKS)} | {BLOCKS: NOT_FINITE}
    finding = held(reading(states(faults, walk=walk, nats=[None, None])))
    assert (finding.health, finding.action) == (Health.FAILED, Action.INVESTIGATE)
    assert where(finding) == [
        (0, "input_layernorm", "input_layernorm"),
        (2, "mlp", "mlp.up_proj"),
        (5, "self_attn", "self_attn.o_proj"),
    ]
    assert [place.block for place in finding.places] == [0, 2, 5]
    assert [block.block for block in finding.blocks if block.departs] == [0, 2, 5]
    assert finding.places[1].reason == (
        "block 2: relative distance 0.2 (1 - cosine 0), allowed 0; it begins at mlp, in mlp.up_proj"
    )
    assert finding.reason.startswith("3 of 6 blocks do not compute what was recorded at 2026-09-21 14:13:20 UTC: ")
    assert all(place.reason in finding.reason for place in finding.places)
    assert "the loss is not finite, and was 3.000 nats" in finding.reason
    assert "behind the blocks" not in finding.reason
    assert (finding.first_jump, finding.nats) == (0, None)


def test_many_faults_are_counted_not_recited() -> None:
    """The reason has the first three and how many more; the places are complete."""
    finding = held(reading(states({block: {STREAM: moved(0.1)} for block in range(5)})))
    assert len(finding.places) == 5
    assert finding.reason.startswith("5 of 6 blocks do not")
    assert "block 2: relative" in finding.reason
    assert "block 3: relative" not in finding.reason
    assert "(and 2 more)" in finding.reason


def test_comparisons_are_counted() -> None:
    """Blocks, the children up to the first that departs, the modules inside it up to the first, and one."""
    finding = held(reading(states({2: from_module("mlp.down_proj", moved(0.2))})))
    # Three children, then up_proj and down_proj.
    assert finding.locations[0].comparisons == BLOCKS + 3 + 2
    assert (finding.effort.blocks, finding.effort.sublayers) == (BLOCKS, 5)
    assert (finding.effort.digests, finding.effort.tensors) == (0, 0)


def test_a_block_that_departs_without_a_part() -> None:
    """Where no child departs by itself, the location ends at the block and says so."""
    finding = held(reading(states({2: {STREAM: moved(0.2)}})))
    assert where(finding) == [(2, None, None)]
    assert finding.locations[0].sentence == "no part of it departs by itself"
    assert finding.locations[0].comparisons == BLOCKS + 3


def test_a_child_that_departs_without_a_module_inside() -> None:
    """Attention that computes something else between its projections is named as the child itself."""
    finding = held(reading(states({2: from_module("self_attn", moved(0.2)) | {"mlp": moved(0.2)}})))
    assert where(finding) == [(2, "self_attn", "self_attn")]
    assert finding.locations[0].sentence == "it begins at self_attn"
    # Two children, and the two projections inside the second.
    assert finding.locations[0].comparisons == BLOCKS + 4


def test_a_child_has_its_own_noise() -> None:
    """A child within its noise is passed over, though the block departs from its own."""
    then = states(noise=LOUD, walk_noise=LOUD)
    faults = {"input_layernorm": moved(0.03), "mlp.down_proj": moved(0.5), "mlp": moved(0.5), STREAM: moved(0.5)}
    assert where(held(reading(states({2: faults})), recording(then))) == [(2, "mlp", "mlp.down_proj")]


def test_a_limit_is_for_blocks() -> None:
    """It takes the place of the noise for blocks, known or not; streams behind blocks are not judged then."""
    now = reading(states({3: from_module("mlp.up_proj", moved(0.3))}, walk={at: moved(0.9) for at in range(4, 7)}))
    fine = held(now, limit=0.31)
    assert (fine.health, fine.blocks[3].allowed, fine.blocks[3].departs) == (Health.OK, 0.31, False)
    assert fine.first_jump == 3
    assert held(reading(states(walk={at: moved(0.2) for at in range(4, 7)})), limit=0.31).first_jump == 3
    assert fine.blocks[3].walk_l2 == pytest.approx(0.9)
    failed = held(now, limit=0.29)
    assert failed.health is Health.FAILED
    assert where(failed) == [(3, "mlp", "mlp.up_proj")]
    noiseless = recording(states(walk_noise=QUIET))
    assert held(now, noiseless, limit=0.31).health is Health.OK
    assert held(reading(states()), noiseless).health is Health.UNKNOWN


def test_a_limit_of_zero_allows_nothing() -> None:
    """Zero is a limit, and not none."""
    then = recording(states(noise=LOUD, walk_noise=LOUD))
    now = reading(states({3: {STREAM: moved(0.001)}}))
    assert held(now, then).health is Health.OK
    assert held(now, then, limit=0.0).health is Health.FAILED


def test_no_rank_and_no_block_are_unknown() -> None:
    """Nothing compared is never ok."""
    nobody = held(reading())
    assert (nobody.health, nobody.action) == (Health.UNKNOWN, Action.INVESTIGATE)
    assert nobody.reason == "No rank answered: nothing was compared"
    empty = held(reading(states(blocks=0), blocks=0))
    assert (empty.health, empty.blocks) == (Health.UNKNOWN, ())
    assert empty.reason.startswith("The model has no blocks: nothing was compared")


def test_a_recording_without_ranks_is_unknown() -> None:
    """There is nothing to hold the blocks against."""
    empty = recording().model_copy(update={"reading": reading()})
    finding = held(reading(states()), empty)
    assert finding.health is Health.UNKNOWN
    assert "6 blocks cannot be told, first block 0: it cannot be told: it was not measured" in finding.reason


def test_a_block_that_one_side_lacks_is_unknown() -> None:
    """A block that was not measured, or not recorded, is never ok."""
    whole, short = states(noise=QUIET, walk_noise=QUIET), states(noise=QUIET, walk_noise=QUIET)
    short = short.model_copy(update={"isolated": short.isolated[:-1]})
    for now, then in ((short, whole), (whole, short)):
        finding = held(reading(now), recording(then))
        assert (finding.health, finding.blocks[5].departs) == (Health.UNKNOWN, None)
        assert finding.effort.blocks == BLOCKS - 1


def test_skipped_blocks_are_judged_alone() -> None:
    """A block that is served at alpha 0 runs alone at 1: a fault in it is found, and how it is served is said."""
    fine = held(reading(states(walk={at: moved(0.9) for at in range(3, 7)}, nats=[9.0, 9.0]), gates={2: 0.0}))
    assert fine.health is Health.OK
    assert fine.first_jump is None
    assert "served with block 2 at alpha 0, so that the walk behind them is not judged" in fine.reason
    assert fine.blocks[2].reason.endswith("served at alpha 0, judged at 1")
    failed = held(reading(states({2: from_module("mlp.up_proj", moved(0.2))}), gates={2: 0.0}))
    assert (failed.health, where(failed)) == (Health.FAILED, [(2, "mlp", "mlp.up_proj")])
    assert failed.blocks[2].gate == 0.0


def test_a_walk_recorded_with_a_gate_is_not_judged() -> None:
    """It was another model that was walked then."""
    then = recording(gates={1: 0.5})
    finding = held(reading(states(walk={at: moved(0.9) for at in range(2, 7)})), then)
    assert (finding.health, finding.first_jump) == (Health.OK, None)
    assert "recorded with block 1 at alpha 0.5, so that the walk behind them is not judged" in finding.reason


def test_a_reference_needs_its_recording() -> None:
    """Recorded or peer without a recording is a mistake of the caller's."""
    for kind in (ReferenceKind.RECORDED, ReferenceKind.PEER):
        with pytest.raises(ValueError, match="needs a recording"):
            judge(reading(states()), kind, None, conditions())


def test_a_finding_is_json() -> None:
    """Infinite distances do not stand in the way of it."""
    finding = held(reading(states({3: {STREAM: NOT_FINITE}}, walk={4: NOT_FINITE})))
    assert DifferentialFinding.model_validate_json(finding.model_dump_json()) == finding


def test_the_loss_is_that_of_the_tokens() -> None:
    """Sequences weigh as many tokens as are predicted in them: 3 and 1."""
    then = recording(states(noise=QUIET, walk_noise=QUIET, nats=[2.0, 4.0]))
    plan = then.plan.model_copy(update={"tokens": [[1, 2, 3, 4], [5, 6]]})
    finding = held(reading(states(nats=[3.0, 4.0])), then.model_copy(update={"plan": plan}))
    assert (finding.nats, finding.reference_nats) == (3.25, 2.5)
