"""The scan of a checkpoint folder in this process, without a server: is this checkpoint bad?

torch and the local engine are imported when they are needed: `flipwatch` runs without them.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError
from rich.progress import Progress

from ...monitors.alpha_scan import (
    AlphaScan,
    AlphaScanFinding,
    AlphaScanPlan,
    Strategy,
    Thresholds,
    alphas_of,
    naive_passes,
    predicted_passes,
)
from ...monitors.validation import ValidationItem, load_items
from ..settings import ScanSettings, ValidationSettings
from ..validation_set import spread
from .checkpoint import check_memory, examine
from .client import CliError
from .finding_table import Cost

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Score = Literal["all", "answer"]

_VALIDATION = ValidationSettings()
_SCAN = ScanSettings()

# Of the libraries beneath: no bars and no advice of theirs among our lines, and nothing is looked for on the network.
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Options(NamedTuple):
    """How a folder is scanned; the defaults are the sidecar's."""

    grid: str | list[float] = "quick"
    dtype: Dtype = "auto"
    items: int = _VALIDATION.max_items
    max_tokens: int = _VALIDATION.max_tokens
    validation: Path | None = None
    score: Score = "all"
    strategy: Strategy = _SCAN.strategy
    max_faults: int = _SCAN.max_faults


class Scanned(NamedTuple):
    """What came of it."""

    finding: AlphaScanFinding
    cost: Cost


def scan_folder(folder: Path, options: Options, progress: Progress) -> Scanned:
    """Scan the checkpoint in `folder`; each mistake in it or in the options is a `CliError` with one sentence."""
    checkpoint = examine(folder)
    check_memory(checkpoint, options.dtype)
    items = chosen_items(options.validation, options.items)
    quieten()
    with told("torch and transformers cannot be imported"):
        from ...probe.local import LocalView, make_plan, run_scan
    task = progress.add_task("loading", total=None)
    with told(f"The tokenizer in {folder} cannot be used"):
        try:
            order = make_plan(
                folder,
                items,
                alphas_of(options.grid),
                max_tokens=options.max_tokens,
                answers_only=options.score == "answer",
            )
        except ValidationError as error:
            raise _unusable(error, options) from None
    with told(f"The model in {folder} cannot be loaded"):
        view = LocalView.load(folder, options.dtype)
    plans: list[AlphaScanPlan] = []
    steps = 0

    def on_plan(plan: AlphaScanPlan, count: int) -> None:
        nonlocal steps
        plans.append(plan)
        steps += count
        progress.update(task, total=steps)

    with told(f"The model in {folder} cannot be scanned"):
        view.check(order)
        progress.reset(task, description="scanning")
        started = time.monotonic()
        monitor = AlphaScan(Thresholds(), options.strategy, options.max_faults)
        finding, _ = run_scan(view, monitor, order, on_plan=on_plan, on_step=lambda: progress.advance(task))
        seconds = time.monotonic() - started
    predicted = sum(predicted_passes(plan, view.num_blocks) * plan.pass_tokens for plan in plans)
    cost = Cost(
        passes=finding.passes,
        naive=naive_passes(order, view.num_blocks),
        seconds=seconds,
        predicted=predicted / _measured_tokens(plans),
    )
    return Scanned(finding, cost)


def quieten() -> None:
    """Must come before transformers is imported."""
    os.environ.update(_QUIET)


def chosen_items(file: Path | None, count: int) -> list[ValidationItem]:
    """At most `count` items of a file, or of the shipped set; a file that cannot be used is a `CliError`."""
    try:
        return spread(load_items(file), count)
    except FileNotFoundError:
        raise CliError(f"There is no file {file}: --validation wants a JSONL file.") from None
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise CliError(str(error)) from None


def _unusable(error: ValidationError, options: Options) -> CliError:
    """Why no plan could be made: its sequences or its alphas."""
    first = error.errors()[0]
    if first["loc"] == ("tokens",):
        return CliError(
            f"No item has a scored token within {options.max_tokens} tokens: raise --max-tokens or use longer items."
        )
    return CliError(f"The grid cannot be used: {first['msg'].removeprefix('Value error, ')}.")


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turn whatever happens inside into one sentence that begins with `what`."""
    try:
        yield
    except CliError:
        raise
    except ImportError as error:
        if error.name in ("torch", "transformers", "safetensors"):
            raise CliError(
                f"A checkpoint folder needs {error.name}, which is not installed: pip install 'flipwatch[local]'."
            ) from None
        raise CliError(f"{what}: {_first_sentence(error)}.") from None
    except Exception as error:
        # Broad on purpose: below are hundreds of model classes that read files which somebody else made.
        text = _first_sentence(error)
        if isinstance(error, MemoryError) or "allocate memory" in text:
            raise CliError(
                f"{what}: there is not enough memory; give fewer --max-tokens or a smaller --dtype."
            ) from None
        raise CliError(f"{what}: {text}.") from None


def _first_sentence(error: Exception) -> str:
    """Of what a library said, which may be pages."""
    text = " ".join(str(error).split()).split(". ")[0][:300].rstrip(".:")
    return text if text and isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: {text}"


def _measured_tokens(plans: list[AlphaScanPlan]) -> int:
    """Tokens of one forward pass over all sequences that the plans measured."""
    return sum({plan.first_sequence: plan.pass_tokens for plan in reversed(plans) if not plan.left_out}.values())
