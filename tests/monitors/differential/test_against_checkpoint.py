"""Judgement against the checkpoint: tensors by name, compute faults, tensors that it has no value for."""

from typing import Any

import pytest

from flipwatch.monitors.differential.comparison import REPEATED_FACTOR
from flipwatch.monitors.differential.facts import STREAM, CleanBlock, Noise
from flipwatch.monitors.differential.judgement import judge
from flipwatch.monitors.differential.reference import ReferenceKind
from flipwatch.monitors.finding import Action, Health

from .by_hand import (
    BLOCKS,
    LOUD,
    NAN,
    QUIET,
    Rows,
    against_checkpoint,
    clean_block,
    conditions,
    difference,
    from_module,
    moved,
    reading,
    states,
)

NOT_FINITE = ((3.0, 4.0), (0.0, NAN))


def clean(**blocks: Any) -> list[CleanBlock]:
    """All blocks, right but for those named: `b2={...}`."""
    return [clean_block(block, **blocks.get(f"b{block}", {})) for block in range(BLOCKS)]


def test_equal_blocks_are_ok() -> None:
    """The sentence names the checkpoint; nothing is walked, and there is no loss."""
    finding = against_checkpoint(reading(states(noise=QUIET, clean=clean())))
    assert (finding.health, finding.action) == (Health.OK, Action.NONE)
    assert finding.reason == (
        "All 6 blocks compute what the checkpoint's tensors give: largest relative distance 0 (block 0), allowed 0; "
        "not compared: what lies outside the blocks, and buffers that no checkpoint has"
    )
    assert (finding.reference, finding.recorded_at, finding.first_jump) == (ReferenceKind.CHECKPOINT, None, None)
    assert (finding.nats, finding.reference_nats, finding.blocks[0].walk_l2) == (None, None, None)
    assert (finding.effort.brute_force, finding.effort.tensors) == (9 * BLOCKS, 0)


def test_three_tensors_in_one_pass() -> None:
    """Each differing tensor is a location, also two in one block; their counts are the worker's."""
    pair = [difference(4, "self_attn.qkv_proj", ["k_proj"]), difference(4, "mlp.up_proj")]
    faults: dict[int, dict[str, Rows]] = {
        1: from_module("input_layernorm", moved(0.2)),
        4: from_module("self_attn.q_proj", NOT_FINITE),
    }
    cleans = clean(
        b1={"tensors": [difference(1, "input_layernorm")], "sublayers": 1, "digests": 1},
        b4={"tensors": pair, "sublayers": 2, "digests": 6},
    )
    finding = against_checkpoint(reading(states(faults, noise=QUIET, clean=cleans)))
    assert (finding.health, finding.action) == (Health.FAILED, Action.REPAIR)
    assert [(f.block, f.sublayer, f.module, f.parts, f.comparisons) for f in finding.locations] == [
        (1, "input_layernorm", "input_layernorm", (), BLOCKS + 1 + 1),
        (4, "self_attn", "self_attn.qkv_proj", ("k_proj",), BLOCKS + 2 + 1),
        (4, "mlp", "mlp.up_proj", (), BLOCKS + 2 + 1),
    ]
    assert finding.locations[0].tensor == "model.layers.1.input_layernorm.weight"
    assert finding.locations[1].diagnosis == pair[0].diagnosis
    assert finding.locations[1].sentence == (
        "against the checkpoint, 1 bit of model.layers.4.self_attn.qkv_proj.weight changed: element [1, 2], bit 14, "
        "0.5 became 1e+38 (single bit flip), in rows of k_proj"
    )
    assert [place.block for place in finding.places] == [1, 4]
    assert finding.places[1].reason.endswith("in rows of k_proj (and 1 more)")
    effort = finding.effort
    assert (effort.blocks, effort.sublayers, effort.digests, effort.tensors) == (BLOCKS, 3, 7, 3)
    assert finding.reason.startswith("2 of 6 blocks do not compute what the checkpoint's tensors give: block 1: ")


def test_a_tensor_of_the_block_itself() -> None:
    """A parameter that no module inside the block has is the block's."""
    found = difference(2, "scale").model_copy(update={"module": STREAM})
    finding = against_checkpoint(
        reading(states({2: {STREAM: moved(0.2)}}, noise=QUIET, clean=clean(b2={"tensors": [found]})))
    )
    assert [(f.sublayer, f.module, f.tensor) for f in finding.locations] == [(None, None, found.tensor)]


def test_equal_tensors_that_compute_something_else() -> None:
    """No tensor to repair: a compute fault is suspected, and the descent says where it begins."""
    faults = {2: from_module("mlp.up_proj", moved(0.2))}
    finding = against_checkpoint(reading(states(faults, noise=QUIET, clean=clean(b2={"sublayers": 3, "digests": 9}))))
    assert (finding.health, finding.action) == (Health.FAILED, Action.INVESTIGATE)
    (found,) = finding.locations
    assert (found.sublayer, found.module, found.tensor, found.diagnosis) == ("mlp", "mlp.up_proj", None, None)
    assert found.sentence == (
        "it computes something else with equal tensors (a compute fault?), and it begins at mlp, in mlp.up_proj"
    )
    assert found.comparisons == BLOCKS + 3 + 1


