"""Lists of gates: what a change makes of them, where two differ, what records do not explain, and all that in words."""

import math
import struct
from collections.abc import Iterable, Sequence

from ..monitors.wire import Gate, ModelFacts
from .records import IN_FLIGHT, MitigationAction, MitigationRecord, MitigationState

# Smaller numbers lose digits in a float32, or become 0, which is a skip.
_SMALLEST = 2.0**-126


def scales(alpha: float) -> bool:
    """Whether a gate of this alpha scales a block: above 0, up to 2, and not 1, as float32 holds it."""
    return _SMALLEST <= alpha <= 2.0 and struct.unpack("f", struct.pack("f", alpha))[0] != 1.0


def names(blocks: Sequence[int]) -> str:
    """`block 4`, `blocks 4 and 7`, `blocks 1, 4 and 7`."""
    if len(blocks) == 1:
        return f"block {blocks[0]}"
    return f"blocks {', '.join(str(block) for block in blocks[:-1])} and {blocks[-1]}"


def readback(gates: Sequence[float], blocks: Iterable[int]) -> str:
    """`gate of block 4 is 0, of block 7 is 1`."""
    return "gate " + ", ".join(f"of block {block} is {gates[block]:g}" for block in blocks)


def with_gates(gates: Sequence[float], change: Iterable[Gate]) -> list[float]:
    """All gates after the change of some."""
    changed = list(gates)
    for gate in change:
        changed[gate.block] = gate.alpha
    return changed


def differing(left: Sequence[float], right: Sequence[float]) -> list[int]:
    """Blocks whose gates differ by more than the rounding of the float32 that holds a gate."""
    pairs = enumerate(zip(left, right, strict=True))
    return [block for block, (a, b) in pairs if not math.isclose(a, b, rel_tol=1e-6)]


def interruption(record: MitigationRecord, gates: Sequence[float]) -> str | None:
    """Why an open record that nobody carries on is no longer what it says, one sentence; None when it is."""
    if record.action is MitigationAction.REPAIR:
        # What it has done is not seen at the gates, only by another look at the weights.
        if record.state not in IN_FLIGHT:
            return None
        return f"This broke off while it was {record.state.value}, and what it has put right is not known: finish it."
    live = readback(gates, record.blocks)
    if record.state in IN_FLIGHT:
        return f"This broke off while it was {record.state.value}; {live} now: finish or undo."
    if record.state is MitigationState.ACTIVE and differing(gates, with_gates(gates, record.gates_wanted)):
        return f"Somebody else changed the gates: {live}, not {record.alpha:g}: finish or undo."
    return None


def unrecorded(facts: ModelFacts, open_records: Iterable[MitigationRecord]) -> list[Gate]:
    """Live gates that are not 1 and belong to no open record."""
    held = {block for record in open_records if record.boot_id == facts.boot_id for block in record.held}
    return [
        Gate(block=block, alpha=alpha) for block, alpha in enumerate(facts.gates) if alpha != 1.0 and block not in held
    ]
