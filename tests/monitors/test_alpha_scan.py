"""The measuring half of the alpha-scan, on a fake model: a small random residual MLP with causal mixing."""

from collections.abc import Generator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flipwatch.monitors.alpha_scan import FULL_GRID, QUICK_GRID, AlphaScan, AlphaScanPlan, AlphaScanReading
from flipwatch.monitors.monitor import ModelView
from flipwatch.monitors.table import MONITORS

VOCAB, WIDTH = 17, 8


@dataclass
class FakeModel:
    """A fake ModelView in float64: block l adds tanh(mean of the past @ W_l)."""

    num_blocks: int = 5
    gates: list[float] = field(default_factory=list)
    calls: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        make = torch.Generator().manual_seed(3)
        self.gates = self.gates or [1.0] * self.num_blocks
        self.table = torch.randn(VOCAB, WIDTH, generator=make, dtype=torch.float64)
        self.weights = torch.randn(self.num_blocks, WIDTH, WIDTH, generator=make, dtype=torch.float64)
        self.head = torch.randn(WIDTH, VOCAB, generator=make, dtype=torch.float64)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        self.calls.append((index, hidden.shape[0], hidden.shape[1]))
        assert hidden.shape[0] % tokens.shape[0] == 0
        past = hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[None, :, None]
        out = hidden + torch.tanh(past @ self.weights[index])
        gate = self.gates[index]
        return hidden if gate == 0.0 else hidden + gate * (out - hidden)

    def nats(self, hidden: Tensor, tokens: Tensor, scored: Tensor) -> Tensor:
        copies = hidden.shape[0] // tokens.shape[0]
        logits = (hidden @ self.head)[:, :-1].transpose(1, 2)
        losses = functional.cross_entropy(logits, tokens.repeat(copies, 1)[:, 1:], reduction="none")
        mask = scored.repeat(copies, 1)[:, 1:]
        return (losses * mask).sum(1) / mask.sum(1)


def plan(alphas: tuple[float, ...] = QUICK_GRID, tokens_per_step: int = 30) -> AlphaScanPlan:
    """Five sequences of different lengths, not sorted."""
    make = torch.Generator().manual_seed(5)
    lengths = [4, 7, 3, 7, 5]
    return AlphaScanPlan(
        alphas=list(alphas),
        tokens=[torch.randint(VOCAB, (n,), generator=make).tolist() for n in lengths],
        scored_from=[1, 3, 2, 1, 4],
        tokens_per_step=tokens_per_step,
    )


def drain(steps: Generator[None, None, AlphaScanReading]) -> tuple[AlphaScanReading, int]:
    """The reading and the number of yields."""
    readings = []

    def caught() -> Generator[None, None, None]:
        readings.append((yield from steps))

    count = sum(1 for _ in caught())
    return readings[0], count


def naive(model: FakeModel, row: list[int], first: int, block: int | None, alpha: float) -> float:
    """Loss of one sequence by a full pass of its own, block `block` scaled by `alpha`."""
    tokens = torch.tensor([row])
    scored = torch.arange(len(row))[None, :] >= first
    h = model.embed(tokens)
    for index in range(model.num_blocks):
        out = model.block(index, h, tokens)
        h = h + alpha * (out - h) if index == block else out
    return float(model.nats(h, tokens, scored))


def test_prefix_sharing_equals_naive_full_passes() -> None:
    """Every loss of a shared, padded, batched scan equals a full pass of its own to 1e-6."""
    model, order = FakeModel(), plan(FULL_GRID)
    reading, _ = drain(AlphaScan().measure(model, order))
    rows = list(zip(order.tokens, order.scored_from, strict=True))
    assert reading.base_nats == pytest.approx([naive(model, r, f, None, 1.0) for r, f in rows], abs=1e-6)
    for block in range(model.num_blocks):
        for a, alpha in enumerate(FULL_GRID):
            expected = [naive(model, r, f, block, alpha) for r, f in rows]
            assert reading.nats[block][a] == pytest.approx(expected, abs=1e-6)
    assert reading.scored_tokens == [3, 4, 1, 6, 1]