def test_a_block_that_departs_with_tensors_unknown() -> None:
    """Where some tensors have no value in the checkpoint, the fault may be in them: no compute fault is suspected."""
    lacking = {"not_comparable": ["model.layers.2.x has another layout."]}
    finding = against_checkpoint(reading(states({2: {STREAM: moved(0.2)}}, noise=QUIET, clean=clean(b2=lacking))))
    assert finding.health is Health.FAILED
    assert finding.locations[0].sentence == (
        "the 9 tensors that can be compared are equal, and no part of it departs by itself"
    )
    assert "1 tensor has no value in the checkpoint" in finding.reason


def test_a_tensor_without_a_value_is_unknown() -> None:
    """What the checkpoint cannot vouch for is never ok, and is named once."""
    lacking = {"not_comparable": ["model.layers.2.x has another layout.", "y is missing."]}
    finding = against_checkpoint(reading(states(noise=QUIET, clean=clean(b2=lacking, b3=lacking))))
    assert (finding.health, finding.action) == (Health.UNKNOWN, Action.INVESTIGATE)
    assert finding.not_comparable == ("model.layers.2.x has another layout.", "y is missing.")
    assert finding.reason == "2 tensors have no value in the checkpoint, first: model.layers.2.x has another layout"


def test_a_differing_tensor_fails_within_the_noise() -> None:
    """Memory that is not the checkpoint's is a fact, however little it changes what the block computes."""
    cleans = clean(b2={"tensors": [difference(2, "mlp.up_proj")], "sublayers": 3})
    finding = against_checkpoint(reading(states({2: {STREAM: moved(0.001)}}, noise=LOUD, clean=cleans)))
    assert (finding.health, finding.action) == (Health.FAILED, Action.REPAIR)
    assert finding.blocks[2].departs is False
    assert finding.reason.startswith("Block 2: relative distance 0.001 (1 - cosine 0), allowed 0.04; against the")


def test_the_live_noise_is_allowed() -> None:
    """It was measured in the same reading, by the same kernels: repetition counts, rounding does not."""
    noise = Noise(repeated=0.01, rounding=0.5)
    allowed = REPEATED_FACTOR * 0.01
    for factor, health in ((0.9, Health.OK), (1.1, Health.FAILED)):
        now = states({2: {STREAM: moved(factor * allowed)}}, noise=noise, clean=clean())
        assert against_checkpoint(reading(now)).health is health


def test_without_noise_nothing_is_told_but_what_is_not_finite() -> None:
    """A checkpoint measurement without noise is unknown; a live block that is not finite fails."""
    unknown = against_checkpoint(reading(states(clean=clean())))
    assert unknown.health is Health.UNKNOWN
    failed = against_checkpoint(reading(states({2: {STREAM: NOT_FINITE}}, clean=clean())))
    assert (failed.health, failed.blocks[2].departs) == (Health.FAILED, True)


def test_a_clean_block_that_is_not_finite_is_unknown() -> None:
    """The checkpoint's own tensors may give nothing to hold against."""
    finding = against_checkpoint(
        reading(states(noise=QUIET, clean=clean(b2={"wrong": {STREAM: ((NAN, 1.0), (NAN, 1.0))}})))
    )
    assert (finding.health, finding.blocks[2].departs) == (Health.UNKNOWN, None)


def test_gates_do_not_matter() -> None:
    """A skipped block is judged at alpha 1, and the sentence says that it is skipped."""
    finding = against_checkpoint(reading(states(noise=QUIET, clean=clean()), gates={2: 0.0}))
    assert finding.health is Health.OK
    assert finding.reason.endswith("served with block 2 at alpha 0")


def test_the_size_of_the_sketches_is_the_plans() -> None:
    """Without a recording the plan's default holds, in whose rows these sketches have no place."""
    now = reading(states(noise=QUIET, clean=clean()))
    with pytest.raises(ValueError, match="no whole rows of 32 numbers"):
        judge(now, ReferenceKind.CHECKPOINT, None, conditions())


def test_another_models_checkpoint_is_not_believed() -> None:
    """Too many tensors differ for a fault: the files are the wrong ones, no block is flagged, no repair suggested."""
    faults = {block: from_module("mlp.up_proj", moved(0.2)) for block in range(BLOCKS)}
    apart = {"tensors": [difference(0, f"mlp.{at}") for at in range(5)]}
    foreign = clean(**{f"b{block}": apart for block in range(BLOCKS)})
    finding = against_checkpoint(reading(states(faults, noise=QUIET, clean=foreign)))
    assert (finding.health, finding.action) == (Health.UNKNOWN, Action.INVESTIGATE)
    assert (finding.places, finding.locations) == ((), ())
    assert {block.departs for block in finding.blocks} == {None}
    assert finding.reason == (
        "30 of 54 tensors are not the checkpoint's: these files are not what the model was loaded from, and nothing is "
        "judged by them"
    )
    few = clean(b2={"tensors": [difference(2, f"mlp.{at}") for at in range(5)]})
    # 5 of 54 are less than a tenth.
    assert against_checkpoint(reading(states(faults, noise=QUIET, clean=few))).health is Health.FAILED
