"""`make up` and `make down`: the pair of `make demo`, left running.

python deploy/demo/up.py start [--vllm-port 8000] [--port 9477] [--every-minutes 5]
python deploy/demo/up.py stop
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from pair import REPOSITORY, SERVED_NAME, NotPossible, Pair, StartFailed, be_stoppable, stop_group

FOLDER = REPOSITORY / ".cache" / "up"
STATE = FOLDER / "processes.json"
TOKENS = FOLDER / "tokens.env"


def start(vllm_port: int, port: int, every_minutes: float) -> int:
    """Start both and leave them running."""
    if STATE.exists():
        print("up: already started; `make down` first.", file=sys.stderr)
        return 2
    settings = {
        "scan": {"every_minutes": every_minutes, "grid": "quick"},
        "validation": {"max_items": 8, "max_tokens": 24},
        "mitigation": {"mode": "enforce"},
    }
    pair = Pair(FOLDER, settings, vllm_port=vllm_port, sidecar_port=port)
    try:
        pair.check()
    except NotPossible as error:
        print(f"up: {error}", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    for server in (pair.vllm, pair.sidecar):
        server.log.unlink(missing_ok=True)
    try:
        print("up: starting vLLM, about 40 seconds", flush=True)
        pair.start_vllm()
        print("up: starting flipwatch serve", flush=True)
        pair.start_sidecar()
    except StartFailed as error:
        pair.stop()
        print(f"up: {error}", file=sys.stderr)
        return 2
    except BaseException:
        pair.stop()
        raise
    running = [(server.name, server.process.pid) for server in (pair.sidecar, pair.vllm) if server.process is not None]
    STATE.write_text(json.dumps([(name, pid, started(pid)) for name, pid in running]))
    TOKENS.touch(mode=0o600)
    variables = {
        "FLIPWATCH_URL": pair.sidecar_url,
        "FLIPWATCH_TOKEN": pair.token,
        "FLIPWATCH_CONFIG": str(pair.configuration),
        "FLIPWATCH_PROBE_TOKEN": pair.probe_token,
    }
    TOKENS.write_text("".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()))
    print(
        f"vLLM       {pair.vllm_url}/v1  (OpenAI API, model {SERVED_NAME})\n"
        f"Flipwatch  {pair.sidecar_url}  (status page; /metrics; /v1)\n"
        f"tokens     {TOKENS}\n"
        f"logs       {pair.vllm.log}\n"
        f"           {pair.sidecar.log}\n"
        f"try        . {TOKENS} && .venv/bin/flipwatch doctor && .venv/bin/flipwatch scan\n"
        f"stop       make down"
    )
    return 0


def stop() -> int:
    """Stop what `start` left running."""
    if not STATE.exists():
        print("down: nothing was started.")
        return 0
    for name, pid, since in json.loads(STATE.read_text()):
        # A number that another process has by now is left alone.
        if started(pid) == since:
            stop_group(pid)
            print(f"down: {name} stopped")
    STATE.unlink()
    TOKENS.unlink(missing_ok=True)
    return 0


def started(pid: int) -> str | None:
    """When a process started, in the kernel's clock ticks; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def port_number(text: str) -> int:
    """For argparse, which turns the `ValueError` into its own sentence."""
    port = int(text)
    if not 0 < port < 65536:
        raise ValueError
    return port


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="A real vLLM with Flipwatch beside it, left running.")
    commands = parser.add_subparsers(dest="command", required=True)
    starting = commands.add_parser("start")
    starting.add_argument("--vllm-port", type=port_number, default=8000)
    starting.add_argument("--port", type=port_number, default=9477, help="of flipwatch serve")
    starting.add_argument("--every-minutes", type=float, default=5.0, help="time between scans")
    commands.add_parser("stop")
    options = parser.parse_args()
    be_stoppable()
    if options.command == "stop":
        return stop()
    return start(options.vllm_port, options.port, options.every_minutes)


if __name__ == "__main__":
    sys.exit(main())
