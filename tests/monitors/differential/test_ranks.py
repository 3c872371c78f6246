"""Several ranks: all of them count, and other parallel sizes are compared where the widths match."""

from flipwatch.monitors.differential.facts import STREAM
from flipwatch.monitors.finding import Action, Health

from .by_hand import (
    BLOCKS,
    LOUD,
    NAN,
    QUIET,
    Rows,
    against_checkpoint,
    clean_block,
    difference,
    from_module,
    held,
    moved,
    reading,
    recording,
    states,
)

SHARDS = {"self_attn.q_proj": 4, "mlp.up_proj": 4}
"""Widths of what each of two ranks has half of."""


def test_one_rank_of_several_is_enough() -> None:
    """A block departs if the stream of any rank does, and the largest distance is told."""
    then = recording(*(states(rank=rank, noise=QUIET, walk_noise=QUIET) for rank in range(2)))
    faults = {3: from_module("mlp.down_proj", moved(0.2))}
    finding = held(reading(states(), states(faults, rank=1)), then)
    assert finding.health is Health.FAILED
    assert [(found.block, found.module) for found in finding.locations] == [(3, "mlp.down_proj")]
    assert round(finding.blocks[3].l2 or 0, 6) == 0.2
    both = held(reading(states({3: {STREAM: moved(0.4)}}), states(faults, rank=1)), then)
    assert round(both.blocks[3].l2 or 0, 6) == 0.4
    broken = held(reading(states(faults), states({3: {STREAM: ((3.0, 4.0), (0.0, NAN))}}, rank=1)), then)
    assert broken.blocks[3].l2 is None


def test_ranks_meet_their_own_reference() -> None:
    """Shards of one width are compared by the number of the rank, in whatever order they answer."""
    other: Rows = ((1.0, 1.0), (2.0, 2.0))
    shard = {block: {"mlp.up_proj": other} for block in range(BLOCKS)}
    then = recording(
        states(rank=0, noise=QUIET, walk_noise=QUIET), states(shard, rank=1, noise=QUIET, walk_noise=QUIET)
    )
    assert held(reading(states(shard, rank=1), states(rank=0)), then).health is Health.OK
    fault = {3: from_module("mlp", moved(0.2))}
    shard[3] = shard[3] | fault[3]
    finding = held(reading(states(shard, rank=1), states(fault, rank=0)), then)
    assert [(found.block, found.module) for found in finding.locations] == [(3, "mlp")]


def test_a_rank_that_cannot_be_told_leaves_the_block_unknown() -> None:
    """An equal rank does not vouch for one without noise; one that departs fails all the same."""
    then = recording(states(noise=QUIET, walk_noise=QUIET), states(rank=1, walk_noise=QUIET))
    finding = held(reading(states(), states(rank=1)), then)
    assert (finding.health, finding.blocks[0].departs) == (Health.UNKNOWN, None)
    failed = held(reading(states({0: {STREAM: moved(0.2)}}), states(rank=1)), then)
    assert (failed.health, failed.blocks[0].departs) == (Health.FAILED, True)


def test_another_parallel_size_is_compared_by_its_streams() -> None:
    """Two ranks against a recording of one: streams and children are whole, parts of activations are passed over."""
    then = recording(states(noise=LOUD, walk_noise=LOUD), tensor_parallel_size=2)
    fine = held(reading(states(widths=SHARDS), states(rank=1, widths=SHARDS)), then)
    assert (fine.health, fine.effort.blocks) == (Health.OK, BLOCKS)
    faults = {3: from_module("mlp.up_proj", moved(0.5))}
    finding = held(reading(*(states(faults, rank=rank, widths=SHARDS) for rank in range(2))), then)
    assert finding.health is Health.FAILED
    (found,) = finding.locations
    assert (found.sublayer, found.module) == ("mlp", "mlp.down_proj")
    assert found.sentence == "it begins at mlp, in mlp.down_proj (mlp.up_proj in front of it could not be compared)"
    # Three children and down_proj.
    assert found.comparisons == BLOCKS + 4


def test_other_streams_are_unknown() -> None:
    """A stream of another width cannot be compared, and is not ok."""
    finding = held(reading(states(widths={STREAM: 4})))
    assert (finding.health, finding.blocks[0].departs, finding.blocks[0].l2) == (Health.UNKNOWN, None, None)
    assert "it has another shape than the reference's" in finding.reason


def test_children_of_another_shape_are_named() -> None:
    """Where no child departs but some could not be compared, the sentence says which."""
    finding = held(reading(states({3: {STREAM: moved(0.5)}}, widths={"mlp": 4})))
    (found,) = finding.locations
    assert (found.sublayer, found.module) == (None, None)
    assert found.sentence == "no part of it departs by itself (mlp could not be compared)"


def test_a_tensor_of_one_rank_is_named_with_it() -> None:
    """The sum of two ranks departs on both; the damaged tensor is one rank's, and no compute fault is suspected."""
    faults = {3: from_module("mlp.down_proj", moved(0.5))}
    clean = [clean_block(block) for block in range(BLOCKS)]
    damaged = list(clean)
    damaged[3] = clean_block(3, tensors=[difference(3, "mlp.down_proj")], sublayers=3, digests=2)
    finding = against_checkpoint(
        reading(states(faults, noise=QUIET, clean=clean), states(faults, rank=1, noise=QUIET, clean=damaged))
    )
    assert (finding.health, finding.action) == (Health.FAILED, Action.REPAIR)
    (found,) = finding.locations
    assert (found.block, found.module, found.tensor) == (3, "mlp.down_proj", "model.layers.3.mlp.down_proj.weight")
    assert "against the checkpoint on rank 1, 1 bit of model.layers.3.mlp.down_proj.weight changed" in found.sentence
    assert finding.effort.brute_force == 2 * 9 * BLOCKS


def test_a_rank_without_clean_blocks_is_unknown() -> None:
    """One rank that could not read the checkpoint leaves every block unknown."""
    clean = [clean_block(block) for block in range(BLOCKS)]
    other = states(rank=1, noise=QUIET)
    finding = against_checkpoint(reading(states(noise=QUIET, clean=clean), other))
    assert finding.health is Health.UNKNOWN
    assert "it was not measured" in finding.reason
