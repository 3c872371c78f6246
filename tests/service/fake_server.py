"""A fake vLLM with a fake probe: a real uvicorn server on loopback with a toy model, for the sidecar's tests.

How to use it (from any test in this folder, sync or async; it runs in a thread of its own):

    from .fake_server import PROBE_TOKEN, FakeServer

    with FakeServer() as server:
        server.url                      # http://127.0.0.1:PORT for `vllm.url`; the probe wants PROBE_TOKEN
        server.harm[4] = 5.0            # block 4 adds harm, until it is repaired: the scan must flag it
        server.engines = [0, 1]         # two data-parallel replicas; `server.harm_in[1]` is harm in the second alone
        server.outside = 1.0            # the loss is so much higher whatever block is left out, as by a bad embedding
        server.nan.add(2)               # block 2 puts out NaN unless it is skipped
        server.gates                    # what was written; `server.seen` lists all requests as "METHOD path"
        server.seconds_per_step = 0.01  # how long each step claims to hold the engine; nobody really waits
        server.refuse["POST /measurements"] = (502, "rank 1 failed")   # answer a route with a problem
        server.weights.damage(7, 4)     # chunk 7, in block 4, has changed; see fake_weights.py
        server.restart()                # a new vLLM process: new boot_id, gates at 1, nothing remembered
        server.void()                   # running measurements become void: 409
        server.stop(); server.start()   # vLLM away and back, on the same port
        server.hold(); server.release() # advances wait in between: "a scan is running"
        server.serve(5)                 # five requests were served, in vLLM's own counter
        server.integrity                # what the fingerprint's routes answer: see fake_integrity.py
        server.states                   # what the differential monitor measures: see fake_states.py
        server.answers                  # what it answers the canary, and counts: see fake_answers.py

There is also the fixture `server` in conftest.py.  The toy model: loss of row n = 2 + n / 100
+ outside + sum over blocks of worth * (1 - g) ** 2 + harm * g, where g is the product of gate and scan's alpha.
Plans with groups of blocks are refused.
"""

import math
import socket
import threading
import uuid
from collections.abc import Sequence
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.middleware.base import RequestResponseEndpoint

from flipwatch.monitors.fingerprint.facts import RepairOrder
from flipwatch.monitors.wire import PREFIX, Advance, Fault, FaultOrder, Gate, GateChange, MeasureOrder
from flipwatch.service.gates import with_gates

from .fake_answers import FakeAnswers
from .fake_integrity import MEASURES, FakeIntegrity
from .fake_states import FakeStates
from .fake_weights import FakeWeights

PROBE_TOKEN = "probe-token-of-the-fake"
MODEL = "toy-model"


