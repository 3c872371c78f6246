"""The fault library: what each kind changes, that a seed repeats it, and that every bit comes back."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flipwatch.monitors.faults import Damage, FaultKind, FaultSpec, damage, inject

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
DTYPES = [*FLOATS, torch.int8]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
ROWS, COLUMNS = 40, 30
FLIPS = [(3, 0), (3, 6), (700, 5)]


def tensor_of(dtype: torch.dtype, seed: int = 0, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> Tensor:
    """Normal values with a few hundred different ones also as int8."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 20).to(dtype)


def spec_of(kind: FaultKind, **fields: Any) -> FaultSpec:
    """A spec of any kind."""
    return FaultSpec(kind=kind, **({"flips": FLIPS} if kind is FaultKind.FLIPS else {}), **fields)


def struck(spec: FaultSpec, tensor: Tensor) -> Damage:
    """The damage; a stale page comes from another tensor of the same shape."""
    return damage(spec, tensor, tensor_of(tensor.dtype, seed=9) if spec.kind is FaultKind.STALE else None)


def bits(tensor: Tensor) -> Tensor:
    """As integers of the same width."""
    return tensor.view(INTEGERS[tensor.element_size()])


def has(kind: FaultKind, dtype: torch.dtype) -> bool:
    """Whether the dtype can hold such a fault."""
    return dtype.is_floating_point or kind not in (FaultKind.NAN, FaultKind.INF)


CASES = [(kind, dtype) for kind in FaultKind for dtype in DTYPES if has(kind, dtype)]


# What each kind does, one check each: (damage, values before, values after, tensor).


def _one_bit(made: Damage, before: Tensor, after: Tensor, tensor: Tensor) -> None:
    width = tensor.element_size() * 8
    assert set((bits(before) ^ bits(after)).tolist()) == {1 << (width - 2)}


def _burst(made: Damage, before: Tensor, after: Tensor, tensor: Tensor) -> None:
    ends = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
    wanted = 64 * tensor.double().abs().max().item()
    allowed = {min(wanted, ends.max), max(-wanted, ends.min)}
    assert set(after.double().tolist()) == {
        float(torch.tensor(v, dtype=torch.float64).to(tensor.dtype)) for v in allowed
    }


def _neighbours(made: Damage, before: Tensor, after: Tensor, tensor: Tensor) -> None:
    assert _run(made.indices)
    largest = tensor.double().abs().max()
    assert (after.double().abs() <= largest).all()
    assert after.double().abs().max() > largest / 4
    assert after.unique().numel() > 5


def _nan(made: Damage, before: Tensor, after: Tensor, tensor: Tensor) -> None:
    assert after.isnan().all()
    rows, columns = made.indices // COLUMNS, made.indices % COLUMNS
    side = math.ceil(math.sqrt(made.indices.numel()))
    assert rows.max() - rows.min() < side
    assert columns.max() - columns.min() < side


def _inf(made: Damage, before: Tensor, after: Tensor, tensor: Tensor) -> None:
    assert set(after.tolist()) == {math.inf, -math.inf}


def _zeros(made: Damage, before: Tensor, after: Tensor, tensor: Tensor) -> None:
    assert not after.any()
    assert _run(made.indices)
    assert made.indices[0] % made.indices.numel() == 0


def _stale(made: Damage, before: Tensor, after: Tensor, tensor: Tensor) -> None:
    assert _run(made.indices)
    assert made.indices[0] % made.indices.numel() == 0
    assert torch.equal(after, tensor_of(tensor.dtype, seed=9).reshape(-1)[made.indices])


def _swap(made: Damage, before: Tensor, after: Tensor, tensor: Tensor) -> None:
    one, other = made.indices.view(2, COLUMNS)
    assert _run(one)
    assert _run(other)
    assert one[0] % COLUMNS == other[0] % COLUMNS == 0
    assert torch.equal(after, torch.cat([before[COLUMNS:], before[:COLUMNS]]))


def _sign(made: Damage, before: Tensor, after: Tensor, tensor: Tensor) -> None:
    assert _run(made.indices)
    assert made.indices[0] % COLUMNS == 0
    assert torch.equal(after, -before)


