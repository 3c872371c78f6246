"""What each kind of fault does: one function each, by the table at the end."""

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from .bits import bits, read
from .spec import FACTORS, FaultKind, FaultSpec

if TYPE_CHECKING:
    from torch import Tensor

Struck = tuple["Tensor | range", "Tensor"]
"""Flat indices, each once, and as many values in the tensor's dtype: see `Damage`."""

Strike = Callable[[FaultSpec, "Tensor", "Tensor | None", random.Random], Struck]
"""(spec, tensor, source, generator) -> what is written where."""

# The top 1 % of a larger tensor is judged by a sample of so many values.
_SAMPLE = 2**20


def _bit(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None", generator: random.Random) -> Struck:
    bit = tensor.element_size() * 8 - 2 if spec.bit is None else spec.bit
    where = _scattered(spec, tensor, generator)
    return _flipped(tensor, where, [_mask(tensor, bit)] * where.numel())


def _burst(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None", generator: random.Random) -> Struck:
    import torch

    where = _scattered(spec, tensor, generator)
    signs = torch.tensor([generator.choice((-1.0, 1.0)) for _ in range(where.numel())], dtype=torch.float64)
    return where, _as_values(signs * _factor(spec) * _largest(tensor), tensor)


def _neighbours(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None", generator: random.Random) -> Struck:
    import torch

    count = min(spec.count, tensor.numel())
    start = generator.randrange(tensor.numel() - count + 1)
    drawn = torch.tensor([generator.uniform(-1.0, 1.0) for _ in range(count)], dtype=torch.float64)
    return range(start, start + count), _as_values(drawn * _factor(spec) * _largest(tensor), tensor)


def _nan(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None", generator: random.Random) -> Struck:
    import torch

    height, width = _shape(tensor)
    if tensor.dim() < 2:
        height, width = 1, tensor.numel()
    count = min(spec.count, tensor.numel())
    columns = min(width, max(math.isqrt(count - 1) + 1, -(-count // height)))
    rows = -(-count // columns)
    top, left = generator.randrange(height - rows + 1), generator.randrange(width - columns + 1)
    tile = torch.arange(top, top + rows)[:, None] * width + torch.arange(left, left + columns)
    where = tile.flatten()[:count].to(tensor.device)
    return where, _special(float("nan"), tensor).expand(count).contiguous()


def _inf(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None", generator: random.Random) -> Struck:
    import torch

    where = _scattered(spec, tensor, generator)
    negative = torch.tensor([generator.random() < 0.5 for _ in range(where.numel())], device=tensor.device)
    infinity = bits(_special(float("inf"), tensor))
    below = bits(_special(float("-inf"), tensor))
    return where, torch.where(negative, below, infinity).view(tensor.dtype)


def _zeros(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None", generator: random.Random) -> Struck:
    page = _page(spec.count, tensor.numel(), generator)
    return page, tensor.new_zeros(len(page))


def _stale(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None", generator: random.Random) -> Struck:
    assert source is not None  # noqa: S101 - `damage` has checked it
    if source.dtype != tensor.dtype or source.numel() == 0:
        raise ValueError(f"A stale page of {tensor.dtype} cannot come from {source.numel()} values of {source.dtype}.")
    page = _page(spec.count, min(tensor.numel(), source.numel()), generator)
    return page, read(source, page).to(tensor.device).view(tensor.dtype)


def _swap(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None", generator: random.Random) -> Struck:
    import torch

    height, width = _shape(tensor)
    if height < 2:
        raise ValueError("A tensor of one row has none to change places with.")
    one, other = (range(row * width, (row + 1) * width) for row in generator.sample(range(height), 2))
    where = torch.cat([torch.arange(r.start, r.stop, device=tensor.device) for r in (one, other)])
    return where, torch.cat([read(tensor, other), read(tensor, one)]).view(tensor.dtype)


def _sign(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None", generator: random.Random) -> Struck:
    height, width = _shape(tensor)
    start = generator.randrange(height) * width
    row = range(start, start + width)
    before = read(tensor, row)
    if tensor.is_floating_point():
        return row, (before ^ _mask(tensor, tensor.element_size() * 8 - 1)).view(tensor.dtype)
    return row, _as_values(-before.double(), tensor)


def _scale(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None", generator: random.Random) -> Struck:
    import torch

    if spec.seed == 0:
        numbers = _numbers(tensor).reshape(-1)
        low, high = numbers.argmin(), numbers.argmax()
        where = torch.where(-numbers[low] > numbers[high], low, high)[None]
    else:
        size = tensor.numel()
        seeded = torch.Generator().manual_seed(spec.seed)
        drawn = torch.arange(size) if size <= _SAMPLE else torch.randint(size, (_SAMPLE,), generator=seeded)
        drawn = drawn.to(tensor.device)
        magnitudes = _numbers(read(tensor, drawn).view(tensor.dtype)).abs()
        top = drawn[magnitudes.topk(-(-drawn.numel() // 100)).indices].tolist()
        top = sorted(set(top))
        where = torch.tensor(generator.sample(top, min(spec.count, len(top))), device=tensor.device)
    return where, _as_values(read(tensor, where).view(tensor.dtype).double() * _factor(spec), tensor)


def _lost(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None", generator: random.Random) -> Struck:
    return range(tensor.numel()), tensor.new_zeros(tensor.numel())


def _flips(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None", generator: random.Random) -> Struck:
    import torch

    masks: dict[int, int] = {}
    for index, bit in spec.flips or ():
        if index >= tensor.numel():
            raise ValueError(f"There is no value {index} in a tensor of {tensor.numel()} values.")
        masks[index] = masks.get(index, 0) ^ _mask(tensor, bit)
    return _flipped(tensor, torch.tensor(list(masks), device=tensor.device), list(masks.values()))


def _shape(tensor: "Tensor") -> tuple[int, int]:
    """Rows, and values in a row."""
    height = tensor.shape[0] if tensor.dim() else 1
    return height, tensor.numel() // height


def _factor(spec: FaultSpec) -> float:
    return FACTORS[spec.kind] if spec.factor is None else spec.factor


def _scattered(spec: FaultSpec, tensor: "Tensor", generator: random.Random) -> "Tensor":
    """`count` random flat indices.  A sample, not a permutation of the tensor: a live server stands still meanwhile."""
    import torch

    size = tensor.numel()
    return torch.tensor(generator.sample(range(size), min(spec.count, size)), device=tensor.device)


def _page(length: int, size: int, generator: random.Random) -> range:
    """A random page among those that lie at multiples of their length; a page as large as the tensor is all of it."""
    length = min(length, size)
    start = generator.randrange(size // length) * length
    return range(start, start + length)


def _mask(tensor: "Tensor", bit: int) -> int:
    """The bit as a number of the tensor's width, whose highest bit is the sign."""
    highest = tensor.element_size() * 8 - 1
    if bit > highest:
        raise ValueError(f"A value of {tensor.dtype} has the bits 0 to {highest}, not {bit}.")
    return -(1 << bit) if bit == highest else 1 << bit


def _flipped(tensor: "Tensor", where: "Tensor", masks: list[int]) -> Struck:
    import torch

    before = read(tensor, where)
    return where, (before ^ torch.tensor(masks, dtype=before.dtype, device=before.device)).view(tensor.dtype)


def _numbers(tensor: "Tensor") -> "Tensor":
    """The values in a type that torch can compare, those that are not finite as 0; no copy where none is needed."""
    numbers = tensor if tensor.is_floating_point() and tensor.element_size() > 1 else tensor.float()
    finite: bool = all(end.isfinite() for end in numbers.aminmax())
    return numbers if finite else numbers.nan_to_num(0.0, 0.0, 0.0)


def _largest(tensor: "Tensor") -> float:
    low, high = _numbers(tensor).aminmax()
    largest = max(-low.item(), high.item())
    if largest == 0:
        raise ValueError("A tensor of zeros has no largest magnitude to start from.")
    return largest


def _as_values(values: "Tensor", tensor: "Tensor") -> "Tensor":
    """Float64 values in the tensor's dtype and on its device, cut to its finite range."""
    import torch

    ends = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
    return values.clamp(ends.min, ends.max).to(tensor.device, tensor.dtype)


def _special(value: float, tensor: "Tensor") -> "Tensor":
    """(1,) NaN or Inf in the tensor's dtype, where it has one."""
    import torch

    special = torch.tensor([value]).to(tensor.dtype)
    if str(special.double().item()) != str(value):
        raise ValueError(f"{tensor.dtype} has no {'NaN' if value != value else 'Inf'}.")
    return special.to(tensor.device)


STRIKES: dict[FaultKind, Strike] = {
    FaultKind.BIT: _bit,
    FaultKind.BURST: _burst,
    FaultKind.NEIGHBOURS: _neighbours,
    FaultKind.NAN: _nan,
    FaultKind.INF: _inf,
    FaultKind.ZEROS: _zeros,
    FaultKind.STALE: _stale,
    FaultKind.SWAP: _swap,
    FaultKind.SIGN: _sign,
    FaultKind.SCALE: _scale,
    FaultKind.LOST: _lost,
    FaultKind.FLIPS: _flips,
}
