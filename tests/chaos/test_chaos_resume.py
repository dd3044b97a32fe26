"""A search that is killed again and again, at moments drawn by chance, still ends as if nothing had been."""

from __future__ import annotations

import collections
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import search_bodies
from tests.faults.leftovers import find_files, find_processes, watch_leftovers

from fulltilt.records import Trial, loads
from fulltilt.report.html import build_tune_html
from fulltilt.tuner import TuneResult
from fulltilt.tuner.picks.finalists import N_FINALISTS

N_KILLS = int(os.environ.get("FULLTILT_CHAOS_KILLS", "20"))
SEED = int(os.environ.get("FULLTILT_CHAOS_SEED") or secrets.randbelow(10**6))
PATIENCE_S = 120.0
N_TOGETHER = N_FINALISTS + 1  # plans that take turns at most: the finalists and the user's own


def read_if_there(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


class KilledSearch:
    """Searches in one run folder, one after the other, with a folder for temporary files that is watched."""

    def __init__(self, folder: Path, tmp: Path, mark: str):
        self.folder, self.tmp, self.mark = folder, tmp, mark
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        self.journal = folder / "out" / "trials.jsonl"

    def start(self) -> subprocess.Popen:
        env = os.environ | {"TMPDIR": str(self.tmp), "CHAOS_NOTES": str(self.notes)}
        program = [sys.executable, search_bodies.__file__, str(self.folder / "out")]
        with (self.folder / "search.log").open("wb") as log:
            return subprocess.Popen(program, env=env, cwd=self.folder, stdout=subprocess.PIPE, stderr=log)

    def finish(self) -> int:
        """Run to the end; returns how many rows were taken over."""
        search = self.start()
        output, _ = search.communicate()
        assert search.returncode == 0, (self.folder / "search.log").read_text()
        return int(output)

    def kill_at(self, n_rows: int, delay_s: float) -> None:
        """SIGKILL when ``n_rows`` more rows are there and ``delay_s`` has passed, or the search has ended by itself."""
        wanted = self.count_lines() + n_rows
        search = self.start()
        wait_until(lambda: self.count_lines() >= wanted or search.poll() is not None)
        time.sleep(delay_s)  # no condition to wait for: the moment is drawn by chance
        search.send_signal(signal.SIGKILL)
        search.communicate()

    def count_lines(self) -> int:
        return read_if_there(self.journal).count("\n")

    def read_rows(self) -> list[Trial]:
        return [loads(Trial, line) for line in read_if_there(self.journal).split("\n")[:-1]]

    def count_starts(self) -> int:
        return len(read_if_there(self.notes / search_bodies.STARTS).split())

    def find_leftovers(self) -> list[str]:
        return find_processes(self.mark) + find_files(self.tmp, self.notes / "names")


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_a_search_that_is_killed_again_and_again_ends_as_one_that_was_not(tmp_path, say):
    rng = random.Random(SEED)
    say(f"\nchaos: a search killed {N_KILLS} times, FULLTILT_CHAOS_SEED={SEED}")
    with watch_leftovers() as (tmp, mark):
        whole = KilledSearch(tmp_path / "whole", tmp, mark)
        whole.finish()
        assert whole.find_leftovers() == []
        search = KilledSearch(tmp_path / "killed", tmp, mark)
        for number in range(1, N_KILLS + 1):
            rows, n_starts = search.read_rows(), search.count_starts()
            search.kill_at(rng.randint(0, 4), rng.uniform(0, 0.4))
            wait_until(lambda: not search.find_leftovers(), search.find_leftovers)
            after = search.read_rows()
            assert after[: len(rows)] == rows
            n_more = sum(row.status != "skipped" for row in after[len(rows) :])
            n_lost = search.count_starts() - n_starts - n_more
            assert 0 <= n_lost <= N_TOGETHER, "only the trial or the group in flight may be lost"
            say(f"  kill {number}: {len(after)} rows, {len(after) - len(rows)} of them new")
        rows = search.read_rows()
        n_taken_over = search.finish()
        assert search.find_leftovers() == []
    assert search.read_rows()[: len(rows)] == rows
    assert n_taken_over == len(rows)
    assert count_ends(drop_torn_groups(search.read_rows())) == count_ends(whole.read_rows())
    document = json.loads((search.folder / "out" / "tune.json").read_text())
    result = TuneResult.read(document)
    assert {row.id for row in (*result.trials, *result.repeats)} == {row.id for row in search.read_rows()}
    assert {row.status for row in result.trials} == {"ok", "out_of_memory", "error", "skipped"}
    chosen = result.picks.recommended
    assert (chosen.trial.plan["batch_size"], chosen.proven) == (64, True)
    assert build_tune_html(document).rstrip().endswith("</html>")


def drop_torn_groups(rows: list[Trial]) -> list[Trial]:
    """Without groups of which a kill left some rows: the next one has the same plans and more."""
    groups = collections.defaultdict(set)
    for row in rows:
        groups[row.group].add(row.plan)
    return [row for row in rows if row.group is None or not groups[row.group] < groups.get(row.group + 1, set())]


def count_ends(rows: list[Trial]) -> collections.Counter:
    """How often each plan ended how, for what: the same for two searches that came to the same."""
    assert len({row.id for row in rows}) == len(rows)
    return collections.Counter((row.plan, row.kind, row.status) for row in rows)


def wait_until(condition, describe=lambda: "") -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain: {describe()}"
        time.sleep(0.005)
