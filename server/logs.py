"""Log lines that carry the id of the request they belong to, as text or as JSON."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Literal

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request being answered; None outside of any."""

TEXT = "%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s"


class TextLines(logging.Formatter):
    """A line for people."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def format(self, record: logging.LogRecord) -> str:
        """The line, with the request's id where there is one."""
        name = request_id.get()
        record.request = f" [{name}]" if name else ""
        return super().format(record)


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and what a record has beside."""

    def format(self, record: logging.LogRecord) -> str:
        """The object; ``fields`` of the record become its own keys."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": request_id.get(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({key: value for key, value in line.items() if value is not None})


def start_logging(level: str, form: Literal["text", "json"]) -> None:
    """Send everything from ``level`` on to stderr in that form.

    Of ``httpx`` warnings alone: it has a line for every request to an engine's servers, and a
    search makes hundreds.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level != "debug":
        logging.getLogger("httpx").setLevel(logging.WARNING)
