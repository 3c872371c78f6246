"""Sealed weights: what changed is seen, named and put back, or said to be beyond repair."""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flipwatch.monitors.faults import FaultKind, FaultSpec, inject
from flipwatch.monitors.fingerprint.facts import NotCovered, ParityPlace, Rank, RankReading
from flipwatch.monitors.fingerprint.line import Line, Source
from flipwatch.monitors.fingerprint.parity import FileParity, MemoryParity, Parity
from flipwatch.monitors.fingerprint.sealed import SealedWeights, Unrepairable

CHUNK = 1024
SPECS = {
    FaultKind.BIT: FaultSpec(kind=FaultKind.BIT, count=3, seed=1),
    FaultKind.BURST: FaultSpec(kind=FaultKind.BURST, seed=2),
    FaultKind.NEIGHBOURS: FaultSpec(kind=FaultKind.NEIGHBOURS, seed=3),
    FaultKind.NAN: FaultSpec(kind=FaultKind.NAN, seed=4),
    FaultKind.INF: FaultSpec(kind=FaultKind.INF, seed=5),
    FaultKind.ZEROS: FaultSpec(kind=FaultKind.ZEROS, seed=6),
    FaultKind.STALE: FaultSpec(kind=FaultKind.STALE, seed=7),
    FaultKind.SWAP: FaultSpec(kind=FaultKind.SWAP, seed=8),
    FaultKind.SIGN: FaultSpec(kind=FaultKind.SIGN, seed=9),
    FaultKind.SCALE: FaultSpec(kind=FaultKind.SCALE, seed=0),
    FaultKind.LOST: FaultSpec(kind=FaultKind.LOST),
    FaultKind.FLIPS: FaultSpec(kind=FaultKind.FLIPS, flips=[(3, 0), (3, 15), (9, 7)]),
}


class Files:
    """Parity files that a test made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.made: list[FileParity] = []

    def __call__(self) -> FileParity:
        self.made.append(FileParity(self._folder, CHUNK))
        return self.made[-1]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    """Makes parity files and closes them."""
    made = Files(tmp_path)
    yield made
    for parity in made.made:
        parity.close()


def model(dtype: torch.dtype = torch.bfloat16) -> list[Source]:
    """Twelve tensors: a chunk each of half of them, the others small and together in one chunk or over two."""
    torch.manual_seed(0)
    wide = [torch.nn.Parameter(torch.randn(16, 32).to(dtype)) for _ in range(6)]
    small = [torch.randn(50).to(dtype) for _ in range(6)]
    return [Source(f"blocks.{at}.weight", at, tensor) for at, tensor in enumerate(wide)] + [
        Source(f"table.{at}", None, tensor) for at, tensor in enumerate(small)
    ]


def sealed(sources: list[Source], *, group: int = 4, parity: Callable[[], Parity] = MemoryParity) -> SealedWeights:
    """Their baseline."""
    made = SealedWeights(
        Line(sources, CHUNK), Rank(rank=0), device=torch.device("cpu"), group=group, new_parity=parity, now=lambda: 5.0
    )
    run(made.record())
    return made


def run(steps: Generator[None, None, Any]) -> Any:
    """All steps; what the work returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def swept(weights: SealedWeights, steps: int = 1) -> RankReading:
    """The reading of a whole sweep."""
    return run(weights.sweep(steps))  # type: ignore[no-any-return]


def snapshot(sources: list[Source]) -> list[bytes]:
    """All bytes of now."""
    return [bytes(source.tensor.detach().view(torch.uint8).numpy().tobytes()) for source in sources]


