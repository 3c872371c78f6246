"""The runbooks: one page for each alert, whose commands and metrics exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from promql_parser import parse
from typer.exceptions import TyperException

from flipwatch.service.cli.app import app
from flipwatch.service.settings import Settings

from .rules import FOREIGN, ROOT, alerts, exported, metrics_in, records

RUNBOOKS = ROOT / "docs" / "runbooks"
PAGES = sorted(RUNBOOKS.glob("Flipwatch*.md"))
HEADINGS = ["Meaning", "Impact", "Diagnosis", "Mitigation", "False causes", "Verify"]

_FENCE = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$")


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _commands(text: str) -> list[str]:
    """Each `flipwatch ...` in fenced blocks and in inline code, without its comment."""
    fenced = [line for _, block in _FENCE.findall(text) for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))
    said = [line.partition("#")[0].strip() for line in fenced + inline]
    return [found[1] for line in said if (found := re.fullmatch(r"(?:kubectl exec .* -- )?(flipwatch .+)", line))]


def _parse(line: str) -> None:
    """As the command line would, without doing anything; raises what it would refuse it with."""
    command, (_, *words) = typer.main.get_command(app), shlex.split(line)
    while words and hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"{line}: there is no command {name}"
        command = command.commands[name]
    command.make_context("flipwatch", words)


def _queries(text: str) -> list[str]:
    return [line for kind, block in _FENCE.findall(text) if kind == "promql" for line in block.splitlines()]


def test_there_is_a_page_for_each_alert_and_no_other() -> None:
    """Named as the alert, which is what runbook_url points at."""
    assert {page.stem for page in PAGES} == {alert["alert"] for alert in alerts()}
    assert {page.name for page in RUNBOOKS.iterdir()} == {"README.md"} | {page.name for page in PAGES}


def test_the_index_has_each_alert_with_its_severity_and_summary() -> None:
    """As the rules say them."""
    rows = re.findall(r"(?m)^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \| (.+) \|$", _text(RUNBOOKS / "README.md"))
    assert all(name == target for name, target, _, _ in rows)
    assert sorted((name, severity, summary) for name, _, severity, summary in rows) == sorted(
        (alert["alert"], alert["labels"]["severity"], alert["annotations"]["summary"]) for alert in alerts()
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_a_page_has_its_parts_and_each_says_something(page: Path) -> None:
    """Title and six headings in order, none empty; a command or a query that says how to see and how to verify."""
    title, *parts = re.split(r"(?m)^## ", _text(page))
    assert title.strip() == f"# {page.stem}"
    assert [part.splitlines()[0] for part in parts] == HEADINGS
    bodies = {heading: part.partition("\n")[2].strip() for heading, part in zip(HEADINGS, parts, strict=True)}
    assert all(len(body) > 10 for body in bodies.values())
    for heading in ("Diagnosis", "Verify"):
        assert _commands(bodies[heading]) or _queries(bodies[heading]), heading
    assert _queries(bodies["Diagnosis"])


@pytest.mark.parametrize("page", [*PAGES, RUNBOOKS / "README.md"], ids=lambda page: str(page.stem))
def test_the_commands_exist(page: Path) -> None:
    """The real command line accepts each of them: command, options, number and kind of arguments."""
    for line in _commands(_text(page)):
        _parse(line)


def test_a_command_that_does_not_exist_is_seen() -> None:
    """A wrong command, option or number of words fails the test above."""
    with pytest.raises(AssertionError):
        _parse("flipwatch mitigate heal")
    for wrong in ("flipwatch scan --quickly", "flipwatch mitigate undo", "flipwatch events --limit many"):
        with pytest.raises(TyperException):
            _parse(wrong)
    assert _commands("`kubectl exec -it POD -c c -- flipwatch status`") == ["flipwatch status"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_the_queries_parse_and_their_metrics_exist(page: Path) -> None:
    """Every line of a promql block, and every metric that the text names."""
    known = exported() | records() | FOREIGN
    for query in _queries(_text(page)):
        parse(query)
        assert not metrics_in(query) - known, query
    named = set(re.findall(r"`(flipwatch_\w+)", _text(page)))
    assert not named - known


@pytest.mark.parametrize("page", [*PAGES, RUNBOOKS / "README.md"], ids=lambda page: str(page.stem))
def test_links_and_settings_exist(page: Path) -> None:
    """Each relative link leads to a file, each setting that is named is one."""
    text = _text(page)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (RUNBOOKS / target).exists(), target
    for group, name in re.findall(r"`([a-z_]+)\.([a-z_]+)`", text):
        model = Settings.model_fields[group].annotation
        assert model is not None
        assert name in model.model_fields, f"{group}.{name}"
