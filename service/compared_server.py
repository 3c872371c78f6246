"""One side of a comparison: a vLLM server with the probe, measured in small parts while it serves."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError

from .. import __version__
from ..monitors.monitor import Monitor
from ..monitors.wire import MeasureOrder, ModelFacts, Progress
from .comparison import ComparisonError, Shape
from .duty import Duty
from .live import Tally
from .measuring import Measurer, ScanError
from .probe import Probe, ProbeError, ProbeRefused, ProbeUnauthorised
from .recordings import conditions
from .settings import ScanSettings
from .vllm import Vllm, VllmError

P = TypeVar("P", bound=BaseModel)
R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


class ServerSide:
    """A live server.  Nothing about what it serves is changed.

    Args:
        url: Without a slash at its end.
        token: The probe's.
        token_from: Where that was found, for messages.
        api_key: What vLLM was given as `--api-key`.
        key_from: Where that is looked for.
        pacing: How much of the engine the parts of a measurement may hold.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        token_from: str,
        api_key: str | None = None,
        key_from: str = "vllm.api_key",
        pacing: ScanSettings = ScanSettings(),  # noqa: B008 - frozen
    ) -> None:
        self._token_from = token_from
        self._key_from = key_from
        self._loop = asyncio.Runner()
        self._probe = Probe(url, token)
        self._vllm = Vllm(url, api_key)
        duty = Duty(pacing.duty, pacing.idle_duty)
        self._measurer = Measurer(pacing, Tally(), duty, self._probe, self._probe.facts)
        self.source = self._probe.shown_url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._loop:
            self._loop.run(self._close())

    def shape(self) -> Shape:
        """As the probe says; a model that cannot be measured, and a probe of another version, are refused here."""
        facts = self._told(self._probe.facts())
        if facts.flipwatch_version != __version__:
            raise ComparisonError(
                f"The probe in {self.source} is of Flipwatch {facts.flipwatch_version}, and this is {__version__}: "
                "install the same version on both sides."
            )
        refusal = facts.refusal or facts.scan_refusal
        if refusal is not None:
            raise ComparisonError(f"The model of {self.source} cannot be measured: {refusal}")
        return Shape(facts.architecture, facts.num_blocks, facts.max_tokens)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """By vLLM's own route."""
        return self._told(self._tokenize(texts))

    @contextmanager
    def opened(self, tokens: list[list[int]]) -> Iterator["ServedModel"]:
        """The server as it is; raises `ComparisonError` when it was restarted or changed before the end."""
        before = self._told(self._probe.facts())
        yield ServedModel(self, before)
        after = self._told(self._probe.facts())
        if after.boot_id != before.boot_id:
            raise ComparisonError(f"vLLM at {self.source} was restarted while it was measured: compare again.")
        if (after.gates, after.faults) != (before.gates, before.faults):
            raise ComparisonError(f"The model of {self.source} was changed while it was measured: compare again.")

    def run(self, order: MeasureOrder, facts: ModelFacts, note: Callable[[int, int], None]) -> Progress:
        """The whole of one order; its last progress has the reading."""
        return self._told(self._measurer.run(order, facts, note))

    def _told(self, work: Awaitable[T]) -> T:
        """The outcome; whatever goes wrong on the way is a sentence that names the server."""

        async def awaited() -> T:
            return await work

        try:
            return self._loop.run(awaited())
        except ProbeUnauthorised:
            raise ComparisonError(f"The probe in {self.source} refused the token from {self._token_from}.") from None
        except ProbeRefused as refused:
            raise ComparisonError(
                f"The probe in {self.source} refused (HTTP {refused.status}): {refused.detail}"
            ) from None
        except (ProbeError, ScanError, VllmError) as error:
            # The client speaks of the sidecar's setting.
            text = str(error).replace("vllm.api_key", self._key_from)
            raise ComparisonError(text if self.source in text else f"{self.source}: {text}") from None

    async def _close(self) -> None:
        async with self._probe, self._vllm:
            pass

    async def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        model = await self._vllm.model()
        return [await self._vllm.tokenize(model, text) for text in texts]


class ServedModel:
    """The model of one vLLM server; of several engines the first stands for all, as replicas are alike."""

    def __init__(self, side: ServerSide, facts: ModelFacts) -> None:
        self._side = side
        self._facts = facts
        self.gates = facts.gates
        self.conditions = conditions(facts)

    def measure(self, monitor: Monitor[Any, P, R, Any], plan: P, kind: type[R], note: Callable[[int, int], None]) -> R:
        """In parts, with rests between them."""
        order = MeasureOrder(monitor=monitor.name, plan=plan.model_dump(mode="json"), engine=self._facts.engines[0])
        progress = self._side.run(order, self._facts, note)
        try:
            return kind.model_validate(progress.reading)
        except ValidationError:
            raise ComparisonError(
                f"The reading of {self._side.source} cannot be read: install the same version of Flipwatch on both "
                "sides."
            ) from None
