"""The bytes of the served model over all its ranks, and the files that it came from."""

import asyncio
import time
from pathlib import Path
from typing import Any

from ..monitors.fingerprint.facts import (
    CheckpointFacts,
    ChunkRepair,
    FileDigest,
    FileOrder,
    IntegrityFacts,
    RepairOrder,
    RepairReport,
    SealFacts,
    WeightFile,
)
from .checkpoint import CheckpointUnusable, checkpoint_folder, sha256_past_cache, weight_files
from .engine import Engine, ProbeError, Reply, boot_id


class LiveIntegrity:
    """One vLLM server's bytes."""

    def __init__(self, engine: Engine, vllm_config: Any) -> None:
        """Nothing is asked of the workers until a route is called."""
        self._engine = engine
        self._vllm_config = vllm_config
        self._hashing = asyncio.Lock()
        self._known: IntegrityFacts | None = None
        """The facts as last heard."""

    async def facts(self) -> IntegrityFacts:
        """The baselines of all ranks; where one has none, the server has none."""
        replies = await self._engine.call("integrity")
        refusals = [
            f"{reply.place.capitalize()}: {reply.result['refusal']}" for reply in replies if reply.result["refusal"]
        ]
        self._known = IntegrityFacts(
            boot_id=boot_id(replies),
            refusal=refusals[0] if refusals else None,
            ranks=[] if refusals else [SealFacts.model_validate(reply.result["seal"]) for reply in replies],
        )
        return self._known

    async def repair(self, order: RepairOrder) -> RepairReport:
        """Put chunks right between two engine steps, as a change of the served model; every rank its own."""
        # What is asked of them stays the same for as long as vLLM lives, and a busy engine is slow to answer.
        before = self._known or await self.facts()
        if before.refusal is not None:
            raise ProbeError(501, "Not supported", before.refusal)
        if order.boot_id != before.boot_id:
            raise ProbeError(409, "Conflict", "vLLM was restarted since this repair was asked for; sweep again.")
        sizes = {seal.rank.rank: seal.chunks for seal in before.ranks}
        for name in order.chunks:
            if name.chunk >= sizes.get(name.rank, 0):
                raise ProbeError(404, "Not found", f"There is no chunk {name.chunk} on rank {name.rank}.")
        wanted = [[name.rank, name.chunk] for name in dict.fromkeys(order.chunks)]

        async def put_right() -> list[Reply]:
            return await self._engine.call("repair", chunks=wanted)

        replies, seconds = await self._engine.change(put_right)
        chunks = [ChunkRepair.model_validate(chunk) for reply in replies for chunk in reply.result["chunks"]]
        return RepairReport(chunks=chunks, paused_seconds=seconds)

    async def checkpoint(self) -> CheckpointFacts:
        """The files that the model came from."""
        try:
            folder, files = await asyncio.to_thread(self._files)
            shown = [WeightFile(name=file.name, bytes=file.stat().st_size) for file in files]
        except (CheckpointUnusable, OSError) as reason:
            return CheckpointFacts(folder=str(self._vllm_config.model_config.model), files=[], refusal=str(reason))
        return CheckpointFacts(folder=str(folder), files=shown, refusal=None)

    async def digest(self, order: FileOrder) -> FileDigest:
        """SHA-256 of one file, in a thread of the API server; one at a time."""
        try:
            _, files = await asyncio.to_thread(self._files)
            file = {file.name: file for file in files}.get(order.file)
            if file is None:
                raise ProbeError(404, "Not found", f"The checkpoint has no file {order.file!r}.")
            async with self._hashing:
                began = time.perf_counter()
                found = await asyncio.to_thread(sha256_past_cache, file)
                seconds = time.perf_counter() - began
            return FileDigest(
                file=order.file, bytes=file.stat().st_size, sha256=found.hexdigest, how=found.read, seconds=seconds
            )
        except (CheckpointUnusable, OSError) as reason:
            raise ProbeError(409, "Conflict", str(reason)) from reason

    def _files(self) -> tuple[Path, list[Path]]:
        folder = checkpoint_folder(self._vllm_config)
        return folder, weight_files(folder)
