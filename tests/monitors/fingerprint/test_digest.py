"""The digests: equal bytes agree, and no change inside one word is missed."""

import secrets

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flipwatch.monitors.fingerprint.digest import Digest, Gmac, Multilinear, digest_for

CHUNK = 4096
DIGESTS: list[Digest] = [Gmac(), Multilinear(CHUNK, torch.device("cpu"))]


def random_chunk(length: int = CHUNK) -> torch.Tensor:
    """Random bytes."""
    return torch.frombuffer(bytearray(secrets.token_bytes(length)), dtype=torch.uint8)


@pytest.mark.parametrize("digest", DIGESTS, ids=lambda digest: digest.name)
@given(word=st.integers(0, CHUNK // 8 - 1), change=st.integers(1, 2**64 - 1))
def test_a_change_inside_one_word_is_always_seen(digest: Digest, word: int, change: int) -> None:
    """Any other value of one word gives another digest, also one that only flips high or low bits."""
    data = random_chunk()
    before = digest.of([data])
    data.view(torch.int64)[word] ^= change - 2**64 if change >= 2**63 else change
    assert digest.of([data]) != before


@pytest.mark.parametrize("digest", DIGESTS, ids=lambda digest: digest.name)
@given(cut=st.integers(0, CHUNK))
def test_parts_count_as_one(digest: Digest, cut: int) -> None:
    """However the bytes are cut, also where no word begins."""
    data = random_chunk()
    assert digest.of([data[:cut], data[cut:]]) == digest.of([data])


@pytest.mark.parametrize("digest", DIGESTS, ids=lambda digest: digest.name)
def test_every_bit_of_every_word_is_seen(digest: Digest) -> None:
    """All single flips of one chunk, one after the other."""
    data = random_chunk(1024)
    before = digest.of([data])
    for byte in range(data.numel()):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert digest.of([data]) != before
            data[byte] ^= 1 << bit
    assert digest.of([data]) == before


@pytest.mark.parametrize("digest", DIGESTS, ids=lambda digest: digest.name)
@pytest.mark.parametrize("value", [2**31, -(2**63), 1, -1, 2**32])
def test_the_same_change_in_two_words_is_seen(digest: Digest, value: int) -> None:
    """Flips that a plain sum or XOR would cancel: the same bits in two words, at many places."""
    data = torch.zeros(CHUNK, dtype=torch.uint8)
    before = digest.of([data])
    words = data.view(torch.int64)
    for first in range(0, words.numel() - 1, 7):
        words[first], words[first + 1] = value, value
        assert digest.of([data]) != before
        words[first], words[first + 1] = value, -value if value != -(2**63) else value
        assert digest.of([data]) != before
        words[first], words[first + 1] = 0, 0


def test_multilinear_is_the_sum_it_says() -> None:
    """Against the formula in Python's own integers, for a chunk shorter than the key."""
    digest = Multilinear(CHUNK, torch.device("cpu"))
    data = random_chunk(256)
    a, b, c, d = ([value % 2**64 for value in row] for row in digest._matrices.tolist())
    low, high = data.view(torch.int32).view(-1, 2).T.tolist()
    low, high = [value % 2**32 for value in low], [value % 2**32 for value in high]
    sums = [
        sum(x * l + y * h for x, y, l, h in zip(*rows, low, high, strict=False)) % 2**64  # noqa: E741
        for rows in ((a, b), (c, d))
    ]
    assert digest.of([data]) == b"".join(value.to_bytes(8, "little") for value in sums)


def test_every_matrix_is_invertible() -> None:
    """The guarantee for one word rests on odd determinants."""
    a, b, c, d = Multilinear(CHUNK, torch.device("cpu"))._matrices
    assert ((a * d - b * c) & 1).all()


def test_keys_differ() -> None:
    """A digest of one process says nothing about another's."""
    data = random_chunk()
    assert Gmac().of([data]) != Gmac().of([data])
    assert Multilinear(CHUNK, torch.device("cpu")).of([data]) != Multilinear(CHUNK, torch.device("cpu")).of([data])


def test_the_device_chooses() -> None:
    """Host memory has instructions for GMAC; other devices add and multiply."""
    assert digest_for(torch.device("cpu"), CHUNK).name == "gmac"
    assert digest_for(torch.device("meta"), CHUNK).name == "multilinear"
