"""deploy/compose.yaml: valid, closed, without secrets, and in step with the settings and files that it mounts.

No container engine runs here: the file is read as compose reads it.
"""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flipwatch.service.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
TEXT = COMPOSE.read_text()


def interpolate(text: str, values: dict[str, str]) -> str:
    """`${NAME:-default}` and `${NAME:?message}` as compose reads them; a missing one of the second kind is an error."""

    def value(match: re.Match[str]) -> str:
        name, operator, word = match.groups()
        if values.get(name):
            return values[name]
        if operator == "?":
            raise LookupError(word)
        return word

    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", value, text)


def read(values: dict[str, str] | None = None) -> dict[str, Any]:
    """The file with anchors and variables resolved."""
    compose: dict[str, Any] = yaml.safe_load(interpolate(TEXT, values or {"FLIPWATCH_SECRETS": "./compose/secrets"}))
    return compose


SERVICES: dict[str, dict[str, Any]] = read()["services"]
VLLM = ("vllm-gpu", "vllm-cpu")
BINDS = [
    (service, volume)
    for service, settings in SERVICES.items()
    for volume in settings["volumes"]
    if isinstance(volume, dict)
]


def mounted(service: str, target: str) -> Path:
    """The file or folder of this repository that a service sees at `target`."""
    [source] = [bind["source"] for name, bind in BINDS if name == service and bind["target"] == target]
    return (DEPLOY / source).resolve()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of deploy/ in which the script of the secrets has run."""
    deploy = tmp_path_factory.mktemp("tree") / "deploy"
    shutil.copytree(DEPLOY / "compose", deploy / "compose", ignore=shutil.ignore_patterns("secrets"))
    subprocess.run(["bash", str(deploy / "compose" / "make_secrets.sh")], check=True, capture_output=True)
    return deploy


def secrets_of(service: dict[str, Any]) -> dict[str, str]:
    """Name under /run/secrets -> secret, of the secrets that a service mounts."""
    mounts = [one if isinstance(one, dict) else {"source": one} for one in service.get("secrets", [])]
    return {one.get("target", one["source"]): one["source"] for one in mounts}


def check_schema(path: Path) -> subprocess.CompletedProcess[str]:
    """Run check-jsonschema with the schema of the compose specification that it ships."""
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)],
        capture_output=True,
        text=True,
    )


def test_is_a_compose_file(tmp_path: Path) -> None:
    """The specification's schema accepts it as it is, and would not accept a slip."""
    done = check_schema(COMPOSE)
    assert done.returncode == 0, done.stdout
    slip = tmp_path / "compose.yaml"
    slip.write_text(TEXT.replace("    read_only: true\n", "").replace("  read_only: true", "  readonly: true", 1))
    assert check_schema(slip).returncode == 1


@pytest.mark.parametrize(
    ("service", "bind"), BINDS, ids=lambda value: value if isinstance(value, str) else value["target"]
)
def test_mounts_what_is_in_the_repository(service: str, bind: dict[str, Any]) -> None:
    """Each bind mount is read-only, exists in the repository, and is never made by the engine as an empty folder."""
    source = (DEPLOY / bind["source"]).resolve()
    assert source.exists()
    assert source.is_relative_to(ROOT)
    assert bind["read_only"] is True
    assert bind["bind"] == {"create_host_path": False}


def test_mounts_no_socket_and_every_named_volume_is_declared() -> None:
    """Other volumes are named ones, all of them declared and used."""
    named = {volume.split(":")[0] for one in SERVICES.values() for volume in one["volumes"] if isinstance(volume, str)}
    assert named == set(read()["volumes"])


def test_publishes_ports_on_loopback_only() -> None:
    """Each service has one port, bound to 127.0.0.1 of the host, and no service shares the host's network."""
    for name, service in SERVICES.items():
        [port] = service["ports"]
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port), name
        assert "network_mode" not in service


def test_holds_no_secret() -> None:
    """Secrets are files: what an environment has of them is a place under /run/secrets that the service mounts."""
    secrets = read()["secrets"]
    for name, service in SERVICES.items():
        for variable, value in service.get("environment", {}).items():
            if re.search(r"TOKEN|PASSWORD|SECRET|KEY", variable):
                assert variable.endswith("_FILE"), (name, variable)
                assert value.removeprefix("/run/secrets/") in secrets_of(service), (name, variable)
    assert {secret for service in SERVICES.values() for secret in secrets_of(service).values()} == set(secrets)
    assert all(set(secret) == {"file"} for secret in secrets.values())


def test_says_what_to_do_when_there_are_no_secrets() -> None:
    """Without FLIPWATCH_SECRETS compose stops with the sentence of each of them, which names a script that exists."""
    with pytest.raises(LookupError, match=r"run `bash deploy/compose/make_secrets\.sh` first"):
        read({"PATH": "/"})
    assert (DEPLOY / "compose" / "make_secrets.sh").exists()


