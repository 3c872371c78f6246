"""The weights of one rank as one line of bytes, cut into chunks.

Tensors lie behind each other in a fixed order, each in the layout in which the kernels read it, each at a multiple of
16 bytes.  A chunk is a stretch of the line of fixed length, so that it may hold a part of one tensor or many small
ones.  Nothing is copied to make the line: it only says where each byte lives.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .facts import Piece

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 16
"""Bytes.  No 64-bit word of a tensor is cut by the border of a chunk or of a block of the digest."""


class Source(NamedTuple):
    """A tensor that goes on the line."""

    name: str
    block: int | None
    tensor: "Tensor"


@dataclass(frozen=True)
class Stretch:
    """Where the memory of one tensor lies on the line."""

    source: Source
    memory: "Tensor"
    """(bytes) uint8: the live memory itself."""
    offset: int
    """Where `memory` begins in the tensor's own memory; above 0 where the beginning lies on the line already."""
    start: int
    """Its first byte on the line."""

    @property
    def stop(self) -> int:
        """Behind its last byte on the line."""
        return self.start + self.memory.numel()


class Part(NamedTuple):
    """Bytes of a chunk that lie in one stretch."""

    stretch: Stretch
    start: int
    """First byte in `stretch.memory`."""
    stop: int
    at: int
    """Where they begin in the chunk."""

    @property
    def memory(self) -> "Tensor":
        """(bytes) uint8: the live memory."""
        return self.stretch.memory[self.start : self.stop]

    @property
    def piece(self) -> Piece:
        """The same in words."""
        source, before = self.stretch.source, self.stretch.offset
        return Piece(tensor=source.name, block=source.block, start=before + self.start, stop=before + self.stop)


class Line:
    """All tensors are on one device.  Memory that several of them share lies on the line once, under the first name."""

    def __init__(self, sources: Sequence[Source], chunk_bytes: int) -> None:
        if chunk_bytes < ALIGNMENT or chunk_bytes % ALIGNMENT:
            raise ValueError(f"A chunk is a multiple of {ALIGNMENT} bytes, not {chunk_bytes}.")
        self.chunk_bytes = chunk_bytes
        self.stretches = _laid_out(sources)
        self._starts = [stretch.start for stretch in self.stretches]
        self._end = _aligned(self.stretches[-1].stop) if self.stretches else 0
        # Made once: a sweep over small chunks would spend as much time on this as on the bytes.
        self._memory = [self._views(chunk) for chunk in range(self.num_chunks)]

    @property
    def num_chunks(self) -> int:
        """The last one may be shorter."""
        return -(-self._end // self.chunk_bytes)

    @property
    def covered_bytes(self) -> int:
        """Bytes of tensors, without the gaps between them."""
        return sum(stretch.memory.numel() for stretch in self.stretches)

    def length(self, chunk: int) -> int:
        """Bytes of a chunk, gaps included; a multiple of 16."""
        return min(self._end, (chunk + 1) * self.chunk_bytes) - chunk * self.chunk_bytes

    def parts(self, chunk: int) -> list[Part]:
        """What a chunk consists of, in the order of the line."""
        begin = chunk * self.chunk_bytes
        end = begin + self.length(chunk)
        parts = []
        at = max(0, bisect_right(self._starts, begin) - 1)
        for stretch in self.stretches[at:]:
            if stretch.start >= end:
                break
            start, stop = max(begin, stretch.start), min(end, stretch.stop)
            if start < stop:
                parts.append(Part(stretch, start - stretch.start, stop - stretch.start, start - begin))
        return parts

    def chunks_of(self, stretches: Iterable[Stretch]) -> list[int]:
        """The chunks in which some stretches lie, ascending."""
        length = self.chunk_bytes
        return sorted({chunk for s in stretches for chunk in range(s.start // length, (s.stop - 1) // length + 1)})

    def paste(self, chunk: int, data: "Tensor", tensors: "Mapping[str, Tensor]") -> None:
        """Put what these tensors hold, by name and laid out as the live ones, into (length) uint8 of a chunk."""
        for part in self.parts(chunk):
            if (tensor := tensors.get(part.stretch.source.name)) is not None:
                begin, length = part.stretch.offset + part.start, part.stop - part.start
                data[part.at : part.at + length] = memory_of(tensor)[begin : begin + length]

    def memory(self, chunk: int) -> "list[Tensor]":
        """Some (n) uint8, `length` in sum: the live memory of a chunk, not copied, and zeros for the gaps."""
        return self._memory[chunk]

    def read(self, chunk: int) -> "Tensor":
        """(length) uint8: a copy of the bytes of now, gaps as zeros."""
        import torch

        return torch.cat(self.memory(chunk))

    def add(self, chunk: int, block: "Tensor") -> None:
        """XOR a chunk's bytes of now into (chunk) uint8."""
        for part in self.parts(chunk):
            block[part.at : part.at + part.stop - part.start].bitwise_xor_(part.memory)

    def write(self, chunk: int, data: "Tensor") -> None:
        """Put (length) uint8 into the tensors' memory."""
        for part in self.parts(chunk):
            part.memory.copy_(data[part.at : part.at + part.stop - part.start])

    def _views(self, chunk: int) -> "list[Tensor]":
        views = []
        at = 0
        for part in self.parts(chunk):
            if part.at > at:
                views.append(part.memory.new_zeros(part.at - at))
            views.append(part.memory)
            at = part.at + part.stop - part.start
        if (rest := self.length(chunk) - at) > 0:
            views.append(views[-1].new_zeros(rest))
        return views


def _laid_out(sources: Sequence[Source]) -> list[Stretch]:
    stretches: list[Stretch] = []
    taken: dict[int, list[tuple[int, int]]] = {}
    end = 0
    for source in sources:
        memory = memory_of(source.tensor)
        intervals = taken.setdefault(source.tensor.untyped_storage().data_ptr(), [])
        begin = int(memory.storage_offset())
        for start, stop in _free(begin, begin + memory.numel(), intervals):
            part = memory[start - begin : stop - begin]
            stretches.append(Stretch(source, part, start - begin, end))
            end = _aligned(end + part.numel())
            intervals.append((start, stop))
    return stretches


def memory_of(tensor: "Tensor") -> "Tensor":
    """(bytes) uint8: the memory from a tensor's first value to its last, in the order of addresses, not copied."""
    import torch

    size = tensor.element_size()
    span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (span * size,), (1,))


def _free(start: int, stop: int, taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of an interval that none of those taken holds."""
    free = [(start, stop)]
    for low, high in taken:
        cut = [(a, min(b, low)) for a, b in free] + [(max(a, high), b) for a, b in free]
        free = sorted((a, b) for a, b in cut if a < b)
    return free


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