def test_a_healthy_model_has_no_changed_chunk() -> None:
    """However the sweep is cut."""
    weights = sealed(model())
    for steps in (1, 3, 8, 50):
        reading = swept(weights, steps)
        assert (reading.chunks, reading.bad_chunks, reading.bad) == (7, 0, [])
        assert reading.recorded_at == 5.0
    assert sum(1 for _ in weights.sweep(50)) == 50


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parity", ["memory", "file"])
def test_what_one_chunk_holds_is_put_back_bit_for_bit(
    kind: FaultKind, dtype: torch.dtype, parity: str, files: Files
) -> None:
    """Every kind of fault, in a chunk of its own."""
    sources = model(dtype)
    before = snapshot(sources)
    weights = sealed(sources, parity=MemoryParity if parity == "memory" else files)
    inject(SPECS[kind], sources[2].tensor, sources[3].tensor if kind is FaultKind.STALE else None)
    damaged = snapshot(sources)
    reading = swept(weights)
    assert [bad.chunk for bad in reading.bad] == [2]
    assert [(piece.tensor, piece.block) for piece in reading.bad[0].pieces] == [("blocks.2.weight", 2)]
    assert reading.bad[0].diagnoses[0].tensor == "blocks.2.weight"
    assert snapshot(sources) == damaged, "looking has changed something"
    weights.put_right(2, weights.rebuilt(2))
    assert snapshot(sources) == before
    assert swept(weights).bad_chunks == 0


def test_the_flipped_bit_is_named() -> None:
    """Element and bit, in a chunk that small tensors share."""
    sources = model()
    weights = sealed(sources)
    inject(FaultSpec(kind=FaultKind.FLIPS, flips=[(17, 14)]), sources[8].tensor)
    (bad,) = swept(weights).bad
    assert [piece.tensor for piece in bad.pieces] == ["table.2"]
    (diagnosis,) = bad.diagnoses
    assert (diagnosis.changes[0].element, diagnosis.changes[0].bits) == ([17], [14])


def test_two_bad_chunks_of_one_group_are_beyond_parity() -> None:
    """Each names the other, and nothing is written; put one right from elsewhere and the other follows."""
    sources = model()
    before = snapshot(sources)
    weights = sealed(sources)
    # Two groups: chunks 0, 2, 4, 6 and 1, 3, 5.
    undo = inject(FaultSpec(kind=FaultKind.ZEROS), sources[0].tensor)
    inject(FaultSpec(kind=FaultKind.BURST), sources[4].tensor)
    inject(FaultSpec(kind=FaultKind.BURST), sources[3].tensor)
    damaged = snapshot(sources)
    bad = {chunk.chunk: chunk for chunk in swept(weights).bad}
    assert set(bad) == {0, 3, 4}
    assert "chunk 4 of the same group 0 changed too" in str(bad[0].unrepairable)
    assert "chunk 0 of the same group 0 changed too" in str(bad[4].unrepairable)
    assert bad[3].unrepairable is None
    with pytest.raises(Unrepairable, match="changed too"):
        weights.rebuilt(0)
    assert snapshot(sources) == damaged
    undo()
    for chunk in (3, 4):
        weights.put_right(chunk, weights.rebuilt(chunk))
    assert snapshot(sources) == before


def test_wrong_bytes_are_never_written() -> None:
    """What does not have the baseline's digest is refused before the write."""
    sources = model()
    weights = sealed(sources)
    inject(SPECS[FaultKind.BURST], sources[2].tensor)
    damaged = snapshot(sources)
    with pytest.raises(Unrepairable, match="not those of the baseline"):
        weights.put_right(2, torch.zeros(CHUNK, dtype=torch.uint8))
    assert snapshot(sources) == damaged


def test_damaged_parity_is_noticed(files: Files) -> None:
    """A parity file that lost bytes or was overwritten gives no bytes back, and says so."""
    sources = model()
    weights = sealed(sources, parity=files)
    inject(SPECS[FaultKind.BURST], sources[2].tensor)
    files.made[0].put(0, torch.zeros(CHUNK, dtype=torch.uint8))
    (bad,) = swept(weights).bad
    assert bad.unrepairable == "The parity of group 0 is damaged itself."
    files.made[0]._file.truncate(10)
    (bad,) = swept(weights).bad
    assert bad.unrepairable == "The parity file ends before group 0."
    assert bad.diagnoses == []


def test_without_parity_damage_is_seen_all_the_same() -> None:
    """The digests need none."""
    sources = model()
    weights = sealed(sources, group=0)
    assert (weights.facts().parity, weights.facts().parity_bytes) == (ParityPlace.NONE, 0)
    inject(SPECS[FaultKind.BURST], sources[2].tensor)
    (bad,) = swept(weights).bad
    assert bad.unrepairable == "No parity is kept."