def test_script_makes_every_secret_once(made: Path) -> None:
    """A closed folder with a file that other users can read for each secret; a second run changes nothing."""
    folder = made / "compose" / "secrets"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    before = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(read()["secrets"]) <= set(before)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o444 for path in folder.iterdir())
    assert len(set(before.values())) == len(before)

    again = subprocess.run(
        ["bash", str(made / "compose" / "make_secrets.sh")], check=True, capture_output=True, text=True
    ).stdout
    assert {path.name: path.read_text() for path in folder.iterdir()} == before
    assert not [text for text in before.values() if text.strip() in again]
    [line] = [line for line in (made / ".env").read_text().splitlines() if not line.startswith("#") and line]
    assert line == f"FLIPWATCH_SECRETS='{folder}'"


def test_script_says_when_a_token_is_not_in_the_list(tmp_path: Path) -> None:
    """In a folder with an odd name: a token that was made anew, and the list that has the old one."""
    compose = tmp_path / "R & $D" / "deploy" / "compose"
    shutil.copytree(DEPLOY / "compose", compose, ignore=shutil.ignore_patterns("secrets"))
    command = ["bash", str(compose / "make_secrets.sh")]
    subprocess.run(command, check=True, capture_output=True)
    assert f"FLIPWATCH_SECRETS='{compose / 'secrets'}'\n" in (compose.parent / ".env").read_text()
    (compose / "secrets" / "alertmanager_token").unlink()
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1
    assert "api_tokens does not hold alertmanager_token" in again.stderr
    (compose / "secrets" / "api_tokens").unlink()
    subprocess.run(command, check=True, capture_output=True)
    token = (compose / "secrets" / "alertmanager_token").read_text().strip()
    assert token in (compose / "secrets" / "api_tokens").read_text()


def test_what_the_script_makes_stays_out_of_the_repository() -> None:
    """Git ignores the secrets and deploy/.env."""
    for name in ("deploy/.env", "deploy/compose/secrets/probe_token"):
        done = subprocess.run(["git", "-C", str(ROOT), "check-ignore", "-q", name])
        assert done.returncode == 0, name


def test_both_profiles_are_the_same_server() -> None:
    """One vLLM for each profile: they differ in device and base only and answer to one name; the rest has none."""
    profiles = {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service}
    assert profiles == {"vllm-gpu": ["gpu"], "vllm-cpu": ["cpu"]}
    gpu, cpu = (SERVICES[name] for name in VLLM)
    assert {key for key in gpu.keys() | cpu.keys() if gpu.get(key) != cpu.get(key)} == {
        "profiles", "build", "environment", "deploy", "cap_add",
    }  # fmt: skip
    assert gpu["networks"] == {"serving": {"aliases": ["vllm"]}}
    assert gpu["environment"].items() <= cpu["environment"].items()


def test_nothing_waits_for_anything() -> None:
    """No service holds another one back, so nothing here can keep vLLM from starting."""
    assert not [name for name, service in SERVICES.items() if "depends_on" in service]


@pytest.mark.parametrize("name", SERVICES)
def test_is_hardened(name: str) -> None:
    """No capabilities, bounded logs, a health check; a read-only root for all but vLLM, which writes caches."""
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["healthcheck"].keys() >= {"interval", "timeout", "retries", "start_period"}
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    assert not {"privileged", "user", "pid", "ipc", "devices"} & set(service)
    assert service.get("cap_add", []) == (["SYS_NICE"] if name == "vllm-cpu" else [])
    assert service.get("read_only", False) is (name not in VLLM)
    if name == "flipwatch":
        assert service["mem_limit"] == "512m"


def test_every_variable_is_in_the_example_with_its_default() -> None:
    """env.example lists what can be set, as compose.yaml has it, and nothing else."""
    defaults = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", TEXT))
    example = dict(re.findall(r"^#? ?([A-Z_]+)=(.*)$", (DEPLOY / "compose" / "env.example").read_text(), re.MULTILINE))
    assert set(example) == set(defaults) | {"FLIPWATCH_SECRETS", "COMPOSE_PROFILES"}
    for name, default in defaults.items():
        assert default in ("", example[name]), name


def test_images_are_pinned() -> None:
    """Every image that is pulled has a version as tag; the bases of those that are built are the Dockerfile's own."""
    names = [service["image"] for service in SERVICES.values() if "image" in service]
    names += [value for service in SERVICES.values() for value in service.get("build", {}).get("args", {}).values()]
    assert len(names) == len(SERVICES)
    for name in names:
        assert re.fullmatch(r"[a-z.]+/[a-z/-]+:v?\d[\w.-]*", name), name
    dockerfile = (ROOT / "Dockerfile").read_text()
    for service in ("vllm-gpu", "flipwatch"):
        for argument, value in SERVICES[service]["build"]["args"].items():
            assert f"\nARG {argument}={value}\n" in dockerfile
    gpu, cpu = (SERVICES[name]["build"]["args"]["VLLM_IMAGE"].rpartition(":")[2] for name in VLLM)
    assert gpu == cpu


