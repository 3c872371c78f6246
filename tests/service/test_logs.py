"""Logging: JSON for machines, and no value under a name that sounds like a secret."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from flipwatch.service import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Logging set up on a stream that is no terminal, and taken back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    out = io.StringIO()
    logs.configure("info", out)
    yield out
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def test_both_kinds_of_loggers_write_json_lines(stream: io.StringIO) -> None:
    """structlog and the standard library share one chain; exceptions stay on one line."""
    structlog.get_logger("ours").info("hello", block=4)
    try:
        raise ValueError("x")
    except ValueError:
        logging.getLogger("theirs").exception("oops")
    ours, theirs = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (ours["event"], ours["block"], ours["level"]) == ("hello", 4, "info")
    assert theirs["event"] == "oops"
    assert "ValueError: x" in theirs["exception"]


def test_values_of_secret_names_are_blanked(stream: io.StringIO) -> None:
    """The second line of defence."""
    structlog.get_logger().warning("x", probe_token="secret-1", authorization="Bearer secret-2", api_key="secret-3")
    assert "secret" not in stream.getvalue()
