"""`flipwatch events`: the audit log, newest line last as in any log."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from .client import Json, Sidecar
from .show import AsJson, console, print_json


def events(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many lines.")] = 50, as_json: AsJson = False
) -> None:
    """Show who changed what, and what Flipwatch decided by itself and why."""
    with Sidecar() as sidecar:
        lines: list[Json] = sidecar.get(f"/v1/events?limit={limit}")
    if as_json:
        print_json(lines)
        return
    for line in reversed(lines):
        when = datetime.fromtimestamp(line["at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        console().print(f"{when}  {line['actor']}  {line['what']}: {_told(line['detail'])}", markup=False)


def _told(detail: Json) -> str:
    """The sentence of a line, or all that it holds."""
    return str(detail["message"]) if "message" in detail else ", ".join(f"{name} {detail[name]}" for name in detail)
