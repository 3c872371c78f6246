"""The `ModelView` of a model that vLLM serves: its live weights, block by block, beside the requests.

Everything in front of the blocks, between them and behind them is the model's own code.  One pass through the model
in which the blocks hand on their input records with which arguments the model calls each block; a block is then called
directly with those arguments and another stream.  Calls go through the wrapped `forward`, so the served gates apply;
where a view has a gate of its own, the block is called past its gate and blended here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .attention import private_context
from .forms import REHEARSAL_LENGTH, Form, arriving, intercepted, rehearsal_stream, rehearsal_tokens, run_model
from .gates import Gates, blend, ungated
from .stack import Signature, Stack, UnsupportedModel

# Rows of logits made at once: bounds their memory (rows x vocabulary x 4 bytes).
_LOGIT_ROWS = 512
_CALLS_KEPT = 2
# The names that all of vLLM's models have for the residual stream between pipeline stages.
_STREAM_MEMBERS = frozenset({"hidden_states", "residual"})
# Relative L2 distance of two ways to compute one thing: bf16 rounding gives 0.04, a wrong stream about 1.
SAME = 0.25


@dataclass(frozen=True)
class _Calls:
    """How the model calls each block for one batch of tokens."""

    tokens: Tensor
    copies: int
    first: Tensor  # (M*T, D) stream in front of block 0; on a later stage of a pipeline only its shape counts
    arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]]  # without the stream


class LiveView:
    """See `monitors.monitor.ModelView`.

    On one stage of a pipeline it is the view of this rank's part: only the first stage embeds, only the last one has
    losses, and blocks are those that are held here (`pipeline.PipelinedView` makes one of all parts).
    """

    def __init__(
        self,
        model: Any,
        stack: Stack,
        gates: Gates,
        forms: "dict[type, Form]",
        vllm_config: Any,
        device: torch.device,
        *,
        as_if: Mapping[int, float] | None = None,
    ) -> None:
        """Look at `model` through its `stack` of wrapped layers.

        `as_if` are alphas that this view has in place of the served ones; those of blocks elsewhere are not looked at.
        """
        self.num_blocks = stack.num_blocks
        self._model = model
        self._stack = stack
        self._gates = gates
        self._vllm_config = vllm_config
        self._device = device
        self._forms = {index: forms[type(layer)] for index, layer in stack.layers.items()}
        self._signatures = {index: Signature.of(layer) for index, layer in stack.layers.items()}
        self._kept: list[_Calls] = []
        self._as_if = {
            index: torch.tensor([alpha], device=device)
            for index, alpha in (as_if or {}).items()
            if index in stack.layers
        }

    @property
    def gates(self) -> list[float]:
        """Alpha per block, from the device; where this view has its own, that one."""
        alphas = self.alphas()
        return [alphas[index] for index in range(self.num_blocks)]

    def alphas(self) -> dict[int, float]:
        """The same of the blocks that are held here."""
        return self._gates.read() | {index: float(alpha) for index, alpha in self._as_if.items()}

    def embed(self, tokens: Tensor) -> Tensor:
        """See `ModelView.embed`."""
        tokens = tokens.to(self._device)
        return self._calls(tokens, 1).first.view(*tokens.shape, -1)

    def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        """See `ModelView.block`."""
        args, kwargs = self._call(index, hidden, tokens)
        layer, alpha = self._stack.layers[index], self._as_if.get(index)
        with private_context(self._vllm_config, tokens.shape[1], skip_compiled=True):
            out = layer(*args, **kwargs) if alpha is None else ungated(layer)(layer, *args, **kwargs)
        behind = self._forms[index].stream(out).reshape(hidden.shape)
        return behind if alpha is None else blend(alpha, hidden, behind)

    def nats(self, hidden: Tensor, tokens: Tensor, scored: Tensor) -> Tensor:
        """See `ModelView.nats`.  NaN on tensor-parallel ranks that do not receive the logits."""
        count, length = hidden.shape[:2]
        final = self.finish(hidden, tokens)
        repeat = count // tokens.shape[0]
        targets = tokens.repeat(repeat, 1)  # (M, T)
        wanted = scored.repeat(repeat, 1)
        rows, positions = wanted.nonzero(as_tuple=True)
        losses = torch.zeros(count, dtype=torch.float64, device=self._device)
        for start in range(0, rows.shape[0], _LOGIT_ROWS):
            row, position = rows[start : start + _LOGIT_ROWS], positions[start : start + _LOGIT_ROWS]
            logits = self._model.compute_logits(final[row * length + position - 1])
            if logits is None:
                return torch.full_like(losses, torch.nan)
            logits = logits.float()
            chosen = logits.gather(1, targets[row, position][:, None])[:, 0]
            losses.index_add_(0, row, (logits.logsumexp(-1) - chosen).double())
        return losses / wanted.sum(1)

    def check(self) -> None:
        """Walk a few tokens block by block and compare with the model's own forward pass, both over this rank's part.

        Raises:
            UnsupportedModel: the two differ by more than rounding, so that a scan would measure something else.
        """
        tokens = rehearsal_tokens(self._vllm_config, self._device)
        incoming = rehearsal_stream(self._model, self._vllm_config, self._device)
        if other := [] if incoming is None else sorted(set(incoming.tensors) - _STREAM_MEMBERS):
            raise UnsupportedModel(
                f"The pipeline stages of this model hand on {' and '.join(other)} beside the residual stream, "
                "so it cannot be scanned under pipeline parallelism."
            )
        first, last = min(self._stack.layers), max(self._stack.layers)
        ends: dict[int, Tensor] = {}

        def observe(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index == first > 0:
                hidden = self._signatures[index].get_hidden(args, kwargs)
                residual = self._signatures[index].get_residual(args, kwargs)
                alone = residual is None or self._forms[index] is Form.PLAIN
                ends[first] = (hidden if alone else self._forms[index].stream((hidden, residual))).clone()
            out = type(layer).forward(layer, *args, **kwargs)
            if index == last:
                ends[last + 1] = self._forms[index].stream(out).clone()
            return out

        with (
            private_context(self._vllm_config, REHEARSAL_LENGTH, skip_compiled=True),
            intercepted(self._stack, observe),
        ):
            final = run_model(self._model, tokens, incoming)
        ends_here = last == self.num_blocks - 1
        whole = (final if ends_here else ends[last + 1]).float()
        if not whole.isfinite().all():
            return  # nothing to compare with; a scan will name the block
        hidden = self.embed(tokens) if first == 0 else ends[first].view(*tokens.shape, -1)
        for index in range(first, last + 1):
            hidden = self.block(index, hidden, tokens)
        walked = (self.finish(hidden, tokens) if ends_here else hidden.view(whole.shape)).float()
        distance = relative_distance(walked, whole)
        # Not "distance > SAME": a walk that ends in NaN must not pass.
        if not distance <= SAME:
            raise UnsupportedModel(
                f"Walking {self._stack.layer_class} block by block does not reproduce the model's own forward pass "
                f"(relative distance {distance:.3f}), so it cannot be scanned."
            )

    def finish(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """(M, T, D) behind the last block -> (M*T, D) behind the final norm, by the model's own code."""
        last = self.num_blocks - 1

        def hand_on(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            incoming = self._signatures[index].get_hidden(args, kwargs)
            stream = hidden.reshape(incoming.shape).clone() if index == last else incoming
            return self._forms[index].output(stream)

        repeat = hidden.shape[0] // tokens.shape[0]
        with (
            private_context(self._vllm_config, tokens.shape[1], skip_compiled=True),
            intercepted(self._stack, hand_on),
        ):
            final: Tensor = self._run(tokens.repeat(repeat, 1))
            return final

    def _run(self, tokens: Tensor) -> Any:
        return run_model(self._model, tokens, arriving(self._model, tokens.numel(), self._vllm_config, self._device))

    def _call(self, index: int, hidden: Tensor, tokens: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As the model calls the block, with this stream."""
        calls = self._calls(tokens, hidden.shape[0] // tokens.shape[0])
        args, kwargs = calls.arguments[index]
        signature = self._signatures[index]
        # The layer may overwrite its inputs: it gets its own.
        stream = hidden.reshape(calls.first.shape).clone()
        return signature.replace(args, kwargs, stream, torch.zeros_like(stream))

    def _calls(self, tokens: Tensor, copies: int) -> _Calls:
        for calls in self._kept:
            if calls.tokens is tokens and calls.copies == copies:
                return calls
        first: list[Tensor] = []
        arguments = {}

        def record(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            stream = self._signatures[index].get_hidden(args, kwargs)
            if not first:
                first.append(stream.clone())
            # Kept, the streams of all blocks would take as much as those of a whole pass.
            arguments[index] = self._signatures[index].replace(args, kwargs, None, None)
            return self._forms[index].output(stream)

        with (
            private_context(self._vllm_config, tokens.shape[1], skip_compiled=True),
            intercepted(self._stack, record),
        ):
            self._run(tokens.repeat(copies, 1))
        calls = _Calls(tokens, copies, first[0], arguments)
        self._kept = [calls, *self._kept[: _CALLS_KEPT - 1]]
        return calls


def relative_distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, L2; NaN where either is not finite."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def check_scannable(vllm_config: Any) -> None:
    """Settings under which a measurement beside the requests would be wrong.

    Raises:
        UnsupportedModel: names the setting.
    """
    if vllm_config.lora_config is not None:
        raise UnsupportedModel("Scans of a server with LoRA adapters are not supported yet; gates are.")
    if vllm_config.model_config.uses_mrope:
        raise UnsupportedModel(
            "Scans of models with multi-axis rotary positions (M-RoPE) are not supported yet; gates are."
        )
