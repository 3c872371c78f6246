"""What a differential measurement costs: memory, time, and bytes of a recording."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import differential_child
import torch
from differential_states import Rows, Served, conditions, read, record
from integrity_engine import Engine
from torch.profiler import ProfilerActivity, profile

from flipwatch.monitors.differential.facts import DifferentialPlan
from flipwatch.monitors.differential.sketch import Sketcher
from flipwatch.probe.armed import Armed
from flipwatch.probe.checkpoint import StoredTensor, checkpoint_folder, tensors_by_block


def memory(served: Served, resident: dict[str, int]) -> dict[str, Any]:
    """Tensors that were alive at once beside the model, in bytes, and what they are to be held against.

    `resident` is what a fresh process says of its own memory.
    """
    armed, plan = served.engine.armed, served.recording.plan
    view = armed.dissection(checkpoint=True)
    largest = max(range(view.num_blocks), key=lambda block: _bytes(armed.stack.layers[block].parameters()))
    layer = armed.stack.layers[largest]
    with torch.inference_mode():
        handed_on = view.dissect(largest, served.inputs["checkpoint"][largest], served.prefix)
        stored = max(one.stop - one.start for one in _stored(armed)[largest].values())
        signs = sum(width * plan.size for width in {rows.shape[-1] for rows in handed_on.values()})
        fill = peak(lambda: view.clean(largest))
        sketches = peak(lambda: [Sketcher(0, plan.size).of(rows) for rows in handed_on.values()])
    measured = {}
    for name, noise in (("without noise", False), ("with noise", True)):
        asked = DifferentialPlan(tokens=plan.tokens, checkpoint=True, noise=noise)
        seen = armed.dissection(checkpoint=True)
        measured[name] = peak(partial(read, seen, asked))
    recorded = peak(lambda: read(armed.dissection(checkpoint=False), served.recording.replay()))
    return {
        "block_bytes": _bytes(layer.parameters()),
        "largest_tensor_bytes": max(p.numel() * p.element_size() for p in layer.parameters()),
        "largest_stored_bytes": stored,
        "activation_bytes": _bytes(handed_on.values()),
        "signs_bytes": signs,
        "sketching_peak_bytes": sketches,
        "clean_peak_bytes": fill,
        "checkpoint_peak_bytes": measured,
        "replay_peak_bytes": recorded,
        "resident": resident,
    }


def peak(work: Callable[[], object]) -> int:
    """The most bytes of tensors that `work` had allocated at once, scratch of the kernels too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        work()
    events = made.profiler.kineto_results.events()
    held = most = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def times(engine: Engine, tokens: Rows, repeats: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Each measurement over one pass of the model over the same tokens, in turn, within one repeat."""
    view = engine.armed.dissection(checkpoint=False)
    where = conditions("vllm", "bfloat16", view.num_blocks)
    recording = record(view, tokens, where)
    batch = torch.tensor(tokens)
    scored = torch.ones_like(batch, dtype=torch.bool)
    scored[:, 0] = False

    @torch.inference_mode()
    def forward(rows: torch.Tensor) -> None:
        hidden = view.embed(rows)
        for block in range(view.num_blocks):
            hidden = view.block(block, hidden, rows)
        view.nats(hidden, rows, scored[: rows.shape[0], : rows.shape[1]])

    against = DifferentialPlan(tokens=tokens, checkpoint=True, noise=True)
    ways: dict[str, Callable[[], object]] = {
        "one pass": lambda: forward(batch),
        "one pass over the prefix": lambda: forward(batch[:1, : recording.plan.prefix]),
        "record": lambda: record(engine.armed.dissection(checkpoint=False), tokens, where),
        "replay": lambda: read(engine.armed.dissection(checkpoint=False), recording.replay()),
        "checkpoint": lambda: read(engine.armed.dissection(checkpoint=True), against),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # pages and caches
    for repeat in range(repeats):
        turn = list(ways.items())
        for name, way in turn if repeat % 2 == 0 else reversed(turn):
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
        tick()
    return {
        "threads": torch.get_num_threads(),
        "sequences": len(tokens),
        "tokens": len(tokens[0]),
        "prefix": recording.plan.prefix,
        "seconds": seconds,
        "over_pass": {
            name: [one / of for one, of in zip(spent, seconds["one pass"], strict=True)]
            for name, spent in seconds.items()
            if name != "one pass"
        },
        "recording_bytes": len(recording.model_dump_json()),
        "inputs_bytes": sum(map(len, recording.reading.ranks[0].inputs)),
    }


def resident(model: Path, tokens: Rows) -> dict[str, int]:
    """Of a fresh process."""
    return differential_child.resident(model, tokens)


def _stored(armed: Armed) -> dict[int | None, dict[str, StoredTensor]]:
    """The checkpoint's tensors by block."""
    return tensors_by_block(checkpoint_folder(armed.vllm_config), armed.model, armed.stack)


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
