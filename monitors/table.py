"""The monitors there are, by name."""

from typing import Any

from .alpha_scan import AlphaScan
from .differential.monitor import Differential
from .fingerprint.monitor import Fingerprint
from .monitor import Monitor

MONITORS: dict[str, type[Monitor[Any, Any, Any, Any]]] = {
    AlphaScan.name: AlphaScan,
    Fingerprint.name: Fingerprint,
    Differential.name: Differential,
}
