"""A fixed state of a sidecar, and the collector over it, for tests of what is exported."""

from collections import Counter

from prometheus_client import CollectorRegistry

from flipwatch.monitors.alpha_scan import AlphaScanFinding, BlockScore, Profile, Thresholds
from flipwatch.monitors.canary.expectation import ReferenceKind as Answers
from flipwatch.monitors.canary.finding import CanaryFinding, Symptom
from flipwatch.monitors.canary.pulse import Beat, Pulse
from flipwatch.monitors.differential.finding import BlockDivergence, DifferentialFinding, Effort
from flipwatch.monitors.differential.reference import ReferenceKind
from flipwatch.monitors.finding import Action, Health, Place
from flipwatch.monitors.fingerprint.facts import (
    FingerprintReading,
    IntegrityFacts,
    Method,
    NotCovered,
    ParityPlace,
    Rank,
    RankComparison,
    RankReading,
    SealFacts,
)
from flipwatch.monitors.fingerprint.judgement import CheckpointVerdict, judge
from flipwatch.monitors.wire import ModelFacts, SelfTest, SelfTestState
from flipwatch.service.alerts import Alerts
from flipwatch.service.live import Live
from flipwatch.service.metrics import SidecarCollector
from flipwatch.service.records import FindingRecord, MitigationAction

from .toy_profile import PROFILE

FACTS = ModelFacts(
    boot_id="boot",
    model="/models/toy",
    architecture="ToyForCausalLM",
    layer_class="ToyLayer",
    num_blocks=3,
    armed=True,
    refusal=None,
    scan_refusal=None,
    model_digest="0123456789abcdef",
    mode="compiled",
    dtype="bfloat16",
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    data_parallel_size=1,
    max_tokens=2048,
    gates=[1.0, 0.0, 1.0],
    self_test=SelfTest(state=SelfTestState.PASSED, reason="All gates act."),
    faults_enabled=False,
    faults=[],
    flipwatch_version="0.1.0",
    vllm_version="0.32.0",
    torch_version="2.13.0",
    hardware="cpu AVX512",
)

FINDING = AlphaScanFinding(
    monitor="alpha_scan",
    health=Health.FAILED,
    reason="block 2 does harm",
    places=(Place(block=2, reason="skip gain 0.75 nats, z 12.5"),),
    action=Action.SKIP,
    base_loss_nats=3.5,
    thresholds=Thresholds(),
    blocks=(
        BlockScore(
            block=0,
            bss=0.5,
            slope=-0.25,
            skip_gain=-1.0,
            largest_deviation=0.375,
            bss_z=1.5,
            skip_gain_z=-0.5,
            bss_profile_z=0.25,
            skip_gain_t=-40.0,
            curve=((0.0, 8.5), (0.7, 7.5)),
        ),
        BlockScore(block=1, curve=((0.0, None),)),
        BlockScore(
            block=2,
            bss=0.25,
            slope=0.5,
            skip_gain=0.75,
            bss_z=-1.5,
            skip_gain_z=12.5,
            bss_profile_z=90.5,
            skip_gain_t=8.5,
            without_drift_nats=0.125,
            flagged=True,
        ),
    ),
    drift_nats=1.25,
    drift_t=10.5,
    profile_recorded_at=PROFILE.recorded_at,
    flagged=(2,),
    predicted_loss_nats=6.5,
    gates=(1.0, 0.0, 1.0),
    passes=11.5,
)


MISSING = [NotCovered(tensor="packed.weight", bytes=1000, reason="It is packed.")]

SEAL = SealFacts(
    rank=Rank(rank=0),
    device="cpu",
    digest="gmac",
    recorded_at=1_700_000_000.0,
    chunk_bytes=2**20,
    chunks=8,
    tensors=3,
    covered_bytes=2**23,
    not_covered=MISSING,
    parity=ParityPlace.MEMORY,
    parity_bytes=2**20,
    parity_groups=1,
    suspicions=[],
)

READING = FingerprintReading(
    ranks=[
        RankReading(
            rank=Rank(rank=0),
            recorded_at=1_700_000_000.0,
            chunks=8,
            covered_bytes=2**23,
            bad_chunks=2,
            bad=[],
            replaced=[],
            not_covered=MISSING,
            suspicions=[],
            seconds=0.25,
        )
    ]
)

VERDICT = CheckpointVerdict(
    at=1_700_000_060.0,
    boot_id="boot",
    files=[],
    manifest=None,
    problems=[],
    ranks=[RankComparison(rank=Rank(rank=0), equal=3, different=[], not_comparable=[])],
)


