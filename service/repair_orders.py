"""Orders to repair: what is to be put right is looked up first, then carried out by `RepairSteps`.

`recent` tells what a sweep has just found in the vLLM process of these facts, if one has.
"""

from collections.abc import Callable, Sequence
from uuid import uuid4

from ..monitors.fingerprint.facts import ChunkRepair, FingerprintReading, blocks_of
from ..monitors.wire import ModelFacts
from .gates import names
from .guard import InvalidOrder, NothingChanged, NothingToRepair, check_actions_in_window, check_blocks, check_process
from .records import Mandate, MitigationAction, MitigationRecord, MitigationState, Mode
from .repair_steps import Mender, RepairSteps
from .repair_words import counted, intention
from .settings import MitigationSettings
from .store import Store
from .swept import Swept, changed_pieces


class RepairOrders:
    """Turns an order into the record of a repair.  A repair needs no gates, and gates no block."""

    def __init__(
        self,
        probe: Mender,
        store: Store,
        settings: MitigationSettings,
        steps: RepairSteps,
        recent: Callable[[ModelFacts], FingerprintReading | None],
        *,
        now: Callable[[], float],
    ) -> None:
        self._probe = probe
        self._store = store
        self._settings = settings
        self._steps = steps
        self._recent = recent
        self._now = now

    async def check(
        self, blocks: Sequence[int] | None, *, reason: str, actor: str, mandate: Mandate | None, mode: Mode
    ) -> MitigationRecord:
        """The record of a repair of these blocks, or of everything for None; not stored yet.

        It is `pending`, or `dry_run` in that mode.  A named block that is skipped, and intact, has its skip ended
        and nothing else.  Raises `MitigationError` or `ProbeError`.
        """
        if blocks is not None and len(set(blocks)) != len(blocks):
            raise InvalidOrder("Name each block once.")
        facts = await self._probe.facts()
        check_process(facts.boot_id, mandate)
        if blocks is not None and facts.armed:
            check_blocks(facts, blocks)
        check_actions_in_window(self._settings, self._store.mitigations(limit=1000), self._now())
        swept, chosen = await self._changed(facts, blocks)
        held = self._held(facts)
        ending = sorted(block for block in held & set(blocks or ()) if swept.intact(block))
        if not chosen and not ending:
            refusal = NothingToRepair if swept.changed else NothingChanged
            raise refusal(swept.nothing_in(blocks))
        touched = {block for bad in chosen for block in blocks_of(changed_pieces(bad))}
        state, message = MitigationState.PENDING, self._will(chosen, ending)
        if mode is Mode.DRY_RUN:
            would = intention(chosen) if chosen else f"let {names(ending)} run again, as nothing has changed there"
            state, message = MitigationState.DRY_RUN, f"Dry run: would {would}; nothing was touched."
        return MitigationRecord(
            id=uuid4().hex,
            action=MitigationAction.REPAIR,
            blocks=tuple(sorted(touched | (held & set(blocks or ())))),
            alpha=None,
            reason=reason,
            actor=actor,
            automatic=mandate is not None,
            rule=None if mandate is None else mandate.rule,
            mode=mode,
            state=state,
            gates_before=(),
            repairs=tuple(chosen),
            boot_id=facts.boot_id,
            created_at=self._now(),
            updated_at=self._now(),
            message=message,
        )

    async def _changed(self, facts: ModelFacts, blocks: Sequence[int] | None) -> tuple[Swept, list[ChunkRepair]]:
        """A look at all chunks, and the changed ones that are meant.

        One sweep after which somebody orders a repair is enough: on a busy server a second one takes long.  The probe
        holds each chunk against its digest before it writes, and all of them are looked at again afterwards.
        """
        reading = self._recent(facts)
        if reading is not None and (chosen := (swept := Swept(reading)).touching(blocks)):
            return swept, chosen
        swept = await self._steps.look()
        return swept, swept.touching(blocks)

    def _held(self, facts: ModelFacts) -> set[int]:
        """Blocks that an active mitigation of this vLLM process holds."""
        return {
            block
            for record in self._store.open_mitigations()
            if record.state is MitigationState.ACTIVE and record.boot_id == facts.boot_id
            for block in record.held
        }

    @staticmethod
    def _will(chosen: Sequence[ChunkRepair], ending: Sequence[int]) -> str:
        if not chosen:
            return f"Will let {names(ending)} run again, as nothing has changed there, once the loss is measured."
        return f"Will put {counted(chosen)} right as soon as the loss before is measured."
