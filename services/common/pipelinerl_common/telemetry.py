"""Logging: one readable line per event on stderr.

2026-11-29T20:00:00.123Z INFO trainer-0 step=3 reward=0.41

Within a trace the line ends with its id: trace=4bf92f3577b34da6a3ce929d0e0e4736.
"""

import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from pipelinerl_common.tracing.span import current

_NOISY = ("nats", "grpc", "asyncio", "aiohttp", "urllib3", "filelock", "httpx", "opentelemetry")
"""Libraries that log from WARNING on only, unless everything is at DEBUG."""

LEVELS = ("debug", "info", "warning", "error")


class _LineFormatter(logging.Formatter):
    """Writes an error as its type and message on the event's own line, and its traceback only with
    `tracebacks`.
    """

    def __init__(self, name: str, tracebacks: bool) -> None:
        super().__init__()
        self._name = name
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        message = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            message += f" error={type(error).__name__}: {error}"
        if trace_id := current().trace_id:
            message += f" trace={trace_id}"
        line = f"{time}Z {record.levelname} {self._name} {' | '.join(message.splitlines())}"
        if error is not None and self._tracebacks and record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure_logging(name: str, level: str) -> None:
    """Sends log records of `level` ("debug", "info", "warning", "error") and above to stderr,
    marked with `name`.
    """
    threshold = getattr(logging, level.upper())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(name, tracebacks=threshold <= logging.DEBUG))
    logging.basicConfig(level=threshold, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for library in _NOISY:
        logging.getLogger(library).setLevel(
            threshold if threshold <= logging.DEBUG else max(threshold, logging.WARNING)
        )


def fields(**values: object) -> str:
    """`key=value` pairs for a log line, floats with 4 significant digits: fields(step=3,
    reward=0.41) is "step=3 reward=0.41".
    """
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in values.items()
    )


def memory_bytes() -> float:
    """Resident memory of this process; 0 where the system does not report it."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0.0
    return float(int(pages) * os.sysconf("SC_PAGE_SIZE"))
