"""Settings: where they come from, what is refused, and in which words."""

import json
import os
from pathlib import Path

import pytest

from flipwatch.service.settings import ConfigurationError, Settings, load_settings


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("FLIPWATCH_"):
            monkeypatch.delenv(name)


def _file(folder: Path, text: str) -> Path:
    path = folder / "flipwatch.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_environment_wins_over_the_file_and_the_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments, environment, YAML, defaults: in this order, merged per setting."""
    path = _file(tmp_path, "listen_port: 1000\nscan: {every_minutes: 5, duty: 0.1}\nvllm: {url: 'http://a:1'}\n")
    monkeypatch.setenv("FLIPWATCH_CONFIG", str(path))
    monkeypatch.setenv("FLIPWATCH_SCAN__DUTY", "0.5")
    settings = load_settings(listen_host="::1")
    assert (settings.listen_host, settings.listen_port) == ("::1", 1000)
    assert (settings.scan.every_minutes, settings.scan.duty) == (5.0, 0.5)
    assert settings.vllm.base_url == "http://a:1"
    assert settings.alpha_scan.tau == 6.0


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("FLIPWATCH_SCAM__DUTY", "1", "FLIPWATCH_SCAM__DUTY is not a setting"),
        ("FLIPWATCH_DUTY", "1", "FLIPWATCH_DUTY is not a setting"),
        ("FLIPWATCH_SCAN__DUTTY", "1", "The setting scan.dutty does not exist"),
        ("FLIPWATCH_SCAN__DUTY", "2", "The setting scan.duty is wrong: Input should be less than or equal to 1"),
        ("FLIPWATCH_SCAN__GRID", "fine", "in FLIPWATCH_SCAN__GRID."),
        ("FLIPWATCH_SCAN__GRID", "[1.0]", "leave 1.0 out"),
        ("FLIPWATCH_SCAN__EVERY_MINUTES", "inf", "The setting scan.every_minutes is wrong"),
        ("FLIPWATCH_SCAN__EVERY_MINUTES", "1e300", "The setting scan.every_minutes is wrong"),
        ("FLIPWATCH_SCAN__GRID", "[NaN]", "The setting scan.grid"),
        ("FLIPWATCH_VLLM__URL", "http://\u2603", "The setting vllm.url is wrong: no request can be sent"),
        ("FLIPWATCH_DIFFERENTIAL__REFERENCE", "peer", "the reference peer needs differential.peer_url"),
        ("FLIPWATCH_DIFFERENTIAL__REFERENCE", "none", "The setting differential.reference is wrong"),
        ("FLIPWATCH_DIFFERENTIAL__PEER_URL", "http://peer", "needs differential.peer_token or"),
        ("FLIPWATCH_DIFFERENTIAL__PEER_URL", "http://\u2603", "The setting differential.peer_url is wrong: no request"),
        ("FLIPWATCH_DIFFERENTIAL__LIMIT", "0", "The setting differential.limit is wrong"),
        ("FLIPWATCH_ALPHA_SCAN__TAU", "inf", "The setting alpha_scan.tau is wrong"),
        ("FLIPWATCH_ALERTS__N", "1" + 21 * "0", "The setting alerts.n is wrong"),
        ("FLIPWATCH_ALERTS__K", "1" + 5000 * "0", "The setting alerts.k is wrong"),
        ("FLIPWATCH_MITIGATION__MAX_ACTIONS", "1" + 21 * "0", "The setting mitigation.max_actions is wrong"),
        (
            "FLIPWATCH_DATA_DIR",
            "~no-such-user/x",
            "The setting data_dir is wrong: there is no home folder for ~no-such",
        ),
        ("FLIPWATCH_CONFIG", "~no-such-user/x", "there is no home folder for ~no-such-user"),
        ("FLIPWATCH_ALERTS__N", "1", "alerts.n must not be smaller than alerts.k"),
        ("FLIPWATCH_TOKENS", "secret-no-json", "write lists and sections as JSON"),
        ("FLIPWATCH_TOKENS", '[{"name": "a", "token": "short-1", "scopes": ["read"]}]', "The setting tokens.0.token"),
        ("FLIPWATCH_CONFIG", "/nowhere.yaml", "/nowhere.yaml, which cannot be read: No such file"),
    ],
)
def test_a_wrong_variable_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
    """It names the setting, says what is wrong and what to do, and never repeats a secret."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    assert "short-1" not in str(caught.value)
    assert "secret-no-json" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("scann: {}", "The setting scann does not exist"),
        ("scan: {dutty: 1}", "The setting scan.dutty does not exist"),
        ("- 1", "must hold settings"),
        ("a: [", "is not valid YAML near line 1"),
        ("1: 2", "a key that is no text"),
        ("scan: {true: 1}", "a key that is no text"),
        ("tokens: [{1: 2}]", "a key that is no text"),
        ("scan: {every_minutes: .inf}", "The setting scan.every_minutes is wrong"),
        ("a: 2026-99-99", "cannot be read as settings"),
        ("a: &a [*a]", "cannot be read as settings"),
        ("a: " + 5000 * "[", "cannot be read as settings"),
        ("faults: {enabled: perhaps}", "The setting faults.enabled is wrong"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    """Unknown keys are refused in YAML too."""
    with pytest.raises(ConfigurationError) as caught:
        load_settings(_file(tmp_path, text))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variables_of_the_probe_and_the_command_line_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One environment for vLLM, sidecar and command line works; FLIPWATCH_FAULTS is not the section `faults`."""
    for name in ("DISABLE", "FAULTS", "CPU_PLAIN_WEIGHTS", "URL", "TOKEN"):
        monkeypatch.setenv(f"FLIPWATCH_{name}", "1")
    settings = load_settings()
    assert settings.faults.enabled is False
    assert settings.tokens == []


