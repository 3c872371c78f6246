"""The metrics: a golden file of a fixed state, promtool's opinion, and what is absent."""

import re
import shutil
import subprocess
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from flipwatch.service.live import Live

from .metrics_rig import DIVERGENCE, FINDING, VERDICT, known, registry
from .toy_profile import PROFILE

GOLDEN = Path(__file__).parent / "golden" / "metrics.txt"

_WITHOUT_PROFILE = {
    "blocks": tuple(
        block.model_copy(update={"bss_profile_z": None, "without_drift_nats": None}) for block in FINDING.blocks
    ),
    "drift_nats": None,
    "drift_t": None,
    "profile_recorded_at": None,
}


def _text(collected: CollectorRegistry) -> str:
    text = generate_latest(collected).decode()
    return re.sub(r"(flipwatch_build_info\{)[^}]*", r'\1python_version="X",version="X"', text)


def test_the_output_is_the_golden_file() -> None:
    """Names, labels, HELP and TYPE are an interface; after a wanted change write the output to the golden file."""
    assert _text(registry(*known(), PROFILE, DIVERGENCE.recorded_at)) == GOLDEN.read_text(encoding="utf-8")


def test_promtool_has_no_complaint() -> None:
    """Prometheus' own linter accepts the whole output; it is in Debian's package `prometheus`."""
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is missing: apt-get install --no-install-recommends prometheus"
    text = _text(registry(*known(), PROFILE, DIVERGENCE.recorded_at))
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_nothing_is_claimed_before_anything_isknown() -> None:
    """No block, no loss, no time of a scan: absent, not zero; counters are there from the start."""
    text = _text(registry(Live(monitors=("alpha_scan",))))
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert "flipwatch_up 0.0" in samples
    assert 'flipwatch_health_state{monitor="alpha_scan",state="unknown"} 1.0' in samples
    assert 'flipwatch_scans_skipped_total{reason="running"} 0.0' in samples
    unknown = (
        "flipwatch_block_",
        "flipwatch_base_loss",
        "flipwatch_last_scan",
        "flipwatch_scan_passes",
        "flipwatch_mitigation_active",
        "flipwatch_profile_",
        "flipwatch_weights_",
        "flipwatch_checkpoint_",
        "flipwatch_sweep_timestamp",
        "flipwatch_sweep_seconds",
        "flipwatch_sweep_duration_seconds",
        "flipwatch_schedule_seconds",
        "flipwatch_drift_nats",
        "flipwatch_drift_t{",
        "flipwatch_walk_divergence",
        "flipwatch_recording_timestamp",
        "flipwatch_differential_timestamp",
        "flipwatch_differential_seconds",
    )
    assert not [line for line in samples if line.startswith(unknown)]
    assert "NaN" not in text


def test_without_a_profile_nothing_is_taken_against_one() -> None:
    """A scan without a clean profile has z over the blocks only, no drift, and says that none was used."""
    live, alerts = known()
    live.found(FINDING.model_copy(update=_WITHOUT_PROFILE), "finding", 1_800_000_900.0)
    text = _text(registry(live, alerts))
    assert "flipwatch_profile_used 0.0" in text
    assert 'reference="blocks"' in text
    for absent in (
        "without_drift_nats{",
        'reference="profile"',
        "flipwatch_drift_nats{",
        "flipwatch_profile_info{",
        "_timestamp_seconds 1.7",
    ):
        assert absent not in text


def test_a_loss_that_is_not_finite_is_absent_and_said() -> None:
    """base_loss_finite is 0, base_loss_nats is not there at all."""
    live, alerts = known()
    live.found(FINDING.model_copy(update={"base_loss_nats": None}), "finding", 1_800_000_900.0)
    text = _text(registry(live, alerts))
    assert 'flipwatch_base_loss_finite{model_name="toy"} 0.0' in text
    assert "flipwatch_base_loss_nats{" not in text


def test_an_alert_of_the_verdict_says_which_one_also_when_that_is_not_known_any_more() -> None:
    """It goes on with the verdict that made it while the evidence is lost, and the verdict of now is unknown."""
    live, alerts = known()
    alerts.judge(live.verdict(), 1_800_000_900.0, "toy")
    assert 'flipwatch_verdict_firing{verdict="weight_fault"} 1.0' in _text(registry(live, alerts))
    live.lost("The probe does not answer.")
    live.now = lambda: 1_800_999_999.0
    alerts.judge(live.verdict(), 1_800_999_999.0, "toy")
    text = _text(registry(live, alerts))
    assert 'flipwatch_verdict{verdict="unknown"} 1.0' in text
    assert 'flipwatch_verdict_firing{verdict="weight_fault"} 1.0' in text
    assert 'flipwatch_verdict_firing{verdict="hung"} 0.0' in text


def test_nothing_is_said_about_weights_of_a_server_that_is_away_or_gone() -> None:
    """Gauges of bytes are absent while the probe is away; a check of another process is none of this one."""
    live, alerts = known()
    live.up = False
    text = _text(registry(live, alerts))
    assert not [line for line in text.splitlines() if line.startswith(("flipwatch_weights_", "flipwatch_checkpoint_"))]
    assert "flipwatch_sweeps_total 9.0" in text
    live.up = True
    live.integrity.verdict = VERDICT.model_copy(update={"boot_id": "the one before"})
    assert "flipwatch_checkpoint_verified{" not in _text(registry(live, alerts))
    live.integrity.verdict = VERDICT.model_copy(update={"problems": ["a.safetensors is not in the manifest."]})
    assert 'flipwatch_checkpoint_verified{model_name="toy"} 0.0' in _text(registry(live, alerts))
