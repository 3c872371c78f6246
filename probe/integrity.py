"""The bytes of one worker's weights: sealed when the model has just been loaded, put right when they have changed."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..monitors.fingerprint.facts import ChunkRepair, Method
from ..monitors.fingerprint.line import Line, Part
from ..monitors.fingerprint.parity import FileParity, MemoryParity, Parity
from ..monitors.fingerprint.sealed import SealedWeights, Unrepairable
from . import switches
from .checkpoint import CheckpointUnusable
from .fresh import fresh_tensors
from .rank import check_independent, this_rank
from .reload import reload_module
from .stack import Stack, UnsupportedModel
from .weights import weights_of

logger = logging.getLogger("vllm.flipwatch")


@torch.inference_mode()
def seal(model: nn.Module, stack: Stack, vllm_config: Any, device: torch.device) -> SealedWeights:
    """Take the baseline of a model that has just been loaded.

    Raises:
        UnsupportedModel: there is none; one sentence.
    """
    check_independent(vllm_config)
    began = time.perf_counter()
    weights = weights_of(model, stack, device)
    if not weights.sources:
        raise UnsupportedModel(f"No tensor of {type(model).__name__} shows its weights.")
    line = Line(weights.sources, switches.chunk_bytes())
    folder = switches.parity_folder()
    sealed = SealedWeights(
        line,
        this_rank(vllm_config),
        device=device,
        not_covered=weights.not_covered,
        replaced=weights.replaced,
        group=switches.parity_group(),
        new_parity=lambda: _new_parity(folder, line.chunk_bytes),
    )
    try:
        for _ in sealed.record():
            pass
    except OSError as error:
        raise UnsupportedModel(
            f"No baseline of the weights: FLIPWATCH_PARITY_DIR takes no parity file ({error.strerror})."
        ) from error
    logger.info(
        "Flipwatch sealed %d chunks (%.1f MB) of weights in %.2f s; %d tensors are not covered.",
        line.num_chunks,
        line.covered_bytes / 1e6,
        time.perf_counter() - began,
        len(weights.not_covered),
    )
    return sealed


def _new_parity(folder: Path | None, chunk_bytes: int) -> Parity:
    return MemoryParity() if folder is None else FileParity(folder, chunk_bytes)


class Repair:
    """Puts chunks of one rank right, best source first: parity, the checkpoint, the checkpoint processed anew.

    Every byte is held against the baseline's digest before it is called repaired; where no source gives the baseline's
    bytes, the memory is left as it was found.
    """

    def __init__(
        self, sealed: SealedWeights, model: nn.Module, stack: Stack, vllm_config: Any, chunks: Sequence[int]
    ) -> None:
        """`chunks` are all that shall be put right: what they need from the checkpoint is read once."""
        self._sealed = sealed
        self._chunks = chunks
        self._fresh: dict[str, Tensor] | None = None
        self._line = sealed.line
        self._model = model
        self._stack = stack
        self._vllm_config = vllm_config

    @torch.inference_mode()
    def run(self) -> list[ChunkRepair]:
        """Put them right, each by the best source; what goes wrong is said in the result.

        Once more by parity for those that failed: with the others of its group put right it may give a chunk back.
        The other sources would only say again what they said.
        """
        done = {chunk: self._put_right(chunk, self._sources) for chunk in self._chunks}
        failed = [chunk for chunk, result in done.items() if not result.intact]
        if len(failed) < len(done):
            for chunk in failed:
                again = self._put_right(chunk, self._sources[:1])
                if again.intact:
                    done[chunk] = again
        return list(done.values())

    @property
    def _sources(self) -> list[tuple[Method, Callable[[int], None]]]:
        """Best first."""
        return [
            (Method.PARITY, self._by_parity),
            (Method.CHECKPOINT, self._by_checkpoint),
            (Method.CHECKPOINT, self._by_reloading),
        ]

    def _put_right(self, chunk: int, sources: Iterable[tuple[Method, Callable[[int], None]]]) -> ChunkRepair:
        if self._sealed.is_intact(chunk):
            return self._report(chunk, None, None, None)
        wrong = self._line.read(chunk)
        reasons = []
        for method, source in sources:
            try:
                source(chunk)
            except (Unrepairable, CheckpointUnusable) as reason:
                reasons.append(str(reason))
            except Exception as error:
                logger.exception("Flipwatch failed to repair chunk %d.", chunk)
                reasons.append(f"{type(error).__name__}: {error}")
            else:
                return self._report(chunk, method, wrong, None)
        return self._report(chunk, None, None, " ".join(reasons))

    def _by_parity(self, chunk: int) -> None:
        self._sealed.put_right(chunk, self._sealed.rebuilt(chunk))

    def _by_checkpoint(self, chunk: int) -> None:
        fresh = self._from_checkpoint()
        right = self._line.read(chunk)
        self._line.paste(chunk, right, fresh)
        self._sealed.put_right(chunk, right)

    def _from_checkpoint(self) -> dict[str, Tensor]:
        """Fresh tensors for all chunks that are not intact yet."""
        if self._fresh is None:
            wanted = [chunk for chunk in self._chunks if not self._sealed.is_intact(chunk)]
            names = dict.fromkeys(name for chunk in wanted for name in _names(self._line.parts(chunk)))
            self._fresh = fresh_tensors(self._model, self._vllm_config, self._stack, list(names))
        return self._fresh

    def _by_reloading(self, chunk: int) -> None:
        """For layouts that were made at load: vLLM makes them again, in place."""
        modules = {name.rpartition(".")[0] for name in _names(self._line.parts(chunk))}
        written = modules | self._deriving(modules)
        touched = [s for s in self._line.stretches if s.source.name.rpartition(".")[0] in written]
        before = [stretch.memory.clone() for stretch in touched]
        were_intact = [other for other in self._line.chunks_of(touched) if self._sealed.is_intact(other)]
        try:
            for module in sorted(modules):
                reload_module(self._model, self._vllm_config, module)
            worse = [other for other in [*were_intact, chunk] if not self._sealed.is_intact(other)]
            if worse:
                raise Unrepairable("The module made anew from the checkpoint has other bytes than the baseline.")
        except BaseException:
            for stretch, memory in zip(touched, before, strict=True):
                stretch.memory.copy_(memory)
            raise

    def _deriving(self, modules: set[str]) -> set[str]:
        """Attention layers that derive matrices from one of these modules (MLA), again when it is loaded anew."""
        named = dict(self._model.named_modules())
        sources = [named[name] for name in modules if name in named]
        return {
            name for name, layer in named.items() if any(getattr(layer, "kv_b_proj", None) is one for one in sources)
        }

    def _report(self, chunk: int, method: Method | None, wrong: Tensor | None, reason: str | None) -> ChunkRepair:
        diagnoses = [] if wrong is None else self._sealed.diagnoses(chunk, self._line.read(chunk), wrong)
        return ChunkRepair(
            rank=self._sealed.rank.rank,
            chunk=chunk,
            pieces=self._sealed.pieces(chunk, diagnoses),
            intact=reason is None,
            method=method,
            diagnoses=diagnoses,
            reason=reason,
        )


def _names(parts: Iterable[Part]) -> list[str]:
    return [part.stretch.source.name for part in parts]
