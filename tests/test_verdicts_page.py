"""The page of verdicts against the table that counts."""

from pathlib import Path

from flipwatch.monitors.verdict.table import TABLE, Row

PAGE = Path(__file__).parents[1] / "docs" / "verdicts.md"
HEAD = "| verdict | health | evidence | meaning | what to do |\n|---|---|---|---|---|\n"


def line(row: Row) -> str:
    """One row as the page writes it."""
    evidence = ", ".join(f"{question.value.replace('_', ' ')}: {answer}" for question, answer in row.pattern.items())
    cells = (f"`{row.verdict}`", f"`{row.health}`", evidence or "anything else", row.sentence, row.advice)
    return f"| {' | '.join(cells)} |\n"


def test_the_page_has_every_row_of_the_table_in_its_order() -> None:
    """What the page promises is what the code does, row by row."""
    table = PAGE.read_text(encoding="utf-8").split("<!-- verdicts -->\n\n")[1].split("\n\n")[0] + "\n"
    assert table == HEAD + "".join(line(row) for row in TABLE)
