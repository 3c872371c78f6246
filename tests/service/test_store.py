"""The store: what comes back after a restart, what retention keeps, and one sentence for each way to be unusable."""

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flipwatch.monitors.finding import Health
from flipwatch.monitors.wire import Gate
from flipwatch.service.records import (
    Event,
    FindingRecord,
    LossState,
    MitigationAction,
    MitigationRecord,
    MitigationState,
    Mode,
    ScanRecord,
    ScanState,
    ScanTrigger,
)
from flipwatch.service.store import SCHEMA_VERSION, Store, StoreError

from .toy_profile import PROFILE


def scan(number: int, state: ScanState = ScanState.DONE, finding_id: str | None = None) -> ScanRecord:
    """A scan made at second `number`."""
    return ScanRecord(
        id=f"s{number}",
        monitor="alpha_scan",
        state=state,
        trigger=ScanTrigger.SCHEDULE,
        created_at=float(number),
        finding_id=finding_id,
    )


def finding(number: int, health: Health = Health.OK, monitor: str = "alpha_scan") -> FindingRecord:
    """A finding made at second `number`."""
    body: dict[str, Any] = {"monitor": monitor, "health": health.value, "reason": f"finding {number}", "places": []}
    return FindingRecord(
        id=f"f{number}", scan_id=f"s{number}", monitor=monitor, created_at=float(number), health=health, body=body
    )


def mitigation(number: int, state: MitigationState) -> MitigationRecord:
    """A mitigation asked for at second `number`."""
    return MitigationRecord(
        id=f"m{number}",
        action=MitigationAction.SKIP,
        blocks=(4,),
        alpha=0.0,
        reason="test",
        actor="alice",
        automatic=False,
        mode=Mode.ENFORCE,
        state=state,
        loss_before=7.16,
        loss_before_state=LossState.FINITE,
        gates_before=(Gate(block=4, alpha=1.0),),
        boot_id="boot-1",
        created_at=float(number),
        updated_at=float(number),
        message="Something with 1 number.",
    )


def event(number: int) -> Event:
    """An event at second `number`."""
    return Event(at=float(number), actor="alice", what="tested", detail={"number": number})


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    """Scans, findings, readings, mitigations and events are the same after the file was closed and opened."""
    path = tmp_path / "flipwatch.db"
    store = Store(path)
    store.save_scan(scan(1, finding_id="f1"))
    store.add_finding(finding(1), [{"alphas": [0.0, 0.7], "base_nats": [None]}, {"alphas": [0.0], "base_nats": [2.5]}])
    store.save_mitigation(mitigation(1, MitigationState.APPLYING), event(1))
    store.close()

    store = Store(path)
    assert store.scan("s1") == scan(1, finding_id="f1")
    assert store.finding("f1") == finding(1)
    assert store.readings("f1") == [{"alphas": [0.0, 0.7], "base_nats": [None]}, {"alphas": [0.0], "base_nats": [2.5]}]
    assert store.mitigation("m1") == mitigation(1, MitigationState.APPLYING)
    assert store.events() == [event(1)]
    store.close()


def test_lists_are_newest_first_and_bounded() -> None:
    """Lists come newest first, as long as asked for, findings also of one monitor."""
    store = Store(None)
    for number in range(5):
        store.save_scan(scan(number))
        store.add_finding(finding(number, monitor="alpha_scan" if number % 2 else "other"))
        store.save_mitigation(mitigation(number, MitigationState.REVERTED), event(number))
    assert [s.id for s in store.scans(2)] == ["s4", "s3"]
    assert [f.id for f in store.findings(2)] == ["f4", "f3"]
    assert [f.id for f in store.findings(monitor="alpha_scan")] == ["f3", "f1"]
    assert [m.id for m in store.mitigations(1)] == ["m4"]
    assert [e.detail["number"] for e in store.events(2)] == [4, 3]
    store.close()


def test_findings_that_say_something_can_be_asked_for() -> None:
    """`judged` counts past the unknown findings."""
    store = Store(None)
    for number in range(6):
        store.add_finding(finding(number, Health.UNKNOWN if number > 2 else Health.OK))
    assert [f.id for f in store.findings(2, judged=True)] == ["f2", "f1"]
    store.close()


