"""Starts a scan in the sidecar and waits for its end, with a bar for people."""

from collections.abc import Collection

from rich.console import Console

from .client import CliError, Json, Refused, Sidecar
from .show import progress_bar


def start_scan(sidecar: Sidecar, path: str, body: Json, *, behind: Collection[str]) -> Json:
    """What the sidecar accepted; a running scan of one of the monitors `behind` is waited for first."""
    while True:
        try:
            return sidecar.post(path, body)
        except Refused as refused:
            running = running_scan(sidecar, behind)
            if refused.status != 409 or running is None:
                raise
            Console(stderr=True).print(f"A scan of {running['monitor']} runs; waiting for its end.")
            follow_scan(sidecar, running["id"], quiet=True)


def running_scan(sidecar: Sidecar, monitors: Collection[str]) -> Json | None:
    """The scan of one of these monitors that runs, if any."""
    scans: list[Json] = sidecar.get("/v1/scans")
    return next((s for s in scans if s["state"] in ("queued", "running") and s["monitor"] in monitors), None)


def follow_scan(sidecar: Sidecar, scan_id: str, *, quiet: bool) -> Json:
    """The scan once it has ended, done or not; the bar is on standard error when that is a terminal."""
    with progress_bar(quiet=quiet) as progress:
        task = progress.add_task("scanning", total=None)
        return sidecar.wait(
            f"/v1/scans/{scan_id}",
            lambda record: record["state"] in ("done", "failed"),
            lambda record: progress.update(task, completed=record["steps_done"], total=record["steps_total"]),
        )


def check_done(scan: Json) -> None:
    """Raises `CliError` when the scan could not be done."""
    if scan["state"] != "done":
        raise CliError(f"The scan could not be done: {scan['error'] or 'no reason was given'}")