def _scale(made: Damage, before: Tensor, after: Tensor, tensor: Tensor) -> None:
    assert before.double().abs().item() == tensor.double().abs().max()
    ends = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
    assert after.double().item() == min(max(before.double().item() * 64, ends.min), ends.max)


def _lost(made: Damage, before: Tensor, after: Tensor, tensor: Tensor) -> None:
    assert not after.any()
    assert torch.equal(made.indices, torch.arange(tensor.numel()))


def _flips(made: Damage, before: Tensor, after: Tensor, tensor: Tensor) -> None:
    assert dict(zip(made.indices.tolist(), (bits(before) ^ bits(after)).tolist(), strict=True)) == {3: 65, 700: 32}


def _run(indices: Tensor) -> bool:
    return bool((indices.diff() == 1).all())


CHECKS: dict[FaultKind, tuple[int, Callable[[Damage, Tensor, Tensor, Tensor], None]]] = {
    FaultKind.BIT: (18, _one_bit),
    FaultKind.BURST: (18, _burst),
    FaultKind.NEIGHBOURS: (18, _neighbours),
    FaultKind.NAN: (18, _nan),
    FaultKind.INF: (18, _inf),
    FaultKind.ZEROS: (18, _zeros),
    FaultKind.STALE: (18, _stale),
    FaultKind.SWAP: (2 * COLUMNS, _swap),
    FaultKind.SIGN: (COLUMNS, _sign),
    FaultKind.SCALE: (1, _scale),
    FaultKind.LOST: (ROWS * COLUMNS, _lost),
    FaultKind.FLIPS: (2, _flips),
}


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_what_a_fault_does(kind: FaultKind, dtype: torch.dtype) -> None:
    """Exactly so many values, each once, become what the kind says; the tensor itself stays as it is."""
    tensor = tensor_of(dtype)
    made = struck(spec_of(kind), tensor)
    count, check = CHECKS[kind]
    assert made.indices.shape == made.after.shape == (count,)
    assert made.indices.dtype == torch.long
    assert made.indices.unique().numel() == count
    assert made.after.dtype == dtype
    check(made, tensor.reshape(-1)[made.indices], made.after, tensor)
    assert torch.equal(tensor, tensor_of(dtype))


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_a_fault_comes_out_bit_for_bit(kind: FaultKind, dtype: torch.dtype) -> None:
    """Injected, a tensor holds the damage and nothing else; undone, also NaN payloads and -0.0 are what they were."""
    width = INTEGERS[dtype.itemsize]
    ends = torch.iinfo(width)
    patterns = torch.randint(
        ends.min, ends.max, (ROWS, COLUMNS), dtype=width, generator=torch.Generator().manual_seed(1)
    )
    patterns[0] = ends.min  # -0.0
    patterns[1] = ends.max - torch.arange(COLUMNS)  # NaN with payloads, as float
    tensor = patterns.clone().view(dtype)
    # The largest values cannot grow.
    spec = spec_of(kind, seed=2, count=600, factor=0.5 if kind is FaultKind.SCALE else None)
    made = struck(spec, tensor)
    wanted = patterns.clone().view(-1)
    wanted[made.indices] = bits(made.after)
    undo = inject(spec, tensor, tensor_of(dtype, seed=9) if kind is FaultKind.STALE else None)
    assert torch.equal(bits(tensor).view(-1), wanted)
    assert not torch.equal(bits(tensor), patterns)
    undo()
    assert torch.equal(bits(tensor), patterns)


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind not in (FaultKind.LOST, FaultKind.FLIPS)])
def test_a_seed_repeats_a_fault(kind: FaultKind) -> None:
    """The same seed does the same, after a trip through JSON too; another seed strikes elsewhere."""
    tensor = tensor_of(torch.bfloat16)
    spec = spec_of(kind, seed=1)
    first = struck(spec, tensor)
    again = struck(FaultSpec.model_validate_json(spec.model_dump_json()), tensor)
    assert torch.equal(first.indices, again.indices)
    assert torch.equal(bits(first.after), bits(again.after))
    assert not torch.equal(first.indices, struck(spec_of(kind, seed=2), tensor).indices)


@pytest.mark.parametrize("kind", [FaultKind.BIT, FaultKind.BURST, FaultKind.NAN, FaultKind.INF, FaultKind.ZEROS])
def test_more_than_all_is_all(kind: FaultKind) -> None:
    """A count beyond the tensor's size damages all of it."""
    made = struck(spec_of(kind, count=10**6), tensor_of(torch.float32))
    assert sorted(made.indices.tolist()) == list(range(ROWS * COLUMNS))


