"""The example of Alertmanager in a real Alertmanager: what holds back what, on the same server only."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from ..vllm_server import free_port
from .rules import ROOT, alerts

EXAMPLE = ROOT / "deploy" / "alertmanager" / "alertmanager.yml"


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The example as it is, but that its webhook leads to a port of this machine where nobody listens."""
    program = shutil.which("prometheus-alertmanager")
    assert program is not None, "apt-get install --no-install-recommends prometheus-alertmanager"
    folder: Path = tmp_path_factory.mktemp("alertmanager")
    config, port = folder / "alertmanager.yml", free_port()
    text = EXAMPLE.read_text(encoding="utf-8")
    assert "http://flipwatch:9477" in text
    config.write_text(text.replace("http://flipwatch:9477", "http://127.0.0.1:1"), encoding="utf-8")
    arguments = [f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}", f"--storage.path={folder}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, *arguments, "--cluster.listen-address="], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            _until(lambda: _ready(client), (folder / "log").read_text)
            yield client
    finally:
        process.terminate()
        process.wait(timeout=30)


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def _until(true: Callable[[], bool], said: Callable[[], str]) -> None:
    deadline = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)


def _fire(client: httpx.Client, instance: str, *names: str, **labels: str) -> None:
    """Alerts of one sidecar, as the rules make them."""
    severities = {alert["alert"]: alert["labels"]["severity"] for alert in alerts()}
    body = [
        {"labels": {"alertname": name, "severity": severities[name], "job": "j", "instance": instance, **labels}}
        for name in names
    ]
    client.post("/api/v2/alerts", json=body).raise_for_status()


def _held_back(client: httpx.Client, instance: str) -> dict[str, bool]:
    """Alert -> whether another one inhibits it."""
    found = client.get("/api/v2/alerts", params={"filter": f'instance="{instance}"'}).raise_for_status().json()
    return {alert["labels"]["alertname"]: bool(alert["status"]["inhibitedBy"]) for alert in found}


def _comes_to(client: httpx.Client, instance: str, wanted: dict[str, bool]) -> None:
    _until(lambda: _held_back(client, instance) == wanted, lambda: str(_held_back(client, instance)))


def test_the_verdict_holds_back_its_symptoms_on_the_same_server(alertmanager: httpx.Client) -> None:
    """One page for one fault; another server's symptoms, and what the verdict says nothing about, go through."""
    symptoms = ("FlipwatchBlockFlagged", "FlipwatchWeightsChanged", "FlipwatchAnswersWrong", "FlipwatchModelNotFinite")
    _fire(alertmanager, "a", "FlipwatchVerdict", verdict="weight_fault")
    _fire(alertmanager, "a", *symptoms, "FlipwatchMitigationFailed")
    _fire(alertmanager, "b", *symptoms)
    wanted = {"FlipwatchVerdict": False, "FlipwatchMitigationFailed": False, **dict.fromkeys(symptoms, True)}
    _comes_to(alertmanager, "a", wanted)
    _comes_to(alertmanager, "b", dict.fromkeys(symptoms, False))


def test_a_latent_verdict_holds_back_nothing(alertmanager: httpx.Client) -> None:
    """It is a warning: the page of changed weights must not hide behind it."""
    _fire(alertmanager, "c", "FlipwatchVerdictLatent", "FlipwatchWeightsChanged", verdict="latent_weight_fault")
    _comes_to(alertmanager, "c", {"FlipwatchVerdictLatent": False, "FlipwatchWeightsChanged": False})


@pytest.mark.parametrize("cause", ["FlipwatchTargetDown", "FlipwatchSidecarDown", "FlipwatchHung"])
def test_what_keeps_all_monitors_from_working_holds_back_that_they_are_late(
    alertmanager: httpx.Client, cause: str
) -> None:
    """Late, failing and unknown are told by their cause; that a model is bad is not held back by it."""
    late = ("FlipwatchScanStale", "FlipwatchSweepStale", "FlipwatchCanaryStale", "FlipwatchUnknown")
    _fire(alertmanager, cause, cause, *late, "FlipwatchWeightsChanged")
    wanted = {cause: False, "FlipwatchWeightsChanged": False, **dict.fromkeys(late, True)}
    _comes_to(alertmanager, cause, wanted)


def test_one_message_for_each_server(alertmanager: httpx.Client) -> None:
    """Pages are grouped by the labels of the target, and the repair gets the verdict alone."""
    _fire(alertmanager, "d", "FlipwatchVerdict", verdict="weight_fault")
    _fire(alertmanager, "d", "FlipwatchBlockFlagged", block="1")
    _fire(alertmanager, "d", "FlipwatchBlockFlagged", block="2")

    def groups() -> list[tuple[str, int]]:
        found = alertmanager.get("/api/v2/alerts/groups", params={"filter": 'instance="d"'}).raise_for_status().json()
        return sorted((group["receiver"]["name"], len(group["alerts"])) for group in found)

    _until(lambda: groups() == [("flipwatch-repair", 1), ("page", 3)], lambda: str(groups()))
