"""Faults on purpose: what a fault does to one tensor, and the way back.

One library for drills on a live server, tests and benchmarks.  A fault is a small JSON (`FaultSpec`); the same
spec on the same tensor always does the same.  Where it strikes is given in flat indices, row by row; rows are those of
the first dimension, and a 1-D tensor has rows of one value.
"""

from .damage import Damage, damage, inject
from .spec import FaultKind, FaultSpec

__all__ = ["Damage", "FaultKind", "FaultSpec", "damage", "inject"]
