"""Repairs in words: for messages, which name the first few chunks, and for the audit log, which has all of them."""

from collections.abc import Sequence
from typing import Any

from ..monitors.fingerprint.facts import ChunkRepair, Method

_NAMED = 8

_HOW = {Method.PARITY: "by parity", Method.CHECKPOINT: "from the checkpoint", None: "found intact"}


def counted(repairs: Sequence[ChunkRepair]) -> str:
    """`1 chunk`, `3 chunks`."""
    return f"{len(repairs)} chunk{'s' * (len(repairs) != 1)}"


def place(repair: ChunkRepair) -> str:
    """`chunk 12 of rank 0 (model.layers.4.mlp.up_proj.weight and 1 more)`."""
    tensors = [piece.tensor for piece in repair.pieces]
    more = f" and {len(tensors) - 1} more" * (len(tensors) > 1)
    where = f" ({tensors[0]}{more})" * bool(tensors)
    return f"chunk {repair.chunk} of rank {repair.rank}{where}"


def intention(repairs: Sequence[ChunkRepair]) -> str:
    """What a dry run would do."""
    return "put right " + _first(
        [
            f"{place(repair)} {_HOW[Method.PARITY]}"
            if repair.reason is None
            else f"{place(repair)} {_HOW[Method.CHECKPOINT]} ({_inside(repair.reason)})"
            for repair in repairs
        ]
    )


def outcome(repairs: Sequence[ChunkRepair]) -> str:
    """What has become of the chunks, half a sentence; the ones that are not intact with their reasons."""
    bad = [repair for repair in repairs if not repair.intact]
    if bad:
        reasons = [f"{place(repair)}: {_inside(repair.reason or 'no reason was given')}" for repair in bad]
        return f"{len(bad)} of {counted(repairs)} could not be put right: {_first(reasons)}"
    methods = [repair.method for repair in repairs]
    how = ", ".join(f"{methods.count(method)} {words}" for method, words in _HOW.items() if method in methods)
    return f"{counted(repairs)} put right ({how})"


def told(repairs: Sequence[ChunkRepair]) -> list[dict[str, Any]]:
    """All chunks, for the audit log."""
    return [
        {
            "rank": repair.rank,
            "chunk": repair.chunk,
            "tensors": [piece.tensor for piece in repair.pieces],
            "intact": repair.intact,
            "method": repair.method,
            "diagnoses": [diagnosis.sentence() for diagnosis in repair.diagnoses],
            "reason": repair.reason,
        }
        for repair in repairs
    ]


def _first(items: Sequence[str]) -> str:
    more = len(items) - _NAMED
    return "; ".join(items[:_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _inside(sentence: str) -> str:
    return sentence.rstrip(".")
