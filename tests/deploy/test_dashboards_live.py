"""Every query of the boards against a real Prometheus that scrapes a sidecar's metrics, vLLM's and dcgm-exporter's."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from flipwatch.monitors.alpha_scan import Thresholds
from flipwatch.monitors.canary.finding import Symptom
from flipwatch.monitors.finding import Health
from flipwatch.monitors.fingerprint.facts import Method
from flipwatch.service.metrics import SidecarCollector
from flipwatch.service.mitigation_steps import Gate
from flipwatch.service.records import MitigationAction, MitigationRecord, MitigationState, Mode

from ..service.metrics_rig import ANSWERS, FINDING, known
from ..service.toy_profile import PROFILE
from ..vllm_server import WITH_THE_TESTS, free_port
from .dashboards import Query, boards, panels, queries

JSON = dict[str, Any]

# Scrapes are half a second apart.
WINDOWS = {"__rate_interval": "4s", "__range": "1m", "__interval": "1s"}
POD = {"namespace": "models", "pod": "vllm-0"}
# In the place of the rules that ship, which have tests of their own.
RULES = {
    "groups": [
        {
            "name": "test",
            "rules": [
                {"alert": "FlipwatchTest", "expr": "flipwatch_block_flagged == 1", "labels": {"severity": "critical"}}
            ],
        }
    ]
}
SKIP = MitigationRecord(
    id="m",
    action=MitigationAction.SKIP,
    blocks=(1,),
    alpha=0.0,
    reason="test",
    actor="alice",
    automatic=False,
    mode=Mode.ENFORCE,
    state=MitigationState.ACTIVE,
    gates_before=(Gate(block=1, alpha=1.0),),
    boot_id="boot",
    created_at=1.0,
    updated_at=1.0,
    message="Block 1 is left out.",
)


class Neighbours(Collector):
    """What the boards read of vLLM and of dcgm-exporter, with the labels that those give it."""

    def collect(self) -> Iterable[Metric]:
        model = {"engine": "0", "model_name": "toy"}
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            yield _one(GaugeMetricFamily, f"vllm:{name}", model, 0.5)
        yield _one(CounterMetricFamily, "vllm:generation_tokens", model, 100)
        card = {"gpu": "3", "UUID": "GPU-3", "device": "nvidia3", "modelName": "NVIDIA H200", "Hostname": "127.0.0.1"}
        yield _one(GaugeMetricFamily, "DCGM_FI_DEV_XID_ERRORS", {**card, "container": "vllm", **POD}, 63)


def _one(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, labels: Mapping[str, str], value: float
) -> Metric:
    made = family(name, "As the other exporter says it.", labels=list(labels))
    made.add_metric(list(labels.values()), value)
    return made


class Scene:
    """A sidecar's metrics that can change, and a Prometheus that scrapes them."""

    def __init__(self, url: str, stop_sidecar: Callable[[], None]) -> None:
        self.live, self.alerts = known()
        self.mitigations: list[MitigationRecord] = []
        self.url = url
        self.stop_sidecar = stop_sidecar

    def collector(self) -> Collector:
        """What the sidecar exports."""
        return SidecarCollector(
            self.live,
            self.alerts,
            thresholds=Thresholds(),
            profile=lambda: PROFILE,
            open_mitigations=lambda: self.mitigations,
            mitigations_done=lambda: {MitigationAction.SKIP: 2},
            mitigations_failed=dict,
            repaired_chunks=lambda: {Method.PARITY: 3},
            deliveries=lambda: (3, 1),
            recorded_at=lambda: PROFILE.recorded_at,
            expected_at=lambda: PROFILE.recorded_at,
        )

    def ask(self, expr: str) -> list[JSON]:
        """The series of an instant query; what Prometheus refuses is an assertion with its words."""
        answer = httpx.post(f"{self.url}/api/v1/query", data={"query": expr}, timeout=10).json()
        assert answer["status"] == "success", f"{answer.get('error')}: {expr}"
        return answer["data"]["result"]

    def value(self, expr: str) -> float | None:
        """The value of the only series; None when there is none."""
        series = self.ask(expr)
        assert len(series) <= 1, series
        return float(series[0]["value"][1]) if series else None


