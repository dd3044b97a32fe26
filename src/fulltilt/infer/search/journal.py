"""Keep what was measured, so that a search that was interrupted goes on, and its budget with it."""

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulltilt.records.run_folder import append_line, read_lines

FILE = "search.jsonl"
GROWN, GROWN_S = 1.1, 5.0  # what was cut is tried again where so many times, or seconds, more are left


class OverError(Exception):
    """The time that is left does not suffice."""


class Journal:
    """Remembers what each question was answered, in a file of one line an answer.

    A search asks the same questions in the same order every time; answers that are there cost nothing. So are questions
    for whose answer the time did not suffice.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic):
        self._file, self._clock = folder / FILE, clock
        self._known: dict[str, dict[str, Any]] = {}
        for line in read_lines(self._file):
            with contextlib.suppress(ValueError, LookupError, TypeError):  # damaged: it is asked again
                row = json.loads(line)
                self._known[row["question"]] = {name: row[name] for name in ("answer", "seconds", "cut_s")}
        self._handed_s, self._told_s = 0.0, clock()

    @property
    def spent_s(self) -> float:
        """Return the seconds of the search so far. A recalled answer counts as long as it took."""
        return self._handed_s + self._clock() - self._told_s

    def ask(
        self, question: str, find: Callable[[float], Any], *, limit_s: float = math.inf, expected_s: float = 0.0
    ) -> Any:
        """Return the recorded answer, or find and record it: a value of JSON.

        Args:
            find: Takes ``limit_s``, and raises OverError where it has no answer by then.
            expected_s: What it may take; where less is left it is not begun.

        Raises:
            OverError: the time does not suffice. StorageError: the answer cannot be written.
        """
        row = self._known.get(question)
        if row is None or (row["cut_s"] is not None and limit_s > GROWN * row["cut_s"] + GROWN_S):
            before_s = row["seconds"] if row else 0.0  # of attempts that were cut
            answer = cut_s = None
            try:
                if expected_s > limit_s:
                    raise OverError
                answer = json.loads(json.dumps(find(limit_s)))
            except OverError:
                cut_s = max(0.0, limit_s)
            row = {"answer": answer, "seconds": round(before_s + self._clock() - self._told_s, 3), "cut_s": cut_s}
            append_line(self._file, json.dumps({"question": question, **row}))
            self._known[question] = row
        self._handed_s += row["seconds"]
        self._told_s = self._clock()
        if row["cut_s"] is not None:
            raise OverError
        return row["answer"]
