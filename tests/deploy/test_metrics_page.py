"""docs/metrics.md and the collector say the same: names, types, labels and their values, numbers of series, queries."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric

from flipwatch.monitors.alpha_scan import QUICK_GRID
from flipwatch.monitors.canary.expectation import ReferenceKind as Answers
from flipwatch.monitors.canary.finding import Symptom
from flipwatch.monitors.canary.pulse import Pulse
from flipwatch.monitors.differential.reference import ReferenceKind
from flipwatch.monitors.finding import Health
from flipwatch.monitors.fingerprint.facts import Method
from flipwatch.monitors.verdict.verdict import Verdict
from flipwatch.service.alert import ALERTING, NAMES
from flipwatch.service.live import Live
from flipwatch.service.metrics_integrity import SKIPPED
from flipwatch.service.records import MitigationAction

from ..service.metrics_rig import known, registry
from ..service.toy_profile import PROFILE
from .metric_series import count, row

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
_HEADER = ["metric", "type", "unit", "meaning", "absent", "what zero does not tell"]
# Numbers of blocks and ranks, and names that others choose.
_OPEN = {"block", "rank", "model_name"}


class Entry(NamedTuple):
    """A metric with its type and its labels."""

    name: str
    kind: str
    labels: frozenset[str]


def _rows() -> list[list[str]]:
    """All rows of all tables, cell by cell."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _of_page() -> dict[str, Entry]:
    """The tables of metrics, each of which has the same six columns."""
    found: dict[str, Entry] = {}
    for cells in _rows():
        name = re.fullmatch(r"`(\w+)(?:\{([\w,]+)\})?`", cells[0])
        if name is None or len(cells) != len(_HEADER):
            continue
        assert name[1] not in found, f"{name[1]} has two rows"
        assert all(cells), f"{name[1]} has an empty cell"
        found[name[1]] = Entry(name[1], cells[1], frozenset((name[2] or "").split(",")) - {""})
    return found


def _of(families: Iterable[Metric]) -> dict[str, Entry]:
    """What is exported; a family without a sample would hide its labels."""
    found = {}
    for family in families:
        assert family.samples, f"{family.name} has no sample"
        [name] = {sample.name for sample in family.samples}
        [labels] = {frozenset(sample.labels) for sample in family.samples}
        found[name] = Entry(name, family.type, labels)
    return found


def _exported() -> dict[str, Entry]:
    live, alerts = known()
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    PlatformCollector(registry=process)
    ours = registry(live, alerts, PROFILE, PROFILE.recorded_at)
    return _of([*ours.collect(), *process.collect()])


def test_the_page_has_every_metric_and_no_other() -> None:
    """Name, type and labels of each, in both directions."""
    page, exported = _of_page(), _exported()
    assert set(page) - set(exported) == set(), "the page has what nobody exports"
    assert set(exported) - set(page) == set(), "the page lacks what is exported"
    assert page == exported


def test_every_table_of_metrics_says_what_zero_does_not_tell() -> None:
    """No section has other columns."""
    headers = [cells for cells in _rows() if cells[0] == "metric"]
    assert len(headers) == len(re.findall(r"^## (?!Labels|How|Deprecation|Together)", PAGE, re.MULTILINE))
    assert all(cells == _HEADER for cells in headers)


CLOSED: dict[tuple[str, str], Iterable[str]] = {
    ("score", ""): ("bss", "slope", "skip_gain", "largest_deviation"),
    ("reference", "flipwatch_block_zscore"): ("blocks", "profile"),
    ("reference", "flipwatch_block_divergence"): ReferenceKind,
    ("reference", "flipwatch_canary_scatter"): Answers,
    ("measure", ""): ("l2", "cosine"),
    ("alpha", ""): [f"{alpha:g}" for alpha in QUICK_GRID],
    ("verdict", "flipwatch_verdict"): Verdict,
    ("verdict", "flipwatch_verdict_firing"): ALERTING,
    ("monitor", ""): ("alpha_scan", "fingerprint", "differential", "canary"),
    ("state", "flipwatch_health_state"): Health,
    ("state", "flipwatch_pulse"): Pulse,
    ("symptom", ""): Symptom,
    ("reason", ""): SKIPPED,
    ("action", ""): MitigationAction,
    ("method", ""): Method,
    ("alert", ""): NAMES,
}


