"""The parts of the benchmark of swaps that need no vLLM: how streams are judged, prompts, tables."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
OLD, NEW = [-1.0, -1.1, -1.2, -1.3], [-2.0, -2.1, -2.2, -2.3]


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The benchmark's modules by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        names = ("streams", "swap_tables", "swap_under_load")
        yield {name: importlib.import_module(name) for name in names}


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([*OLD[:2], *NEW[2:]], (2, 2)),
        (OLD, (4, 4)),
        (NEW, (0, 0)),
        ([-1.004, -1.1, -2.2, -2.296], (2, 2)),
        ([*OLD[:2], -1.7, NEW[3]], None),  # of neither: computed from a mixture
        ([OLD[0], NEW[1], OLD[2], NEW[3]], None),  # forth and back
        ([OLD[0], float("nan"), *NEW[2:]], None),
    ],
)
def test_a_stream_has_one_position_of_the_swap(
    modules: dict[str, ModuleType], told: list[float], found: tuple[int, int] | None
) -> None:
    """Up to the position all tokens are of the first model, from it on of the second; else the stream is stale."""
    split = modules["streams"].split(told, OLD, NEW, 0.01)
    assert (None if split.stale else (split.first, split.last)) == found


def test_where_the_models_agree_the_position_is_not_known(modules: dict[str, ModuleType]) -> None:
    """All positions between the last token that tells and the next one are possible."""
    same = [-1.0, -1.5, -1.5, -3.0]
    split = modules["streams"].split([-1.0, -1.5, -1.5, -3.0], [-1.0, -1.5, -1.5, -9.0], same, 0.01)
    assert (split.first, split.last) == (0, 3)


def stream(module: ModuleType, logprobs: list[float], **more: Any) -> Any:
    """A stream of four tokens that came a second apart."""
    whole = {"tokens": [7] * len(logprobs), "logprobs": logprobs, "at": [10.0, 11.0, 12.0, 15.0], "finish": "length"}
    return module.Stream([1, 2], 4, **(whole | more))


def test_streams_are_counted(modules: dict[str, ModuleType]) -> None:
    """Failed, stale, across the swap, and when the first token of the second model came."""
    module = modules["streams"]
    streams = [
        stream(module, [*OLD[:2], *NEW[2:]]),
        stream(module, OLD),
        stream(module, [OLD[0], -1.6, *NEW[2:]]),
        stream(module, OLD[:2], finish="abort"),
        stream(module, OLD, error="ReadError: gone"),
    ]
    outcome = module.judge(streams, [OLD] * 5, [NEW] * 5, 0.01)
    assert outcome.failed == ["ended by abort with 2 of 4 tokens", "ReadError: gone"]
    assert (outcome.stale, outcome.across, outcome.first_new, outcome.told_apart) == ([2], 1, [12.0], 1.0)
    assert outcome.off == pytest.approx(0.5)
    assert streams[0].longest_stall == 3.0


def test_prompts_are_seeded_and_some_share_a_block(modules: dict[str, ModuleType]) -> None:
    """The same seed gives the same prompts; a quarter begins with one of five blocks."""
    texts = [list(range(n, n + 40)) for n in range(0, 900, 9)]
    make = modules["swap_under_load"].make_prompts
    prompts = make(texts, 200, 3)
    assert prompts == make(texts, 200, 3) != make(texts, 200, 4)
    long = [tuple(prompt[:32]) for prompt in prompts if len(prompt) > 32]
    assert (len(long), len(set(long))) == (50, 5)
    assert min(map(len, prompts)) >= 2


def test_page_shows_what_was_measured(modules: dict[str, ModuleType]) -> None:
    """Failed and stale streams, the times from the request, and a swap that no stream saw."""
    seen = {
        "failed": [],
        "longest_stall_seconds": 2.5,
        "median_gap_seconds": 0.5,
        "from_prefix_cache": 50,
    }
    swap = {
        **seen,
        "all_open": True,
        "seconds": {"answered": 0.25, "verifying": 1.5, "active": 9.0},
        "state": "active",
        "message": "Block 14 skipped.",
        "paused_seconds": 0.125,
        "stale": [],
        "across": 200,
        "told_apart": 0.99,
        "off": 1e-5,
        "first_new_seconds": {"first": 2.0, "median": 3.0, "last": 4.0},
    }
    late = swap | {"all_open": False, "stale": [4, 5], "first_new_seconds": None}
    run = {
        "options": {"streams": 200, "tokens": 16, "begun": 2, "dtype": "float32"},
        "prompt_tokens": [3, 15.5, 40],
        "tolerance": 3e-4,
        "plain": seen,
        "swaps": {"skip": swap, "undo": late},
        "again": {**seen, "off": 1e-5, "same_tokens": 200},
    }
    figures = {"model": "model", "blocks": 30, "width": 576, "vllm": "0.32.0", "runs": [run]}
    page = modules["swap_tables"].markdown(figures)
    assert "| skip | 200 | 0 | 0 | 200 | 1.0e-05 | 3.0e-04 | 99.0 % | 50 |" in page
    assert "| undo | 200, not all open at the order | 0 | 2 | 200 |" in page
    assert "| skip | 2.00 | 3.00 | 4.00 | 0.12 | 2.50 | 2.50 | 0.50 |" in page
    assert "| undo | none | none | none |" in page
    assert "answered 0.25, verifying 1.50, first new token 2.00, active 9.00" in page
