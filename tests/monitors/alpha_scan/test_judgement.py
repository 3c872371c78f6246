"""The judgement half of the alpha-scan, against values computed by hand."""

import json
import math

import pytest

from flipwatch.monitors.alpha_scan import AlphaScan, AlphaScanFinding, AlphaScanReading
from flipwatch.monitors.finding import Action, Health

ALPHAS = [0.0, 0.6, 0.9, 1.1, 1.4]


def reading(
    curves: list[list[float | None]],
    *,
    base: float | None = 2.0,
    alphas: list[float] | None = None,
    gates: list[float] | None = None,
    nonfinite: list[int] | None = None,
) -> AlphaScanReading:
    """One sequence of 10 scored tokens; one loss per block and alpha."""
    return AlphaScanReading(
        alphas=ALPHAS if alphas is None else alphas,
        gates=gates or [1.0] * len(curves),
        scored_tokens=[10],
        base_nats=[base],
        nats=[[[loss] for loss in curve] for curve in curves],
        nonfinite_blocks=nonfinite or [],
        passes=12.0,
    )


def healthy(block: int) -> list[float | None]:
    """A flat, symmetric curve; leaving the block out costs a little, each block differently."""
    return [2.1 + 0.01 * block, 2.02, 2.01, 2.01, 2.02]


def test_golden_scores() -> None:
    """BSS, slope, skip gain and largest deviation of one curve, by hand."""
    curves = [[2.5, 2.4, 2.1, 1.9, 1.7], *[healthy(b) for b in range(1, 6)]]
    score = AlphaScan().judge(reading(curves)).blocks[0]
    assert score.bss == pytest.approx(math.sqrt(0.4**2 + 0.1**2 + 0.1**2 + 0.3**2))
    assert score.slope == pytest.approx((1.9 - 2.1) / 0.2)
    assert score.skip_gain == pytest.approx(-0.5)
    assert score.largest_deviation == pytest.approx(0.4)


def test_golden_z() -> None:
    """Skip gains -.1 to -.4 and 3: median -.2, MAD .1, so the faulty block has z 3.2 / .14826."""
    curves: list[list[float | None]] = [[2.0 - gain, 2.0, 2.0, 2.0, 2.0] for gain in (-0.1, -0.2, -0.3, -0.4, 3.0)]
    finding = AlphaScan().judge(reading(curves))
    assert finding.blocks[4].skip_gain_z == pytest.approx(3.2 / 0.14826)
    assert finding.flagged == (4,)


def test_losses_are_weighted_by_tokens() -> None:
    """Two sequences with 1 and 3 scored tokens: the base loss is (1 * 4 + 3 * 2) / 4."""
    two = AlphaScanReading(
        alphas=[0.0],
        gates=[1.0],
        scored_tokens=[1, 3],
        base_nats=[4.0, 2.0],
        nats=[[[8.0, 4.0]]],
        nonfinite_blocks=[],
        passes=1.0,
    )
    finding = AlphaScan().judge(two)
    assert finding.base_loss_nats == pytest.approx(2.5)
    assert finding.blocks[0].skip_gain == pytest.approx(2.5 - 5.0)


def test_healthy_model_is_ok_with_numbers() -> None:
    """Nothing is flagged, and the sentence still says what was seen."""
    finding = AlphaScan().judge(reading([healthy(b) for b in range(6)]))
    assert (finding.health, finding.flagged, finding.action) == (Health.OK, (), Action.NONE)
    assert "base loss 2.000 nats" in finding.reason
    assert "strongest by skip gain is block 0 (-0.100 nats" in finding.reason
    assert "by BSS block 0" in finding.reason


def test_harmful_block_is_flagged() -> None:
    """A block without which the loss is far lower is named, with the gain and z in the sentence."""
    curves = [healthy(b) for b in range(6)]
    curves[3] = [0.5, 1.9, 1.95, 2.1, 2.5]
    finding = AlphaScan().judge(reading(curves))
    assert (finding.health, finding.flagged, finding.action) == (Health.FAILED, (3,), Action.SKIP)
    assert finding.places[0].block == 3
    assert "1.500 nats lower" in finding.reason
    assert [score.flagged for score in finding.blocks] == [False, False, False, True, False, False]