def test_parity_is_a_share_of_the_weights() -> None:
    """One chunk for each group."""
    facts = sealed(model(), group=7).facts()
    assert (facts.chunks, facts.parity_groups, facts.parity_bytes) == (7, 1, CHUNK)


def test_a_new_baseline_counts_what_differs_and_approves_it() -> None:
    """An announced change is no mismatch afterwards, and parity follows; until its last step the old one counts."""
    sources = model()
    weights = sealed(sources)
    inject(SPECS[FaultKind.BURST], sources[2].tensor)
    changed = snapshot(sources)
    steps = weights.record(20)
    for _ in range(20):
        next(steps)
    assert swept(weights).bad_chunks == 1
    assert run(steps) == 1
    assert swept(weights).bad_chunks == 0
    inject(SPECS[FaultKind.ZEROS], sources[2].tensor)
    weights.put_right(2, weights.rebuilt(2))
    assert snapshot(sources) == changed


def test_a_baseline_of_absurd_values_says_so() -> None:
    """NaN, Inf and values that no trained weight has are named, with the tensor; buffers may hold anything."""
    sources = model()
    inject(SPECS[FaultKind.NAN], sources[2].tensor)
    with torch.no_grad():
        sources[4].tensor[0, 0] = 50_000.0
    sources[7].tensor[0] = torch.inf
    assert swept(sealed(sources)).suspicions == [
        "18 of 512 values of blocks.2.weight are not finite, or beyond 16384.",
        "1 of 512 values of blocks.4.weight are not finite, or beyond 16384.",
    ]


def test_what_is_not_covered_and_what_was_replaced_is_handed_on() -> None:
    """The reading carries both, so that nobody takes silence for health."""
    missing = NotCovered(tensor="packed", bytes=10, reason="It is packed.")
    weights = SealedWeights(
        Line(model(), CHUNK),
        Rank(rank=1),
        device=torch.device("cpu"),
        not_covered=[missing],
        replaced=lambda: ["table.0"],
        group=4,
        new_parity=MemoryParity,
    )
    run(weights.record())
    reading = swept(weights)
    assert (reading.not_covered, reading.replaced) == ([missing], ["table.0"])


