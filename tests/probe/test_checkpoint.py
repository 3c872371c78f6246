"""The files of a checkpoint: which they are, their digests from the disk, their tensors."""

import ctypes
import errno
import hashlib
import json
import mmap
import os
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flipwatch.monitors.fingerprint.manifest import check_manifest, read_manifest
from flipwatch.probe.checkpoint import (
    CheckpointUnusable,
    checkpoint_folder,
    sha256_past_cache,
    stored_tensors,
    tensors_by_block,
    weight_files,
)

CHUNK = 8 << 20
ONE, TWO = "1" * 64, "Ab" * 32


def _resident(path: Path) -> int:
    """How many pages of a file the page cache holds."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    held = (ctypes.c_ubyte * pages)()
    library = ctypes.CDLL(None, use_errno=True)
    # Mapping a file reads nothing of it.
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        address = ctypes.addressof(start := ctypes.c_char.from_buffer(mapped))
        failed = library.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), held)
        del start
    assert failed == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in held)


def _drop(path: Path) -> None:
    """Write a file out and drop what the page cache holds of it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no direct reads."""
    original = os.open

    def refuse(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, (1 << 20) + 17, CHUNK, CHUNK + 1, 2 * CHUNK + 12345])
def test_digest_is_that_of_hashlib(size: int, tmp_path: Path) -> None:
    """Whatever the size, also where the file ends inside a block."""
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    assert sha256_past_cache(tmp_path / "file").hexdigest == hashlib.sha256(content).hexdigest()


def test_short_reads_leave_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that returns less than was asked for, ending inside a block, is gone on from."""
    content = os.urandom(100_001)
    (tmp_path / "file").write_bytes(content)
    original = os.preadv
    reads = []

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        return min(original(descriptor, buffers, offset), 10_001)

    monkeypatch.setattr(os, "preadv", short)
    assert sha256_past_cache(tmp_path / "file").hexdigest == hashlib.sha256(content).hexdigest()
    assert len(reads) > 10
    assert all(offset % 4096 == 0 for offset in reads)


def test_direct_reads_do_not_come_from_the_page_cache(tmp_path: Path) -> None:
    """After a drop a plain read fills the page cache, ours does not: it cannot have gone through it."""
    path = tmp_path / "file"
    content = os.urandom(3 << 20)
    path.write_bytes(content)
    _drop(path)
    assert _resident(path) == 0
    found = sha256_past_cache(path)
    assert found.hexdigest == hashlib.sha256(content).hexdigest()
    if found.read == "advised":
        pytest.skip("The file system of the tests' folder knows no direct reads.")
    assert _resident(path) == 0
    path.read_bytes()
    assert _resident(path) > 0


@pytest.mark.usefixtures("no_direct")
def test_without_direct_reads_the_cache_is_dropped_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer says so, and no page that was cached before is used."""
    path = tmp_path / "file"
    content = os.urandom((3 << 20) + 5)
    path.write_bytes(content)
    held = []
    original = os.posix_fadvise

    def advise(*arguments: int) -> None:
        held.append(_resident(path))
        original(*arguments)
        held.append(_resident(path))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    found = sha256_past_cache(path)
    assert (found.hexdigest, found.read) == (hashlib.sha256(content).hexdigest(), "advised")
    assert held[0] > 0
    assert held[1] == 0


def test_a_budget_slows_it_down(tmp_path: Path) -> None:
    """So many bytes a second and no more, with the same digest."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    begun = time.monotonic()
    assert sha256_past_cache(path, bytes_per_second=4 << 20).hexdigest == hashlib.sha256(bytes(1 << 20)).hexdigest()
    assert time.monotonic() - begun >= 0.25


