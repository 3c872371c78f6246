"""Client of vLLM's own HTTP API: health, model name, tokens, counts of served requests.

VllmError            anything that went wrong with a request
    VllmAway         nobody answers
"""

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ValidationError

from .connection import Connection

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


class Vllm(Connection):
    """One vLLM server.  `timeout` is in seconds."""

    away = VllmAway

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout: float = 10.0) -> None:
        super().__init__(base_url, api_key, timeout)

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
            raise VllmError(f"vLLM's metrics at {self.shown_url} cannot be read: {error}.") from None

    async def _request(self, method: str, path: str, body: object = None) -> httpx.Response:
        response = await self.send(method, path, json=body)
        if response.status_code == 401:
            raise VllmError(f"vLLM at {self.shown_url} refused the key: set vllm.api_key to its --api-key.")
        if not response.is_success:
            raise VllmError(f"vLLM at {self.shown_url} answered {method} {path} with HTTP {response.status_code}.")
        return response
