"""Searches for the few bits that hurt a model most: an evolutionary search in the manner of GenBFA (AttentionBreaker,
arXiv 2411.13757), and the same among flips that stay in range, as in SBFA (arXiv 2509.21843).

One backward pass ranks all flips of a block or tensor to first order, |gradient x change|.  The best of each tensor and
bit are then measured one by one, and a population of small sets of them evolves by selection, crossover and mutation.
Fitness is the loss in nats on the given sequences; a flip that makes it non-finite counts for nothing, since nobody
needs a search to find such a one.

    python bench/fault_search.py --block 12 > worst.json
    flipwatch inject fault --spec worst.json        # on a server of the same model and dtype
"""

import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import checkpoints
import torch
import typer
from flip_candidates import Flip, candidates
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from flipwatch.monitors.faults import FaultKind, FaultSpec, inject
from flipwatch.monitors.validation import load_items
from flipwatch.probe.local import LocalView, make_plan

_MUTATION = 0.3


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    faults: list[tuple[str, FaultSpec]]
    """Name of the parameter, and its flips."""
    base_nats: float
    nats: float
    evaluations: int

    def orders(self) -> list[dict[str, object]]:
        """The faults as `flipwatch inject fault --spec` reads them."""
        return [
            {"tensor": name, "kind": "flips", "flips": [list(flip) for flip in spec.flips or ()]}
            for name, spec in self.faults
        ]


