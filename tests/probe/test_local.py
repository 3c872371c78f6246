"""The local engine against Hugging Face's own forward, on tiny random models."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from flipwatch.monitors.alpha_scan import QUICK_GRID, AlphaScan, AlphaScanPlan
from flipwatch.monitors.monitor import ModelView
from flipwatch.probe.local import LocalView, run_measurement, run_scan

from .small_llama import LAYERS, VOCAB, llama, ragged


def gpt2() -> PreTrainedModel:
    """Learned positions, tied head."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=32, initializer_range=0.3)
    )


def gemma2() -> PreTrainedModel:
    """Scaled embedding, sandwich norms, a mask per layer kind, capped logits."""
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=4,
            initializer_range=0.3,
        )
    )


def bloom() -> PreTrainedModel:
    """Layers return tuples; the mask is handed over per sequence."""
    return BloomForCausalLM(
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=LAYERS, n_head=4, initializer_range=0.3)
    )


MODELS = pytest.mark.parametrize("make", [llama, gpt2, gemma2, bloom])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def batch() -> tuple[Tensor, Tensor]:
    """Three sequences of 9 tokens, different first scored positions."""
    tokens = torch.randint(VOCAB, (3, 9))
    return tokens, torch.arange(9)[None, :] >= torch.tensor([[1], [4], [8]])


def walk(view: LocalView, tokens: Tensor, copies: int = 1) -> Tensor:
    """The stream behind the last block."""
    hidden = view.embed(tokens).repeat(copies, 1, 1)
    for index in range(view.num_blocks):
        hidden = view.block(index, hidden, tokens)
    return hidden


def own_nats(model: PreTrainedModel, tokens: Tensor, scored: Tensor) -> list[float]:
    """Hugging Face's cross-entropy, one sequence at a time."""
    labels = tokens.masked_fill(~scored, -100)
    rows = [slice(n, n + 1) for n in range(len(tokens))]
    return [float(model(input_ids=tokens[row], labels=labels[row], use_cache=False).loss) for row in rows]


@MODELS
@torch.inference_mode()
def test_block_by_block_equals_the_models_own_forward(make: Callable[[], PreTrainedModel]) -> None:
    """Embedding, every block, norm and head: loss and logits are the model's to 1e-5, also for copies."""
    view = LocalView(make())
    tokens, scored = batch()
    hidden = walk(view, tokens, copies=2)
    expected = own_nats(view.model, tokens, scored)
    assert view.nats(hidden, tokens, scored).tolist() == pytest.approx(expected * 2, abs=1e-5)
    logits = view._logits(hidden.flatten(0, 1)).reshape(2, 3, 9, VOCAB)
    own = view.model(input_ids=tokens).logits
    assert torch.allclose(logits[0], own, atol=1e-5)
    assert torch.allclose(logits[1], own, atol=1e-5)


@pytest.mark.parametrize("skipped", [0, 2, LAYERS - 1])
@torch.inference_mode()
def test_skip_equals_the_model_with_that_layer_removed(skipped: int) -> None:
    """A gate of 0 gives the losses of a model that never had the layer."""
    model = llama()
    shorter = copy.deepcopy(model)
    del shorter.model.layers[skipped]
    shorter.config.num_hidden_layers = LAYERS - 1
    view = LocalView(model)
    view.gates[skipped] = 0.0
    tokens, scored = batch()
    expected = own_nats(shorter, tokens, scored)
    assert view.nats(walk(view, tokens), tokens, scored).tolist() == pytest.approx(expected, abs=1e-5)


@torch.inference_mode()
def test_gate_between_damps_the_contribution() -> None:
    """A gate of 0.25 adds a quarter of what the block adds."""
    view = LocalView(llama())
    tokens, _ = batch()
    hidden = view.embed(tokens)
    full = view.block(0, hidden, tokens)
    view.gates[0] = 0.25
    assert torch.allclose(view.block(0, hidden, tokens), hidden + 0.25 * (full - hidden), atol=1e-6)


@torch.inference_mode()
def test_skip_masks_nan() -> None:
    """A block full of NaN leaves no trace at a gate of 0."""
    view = LocalView(llama())
    for weight in view.layers[2].parameters():
        weight.fill_(torch.nan)
    tokens, scored = batch()
    assert view.nats(walk(view, tokens), tokens, scored).isnan().all()
    view.gates[2] = 0.0
    assert view.nats(walk(view, tokens), tokens, scored).isfinite().all()


def plan() -> AlphaScanPlan:
    """Three sequences of different lengths, in more than one chunk."""
    rows = ragged()
    return AlphaScanPlan(alphas=list(QUICK_GRID), tokens=rows, scored_from=[1, 4, 1], tokens_per_step=60)


