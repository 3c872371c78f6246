"""The groups of the sidecar's settings.  What each means and where they come from: `settings.py`."""

from typing import Annotated, Literal

import httpx
from pydantic import (
    AfterValidator,
    AnyHttpUrl,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from ..monitors.alpha_scan import Strategy, Thresholds
from ..monitors.differential.reference import ReferenceKind
from .connection import without_userinfo
from .policy import Rule, each_once
from .settings_values import MOST, MOST_MINUTES, HeaderSecret, UserPath

Scope = Literal["read", "mitigate", "admin"]


def _can_be_asked(url: AnyHttpUrl) -> AnyHttpUrl:
    try:
        _ = httpx.URL(str(url)).host
    except (httpx.InvalidURL, ValueError):
        # Pydantic allows host names that no request can be sent to.
        raise ValueError("no request can be sent to this URL") from None
    return url


ServerUrl = Annotated[AnyHttpUrl, AfterValidator(_can_be_asked)]
"""Where a vLLM server is."""


class Section(BaseModel):
    """A closed group of settings.  Upper bounds only keep out numbers that no clock and no counter can hold."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class VllmSettings(Section):
    """Where the watched server is."""

    url: ServerUrl = AnyHttpUrl("http://127.0.0.1:8000")
    api_key: HeaderSecret | None = None
    """What vLLM was given as `--api-key`."""
    poll_seconds: float = Field(default=5.0, gt=0, le=86_400)
    """Time between two looks at the probe's facts and at vLLM's request counters."""

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
    """Time that one part of any measurement may hold the engine."""
    duty: float = Field(default=0.02, gt=0.0, le=1.0)
    """Share of any minute that all parts of all monitors may hold the engine while requests are there."""
    idle_duty: float = Field(default=0.25, gt=0.0, le=1.0)
    """The same while there are none; never less than `duty`."""

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


class DifferentialSettings(Section):
    """When the model is held against a clean one, and against which."""

    every_minutes: float | None = Field(default=None, gt=0, le=MOST_MINUTES)
    reference: ReferenceKind = ReferenceKind.RECORDED
    """What is taken by the clock, and where nobody asks for another one."""
    peer_url: ServerUrl | None = None
    """A second vLLM with the probe."""
    peer_token: HeaderSecret | None = None
    """What that vLLM has in its FLIPWATCH_PROBE_TOKEN."""
    peer_token_file: UserPath | None = None
    limit: float | None = Field(default=None, gt=0)
    """Largest relative L2 distance of a block from its reference; None: what measured noise explains."""

    @model_validator(mode="after")
    def _a_peer_is_whole(self) -> "DifferentialSettings":
        token = self.peer_token is not None or self.peer_token_file is not None
        if self.reference is ReferenceKind.PEER and self.peer_url is None:
            raise ValueError("the reference peer needs differential.peer_url, and a token for it")
        if self.peer_url is not None and not token:
            raise ValueError("differential.peer_url needs differential.peer_token or differential.peer_token_file")
        return self

    @property
    def peer_base_url(self) -> str | None:
        """The peer's URL without a slash at its end."""
        return None if self.peer_url is None else str(self.peer_url).rstrip("/")


class CanarySettings(Section):
    """When the canary asks, and how long vLLM may be silent."""

    every_minutes: float | None = Field(default=5.0, gt=0, le=MOST_MINUTES)
    timeout_seconds: float = Field(default=30.0, gt=0, le=86_400)
    """Longest time for one answer of a few tokens."""
    hung_seconds: float = Field(default=60.0, gt=0, le=86_400)
    """With requests there and no counter of vLLM moving for so long, it hangs."""


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
    max_blocks: int = Field(default=2, ge=1, le=MOST)
    """Most blocks that may be gated at the same time."""
    max_actions: int = Field(default=4, ge=1, le=MOST)
    """Most actions within `window_minutes`; undoing is always allowed."""
    window_minutes: float = Field(default=60.0, gt=0, le=MOST_MINUTES)


class AutomationSettings(Section):
    """What may be done without a person, by a policy: nothing where there is none."""

    policy_file: UserPath | None = None
    """YAML list of rules."""
    rules: Annotated[list[Rule], AfterValidator(each_once)] = []
    """The same list in here."""

    @model_validator(mode="after")
    def _one_policy(self) -> "AutomationSettings":
        if self.policy_file is not None and self.rules:
            raise ValueError("there is a policy_file and there are rules: keep one of the two")
        return self


class FaultSettings(Section):
    """Damage on purpose, for tests and drills."""

    enabled: bool = False


class Token(Section):
    """One bearer token of the sidecar's own API."""

    name: str = Field(min_length=1)
    token: HeaderSecret = Field(min_length=8)
    scopes: list[Scope] = Field(min_length=1)