class FakeServer:
    """See the module's docstring."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.num_blocks = num_blocks
        self.worth = [0.30 + 0.01 * (block % 5) for block in range(num_blocks)]
        self.seconds_per_step = 0.001
        self.seconds_per_token = 0.0
        """What each step takes beyond that, by the tokens of the plan's steps."""
        self.requests: int | None = None
        """How many requests are said to be unfinished."""
        self.armed = True
        self.scan_refusal: str | None = None
        self.self_test_passes = True
        self.faults_enabled = True
        self.model_digest: str | None = "0123456789abcdef"
        self.engines = [0]
        self.measured: list[int | None] = []
        """The engine that each measurement of blocks was ordered for."""
        self.max_tokens = 2048
        """Most tokens in one step of the engine."""
        self.model = MODEL
        self.architecture = "ToyForCausalLM"
        self.flipwatch_version = "0.1.0"
        self.seen: list[str] = []
        self.steps: list[int] = []
        """Size of each part that was asked for."""
        self.patience: list[float] = []
        """How long each part lets others go first."""
        self.plans: list[dict[str, Any]] = []
        """Plans of the scans that were ordered."""
        self.hold_after_gates = False
        """Hold all parts from the next change of gates on: a mitigation stays in the middle."""
        self.refuse: dict[str, tuple[int, str]] = {}
        self.refuse_title = "Refused"
        """Title of these problems."""
        self.facts_free = threading.Event()
        self.facts_free.set()
        """Cleared: the probe does not answer what it is asked about the model, as when the engine hangs."""
        self.facts_asked = threading.Event()
        self.webhooks: list[dict[str, Any]] = []
        """Bodies that reached POST /webhook."""
        self.webhook_status = 200
        self.weights = FakeWeights()
        self.integrity = FakeIntegrity(self.weights)
        self.states = FakeStates()
        self.answers = FakeAnswers()
        self._served = 0
        self._free = threading.Event()
        self._free.set()
        self.holding = threading.Event()
        """Set once a part waits because of `hold`."""
        self.restart()
        listener = self._listener(0)
        self.port: int = listener.getsockname()[1]
        self._first_listener: socket.socket | None = listener
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    # Life

    @property
    def url(self) -> str:
        """Base URL without a slash at its end."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self.facts_free.set()
        self.answers.go_on()
        self.stop()

    def start(self) -> None:
        """Listen, on the same port as before."""
        listener = self._first_listener or self._listener(self.port)
        self._first_listener = None
        config = uvicorn.Config(self._app(), log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening: connections are refused."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(10)
            self._server = self._thread = None

    def restart(self) -> None:
        """Become a new vLLM process; the weights are good again, as loaded from disk."""
        self.boot_id = uuid.uuid4().hex
        self.weights.reload()
        self.gates = [1.0] * self.num_blocks
        self.harm = [0.0] * self.num_blocks
        self.harm_in: dict[int, dict[int, float]] = {}
        self.outside = 0.0
        self.nan: set[int] = set()
        self.faults: dict[str, Fault] = {}
        self._self_test = {"state": "not_run", "reason": "The self-test has not run yet."}
        self._measurements: dict[str, dict[str, Any]] = {}
        self.integrity.restart()
        self.states.restart()
        self.answers.restart()

    def void(self) -> None:
        """Make running measurements void."""
        for measurement in self._measurements.values():
            measurement["void"] = "monitor" not in measurement

    @property
    def measurements(self) -> int:
        """How many measurements the probe remembers."""
        return len(self._measurements)

    def hold(self) -> None:
        """Let each further part wait until `release`."""
        self.holding.clear()
        self._free.clear()

    def release(self) -> None:
        """Let the parts go on."""
        self._free.set()

    def serve(self, requests: int) -> None:
        """Count requests as served."""
        self._served += requests

    # The toy model

    def loss(
        self,
        row: int = 0,
        scan: dict[int, float] | None = None,
        engine: int = 0,
        gates: Sequence[float] | None = None,
    ) -> float:
        """Loss in nats of one row, with the served gates unless others are given; NaN as in the real one."""
        harm = self.harm_in.get(engine, {})
        total = 2.0 + row / 100 + self.outside
        for block in range(self.num_blocks):
            g = (gates or self.gates)[block] * (scan or {}).get(block, 1.0)
            if block in self.nan and g != 0.0:
                return math.nan
            total += self.worth[block] * (1 - g) ** 2 + (self.harm[block] + harm.get(block, 0.0)) * g
        return total

    def _reading(self, plan: dict[str, Any], engine: int, as_if: Sequence[Gate]) -> dict[str, Any]:
        gates = with_gates(self.gates, as_if)
        rows = range(len(plan["tokens"]))
        alphas = plan["alphas"]
        without = dict.fromkeys(plan.get("left_out", []), 0.0)
        wanted = plan.get("blocks") or range(self.num_blocks)
        nonfinite = sorted(block for block in self.nan if gates[block] != 0.0 and block not in without)

        def losses(scan: dict[int, float]) -> list[float | None]:
            found = [self.loss(row, without | scan, engine, gates) for row in rows]
            return [None if math.isnan(loss) else loss for loss in found]

        def curve(block: int) -> list[list[float | None]]:
            free = gates[block] == 1.0 and block not in without and block in wanted
            return [losses({block: alpha}) for alpha in alphas] if free and not nonfinite else []

        return {
            "alphas": alphas,
            "gates": gates,
            "left_out": list(without),
            "scored_tokens": [
                len(tokens) - first for tokens, first in zip(plan["tokens"], plan["scored_from"], strict=True)
            ],
            "pass_tokens": sum(len(tokens) for tokens in plan["tokens"]),
            "base_nats": losses({}),
            "nats": [curve(block) if alphas else [] for block in range(self.num_blocks)],
            "nonfinite_blocks": nonfinite,
            "passes": 1.0 + len(alphas) * (self.num_blocks - 1) / 2,
        }

    def _read(self, measurement: dict[str, Any]) -> dict[str, Any]:
        if "plan" in measurement:
            return self._reading(measurement["plan"], measurement["engine"] or 0, measurement["as_if"])
        if "states" in measurement:
            damaged = self.states.only in (None, measurement["engine"] or 0)
            states = self.states if damaged else FakeStates()
            return states.reading(measurement["states"], list(self.gates))
        return self.integrity.reading(measurement["monitor"], measurement["order"])

    # HTTP

    @staticmethod
    def _listener(port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
        return listener

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)

        @app.middleware("http")
        async def gatekeeper(request: Request, call_next: RequestResponseEndpoint) -> Response:
            path = request.url.path.removeprefix(PREFIX)
            call = f"{request.method} {path}"
            self.seen.append(call)
            if request.url.path.startswith(PREFIX):
                if request.headers.get("authorization") != f"Bearer {PROBE_TOKEN}":
                    return _problem(401, "The token is wrong.")
                for route, (status, detail) in self.refuse.items():
                    method, _, start = route.partition(" ")
                    if request.method == method and path.startswith(start):
                        return _problem(status, detail, self.refuse_title)
            return await call_next(request)

        @app.get("/health")
        def health() -> Response:
            return Response()

        @app.get("/v1/models")
        def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": self.model, "object": "model"}]}

        @app.post("/tokenize")
        def tokenize(body: dict[str, Any]) -> dict[str, Any]:
            tokens = [1] + [2 + ord(letter) % 250 for letter in body["prompt"]]
            return {"count": len(tokens), "max_model_len": 2048, "tokens": tokens}

        @app.get("/metrics")
        def metrics() -> Response:
            name = "vllm:request_success_total"
            lines = [
                "# HELP vllm:request_success_total Count of successfully processed requests.",
                "# TYPE vllm:request_success_total counter",
                f'{name}{{engine="0",finished_reason="stop",model_name="{self.model}"}} {float(self._served)}',
                f'{name}{{engine="0",finished_reason="length",model_name="{self.model}"}} 0.0',
                *self.answers.counters(),
            ]
            return PlainTextResponse("\n".join(lines) + "\n")

        self.answers.install(app)

        @app.post("/webhook")
        def webhook(body: dict[str, Any]) -> Response:
            self.webhooks.append(body)
            return Response(status_code=self.webhook_status)

        @app.get(PREFIX + "/model")
        def facts() -> dict[str, Any]:
            self.facts_asked.set()
            self.facts_free.wait(30)
            return {
                "boot_id": self.boot_id,
                "model": self.model,
                "architecture": self.architecture,
                "layer_class": "ToyLayer" if self.armed else "",
                "num_blocks": self.num_blocks if self.armed else 0,
                "armed": self.armed,
                "refusal": None if self.armed else "ToyLayer is not supported.",
                "scan_refusal": self.scan_refusal,
                "model_digest": self.model_digest if self.armed else None,
                "mode": "eager",
                "dtype": "bfloat16",
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "data_parallel_size": len(self.engines),
                "engines": self.engines,
                "max_tokens": self.max_tokens,
                "gates": self.gates if self.armed else [],
                "self_test": self._self_test,
                "faults_enabled": self.faults_enabled,
                "faults": [fault.model_dump(mode="json") for fault in self.faults.values()],
                "flipwatch_version": self.flipwatch_version,
                "vllm_version": "0.32.0",
                "torch_version": "2.13.0",
                "hardware": "cpu AVX512",
            }

        @app.post(PREFIX + "/self-test")
        def self_test() -> dict[str, Any]:
            self._self_test = (
                {"state": "passed", "reason": f"All {self.num_blocks} gates act."}
                if self.self_test_passes
                else {"state": "failed", "reason": "Gate 3 is inert: the output does not depend on it."}
            )
            return self._self_test

        @app.put(PREFIX + "/gates")
        def gates(change: GateChange) -> Response:
            if not self.armed:
                return _problem(501, "ToyLayer is not supported.")
            if change.boot_id != self.boot_id:
                return _problem(409, "vLLM was restarted meanwhile.")
            if any(gate.block >= self.num_blocks for gate in change.gates):
                return _problem(404, f"The model has {self.num_blocks} blocks.")
            for gate in change.gates:
                self.gates[gate.block] = gate.alpha
            self.void()
            if self.hold_after_gates:
                self.hold()
            return JSONResponse({"gates": self.gates, "paused_seconds": 0.01})

        @app.post(PREFIX + "/repairs")
        def repairs(body: RepairOrder) -> Response:
            if body.boot_id != self.boot_id:
                return _problem(409, "vLLM was restarted meanwhile.")
            report = self.weights.repair(body)
            for repair in report.chunks:
                for piece in repair.pieces:
                    if repair.intact and piece.block is not None:
                        self.harm[piece.block] = 0.0
            self.void()
            return JSONResponse(report.model_dump(mode="json"))

        self.integrity.install(app, lambda: self.boot_id, _problem)

        @app.post(PREFIX + "/measurements")
        def order(body: MeasureOrder) -> Response:
            name = uuid.uuid4().hex
            if body.monitor in MEASURES:
                total = body.plan["steps"] if "steps" in body.plan else len(body.plan["tensors"])
                self._open(name, {"monitor": body.monitor, "order": body.plan, "done": 0, "total": total})
                return JSONResponse(self._progress(name, 0), 201)
            if not self.armed or self.scan_refusal is not None:
                return _problem(501, self.scan_refusal or "ToyLayer is not supported.")
            self.measured.append(body.engine)
            if body.engine is None and len(self.engines) > 1:
                return _problem(422, "engine: Name the one that is measured.")
            if body.monitor == "differential":
                plan = self.states.order(body.plan)
                self._open(
                    name, {"states": plan, "engine": body.engine, "done": 0, "total": self.num_blocks, "void": False}
                )
                return JSONResponse(self._progress(name, 0), 201)
            if body.plan.get("group", 1) > 1:
                return _problem(501, "The fake scans no groups.")
            alphas = body.plan["alphas"]
            longest = max(len(row) for row in body.plan["tokens"])
            if max(longest * max(1, len(alphas)), body.plan.get("tokens_per_step", 512)) > self.max_tokens:
                return _problem(422, f"This server takes {self.max_tokens} tokens at once.")
            self.plans.append(body.plan)
            steps = self.num_blocks * (2 if alphas else 1)
            begun = {
                "plan": body.plan,
                "engine": body.engine,
                "as_if": body.as_if,
                "done": 0,
                "total": steps,
                "void": False,
            }
            self._open(name, begun)
            return JSONResponse(self._progress(name, 0), 201)

        @app.post(PREFIX + "/measurements/{name}/advance")
        def advance(name: str, body: Advance) -> Response:
            if not self._free.is_set():
                self.holding.set()
                self._free.wait(30)
            measurement = self._measurements.get(name)
            if measurement is None:
                return _problem(404, f"There is no measurement {name}.")
            if measurement.get("void"):
                del self._measurements[name]
                return _problem(409, "The measurement is void: the gates changed under it.")
            self.steps.append(body.steps)
            self.patience.append(body.patience_seconds)
            steps = min(body.steps, measurement["total"] - measurement["done"])
            measurement["done"] += steps
            progress = self._progress(name, steps)
            if progress["reading"] is not None:
                del self._measurements[name]
            return JSONResponse(progress)

        @app.delete(PREFIX + "/measurements/{name}")
        def drop(name: str) -> Response:
            if self._measurements.pop(name, None) is None:
                return _problem(404, f"There is no measurement {name}.")
            return Response(status_code=204)

        @app.post(PREFIX + "/faults")
        def inject(fault: FaultOrder) -> Response:
            if not self.faults_enabled:
                return _problem(403, "Faults are off: start vLLM with FLIPWATCH_FAULTS=1.")
            if fault.block is not None and fault.block >= self.num_blocks:
                return _problem(404, f"The model has {self.num_blocks} blocks.")
            inside = "" if fault.block is None else f"layers.{fault.block}."
            found = {
                "id": uuid.uuid4().hex,
                "tensor": f"model.{inside}{fault.tensor}.weight",
                "shared_with": ["lm_head.weight"] if fault.tensor == "embed_tokens" else [],
            }
            made = Fault.model_validate(fault.model_dump() | found)
            self.faults[made.id] = made
            if fault.block is None:
                self.outside = 1.0
            elif fault.kind.value == "nan":
                self.nan.add(fault.block)
            else:
                self.harm[fault.block] = 5.0
            self.void()
            return JSONResponse(made.model_dump(mode="json"), 201)

        @app.delete(PREFIX + "/faults/{name}")
        def heal(name: str) -> Response:
            fault = self.faults.pop(name, None)
            if fault is None:
                return _problem(404, f"There is no fault {name}.")
            if fault.block is None:
                self.outside = 0.0
            else:
                self.harm[fault.block] = 0.0
                self.nan.discard(fault.block)
            self.void()
            return Response(status_code=204)

        return app

    def _open(self, name: str, measurement: dict[str, Any]) -> None:
        """One of the same kind that was under way is dropped: there is one of the bytes and one of the model."""
        others = self._measurements.items()
        kept = {other: one for other, one in others if ("monitor" in one) != ("monitor" in measurement)}
        self._measurements = kept | {name: measurement}

    def _progress(self, name: str, steps: int) -> dict[str, Any]:
        measurement = self._measurements[name]
        tokens = measurement.get("plan", {}).get("tokens_per_step", 0)
        step = self.seconds_per_step + tokens * self.seconds_per_token
        complete = measurement["done"] >= measurement["total"]
        return {
            "id": name,
            "steps_done": measurement["done"],
            "steps_total": measurement["total"],
            "seconds": steps * step,
            "dearest_seconds": step if steps else 0.0,
            "requests": self.requests,
            "reading": self._read(measurement) if complete else None,
        }


def _problem(status: int, detail: str, title: str = "Refused") -> JSONResponse:
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    return JSONResponse(body, status, media_type="application/problem+json")
