"""Keep a log of what a server does, for programs. It is ``server.log``, a JSON object a line.

A line has time, level, event, mostly experiment and attempt, and a message. No token is ever part of one.
"""

import contextlib
import datetime
import json
import logging
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

LOG = "server.log"
MOST_BYTES, N_OLD = 10 << 20, 5  # server.log.1 is the newest of the old ones
LEVELS = {"fulltilt.lab": logging.INFO, "uvicorn.error": logging.WARNING}


def tell(event: str, **fields: Any) -> dict[str, Any]:
    """Return the ``extra`` of a logging call: the event's name, and values that its line shall have."""
    return {"event": event, "fields": fields}


@contextlib.contextmanager
def keep_log(folder: Path) -> Iterator[None]:
    """Write what the lab says to its log for the length of the block."""
    handler = RotatingFileHandler(folder / LOG, maxBytes=MOST_BYTES, backupCount=N_OLD, encoding="utf-8", delay=True)
    handler.setFormatter(_LineFormatter())
    # Python itself prints warnings that nobody handles, and ours is a handler.
    handlers = [handler] if logging.getLogger().handlers else [handler, logging.lastResort or handler]
    before = {name: logging.getLogger(name).level for name in LEVELS}
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
        for each in handlers:
            logging.getLogger(name).addHandler(each)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
            for each in handlers:
                logging.getLogger(name).removeHandler(each)
        handler.close()


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "message"),
            **getattr(record, "fields", {}),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
