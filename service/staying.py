"""`flipwatch serve --stay`: alive also while it cannot start, for a container in the pod of the model.

A pod is not ready while one of its containers is down, and the kubelet waits longer and longer before it starts
one that ends again and again.  A typing error in a setting of the monitor would so take the model out of rotation.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from .problem import Kind, document
from .server import CannotStartError, listen, run
from .settings import ConfigurationError, Settings

RETRY_SECONDS = 30.0


def serve_staying(load: Callable[[], Settings], retry_seconds: float = RETRY_SECONDS) -> int:
    """Serve with the settings that `load` returns, until SIGTERM or SIGINT; the exit code, which is 0.

    Where that is not possible it says why, once, answers in its own way (see `_refusal`), and tries again after
    `retry_seconds`: a Secret or a ConfigMap that is put right is read anew.
    """
    said = None
    while True:
        try:
            run(load())
            return 0
        except (ConfigurationError, CannotStartError) as error:
            why = str(error)
        with _told_to_stop() as told:
            if why != said:
                print(f"flipwatch: {why}", file=sys.stderr, flush=True)
                said = why
            _answer(why, told, retry_seconds)
        if told.is_set():
            return 0


@contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """Set by SIGTERM and SIGINT; behind it they end the process again, as they do at any start."""
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _answer(why: str, told: threading.Event, seconds: float) -> None:
    """Answer for so long, or until told to stop.

    Where it listens is read from the environment alone, since the settings may be what is wrong.
    """
    server = uvicorn.Server(uvicorn.Config(_refusal(why), log_config=None, access_log=False, lifespan="off"))
    try:
        listener = listen(
            os.environ.get("FLIPWATCH_LISTEN_HOST", "127.0.0.1"), int(os.environ.get("FLIPWATCH_LISTEN_PORT", "9477"))
        )
    except (OSError, ValueError, OverflowError):
        told.wait(seconds)
        return

    def end() -> None:
        told.wait(seconds)
        server.should_exit = True

    with listener:
        threading.Thread(target=end, daemon=True).start()
        # uvicorn takes the signals meanwhile, and raises them again behind it.
        server.run(sockets=[listener])


def _refusal(why: str) -> Starlette:
    """`/livez` answers as ever; everything else is a problem document with the reason, `/readyz` and `/metrics` too."""

    async def alive(_: Request) -> JSONResponse:
        return JSONResponse({"status": "alive"})

    async def refused(_: Request) -> JSONResponse:
        return document(Kind.NOT_READY, why)

    methods = ["GET", "POST", "PUT", "DELETE"]
    return Starlette(routes=[Route("/livez", alive), Route("/{path:path}", refused, methods=methods)])