def test_scale_with_a_seed_takes_large_values() -> None:
    """Different ones of the top 1 %, also of a tensor so large that only a sample of it is looked at."""
    tensor = tensor_of(torch.float32, shape=(1200, 1000))
    made = damage(FaultSpec(kind=FaultKind.SCALE, seed=3, factor=4.0), tensor)
    before = tensor.view(-1)[made.indices]
    assert made.indices.unique().numel() == 18
    # A sample's own top 1 %.
    assert (before.abs() >= tensor.abs().view(-1).quantile(0.985)).all()
    assert torch.equal(made.after, before * 4)


def test_any_bit_and_any_factor() -> None:
    """The sign bit and the lowest one; a factor other than the kind's own."""
    tensor = tensor_of(torch.bfloat16)
    sign = damage(FaultSpec(kind=FaultKind.BIT, bit=15), tensor)
    assert torch.equal(sign.after, -tensor.view(-1)[sign.indices])
    lowest = damage(FaultSpec(kind=FaultKind.BIT, bit=0), tensor)
    assert set((bits(lowest.after) ^ bits(tensor).view(-1)[lowest.indices]).tolist()) == {1}
    burst = damage(FaultSpec(kind=FaultKind.BURST, factor=2), tensor)
    assert set(burst.after.abs().tolist()) == {2 * tensor.abs().max().item()}


@pytest.mark.parametrize("kind", FaultKind)
def test_other_layouts(kind: FaultKind) -> None:
    """A transposed view of the same values is damaged in the same places; rows of a 3-D tensor and of a vector."""
    plain = tensor_of(torch.float32)
    turned = plain.t().contiguous().t()
    source = tensor_of(torch.float32, seed=9) if kind is FaultKind.STALE else None
    undo = [inject(spec_of(kind), plain, source), inject(spec_of(kind), turned, source)]
    assert torch.equal(bits(plain), bits(turned.contiguous()))
    undo[1]()
    assert torch.equal(turned, tensor_of(torch.float32))
    undo[0]()
    cube = damage(spec_of(kind), plain.view(ROWS, 5, 6), source)
    assert cube.indices.numel() == CHECKS[kind][0]
    rows_of_a_vector = {FaultKind.SWAP: 2, FaultKind.SIGN: 1}
    vector = damage(spec_of(kind), plain.view(-1), source)
    assert vector.indices.numel() == rows_of_a_vector.get(kind, CHECKS[kind][0])
    if kind is FaultKind.NAN:
        assert _run(vector.indices)


