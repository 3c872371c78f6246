"""The last findings of one monitor, and the alerts that they make."""

from collections import Counter, deque
from collections.abc import Iterable

from ..monitors.alpha_scan import AlphaScan
from ..monitors.canary.finding import NAME as CANARY
from ..monitors.differential.facts import NAME as DIFFERENTIAL
from ..monitors.finding import Health
from .alert import ANSWERS_WRONG, BLOCK_DEPARTS, BLOCK_FLAGGED, DRIFTED, NOT_FINITE, UNKNOWN, WEIGHTS_CHANGED, Alert
from .records import FindingRecord


class Window:
    """Of one monitor; a `quiet` one makes no alerts of unknown findings."""

    def __init__(self, monitor: str, k: int, n: int, *, quiet: bool) -> None:
        self._monitor = monitor
        self._k = k
        self._quiet = quiet
        self._judged: deque[FindingRecord] = deque(maxlen=n)
        self._all: deque[FindingRecord] = deque(maxlen=n)
        self._swept: FindingRecord | None = None
        """The last that says how many chunks are bad; also one that is unknown because not all bytes are covered."""

    def confirmed_blocks(self, boot_id: str | None = None) -> frozenset[int]:
        """Blocks that k of the last n findings flag; with a boot id, only those about that vLLM process count."""
        return frozenset(block for block, count in self._counts(boot_id).items() if count >= self._k)

    @property
    def confirmed(self) -> bool:
        """k of the last n findings are bad."""
        return sum(judged.health is Health.FAILED for judged in self._judged) >= self._k

    def take(self, finding: FindingRecord) -> Iterable[Alert]:
        """The alerts that fire with this finding as the last one."""
        self._all.append(finding)
        if finding.health is not Health.UNKNOWN:
            self._judged.append(finding)
        if "bad_chunks" in finding.body:
            self._swept = finding
        yield from self._of_blocks(finding.created_at)
        if self._monitor == AlphaScan.name:
            yield from self._of_the_loss(finding.created_at)
        if self._monitor == DIFFERENTIAL:
            yield from self._of_no_block(finding.created_at)
        if self._monitor == CANARY:
            yield from self._of_answers(finding.created_at)
        if self._swept is not None and self._swept.health is Health.FAILED:
            changed = "The served weights have changed" if self._swept.body["bad_chunks"] else "The weights are bad"
            yield self._alert(WEIGHTS_CHANGED, finding.created_at, changed, str(self._swept.body["reason"]))
        unknown = [seen for seen in self._all if seen.health is Health.UNKNOWN and not seen.body.get("answered")]
        if len(unknown) >= self._k and not self._quiet:
            description = (
                f"{len(unknown)} of the last {len(self._all)} findings of {self._monitor}; {unknown[-1].body['reason']}"
            )
            summary = "Flipwatch cannot tell whether the model is healthy"
            yield self._alert(UNKNOWN, finding.created_at, summary, description)

    def _of_blocks(self, at: float) -> Iterable[Alert]:
        flagging = sum(1 for judged in self._judged if _reasons(judged))
        if flagging < self._k:
            return
        counts = self._counts()
        for block in sorted(self.confirmed_blocks() or counts):
            last = next(_reasons(judged)[block] for judged in reversed(self._judged) if block in _reasons(judged))
            description = f"Flagged in {counts[block]} of the last {len(self._judged)} findings; {last.rstrip('.')}."
            if self._monitor == DIFFERENTIAL:
                name, summary = BLOCK_DEPARTS, f"Block {block} computes something else than its reference"
            else:
                name, summary = BLOCK_FLAGGED, f"Block {block} does harm"
            yield self._alert(name, at, summary, description, block)

    def _of_the_loss(self, at: float) -> Iterable[Alert]:
        drifted = [judged for judged in self._judged if _drifted(judged)]
        if len(drifted) >= self._k:
            description = f"{len(drifted)} of the last {len(self._judged)} findings; {drifted[-1].body['reason']}"
            yield self._alert(DRIFTED, at, "The served model is damaged, and no block is the cause", description)
        if self._judged and _not_finite(self._judged[-1]):
            reason = str(self._judged[-1].body["reason"])
            yield self._alert(NOT_FINITE, at, "The loss of the served model is not finite", reason)

    def _of_no_block(self, at: float) -> Iterable[Alert]:
        """The model departs from its reference in front of the blocks or behind them."""
        failed = [judged for judged in self._judged if judged.health is Health.FAILED and not _reasons(judged)]
        if len(failed) >= self._k:
            description = f"{len(failed)} of the last {len(self._judged)} findings; {failed[-1].body['reason']}"
            summary = "The model computes something else than its reference, and no block is the cause"
            yield self._alert(BLOCK_DEPARTS, at, summary, description)

    def _of_answers(self, at: float) -> Iterable[Alert]:
        failed = [judged for judged in self._judged if judged.health is Health.FAILED]
        if len(failed) >= self._k:
            description = f"{len(failed)} of the last {len(self._judged)} findings; {failed[-1].body['reason']}"
            yield self._alert(ANSWERS_WRONG, at, "The server answers wrong, or not at all", description)

    def _alert(self, name: str, at: float, summary: str, description: str, block: int | None = None) -> Alert:
        return Alert(name, self._monitor, block, at, summary, description)

    def _counts(self, boot_id: str | None = None) -> Counter[int]:
        counted = [finding for finding in self._judged if boot_id in (None, finding.boot_id)]
        return Counter(block for finding in counted for block in _reasons(finding))


def _reasons(finding: FindingRecord) -> dict[int, str]:
    """Flagged block -> why."""
    return {place["block"]: place["reason"] for place in finding.body["places"]}


def _drifted(finding: FindingRecord) -> bool:
    """Something is wrong with a model that still gives numbers, and the finding names no block."""
    return finding.health is Health.FAILED and not finding.body["places"] and not _not_finite(finding)


def _not_finite(finding: FindingRecord) -> bool:
    """A judged finding of a monitor that measures the base loss, and there is no number for it."""
    return "base_loss_nats" in finding.body and finding.body["base_loss_nats"] is None
