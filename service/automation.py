"""What is to be done about a verdict by the policy: one decision, with one sentence that says why.

Nothing is done here: `automatic.py` acts, and comes back with what was refused, until the ladder of the verdict has
come to an end.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ..monitors.moment import utc
from ..monitors.verdict.verdict import Joined, Verdict
from .gates import names
from .policy import Rule
from .records import IN_FLIGHT, ITSELF, MitigationAction, MitigationRecord, MitigationState, Mode, Record

_DID_NOT_HELP = (MitigationState.FAILED, MitigationState.INTERRUPTED, MitigationState.REVERTED)


class Says(StrEnum):
    """What a decision comes to."""

    ACTS = "acts"
    WOULD_ACT = "would act"
    """The mode, or the rule, is dry-run."""
    WAITS = "waits"
    """For more verdicts, or for more scans that flag a block."""
    IN_EFFECT = "in effect"
    """What the rule would do is done, or on its way."""
    COOLING_DOWN = "cooling down"
    BREAKER_OPEN = "breaker open"
    REFUSED = "refused"
    OBSERVES = "observes"
    """The mode is observe."""
    NOTHING = "nothing to do"
    """No rule is about the verdict."""


class Decision(Record):
    """What is to be done, by which rule, and why."""

    says: Says
    verdict: Verdict
    message: str
    """One sentence."""
    rule: str | None = None
    blocks: tuple[int, ...] = ()


class Refusal(NamedTuple):
    """Why an order of a rule was not taken; `later`: it may be at the next verdict, so that no other rule is tried."""

    says: Says
    message: str
    later: bool


class Memory(Record):
    """What outlives a restart of the sidecar, about one vLLM process."""

    boot_id: str
    verdicts: tuple[Verdict, ...] = ()
    """The last ones, oldest first; one that comes back on the evidence that it had before is not counted again."""
    heard_at: Mapping[Verdict, float] = {}
    """When the newest evidence that was counted for a verdict was found, epoch seconds."""
    well_at: float | None = None
    """When the last one that is `ok` was heard."""
    said: Decision | None = None
    """The last decision."""


@dataclass(frozen=True)
class Situation:
    """What a decision rests on."""

    joined: Joined
    memory: Memory
    """The verdict of now is its last one."""
    confirmed: Collection[int]
    """Blocks that enough scans flag."""
    acts: Sequence[MitigationRecord]
    """What rules did in this vLLM process, newest first."""
    held: Collection[int]
    """Blocks whose gates are set, or being set, by somebody."""
    mode: Mode
    now: float


def decide(rules: Sequence[Rule], situation: Situation, refused: Mapping[str, Refusal]) -> Decision:
    """The first rule of the verdict's ladder that has something to say; `refused` by name are those that were tried."""
    verdict = situation.joined.verdict
    ladder = [rule for rule in rules if rule.verdict is verdict]
    if not ladder:
        message = f"The verdict is {verdict.value}, and no rule is about it."
        return Decision(says=Says.NOTHING, verdict=verdict, message=message)
    if situation.mode is Mode.OBSERVE:
        message = f"The mode is observe: nothing is done about {verdict.value}, whatever the policy says."
        return Decision(says=Says.OBSERVES, verdict=verdict, rule=ladder[0].name, message=message)
    passed = []
    for rule in ladder:
        decision, last_word = _of_rule(rule, situation, refused.get(rule.name))
        if last_word:
            return decision
        passed.append(decision)
    loudest = next(
        (said for says in (Says.BREAKER_OPEN, Says.COOLING_DOWN) for said in passed if said.says is says), passed[0]
    )
    message = " ".join(decision.message for decision in passed)
    return loudest.model_copy(update={"message": message})


def _of_rule(rule: Rule, situation: Situation, refused: Refusal | None) -> tuple[Decision, bool]:
    """What the rule comes to, and whether that ends the ladder."""
    verdict = situation.joined.verdict

    def says(what: Says, why: str, blocks: Sequence[int] = ()) -> Decision:
        message = f"{rule.name}: {why.rstrip('.')}."
        return Decision(says=what, verdict=verdict, rule=rule.name, blocks=tuple(blocks), message=message)

    k, n = rule.needs
    seen = situation.memory.verdicts[-n:]
    count = f"{seen.count(verdict)} of the last {len(seen)} verdicts"
    if seen.count(verdict) < k:
        return says(Says.WAITS, f"{count}, and {k} of {n} are needed"), True
    if refused is not None:
        return says(refused.says, refused.message), refused.later
    dry = rule.dry_run or situation.mode is Mode.DRY_RUN
    last = _last_of_its_kind(rule, situation.acts, dry)
    if last is not None:
        after = _after(rule, last, situation)
        if after is not None:
            what, why, last_word = after
            return says(what, why), last_word
    blocks: list[int] = []
    if rule.action in (MitigationAction.SKIP, MitigationAction.ATTENUATE):
        if not situation.joined.blocks:
            return says(Says.REFUSED, "the evidence names no block"), False
        free = sorted(set(situation.joined.blocks) - set(situation.held))
        blocks = [block for block in free if block in situation.confirmed]
        if not free:
            return says(Says.IN_EFFECT, f"{names(situation.joined.blocks)} left out or scaled already"), True
        if not blocks:
            return says(Says.WAITS, f"too few scans flag {names(free)} so far (alerts.k of alerts.n)"), True
    why = f"{count}; {situation.joined.reason}"
    return says(Says.WOULD_ACT if dry else Says.ACTS, why, blocks), True


def _last_of_its_kind(rule: Rule, acts: Sequence[MitigationRecord], dry: bool) -> MitigationRecord | None:
    """The last act that did the same, also by the rule of another verdict: what failed a minute ago fails again.

    What was only said counts only for what would only be said.
    """
    for act in acts:
        same = act.action is rule.action and rule.alpha in (None, act.alpha)
        if same and (dry or act.state is not MitigationState.DRY_RUN):
            return act
    return None


def _after(rule: Rule, last: MitigationRecord, situation: Situation) -> tuple[Says, str, bool] | None:
    """What the last act of its kind says about another one, and whether that ends the ladder; None: no obstacle."""
    act = f"mitigation {last.id}"
    if last.state in IN_FLIGHT:
        return Says.IN_EFFECT, f"{act} is on its way", True
    if last.state is MitigationState.ACTIVE and rule.action is MitigationAction.DRAIN:
        return Says.IN_EFFECT, f"{act} drains the server", True
    by_person = last.undone_by not in (None, ITSELF)
    well_at = situation.memory.well_at
    if by_person and (well_at is None or well_at < last.updated_at):
        return Says.REFUSED, f"{last.undone_by} undid {act}, which stands until a verdict is ok or vLLM restarts", True
    ended_by_repair = last.state is MitigationState.REVERTED and last.undone_by is None
    if last.state is MitigationState.REPAIRED or ended_by_repair:
        # A digest proves that the bytes were right then: what is bad now is new.
        return None
    until = last.created_at + rule.cool_down_minutes * 60.0
    if situation.now >= until:
        return None
    failed = last.state in _DID_NOT_HELP
    outcome = "did not help" if failed else f"is {last.state.value}"
    return Says.COOLING_DOWN, f"{act} {outcome}, and the rule rests until {utc(until)}", not failed
