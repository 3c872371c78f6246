"""Which plan follows which reading: whole scans of a toy model whose losses are known."""

import pytest

from flipwatch.monitors.alpha_scan import FULL_GRID, QUICK_GRID, AlphaScanPlan, Strategy
from flipwatch.monitors.alpha_scan.rounds import FIRST_SEQUENCES, GROUP
from flipwatch.monitors.finding import Action, Health

from .toy_model import BLOCKS, ToyModel, scanned, toy_plan

EVERY = pytest.mark.parametrize("strategy", list(Strategy))
ALL = list(range(BLOCKS))


def sequences(plan: AlphaScanPlan) -> range:
    """Which sequences of the order a plan holds."""
    return range(plan.first_sequence, plan.first_sequence + len(plan.tokens))


@EVERY
def test_a_healthy_model_is_ok(strategy: Strategy) -> None:
    """No strategy flags a block, and none goes on behind its first round."""
    scan = scanned(ToyModel(), strategy=strategy)
    assert (scan.finding.health, scan.finding.flagged) == (Health.OK, ())
    assert not any(plan.left_out for plan in scan.plans)
    assert scan.finding.predicted_loss_nats is None


@EVERY
@pytest.mark.parametrize("block", [0, 5, 11])
def test_every_strategy_ends_with_the_same_block(strategy: Strategy, block: int) -> None:
    """A block that does harm is flagged wherever it stands, and the loss without it is the formula's."""
    model = ToyModel(harm={block: 3.0})
    finding = scanned(model, strategy=strategy).finding
    assert (finding.health, finding.action, finding.flagged) == (Health.FAILED, Action.SKIP, (block,))
    tokens = range(finding.sequences)
    assert finding.base_loss_nats == pytest.approx(model.loss(tokens=tokens))
    assert finding.predicted_loss_nats == pytest.approx(model.loss([block], tokens))


def test_plain_measures_the_order_and_then_without_the_block() -> None:
    """Round two: alpha 0 only, on all blocks but the flagged one."""
    order = toy_plan()
    first, second = scanned(ToyModel(harm={5: 3.0}), order).plans
    assert first == order
    assert second == order.model_copy(update={"left_out": [5], "alphas": [0.0]})


def test_two_stage_takes_the_full_grid_for_what_stands_out() -> None:
    """The second stage holds the rest of the grid for the best blocks; BSS over the blocks stays the quick grid's."""
    model = ToyModel(harm={5: 3.0})
    scan = scanned(model, strategy=Strategy.TWO_STAGE)
    assert scan.plans[1].alphas == [alpha for alpha in FULL_GRID if alpha not in QUICK_GRID]
    blocks = scan.plans[1].blocks
    assert blocks is not None
    assert 5 in blocks
    assert len(blocks) < BLOCKS / 2
    assert scan.plans[2].left_out == [5]
    curves = {score.block: [alpha for alpha, _ in score.curve] for score in scan.finding.blocks}
    assert curves[5] == list(FULL_GRID)
    assert [block for block in ALL if curves[block] == list(QUICK_GRID)] == [b for b in ALL if b not in blocks]
    quick = scanned(model).finding
    assert [score.bss for score in scan.finding.blocks] == pytest.approx([score.bss for score in quick.blocks])


def test_two_stage_has_nothing_to_add_to_the_full_grid() -> None:
    """An order that holds the full grid already is measured once."""
    assert len(scanned(ToyModel(), toy_plan(alphas=FULL_GRID), Strategy.TWO_STAGE).plans) == 1


def test_grouped_looks_into_the_two_best_groups() -> None:
    """Alpha 0 for groups first, then the order's grid in two of them, one of which holds the block."""
    scan = scanned(ToyModel(harm={5: 3.0}), strategy=Strategy.GROUPED)
    groups, inside, without = scan.plans
    assert (groups.group, groups.alphas) == (GROUP, [0.0])
    assert (inside.group, inside.alphas) == (1, list(QUICK_GRID))
    assert inside.blocks is not None
    assert len(inside.blocks) == 2 * GROUP
    assert 5 in inside.blocks
    assert without.left_out == [5]


def test_grouped_misses_a_block_among_costly_neighbours() -> None:
    """The stated limit: where the rest of the group is worth more than the harm, other groups look better."""
    worth = [0.3] * 4 + [1.5] * 4 + [0.3] * 4
    model = ToyModel(harm={5: 3.0}, worth=worth)
    assert scanned(model).finding.flagged == (5,)
    assert scanned(model, strategy=Strategy.GROUPED).finding.flagged == ()


def test_grouped_measures_all_blocks_when_the_loss_is_not_finite() -> None:
    """Groups cannot be compared with a loss that is not a number; the block that makes it one is found all the same."""
    model = ToyModel(size={5: 50.0}, too_much=40.0)
    scan = scanned(model, strategy=Strategy.GROUPED)
    assert scan.plans[1] == toy_plan()
    assert scan.finding.flagged == (5,)
    assert scan.finding.predicted_loss_nats == pytest.approx(model.loss([5]))


