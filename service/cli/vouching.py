"""What the commands share that record, show and remove what an operator vouches for."""

from collections.abc import Callable, Sequence

from ...monitors.moment import utc
from .client import CliError, Json, Sidecar
from .follow import check_done, follow_scan, start_scan
from .show import console, print_json


def record_vouched(path: str, what: str, size: Callable[[Json], str], *, behind: Sequence[str], as_json: bool) -> None:
    """Record "states" or "answers" of the live model, and print whose they are; `behind`: the scans to wait for."""
    with Sidecar() as sidecar:
        done = follow_scan(sidecar, start_scan(sidecar, path, {}, behind=behind)["id"], quiet=as_json)
        check_done(done)
        if done["recording_refusal"] is not None:
            raise CliError(f"No {what} were recorded: {done['recording_refusal']}")
        made = sidecar.get(path)
    if as_json:
        print_json(made)
        return
    words = f"recorded: {what} of {made['conditions']['model']}, {utc(made['recorded_at'])}, {size(made)}"
    console().print(words, markup=False)


def show_vouched(path: str, what: str, size: Callable[[Json], str], *, as_json: bool) -> None:
    """Print whose are recorded, a line for each condition."""
    with Sidecar() as sidecar:
        made = sidecar.get(path)
    if as_json:
        print_json(made)
        return
    shown = {**made["conditions"], "recorded": utc(made["recorded_at"]), what: size(made)}
    if made.get("misfit") is not None:
        shown["not used"] = made["misfit"]
    for name, value in shown.items():
        console().print(f"{name:<22} {value}", markup=False)


def remove_vouched(path: str) -> None:
    """Forget them."""
    with Sidecar() as sidecar:
        sidecar.delete(path)
    console().print("removed", markup=False)