def test_what_is_behind_the_first_chunks_is_not_called_repairable() -> None:
    """With everything lost, parity can do nothing, and no chunk that is only listed says otherwise."""
    tensor = torch.randn(20, CHUNK // 4)
    weights = sealed([Source("weight", 0, tensor)])
    tensor.zero_()
    bad = swept(weights).bad
    assert len(bad) == 20
    assert all(chunk.unrepairable is not None for chunk in bad)
    assert bad[-1].unrepairable == "4 chunks of its group 4 have changed, and parity gives one back."
    without = sealed([Source("weight", 0, tensor)], group=0)
    tensor.fill_(1.0)
    assert {chunk.unrepairable for chunk in swept(without).bad} == {"No parity is kept."}


def test_what_is_behind_the_first_chunks_is_repairable_where_it_is_alone_in_its_group() -> None:
    """A chunk in each of ten groups: parity can put all of them right, also those that are not diagnosed."""
    tensor = torch.randn(20, CHUNK // 4)
    weights = sealed([Source("weight", 0, tensor)], group=2)
    tensor[:10] = 0.0
    assert [chunk.unrepairable for chunk in swept(weights).bad] == [None] * 10


@pytest.mark.parametrize("shape", ["padded", "repeated"])
def test_a_tensor_with_gaps_is_named_byte_by_byte(shape: str) -> None:
    """A change in one whose elements do not fill its memory is found and put back, and the sweep goes on."""
    whole = torch.randn(8, 40)
    tensor = whole[:, :32] if shape == "padded" else whole[0, :32].expand(8, 32)
    weights = sealed([Source("weight", 0, tensor), *model()])
    right = tensor.clone()
    whole.view(torch.uint8)[0, 5] ^= 4
    (bad,) = swept(weights).bad
    (diagnosis,) = bad.diagnoses
    assert (diagnosis.tensor, diagnosis.dtype, diagnosis.first) == ("weight", "uint8", [5])
    assert diagnosis.changes[0].bits == [2]
    weights.put_right(bad.chunk, weights.rebuilt(bad.chunk))
    assert torch.equal(tensor, right)


def test_packed_floats_get_a_baseline() -> None:
    """Torch has no arithmetic for packs of 4-bit floats: nothing is said of their values."""
    tensor = torch.randint(256, (CHUNK,), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    weights = sealed([Source("weight", 0, torch.nn.Parameter(tensor, requires_grad=False))])
    assert swept(weights).suspicions == []
    tensor.view(torch.uint8)[7] ^= 1
    assert swept(weights).bad_chunks == 1


@pytest.mark.parametrize("parity", ["memory", "file"])
def test_a_baseline_that_was_wrong_is_corrected(parity: str, files: Files) -> None:
    """Damage that is older than the baseline: corrected, it is seen, and parity gives the right bytes."""
    sources = model()
    right = snapshot(sources)
    inject(SPECS[FaultKind.BURST], sources[2].tensor)
    weights = sealed(sources, parity=MemoryParity if parity == "memory" else files)
    damaged = snapshot(sources)
    assert swept(weights).bad_chunks == 0
    weights.correct("blocks.2.weight", {2: torch.frombuffer(bytearray(right[2]), dtype=torch.uint8)})
    assert snapshot(sources) == damaged, "correcting has changed something"
    (bad,) = swept(weights).bad
    assert (bad.chunk, bad.unrepairable, bad.diagnoses[0].tensor) == (2, None, "blocks.2.weight")
    weights.put_right(2, weights.rebuilt(2))
    assert snapshot(sources) == right
    assert swept(weights).bad_chunks == 0


def test_a_correction_beside_a_later_fault_keeps_both() -> None:
    """The group has another chunk that has changed since: its baseline comes from parity, and both can be put right."""
    sources = model()
    right = snapshot(sources)
    inject(SPECS[FaultKind.BURST], sources[1].tensor)
    weights = sealed(sources)
    groups = weights.groups
    (other,) = [chunk for chunk in range(weights.line.num_chunks) if chunk != 1 and chunk % groups == 1 % groups][:1]
    weights.line.write(other, weights.line.read(other) ^ 1)
    weights.correct("blocks.1.weight", {1: torch.frombuffer(bytearray(right[1]), dtype=torch.uint8)})
    assert [bad.chunk for bad in swept(weights).bad] == [1, other]
    weights.put_right(1, torch.frombuffer(bytearray(right[1]), dtype=torch.uint8))
    weights.put_right(other, weights.rebuilt(other))
    assert snapshot(sources) == right


def test_a_correction_that_parity_does_not_allow_changes_nothing() -> None:
    """Two chunks of the group have changed: their baseline is lost, so the new parity cannot be told."""
    sources = model()
    weights = sealed(sources)
    groups = weights.groups
    same = [chunk for chunk in range(weights.line.num_chunks) if chunk % groups == 1 % groups]
    for chunk in same[1:3]:
        weights.line.write(chunk, weights.line.read(chunk) ^ 1)
    before = weights.line.read(1)
    with pytest.raises(Unrepairable):
        # Chunk 2 lies in another group, which could be told.
        weights.correct("blocks.1.weight", {2: weights.line.read(2) ^ 1, 1: before ^ 1})
    assert weights.is_intact(1)
    assert weights.is_intact(2)
    assert swept(weights).bad_chunks == len(same[1:3])


def test_a_corrected_tensor_is_not_suspected_any_more() -> None:
    """Values that were no numbers when the baseline was taken: with the right ones in their place all is well."""
    sources = model()
    right = snapshot(sources)
    inject(SPECS[FaultKind.NAN], sources[2].tensor)
    weights = sealed(sources)
    assert weights.facts().suspicions
    weights.correct("blocks.2.weight", {2: torch.frombuffer(bytearray(right[2]), dtype=torch.uint8)})
    weights.put_right(2, weights.rebuilt(2))
    assert snapshot(sources) == right
    assert (swept(weights).suspicions, weights.facts().suspicions) == ([], [])
