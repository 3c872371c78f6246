"""`/v1/states`, `/v1/blocks`, `/v1/findings`: what is known."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from ...monitors.alpha_scan import AlphaScan, AlphaScanFinding
from ...monitors.finding import Action
from ..live import MonitorState
from ..problem import Kind, responses
from ..records import FindingRecord
from ..schemas import AlertView, BlockView, MitigationOffer, PulseView, StatesView, StateView
from ..sidecar import Sidecar
from ..skippability import loss_without
from .access import GUARDED, READING, Limit, Reader, TheSidecar

router = APIRouter(prefix="/v1", tags=["states"])


@router.get("/states", operation_id="getStates", responses=responses(*GUARDED), openapi_extra=READING)
async def get_states(sidecar: TheSidecar, _: Reader) -> StatesView:
    """The verdict, health as each monitor sees it, alerts that fire, and whether a mitigation can be had."""
    return states(sidecar)


@router.get("/blocks", operation_id="listBlocks", responses=responses(*GUARDED), openapi_extra=READING)
async def list_blocks(sidecar: TheSidecar, _: Reader) -> list[BlockView]:
    """All blocks with gate and scores; empty before vLLM has answered."""
    return blocks(sidecar)


@router.get(
    "/findings", operation_id="listFindings", responses=responses(*GUARDED, Kind.INVALID), openapi_extra=READING
)
async def list_findings(
    sidecar: TheSidecar,
    _: Reader,
    limit: Limit = 100,
    monitor: Annotated[str | None, Query(max_length=100)] = None,
) -> list[FindingRecord]:
    """The last findings, newest first."""
    return sidecar.store.findings(limit, monitor)


def states(sidecar: Sidecar) -> StatesView:
    """The whole picture."""
    live = sidecar.live
    mode = sidecar.settings.mitigation.mode
    refusal = live.gates_refusal()
    if refusal is None and mode == "observe":
        refusal = "The mode is observe: set mitigation.mode to dry-run or enforce."
    return StatesView(
        verdict=live.verdict(),
        up=live.up,
        away=None if live.up else live.away,
        model_name=live.model_name,
        boot_id=live.facts.boot_id if live.up and live.facts is not None else None,
        gates=live.facts.gates if live.up and live.facts is not None and live.facts.armed else None,
        scanning=sidecar.runner.running,
        pulse=PulseView(pulse=live.beat.pulse, reason=live.beat.reason),
        last_scan_at=live.tally(AlphaScan.name).last_at,
        mitigation=MitigationOffer(mode=mode, offered=refusal is None, reason=refusal),
        automation=sidecar.automatic.last,
        profile=sidecar.baseline.told(live.state(AlphaScan.name).finding),
        states=[_state(state) for state in live.states()],
        alerts=[
            AlertView(
                name=alert.name,
                monitor=alert.monitor,
                block=alert.block,
                since=alert.since,
                summary=alert.summary,
                description=alert.description,
            )
            for alert in sidecar.alerts.firing
        ],
    )


def blocks(sidecar: Sidecar) -> list[BlockView]:
    """All blocks; what is not known now is None."""
    facts = sidecar.live.facts
    if facts is None:
        return []
    finding = sidecar.live.state(AlphaScan.name).finding
    scores = _scores(finding) if isinstance(finding, AlphaScanFinding) else {}
    held = {
        block: record.id
        for record in sidecar.store.open_mitigations()
        if record.boot_id == facts.boot_id
        for block in record.held
    }
    return [
        BlockView(
            gate=facts.gates[block] if sidecar.live.up and facts.armed else None,
            mitigation_id=held.get(block),
            **scores.get(block, {"block": block, "flagged": None}),
        )
        for block in range(facts.num_blocks)
    ]


def _scores(finding: AlphaScanFinding) -> dict[int, dict[str, Any]]:
    """What the finding knows of each block, as far as the API shows it: a score more is no error of the route."""
    shown = set(BlockView.model_fields)
    return {
        score.block: score.model_dump(include=shown) | {"loss_without_nats": loss_without(finding, score.block)}
        for score in finding.blocks
    }


def _state(state: MonitorState) -> StateView:
    finding = state.finding
    return StateView(
        monitor=state.monitor,
        health=state.health,
        reason=state.reason,
        at=state.at,
        action=Action.NONE if finding is None else finding.action,
        flagged=[] if finding is None else [place.block for place in finding.places],
        finding_id=state.finding_id,
    )
