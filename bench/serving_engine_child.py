"""A vLLM engine in a process of its own that decodes when it is told to: one line of JSON for each command.

    steps N    decode N steps of the whole batch -> {"wall": [...], "cpu": [...]}, seconds per step
    kernels    -> {"kernels": K, "operations": P}: calls in the code that inductor made, and lines in its kernels
    end        end

What it prints first is {"ready": ...}.  Everything else that vLLM prints goes to standard error.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

_PROMPT_TOKENS = 16
_CALL = r"^\s+(?:\w+ = )?(?:cpp_fused_\w+|triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.\S+)\("


class Decoder:
    """Keeps a batch of requests decoding."""

    def __init__(self, model: str, batch: int, *, compiled: bool) -> None:
        from vllm import LLM

        self._llm = LLM(
            model,
            enforce_eager=not compiled,
            max_model_len=1024,
            max_num_seqs=batch,
            max_num_batched_tokens=1024,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self._batch = batch
        self._left = 0
        self._number = 0

    def steps(self, count: int) -> dict[str, list[float]]:
        """Seconds on the clock and of CPU of each of `count` decode steps."""
        if self._left < count:
            self._refill()
        wall, cpu = [], []
        for _ in range(count):
            began, used = time.perf_counter(), time.process_time()
            self._llm.llm_engine.step()
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
        self._left -= count
        return {"wall": wall, "cpu": cpu}

    def _refill(self) -> None:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            engine.step()
        tokens = 1024 - 2 * _PROMPT_TOKENS
        for _ in range(self._batch):
            self._number += 1
            prompt: Any = {"prompt_token_ids": [100 + self._number % 1000 + at for at in range(_PROMPT_TOKENS)]}
            engine.add_request(
                str(self._number), prompt, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            )
        for _ in range(4):
            engine.step()
        self._left = tokens - 8


def kernels() -> dict[str, int]:
    """Of the largest graph in the folder of inductor, which is the model: calls, and lines in its kernels."""
    found = []
    for file in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.py"):
        text = file.read_text(encoding="utf-8", errors="replace")
        if "def call(" in text:
            body = text[text.index("def call(") :]
            found.append((len(re.findall(_CALL, body, re.MULTILINE)), len(re.findall(r"auto tmp\d+ = ", text))))
    calls, lines = max(found, default=(0, 0))
    return {"kernels": calls, "operations": lines}


def main(model: str, batch: int, mode: str) -> None:
    """Serve commands from standard input."""
    # vLLM's own lines must not come between ours.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    decoder = Decoder(model, batch, compiled=mode == "compiled")
    decoder.steps(8)
    print(json.dumps({"ready": mode}), file=answers)
    for line in sys.stdin:
        match line.split():
            case ["steps", count]:
                print(json.dumps(decoder.steps(int(count))), file=answers)
            case ["kernels"]:
                print(json.dumps(kernels()), file=answers)
            case _:
                return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
