"""Says which weights a process has loaded: a digest of a sample of them, taken once before serving."""

import hashlib

import torch
from torch import Tensor, nn

from ..monitors.faults.bits import read

SAMPLES = 256
"""Values of one parameter that count, at most."""


@torch.inference_mode()
def digest_weights(model: nn.Module) -> str:
    """Hex digest of the parameters as they lie in memory: of each the name, shape, dtype and up to `SAMPLES` values.

    It is a sample: it tells checkpoints apart, it does not prove that no value differs.  The values are taken at even
    strides and go in as raw bytes.  A parameter without values (packed by the engine) counts by its name alone.
    One copy from the device for each parameter.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}\n".encode())
        if parameter.numel():
            digest.update(_sample(parameter).numpy().tobytes())
    return digest.hexdigest()[:32]


def combine(digests: list[str]) -> str:
    """One digest, or id, of those of the ranks, in the order of the ranks."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:32]


def _sample(parameter: Tensor) -> Tensor:
    """(n) integers: the bits of every `stride`-th value, on the CPU."""
    # Odd: a stride that is a multiple of the row length would see the first column only.
    stride = -(-parameter.numel() // SAMPLES) | 1
    where = torch.arange(0, parameter.numel(), stride, device=parameter.device)
    return read(parameter, where).cpu()
