"""What Alertmanager sends to a webhook: its JSON, version 4, as far as Flipwatch reads it.

The format is Alertmanager's and not ours, so these models differ from those of `schemas.py` in one thing: keys that
they do not name are accepted and ignored.  It has grown before (`truncatedAlerts`), and will again; help must not be
refused because of an upgrade of Alertmanager.  What is read is as strict as anywhere: a wrong type is an error.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

PREFIX = "Flipwatch"
"""With what the `alertname` of each of Flipwatch's alerts begins, its own and those of its Prometheus rules."""

Status = Literal["firing", "resolved"]


class _Received(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class AlertReceived(_Received):
    """One alert of a notification."""

    status: Status
    labels: dict[str, str] = Field(description="Those of the alert; `alertname` is always among them.")

    @property
    def name(self) -> str:
        """`alertname`; empty where it is missing."""
        return self.labels.get("alertname", "")

    @property
    def words(self) -> str:
        """For people: `FlipwatchVerdict (weight_fault)`, `FlipwatchBlockFlagged (block 4)`."""
        if "verdict" in self.labels:
            return f"{self.name} ({self.labels['verdict']})"
        return f"{self.name} (block {self.labels['block']})" if "block" in self.labels else self.name


class Notification(_Received):
    """One group of alerts, sent when it begins to fire, when it changes, and again every `repeat_interval`."""

    version: Literal["4"]
    status: Status = Field(description="`firing` while one of the alerts does.")
    alerts: list[AlertReceived]

    @property
    def ours(self) -> list[AlertReceived]:
        """Its alerts that are Flipwatch's."""
        return [alert for alert in self.alerts if alert.name.startswith(PREFIX)]

    @property
    def firing(self) -> list[AlertReceived]:
        """Those of them that fire."""
        return [alert for alert in self.ours if alert.status == "firing"] if self.status == "firing" else []
