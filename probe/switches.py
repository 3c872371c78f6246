"""The environment variables that switch the probe on, read in every vLLM process.

FLIPWATCH_PROBE_TOKEN        bearer token of the probe's routes; without one the probe does not exist
FLIPWATCH_PROBE_TOKEN_FILE   the same from a file (a mounted secret)
FLIPWATCH_DISABLE=1          off switch: vLLM serves as if Flipwatch were not installed
FLIPWATCH_FAULTS=1           allow fault injection (drills and tests)
FLIPWATCH_CPU_PLAIN_WEIGHTS=1  keep plain weights on vLLM's CPU build instead of opaque oneDNN handles
"""

import logging
import os
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
