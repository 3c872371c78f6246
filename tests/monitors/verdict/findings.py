"""Findings of each monitor, and all that is known of a server, as the tests of the verdict need them."""

from dataclasses import replace
from typing import Any

from flipwatch.monitors.alpha_scan import AlphaScanFinding, BlockScore, Thresholds
from flipwatch.monitors.canary.finding import CanaryFinding, Symptom
from flipwatch.monitors.canary.pulse import Beat, Pulse
from flipwatch.monitors.differential.finding import DifferentialFinding, Effort
from flipwatch.monitors.differential.reference import ReferenceKind
from flipwatch.monitors.finding import Health, Place
from flipwatch.monitors.fingerprint.judgement import FingerprintFinding
from flipwatch.monitors.verdict.evidence import Heard, Seen


def swept(**other: Any) -> FingerprintFinding:
    """A sweep of 295 chunks; all are those of the baseline unless `other` says so."""
    plain: dict[str, Any] = {
        "monitor": "fingerprint",
        "health": Health.OK,
        "reason": "All 295 chunks are those of the baseline.",
        "chunks": 295,
        "bad_chunks": 0,
        "covered_bytes": 295 * 2**20,
        "not_covered": [],
        "bad": [],
        "repairable": 0,
        "blocks": (),
    }
    return FingerprintFinding(**plain | other)


def changed() -> FingerprintFinding:
    """One chunk of block 4 has changed."""
    return swept(health=Health.FAILED, reason="1 of 295 chunks differs.", bad_chunks=1, blocks=(4,))


def scanned(*flagged: int, **other: Any) -> AlphaScanFinding:
    """A scan of 8 blocks that flags these."""
    places = tuple(
        Place(block=block, reason=f"block {block}: without it the loss is 3.2 nats lower") for block in flagged
    )
    scores = [
        BlockScore(
            block=block,
            flagged=block in flagged,
            curve=(),
            bss=None,
            slope=None,
            skip_gain=None,
            largest_deviation=None,
            bss_z=None,
            slope_z=None,
            skip_gain_z=None,
            largest_deviation_z=None,
        )
        for block in range(8)
    ]
    plain: dict[str, Any] = {
        "monitor": "alpha_scan",
        "health": Health.FAILED if flagged else Health.OK,
        "reason": "Base loss 2.910 nats.",
        "places": places,
        "base_loss_nats": 2.91,
        "thresholds": Thresholds(),
        "blocks": tuple(scores),
        "flagged": flagged,
        "gates": (1.0,) * 8,
        "sequences": 8,
    }
    return AlphaScanFinding(**plain | other)


def compared(*departing: int, **other: Any) -> DifferentialFinding:
    """A comparison with the checkpoint, from which these blocks depart."""
    places = tuple(Place(block=block, reason=f"block {block}: relative distance 0.3") for block in departing)
    plain: dict[str, Any] = {
        "monitor": "differential",
        "health": Health.FAILED if departing else Health.OK,
        "reason": "Against the checkpoint.",
        "places": places,
        "reference": ReferenceKind.CHECKPOINT,
        "recorded_at": None,
        "blocks": (),
        "first_jump": None,
        "locations": (),
        "effort": Effort(blocks=8, sublayers=0, digests=0, tensors=0, brute_force=0),
        "nats": None,
        "reference_nats": None,
    }
    return DifferentialFinding(**plain | other)


def asked(symptom: Symptom = Symptom.NONE, health: Health | None = None) -> CanaryFinding:
    """What the canary says of 8 prompts."""
    bad = symptom is not Symptom.NONE
    return CanaryFinding(
        monitor="canary",
        health=health or (Health.FAILED if bad else Health.OK),
        reason="3 of 8 answers are wrong." if bad else "8 of 8 answers are as expected.",
        symptom=symptom,
        answered=8,
    )


MOVING = Beat(Pulse.MOVING, "2 requests run and 0 wait; no counter has moved for 1 s.")
HUNG = Beat(Pulse.HUNG, "2 requests run and 0 wait, and no counter has moved for 60 s.")

HEALTHY = Heard(
    fingerprint=Seen(swept(), began=100.0, since=100.0),
    scan=Seen(scanned(), began=100.0, since=100.0),
    differential=Seen(None, "It runs only when somebody asks."),
    canary=Seen(asked(), began=100.0, since=100.0),
    beat=MOVING,
    gates=(1.0,) * 8,
)


def heard(**other: Any) -> Heard:
    """A healthy server, but for this; findings are wrapped as if all were measured after everything else."""
    wrapped = {
        name: Seen(value, began=200.0, since=150.0)
        if name not in ("beat", "gates") and not isinstance(value, Seen)
        else value
        for name, value in other.items()
    }
    plain = replace(
        HEALTHY,
        fingerprint=replace(HEALTHY.fingerprint, began=200.0),
        scan=replace(HEALTHY.scan, began=200.0),
        canary=replace(HEALTHY.canary, began=200.0),
    )
    return replace(plain, **wrapped)
