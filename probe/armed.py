"""The served model as the probe holds it in one worker process: its gates, or why there are none."""

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..monitors.fingerprint.sealed import SealedWeights
from .attention import check_supported
from .checkpoint import checkpoint_folder, tensors_by_block
from .dissection import LiveDissection
from .forms import Form, learn_forms
from .gates import Gates
from .integrity import seal
from .pipeline import PipelinedView
from .rank import check_independent, this_rank
from .ranks import Ranks
from .stack import Stack, UnsupportedModel, find_stack
from .view import LiveView, check_scannable
from .weights_digest import digest_weights

logger = logging.getLogger("vllm.flipwatch")


@dataclass(frozen=True)
class Armed:
    """What arming left behind."""

    boot_id: str
    model: nn.Module
    vllm_config: Any
    device: torch.device
    stack: Stack
    gates: Gates | None
    forms: dict[type, Form] = field(default_factory=dict)
    refusal: str | None = None
    scan_refusal: str | None = None
    model_digest: str | None = None
    """Of this rank's weights as they were loaded; damage and repair afterwards do not change it."""
    sealed: SealedWeights | None = None
    """The bytes of this rank's weights with their baseline; gates or not."""
    seal_refusal: str | None = None

    def view(self, as_if: Mapping[int, float] | None = None) -> LiveView | PipelinedView:
        """A fresh view for one measurement, with these alphas in place of the served ones.

        Under pipeline parallelism all ranks make theirs at once.

        Raises:
            UnsupportedModel: the model cannot be scanned.
        """
        part = self.part(as_if)
        ranks = Ranks.here()
        return part if ranks.stages == 1 else PipelinedView(part, ranks, self.vllm_config, self.device)

    def part(self, as_if: Mapping[int, float] | None = None) -> LiveView:
        """A view of the blocks that this rank holds.

        Raises:
            UnsupportedModel: as `view` does.
        """
        return LiveView(*self._seen(), as_if=as_if)

    def dissection(self, *, checkpoint: bool) -> LiveDissection:
        """A fresh view of its blocks alone, with their tensors on the disk where they are wanted.

        Raises:
            UnsupportedModel: as `view` does.
            CheckpointUnusable: the checkpoint cannot be read, or its blocks cannot be told.
        """
        stages = Ranks.here().stages
        if stages > 1:
            raise UnsupportedModel(
                f"Blocks are not run alone on a server with {stages} pipeline stages yet; scans, gates and the "
                "fingerprint work there."
            )
        seen = self._seen()
        folder = checkpoint_folder(self.vllm_config) if checkpoint else None
        stored = None if folder is None else tensors_by_block(folder, self.model, self.stack)
        return LiveDissection(*seen, rank=this_rank(self.vllm_config), checkpoint=stored)

    def _seen(self) -> tuple[Any, ...]:
        if self.gates is None:
            raise UnsupportedModel(self.refusal or "No gates are installed.")
        if self.scan_refusal is not None:
            raise UnsupportedModel(self.scan_refusal)
        return self.model, self.stack, self.gates, self.forms, self.vllm_config, self.device

    def bytes(self) -> SealedWeights:
        """The weights with their baseline.

        Raises:
            UnsupportedModel: there is none.
        """
        if self.sealed is None:
            raise UnsupportedModel(self.seal_refusal or "The bytes of this model have no baseline.")
        return self.sealed


# The one model that this process serves; None until it is loaded.
served: Armed | None = None


def arm(model: nn.Module, vllm_config: Any) -> Armed:
    """Install gates on a model that has just been loaded; never raises."""
    global served
    boot_id = uuid.uuid4().hex
    device = torch.device(vllm_config.device_config.device)
    stack = Stack({}, 0, "")
    try:
        stack = _stack_or_nothing(model)
        device = next(model.parameters()).device
        served = _arm(model, vllm_config, device, boot_id)
    except UnsupportedModel as reason:
        served = Armed(boot_id, model, vllm_config, device, stack, None, refusal=str(reason))
    except Exception as error:
        # Serving comes first, whatever went wrong here.
        logger.exception("Flipwatch failed while it looked at the model.")
        refusal = f"Looking at {type(model).__name__} failed: {type(error).__name__}: {error}"
        served = Armed(boot_id, model, vllm_config, device, stack, None, refusal=refusal)
    served = _sealed(served)
    return served


def _stack_or_nothing(model: nn.Module) -> Stack:
    """Blocks have numbers also where they get no gates."""
    try:
        return find_stack(model)
    except UnsupportedModel:
        return Stack({}, 0, "")


def _sealed(armed: Armed) -> Armed:
    """With the baseline of its bytes.  Taken after the layers have been called: some make their tables then."""
    try:
        return replace(armed, sealed=seal(armed.model, armed.stack, armed.vllm_config, armed.device))
    except UnsupportedModel as reason:
        return replace(armed, seal_refusal=str(reason))
    except Exception as error:
        logger.exception("Flipwatch failed to take the baseline of the weights.")
        return replace(armed, seal_refusal=f"Taking the baseline failed: {type(error).__name__}: {error}")


def _arm(model: nn.Module, vllm_config: Any, device: torch.device, boot_id: str) -> Armed:
    check_independent(vllm_config)
    if vllm_config.model_config.is_encoder_decoder:
        raise UnsupportedModel("Encoder-decoder models are not supported.")
    stack = find_stack(model)
    scan_refusal = _first_refusal(vllm_config)
    forms = dict(learn_forms(model, stack, vllm_config, device))
    gates = Gates(stack, forms, device, eager=_runs_eager(vllm_config))
    armed = Armed(
        boot_id,
        model,
        vllm_config,
        device,
        stack,
        gates,
        forms,
        scan_refusal=scan_refusal,
        model_digest=_digest_or_none(model),
    )
    if scan_refusal is None:
        try:
            with torch.inference_mode():
                armed.part().check()
        except UnsupportedModel as reason:
            return replace(armed, scan_refusal=str(reason))
    return armed


def _first_refusal(vllm_config: Any) -> str | None:
    try:
        check_scannable(vllm_config)
        check_supported(vllm_config)
    except UnsupportedModel as reason:
        return str(reason)
    return None


def _digest_or_none(model: nn.Module) -> str | None:
    try:
        return digest_weights(model)
    except Exception:
        # Weights of a kind that cannot be read: all but the clean profile works without.
        logger.exception("Flipwatch cannot take a digest of the weights, so no clean profile can be used.")
        return None


def _runs_eager(vllm_config: Any) -> bool:
    """Neither compiled nor captured, so that Python decides in every call."""
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    return bool(compilation.mode == CompilationMode.NONE and compilation.cudagraph_mode == CUDAGraphMode.NONE)
