"""Write every trial to disk before the next one starts, so that a killed search goes on where it was."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from fulltilt.records import Plan, Trial, dumps, find_damage, loads
from fulltilt.records.run_folder import RunFolder, append_line, read_lines

JOURNAL_FILE = "trials.jsonl"

Key = tuple[Plan, str, str | None, int | None]
"""Plan, kind, comparison and round: what tells whether a recorded row answers."""


class Journal:
    """Holds the rows of one search, in memory and, with a folder, on disk.

    The first request for a plan gets the first recorded row of that plan and kind, and so on: a plan that is measured
    three times is not measured a fourth time on resume.
    """

    def __init__(self, folder: RunFolder | None = None):
        self._folder = folder
        self.trials: list[Trial] = []
        self.notes: list[str] = []
        self._recorded: dict[Key, list[Trial]] = defaultdict(list)
        if folder is not None:
            self._read(folder)
        self.n_found = len(self.trials)

    def take(self, key: Key) -> Trial | None:
        """Hand out the next recorded row of this key; None where all were."""
        return self._recorded[key].pop(0) if self.holds(key) else None

    def holds(self, key: Key) -> bool:
        """Return whether ``take`` would hand out a row."""
        return bool(self._recorded.get(key))

    def enter_round(self, comparison: str | None, runs: Sequence[tuple[Plan, str]]) -> int:
        """Return the next fully recorded round's number, else a new one; set aside rows of incomplete rounds.

        Rows made beside each other tell which plan is faster, and one made after a kill, minutes later, once decided it
        alone.
        """
        recorded = {key[3] for key, rows in self._recorded.items() if key[2] == comparison and rows}
        for number in sorted(number for number in recorded if number is not None):
            if all(self.holds((plan, kind, comparison, number)) for plan, kind in runs):
                return number
            broken = [key for key in self._recorded if key[2:] == (comparison, number)]
            ids = ", ".join(row.id for key in broken for row in self._recorded.pop(key))
            self.notes.append(f"{ids}: of a round that was broken off, set aside: a round counts only whole")
        return 1 + max((row.round or 0 for row in self.trials if row.comparison == comparison), default=0)

    def take_rest(self, kinds: Collection[str]) -> list[Trial]:
        """Hand out all recorded rows of these kinds that are left, in the order they were written."""
        keys = [key for key in self._recorded if key[1] in kinds]
        waiting = {trial.id for key in keys for trial in self._recorded.pop(key)}
        return [trial for trial in self.trials if trial.id in waiting]

    def append(self, trial: Trial) -> None:
        """Write a row durably.

        Raises:
            StorageError: no space left; rows written before are untouched, and the search can be started again.
        """
        if self._folder is not None:
            append_line(self._folder.path / JOURNAL_FILE, dumps(trial))
        self.trials.append(trial)

    def next_id(self) -> str:
        """Return the next free trial id, such as ``t8`` after ``t7``."""
        numbers = [int(t.id[1:]) for t in self.trials if t.id[:1] == "t" and t.id[1:].isdigit()]
        return f"t{max(numbers, default=0) + 1}"

    def _read(self, folder: RunFolder) -> None:
        """Read the rows. A damaged one, or one with impossible figures, is left out and measured again."""
        seen: set[str] = set()
        for number, line in enumerate(read_lines(folder.path / JOURNAL_FILE), start=1):
            place = f"{folder.path / JOURNAL_FILE}:{number}"
            try:
                trial = loads(Trial, line)
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                self.notes.append(f"{place}: unreadable row left out ({error})")
                continue
            problem = "an earlier row is called so, too" if trial.id in seen else find_damage(trial)
            if problem is not None:
                self.notes.append(
                    f"{place}: the row was changed or damaged and is left out, to be run again ({trial.id}: {problem})"
                )
                continue
            seen.add(trial.id)
            self.trials.append(trial)
            self._recorded[trial.plan, trial.kind, trial.comparison, trial.round].append(trial)
