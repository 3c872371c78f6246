"""How each layer hands on the residual stream, learned by calling it.

vLLM's layers return the stream in one of these forms (vLLM 0.32: 113 layer classes):

    PLAIN      hidden; it is the stream
    PAIR       (hidden, residual); the stream is their sum, added by the next layer's norm
    OVERWRITE  (hidden, residual); the residual is overwritten by the next layer, the stream is hidden alone
    SINGLE     (hidden, None); hidden is the stream

Which one cannot be read off the signature, so each layer class is tried once on a few tokens when the model has just
been loaded.  Anything else is refused, and vLLM then serves as if Flipwatch were not there.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from .attention import private_context
from .stack import Signature, Stack, UnsupportedModel

REHEARSAL_LENGTH = 8

# (block index, layer, positional arguments, keyword arguments) -> what the layer returns instead
Hook = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class Form(Enum):
    """How a layer hands on the stream."""

    PLAIN = auto()
    PAIR = auto()
    OVERWRITE = auto()
    SINGLE = auto()

    def stream(self, out: Any) -> Tensor:
        """The residual stream in a layer's output."""
        hidden: Tensor = out if self is Form.PLAIN else out[0]
        if self is Form.PAIR:
            # As the fused add + norm of the next layer does: sum in fp32, rounded to the model's dtype.
            residual: Tensor = out[1]
            return (hidden.float() + residual.float()).to(hidden.dtype)
        return hidden

    def output(self, stream: Tensor) -> Any:
        """A layer's output that carries `stream`."""
        if self is Form.PLAIN:
            return stream
        if self is Form.SINGLE:
            return stream, None
        return stream, torch.zeros_like(stream)


@contextmanager
def intercepted(stack: Stack, hook: Hook) -> Iterator[None]:
    """Inside the `with`, `hook` answers for each layer.  Acts only where the model runs uncompiled."""

    def forward_of(index: int, layer: nn.Module) -> Callable[..., Any]:
        return lambda *args, **kwargs: hook(index, layer, args, kwargs)

    for index, layer in stack.layers.items():
        layer.forward = forward_of(index, layer)
    try:
        yield
    finally:
        for layer in stack.layers.values():
            del layer.forward


def run_model(model: Any, tokens: Tensor, incoming: Any = None) -> Any:
    """(M, T) token ids -> (M*T, D) hidden state behind the final norm, in the caller's forward context.

    On a later stage of a pipeline `incoming` is what the stage before hands on, vLLM's `IntermediateTensors`; all but
    the last stage return such.
    """
    copies, length = tokens.shape
    ids = tokens.reshape(-1).to(torch.int32)
    positions = torch.arange(length, dtype=torch.int64, device=tokens.device).repeat(copies)
    out = model(ids, positions) if incoming is None else model(ids, positions, intermediate_tensors=incoming)
    return out[0] if isinstance(out, tuple) else out


def arriving(model: Any, rows: int, vllm_config: Any, device: torch.device) -> Any:
    """What this rank's part of the model takes from the stage before it, all zero; None where it is the first."""
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return None
    from vllm.distributed.parallel_state import get_pp_group

    if get_pp_group().is_first_rank:
        return None
    return model.make_empty_intermediate_tensors(rows, vllm_config.model_config.dtype, device)


def rehearsal_tokens(vllm_config: Any, device: torch.device) -> Tensor:
    """(1, T) ordinary token ids, from the middle of the vocabulary.

    The first ids are special tokens, on which some models' activations are so large that bf16 rounding alone moves the
    result by a quarter (SmolLM2).
    """
    first = vllm_config.model_config.get_vocab_size() // 2
    return torch.arange(first, first + REHEARSAL_LENGTH, device=device)[None]


def rehearsal_stream(model: Any, vllm_config: Any, device: torch.device) -> Any:
    """As `arriving`, with values.

    Made up: while models are loaded no rank waits for another, which may have no Flipwatch or refuse its part.
    """
    made = arriving(model, REHEARSAL_LENGTH, vllm_config, device)
    if made is not None:
        values = torch.Generator(device).manual_seed(0)
        for tensor in made.tensors.values():
            tensor.normal_(generator=values)
    return made


def _look(name: str, out: Any) -> tuple[Tensor, Tensor | None]:
    """Split an output into hidden and residual, or refuse it."""
    if isinstance(out, Tensor):
        return out, None
    if isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], Tensor) and isinstance(out[1], Tensor | None):
        return out[0], out[1]
    shape = f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__
    raise UnsupportedModel(f"Layer class {name} returns {shape}, a form of the residual stream that is not supported.")


def learn_forms(model: Any, stack: Stack, vllm_config: Any, device: torch.device) -> Mapping[type, Form]:
    """Run a few tokens through the freshly loaded model and see what each layer class hands on.

    Raises:
        UnsupportedModel: a layer class returns something else, or changes the shape of the stream.
    """
    forms: dict[type, Form] = {}
    signatures = {type(layer): Signature.of(layer) for layer in stack.layers.values()}

    def observe(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cls = type(layer)
        signature = signatures[cls]
        hidden = signature.get_hidden(args, kwargs).clone()
        residual = signature.get_residual(args, kwargs)
        kept = residual.clone() if residual is not None else None

        def call(h: Tensor, r: Tensor | None) -> Any:
            # Layers write into their inputs, so each call gets its own.
            new = signature.replace(args, kwargs, h.clone(), r.clone() if r is not None else None)
            return cls.forward(layer, *new[0], **new[1])

        out = call(hidden, kept)
        hidden_out, residual_out = _look(cls.__name__, out)
        for member in (hidden_out, residual_out):
            if member is not None and member.shape != hidden.shape:
                raise UnsupportedModel(
                    f"Layer class {cls.__name__} turns a stream of shape {tuple(hidden.shape)} "
                    f"into {tuple(member.shape)}."
                )
        if cls not in forms:
            if isinstance(out, Tensor):
                forms[cls] = Form.PLAIN
            elif residual_out is None:
                forms[cls] = Form.SINGLE
            else:
                other = torch.ones_like(hidden) if kept is None else kept + 1
                moved = not torch.equal(call(hidden, other)[0], call(hidden, torch.zeros_like(hidden))[0])
                forms[cls] = Form.PAIR if moved else Form.OVERWRITE
        return out

    tokens = rehearsal_tokens(vllm_config, device)
    with (
        torch.inference_mode(),
        private_context(vllm_config, REHEARSAL_LENGTH, skip_compiled=True),
        intercepted(stack, observe),
    ):
        run_model(model, tokens, rehearsal_stream(model, vllm_config, device))
    return forms
