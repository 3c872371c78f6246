"""The walk as served: where it jumps, and what it says that no block alone does; the loss behind it."""

from flipwatch.monitors.differential.comparison import Comparison
from flipwatch.monitors.differential.divergence import Divergence
from flipwatch.monitors.differential.facts import STREAM
from flipwatch.monitors.differential.walk import first_jump
from flipwatch.monitors.finding import Action, Health

from .by_hand import LOUD, NAN, QUIET, Rows, from_module, held, moved, reading, recording, states

NOT_FINITE = ((3.0, 4.0), (0.0, NAN))


def curve(*distances: float, allowed: float = 0.0) -> list[Comparison]:
    """Streams that lie this far away: in front of the blocks, then behind each."""
    return [Comparison(Divergence(l2, 0.0), allowed, l2 > allowed) for l2 in distances]


def from_block(block: int, rows: Rows) -> dict[int, Rows]:
    """A walk that is off behind this block of six and all that follow."""
    return dict.fromkeys(range(block + 1, 7), rows)


def test_the_first_difference_jumps_at_the_fault() -> None:
    """A curve that is flat, rises at one block and stays: that block, the first and the last included."""
    assert first_jump(curve(0, 0, 0, 0, 0.5, 0.55, 0.5, 0.6)) == 3
    assert first_jump(curve(0, 0.5, 0.5, 0.55, 0.5, 0.6)) == 0
    assert first_jump(curve(0, 0, 0, 0, 0, 0.5)) == 4


def test_of_several_jumps_the_first_counts() -> None:
    """A later and larger jump is another fault, or the first one carried on."""
    assert first_jump(curve(0, 0, 0.2, 0.2, 0.21, 0.9, 0.9, 0.9, 0.9, 0.9)) == 1


def test_noise_that_grows_is_no_jump() -> None:
    """Even steps are rounding that adds up, and so is a step within what is allowed."""
    assert first_jump(curve(0, 0.010, 0.021, 0.030, 0.041, 0.050, 0.061)) is None
    assert first_jump(curve(0, 0, 0, 0.3, 0.3, 0.3, 0.3, allowed=0.4)) is None
    assert first_jump(curve(0, 0.010, 0.021, 0.030, 0.300, 0.310, 0.321, allowed=0.1)) == 3


def test_a_stream_that_is_not_finite_is_an_infinite_jump() -> None:
    """Behind it nothing jumps any more; when it enters in front of the blocks, no block does."""
    inf = float("inf")
    assert first_jump(curve(0, 0, inf, inf, inf, inf)) == 1
    assert first_jump(curve(inf, inf, inf, inf)) is None


def test_few_blocks_have_no_spread() -> None:
    """With less than four differences any rise above what is allowed is a jump."""
    assert first_jump(curve(0, 0, 0.5)) == 1
    assert first_jump(curve(0, 0, 0)) is None


def test_a_stream_that_cannot_be_compared_leaves_no_curve() -> None:
    """A gap hides where a jump would be."""
    assert first_jump([*curve(0, 0), Comparison(None, None, None, "why"), *curve(0.5, 0.5)]) is None


def test_the_jump_stands_in_the_finding() -> None:
    """Beside a fault, block and numbers of the walk are told."""
    finding = held(reading(states({3: from_module("mlp", moved(0.2))}, walk=from_block(3, moved(0.2)))))
    assert (finding.health, finding.first_jump) == (Health.FAILED, 3)
    assert "the walk jumps first at block 3" in finding.reason
    assert "as served the stream" not in finding.reason
    assert [round(block.walk_l2 or 0, 6) for block in finding.blocks] == [0, 0, 0, 0.2, 0.2, 0.2]
    assert finding.blocks[3].walk_cosine == 0


def test_damage_in_front_of_the_blocks() -> None:
    """A stream that departs in front of block 0 is the embedding, and fails though every block is right."""
    for rows, told in ((moved(0.2), "relative distance 0.2"), (NOT_FINITE, "its values are not finite")):
        for gates in ({}, {2: 0.0}):
            finding = held(reading(states(walk=dict.fromkeys(range(7), rows)), gates=gates))
            assert (finding.health, finding.action) == (Health.FAILED, Action.INVESTIGATE)
            assert finding.reason.startswith(f"The stream in front of the blocks departs, {told}")
            assert "the damage lies in front of them, in the embedding" in finding.reason
            assert (finding.places, finding.first_jump) == ((), None)


def test_damage_that_shows_only_as_served() -> None:
    """No block departs alone and the walk does: degraded, with the block behind which it does."""
    finding = held(reading(states(walk=from_block(4, moved(0.2)))))
    assert (finding.health, finding.action) == (Health.DEGRADED, Action.INVESTIGATE)
    assert finding.reason.startswith("No block departs alone, but as served the stream does behind block 4, relative")
    assert "such as an expert" in finding.reason
    assert (finding.first_jump, finding.locations) == (4, ())


def test_a_walk_within_its_noise_is_ok() -> None:
    """The same factors hold for the walk."""
    then = recording(states(noise=QUIET, walk_noise=LOUD))
    assert held(reading(states(walk=from_block(4, moved(0.039)))), then).health is Health.OK
    assert held(reading(states(walk=from_block(4, moved(0.041)))), then).health is Health.DEGRADED