def test_service_links_of_kubernetes_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a Service named `flipwatch` with a port named `http`; a setting that is spelled wrong is still refused."""
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_9477_TCP", "PORT_9477_TCP_ADDR"):
        monkeypatch.setenv(f"FLIPWATCH_{name}", "tcp://10.0.0.1:9477")
    assert load_settings().listen_port == 9477
    monkeypatch.setenv("FLIPWATCH_PORTS", "1")
    with pytest.raises(ConfigurationError, match="FLIPWATCH_PORTS is not a setting"):
        load_settings()


def test_a_grid_is_a_name_or_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both come through the environment."""
    monkeypatch.setenv("FLIPWATCH_SCAN__GRID", "full")
    assert load_settings().scan.grid == "full"
    monkeypatch.setenv("FLIPWATCH_SCAN__GRID", "[0, 0.7, 1.3]")
    assert load_settings().scan.grid == [0.0, 0.7, 1.3]


def test_a_schedule_can_be_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`null` stands for none."""
    monkeypatch.setenv("FLIPWATCH_SCAN__EVERY_MINUTES", "null")
    assert load_settings().scan.every_minutes is None


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell replaces it in YAML or in a compose file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    _file(tmp_path, "{data_dir: ~/a, probe_token_file: ~/b, tokens_file: ~/c, validation: {file: ~/d}}")
    settings = load_settings(Path("~/flipwatch.yaml"))
    paths = settings.data_dir, settings.probe_token_file, settings.tokens_file, settings.validation.file
    assert paths == tuple(tmp_path / name for name in "abcd")
    assert Settings().data_dir == tmp_path / ".local/state/flipwatch"


def test_the_probe_token_comes_from_variable_or_file_or_is_asked_for(tmp_path: Path) -> None:
    """A missing or empty token is a sentence that says what to set."""
    path = tmp_path / "token"
    path.write_text("from-a-file\n", encoding="utf-8")
    assert Settings(probe_token="direct").probe_secret() == "direct"
    assert Settings(probe_token_file=path).probe_secret() == "from-a-file"
    path.write_text("\n", encoding="utf-8")
    for settings in (Settings(), Settings(probe_token_file=path), Settings(probe_token_file=tmp_path / "nothing")):
        with pytest.raises(ConfigurationError, match="token"):
            settings.probe_secret()


def test_secrets_are_fit_for_a_header(tmp_path: Path) -> None:
    """White space around a secret is dropped; an empty key is none."""
    path = tmp_path / "token"
    path.write_text(" from-a-file \r\n", encoding="utf-8")
    assert Settings(probe_token="direct\n").probe_secret() == "direct"
    assert Settings(probe_token_file=path).probe_secret() == "from-a-file"
    key = Settings(vllm={"api_key": "key\n"}).vllm.api_key
    assert key is not None
    assert key.get_secret_value() == "key"
    assert Settings(vllm={"api_key": "\n"}).vllm.api_key is None


@pytest.mark.parametrize("value", ["secret-1\nsecret-2", "s\u00e4cret-value", "secret-\x7fvalue"])
@pytest.mark.parametrize("name", ["FLIPWATCH_PROBE_TOKEN", "FLIPWATCH_VLLM__API_KEY", "FLIPWATCH_TOKENS"])
def test_a_secret_that_no_header_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """httpx or the other side would refuse it later, with the secret in the message."""
    tokens = json.dumps([{"name": "a", "token": value, "scopes": ["read"]}])
    monkeypatch.setenv(name, tokens if name == "FLIPWATCH_TOKENS" else value)
    with pytest.raises(ConfigurationError, match="one line of printable ASCII") as caught:
        load_settings()
    assert "cret-" not in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="one line of printable ASCII") as plain:
        Settings()
    assert "cret-" not in str(plain.value)


def test_a_probe_token_file_with_two_lines_is_refused(tmp_path: Path) -> None:
    """The sentence names the file and repeats nothing of it."""
    path = tmp_path / "token"
    path.write_text("secret-1\nsecret-2\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="one line of printable ASCII") as caught:
        Settings(probe_token_file=path).probe_secret()
    assert str(path) in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- {name: a, token: secret-value, scopes: [all]}", "tokens_file.scopes.0 is wrong"),
        ("name: a", "must hold a list"),
        ("- [secret-value", "is not valid YAML"),
        ("- secret-value", "The setting tokens_file is wrong: "),
        ("- {secret-value: 2026-99-99}", "cannot be read"),
        ("- {name: a, token: secret-value, scopes: [read]}\n" * 2, "same name"),
        ("- {name: flipwatch, token: secret-value, scopes: [read]}", "as Flipwatch calls itself"),
    ],
)
def test_a_wrong_tokens_file_is_one_sentence_without_a_token(tmp_path: Path, text: str, sentence: str) -> None:
    """Nothing of the file is repeated."""
    with pytest.raises(ConfigurationError) as caught:
        Settings(tokens_file=_file(tmp_path, text)).api_tokens()
    assert sentence in str(caught.value)
    assert "secret-value" not in str(caught.value)


def test_tokens_of_setting_and_file_are_joined(tmp_path: Path) -> None:
    """Both lists count."""
    path = _file(tmp_path, "- {name: b, token: token-of-b, scopes: [admin]}")
    tokens = Settings(tokens_file=path, tokens=[{"name": "a", "token": "token-of-a", "scopes": ["read"]}]).api_tokens()
    assert [token.name for token in tokens] == ["a", "b"]


def test_shown_settings_hold_no_secret() -> None:
    """Tokens, keys, the webhook and a password in vLLM's URL are blanked."""
    shown = Settings(
        probe_token="secret-1",
        tokens=[{"name": "a", "token": "secret-2", "scopes": ["read"]}],
        vllm={"url": "http://user:secret-3@host:1", "api_key": "secret-4"},
        alerts={"webhook_url": "http://host/secret-5"},
        differential={"peer_url": "http://user:secret-6@peer:1", "peer_token": "secret-7"},
    ).public()
    assert "secret" not in str(shown).replace("probe_token", "")
    assert shown["vllm"]["url"] == "http://host:1"
    assert shown["differential"]["peer_url"] == "http://peer:1"
    assert shown["differential"]["peer_token"] == "**********"


