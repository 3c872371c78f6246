"""Causal attention for a measurement beside the served requests.

Eager and compiled code both reach attention through vLLM's opaque ops, which look the layer up by name in the
ForwardContext.  A private ForwardContext whose layers are the stand-ins below therefore replaces attention with plain
causal attention over packed sequences: no KV cache is read or written, no request state is touched, and no module is
patched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .stack import UnsupportedModel


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """(B, T, H, D) queries, (B, T, G, D) keys, (B, T, G, V) values, G divides H -> (B, T, H, V)."""
    repeat = query.shape[2] // key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # (B, H or G, T, D)
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    if not window and not soft_cap and sinks is None:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    scores = (q.float() @ k.float().transpose(2, 3)) * scale  # (B, H, T, T)
    if soft_cap:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    position = torch.arange(scores.shape[-1], device=scores.device)
    hidden = position[None, :] > position[:, None]
    if window:
        hidden |= position[None, :] <= position[:, None] - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return (weights @ v.float()).to(v.dtype).transpose(1, 2)


class CausalStandIn:
    """Answers for one attention layer (or MLA layer) while a measurement runs."""

    # vLLM 0.32's MLA op asks for it.
    hisparse_cache = None

    def __init__(self, layer: Any, length: int) -> None:
        """Stand in for `layer` over packed sequences of `length` tokens each."""
        self._layer = layer
        self._length = length
        self.kv_cache = torch.empty(0)
        self.impl = self
        impl = layer.impl
        self._scale = float(impl.scale)
        self._window = _window(layer)
        self._soft_cap = getattr(impl, "logits_soft_cap", None) or None
        self._sinks = getattr(impl, "sinks", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def prepare_kv_cache_update(self, *_: Any) -> None:
        """Nothing is written."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        def packed(x: Tensor) -> Tensor:
            return x.reshape(-1, self._length, *x.shape[1:])

        out = causal_attention(
            packed(query), packed(key), packed(value), scale, self._window, self._soft_cap, self._sinks
        )
        return out.flatten(0, 1)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **_: Any,
    ) -> Tensor:
        """`impl.forward` of a plain attention layer: (B*T, H, D) -> `output`, in place."""
        return output.copy_(self._attend(query, key, value, self._scale).reshape(output.shape))

    def forward_impl(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **_: Any,
    ) -> Tensor:
        """`forward_impl` of an MLA layer: expand keys and values through the live kv_b_proj."""
        mla = self._layer
        expanded = mla.kv_b_proj(kv_c_normed)[0].view(-1, mla.num_heads, mla.qk_nope_head_dim + mla.v_head_dim)
        k_nope, value = expanded.split([mla.qk_nope_head_dim, mla.v_head_dim], -1)
        rope = k_pe.view(-1, 1, mla.qk_rope_head_dim).expand(-1, mla.num_heads, -1)
        key = torch.cat([k_nope, rope], -1)
        query = q.view(-1, mla.num_heads, mla.qk_head_dim)
        return output.copy_(self._attend(query, key, value, float(mla.scale)).reshape(output.shape))


def _window(layer: Any) -> int | None:
    window = getattr(layer, "sliding_window", None)
    return int(window) if window and window > 0 else None


def check_supported(vllm_config: Any) -> None:
    """Every stateful layer must be causal self-attention that a stand-in can answer for.

    Raises:
        UnsupportedModel: names the layer that is not.
    """
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        kind = type(layer).__name__
        if not (hasattr(layer, "impl") and hasattr(layer, "kv_cache")):
            if hasattr(layer, "kv_cache") or hasattr(layer, "mamba_type"):
                raise UnsupportedModel(
                    f"Layer {name} ({kind}) keeps a state that is not attention, so it cannot be scanned."
                )
            continue
        if getattr(layer.impl, "alibi_slopes", None) is not None:
            raise UnsupportedModel(f"Layer {name} ({kind}) uses ALiBi, which the scan's attention does not offer.")
        attention = getattr(layer, "attn_type", "decoder")
        if getattr(attention, "value", attention) != "decoder":
            raise UnsupportedModel(f"Layer {name} ({kind}) is {attention} attention, not causal self-attention.")


@contextmanager
def private_context(vllm_config: Any, length: int, *, skip_compiled: bool) -> Iterator[None]:
    """Run the live modules over packed sequences of `length` tokens, apart from everything that serves."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import ForwardContext, override_forward_context

    compilation = vllm_config.compilation_config
    layers = {
        name: CausalStandIn(layer, length) if hasattr(layer, "impl") and hasattr(layer, "kv_cache") else layer
        for name, layer in compilation.static_forward_context.items()
    }
    context = ForwardContext(
        no_compile_layers=layers,
        attn_metadata=None,  # as in vLLM's own profiling run: nothing of a request
        slot_mapping={},
        skip_compiled=skip_compiled,
        all_moe_layers=compilation.static_all_moe_layers if compilation.fast_moe_cold_start else None,
    )
    with set_current_vllm_config(vllm_config), override_forward_context(context):
        yield
