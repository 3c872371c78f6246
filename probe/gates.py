"""Per-block gates inside the served model.

A gate is one number per block, alpha, kept on the device and read inside the graph:

    h_out = h_in + alpha * (block(h_in) - h_in)

The blend acts on every member of the layer's output on its own.  Where a layer hands on (hidden, residual), the
stream is their sum, so blending both members blends the sum, whatever the next layer does with them.  It selects
rather than multiplies: alpha 1 hands on the layer's own tensors bit for bit, alpha 0 the layer's inputs bit for bit,
so that NaN and Inf of a skipped block cannot leak.

The inputs are copied first: vLLM's fused add + norm overwrites them in place (silently wrong at alpha 0 otherwise, and
its compiled build refuses a second use of such an input).  vLLM's compile passes drop a plain clone where they believe
that nothing is written to the original.  They do not see a layer that takes its hidden state as its residual too, as
the first layer does: the copy would then share its memory with a tensor that is overwritten.  There the copy is an
operator that no pass looks into.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .forms import Form
from .stack import Signature, Stack

GATE = "flipwatch_gate"
ALPHA = "flipwatch_alpha"
_OURS = "__flipwatch_gate__"
Forward = Callable[..., Any]


def blend(gate: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """`before` at gate 0, `after` at gate 1, linear between; all of one shape, computed in fp32."""
    mixed = (before.float() + gate * (after.float() - before.float())).to(after.dtype)
    return torch.where(gate == 1, after, torch.where(gate == 0, before, mixed))


@torch.library.custom_op("flipwatch::snapshot", mutates_args=())
def snapshot(x: Tensor) -> Tensor:
    """A copy that compile passes keep."""
    return x.clone()


@snapshot.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _gated(layer: nn.Module, original: Forward, signature: Signature, form: Form, args: Any, kwargs: Any) -> Any:
    gate = getattr(layer, GATE)
    hidden = signature.get_hidden(args, kwargs)
    residual = signature.get_residual(args, kwargs)
    # Where the layer gets its residual as an argument and adds it, the plain clone is safe, and mostly costs nothing.
    copy = torch.clone if residual is not None and form is Form.PAIR else snapshot
    hidden_before = copy(hidden)
    residual_before = copy(residual) if residual is not None else None
    out = original(layer, *args, **kwargs)
    if not isinstance(out, tuple):
        return blend(gate, hidden_before, out)
    hidden_after, residual_after = out
    if residual_after is None:
        return blend(gate, hidden_before, hidden_after), None
    if residual_before is None:
        # The first layer: the whole stream comes in as the hidden state.
        residual_before = torch.zeros_like(residual_after)
    return blend(gate, hidden_before, hidden_after), blend(gate, residual_before, residual_after)


def _wrap(cls: type[nn.Module], signature: Signature, form: Form, *, eager: bool) -> None:
    original: Forward = cls.forward

    if eager:

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Nothing is captured or compiled here, so a healthy server pays one attribute read.
            if getattr(self, ALPHA, 1.0) == 1.0:
                return original(self, *args, **kwargs)
            return _gated(self, original, signature, form, args, kwargs)

    else:

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(self, GATE):
                return original(self, *args, **kwargs)
            return _gated(self, original, signature, form, args, kwargs)

    functools.update_wrapper(forward, original)
    setattr(forward, _OURS, True)
    cls.forward = forward


def ungated(layer: nn.Module) -> Forward:
    """The layer class's own `forward`, as it was before it got a gate; takes the layer first."""
    forward: Forward = type(layer).forward
    original: Forward = getattr(forward, "__wrapped__", forward)
    return original if hasattr(forward, _OURS) else forward


class Gates:
    """The alphas of the blocks that this rank holds."""

    def __init__(self, stack: Stack, forms: Mapping[type, Form], device: torch.device, *, eager: bool) -> None:
        """Wrap the layer classes and give each layer its gate, open.

        Args:
            stack: The blocks of this rank.
            forms: How each layer class hands on the stream.
            device: Where the model lives.
            eager: vLLM neither compiles nor captures this model, so Python may decide call by call.
        """
        self._layers = stack.layers
        for cls in {type(layer) for layer in stack.layers.values()}:
            if not hasattr(cls.forward, _OURS):
                layer = next(layer for layer in stack.layers.values() if type(layer) is cls)
                _wrap(cls, Signature.of(layer), forms[cls], eager=eager)
        for layer in stack.layers.values():
            # A buffer: it keeps its address (CUDA graphs read it) and survives vLLM's sleep and weight reload.
            layer.register_buffer(GATE, torch.ones(1, dtype=torch.float32, device=device), persistent=False)
            setattr(layer, ALPHA, 1.0)

    def read(self) -> dict[int, float]:
        """Alpha per block, from the device."""
        # One transfer for all: each would wait for the device.
        alphas: list[float] = torch.cat([getattr(layer, GATE) for layer in self._layers.values()]).tolist()
        return dict(zip(self._layers, alphas, strict=True))

    def write(self, alphas: Mapping[int, float]) -> None:
        """Set alphas in place; blocks that this rank does not hold are left to the ranks that do."""
        for index, alpha in alphas.items():
            if (layer := self._layers.get(index)) is not None:
                getattr(layer, GATE).fill_(alpha)
                setattr(layer, ALPHA, float(alpha))

    @contextmanager
    def temporarily(self, alphas: Mapping[int, float]) -> Iterator[None]:
        """Other alphas inside the `with`; what stood before stands again after it."""
        before = self.read()
        self.write(alphas)
        try:
            yield
        finally:
            self.write(before)
