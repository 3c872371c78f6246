"""Orders to drain: the server is called not ready, and nothing in it is touched.

vLLM is not asked: the server that needs it most is one that does not answer any more.
"""

from collections.abc import Callable, Iterable
from uuid import uuid4

from .guard import AlreadyMitigated, check_actions_in_window
from .records import Mandate, MitigationAction, MitigationRecord, MitigationState, Mode
from .settings import MitigationSettings
from .store import Store


class DrainOrders:
    """Turns an order into a record, which is all that a drain consists of."""

    def __init__(self, store: Store, settings: MitigationSettings, *, now: Callable[[], float]) -> None:
        self._store = store
        self._settings = settings
        self._now = now

    def check(self, boot_id: str, *, reason: str, actor: str, mandate: Mandate | None, mode: Mode) -> MitigationRecord:
        """The record, `active` or `dry_run` and not stored yet; raises `MitigationError`."""
        drain = drain_in_effect(self._store.open_mitigations())
        if drain is not None:
            raise AlreadyMitigated(f"Mitigation {drain.id} drains this server already: undo it to end that.")
        check_actions_in_window(self._settings, self._store.mitigations(limit=1000), self._now())
        state, message = MitigationState.ACTIVE, "Drained: /readyz answers 503 until this is undone or vLLM restarts."
        if mode is Mode.DRY_RUN:
            state, message = MitigationState.DRY_RUN, "Dry run: would let /readyz answer 503; nothing was touched."
        return MitigationRecord(
            id=uuid4().hex,
            action=MitigationAction.DRAIN,
            blocks=(),
            alpha=None,
            reason=reason,
            actor=actor,
            automatic=mandate is not None,
            rule=None if mandate is None else mandate.rule,
            mode=mode,
            state=state,
            gates_before=(),
            boot_id=boot_id,
            created_at=self._now(),
            updated_at=self._now(),
            message=message,
        )


def drain_in_effect(open_records: Iterable[MitigationRecord]) -> MitigationRecord | None:
    """The drain that keeps the server not ready, if there is one."""
    return next((record for record in open_records if record.action is MitigationAction.DRAIN), None)
