"""A vLLM plugin of the tests alone: conditions that this machine does not have, or that must be broken on purpose.

Switched by `FLIPWATCH_TESTS`, a comma-separated list:

    vllm_compile   undo the CPU platform's rewrite of VLLM_COMPILE, so that the passes of a GPU's compile path run here
    inplace_norm   a fused add + norm that overwrites its inputs, as CUDA's does in eager mode
    unsalted       leave vLLM's compile-cache key as it is
    failing_rank   `facts` and `add_fault` fail on rank 1 while the file named by `FLIPWATCH_TESTS_FAIL` exists
    failing_block  a block of rank 1 that is measured fails while the file of that name with `-block` behind it exists
    flip_on_rank   rank 1 flips a bit of its weights when the file of that name with `-flip` behind it exists, once
    stuck_gate     rank 1 forgets gate writes while the file of that name with `-gate` behind it exists
    stale_cache    a change of the model leaves all cached state as it is while the file of that name with `-stale`
                   behind it exists
    plain_weights  keep plain weights on CPU without Flipwatch, for the other side of a comparison
    odd_layer      Llama's layers return a list, a form that Flipwatch does not know and vLLM does not mind

Rank 1 is that of all workers: under data parallelism of one worker each, engine 1.
"""

import functools
import os
from pathlib import Path
from typing import Any


def register() -> None:
    """Entry point `vllm.general_plugins`."""
    wanted = set(os.environ.get("FLIPWATCH_TESTS", "").split(",")) - {""}
    for name in wanted:
        {
            "vllm_compile": _vllm_compile,
            "inplace_norm": _inplace_norm,
            "unsalted": _unsalted,
            "failing_rank": _failing_rank,
            "stuck_gate": _stuck_gate,
            "failing_block": _failing_block,
            "flip_on_rank": _flip_on_rank,
            "stale_cache": _stale_cache,
            "plain_weights": _plain_weights,
            "odd_layer": _odd_layer,
        }[name]()


def _vllm_compile() -> None:
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        asked = vllm_config.compilation_config.mode
        original(cls, vllm_config)
        if asked == CompilationMode.VLLM_COMPILE:
            vllm_config.compilation_config.mode = CompilationMode.VLLM_COMPILE
            vllm_config.compilation_config.ir_enable_torch_wrap = True
            vllm_config.compilation_config.compile_sizes = []

    platform.check_and_update_config = classmethod(check_and_update_config)
    # It names CUDA's operators; there is nothing for it to do here.
    FixFunctionalizationPass.__call__ = lambda self, graph: None


def _inplace_norm() -> None:
    from torch import Tensor
    from vllm import ir
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.platforms import current_platform

    operator = ir.ops.fused_add_rms_norm
    if "flipwatch_tests_inplace" in operator.impls:
        return
    native = operator.impls["native"].impl_fn

    def overwrite(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        out, residual = native(x, x_residual, weight, epsilon, variance_size)
        x.copy_(out)
        x_residual.copy_(residual)
        return x, x_residual

    operator.register_impl("flipwatch_tests_inplace", inplace=True)(overwrite)

    def priority(cls: Any, vllm_config: Any) -> Any:
        return IrOpPriorityConfig.with_default(["native"], fused_add_rms_norm=["flipwatch_tests_inplace", "native"])

    type(current_platform).get_default_ir_op_priority = classmethod(priority)


def _unsalted() -> None:
    from flipwatch.probe import plugin

    plugin._salt_compile_cache = lambda vllm_config: None


def _told_to_fail(suffix: str = "") -> bool:
    from vllm.distributed.parallel_state import get_world_group

    from flipwatch.probe import armed

    second = get_world_group().rank == 1 or armed.served.vllm_config.parallel_config.data_parallel_index == 1
    return second and Path(os.environ["FLIPWATCH_TESTS_FAIL"] + suffix).exists()


def _failing_rank() -> None:
    from flipwatch.probe import worker

    def failing(original: Any) -> Any:
        def operation(probe: Any, **payload: Any) -> dict[str, Any]:
            if _told_to_fail():
                raise RuntimeError("made to fail by a test")
            return original(probe, **payload)

        return operation

    for name in ("facts", "add_fault"):
        worker._OPERATIONS[name] = failing(worker._OPERATIONS[name])


def _failing_block() -> None:
    from flipwatch.probe import armed
    from flipwatch.probe.view import LiveView

    original = LiveView.block

    def block(self: Any, index: int, hidden: Any, tokens: Any) -> Any:
        # The model is looked at while it is loaded too.
        if armed.served is not None and _told_to_fail("-block"):
            raise RuntimeError("made to fail by a test")
        return original(self, index, hidden, tokens)

    LiveView.block = block  # type: ignore[method-assign]


def _flip_on_rank() -> None:
    import torch

    from flipwatch.probe import armed, worker

    original = worker._OPERATIONS["facts"]

    def facts(probe: Any) -> dict[str, Any]:
        if _told_to_fail("-flip"):
            Path(os.environ["FLIPWATCH_TESTS_FAIL"] + "-flip").unlink()
            # Of block 2, or the nearest that this stage of a pipeline has.
            tensor = f"layers.{min(armed.served.stack.layers, key=lambda block: abs(block - 2))}.mlp.down_proj"
            stretch = next(s for s in armed.served.sealed.line.stretches if tensor in s.source.name)
            with torch.inference_mode():
                stretch.memory[1003] ^= 64
        return original(probe)

    worker._OPERATIONS["facts"] = facts


def _stuck_gate() -> None:
    from flipwatch.probe.gates import Gates

    original = Gates.write

    def write(self: Any, alphas: Any) -> None:
        if not _told_to_fail("-gate"):
            original(self, alphas)

    Gates.write = write  # type: ignore[method-assign]


def _stale_cache() -> None:
    from flipwatch.probe.engine import Engine

    original = Engine._change

    async def change(self: Any, act: Any, keep_caches: bool) -> Any:
        stale = os.path.exists(os.environ["FLIPWATCH_TESTS_FAIL"] + "-stale")  # noqa: ASYNC240 - tests
        return await original(self, act, keep_caches or stale)

    Engine._change = change  # type: ignore[method-assign]


def _plain_weights() -> None:
    from flipwatch.probe import plugin

    plugin._keep_plain_weights()


def _odd_layer() -> None:
    from vllm.model_executor.models.llama import LlamaDecoderLayer

    original = LlamaDecoderLayer.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return list(original(self, *args, **kwargs))

    LlamaDecoderLayer.forward = forward
