"""How large the parts of a scan are, and how long the engine is left alone between them."""

_LARGEST_GROWTH = 4


class Pace:
    """Adapts the size of the parts to a budget, from the time that the probe says it held the engine.

    `budget_seconds` is what one part may hold the engine, `duty` the share of wall time that all parts together
    may.  A scan starts with one step, because nothing is known about the model's speed.
    """

    def __init__(self, budget_seconds: float, duty: float) -> None:
        self._budget = budget_seconds
        self._duty = duty
        self.steps = 1
        """Size of the next part."""

    def observe(self, steps: int, held_seconds: float) -> None:
        """Take in what the last part did."""
        largest = self.steps * _LARGEST_GROWTH
        wanted = largest if steps < 1 or held_seconds <= 0.0 else int(self._budget * steps / held_seconds)
        self.steps = max(1, min(wanted, largest))

    def rest(self, held_seconds: float, wall_seconds: float) -> float:
        """Seconds to wait after a part that held the engine so long and took so long on the wall clock."""
        return max(0.0, held_seconds / self._duty - wall_seconds)
