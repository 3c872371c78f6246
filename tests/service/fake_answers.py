"""What the fake vLLM answers the canary, and what it counts: sound answers that faults can spoil.

How to use it, through `FakeServer.answers`:

    server.answers.flip = {4: 3}        # prompt 4 has another token at place 3
    server.answers.move = {1: 0.5}      # the log probabilities of prompt 1 lie 0.5 nats lower
    server.answers.rounding = 0.01      # they move by so much while other requests are there
    server.answers.stale = 0.5          # what comes from the prefix cache lies so much lower
    server.answers.nan = True           # vLLM cannot write them
    server.answers.repeat = True        # one token over and over
    server.answers.status = 500         # refused
    server.answers.hang(); .go_on()     # no answer in between; nothing is counted
    server.answers.running = 2          # requests that vLLM says are there
    server.answers.busy = True          # it computes other tokens all the time
    server.answers.bad_engine = 1       # all of this in the answers of that engine only
"""

import asyncio
import threading
from collections import Counter
from typing import Annotated, Any

from fastapi import FastAPI, Header
from fastapi.responses import JSONResponse, Response

from flipwatch.monitors.canary.plan import PROMPTS


class FakeAnswers:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        """Bodies of all completions."""
        self.sent_to: list[str | None] = []
        """The engine that each of them names."""
        self.running = 0
        self.stuck: int | None = None
        """Requests on a second engine, which computes nothing; None: there is none."""
        self.busy = False
        """The counters move each time that they are read."""
        self.tokens = 0
        """What the counters of tokens say."""
        self._free = threading.Event()
        self._free.set()
        self._reached = threading.Event()
        self._seen: Counter[tuple[str, str, str | None]] = Counter()
        self.restart()

    def restart(self) -> None:
        """Sound again."""
        self.flip: dict[int, int] = {}
        self.move: dict[int, float] = {}
        self.rounding = 0.0
        self.stale = 0.0
        self.nan = self.repeat = False
        self.status = 200
        self.bad_engine: int | None = None
        self._seen.clear()

    def hang(self) -> None:
        """Answer nothing from now on."""
        self._free.clear()

    def go_on(self) -> None:
        """Answer again."""
        self._free.set()

    async def reached(self) -> None:
        """Wait until somebody has asked."""
        await asyncio.to_thread(self._reached.wait, 30)

    def counters(self) -> list[str]:
        """Lines for /metrics."""
        label = '{engine="0"}'
        self.tokens += self.busy
        return [
            f"vllm:num_requests_running{label} {float(self.running)}",
            f"vllm:num_requests_waiting{label} 0.0",
            f"vllm:prompt_tokens_total{label} {float(self.tokens)}",
            f"vllm:generation_tokens_total{label} {float(self.tokens)}",
            *([] if self.stuck is None else [f'vllm:num_requests_running{{engine="1"}} {float(self.stuck)}']),
        ]

    def install(self, app: FastAPI) -> None:
        """Answer completions."""

        @app.post("/v1/completions")
        def complete(body: dict[str, Any], x_data_parallel_rank: Annotated[str | None, Header()] = None) -> Response:
            self.asked.append(body)
            self.sent_to.append(x_data_parallel_rank)
            self._reached.set()
            sound = self.bad_engine is not None and x_data_parallel_rank != str(self.bad_engine)
            if not sound:
                self._free.wait(30)
            if self.status != 200 and not sound:
                return JSONResponse({"error": {"message": "no"}}, self.status)
            if self.nan and not sound:
                message = "Out of range float values are not JSON compliant"
                return JSONResponse({"error": {"message": message, "type": "BadRequestError"}}, 400)
            self.tokens += 16
            return JSONResponse({"choices": [self._choice(body, x_data_parallel_rank, sound=sound)]})

    def _choice(self, body: dict[str, Any], engine: str | None, *, sound: bool) -> dict[str, Any]:
        place = PROMPTS.index(body["prompt"])
        key = body["prompt"], body["cache_salt"], engine
        lower = 0.0 if sound else self.move.get(place, 0.0) + (self.stale if self._seen[key] else 0.0)
        # Every other answer is computed beside another one.
        lower += 0.0 if len(self.asked) % 2 else self.rounding
        self._seen[key] += 1
        tokens = [7 if self.repeat and not sound else 100 * (place + 1) + at for at in range(16)]
        if place in self.flip and not sound:
            tokens[self.flip[place]] = 9
        logprobs = [-0.5 - lower] * 16
        top = [
            {f"token_id:{token}": value, "token_id:1": value - 4.0}
            for token, value in zip(tokens, logprobs, strict=True)
        ]
        return {
            "index": 0,
            "text": "",
            "token_ids": tokens,
            "finish_reason": "length",
            "logprobs": {"tokens": [], "token_logprobs": logprobs, "top_logprobs": top, "text_offset": []},
        }
