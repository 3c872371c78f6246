"""The judgement half of the alpha-scan, against values computed by hand."""

import json

import pytest

from flipwatch.monitors.alpha_scan import AlphaScanFinding, Thresholds
from flipwatch.monitors.alpha_scan.judgement import judge
from flipwatch.monitors.alpha_scan.scores import MIN_SEQUENCES
from flipwatch.monitors.finding import Action, Health

from .by_hand import Curves, gains, healthy, profile_of, reading

DEFAULTS = Thresholds()


def test_healthy_model_is_ok_with_numbers() -> None:
    """Nothing is flagged, and the sentence still says what was seen and what it rests on."""
    finding = judge([reading([healthy(b) for b in range(6)])], DEFAULTS)
    assert (finding.health, finding.flagged, finding.action) == (Health.OK, (), Action.NONE)
    assert "base loss 2.000 nats over 80 tokens in 8 sequences" in finding.reason
    assert "strongest by skip gain is block 0 (-0.100 nats" in finding.reason
    assert "by BSS block 0" in finding.reason
    assert finding.reason.endswith("; no clean profile was used")
    assert finding.predicted_loss_nats is None


def test_harmful_block_is_flagged() -> None:
    """A block without which the loss is far lower is named, with gain, t and z in the sentence."""
    curves = [healthy(b) for b in range(6)]
    curves[3] = [0.5, 1.9, 1.95, 2.1, 2.5]
    finding = judge([reading(curves)], DEFAULTS)
    assert (finding.health, finding.flagged, finding.action) == (Health.FAILED, (3,), Action.SKIP)
    assert finding.places[0].block == 3
    assert "block 3: without it the loss is 1.500 nats lower (t 198.4, z " in finding.reason
    assert [score.flagged for score in finding.blocks] == [False, False, False, True, False, False]
    assert finding.predicted_loss_nats == pytest.approx(0.5)


def test_harmful_block_is_flagged_whatever_its_z() -> None:
    """Blocks cost very different amounts to leave out, so 2 nats of harm may have a z of only 4."""
    finding = judge([reading(gains(-1.5, -0.2, -0.6, -1.0, -0.1, 2.0))], DEFAULTS)
    z = finding.blocks[5].skip_gain_z
    assert z is not None
    assert z < 6
    assert finding.flagged == (5,)


def test_shadow_of_a_strong_fault_is_named_but_not_flagged() -> None:
    """One block per round by its gain: a second that looks harmful, however much, is in the sentence only."""
    finding = judge([reading(gains(-1.5, -0.2, -0.6, -1.0, -0.1, 2.0, 0.5))], DEFAULTS)
    assert finding.flagged == (5,)
    assert "also better without block 6 (+0.500), perhaps by the same fault" in finding.reason


def test_the_round_without_the_block_decides_about_its_shadow() -> None:
    """What is harmful and stands out without the first block as well is flagged, with what was left out."""
    first = reading(gains(-0.3, -0.2, 2.0, 1.0, -0.1, -0.2))
    still = reading([*gains(-0.3, -0.2), [], *gains(0.9, -0.1, -0.2)], left_out=[2])
    finding = judge([first, still], DEFAULTS)
    assert finding.flagged == (2, 3)
    assert "block 3: without it the loss is 0.900 nats lower" in finding.reason
    assert "(with block 2 left out)" in finding.reason
    assert "also better" not in finding.reason
    assert finding.predicted_loss_nats == pytest.approx(1.1)
    gone = reading([*gains(-0.3, -0.2), [], *gains(-0.1, -0.1, -0.2)], base=0.0, left_out=[2])
    finding = judge([first, gone], DEFAULTS)
    assert finding.flagged == (2,)
    assert "also better" not in finding.reason
    assert finding.predicted_loss_nats == pytest.approx(0.0)
    assert [bool(score.curve) for score in finding.blocks] == [True] * 6
    assert finding.left_out == ()
    assert finding.passes == pytest.approx(24.0)


