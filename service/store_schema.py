"""The tables of the store, as steps from one schema version to the next."""

import sqlite3

APPLICATION_ID = 0x464C5057
"""PRAGMA application_id of our files ("FLPW"): another program's database must not be taken for an old one of ours."""

_STEPS = (
    """
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
    """,
    """
    CREATE TABLE profile (body TEXT NOT NULL);
    """,
    """
    CREATE TABLE recording (body TEXT NOT NULL);
    """,
    """
    CREATE TABLE automation (body TEXT NOT NULL);
    """,
    """
    CREATE TABLE expectation (body TEXT NOT NULL);
    """,
)

SCHEMA_VERSION = len(_STEPS)


def upgrade(db: sqlite3.Connection, version: int) -> None:
    """Bring a file of schema `version` to ours, inside the caller's transaction; an empty file has version 0."""
    for step in _STEPS[version:]:
        for statement in step.split(";"):
            db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
