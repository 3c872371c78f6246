"""The commands in one place, and the one catch that turns every mistake into a sentence."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import Abort, TyperException

from ... import __version__
from . import baseline, canary, compare, differential, doctor, events, inject, integrity, mitigate, scan, status
from .client import CliError

app = typer.Typer(
    name="flipwatch",
    help="Online health monitor for LLM servers. Talks to the sidecar at FLIPWATCH_URL with FLIPWATCH_TOKEN.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("scan")(scan.scan)
app.command("compare")(compare.compare)
app.command("status")(status.status)
app.command("events")(events.events)
app.add_typer(baseline.app, name="baseline")
app.add_typer(integrity.app, name="integrity")
app.add_typer(differential.app, name="differential")
app.add_typer(canary.app, name="canary")
app.add_typer(mitigate.app, name="mitigate")
app.add_typer(inject.app, name="inject")
app.command("doctor")(doctor.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flipwatch {__version__}")
        raise typer.Exit


@app.callback()
def _flipwatch(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings; FLIPWATCH_ variables win over it.")
    ] = None,
    stay: Annotated[
        bool,
        typer.Option("--stay", help="Where it cannot start: stay alive, say why on /readyz, and try again."),
    ] = False,
) -> None:
    """Run the sidecar until it is told to stop."""
    from ..server import serve as run
    from ..settings import ConfigurationError, load_settings
    from ..staying import serve_staying

    if stay:
        raise typer.Exit(serve_staying(lambda: load_settings(config)))
    try:
        settings = load_settings(config)
    except ConfigurationError as error:
        raise CliError(str(error)) from None
    raise typer.Exit(run(settings))


def _refuse(why: str) -> int:
    # A group without a command has shown its help and has nothing more to say.
    if message := " ".join(why.split()):
        print(f"flipwatch: {message}", file=sys.stderr)
    return 2


def main() -> None:
    """Entry point of the `flipwatch` program."""
    try:
        code = app(prog_name="flipwatch", standalone_mode=False)
    except CliError as error:
        code = _refuse(str(error))
    except TyperException as error:
        code = _refuse(error.format_message())
    except Abort:
        code = 130
    sys.exit(code)
