"""What changed in a tensor's bytes: the elements, the bits, the values, the name of the pattern, the sentence."""

import json
from collections.abc import Iterable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import settings as bounded
from hypothesis import strategies as st
from torch import Tensor

from flipwatch.monitors.faults import FaultKind, FaultSpec, damage, inject
from flipwatch.monitors.fingerprint.diagnosis import Diagnosis, Pattern, diagnose

ROWS, COLUMNS = 40, 30
NAME = "model.layers.3.mlp.down_proj.weight"

EXPECTED = {
    FaultKind.BIT: (Pattern.FLIPS, None),
    FaultKind.NAN: (Pattern.NAN, None),
    FaultKind.INF: (Pattern.INF, None),
    FaultKind.ZEROS: (Pattern.ZEROS, None),
    FaultKind.STALE: (Pattern.COPY, "right"),
    FaultKind.SWAP: (Pattern.COPY, NAME),
    FaultKind.SIGN: (Pattern.SIGN, None),
    FaultKind.LOST: (Pattern.ZEROS, None),
    FaultKind.FLIPS: (Pattern.FLIPS, None),
}
CASES = [
    (kind, dtype)
    for kind in FaultKind
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8)
    if dtype.is_floating_point or kind not in (FaultKind.NAN, FaultKind.INF)
]


