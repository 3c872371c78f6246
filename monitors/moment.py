"""A moment in words, for reasons, messages and tables."""

from datetime import UTC, datetime


def utc(at: float) -> str:
    """`2026-11-30 12:00:00 UTC`, of epoch seconds."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
