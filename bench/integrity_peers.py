"""What others offer against changed weights, on the same live weights.

`Sha256` is vLLM's own: the worker's method behind its developer route `/weight_checker`.  `LmFix` is the detection half
of LM-Fix (arXiv 2511.02866), rebuilt from its description, since the published code does not run: a forward pass over
the ids 1 to L, the head's output in float32, SHA-256.  Its pass runs beside the requests, with plain causal attention
and no KV cache, which is the most favourable case for it: always the same batch.
"""

import hashlib

import torch
from integrity_engine import Engine

from flipwatch.probe.attention import private_context
from flipwatch.probe.forms import run_model

LENGTHS = (1, 40, 200, 1000)


class Sha256:
    """A SHA-256 of each parameter."""

    name = "vLLM's SHA-256"

    def __init__(self, engine: Engine, most: int) -> None:
        """Takes the reference."""
        self._engine = engine
        self.most = most
        self._reference = self.check()
        self.reference_bytes = 32 * len(self._reference)

    def check(self) -> dict[str, str]:
        """All digests of now."""
        digests: dict[str, str] = self._engine.worker.compute_weight_checksums()
        return digests

    def differs(self) -> bool:
        """See `Peer.differs`."""
        return self.check() != self._reference


class LmFix:
    """A hash of the logits of one fixed input."""

    reference_bytes = 32

    def __init__(self, engine: Engine, length: int, most: int) -> None:
        """Takes the reference."""
        self.name = f"LM-Fix, L = {length}"
        self._armed = engine.armed
        self._tokens = torch.arange(1, length + 1)[None]
        self.most = most
        self._reference = self.check()

    def check(self) -> bytes:
        """The hash of now."""
        armed = self._armed
        with private_context(armed.vllm_config, self._tokens.shape[1], skip_compiled=True):
            logits = armed.model.compute_logits(run_model(armed.model, self._tokens))  # type: ignore[operator]
        return hashlib.sha256(logits.float().contiguous().numpy().data).digest()

    def differs(self) -> bool:
        """See `Peer.differs`."""
        return self.check() != self._reference
