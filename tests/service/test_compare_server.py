"""`flipwatch compare` of live servers, through a fake vLLM with a fake probe: routes, tokens, pacing, refusals.

What a real probe measures is not faked here: the numbers are a toy's.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flipwatch.service.compared import Comparison
from flipwatch.service.measuring import Measurer
from flipwatch.service.settings import load_settings

from .compare_rig import LAYERS, Done, call, make, refused
from .fake_server import PROBE_TOKEN, FakeServer

Call = Callable[..., Done]


@pytest.fixture
def peer() -> Iterator[FakeServer]:
    """The other server."""
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the program with the token that both fakes want."""
    monkeypatch.setenv("FLIPWATCH_PROBE_TOKEN", PROBE_TOKEN)
    for name in ("FLIPWATCH_PEER_PROBE_TOKEN", "FLIPWATCH_VLLM__API_KEY", "FLIPWATCH_PEER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: call(monkeypatch, capsys, *arguments, "--items", 3)


def test_equal_servers_are_code_0(compare: Call, server: FakeServer, peer: FakeServer) -> None:
    """A is recorded with its noise, B replays A's inputs; both are left as they were, without a measurement."""
    done = compare(server.url, peer.url)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("ok: ")
    [recorded] = server.states.plans
    [replayed] = peer.states.plans
    assert (recorded.noise, recorded.inputs, replayed.noise) == (True, None, False)
    assert (replayed.tokens, replayed.inputs_dtype) == (recorded.tokens, "bfloat16")
    assert replayed.inputs is not None
    for fake in (server, peer):
        assert (fake.measurements, fake.gates) == (0, [1.0] * 8)
        assert not any(request.startswith(("PUT", "POST /self-test")) for request in fake.seen)


def test_a_departing_block_is_code_1(compare: Call, server: FakeServer, peer: FakeServer) -> None:
    """It ranks first, and its harm shows in the losses of B only."""
    peer.states.off[4] = 0.5
    peer.harm[4] = 5.0
    done = compare(server.url, peer.url, "--json")
    assert done.code == 1
    found = Comparison.model_validate_json(done.out)
    assert found.ranking[0] == 4
    assert [block.block for block in found.finding.blocks if block.departs] == [4]
    gains = [(block.a.skip_gain_nats, block.b.skip_gain_nats) for block in found.blocks]
    assert gains[4] == (pytest.approx(-0.34), pytest.approx(4.66))
    assert gains[3] == (pytest.approx(-0.33), pytest.approx(-0.33))
    assert (found.a.source, found.b.source) == (server.url, peer.url)


def test_gates_are_said(compare: Call, server: FakeServer, peer: FakeServer) -> None:
    """A server that serves without a block says so, and there is no loss without that block."""
    peer.gates[2] = 0.0
    done = compare(server.url, peer.url)
    assert "served with block 2 at 0" in next(line for line in done.out.splitlines() if line.startswith("B: "))
    assert "served with" not in next(line for line in done.out.splitlines() if line.startswith("A: "))
    [row] = [line.split() for line in done.out.splitlines() if line.startswith("2 ")]
    assert (row[6], row[8]) == ("-", "-")


def test_parts_keep_to_the_budget(
    compare: Call, server: FakeServer, peer: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that claim to hold the engine for long are asked for one by one, with rests in which it serves."""
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    monkeypatch.setitem(Measurer.__init__.__kwdefaults__, "rest", rest)
    server.seconds_per_step = peer.seconds_per_step = 0.06
    assert compare(server.url, peer.url, "--no-gain").code == 0
    assert (server.steps, peer.steps) == ([1] * 8, [1] * 8)
    assert len(rests) == 16
    # In front of the first part of each server nothing was held; behind it two percent may be.
    assert rests.count(0.0) == 2
    assert all(2.0 < seconds < 2.95 for seconds in rests if seconds)


def test_each_server_has_its_token(
    compare: Call, server: FakeServer, peer: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wrong one is told with the place that it is from; a file wins over the environment."""
    file = tmp_path / "token"
    file.write_text(f" {PROBE_TOKEN}\n")
    monkeypatch.setenv("FLIPWATCH_PEER_PROBE_TOKEN", "wrong")
    refused(compare(server.url, peer.url), f"{peer.url} refused the token from FLIPWATCH_PEER_PROBE_TOKEN")
    assert compare(server.url, peer.url, "--token-file-b", file).code == 0
    monkeypatch.setenv("FLIPWATCH_PEER_PROBE_TOKEN", PROBE_TOKEN)
    monkeypatch.setenv("FLIPWATCH_PROBE_TOKEN", "wrong")
    refused(compare(server.url, peer.url), f"{server.url} refused the token from FLIPWATCH_PROBE_TOKEN")
    assert compare(server.url, peer.url, "--token-file-a", file).code == 0
    monkeypatch.delenv("FLIPWATCH_PROBE_TOKEN")
    refused(compare(server.url, peer.url), "There is no probe token for server A: set FLIPWATCH_PROBE_TOKEN")
    file.write_text("\n")
    refused(compare(server.url, peer.url, "--token-file-a", file), "is empty")
    file.write_text("t\u00f6ken")
    refused(compare(server.url, peer.url, "--token-file-a", file), "printable ASCII")
    refused(compare(server.url, peer.url, "--token-file-a", tmp_path), "cannot be read: Is a directory")


def _another_version(fake: FakeServer) -> None:
    fake.flipwatch_version = "0.0.9"


def _another_architecture(fake: FakeServer) -> None:
    fake.architecture = "OtherForCausalLM"


def _no_scan(fake: FakeServer) -> None:
    fake.scan_refusal = "ToyLayer has recurrent state."


def _not_armed(fake: FakeServer) -> None:
    fake.armed = False


def _full(fake: FakeServer) -> None:
    fake.refuse["POST /measurements"] = (422, "This is more than this server takes.")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (FakeServer.stop, "cannot be reached"),
        (_another_version, "is of Flipwatch 0.0.9, and this is 0.1.0"),
        (_another_architecture, "differ in their architecture, ToyForCausalLM and OtherForCausalLM"),
        (_no_scan, "cannot be measured: ToyLayer has recurrent state."),
        (_not_armed, "cannot be measured: ToyLayer is not supported."),
        (_full, "This is more than this server takes."),
    ],
)
def test_a_server_that_cannot_be_compared_is_one_sentence(
    compare: Call, server: FakeServer, peer: FakeServer, spoil: Callable[[FakeServer], None], words: str
) -> None:
    """Away, of another version, another model, not to be measured: which server it is, and why."""
    spoil(peer)
    done = compare(server.url, peer.url)
    refused(done, words)
    assert peer.url in done.err
    assert server.measurements == 0


