"""The local engine: the same view of a model, over a Hugging Face causal LM in this process.

Nothing here knows an architecture.  The model's own forward runs with its decoder layers intercepted: what it hands
to each layer (masks, rotary embeddings, position ids) is recorded, and what it does behind the last layer (final
norm, head, logit scaling) is used as it is.  It asks of the model that its decoder layers sit in one
`ModuleList`, take the stream as first argument, and need nothing from each other but the stream: no shared key-value
states across layers, no per-layer inputs computed from the stream.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..monitors.alpha_scan import AlphaScanPlan, Profile, padded
from ..monitors.finding import Finding
from ..monitors.monitor import ModelView, Monitor
from ..monitors.validation import ValidationItem

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What the model hands to a layer besides the stream."""

P = TypeVar("P")
R = TypeVar("R")
F = TypeVar("F", bound=Finding)


class LocalView:
    """A `ModelView` over a Hugging Face causal LM.

    `gates` may be set to ask what the model would do with a block damped (0 to 1) or left out (0); the model itself
    is never changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.layers_name, self.layers = _decoder_layers(model)
        self.num_blocks = len(self.layers)
        self.gates = [1.0] * self.num_blocks
        self._calls_for: Tensor | None = None
        self._calls: dict[int, list[Call]] = {}
        self._rest = self._beside_the_stream()

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype | str = torch.float32) -> "LocalView":
        """Load a checkpoint folder; nothing is downloaded, and no code in the folder is run.

        With the dtype `auto`, the checkpoint's own, the weights stay in the mapped files and take memory once.  Raises
        `OSError` when it is no checkpoint, and `ValueError` when weights are missing in it, which would be filled
        with random numbers, when it has layers that its config does not count, or when its architecture is not
        supported.  On other damage transformers raises what it likes.
        """
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

        here = {"local_files_only": True, "trust_remote_code": False}
        config = AutoConfig.from_pretrained(folder, **here)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"{config.model_type} is no causal language model that transformers knows")
        model, told = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **here
        )
        odd = [f"{name} is missing" for name in sorted(told["missing_keys"])]
        odd += [f"{name} has another shape" for name, *_ in sorted(told["mismatched_keys"])]
        if odd:
            raise ValueError(f"{len(odd)} tensors of the model are not in the files as its config wants them: {odd[0]}")
        view = cls(model)
        # A layer that the config does not count is left out without a word.
        behind = f"{view.layers_name}.{view.num_blocks}."
        if any(name.startswith(behind) for name in told["unexpected_keys"]):
            raise ValueError(
                f"the files hold a decoder layer {behind[:-1]}, but the config says that there are {view.num_blocks}"
            )
        return view

    def check(self, plan: AlphaScanPlan) -> None:
        """Raise `ValueError` when the model walked block by block is not the model itself.

        Compared is the loss of the plan's first sequence.  A layer that needs more than the stream shows here.
        """
        tokens, scored = padded(plan, [0])
        with torch.inference_mode():
            hidden = self.embed(tokens)
            for block in range(self.num_blocks):
                hidden = self.block(block, hidden, tokens)
            walked = self.nats(hidden, tokens, scored)
            logits = self.model(input_ids=self._on_device(tokens), use_cache=False).logits[:, :-1]
            wanted = self._on_device(scored)[:, 1:]
            own = functional.cross_entropy(logits[wanted].float(), self._on_device(tokens)[:, 1:][wanted])
        if not torch.allclose(walked[0], own, rtol=0.01, atol=0.05, equal_nan=True):
            raise ValueError(
                f"{type(self.model).__name__} cannot be walked block by block: a loss of {own:.3f} nats became "
                f"{walked[0]:.3f}"
            )

    def embed(self, tokens: Tensor) -> Tensor:
        """(N, T) -> (N, T, D), as the model hands it to block 0."""
        tokens = self._on_device(tokens)
        seen: list[Tensor] = []

        def first(index: int, hidden: Tensor, call: Call) -> Tensor:
            if index == 0:
                seen.append(hidden)
            return hidden

        with self._intercepted(first):
            self.model(input_ids=tokens, use_cache=False, **self._few_logits)
        return seen[0]

    def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        """(M, T, D) -> (M, T, D), gate applied; a gate of 0 masks and does not run the block."""
        gate = self.gates[index]
        if gate == 0.0:
            return hidden
        args, kwargs = self._calls_at(tokens, hidden.shape[0])[index]
        out = stream_of(self.layers[index](hidden, *args, **kwargs))
        if gate == 1.0:
            return out
        base = hidden.float()
        return (base + gate * (out.float() - base)).to(hidden.dtype)

    def nats(self, hidden: Tensor, tokens: Tensor, scored: Tensor) -> Tensor:
        """(M, T, D) -> (M,) mean loss over the scored positions, in float32.

        Only the scored positions go through norm and head.
        """
        copies = hidden.shape[0] // tokens.shape[0]
        tokens = self._on_device(tokens).repeat(copies, 1)
        scored = self._on_device(scored).repeat(copies, 1)[:, 1:]
        losses = functional.cross_entropy(
            self._logits(hidden[:, :-1][scored]), tokens[:, 1:][scored], reduction="none"
        )  # (K,)
        rows = scored.nonzero()[:, 0]
        sums = torch.zeros(hidden.shape[0], device=losses.device).index_add_(0, rows, losses)
        return sums / scored.sum(dim=1)

    def _logits(self, hidden: Tensor) -> Tensor:
        """(K, D) stream behind the last block -> (K, V) float32, through the model's own code.

        As K sequences of one token each: norm and head know no neighbours.
        """

        def last(index: int, before: Tensor, call: Call) -> Tensor:
            return hidden[:, None]

        with self._intercepted(last):
            placeholder = self._on_device(torch.zeros(hidden.shape[0], 1, dtype=torch.long))
            logits: Tensor = self.model(input_ids=placeholder, use_cache=False).logits
        return logits[:, 0].float()

    def _calls_at(self, tokens: Tensor, rows: int) -> list[Call]:
        """What the model hands to its layers for `tokens` repeated to `rows` sequences; the latest are kept."""
        if self._calls_for is None or not torch.equal(self._calls_for, tokens):
            self._calls_for, self._calls = tokens, {}
        if rows not in self._calls:
            calls: list[Call] = []

            def record(index: int, hidden: Tensor, call: Call) -> Tensor:
                calls.append(call)
                return hidden

            with self._intercepted(record):
                copies = self._on_device(tokens).repeat(rows // tokens.shape[0], 1)
                self.model(input_ids=copies, use_cache=False, **self._few_logits)
            self._calls[rows] = calls
        return self._calls[rows]

    def _beside_the_stream(self) -> tuple[Any, ...] | None:
        """What a layer returns beside the stream; None when it returns the stream alone.

        Learned from one real call: some models take `output[0]`, which of a bare tensor would be a sequence.
        """
        seen: list[Any] = []
        hook = self.layers[0].register_forward_hook(lambda layer, args, output: seen.append(output))
        try:
            with torch.inference_mode():
                self.model(input_ids=self._on_device(torch.zeros(1, 1, dtype=torch.long)), use_cache=False)
        finally:
            hook.remove()
        return seen[0][1:] if isinstance(seen[0], tuple) else None

    @contextmanager
    def _intercepted(self, instead: Callable[[int, Tensor, Call], Tensor]) -> Iterator[None]:
        """Within it the layers do not compute: each gives what `instead(index, stream, call)` says."""

        def stand_in(index: int) -> Callable[..., Any]:
            def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
                stream = instead(index, hidden, (args, kwargs))
                return stream if self._rest is None else (stream, *self._rest)

            return forward

        for index, layer in enumerate(self.layers):
            layer.__dict__["forward"] = stand_in(index)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.__dict__["forward"]

    @property
    def _few_logits(self) -> dict[str, int]:
        """Spares the head where its result is not wanted."""
        can = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        return {"logits_to_keep": 1} if can else {}

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(next(self.model.parameters()).device)


def run_measurement(
    view: LocalView, monitor: Monitor[ModelView, P, R, Any], plan: P, on_step: Callable[[], None] = lambda: None
) -> R:
    """Run a whole measurement in one go; `on_step` is called after each of its units."""
    steps = monitor.measure(view, plan)
    with torch.inference_mode():
        while True:
            try:
                next(steps)
            except StopIteration as end:
                reading: R = end.value
                return reading
            on_step()


def run_scan(
    view: LocalView,
    monitor: Monitor[ModelView, P, R, F],
    order: P,
    profile: Profile | None = None,
    on_plan: Callable[[P, int], None] = lambda plan, steps: None,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[F, list[R]]:
    """Measure all that an order leads to, and judge it.

    `on_plan` is called with each plan and its number of steps, `on_step` after each of them.  Raises `ValueError` for a
    plan that does not fit the model.
    """
    readings: list[R] = []
    while (plan := monitor.next_plan(order, readings, profile)) is not None:
        on_plan(plan, monitor.steps(plan, view.num_blocks))
        readings.append(run_measurement(view, monitor, plan, on_step))
    return monitor.judge(readings, profile), readings


def make_plan(
    folder: Path,
    items: list[ValidationItem],
    alphas: list[float],
    *,
    max_tokens: int,
    answers_only: bool = False,
    tokens_per_step: int = 512,
) -> AlphaScanPlan:
    """Tokenise items with the checkpoint's own tokenizer, cut to `max_tokens`.

    Scored are all tokens but the first, or only the answer's.  An item whose answer does not fit is then left out.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokens, scored_from = [], []
    for item in items:
        prompt = tokenizer(item.prompt)["input_ids"]
        row = (prompt + tokenizer(item.answer, add_special_tokens=False)["input_ids"])[:max_tokens]
        first = len(prompt) if answers_only else 1
        if 1 <= first < len(row):
            tokens.append(row)
            scored_from.append(first)
    return AlphaScanPlan(alphas=alphas, tokens=tokens, scored_from=scored_from, tokens_per_step=tokens_per_step)


def stream_of(output: Any) -> Tensor:
    """A layer's output is the stream or a tuple that starts with it."""
    stream: Tensor = output[0] if isinstance(output, tuple) else output
    return stream


def _decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers and its name: as long as the config says, and the outermost of that length."""
    wanted = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == wanted]
    if not found:
        raise ValueError(f"{type(model).__name__} has no list of {wanted} decoder layers")
    return found[0]
