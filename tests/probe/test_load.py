"""How busy the server is, and how long a part lets others go first, on a client of vLLM's shape."""

import time
from types import SimpleNamespace

import pytest

from flipwatch.probe.load import Load


class Client:
    """What `Load` asks of vLLM's `AsyncLLM`."""

    def __init__(self, api_processes: int = 1) -> None:
        parallel = SimpleNamespace(_api_process_count=api_processes)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.looks = 0
        self.waiting = 0
        """So many looks find a request without a first token."""

    def get_num_unfinished_requests(self) -> int:
        """Requests in the output processor."""
        return 3

    def get_num_queued_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        self.looks += 1
        return 7 if self.looks <= self.waiting else 0


def test_requests_are_known_where_one_process_has_them_all() -> None:
    """With a second API process nobody knows how many requests are there, and nobody says a number."""
    assert Load(Client()).requests() == 3
    assert Load(Client(api_processes=2)).requests() is None


async def test_a_part_waits_until_no_request_waits() -> None:
    """The wait ends with the queue, long before the patience does; without a queue there is none."""
    client = Client()
    client.waiting = 4
    began = time.monotonic()
    await Load(client).calm(30.0)
    assert client.looks == 5
    assert time.monotonic() - began < 10.0
    await Load(client).calm(30.0)
    assert client.looks == 6


@pytest.mark.parametrize("patience", [0.0, 0.05])
async def test_a_queue_that_never_ends_does_not_hold_a_part_back(patience: float) -> None:
    """Under a load that leaves no gap a part goes on when its patience is over, so that a scan ends."""
    client = Client()
    client.waiting = 10**9
    began = time.monotonic()
    await Load(client).calm(patience)
    assert time.monotonic() - began >= patience
    assert client.looks <= 20
