"""The sidecar's Prometheus metrics: fresh families from the live state on each scrape.

What is not known is absent; nothing is ever NaN.  `docs/` and the alert rules use these names: they are an interface.
"""

import platform
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import __version__
from ..monitors.alpha_scan import AlphaScan, AlphaScanFinding, Profile, Thresholds
from ..monitors.finding import Health
from ..monitors.fingerprint.facts import Method
from ..monitors.verdict.verdict import Verdict
from .alert import ALERTING, NAMES, VERDICT
from .alerts import Alerts
from .drain_orders import drain_in_effect
from .live import Live
from .metrics_canary import of_canary
from .metrics_differential import of_differential
from .metrics_integrity import counter, of_weights, skipped
from .metrics_scores import of_blocks, of_profile, of_thresholds
from .records import MitigationAction, MitigationRecord, MitigationState
from .sidecar import Sidecar
from .store import StoreError


class SidecarCollector(Collector):
    """Everything that `flipwatch serve` exports about the served model and about itself."""

    def __init__(
        self,
        live: Live,
        alerts: Alerts,
        *,
        thresholds: Thresholds,
        profile: Callable[[], Profile | None],
        open_mitigations: Callable[[], Iterable[MitigationRecord]],
        mitigations_done: Callable[[], Mapping[MitigationAction, int]],
        mitigations_failed: Callable[[], Mapping[MitigationAction, int]],
        repaired_chunks: Callable[[], Mapping[Method, int]],
        deliveries: Callable[[], tuple[int, int]],
        recorded_at: Callable[[], float | None],
        expected_at: Callable[[], float | None],
    ) -> None:
        self._live = live
        self._alerts = alerts
        self._thresholds = thresholds
        self._profile = profile
        self._open_mitigations = open_mitigations
        self._mitigations_done = mitigations_done
        self._mitigations_failed = mitigations_failed
        self._repaired_chunks = repaired_chunks
        self._deliveries = deliveries
        self._recorded_at = recorded_at
        self._expected_at = expected_at

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry must not scrape just to register."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All families."""
        yield _gauge("up", "Whether the probe inside vLLM answers (1) or not (0).", int(self._live.up))
        build = GaugeMetricFamily(
            "flipwatch_build_info", "Versions of the sidecar; always 1.", labels=["version", "python_version"]
        )
        build.add_metric([__version__, platform.python_version()], 1)
        yield build
        yield from self._model()
        yield from self._blocks()
        yield from self._health()
        yield from self._scans()
        yield from self._mitigations()
        yield from self._alerting()

    @property
    def _name(self) -> str:
        facts = self._live.facts
        return self._live.model_name or (facts.model if facts is not None else "")

    @property
    def _finding(self) -> AlphaScanFinding | None:
        finding = self._live.state(AlphaScan.name).finding
        return finding if isinstance(finding, AlphaScanFinding) else None

    def _model(self) -> Iterable[Metric]:
        info = GaugeMetricFamily(
            "flipwatch_model_info",
            "The served model as the probe sees it; always 1.",
            labels=["model_name", "architecture", "layer_class", "mode", "dtype", "vllm_version"],
        )
        facts = self._live.facts
        if self._live.up and facts is not None:
            labels = [facts.architecture, facts.layer_class, facts.mode, facts.dtype, facts.vllm_version]
            info.add_metric([self._name, *labels], 1)
        yield info
        usable = GaugeMetricFamily(
            "flipwatch_gates_usable", "Whether gates are installed and were seen to act (1) or not (0)."
        )
        if self._live.up:
            usable.add_metric([], int(self._live.gates_refusal() is None))
        yield usable

    def _blocks(self) -> Iterable[Metric]:
        yield from of_blocks(self._finding, self._name)
        yield from of_thresholds(self._thresholds)
        yield from of_profile(self._profile(), self._finding, self._name)
        gate = GaugeMetricFamily(
            "flipwatch_block_gate",
            "Alpha of the block as served: 1 normal, 0 left out.",
            labels=["model_name", "block"],
        )
        if self._live.up and self._live.facts is not None:
            for at, alpha in enumerate(self._live.facts.gates):
                gate.add_metric([self._name, str(at)], alpha)
        yield gate

    def _health(self) -> Iterable[Metric]:
        loss = GaugeMetricFamily(
            "flipwatch_base_loss_nats",
            "Loss of the model as served on the validation set, nats per scored token, from the last scan; "
            "absent when it is not finite.",
            labels=["model_name"],
        )
        finite = GaugeMetricFamily(
            "flipwatch_base_loss_finite",
            "Whether that loss is a finite number (1) or not (0).",
            labels=["model_name"],
        )
        finding = self._finding
        if finding is not None and finding.base_loss_nats is not None:
            loss.add_metric([self._name], finding.base_loss_nats)
            finite.add_metric([self._name], 1)
        elif finding is not None and finding.health is Health.FAILED:
            finite.add_metric([self._name], 0)
        yield from (loss, finite)
        verdict = GaugeMetricFamily(
            "flipwatch_verdict",
            "What all evidence together says: 1 for the verdict of now, 0 for the others.",
            labels=["verdict"],
        )
        now = self._live.verdict().verdict
        for each in Verdict:
            verdict.add_metric([each.value], int(each is now))
        yield verdict
        state = GaugeMetricFamily(
            "flipwatch_health_state",
            "Health as the monitor sees it: 1 for the state it is in, 0 for the others.",
            labels=["monitor", "state"],
        )
        for known in self._live.states():
            for health in Health:
                state.add_metric([known.monitor, health.value], int(known.health is health))
        yield state

    def _scans(self) -> Iterable[Metric]:
        schedule = GaugeMetricFamily(
            "flipwatch_schedule_seconds",
            "Time from one run of the monitor by the clock to the next; absent when there are none.",
            labels=["monitor"],
        )
        for monitor, minutes in self._live.every_minutes.items():
            if minutes is not None:
                schedule.add_metric([monitor], 60.0 * minutes)
        yield schedule
        tally = self._live.tally(AlphaScan.name)
        at = GaugeMetricFamily(
            "flipwatch_last_scan_timestamp_seconds", "Unix time at which the last successful scan ended."
        )
        if tally.last_at is not None:
            at.add_metric([], tally.last_at)
        yield at
        took = GaugeMetricFamily(
            "flipwatch_scan_duration_seconds", "Wall time of the last successful scan, pauses included."
        )
        if tally.last_seconds is not None:
            took.add_metric([], tally.last_seconds)
        yield took
        passes = GaugeMetricFamily(
            "flipwatch_scan_passes", "What the last scan cost, in forward passes over the validation set."
        )
        if self._finding is not None:
            passes.add_metric([], self._finding.passes)
        yield passes
        yield counter("scans", "Scans that were started.", tally.started)
        yield counter("scan_failures", "Scans that could not be done.", tally.failures)
        yield skipped("scans", "Scans", tally)
        yield counter("scan_parts", "Parts of scans; the engine serves between two of them.", tally.parts)
        yield counter("engine_held_seconds", "Time for which parts of scans held vLLM's engine.", tally.held_seconds)
        yield from of_weights(self._live, self._name)
        yield from of_differential(self._live, self._name, self._recorded_at())
        yield from of_canary(self._live, self._name, self._expected_at())
        yield counter("vllm_restarts_seen", "Restarts of vLLM that the sidecar noticed.", self._live.restarts_seen)

    def _mitigations(self) -> Iterable[Metric]:
        for name, text, counts in (
            ("mitigations", "Mitigations that became active, and verified repairs.", self._mitigations_done()),
            ("mitigation_failures", "Mitigations and undos that failed, or may have.", self._mitigations_failed()),
        ):
            family = CounterMetricFamily(f"flipwatch_{name}", text, labels=["action"])
            for action in MitigationAction:
                family.add_metric([action.value], counts.get(action, 0))
            yield family
        chunks = CounterMetricFamily(
            "flipwatch_repaired_chunks",
            "Chunks of the weights that were put right, by where their bytes came from.",
            labels=["method"],
        )
        for method in Method:
            chunks.add_metric([method.value], self._repaired_chunks().get(method, 0))
        yield chunks
        active = GaugeMetricFamily(
            "flipwatch_mitigation_active",
            "Whether an active mitigation holds the block (1) or not (0).",
            labels=["model_name", "block"],
        )
        facts = self._live.facts
        try:
            records = list(self._open_mitigations())
        except StoreError:
            # Not known is absent.
            return
        if self._live.up and facts is not None:
            held = {
                block
                for record in records
                if record.state is MitigationState.ACTIVE and record.boot_id == facts.boot_id
                for block in record.held
            }
            for block in range(facts.num_blocks):
                active.add_metric([self._name, str(block)], int(block in held))
        yield active
        drained = drain_in_effect(records) is not None
        yield GaugeMetricFamily(
            "flipwatch_drained", "Whether a drain keeps /readyz at 503 (1) or not (0).", int(drained)
        )

    def _alerting(self) -> Iterable[Metric]:
        firing = GaugeMetricFamily(
            "flipwatch_alert_firing", "Whether Flipwatch's own alert fires (1) or not (0).", labels=["alert"]
        )
        names = {alert.name for alert in self._alerts.firing}
        for name in NAMES:
            firing.add_metric([name], int(name in names))
        yield firing
        of_verdict = GaugeMetricFamily(
            "flipwatch_verdict_firing",
            "Whether FlipwatchVerdict fires for the verdict (1) or not (0); it goes on while the verdict is unknown.",
            labels=["verdict"],
        )
        for verdict in ALERTING:
            fires = any(alert.name == VERDICT and alert.verdict is verdict for alert in self._alerts.firing)
            of_verdict.add_metric([verdict.value], int(fires))
        yield of_verdict
        sent, failures = self._deliveries()
        yield counter("alerts_sent", "Alert messages that the webhook accepted.", sent)
        yield counter("alert_failures", "Alert messages that could not be delivered.", failures)


def registry(sidecar: Sidecar) -> CollectorRegistry:
    """A registry of its own for one app."""
    made = CollectorRegistry(auto_describe=False)
    webhook = sidecar.webhook
    made.register(
        SidecarCollector(
            sidecar.live,
            sidecar.alerts,
            thresholds=sidecar.settings.alpha_scan,
            profile=lambda: sidecar.baseline.current,
            open_mitigations=sidecar.store.open_mitigations,
            mitigations_done=lambda: sidecar.mitigator.done,
            mitigations_failed=lambda: sidecar.mitigator.failed,
            repaired_chunks=lambda: sidecar.mitigator.repaired,
            deliveries=lambda: (0, 0) if webhook is None else (webhook.sent, webhook.failures),
            recorded_at=lambda: sidecar.recordings.recorded_at,
            expected_at=lambda: sidecar.expectations.recorded_at,
        )
    )
    ProcessCollector(registry=made)
    PlatformCollector(registry=made)
    return made


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"flipwatch_{name}", text, value=value)
