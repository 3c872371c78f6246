"""Client of vLLM's own HTTP API: health, model name, tokens, completions, counters.

VllmError            anything that went wrong with a request
    VllmAway         nobody answers
        VllmLate     it was asked, and did not answer in time
    VllmFailed       it answered with an error of its own (HTTP 5xx)
"""

import time
from collections.abc import Iterable
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from pydantic import BaseModel, ValidationError

from ..monitors.canary.answers import Answer, Failure
from ..monitors.canary.pulse import Counts
from .connection import Connection

_SERVED = "vllm:request_success_total"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
# The KV cache fills while a long prompt is computed in parts, before any token is counted.
_MOVING = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:kv_cache_usage_perc",
    _SERVED,
)

_ENGINE = "X-data-parallel-rank"

_NO_JSON = "not JSON compliant"

# What vLLM writes for minus infinity.
_NOTHING = -9999.0

# Its own errors; 502, 503 and 504 are a proxy's, or of a server that is not ready.
_OF_ITS_OWN = (500, 501)


class VllmError(Exception):
    """A request to vLLM failed; the message is one sentence."""


class VllmAway(VllmError):
    """vLLM does not answer."""


class VllmLate(VllmAway):
    """vLLM was asked, and did not answer in time."""


class VllmFailed(VllmError):
    """vLLM answered with an error of its own."""


class _Tokens(BaseModel):
    tokens: list[int]


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


class _Logprobs(BaseModel):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]


class _Choice(BaseModel):
    token_ids: list[int]
    logprobs: _Logprobs


class _Completion(BaseModel):
    choices: list[_Choice]


class Vllm(Connection):
    """One vLLM server.  `timeout` is in seconds."""

    away = VllmAway
    late = VllmLate

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout: float = 10.0) -> None:
        super().__init__(base_url, api_key, timeout)
        self._own = 0
        """Completions of ours that vLLM has counted."""

    async def healthy(self) -> bool:
        """Whether vLLM's own health check passes; False also when nobody answers."""
        try:
            await self._request("GET", "/health")
        except VllmError:
            return False
        return True

    async def model(self) -> str:
        """The name under which the model is served."""
        response = await self._request("GET", "/v1/models")
        try:
            models = _Models.model_validate_json(response.content).data
        except ValidationError:
            models = []
        if not models:
            raise VllmError(f"vLLM at {self.shown_url} names no served model.")
        return models[0].id

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Token ids of `text` with the special tokens that the tokenizer adds."""
        body = {"model": model, "prompt": text, "add_special_tokens": True}
        response = await self._request("POST", "/tokenize", body)
        try:
            return _Tokens.model_validate_json(response.content).tokens
        except ValidationError:
            raise VllmError(f"vLLM at {self.shown_url} answered /tokenize without tokens.") from None

    async def complete(
        self, model: str, prompt: str, *, max_tokens: int, salt: str, seconds: float, engine: int | None = None
    ) -> Answer:
        """A greedy completion of `prompt`, taking part in the prefix cache of this salt only.

        `engine` is the place of a data-parallel engine among those behind the API server; None leaves it to vLLM's
        load balancer.  An answer that vLLM cannot write for want of finite numbers is an answer.  Raises `VllmFailed`,
        `VllmLate` after `seconds`, `VllmAway`, or `VllmError` for what it refuses.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 2,
            "cache_salt": salt,
            "return_token_ids": True,
            # Else two tokens of the same text would be one.
            "return_tokens_as_token_ids": True,
        }
        headers = {} if engine is None else {_ENGINE: str(engine)}
        started = time.monotonic()
        response = await self.send("POST", "/v1/completions", json=body, headers=headers, timeout=seconds)
        took = time.monotonic() - started
        self._own += 1
        # NaN has no JSON: vLLM fails to write its answer, and calls that the client's mistake.
        if response.status_code == 400 and _NO_JSON in response.text:
            return Answer(
                seconds=took, failure=Failure.NOT_FINITE, detail="has log probabilities that are no finite numbers"
            )
        self._check(response, "POST", "/v1/completions")
        try:
            choice = _Completion.model_validate_json(response.content).choices[0]
        except (ValidationError, IndexError):
            raise VllmError(f"vLLM at {self.shown_url} answered a completion without tokens.") from None
        numbers = tuple(map(_finite, choice.logprobs.token_logprobs))
        margins = tuple(map(_margin, choice.logprobs.top_logprobs))
        if not len(choice.token_ids) == len(numbers) == len(margins):
            raise VllmError(f"vLLM at {self.shown_url} answered {len(choice.token_ids)} tokens with other numbers.")
        return Answer(tokens=tuple(choice.token_ids), logprobs=numbers, margins=margins, seconds=took)

    async def served_requests(self) -> int:
        """Requests finished since vLLM started, from its own counter, less those of this client.

        After a restart of vLLM it may lie below 0: only differences mean anything.
        """
        return round(sum(sample.value for sample in await self._samples() if sample.name == _SERVED)) - self._own

    async def counts(self, seconds: float) -> dict[str, Counts]:
        """Its counters of requests and tokens, by engine; `seconds` may pass."""
        counted: dict[str, dict[str, float]] = {}
        for sample in await self._samples(timeout=seconds):
            if sample.name in (_RUNNING, _WAITING, *_MOVING):
                of_one = counted.setdefault(sample.labels.get("engine", ""), {})
                of_one[sample.name] = of_one.get(sample.name, 0.0) + sample.value
        if not any(_RUNNING in of_one for of_one in counted.values()):
            raise VllmError(f"vLLM at {self.shown_url} does not count its requests (--disable-log-stats?).")
        return {
            engine: Counts(
                running=round(of_one.get(_RUNNING, 0.0)),
                waiting=round(of_one.get(_WAITING, 0.0)),
                moving=tuple(of_one.get(name, 0.0) for name in _MOVING),
            )
            for engine, of_one in counted.items()
        }

    async def _samples(self, **more: Any) -> Iterable[Sample]:
        response = await self._request("GET", "/metrics", **more)
        try:
            families = list(text_string_to_metric_families(response.text))
        except ValueError as error:
            raise VllmError(f"vLLM's metrics at {self.shown_url} cannot be read: {error}.") from None
        return (sample for family in families for sample in family.samples)

    async def _request(self, method: str, path: str, body: object = None, **more: Any) -> httpx.Response:
        response = await self.send(method, path, json=body, **more)
        self._check(response, method, path)
        return response

    def _check(self, response: httpx.Response, method: str, path: str) -> None:
        if response.status_code == 401:
            raise VllmError(f"vLLM at {self.shown_url} refused the key: set vllm.api_key to its --api-key.")
        if not response.is_success:
            kind = VllmFailed if response.status_code in _OF_ITS_OWN else VllmError
            raise kind(f"vLLM at {self.shown_url} answered {method} {path} with HTTP {response.status_code}.")


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None or logprob <= _NOTHING else logprob


def _margin(top: dict[str, float | None] | None) -> float | None:
    """By how much the best of the tokens lies above the next one."""
    known = sorted((value for value in (top or {}).values() if value is not None), reverse=True)
    return None if len(known) < 2 else known[0] - known[1]