def test_the_values_of_labels_are_those_of_the_code() -> None:
    """Closed sets are listed in full, and whatever is exported lies within them."""
    page = {
        (cells[0].strip("`"), cells[1].strip("`") if cells[1].startswith("`") else ""): re.findall(
            r"`([\w.]+)`", cells[2].partition(";")[0]
        )
        for cells in _rows()
        if len(cells) == 3 and cells[0].startswith("`")
    }
    assert {label for label, _ in page} >= _OPEN
    assert {key: values for key, values in page.items() if key[0] not in _OPEN} == {
        key: [str(value) for value in values] for key, values in CLOSED.items()
    }
    live, alerts = known()
    for family in registry(live, alerts, PROFILE, PROFILE.recorded_at).collect():
        if family.name.endswith("_info"):
            continue
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label not in _OPEN:
                    allowed = CLOSED[(label, sample.name)] if (label, sample.name) in CLOSED else CLOSED[(label, "")]
                    assert value in {str(one) for one in allowed}, sample


def test_the_numbers_of_series_are_those_of_the_collector() -> None:
    """The table, and the sentence under it."""
    rows = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    series = [count(int(line.split("|")[1])) for line in rows]
    assert rows == [row(one) for one in series]
    assert len(rows) >= 3
    [(by_block, besides)] = {(one.by_block // one.blocks, one.total - one.by_block) for one in series}
    assert f"at most {by_block} for each block and {besides} besides" in PAGE
    asked = re.search(r"`python -m tests.deploy.metric_series ([\d ]+)`", PAGE)
    assert asked is not None
    assert asked[1].split() == [str(one.blocks) for one in series]
    live, alerts = known()
    by_rank = [
        family
        for family in registry(live, alerts, PROFILE, PROFILE.recorded_at).collect()
        if "rank" in family.samples[0].labels
    ]
    assert f"each further rank adds {len(by_rank)}." in PAGE
    process = [name for name in _exported() if not name.startswith("flipwatch_")]
    assert f"without the sidecar's own process ({len(process)} more)" in PAGE


def test_the_queries_are_promql_about_metrics_that_exist(tmp_path: Path) -> None:
    """Prometheus' own parser takes each of them, and each name of ours is exported."""
    queries = re.findall(r"```promql\n(.*?)```", PAGE, re.DOTALL)
    assert len(queries) >= 5
    used = set(re.findall(r"\bflipwatch_\w+", "\n".join(queries)))
    assert used
    assert used - set(_exported()) == set()
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is missing: apt-get install --no-install-recommends prometheus"
    rules = "".join(
        f"  - record: page:query:{at}\n    expr: |\n" + "".join(f"      {line}\n" for line in query.splitlines())
        for at, query in enumerate(queries)
    )
    file = tmp_path / "queries.yml"
    file.write_text(f"groups:\n- name: page\n  rules:\n{rules}", encoding="utf-8")
    checked = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_never_absent_means_there_before_anything_is_known() -> None:
    """What the page calls never absent is there at the first scrape; what is not there then is not called that."""
    nothing_known = registry(Live(monitors=("alpha_scan",))).collect()
    there = {sample.name for family in nothing_known for sample in family.samples}
    never = {
        name
        for cells in _rows()
        if len(cells) == len(_HEADER) and (name := cells[0].strip("`").partition("{")[0]).startswith("flipwatch_")
        if cells[4] == "never"
    }
    assert never - there == set()
    # These can be absent later, or in part.
    assert there - never == {"flipwatch_health_state", "flipwatch_drained"}
