"""The search for harmful bits, on a tiny model."""

import importlib
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from flipwatch.monitors.faults import FaultKind, FaultSpec, inject
from flipwatch.monitors.wire import FaultOrder
from flipwatch.probe.local import LocalView

BENCH = Path(__file__).resolve().parents[1] / "bench"
BUDGET = {"evaluations": 60, "population": 8}


@pytest.fixture(scope="module")
def fault_search() -> Iterator[ModuleType]:
    """The script as a module; it imports its neighbour."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("fault_search")


def tiny(vocabulary: int = 61, blocks: int = 3) -> LlamaForCausalLM:
    """Random weights, tied head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


TOKENS = torch.randint(61, (4, 12), generator=torch.Generator().manual_seed(1))
SCORED = torch.ones_like(TOKENS, dtype=torch.bool).index_fill(1, torch.tensor([0]), False)


@pytest.fixture(scope="module")
def view() -> LocalView:
    """The tiny model, trained on the sequences for a second."""
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    return LocalView(model)


@pytest.fixture(autouse=True)
def _unchanged(view: LocalView) -> Iterator[None]:
    """No search leaves a trace in the model."""
    before = {name: parameter.detach().clone() for name, parameter in view.model.named_parameters()}
    yield
    for name, parameter in view.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.requires_grad


@contextmanager
def damaged(view: LocalView, faults: list[tuple[str, FaultSpec]]) -> Iterator[None]:
    """The model with faults in it."""
    undo = [inject(spec, view.model.get_parameter(name)) for name, spec in faults]
    yield
    for back in reversed(undo):
        back()


def loss(view: LocalView) -> float:
    """Mean loss of the sequences by the model's own forward, unlike the search's."""
    with torch.inference_mode():
        return float(view.model(input_ids=TOKENS, labels=TOKENS).loss)


def random_harm(view: LocalView, block: int, sets: int, in_range: bool = False) -> list[float]:
    """Losses under sets of three random bits in random values of a block, those that are finite."""
    generator = random.Random(0)  # noqa: S311 - reproducible
    names = [name for name, _ in view.model.named_parameters() if name.startswith(f"model.layers.{block}.")]
    found: list[float] = []
    while len(found) < sets:
        chosen = [
            (name, FaultSpec(kind=FaultKind.BIT, count=1, bit=generator.randrange(32), seed=generator.randrange(9**9)))
            for name in generator.sample(names, 3)
        ]
        ranges = {name: view.model.get_parameter(name).aminmax() for name, _ in chosen}
        with damaged(view, chosen):
            inside = all(view.model.get_parameter(name).aminmax() == ends for name, ends in ranges.items())
            if inside or not in_range:
                found.append(loss(view))
    return [one for one in found if math.isfinite(one)]


