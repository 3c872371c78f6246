"""XOR parity over groups of chunks: what is missing of one chunk, the others and the parity give back.

As in RAID 5 (Patterson, Gibson, Katz 1988, section 7).  Chunk `i` is in group `i mod groups`, so that neighbours, which
one stray write may hit together, are in different groups.
"""

import os
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from .facts import ParityPlace

if TYPE_CHECKING:
    from torch import Tensor


class ParityLost(Exception):
    """The parity of a group cannot be read; one sentence."""


class Parity(ABC):
    """The parity blocks of all groups, each as long as a chunk."""

    place: ParityPlace

    @abstractmethod
    def put(self, group: int, block: "Tensor") -> None:
        """Keep (chunk) uint8, on the host."""

    @abstractmethod
    def get(self, group: int) -> "Tensor":
        """(chunk) uint8 on the host, the caller's own; raises `ParityLost`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it; it cannot be used afterwards."""


class MemoryParity(Parity):
    """In host memory."""

    place = ParityPlace.MEMORY

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}

    def put(self, group: int, block: "Tensor") -> None:
        """See `Parity.put`."""
        self._blocks[group] = block.clone()

    def get(self, group: int) -> "Tensor":
        """See `Parity.get`."""
        return self._blocks[group].clone()

    def close(self) -> None:
        """See `Parity.close`."""
        self._blocks.clear()


class FileParity(Parity):
    """In a file that nobody else can open by name: it is gone with the process.

    Read and written, never mapped: a mapped file that somebody cuts short kills the process that looks at it.
    """

    place = ParityPlace.FILE

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        """Raises `OSError` when the folder takes no file."""
        self._chunk_bytes = chunk_bytes
        self._file = tempfile.TemporaryFile(dir=folder, prefix="flipwatch-parity-")  # noqa: SIM115 - kept open

    def put(self, group: int, block: "Tensor") -> None:
        """See `Parity.put`; raises `OSError`."""
        self._file.seek(group * self._chunk_bytes)
        self._file.write(block.numpy().data)
        self._file.flush()

    def get(self, group: int) -> "Tensor":
        """See `Parity.get`."""
        import torch

        try:
            data = bytearray(os.pread(self._file.fileno(), self._chunk_bytes, group * self._chunk_bytes))
        except OSError as error:
            raise ParityLost(f"The parity file cannot be read: {error.strerror}.") from error
        if len(data) < self._chunk_bytes:
            raise ParityLost(f"The parity file ends before group {group}.")
        return torch.frombuffer(data, dtype=torch.uint8)

    def close(self) -> None:
        """See `Parity.close`."""
        self._file.close()
