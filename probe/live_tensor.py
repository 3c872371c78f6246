"""Finds a tensor of the served model by the name that the checkpoint or vLLM gives it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .stack import Stack


class UnknownTensor(Exception):
    """No live tensor answers to that name; the text says which there are."""


@dataclass(frozen=True)
class LiveTensor:
    """A live parameter, or the rows of it that one of several packed projections has on this rank."""

    name: str
    block: int | None
    values: Tensor
    shared_with: list[str]
    """Other names of the same parameter."""


def find_tensor(wanted: str, block: int | None, model: nn.Module, stack: Stack) -> LiveTensor:
    """The tensor of this name inside a block, or without a block outside the blocks or by its full name.

    Raises:
        UnknownTensor: there is none, or more than one; or it is held where no tensor shows it.
    """
    if block is None:
        block = stack.block_of(wanted)
    if block is not None and block not in stack.layers:
        if 0 <= block < stack.num_blocks:
            raise UnknownTensor(f"Block {block} lies on another pipeline stage.")
        raise UnknownTensor(f"Block {block} does not exist; this model has {stack.num_blocks} blocks.")
    prefix = "" if block is None else f"{stack.path}.{block}."
    everywhere = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.numel()}
    live = {
        name.removeprefix(prefix): parameter
        for name, parameter in everywhere.items()
        if (name.startswith(prefix) if prefix else not name.startswith(f"{stack.path}."))
    }
    stem = wanted.removeprefix(prefix).removesuffix(".weight")
    matches = _named(live, wanted.removeprefix(prefix)) or _named(live, f"{stem}.weight")
    part = None
    if not matches:
        matches, part = _packed(live, stem, getattr(model, "packed_modules_mapping", {}))
    # A tied head is one parameter with two names.
    if len({id(live[match]) for match in matches}) != 1:
        where = "outside the blocks" if block is None else f"of block {block}"
        problem = "is not there" if not matches else f"is ambiguous ({', '.join(matches)})"
        raise UnknownTensor(f"Tensor {wanted!r} {where} {problem}; tensors in memory: {', '.join(sorted(live))}.")
    parameter = live[matches[0]]
    names = [name for name, other in everywhere.items() if other is parameter]
    values = parameter.data
    if part is not None:
        rows = _rows(model.get_submodule(names[0].removesuffix(".weight")), part, parameter)
        if rows is None:
            raise UnknownTensor(
                f"Tensor {wanted!r} is no run of rows of {names[0]} in memory; damage that one instead."
            )
        values = values[rows.start : rows.stop]
    return LiveTensor(names[0], block, values, names[1:])


def _named(live: Mapping[str, Tensor], name: str) -> list[str]:
    """Those of exactly this name, else those that end with it."""
    return [name] if name in live else [other for other in live if other.endswith(f".{name}")]


def _packed(live: Mapping[str, Tensor], stem: str, mapping: Mapping[str, list[str]]) -> tuple[list[str], int | None]:
    """The parameters in which a projection of this name is packed with others, and which part of them it is."""
    head, _, part = stem.rpartition(".")
    for packed, parts in mapping.items():
        if part in parts:
            name = f"{head}.{packed}.weight" if head else f"{packed}.weight"
            return _named(live, name), parts.index(part)
    return [], None


def packed_rows(model: nn.Module, name: str) -> list[tuple[str, range]]:
    """The projections that are packed in a parameter of this full name, and their rows of it on this rank."""
    head, _, packed = name.removesuffix(".weight").rpartition(".")
    mapping: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    parts = mapping.get(packed, []) if name.endswith(".weight") else []
    if not parts:
        return []
    module, parameter = model.get_submodule(f"{head}.{packed}"), model.get_parameter(name)
    rows = {part: _rows(module, index, parameter) for index, part in enumerate(parts)}
    return [(part, at) for part, at in rows.items() if at is not None]


def _rows(module: Any, part: int, parameter: Tensor) -> range | None:
    """Rows of one part of a fused projection on this rank; None where it does not lie in rows."""
    sizes = [size // module.tp_size for size in module.output_sizes]
    if parameter.shape[0] != sum(sizes):
        return None
    return range(sum(sizes[:part]), sum(sizes[: part + 1]))
