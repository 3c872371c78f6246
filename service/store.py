"""The sidecar's memory: what is kept of scans, findings, mitigations, references and the audit log, and how long."""

import json
import sqlite3
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ..monitors.alpha_scan import Profile
from ..monitors.canary.expectation import Expectation
from ..monitors.differential.reference import Recording
from .automation import Memory
from .database import Database
from .database import StoreError as StoreError
from .records import IN_FLIGHT, Event, FindingRecord, MitigationRecord, MitigationState, ScanRecord
from .store_schema import SCHEMA_VERSION

# Failed ones stay for good: they are few and worth reading.
_CLOSED = (MitigationState.REVERTED, MitigationState.REPAIRED, MitigationState.DRY_RUN)
_ENDED = ("done", "failed")


class Store:
    """Scans, findings, mitigations, the clean profile, recorded states and answers, automation's memory, the audit log.

    `path` is the file (made when missing), or None for a store in memory.  Retention: of each monitor the last `keep`
    scans and findings, and apart from them the last `keep_failed` that failed, so that a week of healthy scans does not
    push out the one that matters; and the last `keep` closed mitigations.  Readings, which are large, are kept up to
    `readings_bytes` in sum, those of failed findings first; the finding itself outlives its reading.

    All methods are short and synchronous, safe from any thread, and raise `StoreError`.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        keep: int = 1000,
        keep_failed: int = 200,
        keep_events: int = 10_000,
        readings_bytes: int = 64 * 2**20,
        busy_seconds: float = 5.0,
    ) -> None:
        self._keep = keep
        self._keep_failed = keep_failed
        self._keep_events = keep_events
        self._readings_bytes = readings_bytes
        self._file = Database(path, busy_seconds)

    def close(self) -> None:
        """Let go of the file.  The store cannot be used afterwards."""
        self._file.close()

    def touch(self) -> None:
        """Write what is there already; raises `StoreError` where nothing could be stored."""
        with self._file.transaction() as db:
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    # Scans and findings

    def save_scan(self, scan: ScanRecord) -> None:
        """Insert the scan, or replace the one of the same id."""
        with self._file.transaction() as db:
            db.execute(
                "INSERT INTO scans VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
                "state = excluded.state, finding_id = excluded.finding_id, body = excluded.body",
                (scan.id, scan.state, scan.finding_id, scan.created_at, scan.model_dump_json()),
            )
            if scan.state in _ENDED:
                self._trim_scans(db)

    def scan(self, scan_id: str) -> ScanRecord | None:
        """The scan of this id, or None."""
        row = self._file.one("SELECT body FROM scans WHERE id = ?", scan_id)
        return None if row is None else ScanRecord.model_validate_json(row)

    def scans(self, limit: int = 100) -> list[ScanRecord]:
        """The last scans, newest first."""
        rows = self._file.all("SELECT body FROM scans ORDER BY created_at DESC, rowid DESC LIMIT ?", limit)
        return [ScanRecord.model_validate_json(row) for row in rows]

    def open_scans(self) -> list[ScanRecord]:
        """Scans that are queued or running, oldest first: at start, those that a killed sidecar left behind."""
        rows = self._file.all("SELECT body FROM scans WHERE state NOT IN ('done', 'failed') ORDER BY created_at, rowid")
        return [ScanRecord.model_validate_json(row) for row in rows]

    def add_finding(self, finding: FindingRecord, readings: list[dict[str, Any]] | None = None) -> None:
        """Keep a finding, with the readings that it was judged from."""
        text = None if not readings else json.dumps(readings, allow_nan=False, separators=(",", ":"))
        with self._file.transaction() as db:
            db.execute(
                "INSERT INTO findings VALUES (?, ?, ?, ?, ?, ?)",
                (finding.id, finding.monitor, finding.health, finding.created_at, finding.model_dump_json(), text),
            )
            self._trim_findings(db)

    def finding(self, finding_id: str) -> FindingRecord | None:
        """The finding of this id, or None."""
        row = self._file.one("SELECT body FROM findings WHERE id = ?", finding_id)
        return None if row is None else FindingRecord.model_validate_json(row)

    def findings(self, limit: int = 100, monitor: str | None = None, *, judged: bool = False) -> list[FindingRecord]:
        """The last findings, newest first, of one monitor or of all; `judged` leaves the `unknown` ones out."""
        rows = self._file.all(
            "SELECT body FROM findings WHERE (?1 IS NULL OR monitor = ?1) AND NOT (?2 AND health = 'unknown') "
            "ORDER BY created_at DESC, rowid DESC LIMIT ?3",
            monitor,
            judged,
            limit,
        )
        return [FindingRecord.model_validate_json(row) for row in rows]

    def readings(self, finding_id: str) -> list[dict[str, Any]] | None:
        """The readings behind a finding; None when there were none or they had to go to save space."""
        row = self._file.one("SELECT reading FROM findings WHERE id = ?", finding_id)
        if row is None:
            return None
        readings: list[dict[str, Any]] = json.loads(row)
        return readings

    # Mitigations

    def save_mitigation(self, mitigation: MitigationRecord, event: Event | None = None) -> None:
        """Insert or replace the mitigation; with its line in the audit log, both or none."""
        with self._file.transaction() as db:
            db.execute(
                "INSERT INTO mitigations VALUES (?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET state = excluded.state, body = excluded.body",
                (mitigation.id, mitigation.state, mitigation.created_at, mitigation.model_dump_json()),
            )
            if event is not None:
                self._insert_event(db, event)
            db.execute(
                "DELETE FROM mitigations WHERE state IN (?, ?, ?) AND id NOT IN "
                "(SELECT id FROM mitigations ORDER BY created_at DESC, rowid DESC LIMIT ?)",
                (*_CLOSED, self._keep),
            )

    def mitigation(self, mitigation_id: str) -> MitigationRecord | None:
        """The mitigation of this id, or None."""
        row = self._file.one("SELECT body FROM mitigations WHERE id = ?", mitigation_id)
        return None if row is None else MitigationRecord.model_validate_json(row)

    def mitigations(self, limit: int = 100) -> list[MitigationRecord]:
        """The last mitigations, newest first."""
        rows = self._file.all("SELECT body FROM mitigations ORDER BY created_at DESC, rowid DESC LIMIT ?", limit)
        return [MitigationRecord.model_validate_json(row) for row in rows]

    def open_mitigations(self) -> list[MitigationRecord]:
        """Mitigations that may hold a gate: active, interrupted or on their way; oldest first."""
        states = [*IN_FLIGHT, MitigationState.ACTIVE, MitigationState.INTERRUPTED]
        marks = ", ".join("?" * len(states))
        rows = self._file.all(
            f"SELECT body FROM mitigations WHERE state IN ({marks}) ORDER BY created_at, rowid",  # noqa: S608
            *states,
        )
        return [MitigationRecord.model_validate_json(row) for row in rows]

    # The clean profile, the recorded states and answers, what automation remembers, and the audit log

    def profile(self) -> Profile | None:
        """The clean profile, or None."""
        row = self._file.one("SELECT body FROM profile")
        return None if row is None else Profile.model_validate_json(row)

    def set_profile(self, profile: Profile | None, event: Event) -> None:
        """Replace the clean profile, or remove it; with its line in the audit log, both or none."""
        self._replace("profile", profile, event)

    def recording(self) -> Recording | None:
        """The recorded states, or None."""
        row = self._file.one("SELECT body FROM recording")
        return None if row is None else Recording.model_validate_json(row)

    def set_recording(self, recording: Recording | None, event: Event) -> None:
        """Replace the recorded states, or remove them; with its line in the audit log, both or none."""
        self._replace("recording", recording, event)

    def expectation(self) -> Expectation | None:
        """The recorded answers, or None."""
        row = self._file.one("SELECT body FROM expectation")
        return None if row is None else Expectation.model_validate_json(row)

    def set_expectation(self, expectation: Expectation | None, event: Event) -> None:
        """Replace the recorded answers, or remove them; with its line in the audit log, both or none."""
        self._replace("expectation", expectation, event)

    def automation(self) -> Memory | None:
        """What automation remembers, or None."""
        row = self._file.one("SELECT body FROM automation")
        return None if row is None else Memory.model_validate_json(row)

    def set_automation(self, memory: Memory, event: Event | None) -> None:
        """Replace what automation remembers; with the line in the audit log of a decision that is new, both or none."""
        self._replace("automation", memory, event)

    def _replace(self, table: str, only: BaseModel | None, event: Event | None) -> None:
        """The one row of one of these tables."""
        with self._file.transaction() as db:
            db.execute(f"DELETE FROM {table}")  # noqa: S608
            if only is not None:
                db.execute(f"INSERT INTO {table} VALUES (?)", (only.model_dump_json(),))  # noqa: S608
            if event is not None:
                self._insert_event(db, event)

    def add_event(self, event: Event) -> None:
        """Add one line to the audit log."""
        with self._file.transaction() as db:
            self._insert_event(db, event)

    def events(self, limit: int = 100) -> list[Event]:
        """The last lines of the audit log, newest first."""
        rows = self._file.all("SELECT body FROM events ORDER BY rowid DESC LIMIT ?", limit)
        return [Event.model_validate_json(row) for row in rows]

    def last_event(self, what: str) -> Event | None:
        """The newest line of the audit log that says this, or None."""
        row = self._file.one("SELECT body FROM events WHERE body ->> '$.what' = ? ORDER BY rowid DESC LIMIT 1", what)
        return None if row is None else Event.model_validate_json(row)

    # Retention

    def _trim_scans(self, db: sqlite3.Connection) -> None:
        db.execute(
            """
            DELETE FROM scans WHERE state IN ('done', 'failed')
            AND id NOT IN (SELECT id FROM (
                SELECT id, state = 'failed' AS bad,
                ROW_NUMBER() OVER (PARTITION BY monitor ORDER BY created_at DESC, place DESC) AS nth,
                ROW_NUMBER() OVER (PARTITION BY monitor, state = 'failed' ORDER BY created_at DESC, place DESC) AS same
                FROM (SELECT id, state, created_at, rowid AS place, body ->> '$.monitor' AS monitor FROM scans)
            ) WHERE nth <= ? OR (bad AND same <= ?))
            AND (finding_id IS NULL OR finding_id NOT IN (SELECT id FROM findings))
            """,
            (self._keep, self._keep_failed),
        )

    def _trim_findings(self, db: sqlite3.Connection) -> None:
        db.execute(
            """
            DELETE FROM findings WHERE id NOT IN (SELECT id FROM (
                SELECT id, health = 'failed' AS bad,
                ROW_NUMBER() OVER (PARTITION BY monitor ORDER BY created_at DESC, rowid DESC) AS nth,
                ROW_NUMBER() OVER (PARTITION BY monitor, health = 'failed' ORDER BY created_at DESC, rowid DESC) AS same
                FROM findings
            ) WHERE nth <= ? OR (bad AND same <= ?))
            """,
            (self._keep, self._keep_failed),
        )
        db.execute(
            """
            UPDATE findings SET reading = NULL WHERE id IN (
                SELECT id FROM (
                    SELECT id, SUM(LENGTH(reading)) OVER (
                        ORDER BY health = 'failed' DESC, created_at DESC, rowid DESC
                    ) AS bytes FROM findings WHERE reading IS NOT NULL
                ) WHERE bytes > ?
            )
            """,
            (self._readings_bytes,),
        )

    def _insert_event(self, db: sqlite3.Connection, event: Event) -> None:
        db.execute("INSERT INTO events VALUES (?, ?)", (event.at, event.model_dump_json()))
        db.execute(
            "DELETE FROM events WHERE rowid <= (SELECT MAX(rowid) FROM events) - ?",
            (self._keep_events,),
        )
