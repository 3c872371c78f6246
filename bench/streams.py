"""Many open streams on a vLLM server, and whether any of them was given something stale when the model was swapped.

What a stream was told is held against a reference: its prompt and output, sent again to an idle server as one prompt,
under the model of before the swap and under the model of after it.  A sound stream has one position in front of which
all log probabilities are those of the first and from which on all are those of the second.  A key or value, or a cached
prefix, that was computed by the first model and used behind the swap moves a log probability away from both.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

LEAST_TOLERANCE = 1e-4
"""Nats.  Rounding depends on what else is in a batch; a stale key moves a log probability a thousand times further."""

AT_ONCE = 32
"""References that are asked for at the same time."""


@dataclass
class Stream:
    """One greedy completion as it came."""

    prompt: list[int]
    asked: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    """When each token came, by `time.perf_counter`."""
    finish: str | None = None
    cached: int = 0
    """Tokens of the prompt that came from the prefix cache."""
    error: str | None = None

    @property
    def failed(self) -> str | None:
        """Why this stream is not what was asked for; None when it is."""
        if self.error is not None:
            return self.error
        if self.finish != "length" or len(self.tokens) != self.asked or len(self.logprobs) != self.asked:
            return f"ended by {self.finish} with {len(self.tokens)} of {self.asked} tokens"
        return None

    @property
    def longest_stall(self) -> float:
        """Seconds of the longest wait between two tokens."""
        return max((after - before for before, after in zip(self.at, self.at[1:], strict=False)), default=0.0)


class Split(NamedTuple):
    """Where a stream went from one model to the other."""

    first: int
    """The earliest position at which the second model can have taken over; it has computed this token and all later."""
    last: int
    """The latest one: between the two the models say the same."""
    off: float
    """How far the worst log probability lies from the model that it is said to be of, for the best position."""
    stale: bool
    """It lies further away than the tolerance at every position: the two others say nothing then."""


def split(logprobs: Sequence[float], before: Sequence[float], after: Sequence[float], tolerance: float) -> Split:
    """The position of the swap; `stale` where there is no such position: something of the first model was used.

    `before` and `after` are the same tokens' log probabilities under the first and the second model.
    """
    count = len(logprobs)
    off = [_worst(logprobs, [*before[:at], *after[at:]]) for at in range(count + 1)]
    fits = [at for at in range(count + 1) if off[at] <= tolerance]
    return Split(fits[0], fits[-1], min(off), stale=False) if fits else Split(0, count, min(off), stale=True)


def _worst(told: Sequence[float], known: Sequence[float]) -> float:
    """The largest difference; infinite where one is no number."""
    gaps = [abs(x - y) for x, y in zip(told, known, strict=True)]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)


class Server:
    """The OpenAI API of one vLLM."""

    def __init__(self, url: str, name: str) -> None:
        self._name = name
        # A connection for each request: one that was kept may be closed by the server at the moment of its next use.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False)
        self._salt = 0

    async def close(self) -> None:
        """End all connections."""
        await self._client.aclose()

    async def tokens(self, text: str) -> list[int]:
        """Token ids of a text."""
        reply = await self._client.post("/tokenize", json={"model": self._name, "prompt": text})
        reply.raise_for_status()
        return list(reply.json()["tokens"])

    async def follow(self, stream: Stream, told: Callable[[], None] = lambda: None) -> None:
        """Ask for the stream and take it in to its end; `told` is called behind each part of it.  Raises nothing."""
        body = self._greedy(stream.prompt, stream.asked) | {
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    stream.error = f"HTTP {reply.status_code}: {(await reply.aread())[:200]!r}"
                    return
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(stream, json.loads(line.removeprefix("data: ")))
                        told()
        except httpx.HTTPError as error:
            stream.error = f"{type(error).__name__}: {error}"

    def _greedy(self, prompt: list[int], count: int) -> dict[str, Any]:
        return {"model": self._name, "prompt": prompt, "max_tokens": count, "temperature": 0}

    def _take(self, stream: Stream, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            stream.error = str(chunk["error"])
            return
        if chunk.get("usage"):
            stream.cached = int((chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        for choice in chunk["choices"]:
            now = time.perf_counter()
            new = list(choice.get("token_ids") or [])
            stream.tokens += new
            stream.at += [now] * len(new)
            if choice["logprobs"] is not None:
                stream.logprobs += choice["logprobs"]["token_logprobs"]
            stream.finish = choice["finish_reason"] or stream.finish

    async def reference(self, streams: Sequence[Stream]) -> list[list[float]]:
        """Log probability of each output token under the model as it is now, whole sequences at a time.

        Neither reads nor fills the prefix cache of anybody else: each sequence has a salt of its own.
        """
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(stream: Stream) -> list[float]:
            self._salt += 1
            whole = stream.prompt + stream.tokens
            salt = f"reference {self._salt} {time.time_ns()}"
            body = self._greedy(whole, 1) | {"prompt_logprobs": 0, "cache_salt": salt}
            async with gate:
                reply = await self._client.post("/v1/completions", json=body)
            reply.raise_for_status()
            entries = reply.json()["choices"][0]["prompt_logprobs"][len(stream.prompt) :]
            return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, stream.tokens, strict=True)]

        return list(await asyncio.gather(*(one(stream) for stream in streams)))


async def run(
    server: Server,
    prompts: Sequence[list[int]],
    asked: int,
    *,
    begun: int = 1,
    meanwhile: Callable[[], Any] | None = None,
) -> tuple[list[Stream], bool]:
    """Open all streams at once and follow them to their ends.

    `meanwhile` is a coroutine function that is awaited once every stream has `begun` tokens.  Returns the streams, and
    whether all of them were open when it was called.
    """
    streams = [Stream(list(prompt), asked) for prompt in prompts]
    moment = asyncio.Event()

    def told() -> None:
        if all(len(stream.tokens) >= begun or stream.error for stream in streams):
            moment.set()

    tasks = [asyncio.create_task(server.follow(stream, told)) for stream in streams]
    ends = asyncio.gather(*tasks)
    all_open = False
    if meanwhile is not None:
        await asyncio.wait({asyncio.ensure_future(moment.wait()), ends}, return_when=asyncio.FIRST_COMPLETED)
        all_open = not any(task.done() for task in tasks)
        await meanwhile()
    await ends
    return streams, all_open


@dataclass(frozen=True)
class Outcome:
    """What became of the streams over one swap."""

    failed: list[str]
    stale: list[int]
    """Indices of streams that have no position of the swap."""
    across: int
    """Streams with tokens of both models."""
    told_apart: float
    """Share of the tokens at which the two models differ by more than the tolerance."""
    first_new: list[float]
    """When each stream that has one got its first token of the second model; the latest that it can have been."""
    off: float
    """The worst log probability's distance from its model, over all streams."""


def judge(
    streams: Sequence[Stream],
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    tolerance: float,
) -> Outcome:
    """Hold the streams against the references under the model of before and of after the swap."""
    failed = [reason for stream in streams if (reason := stream.failed) is not None]
    stale, across, first_new, off = [], 0, [], 0.0
    for index, (stream, first, second) in enumerate(zip(streams, before, after, strict=True)):
        if stream.failed is not None:
            continue
        found = split(stream.logprobs, first, second, tolerance)
        off = max(off, found.off)
        if found.stale:
            stale.append(index)
            continue
        across += 0 < found.first <= found.last < stream.asked
        if found.last < stream.asked:
            first_new.append(stream.at[found.last])
    gaps = [abs(a - b) for first, second in zip(before, after, strict=True) for a, b in zip(first, second, strict=True)]
    apart = sum(gap > tolerance for gap in gaps) / len(gaps) if gaps else 0.0
    return Outcome(failed, stale, across, apart, sorted(first_new), off)
