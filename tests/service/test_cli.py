"""The program `flipwatch` as people call it, against a real `flipwatch serve` beside the fake vLLM."""

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..vllm_server import free_port
from .fake_server import PROBE_TOKEN, FakeServer
from .toy_profile import PROFILE

PROGRAM = [sys.executable, "-m", "flipwatch.service.cli"]
BOSS, READER = "token-of-the-boss", "token-of-the-reader"


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("FLIPWATCH_")}


@dataclass
class Desk:
    """A running sidecar, its fake vLLM, and a shell with the right variables."""

    vllm: FakeServer
    url: str
    config: Path

    def run(
        self, *arguments: str, token: str | None = BOSS, stdin: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Call the program."""
        environment = _plain_environment() | {"FLIPWATCH_URL": self.url}
        if token is not None:
            environment["FLIPWATCH_TOKEN"] = token
        return subprocess.run(
            [*PROGRAM, *arguments],
            env=environment | variables,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Call the program with --json; the parsed output."""
        done = self.run(*arguments, "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    def refused(self, *arguments: str, words: str, token: str | None = BOSS, **variables: str) -> None:
        """The call ends with code 2 and one sentence on standard error that has the words."""
        done = self.run(*arguments, token=token, **variables)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("flipwatch: ")
        assert words in done.stderr
        assert "Traceback" not in done.stdout


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """One sidecar for the whole file; each test leaves the model healthy."""
    folder = tmp_path_factory.mktemp("sidecar")
    config = folder / "flipwatch.yaml"
    port = free_port()
    with FakeServer() as vllm:
        settings = {
            "listen_port": port,
            "data_dir": str(folder / "data"),
            "probe_token": PROBE_TOKEN,
            "tokens": [
                {"name": "boss", "token": BOSS, "scopes": ["admin"]},
                {"name": "reader", "token": READER, "scopes": ["read"]},
            ],
            "vllm": {"url": vllm.url, "poll_seconds": 0.2},
            "scan": {"every_minutes": None, "duty": 1.0},
            "fingerprint": {"every_minutes": 60},
            "validation": {"max_items": 8},
            "mitigation": {"mode": "enforce", "max_actions": 100},
            "faults": {"enabled": True},
        }
        config.write_text(json.dumps(settings))
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [*PROGRAM, "serve", "--config", str(config)], env=_plain_environment(), stderr=log
            )
        try:
            desk = Desk(vllm, f"http://127.0.0.1:{port}", config)
            _wait_until_it_watches(desk.url, process)
            yield desk
        finally:
            process.terminate()
            assert process.wait(20) == 0


def _wait_until_it_watches(url: str, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(url + "/v1/states", trust_env=False).json()["up"]:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    pytest.fail(f"the sidecar does not watch; exit code {process.poll()}")


@pytest.fixture(autouse=True)
def _healthy_afterwards(desk: Desk) -> Iterator[None]:
    yield
    desk.vllm.harm = [0.0] * desk.vllm.num_blocks
    desk.vllm.nan.clear()
    desk.vllm.scan_refusal = None
    desk.vllm.states.restart()
    desk.vllm.answers.restart()


def test_scan_of_a_healthy_model_is_code_0(desk: Desk) -> None:
    """The reason is on standard output; nothing, no progress bar either, on standard error that is no terminal."""
    done = desk.run("scan")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ok: ")
    assert "\x1b" not in done.stdout


def test_scan_that_finds_something_is_code_1(desk: Desk) -> None:
    """A harmful block: code 1, and its scores in a table or as JSON; status says the same."""
    desk.vllm.harm[4] = 5.0
    done = desk.run("scan")
    assert done.returncode == 1
    assert done.stdout.startswith("failed: ")
    [row] = [line.split() for line in done.stdout.splitlines() if line.endswith("flagged")]
    assert (row[0], float(row[1])) == ("4", pytest.approx(desk.vllm.loss(scan={4: 0.0}), abs=0.1))
    assert "forward passes (naive 25), " in done.stdout
    everything = [line.split()[0] for line in desk.run("scan", "--all").stdout.splitlines()]
    assert everything[2:-1] == [str(block) for block in range(desk.vllm.num_blocks)]
    scan = desk.json("scan", code=1)
    assert scan["finding"]["flagged"] == [4]
    assert desk.json("status", code=1)["states"]["states"][0]["flagged"] == [4]
    assert " 4 " in desk.run("status", "--blocks").stdout.replace("\n", " ")


def test_scan_that_cannot_be_done_is_code_2(desk: Desk) -> None:
    """A model that cannot be scanned is neither ok nor a finding."""
    desk.vllm.scan_refusal = "ToyLayer cannot be walked."
    done = desk.run("scan")
    assert done.returncode == 2
    assert "ToyLayer cannot be walked" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_scan_joins_the_one_that_runs(desk: Desk) -> None:
    """While a scan runs, `scan` waits for its result; one with a grid of its own is refused."""
    desk.vllm.hold()
    try:
        headers = {"Authorization": f"Bearer {BOSS}"}
        assert httpx.post(desk.url + "/v1/scans", json={}, headers=headers, trust_env=False).status_code == 202
        desk.refused("scan", "--grid", "quick", words="A scan runs already")
        environment = _plain_environment() | {"FLIPWATCH_URL": desk.url, "FLIPWATCH_TOKEN": BOSS}
        joined = subprocess.Popen(
            [*PROGRAM, "scan"], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert joined.stderr is not None
        assert joined.stderr.readline() == "A scan runs already; waiting for its result.\n"
    finally:
        desk.vllm.release()
    out, _ = joined.communicate(timeout=30)
    assert joined.returncode == 0
    assert out.startswith("ok: ")


def test_scan_takes_a_grid(desk: Desk) -> None:
    """Names and numbers; a one among the alphas is refused by the sidecar with its own sentence."""
    assert desk.run("scan", "--grid", "0,0.5").returncode == 0
    desk.refused("scan", "--grid", "0,1", words="always measured")
    desk.refused("scan", "--grid", "some", words="'some' is neither quick, full, nor numbers")


def test_scan_shows_progress_on_a_terminal(desk: Desk) -> None:
    """With standard error on a terminal there is a bar; NO_COLOR takes its colours away."""
    master, slave = pty.openpty()
    environment = _plain_environment() | {"FLIPWATCH_URL": desk.url, "FLIPWATCH_TOKEN": BOSS}
    environment |= {"NO_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run([*PROGRAM, "scan"], env=environment, stdout=subprocess.PIPE, stderr=slave, timeout=60)
    os.close(slave)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert done.returncode == 0
    assert "scanning" in shown
    assert "\x1b[3" not in shown


def test_mitigate_skip_and_undo(desk: Desk) -> None:
    """The flagged block is skipped, listed, shown, and put back."""
    desk.vllm.harm[4] = 5.0
    assert desk.run("scan").returncode == 1
    record = desk.json("mitigate", "skip", "--flagged")
    assert (record["state"], record["blocks"]) == ("active", [4])
    assert desk.vllm.gates[4] == 0.0
    desk.refused("mitigate", "skip", "4", words="holds block 4")
    assert record["id"] in desk.run("mitigate", "list").stdout
    assert "active" in desk.run("mitigate", "show", record["id"]).stdout
    assert record["id"] in desk.run("status").stdout
    desk.vllm.harm[4] = 0.0
    undone = desk.run("mitigate", "undo", record["id"])
    assert (undone.returncode, undone.stderr) == (0, "")
    assert "reverted" in undone.stdout
    assert desk.vllm.gates == [1.0] * desk.vllm.num_blocks
    desk.refused("mitigate", "finish", record["id"], words="only interrupted ones")


def test_mitigate_attenuate(desk: Desk) -> None:
    """A block's gate is set to alpha."""
    record = desk.json("mitigate", "attenuate", "3", "--alpha", "0.5", "--reason", "a drill", "--force")
    assert (record["state"], record["alpha"], record["reason"]) == ("active", 0.5, "a drill")
    assert desk.vllm.gates[3] == 0.5
    assert desk.run("mitigate", "undo", record["id"]).returncode == 0


def test_mitigate_drain_and_the_audit_log(desk: Desk) -> None:
    """The sidecar is not ready until the drain is undone; `events` tells both, oldest first."""
    record = desk.json("mitigate", "drain", "--reason", "a drill")
    assert (record["state"], record["action"], record["reason"]) == ("active", "drain", "a drill")
    assert httpx.get(f"{desk.url}/readyz").status_code == 503
    desk.refused("mitigate", "drain", words="drains this server already")
    assert desk.run("mitigate", "undo", record["id"]).returncode == 0
    assert httpx.get(f"{desk.url}/readyz").status_code == 200
    lines = desk.run("events", "--limit", "2").stdout.splitlines()
    assert [line.split("  ")[1:] for line in lines] == [
        ["boss", "mitigation active: Drained: /readyz answers 503 until this is undone or vLLM restarts."],
        ["boss", "mitigation reverted: Undone: /readyz says again whether the sidecar works."],
    ]
    assert [line["what"] for line in desk.json("events", "--limit", "2")] == [
        "mitigation reverted",
        "mitigation active",
    ]


def test_mitigate_with_force(desk: Desk) -> None:
    """What the scan calls harmful is one sentence with the numbers; --force does it all the same."""
    assert desk.run("scan").returncode == 0
    desk.refused("mitigate", "skip", "5", words="Leaving block 5 out would raise the loss from 2.")
    record = desk.json("mitigate", "skip", "5", "--force")
    assert (record["state"], record["forced"]) == ("active", True)
    assert desk.run("mitigate", "undo", record["id"]).returncode == 0


def test_inject_and_undo(desk: Desk) -> None:
    """A fault is made, listed and taken back."""
    fault = desk.json("inject", "fault", "2", "mlp.up_proj", "--kind", "burst", "--count", "18", "--factor", "3")
    assert (fault["block"], fault["factor"]) == (2, 3.0)
    assert [made["id"] for made in desk.json("inject", "list")] == [fault["id"]]
    assert fault["id"] in desk.run("inject", "list").stdout
    assert desk.run("inject", "undo", fault["id"]).returncode == 0
    assert desk.json("inject", "list") == []


def test_inject_outside_the_blocks(desk: Desk) -> None:
    """A tensor alone is one outside the blocks; the line says what else is damaged with it."""
    told = desk.run("inject", "fault", "embed_tokens", "--kind", "bit", "--bit", "14")
    assert told.returncode == 0
    assert "bit in 18 values of model.embed_tokens.weight, which is also lm_head.weight" in told.stdout
    (fault,) = desk.json("inject", "list")
    assert (fault["block"], fault["bit"]) == (None, 14)
    assert desk.run("inject", "undo", fault["id"]).returncode == 0


def test_inject_what_a_file_says(desk: Desk, tmp_path: Path) -> None:
    """One fault or a list, from a file or standard input; of a list with a wrong one, nothing is left."""
    found = {"tensor": "model.layers.3.mlp.up_proj.weight", "kind": "flips", "flips": [[5, 30]]}
    stale = {"block": 1, "tensor": "mlp.up_proj", "kind": "stale", "source": "mlp.gate_proj", "seed": 4}
    file = tmp_path / "faults.json"
    file.write_text(json.dumps([found, stale]))
    made = desk.json("inject", "fault", "--spec", str(file))
    assert [one["kind"] for one in made] == ["flips", "stale"]
    assert (made[0]["flips"], made[1]["source"], made[1]["seed"]) == ([[5, 30]], "mlp.gate_proj", 4)
    piped = desk.run("inject", "fault", "--spec", "-", "--json", stdin=json.dumps(found))
    assert [one["tensor"] for one in json.loads(piped.stdout)] == [made[0]["tensor"]]
    for fault in desk.json("inject", "list"):
        assert desk.run("inject", "undo", fault["id"]).returncode == 0
    file.write_text(json.dumps([found, stale | {"block": 99}]))
    desk.refused("inject", "fault", "--spec", str(file), words="blocks")
    assert desk.json("inject", "list") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a fault"),
        ('{"tensor": "x", "kind": "burst", "factor": NaN}', "cannot be sent"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_is_one_sentence(desk: Desk, tmp_path: Path, text: str | None, words: str) -> None:
    """No JSON, no fault in it, a wrong fault, no file."""
    file = tmp_path / "fault.json"
    if text is not None:
        file.write_text(text)
    desk.refused("inject", "fault", "--spec", str(file), words=words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["scann"], "No such command"),
        (["scan", "--loud"], "No such option"),
        (["mitigate", "skip"], "Name the blocks, or give --flagged"),
        (["mitigate", "skip", "4", "--flagged"], "one of the two"),
        (["mitigate", "skip", "four"], "Invalid value"),
        (["mitigate", "skip", "99"], "There is no block 99"),
        (["mitigate", "skip", "--flagged"], "No block is flagged"),
        (["mitigate", "attenuate", "3", "--alpha", "7"], "alpha"),
        (["mitigate", "attenuate", "3", "--alpha", "nan"], "alpha"),
        (["mitigate", "attenuate", "3", "--alpha", "inf"], "alpha"),
        (["mitigate", "skip", "3", "--reason", "\udcff"], "cannot be sent"),
        (["scan", "--grid", "0,nan"], "neither quick, full, nor numbers"),
        (["scan", "--grid", "1e400"], "neither quick, full, nor numbers"),
        (["mitigate", "undo", "nothing"], "There is no mitigation nothing"),
        (["inject", "fault", "99", "mlp.up_proj"], "blocks"),
        (["inject", "fault", "4"], "Name a block and a tensor"),
        (["inject", "fault", "lm_head", "--spec", "x.json"], "one of the two"),
        (["inject", "fault", "lm_head", "--bit", "3"], "bit is for kind bit only"),
        (["inject", "fault", "lm_head", "--kind", "stale"], "needs a source"),
        (["inject", "undo", "nothing"], "There is no fault nothing"),
        (["differential", "scan", "--reference", "nothing"], "Invalid value"),
        (["differential", "scan", "--reference", "peer"], "There is no peer: set differential.peer_url"),
        (["differential", "scan"], "record states first"),
        (["differential", "show"], "There are no recorded states"),
        (["differential", "remove"], "There are no recorded states"),
        (["canary", "show"], "There are no recorded answers"),
        (["canary", "remove"], "There are no recorded answers"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(desk: Desk, arguments: list[str], words: str) -> None:
    """Wrong words, unknown blocks, unknown ids."""
    assert desk.run("scan").returncode == 0
    desk.refused(*arguments, words=words)


def test_tokens(desk: Desk) -> None:
    """No token, a wrong one, one with too small a scope, one that no header can hold, each with its own sentence."""
    desk.refused("scan", words="set FLIPWATCH_TOKEN", token=None)
    desk.refused("status", words="refused the token", token="token-of-a-thief")
    desk.refused("scan", words="does not have the scope", token=READER)
    desk.refused("status", words="cannot be used", token="t\u00f6ken\u20ac")
    assert desk.run("status", token=READER).stdout.startswith("verdict ")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[", "nonsense", "ftp://127.0.0.1"])
def test_without_a_sidecar(desk: Desk, url: str) -> None:
    """Nobody there, or no URL at all."""
    desk.refused("status", words="FLIPWATCH_URL", FLIPWATCH_URL=url)


def test_no_sentence_repeats_a_secret(desk: Desk) -> None:
    """A token with a line break inside, a password in a URL, of the sidecar and of vLLM; white space is dropped."""
    assert desk.run("status", token=BOSS + "\n").stdout.startswith("verdict ")
    for code, arguments, variables in (
        (2, ["status"], {"FLIPWATCH_TOKEN": "secret-1\nsecret-2"}),
        (2, ["status"], {"FLIPWATCH_URL": "http://user:secret@127.0.0.1:1"}),
        (2, ["status"], {"FLIPWATCH_URL": "user:secret@127.0.0.1"}),
        (2, ["doctor", "--config", str(desk.config)], {"FLIPWATCH_VLLM__URL": "http://user:secret@127.0.0.1:1"}),
    ):
        done = desk.run(*arguments, **variables)
        assert done.returncode == code
        assert "secret" not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_something_else_than_a_sidecar(desk: Desk) -> None:
    """vLLM answers there and not Flipwatch."""
    desk.refused("status", words="is this Flipwatch's sidecar?", FLIPWATCH_URL=desk.vllm.url)


def _doctor(desk: Desk, code: int, token: str | None = BOSS, **variables: str) -> dict[str, tuple[bool | None, str]]:
    done = desk.run("doctor", "--config", str(desk.config), "--json", token=token, **variables)
    assert done.returncode == code, done.stdout + done.stderr
    return {check["name"]: (check["good"], check["says"]) for check in json.loads(done.stdout)}


def test_doctor_of_a_healthy_installation(desk: Desk) -> None:
    """All checks are there and good; the plain form has one line for each."""
    checks = _doctor(desk, 0)
    good = {name for name, (state, _) in checks.items() if state}
    assert good == {
        *("sidecar", "token", "settings", "vllm", "plugin", "probe token", "versions"),
        *("blocks", "scan", "gates", "self-test", "validation"),
    }
    assert "'boss'" in checks["token"][1]
    assert "on at the sidecar, on at the probe" in checks["faults"][1]
    assert checks["automation"] == (None, "no rule: nothing is automatic")
    plain = desk.run("doctor", "--config", str(desk.config))
    assert (plain.returncode, plain.stderr) == (0, "")
    assert len(plain.stdout.splitlines()) == len(checks)
    assert "\x1b" not in plain.stdout


def test_doctor_finds_what_is_wrong(desk: Desk) -> None:
    """Wrong tokens, no plugin, no vLLM, no sidecar, inert gates: the line that is BAD names it, with code 2."""
    assert _doctor(desk, 2, token="token-of-a-thief")["token"][0] is False
    assert _doctor(desk, 2, FLIPWATCH_PROBE_TOKEN="wrong")["probe token"][0] is False
    assert _doctor(desk, 2, FLIPWATCH_VLLM__URL="http://127.0.0.1:1")["vllm"][0] is False
    assert _doctor(desk, 2, FLIPWATCH_URL="http://127.0.0.1:1")["sidecar"][0] is False
    assert _doctor(desk, 2, FLIPWATCH_VALIDATION__FILE="/nowhere.jsonl")["validation"][0] is False
    says = _doctor(desk, 2, FLIPWATCH_SCANS="1")["settings"][1]
    assert "FLIPWATCH_SCANS" in says
    assert says.endswith("(The sidecar serves with others: run this where it runs, with its variables.)")
    alone = _doctor(desk, 2, FLIPWATCH_SCANS="1", FLIPWATCH_URL="http://127.0.0.1:1")
    assert "serves with others" not in alone["settings"][1]
    assert "/nowhere.yaml" in _doctor(desk, 2, FLIPWATCH_AUTOMATION__POLICY_FILE="/nowhere.yaml")["settings"][1]
    desk.vllm.armed = False
    assert _doctor(desk, 2)["gates"] == (False, "ToyLayer is not supported.")
    desk.vllm.armed = True


def test_integrity_of_good_weights_is_code_0(desk: Desk) -> None:
    """Sweep, check and show agree, in words and as JSON."""
    swept = desk.run("integrity", "sweep")
    assert (swept.returncode, swept.stderr) == (0, "")
    assert swept.stdout.startswith("ok: All 40 chunks (41.9 MB) of 1 rank are those of the baseline of ")
    checked = desk.run("integrity", "check")
    assert checked.returncode == 0, checked.stderr
    assert "1 file (1.0 kB) not checked against anything; 12 tensors in memory as in the checkpoint" in checked.stdout
    assert f"{'ab' * 32}  model.safetensors" in checked.stdout
    shown = desk.run("integrity", "show")
    assert shown.returncode == 0
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["rank", "recorded", "chunks", "covered", "not", "covered", "parity", "digest"] in rows
    assert any(row[0] == "0" and row[4:7] == ["40", "41.9", "MB"] for row in rows)
    integrity = desk.json("integrity", "show")
    assert (integrity["state"]["health"], integrity["integrity"]["verified"]) == ("ok", True)
    assert desk.json("integrity", "check")["verdict"]["problems"] == []


def test_integrity_correct_shows_what_is_wrong_now(desk: Desk) -> None:
    """Exit code 1: the sweep behind the correction finds the chunk; without a reason it is a mistake."""
    desk.vllm.integrity.wrong = {"model.layers.4.mlp.up_proj.weight": (7, 4)}
    done = desk.run("integrity", "correct", "model.layers.4.mlp.up_proj.weight", "--reason", "bad shard")
    assert done.returncode == 1, done.stderr
    assert "1 of 40 chunks differs" in done.stdout
    desk.refused("integrity", "correct", "model.layers.4.mlp.up_proj.weight", words="--reason")
    desk.refused("integrity", "correct", "a", "a", "--reason", "x", words="name each tensor once")
    desk.vllm.weights.reload()
    assert desk.run("integrity", "sweep").returncode == 0


def test_integrity_of_changed_weights_is_code_1(desk: Desk) -> None:
    """The chunk is named with tensor and block; a new baseline needs a reason and makes it good."""
    desk.vllm.weights.damage(7, 4)
    swept = desk.run("integrity", "sweep")
    assert swept.returncode == 1
    assert swept.stdout.startswith("failed: 1 of 40 chunks differs from the baseline of ")
    [row] = [line.split() for line in swept.stdout.splitlines() if line.endswith("repairs it")]
    assert row[:4] == ["0", "7", "model.layers.4.mlp.up_proj.weight", "4"]
    assert desk.run("integrity", "show").returncode == 1
    assert desk.json("integrity", "sweep", code=1)["finding"]["bad_chunks"] == 1
    desk.refused("integrity", "record", words="--reason")
    desk.refused("integrity", "record", "--reason", "", words="reason")
    recorded = desk.run("integrity", "record", "--reason", "weight sync")
    assert (recorded.returncode, recorded.stdout.startswith("ok: ")) == (0, True)


def test_integrity_that_cannot_be_told_is_code_2(desk: Desk) -> None:
    """No baselines: neither ok nor a finding; and who may not may not."""
    desk.vllm.integrity.refusal = "The weights are on a meta device."
    try:
        desk.refused("integrity", "sweep", words="The weights are on a meta device")
        shown = desk.run("integrity", "show")
        assert (shown.returncode, "no baselines: The weights are on" in shown.stdout) == (2, True)
        desk.refused("integrity", "record", "--reason", "x", words="does not have the scope", token=READER)
    finally:
        desk.vllm.integrity.refusal = None
        assert desk.run("integrity", "sweep").returncode == 0


def test_the_canary_records_asks_and_forgets(desk: Desk) -> None:
    """Exit code 0 while the answers are what was recorded, 1 when they are not."""
    made = desk.run("canary", "record")
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.startswith("recorded: answers of toy-model, ")
    assert "6 prompts, 96 tokens, asked 5 times" in desk.run("canary", "show").stdout
    assert desk.run("canary", "run").stdout.startswith("ok: 6 prompts were answered twice")
    desk.vllm.answers.flip = {4: 3}
    done = desk.run("canary", "run")
    assert done.returncode == 1
    assert done.stdout.startswith(
        "failed: 1 of 6 prompts (4) are answered wrong or not at all: 4 has at token 3 another"
    )
    assert desk.json("canary", "run", code=1)["finding"]["symptom"] == "changed"
    assert desk.run("canary", "remove").stdout == "removed\n"


def test_differential_against_the_checkpoint_names_the_tensor(desk: Desk) -> None:
    """Code 0 with the nearest blocks, code 1 with block, module, tensor, element and bits, and what it took."""
    done = desk.run("differential", "scan", "--reference", "checkpoint")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ok: All 8 blocks compute what the checkpoint's tensors give")
    assert "5 more blocks with --all" in done.stdout
    desk.vllm.states.off = {4: 0.5, 6: 0.25}
    done = desk.run("differential", "scan", "--reference", "checkpoint")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("departs")] == ["4", "6"]
    row = next(line for line in lines if "down_proj.weight" in line and line.startswith("4 "))
    tensor = "model.layers.4.mlp.down_proj.weight"
    assert row.split() == ["4", "mlp", "mlp.down_proj", tensor, "1", "[12,", "345]", "14", "11"]
    assert lines[-1] == (
        "comparisons: 8 of blocks, 4 inside blocks, 6 of digests, 2 of tensors value by value; brute force: 56 tensors"
    )
    everything = desk.run("differential", "scan", "--reference", "checkpoint", "--all").stdout
    assert "with --all" not in everything
    scan = desk.json("differential", "scan", "--reference", "checkpoint", code=1)
    assert [location["block"] for location in scan["finding"]["locations"]] == [4, 6]
    assert "differential failed: " in desk.run("status").stdout
    desk.refused("differential", "record", words="down_proj")
    desk.vllm.states.off = {}
    assert desk.run("differential", "scan", "--reference", "checkpoint").returncode == 0


def test_differential_from_record_to_remove(desk: Desk) -> None:
    """Recorded, shown, compared with, not finite, refused, removed."""
    done = desk.run("differential", "record")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("recorded: states of toy-model, ")
    assert "8 sequences, 512 tokens, blocks alone on 16" in done.stdout
    made = desk.json("differential", "show")
    assert made["conditions"]["model_digest"] in desk.run("differential", "show").stdout
    assert desk.run("differential", "scan").returncode == 0
    desk.vllm.states.nan.add(3)
    done = desk.run("differential", "scan")
    assert done.returncode == 1
    [row] = [line.split() for line in done.stdout.splitlines() if line.endswith("departs")]
    assert row[:2] == ["3", "-"]
    desk.refused("differential", "record", words="No states were recorded: The loss of the model is not finite")
    assert desk.json("differential", "show") == made
    desk.refused("differential", "record", words="scope", token=READER)
    assert desk.run("differential", "remove").stdout == "removed\n"


def test_baseline_from_record_to_remove(desk: Desk, tmp_path: Path) -> None:
    """A profile is recorded, shown, exported, removed and imported again, and is the same all the way."""
    desk.refused("baseline", "show", words="There is no clean profile")
    recorded = desk.json("baseline", "record")
    assert desk.json("baseline", "show") == recorded
    shown = desk.run("baseline", "show").stdout
    assert "vllm 0.32.0 eager" in shown
    assert "8, 2.035 nats on average" in shown
    file = tmp_path / "profile.json"
    assert desk.run("baseline", "export", str(file)).returncode == 0
    assert json.loads(file.read_text()) == json.loads(desk.run("baseline", "export").stdout) == recorded
    desk.refused("baseline", "export", str(tmp_path / "nowhere" / "x.json"), words="cannot be written")
    desk.refused("baseline", "remove", words="reader", token=READER)
    assert desk.run("baseline", "remove").stdout == "removed\n"
    desk.refused("baseline", "remove", words="There is no clean profile")
    assert desk.run("baseline", "import", str(file)).stdout.startswith("imported: profile of toy-model, ")
    assert desk.json("baseline", "import", str(file)) == recorded
    assert desk.json("scan")["finding"]["profile_recorded_at"] == recorded["recorded_at"]
    assert "was judged with the clean profile of" in desk.run("status").stdout
    assert desk.run("baseline", "remove").returncode == 0


def test_baseline_of_a_flagged_model_is_refused(desk: Desk) -> None:
    """The sentence says what was found; there is still no profile."""
    desk.vllm.harm[4] = 5.0
    desk.refused("baseline", "record", words="No profile was recorded: No profile is made of a model that is failed")
    desk.vllm.harm[4] = 0.0
    desk.vllm.scan_refusal = "ToyLayer has recurrent state."
    desk.refused("baseline", "record", words="The scan could not be done")
    desk.refused("baseline", "show", words="There is no clean profile")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no clean profile: Invalid JSON"),
        ("[]", "is no clean profile"),
        ("{}", "is no clean profile: provenance: Field required"),
        (json.dumps(PROFILE.model_dump(mode="json") | {"recorded_at": "today"}), "is no clean profile: recorded_at"),
        (PROFILE.model_dump_json(), "torch_version 2.12.0 there, 2.13.0 here"),
    ],
)
def test_baseline_import_of_a_wrong_file(desk: Desk, tmp_path: Path, text: str, words: str) -> None:
    """Bad JSON, a wrong document and a foreign profile are one sentence and code 2."""
    file = tmp_path / "profile.json"
    file.write_text(text)
    desk.refused("baseline", "import", str(file), words=words)


def test_baseline_import_of_no_file(desk: Desk, tmp_path: Path) -> None:
    """A path where nothing is, or a folder, is one sentence and code 2."""
    desk.refused("baseline", "import", str(tmp_path / "nothing"), words="No such file")
    desk.refused("baseline", "import", str(tmp_path), words="Is a directory")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("listen_port: [", "not valid YAML"),
        ("listen_prot: 1", "listen_prot"),
        ("listen_port: many", "listen_port"),
        ("{}", "probe token"),
        ("1: 2", "key that is no text"),
        ("{probe_token: abc, listen_host: ..}", "cannot listen"),
        ("{probe_token: tok\u00e9n}", "probe_token is wrong"),
        ("{probe_token: abc, vllm: {api_key: k\u00e9y}}", "vllm.api_key is wrong"),
    ],
)
def test_serve_that_cannot_start(desk: Desk, tmp_path: Path, text: str, words: str) -> None:
    """Bad YAML, a misspelt or wrong setting, no token: one line and code 2."""
    config = tmp_path / "flipwatch.yaml"
    config.write_text(text, encoding="utf-8")
    desk.refused("serve", "--config", str(config), words=words, FLIPWATCH_DATA_DIR=str(tmp_path))


def test_serve_on_a_taken_port(desk: Desk, tmp_path: Path) -> None:
    """The line names the port."""
    port = str(desk.vllm.port)
    desk.refused(
        *("serve", "--config", str(desk.config)),
        words=port,
        FLIPWATCH_LISTEN_PORT=port,
        FLIPWATCH_DATA_DIR=str(tmp_path),
    )


def test_version_and_help(desk: Desk) -> None:
    """The version is that of the distribution; every command has a help text."""
    assert desk.run("--version").stdout == f"flipwatch {version('flipwatch')}\n"
    shown = desk.run("--help").stdout
    for command in ("serve", "scan", "baseline", "status", "mitigate", "inject", "doctor"):
        assert command in shown
