"""How large the parts of a measurement are."""

from collections import deque
from typing import NamedTuple

_GROWTH = 2
# Parts that are remembered: more than lie between two losses of a scan, which are its dearest steps.
_MEMORY = 64


class _Seen(NamedTuple):
    """What a part showed: its dearest step, and what its other steps took on average, None where it had no other."""

    dearest: float
    others: float | None


class Pace:
    """Adapts the size of the parts to a budget, from what the probe says of each.

    A part of n steps is taken to last as long as the dearest step that was seen lately and n - 1 steps of the dearest
    average that was seen lately.  So sizes shrink at once and grow slowly.  The first part is one step, because
    nothing is known about the model's speed.
    """

    def __init__(self, budget_seconds: float) -> None:
        self._budget = budget_seconds
        self._seen: deque[_Seen] = deque(maxlen=_MEMORY)
        self.steps = 1
        """Size of the next part."""

    def observe(self, steps: int, held_seconds: float, dearest_seconds: float) -> None:
        """Take in what the last part did."""
        if steps < 1:
            return
        dearest = dearest_seconds or held_seconds / steps
        self._seen.append(_Seen(dearest, (held_seconds - dearest) / (steps - 1) if steps > 1 else None))
        dearest = max(seen.dearest for seen in self._seen)
        usual = max((seen.others for seen in self._seen if seen.others is not None), default=dearest)
        spare = self._budget - dearest
        fitting = 1 + int(spare / usual) if spare > 0.0 and usual > 0.0 else 1
        self.steps = min(fitting, self.steps * _GROWTH)