def test_growing_stops_early_when_the_case_is_clear() -> None:
    """A healthy model, and one with a strong fault, need only the first sequences."""
    for harm in ({}, {5: 3.0}):
        scan = scanned(ToyModel(harm=harm), toy_plan(64), Strategy.GROWING)
        assert {sequences(plan) for plan in scan.plans} == {range(FIRST_SEQUENCES)}
        assert scan.finding.sequences == FIRST_SEQUENCES


def test_growing_takes_all_sequences_when_the_case_is_unclear() -> None:
    """A gain near the threshold with a large spread: twice as many each time, each measured once, up to the end."""
    model = ToyModel(harm={5: 0.35}, spread=0.4)
    scan = scanned(model, toy_plan(50), Strategy.GROWING)
    first = [plan for plan in scan.plans if not plan.left_out]
    assert [sequences(plan) for plan in first] == [range(8), range(8, 16), range(16, 32), range(32, 50)]
    plain = scanned(model, toy_plan(50)).finding
    assert scan.finding.sequences == 50
    assert [s.skip_gain for s in scan.finding.blocks] == pytest.approx([s.skip_gain for s in plain.blocks])
    assert [s.skip_gain_t for s in scan.finding.blocks] == pytest.approx([s.skip_gain_t for s in plain.blocks])
    assert scan.finding.passes == pytest.approx(plain.passes)


def test_growing_goes_on_while_two_blocks_are_too_close() -> None:
    """Two equal faults: the ranking is not stable, so all sequences are used; both are found."""
    model = ToyModel(harm={5: 3.0, 8: 2.99}, spread=0.1)
    scan = scanned(model, toy_plan(32), Strategy.GROWING)
    assert scan.finding.flagged == (5, 8)
    assert scan.finding.sequences == 32
    model = ToyModel(harm={5: 3.0, 8: 1.0})
    assert scanned(model, toy_plan(32), Strategy.GROWING).finding.sequences == FIRST_SEQUENCES


def test_one_sequence_can_never_be_stable() -> None:
    """Growing with one sequence ends all the same, with nothing flagged."""
    scan = scanned(ToyModel(harm={5: 3.0}), toy_plan(1), Strategy.GROWING)
    assert len(scan.plans) == 1
    assert scan.finding.health is Health.UNKNOWN


@EVERY
@pytest.mark.parametrize("faults", [(2, 9), (1, 6, 10), (4, 5)])
def test_several_faults_are_found_one_after_the_other(strategy: Strategy, faults: tuple[int, ...]) -> None:
    """Two and three harmful blocks at once: the strongest first, each in a round without those before."""
    harm = {block: 3.0 - 0.5 * number for number, block in enumerate(faults)}
    model = ToyModel(harm=harm)
    scan = scanned(model, strategy=strategy)
    assert scan.finding.flagged == faults
    left_out = [plan.left_out for plan in scan.plans if plan.left_out]
    assert left_out == [sorted(faults[:number]) for number in range(1, min(len(faults), 2) + 1)]
    tokens = range(scan.finding.sequences)
    assert scan.finding.predicted_loss_nats == pytest.approx(model.loss(faults, tokens))


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_than_max_faults_are_looked_for(most: int) -> None:
    """Of four, so many are flagged; the next one is named as what may be their shadow."""
    model = ToyModel(harm={1: 4.0, 4: 3.0, 7: 2.0, 10: 1.0})
    scan = scanned(model, max_faults=most)
    assert scan.finding.flagged == (1, 4, 7)[:most]
    assert f"also better without block {(4, 7, 10)[most - 1]}" in scan.finding.reason
    assert len(scan.plans) == most
    assert scan.finding.predicted_loss_nats == pytest.approx(model.loss((1, 4, 7)[:most]))


@EVERY
def test_a_nonfinite_and_a_harmful_block(strategy: Strategy) -> None:
    """The first pass names the NaN; the curves come from the model without it, and show the harmful one."""
    model = ToyModel(harm={8: 3.0}, nan=frozenset({3}))
    scan = scanned(model, strategy=strategy)
    assert scan.finding.flagged == (3, 8)
    assert scan.finding.base_loss_nats is None
    assert scan.finding.left_out == (3,)
    assert [bool(score.curve) for score in scan.finding.blocks] == [block != 3 for block in ALL]
    assert [plan.left_out for plan in scan.plans] == [[], [3], [3, 8]]
    assert scan.plans[1].alphas == list(QUICK_GRID)
    assert scan.plans[2].alphas == [0.0]
    assert scan.finding.predicted_loss_nats == pytest.approx(model.loss([3, 8], range(scan.finding.sequences)))


