"""Seeded faults in the blocks of a live model: what was damaged, what it changed, and what each reference said."""

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from differential_states import Served
from torch import Tensor

from flipwatch.monitors.differential.finding import DifferentialFinding, Location
from flipwatch.monitors.faults import FaultKind, FaultSpec, inject
from flipwatch.monitors.faults.bits import bits

COUNTS = (1, 4, 18, 256)
"""Values per fault; drawn."""
NOT_FINITE = (FaultKind.NAN, FaultKind.INF)
TRIES = 50
"""A kind that never changes a tensor, such as a swap of equal values, gives way to the next fault."""


class Place(NamedTuple):
    """A tensor of a block, or the rows of it that one packed projection has."""

    block: int
    tensor: str
    """Name inside the block."""
    part: str
    """The projection, where several are packed; else empty."""
    values: Tensor

    @property
    def what(self) -> str:
        """As the checkpoint names it: `q_proj`, `input_layernorm`."""
        return self.part or self.tensor.removesuffix(".weight").rpartition(".")[2]


class Fault(NamedTuple):
    """What is done where."""

    place: Place
    spec: FaultSpec
    source: Tensor | None


class Struck(NamedTuple):
    """What a fault changed: the truth that findings are held against."""

    fault: Fault
    tensor: Tensor
    before: Tensor
    """All bits of the tensor."""
    first: list[int]
    """Index of the first changed element in memory order."""
    elements: int
    undo: Callable[[], None]

    def put_back(self) -> bool:
        """Undo it; is every bit that of before?"""
        self.undo()
        return torch.equal(bits(self.tensor), self.before)


class Cases:
    """Draws faults so that kinds, blocks and tensors all come equally often."""

    def __init__(self, served: Served, seed: int) -> None:
        self._generator = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self._places = places(served)
        self._kinds = self._in_turn(list(FaultKind))
        self._blocks = self._in_turn(sorted({place.block for place in self._places}))
        self._whats = self._in_turn(sorted({place.what for place in self._places}))

    def draw(self, block: int | None = None, kind: FaultKind | None = None) -> Fault:
        """The next fault, in this block and of this kind where they are given."""
        block = next(self._blocks) if block is None else block
        what = next(self._whats)
        (place,) = (place for place in self._places if (place.block, place.what) == (block, what))
        kind = next(self._kinds) if kind is None else kind
        source = None
        if kind is FaultKind.STALE:
            alike = [other.values for other in self._places if other.what == what and other.block != block]
            source = self._generator.choice(alike)
        return Fault(place, self._spec(kind, place.values), source)

    def blocks(self, count: int) -> list[int]:
        """Different blocks."""
        return self._generator.sample(sorted({place.block for place in self._places}), count)

    def again(self, fault: Fault) -> Fault:
        """The same kind at the same place, drawn anew."""
        return fault._replace(spec=self._spec(fault.spec.kind, fault.place.values))

    def _spec(self, kind: FaultKind, tensor: Tensor) -> FaultSpec:
        generator = self._generator
        width, size = 8 * tensor.element_size(), tensor.numel()
        count = generator.choice(COUNTS)
        flips = None
        if kind is FaultKind.FLIPS:
            where = generator.sample(range(size), min(count, size))
            flips = [(at, generator.randrange(width)) for at in where]
        bit = generator.randrange(width) if kind is FaultKind.BIT else None
        return FaultSpec(kind=kind, count=count, seed=generator.randrange(2**31), bit=bit, flips=flips)

    def _in_turn(self, things: list[Any]) -> Iterator[Any]:
        """All of them in a random order, then all in another."""
        while True:
            yield from self._generator.sample(things, len(things))


def places(served: Served) -> list[Place]:
    """Every parameter of every block, packed ones by their parts."""
    armed = served.engine.armed
    view = armed.dissection(checkpoint=False)
    found = []
    for block in range(view.num_blocks):
        for name, parameter in armed.stack.layers[block].named_parameters():
            packed = view.parts(block, name)
            found += [Place(block, name, part, parameter.data[rows.start : rows.stop]) for part, rows in packed]
            found += [] if packed else [Place(block, name, "", parameter.data)]
    return found


@torch.inference_mode()
def strike(served: Served, fault: Fault) -> Struck | None:
    """Damage the live tensor; None where that would change nothing, or makes no sense for it."""
    tensor = served.engine.armed.stack.layers[fault.place.block].get_parameter(fault.place.tensor).data
    before = bits(tensor).clone()
    try:
        undo = inject(fault.spec, fault.place.values, fault.source)
    except ValueError:
        return None
    changed = (bits(tensor) != before).nonzero()
    return Struck(fault, tensor, before, changed[0].tolist(), len(changed), undo)


