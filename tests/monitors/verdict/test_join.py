"""One verdict from findings: each row of the table by findings that mean it, what is stale, and what is said."""

from dataclasses import replace

import pytest

from flipwatch.monitors.canary.finding import Symptom
from flipwatch.monitors.canary.pulse import Beat, Pulse
from flipwatch.monitors.finding import Action, Health
from flipwatch.monitors.verdict.evidence import Heard, Question, Seen
from flipwatch.monitors.verdict.join import join
from flipwatch.monitors.verdict.verdict import Joined, Verdict

from .findings import HEALTHY, HUNG, asked, changed, compared, heard, scanned, swept

SKIPPED = (1.0,) * 4 + (0.0,) + (1.0,) * 3
OUT = {"gates": SKIPPED, "health": Health.DEGRADED}


@pytest.mark.parametrize(
    ("what", "verdict", "action"),
    [
        (HEALTHY, Verdict.OK, Action.NONE),
        (heard(fingerprint=changed(), scan=scanned(4)), Verdict.WEIGHT_FAULT, Action.REPAIR),
        (heard(fingerprint=changed(), canary=asked(Symptom.NOT_FINITE)), Verdict.WEIGHT_FAULT, Action.REPAIR),
        (heard(fingerprint=changed(), scan=scanned(drift_nats=0.2)), Verdict.WEIGHT_FAULT, Action.REPAIR),
        (heard(fingerprint=changed()), Verdict.LATENT_WEIGHT_FAULT, Action.REPAIR),
        (heard(fingerprint=changed(), canary=Seen(None)), Verdict.LATENT_WEIGHT_FAULT, Action.REPAIR),
        (heard(scan=scanned(4), canary=asked(Symptom.CHANGED)), Verdict.OLD_FAULT, Action.SKIP),
        (heard(differential=compared(4)), Verdict.OLD_FAULT, Action.SKIP),
        (heard(scan=scanned(health=Health.FAILED, drift_nats=0.2)), Verdict.OLD_FAULT, Action.INVESTIGATE),
        (
            heard(fingerprint=swept(health=Health.FAILED, loaded_bad=("the files are others",))),
            Verdict.OLD_FAULT,
            Action.INVESTIGATE,
        ),
        (heard(canary=asked(Symptom.CACHE_DIFFERS)), Verdict.SERVING_FAULT, Action.DRAIN),
        (heard(canary=asked(Symptom.TIMED_OUT), beat=HUNG), Verdict.HUNG, Action.DRAIN),
        (heard(canary=asked(Symptom.TIMED_OUT)), Verdict.UNKNOWN, Action.INVESTIGATE),
        (heard(scan=scanned(**OUT), gates=SKIPPED), Verdict.MITIGATED, Action.NONE),
        (heard(scan=scanned(**OUT), gates=SKIPPED, fingerprint=changed()), Verdict.MITIGATED, Action.REPAIR),
        (
            heard(scan=scanned(**OUT), gates=SKIPPED, canary=asked(health=Health.UNKNOWN)),
            Verdict.MITIGATED,
            Action.NONE,
        ),
        (heard(canary=asked(health=Health.UNKNOWN)), Verdict.UNKNOWN, Action.INVESTIGATE),
        (
            heard(scan=scanned(**OUT), gates=SKIPPED, canary=asked(Symptom.DEGENERATE)),
            Verdict.SERVING_FAULT,
            Action.INVESTIGATE,
        ),
        (heard(canary=Seen(None, "No scan.")), Verdict.UNKNOWN, Action.INVESTIGATE),
        (heard(scan=Seen(None, "No scan.")), Verdict.UNKNOWN, Action.INVESTIGATE),
        (heard(beat=Beat(Pulse.UNKNOWN, "Not read.")), Verdict.UNKNOWN, Action.INVESTIGATE),
        (heard(gates=None), Verdict.UNKNOWN, Action.INVESTIGATE),
        (
            heard(fingerprint=swept(health=Health.UNKNOWN, doubts=("3 MB are not covered",))),
            Verdict.UNKNOWN,
            Action.INVESTIGATE,
        ),
    ],
)
def test_pattern(what: Heard, verdict: Verdict, action: Action) -> None:
    """These findings together are that verdict, and that is the first thing to try."""
    joined = join(what)
    assert (joined.verdict, joined.action) == (verdict, action), joined.reason