def test_store_that_takes_no_writes_is_found_out(tmp_path: Path) -> None:
    """A touch changes nothing and fails where a write would."""
    store = Store(tmp_path / "flipwatch.db")
    store.touch()
    store._file._db.execute("PRAGMA query_only = 1")
    assert store.findings() == []
    with pytest.raises(StoreError, match="readonly"):
        store.touch()
    store.close()


def test_unknown_ids_are_none() -> None:
    """What is not there is None, also the reading of a finding that has none."""
    store = Store(None)
    store.add_finding(finding(1))
    for found in (store.scan("x"), store.finding("x"), store.mitigation("x")):
        assert found is None
    assert store.readings("x") is store.readings("f1") is None
    store.close()


def test_saving_again_replaces() -> None:
    """A scan or mitigation saved again under its id is updated, not doubled."""
    store = Store(None)
    store.save_scan(scan(1, ScanState.RUNNING))
    store.save_scan(scan(1, ScanState.DONE))
    store.save_mitigation(mitigation(1, MitigationState.PENDING))
    store.save_mitigation(mitigation(1, MitigationState.ACTIVE))
    assert [s.state for s in store.scans()] == [ScanState.DONE]
    assert [m.state for m in store.mitigations()] == [MitigationState.ACTIVE]
    store.close()


def test_open_scans_and_mitigations_are_found() -> None:
    """Exactly the records that a killed sidecar may have left unfinished are listed as open, oldest first."""
    store = Store(None)
    for number, scan_state in enumerate(ScanState):
        store.save_scan(scan(number, scan_state))
    for number, state in enumerate(MitigationState):
        store.save_mitigation(mitigation(number, state))
    assert [s.state for s in store.open_scans()] == [ScanState.QUEUED, ScanState.RUNNING]
    assert [m.state for m in store.open_mitigations()] == [
        MitigationState.PENDING,
        MitigationState.APPLYING,
        MitigationState.VERIFYING,
        MitigationState.ACTIVE,
        MitigationState.REVERTING,
        MitigationState.INTERRUPTED,
    ]
    store.close()


def test_failed_findings_outlive_healthy_ones() -> None:
    """Retention keeps the last findings and, apart from them, the last failed ones with their scans."""
    store = Store(None, keep=3, keep_failed=1)
    for number in range(10):
        failed = number in (1, 2)
        store.add_finding(finding(number, Health.FAILED if failed else Health.OK))
        store.save_scan(scan(number, finding_id=f"f{number}"))
    assert [f.id for f in store.findings()] == ["f9", "f8", "f7", "f2"]
    assert [s.id for s in store.scans()] == ["s9", "s8", "s7", "s2"]
    store.close()


def test_each_monitor_is_kept_for_itself() -> None:
    """Sweeps every few minutes push out neither the scans of every hour nor the failed one among them."""
    store = Store(None, keep=2, keep_failed=1)
    store.add_finding(finding(0, Health.FAILED))
    store.save_scan(scan(0, ScanState.FAILED, "f0"))
    for number in (1, 2, 3):
        store.add_finding(finding(number))
        store.save_scan(scan(number, finding_id=f"f{number}"))
    for number in range(10, 20):
        failed = number < 15
        store.add_finding(finding(number, Health.FAILED if failed else Health.OK, "fingerprint"))
        store.save_scan(scan(number, finding_id=f"f{number}").model_copy(update={"monitor": "fingerprint"}))
    assert [f.id for f in store.findings()] == ["f19", "f18", "f14", "f3", "f2", "f0"]
    assert [s.id for s in store.scans()] == ["s19", "s18", "s14", "s3", "s2", "s0"]
    store.close()


