"""Log lines on stderr: plain, or one JSON object each, with the trace that they belong to."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

from kvwire.errors import ConfigError
from kvwire.telemetry import tracing

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """time (UTC), level, logger, message, server_id, trace_id and span_id, and whatever `extra=` named."""

    def __init__(self, server_id: str = "") -> None:
        super().__init__()
        self._server_id = server_id

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._server_id:
            line["server_id"] = self._server_id
        ids = tracing.current_ids()
        if ids is not None:
            line["trace_id"], line["span_id"] = ids
        for name, value in vars(record).items():
            if name not in _STANDARD:
                line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class PlainFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")


def setup_logging(
    level: str = "info", *, json_lines: bool = False, server_id: str = "", stream: TextIO | None = None
) -> logging.Handler:
    """Send the `kvwire` loggers to stderr. For programs: a library leaves logging to whoever imports it."""
    if level.lower() not in LEVELS:
        known = ", ".join(LEVELS)
        raise ConfigError(f"The log level {level!r} is unknown: use one of {known}.", setting="log_level")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(server_id) if json_lines else PlainFormatter())
    logger = logging.getLogger("kvwire")
    for earlier in logger.handlers[:]:
        logger.removeHandler(earlier)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return handler
