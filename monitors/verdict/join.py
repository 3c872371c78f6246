"""From all that is known of a server to one verdict."""

from .evidence import Answer, Heard, gather
from .table import first_fit
from .verdict import Joined


def join(heard: Heard) -> Joined:
    """The verdict on a server; see `evidence` for what counts, and `table` for what follows from it."""
    evidence = gather(heard)
    row = first_fit(evidence.answers)
    told = "; ".join(sign.sentence for sign in evidence.signs.values())
    rests_on = [question for question, answer in row.pattern.items() if answer is Answer.YES]
    grounds = [monitor for question in rests_on for monitor in evidence.witnesses[question]]
    return Joined(
        verdict=row.verdict,
        health=row.health,
        reason=f"{row.sentence}: {told}.",
        action=row.action,
        advice=row.advice,
        blocks=evidence.blocks,
        signs=tuple(evidence.signs.values()),
        rests_on=tuple(rests_on),
        grounds=tuple(dict.fromkeys(grounds)),
        stale=evidence.stale,
    )
