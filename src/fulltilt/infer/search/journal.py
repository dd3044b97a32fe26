"""Keep what was measured, so that a search that was interrupted goes on, and its budget with it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulltilt.records.run_folder import append_line, read_lines

FILE = "search.jsonl"


class Journal:
    """Remembers what each question was answered, in a file of one line an answer.

    A search asks the same questions in the same order every time; answers that are there cost nothing.

    Attributes:
        notes: Lines that could not be read.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic):
        self._file, self._clock = folder / FILE, clock
        self._known: dict[str, tuple[Any, float]] = {}
        self.notes: list[str] = []
        for number, line in enumerate(read_lines(self._file), start=1):
            try:
                row = json.loads(line)
                self._known[row["question"]] = row["answer"], float(row["seconds"])
            except (ValueError, KeyError, TypeError) as error:
                self.notes.append(f"{self._file}:{number}: unreadable line left out ({error})")
        self._handed_s, self._told_s = 0.0, clock()

    @property
    def spent_s(self) -> float:
        """Return the seconds of the search so far. A recalled answer counts as long as it took."""
        return self._handed_s + self._clock() - self._told_s

    def forget(self, question: str) -> None:
        """Forget an answer whose files are gone."""
        self._known.pop(question, None)

    def ask(self, question: str, find: Callable[[], Any]) -> Any:
        """Return the recorded answer, or find and record it: a value of JSON.

        Raises:
            StorageError: it cannot be written.
        """
        if question not in self._known:
            answer = json.loads(json.dumps(find()))
            seconds = round(self._clock() - self._told_s, 3)
            append_line(self._file, json.dumps({"question": question, "seconds": seconds, "answer": answer}))
            self._known[question] = answer, seconds
        answer, seconds = self._known[question]
        self._handed_s += seconds
        self._told_s = self._clock()
        return answer