@pytest.mark.parametrize("grid", [(), (0.0,), QUICK_GRID, FULL_GRID])
@pytest.mark.parametrize("tokens_per_step", [1, 30, 10_000])
def test_steps_are_exact(grid: tuple[float, ...], tokens_per_step: int) -> None:
    """The number of yields is what `steps` says, for any grid and chunk size."""
    model, order = FakeModel(), plan(grid, tokens_per_step)
    _, count = drain(AlphaScan().measure(model, order))
    assert count == AlphaScan().steps(order, model.num_blocks)


def test_at_most_one_block_call_per_step() -> None:
    """No unit holds the engine for more than one block call."""
    model = FakeModel()
    done = 0
    for _ in AlphaScan().measure(model, plan()):
        assert len(model.calls) - done <= 1
        done = len(model.calls)


def test_chunk_size_changes_nothing() -> None:
    """One sequence at a time and all at once give the same losses in the same order."""
    one, _ = drain(AlphaScan().measure(FakeModel(), plan(tokens_per_step=1)))
    everything, _ = drain(AlphaScan().measure(FakeModel(), plan(tokens_per_step=10_000)))
    assert one.base_nats == pytest.approx(everything.base_nats, abs=1e-9)
    for mine, theirs in zip(one.nats, everything.nats, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert x == pytest.approx(y, abs=1e-6)


def test_chunks_keep_to_their_size() -> None:
    """No block call holds more than `tokens_per_step` tokens when a sequence fits."""
    model = FakeModel()
    drain(AlphaScan().measure(model, plan(tokens_per_step=42)))
    assert max(rows * width for _, rows, width in model.calls) == 42


@pytest.mark.parametrize("part", [1, 3, 1000])
def test_parts_of_any_length_give_the_same_reading(part: int) -> None:
    """A scan advanced in parts, with the model serving others in between, reads the same numbers."""
    whole, _ = drain(AlphaScan().measure(FakeModel(), plan()))
    model = FakeModel()
    steps = AlphaScan().measure(model, plan())
    reading = None
    while reading is None:
        for _ in range(part):
            try:
                next(steps)
            except StopIteration as end:
                reading = end.value
                break
        model.block(0, model.embed(torch.zeros(2, 9, dtype=torch.long)), torch.zeros(2, 9, dtype=torch.long))
    assert reading == whole


def test_passes_follow_the_formula() -> None:
    """For sequences of one length the cost is 2 + |A| * (L - 1) / 2 passes; for no grid it is 1."""
    rows = [[1, 2, 3, 4]] * 3
    order = AlphaScanPlan(alphas=list(QUICK_GRID), tokens=rows, scored_from=[1, 1, 1])
    reading, _ = drain(AlphaScan().measure(FakeModel(), order))
    assert reading.passes == pytest.approx(2 + 3 * (5 - 1) / 2)
    base, _ = drain(AlphaScan().measure(FakeModel(), AlphaScanPlan(alphas=[], tokens=rows, scored_from=[1, 1, 1])))
    assert base.passes == pytest.approx(1.0)
    assert base.nats == [[]] * 5


def test_two_nonfinite_blocks_are_named_in_one_pass() -> None:
    """NaN in one block and Inf in another: both named, no curves, the base losses are None."""
    model = FakeModel()
    model.weights[1, 0, 0] = torch.nan
    model.weights[3] = torch.inf
    reading, count = drain(AlphaScan().measure(model, plan()))
    assert reading.nonfinite_blocks == [1, 3]
    assert reading.base_nats == [None] * 5
    assert reading.nats == [[]] * 5
    assert reading.passes < 2
    assert count < AlphaScan().steps(plan(), 5)
    assert AlphaScan().judge(reading).flagged == (1, 3)


def test_nan_that_one_sequence_meets_leaves_the_others_finite() -> None:
    """A block that fails on one token only: it is named, and the other sequences keep their base loss."""

    class Picky(FakeModel):
        def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
            out = super().block(index, hidden, tokens)
            return torch.where((tokens == 16)[:, :, None], torch.nan, out) if index == 2 else out

    order = AlphaScanPlan(alphas=[0.0], tokens=[[1, 2, 3], [1, 16, 3], [4, 5, 6, 7]], scored_from=[1, 1, 1])
    reading, _ = drain(AlphaScan().measure(Picky(), order))
    assert reading.nonfinite_blocks == [2]
    assert [loss is None for loss in reading.base_nats] == [False, True, False]


def test_broken_embedding_blames_no_block() -> None:
    """A stream that is not finite before the first block has no culprit among the blocks."""
    model = FakeModel()
    model.table[:] = torch.nan
    reading, _ = drain(AlphaScan().measure(model, plan()))
    assert reading.nonfinite_blocks == []
    assert reading.base_nats == [None] * 5
    assert AlphaScan().judge(reading).health == "failed"


def test_overflow_behind_the_blocks_names_the_block_to_leave_out() -> None:
    """Every block's output is finite but the loss is not: only leaving block 2 out makes it finite."""

    class Overflowing(FakeModel):
        def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
            out = super().block(index, hidden, tokens)
            return out + 1e30 if index == 2 else out

        def nats(self, hidden: Tensor, tokens: Tensor, scored: Tensor) -> Tensor:
            losses = super().nats(hidden, tokens, scored)
            return torch.where(hidden.abs().amax((1, 2)) > 1e20, torch.nan, losses)

    reading, _ = drain(AlphaScan().measure(Overflowing(), plan()))
    assert reading.base_nats == [None] * 5
    assert AlphaScan().judge(reading).flagged == (2,)


def test_gated_blocks_run_as_served_and_are_not_scanned() -> None:
    """A skipped and a damped block have no curve; the others' losses are those of the gated model."""
    gates = [1.0, 0.0, 1.0, 0.5, 1.0]
    model, order = FakeModel(gates=gates), plan()
    reading, _ = drain(AlphaScan().measure(model, order))
    assert reading.gates == gates
    assert [bool(rows) for rows in reading.nats] == [True, False, True, False, True]
    rows = list(zip(order.tokens, order.scored_from, strict=True))
    assert reading.base_nats == pytest.approx([naive(model, r, f, None, 1.0) for r, f in rows], abs=1e-6)
    assert reading.nats[2][1] == pytest.approx([naive(model, r, f, 2, 0.7) for r, f in rows], abs=1e-6)


def test_skip_masks_an_infinite_contribution() -> None:
    """Alpha 0 takes the stream in front of the block, it never multiplies 0 by Inf."""

    class Late(FakeModel):
        """Block 2 is finite in the base pass and overflows in the scan pass."""

        def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
            out = super().block(index, hidden, tokens)
            calls = sum(1 for called, _, _ in self.calls if called == 2)
            return torch.full_like(out, torch.inf) if index == 2 and calls == 2 else out

    order = AlphaScanPlan(alphas=list(QUICK_GRID), tokens=[[1, 2, 3]], scored_from=[1])
    gates = [0.5, 0.5, 1.0]
    sound, _ = drain(AlphaScan().measure(FakeModel(3, gates), order))
    reading, _ = drain(AlphaScan().measure(Late(3, gates), order))
    assert reading.nats[2][0] == sound.nats[2][0]
    assert reading.nats[2][1:] == [[None], [None]]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [], "scored_from": []},
        {"tokens": [[1, 2]], "scored_from": [0]},
        {"tokens": [[1, 2]], "scored_from": [2]},
        {"tokens": [[1]], "scored_from": [1]},
        {"tokens": [[1, 2], [1, 2]], "scored_from": [1]},
        {"alphas": [1.0]},
        {"alphas": [0.5, 0.5]},
        {"alphas": [-0.5]},
        {"alphas": [float("nan")]},
        {"tokens_per_step": 0},
    ],
)
def test_bad_plans_are_refused(change: dict[str, object]) -> None:
    """A plan that cannot be measured never reaches the engine."""
    good: dict[str, object] = {"alphas": [0.0], "tokens": [[1, 2]], "scored_from": [1]}
    AlphaScanPlan.model_validate(good)
    with pytest.raises(ValueError, match=r"tokens|alphas|scored_from"):
        AlphaScanPlan.model_validate(good | change)


def test_plan_and_reading_survive_json() -> None:
    """Both cross the process border unchanged."""
    order = plan()
    assert AlphaScanPlan.model_validate_json(order.model_dump_json()) == order
    reading, _ = drain(AlphaScan().measure(FakeModel(), order))
    assert AlphaScanReading.model_validate_json(reading.model_dump_json()) == reading


def test_table_lists_the_scan() -> None:
    """The scan is found by its name, and the fake has the shape of a view."""
    view: ModelView = FakeModel()
    assert view.num_blocks == 5
    assert MONITORS["alpha_scan"] is AlphaScan
