"""Client of vLLM's own HTTP API: health, model name, tokens, counts of served requests.

VllmError            anything that went wrong with a request
    VllmAway         nobody answers
"""

from types import TracebackType
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ValidationError

# Counter families lose their `_total` in the parser.
_SERVED = "vllm:request_success"


class VllmError(Exception):
    """A request to vLLM failed; the message is one sentence."""


class VllmAway(VllmError):
    """vLLM does not answer."""


class _Tokens(BaseModel):
    tokens: list[int]


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


class Vllm:
    """One vLLM server.  `timeout` is in seconds."""

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout: float = 10.0) -> None:
        self._url = base_url
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=timeout,
            # Shorter than uvicorn's 5 s: a connection that the server closes at the moment of use is a false "away".
            limits=httpx.Limits(keepalive_expiry=2.0),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

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
            raise VllmError(f"vLLM at {self._url} names no served model.")
        return models[0].id

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Token ids of `text` with the special tokens that the tokenizer adds."""
        body = {"model": model, "prompt": text, "add_special_tokens": True}
        response = await self._request("POST", "/tokenize", body)
        try:
            return _Tokens.model_validate_json(response.content).tokens
        except ValidationError:
            raise VllmError(f"vLLM at {self._url} answered /tokenize without tokens.") from None

    async def served_requests(self) -> int:
        """Requests finished since vLLM started, from its own counter; 0 when it has not counted any."""
        response = await self._request("GET", "/metrics")
        try:
            return round(
                sum(
                    sample.value
                    for family in text_string_to_metric_families(response.text)
                    if family.name == _SERVED
                    for sample in family.samples
                    if sample.name == _SERVED + "_total"
                )
            )
        except ValueError as error:
            raise VllmError(f"vLLM's metrics at {self._url} cannot be read: {error}.") from None

    async def _request(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.TimeoutException:
            raise VllmAway(f"vLLM at {self._url} did not answer {method} {path} in time.") from None
        except httpx.HTTPError as error:
            raise VllmAway(f"vLLM at {self._url} cannot be reached: {str(error) or type(error).__name__}.") from None
        if response.status_code == 401:
            raise VllmError(f"vLLM at {self._url} refused the key: set vllm.api_key to its --api-key.")
        if not response.is_success:
            raise VllmError(f"vLLM at {self._url} answered {method} {path} with HTTP {response.status_code}.")
        return response
