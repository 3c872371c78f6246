"""Clients that stream one request after another for hours, and what became of every one of them."""

import json
import random
import threading
import time
from dataclasses import dataclass, field

import httpx

# A server that shares its cores with other work may be slow, and a swap recomputes: slow is not lost.
_PATIENT_SECONDS = 600.0


@dataclass
class Ended:
    """Counts of requests that have ended, and why the lost ones were lost."""

    whole: int = 0
    """With as many tokens as were asked for."""
    lost: list[str] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    longest_gap_seconds: list[float] = field(default_factory=list)
    """Of each request, the longest time between two of its tokens."""


class SoakLoad:
    """`with` it: `clients` threads, each with a pause of `pause_seconds` on average between two requests."""

    def __init__(self, url: str, model: str, clients: int, tokens: int, pause_seconds: float, seed: int) -> None:
        # A connection for each request: one that was kept may be closed by the server at the moment of its next use.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=url, timeout=_PATIENT_SECONDS, limits=limits, trust_env=False)
        self._model = model
        self._tokens = tokens
        self._pause_seconds = pause_seconds
        self._end = threading.Event()
        self._lock = threading.Lock()
        self.ended = Ended()
        self.open = 0
        self._threads = [threading.Thread(target=self._run, args=(seed + number,)) for number in range(clients)]

    def _run(self, seed: int) -> None:
        generator = random.Random(seed)  # noqa: S311 - reproducible, not secret
        turn = 0
        while not self._end.is_set():
            turn += 1
            shared = "You are a helpful assistant of a library. " * generator.choice((0, 2, 6))
            self._one(f"{shared}Story {seed}.{turn}: once upon a time", generator.randrange(8, self._tokens + 1))
            self._end.wait(generator.expovariate(1.0 / self._pause_seconds))

    def _one(self, prompt: str, tokens: int) -> None:
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        # The count from vLLM itself: a token of half a character, or one that damage made, has no text of its own.
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        began = last = time.monotonic()
        first, gap, got, finish = None, 0.0, 0, None
        self.open += 1
        try:
            with self._client.stream("POST", "/v1/completions", json=body) as reply:
                reply.raise_for_status()
                for line in reply.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    message = json.loads(line.removeprefix("data: "))
                    got = (message.get("usage") or {}).get("completion_tokens", got)
                    for choice in message["choices"]:
                        now = time.monotonic()
                        first, gap, last = first or now - began, max(gap, now - last if first else 0.0), now
                        finish = choice["finish_reason"] or finish
            why = None if (got, finish) == (tokens, "length") else f"{got} of {tokens} tokens, finish {finish}"
        except (httpx.HTTPError, KeyError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            self.open -= 1
        with self._lock:
            if why is not None:
                self.ended.lost.append(why)
                return
            self.ended.whole += 1
            self.ended.first_token_seconds.append(first or 0.0)
            self.ended.longest_gap_seconds.append(gap)

    def __enter__(self) -> "SoakLoad":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        self._client.close()
