"""What happened to a tensor whose bytes have changed: which elements and bits, what they were and became, the pattern.

Positions in memory become indices of the tensor by its strides.  The patterns are tried in the order of `Pattern`,
and the first that fits is the name.  A copy needs evidence: some bytes of another tensor may agree by chance, and one
constant value is a fill.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING

from pydantic import Field

from ..strict import Wire

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LISTED = 16
"""So many changed elements are listed one by one."""

# Changed elements of fewer bytes than this in sum are not called a copy.
_COPY_BYTES = 8


class Pattern(StrEnum):
    """The name of a change, in the order in which they are tried."""

    SINGLE_FLIP = "single_flip"
    """One bit of one element."""
    ZEROS = "zeros"
    """All changed elements became zero bytes."""
    SIGN = "sign"
    """More than one element, all negated: only the sign bit of floating-point values, integers by two's complement."""
    COPY = "copy"
    """The changed elements equal those at the same place of another tensor, or rows of the tensor changed places."""
    FLIPS = "flips"
    """One bit of each of several elements, also where that made them all NaN or Inf."""
    NAN = "nan"
    """All changed elements became NaN."""
    INF = "inf"
    """All changed elements became Inf or -Inf."""
    BURST = "burst"
    """Other values, in one element or more: whatever none of the others fits."""


_WORDS = {
    Pattern.SINGLE_FLIP: "single bit flip",
    Pattern.ZEROS: "zeros",
    Pattern.SIGN: "negated",
    Pattern.FLIPS: "bit flips, one per element",
    Pattern.NAN: "NaN",
    Pattern.INF: "Inf",
    Pattern.BURST: "burst",
}


class Change(Wire):
    """One changed element."""

    element: list[int]
    """Its index in the tensor's shape."""
    bits: list[int]
    """Which bits differ, counted from the lowest."""
    before: str
    """The value as Python writes it, `nan` and `inf` too; 8-bit packs of 4-bit floats as an integer."""
    after: str
    before_bits: str
    """All bits of the value in hexadecimal, 0x first."""
    after_bits: str

    def sentence(self, floating: bool) -> str:
        """`element [12, 345], bit 14, 0.0123 became 4.2e+36`, with as many digits as tell the values apart."""
        before, after = self.before, self.after
        if floating:
            for digits in range(3, 18):
                before, after = f"{float(self.before):.{digits}g}", f"{float(self.after):.{digits}g}"
                if before != after:
                    break
        bits = ", ".join(map(str, self.bits))
        return f"element {self.element}, bit{'s' * (len(self.bits) > 1)} {bits}, {before} became {after}"


class Diagnosis(Wire):
    """What changed in one tensor, within the bytes that were compared."""

    tensor: str
    dtype: str
    """As torch names it, without `torch.`."""
    elements: int
    """How many elements changed."""
    bits: int
    """How many bits changed, in sum."""
    first: list[int]
    """Index of the first changed element in memory order."""
    last: list[int]
    pattern: Pattern = Field(strict=False)
    source: str | None
    """Of a copy: the other tensor, or this one where rows changed places."""
    changes: list[Change]
    """The first 16, in memory order."""

    def sentence(self) -> str:
        """All of it in one sentence, without the full stop."""
        words = _WORDS.get(self.pattern)
        if words is None:
            rows = self.source == self.tensor
            words = "rows changed places" if rows else f"copy of the same place of {self.source}"
        example = self.changes[0].sentence("float" in self.dtype)
        bits = f"{self.bits} bit{'s' * (self.bits > 1)}"
        if self.elements == 1:
            return f"{bits} of {self.tensor} changed: {example} ({words})"
        return (
            f"{bits} of {self.elements} elements of {self.tensor} changed, between {self.first} and {self.last}: "
            f"first {example} ({words})"
        )


def diagnose(
    name: str,
    tensor: "Tensor",
    offset: int,
    before: "Tensor",
    after: "Tensor",
    others: Iterable[tuple[str, "Tensor"]] = (),
) -> Diagnosis | None:
    """What happened between `before` and `after`; None where they are equal.

    Args:
        name: What the tensor is called.
        tensor: Gives dtype, shape and strides and is not read: any dense layout, such as a transposed one.
        offset: Where the bytes begin in the tensor's memory, in bytes.
        before: (n,) uint8, on any device: the bytes as they were, in memory order.
        after: (n,) uint8, on any device: what they became.
        others: Names and (n,) uint8 of the same range of other tensors that this one may have been overwritten with;
            read up to the first that fits, and only where a copy is possible.

    Raises:
        ValueError: the bytes are no whole elements of the tensor, or its elements do not fill its memory.
    """
    _check(name, tensor, offset, before, after)
    size, start = tensor.element_size(), offset // tensor.element_size()
    old, new = before.cpu().reshape(-1, size), after.cpu().reshape(-1, size)
    where = (old ^ new).any(dim=1).nonzero().flatten()
    if not where.numel():
        return None
    counts = _ones(old[where] ^ new[where])
    pattern, source = _pattern(name, tensor, start, old, new, where, counts, others)
    listed = where[:LISTED]
    return Diagnosis(
        tensor=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        elements=where.numel(),
        bits=int(counts.sum()),
        first=_index(tensor, start + int(where[0])),
        last=_index(tensor, start + int(where[-1])),
        pattern=pattern,
        source=source,
        changes=_changes(tensor, start, listed.tolist(), old[listed], new[listed]),
    )


