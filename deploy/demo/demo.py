"""The whole loop on a real vLLM: watch, break, find, alert, mitigate, repair.

Exit code 0 only if every step held; 1 if one did not: it is named, with the ends of both logs; 2 if nothing could be
started.

    make demo        (ARGS="--keep-logs FOLDER" leaves the servers' logs there, ARGS="--picture docs/page.png" takes the
                     status page of the corrupted model by chromium, which it does not install)
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from pair import SERVED_NAME, NotPossible, Pair, StartFailed, be_stoppable

BLOCK = 4
FAULT = {"block": BLOCK, "tensor": "mlp.up_proj", "kind": "burst", "count": 18, "seed": 4}
QUESTION = "What is the capital of France? Answer with one word."
RIGHT = "Paris"

# Small and frequent scans: a demo has minutes, production has hours.  See docs/settings.md for what they mean.
SETTINGS: dict[str, Any] = {
    "scan": {"every_minutes": 0.25, "grid": "quick", "part_budget_ms": 500, "duty": 0.9},
    "validation": {"max_items": 8, "max_tokens": 24},
    "alerts": {"k": 2, "n": 3},
    "mitigation": {"mode": "enforce"},
}

_SCAN_SECONDS = 150
_ALERT_SECONDS = 200
_MITIGATION_SECONDS = 120

Json = dict[str, Any]


class StepFailed(Exception):
    """A step did not hold; the message says what was expected and what was seen."""


class Webhook:
    """A receiver for alerts on loopback."""

    def __init__(self) -> None:
        self.received: list[Json] = []
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/alerts"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Timeline:
    """What happened, when, and how long it took."""

    began: float = field(default_factory=time.monotonic)
    rows: list[tuple[float, float, str]] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        """Time a step; the yielded function notes its outcome."""
        start = time.monotonic()
        print(f"{start - self.began:6.1f} s  {name} ...", flush=True)
        outcome: list[str] = []
        try:
            yield outcome.append
        except StepFailed as error:
            raise StepFailed(f"{name}: {error}") from None
        end = time.monotonic()
        for line in outcome:
            print(f"          {line}", flush=True)
        self.rows.append((start - self.began, end - start, name))

    def print(self) -> None:
        """The table at the end."""
        print("\n  at s   took s  step")
        for at, took, name in self.rows:
            print(f"{at:6.1f} {took:8.1f}  {name}")


class Operator:
    """What a person would do by hand: ask the model, and talk to the sidecar's API."""

    def __init__(self, pair: Pair) -> None:
        self._model = httpx.Client(base_url=pair.vllm_url, timeout=60.0, trust_env=False)
        self._sidecar = httpx.Client(
            base_url=pair.sidecar_url + "/v1",
            headers={"authorization": f"Bearer {pair.token}"},
            timeout=60.0,
            trust_env=False,
        )

    def ask(self) -> str:
        """The model's greedy answer to the question."""
        response = self._model.post(
            "/v1/chat/completions",
            json={
                "model": SERVED_NAME,
                "messages": [{"role": "user", "content": QUESTION}],
                "temperature": 0,
                "max_tokens": 16,
            },
        )
        if not response.is_success:
            raise StepFailed(f"vLLM answered HTTP {response.status_code}: {response.text}")
        answer: str = response.json()["choices"][0]["message"]["content"]
        return answer

    def call(self, method: str, path: str, body: Json | None = None) -> Any:
        """One request to the sidecar; its JSON answer, None when it has none."""
        response = self._sidecar.request(method, path, json=body)
        if not response.is_success:
            raise StepFailed(f"{method} /v1{path} answered HTTP {response.status_code}: {response.text}")
        return response.json() if response.content else None

    def wait(self, what: str, seconds: float, look: Callable[[], Json | None]) -> Json:
        """Look until there is something."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            seen = look()
            if seen is not None:
                return seen
            time.sleep(0.5)
        raise StepFailed(f"{what} did not happen within {seconds:.0f} s")

    def finding(self, since: float, wanted: Callable[[Json], bool]) -> Json:
        """Wait for an alpha-scan by the clock, begun after `since` (epoch seconds), with a finding that is wanted."""

        def look() -> Json | None:
            for scan in self.call("GET", "/scans"):
                of_blocks = scan["monitor"] == "alpha_scan" and scan["trigger"] == "schedule"
                if of_blocks and scan["state"] == "done" and scan["created_at"] > since:
                    finding: Json = self.call("GET", f"/scans/{scan['id']}")["finding"]
                    if wanted(finding):
                        return finding
            return None

        return self.wait("a scan with such a finding", _SCAN_SECONDS, look)

    def sweep(self) -> Json:
        """Sweep the weights now; its finding, which must not be ok."""

        def begin() -> Json | None:
            # A scan by the clock, or the one that follows a mitigation, may be under way.
            reply = self._sidecar.post("/scans", json={"monitor": "fingerprint"})
            return reply.json() if reply.status_code == 202 else None

        made = self.wait("the begin of a sweep", _SCAN_SECONDS, begin)

        def look() -> Json | None:
            finding: Json | None = self.call("GET", f"/scans/{made['id']}")["finding"]
            return finding

        finding = self.wait("the end of the sweep", _SCAN_SECONDS, look)
        expect(finding["health"] == "failed", f"expected changed weights, got {finding['health']}: {finding['reason']}")
        return finding

    def mitigation(self, name: str, wanted: str) -> Json:
        """Wait until a mitigation is in the state `wanted`."""

        def look() -> Json | None:
            record: Json = self.call("GET", f"/mitigations/{name}")
            if record["state"] in ("failed", "interrupted"):
                raise StepFailed(f"the mitigation ended as {record['state']}: {record['message']}")
            return record if record["state"] == wanted else None

        return self.wait(f"mitigation {wanted}", _MITIGATION_SECONDS, look)


def expect(holds: bool, otherwise: str) -> None:
    """Raise `StepFailed` when a step did not hold."""
    if not holds:
        raise StepFailed(otherwise)


def take_picture(url: str, file: Path) -> None:
    """The page at `url` as a PNG of its upper part."""
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1020,1180",
    ]
    subprocess.run([*command, f"--screenshot={file}", url], check=True, capture_output=True, timeout=60)  # noqa: S603


def play(pair: Pair, webhook: Webhook, timeline: Timeline, picture: Path | None) -> None:
    """All steps in order.  Raises `StepFailed` or `StartFailed`."""
    with timeline.step("start vLLM") as note:
        pair.start_vllm()
        note(f"serving at {pair.vllm_url}")
    with timeline.step("start flipwatch serve") as note:
        pair.start_sidecar()
        note(f"watching from {pair.sidecar_url}")
    operator = Operator(pair)

    with timeline.step("scan the healthy model") as note:
        finding = operator.finding(0.0, lambda _: True)
        healthy_loss = finding["base_loss_nats"]
        expect(finding["health"] == "ok", f"expected ok, got {finding['health']}: {finding['reason']}")
        note(finding["reason"])
    with timeline.step("ask") as note:
        healthy = operator.ask()
        note(repr(healthy))
        expect(RIGHT in healthy, f"the healthy model does not say {RIGHT}: {healthy!r}")

    with timeline.step(f"corrupt {FAULT['count']} values of block {BLOCK}'s {FAULT['tensor']}") as note:
        broken_at = time.time()
        fault = operator.call("POST", "/faults", FAULT)
        note(f"{fault['tensor']}, in memory only")
    with timeline.step("ask again") as note:
        corrupted = operator.ask()
        note(repr(corrupted))
        expect(RIGHT not in corrupted, f"the corrupted model still says {RIGHT}: {corrupted!r}")

    with timeline.step(f"wait for a scheduled scan to flag block {BLOCK}") as note:
        finding = operator.finding(broken_at, lambda finding: list(finding["flagged"]) == [BLOCK])
        note(finding["reason"])
    with timeline.step("wait for the alert at the webhook") as note:
        alert = operator.wait("the alert", _ALERT_SECONDS, lambda: block_alert(webhook.received))
        note(f"{alert['labels']['alertname']}: {alert['annotations']['description']}")
    if picture is not None:
        take_picture(pair.sidecar_url, picture)

    with timeline.step("mitigate over REST: skip the flagged blocks") as note:
        made = operator.call("POST", "/mitigations", {"action": "skip", "blocks": "flagged"})
        skip = operator.mitigation(made["id"], "active")
        expect(list(skip["blocks"]) == [BLOCK], f"expected block {BLOCK} to be skipped, got {skip['blocks']}")
        before, after = skip["loss_before"], skip["loss_after"]
        fell = after is not None and (before is None or after < before)
        expect(fell, f"the loss did not fall: {before} -> {after}")
        note(skip["message"])
    with timeline.step("ask again") as note:
        mitigated = operator.ask()
        note(repr(mitigated))
        expect(RIGHT in mitigated, f"the mitigated model does not say {RIGHT}: {mitigated!r}")

    with timeline.step("sweep the weights: what has changed?") as note:
        note(operator.sweep()["reason"])
    with timeline.step("repair over REST: the right bytes, and the skip ends") as note:
        made = operator.call("POST", "/mitigations", {"action": "repair"})
        repair = operator.mitigation(made["id"], "repaired")
        operator.mitigation(skip["id"], "reverted")
        note(repair["message"])
    with timeline.step("ask again") as note:
        restored = operator.ask()
        note(repr(restored))
        expect(restored == healthy, f"expected the first answer {healthy!r}, got {restored!r}")

    timeline.print()
    print(f"\n{'':<12}{'nats per token':>16}   {QUESTION}")
    for name, loss, answer in (
        ("healthy", healthy_loss, healthy),
        ("corrupted", before, corrupted),
        ("mitigated", after, mitigated),
    ):
        print(f"{name:<12}{'not finite' if loss is None else format(loss, '.3f'):>16}   {answer!r}")
    print("and after the repair the answer is the first one again.\n")


def block_alert(received: list[Json]) -> Json | None:
    """The alert that names the block, from Alertmanager's webhook JSON."""
    for body in received:
        for alert in body["alerts"]:
            if alert["labels"].get("block") == str(BLOCK) and alert["status"] == "firing":
                found: Json = alert
                return found
    return None


