"""The README's table of verdicts against the table that counts."""

from pathlib import Path

from flipwatch.monitors.verdict.table import TABLE, Row

README = Path(__file__).parents[1] / "README.md"
HEAD = "| verdict | health | evidence | meaning | what to do |\n|---|---|---|---|---|\n"


def line(row: Row) -> str:
    """One row as the README writes it."""
    evidence = ", ".join(f"{question.value.replace('_', ' ')}: {answer}" for question, answer in row.pattern.items())
    cells = (f"`{row.verdict}`", f"`{row.health}`", evidence or "anything else", row.sentence, row.advice)
    return f"| {' | '.join(cells)} |\n"


def test_readme_has_every_row_of_the_table_in_its_order() -> None:
    """What the README promises is what the code does, row by row."""
    table = README.read_text(encoding="utf-8").split("<!-- verdicts -->\n\n")[1].split("\n\n")[0] + "\n"
    assert table == HEAD + "".join(line(row) for row in TABLE)
