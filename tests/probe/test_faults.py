"""Faults in a model without vLLM around it: which tensor a name means, and undo in any order."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from flipwatch.monitors.faults import FaultKind
from flipwatch.monitors.wire import FaultOrder
from flipwatch.probe.faults import Faults, find_target
from flipwatch.probe.kv_cache import KV_CACHE, cache_of, clear, kv_caches
from flipwatch.probe.live_tensor import UnknownTensor, find_tensor
from flipwatch.probe.stack import Stack


class Packed(nn.Module):
    """Three projections in one tensor, as vLLM holds them; this rank has half of each."""

    tp_size = 2
    output_sizes = (16, 8, 8)

    def __init__(self, rows: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 8))


def model(tied: bool = True) -> nn.Module:
    """A tiny Llama whose first block has packed projections, the second ones of another layout."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    made = LlamaForCausalLM(config)
    for block, rows in ((0, 16), (1, 8)):
        attention = made.model.layers[block].self_attn
        del attention.q_proj, attention.k_proj, attention.v_proj
        attention.qkv_proj = Packed(rows)
    made.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return made


def stack_of(made: nn.Module) -> Stack:
    """Its blocks."""
    return Stack(dict(enumerate(made.get_submodule("model.layers"))), 2, "model.layers")


@pytest.mark.parametrize(
    ("wanted", "block", "name"),
    [
        ("mlp.up_proj", 1, "model.layers.1.mlp.up_proj.weight"),
        ("up_proj.weight", 1, "model.layers.1.mlp.up_proj.weight"),
        ("model.layers.1.mlp.up_proj.weight", 1, "model.layers.1.mlp.up_proj.weight"),
        ("model.layers.1.mlp.up_proj", None, "model.layers.1.mlp.up_proj.weight"),
        ("input_layernorm", 0, "model.layers.0.input_layernorm.weight"),
        ("qkv_proj", 1, "model.layers.1.self_attn.qkv_proj.weight"),
        ("norm", None, "model.norm.weight"),
        ("model.norm.weight", None, "model.norm.weight"),
        ("embed_tokens", None, "model.embed_tokens.weight"),
        ("lm_head", None, "lm_head.weight"),
    ],
)
def test_a_name_finds_its_tensor(wanted: str, block: int | None, name: str) -> None:
    """By the end of the name or all of it, with or without `.weight`, inside a block or outside the blocks."""
    made = model(tied=False)
    found = find_tensor(wanted, block, made, stack_of(made))
    parameter = made.get_parameter(name)
    assert (found.name, found.values.data_ptr(), found.values.shape) == (name, parameter.data_ptr(), parameter.shape)
    assert found.block == (int(name.split(".")[2]) if "layers" in name else None)
    assert found.shared_with == []


@pytest.mark.parametrize("wanted", ["lm_head", "embed_tokens"])
def test_a_tied_head_says_so(wanted: str) -> None:
    """Both names lead to the one tensor, and it tells both."""
    made = model()
    found = find_tensor(wanted, None, made, stack_of(made))
    assert (found.name, found.shared_with) == ("model.embed_tokens.weight", ["lm_head.weight"])


@pytest.mark.parametrize(("part", "rows"), [("q_proj", (0, 8)), ("k_proj", (8, 12)), ("v_proj", (12, 16))])
@pytest.mark.parametrize("wanted", ["{}", "self_attn.{}.weight", "model.layers.0.self_attn.{}.weight"])
def test_a_packed_projection_has_its_rows(wanted: str, part: str, rows: tuple[int, int]) -> None:
    """The checkpoint's name means the rows of it on this rank."""
    made = model()
    found = find_tensor(wanted.format(part), None if "layers" in wanted else 0, made, stack_of(made))
    whole = made.get_parameter("model.layers.0.self_attn.qkv_proj.weight")
    assert found.name == "model.layers.0.self_attn.qkv_proj.weight"
    assert torch.equal(found.values, whole[rows[0] : rows[1]])
    assert found.values.data_ptr() == whole[rows[0]].data_ptr()


@pytest.mark.parametrize(
    ("wanted", "block", "words"),
    [
        ("nothing", 1, "'nothing' of block 1 is not there.*mlp.down_proj.weight"),
        ("nothing", None, "outside the blocks is not there.*lm_head.weight, model.embed_tokens.weight, model.norm"),
        ("up_proj", None, "outside the blocks is not there"),
        ("lm_head", 1, "of block 1 is not there"),
        ("weight", None, "is ambiguous"),
        ("mlp.up_proj", 2, "Block 2 does not exist; this model has 2 blocks"),
        ("model.layers.7.mlp.up_proj", None, "Block 7 does not exist"),
        ("model.layers.0.mlp.up_proj", 1, "of block 1 is not there"),
        ("q_proj", 1, r"no run of rows of model\.layers\.1\.self_attn\.qkv_proj\.weight"),
    ],
)
def test_a_wrong_name_is_refused(wanted: str, block: int | None, words: str) -> None:
    """One sentence that says what there is."""
    made = model()
    with pytest.raises(UnknownTensor, match=words):
        find_tensor(wanted, block, made, stack_of(made))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("mlp.gate_proj", "model.layers.1.mlp.gate_proj.weight"),
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj.weight"),
        ("lm_head", "model.embed_tokens.weight"),
    ],
)
def test_a_source_may_lie_elsewhere(source: str, name: str) -> None:
    """In the same block, in another by its full name, or outside the blocks."""
    made = model()
    order = FaultOrder(block=1, tensor="mlp.up_proj", kind=FaultKind.STALE, source=source)
    _, found = find_target(order, made, stack_of(made))
    assert found is not None
    assert found.name == name
    with pytest.raises(UnknownTensor, match="nothing"):
        find_target(order.model_copy(update={"source": "nothing"}), made, stack_of(made))


