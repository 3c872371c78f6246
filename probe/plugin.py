"""vLLM's general plugin: runs in every vLLM process before a model is loaded.

It does two things, both only when the probe is switched on (`switches.py`): it lets the loader arm the gates of the
served model between load and compile, and it gives the worker one RPC method.  A failure here is logged and leaves
vLLM as it is.
"""

import functools
import logging
from typing import Any

from . import switches

logger = logging.getLogger("vllm.flipwatch")

_SALT = "flipwatch_gates"
_SALT_VERSION = 1


def register() -> None:
    """Entry point `vllm.general_plugins`; idempotent, cheap, never raises."""
    try:
        if not switches.enabled():
            return
        _extend_worker()
        _extend_loader()
        if switches.cpu_plain_weights():
            _keep_plain_weights()
    except Exception:
        logger.exception("Flipwatch could not register its probe; vLLM serves without it.")


def _extend_loader() -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    original = BaseModelLoader.load_model
    if hasattr(original, "__wrapped_by_flipwatch__"):
        return

    @functools.wraps(original)
    def load_model(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(self, vllm_config, model_config, *args, **kwargs)
        # Draft models of speculative decoding come through here too; only the served model is watched.
        if model_config is vllm_config.model_config:
            try:
                _arm(model, vllm_config)
            except Exception:
                logger.exception("Flipwatch failed while it looked at the model; vLLM serves without it.")
        return model

    load_model.__wrapped_by_flipwatch__ = True  # type: ignore[attr-defined]
    BaseModelLoader.load_model = load_model


def _arm(model: Any, vllm_config: Any) -> None:
    from .armed import arm

    armed = arm(model, vllm_config)
    if armed.refusal is not None:
        logger.warning("Flipwatch does not watch this model: %s", armed.refusal)
        return
    _salt_compile_cache(vllm_config)
    logger.info("Flipwatch installed gates on %d blocks of %s.", len(armed.stack.layers), armed.stack.layer_class)
    if armed.scan_refusal is not None:
        logger.warning("Flipwatch cannot scan this model: %s", armed.scan_refusal)


def _salt_compile_cache(vllm_config: Any) -> None:
    """Make the compile cache's key differ from a server's without gates.

    vLLM's key does not cover plugins: without this, a cache left by a plain run is loaded and the gates do nothing.
    """
    additional = vllm_config.additional_config
    if isinstance(additional, dict):
        vllm_config.additional_config = {**additional, _SALT: _SALT_VERSION}
    else:
        logger.warning("additional_config is no dict: the compile cache is not salted; the gate self-test will tell.")


def _extend_worker() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    from .worker import RPC, rpc

    setattr(WorkerBase, RPC, rpc)


def _keep_plain_weights() -> None:
    """On vLLM's CPU build, do not pack Linear weights into oneDNN handles that no tensor shows."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = plain