def struck(served: Served, cases: Cases, **wanted: Any) -> Struck:
    """Draw until a fault changes something, and leave it in place."""
    while True:
        fault = cases.draw(**wanted)
        for _ in range(TRIES):
            if (done := strike(served, fault)) is not None:
                return done
            fault = cases.again(fault)


def run(served: Served, count: int, seed: int, skip: int) -> Iterator[dict[str, Any]]:
    """One fault after the other: truth, and what each reference says of it.  The first `skip` are only drawn."""
    cases = Cases(served, seed)
    for number in range(count):
        done = struck(served, cases)
        if number < skip:
            done.put_back()
            continue
        block = done.fault.place.block
        changes = {name: served.change(name, block) for name in served.inputs}
        replayed = served.replayed()
        findings = {
            "recorded": served.judged(replayed),
            "checkpoint": served.against_checkpoint(),
            "other kernels": served.as_peer(replayed),
        }
        yield {
            **told(done),
            "change": {name: finite(change) for name, change in changes.items()},
            "more_than_noise": {name: change > served.noise[block] for name, change in changes.items()},
            "said": {name: said(finding, done, name) for name, finding in findings.items()},
            "put_back": done.put_back(),
        }


def run_triples(served: Served, count: int, seed: int, skip: int) -> Iterator[dict[str, Any]]:
    """Three faults in three blocks at once, each of which changes what its block hands on; in every other triple one
    that is not finite.  The first `skip` are not drawn: each has a seed of its own."""
    for number in range(skip, count):
        cases = Cases(served, 1000 * (seed + 1) + number)
        triple: list[Struck] = []
        for at, block in enumerate(cases.blocks(3)):
            kind = NOT_FINITE[number // 2 % 2] if at == 0 and number % 2 == 0 else None
            triple.append(_that_shows(served, cases, block, kind))
        findings = {"recorded": served.against_recording(), "checkpoint": served.against_checkpoint()}
        struck_blocks = sorted(done.fault.place.block for done in triple)
        yield {
            "faults": [told(done) for done in triple],
            "not_finite": number % 2 == 0,
            "said": {
                name: {
                    "flagged": flagged(finding),
                    "exact": flagged(finding) == struck_blocks,
                    "each": [said(finding, done, name) for done in triple],
                }
                for name, finding in findings.items()
            },
            "put_back": len([done for done in reversed(triple) if done.put_back()]) == len(triple),
        }


def _that_shows(served: Served, cases: Cases, block: int, kind: FaultKind | None) -> Struck:
    while True:
        done = struck(served, cases, block=block, kind=kind)
        if all(served.change(name, block) > served.noise[block] for name in served.inputs):
            return done
        done.put_back()


def told(done: Struck) -> dict[str, Any]:
    """The truth as JSON."""
    place, spec = done.fault.place, done.fault.spec
    return {
        "kind": spec.kind.value,
        "count": spec.count,
        "bit": spec.bit,
        "block": place.block,
        "tensor": place.tensor,
        "part": place.part,
        "what": place.what,
        "first": done.first,
        "elements": done.elements,
    }


def said(finding: DifferentialFinding, done: Struck, name: str) -> dict[str, Any]:
    """What a finding says of one fault, and how far down that is right."""
    place = done.fault.place
    here = [location for location in finding.locations if location.block == place.block]
    divergence = finding.blocks[place.block]
    module = place.tensor.rpartition(".")[0]
    record: dict[str, Any] = {
        "health": finding.health.value,
        "flagged": flagged(finding),
        "exact": flagged(finding) == [place.block],
        "found": place.block in flagged(finding),
        "l2": divergence.l2,
        "allowed": divergence.allowed,
        "sublayer": any(location.sublayer == module.partition(".")[0] for location in here),
        "module": any(location.module == module for location in here),
        "comparisons": [location.comparisons for location in here],
        "sentence": here[0].sentence if here else divergence.reason,
    }
    if name == "checkpoint":
        record["tensor"] = len(here) == 1 and _is(here[0], done)
        record["effort"] = finding.effort.model_dump()
    return record


def flagged(finding: DifferentialFinding) -> list[int]:
    """The blocks that a finding names."""
    return sorted({location.block for location in finding.locations})


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if value != float("inf") else None


def _is(location: Location, done: Struck) -> bool:
    """Tensor, part of it, first element and number of elements."""
    place, diagnosis = done.fault.place, location.diagnosis
    return (
        location.tensor is not None
        and location.tensor.endswith(f".{place.block}.{place.tensor}")
        and location.parts == ((place.part,) if place.part else ())
        and diagnosis is not None
        and (diagnosis.first, diagnosis.elements) == (done.first, done.elements)
    )
