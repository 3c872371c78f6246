"""The heartbeat of a server, from vLLM's own counters: does it move while there is work?"""

from enum import StrEnum


class Pulse(StrEnum):
    """What the counters say."""

    IDLE = "idle"
    """No request is there."""
    MOVING = "moving"
    """Requests are there, and tokens come."""
    HUNG = "hung"
    """Requests have been there for the whole time that is allowed, and no token came."""
    UNKNOWN = "unknown"
    """The counters could not be read, or not for long enough."""