@EVERY
def test_three_saturating_blocks_are_named_at_once(strategy: Strategy) -> None:
    """Each alone drives the loss to its cap, so no skip of one shows anything: the first pass names all three."""
    model = ToyModel(harm=dict.fromkeys((2, 6, 9), 100.0), size=dict.fromkeys((2, 6, 9), 1e6), cap=10.8)
    scan = scanned(model, strategy=strategy)
    assert scan.finding.base_loss_nats == pytest.approx(10.8)
    assert scan.finding.flagged == (2, 6, 9)
    assert [plan.left_out for plan in scan.plans] == [[], [2, 6, 9]]
    assert "explodes" in scan.finding.reason
    assert all(score.curve for score in scan.finding.blocks if score.block not in (2, 6, 9))
    assert scan.finding.predicted_loss_nats == pytest.approx(model.loss([2, 6, 9], range(scan.finding.sequences)))


@EVERY
def test_a_healthy_block_that_adds_a_lot_is_not_flagged(strategy: Strategy) -> None:
    """It looks like an explosion, but the model is worse without it: not flagged, and all blocks have their curves."""
    scan = scanned(ToyModel(size={4: 1e5}), strategy=strategy)
    assert (scan.finding.health, scan.finding.flagged) == (Health.OK, ())
    assert scan.finding.left_out == ()
    assert [plan.left_out for plan in scan.plans][:3] == [[], [4], []]
    assert scan.plans[2].explosion_ratio is None
    assert all(score.curve for score in scan.finding.blocks)
    assert scan.finding.blocks[4].skip_gain == pytest.approx(-0.34)


@EVERY
def test_a_fault_beside_a_healthy_block_that_adds_a_lot(strategy: Strategy) -> None:
    """The harmful block is flagged, the one that only adds a lot is not, and the strategy does its further steps."""
    model = ToyModel(harm={8: 3.0}, size={4: 1e5})
    scan = scanned(model, strategy=strategy)
    assert scan.finding.flagged == (8,)
    assert scan.finding.predicted_loss_nats == pytest.approx(model.loss([8], range(scan.finding.sequences)))
    if strategy is Strategy.TWO_STAGE:
        assert [alpha for alpha, _ in scan.finding.blocks[8].curve] == list(FULL_GRID)


def test_growing_with_a_healthy_block_that_adds_a_lot() -> None:
    """All further sequences are measured as well, and their losses count."""
    scan = scanned(ToyModel(harm={5: 0.35}, spread=0.4, size={4: 1e5}), toy_plan(32), Strategy.GROWING)
    assert scan.finding.sequences == 32
    assert all(score.curve for score in scan.finding.blocks)


@pytest.mark.parametrize(("harm", "flagged"), [({4: 100.0}, (4,)), ({}, ())])
def test_growing_meets_an_explosion_in_later_sequences(harm: dict[int, float], flagged: tuple[int, ...]) -> None:
    """A block that explodes on some sequences only: all that were measured count, with curves, harmful or not."""
    unclear = {5: 0.35}
    model = ToyModel(harm=harm | unclear, spread=0.4, size={4: 1e6}, large_from=8, worth=[0.3] * BLOCKS)
    scan = scanned(model, toy_plan(16), Strategy.GROWING)
    assert scan.finding.flagged == flagged
    assert scan.finding.sequences == 16
    assert all(score.curve for score in scan.finding.blocks if score.block not in flagged)


@EVERY
def test_nothing_follows_an_empty_grid(strategy: Strategy) -> None:
    """Where only the base loss is wanted, one plan is all, also on a broken model."""
    for model in (ToyModel(), ToyModel(nan=frozenset({2})), ToyModel(size={3: 1e6}, harm={3: 100.0})):
        order = toy_plan(alphas=())
        assert scanned(model, order, strategy).plans == [order]


@EVERY
def test_a_model_of_broken_blocks_comes_to_an_end(strategy: Strategy) -> None:
    """All blocks are NaN, or all but one, or all harmful: the scan ends, and names what it found."""
    assert scanned(ToyModel(nan=frozenset(ALL)), strategy=strategy).finding.flagged == tuple(ALL)
    assert scanned(ToyModel(nan=frozenset(ALL[1:])), strategy=strategy).finding.flagged == tuple(ALL[1:])
    assert scanned(ToyModel(harm=dict.fromkeys(ALL, 3.0)), strategy=strategy).finding.flagged != ()


@EVERY
def test_gated_blocks_stay_gated_in_all_rounds(strategy: Strategy) -> None:
    """A block that is served at alpha 0 is neither scanned nor flagged, and the others are."""
    model = ToyModel(harm={2: 3.0, 8: 3.0}, gates=[0.0 if block == 2 else 1.0 for block in ALL])
    finding = scanned(model, strategy=strategy).finding
    assert finding.flagged == (8,)
    assert finding.blocks[2].curve == ()
