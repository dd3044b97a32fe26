"""Write every trial to disk before the next one starts, so that a killed search goes on where it was."""

import json
from collections import defaultdict
from collections.abc import Collection

from fulltilt.records import IN_TURNS, Plan, Trial, dumps, encode, find_damage, format_bytes, loads
from fulltilt.records.run_folder import RunFolder, append_line, read_lines

JOURNAL_FILE = "trials.jsonl"
PASSING_LIMIT = "passing_limit_bytes"  # key of a line
ROOMIER = 1.1  # times the memory, before what ran out of it runs again: what is free differs from minute to minute
LARGER = "which ran out of memory"  # ends the reason of a plan that was skipped for a smaller one

Key = tuple[Plan, str]
"""Plan and kind: what tells whether a recorded row answers."""


class Journal:
    """Holds the rows of one search, in memory and, with a folder, on disk.

    The first request for a plan gets the first recorded row of that plan and kind, and so on; groups of rows that were
    measured in turns are handed out whole.

    Args:
        passing_limit_bytes: Of a trial's memory, where that is what happens to be free; None: the limit is the same in
            every search of the folder.
    """

    def __init__(self, folder: RunFolder | None = None, *, passing_limit_bytes: int | None = None):
        self._folder, self._limit_bytes = folder, passing_limit_bytes
        self.trials: list[Trial] = []
        self.notes: list[str] = []
        self._recorded: dict[Key, list[Trial]] = defaultdict(list)
        self._groups: dict[int, list[Trial]] = defaultdict(list)  # by number
        if folder is not None:
            self._read(folder)
        waiting = (*self._recorded.values(), *self._groups.values())
        self.n_found = sum(map(len, waiting))  # without what is left out

    def take(self, key: Key) -> Trial | None:
        """Hand out the next recorded row of this key; None where all were."""
        return self._recorded[key].pop(0) if self.holds(key) else None

    def holds(self, key: Key) -> bool:
        """Return whether ``take`` would hand out a row."""
        return bool(self._recorded.get(key))

    def take_group(self, plans: Collection[Plan]) -> list[Trial]:
        """Hand out the next recorded group of exactly these plans, or of those that failed; nothing where none is."""
        number = self._find_group(plans)
        return [] if number is None else self._groups.pop(number)

    def holds_group(self, plans: Collection[Plan]) -> bool:
        """Return whether ``take_group`` would hand out rows."""
        return self._find_group(plans) is not None

    def _find_group(self, plans: Collection[Plan]) -> int | None:
        wanted = set(plans)
        for number, rows in self._groups.items():
            found = {row.plan for row in rows}
            if found == wanted or (found < wanted and all(row.status != "ok" for row in rows)):
                return number
        return None

    def count_groups(self) -> int:
        """Return the highest number of a group so far."""
        return max((row.group or 0 for row in self.trials), default=0)

    def take_rest(self, kinds: Collection[str]) -> list[Trial]:
        """Hand out all recorded rows of these kinds that are left, in the order they were written."""
        keys = [key for key in self._recorded if key[1] in kinds]
        waiting = {trial.id for key in keys for trial in self._recorded.pop(key)}
        if IN_TURNS in kinds:
            waiting |= {trial.id for rows in self._groups.values() for trial in rows}
            self._groups.clear()
        return [trial for trial in self.trials if trial.id in waiting]

    def append(self, *trials: Trial) -> None:
        """Write a row, or those of a group, durably.

        Raises:
            StorageError: no space left; rows written before are untouched, and the search can be started again.
        """
        if self._folder is not None:
            limit = {} if self._limit_bytes is None else {PASSING_LIMIT: self._limit_bytes}
            append_line(self._folder.path / JOURNAL_FILE, *(dumps(encode(trial) | limit) for trial in trials))
        self.trials += trials

    def next_ids(self, n: int = 1) -> list[str]:
        """Return the next free trial ids, such as ``t8`` after ``t7``."""
        numbers = [int(t.id[1:]) for t in self.trials if t.id[:1] == "t" and t.id[1:].isdigit()]
        return [f"t{max(numbers, default=0) + i}" for i in range(1, n + 1)]

    def _read(self, folder: RunFolder) -> None:
        """Read the rows. A damaged one, or one with impossible figures, is left out and measured again."""
        limits: dict[str, int] = {}  # id → the passing limit, 0 where there was none
        for number, line in enumerate(read_lines(folder.path / JOURNAL_FILE), start=1):
            place = f"{folder.path / JOURNAL_FILE}:{number}"
            try:
                trial = loads(Trial, line)
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                self.notes.append(f"{place}: unreadable row left out ({error})")
                continue
            problem = "an earlier row is called so, too" if trial.id in limits else find_damage(trial)
            if problem is not None:
                self.notes.append(
                    f"{place}: the row was changed or damaged and is left out, to be run again ({trial.id}: {problem})"
                )
                continue
            found = json.loads(line).get(PASSING_LIMIT)
            limits[trial.id] = found if isinstance(found, int) else 0
            self.trials.append(trial)
        outdated = self._list_outdated(limits)
        for trial in self.trials:
            if trial.id in outdated:
                continue
            if trial.group is None:
                self._recorded[trial.plan, trial.kind].append(trial)
            else:
                self._groups[trial.group].append(trial)

    def _list_outdated(self, limits: dict[str, int]) -> list[str]:
        """List the rows that ran out of memory while less was free than later, or now."""
        most_bytes, outdated = self._limit_bytes or 0, []
        for trial in reversed(self.trials):
            is_short = trial.status == "out_of_memory" or (trial.reason or "").endswith(LARGER)
            if is_short and 0 < limits[trial.id] * ROOMIER < most_bytes:
                outdated.insert(0, trial.id)
            most_bytes = max(most_bytes, limits[trial.id])
        if outdated:
            more = f"more was since ({format_bytes(most_bytes)} for a trial)"
            self.notes.append(
                f"{', '.join(outdated)}: ran out of the memory that was free, and {more}: to be run again"
            )
        return outdated
