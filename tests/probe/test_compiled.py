"""Gates on a live vLLM in compiled mode: this build's own, and the passes that GPUs run (VLLM_COMPILE)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flipwatch.monitors.finding import Health

from ..vllm_server import VllmServer
from .reference import Reference, largest_difference
from .states import against_checkpoint, against_recording, recorded
from .tiny import make

pytestmark = pytest.mark.vllm

MakeEnvironment = Callable[..., dict[str, str]]
FP32 = ["--dtype", "float32"]
# This build's default mode writes ahead-of-time artefacts that it cannot load again: half a minute for nothing.
NO_AOT = {"VLLM_USE_AOT_COMPILE": "0"}
VLLM_COMPILE = [*FP32, "--compilation-config", '{"mode": 3}']


@pytest.fixture(scope="module")
def tiny(smol: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers: compiling 30 takes minutes on 2 cores.  tests/e2e compiles the real model."""
    return make("llama", smol, tmp_path_factory.mktemp("tiny"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def tiny_reference(tiny: Path) -> Reference:
    """The same model in transformers."""
    return Reference(tiny)


@pytest.fixture(scope="module")
def compiled(tiny: Path, test_environment: MakeEnvironment) -> Iterator[VllmServer]:
    """Compiled as this build does by default."""
    with VllmServer(tiny, FP32, test_environment(**NO_AOT)) as server:
        assert server.facts()["mode"] == "compiled"
        assert server.self_test()["state"] == "passed"
        yield server


def _check_gates(server: VllmServer, prompts: list[str], reference: Reference) -> None:
    """A first, a middle and the last block: skipped equals removed; undone equals before, bit for bit."""
    before = server.outputs(prompts)
    assert server.outputs(prompts) == before
    sequences = [server.tokens(prompt) for prompt in prompts]
    for block in (0, 2, 3):
        server.set_gates({block: 0.0})
        for tokens in sequences:
            assert largest_difference(server.prompt_logprobs(tokens), reference.logprobs(tokens, block, 0.0)) < 1e-3
        server.set_gates({block: 1.0})
    assert server.outputs(prompts) == before


def _check_nan(server: VllmServer, prompts: list[str]) -> None:
    """A skipped block full of NaN or Inf leaves no trace, also not in reused KV blocks."""
    healthy = server.outputs(prompts)
    server.set_gates({2: 0.0})
    skipped = server.outputs(prompts)
    server.set_gates({2: 1.0})
    for kind in ("nan", "inf"):
        fault = server.inject(block=2, tensor="mlp.down_proj", kind=kind, count=100_000)
        # Logprobs of NaN cannot be written as JSON; vLLM answers without them.
        bad = [server.complete(prompt, logprobs=None)["text"] for prompt in prompts]
        assert bad != [text for text, _, _ in healthy]
        server.set_gates({2: 0.0})
        assert server.outputs(prompts) == skipped
        server.heal(fault)
        server.set_gates({2: 1.0})
    assert server.outputs(prompts) == healthy


def test_gates_at_one_within_rounding(
    compiled: VllmServer, prompts: list[str], tiny: Path, test_environment: MakeEnvironment
) -> None:
    """With all gates at 1, compiled logprobs are within rounding of vLLM without Flipwatch."""
    sequences = [compiled.tokens(prompt) for prompt in prompts]
    ours = [compiled.prompt_logprobs(tokens) for tokens in sequences]
    with VllmServer(tiny, FP32, test_environment(flipwatch=False, **NO_AOT)) as plain:
        theirs = [plain.prompt_logprobs(tokens) for tokens in sequences]
    assert max(largest_difference(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-3


def test_compiled_gates(compiled: VllmServer, prompts: list[str], tiny_reference: Reference) -> None:
    """Skip and undo in this build's own compiled mode."""
    _check_gates(compiled, prompts, tiny_reference)


def test_compiled_nan(compiled: VllmServer, prompts: list[str]) -> None:
    """NaN is masked in compiled code too."""
    _check_nan(compiled, prompts)


def test_compiled_scan(compiled: VllmServer, prompts: list[str]) -> None:
    """A scan beside compiled code measures the loss that the compiled code serves."""
    tokens = compiled.tokens(prompts[3])
    served = compiled.prompt_logprobs(tokens)
    assert compiled.measure([tokens])["base_nats"][0] == pytest.approx(-sum(served) / len(served), abs=1e-3)


def test_compiled_blocks_alone(compiled: VllmServer, prompts: list[str]) -> None:
    """The blocks of a compiled server are run alone and named, and what the compiled code serves stays as it was."""
    before = compiled.outputs(prompts)
    recording = recorded(compiled)
    assert {against_recording(compiled, recording).health, against_checkpoint(compiled).health} == {Health.OK}
    fault = compiled.inject(block=1, tensor="self_attn.o_proj", kind="burst")
    for finding in (against_recording(compiled, recording), against_checkpoint(compiled)):
        assert [(spot.block, spot.module) for spot in finding.locations] == [(1, "self_attn.o_proj")]
    compiled.heal(fault)
    assert compiled.outputs(prompts) == before


@pytest.fixture(scope="module")
def stale_cache(tiny: Path, test_environment: MakeEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compile cache that a vLLM filled while Flipwatch was off, under the passes that GPUs run."""
    root = tmp_path_factory.mktemp("compile-cache")
    # Switched off rather than left out: vLLM's key covers VLLM_PLUGINS, so a server that never named Flipwatch leaves
    # nothing stale, and one that had it switched off does.
    things = ("vllm_compile", "inplace_norm", "plain_weights")
    environment = test_environment(*things, FLIPWATCH_DISABLE="1", VLLM_CACHE_ROOT=str(root))
    with VllmServer(tiny, VLLM_COMPILE, environment) as plain:
        plain.complete("Hello")
    assert any(root.rglob("*")), "the plain run left no compile cache"
    return root


def test_stale_cache_does_not_disarm_the_gates(
    tiny: Path,
    test_environment: MakeEnvironment,
    stale_cache: Path,
    prompts: list[str],
    tiny_reference: Reference,
) -> None:
    """After a plain run left its compile cache, gates work all the same, under VLLM_COMPILE's own passes."""
    environment = test_environment("vllm_compile", "inplace_norm", VLLM_CACHE_ROOT=str(stale_cache))
    with VllmServer(tiny, VLLM_COMPILE, environment) as server:
        assert server.facts()["mode"] == "compiled"
        assert server.self_test()["state"] == "passed"
        _check_gates(server, prompts, tiny_reference)
        _check_nan(server, prompts)


def test_inert_gates_are_seen(tiny: Path, test_environment: MakeEnvironment, stale_cache: Path) -> None:
    """Gates made inert by a stale cache fail the self-test; no change is offered and the reason is given."""
    environment = test_environment("vllm_compile", "inplace_norm", "unsalted", VLLM_CACHE_ROOT=str(stale_cache))
    with VllmServer(tiny, VLLM_COMPILE, environment) as server:
        assert server.gates({2: 0.0}).status_code == 409  # not tested yet
        result = server.self_test()
        assert result["state"] == "failed"
        assert "4 of 4" in result["reason"]
        reply = server.gates({2: 0.0})
        assert reply.status_code == 409
        assert "4 of 4" in reply.json()["detail"]
        assert server.facts()["self_test"] == result
        assert set(server.facts()["gates"]) == {1.0}
