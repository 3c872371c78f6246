"""The files that the served model came from: which they are, their digests, and their tensors one by one."""

import errno
import hashlib
import json
import math
import mmap
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .stack import Stack

_CHUNK = 8 << 20
# Direct reads need offsets, lengths and memory in multiples of the device's block; no device has larger ones.
_ALIGNMENT = 4096
_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral")
_LARGEST_HEADER = 100 << 20
_NUMBERED = re.compile(r"(?:(.*?)\.)?(\d+)\.")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointUnusable(Exception):
    """The checkpoint cannot be read, or not compared with what is in memory; the text is one sentence."""


@dataclass(frozen=True)
class FileDigest:
    """SHA-256 of a file, and how its bytes were read."""

    hexdigest: str
    read: Literal["direct", "advised"]
    """`direct` read the disk past the page cache.  `advised` asked the kernel to drop the cached pages first, where the
    file system reads no other way; pages that another process has mapped stay."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a safetensors file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self) -> Tensor:
        """A copy on the CPU.

        With plain reads: memory that is mapped from a file ends the process when the file shrinks or the disk fails.

        Raises:
            CheckpointUnusable: the file is not as its header says, or cannot be read.
        """
        memory = torch.empty(self.stop - self.start, dtype=torch.uint8)
        if memory.numel():
            with _sentences(self.file), self.file.open("rb", buffering=0) as file:
                _read_into(file.fileno(), memory.numpy().data, self.start, self.file)
        return memory.view(self.dtype).view(self.shape)


@contextmanager
def _sentences(path: Path) -> Iterator[None]:
    """Turns what goes wrong with a file into one sentence."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise CheckpointUnusable(f"{path} cannot be read: {reason}.") from error


def checkpoint_folder(vllm_config: Any) -> Path:
    """The local folder that vLLM loaded the model from; a hub id is looked up in the local cache, never fetched.

    Raises:
        CheckpointUnusable: there is none, or the model was loaded in a way that this cannot follow.
    """
    import vllm.envs
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    config, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format not in _FORMATS:
        raise CheckpointUnusable(
            f"The model was loaded with load format {load.load_format}, not from safetensors files."
        )
    if getattr(config, "model_weights", ""):
        raise CheckpointUnusable(f"The model was loaded from {config.model_weights}, which is no local folder.")
    folder = Path(config.model)
    if not folder.is_dir():
        if vllm.envs.VLLM_USE_MODELSCOPE:
            raise CheckpointUnusable(f"{config.model} is no local folder; of a ModelScope id the files are not found.")
        try:
            found = snapshot_download(
                config.model, revision=config.revision, cache_dir=load.download_dir, local_files_only=True
            )
        except (LocalEntryNotFoundError, HFValidationError, OSError):
            raise CheckpointUnusable(f"{config.model} is neither a folder nor in the local hub cache.") from None
        folder = Path(found)
    if load.load_format not in ("auto", "mistral") and any(folder.glob("consolidated*.safetensors")):
        raise CheckpointUnusable(f"{folder} holds the model twice, and load format {load.load_format} may take either.")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted by name, as vLLM picks them with load format `auto`.

    Mistral's `consolidated` files come first; files that the index does not name are left out.

    Raises:
        CheckpointUnusable: there are none, or one that the index names is missing.
    """
    with _sentences(folder):
        present = sorted(path.name for path in folder.iterdir() if path.is_file())
    files = [name for name in present if name.endswith(".safetensors")]
    index = "model.safetensors.index.json"
    if consolidated := [name for name in files if name.startswith("consolidated")]:
        files, index = consolidated, "consolidated.safetensors.index.json"
    if not files:
        other = next((name for name in present if Path(name).suffix in (".bin", ".pt", ".pth", ".gguf")), None)
        found = f"only {other} and the like, which is not supported" if other else "no weights"
        raise CheckpointUnusable(f"{folder} holds no safetensors files, {found}.")
    if index in present:
        with _sentences(folder / index):
            text = (folder / index).read_text(encoding="utf-8", errors="replace")
        try:
            named = {str(name) for name in json.loads(text)["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointUnusable(f"{folder / index} is no index of safetensors files.") from None
        if missing := sorted(named - set(files)):
            raise CheckpointUnusable(f"{missing[0]} is missing in {folder}, though {index} names it.")
        files = [name for name in files if name in named]
    return [folder / name for name in files]


def sha256_past_cache(path: Path, bytes_per_second: float | None = None) -> FileDigest:
    """SHA-256 of the bytes on the disk, not of those that the page cache holds of them.

    Reads 8 MiB at a time; neither reading nor hashing holds the interpreter lock.

    Args:
        path: A file that nobody writes to.
        bytes_per_second: Read no faster than this on average; None is as fast as the disk goes.

    Raises:
        CheckpointUnusable: the file is not there, cannot be read or changed meanwhile.
    """
    with _sentences(path), mmap.mmap(-1, _CHUNK) as buffer:
        direct = _open_direct(path, buffer)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if direct is None else direct
        try:
            before = os.fstat(descriptor)
            if direct is None:
                # Pages that were never written to the disk cannot be dropped.
                with suppress(OSError):
                    os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            digest = hashlib.sha256()
            begun = time.monotonic()
            for done, chunk in _chunks(descriptor, before.st_size, buffer, path):
                digest.update(chunk)
                chunk.release()
                if bytes_per_second is not None:
                    time.sleep(max(0.0, begun + done / bytes_per_second - time.monotonic()))
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise CheckpointUnusable(f"{path} changed while it was read.")
    return FileDigest(digest.hexdigest(), "advised" if direct is None else "direct")


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint by their name there, file by file, from the headers of the files alone.

    Raises:
        CheckpointUnusable: a file cannot be read, is cut off, or is no safetensors file.
    """
    return {name: stored for file in weight_files(folder) for name, stored in _header(file)}


