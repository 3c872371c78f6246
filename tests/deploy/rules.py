"""The rules as data, for the tests of what rests on them."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RULES_FILE = ROOT / "helm" / "flipwatch" / "files" / "rules.yaml"
GOLDEN = ROOT / "tests" / "service" / "golden" / "metrics.txt"

FOREIGN = {"up", "process_start_time_seconds"}
"""Metrics in rules that are not Flipwatch's own: of Prometheus itself, and of each process."""

_WORDS = re.compile(r"\b[a-z_]+:[a-zA-Z0-9_:]+|\bflipwatch_[a-z0-9_]+|\bvllm:[a-z_]+|\bup\b|\bprocess_[a-z_]+")


def rules() -> list[dict[str, Any]]:
    """All of them, in the order of the file."""
    groups = yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """The alerting ones."""
    return [rule for rule in rules() if "alert" in rule]


def records() -> set[str]:
    """Names of the recording ones."""
    return {rule["record"] for rule in rules() if "record" in rule}


def exported() -> set[str]:
    """Names of all samples that the sidecar exports when it knows everything."""
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def metrics_in(text: str) -> set[str]:
    """Names in a query that look like metrics or recording rules; label values in quotes are none."""
    return set(_WORDS.findall(re.sub(r'"[^"]*"', "", text)))
