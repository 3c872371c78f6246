"""Joining the readings of one scan."""

from typing import Any

import pytest

from flipwatch.monitors.alpha_scan import AlphaScan, AlphaScanReading
from flipwatch.monitors.alpha_scan.reading import joined, rounds

from .random_model import RandomModel, changed, drain, plan


def measured(**changes: Any) -> AlphaScanReading:
    """A reading of the random model, by the plan with these changes."""
    return drain(AlphaScan().measure(RandomModel(), changed(plan(), **changes)))[0]


def part(start: int, stop: int, **changes: Any) -> AlphaScanReading:
    """A reading of some of the plan's sequences."""
    order = plan()
    rows = {"tokens": order.tokens[start:stop], "scored_from": order.scored_from[start:stop]}
    return measured(first_sequence=start, **rows, **changes)


def assert_same(mine: AlphaScanReading, theirs: AlphaScanReading) -> None:
    """The same losses, to rounding: batches differ, and so does their padding."""
    assert (mine.alphas, mine.scored_tokens) == (theirs.alphas, theirs.scored_tokens)
    assert (mine.pass_tokens, mine.first_sequence) == (theirs.pass_tokens, theirs.first_sequence)
    assert mine.base_nats == pytest.approx(theirs.base_nats, rel=1e-6)
    for block, rows in enumerate(theirs.nats):
        assert len(mine.nats[block]) == len(rows)
        for alpha in theirs.alphas if rows else []:
            assert mine.at(block, alpha) == pytest.approx(theirs.at(block, alpha), rel=1e-6)


def test_one_reading_is_joined_with_its_alphas_in_order() -> None:
    """A single reading stays what it is, but for the order of its alphas."""
    one = joined([measured(alphas=[1.3, 0.0, 0.7])])
    assert_same(one, measured(alphas=[0.0, 0.7, 1.3]))


def test_parts_of_the_sequences_are_joined() -> None:
    """In whatever order they come; the passes are those of all over all tokens."""
    first, second, third = part(0, 1), part(1, 2), part(2, 5)
    together = joined([third, first, second])
    assert_same(together, measured())
    work = sum(one.passes * one.pass_tokens for one in (first, second, third))
    assert together.passes == pytest.approx(work / together.pass_tokens)


def test_alphas_of_one_model_are_joined() -> None:
    """Two grids over the same sequences make one, each row where it belongs."""
    assert_same(joined([measured(alphas=[1.3, 0.0]), measured(alphas=[0.7])]), measured(alphas=[0.0, 0.7, 1.3]))


def test_blocks_are_joined() -> None:
    """Blocks measured apart stand side by side; one that was measured in no reading has nothing."""
    together = joined([measured(blocks=[3]), measured(blocks=[0, 1])])
    assert_same(together, measured(blocks=[0, 1, 3]))


def test_more_alphas_for_some_blocks() -> None:
    """A second stage: the others have no losses at those alphas."""
    together = joined([measured(alphas=[0.0, 0.7]), measured(alphas=[0.6], blocks=[2])])
    assert together.alphas == [0.0, 0.6, 0.7]
    assert together.at(2, 0.6) == measured(alphas=[0.6], blocks=[2]).at(2, 0.6)
    assert together.at(1, 0.6) == []
    assert together.at(1, 0.7) == measured(alphas=[0.0, 0.7]).at(1, 0.7)


def test_a_row_on_part_of_the_sequences_is_left_out() -> None:
    """Block 1 and alpha 0.7 were measured on the first two sequences only: no mean over half of them is made."""
    together = joined([part(0, 2, alphas=[0.0, 0.7]), part(2, 5, alphas=[0.0], blocks=[0, 2, 3, 4])])
    assert len(together.base_nats) == 5
    assert together.nats[1] == []
    assert together.at(0, 0.7) == []
    assert len(together.at(0, 0.0)) == 5


def test_a_reading_of_more_sequences_replaces_its_parts() -> None:
    """Sequences that were measured again, all together, count once."""
    together = joined([part(0, 2), part(2, 5, alphas=[]), part(0, 5)])
    assert_same(together, measured())


def test_sequences_behind_a_gap_are_left_out() -> None:
    """Without the second part, the third does not follow the first."""
    assert_same(joined([part(0, 1), part(2, 5)]), joined([part(0, 1)]))


def test_groups_stay_apart_from_blocks() -> None:
    """The losses of groups are never taken for those of their first block; alone, they are all there is."""
    groups = measured(group=2, alphas=[0.0])
    together = joined([groups, measured(blocks=[1])])
    assert together.group == 1
    assert [bool(rows) for rows in together.nats] == [False, True, False, False, False]
    assert together.passes == pytest.approx(groups.passes + measured(blocks=[1]).passes)
    assert joined([groups]).group == 2
    assert joined([groups]).at(2, 0.0) == groups.at(2, 0.0)


def test_broken_blocks_of_all_readings_are_named() -> None:
    """What one part of the sequences meets holds for the model."""
    one = part(0, 2).model_copy(update={"nonfinite_blocks": [3], "exploding_blocks": [4]})
    two = part(2, 5).model_copy(update={"nonfinite_blocks": [1, 3], "exploding_blocks": [0]})
    together = joined([one, two])
    assert (together.nonfinite_blocks, together.exploding_blocks) == ([1, 3], [0, 4])
    assert not together.complete


def test_rounds_are_the_models_that_were_measured() -> None:
    """One joined reading for each set of blocks left out, in the order in which it came first."""
    readings = [
        part(0, 2),
        measured(left_out=[3], alphas=[0.0]),
        part(2, 5),
        measured(left_out=[1, 3], alphas=[0.0]),
    ]
    served, without, further = rounds(readings)
    assert_same(served, measured())
    assert (without.left_out, further.left_out) == ([3], [1, 3])
    assert without.base_nats == measured(left_out=[3], alphas=[]).base_nats
