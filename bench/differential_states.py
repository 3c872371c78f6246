"""States of a model, recorded, replayed and judged, whichever engine runs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from integrity_engine import Engine
from torch import Tensor

from flipwatch import __version__
from flipwatch.monitors.differential.facts import STREAM, DifferentialPlan, DifferentialReading
from flipwatch.monitors.differential.finding import DifferentialFinding
from flipwatch.monitors.differential.judgement import judge
from flipwatch.monitors.differential.measure import distance
from flipwatch.monitors.differential.monitor import Differential
from flipwatch.monitors.differential.reference import Conditions, Recording, ReferenceKind
from flipwatch.monitors.differential.view import DissectedView
from flipwatch.monitors.validation import ValidationItem, load_items
from flipwatch.probe.local import LocalView, run_measurement
from flipwatch.probe.local_dissection import LocalDissection

Rows = list[list[int]]
"""Token ids of some sequences."""


def conditions(engine: str, dtype: str, blocks: int) -> Conditions:
    """Of a model of this benchmark; `engine` tells kernels apart."""
    return Conditions(
        model="model",
        model_digest=None,
        architecture="the same",
        num_blocks=blocks,
        dtype=dtype,
        engine=engine,
        torch_version=version("torch"),
        hardware="the same",
        tensor_parallel_size=1,
        flipwatch_version=__version__,
    )


def read(view: DissectedView, plan: DifferentialPlan) -> DifferentialReading:
    """One measurement, as the probe makes it."""
    reading: DifferentialReading = run_measurement(cast(Any, view), cast(Any, Differential()), plan)
    return reading


def record(view: DissectedView, tokens: Rows, where: Conditions, seed: int = 0) -> Recording:
    """States and noise of a model that is taken to be healthy."""
    plan = DifferentialPlan(tokens=tokens, noise=True, seed=seed)
    return Recording(recorded_at=0.0, conditions=where, plan=plan, reading=read(view, plan))


def texts(model: Path, count: int, length: int) -> Rows:
    """The first sequences of the shipped validation set that are long enough, cut to `length` tokens.

    Raises `ValueError` where there are too few.
    """
    return tokenised(model, load_items(), count, length)


def tokenised(model: Path, items: Sequence[ValidationItem], count: int, length: int) -> Rows:
    """The same of these items."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    encoded = (tokenizer(item.prompt + item.answer)["input_ids"] for item in items)
    rows: Rows = [ids[:length] for ids in encoded if len(ids) >= length]
    if len(rows) < count:
        raise ValueError(f"{len(rows)} texts have {length} tokens, and {count} are wanted")
    return rows[:count]


def local(model: Path, dtype: torch.dtype) -> LocalDissection:
    """The checkpoint by transformers."""
    return LocalDissection(LocalView.load(model, dtype).model)


@dataclass
class Served:
    """The vLLM of this process with its references, made while it is healthy."""

    engine: Engine
    recording: Recording
    inputs: dict[str, list[Tensor]]
    """By reference: what each block is fed, (1, P, D)."""
    clean: dict[str, list[Tensor]]
    """What the healthy blocks make of it, (P, D)."""
    noise: list[float]
    """Of the output of each block, repeated: relative L2 distance."""

    @classmethod
    def prepare(cls, engine: Engine, tokens: Rows) -> "Served":
        """Record states, and keep beside them the whole activations that the truth is measured on."""
        view = engine.armed.dissection(checkpoint=False)
        recording = record(view, tokens, conditions("vllm", "bfloat16", view.num_blocks))
        (states,) = recording.reading.ranks
        noise = [states.isolated[block].points[-1].noise for block in range(view.num_blocks)]
        served = cls(engine, recording, {"recorded": [], "checkpoint": []}, {}, [])
        served.noise = [noise_of.repeated or 0.0 for noise_of in noise if noise_of is not None]
        hidden = stream = view.embed(served.prefix)
        with torch.inference_mode():
            whole = view.embed(torch.tensor(tokens))
            for block in range(view.num_blocks):
                # What the walk feeds a block comes from all sequences at once, the checkpoint's chain from the prefix.
                served.inputs["recorded"].append(whole[:1, : hidden.shape[1]].clone())
                served.inputs["checkpoint"].append(stream.clone())
                whole = view.block(block, whole, torch.tensor(tokens))
                stream = view.dissect(block, stream, served.prefix)[STREAM].reshape(stream.shape)
        served.clean = {name: served.outputs(name, range(view.num_blocks)) for name in served.inputs}
        return served

    @property
    def prefix(self) -> Tensor:
        """(1, P) tokens that blocks are run on."""
        return torch.tensor(self.recording.plan.tokens[0][: self.recording.plan.prefix])[None]

    @torch.inference_mode()
    def outputs(self, name: str, blocks: Sequence[int]) -> list[Tensor]:
        """What these blocks hand on now, each fed what the reference feeds it: whole activations."""
        view = self.engine.armed.dissection(checkpoint=False)
        return [view.dissect(block, self.inputs[name][block], self.prefix)[STREAM] for block in blocks]

    def change(self, name: str, block: int) -> float:
        """Relative L2 distance of a block's output from the healthy one; infinite where it is not finite."""
        (now,) = self.outputs(name, [block])
        if not now.isfinite().all():
            return float("inf")
        return distance(now, self.clean[name][block])

    def against_recording(self) -> DifferentialFinding:
        """The live model against the recorded states."""
        return self._judged(self.replayed(), ReferenceKind.RECORDED, self.recording.conditions)

    def as_peer(self, reading: DifferentialReading) -> DifferentialFinding:
        """A replay judged as if other kernels had recorded: with all that rounding explains allowed."""
        return self._judged(reading, ReferenceKind.PEER, conditions("another", "bfloat16", len(self.noise)))

    def replayed(self) -> DifferentialReading:
        """The recorded inputs through the live model."""
        return read(self.engine.armed.dissection(checkpoint=False), self.recording.replay())

    def judged(self, reading: DifferentialReading) -> DifferentialFinding:
        """A replay, with what repetition explains allowed."""
        return self._judged(reading, ReferenceKind.RECORDED, self.recording.conditions)

    def _judged(self, reading: DifferentialReading, kind: ReferenceKind, where: Conditions) -> DifferentialFinding:
        return judge(reading, kind, self.recording, where)

    def against_checkpoint(self, tokens: Rows | None = None, seed: int = 0) -> DifferentialFinding:
        """The live model against the files, on these sequences or the recorded ones."""
        tokens = self.recording.plan.tokens if tokens is None else tokens
        plan = DifferentialPlan(tokens=tokens, checkpoint=True, noise=True, seed=seed)
        reading = read(self.engine.armed.dissection(checkpoint=True), plan)
        return judge(reading, ReferenceKind.CHECKPOINT, None, self.recording.conditions)
