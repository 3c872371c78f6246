"""Repair of chunks without vLLM around it: what is written, what is refused, and what is put back.

The checkpoint and vLLM's loaders are stand-ins here; test_integrity.py and test_reload.py have the real ones.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flipwatch.monitors.faults import FaultKind, FaultSpec, inject
from flipwatch.monitors.fingerprint.facts import ChunkRepair, Method, Rank
from flipwatch.monitors.fingerprint.line import Line
from flipwatch.monitors.fingerprint.parity import MemoryParity
from flipwatch.monitors.fingerprint.sealed import SealedWeights
from flipwatch.probe import integrity
from flipwatch.probe.checkpoint import CheckpointUnusable
from flipwatch.probe.stack import Stack
from flipwatch.probe.weights import weights_of

CHUNK = 4096
MOVED = "The checkpoint was moved."


class Bench:
    """Four layers of a chunk each in two groups of parity, with a copy of what is right."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self._patch = monkeypatch
        self.model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
        weights = weights_of(self.model, Stack({}, 0, ""), torch.device("cpu"))
        self.sealed = SealedWeights(
            Line(weights.sources, CHUNK), Rank(rank=0), device=weights.device, group=2, new_parity=MemoryParity
        )
        with torch.inference_mode():
            for _ in self.sealed.record():
                pass
        self.right = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        self.checkpoint(lambda names: _unusable())
        self.reload(lambda module: _unusable())

    def checkpoint(self, fresh: Callable[[list[str]], dict[str, Tensor]]) -> None:
        """What the checkpoint has for these names."""
        self._patch.setattr(integrity, "fresh_tensors", lambda model, config, stack, names: fresh(names))

    def reload(self, act: Callable[[str], None]) -> None:
        """What making a module anew does."""
        self._patch.setattr(integrity, "reload_module", lambda model, config, module: act(module))

    def damage(self, *layers: int) -> None:
        """A burst in each."""
        for layer in layers:
            inject(FaultSpec(kind=FaultKind.BURST, seed=layer), self.model[layer].weight)

    def repair(self, *chunks: int) -> list[ChunkRepair]:
        """Put them right."""
        return integrity.Repair(self.sealed, self.model, Stack({}, 0, ""), None, chunks).run()

    def wrong(self) -> list[int]:
        """Layers whose bytes are not the right ones."""
        return [layer for layer in range(4) if not torch.equal(self.model[layer].weight, self.right[f"{layer}.weight"])]


def _unusable() -> dict[str, Tensor]:
    raise CheckpointUnusable(MOVED)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Fresh for each test, with a checkpoint that was moved away."""
    return Bench(monkeypatch)


def test_one_chunk_of_each_group_needs_no_checkpoint(bench: Bench) -> None:
    """Parity gives both back."""
    bench.damage(0, 1)
    assert [(done.intact, done.method) for done in bench.repair(0, 1)] == [(True, Method.PARITY)] * 2
    assert bench.wrong() == []


def test_two_of_a_group_stay_as_they_are_without_a_checkpoint(bench: Bench) -> None:
    """All reasons are said, and no byte is written; the third one is repaired all the same."""
    bench.damage(0, 2, 3)
    damaged = [layer.weight.detach().clone() for layer in bench.model]
    one, other, third = bench.repair(0, 2, 3)
    assert "chunk 2 of the same group 0 changed too" in str(one.reason)
    assert MOVED in str(one.reason)
    assert not one.intact
    assert not other.intact
    assert third.intact
    assert bench.wrong() == [0, 2]
    assert torch.equal(bench.model[0].weight, damaged[0])
    assert torch.equal(bench.model[2].weight, damaged[2])


def test_one_from_the_checkpoint_and_the_other_follows(bench: Bench) -> None:
    """With a part of the checkpoint the first comes from it; then parity has what it needs, whatever the order."""
    bench.damage(0, 2)
    bench.checkpoint(lambda names: {"2.weight": bench.right["2.weight"]})
    one, other = bench.repair(0, 2)
    assert (one.intact, one.method) == (True, Method.PARITY)
    assert (other.intact, other.method) == (True, Method.CHECKPOINT)
    assert [diagnosis.tensor for diagnosis in other.diagnoses] == ["2.weight"]
    assert bench.wrong() == []


def test_another_checkpoint_is_refused(bench: Bench) -> None:
    """Bytes that are not the baseline's are never written, from whatever file they come."""
    bench.damage(0, 2)
    damaged = [layer.weight.detach().clone() for layer in bench.model]
    bench.checkpoint(lambda names: {name: bench.right[name] + 1 for name in names})
    for done in bench.repair(0, 2):
        assert not done.intact
        assert "are not those of the baseline" in str(done.reason)
    assert all(torch.equal(layer.weight, was) for layer, was in zip(bench.model, damaged, strict=True))


