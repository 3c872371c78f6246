"""The blocks of a Hugging Face model run alone, and modules that hold other tensors for a while."""

import pytest
import torch
from torch import Tensor, nn

from flipwatch.monitors.differential.facts import STREAM, DifferentialPlan, DifferentialReading
from flipwatch.monitors.differential.judgement import judge
from flipwatch.monitors.differential.monitor import Differential
from flipwatch.monitors.differential.reference import ReferenceKind
from flipwatch.monitors.differential.view import CleanTensors
from flipwatch.monitors.finding import Health
from flipwatch.probe.activations import handed_on, holding
from flipwatch.probe.local import run_measurement
from flipwatch.probe.local_dissection import LocalDissection

from .small_llama import llama

TOKENS = [[1, 5, 9, 2, 7, 3], [4, 4, 8]]


@pytest.fixture
def view() -> LocalDissection:
    """A random Llama of five blocks."""
    torch.manual_seed(7)
    return LocalDissection(llama())


def measured(view: LocalDissection, plan: DifferentialPlan) -> DifferentialReading:
    """The reading, after as many steps as were announced."""
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    announced = Differential().steps(plan, view.num_blocks)
    reading = run_measurement(view, Differential(), plan, step)
    assert steps == announced
    return reading


def test_a_block_alone_is_the_block(view: LocalDissection) -> None:
    """Its stream is what the walk computes, bit for bit; its modules come in the order in which they run."""
    tokens = torch.tensor([TOKENS[0]])
    hidden = view.embed(tokens)
    with torch.inference_mode():
        found = view.dissect(1, hidden, tokens)
        assert torch.equal(found[STREAM], view.block(1, hidden, tokens).reshape(6, -1))
    names = list(found)
    assert names[0] == "input_layernorm"
    assert names[-3:] == ["mlp.down_proj", "mlp", STREAM]
    assert names.index("self_attn.o_proj") < names.index("self_attn") < names.index("post_attention_layernorm")
    assert all(activation.shape[0] == 6 for activation in found.values())


def test_a_reading_has_every_block_and_replays_bit_for_bit(view: LocalDissection) -> None:
    """Recorded with its inputs and noise; fed again, the same states come out."""
    plan = DifferentialPlan(tokens=TOKENS, prefix=4, size=8, noise=True)
    recorded = measured(view, plan)
    (rank,) = recorded.ranks
    blocks = view.num_blocks
    assert (len(rank.walk), len(rank.walk_noise), len(rank.isolated), len(rank.inputs)) == (
        blocks + 1,
        blocks + 1,
        blocks,
        blocks,
    )
    assert (len(rank.nats), rank.clean, recorded.gates, recorded.dtype) == (2, [], [1.0] * blocks, "float32")
    stream = rank.isolated[0].points[-1]
    assert stream.noise is not None
    assert stream.noise.repeated == 0.0
    assert 0.0 < (stream.noise.rounding or 0.0) < 1e-5
    replay = plan.model_copy(update={"inputs": rank.inputs, "inputs_dtype": recorded.dtype, "noise": False})
    (again,) = measured(view, replay).ranks
    assert again.walk == rank.walk
    assert [block.points[-1].sketch for block in again.isolated] == [block.points[-1].sketch for block in rank.isolated]
    assert again.inputs == []


def test_padding_and_gates_do_not_reach_the_states(view: LocalDissection) -> None:
    """A longer sequence beside it changes nothing; a block that is left out is run alone all the same."""
    both = measured(view, DifferentialPlan(tokens=TOKENS, size=8)).ranks[0]
    alone = measured(view, DifferentialPlan(tokens=TOKENS[1:], size=8)).ranks[0]
    assert both.nats[1] == pytest.approx(alone.nats[0], abs=1e-5)
    view.gates[1] = 0.0
    skipped = measured(view, DifferentialPlan(tokens=TOKENS, size=8)).ranks[0]
    assert skipped.walk[1] == both.walk[1]
    assert skipped.walk[2] == skipped.walk[1]
    assert skipped.isolated[1].points[-1].sketch == both.isolated[1].points[-1].sketch


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": ["", ""]}, "inputs for 2 blocks"),
        ({"checkpoint": True, "inputs": None, "inputs_dtype": None}, "no checkpoint"),
    ],
    ids=["inputs", "checkpoint"],
)
def test_what_does_not_fit_is_refused(view: LocalDissection, change: dict[str, object], words: str) -> None:
    """One sentence."""
    plan = DifferentialPlan(tokens=TOKENS, inputs=["AAAA"] * view.num_blocks, inputs_dtype="float32")
    with pytest.raises(ValueError, match=words):
        measured(view, plan.model_copy(update=change))


def test_inputs_of_another_width_are_refused(view: LocalDissection) -> None:
    """Before anything is run with them."""
    plan = DifferentialPlan(tokens=TOKENS, inputs=["AAAA"] * view.num_blocks, inputs_dtype="float32")
    with pytest.raises(ValueError, match="block 0 has 3 bytes"):
        measured(view, plan)


class Beside(LocalDissection):
    """A view that has a checkpoint: its own tensors, but for one sign of a zero in block 2."""

    def clean(self, index: int) -> CleanTensors:
        tensors = {name: tensor.clone() for name, tensor in self.tensors(index).items()}
        if index == 2:
            tensors["mlp.down_proj.weight"][3, 4] = -0.0
        return CleanTensors(tensors, [])


def test_a_wrong_value_that_changes_no_output_is_seen() -> None:
    """The digests of all tensors are compared: the block hands on the same, and its tensor is not the checkpoint's."""
    torch.manual_seed(7)
    view = Beside(llama())
    view.layers[2].mlp.down_proj.weight.data[3, 4] = 0.0
    reading = measured(view, DifferentialPlan(tokens=TOKENS, checkpoint=True, noise=True))
    (rank,) = reading.ranks
    assert [block.points[-1].sketch for block in rank.clean] == [block.points[-1].sketch for block in rank.isolated]
    assert [len(block.tensors) for block in rank.clean] == [0, 0, 1, 0, 0]
    finding = judge(reading, ReferenceKind.CHECKPOINT)
    assert finding.health is Health.FAILED
    (spot,) = finding.locations
    assert (spot.block, spot.module, spot.diagnosis and spot.diagnosis.first) == (2, "mlp.down_proj", [3, 4])
    # The blocks, no child of one, and the tensor.
    assert spot.comparisons == view.num_blocks + 1


class Twice(nn.Module):
    """A module that is known under two names, as MLA's projections are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = self.first
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale


def test_a_module_with_two_names_gets_its_own_tensor_back() -> None:
    """Under both of them other tensors count within, and its own, the very object, afterwards; also after an error."""
    block = Twice()
    own, scale = block.first.weight, block.scale
    other = {"first.weight": torch.eye(2) * 3, "scale": torch.full((2,), 2.0)}
    with holding(block, other):
        assert block(torch.ones(1, 2)).tolist() == [[18.0, 18.0]]
    assert block.first.weight is own
    assert block.scale is scale
    with pytest.raises(RuntimeError), holding(block, other):
        raise RuntimeError
    assert block.second.weight is own


def test_only_what_has_a_row_per_token_is_kept() -> None:
    """The first call of a module counts, and what it handed on is not changed by what is done to it later."""
    block = Twice()
    with torch.inference_mode(), handed_on(block, 3) as kept:
        out = block(torch.ones(3, 2))
        once = kept["first"].clone()
        out.zero_()
    assert list(kept) == ["first"]
    assert torch.equal(kept["first"], once)
    with handed_on(block, 5) as kept:
        block(torch.ones(3, 2))
    assert kept == {}
