"""Load on a live server by vLLM's own benchmark client, in short segments."""

import argparse
import asyncio
import contextlib
import io
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """What is asked of a server in one segment."""

    prompts: int
    input_tokens: int
    output_tokens: int
    rate: float
    """Requests per second, drawn as a Poisson process; inf: all at once, as far as `streams` lets them."""
    streams: int | None
    """Most requests at the same time; None: no limit."""


def drive(url: str, served: str, model: Path, shape: Shape, seed: int) -> dict[str, Any]:
    """One segment; figures of vLLM's client: seconds, tokens per second, and percentiles in milliseconds.

    Raises `RuntimeError` when a request failed: a figure of fewer requests would look better.
    """
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = FlexibleArgumentParser()
    add_cli_args(parser)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *("--backend", "openai", "--base-url", url, "--model", served, "--tokenizer", str(model)),
            *("--dataset-name", "random", "--random-input-len", str(shape.input_tokens), "--ignore-eos"),
            *("--random-output-len", str(shape.output_tokens), "--num-prompts", str(shape.prompts)),
            *("--request-rate", str(shape.rate), "--seed", str(seed), "--disable-tqdm", "--temperature", "0"),
            *("--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99"),
            *("--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "result.json"),
        ]
        if shape.streams is not None:
            arguments += ["--max-concurrency", str(shape.streams)]
        # Its report goes to standard output.
        with contextlib.redirect_stdout(io.StringIO()):
            asyncio.run(main_async(parser.parse_args(arguments)))
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    if found["completed"] != shape.prompts:
        raise RuntimeError(f"{shape.prompts - found['completed']} of {shape.prompts} requests failed at {url}.")
    return {
        "seconds": found["duration"],
        "tokens_per_second": found["output_throughput"],
        "ttft_ms": [1e3 * seconds for seconds in found["ttfts"]],
        "itl_ms": [1e3 * seconds for gaps in found["itls"] for seconds in gaps],
    }