def test_the_token_of_the_peer_comes_from_variable_or_file(tmp_path: Path) -> None:
    """Without a peer there is none; an empty or unreadable file is one sentence that names it and no secret."""
    path = tmp_path / "token"
    path.write_text(" from-a-file\n", encoding="utf-8")
    assert Settings().peer() is None
    peer = {"peer_url": "http://peer:1/", "reference": "peer"}
    assert Settings(differential=peer | {"peer_token": "direct"}).peer() == ("http://peer:1", "direct")
    settings = Settings(differential=peer | {"peer_token_file": str(path)})
    assert settings.peer() == ("http://peer:1", "from-a-file")
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="The peer's token is empty"):
        settings.peer()
    path.write_text("secret-1\nsecret-2\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="printable ASCII") as caught:
        settings.peer()
    assert "secret" not in str(caught.value)
    path.unlink()
    with pytest.raises(ConfigurationError, match=r"differential\.peer_token_file names"):
        settings.peer()


def test_a_manifest_is_read_and_a_wrong_one_is_one_sentence(tmp_path: Path) -> None:
    """What `sha256sum` prints; a missing or damaged file stops the start with its name and what is wrong."""
    path = tmp_path / "SHA256SUMS"
    settings = Settings(fingerprint={"manifest": str(path)})
    assert Settings().manifest() is None
    with pytest.raises(ConfigurationError, match=r"fingerprint\.manifest names .* cannot be read: No such file"):
        settings.manifest()
    path.write_text(f"{'ab' * 32}  model.safetensors\n")
    assert settings.manifest() == {"model.safetensors": "ab" * 32}
    path.write_text("abc  model.safetensors\n")
    with pytest.raises(
        ConfigurationError, match=r"SHA256SUMS \(fingerprint\.manifest\) is wrong: Line 1 of the manifest"
    ):
        settings.manifest()