@MODELS
def test_scan_equals_hugging_face(make: Callable[[], PreTrainedModel]) -> None:
    """The scan's base loss is Hugging Face's own cross-entropy; alpha 0 is the model with the gate at 0."""
    view, order = LocalView(make()), plan()
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    reading = run_measurement(view, AlphaScan(), order, count)
    assert steps == AlphaScan().steps(order, LAYERS)
    with torch.inference_mode():
        for n, (row, first) in enumerate(zip(order.tokens, order.scored_from, strict=True)):
            tokens, scored = torch.tensor([row]), torch.arange(len(row))[None, :] >= first
            assert reading.base_nats[n] == pytest.approx(own_nats(view.model, tokens, scored)[0], abs=1e-5)
            view.gates[3] = 0.0
            assert reading.nats[3][0][n] == pytest.approx(
                float(view.nats(walk(view, tokens), tokens, scored)), abs=1e-5
            )
            view.gates[3] = 1.0


def test_a_whole_scan_goes_on_without_the_broken_block() -> None:
    """NaN in block 2: named by the first plan, and the second has the curves and the loss without it."""
    view, order = LocalView(llama()), plan()
    for weight in view.layers[2].parameters():
        weight.detach().fill_(torch.nan)
    plans: list[tuple[AlphaScanPlan, int]] = []
    done = [0]

    def begin(started: AlphaScanPlan, steps: int) -> None:
        plans.append((started, steps))
        done.append(0)

    def count() -> None:
        done[-1] += 1

    finding, readings = run_scan(view, AlphaScan(), order, on_plan=begin, on_step=count)
    assert finding.flagged == (2,)
    assert [started.left_out for started, _ in plans] == [[], [2]]
    assert [reading.left_out for reading in readings] == [[], [2]]
    assert done[1] < plans[0][1]
    assert done[2] == plans[1][1]
    view.gates[2] = 0.0
    without = run_measurement(view, AlphaScan(), order.model_copy(update={"alphas": []}))
    assert readings[1].base_nats == pytest.approx(without.base_nats, abs=1e-4)
    assert [bool(score.curve) for score in finding.blocks] == [True, True, False, True, True]


def test_scan_leaves_the_model_as_it_was() -> None:
    """After a scan the layers' own forward is back, and the model answers bit for bit as before."""
    view = LocalView(llama())
    tokens, _ = batch()
    with torch.inference_mode():
        before = view.model(input_ids=tokens).logits
        run_measurement(view, AlphaScan(), plan())
        assert torch.equal(view.model(input_ids=tokens).logits, before)
    assert all("forward" not in vars(layer) for layer in view.layers)


def test_layers_come_back_when_the_forward_fails() -> None:
    """A token id out of range raises, and the layers are not left intercepted."""
    view = LocalView(llama())
    with pytest.raises(IndexError):
        view.embed(torch.tensor([[VOCAB]]))
    assert all("forward" not in vars(layer) for layer in view.layers)


def test_model_without_decoder_layers_is_refused() -> None:
    """One clear sentence instead of a wrong guess."""
    with pytest.raises(ValueError, match="no list of None decoder layers"):
        LocalView(torch.nn.Linear(2, 2))


def test_local_view_is_a_model_view() -> None:
    """What monitors are promised is there."""
    view: ModelView = LocalView(llama())
    assert (view.num_blocks, view.gates) == (LAYERS, [1.0] * LAYERS)


class Halving(torch.nn.Module):
    """A model that does something to the stream between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=2)
        self.embedding = torch.nn.Embedding(VOCAB, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.head = torch.nn.Linear(8, VOCAB)

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        hidden = 20.0 * self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden) / 2
        return SimpleNamespace(logits=self.head(hidden))


def test_model_that_cannot_be_walked_is_told() -> None:
    """What happens between the layers is lost block by block: `check` says so, and nothing for a model without it."""
    LocalView(llama()).check(plan())
    with pytest.raises(ValueError, match="Halving cannot be walked block by block"):
        LocalView(Halving()).check(plan())


@pytest.mark.parametrize("dtype", ["auto", torch.float32])
def test_load_takes_what_is_there_and_nothing_else(tmp_path: Path, dtype: str | torch.dtype) -> None:
    """The wanted precision; a tensor that is missing or has another shape is not made up."""
    model = llama().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    view = LocalView.load(tmp_path, dtype)
    assert next(view.model.parameters()).dtype == (torch.bfloat16 if dtype == "auto" else dtype)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, words in (
        ({"num_hidden_layers": LAYERS + 1}, "9 tensors .* model.layers.5.input_layernorm.weight is missing"),
        ({"vocab_size": VOCAB + 1}, "2 tensors .* has another shape"),
        ({"model_type": "vit"}, "vit is no causal language model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=words):
            LocalView.load(tmp_path, dtype)
