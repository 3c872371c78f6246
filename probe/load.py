"""How busy the server is, as vLLM's API process sees it."""

import asyncio
import time
from typing import Any

# Between two looks at the queue; nothing tells when a request gets its first token.
_LOOK_SECONDS = 0.004


class Load:
    """The requests of one vLLM server."""

    def __init__(self, client: Any) -> None:
        """`client` is vLLM's `AsyncLLM`."""
        self._client = client

    def requests(self) -> int | None:
        """Requests that were taken and are not finished; None where other API processes may have some."""
        # With several API processes each one knows only its own requests.
        if self._client.vllm_config.parallel_config._api_process_count > 1:
            return None
        return int(self._client.get_num_unfinished_requests())

    async def calm(self, patience: float) -> None:
        """Wait until no request waits for its first token, for `patience` seconds at most."""
        until = time.monotonic() + patience
        while self._client.get_num_queued_tokens() > 0 and (left := until - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(_LOOK_SECONDS, left))