def test_harmful_block_is_flagged_whatever_its_z() -> None:
    """Blocks cost very different amounts to leave out, so 2 nats of harm may have a z of only 4."""
    gains = [-1.5, -0.2, -0.6, -1.0, -0.1, 2.0]
    curves: list[list[float | None]] = [[2.0 - gain, 2.0, 2.0, 2.0, 2.0] for gain in gains]
    finding = AlphaScan().judge(reading(curves))
    z = finding.blocks[5].skip_gain_z
    assert z is not None
    assert z < 6
    assert finding.flagged == (5,)


def test_shadow_of_a_strong_fault_is_named_but_not_flagged() -> None:
    """A second block that looks harmful without standing out is in the sentence only."""
    gains = [-1.5, -0.2, -0.6, -1.0, -0.1, 2.0, 0.5]
    curves: list[list[float | None]] = [[2.0 - gain, 2.0, 2.0, 2.0, 2.0] for gain in gains]
    finding = AlphaScan().judge(reading(curves))
    assert finding.flagged == (5,)
    assert "also better without block 6 (+0.500)" in finding.reason


def test_two_harmful_blocks_that_stand_out_are_both_flagged() -> None:
    """The second worst is flagged when its z is over tau as well."""
    gains = [-0.1, -0.2, -0.3, -0.4, -0.2, 3.0, 1.0]
    curves: list[list[float | None]] = [[2.0 - gain, 2.0, 2.0, 2.0, 2.0] for gain in gains]
    assert AlphaScan().judge(reading(curves)).flagged == (5, 6)
    assert AlphaScan(tau=30).judge(reading(curves)).flagged == (5,)


def test_small_gain_is_not_flagged() -> None:
    """A gain that stands out but is below the minimum in nats does not flag."""
    curves: list[list[float | None]] = [[2.0 - gain, 2.0, 2.0, 2.0, 2.0] for gain in (0.0, 0.0, 0.0, 0.0, 0.04)]
    finding = AlphaScan().judge(reading(curves))
    z = finding.blocks[4].skip_gain_z
    assert z is not None
    assert z > 6
    assert finding.flagged == ()
    assert AlphaScan(min_gain_nats=0.03).judge(reading(curves)).flagged == (4,)


def test_bss_alone_never_flags_but_is_mentioned() -> None:
    """A block with a huge BSS that the model needs is reported in the sentence only."""
    curves = [healthy(b) for b in range(6)]
    curves[5] = [6.0, 4.0, 2.5, 2.5, 4.0]
    finding = AlphaScan().judge(reading(curves))
    assert finding.health is Health.OK
    assert "over tau 6, which alone is no alarm" in finding.reason


def test_saturated_loss_still_names_the_block() -> None:
    """When every other block changes nothing (MAD 0), the one that brings the loss down is flagged."""
    curves: list[list[float | None]] = [[10.8] * 5 for _ in range(6)]
    curves[1] = [7.6, 10.8, 10.8, 10.8, 10.8]
    finding = AlphaScan().judge(reading(curves, base=10.8))
    assert finding.flagged == (1,)
    assert finding.blocks[1].bss == 0.0


def test_nonfinite_blocks_fail_without_scores() -> None:
    """Blocks named by the first pass are flagged; the base loss is None, not a number."""
    finding = AlphaScan().judge(reading([[], [], [], []], base=None, nonfinite=[1, 3]))
    assert (finding.health, finding.flagged, finding.action) == (Health.FAILED, (1, 3), Action.SKIP)
    assert finding.base_loss_nats is None
    assert finding.blocks[0].skip_gain is None
    assert "block 1" in finding.reason
    assert "not finite" in finding.reason


