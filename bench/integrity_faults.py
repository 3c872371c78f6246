"""Every kind of the fault library on random tensors: seen, and put right bit for bit, or refused."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from integrity_engine import Engine
from integrity_flips import chunk_of, finish
from torch import Tensor

from flipwatch.monitors.faults import FaultKind, FaultSpec, damage, inject
from flipwatch.monitors.fingerprint.facts import ChunkRepair, Method
from flipwatch.monitors.fingerprint.line import Line, Source
from flipwatch.probe.integrity import Repair

COUNTS = (1, 4, 18, 256)
"""Values per fault; drawn."""
TRIES = 10_000


class Cases:
    """Draws faults that lie in one chunk as a whole."""

    def __init__(self, line: Line, seed: int) -> None:
        self._line = line
        self._generator = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self._sources = list({id(stretch.source.tensor): stretch.source for stretch in line.stretches}.values())

    def draw(self, kind: FaultKind, chunk: int | None = None) -> tuple[Source, FaultSpec, Tensor | None, int]:
        """Tensor, fault, the tensor that a stale page comes from, and the chunk (this one, if one is asked for)."""
        generator = self._generator
        for _ in range(TRIES):
            source = generator.choice(self._within(chunk))
            tensor = source.tensor
            other = None
            if kind is FaultKind.STALE:
                alike = [s.tensor for s in self._sources if s.tensor.dtype == tensor.dtype and s.tensor is not tensor]
                other = generator.choice(alike) if alike else None
            spec = self._spec(kind, tensor)
            try:
                made = damage(spec, tensor, other)
            except ValueError:
                continue  # makes no sense for this tensor, or changes nothing
            ends = {self._chunk(tensor, int(at)) for at in (made.indices.min(), made.indices.max())}
            if len(ends) == 1 and (chunk is None or ends == {chunk}):
                return source, spec, other, ends.pop()
        raise LookupError(f"No {kind} was found that lies in one chunk.")

    def mate(self, chunk: int, groups: int) -> int:
        """Another chunk of the same group."""
        return self._generator.choice([c for c in range(chunk % groups, self._line.num_chunks, groups) if c != chunk])

    def _within(self, chunk: int | None) -> list[Source]:
        return self._sources if chunk is None else [part.stretch.source for part in self._line.parts(chunk)]

    def _spec(self, kind: FaultKind, tensor: Tensor) -> FaultSpec:
        generator = self._generator
        seed = generator.randrange(2**31)
        width = 8 * tensor.element_size()
        flips = None
        if kind is FaultKind.FLIPS:
            # Side by side, so that they lie in one chunk more often than not.
            count = min(generator.choice(COUNTS), tensor.numel())
            start = generator.randrange(tensor.numel() - count + 1)
            flips = [(start + at, generator.randrange(width)) for at in range(count)]
        bit = generator.randrange(width) if kind is FaultKind.BIT else None
        return FaultSpec(kind=kind, count=generator.choice(COUNTS), seed=seed, bit=bit, flips=flips)

    def _chunk(self, tensor: Tensor, flat: int) -> int:
        index = [int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)]
        return chunk_of(self._line, tensor, index)


def run(engine: Engine, of_kind: int, pairs: int, seed: int, tick: Callable[[], None]) -> dict[str, Any]:
    """`of_kind` faults of each kind, and `pairs` of two chunks of one group, each in a kind of its own."""
    sealed = engine.sealed
    copy = [stretch.memory.clone() for stretch in sealed.line.stretches]
    cases = Cases(sealed.line, seed)
    singles: dict[str, dict[str, int]] = {}
    for kind in FaultKind:
        count = singles[kind.value] = {"faults": 0, "seen": 0, "by_parity": 0, "same_bits": 0}
        for _ in range(of_kind):
            source, spec, other, chunk = cases.draw(kind)
            inject(spec, source.tensor, other)
            seen = [bad.chunk for bad in finish(sealed.sweep()).bad]
            (result,) = _repair(engine, [chunk])
            count["faults"] += 1
            count["seen"] += seen == [chunk]
            count["by_parity"] += result.method is Method.PARITY
            count["same_bits"] += _put_back(engine, copy)
            tick()
    both = {"pairs": 0, "seen": 0, "by_checkpoint": 0, "same_bits": 0, "refused": 0, "refused_left_as_found": 0}
    kinds = _in_turn()
    for _ in range(pairs):
        source, spec, other, chunk = cases.draw(next(kinds))
        inject(spec, source.tensor, other)
        mate = cases.mate(chunk, sealed.groups)
        second, spec, other, _ = cases.draw(FaultKind.FLIPS, mate)
        inject(spec, second.tensor, other)
        found = [stretch.memory.clone() for stretch in sealed.line.stretches]
        found_chunks = {bad.chunk for bad in finish(sealed.sweep()).bad}
        results = _repair(engine, [chunk, mate])
        both["pairs"] += 1
        both["seen"] += found_chunks == {chunk, mate}
        if all(result.intact for result in results):
            both["by_checkpoint"] += any(result.method is Method.CHECKPOINT for result in results)
            both["same_bits"] += _put_back(engine, copy)
        else:
            both["refused"] += 1
            both["refused_left_as_found"] += all(
                torch.equal(stretch.memory, before)
                for stretch, before in zip(sealed.line.stretches, found, strict=True)
            )
            _put_back(engine, copy)
        tick()
    return {"kinds": singles, "pairs": both}


def _in_turn() -> Iterator[FaultKind]:
    while True:
        yield from FaultKind


def _repair(engine: Engine, chunks: list[int]) -> list[ChunkRepair]:
    armed = engine.armed
    return Repair(engine.sealed, armed.model, armed.stack, armed.vllm_config, chunks).run()


def _put_back(engine: Engine, copy: list[Tensor]) -> bool:
    """Are all bytes those of the copy?  Where not, they are afterwards."""
    same = True
    for stretch, before in zip(engine.sealed.line.stretches, copy, strict=True):
        if not torch.equal(stretch.memory, before):
            same = False
            stretch.memory.copy_(before)
    return same