@pytest.mark.parametrize(
    ("fields", "tensor", "words"),
    [
        ({"kind": "nan"}, tensor_of(torch.int8), "torch.int8 has no NaN"),
        ({"kind": "inf"}, tensor_of(torch.int8), "torch.int8 has no Inf"),
        ({"kind": "inf"}, tensor_of(torch.float8_e4m3fn), "torch.float8_e4m3fn has no Inf"),
        ({"kind": "bit", "bit": 16}, tensor_of(torch.bfloat16), "has the bits 0 to 15, not 16"),
        ({"kind": "flips", "flips": [(0, 8)]}, tensor_of(torch.int8), "has the bits 0 to 7, not 8"),
        ({"kind": "flips", "flips": [(1200, 0)]}, tensor_of(torch.int8), "no value 1200 in a tensor of 1200 values"),
        ({"kind": "swap"}, torch.ones(1, 9), "one row"),
        ({"kind": "swap"}, torch.ones(9, 9), "changes no value"),
        ({"kind": "lost"}, torch.zeros(9), "changes no value"),
        ({"kind": "burst"}, torch.zeros(9), "no largest magnitude"),
        ({"kind": "scale"}, torch.full((9,), 127, dtype=torch.int8), "changes no value"),
        ({"kind": "stale"}, torch.ones(9), "needs the tensor that it is copied from"),
        ({"kind": "zeros"}, torch.ones(0), "cannot be damaged"),
        ({"kind": "zeros"}, torch.ones(9, dtype=torch.bool), "cannot be damaged"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, Any], tensor: Tensor, words: str) -> None:
    """A fault that this tensor cannot have, or that would change nothing, is one sentence."""
    with pytest.raises(ValueError, match=words) as caught:
        damage(FaultSpec.model_validate(fields), tensor)
    assert str(caught.value).endswith(".")


def test_a_stale_page_wants_its_like() -> None:
    """Bytes of another dtype are no copy, and kinds that copy nothing take no source."""
    with pytest.raises(ValueError, match=r"cannot come from 1200 values of torch\.float16"):
        damage(FaultSpec(kind=FaultKind.STALE), tensor_of(torch.bfloat16), tensor_of(torch.float16))
    with pytest.raises(ValueError, match="no other kind takes one"):
        damage(FaultSpec(kind=FaultKind.ZEROS), tensor_of(torch.bfloat16), tensor_of(torch.bfloat16))


def test_a_stale_page_lies_in_both() -> None:
    """From a shorter tensor, the page is one that the shorter has."""
    short = tensor_of(torch.float32, seed=9, shape=(40,))
    pages = {
        damage(FaultSpec(kind=FaultKind.STALE, seed=s, count=10), tensor_of(torch.float32), short).indices[0].item()
        for s in range(40)
    }
    assert pages == {0, 10, 20, 30}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "rust"}, "kind"),
        ({"kind": "nan", "bit": 3}, "bit is for kind bit only, not for nan"),
        ({"kind": "nan", "factor": 3.0}, "factor is for the kinds burst, neighbours, scale only"),
        ({"kind": "burst", "factor": math.inf}, "finite"),
        ({"kind": "burst", "factor": 0.0}, "greater than 0"),
        ({"kind": "burst", "count": 0}, "count"),
        ({"kind": "burst", "count": True}, "count"),
        ({"kind": "burst", "seed": -1}, "seed"),
        ({"kind": "bit", "flips": [[0, 1]]}, "no other kind takes one"),
        ({"kind": "flips"}, "needs a list of flips"),
        ({"kind": "flips", "flips": []}, "at least 1"),
        ({"kind": "flips", "flips": [[0, 64]]}, "less than or equal to 63"),
        ({"kind": "flips", "flips": [[0, 1], [0, 1]]}, "twice"),
        ({"kind": "flips", "flips": [[0.5, 1]]}, "integer"),
        ({"kind": "nan", "colour": "red"}, "colour"),
    ],
)
def test_a_wrong_spec_is_refused(fields: dict[str, Any], words: str) -> None:
    """Fields that do not belong together, wrong types, unknown names."""
    with pytest.raises(ValidationError, match=words):
        FaultSpec.model_validate(fields)


# On a model.

PLACES = {
    "projection": "model.layers.1.mlp.up_proj.weight",
    "norm weight": "model.layers.1.post_attention_layernorm.weight",
    "embedding": "model.embed_tokens.weight",
    "final norm": "model.norm.weight",
    "LM head": "lm_head.weight",
}
SOURCES = {
    "projection": "model.layers.1.mlp.gate_proj.weight",
    "norm weight": "model.layers.0.input_layernorm.weight",
    "embedding": "lm_head.weight",
    "final norm": "model.layers.0.input_layernorm.weight",
    "LM head": "model.embed_tokens.weight",
}


@pytest.fixture(scope="module")
def tiny() -> LlamaForCausalLM:
    """Two blocks, all weights random, norms too."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", FaultKind)
def test_every_fault_acts_everywhere(tiny: LlamaForCausalLM, kind: FaultKind, place: str) -> None:
    """A model's output changes with every kind in every kind of tensor, and is the same again afterwards.

    All tokens are in the text, so that no row of the embedding is idle.
    """
    parameters = dict(tiny.named_parameters())
    source = parameters[SOURCES[place]] if kind is FaultKind.STALE else None
    spec = FaultSpec(kind=kind, flips=[(5, 30), (17, 26)] if kind is FaultKind.FLIPS else None)

    def logits() -> Tensor:
        with torch.inference_mode():
            found: Tensor = tiny(torch.arange(61)[None]).logits
        return found

    before = logits()
    undo = inject(spec, parameters[PLACES[place]], source)
    # NaN is not equal to itself.
    assert not torch.equal(logits(), before)
    undo()
    assert torch.equal(logits(), before)
