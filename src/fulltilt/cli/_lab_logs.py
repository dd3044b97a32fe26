"""``fulltilt lab logs``: print what the trainings of an experiment printed, and go on as they print."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fulltilt.cli import EXIT_INTERRUPTED
from fulltilt.cli._shared import write_json
from fulltilt.cli.lab import FOLLOW_S, find_address
from fulltilt.errors import UsageError, strip_control_codes
from fulltilt.lab.client import Client, NoAnswerError, connect
from fulltilt.lab.serving import find_server
from fulltilt.lab.states import OVER
from fulltilt.records import VERSION


def run_logs(args: argparse.Namespace) -> int:
    """Print the log of an experiment; with ``--follow`` until it is over, also when the server is away meanwhile."""
    log, is_told = _Log(args), False
    with _end_silently() if args.follow else contextlib.nullcontext():
        while not _read_on(args, log):
            if not is_told:
                print("the lab is not served now; this goes on when it is", file=sys.stderr)
            is_told = True
            while args.url is None and find_server(Path(args.lab)) is None:
                time.sleep(FOLLOW_S)
            time.sleep(FOLLOW_S)
    if not log.is_in_lines:
        write_json(args.json, log.build_document())
    return 0


@contextlib.contextmanager
def _end_silently() -> Iterator[None]:
    """Let Ctrl-C, the usual end of following, end the process without a word, also amid a request."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # a background job: it stays ignored
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _read_on(args: argparse.Namespace, log: _Log) -> bool:
    """Print what there is, and what comes as long as a server answers; return whether that is all."""
    try:
        with connect(Path(args.lab), address=find_address(args)) as client:
            while not log.print_rest(client):
                if not args.follow:
                    if log.is_empty:
                        raise UsageError(f"{args.id} has printed nothing yet; --follow waits for it")
                    return True
                if not client.is_served:
                    return False  # without a server nothing runs; and one that starts needs the folder
                time.sleep(FOLLOW_S)
            return True
    except NoAnswerError:
        if log.is_new or not args.follow:
            raise
        return False


class _Log:
    """The log of all attempts at an experiment, and how far it was printed."""

    def __init__(self, args: argparse.Namespace):
        self._id, self._attempt, self._offset = args.id, 1, 0
        self._json, self.is_in_lines = args.json, args.json == "-" and args.follow
        self._kept: dict[int, list[bytes]] = {}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.is_new = self.is_empty = True

    def print_rest(self, client: Client) -> bool:
        """Print what is there and was not printed yet; return whether the experiment is over."""
        found = client.get(f"/api/experiments/{self._id}")["experiment"]  # before the log: what is over is complete
        self.is_new = False
        while True:
            data = client.read(f"/api/experiments/{self._id}/log", attempt=self._attempt, offset=self._offset)
            if data:
                self._offset += len(data)
                self._print(data)
            elif self._attempt < found["attempt"]:
                self._attempt, self._offset = self._attempt + 1, 0
            else:
                return found["state"] in (*OVER, "held")

    def build_document(self) -> dict[str, Any]:
        texts = {number: b"".join(pieces).decode(errors="replace") for number, pieces in self._kept.items()}
        attempts = [{"attempt": number, "text": text} for number, text in texts.items()]
        return {"version": VERSION, "id": self._id, "attempts": attempts}

    def _print(self, data: bytes) -> None:
        self.is_empty = False
        if self.is_in_lines:
            write_json(self._json, json.dumps({"attempt": self._attempt, "text": self._decoder.decode(data)}))
        elif self._json:
            self._kept.setdefault(self._attempt, []).append(data)
        if self._json == "-":
            return
        sys.stdout.flush()
        if sys.stdout.isatty():
            sys.stdout.write(strip_control_codes(self._decoder.decode(data)))
        else:
            sys.stdout.buffer.write(data)
        sys.stdout.flush()