def test_failed_and_running_scans_outlive_done_ones() -> None:
    """A scan that could not be done stays longer than those that were, and a running one is never dropped."""
    store = Store(None, keep=2, keep_failed=1)
    store.save_scan(scan(0, ScanState.RUNNING))
    store.save_scan(scan(1, ScanState.FAILED))
    for number in range(2, 8):
        store.save_scan(scan(number))
    assert [s.id for s in store.scans()] == ["s7", "s6", "s1", "s0"]
    store.close()


def test_readings_are_bounded_in_bytes() -> None:
    """Old readings go first and those of failed findings last; the findings themselves stay."""
    store = Store(None, readings_bytes=350)
    for number in range(5):
        health = Health.FAILED if number == 1 else Health.OK
        store.add_finding(finding(number, health), [{"x": "y" * 100}])
    assert [number for number in range(5) if store.readings(f"f{number}") is not None] == [1, 3, 4]
    assert len(store.findings()) == 5
    store.close()


def test_open_and_failed_mitigations_are_never_dropped() -> None:
    """Retention drops old mitigations that are reverted, repaired or were dry runs, and no others."""
    store = Store(None, keep=2)
    for number, state in enumerate(MitigationState):
        store.save_mitigation(mitigation(number, state))
    for number in range(20, 24):
        store.save_mitigation(mitigation(number, MitigationState.REVERTED))
    kept = {m.id: m.state for m in store.mitigations()}
    assert set(kept) == {"m0", "m1", "m2", "m3", "m5", "m6", "m9", "m22", "m23"}
    store.close()


def test_events_are_bounded() -> None:
    """The audit log keeps its last lines."""
    store = Store(None, keep_events=3)
    for number in range(10):
        store.add_event(event(number))
    assert [e.detail["number"] for e in store.events()] == [9, 8, 7]
    store.close()


def test_mitigation_and_its_event_are_stored_together_or_not_at_all(tmp_path: Path) -> None:
    """When the event cannot be written, the mitigation is not written either."""
    path = tmp_path / "flipwatch.db"
    Store(path).close()
    db = sqlite3.connect(path)
    db.execute("DROP TABLE events")
    db.close()
    store = Store(path)
    with pytest.raises(StoreError, match="no such table: events"):
        store.save_mitigation(mitigation(1, MitigationState.APPLYING), event(1))
    assert store.mitigations() == []
    store.close()


def test_a_number_that_is_not_finite_is_refused() -> None:
    """NaN never reaches the file, neither in a record nor in a reading."""
    store = Store(None)
    with pytest.raises(ValueError, match="finite"):
        event(1).model_validate(event(1).model_dump() | {"at": float("nan")})
    with pytest.raises(ValueError, match="JSON compliant"):
        store.add_finding(finding(1), [{"loss": float("nan")}])
    assert store.findings() == []
    store.close()


def test_file_held_by_another_process_is_one_sentence(tmp_path: Path) -> None:
    """A second sidecar on the same file is told so at its start, and can start once the first is gone."""
    path = tmp_path / "flipwatch.db"
    first = Store(path)
    with pytest.raises(StoreError, match="is locked: another flipwatch serve uses it"):
        Store(path, busy_seconds=0.05)
    first.close()
    Store(path, busy_seconds=0.05).close()


def test_kill_9_loses_nothing_and_leaves_no_lock(tmp_path: Path) -> None:
    """What a process stored before it was killed is there, and the next process can open the file at once."""
    path = tmp_path / "flipwatch.db"
    program = (
        "import sys, pathlib; from flipwatch.service.store import Store; from flipwatch.service.records import *;"
        "store = Store(pathlib.Path(sys.argv[1]));"
        "store.save_mitigation(MitigationRecord.model_validate_json(sys.argv[2]));"
        "print('stored', flush=True); sys.stdin.read()"
    )
    record = mitigation(1, MitigationState.APPLYING)
    arguments = [sys.executable, "-c", program, str(path), record.model_dump_json()]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"stored\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    store = Store(path, busy_seconds=0.05)
    assert store.open_mitigations() == [record]
    store.close()


