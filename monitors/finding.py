"""The judgement of one monitor: health, reason, places, suggested action."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Health(StrEnum):
    """State of what a monitor watches.  No data is `unknown`, never `ok`."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Action(StrEnum):
    """What a monitor suggests.  A monitor never acts itself."""

    NONE = "none"
    INVESTIGATE = "investigate"
    SKIP = "skip"
    REPAIR = "repair"
    DRAIN = "drain"


class Place(BaseModel):
    """One block that a finding points at, and why, in one sentence with the numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block: int
    reason: str


class Finding(BaseModel):
    """What a monitor concludes from one reading."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    monitor: str
    health: Health
    reason: str
    """One sentence with the numbers in it, also when the health is `ok`."""
    places: tuple[Place, ...] = ()
    action: Action = Action.NONE
