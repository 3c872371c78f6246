"""How long things take on one thread: sweeps and what they are held against, recording, repair and reload."""

import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from integrity_engine import Engine
from integrity_flips import Flip, draw, finish, flipped
from integrity_peers import LmFix, Sha256

from flipwatch.monitors.fingerprint.facts import Method
from flipwatch.probe.integrity import Repair

SWEEP = "sweep"
SUM = "tensor.sum()"


def speed(
    engine: Engine, sha: Sha256, fixes: Sequence[LmFix], repeats: int, tick: Callable[[], None]
) -> dict[str, Any]:
    """Each way over all weights, `repeats` times, in turn and every other time in reverse order.

    Ratios are taken within a repeat.  LM-Fix takes part in the first three only.
    """
    tensors = list({id(s.source.tensor): s.source.tensor for s in engine.sealed.line.stretches}.values())

    def sweep() -> None:
        finish(engine.sealed.sweep())

    def add() -> None:
        for tensor in tensors:
            tensor.sum()

    ways: dict[str, Callable[[], object]] = {SWEEP: sweep, SUM: add, sha.name: sha.check}
    slow: dict[str, Callable[[], object]] = {fix.name: fix.check for fix in fixes}
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, *slow)}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in seconds}
    for way in ways.values():
        way()  # pages and caches
    for repeat in range(repeats):
        turn = list((ways | slow if repeat < 3 else ways).items())
        for name, way in turn if repeat % 2 == 0 else reversed(turn):
            wall, cpu = time.perf_counter(), time.process_time()
            way()
            seconds[name].append(time.perf_counter() - wall)
            cpu_seconds[name].append(time.process_time() - cpu)
        tick()
    ratios = {name: _ratios(seconds, name) for name in seconds if name != SWEEP}
    cpu_ratios = {name: _ratios(cpu_seconds, name) for name in seconds if name != SWEEP}
    return {
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "bytes": engine.sealed.line.covered_bytes,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "over_sweep": ratios,
        "cpu_over_sweep": cpu_ratios,
    }


def _ratios(seconds: dict[str, list[float]], name: str) -> list[float]:
    return [other / own for own, other in zip(seconds[SWEEP], seconds[name], strict=False)]


def recording(engine: Engine, repeats: int) -> dict[str, Any]:
    """Taking the baseline: digests, parity, a look at the values."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        finish(engine.sealed.record())
        seconds.append(time.perf_counter() - began)
    facts = engine.sealed.facts()
    return {
        "seconds": seconds,
        "chunks": facts.chunks,
        "chunk_bytes": facts.chunk_bytes,
        "tensors": facts.tensors,
        "covered_bytes": facts.covered_bytes,
        "not_covered": len(facts.not_covered),
        "parity_bytes": facts.parity_bytes,
        "digest_bytes": 16 * (facts.chunks + facts.parity_groups),
        "digest": facts.digest,
    }


def repairing(engine: Engine, count: int, reloads: int, seed: int, tick: Callable[[], None]) -> dict[str, Any]:
    """One bit flips in each of `count` random chunks, one after the other: repaired by parity, by checkpoint; reload.

    A repair's time has everything in it: the look whether the chunk is changed, the rebuilt bytes with their digest,
    the write, the look afterwards, the diagnosis.  The reload is that of the whole model, as vLLM offers it.
    """
    by_parity, by_checkpoint, refused = [], [], 0
    flips = draw(engine.sealed.line, engine.parameters, 2 * count, 0.0, seed)
    generator = random.Random(seed)  # noqa: S311 - reproducible, not secret
    for flip in flips[:count]:
        method, seconds = _repair(engine, flip)
        if method is not Method.PARITY:
            raise RuntimeError(f"Chunk {flip.chunk} was not repaired by parity.")
        by_parity.append(seconds)
        tick()
    sealed = engine.sealed
    for flip in flips[count:]:
        mates = [c for c in range(flip.chunk % sealed.groups, sealed.line.num_chunks, sealed.groups) if c != flip.chunk]
        memory = sealed.line.parts(generator.choice(mates))[0].memory
        memory[0] ^= 1  # parity gives nothing back now
        method, seconds = _repair(engine, flip)
        memory[0] ^= 1
        if method is Method.CHECKPOINT:
            by_checkpoint.append(seconds)
        else:
            refused += 1
        tick()
    reload_seconds, changed, replaced = [], 0, 0
    for _ in range(reloads):
        reload_seconds.append(engine.reload())
        after = finish(sealed.sweep())
        changed, replaced = max(changed, after.bad_chunks), max(replaced, len(after.replaced))
        tick()
    return {
        "parity_seconds": by_parity,
        "checkpoint_seconds": by_checkpoint,
        "checkpoint_refused": refused,
        "reload_seconds": reload_seconds,
        "reload_changed_chunks": changed,
        "reload_replaced_tensors": replaced,
        "reload_over_parity": statistics.median(reload_seconds) / statistics.median(by_parity),
        "reload_over_slowest_parity": min(reload_seconds) / max(by_parity),
    }


def _repair(engine: Engine, flip: Flip) -> tuple[Method | None, float]:
    armed = engine.armed
    with flipped(flip):
        repair = Repair(engine.sealed, armed.model, armed.stack, armed.vllm_config, [flip.chunk])
        began = time.perf_counter()
        (result,) = repair.run()
        return result.method, time.perf_counter() - began
