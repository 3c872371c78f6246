"""What every route that orders a mitigation needs: the blocks that this sidecar's own findings point at, the drain of
the vLLM process of now, and the answer to an order that was taken."""

from fastapi import Response

from ...monitors.alpha_scan import AlphaScan
from ...monitors.finding import Action
from ...monitors.fingerprint.judgement import FingerprintFinding
from ..gates import names
from ..problem import Kind, ProblemError
from ..records import MitigationRecord
from ..sidecar import Sidecar


class NothingFlagged(ProblemError):
    """The last findings flag no block."""


def damaged(sidecar: Sidecar) -> list[int]:
    """Blocks that any monitor flags, whatever it advises: what has not changed is not repaired anyway.

    Raises `NothingFlagged`, or a `ProblemError` while vLLM is away.
    """
    _check_up(sidecar)
    findings = [state.finding for state in sidecar.live.states() if state.finding is not None]
    blocks = {place.block for finding in findings for place in finding.places}
    blocks |= {block for finding in findings if isinstance(finding, FingerprintFinding) for block in finding.blocks}
    if not blocks:
        raise NothingFlagged(Kind.CONFLICT, "No block is flagged by the last findings: scan, or name no blocks at all.")
    return sorted(blocks)


def flagged(sidecar: Sidecar) -> list[int]:
    """Blocks that the last scan flags, and advises to leave out.

    Raises `NothingFlagged`, or a `ProblemError` where it advises no skip or while vLLM is away.
    """
    _check_up(sidecar)
    finding = sidecar.live.state(AlphaScan.name).finding
    blocks = [] if finding is None else [place.block for place in finding.places]
    if not blocks:
        raise NothingFlagged(Kind.CONFLICT, "No block is flagged by the last finding: scan, or name the blocks.")
    if finding is not None and finding.action is not Action.SKIP:
        raise ProblemError(
            Kind.CONFLICT,
            f"The last finding flags {names(blocks)} and advises no skip; read its reason, and name the blocks to "
            "leave them out all the same.",
        )
    return blocks


def drain(sidecar: Sidecar, *, reason: str, actor: str) -> MitigationRecord:
    """Drain the vLLM process that was last heard of; if it is another one by now, the drain ends when it answers.

    Raises `MitigationError`, or `ProblemError` if no process was ever heard of.
    """
    boot_id = sidecar.last_heard_of()
    if boot_id is None:
        raise ProblemError(Kind.VLLM_AWAY, sidecar.live.away)
    return sidecar.mitigator.drain(boot_id, reason=reason, actor=actor)


async def follow(sidecar: Sidecar, record: MitigationRecord, response: Response) -> None:
    """Let the scans give way to the order, and say where it can be read."""
    await sidecar.follow(record)
    response.headers["location"] = f"/v1/mitigations/{record.id}"


def _check_up(sidecar: Sidecar) -> None:
    if not sidecar.live.up:
        raise ProblemError(Kind.VLLM_AWAY, sidecar.live.away)