def test_files_that_cannot_be_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is missing, one that is a folder, one that the disk fails on, one that changes meanwhile."""
    with pytest.raises(CheckpointUnusable, match=r"gone cannot be read: no such file or directory\.$"):
        sha256_past_cache(tmp_path / "gone")
    with pytest.raises(CheckpointUnusable, match="is a directory"):
        sha256_past_cache(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    original = os.preadv

    def growing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        with path.open("ab") as file:
            file.write(b"more")
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", growing)
    with pytest.raises(CheckpointUnusable, match="changed while it was read"):
        sha256_past_cache(path)

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointUnusable, match="cannot be read: input/output error"):
        sha256_past_cache(path)


def _tensors() -> dict[str, torch.Tensor]:
    """One of every kind that matters: several types, no values, a scalar."""
    generator = torch.Generator().manual_seed(0)
    random_values = torch.randn(7, 5, generator=generator)
    return {
        "model.layers.1.a": random_values,
        "model.layers.1.b": random_values.to(torch.bfloat16),
        "model.layers.1.c": random_values.to(torch.float8_e4m3fn),
        "model.layers.1.d": torch.tensor(3.5),
        "model.layers.1.e": torch.empty(0, 4),
        "model.layers.1.f": torch.tensor([True, False]),
        "model.layers.11.a": torch.arange(5),
        "model.norm": torch.ones(3),
    }


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Whatever their type and shape; from two files."""
    tensors = _tensors()
    names = list(tensors)
    save_file({name: tensors[name] for name in names[:3]}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    save_file({name: tensors[name] for name in names[3:]}, tmp_path / "b.safetensors")
    stored = stored_tensors(tmp_path)
    assert set(stored) == set(names)
    for name, expected in tensors.items():
        tensor = stored[name].read()
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


class _Renaming:
    """What vLLM's multimodal models have: names of the checkpoint that get another head, and some that are dropped."""

    class hf_to_vllm_mapper:
        @staticmethod
        def apply_list(names: list[str]) -> list[str]:
            head, new = "model.language_model.", "language_model.model."
            return [n.replace(head, new) for n in names if "inv_freq" not in n]


@pytest.mark.parametrize(
    ("stack_path", "model", "names"),
    [
        ("model.layers", None, {"model.layers.0.a": 0, "model.layers.1.experts.0.a": 1, "model.norm": None}),
        # A layer behind the last one is a draft model's.
        ("model.layers", None, {"model.layers.0.a": 0, "model.layers.1.a": 1, "model.layers.2.a": "left out"}),
        # The checkpoint's names have a shorter or a longer head.
        ("transformer.h", None, {"h.0.a": 0, "h.1.a": 1, "wte": None}),
        ("h", None, {"transformer.h.0.a": 0, "transformer.h.1.a": 1, "transformer.wte": None}),
        # Another head altogether, and the only list of that length.
        ("model.layers", None, {"gpt_neox.blocks.0.a": 0, "gpt_neox.blocks.1.a": 1, "gpt_neox.norm": None}),
        # A vision tower has blocks too.
        (
            "language_model.model.layers",
            _Renaming(),
            {
                "model.language_model.layers.0.a": 0,
                "model.language_model.layers.1.a": 1,
                "model.language_model.layers.1.inv_freq": None,
                "model.visual.layers.0.a": None,
                "model.visual.layers.1.a": None,
            },
        ),
    ],
)
def test_tensors_by_block(stack_path: str, model: Any, names: dict[str, Any], tmp_path: Path) -> None:
    """The first number behind the stack's path is the block; all the rest lies outside."""
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    found = tensors_by_block(tmp_path, model, SimpleNamespace(path=stack_path, num_blocks=2))
    blocks = {name: block for block, group in found.items() for name in group}
    assert blocks == {name: block for name, block in names.items() if block != "left out"}


@pytest.mark.parametrize("names", [["x.0.a", "x.1.a", "y.0.a", "y.1.a"], ["model.layers.0.a"], ["a"]])
def test_names_that_do_not_tell_the_blocks(names: list[str], tmp_path: Path) -> None:
    """Two lists that could be it, or none that is long enough: refused, not guessed."""
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointUnusable, match="do not tell which tensors belong to the 2 blocks"):
        tensors_by_block(tmp_path, None, SimpleNamespace(path="model.layers", num_blocks=2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content[:-1], "cut off: tensor"),
        (lambda content: content[:20], "no header"),
        (lambda content: b"", "no header"),
        (lambda content: b"not a header at all", "no header"),
        (lambda content: content.replace(b'"F32"', b'"F99"'), "has the type F99"),
        (lambda content: content.replace(b"[7,5]", b"[7,6]"), "a wrong length"),
        (lambda content: struct.pack("<Q", 1 << 60) + content[8:], "no header"),
    ],
)
def test_damaged_files_are_refused(change: Any, words: str, tmp_path: Path) -> None:
    """A file that was cut off or is something else: one sentence before anything of it is used."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(7, 5)}, path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointUnusable, match=words):
        stored_tensors(tmp_path)


def test_a_file_that_shrinks_under_the_reader_is_an_error_and_no_crash(tmp_path: Path) -> None:
    """Between header and data the file is cut; a mapped file would end the process here."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100_000)}, path)
    stored = stored_tensors(tmp_path)["a"]
    os.truncate(path, 5000)
    with pytest.raises(CheckpointUnusable, match="cut off: it ended after 5000 bytes"):
        stored.read()
    path.unlink()
    with pytest.raises(CheckpointUnusable, match="no such file"):
        stored.read()


def _touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"")