def test_a_crippled_model_makes_healthy_blocks_look_harmful() -> None:
    """Without a block that may be vital a gain that does not stand out flags nothing, and is named as a shadow."""
    nan = reading([[]] * 6, base=None, nonfinite=[2])
    without = reading([*gains(-0.9, -0.2), [], *gains(0.9, -0.5, 0.1)], left_out=[2])
    finding = judge([nan, without], DEFAULTS)
    assert finding.flagged == (2,)
    assert "also better without block 3 (+0.900)" in finding.reason
    gated = reading([*gains(-0.9, -0.2), [], *gains(0.9, -0.5, 0.1)], gates=[1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    finding = judge([gated], DEFAULTS)
    assert (finding.flagged, finding.health) == ((), Health.DEGRADED)
    assert "also better without block 3 (+0.900), block 5 (+0.100), perhaps for want of the blocks" in finding.reason


def test_a_profile_knows_what_the_model_can_do_without() -> None:
    """Without a block that costs little the next gain flags as it is; without the one block that explains it, none."""
    clean = profile_of(reading(gains(-0.4, -0.2, -0.3, -0.1, -0.5, -0.2)))
    without = reading([*gains(-0.9, -0.2), [], *gains(0.9, -0.5, 0.1)], base=3.0, left_out=[2])
    first = reading([[3.4, 3.4, 3.4, 3.4, 3.4]] * 6, base=3.4, nonfinite=[2])
    assert judge([first, without], DEFAULTS).flagged == (2,)
    assert judge([first, without], DEFAULTS, clean).flagged == (2, 3)
    explained = reading([*gains(-0.9, -0.2), [], *gains(0.9, -0.5, 0.1)], base=2.3, left_out=[2])
    assert judge([first, explained], DEFAULTS, clean).flagged == (2,)


def test_small_gain_is_not_flagged() -> None:
    """A gain that is certain and stands out but is below the minimum in nats does not flag."""
    curves = gains(0.0, 0.0, 0.0, 0.0, 0.04)
    finding = judge([reading(curves)], DEFAULTS)
    score = finding.blocks[4]
    assert score.skip_gain_z is not None
    assert score.skip_gain_z > 6
    assert score.skip_gain_t is not None
    assert score.skip_gain_t > 3
    assert (finding.health, finding.flagged) == (Health.OK, ())
    assert judge([reading(curves)], Thresholds(min_gain_nats=0.03)).flagged == (4,)


def test_uncertain_gain_is_not_flagged() -> None:
    """A large gain that is below the minimum in standard errors may be an accident of the sequences."""
    curves = gains(-0.1, -0.2, -0.3, -0.4, 0.5)
    uncertain = reading(curves, spread=0.25)
    finding = judge([uncertain], DEFAULTS)
    assert finding.blocks[4].skip_gain_t == pytest.approx(0.5 / (0.5 / 7**0.5))
    assert (finding.health, finding.flagged) == (Health.OK, ())
    assert judge([uncertain], Thresholds(min_gain_t=2.6)).flagged == (4,)


@pytest.mark.parametrize("sequences", [2, MIN_SEQUENCES - 2])
def test_few_sequences_prove_nothing(sequences: int) -> None:
    """A large gain on too few sequences has no t: unknown, never flagged; without a gain the model is ok."""
    finding = judge([reading(gains(-0.1, -0.2, -0.3, -0.4, 3.0), sequences=sequences)], DEFAULTS)
    assert (finding.health, finding.flagged, finding.action) == (Health.UNKNOWN, (), Action.NONE)
    assert finding.blocks[4].skip_gain == pytest.approx(3.0)
    assert finding.blocks[4].skip_gain_t is None
    assert "block 4 looks harmful (+3.000 nats), but fewer than 8 sequences prove nothing" in finding.reason
    assert judge([reading(gains(-0.1, -0.2), sequences=sequences)], DEFAULTS).health is Health.OK


def test_bss_alone_never_flags_but_is_mentioned() -> None:
    """A block with a huge BSS that the model needs is reported in the sentence only."""
    curves = [healthy(b) for b in range(6)]
    curves[5] = [6.0, 4.0, 2.5, 2.5, 4.0]
    finding = judge([reading(curves)], DEFAULTS)
    assert finding.health is Health.OK
    assert "over tau 6, which alone is no alarm" in finding.reason


def test_saturated_loss_still_names_the_block() -> None:
    """When every other block changes nothing (MAD 0), the one that brings the loss down is flagged."""
    curves: Curves = [[10.8] * 5 for _ in range(6)]
    curves[1] = [7.6, 10.8, 10.8, 10.8, 10.8]
    finding = judge([reading(curves, base=10.8)], DEFAULTS)
    assert finding.flagged == (1,)
    assert finding.blocks[1].bss == pytest.approx(0.0)


def test_nonfinite_blocks_fail_without_scores() -> None:
    """Blocks named by the first pass are flagged; the base loss is None, not a number."""
    finding = judge([reading([[], [], [], []], base=None, nonfinite=[1, 3])], DEFAULTS)
    assert (finding.health, finding.flagged, finding.action) == (Health.FAILED, (1, 3), Action.SKIP)
    assert finding.base_loss_nats is None
    assert finding.blocks[0].skip_gain is None
    assert "block 1: its output is not finite" in finding.reason


def test_scores_come_from_the_round_that_has_curves() -> None:
    """A model with a broken block has none: those without it are shown, and the finding says what was left out."""
    broken = reading([[], [], [], [], []], base=None, nonfinite=[1])
    without = reading([healthy(0), [], healthy(2), healthy(3), healthy(4)], left_out=[1])
    finding = judge([broken, without], DEFAULTS)
    assert (finding.flagged, finding.left_out) == ((1,), (1,))
    assert finding.base_loss_nats is None
    assert finding.predicted_loss_nats == pytest.approx(2.0)
    assert finding.blocks[2].skip_gain == pytest.approx(-0.12)
    assert finding.blocks[1].flagged


@pytest.mark.parametrize(("without", "flagged"), [(1.5, (2,)), (2.5, ())])
def test_an_explosion_is_flagged_when_the_model_is_better_without(without: float, flagged: tuple[int, ...]) -> None:
    """The round without the block tells a fault from a model that works like this."""
    served = reading([[], [], [], [], []], exploding=[2])
    after = reading([healthy(0), healthy(1), [], healthy(3), healthy(4)], base=without, left_out=[2])
    assert judge([served, after], DEFAULTS).flagged == flagged
    assert judge([served], DEFAULTS).flagged == (2,)


def test_only_way_out_of_a_nonfinite_loss_is_flagged() -> None:
    """The stream overflows behind all blocks: the block without which the loss is finite is the culprit."""
    curves: Curves = [[None] * 5 for _ in range(5)]
    curves[2] = [3.0, None, None, None, None]
    finding = judge([reading(curves, base=None)], DEFAULTS)
    assert (finding.health, finding.flagged) == (Health.FAILED, (2,))
    assert "finite only without it, 3.000 nats" in finding.reason
    assert finding.predicted_loss_nats == pytest.approx(3.0)
    curves[4] = [2.5, None, None, None, None]
    two = judge([reading(curves, base=None)], DEFAULTS)
    assert two.flagged == (4,)
    assert "finite without it, 2.500 nats" in two.reason


def test_nonfinite_loss_without_a_culprit_fails() -> None:
    """A broken head: failed all the same, no block named, somebody must look."""
    finding = judge([reading([[None] * 5 for _ in range(5)], base=None)], DEFAULTS)
    assert (finding.health, finding.flagged, finding.action) == (Health.FAILED, (), Action.INVESTIGATE)


def test_gated_block_is_degraded_and_unscored() -> None:
    """A skipped block is not scored, and the state says that the model serves without it."""
    curves = [healthy(b) for b in range(6)]
    curves[4] = []
    finding = judge([reading(curves, gates=[1.0, 1.0, 1.0, 1.0, 0.0, 1.0])], DEFAULTS)
    assert finding.health is Health.DEGRADED
    assert "serving without block 4" in finding.reason
    assert finding.blocks[4].skip_gain is None
    half = judge([reading(curves, gates=[1.0, 1.0, 1.0, 1.0, 0.5, 1.0])], DEFAULTS)
    assert half.health is Health.DEGRADED
    assert "serving with block 4 at alpha 0.5" in half.reason


def test_no_data_is_unknown() -> None:
    """No sequences, no grid, or no alpha 0: unknown, never ok."""
    empty = reading([[]], alphas=[], sequences=0)
    assert judge([empty], DEFAULTS).health is Health.UNKNOWN
    base_only = judge([reading([[] for _ in range(6)], alphas=[])], DEFAULTS)
    assert (base_only.health, base_only.base_loss_nats) == (Health.UNKNOWN, pytest.approx(2.0))
    no_skip = judge([reading([[2.1, 2.1]] * 6, alphas=[0.7, 1.3])], DEFAULTS)
    assert no_skip.health is Health.UNKNOWN
    assert no_skip.blocks[0].skip_gain is None
    assert no_skip.blocks[0].slope is not None


def test_few_blocks_are_judged_without_z() -> None:
    """Three blocks have no z, but a harmful one among them is found all the same."""
    finding = judge([reading([healthy(0), healthy(1), healthy(2)])], DEFAULTS)
    assert (finding.health, finding.blocks[0].skip_gain_z) == (Health.OK, None)
    assert judge([reading([healthy(0), healthy(1), [1.0] * 5])], DEFAULTS).flagged == (2,)


def test_finding_survives_json() -> None:
    """No NaN is in the JSON, and the finding reads back equal."""
    for finding in (
        judge([reading([[None] * 5 for _ in range(5)], base=None)], DEFAULTS),
        judge([reading([healthy(b) for b in range(6)])], DEFAULTS, profile_of(reading([healthy(b) for b in range(6)]))),
    ):
        text = finding.model_dump_json()
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
        assert AlphaScanFinding.model_validate_json(text) == finding


def test_one_sequence_proves_nothing() -> None:
    """The least that can be measured is never flagged."""
    finding = judge([reading(gains(-0.1, -0.2, -0.3, -0.4, 3.0), sequences=1)], DEFAULTS)
    assert (finding.health, finding.flagged) == (Health.UNKNOWN, ())
