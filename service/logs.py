"""Logging: one chain for structlog and the standard library; JSON lines unless a person watches."""

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

_SECRET_WORDS = ("token", "authorization", "api_key", "password", "secret")
_HIDDEN = "**********"


def configure(level: str, stream: TextIO | None = None) -> None:
    """Set logging up for this process; `stream` is standard error unless given."""
    out = stream or sys.stderr
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        hide_secrets,
    ]
    terminal = out.isatty()
    last: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "apscheduler"):
        # One line a request, or a job, every few seconds says nothing.
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def hide_secrets(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Blank the value of every key that sounds like a secret: the second line of defence, after not logging it."""
    return {
        key: _HIDDEN if any(word in key.lower() for word in _SECRET_WORDS) else value for key, value in event.items()
    }
