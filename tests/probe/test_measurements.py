"""Measurements of a worker between their parts, without a model: two kinds at a time, each void on its own."""

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flipwatch.monitors.alpha_scan import AlphaScan
from flipwatch.monitors.fingerprint.facts import RECORD
from flipwatch.monitors.fingerprint.judgement import NAME as FINGERPRINT
from flipwatch.probe import worker
from flipwatch.probe.refused import Refused
from flipwatch.probe.worker import WorkerProbe

STEPS = 4


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> WorkerProbe:
    """A worker whose measurements only count their steps."""

    class Reading:
        def model_dump(self, mode: str) -> dict[str, Any]:
            return {"mode": mode}

    def begin(armed: Any, name: str, plan: dict[str, Any], as_if: Any) -> tuple[Generator[None, None, Reading], int]:
        def steps() -> Generator[None, None, Reading]:
            for _ in range(STEPS):
                yield
            return Reading()

        return steps(), STEPS

    monkeypatch.setattr(worker, "begin", begin)
    monkeypatch.setattr(worker, "_served", lambda: SimpleNamespace(device=torch.device("cpu")))
    return WorkerProbe()


def test_a_sweep_and_a_scan_advance_side_by_side(probe: WorkerProbe) -> None:
    """Beginning one drops neither the other nor its progress; each gives its reading."""
    probe.open("scan", AlphaScan.name, {})
    assert probe.advance("scan", 2)["steps_done"] == 2
    probe.open("sweep", FINGERPRINT, {})
    assert probe.advance("sweep", 3)["steps_done"] == 3
    assert probe.advance("scan", 2)["reading"] == {"mode": "json"}
    assert probe.advance("sweep", 9)["reading"] == {"mode": "json"}
    for done in ("scan", "sweep"):
        with pytest.raises(Refused, match="There is no measurement"):
            probe.advance(done, 1)


def test_one_of_the_same_kind_replaces_the_other(probe: WorkerProbe) -> None:
    """A record of new baselines drops a sweep, and a scan beside them goes on."""
    probe.open("scan", AlphaScan.name, {})
    probe.open("sweep", FINGERPRINT, {})
    probe.open("record", RECORD, {})
    with pytest.raises(Refused, match="There is no measurement sweep"):
        probe.advance("sweep", 1)
    assert probe.advance("record", 1)["steps_done"] == 1
    probe.close("record")
    assert probe.advance("scan", 1)["steps_done"] == 1


def test_a_change_of_the_model_voids_both(probe: WorkerProbe) -> None:
    """Each is refused once as void, and is then unknown."""
    probe.open("scan", AlphaScan.name, {})
    probe.open("sweep", FINGERPRINT, {})
    probe._version += 1
    for void in ("scan", "sweep"):
        with pytest.raises(Refused, match="The model changed"):
            probe.advance(void, 1)
        with pytest.raises(Refused, match="There is no measurement"):
            probe.advance(void, 1)


def test_the_dearest_step_of_a_part_is_told(probe: WorkerProbe) -> None:
    """It lies between the average of the part's steps and the whole part."""
    probe.open("scan", AlphaScan.name, {})
    part = probe.advance("scan", 3)
    assert part["seconds"] / 4 <= part["dearest_seconds"] <= part["seconds"]