def test_only_way_out_of_a_nonfinite_loss_is_flagged() -> None:
    """The stream overflows behind all blocks: the block without which the loss is finite is the culprit."""
    curves: list[list[float | None]] = [[None] * 5 for _ in range(5)]
    curves[2] = [3.0, None, None, None, None]
    finding = AlphaScan().judge(reading(curves, base=None))
    assert (finding.health, finding.flagged) == (Health.FAILED, (2,))
    assert "finite only without it, 3.000 nats" in finding.reason


def test_nonfinite_loss_without_a_culprit_fails() -> None:
    """A broken head: failed all the same, no block named, somebody must look."""
    finding = AlphaScan().judge(reading([[None] * 5 for _ in range(5)], base=None))
    assert (finding.health, finding.flagged, finding.action) == (Health.FAILED, (), Action.INVESTIGATE)


def test_nonfinite_loss_at_one_alpha_removes_only_its_scores() -> None:
    """An overflow at alpha 1.4 takes BSS and largest deviation of that block; slope and skip gain stay."""
    curves = [healthy(b) for b in range(6)]
    curves[2] = [2.1, 2.02, 2.01, 2.01, None]
    score = AlphaScan().judge(reading(curves)).blocks[2]
    assert score.bss is None
    assert score.bss_z is None
    assert score.largest_deviation is None
    assert score.slope == pytest.approx(0.0)
    assert score.skip_gain == pytest.approx(-0.1)


def test_gated_block_is_degraded_and_unscored() -> None:
    """A skipped block is not scored, and the state says that the model serves without it."""
    curves = [healthy(b) for b in range(6)]
    curves[4] = []
    finding = AlphaScan().judge(reading(curves, gates=[1.0, 1.0, 1.0, 1.0, 0.0, 1.0]))
    assert finding.health is Health.DEGRADED
    assert "serving without block 4" in finding.reason
    assert finding.blocks[4].skip_gain is None
    half = AlphaScan().judge(reading(curves, gates=[1.0, 1.0, 1.0, 1.0, 0.5, 1.0]))
    assert half.health is Health.DEGRADED
    assert "serving with block 4 at alpha 0.5" in half.reason


def test_no_data_is_unknown() -> None:
    """No sequences, no grid, or no alpha 0: unknown, never ok."""
    scan = AlphaScan()
    empty = AlphaScanReading(
        alphas=[], gates=[1.0], scored_tokens=[], base_nats=[], nats=[[]], nonfinite_blocks=[], passes=0.0
    )
    assert scan.judge(empty).health is Health.UNKNOWN
    base_only = scan.judge(reading([[] for _ in range(6)], alphas=[]))
    assert (base_only.health, base_only.base_loss_nats) == (Health.UNKNOWN, 2.0)
    no_skip = scan.judge(reading([[2.1, 2.1]] * 6, alphas=[0.7, 1.3]))
    assert no_skip.health is Health.UNKNOWN
    assert no_skip.blocks[0].skip_gain is None
    assert no_skip.blocks[0].slope is not None


def test_few_blocks_are_judged_without_z() -> None:
    """Three blocks have no z, but a harmful one among them is found all the same."""
    finding = AlphaScan().judge(reading([healthy(0), healthy(1), healthy(2)]))
    assert (finding.health, finding.blocks[0].skip_gain_z) == (Health.OK, None)
    assert AlphaScan().judge(reading([healthy(0), healthy(1), [1.0] * 5])).flagged == (2,)


def test_lopsided_grid_has_no_slope() -> None:
    """Without a pair around 1 there is no slope; 0 and 2 are no pair."""
    finding = AlphaScan().judge(reading([[2.1, 2.2, 2.3]] * 5, alphas=[0.0, 0.7, 2.0]))
    assert finding.blocks[0].slope is None
    assert finding.blocks[0].bss == pytest.approx(math.hypot(0.2, 0.3))


def test_finding_survives_json() -> None:
    """No NaN is in the JSON, and the finding reads back equal."""
    finding = AlphaScan().judge(reading([[None] * 5 for _ in range(5)], base=None))
    text = finding.model_dump_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert AlphaScanFinding.model_validate_json(text) == finding
