"""A thousand trials that fail in every way we know, in one search: each gets its status, and none leaves a thing."""

from __future__ import annotations

import collections
import dataclasses
import gc
import json
import os
import secrets
import time
from pathlib import Path

import chaos_bodies
import pytest
from chaos_catalogue import HANG_DEADLINE_S, Fault, build_schedule, list_faults
from tests.faults import leftovers
from tests.faults.leftovers import find_processes, read_peak_mib, watch_leftovers

from fulltilt.levers import default_plan
from fulltilt.records import Trial, TrialRequest, WorkloadSource
from fulltilt.records.run_folder import RunFolder
from fulltilt.tuner.picks.finalists import select_finalists
from fulltilt.tuner.search.journal import JOURNAL_FILE, Journal
from fulltilt.tuner.search.session import Ask, Session
from fulltilt.tuner.trials.process import Zygote
from fulltilt.tuner.trials.target import ProcessTarget

N_TRIALS = int(os.environ.get("FULLTILT_CHAOS_TRIALS", "1000"))
SEED = int(os.environ.get("FULLTILT_CHAOS_SEED") or secrets.randbelow(10**6))
WARM_TRIALS = 200  # the first ones fill caches
MEMORY_PER_TRIAL_KIB = 32.0  # a row of the journal has some kilobytes
PEAK_MIB = 96.0  # above the resident set at the start: one and a half times the longest line that is kept
Tallies = dict[str, list[tuple[float, bool]]]  # fault → seconds and whether the status was wrong, of each trial


class WatchedTarget:
    """Runs each plan's fault and looks around afterwards."""

    def __init__(self, schedule: list[Fault], folder: Path, tmp: Path, mark: str, say):
        self.schedule, self.folder, self.tmp, self.mark, self.say = schedule, folder, tmp, mark, say
        self.notes = folder / "notes"
        self.problems: list[str] = []
        self.tallies: Tallies = collections.defaultdict(list)
        self.zygote = Zygote(folder / "zygote.log", body="chaos_bodies:do", preload=("json",))
        config = {"schedule": str(folder / "schedule.json"), "notes": str(self.notes)}
        (folder / "schedule.json").write_text(json.dumps([dataclasses.asdict(fault) for fault in schedule]))
        here = str(Path(chaos_bodies.__file__).parent)
        source = WorkloadSource(config=config, base_dir=".", import_paths=(here,))
        self.usual, self.short = (
            ProcessTarget(TrialRequest(source=source, device="cpu", deadline_s=deadline_s), folder, zygote=self.zygote)
            for deadline_s in (300.0, HANG_DEADLINE_S)
        )
        self.descriptors: dict[int, int] = {}
        self.warm_mib = 0.0

    def __call__(self, plan, *, id: str, **asked) -> Trial:
        number = plan["batch_size"]
        fault = self.schedule[number - 1]
        if fault.has_full_log:
            (self.folder / "logs").mkdir(exist_ok=True)
            (self.folder / "logs" / f"{id}.log").symlink_to("/dev/full")
        trial = (self.short if fault.hangs else self.usual)(plan, id=id, **asked)
        self._judge(fault, trial)
        self._look_around(fault, id)
        if number == min(WARM_TRIALS, len(self.schedule)):
            gc.collect()
            leftovers.reset_peak_memory()
            self.warm_mib = read_peak_mib()
        if number % 100 == 0:
            self.say(f"  {number} of {len(self.schedule)}, {len(self.problems)} problems")
        return trial

    def _judge(self, fault: Fault, trial: Trial) -> None:
        reason = trial.reason or ""
        is_wrong = trial.status != fault.status or fault.words not in reason or bool(reason) == (trial.status == "ok")
        self.tallies[fault.name].append((trial.seconds, is_wrong))
        if is_wrong:
            wanted = f"{fault.status} ({fault.words!r})"
            self.problems.append(f"{trial.id} {fault.name}: wanted {wanted}, got {trial.status} ({reason})")

    def _look_around(self, fault: Fault, id: str) -> None:
        zygote = self.zygote.pid
        left = find_processes(self.mark, spare={zygote}) + leftovers.find_files(self.tmp, self.notes)
        left += [f"child {pid}" for pid in leftovers.find_children(os.getpid()) if pid != zygote]
        self.notes.unlink(missing_ok=True)
        for pid in filter(None, (os.getpid(), zygote)):
            n_open = leftovers.count_descriptors(pid)
            if n_open > self.descriptors.setdefault(pid, n_open):
                left.append(f"{n_open} descriptors of process {pid}, {self.descriptors[pid]} at first")
        self.problems += [f"{id} {fault.name}: left {what}" for what in left]


@pytest.fixture
def watched():
    with watch_leftovers() as watched:
        yield watched


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_every_injected_failure_gets_its_status_and_leaves_nothing(tmp_path, watched, monkeypatch, say):
    counter = tmp_path / "oom_kills"
    counter.write_text("0")
    monkeypatch.setattr("fulltilt.tuner.trials.process.read_oom_kills", lambda: int(counter.read_text()))
    tmp, mark = watched
    schedule = build_schedule(list_faults(tmp_path), N_TRIALS, SEED)
    say(f"\nchaos: {N_TRIALS} trials of {len(list_faults(tmp_path))} faults, FULLTILT_CHAOS_SEED={SEED}")
    target = WatchedTarget(schedule, tmp_path, tmp, mark, say)
    start_s = time.monotonic()
    with RunFolder(tmp_path / "out", fingerprint_parts={}, command="tune", results=[JOURNAL_FILE]) as folder:
        session = Session(target, Journal(folder))
        session.run(Ask(plan=schedule_plan(number), why="chaos") for number in range(1, N_TRIALS + 1))
        target.zygote.close()
        kept = Journal(folder)
    say(build_table(target.tallies, time.monotonic() - start_s))

    assert target.problems == []
    assert find_processes(mark) == []
    gc.collect()
    peak_mib = read_peak_mib() - target.warm_mib
    assert peak_mib < PEAK_MIB + MEMORY_PER_TRIAL_KIB / 1024 * (N_TRIALS - WARM_TRIALS)
    assert (kept.trials, kept.notes) == (session.rows, [])
    finalists = select_finalists(session.rows, limit_gib=None)
    assert {schedule[plan["batch_size"] - 1].status for plan in finalists} == {"ok"}


def schedule_plan(number: int):
    return default_plan({"batch_size": number})


def build_table(tallies: Tallies, seconds: float) -> str:
    lines = [f"{'fault':<36}{'n':>5}{'wrong':>7}{'s each':>9}"]
    for name, ends in sorted(tallies.items()):
        lasted_s, wrong = zip(*ends, strict=True)
        lines.append(f"{name:<36}{len(ends):>5}{sum(wrong):>7}{sum(lasted_s) / len(ends):>9.2f}")
    lines.append(f"{N_TRIALS} trials in {seconds:.0f} s (seed {SEED})")
    return "\n".join(lines)
