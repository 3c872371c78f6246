"""What the commands print: JSON for machines, plain lines and tables for people."""

import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
"""The option of the commands that print records as the API has them."""


def console() -> Console:
    """Standard output; without colour when it is no terminal or NO_COLOR is set, and never cut off in a pipe."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 10_000)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def progress_bar(*, quiet: bool) -> Progress:
    """A bar on standard error; none when that is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )


def table(*columns: str) -> Table:
    """A table without boxes: it can be cut and grepped."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def print_records(
    records: list[dict[str, Any]], as_json: bool, columns: tuple[str, ...], row: Callable[[dict[str, Any]], list[str]]
) -> None:
    """What a `list` command prints: the records as JSON, or a table with the `row` of each."""
    if as_json:
        print_json(records)
        return
    shown = table(*columns)
    for record in records:
        shown.add_row(*row(record))
    console().print(shown)


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"
