"""From a block down to the tensors that are not the checkpoint's, their elements and bits.

Method: hierarchical descent (block, sublayer, tensor, element), with digests in place of comparisons of tensors.  The
digests are taken also where the block hands on the same: a wrong value that these tokens do not bring to light is one.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..faults.bits import bits
from ..fingerprint.diagnosis import diagnose
from ..fingerprint.digest import digest_for
from ..fingerprint.line import memory_of
from .facts import STREAM, Comparisons, TensorDifference

if TYPE_CHECKING:
    from torch import Tensor

    from .view import DissectedView

# What a digest takes at once.
_CHUNK_BYTES = 2**20


def descend(
    view: "DissectedView",
    index: int,
    live: "Mapping[str, Tensor]",
    clean: "Mapping[str, Tensor]",
    tensors: "Mapping[str, Tensor]",
) -> tuple[list[TensorDifference], Comparisons]:
    """The tensors of a block that are not the checkpoint's, and what it took.

    Args:
        view: The model.
        index: The block.
        live: What its modules handed on.
        clean: The same with the checkpoint's tensors.
        tensors: These.
    """
    compared = 0
    if not same_bits(live[STREAM], clean[STREAM]):
        for child in (path for path in live if path != STREAM and "." not in path):
            compared += 1
            if not same_bits(live[child], clean[child]):
                break
    mine = view.tensors(index)
    changed = [name for name, right in tensors.items() if not _same_digest(mine[name], right)]
    differences = [_difference(view, index, name, mine[name], tensors[name]) for name in changed]
    return differences, Comparisons(sublayers=compared, digests=len(tensors), tensors=len(changed))


def same_bits(one: "Tensor", other: "Tensor") -> bool:
    """Equal bit for bit, NaN and the sign of zero too."""
    return bool((bits(one) == bits(other)).all())


def _difference(view: "DissectedView", index: int, name: str, mine: "Tensor", right: "Tensor") -> TensorDifference:
    full = f"{view.path(index)}.{name}"
    diagnosis = diagnose(full, mine, 0, memory_of(right), memory_of(mine))
    assert diagnosis is not None  # noqa: S101 - the digests differ
    apart = (bits(mine) != bits(right)).reshape(mine.shape[0] if mine.dim() else 1, -1).any(dim=1)
    rows = set(apart.nonzero().flatten().tolist())
    parts = [part for part, place in view.parts(index, name) if rows.intersection(place)]
    return TensorDifference(
        tensor=full, module=name.rpartition(".")[0], parts=parts, values=mine.numel(), diagnosis=diagnosis
    )


def _same_digest(one: "Tensor", other: "Tensor") -> bool:
    digest = digest_for(one.device, _CHUNK_BYTES)
    pairs = zip(_chunks(one), _chunks(other), strict=True)
    return all(digest.of([left]) == digest.of([right]) for left, right in pairs)


def _chunks(tensor: "Tensor") -> "Iterator[Tensor]":
    """The tensor's bytes, each piece as long as a digest takes, the last one filled up to whole words."""
    import torch
    from torch.nn.functional import pad

    pieces: tuple[Tensor, ...] = torch.split(memory_of(tensor), _CHUNK_BYTES)
    for piece in pieces:
        yield piece if piece.numel() % 16 == 0 else pad(piece, (0, -piece.numel() % 16))