def test_a_module_made_anew_wrongly_is_put_back(bench: Bench) -> None:
    """Where only a reload in place is left, what it spoils is put back as it was."""
    bench.damage(0, 2)
    damaged = [layer.weight.detach().clone() for layer in bench.model]

    def spoil(module: str) -> None:
        with torch.no_grad():
            bench.model.get_submodule(module).weight.fill_(3.0)

    bench.reload(spoil)
    assert not any(done.intact for done in bench.repair(0, 2))
    assert all(torch.equal(layer.weight, was) for layer, was in zip(bench.model, damaged, strict=True))

    def fail(module: str) -> None:
        spoil(module)
        raise RuntimeError("half-way")

    bench.reload(fail)
    assert "RuntimeError: half-way" in str(bench.repair(0, 2)[0].reason)
    assert all(torch.equal(layer.weight, was) for layer, was in zip(bench.model, damaged, strict=True))


def test_a_module_made_anew_rightly_counts(bench: Bench) -> None:
    """For layouts that no loader writes, the reload in place is the way."""
    bench.damage(0, 2)

    def remake(module: str) -> None:
        with torch.no_grad():
            bench.model.get_submodule(module).weight.copy_(bench.right[f"{module}.weight"])

    bench.reload(remake)
    assert [done.intact for done in bench.repair(0, 2)] == [True, True]
    assert bench.wrong() == []


def test_a_fault_that_comes_during_the_repair(bench: Bench) -> None:
    """The chunk that is repaired comes out right; the new damage is no part of it and is seen by the next sweep."""
    bench.damage(0, 2)

    def fresh(names: list[str]) -> dict[str, Tensor]:
        bench.damage(3)
        return bench.right

    bench.checkpoint(fresh)
    assert all(done.intact for done in bench.repair(0, 2))
    assert bench.wrong() == [3]
    sweep = bench.sealed.sweep()
    next(sweep)
    with pytest.raises(StopIteration) as end:
        next(sweep)
    assert [bad.chunk for bad in end.value.value.bad] == [3]


def test_memory_that_does_not_hold_is_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that does not arrive is no repair."""
    bench.damage(1)
    monkeypatch.setattr(bench.sealed.line, "write", lambda chunk, data: None)
    (done,) = bench.repair(1)
    assert not done.intact
    assert "the memory itself is broken" in str(done.reason)


def test_what_is_read_and_what_is_not() -> None:
    """Buffers and plain attributes count, state does not; an empty weight is named with its size."""
    module = nn.Linear(8, 4)
    module.register_buffer("scale", torch.ones(1))
    module.register_buffer("flipwatch_gate", torch.ones(1))
    module.derived = torch.ones(3)
    module.kv_cache = torch.ones(5)
    packed = nn.Linear(2, 2, bias=False)
    packed.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    packed.input_size_per_partition, packed.output_size_per_partition = 6, 10
    model = nn.ModuleDict({"layers": nn.ModuleList([module, packed]), "tied": module})
    weights = weights_of(model, Stack({}, 0, "layers"), torch.device("cpu"))
    assert [(source.name, source.block) for source in weights.sources] == [
        ("layers.0.weight", 0),
        ("layers.0.bias", 0),
        ("layers.0.scale", 0),
        ("layers.0.derived", 0),
    ]
    (missing,) = weights.not_covered
    assert (missing.tensor, missing.bytes) == ("layers.1.weight", 120)
    assert weights.replaced() == []
    module.derived = torch.ones(3)
    module.weight.data = module.weight.data.clone()
    assert weights.replaced() == ["layers.0.weight", "layers.0.derived"]


def test_what_a_forward_pass_hands_on_is_no_weight() -> None:
    """Embeddings that every request writes (Gemma) and host copies of scales are left out; what is derived is not."""
    model = nn.Linear(4, 4)
    model.per_layer_embeddings = torch.zeros(8)
    model._k_scale_cpu = torch.tensor(1.0)
    model.derived = torch.zeros(8)
    names = [source.name for source in weights_of(model, Stack({}, 0, ""), torch.device("cpu")).sources]
    assert names == ["weight", "bias", "derived"]


def test_a_failed_reload_puts_back_what_was_derived_from_it(bench: Bench) -> None:
    """MLA's matrices are written beside the projection that they come from: both stay as they were found."""
    bench.model[1].kv_b_proj = bench.model[0]
    bench.damage(0, 2)
    damaged = bench.model[0].weight.detach().clone()

    def half(module: str) -> None:
        with torch.no_grad():
            bench.model[0].weight.zero_()
            bench.model[1].weight.zero_()

    bench.reload(half)
    (done,) = bench.repair(0)
    assert not done.intact
    assert torch.equal(bench.model[0].weight, damaged)
    assert bench.wrong() == [0, 2]