def _until(
    what: str, true: Callable[[], bool], missing: Callable[[], object] = lambda: "", seconds: float = 60
) -> None:
    """Wait for it; a busy machine takes its time.  `missing`: what there is to say when it does not come."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"Not within {seconds} s: {what} {missing()}"
        time.sleep(0.1)


@contextmanager
def _served(collector: Collector) -> Iterator[tuple[int, Callable[[], None]]]:
    """The metrics over HTTP on loopback: the port, and what ends it."""
    made = CollectorRegistry(auto_describe=False)
    made.register(collector)
    port = free_port()
    server, thread = start_http_server(port, addr="127.0.0.1", registry=made)

    def stop() -> None:
        if thread.is_alive():
            server.shutdown()
            server.server_close()
            thread.join()

    try:
        yield port, stop
    finally:
        stop()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """The sidecar in a state in which everything is known, its neighbours, and Prometheus."""
    prometheus = shutil.which("prometheus")
    assert prometheus is not None, "prometheus is missing: apt-get install --no-install-recommends prometheus"
    port = free_port()
    with ExitStack() as stack:
        made = Scene(f"http://127.0.0.1:{port}", lambda: None)
        sidecar, made.stop_sidecar = stack.enter_context(_served(made.collector()))
        others, _ = stack.enter_context(_served(Neighbours()))
        jobs = {"flipwatch": {"targets": [f"127.0.0.1:{sidecar}"], "labels": POD}}
        # dcgm-exporter's own pod: Prometheus renames the pod that the exporter tells to exported_pod.
        jobs["others"] = {"targets": [f"127.0.0.1:{others}"], "labels": {"namespace": "gpus", "pod": "dcgm-0"}}
        (tmp_path / "rules.yml").write_text(yaml.safe_dump(RULES))
        (tmp_path / "prometheus.yml").write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
                    "rule_files": ["rules.yml"],
                    "scrape_configs": [{"job_name": name, "static_configs": [at]} for name, at in jobs.items()],
                }
            )
        )
        log = stack.enter_context((tmp_path / "log").open("w"))
        process = subprocess.Popen(
            [
                *WITH_THE_TESTS,
                prometheus,
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _until("Prometheus answers", lambda: process.poll() is None and _ready(made.url))
            yield made
        finally:
            process.terminate()
            process.wait(30)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_every_query_has_data(scene: Scene) -> None:
    """All panels, variables and annotations; the labels of legends and tables are there."""
    pending = {query.expr: query for query in queries(WINDOWS)}
    labels: dict[tuple[str, str], set[str]] = {}

    def ask() -> None:
        for expr, query in list(pending.items()):
            if series := scene.ask(expr):
                del pending[expr]
                names = {name for one in series for name in one["metric"]}
                legend = set(re.findall(r"\{\{(\w+)\}\}", query.target.get("legendFormat", "")))
                assert legend <= names, f"{query.board}: {query.title}: a legend has labels that no series has"
                labels.setdefault((query.board, query.title), set()).update(names)

    def left() -> list[Query]:
        ask()
        return [query for query in pending.values() if query.kind != "annotation"]

    _until("data for all", lambda: not left(), lambda: [(query.title, query.expr) for query in left()])
    for uid, board in boards().items():
        for panel in panels(board):
            if panel["type"] == "table" and panel["transformations"][0]["id"] == "merge":
                columns = panel["transformations"][1]["options"]
                shown = {name for name in columns["indexByName"] if not name.startswith("Value")}
                hidden = {name for name in columns["excludeByName"] if not name.startswith("Value")} - {"Time"}
                assert shown | hidden <= labels[uid, panel["title"]], panel["title"]

    def marked(*names: str) -> bool:
        ask()
        return not {query.title for query in pending.values()} & set(names)

    scene.live.restarts_seen += 1
    scene.mitigations = [SKIP]
    _until("marks of what begins", lambda: marked("Mitigation on", "vLLM restarted"))
    assert not marked("Mitigation off")
    scene.mitigations = []
    _until("a mark of what ends", lambda: marked("Mitigation off"))
    assert not pending


def test_since_when_and_away(scene: Scene) -> None:
    """A block that is flagged later tells when; a sidecar that is gone is neither good nor forgotten."""
    found = {query.title: [] for query in queries()}
    for query in queries(WINDOWS):
        found[query.title].append(query.expr)
    verdict, since = found["Verdict now"][0], found["Blocks that something points at"][1]
    reached, away = found["Sidecars"][:2]
    xids = found["Xid errors of the GPUs under these servers"]
    _until("a scrape", lambda: scene.value(verdict) is not None and len(scene.ask(since)) == 1)
    assert scene.value(verdict) == 3, "weight_fault is the third verdict"
    assert scene.value(away) == 0
    _until("a scrape of the neighbours", lambda: bool(scene.ask(xids[0])))
    assert [(scene.value(xids[0])), scene.value(xids[1])] == [63, 3], "the last Xid, and the verdict beside it"
    (first,) = scene.ask(since)
    assert first["metric"]["block"] == "2"
    # Two scrapes with the block unflagged.
    start = time.time()
    _until("two seconds of scrapes", lambda: time.time() > start + 2)
    blocks = tuple(block.model_copy(update={"flagged": True}) for block in FINDING.blocks)
    scene.live.found(FINDING.model_copy(update={"blocks": blocks}), "later", 1_800_000_100.0)
    changed = time.time()
    _until("all blocks flagged", lambda: len(scene.ask(since)) == 3)
    times = {one["metric"]["block"]: float(one["value"][1]) / 1000 for one in scene.ask(since)}
    assert abs(times["0"] - changed) < 2.5, "the time at which it changed, give or take a step and a scrape"
    assert times["2"] < changed - 1.5, "flagged all the time: as far back as Prometheus knows"
    symptom = found["Symptom of the canary's answers"][0]
    assert scene.value(symptom) == 7, "changed is the last symptom"
    # A canary that does not know has no symptom either.
    scene.live.monitors = (*scene.live.monitors, ANSWERS.monitor)
    unknown = {"health": Health.UNKNOWN, "symptom": Symptom.NONE}
    scene.live.found(ANSWERS.model_copy(update=unknown), "canary", 1_800_000_950.0)
    _until("the canary does not know", lambda: scene.value(symptom) == 0)
    scene.stop_sidecar()
    _until("the sidecar is away", lambda: scene.value(away) == 1)
    assert scene.value(verdict) == 0
    assert scene.value(reached) == 1
    assert scene.ask(found["Servers by verdict"][0]) == []
    assert [scene.ask(expr) for expr in found["Probe and gates"]] == [[], []]
