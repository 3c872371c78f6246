"""Settings of the sidecar: environment (`FLIPWATCH_`, nested by `__`), then a YAML file, then defaults.

Unknown keys are refused in both places: a setting that is spelled wrong must not be silently without effect.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
from pydantic import (
    AnyHttpUrl,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from ..monitors.alpha_scan import Strategy, Thresholds
from ..monitors.fingerprint.manifest import read_manifest
from .connection import without_userinfo
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
from .settings_values import MOST, MOST_MINUTES, HeaderSecret, UserPath, fit_for_a_header, from_home

Scope = Literal["read", "mitigate", "admin"]


class Section(BaseModel):
    """A closed group of settings.  Upper bounds only keep out numbers that no clock and no counter can hold."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class VllmSettings(Section):
    """Where the watched server is."""

    url: AnyHttpUrl = AnyHttpUrl("http://127.0.0.1:8000")
    api_key: HeaderSecret | None = None
    """What vLLM was given as `--api-key`."""
    poll_seconds: float = Field(default=5.0, gt=0, le=86_400)
    """Time between two looks at the probe's facts and at vLLM's request counters."""

    @field_validator("url")
    @classmethod
    def _host_can_be_asked(cls, url: AnyHttpUrl) -> AnyHttpUrl:
        try:
            _ = httpx.URL(str(url)).host
        except (httpx.InvalidURL, ValueError):
            # Pydantic allows host names that no request can be sent to.
            raise ValueError("no request can be sent to this URL") from None
        return url

    @field_validator("api_key")
    @classmethod
    def _empty_is_none(cls, key: SecretStr | None) -> SecretStr | None:
        return key or None

    @property
    def base_url(self) -> str:
        """The URL without a slash at its end."""
        return str(self.url).rstrip("/")

    @property
    def shown_url(self) -> str:
        """The same without user and password, for people."""
        return without_userinfo(self.base_url)


class ScanSettings(Section):
    """When scans run and how much of the engine they may take."""

    every_minutes: float | None = Field(default=60.0, gt=0, le=MOST_MINUTES)
    every_requests: int | None = Field(default=None, ge=1, le=MOST)
    grid: Literal["quick", "full"] | list[Annotated[float, Field(ge=0.0, le=2.0)]] = "quick"
    strategy: Annotated[Strategy, Field(strict=False)] = Strategy.PLAIN
    """How the first round of a scan saves work."""
    max_faults: int = Field(default=3, ge=1, le=MOST)
    """With so many blocks flagged, a scan looks for no other."""
    part_budget_ms: float = Field(default=50.0, gt=0, le=60_000)
    """Time that one part of a scan may hold the engine."""
    duty: float = Field(default=0.25, gt=0.0, le=1.0)
    """Share of wall time that the parts of a scan may hold the engine."""

    @field_validator("grid")
    @classmethod
    def _grid_has_no_base_line(cls, grid: str | list[float]) -> str | list[float]:
        if isinstance(grid, list) and (not grid or 1.0 in grid or len(set(grid)) != len(grid)):
            raise ValueError("name each alpha once, at least one, and leave 1.0 out: it is always measured")
        return grid


class FingerprintSettings(Section):
    """When the weights are swept, and what their checkpoint is held against."""

    every_minutes: float | None = Field(default=5.0, gt=0, le=MOST_MINUTES)
    manifest: UserPath | None = None
    """SHA-256 of the checkpoint's files, as `sha256sum` prints them."""
    check_checkpoint: bool = False
    """Once after each start of vLLM: hold the files against the manifest, and memory against the files."""


class ValidationSettings(Section):
    """Which texts a scan measures the loss on."""

    file: UserPath | None = None
    """JSONL with `prompt` and `answer`; None means the set that ships with Flipwatch."""
    max_items: int = Field(default=64, ge=1, le=MOST)
    max_tokens: int = Field(default=64, ge=2, le=MOST)
    score: Literal["all", "answer"] = "all"


class AlphaScanSettings(Section, Thresholds):
    """Thresholds of the alpha-scan."""


class AlertSettings(Section):
    """An alert fires when `k` of the last `n` findings of a monitor are bad."""

    k: int = Field(default=2, ge=1, le=1000)
    n: int = Field(default=3, ge=1, le=1000)
    webhook_url: AnyHttpUrl | None = None
    """May carry a secret in its path: it is never logged nor shown."""

    @model_validator(mode="after")
    def _n_is_not_below_k(self) -> "AlertSettings":
        if self.n < self.k:
            raise ValueError("alerts.n must not be smaller than alerts.k")
        return self


class MitigationSettings(Section):
    """What may be done to the served model.  The default only observes."""

    mode: Literal["observe", "dry-run", "enforce"] = "observe"
    automatic: bool = False
    """Act on a firing alert without a person; in the mode `dry-run` only record what would be done."""
    max_blocks: int = Field(default=2, ge=1, le=MOST)
    """Most blocks that may be gated at the same time."""
    max_actions: int = Field(default=4, ge=1, le=MOST)
    """Most actions within `window_minutes`; undoing is always allowed."""
    window_minutes: float = Field(default=60.0, gt=0, le=MOST_MINUTES)
    skip_unrepaired: bool = False
    """Leave out the blocks of what a repair could not put right."""


class FaultSettings(Section):
    """Damage on purpose, for tests and drills."""

    enabled: bool = False


class Token(Section):
    """One bearer token of the sidecar's own API."""

    name: str = Field(min_length=1)
    token: HeaderSecret = Field(min_length=8)
    scopes: list[Scope] = Field(min_length=1)


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
    validation: ValidationSettings = ValidationSettings()
    alpha_scan: AlphaScanSettings = AlphaScanSettings()
    alerts: AlertSettings = AlertSettings()
    mitigation: MitigationSettings = MitigationSettings()
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
        if self.probe_token is not None:
            secret = self.probe_token.get_secret_value()
        elif self.probe_token_file is not None:
            try:
                text = SecretStr(read("probe_token_file", self.probe_token_file))
                secret = fit_for_a_header(text).get_secret_value()
            except ValueError as error:
                raise ConfigurationError(f"The token in {self.probe_token_file} is wrong: {error}.") from None
        else:
            raise ConfigurationError(
                "There is no probe token: set FLIPWATCH_PROBE_TOKEN (or FLIPWATCH_PROBE_TOKEN_FILE) to the value "
                "that the vLLM process has in its own FLIPWATCH_PROBE_TOKEN."
            )
        if not secret:
            raise ConfigurationError("The probe token is empty: put the token of the vLLM process into it.")
        return secret

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

    def public(self) -> dict[str, Any]:
        """The settings as JSON without secrets, for /v1/info."""
        shown: dict[str, Any] = self.model_dump(mode="json", exclude={"probe_token", "tokens"})
        shown["tokens"] = [{"name": token.name, "scopes": token.scopes} for token in self.tokens]
        shown["vllm"]["api_key"] = None if self.vllm.api_key is None else "**********"
        shown["vllm"]["url"] = self.vllm.shown_url
        shown["alerts"]["webhook_url"] = None if self.alerts.webhook_url is None else "**********"
        return shown


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
    "ConfigurationError",
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