def test_the_reason_is_one_sentence_with_the_numbers_of_all_evidence() -> None:
    """All evidence is in it, and there is one sign for each question."""
    joined = join(heard(fingerprint=changed(), scan=scanned(4), canary=asked(Symptom.CHANGED)))
    for part in ("1 of 295 chunks", "block 4: without it the loss is 3.2 nats lower", "2.910 nats", "3 of 8 answers"):
        assert part in joined.reason
    assert joined.reason.endswith(".")
    assert ". " not in joined.reason
    assert [sign.question for sign in joined.signs] == list(Question)
    assert joined.blocks == (4,)
    assert joined.grounds == ("fingerprint", "alpha_scan")


def test_a_healthy_server_says_why_as_well() -> None:
    """`ok` rests on numbers, too, and on nobody's complaint."""
    joined = join(HEALTHY)
    assert "all 295 chunks" in joined.reason
    assert "none of 8 blocks" in joined.reason
    assert (joined.grounds, joined.stale, joined.health) == ((), (), Health.OK)


def test_a_clean_sweep_from_before_the_fault_makes_no_compute_fault() -> None:
    """A block is flagged after the last sweep: bytes are unknown, a sweep is wanted, and nothing is guessed."""
    late = replace(HEALTHY, scan=Seen(scanned(4), began=290.0, since=300.0))
    joined = join(late)
    assert (joined.verdict, joined.health) == (Verdict.UNKNOWN, Health.FAILED)
    assert joined.stale == ("fingerprint", "canary")
    assert "fingerprint looked before alpha_scan saw that" in joined.reason
    fresh = replace(late, fingerprint=Seen(swept(), began=301.0, since=100.0))
    assert join(fresh).verdict is Verdict.OLD_FAULT
    assert join(replace(late, fingerprint=Seen(changed(), began=301.0, since=302.0))).verdict is Verdict.WEIGHT_FAULT


def test_a_clean_sweep_between_two_faults_says_nothing_of_the_second() -> None:
    """The scan flags an old fault since 100; the sweep of 200 knows nothing of the block that departs since 300."""
    seen = replace(HEALTHY, scan=Seen(scanned(4), began=250.0, since=100.0))
    both = replace(seen, fingerprint=Seen(swept(), began=200.0), differential=Seen(compared(5), since=300.0))
    assert (join(both).verdict, join(both).stale) == (Verdict.UNKNOWN, ("fingerprint", "canary"))
    assert join(replace(both, fingerprint=Seen(swept(), began=301.0))).verdict is Verdict.OLD_FAULT


def test_a_scan_from_before_the_flip_does_not_call_it_latent() -> None:
    """Changed bytes are alarming at once; that nothing shows it needs a scan and a canary that ran afterwards."""
    joined = join(replace(HEALTHY, fingerprint=Seen(changed(), began=290.0, since=300.0)))
    assert (joined.verdict, joined.health) == (Verdict.LATENT_WEIGHT_FAULT, Health.FAILED)
    assert joined.stale == ("alpha_scan", "canary")


def test_a_lasting_fault_does_not_make_evidence_stale_for_ever() -> None:
    """The canary fails every minute since 300; a sweep of 301 counts still at 1000."""
    lasting = replace(
        HEALTHY,
        canary=Seen(asked(Symptom.CHANGED), began=1000.0, since=300.0),
        fingerprint=Seen(swept(), began=301.0, since=100.0),
        scan=Seen(scanned(), began=302.0, since=100.0),
    )
    joined = join(lasting)
    assert (joined.verdict, joined.stale) == (Verdict.SERVING_FAULT, ())


def test_a_block_that_is_left_out_departs_in_vain() -> None:
    """The comparison runs it alone at alpha 1; what is served is without it."""
    left_out = heard(scan=scanned(**OUT), gates=SKIPPED, differential=compared(4))
    assert join(left_out).verdict is Verdict.MITIGATED
    assert join(heard(scan=scanned(**OUT), gates=SKIPPED, differential=compared(4, 5))).verdict is Verdict.OLD_FAULT


def test_a_loss_that_is_no_number_is_never_right() -> None:
    """Not finite and no block the only cause: the loss is off, with what the bytes say."""
    nan = scanned(health=Health.FAILED, base_loss_nats=None)
    assert join(heard(scan=nan, fingerprint=changed())).verdict is Verdict.WEIGHT_FAULT
    assert join(heard(scan=nan)).verdict is Verdict.OLD_FAULT
    assert "not finite" in join(heard(scan=nan)).reason


def test_a_joined_verdict_is_json_and_back() -> None:
    """As the API shows it."""
    joined = join(heard(fingerprint=changed(), scan=scanned(4)))
    assert Joined.model_validate_json(joined.model_dump_json()) == joined