def tensor_of(dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal values with a few hundred different ones also as int8."""
    return (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) * 20).to(dtype)


def memory(tensor: Tensor) -> Tensor:
    """A copy of a dense tensor's bytes in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).clone().view(torch.uint8)


def word(tensor: Tensor, *index: int) -> int:
    """One value's bits."""
    return int.from_bytes(bytes(tensor[index].reshape(1).view(torch.uint8).tolist()), "little")


def compared(
    tensor: Tensor, before: Tensor, after: Tensor, others: Iterable[tuple[str, Tensor]] = (), start: int = 0
) -> Diagnosis:
    """The diagnosis of bytes that differ."""
    found = diagnose(NAME, tensor, start, before, after, others)
    assert found is not None
    return found


def changed(before: list[float], after: list[float], dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Diagnosis:
    """The diagnosis of a whole tensor with these values."""
    old, new = torch.tensor(before).to(dtype), torch.tensor(after).to(dtype)
    return compared(old.view(shape or (-1,)), memory(old), memory(new))


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_every_fault_is_named(kind: FaultKind, dtype: torch.dtype) -> None:
    """Pattern, source, counts, places, bits and values are those that the fault library wrote."""
    tensor, before = tensor_of(dtype), tensor_of(dtype)
    spec = FaultSpec(kind=kind, flips=[(3, 0), (3 + COLUMNS, 4)] if kind is FaultKind.FLIPS else None)
    source = tensor_of(dtype, seed=9) if kind is FaultKind.STALE else None
    made = damage(spec, tensor, source)
    inject(spec, tensor, source)
    others = [("wrong", memory(tensor_of(dtype, seed=8))), ("right", memory(tensor_of(dtype, seed=9)))]
    found = compared(tensor, memory(before), memory(tensor), others)
    places = sorted(divmod(flat, COLUMNS) for flat in made.indices.tolist())
    masks = {place: word(before, *place) ^ word(tensor, *place) for place in places}
    masks = {place: mask for place, mask in masks.items() if mask}
    assert (found.pattern, found.source) == EXPECTED.get(kind, (Pattern.BURST, None))
    assert (found.tensor, found.dtype) == (NAME, str(dtype)[6:])
    assert (found.elements, found.bits) == (len(masks), sum(mask.bit_count() for mask in masks.values()))
    assert [tuple(change.element) for change in found.changes] == list(masks)[:16]
    assert (tuple(found.first), tuple(found.last)) == (min(masks), max(masks))
    for change in found.changes:
        row, column = change.element
        assert sum(1 << bit for bit in change.bits) == masks[row, column]
        assert change.before == repr(before[row, column].item())
        assert change.after == repr(tensor[row, column].item())
        assert int(change.before_bits, 16) == word(before, row, column)
        assert int(change.after_bits, 16) == word(tensor, row, column)
        assert len(change.after_bits) == 2 + 2 * dtype.itemsize


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_the_index_follows_the_strides(order: tuple[int, ...]) -> None:
    """Wherever a byte of a permuted tensor changes, its element is the one that differs; ranges begin anywhere."""
    plain = torch.arange(5 * 4 * 8, dtype=torch.int32).view(5, 4, 8)
    tensor = plain.permute(order)
    for at in range(4, 600, 52):
        harmed = plain.clone()
        harmed.view(-1)[at // 4] ^= 0x00010000
        start, stop = at // 16 * 16, at // 16 * 16 + 16
        found = compared(tensor, memory(plain)[start:stop], memory(harmed)[start:stop], start=start)
        place = (harmed.permute(order) != tensor).nonzero().tolist()
        assert [found.changes[0].element] == place
        assert found.first == found.last == found.changes[0].element
        assert (found.pattern, found.changes[0].bits) == (Pattern.SINGLE_FLIP, [16])


@pytest.mark.parametrize("shape", [(12, 1), (1, 12)])
def test_a_dimension_of_one_may_have_any_stride(shape: tuple[int, int]) -> None:
    """Torch does not look at it, so it says nothing about the place."""
    data = torch.arange(12.0)
    for stride in (0, 1, 7, 12):
        tensor = data.as_strided(shape, (1, stride) if shape[1] == 1 else (stride, 1))
        found = compared(tensor, memory(data), memory(data.roll(3)))
        assert found.last == [shape[0] - 1, shape[1] - 1]
        assert found.pattern == (Pattern.COPY if shape[1] == 1 else Pattern.BURST)


def test_the_sentence_names_one_flip() -> None:
    """One flip in a transposed matrix, word by word."""
    tensor = torch.zeros(400, 64, dtype=torch.bfloat16).t()
    tensor[12, 345] = 0.0123
    before = memory(tensor)
    inject(FaultSpec(kind=FaultKind.FLIPS, flips=[(12 * 400 + 345, 14)]), tensor)
    found = compared(tensor, before, memory(tensor))
    start, end = f"1 bit of {NAME} changed: ", "element [12, 345], bit 14, 0.0123 became 4.2e+36 (single bit flip)"
    assert found.sentence() == start + end


@pytest.mark.parametrize(
    ("before", "after", "dtype", "sentence"),
    [
        ([1.0], [1 + 2**-23], torch.float32, "bit 0, 1 became 1.0000001 (single bit flip)"),
        ([7], [4], torch.int8, f"2 bits of {NAME} changed: element [0], bits 0, 1, 7 became 4 (burst)"),
        ([1, 2, 0], [1, 3, 1], torch.int64, f"2 bits of 2 elements of {NAME} changed, between [1] and [2]: first"),
        ([1, 2, 0], [1, 3, 1], torch.int32, "first element [1], bit 0, 2 became 3 (bit flips, one per element)"),
        ([True, True], [False, False], torch.bool, "True became False (zeros)"),
        ([1.5, 2], [float("nan")] * 2, torch.float16, "1.5 became nan (NaN)"),
    ],
)
def test_sentences(before: list[float], after: list[float], dtype: torch.dtype, sentence: str) -> None:
    """Singular and plural, and as many digits as tell the values apart."""
    assert sentence in changed(before, after, dtype).sentence()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("before", "after", "dtype", "pattern"),
    [
        ([1.25, 3], [NAN, NAN], torch.float8_e4m3fn, Pattern.NAN),
        ([1.25, 3], [INF, -INF], torch.float8_e5m2, Pattern.INF),
        ([1.25, 3], [INF, NAN], torch.float8_e5m2, Pattern.BURST),
        ([1.25, -3, 0], [-1.25, 3, 0], torch.float8_e4m3fn, Pattern.SIGN),
        ([1.25, -3], [-1.25, -3.5], torch.bfloat16, Pattern.FLIPS),
        ([1.25, -3], [-1.25, 4], torch.bfloat16, Pattern.BURST),
        ([-1.25], [1.25], torch.bfloat16, Pattern.SINGLE_FLIP),
        ([5, -3], [-5, 3], torch.int8, Pattern.SIGN),
        ([5], [-5], torch.int8, Pattern.BURST),
        ([5, 253], [251, 3], torch.uint8, Pattern.BURST),
        ([1.0, -1.0], [-4.0, 4.0], torch.bfloat16, Pattern.BURST),
        ([*range(10, 26)], [*range(11, 19), *range(17, 25)], torch.uint8, Pattern.BURST),
        ([3.5], [0.0], torch.bfloat16, Pattern.ZEROS),
        ([4], [0], torch.int8, Pattern.SINGLE_FLIP),
        ([4, 1], [0, 0], torch.int8, Pattern.ZEROS),
        ([3.5, 1.0], [NAN, 1.0], torch.bfloat16, Pattern.NAN),
        ([1.0, -1.0], [INF, -INF], torch.bfloat16, Pattern.FLIPS),
        ([1.1, 2.2], [2.2, 1.1], torch.float32, Pattern.COPY),
        ([1.1, 2.2], [2.2, 1.1], torch.bfloat16, Pattern.BURST),
    ],
)
def test_which_pattern(before: list[float], after: list[float], dtype: torch.dtype, pattern: Pattern) -> None:
    """Names at their borders: what one element, one bit or another dtype makes of them; two rows of equal sum."""
    assert changed(before, after, dtype, (2, 8) if len(before) == 16 else ()).pattern == pattern


def test_swapped_rows_lie_in_the_range_as_a_whole() -> None:
    """Also rows that memory holds spread out; of a row that is cut nothing is said; columns are no rows."""
    wide = torch.arange(1, 49, dtype=torch.float32).view(6, 8)
    for tensor in (wide, wide.t().contiguous().t()):
        harmed = tensor.clone()
        assert harmed.stride() == tensor.stride()
        harmed[[1, 4, 3]] = tensor[[4, 3, 1]]
        found = compared(tensor, memory(tensor), memory(harmed))
        assert (found.pattern, found.source, found.elements) == (Pattern.COPY, NAME, 24)
        assert found.sentence().endswith("(rows changed places)")
        for start, stop in ((0, 144), (56, 64)):
            cut = compared(tensor, memory(tensor)[start:stop], memory(harmed)[start:stop], start=start)
            assert cut.pattern == Pattern.BURST
        harmed = tensor.clone()
        harmed[:, [1, 4]] = tensor[:, [4, 1]]
        columns = compared(tensor, memory(tensor), memory(harmed))
        assert columns.pattern == Pattern.BURST


def test_a_copy_needs_evidence() -> None:
    """A constant is a fill, few bytes are chance; candidates are read up to the first that fits."""
    before, other = memory(tensor_of(torch.bfloat16)), memory(tensor_of(torch.bfloat16, seed=9))
    tensor = tensor_of(torch.bfloat16)

    def until_it_fits() -> Iterator[tuple[str, Tensor]]:
        yield "same", before
        yield "other", other
        pytest.fail("read on")

    after = torch.cat([before[:40], other[40:80], before[80:]])
    found = compared(tensor, before, after, until_it_fits())
    assert (found.pattern, found.source) == (Pattern.COPY, "other")
    assert found.sentence().endswith("(copy of the same place of other)")
    few = torch.cat([before[:40], other[40:46], before[46:]])
    ones = torch.full((ROWS * COLUMNS,), 1.0, dtype=torch.bfloat16).view(torch.uint8)
    for harmed, candidate in ((few, other), (ones, ones)):
        found = compared(tensor, before, harmed, [("other", candidate)])
        assert (found.pattern, found.source) == (Pattern.BURST, None)


def test_json_holds_no_odd_number() -> None:
    """NaN and Inf travel as text, and the diagnosis comes back as it was."""
    found = changed([1.5, NAN, -0.0, 3], [NAN, INF, -INF, 7], torch.float32)
    text = found.model_dump_json()
    kept = json.loads(text, parse_constant=pytest.fail)
    assert [change["before"] for change in kept["changes"]] == ["1.5", "nan", "-0.0", "3.0"]
    assert [change["after"] for change in kept["changes"]] == ["nan", "inf", "-inf", "7.0"]
    assert Diagnosis.model_validate_json(text) == Diagnosis.model_validate(kept) == found


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]
DTYPES += [torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float4_e2m1fn_x2]


@bounded(max_examples=150, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.binary(min_size=64, max_size=64),
    st.dictionaries(st.integers(0, 63), st.integers(1, 255), max_size=16),
)
def test_the_list_undoes_the_change(dtype: torch.dtype, data: bytes, masks: dict[int, int]) -> None:
    """Any bits, any dtype: the sum of bits is the number of ones, and the listed changes lead back to the old bytes."""
    before = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    after = before.clone()
    for at, mask in masks.items():
        after[at] ^= mask
    tensor = torch.empty(256, dtype=torch.uint8).view(dtype)
    found = diagnose(NAME, tensor, 128, before, after)
    if not masks:
        assert found is None
        return
    assert found is not None
    assert found.bits == sum(mask.bit_count() for mask in masks.values())
    assert found.elements == len(found.changes) == len({at // dtype.itemsize for at in masks})
    for change in found.changes:
        at = change.element[0] * dtype.itemsize - 128
        was, became = (bytes.fromhex(text[2:])[::-1] for text in (change.before_bits, change.after_bits))
        assert bytes(after[at : at + dtype.itemsize].tolist()) == became
        after[at : at + dtype.itemsize] = torch.tensor(list(was), dtype=torch.uint8)
    assert torch.equal(after, before)
    assert NAME in found.sentence()
    assert Diagnosis.model_validate_json(found.model_dump_json()) == found


def test_a_whole_chunk_changes() -> None:
    """1 MiB of which every byte is another: all counted, the first 16 listed."""
    before = torch.randint(0, 256, (2**20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = compared(before.view(torch.bfloat16).view(512, 1024), before, before ^ 0xFF)
    assert (found.elements, found.bits, found.last) == (2**19, 2**23, [511, 1023])
    assert [change.element for change in found.changes] == [[0, column] for column in range(16)]


@pytest.mark.parametrize(
    ("tensor", "offset", "length", "words"),
    [
        (torch.zeros(9), -4, 8, "Bytes -4 to 4 are no whole elements"),
        (torch.zeros(9), 2, 6, "Bytes 2 to 8 are no whole elements"),
        (torch.zeros(9), 0, 6, "Bytes 0 to 6 are no whole elements"),
        (torch.zeros(9), 32, 8, "which has 9 elements of 4 bytes"),
        (torch.zeros(9, 4)[:, :2], 0, 8, "do not fill its memory"),
        (torch.zeros(1).expand(4), 0, 8, "do not fill its memory"),
    ],
)
def test_wrong_ranges_are_refused(tensor: Tensor, offset: int, length: int, words: str) -> None:
    """Bytes that are no whole elements of a dense tensor are one sentence."""
    with pytest.raises(ValueError, match=words):
        diagnose(NAME, tensor, offset, torch.zeros(length, dtype=torch.uint8), torch.ones(length, dtype=torch.uint8))


def test_bytes_of_another_kind_are_refused() -> None:
    """Other dtypes, shapes and lengths, of a candidate too."""
    tensor, data = torch.zeros(8), torch.zeros(32, dtype=torch.uint8)
    for before, after in ((data, data[:16]), (data.float(), data), (data.view(2, 16), data.view(2, 16))):
        with pytest.raises(ValueError, match="uint8 tensors of one dimension and one length"):
            diagnose(NAME, tensor, 0, before, after)
    after = torch.arange(32, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"bytes of other are not as many as those of {NAME}"):
        diagnose(NAME, tensor, 0, data, after, [("other", data[:16])])