def search(
    view: LocalView,
    tokens: Tensor,
    scored: Tensor,
    *,
    block: int | None = None,
    tensor: str | None = None,
    flips: int = 3,
    in_range: bool = False,
    seed: int = 0,
    evaluations: int = 96,
    population: int = 16,
    on_evaluations: Callable[[int], None] = lambda done: None,
) -> Found:
    """Find at most `flips` bits that raise the loss most; the model is left as it was, bit for bit.

    Args:
        view: The model, all gates at 1.
        tokens: (N, T) token ids.
        scored: (N, T) bool, which positions count.
        block: Search all parameters of this block, or
        tensor: this parameter alone, by its full name.
        flips: Size of a set, each in another value.
        in_range: Only flips after which a value still lies between its tensor's smallest and largest.
        seed: The same seed finds the same bits.
        evaluations: Budget: how often the loss is measured.  A third goes to single flips.
        population: Sets in a generation.
        on_evaluations: Called with the number of evaluations done.

    Raises:
        ValueError: no such block or tensor, nothing to flip there, or the model's loss is not finite.
    """
    names = _scope(view, block, tensor)
    measure = _Fitness(view, names, tokens, scored)
    base = measure([()])[0]
    if not math.isfinite(base):
        raise ValueError("The model's loss is not finite; search in a healthy model.")
    generator = random.Random(seed)  # noqa: S311 - reproducible, not secret
    groups = candidates(view.model, names, tokens, scored, in_range)
    if not groups:
        raise ValueError(f"No bit of {', '.join(names)} can be flipped within these limits.")

    seen: dict[tuple[Flip, ...], float] = {}

    def evaluate(wanted: Sequence[tuple[Flip, ...]]) -> None:
        new = [one for one in dict.fromkeys(wanted) if one not in seen][: max(0, evaluations - len(seen))]
        for start in range(0, len(new), population):
            part = new[start : start + population]
            seen.update(zip(part, measure(part), strict=True))
            on_evaluations(len(seen))

    # Round by round through the groups, the most promising first in each.
    longest = max(len(group) for group in groups)
    ranked = [group[place] for place in range(longest) for group in groups if place < len(group)]
    evaluate([(flip,) for flip in ranked[: max(1, evaluations // 3)]])
    singles = sorted(seen, key=lambda one: -seen[one])
    pool = [flip for (flip,) in singles if math.isfinite(seen[(flip,)])] + ranked[len(singles) :] or ranked
    peers = {flip: group for group in groups for flip in group}

    def draw() -> Flip:
        return pool[int(len(pool) * generator.random() ** 3)]

    def child() -> tuple[Flip, ...]:
        genes = list({flip: None for parent in generator.sample(parents, min(2, len(parents))) for flip in parent})
        generator.shuffle(genes)
        genes = genes[:flips]
        for place, flip in enumerate(genes):
            if generator.random() < _MUTATION:
                genes[place] = generator.choice(peers[flip]) if generator.random() < 0.5 else draw()
        return _set(genes, draw, flips)

    evaluate([_set(pool[:flips], draw, flips), *(_set([], draw, flips) for _ in range(population - 1))])
    barren = 0
    while len(seen) < evaluations and barren < 20:
        before = len(seen)
        parents = sorted(seen, key=lambda one: -seen[one])[: max(2, population // 3)]
        evaluate([child() for _ in range(population)])
        # A scope of few bits is used up before the budget is.
        barren = barren + 1 if len(seen) == before else 0
    best = max(seen, key=lambda one: seen[one])
    if not math.isfinite(seen[best]):
        raise ValueError(f"Every flip tried in {', '.join(names)} makes the loss not finite; give more evaluations.")
    return Found(_faults(best), base, seen[best], len(seen))


def _set(genes: Sequence[Flip], draw: Callable[[], Flip], size: int) -> tuple[Flip, ...]:
    """`size` flips in different values, in order: these first, then drawn ones; fewer where none are left."""
    chosen = {(flip.tensor, flip.at): flip for flip in genes}
    for _ in range(20 * size):
        if len(chosen) >= size:
            break
        flip = draw()
        chosen.setdefault((flip.tensor, flip.at), flip)
    return tuple(sorted(chosen.values()))


def _faults(flips: Sequence[Flip]) -> list[tuple[str, FaultSpec]]:
    """One spec per tensor."""
    by_tensor: dict[str, list[tuple[int, int]]] = {}
    for flip in flips:
        by_tensor.setdefault(flip.tensor, []).append((flip.at, flip.bit))
    return [(name, FaultSpec(kind=FaultKind.FLIPS, flips=pairs)) for name, pairs in by_tensor.items()]


def _scope(view: LocalView, block: int | None, tensor: str | None) -> list[str]:
    """Names of the parameters to search, all in one block or one outside the blocks."""
    everywhere = dict(view.model.named_parameters())
    if (block is None) == (tensor is None):
        raise ValueError("Name a block or a tensor, one of the two.")
    if tensor is not None:
        if tensor not in everywhere:
            raise ValueError(f"There is no parameter {tensor!r}; take a full name, such as {next(iter(everywhere))}.")
        return [tensor]
    assert block is not None  # noqa: S101 - one of the two is there
    if not 0 <= block < view.num_blocks:
        raise ValueError(f"There is no block {block}; the model has {view.num_blocks}.")
    inside = {id(parameter) for parameter in view.layers[block].parameters()}
    return [name for name, parameter in everywhere.items() if id(parameter) in inside]


class _Fitness:
    """Losses of the model under sets of flips.

    The stream in front of the searched block is computed once, and behind it all sets run as one batch.  Outside the
    blocks, the blocks run only where the embedding has changed.
    """

    def __init__(self, view: LocalView, names: list[str], tokens: Tensor, scored: Tensor) -> None:
        self._view, self._tokens, self._scored = view, tokens, scored
        self._parameters = dict(view.model.named_parameters())
        searched = {id(self._parameters[name]) for name in names}
        self._block = next(
            (n for n, layer in enumerate(view.layers) if searched & {id(p) for p in layer.parameters()}), None
        )
        with torch.inference_mode():
            self._embedded = view.embed(tokens)
            self._healthy = self._run(self._embedded, 0, view.num_blocks if self._block is None else self._block)

    @torch.inference_mode()
    def __call__(self, sets: Sequence[tuple[Flip, ...]]) -> list[float]:
        """Mean loss over the sequences for each set, in nats; -inf where it is not finite."""
        losses = self._outside(sets) if self._block is None else self._inside(sets, self._block)
        return [loss if math.isfinite(loss) else -math.inf for loss in losses]

    def _inside(self, sets: Sequence[tuple[Flip, ...]], block: int) -> list[float]:
        streams = []
        for flips in sets:
            with self._flipped(flips):
                streams.append(self._run(self._healthy, block, block + 1))
        hidden = self._run(torch.cat(streams), block + 1, self._view.num_blocks)
        nats = self._view.nats(hidden, self._tokens, self._scored)
        losses: list[float] = nats.reshape(len(sets), -1).mean(1).tolist()
        return losses

    def _outside(self, sets: Sequence[tuple[Flip, ...]]) -> list[float]:
        losses = []
        for flips in sets:
            with self._flipped(flips):
                embedded = self._view.embed(self._tokens)
                same = torch.equal(embedded, self._embedded)
                hidden = self._healthy if same else self._run(embedded, 0, self._view.num_blocks)
                losses.append(self._view.nats(hidden, self._tokens, self._scored).mean().item())
        return losses

    def _run(self, hidden: Tensor, start: int, end: int) -> Tensor:
        for index in range(start, end):
            hidden = self._view.block(index, hidden, self._tokens)
        return hidden

    @contextmanager
    def _flipped(self, flips: Sequence[Flip]) -> Iterator[None]:
        undo = [inject(spec, self._parameters[name]) for name, spec in _faults(flips)]
        try:
            yield
        finally:
            for back in reversed(undo):
                back()


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = checkpoints.MODEL,
    block: Annotated[int | None, typer.Option(help="Search this block.")] = None,
    tensor: Annotated[str | None, typer.Option(help="Search this parameter, e.g. model.norm.weight.")] = None,
    flips: Annotated[int, typer.Option(min=1, help="Bits to flip.")] = 3,
    in_range: Annotated[bool, typer.Option("--in-range", help="Values stay inside their tensor's range.")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    evaluations: Annotated[int, typer.Option(min=2, help="How often the loss is measured.")] = 96,
    population: Annotated[int, typer.Option(min=2, help="Sets of flips in a generation.")] = 16,
    items: Annotated[int, typer.Option(min=1, help="Texts of the validation set.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per text, at most.")] = 16,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16: as the model is served.")] = "float32",
) -> None:
    """Print the bits that hurt most as JSON; the figures go to stderr."""
    from flipwatch.monitors.alpha_scan import padded

    checkpoints.require("fault_search", model, dtype)
    plan = make_plan(model, load_items()[:items], [], max_tokens=tokens)
    disable_progress_bar()
    view = LocalView.load(model, checkpoints.DTYPES[dtype])
    try:
        found = search(
            view,
            *padded(plan, range(len(plan.tokens))),
            block=block,
            tensor=tensor,
            flips=flips,
            in_range=in_range,
            seed=seed,
            evaluations=evaluations,
            population=population,
        )
    except ValueError as error:
        print(f"fault_search: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"{found.base_nats:.3f} -> {found.nats:.3f} nats in {found.evaluations} evaluations", file=sys.stderr)
    print(json.dumps(found.orders(), indent=2))


if __name__ == "__main__":
    typer.run(main)