def _check(name: str, tensor: "Tensor", offset: int, before: "Tensor", after: "Tensor") -> None:
    import torch

    if before.dtype != torch.uint8 or after.dtype != torch.uint8 or before.dim() != 1 or before.shape != after.shape:
        raise ValueError(f"The bytes of {name} before and after must be uint8 tensors of one dimension and one length.")
    size, end = tensor.element_size(), offset + before.numel()
    if offset % size or end % size or offset < 0 or end > tensor.numel() * size:
        whole = f"{tensor.numel()} elements of {size} bytes"
        raise ValueError(f"Bytes {offset} to {end} are no whole elements of {name}, which has {whole}.")
    filled = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != filled:
            raise ValueError(f"The elements of {name} do not fill its memory: strides {tensor.stride()}.")
        filled *= length


def _pattern(
    name: str,
    tensor: "Tensor",
    start: int,
    old: "Tensor",
    new: "Tensor",
    where: "Tensor",
    counts: "Tensor",
    others: Iterable[tuple[str, "Tensor"]],
) -> tuple[Pattern, str | None]:
    """The pattern, and the source of a copy.  `old` and `new` are (elements, bytes of one)."""
    was, became = old[where], new[where]
    if where.numel() == 1 and counts.item() == 1:
        return Pattern.SINGLE_FLIP, None
    if not became.any():
        return Pattern.ZEROS, None
    if where.numel() > 1 and _negated(was, became, tensor.dtype):
        return Pattern.SIGN, None
    # A fill with one value is no copy, even of a tensor that holds nothing else.
    if became.numel() >= _COPY_BYTES and (became != became[0]).any():
        if _rows_moved(tensor, start, old, new, where):
            return Pattern.COPY, name
        for other, there in others:
            if there.shape != (old.numel(),):
                raise ValueError(f"The bytes of {other} are not as many as those of {name}.")
            if (there.reshape(old.shape)[where.to(there.device)].cpu() == became).all():
                return Pattern.COPY, other
    if counts.max() == 1:
        return Pattern.FLIPS, None
    values = _values(became, tensor.dtype)
    # Torch tests no 8-bit value for NaN on every device and release.
    values = values.float() if values.element_size() == 1 else values
    if values.isnan().all():
        return Pattern.NAN, None
    return (Pattern.INF if values.isinf().all() else Pattern.BURST), None


def _negated(was: "Tensor", became: "Tensor", dtype: "torch.dtype") -> bool:
    if not dtype.is_signed or dtype.is_complex:
        return False
    if not dtype.is_floating_point:
        return bool((_values(became, dtype) == -_values(was, dtype)).all())
    # Little-endian: the sign is the highest bit of the last byte.
    masks = was ^ became
    return bool((masks[:, -1] == 0x80).all() and not masks[:, :-1].any())


def _rows_moved(tensor: "Tensor", start: int, old: "Tensor", new: "Tensor", where: "Tensor") -> bool:
    """Whether the rows (of the last dimension; single values of a vector) with changes are the same in another order.

    Rows that do not lie in the range as a whole cannot be told.  Rows are put in the order of a hash: different
    ones share it less than once in a million ranges, and then a copy may be called a burst, never the other way round.
    """
    import torch

    width, step = (tensor.shape[-1], max(tensor.stride(-1), 1)) if tensor.dim() > 1 else (1, 1)
    at = where + start
    first = torch.unique(at - at // step % width * step) - start
    if first[0] < 0 or first[-1] + (width - 1) * step >= len(old):
        return False
    inside = first[:, None] + torch.arange(width) * step
    was, became = old[inside].flatten(1), new[inside].flatten(1)
    factors = torch.randint(2**62, (was.shape[1],), generator=torch.Generator().manual_seed(0))
    order, reached = ((rows * factors).sum(dim=1).argsort() for rows in (was, became))
    return torch.equal(was[order], became[reached])


def _changes(tensor: "Tensor", start: int, where: list[int], old: "Tensor", new: "Tensor") -> list[Change]:
    values = zip(_values(old, tensor.dtype).tolist(), _values(new, tensor.dtype).tolist(), strict=True)
    patterns = zip(old.tolist(), new.tolist(), strict=True)
    width = 2 * tensor.element_size()
    changes = []
    for at, (before, after), pattern in zip(where, values, patterns, strict=True):
        was, became = (int.from_bytes(bytes(data), "little") for data in pattern)
        changes.append(
            Change(
                element=_index(tensor, start + at),
                bits=[bit for bit in range(4 * width) if (was ^ became) >> bit & 1],
                before=repr(before),
                after=repr(after),
                before_bits=f"0x{was:0{width}x}",
                after_bits=f"0x{became:0{width}x}",
            )
        )
    return changes


def _index(tensor: "Tensor", at: int) -> list[int]:
    """The index of the element at this place in memory, counted in elements: the strides of a dense tensor nest."""
    places = zip(tensor.stride(), tensor.shape, strict=True)
    return [at // stride % length if length > 1 else 0 for stride, length in places]


def _values(rows: "Tensor", dtype: "torch.dtype") -> "Tensor":
    """(n,) values of `dtype` from (n, bytes of one)."""
    import torch

    # Two 4-bit floats in a byte: torch cannot read them, so the byte stands for itself.
    return rows.view(torch.uint8 if dtype == torch.float4_e2m1fn_x2 else dtype).flatten()


def _ones(masks: "Tensor") -> "Tensor":
    """How many bits are set in each row: (n, bytes) uint8 -> (n,) int64.  Pairs of bits, then fours, then the byte."""
    pairs = masks - (masks >> 1 & 0x55)
    fours = (pairs & 0x33) + (pairs >> 2 & 0x33)
    return ((fours + (fours >> 4)) & 0x0F).sum(dim=1)
