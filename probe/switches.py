"""The environment variables that switch the probe on, read in every vLLM process.

FLIPWATCH_PROBE_TOKEN        bearer token of the probe's routes; without one the probe does not exist
FLIPWATCH_PROBE_TOKEN_FILE   the same from a file (a mounted secret)
FLIPWATCH_DISABLE=1          off switch: vLLM serves as if Flipwatch were not installed
FLIPWATCH_FAULTS=1           allow fault injection (drills and tests)
FLIPWATCH_CPU_PLAIN_WEIGHTS=1  keep plain weights on vLLM's CPU build instead of opaque oneDNN handles
FLIPWATCH_PARITY_GROUP=64    chunks of weights that share one chunk of parity; 0: keep no parity
FLIPWATCH_PARITY_DIR         folder for the parity; without one it is kept in host memory
FLIPWATCH_CHUNK_BYTES=1048576  length of a chunk
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("vllm.flipwatch")

_TRUE = frozenset({"1", "true", "yes", "on"})


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in _TRUE


def token() -> str | None:
    """The probe's bearer token, or None when none is configured or its file cannot be read."""
    if value := os.environ.get("FLIPWATCH_PROBE_TOKEN", "").strip():
        return value
    if path := os.environ.get("FLIPWATCH_PROBE_TOKEN_FILE"):
        try:
            return Path(path).read_text(encoding="utf-8").strip() or None
        except (OSError, ValueError) as error:
            # Never a reason for vLLM not to start.
            logger.warning("Flipwatch is off: FLIPWATCH_PROBE_TOKEN_FILE cannot be read: %s", type(error).__name__)
            return None
    return None


def enabled() -> bool:
    """A token is configured and the off switch is not set."""
    return token() is not None and not _is_on("FLIPWATCH_DISABLE")


def faults_allowed() -> bool:
    """Fault injection is allowed on this server."""
    return _is_on("FLIPWATCH_FAULTS")


def cpu_plain_weights() -> bool:
    """The CPU build must keep its weights where they can be seen and changed."""
    return _is_on("FLIPWATCH_CPU_PLAIN_WEIGHTS")


def parity_group() -> int:
    """How many chunks share one chunk of parity; 0 for no parity."""
    return _number("FLIPWATCH_PARITY_GROUP", 64, lambda value: value == 0 or value >= 2, "0, or 2 and more")


def parity_folder() -> Path | None:
    """Where the parity is kept; None is host memory."""
    folder = os.environ.get("FLIPWATCH_PARITY_DIR", "").strip()
    return Path(folder) if folder else None


def chunk_bytes() -> int:
    """Length of a chunk of weights."""
    return _number(
        "FLIPWATCH_CHUNK_BYTES",
        2**20,
        lambda value: value >= 4096 and value % 4096 == 0 and value <= 2**28,
        "a multiple of 4096, up to 268435456",
    )


def _number(name: str, default: int, allowed: Callable[[int], bool], which: str) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = -1
    if allowed(value):
        return value
    # Never a reason for vLLM not to start.
    logger.warning("Flipwatch takes %s=%d: %r is not %s.", name, default, text, which)
    return default
