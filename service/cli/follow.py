"""Waits for a scan that runs in the sidecar, with a bar for people."""

from .client import CliError, Json, Sidecar
from .show import progress_bar


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