def test_a_walk_that_cannot_be_told_is_unknown() -> None:
    """Without its noise (in front of the blocks under gates, too), or with a place missing, it is not ok."""
    noiseless = held(reading(states()), recording(states(noise=QUIET)))
    assert noiseless.health is Health.UNKNOWN
    assert "The stream in front of the blocks, as served: it cannot be told: " in noiseless.reason
    skipped = held(reading(states(), gates={2: 0.0}), recording(states(noise=QUIET)))
    assert skipped.health is Health.UNKNOWN
    now = states().model_copy(update={"walk": states().walk[:-1]})
    short = held(reading(now))
    assert short.health is Health.UNKNOWN
    assert "The stream behind block 5, as served: it cannot be told: it was not measured" in short.reason
    assert held(reading(now), limit=0.1).health is Health.OK


def test_a_limit_holds_in_front_of_the_blocks() -> None:
    """The embedding is one step like a block: within the limit it is fine, above it fails."""
    now = reading(states(walk=dict.fromkeys(range(7), moved(0.2))))
    assert held(now, limit=0.25).health is Health.OK
    assert held(now, limit=0.15).health is Health.FAILED


def test_damage_behind_the_blocks() -> None:
    """Right streams and another loss: degraded; not finite where it was: failed; a small difference is rounding."""
    worse = held(reading(states(nats=[2.5, 4.5])))
    assert (worse.health, worse.action) == (Health.DEGRADED, Action.INVESTIGATE)
    assert "the damage lies behind the blocks" in worse.reason
    assert "the loss is 3.500 nats, and was 3.000 nats" in worse.reason
    assert held(reading(states(nats=[1.5, 3.5]))).health is Health.DEGRADED
    losses: list[list[float | None]] = [[None, None], [2.0, None]]
    for nats in losses:
        broken = held(reading(states(nats=nats)))
        assert (broken.health, broken.nats, broken.reference_nats) == (Health.FAILED, None, 3.0)
        assert "the loss is not finite, and was 3.000 nats" in broken.reason
    near = {at: moved(0.01) for at in range(7)}
    then = recording(states(noise=LOUD, walk_noise=LOUD))
    assert held(reading(states(nats=[2.05, 4.05], walk=near)), then).health is Health.OK
    assert held(reading(states(nats=[2.0005, 4.0005]))).health is Health.OK
    # Where nothing was rounded otherwise, nothing else explains it.
    assert held(reading(states(nats=[2.05, 4.05]))).health is Health.DEGRADED


def test_a_limit_does_not_hide_the_loss() -> None:
    """An update may make it better, and not much worse; one that is no number fails under any limit and any gate."""
    assert held(reading(states(nats=[1.0, 2.0])), limit=0.5).health is Health.OK
    assert held(reading(states(nats=[9.0, 9.0])), limit=0.5).health is Health.DEGRADED
    assert held(reading(states(nats=[None, 4.0])), limit=0.5).health is Health.FAILED
    assert held(reading(states(nats=[None, 4.0]), gates={2: 0.0})).health is Health.FAILED
    assert held(reading(states(nats=[9.0, 9.0]), gates={2: 0.0})).health is Health.OK


def test_a_reference_that_is_no_number_vouches_for_nothing() -> None:
    """Its loss, or some rows of its streams or blocks: unknown, whatever the live model says."""
    lost = recording(states(noise=QUIET, walk_noise=QUIET, nats=[None, 4.0]))
    for nats in ([2.0, 4.0], [None, 4.0]):
        assert held(reading(states(nats=nats)), lost).health is not Health.OK
    some = ((NAN, 4.0), (0.0, 5.0))
    rows = recording(states({1: {STREAM: some}}, noise=QUIET, walk_noise=QUIET))
    finding = held(reading(states()), rows)
    assert (finding.health, finding.blocks[1].departs) == (Health.UNKNOWN, None)
    assert "the reference is not finite in some rows" in finding.reason
    assert held(reading(states({1: {STREAM: moved(0.3)}})), rows).health is Health.FAILED


def test_what_is_in_doubt_is_not_called_right() -> None:
    """Where blocks or streams cannot be told, a walk or a loss that departs is a warning that does not clear them."""
    noiseless = recording(states(walk_noise=QUIET))
    walked = held(reading(states(walk=from_block(4, moved(0.2)))), noiseless)
    assert walked.health is Health.DEGRADED
    assert walked.reason.startswith("As served the stream departs behind block 4, relative")
    assert "6 blocks cannot be told" in walked.reason
    assert "no block departs alone" not in walked.reason
    lost = held(reading(states(nats=[9.0, 9.0])), noiseless)
    assert lost.health is Health.DEGRADED
    assert lost.reason.startswith("The loss is not that of the reference; 6 blocks cannot be told")


def test_the_loss_is_of_the_rank_that_has_it() -> None:
    """Ranks without logits have none, and do not make it unknown."""
    then = recording(*(states(rank=rank, noise=QUIET, walk_noise=QUIET) for rank in range(2)))
    finding = held(reading(states(nats=[None, None]), states(rank=1)), then)
    assert (finding.health, finding.nats) == (Health.OK, 3.0)