def test_another_number_of_blocks_is_one_sentence(compare: Call, server: FakeServer) -> None:
    """Nothing is measured."""
    with FakeServer(num_blocks=9) as other:
        refused(compare(server.url, other.url), "differ in their number of blocks, 8 and 9")
    assert server.states.plans == []


@pytest.mark.parametrize("change", [FakeServer.restart, lambda fake: fake.gates.__setitem__(1, 0.0)])
def test_a_server_that_changes_meanwhile_is_one_sentence(
    compare: Call, server: FakeServer, peer: FakeServer, change: Callable[[FakeServer], None]
) -> None:
    """A restart, or another gate, in the middle of the measurement: its numbers would mix two models."""
    peer.hold()

    def meanwhile() -> None:
        assert peer.holding.wait(30)
        change(peer)
        peer.release()

    thread = threading.Thread(target=meanwhile)
    thread.start()
    done = compare(server.url, peer.url, "--no-gain")
    thread.join()
    refused(done, "while it was measured")
    assert peer.url in done.err


def test_urls_that_cannot_be_asked(compare: Call, server: FakeServer) -> None:
    """No URL, no key for a header, options for folders: one sentence before anything is asked."""
    refused(compare(server.url, "http://"), "The URL B")
    refused(compare(server.url, server.url, "--dtype-b", "float32"), "--dtype-b goes with a folder only")
    assert server.seen == []


def test_a_folder_beside_a_server(compare: Call, server: FakeServer, tmp_path: Path) -> None:
    """Another model, or one with another tokenizer: nothing is measured, and the folder is not loaded."""
    folder = make(tmp_path / "model")
    refused(compare(folder, server.url), "differ in their architecture, LlamaForCausalLM and ToyForCausalLM")
    with FakeServer(num_blocks=LAYERS) as other:
        other.architecture = "LlamaForCausalLM"
        refused(compare(folder, other.url), "give other ids for the same text")
        assert other.states.plans == []


def test_a_sidecar_does_not_mind_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported for a comparison, they do not keep `flipwatch serve` from starting in the same shell."""
    monkeypatch.setenv("FLIPWATCH_PEER_PROBE_TOKEN", "a-token")
    monkeypatch.setenv("FLIPWATCH_PEER_API_KEY", "a-key")
    assert load_settings().vllm.api_key is None