def main() -> int:
    """Play the demo; the exit code."""
    parser = argparse.ArgumentParser(description="Break a real vLLM, watch it being found and healed.")
    parser.add_argument("--keep-logs", type=Path, metavar="FOLDER", help="leave logs and the sidecar's data there")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="take a picture of the page of the corrupted model"
    )
    options = parser.parse_args()
    be_stoppable()
    with contextlib.ExitStack() as stack:
        if options.keep_logs is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flipwatch-demo-")))
        else:
            folder = options.keep_logs.resolve()
            folder.mkdir(parents=True, exist_ok=True)
        webhook = Webhook()
        stack.callback(webhook.close)
        settings = SETTINGS | {"alerts": SETTINGS["alerts"] | {"webhook_url": webhook.url}}
        pair = stack.enter_context(Pair(folder, settings))
        timeline = Timeline()
        try:
            pair.check()
            play(pair, webhook, timeline, options.picture and options.picture.resolve())
        except NotPossible as error:
            print(f"demo: {error}", file=sys.stderr)
            return 2
        except StartFailed as error:
            print(f"demo: {error}", file=sys.stderr)
            return 1
        except (StepFailed, httpx.HTTPError, KeyError) as error:
            print(f"demo: FAILED: {type(error).__name__}: {error}", file=sys.stderr)
            for server in (pair.sidecar, pair.vllm):
                print(server.tail(), file=sys.stderr)
            return 1
        pair.stop()
        print(f"Both servers are stopped. The demo held, in {time.monotonic() - timeline.began:.0f} s.")
        return 0


if __name__ == "__main__":
    sys.exit(main())
