"""What the gates cost a decode step, with all of them at 1: two engines, plain and gated, step in turn.

Each engine lives in a process of its own (`serving_engine_child.py`).  They never run at the same time, take bursts of
a few steps in rotating order, and each ratio is of two bursts next to each other; of each burst the fastest quarter is
taken, because whatever else runs on the machine only slows steps down.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import serving_plain

_CHILD = Path(__file__).with_name("serving_engine_child.py")


@dataclass
class Engine:
    """One child process."""

    process: "subprocess.Popen[str]"

    def asked(self, command: str) -> dict[str, Any]:
        """The answer to a command of the child."""
        assert self.process.stdin is not None  # noqa: S101 - a pipe
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line that it prints."""
        assert self.process.stdout is not None  # noqa: S101 - a pipe
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"An engine ended with code {self.process.wait()}; its log is above.")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def engine(model: Path, batch: int, mode: str, *, gated: bool, cache: Path) -> Iterator[Engine]:
    """An engine that starts: its first answer says that it is ready.  `cache` keeps what it compiles."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FLIPWATCH_", "VLLM_"))}
    with tempfile.TemporaryDirectory() as folder:
        serving_plain.install(Path(folder))
        environment |= serving_plain.environment(Path(folder), "not-used" if gated else None)
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        }
        process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, str(_CHILD), str(model), str(batch), mode],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Engine(process)
        finally:
            process.kill()
            process.wait()


def compare(model: Path, mode: str, *, batch: int, bursts: int, steps: int, cache: Path) -> dict[str, Any]:
    """Ratios gated over plain, per pair of bursts, and the kernels of both where they are compiled."""
    times: dict[bool, dict[str, list[float]]] = {gated: {"wall": [], "cpu": []} for gated in (False, True)}
    with ExitStack() as stack:
        both = {
            gated: stack.enter_context(engine(model, batch, mode, gated=gated, cache=cache / f"{mode}-{gated}"))
            for gated in (False, True)
        }
        for started in both.values():
            started.answer()
        for burst in range(bursts):
            for gated in (False, True) if burst % 2 else (True, False):
                answer = both[gated].asked(f"steps {steps}")
                for clock, seconds in times[gated].items():
                    fastest = sorted(answer[clock])[: max(1, steps // 4)]
                    seconds.append(statistics.median(fastest))
        found = {
            clock: [gated / plain for gated, plain in zip(times[True][clock], times[False][clock], strict=True)]
            for clock in ("wall", "cpu")
        }
        kernels = {name: both[gated].asked("kernels") for name, gated in (("plain", False), ("gated", True))}
    return {
        "mode": mode,
        "model": model.resolve().name,
        "batch": batch,
        "ratios": found,
        "step_seconds": {"plain": times[False], "gated": times[True]},
        "kernels": kernels if mode == "compiled" else None,
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    result = compare(
        Path(sys.argv[1]),
        sys.argv[2],
        batch=int(sys.argv[3]),
        bursts=int(sys.argv[4]),
        steps=int(sys.argv[5]),
        cache=Path(sys.argv[6]),
    )
    for clock, ratios in result["ratios"].items():
        quarter = statistics.quantiles(ratios, n=4)
        print(clock, "median", round(statistics.median(ratios), 4), "quartiles", [round(q, 4) for q in quarter])
    medians = {side: round(statistics.median(of["wall"]) * 1e3, 2) for side, of in result["step_seconds"].items()}
    print(medians, result["kernels"])
    Path(sys.argv[7]).write_text(json.dumps(result))
