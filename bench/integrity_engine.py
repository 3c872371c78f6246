"""A vLLM inside this process, so that its live weights can be damaged, looked at and timed without a way in between."""

import itertools
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flipwatch.monitors.fingerprint.facts import RankReading
from flipwatch.monitors.fingerprint.sealed import SealedWeights
from flipwatch.probe import armed as armed_module
from flipwatch.probe.armed import Armed

MAX_TOKENS = 1024

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "flipwatch",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "FLIPWATCH_PROBE_TOKEN": "of-the-benchmark",
    "FLIPWATCH_CPU_PLAIN_WEIGHTS": "1",
}


@dataclass
class Engine:
    """vLLM's engine, its one worker, and what the probe knows of it."""

    llm: Any
    worker: Any
    armed: Armed
    served_tokens: int = 0
    _ids: "itertools.count[int]" = field(default_factory=itertools.count)

    @classmethod
    def start(cls, model: Path, dtype: str = "bfloat16") -> "Engine":
        """Load `model`, eager, one thread.  Raises `RuntimeError` where the probe has no baseline of it."""
        os.environ.update(_ENVIRONMENT)
        from vllm import LLM

        llm = LLM(
            model=str(model),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=MAX_TOKENS,
            max_num_seqs=8,
            max_num_batched_tokens=2 * MAX_TOKENS,
            enable_prefix_caching=False,
        )
        torch.set_num_threads(1)
        armed = armed_module.served
        if armed is None or armed.sealed is None:
            raise RuntimeError(f"No baseline: {armed.seal_refusal if armed else 'the probe did not see the model'}")
        return cls(llm, llm.llm_engine.model_executor.driver_worker.worker, armed)

    @property
    def sealed(self) -> SealedWeights:
        """The weights with their baseline."""
        return self.armed.bytes()

    @property
    def parameters(self) -> set[int]:
        """The ids of the model's parameters; other tensors are buffers and attributes."""
        return {id(parameter) for parameter in self.armed.model.parameters()}

    def sweep_while_serving(self, generator: random.Random, steps: int) -> RankReading:
        """One sweep in `steps` parts, one between each two steps of the engine, which always has requests."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        sweep = self.sealed.sweep(steps)
        vocabulary = self.armed.vllm_config.model_config.get_vocab_size()
        while True:
            while engine.get_num_unfinished_requests() < 4:
                prompt = [generator.randrange(vocabulary) for _ in range(generator.randint(4, 64))]
                sampling = SamplingParams(max_tokens=generator.randint(4, 32), ignore_eos=True, seed=next(self._ids))
                engine.add_request(str(next(self._ids)), {"prompt_token_ids": prompt}, sampling)
            self.served_tokens += len(engine.step())
            try:
                next(sweep)
            except StopIteration as stop:
                reading: RankReading = stop.value
                return reading

    def drain(self) -> None:
        """Let the requests under way come to their end."""
        while self.llm.llm_engine.has_unfinished_requests():
            self.served_tokens += len(self.llm.llm_engine.step())

    def reload(self) -> float:
        """vLLM's own reload of the whole model in place; seconds."""
        began = time.perf_counter()
        self.worker.reload_weights()
        return time.perf_counter() - began
