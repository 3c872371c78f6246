"""The faults of the detection benchmark: which there are, and how each is drawn from a seed."""

import random
from collections.abc import Iterator, Sequence

from fault_search import search
from torch import nn

from flipwatch.monitors.alpha_scan import AlphaScanPlan, padded
from flipwatch.monitors.faults import FaultKind, FaultSpec
from flipwatch.monitors.strict import Wire
from flipwatch.probe.local import LocalView

PAGE = 2048
"""Values in 4 KiB of bf16."""

SEARCHED = ("searched bits", "searched bits in range")

IN_BLOCK: dict[str, FaultSpec] = {
    "top exponent bit": FaultSpec(kind=FaultKind.BIT, count=1),
    "random bit": FaultSpec(kind=FaultKind.BIT, count=1, bit=0),
    "burst": FaultSpec(kind=FaultKind.BURST, count=18),
    "large burst": FaultSpec(kind=FaultKind.BURST, count=256),
    "neighbouring values": FaultSpec(kind=FaultKind.NEIGHBOURS, count=32, factor=16.0),
    "page of noise": FaultSpec(kind=FaultKind.NEIGHBOURS, count=PAGE, factor=16.0),
    "NaN tile": FaultSpec(kind=FaultKind.NAN, count=16),
    "Inf": FaultSpec(kind=FaultKind.INF, count=1),
    "page of zeros": FaultSpec(kind=FaultKind.ZEROS, count=PAGE),
    "stale page": FaultSpec(kind=FaultKind.STALE, count=PAGE),
    "rows swapped": FaultSpec(kind=FaultKind.SWAP),
    "sign of a row": FaultSpec(kind=FaultKind.SIGN),
    "one value scaled": FaultSpec(kind=FaultKind.SCALE, count=1),
    "lost buffer": FaultSpec(kind=FaultKind.LOST),
    "norm weight": FaultSpec(kind=FaultKind.SCALE, count=1),
}
"""Name in the tables -> what happens; tensor, seed and, for a random bit, its position are drawn."""

OUTSIDE: dict[str, FaultSpec] = {
    "burst": FaultSpec(kind=FaultKind.BURST, count=18),
    "page of zeros": FaultSpec(kind=FaultKind.ZEROS, count=PAGE),
    "one value scaled": FaultSpec(kind=FaultKind.SCALE, count=1),
    "lost buffer": FaultSpec(kind=FaultKind.LOST),
}

NOT_FINITE: dict[str, FaultSpec] = {
    "NaN": FaultSpec(kind=FaultKind.NAN, count=16),
    "Inf": FaultSpec(kind=FaultKind.INF, count=1),
    "saturating bit": FaultSpec(kind=FaultKind.BIT, count=1),
}


class Strike(Wire):
    """One damaged tensor."""

    block: int | None
    """None: outside the blocks."""
    tensor: str
    """The model's own full name."""
    source: str | None = None
    """Where a stale page comes from."""
    spec: FaultSpec


class Case(Wire):
    """One fault, or several at once."""

    name: str
    """Key in the results."""
    kind: str
    strikes: list[Strike]

    @property
    def blocks(self) -> list[int]:
        """The damaged blocks, ascending."""
        return sorted({strike.block for strike in self.strikes if strike.block is not None})


def singles(view: LocalView, plan: AlphaScanPlan, seeds: int) -> Iterator[Case]:
    """Faults in one block, seed by seed through all kinds, so that any beginning is balanced."""
    for seed in range(seeds):
        for kind in (*IN_BLOCK, *SEARCHED):
            yield _single(view, plan, kind, seed)


def outside(view: LocalView, seeds: int) -> Iterator[Case]:
    """Faults in the embedding, the final norm and the head."""
    places = _outside_tensors(view)
    for seed in range(seeds):
        for place, tensor in places.items():
            for kind, spec in OUTSIDE.items():
                strike = Strike(block=None, tensor=tensor, spec=spec.model_copy(update={"seed": seed}))
                yield Case(name=f"outside/{place}/{kind}/{seed}", kind=f"{place}: {kind}", strikes=[strike])


