"""The facts of the differential monitor: a walk through the model as served, and each block alone."""

import base64
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .descent import descend, same_bits
from .facts import (
    STREAM,
    BlockStates,
    CleanBlock,
    DifferentialPlan,
    DifferentialReading,
    Noise,
    Point,
    RankStates,
)
from .sketch import Sketcher, as_sketch
from .view import DissectedView

if TYPE_CHECKING:
    from torch import Tensor

Activations = Mapping[str, "Tensor"]


def steps(plan: DifferentialPlan, num_blocks: int) -> int:
    """Units of work: each yields once.

    Raises:
        ValueError: the inputs are of a model with another number of blocks.
    """
    if plan.inputs is not None and len(plan.inputs) != num_blocks:
        raise ValueError(f"there are inputs for {len(plan.inputs)} blocks, and the model has {num_blocks}")
    walks = (1 + plan.noise) * (num_blocks + 1) if plan.walks else 0
    return walks + num_blocks


def measure(view: DissectedView, plan: DifferentialPlan) -> Generator[None, None, DifferentialReading]:
    """One rank's states.  See `DifferentialPlan`.

    Raises:
        ValueError: the inputs do not fit the model, or there is no checkpoint.
    """
    measurement = _Measurement(view, plan)
    walk = (yield from measurement.walk()) if plan.walks else _Walk([], 0, [], [])
    walk_noise = (yield from measurement.walk_noise(walk)) if plan.walks and plan.noise else []
    isolated: list[BlockStates] = []
    clean: list[CleanBlock] = []
    stream = view.embed(measurement.prefix)
    inputs = walk.inputs if plan.inputs is None else _decoded(plan, stream)
    for index in range(view.num_blocks):
        fed = stream if plan.checkpoint else inputs[index]
        live = view.dissect(index, fed, measurement.prefix)
        noise = measurement.noise(index, fed, live) if plan.noise else {}
        isolated.append(BlockStates(block=index, points=measurement.points(live, noise)))
        if plan.checkpoint:
            block, stream = measurement.against_checkpoint(index, fed, live)
            clean.append(block)
        yield
    states = RankStates(
        rank=view.rank,
        walk=[as_sketch(rows, walk.width) for rows in walk.rows],
        walk_noise=walk_noise,
        nats=walk.nats,
        isolated=isolated,
        clean=clean,
        inputs=[_encoded(fed) for fed in inputs] if plan.records else [],
    )
    return DifferentialReading(ranks=[states], gates=view.gates, dtype=str(stream.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class _Walk:
    """The model as served, from in front of block 0 to behind the last block."""

    rows: "list[Tensor]"
    """(blocks + 1) times (N, K)."""
    width: int
    nats: list[float | None]
    inputs: "list[Tensor]"
    """Of each block: (1, P, D), the first tokens in front of it."""


class _Measurement:
    """What one measurement works with."""

    def __init__(self, view: DissectedView, plan: DifferentialPlan) -> None:
        import torch

        self._view = view
        self._plan = plan
        self._sketcher = Sketcher(plan.seed, plan.size)
        self._lengths = [len(row) for row in plan.tokens]
        width = max(self._lengths)
        self._tokens = torch.tensor([row + row[-1:] * (width - len(row)) for row in plan.tokens])
        self._moves = torch.Generator().manual_seed(plan.seed)
        self.prefix = self._tokens[:1, : min(plan.prefix, self._lengths[0])].contiguous()

    def walk(self) -> Generator[None, None, "_Walk"]:
        """The model as served."""
        length = self.prefix.shape[1]
        hidden = self._view.embed(self._tokens)
        rows, inputs = [self._rows(hidden)], []
        for index in range(self._view.num_blocks):
            inputs.append(hidden[:1, :length].clone())
            hidden = self._view.block(index, hidden, self._tokens)
            rows.append(self._rows(hidden))
            yield
        nats = self._nats(hidden)
        yield
        return _Walk(rows, hidden.shape[-1], nats, inputs)

    def walk_noise(self, walk: "_Walk") -> Generator[None, None, list[Noise]]:
        """(blocks + 1): how far the walk lies from itself, walked again, and with its start moved by rounding."""
        again = self._view.embed(self._tokens)
        moved = self._moved(again)
        noise = []
        for index, rows in enumerate(walk.rows):
            repeated, rounding = (distance(self._rows(hidden), rows) for hidden in (again, moved))
            noise.append(Noise(repeated=_largest(repeated), rounding=_largest(rounding)))
            if index < self._view.num_blocks:
                again = self._view.block(index, again, self._tokens)
                moved = self._view.block(index, moved, self._tokens)
            yield
        return noise

    def _rows(self, hidden: "Tensor") -> "Tensor":
        return self._sketcher.rows_of_sequences(hidden, self._lengths)

    def points(self, activations: Activations, noise: Mapping[str, Noise]) -> list[Point]:
        """Sketches of what the modules handed on."""
        return [
            Point(module=path, sketch=self._sketcher.of(activation), noise=noise.get(path))
            for path, activation in activations.items()
        ]

    def noise(self, index: int, fed: "Tensor", live: Activations) -> dict[str, Noise]:
        """How far a block lies from itself: run again, in a batch of two, and with its input moved by rounding."""
        import torch

        def apart(other: "Tensor") -> dict[str, float]:
            # One of them at a time is held beside `live`.
            found = self._view.dissect(index, other, self.prefix)
            return {path: distance(found[path][: here.shape[0]], here) for path, here in live.items()}

        again, twice, moved = apart(fed), apart(torch.cat([fed, fed])), apart(self._moved(fed))
        return {
            path: Noise(repeated=_largest(again[path]), rounding=_largest(moved[path], twice[path])) for path in live
        }

    def against_checkpoint(self, index: int, fed: "Tensor", live: Activations) -> "tuple[CleanBlock, Tensor]":
        """The block with the checkpoint's tensors, and what it hands to the next one."""
        tensors, missing = self._view.clean(index)
        # Also where there is none: on every rank the same work, or those that share a layer wait for each other.
        right = self._view.dissect(index, fed, self.prefix, tensors)
        found, comparisons = descend(self._view, index, live, right, tensors)
        block = CleanBlock(
            block=index,
            points=self.points(right, {}),
            not_comparable=missing,
            comparable=len(tensors),
            tensors=found,
            comparisons=comparisons,
        )
        stream = right[STREAM] if right[STREAM].isfinite().all() else live[STREAM]
        return block, stream.reshape(fed.shape)

    def _nats(self, hidden: "Tensor") -> list[float | None]:
        """(N) mean loss of all tokens but the first."""
        import torch

        at = torch.arange(self._tokens.shape[1])[None]
        scored = (at >= 1) & (at < torch.tensor(self._lengths)[:, None])
        losses = self._view.nats(hidden, self._tokens, scored)
        return [_finite(loss) for loss in losses.tolist()]

    def _moved(self, hidden: "Tensor") -> "Tensor":
        """Each value moved by one unit in its last place up or down, or not at all, at random."""
        import torch

        step = torch.randint(-1, 2, hidden.shape, generator=self._moves).to(hidden.device)
        exact = hidden.double() * (1 + step * torch.finfo(hidden.dtype).eps)
        return exact.to(hidden.dtype)


def distance(one: "Tensor", other: "Tensor") -> float:
    """Relative L2 distance of the row that lies furthest: (R, W) against (R, W).  NaN where a row is not finite."""
    import torch

    if same_bits(one, other):
        return 0.0
    apart = (one.double() - other.double()).norm(dim=-1) / other.double().norm(dim=-1)
    # Two rows of zeros are equal.
    return float(torch.where((one == other).all(dim=-1), 0.0, apart).max())


def _largest(*distances: float) -> float | None:
    return _finite(max(distances)) if all(d == d for d in distances) else None


def _finite(value: float) -> float | None:
    return value if value == value and value != float("inf") else None


def _encoded(hidden: "Tensor") -> str:
    """(1, P, D) in its own type."""
    import torch

    return base64.b64encode(hidden.contiguous().cpu().view(torch.uint8).numpy().tobytes()).decode()


def _decoded(plan: DifferentialPlan, like: "Tensor") -> "list[Tensor]":
    """What the plan feeds each block, in the model's type."""
    import torch

    kind: torch.dtype = getattr(torch, plan.inputs_dtype or "")
    fed = []
    for index, text in enumerate(plan.inputs or []):
        data = base64.b64decode(text, validate=True)
        if len(data) != like.numel() * kind.itemsize:
            raise ValueError(f"the input of block {index} has {len(data)} bytes, not {like.numel() * kind.itemsize}")
        values = torch.frombuffer(bytearray(data), dtype=kind).view(like.shape)
        fed.append(values.to(like.device, like.dtype))
    return fed