ORDERS = [
    FaultOrder(block=0, tensor="mlp.up_proj", kind=FaultKind.BURST, count=40),
    FaultOrder(block=0, tensor="mlp.up_proj", kind=FaultKind.STALE, count=96, source="mlp.gate_proj"),
    FaultOrder(block=0, tensor="mlp.up_proj", kind=FaultKind.LOST),
    FaultOrder(tensor="embed_tokens", kind=FaultKind.NAN),
    FaultOrder(tensor="lm_head", kind=FaultKind.SIGN),
]


@pytest.mark.parametrize("order_of_undo", [*itertools.permutations(range(3)), (4, 3), (3, 4)])
def test_overlapping_faults_come_out_in_any_order(order_of_undo: tuple[int, ...]) -> None:
    """As long as one is left the model is damaged; after the last, every bit is back."""
    made = model()

    def state() -> list[Tensor]:
        return [parameter.detach().view(torch.int32).clone() for parameter in made.parameters()]

    def same(one: list[Tensor], other: list[Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    healthy = state()
    faults = Faults()
    injected = sorted(order_of_undo)
    for index in injected:
        faults.add(str(index), ORDERS[index], *find_target(ORDERS[index], made, stack_of(made)))
    assert [fault.id for fault in faults.active()] == [str(index) for index in injected]
    assert not same(state(), healthy)
    for undone in order_of_undo:
        assert faults.remove(str(undone))
        assert not faults.remove(str(undone))
        assert same(state(), healthy) == (not faults.active())
    assert same(state(), healthy)


def test_a_repaired_fault_is_forgotten() -> None:
    """What a repair has put back is no fault any more; what it has not stays."""
    made = model()
    faults = Faults()
    healthy = made.lm_head.weight.detach().clone()
    for index, tensor in enumerate(("lm_head", "model.norm")):
        order = FaultOrder(tensor=tensor, kind=FaultKind.SIGN)
        faults.add(str(index), order, *find_target(order, made, stack_of(made)))
    with torch.no_grad():
        made.lm_head.weight.copy_(healthy)
    faults.forget_repaired()
    assert [fault.id for fault in faults.active()] == ["1"]
    assert not faults.remove("0")


def test_a_fault_tells_what_it_did() -> None:
    """The live name, the number of values, the other name of a tied tensor."""
    made = model()
    order = FaultOrder(tensor="lm_head", kind=FaultKind.SWAP)
    fault = Faults().add("a", order, *find_target(order, made, stack_of(made)))
    assert (fault.tensor, fault.block, fault.count) == ("model.embed_tokens.weight", None, 16)
    assert fault.shared_with == ["lm_head.weight"]


def caches(made: nn.Module, *blocks: int) -> Any:
    """What vLLM's configuration says of the KV caches of these blocks; an attention without a cache beside them."""
    context = {
        f"model.layers.{block}.self_attn.attn": SimpleNamespace(kv_cache=torch.randn(2, 4, 8)) for block in blocks
    }
    context["model.layers.0.cross.attn"] = SimpleNamespace(kv_cache=torch.zeros(0))
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))


def test_a_fault_in_a_kv_cache_goes_when_the_caches_are_cleared() -> None:
    """It strikes the cache of its block alone; nothing that lay there comes back, and its removal is no error."""
    made = model()
    config = caches(made, 0, 1)
    (_, other), (name, struck) = kv_caches(config)
    before = other.clone()
    order = FaultOrder(block=1, tensor=KV_CACHE, kind=FaultKind.NAN, count=10**9)
    faults = Faults()
    fault = faults.add("a", order, cache_of(1, config, stack_of(made)), None)
    assert (fault.tensor, fault.block, fault.count, name) == (name, 1, 64, "model.layers.1.self_attn.attn.kv_cache")
    assert struck.isnan().all()
    weight = FaultOrder(tensor="lm_head", kind=FaultKind.SIGN)
    faults.add("b", weight, *find_target(weight, made, stack_of(made)))
    assert torch.equal(other, before)
    assert clear(config) == 2
    faults.forget_cached()
    assert [one.id for one in faults.active()] == ["b"]
    assert faults.remove("a")
    assert not struck.any()
    clear(config)
    faults.forget_cached()
    assert not faults.remove("a")


@pytest.mark.parametrize(
    ("block", "words"), [(None, "name the block"), (1, "Block 1 has 0 KV caches"), (0, "Block 0 has 2 KV caches")]
)
def test_a_kv_cache_that_is_not_there_is_refused(block: int | None, words: str) -> None:
    """Or one of several."""
    made = model()
    config = caches(made, 0)
    context = config.compilation_config.static_forward_context
    context["model.layers.0.cross.attn"].kv_cache = [torch.randn(3)]
    with pytest.raises(UnknownTensor, match=words):
        cache_of(block, config, stack_of(made))
