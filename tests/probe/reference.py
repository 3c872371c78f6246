"""The same model in Hugging Face transformers, fp32, with a layer removed or scaled: what a gate must equal."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class Reference:
    """Teacher-forced log-probabilities of given tokens."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        lists = (module for module in self._model.modules() if isinstance(module, torch.nn.ModuleList))
        self._layers: Any = max(lists, key=len)

    def parameter(self, name: str) -> torch.Tensor:
        """A weight by its full name, as it lies in memory."""
        found: torch.Tensor = self._model.get_parameter(name).data
        return found

    @contextmanager
    def alpha(self, block: int | None, alpha: float) -> Iterator[None]:
        """Scale what one layer adds to its input."""
        if block is None:
            yield
            return

        def hook(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
            before = args[0] if args else kwargs["hidden_states"]
            after = out[0] if isinstance(out, tuple) else out
            # Alpha 0 selects: the layer may be full of NaN.
            mixed = before if alpha == 0 else before + alpha * (after - before)
            return (mixed, *out[1:]) if isinstance(out, tuple) else mixed

        handle = self._layers[block].register_forward_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @torch.no_grad()
    def logprobs(self, tokens: list[int], block: int | None = None, alpha: float = 1.0) -> list[float]:
        """Log-probability of each token but the first."""
        with self.alpha(block, alpha):
            logits = self._model(torch.tensor([tokens]), use_cache=False).logits.float()
        chosen = torch.log_softmax(logits, -1)[0, :-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        return [float(value) for value in chosen]


def largest_difference(a: list[float], b: list[float]) -> float:
    """max |a - b|; lists of one length."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
