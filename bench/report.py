"""A benchmark's figures: as tables in the terminal, as JSON, and as a page for the documentation."""

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from integrity_flips import wilson
from rich.console import Console
from rich.table import Table as RichTable


class Table(NamedTuple):
    """A heading, what to know before reading it, and the table."""

    title: str
    text: str
    columns: list[str]
    rows: list[list[str]]


def share(count: Sequence[int]) -> str:
    """`97.5 % (195 of 200; 94.3 to 98.9)`: with the 95 % interval."""
    part, whole = count
    if not whole:
        return "none"
    low, high = wilson(part, whole)
    return f"{100 * part / whole:.2f} % ({part} of {whole}; {100 * low:.2f} to {100 * high:.2f})"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`2.10 (1.93 to 2.44)`: median, smallest, largest."""
    if not values:
        return "none"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def page(head: list[str], tables: Iterable[Table]) -> str:
    """Markdown: the lines of the head, then each table with its heading and text."""
    lines = list(head)
    for table in tables:
        lines += [f"## {table.title}\n", f"{table.text}\n"]
        lines += [f"| {' | '.join(table.columns)} |", f"|{' --- |' * len(table.columns)}"]
        lines += [f"| {' | '.join(row)} |" for row in table.rows]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def publish(figures: dict[str, Any], tables: Iterable[Table], page: str, file: Path | None, docs: Path | None) -> None:
    """Show the tables; write the figures into `file`, and with their page into the folder `docs`, where asked for."""
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for table in tables:
        shown = RichTable(title=table.title, caption=table.text, caption_justify="left")
        for number, column in enumerate(table.columns):
            shown.add_column(column, justify="right" if number else "left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    text = json.dumps(figures, indent=1, allow_nan=False) + "\n"
    if file is not None:
        file.write_text(text, encoding="utf-8")
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        (docs / "README.md").write_text(page, encoding="utf-8")
        (docs / "results.json").write_text(text, encoding="utf-8")