def test_corrupt_file_is_one_sentence(tmp_path: Path) -> None:
    """A file that is no database, or whose pages are damaged, is called corrupt."""
    path = tmp_path / "flipwatch.db"
    path.write_bytes(b"no database at all" * 1000)
    with pytest.raises(StoreError, match="is corrupt"):
        Store(path)

    path.unlink()
    store = Store(path)
    for number in range(200):
        store.add_event(event(number))
    store.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="is corrupt"):
        Store(path)


def test_double_id_is_not_called_corruption() -> None:
    """An error that is no damage of the file is told as what it is, and leaves the store usable."""
    store = Store(None)
    store.add_finding(finding(1))
    with pytest.raises(StoreError, match="cannot be used: UNIQUE constraint"):
        store.add_finding(finding(1))
    assert store.findings() == [finding(1)]
    store.close()


SCHEMA_1 = """
CREATE TABLE scans (
    id TEXT PRIMARY KEY, state TEXT NOT NULL, finding_id TEXT, created_at REAL NOT NULL, body TEXT NOT NULL
);
CREATE INDEX scans_by_time ON scans (created_at);
CREATE TABLE findings (
    id TEXT PRIMARY KEY, monitor TEXT NOT NULL, health TEXT NOT NULL, created_at REAL NOT NULL, body TEXT NOT NULL,
    reading TEXT
);
CREATE INDEX findings_by_time ON findings (created_at);
CREATE TABLE mitigations (id TEXT PRIMARY KEY, state TEXT NOT NULL, created_at REAL NOT NULL, body TEXT NOT NULL);
CREATE INDEX mitigations_by_time ON mitigations (created_at);
CREATE TABLE events (at REAL NOT NULL, body TEXT NOT NULL);
PRAGMA application_id = 1179406423;
PRAGMA user_version = 1;
"""


def test_a_file_of_the_first_schema_is_upgraded(tmp_path: Path) -> None:
    """What the first version stored is still there, profile and states have a place, opening again changes nothing."""
    path = tmp_path / "flipwatch.db"
    db = sqlite3.connect(path)
    db.executescript(SCHEMA_1)
    # The first version knew of no repairs.
    body = mitigation(1, MitigationState.ACTIVE).model_dump_json(exclude={"repairs"})
    db.execute("INSERT INTO mitigations VALUES ('m1', 'active', 1.0, ?)", (body,))
    db.commit()
    db.close()
    for _ in range(2):
        store = Store(path)
        assert store.open_mitigations() == [mitigation(1, MitigationState.ACTIVE)]
        store.close()
    store = Store(path)
    assert (store.profile(), store.recording()) == (None, None)
    store.set_profile(PROFILE, event(1))
    store.close()
    store = Store(path)
    assert (store.profile(), store.recording(), store.events()) == (PROFILE, None, [event(1)])
    store.set_profile(None, event(2))
    assert store.profile() is None
    store.close()
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    db.close()


def test_a_second_profile_takes_the_place_of_the_first() -> None:
    """There is one or none; with an event that cannot be written there is no change."""
    store = Store(None)
    store.set_profile(PROFILE, event(1))
    store.set_profile(PROFILE.model_copy(update={"recorded_at": 6.0}), event(2))
    store._file._db.execute("DROP TABLE events")
    with pytest.raises(StoreError, match="no such table: events"):
        store.set_profile(PROFILE, event(3))
    kept = store.profile()
    assert kept is not None
    assert kept.recorded_at == 6.0
    store.close()


def test_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A file of a newer Flipwatch is refused with both versions in the sentence, and not changed."""
    path = tmp_path / "flipwatch.db"
    Store(path).close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=f"newer Flipwatch .schema {SCHEMA_VERSION + 1}, this one knows"):
        Store(path)
    assert path.read_bytes() == before


def test_database_of_another_program_is_refused(tmp_path: Path) -> None:
    """A file with somebody else's tables is not taken for ours."""
    path = tmp_path / "flipwatch.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE theirs (x)")
    db.close()
    with pytest.raises(StoreError, match="another program"):
        Store(path)


def test_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    """A path that cannot be opened is told in one sentence."""
    with pytest.raises(StoreError, match="cannot be used: unable to open"):
        Store(tmp_path / "nowhere" / "flipwatch.db")
