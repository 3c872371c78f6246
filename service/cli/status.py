"""`flipwatch status`: what the sidecar knows now."""

from typing import Annotated, Any

import typer

from ...monitors.moment import utc
from .client import Json, Sidecar
from .show import console, number, print_json, table

_EXIT = {"ok": 0, "degraded": 1, "failed": 1}


def status(
    all_blocks: Annotated[bool, typer.Option("--blocks", help="Show all blocks, also the plain ones.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print states and blocks as JSON.")] = False,
) -> None:
    """Show the verdict, health, alerts and gates. Exit code by the verdict, 0: ok, 1: a finding, 2: cannot tell."""
    with Sidecar() as sidecar:
        states: Json = sidecar.get("/v1/states")
        blocks: list[Json] = sidecar.get("/v1/blocks")
    if as_json:
        print_json({"states": states, "blocks": blocks})
    else:
        _print(states, blocks if all_blocks else [block for block in blocks if _stands_out(block)])
    raise typer.Exit(_EXIT.get(states["verdict"]["health"], 2))


def _stands_out(block: dict[str, Any]) -> bool:
    return bool(block["flagged"]) or block["gate"] not in (None, 1.0)


def _print(states: Json, blocks: list[Json]) -> None:
    out = console()
    verdict = states["verdict"]
    out.print(f"verdict      {verdict['verdict']}: {verdict['reason']}", markup=False)
    out.print(f"what to do   {verdict['advice']}", markup=False)
    out.print(f"model        {states['model_name'] or 'not known'}", markup=False)
    if not states["up"]:
        out.print(f"vLLM away    {states['away']}", markup=False)
    for state in states["states"]:
        out.print(f"{state['monitor']:<12} {state['health']}: {state['reason']}", markup=False)
    last = states["last_scan_at"]
    when = "none yet" if last is None else utc(last)
    out.print(f"last scan    {when}{', one is running' if states['scanning'] else ''}")
    offer = states["mitigation"]
    out.print(
        f"mitigation   {offer['mode']}: {'can be asked for' if offer['offered'] else offer['reason']}", markup=False
    )
    out.print(f"automation   {states['automation']}", markup=False)
    out.print(f"profile      {states['profile']}", markup=False)
    for alert in states["alerts"]:
        out.print(f"alert        {alert['name']}: {alert['summary']}. {alert['description']}", markup=False)
    if not blocks:
        return
    shown = table("block", "gate", "flagged", "mitigation", "without it", "skip gain", "z", "bss z", "slope z")
    for block in blocks:
        shown.add_row(
            str(block["block"]),
            number(block["gate"], 2),
            {True: "yes", False: "no", None: "-"}[block["flagged"]],
            block["mitigation_id"] or "-",
            *(number(block[name]) for name in ("loss_without_nats", "skip_gain", "skip_gain_z", "bss_z", "slope_z")),
        )
    out.print(shown)