def settings_of(monkeypatch: pytest.MonkeyPatch, folder: Path, config: Path) -> Settings:
    """The settings that the sidecar has in there: its environment, its file, its secrets."""
    for name in [name for name in os.environ if name.startswith("FLIPWATCH_")]:
        monkeypatch.delenv(name)
    for name, value in SERVICES["flipwatch"]["environment"].items():
        monkeypatch.setenv(name, str(folder / value.rpartition("/")[2]) if value.startswith("/run/secrets/") else value)
    assert SERVICES["flipwatch"]["environment"]["FLIPWATCH_CONFIG"] == "/etc/flipwatch/flipwatch.yaml"
    monkeypatch.setenv("FLIPWATCH_CONFIG", str(config))
    return load_settings()


def test_settings_are_accepted(monkeypatch: pytest.MonkeyPatch, made: Path) -> None:
    """The sidecar reads environment, file and secrets without a word, watches `vllm`, and only observes."""
    folder = made / "compose" / "secrets"
    settings = settings_of(monkeypatch, folder, mounted("flipwatch", "/etc/flipwatch/flipwatch.yaml"))
    assert settings.mitigation.mode == "observe"
    assert settings.automation.rules == []
    assert settings.faults.enabled is False
    assert settings.vllm.base_url == "http://vllm:8000"
    assert settings.listen_host == "0.0.0.0"  # noqa: S104
    assert f":{settings.listen_port}" in SERVICES["flipwatch"]["ports"][0]
    assert settings.probe_secret() == (folder / "probe_token").read_text().strip()
    tokens = {token.name: token for token in settings.api_tokens()}
    assert tokens["operator"].scopes == ["read", "mitigate", "admin"]
    assert tokens["alertmanager"].scopes == ["mitigate"]
    for name, token in tokens.items():
        assert token.token.get_secret_value() == (folder / f"{name}_token").read_text().strip()


def test_policy_of_the_example_can_be_switched_on(monkeypatch: pytest.MonkeyPatch, made: Path, tmp_path: Path) -> None:
    """Without its comment signs, the last setting names the example policy where compose mounts it, and it is read."""
    text = mounted("flipwatch", "/etc/flipwatch/flipwatch.yaml").read_text()
    place = "/etc/flipwatch/policy.yaml"
    assert text.endswith(f"# automation:\n#   policy_file: {place}\n")
    config = tmp_path / "flipwatch.yaml"
    config.write_text(
        text.replace("# automation:", "automation:").replace(
            f"#   policy_file: {place}", f"  policy_file: {json.dumps(str(mounted('flipwatch', place)))}"
        )
    )
    settings = settings_of(monkeypatch, made / "compose" / "secrets", config)
    assert settings.policy()


def test_prometheus_and_alertmanager_look_for_services_that_are_there() -> None:
    """Their host names are services or vLLM's alias; rules and credentials lie where compose mounts them."""
    names = set(SERVICES) - set(VLLM) | {"vllm"}
    prometheus = yaml.safe_load(mounted("prometheus", "/etc/prometheus/prometheus.yml").read_text())
    pairs = [one for job in prometheus["scrape_configs"] for one in job.get("static_configs", [])]
    pairs += [one for manager in prometheus["alerting"]["alertmanagers"] for one in manager["static_configs"]]
    hosts = {target.rpartition(":")[0] for one in pairs for target in one["targets"]}
    assert {"flipwatch", "vllm", "alertmanager"} <= hosts <= names | {"localhost", "127.0.0.1"}
    for rules in prometheus["rule_files"]:
        mounted("prometheus", str(Path("/etc/prometheus") / rules))

    text = mounted("alertmanager", "/etc/alertmanager/alertmanager.yml").read_text()
    plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    assert set(re.findall(r"http://([\w.-]+):", plain)) <= names
    places = re.findall(r"credentials_file: ['\"]?(\S+?)['\"]?$", plain, re.MULTILINE)
    assert {place.removeprefix("/run/secrets/") for place in places} == set(secrets_of(SERVICES["alertmanager"]))


def test_grafana_is_provisioned_with_what_is_mounted() -> None:
    """The data source is the Prometheus of this file, and the boards lie where the provider looks for them."""
    folder = mounted("grafana", "/etc/grafana/provisioning")
    [sources] = [yaml.safe_load(path.read_text()) for path in (folder / "datasources").glob("*.y*ml")]
    assert "http://prometheus:9090" in [source["url"] for source in sources["datasources"]]
    [boards] = [yaml.safe_load(path.read_text()) for path in (folder / "dashboards").glob("*.y*ml")]
    for provider in boards["providers"]:
        assert sorted(mounted("grafana", provider["options"]["path"]).glob("*.json"))
