"""`flipwatch baseline`: the clean profile of the served model, that scans are judged with."""

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from ...monitors.alpha_scan import Profile
from ...monitors.moment import utc
from .client import CliError, Json, Sidecar
from .follow import check_done, follow_scan
from .show import AsJson, console, number, print_json

app = typer.Typer(
    help="Record, show and move the clean profile that scans are judged with.",
    no_args_is_help=True,
)

_PATH = "/v1/baselines"


@app.command()
def record(as_json: AsJson = False) -> None:
    """Scan the live model, known to be good, and make its clean profile."""
    with Sidecar() as sidecar:
        accepted = sidecar.post(_PATH, {})
        scan = follow_scan(sidecar, accepted["id"], quiet=as_json)
        check_done(scan)
        if scan["profile_refusal"] is not None:
            raise CliError(f"No profile was recorded: {scan['profile_refusal']}")
        made = sidecar.get(_PATH)
    _tell("recorded", made, as_json)


@app.command()
def show(as_json: AsJson = False) -> None:
    """Show whose profile it is."""
    with Sidecar() as sidecar:
        profile = sidecar.get(_PATH)
        used = sidecar.get("/v1/states")["profile"]
    if as_json:
        print_json(profile)
        return
    out = console()
    base = profile["base_nats"]
    shown = {
        **profile["provenance"],
        "recorded": utc(profile["recorded_at"]),
        "alphas": ", ".join(f"{alpha:g}" for alpha in profile["alphas"]),
        "blocks": len(profile["blocks"]),
        "sequences": f"{len(base)}, {number(sum(base) / len(base))} nats on average",
    }
    for name, value in shown.items():
        out.print(f"{name:<22} {value}", markup=False)
    out.print(used, markup=False)


@app.command()
def export(
    file: Annotated[Path | None, typer.Argument(help="File to write; default: standard output.")] = None,
) -> None:
    """Write the profile as JSON, for another server of the same model."""
    with Sidecar() as sidecar:
        profile = sidecar.get(_PATH)
    if file is None:
        print_json(profile)
        return
    try:
        file.write_text(json.dumps(profile) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError(f"The profile cannot be written to {file}: {error.strerror}.") from None
    console().print(f"{file}: profile of {profile['provenance']['model']}, {utc(profile['recorded_at'])}", markup=False)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="File that `flipwatch baseline export` wrote.")], as_json: AsJson = False
) -> None:
    """Use a profile that was recorded before; one of another model, build or validation set is refused."""
    profile = _read(file)
    with Sidecar() as sidecar:
        made = sidecar.put(_PATH, profile.model_dump(mode="json"))
    _tell("imported", made, as_json)


@app.command()
def remove() -> None:
    """Forget the profile: scans are judged without one."""
    with Sidecar() as sidecar:
        sidecar.delete(_PATH)
    console().print("removed", markup=False)


def _read(file: Path) -> Profile:
    try:
        return Profile.model_validate_json(file.read_bytes())
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror}.") from None
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise CliError(f"{file} is no clean profile: {f'{at}: ' if at else ''}{first['msg']}.") from None


def _tell(what: str, profile: Json, as_json: bool) -> None:
    if as_json:
        print_json(profile)
        return
    size = f"{len(profile['blocks'])} blocks, {len(profile['base_nats'])} sequences"
    console().print(
        f"{what}: profile of {profile['provenance']['model']}, {utc(profile['recorded_at'])}, {size}", markup=False
    )