@pytest.mark.parametrize("block", [0, 2])
def test_the_bits_found_hurt_more_than_random_ones(fault_search: ModuleType, view: LocalView, block: int) -> None:
    """The loss that the search names is the model's loss under its bits, and far above that of random bits."""
    found = fault_search.search(view, TOKENS, SCORED, block=block, **BUDGET)
    assert found.base_nats == pytest.approx(loss(view), abs=1e-4)
    assert sum(len(spec.flips) for _, spec in found.faults) <= 3
    assert all(name.startswith(f"model.layers.{block}.") for name, _ in found.faults)
    with damaged(view, found.faults):
        assert loss(view) == pytest.approx(found.nats, rel=1e-4)
    # A block that one bit has saturated can do no more harm; random bits hit such a one now and then.
    harm = sorted(random_harm(view, block, sets=60))
    assert found.nats > harm[-1] - 1e-4
    assert found.nats > found.base_nats + 20 * (harm[len(harm) // 2] - found.base_nats)
    assert found.nats > found.base_nats + 3


def test_in_range_flips_stay_in_range(fault_search: ModuleType, view: LocalView) -> None:
    """No value leaves its tensor's range, and the loss still rises more than by random bits that stay in it."""
    parameters = {name: parameter.detach().clone() for name, parameter in view.model.named_parameters()}
    found = fault_search.search(view, TOKENS, SCORED, block=1, in_range=True, **BUDGET)
    with damaged(view, found.faults):
        for name, spec in found.faults:
            now = view.model.get_parameter(name)
            assert (now != parameters[name]).sum() == len(spec.flips)
            assert now.aminmax() == parameters[name].aminmax()
    harm = [one - found.base_nats for one in random_harm(view, 1, sets=60, in_range=True)]
    assert found.nats - found.base_nats > 1.5 * max(harm)
    assert found.nats < fault_search.search(view, TOKENS, SCORED, block=1, **BUDGET).nats


def test_a_seed_repeats_a_search(fault_search: ModuleType, view: LocalView) -> None:
    """The same seed finds the same bits in the same number of evaluations."""
    once, again = (fault_search.search(view, TOKENS, SCORED, block=1, seed=5, **BUDGET) for _ in range(2))
    assert once == again
    assert once.evaluations == BUDGET["evaluations"]


@pytest.mark.parametrize(
    "tensor", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_one_tensor_can_be_searched(fault_search: ModuleType, view: LocalView, tensor: str) -> None:
    """Also outside the blocks; the orders are what the API takes."""
    found = fault_search.search(view, TOKENS, SCORED, tensor=tensor, flips=2, evaluations=30, population=8)
    assert [name for name, _ in found.faults] == [tensor]
    with damaged(view, found.faults):
        assert loss(view) == pytest.approx(found.nats, rel=1e-4)
    orders = [FaultOrder.model_validate(order) for order in json.loads(json.dumps(found.orders()))]
    assert [(order.tensor, order.flips) for order in orders] == [(tensor, found.faults[0][1].flips)]


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ({}, "one of the two"),
        ({"block": 1, "tensor": "model.norm.weight"}, "one of the two"),
        ({"block": 3}, "no block 3; the model has 3"),
        ({"tensor": "up_proj"}, r"no parameter 'up_proj'.*model\.embed_tokens\.weight"),
    ],
)
def test_a_wrong_scope_is_refused(fault_search: ModuleType, view: LocalView, scope: dict[str, Any], words: str) -> None:
    """One sentence that says what there is."""
    with pytest.raises(ValueError, match=words):
        fault_search.search(view, TOKENS, SCORED, **scope)


def test_a_broken_model_is_refused(fault_search: ModuleType, view: LocalView) -> None:
    """There is nothing to search in a model whose loss is not finite."""
    undo = inject(FaultSpec(kind=FaultKind.NAN), view.model.get_parameter("model.norm.weight"))
    try:
        with pytest.raises(ValueError, match="not finite"):
            fault_search.search(view, TOKENS, SCORED, block=1)
    finally:
        undo()


def test_the_program_prints_orders(
    fault_search: ModuleType, smol: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is JSON that can be injected; the figures are on standard error."""
    tokenizer = AutoTokenizer.from_pretrained(smol)
    tiny(len(tokenizer), blocks=2).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    fault_search.main(model=tmp_path, block=1, evaluations=8, population=4, items=2, dtype="bfloat16")
    printed = capsys.readouterr()
    assert " nats in 8 evaluations" in printed.err
    orders = [FaultOrder.model_validate(order) for order in json.loads(printed.out)]
    assert orders
    assert all(order.kind is FaultKind.FLIPS for order in orders)


@pytest.mark.parametrize(("block", "words"), [(1, "make setup"), (99, "there is no block 99")])
def test_a_mistake_is_one_line_and_code_2(
    fault_search: ModuleType, smol: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], block: int, words: str
) -> None:
    """No checkpoint there, or no such block."""
    with pytest.raises(typer.Exit) as caught:
        fault_search.main(model=smol if block == 99 else tmp_path, block=block)
    printed = capsys.readouterr()
    assert (caught.value.exit_code, printed.out) == (2, "")
    assert len(printed.err.splitlines()) == 1
    assert words.lower() in printed.err.lower()
