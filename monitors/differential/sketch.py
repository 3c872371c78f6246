"""Seeded projections of activations: small enough to keep and to send, and distances survive in them.

An activation row `h` of width W becomes `h @ S / sqrt(K)` with S a (W, K) matrix of random signs that the seed fixes on
every machine.  The projection is linear, so the difference of two sketches is the sketch of the difference, and its
squared length is that of the difference in expectation, with a relative standard deviation of sqrt(2 / K)
(Achlioptas, "Database-friendly random projections", 2003, theorem 1.1, for signs).
"""

import base64
import math
import random
from typing import TYPE_CHECKING

from .facts import Sketch

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# Columns of an activation that are projected at once.
_COLUMNS = 512


class Sketcher:
    """Makes the sketches of one measurement."""

    def __init__(self, seed: int, size: int) -> None:
        """`size` is K."""
        self._seed = seed
        self._size = size
        self._signs: dict[tuple[int, torch.device], Tensor] = {}

    def of(self, activation: "Tensor") -> Sketch:
        """(R, W) -> R rows, in float64: a change of one value by its last bit must not drown in the sum."""
        return as_sketch(self._project(activation), activation.shape[-1])

    def rows_of_sequences(self, hidden: "Tensor", lengths: list[int]) -> "Tensor":
        """(N, T, D) -> (N, K): the tokens of a sequence, each of length 1, summed with random signs.

        Some tokens are longer than all others together by far; without the scaling only they would count.
        """
        import torch

        signs = _signs(f"{self._seed}/tokens", hidden.shape[1]).to(hidden.device)
        at = torch.arange(hidden.shape[1], device=hidden.device)[None]
        ends = torch.tensor(lengths, device=hidden.device)[:, None]
        scale = hidden.double().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        # Chosen, not multiplied by 0: a padded place may hold NaN.
        weights = torch.where(at < ends, signs / scale, 0.0)
        values = torch.where((at < ends)[..., None], hidden.double(), 0.0)
        return self._project(torch.einsum("nt,ntd->nd", weights, values))

    def _project(self, activation: "Tensor") -> "Tensor":
        """(R, W) -> (R, K), some columns at a time: in float64 the signs take eight times what they are kept in."""
        import torch

        width = activation.shape[-1]
        signs = self._matrix(width, activation.device)
        rows = torch.zeros(activation.shape[0], self._size, dtype=torch.float64, device=activation.device)
        for start in range(0, width, _COLUMNS):
            some = slice(start, start + _COLUMNS)
            rows += activation[:, some].double() @ signs[some].double()
        return rows / math.sqrt(self._size)

    def _matrix(self, width: int, device: "torch.device") -> "Tensor":
        """(width, K) int8 of +1 and -1."""
        if (width, device) not in self._signs:
            signs = _signs(f"{self._seed}/{width}", width * self._size)
            self._signs[width, device] = signs.view(width, self._size).to(device)
        return self._signs[width, device]


def as_sketch(rows: "Tensor", width: int) -> Sketch:
    """(R, K) float64 as it travels."""
    return Sketch(width=width, rows=base64.b64encode(rows.cpu().numpy().astype("<f8").tobytes()).decode())


def _signs(seed: str, count: int) -> "Tensor":
    """(count) int8 of +1 and -1.  By Python's generator: the same on every machine and in every version of torch."""
    import torch

    drawn = bytearray(random.Random(seed).randbytes(-(-count // 8)))  # noqa: S311 - no secret
    octets = torch.frombuffer(drawn, dtype=torch.uint8)
    ones = (octets[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return ones.flatten()[:count].to(torch.int8) * 2 - 1
