"""Judgement of sweeps: what is failed, unknown, ok, and what the sentence says."""

from typing import Any

import pytest

from flipwatch.monitors.finding import Action, Health
from flipwatch.monitors.fingerprint.diagnosis import Change, Diagnosis, Pattern
from flipwatch.monitors.fingerprint.facts import (
    BadChunk,
    FileDigest,
    FingerprintReading,
    NotCovered,
    Piece,
    Rank,
    RankComparison,
    RankReading,
)
from flipwatch.monitors.fingerprint.judgement import CheckpointVerdict, FingerprintFinding, judge, size

RECORDED = 1_790_000_000.0
TENSOR = "model.layers.4.mlp.up_proj.weight"

FLIP = Diagnosis(
    tensor=TENSOR,
    dtype="bfloat16",
    elements=1,
    bits=1,
    first=[1, 2],
    last=[1, 2],
    pattern=Pattern.SINGLE_FLIP,
    source=None,
    changes=[Change(element=[1, 2], bits=[14], before="0.5", after="1e+38", before_bits="0x3f00", after_bits="0x7f00")],
)


def bad(chunk: int = 77, *, block: int | None = 4, why: str | None = None, **changes: Any) -> BadChunk:
    """A bad chunk in one tensor, which parity can put right unless `why` says otherwise."""
    piece = Piece(tensor=TENSOR, block=block, start=0, stop=1024)
    return BadChunk(**{"chunk": chunk, "pieces": [piece], "diagnoses": [FLIP], "unrepairable": why, **changes})


def rank(number: int = 0, **changes: Any) -> RankReading:
    """A rank of 257 chunks in which nothing is wrong, but for the changes."""
    values: dict[str, Any] = {
        "rank": Rank(rank=number, tensor=number),
        "recorded_at": RECORDED,
        "chunks": 257,
        "covered_bytes": 269_100_000,
        "bad_chunks": len(changes.get("bad", [])),
        "bad": [],
        "replaced": [],
        "not_covered": [],
        "suspicions": [],
        "seconds": 0.1,
    }
    return RankReading(**values | changes)


def judged(*ranks: RankReading, provenance: CheckpointVerdict | None = None) -> FingerprintFinding:
    """The finding about these ranks."""
    return judge(FingerprintReading(ranks=list(ranks)), provenance)


def verdict(
    problems: tuple[str, ...] = (), different: tuple[str, ...] = (), manifest: str | None = "sums", equal: int = 272
) -> CheckpointVerdict:
    """A check of the checkpoint; nothing is wrong unless said."""
    comparison = RankComparison(rank=Rank(rank=0), equal=equal, different=list(different), not_comparable=[])
    file = FileDigest(file="model.safetensors", bytes=2_000_000, sha256="0" * 64, how="direct", seconds=0.1)
    return CheckpointVerdict(
        at=RECORDED + 60, boot_id="boot", files=[file], manifest=manifest, problems=list(problems), ranks=[comparison]
    )


def test_a_clean_sweep_is_ok_with_its_numbers() -> None:
    """Chunks, bytes, ranks and the time of the baseline are in the sentence."""
    finding = judged(rank())
    assert (finding.health, finding.action) == (Health.OK, Action.NONE)
    assert finding.reason == "All 257 chunks (269.1 MB) of 1 rank are those of the baseline of 2026-09-21 14:13:20 UTC"
    assert (finding.chunks, finding.bad_chunks, finding.covered_bytes) == (257, 0, 269_100_000)
    assert "All 514 chunks (538.2 MB) of 2 ranks" in judged(rank(), rank(1)).reason


def test_a_bad_chunk_is_failed_and_named() -> None:
    """Rank, tensor, block, chunk and the diagnosis stand in the sentence; repair is suggested."""
    finding = judged(rank(), rank(1, bad=[bad()]))
    assert (finding.health, finding.action) == (Health.FAILED, Action.REPAIR)
    assert finding.reason == (
        "1 of 514 chunks differs from the baseline of 2026-09-21 14:13:20 UTC: rank 1, "
        f"{TENSOR}, block 4, chunk 77: {FLIP.sentence()}; parity can put it right"
    )
    assert [(chunk.rank, chunk.chunk) for chunk in finding.bad] == [(1, 77)]
    assert (finding.bad_chunks, finding.repairable, finding.blocks, finding.places) == (1, 1, (4,), ())


def test_several_bad_chunks_are_counted_and_what_parity_cannot_do_is_said() -> None:
    """The first is named; a chunk that parity cannot put right says why; blocks are those of all."""
    lost = bad(9, block=None, why="Another chunk of its group is bad.", diagnoses=[])
    finding = judged(rank(bad=[bad(), bad(5, block=2), lost], bad_chunks=40))
    assert finding.reason.startswith("40 of 257 chunks differ from")
    assert f"first rank 0, {TENSOR}, block 4, chunk 77: 1 bit" in finding.reason
    assert finding.reason.endswith(
        "parity can put 2 of the first 3 right; parity cannot put chunk 9 of rank 0 right: "
        "Another chunk of its group is bad"
    )
    assert (finding.repairable, finding.blocks) == (2, (2, 4))
    assert "outside the blocks" in judged(rank(bad=[lost])).reason


