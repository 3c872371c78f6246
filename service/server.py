"""`flipwatch serve`: one process, one worker, until it is told to stop."""

import signal
import socket
import sys

import structlog
import uvicorn

from . import logs
from .app import create_app
from .settings import ConfigurationError, Settings
from .store import StoreError
from .validation_set import ValidationSetError

_log = structlog.get_logger(__name__)

CANNOT_START = 2


class CannotStartError(Exception):
    """Flipwatch cannot serve; the message is one sentence for the operator."""


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code: 0, or 2 after one line that says why it cannot start."""
    try:
        run(settings)
    except CannotStartError as error:
        print(f"flipwatch: {error}", file=sys.stderr)
        return CANNOT_START
    return 0


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.  Raises `CannotStartError`.

    One worker only: schedule, live state and metrics are those of one process.
    """
    logs.configure(settings.log_level)
    try:
        listener = listen(settings.listen_host, settings.listen_port)
    except (OSError, ValueError) as error:
        why = error.strerror or error if isinstance(error, OSError) else "no name of a host"
        raise CannotStartError(
            f"cannot listen on {settings.listen_host}:{settings.listen_port} ({why}): stop the program that uses the "
            "port, or set listen_host and listen_port."
        ) from None
    with listener:
        try:
            app = create_app(settings)
        except (ConfigurationError, StoreError, ValidationSetError) as error:
            raise CannotStartError(f"{str(error).rstrip('.')}.") from None
        host, port = listener.getsockname()[:2]
        _log.info("listening", host=host, port=port, vllm=settings.public()["vllm"]["url"])
        # Log lines of requests are left out: a scrape every few seconds says nothing, and a URL may hold a secret.
        config = uvicorn.Config(app, log_config=None, access_log=False, workers=1, timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        # uvicorn shuts down cleanly and then raises the signal again, for whoever was there before: that is us, and
        # to be told to stop is no failure.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        server.run(sockets=[listener])
    if not server.started:
        raise CannotStartError("The sidecar did not come up: its log says why.")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.  Raises `OSError` or `ValueError`."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
