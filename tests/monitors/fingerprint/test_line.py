"""The line of bytes: every byte lies on it once, and is read and written where it lives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flipwatch.monitors.fingerprint.line import Line, Source, memory_of

SIZES = st.lists(st.integers(1, 3000), min_size=1, max_size=12)


def sources(*tensors: torch.Tensor) -> list[Source]:
    """Tensors with names."""
    return [Source(f"tensor{at}", None, tensor) for at, tensor in enumerate(tensors)]


@given(SIZES, st.sampled_from([16, 64, 1024, 4096]))
def test_each_byte_lies_on_the_line_once(sizes: list[int], chunk_bytes: int) -> None:
    """All chunks together hold every tensor's bytes in order, gaps as zeros."""
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    line = Line(sources(*tensors), chunk_bytes)
    read = b"".join(bytes(line.read(chunk).numpy()) for chunk in range(line.num_chunks))
    wanted = b"".join(bytes(tensor.numpy()).ljust(-(-tensor.numel() // 16) * 16, b"\0") for tensor in tensors)
    assert read == wanted
    assert line.covered_bytes == sum(sizes)
    assert sum(line.length(chunk) for chunk in range(line.num_chunks)) == len(wanted)


@given(SIZES, st.sampled_from([16, 64, 1024]), st.data())
def test_a_written_chunk_reaches_its_tensors_and_no_other(
    sizes: list[int], chunk_bytes: int, data: st.DataObject
) -> None:
    """Writing a chunk changes its own bytes alone."""
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    line = Line(sources(*tensors), chunk_bytes)
    chunk = data.draw(st.integers(0, line.num_chunks - 1))
    line.write(chunk, torch.full((line.length(chunk),), 7, dtype=torch.uint8))
    for at, stretch in enumerate(line.stretches):
        begin, end = chunk * chunk_bytes, (chunk + 1) * chunk_bytes
        for byte, value in enumerate(tensors[at].tolist()):
            assert value == (7 if begin <= stretch.start + byte < end else 0)


def test_shared_memory_lies_there_once() -> None:
    """A tied tensor and a view add nothing; a view that reaches further adds what is new."""
    whole = torch.arange(100, dtype=torch.int16)
    line = Line(sources(whole[:60], whole[10:20], whole[40:], whole), 4096)
    assert [(s.source.name, s.offset, s.memory.numel()) for s in line.stretches] == [
        ("tensor0", 0, 120),
        ("tensor2", 40, 80),
    ]
    assert line.covered_bytes == whole.numel() * 2


def test_a_transposed_tensor_lies_there_as_in_memory() -> None:
    """The line follows addresses, not indices."""
    plain = torch.randn(6, 5)
    assert torch.equal(memory_of(plain.t()), plain.view(torch.uint8).flatten())


def test_a_scalar_lies_there() -> None:
    """A tensor without dimensions has bytes too."""
    assert memory_of(torch.tensor(1.5)).tolist() == [0, 0, 192, 63]


@pytest.mark.parametrize("chunk_bytes", [0, 8, 100])
def test_odd_chunk_lengths_are_refused(chunk_bytes: int) -> None:
    """A chunk is made of whole blocks of the digest."""
    with pytest.raises(ValueError, match="multiple of 16"):
        Line(sources(torch.zeros(4)), chunk_bytes)