def not_finite(view: LocalView, blocks: Sequence[int], several: int) -> Iterator[Case]:
    """NaN, Inf and saturation in each of the blocks, then in two and three of them at once."""
    for kind in NOT_FINITE:
        for block in blocks:
            yield Case(name=f"not-finite/{kind}/{block}", kind=kind, strikes=[_hard(view, kind, block, block)])
    for count in (2, 3) if len(blocks) >= 3 else ():
        for seed in range(several):
            draw = random.Random(f"not finite {count} {seed}")  # noqa: S311 - reproducible, not secret
            chosen = sorted(draw.sample(list(blocks), count))
            strikes = [_hard(view, draw.choice(list(NOT_FINITE)), block, seed) for block in chosen]
            yield Case(name=f"not-finite/{count}/{seed}", kind=f"{count} of NaN, Inf, saturating", strikes=strikes)


def several(view: LocalView, blocks: Sequence[int], seeds: int) -> Iterator[Case]:
    """Two and three finite faults at once, in different ones of the blocks."""
    kinds = ("burst", "top exponent bit", "neighbouring values", "norm weight", "lost buffer")
    for seed in range(seeds):
        for count in (2, 3) if len(blocks) >= 3 else ():
            draw = random.Random(f"several {count} {seed}")  # noqa: S311
            chosen = sorted(draw.sample(list(blocks), count))
            strikes = [_strike(view, draw.choice(kinds), block, draw) for block in chosen]
            yield Case(name=f"several/{count}/{seed}", kind=f"{count} faults", strikes=strikes)


def _single(view: LocalView, plan: AlphaScanPlan, kind: str, seed: int) -> Case:
    draw = random.Random(f"{kind} {seed}")  # noqa: S311
    block = draw.randrange(view.num_blocks)
    name = f"single/{kind}/{seed}"
    if kind not in SEARCHED:
        return Case(name=name, kind=kind, strikes=[_strike(view, kind, block, draw)])
    tokens, scored = padded(plan, range(min(4, len(plan.tokens))))
    found = search(
        view, tokens, scored, block=block, in_range=kind == "searched bits in range", seed=seed, evaluations=64
    )
    strikes = [Strike(block=block, tensor=tensor, spec=spec) for tensor, spec in found.faults]
    return Case(name=name, kind=kind, strikes=strikes)


def _strike(view: LocalView, kind: str, block: int, draw: random.Random) -> Strike:
    """A fault of this kind somewhere in the block."""
    spec = IN_BLOCK[kind]
    tensors = _tensors(view, block, matrices=kind != "norm weight")
    tensor = draw.choice(sorted(tensors))
    change: dict[str, int] = {"seed": draw.randrange(1, 2**31)}
    if kind == "random bit":
        change["bit"] = draw.randrange(8 * tensors[tensor].element_size())
    if kind == "norm weight":
        change["seed"] = 0
    source = None
    if spec.kind is FaultKind.STALE:
        other = draw.choice([other for other in range(view.num_blocks) if other != block])
        source = tensor.replace(f".{block}.", f".{other}.", 1)
    return Strike(block=block, tensor=tensor, source=source, spec=spec.model_copy(update=change))


def _hard(view: LocalView, kind: str, block: int, seed: int) -> Strike:
    """In a matrix that writes to the stream, so that the damage reaches it whatever the tokens are."""
    writers = [
        name for name in _tensors(view, block, matrices=True) if name.endswith(("down_proj.weight", "o_proj.weight"))
    ]
    draw = random.Random(f"{kind} {block} {seed}")  # noqa: S311
    spec = NOT_FINITE[kind].model_copy(update={"seed": draw.randrange(2**31)})
    return Strike(block=block, tensor=draw.choice(sorted(writers)), spec=spec)


def _tensors(view: LocalView, block: int, *, matrices: bool) -> dict[str, nn.Parameter]:
    """Full name -> matrix, or vector, of one block."""
    own = {id(parameter) for parameter in view.layers[block].parameters()}
    return {
        name: parameter
        for name, parameter in view.model.named_parameters()
        if id(parameter) in own and (parameter.ndim == 2) == matrices
    }


def _outside_tensors(view: LocalView) -> dict[str, str]:
    """Embedding, final norm and, where it is not the embedding itself, the head."""
    inside = {id(parameter) for layer in view.layers for parameter in layer.parameters()}
    free = {name: parameter for name, parameter in view.model.named_parameters() if id(parameter) not in inside}
    places = {}
    for name, parameter in free.items():
        if parameter.ndim == 1:
            places["final norm"] = name
        elif "embed" in name:
            places["embedding"] = name
        else:
            places["head"] = name
    return places
