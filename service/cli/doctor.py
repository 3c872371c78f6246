"""`flipwatch doctor`: what is wrong with this installation, one line for each check."""

import asyncio
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from ...monitors.wire import ModelFacts, SelfTestState
from ..probe import Probe, ProbeError, ProbeRefused, ProbeUnauthorised
from ..settings import ConfigurationError, Settings, load_settings
from ..vllm import Vllm, VllmError
from .client import TOKEN_VARIABLE, CliError, Json, Sidecar
from .show import console, print_json


@dataclass(frozen=True)
class Check:
    """One line.  `good` is None for a remark that is neither right nor wrong."""

    name: str
    good: bool | None
    says: str


def doctor(
    config: Annotated[
        Path | None, typer.Option(help="YAML file of the sidecar; default: FLIPWATCH_CONFIG and the environment.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check sidecar, vLLM, probe and gates. Exit code 0: all is well, 2: something is wrong."""
    checks = examine(config)
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        out = console()
        words = {True: "[green]ok  [/]", False: "[red]BAD [/]", None: "note"}
        for check in checks:
            out.print(f"{words[check.good]} {check.name:<12} ", end="")
            out.print(check.says, markup=False)
    raise typer.Exit(2 if any(check.good is False for check in checks) else 0)


def examine(config: Path | None) -> list[Check]:
    """All checks.  What cannot be looked at because of an earlier fault is left out."""
    checks: list[Check] = []
    with Sidecar() as sidecar:
        info = _sidecar(sidecar, checks)
    settings = _settings(config, checks, serving=info is not None)
    facts: ModelFacts | None = None
    if settings is not None:
        facts = asyncio.run(_vllm(settings, checks))
        _validation(settings, checks)
    if facts is not None:
        _model(facts, checks)
    if info is not None:
        _switches(info, facts, checks)
    return checks


def _sidecar(sidecar: Sidecar, checks: list[Check]) -> Json | None:
    try:
        sidecar.get("/livez")
    except CliError as error:
        checks.append(Check("sidecar", False, str(error)))
        return None
    checks.append(Check("sidecar", True, f"answers at {sidecar.url}"))
    try:
        info: Json = sidecar.get("/v1/info")
    except CliError as error:
        checks.append(Check("token", False, str(error)))
        return None
    caller = info["caller"]
    scopes = ", ".join(caller["scopes"]) or "none"
    mine = "no token" if sidecar.token is None else f"the token in {TOKEN_VARIABLE}"
    checks.append(Check("token", True, f"{mine} is accepted as {caller['name']!r}, scopes: {scopes}"))
    return info


def _settings(config: Path | None, checks: list[Check], *, serving: bool) -> Settings | None:
    try:
        settings = load_settings(config)
        settings.probe_secret()
        settings.api_tokens()
        rules = settings.policy()
    except ConfigurationError as error:
        # One that serves had good settings when it started: these are not its own.
        where = " (The sidecar serves with others: run this where it runs, with its variables.)" if serving else ""
        checks.append(Check("settings", False, f"{error}{where}"))
        return None
    checks.append(Check("settings", True, f"can be read; vLLM is expected at {settings.vllm.shown_url}"))
    checks.append(Check("automation", None, ", ".join(rule.name for rule in rules) or "no rule: nothing is automatic"))
    return settings


async def _vllm(settings: Settings, checks: list[Check]) -> ModelFacts | None:
    url, shown = settings.vllm.base_url, settings.vllm.shown_url
    key = settings.vllm.api_key
    async with Vllm(url, key.get_secret_value() if key else None) as vllm:
        if not await vllm.healthy():
            checks.append(Check("vllm", False, f"{shown}/health does not answer 200: start vLLM, or correct vllm.url."))
            return None
        try:
            model = await vllm.model()
        except VllmError as error:
            checks.append(Check("vllm", False, str(error)))
            return None
        checks.append(Check("vllm", True, f"serves {model!r} at {shown}"))
    async with Probe(url, settings.probe_secret()) as probe:
        try:
            facts = await probe.facts()
        except (ProbeUnauthorised, ProbeRefused) as error:
            checks.append(Check("plugin", True, "the probe is loaded in vLLM"))
            checks.append(Check("probe token", False, str(error)))
            return None
        except ProbeError as error:
            checks.append(Check("plugin", False, str(error)))
            return None
    checks.append(Check("plugin", True, "the probe is loaded in vLLM"))
    checks.append(Check("probe token", True, "is accepted"))
    return facts


def _model(facts: ModelFacts, checks: list[Check]) -> None:
    here, there = version("flipwatch"), facts.flipwatch_version
    advice = "" if here == there else ": install the same version on both sides."
    beside = f"vLLM {facts.vllm_version}, torch {facts.torch_version}"
    checks.append(Check("versions", here == there, f"flipwatch {here} here, {there} in vLLM ({beside}){advice}"))
    blocks = f"{facts.num_blocks} of {facts.layer_class} in {facts.architecture}"
    checks.append(Check("blocks", facts.num_blocks > 0, blocks))
    scan = facts.scan_refusal or f"possible, up to {facts.max_tokens} tokens a sequence"
    checks.append(Check("scan", facts.scan_refusal is None, scan))
    gates = f"installed, {facts.mode} mode" if facts.armed else facts.refusal or "not installed"
    checks.append(Check("gates", facts.armed, gates))
    test = facts.self_test
    good = {SelfTestState.PASSED: True, SelfTestState.FAILED: False, SelfTestState.NOT_RUN: None}[test.state]
    checks.append(Check("self-test", good, f"{test.state.value}: {test.reason}"))
    gated = [f"{block} at {alpha:g}" for block, alpha in enumerate(facts.gates) if alpha != 1.0]
    if gated:
        checks.append(Check("mitigated", None, f"serving with block {', block '.join(gated)}"))


def _validation(settings: Settings, checks: list[Check]) -> None:
    from ...monitors.validation import load_items

    where = settings.validation.file or "the set that ships with Flipwatch"
    try:
        items = load_items(settings.validation.file)
    except (OSError, ValueError) as error:
        checks.append(Check("validation", False, f"{where}: {error}"))
        return
    used = min(len(items), settings.validation.max_items)
    checks.append(Check("validation", bool(items), f"{where}: {len(items)} items, {used} used"))


def _switches(info: Json, facts: ModelFacts | None, checks: list[Check]) -> None:
    settings = info["settings"]
    checks.append(Check("mitigation", None, f"mode {settings['mitigation']['mode']}"))
    here = settings["faults"]["enabled"]
    there = facts is not None and facts.faults_enabled
    probe = "not known" if facts is None else "on" if there else "off"
    state = f"{'on' if here else 'off'} at the sidecar, {probe} at the probe"
    checks.append(Check("faults", None, f"injection is {state}" + ("; not for production" if here and there else "")))
    if facts is not None and facts.faults:
        checks.append(Check("damage", None, f"{len(facts.faults)} injected faults are in the model now"))