def tensors_by_block(folder: Path, model: nn.Module, stack: Stack) -> dict[int | None, dict[str, StoredTensor]]:
    """The checkpoint's tensors by block and by their name there; None for those outside the blocks.

    A block is told by the first number in a name, behind the path that the stack has in vLLM.  The checkpoint's path
    may be longer or shorter at its head (a multimodal model's language model), after the model's own renaming.

    Raises:
        CheckpointUnusable: as `stored_tensors` does, or the names do not tell the blocks.
    """
    tensors = stored_tensors(folder)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    places: dict[str, tuple[str, int] | None] = {}
    for name in tensors:
        renamed = name if mapper is None else next(iter(mapper.apply_list([name])), name)
        match = _NUMBERED.match(renamed)
        places[name] = (match[1] or "", int(match[2])) if match else None
    blocks = set(range(stack.num_blocks))
    held: dict[str, set[int]] = {}
    for place in filter(None, places.values()):
        held.setdefault(place[0], set()).add(place[1])
    complete = [path for path, numbers in held.items() if blocks <= numbers]
    named = [path for path in complete if _same_end(path, stack.path)]
    paths = named if stack.path not in named else [stack.path]
    if len(paths or complete) != 1:
        raise CheckpointUnusable(
            f"The names in the checkpoint do not tell which tensors belong to the {stack.num_blocks} blocks."
        )
    (path,) = paths or complete
    found: dict[int | None, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        if (at := places[name]) is None or at[0] != path:
            found.setdefault(None, {})[name] = stored
        elif at[1] in blocks:
            # Numbers beyond are layers of a draft model.
            found.setdefault(at[1], {})[name] = stored
    return found


def _same_end(one: str, other: str) -> bool:
    return bool(one) and (f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}"))


def _open_direct(path: Path, buffer: mmap.mmap) -> int | None:
    """A descriptor that reads past the page cache, or None where the file system has no such thing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    try:
        # Some open the file and refuse to read.
        with memoryview(buffer)[:_ALIGNMENT] as first:
            os.preadv(descriptor, [first], 0)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    return descriptor


def _chunks(descriptor: int, size: int, buffer: mmap.mmap, path: Path) -> Iterator[tuple[int, memoryview]]:
    """(bytes so far, the next bytes), each valid until the next one is asked for."""
    done = 0
    while done < size:
        # After a short read the next one starts at a block's edge again and its head is left out.
        offset = done - done % _ALIGNMENT
        with memoryview(buffer) as whole:
            end = offset + os.preadv(descriptor, [whole], offset)
        if end <= done:
            raise CheckpointUnusable(f"{path} ended after {done} of {size} bytes.")
        end = min(end, size)
        yield end, memoryview(buffer)[done - offset : end - offset]
        done = end


def _read_into(descriptor: int, memory: memoryview, start: int, path: Path) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], start + done)
        if not count:
            raise CheckpointUnusable(f"{path} is cut off: it ended after {start + done} bytes.")
        done += count


def _header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Names and places by the safetensors format: length of the header (8 bytes, little-endian), header, data."""
    with _sentences(file), file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        text = opened.read(length) if length <= min(size, _LARGEST_HEADER) else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        places = [
            (name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]) for name, entry in header.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointUnusable(f"{file} has no header of a safetensors file.") from None
    for name, kind, shape, start, stop in places:
        if kind not in _DTYPES:
            raise CheckpointUnusable(f"Tensor {name} of {file} has the type {kind}, which is not supported.")
        dtype = _DTYPES[kind]
        if not 0 <= start <= stop or math.prod(shape) * dtype.itemsize != stop - start:
            raise CheckpointUnusable(f"The header of {file} gives tensor {name} a wrong length.")
        if 8 + length + stop > size:
            raise CheckpointUnusable(f"{file} is cut off: tensor {name} ends behind its {size} bytes.")
        yield name, StoredTensor(file, dtype, shape, 8 + length + start, 8 + length + stop)
