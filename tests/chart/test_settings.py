"""What the chart hands to Flipwatch, read by Flipwatch itself; and what is made of other files is in step with them."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CHART, ROOT, SETS, merged, values_of
from engines import Four, of_kind

PYTHON = Path(os.environ.get("FLIPWATCH_PYTHON", ROOT / ".venv" / "bin" / "python"))
"""With Flipwatch in it, which this environment has not: that of `make setup`, unless said."""

SECRET = {
    "probe-token": "the-token-of-the-probe",
    "tokens.yaml": "- {name: oncall, token: a-token-of-the-api, scopes: [read, mitigate]}\n",
    "vllm-api-key": "the-key-of-vllm",
    "peer-token": "the-token-of-the-peer",
    "webhook-url": "http://hook.example/secret",
}
EVERYWHERE = "0.0.0.0"  # noqa: S104 - a pod has an address of its own
POLICY = "- {verdict: weight_fault, action: repair}\n"

READ = """
import json, sys
from flipwatch.service.settings import load_settings
settings = load_settings()
print(json.dumps({
    "settings": settings.public(),
    "probe": settings.probe_secret(),
    "tokens": [token.name for token in settings.api_tokens()],
    "peer": settings.peer(),
    "key": settings.vllm.api_key and settings.vllm.api_key.get_secret_value(),
    "webhook": settings.alerts.webhook_url and str(settings.alerts.webhook_url),
    "policy": [rule.name for rule in settings.policy()],
}))
"""


def flipwatch(script: str, environ: dict[str, str]) -> str:
    """What a script prints in Flipwatch's own environment."""
    assert PYTHON.exists(), (
        f"There is no {PYTHON}: run `make setup`, or name a Python with Flipwatch in FLIPWATCH_PYTHON."
    )
    done = subprocess.run([str(PYTHON), "-c", script], env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_as_in_the_pod(four: Four, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The settings as the container reads them: its environment, with its mounted files under `folder`."""
    if values.get("form") == "sidecar":
        made = four.render(CHART, merged(values, {"sidecar": {"render": "parts"}}))
        pod = yaml.safe_load(made["flipwatch/templates/sidecar-parts.yaml"])
        [container] = pod["initContainers"]
    else:
        made = four.render(CHART, values)
        [deployment] = of_kind(made, "Deployment")
        pod = deployment["spec"]["template"]["spec"]
        [container] = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in container["volumeMounts"]:
        target = folder / mount["mountPath"].lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        volume = volumes[mount["name"]]
        if "secret" in volume:
            files = SECRET
        elif "configMap" in volume:
            configs = {c["metadata"]["name"]: c["data"] for c in of_kind(made, "ConfigMap")}
            files = configs.get(volume["configMap"]["name"], {"policy.yaml": POLICY})
        else:
            files = {}
        for name, text in files.items():
            (target / name).write_text(text)
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    for variable in container["env"]:
        if "value" in variable:
            value = variable["value"]
            environ[variable["name"]] = str(folder) + value if value.startswith("/") else value
        else:
            environ[variable["name"]] = SECRET[variable["valueFrom"]["secretKeyRef"]["key"]]
    return json.loads(flipwatch(READ, environ))


@pytest.mark.parametrize("name", SETS)
def test_flipwatch_accepts_its_settings(name: str, four: Four, tmp_path: Path) -> None:
    """Flipwatch's own loader takes environment, files and Secret of each set of values, and reads what was meant."""
    values = values_of(name)
    found = read_as_in_the_pod(four, values, tmp_path)
    settings = found["settings"]
    assert settings["mitigation"]["mode"] == values.get("mode", "observe")
    assert settings["vllm"]["url"] == values.get("vllm", {}).get("url", "http://127.0.0.1:8000")
    assert settings["listen_host"] == values.get("listenHost", EVERYWHERE)
    assert settings["listen_port"] == 9477
    assert found["probe"] == SECRET["probe-token"]
    assert found["tokens"] == ["oncall"]
    assert _is_part_of(values.get("settings", {}), settings)
    keys = values.get("secretKeys", {})
    assert found["key"] == (SECRET["vllm-api-key"] if "vllmApiKey" in keys else None)
    assert found["webhook"] == (SECRET["webhook-url"] if "webhookUrl" in keys else None)
    assert (found["peer"] or [None, None])[1] == (SECRET["peer-token"] if "peerToken" in keys else None)
    rules = values.get("automation", {})
    count = len(rules.get("rules", [])) or (1 if "existingConfigMap" in rules else 0)
    assert len(found["policy"]) == count


def _is_part_of(given: Any, whole: Any) -> bool:
    if isinstance(given, dict):
        return all(key in whole and _is_part_of(value, whole[key]) for key, value in given.items())
    return bool(given == whole) or str(given).rstrip("/") == str(whole).rstrip("/")


def test_a_change_of_settings_restarts_the_pod(four: Four) -> None:
    """The checksum in the pod's annotations follows settings and policy, and nothing else."""

    def checksum(values: dict[str, Any]) -> str:
        [deployment] = of_kind(four.render(CHART, {**values_of("enforce"), **values}), "Deployment")
        return str(deployment["spec"]["template"]["metadata"]["annotations"]["checksum/config"])

    first = checksum({})
    assert checksum({"podLabels": {"a": "b"}}) == first
    assert checksum({"settings": {"scan": {"every_minutes": 1}}}) != first
    assert checksum({"automation": {"rules": []}}) != first


def test_no_secret_is_rendered(four: Four) -> None:
    """The chart makes no Secret, and takes none from values."""
    for name in SETS:
        assert of_kind(four.render(CHART, values_of(name)), "Secret") == []


def test_schema_is_in_step_with_the_settings() -> None:
    """values.schema.json is what deploy/chart_schema.py makes of Flipwatch's settings now."""
    script = "import sys; sys.path.insert(0, 'deploy'); import chart_schema; sys.stdout.write(chart_schema.written())"
    made = flipwatch(script, {"PATH": os.environ["PATH"]})
    assert (CHART / "values.schema.json").read_text() == made


def test_readme_is_in_step_with_the_values() -> None:
    """The tables of the chart's README are what deploy/chart_readme.py makes of values.yaml now."""
    tables = _module("chart_readme")
    readme, values = (CHART / "README.md").read_text(), (CHART / "values.yaml").read_text()
    assert tables.renewed(readme, values) == readme


def test_every_value_is_in_the_schema_and_has_a_description() -> None:
    """A value without a description, or that the schema does not know, is an error."""
    tables = _module("chart_readme")
    with pytest.raises(SystemExit, match="describe it"):
        tables.tables((CHART / "values.yaml").read_text() + "\nnew: 1\n")
    with pytest.raises(SystemExit, match="remove the line"):
        tables.tables((CHART / "values.yaml").read_text() + "\n## @param gone Words\n")


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "deploy" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
