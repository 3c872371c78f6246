"""Settings of the sidecar: environment (`FLIPWATCH_`, nested by `__`), then a YAML file, then defaults.

Unknown keys are refused in both places: a setting that is spelled wrong must not be silently without effect.
"""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from ..monitors.fingerprint.manifest import read_manifest
from .connection import without_userinfo
from .policy import Rule, read_policy
from .records import ITSELF
from .settings_loading import (
    CONFIG_VARIABLE,
    PREFIX,
    ConfigurationError,
    Environment,
    explain,
    read,
    read_yaml,
    refuse_odd_file,
    refuse_unknown_variables,
)
from .settings_sections import (
    AlertSettings,
    AlphaScanSettings,
    AutomationSettings,
    CanarySettings,
    DifferentialSettings,
    FaultSettings,
    FingerprintSettings,
    MitigationSettings,
    ScanSettings,
    Scope,
    Token,
    ValidationSettings,
    VllmSettings,
)
from .settings_values import HeaderSecret, UserPath, fit_for_a_header, from_home


class Settings(BaseSettings):
    """All settings of the sidecar."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_parse_none_str="null",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    listen_host: str = "127.0.0.1"
    listen_port: int = Field(default=9477, ge=0, le=65535)
    data_dir: UserPath = Path("~/.local/state/flipwatch")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    probe_token: HeaderSecret | None = None
    probe_token_file: UserPath | None = None
    tokens: list[Token] = []
    tokens_file: UserPath | None = None
    """YAML or JSON list of `{name, token, scopes}`."""
    vllm: VllmSettings = VllmSettings()
    scan: ScanSettings = ScanSettings()
    fingerprint: FingerprintSettings = FingerprintSettings()
    differential: DifferentialSettings = DifferentialSettings()
    canary: CanarySettings = CanarySettings()
    validation: ValidationSettings = ValidationSettings()
    alpha_scan: AlphaScanSettings = AlphaScanSettings()
    alerts: AlertSettings = AlertSettings()
    mitigation: MitigationSettings = MitigationSettings()
    automation: AutomationSettings = AutomationSettings()
    faults: FaultSettings = FaultSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments first, then the environment, then the YAML file."""
        return init_settings, Environment(settings_cls), YamlConfigSettingsSource(settings_cls)

    def probe_secret(self) -> str:
        """The token that the probe expects; `ConfigurationError` when there is none."""
        secret = _secret("probe_token", self.probe_token, self.probe_token_file)
        if secret is None:
            raise ConfigurationError(
                "There is no probe token: set FLIPWATCH_PROBE_TOKEN (or FLIPWATCH_PROBE_TOKEN_FILE) to the value "
                "that the vLLM process has in its own FLIPWATCH_PROBE_TOKEN."
            )
        if not secret:
            raise ConfigurationError("The probe token is empty: put the token of the vLLM process into it.")
        return secret

    def peer(self) -> tuple[str, str] | None:
        """URL and token of the peer, None when there is none; `ConfigurationError` when the token is bad."""
        url = self.differential.peer_base_url
        if url is None:
            return None
        secret = _secret("differential.peer_token", self.differential.peer_token, self.differential.peer_token_file)
        if not secret:
            raise ConfigurationError("The peer's token is empty: put the probe token of that vLLM into it.")
        return url, secret

    def api_tokens(self) -> list[Token]:
        """The tokens of the API, from `tokens` and `tokens_file`; `ConfigurationError` when the file is bad."""
        tokens = list(self.tokens)
        if self.tokens_file is not None:
            entries = read_yaml("tokens_file", self.tokens_file)
            if not isinstance(entries, list):
                raise ConfigurationError(
                    f"The setting tokens_file ({self.tokens_file}) must hold a list of {{name, token, scopes}}."
                )
            try:
                tokens += [Token.model_validate(entry) for entry in entries]
            except ValidationError as error:
                raise ConfigurationError(explain(error, "tokens_file.")) from None
        names = [token.name for token in tokens]
        if len(set(names)) != len(names):
            raise ConfigurationError("Two API tokens have the same name: give each one a name of its own.")
        if ITSELF in names:
            # Its undo would look like one of Flipwatch's own, against which a rule may act again.
            raise ConfigurationError(
                f"An API token is named {ITSELF}, as Flipwatch calls itself in the audit log: give it another name."
            )
        return tokens

    def manifest(self) -> dict[str, str] | None:
        """File name -> SHA-256, from `fingerprint.manifest`; `ConfigurationError` when the file is bad."""
        path = self.fingerprint.manifest
        if path is None:
            return None
        try:
            return read_manifest(read("fingerprint.manifest", path))
        except ValueError as error:
            raise ConfigurationError(f"The file {path} (fingerprint.manifest) is wrong: {error}") from None

    def policy(self) -> list[Rule]:
        """The rules of automation, inline or from their file; `ConfigurationError` when the file is bad."""
        path = self.automation.policy_file
        return self.automation.rules if path is None else read_policy("automation.policy_file", path)

    def public(self) -> dict[str, Any]:
        """The settings as JSON without secrets, for /v1/info."""
        shown: dict[str, Any] = self.model_dump(mode="json", exclude={"probe_token", "tokens"})
        shown["tokens"] = [{"name": token.name, "scopes": token.scopes} for token in self.tokens]
        shown["vllm"]["api_key"] = None if self.vllm.api_key is None else "**********"
        shown["vllm"]["url"] = self.vllm.shown_url
        peer = self.differential
        shown["differential"]["peer_url"] = None if peer.peer_base_url is None else without_userinfo(peer.peer_base_url)
        shown["differential"]["peer_token"] = None if peer.peer_token is None else "**********"
        shown["alerts"]["webhook_url"] = None if self.alerts.webhook_url is None else "**********"
        return shown


def _secret(name: str, value: SecretStr | None, file: Path | None) -> str | None:
    """A secret that is given as the setting `name`, or in the file of `name`_file; None where neither is there."""
    if value is not None:
        return value.get_secret_value()
    if file is None:
        return None
    try:
        return fit_for_a_header(SecretStr(read(f"{name}_file", file))).get_secret_value()
    except ValueError as error:
        raise ConfigurationError(f"The token in {file} is wrong: {error}.") from None


def load_settings(config: Path | None = None, **overrides: Any) -> Settings:
    """Read the settings; `config` wins over FLIPWATCH_CONFIG; `overrides` win over everything.

    Raises `ConfigurationError` with one sentence.
    """
    path = config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    if path is not None:
        try:
            path = from_home(path)
        except ValueError as error:
            raise ConfigurationError(f"The configuration file {path} cannot be found: {error}.") from None
        refuse_odd_file(path)
    refuse_unknown_variables(os.environ, Settings.model_fields)

    class FromFile(Settings):
        model_config = SettingsConfigDict(yaml_file=path)

    try:
        return FromFile(**overrides)
    except ValidationError as error:
        raise ConfigurationError(explain(error)) from None
    except SettingsError as error:
        raise ConfigurationError(
            f"The environment cannot be read: {str(error).split(' from source')[0]}; write lists and sections as JSON."
        ) from None


__all__ = [
    "AlertSettings",
    "AlphaScanSettings",
    "AutomationSettings",
    "CanarySettings",
    "ConfigurationError",
    "DifferentialSettings",
    "FaultSettings",
    "FingerprintSettings",
    "MitigationSettings",
    "ScanSettings",
    "Scope",
    "Settings",
    "Token",
    "ValidationSettings",
    "VllmSettings",
    "load_settings",
]
