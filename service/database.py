"""The SQLite file of the sidecar: WAL mode, one process, one writer.

    StoreError      the file is locked, corrupt, not ours, or written by a newer Flipwatch

The file is held exclusively for as long as it is open: two sidecars that both believe that they own the gates of one
server would undo each other.  It must lie on a local disk (WAL does not work on NFS).
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .store_schema import APPLICATION_ID, SCHEMA_VERSION, upgrade


class StoreError(Exception):
    """The store cannot be used; one sentence that says why and what to do."""


class Database:
    """The open file.  All methods are safe from any thread and raise `StoreError`.

    `path` is the file (made when missing), or None for one in memory.
    """

    def __init__(self, path: Path | None, busy_seconds: float) -> None:
        self._name = "the store in memory" if path is None else str(path)
        self._lock = threading.Lock()
        with self._told():
            self._db = sqlite3.connect(
                ":memory:" if path is None else path, isolation_level=None, check_same_thread=False
            )
        try:
            with self._told():
                self._open(busy_seconds)
        except StoreError:
            self._db.close()
            raise

    def _open(self, busy_seconds: float) -> None:
        self._db.execute(f"PRAGMA busy_timeout = {round(busy_seconds * 1000)}")
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        owner = self._db.execute("PRAGMA application_id").fetchone()[0]
        empty = self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0
        if not empty and owner != APPLICATION_ID:
            raise StoreError(f"{self._name} is a database of another program: point data_dir somewhere else")
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self._name} was written by a newer Flipwatch (schema {version}, this one knows {SCHEMA_VERSION}): "
                "upgrade, or point data_dir somewhere else"
            )
        self._db.execute("PRAGMA journal_mode = WAL")
        # A crash of this process loses nothing with NORMAL.  A crash of the machine may lose the last commits, but
        # takes the gates of the vLLM beside it along.
        self._db.execute("PRAGMA synchronous = NORMAL")
        # Takes the exclusive lock now: a second sidecar fails at its start and not at its first write.
        self._db.execute("BEGIN IMMEDIATE")
        damage = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise self._corrupt(damage)
        upgrade(self._db, 0 if empty else version)
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Let go of the file.  It cannot be used afterwards."""
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All that is done within it, or nothing."""
        with self._lock, self._told():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def one(self, query: str, *values: Any) -> str | None:
        """The first column of the first row, or None."""
        rows = self.all(query, *values)
        return rows[0] if rows else None

    def all(self, query: str, *values: Any) -> list[Any]:
        """The first column of all rows."""
        with self._lock, self._told():
            return [row[0] for row in self._db.execute(query, values).fetchall()]

    @contextmanager
    def _told(self) -> Iterator[None]:
        """SQLite's errors as one sentence."""
        try:
            yield
        except sqlite3.Error as error:
            # The low byte is the kind of error, the rest says more closely.
            kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise StoreError(f"{self._name} is locked: another flipwatch serve uses it") from error
            if kind in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise self._corrupt(str(error)) from error
            raise StoreError(f"{self._name} cannot be used: {error}") from error

    def _corrupt(self, how: str) -> StoreError:
        return StoreError(f"{self._name} is corrupt ({how}): move it away, a new one will be made")
