"""A vLLM in a process of its own, for what one process cannot be twice: another type, more threads, a fresh memory.

    python bench/differential_child.py record MODEL ORDER RECORDINGS
    python bench/differential_child.py memory MODEL ORDER FIGURES

ORDER is JSON: the type, and the sequences of each recording.  The number of threads is that of OMP_NUM_THREADS.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from differential_states import Rows, conditions, read, record
from integrity_engine import Engine

from flipwatch.monitors.differential.facts import DifferentialPlan

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def recorded(model: Path, dtype: str, threads: int, sets: list[Rows]) -> dict[str, Any]:
    """States of a vLLM in this type and with so many threads: `recordings`, one for each set, and its `threads`."""
    answer: dict[str, Any] = _child("record", model, {"dtype": dtype, "sets": sets}, threads)
    return answer


def resident(model: Path, tokens: Rows) -> dict[str, int]:
    """Bytes by which the resident memory of a fresh vLLM grows: by a checkpoint measurement, and by the live blocks."""
    answer: dict[str, int] = _child("memory", model, {"dtype": "bfloat16", "sets": [tokens]}, 1)
    return answer


def _child(what: str, model: Path, order: dict[str, Any], threads: int) -> Any:
    with TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "order.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(order), encoding="utf-8")
        arguments = [sys.executable, __file__, what, str(model), str(asked), str(answer)]
        # Large pieces of memory go back to the system at once: what is resident is what is held.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MALLOC_MMAP_THRESHOLD_": str(2**16)}
        subprocess.run(arguments, env=environment, check=True)  # noqa: S603
        return json.loads(answer.read_text(encoding="utf-8"))


def _record(engine: Engine, dtype: str, sets: list[Rows]) -> dict[str, Any]:
    where = conditions("vllm", dtype, engine.armed.stack.num_blocks)
    recordings = [
        record(engine.armed.dissection(checkpoint=False), tokens, where, seed) for seed, tokens in enumerate(sets)
    ]
    return {"recordings": [one.model_dump(mode="json") for one in recordings], "threads": torch.get_num_threads()}


def _memory(engine: Engine, dtype: str, sets: list[Rows]) -> dict[str, int]:
    (tokens,) = sets
    against = DifferentialPlan(tokens=tokens, checkpoint=True, noise=True)
    # The short inputs of the blocks through the live model: what the kernels take for themselves, whoever calls them.
    alone = DifferentialPlan(tokens=[tokens[0][: against.prefix]])
    # Whatever is made once and kept is made before.
    read(engine.armed.dissection(checkpoint=True), against)
    return {
        "checkpoint": _growth(lambda: read(engine.armed.dissection(checkpoint=True), against)),
        "live": _growth(lambda: read(engine.armed.dissection(checkpoint=False), alone)),
    }


def _growth(work: Callable[[], object]) -> int:
    """By how many bytes resident memory grows at most."""
    gc.collect()
    # So do the small ones that are free, or the measurement would live on them unseen.
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text("5")  # the peak is counted anew
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    order = json.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))
    run = {"record": _record, "memory": _memory}[sys.argv[1]]
    made = run(Engine.start(Path(sys.argv[2]), order["dtype"]), order["dtype"], order["sets"])
    Path(sys.argv[4]).write_text(json.dumps(made), encoding="utf-8")