def divergence(block: int, l2: float | None, departs: bool | None) -> BlockDivergence:
    """A block at this distance from its reference."""
    return BlockDivergence(
        block=block,
        gate=1.0,
        l2=l2,
        cosine=None if l2 is None else l2 / 2,
        allowed=0.25 if departs is not None else None,
        departs=departs,
        walk_l2=l2,
        walk_cosine=l2,
        reason="the numbers",
    )


DIVERGENCE = DifferentialFinding(
    monitor="differential",
    health=Health.FAILED,
    reason="block 2 departs",
    places=(Place(block=2, reason="relative distance 0.5, allowed 0.25"),),
    action=Action.INVESTIGATE,
    reference=ReferenceKind.RECORDED,
    recorded_at=1_700_000_000.0,
    blocks=(divergence(0, 0.125, False), divergence(1, None, None), divergence(2, 0.5, True)),
    first_jump=2,
    locations=(),
    effort=Effort(blocks=3, sublayers=2, digests=0, tensors=0, brute_force=0),
    nats=3.5,
    reference_nats=3.25,
)

ANSWERS = CanaryFinding(
    monitor="canary",
    health=Health.FAILED,
    reason="prompt 1 is another",
    action=Action.INVESTIGATE,
    symptom=Symptom.CHANGED,
    wrong=(1, 4),
    reference=Answers.RECORDED,
    answered=6,
    seconds=0.75,
    scatter=0.5,
    tolerance=0.25,
)


def registry(
    live: Live, alerts: Alerts | None = None, profile: Profile | None = None, recorded_at: float | None = None
) -> CollectorRegistry:
    """A registry with the collector of this state."""
    made = CollectorRegistry()
    made.register(
        SidecarCollector(
            live,
            alerts or Alerts(k=1, n=3),
            thresholds=Thresholds(),
            profile=lambda: profile,
            open_mitigations=list,
            mitigations_done=lambda: Counter({MitigationAction.SKIP: 2}),
            mitigations_failed=Counter,
            repaired_chunks=lambda: Counter({Method.PARITY: 3}),
            deliveries=lambda: (3, 1),
            recorded_at=lambda: recorded_at,
            expected_at=lambda: recorded_at,
        )
    )
    return made


def known() -> tuple[Live, Alerts]:
    """A state in which every family has a value."""
    live = Live(
        monitors=("alpha_scan", "fingerprint"),
        every_minutes={"alpha_scan": 60.0, "fingerprint": 5.0, "differential": None},
        # All findings are of one hour, so none is old.
        now=lambda: 1_800_000_900.0,
        facts=FACTS,
        model_name="toy",
        up=True,
    )
    scans = live.tally("alpha_scan")
    scans.started, scans.failures, scans.parts, scans.held_seconds = 7, 1, 120, 4.5
    scans.skipped["running"] = 2
    scans.last_at, scans.last_seconds = 1_800_000_000.0, 12.5
    live.found(FINDING, "finding", 1_800_000_000.0)
    sweeps = live.tally("fingerprint")
    sweeps.started, sweeps.failures, sweeps.parts, sweeps.held_seconds = 9, 2, 30, 1.5
    sweeps.skipped["interrupted"] = 1
    sweeps.last_at, sweeps.last_seconds = 1_800_000_300.0, 1.25
    live.integrity.facts = IntegrityFacts(boot_id="boot", refusal=None, ranks=[SEAL])
    live.integrity.reading, live.integrity.verdict = READING, VERDICT
    live.found(judge(READING, VERDICT), "sweep", 1_800_000_300.0)
    comparisons = live.tally("differential")
    comparisons.started, comparisons.failures, comparisons.parts, comparisons.held_seconds = 5, 1, 20, 0.5
    comparisons.skipped["misfire"] = 1
    comparisons.last_at, comparisons.last_seconds = 1_800_000_600.0, 2.25
    live.found(DIVERGENCE, "comparison", 1_800_000_600.0)
    canary = live.tally("canary")
    canary.started, canary.failures = 6, 1
    canary.skipped["running"] = 1
    canary.last_at, canary.last_seconds = 1_800_000_900.0, 3.5
    live.found(ANSWERS, "answers", 1_800_000_900.0)
    live.beat = Beat(Pulse.MOVING, "the numbers")
    alerts = Alerts(k=1, n=3)
    alerts.restore(
        [
            FindingRecord(
                id="finding",
                scan_id="scan",
                monitor="alpha_scan",
                created_at=1_800_000_000.0,
                health=FINDING.health,
                body=FINDING.model_dump(mode="json"),
            )
        ]
    )
    return live, alerts
