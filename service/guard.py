"""What forbids a mitigation: the refusals, and the checks that raise them.  Nothing here forbids an undo.

MitigationError             one sentence that says what was refused and why
    UnknownMitigation       no record of this id
    UnknownBlock            the model has no such block
    InvalidOrder            blocks or alpha make no sense, whatever the model
    MitigationConflict      not now
        MitigationBusy      another one is on its way
        AlreadyMitigated    an open record holds the block
        WrongState          this record is not in a state for that
        OtherProcess        vLLM is not the process any more that the order is about
        WeightsUnknown      the weights could not be looked at, so nobody can say what to repair
        NothingToRepair     no changed chunk is named that could be repaired here
            NothingChanged  no chunk of the weights has changed at all
        HarmfulOrder        the last scan says that it makes the loss worse
    MitigationForbidden     the operator's settings say no
        ModeForbids         the mode is `observe`
        BreakerOpen         too many blocks, or too many actions in the window
    GatesUnusable           this vLLM has no gates, or they did not pass the self-test
"""

from collections.abc import Iterable, Sequence

from ..monitors.alpha_scan import AlphaScanFinding
from ..monitors.moment import utc
from ..monitors.wire import ModelFacts, SelfTestState
from .gates import names, scales
from .live import MonitorState
from .records import Mandate, MitigationAction, MitigationRecord, MitigationState, Mode
from .settings import MitigationSettings
from .skippability import predicted


class MitigationError(Exception):
    """A mitigation was refused; the message is one sentence."""


class UnknownMitigation(MitigationError):
    """There is no record of this id."""


class UnknownBlock(MitigationError):
    """The model has no such block."""


class InvalidOrder(MitigationError):
    """The blocks or the alpha make no sense, whatever the model."""


class MitigationConflict(MitigationError):
    """Not now."""


class MitigationBusy(MitigationConflict):
    """Another mitigation is on its way."""


class AlreadyMitigated(MitigationConflict):
    """An open record holds the block."""


class WrongState(MitigationConflict):
    """The record is not in a state for that."""


class OtherProcess(MitigationConflict):
    """vLLM is not the process any more that the order is about."""


class HarmfulOrder(MitigationConflict):
    """The last scan says that the loss would rise; an order that says `force` is done all the same."""


class WeightsUnknown(MitigationConflict):
    """The weights could not be looked at, so nobody can say what to repair."""


class NothingToRepair(MitigationConflict):
    """No changed chunk of the weights is named that could be repaired here."""


class NothingChanged(NothingToRepair):
    """No chunk of the weights has changed at all."""


class MitigationForbidden(MitigationError):
    """The operator's settings say no."""


class ModeForbids(MitigationForbidden):
    """The mode is `observe`."""


class BreakerOpen(MitigationForbidden):
    """Too many blocks at once, or too many actions in the window."""


class GatesUnusable(MitigationError):
    """This vLLM has no gates, or nobody has seen them act."""


def check_order(action: MitigationAction, blocks: Sequence[int], alpha: float) -> None:
    """Raise `InvalidOrder` when the order makes no sense on any model."""
    if not blocks or len(set(blocks)) != len(blocks):
        raise InvalidOrder("Name at least one block, and each block once.")
    if action is MitigationAction.SKIP and alpha != 0.0:
        raise InvalidOrder(f"A skip sets alpha 0, not {alpha:g}: attenuate takes an alpha.")
    if action is MitigationAction.ATTENUATE and not scales(alpha):
        raise InvalidOrder(
            f"Attenuate takes an alpha above 0, up to 2, and not 1, as float32 holds it; this one is {alpha!r}."
        )


def check_mode(settings: MitigationSettings) -> None:
    """Raise `ModeForbids` in the mode `observe`."""
    if Mode(settings.mode) is Mode.OBSERVE:
        raise ModeForbids("The mode is observe: set mitigation.mode to dry-run or enforce to allow mitigations.")


def check_process(boot_id: str, mandate: Mandate | None) -> None:
    """Raise `OtherProcess` when a rule's verdict was about another vLLM process than this one."""
    if mandate is not None and mandate.boot_id != boot_id:
        raise OtherProcess("vLLM was restarted since that verdict, which says nothing about the new process.")


