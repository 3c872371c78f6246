"""Orders to skip or attenuate: the checks, and the record that comes of an order that passes them."""

from collections.abc import Callable, Sequence
from uuid import uuid4

from ..monitors.wire import Gate
from .gates import names
from .guard import (
    HarmfulOrder,
    check_actions_in_window,
    check_blocks_at_once,
    check_model,
    check_not_held,
    check_order,
    check_process,
    harm,
)
from .live import MonitorState
from .mitigation_steps import GateKeeper
from .records import Event, Mandate, MitigationAction, MitigationRecord, MitigationState, Mode
from .settings import MitigationSettings
from .store import Store


class GateOrders:
    """Turns an order into a record.  `scanned` tells what was found in the vLLM process of a boot id."""

    def __init__(
        self,
        probe: GateKeeper,
        store: Store,
        settings: MitigationSettings,
        scanned: Callable[[str], MonitorState | None],
        *,
        now: Callable[[], float],
        worse_nats: float,
    ) -> None:
        self._probe = probe
        self._store = store
        self._settings = settings
        self._scanned = scanned
        self._now = now
        self._worse_nats = worse_nats

    async def check(
        self,
        action: MitigationAction,
        blocks: Sequence[int],
        alpha: float,
        *,
        reason: str,
        actor: str,
        mandate: Mandate | None,
        force: bool,
        mode: Mode,
    ) -> tuple[MitigationRecord, list[float]]:
        """The record, `pending` or `dry_run` and not stored yet, and all live gates.

        Raises `MitigationError` or `ProbeError`.
        """
        check_order(action, blocks, alpha)
        facts = await self._probe.facts()
        check_process(facts.boot_id, mandate)
        check_model(facts, blocks)
        check_not_held(blocks, facts.boot_id, self._store.open_mitigations())
        check_blocks_at_once(self._settings, facts.gates, blocks)
        check_actions_in_window(self._settings, self._store.mitigations(limit=1000), self._now())
        worse = harm(self._scanned(facts.boot_id), facts.gates, blocks, alpha, self._worse_nats)
        if worse is not None and not force:
            raise HarmfulOrder(f"{worse}: not done without force.")
        order = f"set the gate of {names(blocks)} to {alpha:g}"
        state, message = MitigationState.PENDING, f"Will {order}."
        if mode is Mode.DRY_RUN:
            state, message = MitigationState.DRY_RUN, f"Dry run: would {order}; nothing was touched."
        record = MitigationRecord(
            id=uuid4().hex,
            action=action,
            blocks=tuple(blocks),
            alpha=alpha,
            reason=reason,
            actor=actor,
            automatic=mandate is not None,
            rule=None if mandate is None else mandate.rule,
            forced=worse is not None,
            mode=mode,
            state=state,
            gates_before=tuple(Gate(block=block, alpha=facts.gates[block]) for block in blocks),
            boot_id=facts.boot_id,
            created_at=self._now(),
            updated_at=self._now(),
            message=message,
        )
        if worse is not None:
            detail = {"id": record.id, "blocks": list(blocks), "alpha": alpha, "message": f"{worse}."}
            self._store.add_event(Event(at=self._now(), actor=actor, what="mitigation forced", detail=detail))
        return record, facts.gates