def test_a_bad_chunk_without_a_diagnosis_or_a_list_is_failed_all_the_same() -> None:
    """The count alone decides, whatever else the ranks could say."""
    assert judged(rank(bad=[bad(diagnoses=[])])).health is Health.FAILED
    finding = judged(rank(bad_chunks=3))
    assert (finding.health, finding.action) == (Health.FAILED, Action.REPAIR)
    assert "3 of 257 chunks differ" in finding.reason


def test_a_model_that_was_loaded_damaged_is_failed() -> None:
    """Bytes that are as they were, of values that were bad already: nothing to repair from."""
    finding = judged(rank(suspicions=["3 of 9 values of lm_head.weight are not finite.", "2 of 4 others."]))
    assert (finding.health, finding.action, finding.bad_chunks) == (Health.FAILED, Action.INVESTIGATE, 0)
    assert "bad when the baseline was taken: rank 0: 3 of 9 values of lm_head.weight are not finite (and 1 more)" in (
        finding.reason
    )


def test_replaced_tensors_are_unknown() -> None:
    """A tensor that nobody serves from any more proves nothing about the one that took its place."""
    finding = judged(rank(replaced=["lm_head.weight"]))
    assert (finding.health, finding.action) == (Health.UNKNOWN, Action.INVESTIGATE)
    assert "1 tensor was replaced since the baseline of 2026" in finding.reason
    assert "lm_head.weight of rank 0" in finding.reason


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([900_000], "900.0 kB of 270.0 MB are not covered, first w0 of rank 0: packed"),
        ([900_000, None], "900.0 kB of 270.0 MB and 1 tensor of unknown size are not covered"),
        ([None], "Beside the 269.1 MB that are covered, 1 tensor of unknown size is not covered"),
    ],
)
def test_an_uncovered_tensor_is_never_healthy(sizes: list[int | None], words: str) -> None:
    """How many bytes of how many, the first tensor, and why."""
    missing = [NotCovered(tensor=f"w{at}", bytes=count, reason="packed.") for at, count in enumerate(sizes)]
    finding = judged(rank(not_covered=missing))
    assert (finding.health, finding.action) == (Health.UNKNOWN, Action.INVESTIGATE)
    assert finding.reason.startswith(words)
    assert finding.not_covered == missing


def test_a_bad_chunk_outweighs_what_is_not_covered_and_both_are_said() -> None:
    """Failed is worse than unknown, and the gap stays visible."""
    missing = [NotCovered(tensor="w", bytes=10, reason="packed")]
    finding = judged(rank(bad=[bad()], not_covered=missing))
    assert finding.health is Health.FAILED
    assert "10 bytes of 269.1 MB are not covered" in finding.reason


def test_nothing_is_unknown() -> None:
    """No rank, or a rank that holds nothing, is no proof of health."""
    assert (judged().health, judged().reason) == (Health.UNKNOWN, "No rank answered: nothing was compared")
    empty = judged(rank(), rank(1, chunks=0, covered_bytes=0))
    assert (empty.health, empty.reason) == (Health.UNKNOWN, "Rank 1 holds no bytes to compare")


def test_a_baseline_of_a_bad_checkpoint_is_failed() -> None:
    """Clean against a baseline that was recorded from wrong bytes is not ok."""
    wrong = judged(rank(), provenance=verdict(problems=("model.safetensors is not in the manifest.",)))
    assert (wrong.health, wrong.action, wrong.bad_chunks) == (Health.FAILED, Action.INVESTIGATE, 0)
    assert wrong.reason == (
        "The checkpoint was checked at 2026-09-21 14:14:20 UTC: model.safetensors is not in the manifest"
    )
    other = judged(rank(), provenance=verdict(different=("2 of 9 values of lm_head.weight differ.",)))
    assert other.health is Health.FAILED
    assert "rank 0: 2 of 9 values of lm_head.weight differ" in other.reason


def test_a_good_checkpoint_is_said_and_one_that_proves_nothing_is_not() -> None:
    """Only a comparison of some tensors without a difference counts as verified."""
    assert judged(rank(), provenance=verdict()).reason.endswith(
        "at 2026-09-21 14:14:20 UTC 272 tensors were those of the checkpoint, whose files are those of the manifest"
    )
    assert judged(rank(), provenance=verdict(manifest=None)).reason.endswith("were those of the checkpoint")
    nothing = verdict(equal=0)
    assert not nothing.verified
    assert "checkpoint" not in judged(rank(), provenance=nothing).reason
    assert verdict(manifest=None).sentence == (
        "1 file (2.0 MB) not checked against anything; 272 tensors in memory as in the checkpoint, 0 not comparable"
    )


def test_a_finding_survives_json() -> None:
    """What the store keeps is what was found."""
    finding = judged(rank(bad=[bad()], not_covered=[NotCovered(tensor="w", bytes=None, reason="packed")]))
    assert FingerprintFinding.model_validate_json(finding.model_dump_json()) == finding


def test_sizes_are_for_people() -> None:
    """Decimal units, one digit."""
    assert [size(count) for count in (0, 999, 1000, 2_500_000, 7 * 10**9)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "2.5 MB",
        "7.0 GB",
    ]
