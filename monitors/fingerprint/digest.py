"""Keyed digests of a chunk, computed on the device that holds it.

A digest of 16 bytes is taken with a random key that never leaves the process.  Two chunks of one length that differ
inside a single 64-bit word never have the same digest; two that differ otherwise have it with a probability below
2^-60 over the choice of the key.  Each class says why.
"""

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Digest(Protocol):
    """A keyed digest."""

    name: ClassVar[str]

    def of(self, parts: "Sequence[Tensor]") -> bytes:
        """Some (n) uint8, a multiple of 16 in sum, which count as one behind the other -> 16 bytes.

        Waits for the device.
        """
        ...


class Gmac:
    """GMAC (NIST SP 800-38D, section 6.4), for bytes in host memory: the processor has instructions for it.

    With a fixed key and nonce the digests of two chunks of one length differ by the sum over their 128-bit blocks of
    `d_i * H^(n - i + 2)` in GF(2^128), where `d_i` is the XOR of the two blocks and H the hash key.  A change inside
    one word lies in one block: a single product of two elements that are not zero, in a field, so never zero.  (H = 0
    is refused below.)  A wider change is a polynomial in H of degree n + 1 at most, which has at most as many
    roots: for a chunk of 1 MiB it is missed with a probability of at most 65,537 / 2^128 < 2^-111.
    """

    name: ClassVar[str] = "gmac"

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        while True:
            # The nonce repeats on purpose: nothing is encrypted or sent, and equal bytes must have equal digests.
            mode = modes.GCM(secrets.token_bytes(12))
            self._cipher = Cipher(algorithms.AES(secrets.token_bytes(16)), mode)
            if self._tag([bytes(16)]) != self._tag([bytes(15) + b"\1"]):
                return

    def of(self, parts: "Sequence[Tensor]") -> bytes:
        """See `Digest.of`.  Copies nothing."""
        return self._tag([part.numpy().data for part in parts])

    def _tag(self, parts: "Sequence[bytes | memoryview]") -> bytes:
        mac = self._cipher.encryptor()
        for part in parts:
            mac.authenticate_additional_data(part)
        mac.finalize()
        return mac.tag


class Multilinear:
    """A multilinear hash modulo 2^64, in tensor operations, for any device.

    Each 64-bit word is split into its halves `(l_i, h_i)`, numbers below 2^32, and a digest is the sum over the words
    of `M_i (l_i, h_i)` modulo 2^64, with a random 2 x 2 matrix `M_i` of odd determinant for each word.

    An odd determinant makes `M_i` invertible modulo 2^64.  So a change inside one word, whose `(dl, dh)` is not zero
    modulo 2^64, always changes the sum.  In a wider change take any word that changed: `(dl, dh) = 2^v u`, v <= 31,
    with u odd in one part.  `M_i` is uniform among the invertible matrices (its lowest bits among the 6 that are
    invertible modulo 2, all other bits free), so `M_i u` is uniform among the vectors with an odd part, and `2^v
    M_i u` takes each of its (3/4) 4^(64 - v) values alike: the one that cancels all other words is met with a
    probability of at most (4/3) 4^-33 < 2^-65.
    """

    name: ClassVar[str] = "multilinear"

    # Lowest bits of the rows ((a, b), (c, d)) of the matrices that are invertible modulo 2.
    _INVERTIBLE = ((1, 0, 0, 1), (1, 0, 1, 1), (1, 1, 0, 1), (0, 1, 1, 0), (0, 1, 1, 1), (1, 1, 1, 0))

    def __init__(self, chunk_bytes: int, device: "torch.device") -> None:
        import torch

        words = chunk_bytes // 8
        random = torch.frombuffer(bytearray(secrets.token_bytes(32 * words)), dtype=torch.int64).view(4, words)
        table = torch.tensor(self._INVERTIBLE, dtype=torch.int64).T  # (4, 6)
        lowest = table[:, torch.tensor([secrets.randbelow(6) for _ in range(words)])]  # (4, words)
        self._matrices = ((random & -2) | lowest).to(device)

    def of(self, parts: "Sequence[Tensor]") -> bytes:
        """See `Digest.of`."""
        import torch

        data = parts[0] if len(parts) == 1 and parts[0].storage_offset() % 8 == 0 else torch.cat(list(parts))
        words = data.view(torch.int64)
        low, high = words & 0xFFFFFFFF, (words >> 32) & 0xFFFFFFFF
        a, b, c, d = self._matrices[:, : words.numel()]
        sums = torch.stack([(low * a + high * b).sum(), (low * c + high * d).sum()])
        return sums.cpu().numpy().tobytes()


def digest_for(device: "torch.device", chunk_bytes: int) -> Digest:
    """A fresh key, of the digest that suits the device."""
    return Gmac() if device.type == "cpu" else Multilinear(chunk_bytes, device)
