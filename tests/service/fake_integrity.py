"""What the fingerprint's routes of the fake probe answer, but for repairs: baselines, sweeps, checks of the checkpoint.

server.weights.damage(7, 4)                    # see fake_weights.py
server.integrity.files["model.safetensors"]    # its SHA-256
server.integrity.different = ["..."]           # what the comparison with the checkpoint says of rank 0
server.integrity.not_covered = [...]           # NotCovered
server.integrity.refusal = "..."               # there are no baselines
server.integrity.checkpoint_refusal = "..."    # the files cannot be read
server.integrity.wrong = {"model.layers.4.mlp.up_proj.weight": (7, 4)}    # what a correction makes bad: chunk, block
server.integrity.old = True                    # a probe from before there were fingerprints
"""

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from flipwatch.monitors.fingerprint.facts import COMPARE, CORRECT, RECORD, FileOrder, NotCovered
from flipwatch.monitors.wire import PREFIX

from .fake_weights import CHUNK_BYTES, FakeWeights

MEASURES = ("fingerprint", RECORD, COMPARE, CORRECT)


class FakeIntegrity:
    """See the module's docstring."""

    def __init__(self, weights: FakeWeights) -> None:
        self.weights = weights
        self.files = {"model.safetensors": "ab" * 32}
        self.not_covered: list[NotCovered] = []
        self.refusal: str | None = None
        self.checkpoint_refusal: str | None = None
        self.old = False
        self.boot_id: str | None = None
        """Said instead of the server's."""
        self.restart()

    def restart(self) -> None:
        """A baseline of good bytes, and a checkpoint that is the same."""
        self.different: list[str] = []
        self.recorded_at = 1000.0
        self.wrong: dict[str, tuple[int, int]] = {}

    def seals(self) -> list[dict[str, Any]]:
        """The baselines."""
        covered = self.weights.chunks * CHUNK_BYTES
        return [
            {
                "rank": {"rank": rank, "tensor": rank},
                "device": "cpu",
                "digest": "gmac",
                "recorded_at": self.recorded_at,
                "chunk_bytes": CHUNK_BYTES,
                "chunks": self.weights.chunks,
                "tensors": 12,
                "covered_bytes": covered,
                "not_covered": [missing.model_dump() for missing in self.not_covered],
                "parity": "memory",
                "parity_bytes": covered // 64,
                "parity_groups": 1,
                "suspicions": [],
            }
            for rank in range(self.weights.ranks)
        ]

    def reading(self, monitor: str, plan: dict[str, Any]) -> dict[str, Any]:
        """What a measurement reads at its end."""
        if monitor == CORRECT:
            known = [tensor for tensor in plan["tensors"] if tensor in self.wrong]
            for tensor in known:
                self.weights.damage(*self.wrong[tensor])
            refused = [
                f"{tensor}: The checkpoint has no such tensor." for tensor in plan["tensors"] if "lost" in tensor
            ]
            return {"ranks": [{"seal": seal, "corrected": known, "refused": refused} for seal in self.seals()]}
        if monitor == RECORD:
            changed = len(self.weights.bad)
            self.weights.reload()
            self.recorded_at += 100.0
            return {"ranks": self.seals(), "changed_chunks": changed}
        if monitor == COMPARE:
            ranks = range(self.weights.ranks)
            return {
                "ranks": [
                    {
                        "rank": {"rank": rank},
                        "equal": 12,
                        "different": self.different if rank == 0 else [],
                        "not_comparable": [],
                    }
                    for rank in ranks
                ]
            }
        update = {"not_covered": self.not_covered, "recorded_at": self.recorded_at}
        return {
            "ranks": [rank.model_copy(update=update).model_dump(mode="json") for rank in self.weights.reading().ranks]
        }

    def install(self, app: FastAPI, boot_id: Any, problem: Any) -> None:
        """Answer the routes; `boot_id` and `problem` are the server's."""

        @app.get(PREFIX + "/integrity")
        def integrity() -> Response:
            if self.old:
                return JSONResponse({"detail": "Not Found"}, 404)
            ranks = [] if self.refusal is not None else self.seals()
            known = self.boot_id or boot_id()
            return JSONResponse({"boot_id": known, "refusal": self.refusal, "ranks": ranks})

        @app.get(PREFIX + "/checkpoint")
        def checkpoint() -> dict[str, Any]:
            files = [{"name": name, "bytes": 1000} for name in self.files]
            return {"folder": "/models/toy", "files": files, "refusal": self.checkpoint_refusal}

        @app.post(PREFIX + "/checkpoint/digests")
        def digest(order: FileOrder) -> Response:
            if order.file not in self.files:
                return problem(404, f"There is no file {order.file}.")
            sha = self.files[order.file]
            return JSONResponse({"file": order.file, "bytes": 1000, "sha256": sha, "how": "direct", "seconds": 0.1})
