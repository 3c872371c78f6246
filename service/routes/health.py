"""`/livez`, `/readyz`, `/metrics`, and the status page at `/`: open, but for the page."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client.exposition import choose_encoder

from ..drain_orders import drain_in_effect
from ..page import render
from ..problem import Kind, document, responses
from ..schemas import CheckView, LiveView, ReadyView
from ..sidecar import Sidecar
from ..store import StoreError
from .access import Reader, TheSidecar
from .states import blocks, states

router = APIRouter(tags=["health"])


@router.get("/livez", operation_id="getLive")
async def get_live() -> LiveView:
    """The process answers.  Never depends on the model."""
    return LiveView(status="alive")


@router.get("/readyz", operation_id="getReady", response_model=ReadyView, responses=responses(Kind.NOT_READY))
async def get_ready(sidecar: TheSidecar) -> JSONResponse:
    """The sidecar can do its work.  An absent vLLM is listed and does not make it unready; a drain does."""
    found = _checks(sidecar)
    listed = [check.model_dump(mode="json") for check in found]
    bad = [check for check in found if check.required and not check.ok]
    if bad:
        return document(
            Kind.NOT_READY, "; ".join(f"{check.name}: {check.detail.rstrip('.')}" for check in bad) + ".", checks=listed
        )
    return JSONResponse({"status": "ready", "checks": listed})


@router.get("/metrics", include_in_schema=False)
async def get_metrics(request: Request) -> Response:
    """Prometheus' text format, or OpenMetrics for who asks for it."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(request.app.state.registry), headers={"content-type": media_type})


@router.get("/", include_in_schema=False, response_class=HTMLResponse)
async def get_page(sidecar: TheSidecar, _: Reader) -> HTMLResponse:
    """The status page for people."""
    html = render(
        states(sidecar),
        blocks(sidecar),
        sidecar.store.mitigations(10),
        [sidecar.runner.record(scan.id) or scan for scan in sidecar.store.scans(10)],
        tau=sidecar.settings.alpha_scan.tau,
        now=sidecar.now(),
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
    return HTMLResponse(html, headers={"content-security-policy": policy, "cache-control": "no-store"})


def _checks(sidecar: Sidecar) -> list[CheckView]:
    drain = None
    try:
        sidecar.store.touch()
        store = CheckView(name="store", ok=True, required=True, detail="can be written")
        drain = drain_in_effect(sidecar.store.open_mitigations())
    except StoreError as error:
        store = CheckView(name="store", ok=False, required=True, detail=str(error))
    running = sidecar.schedule.running
    schedule = CheckView(name="schedule", ok=running, required=True, detail="runs" if running else "does not run")
    live = sidecar.live
    probe = CheckView(name="probe", ok=live.up, required=False, detail="answers" if live.up else live.away)
    refusal = live.gates_refusal()
    gates = CheckView(name="gates", ok=refusal is None, required=False, detail=refusal or "act")
    found = [store, schedule, probe, gates]
    if drain is not None:
        # Anybody may read this, so that the reason stays with the record.
        detail = f"mitigation {drain.id} drains this server, until it is undone or vLLM restarts"
        found.append(CheckView(name="drain", ok=False, required=True, detail=detail))
    return found
