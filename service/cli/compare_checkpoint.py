"""One side of a comparison: a checkpoint folder, loaded in this process for as long as it is measured.

torch and the local engine are imported when they are needed: `flipwatch` runs without them.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from ... import __version__
from ...monitors.alpha_scan import AlphaScanPlan
from ...monitors.differential.reference import Conditions
from ...monitors.monitor import Monitor
from ..comparison import Shape
from .checkpoint import check_memory, examine
from .client import CliError
from .offline import Dtype, quieten, told

if TYPE_CHECKING:
    from ...probe.local_dissection import LocalDissection

P = TypeVar("P", bound=BaseModel)
R = TypeVar("R", bound=BaseModel)

_ANY = 2**31
"""Nothing but memory bounds the length of a sequence."""


class CheckpointSide:
    """A checkpoint folder, and the precision that it is loaded in; `auto` is its own."""

    def __init__(self, folder: Path, dtype: Dtype) -> None:
        """Raises `CliError` for what can be seen to be wrong without loading it."""
        if not _is_checkpoint(folder):
            raise CliError(
                f"{folder} is no checkpoint folder with a config.json: give one, or the URL of a vLLM server (http://...)."
            )
        check_memory(examine(folder), dtype)
        quieten()
        self.source = str(folder)
        self._folder = folder
        self._dtype = dtype

    def shape(self) -> Shape:
        """By its config."""
        with told(f"The config in {self._folder} cannot be used"):
            from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

            config = AutoConfig.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
            if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
                raise CliError(
                    f"{self._folder}: {config.model_type} is no causal language model that transformers knows."
                )
            return Shape(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__, config.num_hidden_layers, _ANY)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """With its own tokenizer."""
        with told(f"The tokenizer in {self._folder} cannot be used"):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
            return [tokenizer(text)["input_ids"] for text in texts]

    @contextmanager
    def opened(self, tokens: list[list[int]]) -> Iterator["LocalModel"]:
        """Load it; gone from memory afterwards."""
        with told("torch and transformers cannot be imported"):
            # Allowed here and in `offline` only: see the import contracts in pyproject.toml.
            from ...probe.local_dissection import LocalDissection
        with told(f"The model in {self._folder} cannot be loaded"):
            view = LocalDissection.load(self._folder, self._dtype)
            assert isinstance(view, LocalDissection)  # noqa: S101 - a class method of it
        with told(f"The model in {self._folder} cannot be measured"):
            view.check(AlphaScanPlan(alphas=[], tokens=tokens[:1], scored_from=[1]))
        model = LocalModel(self._folder, view)
        del view
        try:
            yield model
        finally:
            model.close()


class LocalModel:
    """A loaded checkpoint."""

    def __init__(self, folder: Path, view: "LocalDissection") -> None:
        self._folder = folder
        self._view: LocalDissection | None = view
        self.gates = list(view.gates)
        self.conditions = Conditions(
            model=folder.name,
            model_digest=None,
            architecture=type(view.model).__name__,
            num_blocks=view.num_blocks,
            dtype=str(next(view.model.parameters()).dtype).removeprefix("torch."),
            engine=f"transformers {version('transformers')}",
            torch_version=version("torch"),
            hardware=view.hardware,
            tensor_parallel_size=1,
            flipwatch_version=__version__,
        )

    def measure(self, monitor: Monitor[Any, P, R, Any], plan: P, kind: type[R], note: Callable[[int, int], None]) -> R:
        """In one go."""
        from ...probe.local import run_measurement

        assert self._view is not None  # noqa: S101 - open as long as its context is
        total, done = monitor.steps(plan, self._view.num_blocks), 0

        def step() -> None:
            nonlocal done
            done += 1
            note(done, total)

        with told(f"The model in {self._folder} cannot be measured"):
            return run_measurement(self._view, monitor, plan, step)

    def close(self) -> None:
        """Free its memory, whoever still holds this object."""
        self._view = None
        gc.collect()


def _is_checkpoint(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file()
    except (OSError, ValueError):
        # A name that cannot be one: too long, or with a zero byte.
        return False
