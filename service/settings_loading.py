"""What reading the settings needs beside their model: names of variables, files, and errors in plain words.

Unknown keys are refused in the environment and in the file: a setting that is spelled wrong must not be silently
without effect.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

PREFIX = "FLIPWATCH_"
CONFIG_VARIABLE = "FLIPWATCH_CONFIG"

# Read by the probe inside vLLM.  Sidecar and vLLM often share one environment (a compose file, a shell), so
# these names are known here and mean nothing.
PROBE_VARIABLES = frozenset({"FLIPWATCH_DISABLE", "FLIPWATCH_FAULTS", "FLIPWATCH_CPU_PLAIN_WEIGHTS"})

# Read by the command line (`client.py` and `compare.py` of `service/cli`) and by the set-up script; an operator exports
# them once.
OTHER_VARIABLES = frozenset(
    {
        "FLIPWATCH_URL",
        "FLIPWATCH_TOKEN",
        "FLIPWATCH_PEER_PROBE_TOKEN",
        "FLIPWATCH_PEER_API_KEY",
        "FLIPWATCH_CACHE",
    }
)

# Kubernetes puts these into every pod beside a Service named `flipwatch`.
_SERVICE_LINKS = re.compile(r"FLIPWATCH_(SERVICE_(HOST|PORT.*)|PORT(_.*)?)")


# Settings that are gone, and what to write instead.
_REPLACED = {
    "mitigation.automatic": "write rules for weight_fault and old_fault into automation.rules, or into a file that "
    "automation.policy_file names (deploy/examples/policy.yaml is one)",
    "mitigation.skip_unrepaired": "write a rule {verdict: weight_fault, action: skip} behind the one that repairs into "
    "automation.rules",
}


class ConfigurationError(Exception):
    """A setting is missing or wrong; the message is one sentence for the operator."""


class Environment(EnvSettingsSource):
    """The environment without the probe's variables: FLIPWATCH_FAULTS is not the section `faults`."""

    def _load_env_vars(self) -> Mapping[str, str | None]:
        probe_side = {name.lower() for name in PROBE_VARIABLES}
        return {name: value for name, value in super()._load_env_vars().items() if name.lower() not in probe_side}


def explain(error: ValidationError, prefix: str = "") -> str:
    """One sentence that names the first wrong setting, what is wrong, and what to do.

    The value itself is left out: it may be a secret.
    """
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # Pydantic adds the tried member of a union to the place: no part of the setting's name.
    parts = [str(part) for part in first["loc"] if str(part).isidentifier() or isinstance(part, int)]
    name = (prefix + ".".join(parts)).rstrip(".")
    if first["type"] == "extra_forbidden" and name in _REPLACED:
        return f"The setting {name} is gone: {_REPLACED[name]}."
    if first["type"] == "extra_forbidden":
        return f"The setting {name} does not exist: check its spelling or remove it."
    if first["type"] == "missing":
        return f"The setting {name} is missing: set it."
    what = first["msg"].removeprefix("Value error, ").rstrip(".")
    if prefix:
        return f"The setting {name} is wrong: {what}; correct it in the file."
    plain = [part for part in parts if not part.isdigit()]
    variable = PREFIX + "__".join(plain[:1] if len(plain) < len(parts) else plain).upper()
    return f"The setting {name} is wrong: {what}; correct it in the YAML file or in {variable}."


def refuse_unknown_variables(environ: Mapping[str, str], settings: Iterable[str]) -> None:
    """Raise `ConfigurationError` for a variable with our prefix that is none of the top-level `settings`."""
    known = {PREFIX + name.upper() for name in settings} | PROBE_VARIABLES | OTHER_VARIABLES | {CONFIG_VARIABLE}
    for name in sorted(environ):
        upper = name.upper()
        if _SERVICE_LINKS.fullmatch(upper):
            continue
        if upper.startswith(PREFIX) and upper not in known and upper.split("__")[0] not in known:
            raise ConfigurationError(
                f"The environment variable {name} is not a setting of Flipwatch: check its spelling or unset it."
            )


def refuse_odd_file(path: Path) -> None:
    """Raise `ConfigurationError` for a configuration file that holds no settings."""
    content = read_yaml("config", path)
    if content is not None and not isinstance(content, dict):
        raise ConfigurationError(f"The configuration file {path} must hold settings as `name: value` lines.")


def read_yaml(setting: str, path: Path) -> Any:
    """Content of the YAML file that a setting names, with text for keys.  Raises `ConfigurationError`."""
    text = read(setting, path)
    # The parser's message quotes the file, and the file may hold secrets.
    try:
        content = yaml.safe_load(text)
        named = _has_only_text_keys(content)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" near line {mark.line + 1}" if mark is not None else ""
        raise ConfigurationError(f"The file {path} ({setting}) is not valid YAML{where}: correct it.") from None
    except (ValueError, RecursionError):
        # A date that does not exist; lists in lists without an end.
        raise ConfigurationError(f"The file {path} ({setting}) cannot be read as settings: correct it.") from None
    if not named:
        raise ConfigurationError(f"The file {path} ({setting}) has a key that is no text: correct its spelling.")
    return content


def _has_only_text_keys(content: object) -> bool:
    if isinstance(content, dict):
        return all(isinstance(key, str) and _has_only_text_keys(value) for key, value in content.items())
    return not isinstance(content, list) or all(map(_has_only_text_keys, content))


def read(setting: str, path: Path) -> str:
    """Text of the file that a setting names.  Raises `ConfigurationError`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        # No UTF-8, or a zero byte in the name.
        why = error.strerror if isinstance(error, OSError) else "no text with a usable name"
        raise ConfigurationError(f"The setting {setting} names {path}, which cannot be read: {why}.") from None