def check_model(facts: ModelFacts, blocks: Iterable[int]) -> None:
    """Raise `GatesUnusable` or `UnknownBlock`."""
    if not facts.armed:
        raise GatesUnusable(f"This model cannot be mitigated: {facts.refusal or 'its gates are not installed'}")
    if facts.self_test.state is not SelfTestState.PASSED:
        raise GatesUnusable(
            f"The gates were not seen to act (self-test {facts.self_test.state.value}): {facts.self_test.reason}"
        )
    check_blocks(facts, blocks)


def check_blocks(facts: ModelFacts, blocks: Iterable[int]) -> None:
    """Raise `UnknownBlock`."""
    for block in blocks:
        if not 0 <= block < facts.num_blocks:
            raise UnknownBlock(f"There is no block {block}: the model has blocks 0 to {facts.num_blocks - 1}.")


def check_not_held(blocks: Iterable[int], boot_id: str, open_records: Iterable[MitigationRecord]) -> None:
    """Raise `AlreadyMitigated` when an open record of this vLLM process holds one of the blocks.

    A gate that is not 1 and belongs to no record is no obstacle: asking for it is how to take it over.
    """
    for record in open_records:
        both = sorted(set(record.held) & set(blocks))
        if both and record.boot_id == boot_id:
            help_ = "undo" if record.state is MitigationState.ACTIVE else "finish or undo"
            raise AlreadyMitigated(f"Mitigation {record.id} ({record.state.value}) holds block {both[0]}: {help_} it.")


def check_blocks_at_once(settings: MitigationSettings, gates: Sequence[float], blocks: Iterable[int]) -> None:
    """Raise `BreakerOpen` when more than `max_blocks` would be gated at once."""
    gated = {block for block, alpha in enumerate(gates) if alpha != 1.0} | set(blocks)
    if len(gated) > settings.max_blocks:
        raise BreakerOpen(
            f"{len(gated)} blocks would be gated at once, mitigation.max_blocks allows {settings.max_blocks}: "
            "this much damage is for a person to look at."
        )


def check_actions_in_window(settings: MitigationSettings, history: Iterable[MitigationRecord], now: float) -> None:
    """Raise `BreakerOpen` after `max_actions` within the window; `history` is newest first, `now` epoch seconds."""
    since = now - settings.window_minutes * 60.0
    actions = sum(1 for record in history if record.created_at > since and record.state is not MitigationState.DRY_RUN)
    if actions >= settings.max_actions:
        raise BreakerOpen(
            f"{actions} mitigations in the last {settings.window_minutes:g} minutes, mitigation.max_actions allows "
            f"{settings.max_actions}: wait, or raise it."
        )


def harm(
    scanned: MonitorState | None, gates: Sequence[float], blocks: Sequence[int], alpha: float, worse_nats: float
) -> str | None:
    """Half a sentence when the last scan says that the loss would rise by more than `worse_nats`; None otherwise.

    Also None where the scan cannot know: it met a loss that was not finite, or one of the blocks was scaled then or is
    now.  Where other blocks have been scaled since, the change that it measured counts as an estimate.
    """
    finding = None if scanned is None else scanned.finding
    if scanned is None or not isinstance(finding, AlphaScanFinding) or alpha >= 1.0:
        return None
    base = finding.base_loss_nats
    known = predicted(finding, blocks, alpha)
    if base is None or known is None or any(finding.gates[block] != 1.0 or gates[block] != 1.0 for block in blocks):
        return None
    known = known._replace(estimated=known.estimated or list(finding.gates) != list(gates))
    if known.nats is not None and known.nats <= base + worse_nats:
        return None
    what = f"Leaving {names(blocks)} out" if alpha == 0.0 else f"Scaling {names(blocks)} to alpha {alpha:g}"
    how = "estimated from the single changes in the " if known.estimated else ""
    about = "about " if known.estimated else ""
    after = "no finite number" if known.nats is None else f"{about}{known.nats:.2f} nats"
    when = "" if scanned.at is None else f" of {utc(scanned.at)}"
    return f"{what} would raise the loss from {base:.2f} to {after} ({how}scan{when})"
