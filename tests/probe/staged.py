"""A toy model over pipeline stages: one process each, in vLLM's own groups over gloo, without an engine.

The probe in it is the real one; only the scheduler and the HTTP routes are missing.
"""

import asyncio
import multiprocessing
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from flipwatch.probe.engine import Engine
from flipwatch.probe.live import LiveServer

WIDTH, VOCABULARY, BLOCKS = 16, 64, 5
FAIL = "fail"
"""Instead of an operation: every block of this rank fails from now on, or no longer."""
# An all-reduce that nobody answers would take half an hour to give up.
_PATIENCE = 60


def _weight(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def _normed(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


class Layer(nn.Module):
    """Hands on (hidden, residual) as Llama's do; no attention."""

    def __init__(self, index: int, *, odd: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up.weight.data = _weight(index, WIDTH)
        self._odd = odd

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        """One block."""
        residual = hidden_states if residual is None else residual + hidden_states
        out = torch.tanh(self.up(_normed(residual))), residual
        return list(out) if self._odd else out


class Model(nn.Module):
    """One stage, built as vLLM's models are."""

    def __init__(self, *, odd: bool) -> None:
        super().__init__()
        from vllm.distributed.parallel_state import get_pp_group
        from vllm.model_executor.models.utils import (
            PPMissingLayer,
            make_empty_intermediate_tensors_factory,
            make_layers,
        )

        self._pipeline = get_pp_group()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if self._pipeline.is_first_rank else PPMissingLayer()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if self._pipeline.is_last_rank else PPMissingLayer()
        for module, seed in ((self.embed, 100), (self.head, 101)):
            if not isinstance(module, PPMissingLayer):
                module.weight.data = _weight(seed, VOCABULARY)
        self._start, self._end, self.layers = make_layers(
            BLOCKS, lambda prefix: Layer(int(prefix.rpartition(".")[2]), odd=odd), prefix="layers"
        )
        names = ["hidden_states", "residual"]
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(names, WIDTH)

    def forward(self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None) -> Any:
        """This stage's part."""
        from vllm.sequence import IntermediateTensors

        residual = None
        if self._pipeline.is_first_rank:
            hidden = self.embed(input_ids.long())
        else:
            hidden, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
        for layer in list(self.layers)[self._start : self._end]:
            hidden, residual = layer(positions, hidden, residual)
        if not self._pipeline.is_last_rank:
            return IntermediateTensors({"hidden_states": hidden, "residual": residual})
        return _normed(hidden + residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """On the last stage."""
        logits: Tensor = self.head(hidden)
        return logits


def _config(stages: int) -> Any:
    from vllm.config import VllmConfig

    config: Any = VllmConfig()
    config.model_config = SimpleNamespace(
        dtype=torch.float32,
        get_hidden_size=lambda: WIDTH,
        get_vocab_size=lambda: VOCABULARY,
        is_encoder_decoder=False,
        is_moe=False,
        uses_mrope=False,
        served_model_name="toy",
        max_model_len=64,
    )
    config.parallel_config.pipeline_parallel_size = stages
    config.device_config = SimpleNamespace(device="cpu")
    return config


def _stage(rank: int, stages: int, store: str, odd_stage: int | None, pipe: Any) -> None:
    """One process: answers what comes through the pipe until that is closed."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    from flipwatch.probe import armed
    from flipwatch.probe.view import LiveView
    from flipwatch.probe.worker import rpc

    config = _config(stages)
    with set_current_vllm_config(config):
        init_distributed_environment(stages, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(1, stages, backend="gloo")
        model = Model(odd=rank == odd_stage)
    armed.arm(model, config)
    worker = SimpleNamespace(rank=rank, vllm_config=config)
    works = LiveView.block

    def fails(*_: Any) -> Tensor:
        raise RuntimeError("made to fail by a test")

    while (order := pipe.recv()) is not None:
        if order[0] == FAIL:
            LiveView.block = fails if order[1] else works  # type: ignore[method-assign]
            pipe.send(None)
        else:
            pipe.send(rpc(worker, *order))


class Stages:
    """The processes, and what the probe takes for vLLM's engine client."""

    def __init__(self, stages: int, folder: Path, odd_stage: int | None = None) -> None:
        """Start them; on `odd_stage` the layers return something that Flipwatch does not know."""
        spawn = multiprocessing.get_context("spawn")
        pairs = [spawn.Pipe() for _ in range(stages)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            spawn.Process(target=_stage, args=(rank, stages, str(folder / "store"), odd_stage, theirs))
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()  # so that a process that ended is seen
        self._paused = False
        self.errored = False
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=stages, _api_process_count=1))
        self.engine_core = SimpleNamespace(engine_ranks_managed=[0])
        self.live = LiveServer(Engine(self), self, "toy")  # type: ignore[arg-type]

    def close(self) -> None:
        """End them."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with suppress(BrokenPipeError):
                pipe.send(None)
            process.join(10)
            process.kill()
            process.join()

    def fail(self, rank: int, *, now: bool) -> None:
        """Let the blocks of one rank fail, or work again."""
        self._pipes[rank].send((FAIL, now))
        self._pipes[rank].recv()

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """As vLLM's: every rank's reply."""
        for pipe in self._pipes:
            pipe.send(args)
        replies = []
        for rank, pipe in enumerate(self._pipes):
            assert await asyncio.to_thread(pipe.poll, _PATIENCE), f"rank {rank} does not answer {args[1]}"
            replies.append(pipe.recv())
        return replies

    async def is_sleeping(self) -> bool:
        """Paused."""
        return self._paused

    async def pause_generation(self, **_: Any) -> None:
        """There is nothing to pause."""
        self._paused = True

    async def reset_prefix_cache(self, **_: Any) -> bool:
        """Nor to reset."""
        return True

    async def resume_generation(self) -> None:
        """As `pause_generation`."""
        self._paused = False

    def requests(self) -> int:
        """As `Load` has it: none."""
        return 0

    async def calm(self, patience: float) -> None:
        """As `Load` has it: always."""
