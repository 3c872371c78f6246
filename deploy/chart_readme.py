"""Write the table of values in helm/flipwatch/README.md, from the comments and defaults of values.yaml.

    .venv/bin/python deploy/chart_readme.py

`## @param KEY DESCRIPTION` describes one value, `## @section TITLE` begins a table.  Raises `SystemExit` with one
sentence where a value has no description, or a description no value.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

CHART = Path(__file__).parent.parent / "helm" / "flipwatch"
BEGIN, END = "<!-- values -->\n", "<!-- end of values -->\n"

_COMMENT = re.compile(r"^## @(param (?P<key>\S+)|section) (?P<words>.+)$", re.MULTILINE)


def tables(text: str) -> str:
    """The tables for the text of a values.yaml."""
    defaults = yaml.safe_load(text)
    lines: list[str] = []
    described: set[str] = set()
    for match in _COMMENT.finditer(text):
        key, words = match["key"], match["words"]
        if key is None:
            lines += ["", f"### {words}", "", "| value | default | meaning |", "|---|---|---|"]
            continue
        described.add(key)
        lines.append(f"| `{key}` | {_shown(_default(defaults, key))} | {words} |")
    if missing := sorted(set(_leaves(defaults, described)) - described):
        raise SystemExit(f"values.yaml has no `## @param` for {', '.join(missing)}: describe it.")
    return "\n".join(lines[1:]) + "\n"


def _default(defaults: Any, key: str) -> Any:
    value = defaults
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise SystemExit(f"values.yaml describes {key}, which is no value: remove the line.")
        value = value[part]
    return value


def _leaves(value: Any, described: set[str], key: str = "") -> Iterator[str]:
    """Every key that has to be described: what is described as a whole is not opened."""
    if isinstance(value, dict) and value and key not in described:
        for name, part in value.items():
            yield from _leaves(part, described, f"{key}.{name}".lstrip("."))
    else:
        yield key


def _shown(value: Any) -> str:
    if value == "":
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def renewed(readme: str, values: str) -> str:
    """The README with the tables of these values."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + tables(values) + "\n" + END + after


if __name__ == "__main__":
    path = CHART / "README.md"
    values = (CHART / "values.yaml").read_text(encoding="utf-8")
    path.write_text(renewed(path.read_text(encoding="utf-8"), values), encoding="utf-8")
