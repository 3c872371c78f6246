"""A checkpoint folder, looked at before anything is loaded: what a library would say in many lines, or not at all."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from .client import CliError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_MOST_HEADER = 100 * 2**20  # the format's own limit


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose config and weights are there as a whole."""

    folder: Path
    files: tuple[Path, ...]
    stored_bytes: int
    """Of all tensors, as they lie in the files."""
    floats: int
    """Numbers among them that loading converts to the wanted dtype."""
    float_bytes: int
    """What these take in the files."""

    def bytes_as(self, dtype: str) -> int:
        """Bytes of all tensors in memory; `auto` keeps them as they are."""
        if dtype == "auto":
            return self.stored_bytes
        return self.stored_bytes - self.float_bytes + self.floats * _SIZES[dtype]


class _Tensor(BaseModel):
    """One entry of a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def examine(folder: Path) -> Checkpoint:
    """Raise `CliError` with one sentence for whatever is missing, cut off or unreadable."""
    if not _is_there(folder, Path.is_dir):
        raise CliError(f"There is no folder {folder}: --model wants a checkpoint folder with config.json and weights.")
    _json(folder / "config.json")
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        raise CliError(f"{folder} holds no tokenizer (tokenizer.json): copy it from where the model came from.")
    files = _weight_files(folder)
    stored = floats = float_bytes = 0
    for file in files:
        for tensor in _header(file):
            size = tensor.data_offsets[1] - tensor.data_offsets[0]
            stored += size
            if tensor.dtype in _FLOATS:
                floats += math.prod(tensor.shape)
                float_bytes += size
    return Checkpoint(folder, files, stored, floats, float_bytes)


def check_memory(checkpoint: Checkpoint, dtype: str) -> None:
    """Raise `CliError` when the weights alone are more than the memory that is free."""
    needed, free = checkpoint.bytes_as(dtype), free_bytes()
    if free is not None and needed > free:
        raise CliError(
            f"There is not enough memory for {checkpoint.folder}: its weights take {_gb(needed)} as "
            f"{'stored' if dtype == 'auto' else dtype}, and {_gb(free)} are free."
        )


def free_bytes(root: Path = Path("/")) -> int | None:
    """Memory that may still be used, by the machine and by the control group; None where Linux does not tell."""
    free: list[int] = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        group = root / "sys/fs/cgroup"
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            # Pages of files count as used and are given back when somebody needs them.
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            free.append(int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass
    return min(free, default=None)


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if (folder / _SINGLE).exists():
        return (folder / _SINGLE,)
    if not (folder / _INDEX).exists():
        raise CliError(
            f"{folder} holds neither {_SINGLE} nor {_INDEX}: only checkpoints in safetensors files can be scanned."
        )
    names = _json(folder / _INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise CliError(f"{folder / _INDEX} has no weight_map: the checkpoint is damaged, copy it again.")
    files = tuple(folder / name for name in sorted(set(names.values())))
    missing = [file.name for file in files if not _is_there(file, Path.is_file)]
    if missing:
        raise CliError(
            f"{folder} lacks {len(missing)} of its {len(files)} weight files ({missing[0]}): copy the folder again."
        )
    return files


def _header(file: Path) -> list[_Tensor]:
    """Tensors of a safetensors file: 8 bytes with the length of the JSON that follows, then the data."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            text = opened.read(min(length, _MOST_HEADER))
        if size < 8 + length <= 8 + _MOST_HEADER:
            raise CliError(f"{file} is cut off within its header: copy it again.")
        content = json.loads(text)
        content.pop("__metadata__", None)
        tensors = [_Tensor.model_validate(tensor) for tensor in content.values()]
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise CliError(f"{file} is no safetensors file, or its header is damaged: copy it again.") from None
    end = 8 + length + max((tensor.data_offsets[1] for tensor in tensors), default=0)
    if size < end:
        raise CliError(f"{file} is cut off: it holds {size} of {end} bytes; copy it again.")
    return tensors


def _is_there(path: Path, check: Callable[[Path], bool]) -> bool:
    """Whether it is; a name that cannot be one, e.g. too long, is not there."""
    try:
        return check(path)
    except OSError:
        return False


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CliError(f"{file.parent} holds no {file.name}: --model wants a checkpoint folder.") from None
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise CliError(f"{file} is no JSON object: the checkpoint is damaged, copy it again.")
    return content


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