def test_weight_files_are_those_that_vllm_takes(tmp_path: Path) -> None:
    """All of them, or those of the index, or Mistral's own; a missing one and other formats are refused."""
    with pytest.raises(CheckpointUnusable, match="holds no safetensors files, no weights"):
        weight_files(tmp_path)
    _touch(tmp_path, "config.json", "pytorch_model.bin")
    with pytest.raises(CheckpointUnusable, match=r"only pytorch_model\.bin and the like, which is not supported"):
        weight_files(tmp_path)
    _touch(tmp_path, "model-2.safetensors", "model-1.safetensors", "other.safetensors")
    assert [file.name for file in weight_files(tmp_path)] == [
        "model-1.safetensors",
        "model-2.safetensors",
        "other.safetensors",
    ]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert [file.name for file in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointUnusable, match=r"model-2\.safetensors is missing in"):
        weight_files(tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointUnusable, match="is no index"):
        weight_files(tmp_path)
    _touch(tmp_path, "consolidated.safetensors")
    assert [file.name for file in weight_files(tmp_path)] == ["consolidated.safetensors"]
    with pytest.raises(CheckpointUnusable, match="no such file"):
        weight_files(tmp_path / "gone")


def _config(model: str | Path, **load: Any) -> Any:
    load = {"load_format": "auto", "download_dir": None, **load}
    model_config = SimpleNamespace(model=str(model), revision=None, model_weights="")
    return SimpleNamespace(model_config=model_config, load_config=SimpleNamespace(**load))


@pytest.mark.vllm
def test_the_folder_of_the_model(tmp_path: Path) -> None:
    """A folder is itself, a hub id is found in the local cache only, and the rest is refused."""
    pytest.importorskip("vllm")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert checkpoint_folder(_config(folder)) == folder
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointUnusable, match=r"^some/model is neither a folder nor in the local hub cache\.$"):
        checkpoint_folder(_config("some/model", download_dir=str(cache)))
    with pytest.raises(CheckpointUnusable, match="is neither a folder"):
        checkpoint_folder(_config(tmp_path / "gone"))
    snapshot = cache / "models--some--model" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    refs = cache / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("c" * 40)
    assert checkpoint_folder(_config("some/model", download_dir=str(cache))) == snapshot
    with pytest.raises(CheckpointUnusable, match="load format dummy"):
        checkpoint_folder(_config(folder, load_format="dummy"))
    _touch(folder, "model.safetensors", "consolidated.safetensors")
    with pytest.raises(CheckpointUnusable, match="holds the model twice"):
        checkpoint_folder(_config(folder, load_format="hf"))


@pytest.mark.parametrize(
    "text",
    [
        f"{ONE}  a.safetensors\n\n{TWO} *sub/b c.safetensors\r\n",
        json.dumps({"./a.safetensors": ONE, "sub/b c.safetensors": TWO}),
    ],
)
def test_manifest_in_both_forms(text: str) -> None:
    """Two columns with or without the star, or a JSON object; digests in small letters."""
    assert read_manifest(text) == {"a.safetensors": ONE, "sub/b c.safetensors": TWO.lower()}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Line 1 .* names no file"),
        ("{}", "Line 1 .* names no file"),
        (f"{ONE}  a\nnonsense\n", "Line 2 .* not of the form"),
        (f"{ONE[:-1]}  a\n", "Line 1 .* not of the form"),
        (f"{ONE}  a\n\n{TWO}  a\n", "Line 3 .* another digest"),
        ('{\n"a": 3}', "Line 2 .* gives a no SHA-256"),
        (f'{{\n"a": "{ONE}",\n"b": {{"c": "{ONE}"}}}}', "Line 3 .* gives b no SHA-256"),
        (f'{{"a": "{ONE}",\n"a": "{TWO}"}}', "Line 2 .* another digest"),
        ('{"a":\n', "Line 2 .* is no JSON"),
    ],
)
def test_wrong_manifests_name_the_line(text: str, words: str) -> None:
    """One sentence with the number of the line."""
    with pytest.raises(ValueError, match=rf"^{words}.*\.$"):
        read_manifest(text)


def test_manifest_against_digests() -> None:
    """Equal files have no problem; another digest, a file that is not named, and two of one name have one each."""
    manifest = {"a": ONE, "sub/b": TWO.lower(), "x/c": ONE, "y/c": TWO.lower(), "readme": ONE}
    assert check_manifest(manifest, {"a": ONE, "b": TWO}) == []
    problems = check_manifest(manifest, {"a": TWO, "b": TWO, "c": ONE, "d": ONE})
    assert problems == [
        f"a has the SHA-256 {TWO.lower()}, but the manifest says {ONE}.",
        "The manifest names several files c with different digests.",
        "d is not in the manifest.",
    ]
