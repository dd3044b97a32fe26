"""Drive a strategy: ask the target, keep the journal, count, and stop at the budget.

A strategy is a generator. It yields ``Ask`` (run this plan; the trial comes back from ``yield``) or ``Skip`` (a row for
a plan that need not run), and decides from what it gets. It does no I/O of its own, so a new strategy is one function.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence

from fulltilt.records import PROBES, WHOLE_RUNS, Plan, Trial
from fulltilt.tuner.search.budget import Refusal
from fulltilt.tuner.search.journal import Journal, Key
from fulltilt.tuner.search.progress import OnEvent, TrialCut, TrialDone, TrialStarted
from fulltilt.tuner.trials.rows import build_row
from fulltilt.tuner.trials.target import Target

END_TO_END = "end_to_end"
REPEAT = "repeat"
BASELINE = "baseline"
RESERVE_SHARE = 0.3  # of the budget at most is kept back for repeats: plans that were never tried come first
N_ALIKE = 3  # plans that failed in the same words: fewer may be one lever's fault


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Run ``plan``, or a part of it: ``kind`` is one of ``records.WHOLE_RUNS`` and ``records.PROBES``.

    Asked twice, the same is run once; of kind "repeat" or "baseline" it is always a fresh process. The runs of a round
    say nothing without each other: it is begun only with time for all, and one that was broken off is begun anew.
    """

    plan: Plan
    why: str
    kind: str = END_TO_END
    comparison: str | None = None  # of repeats: which plans run side by side; rows of another one are no answer
    together: tuple[tuple[Plan, str], ...] = ()  # plan and kind of all runs of the round that this one begins


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """Write a row for ``plan`` that says why it does not run."""

    plan: Plan
    reason: str
    why: str = "part of the grid"


Strategy = Generator[Ask | Skip, Trial, None]


@dataclasses.dataclass
class Session:
    """A search in progress, which answers what strategies ask."""

    target: Target
    journal: Journal
    _: dataclasses.KW_ONLY
    budget_s: float | None = None  # wall time of this search; rows that lay in the folder cost none of it
    reserve_trials: int = 4  # whose time is kept back for measuring the finalists again
    reserve_share: float = RESERVE_SHARE  # of the budget at most is kept back for them
    planned: Mapping[str, int] = dataclasses.field(default_factory=dict)  # kind → trials at most, for progress only
    on_event: OnEvent = lambda event: None
    clock: Callable[[], float] = time.monotonic
    start_s: float | None = None  # when the search began, on ``clock``; None: now
    n_devices: int = 1  # that a trial runs on; for the rows of plans that are skipped

    def __post_init__(self) -> None:
        self._start_s = self.clock() if self.start_s is None else self.start_s
        self.earlier_s = sum(trial.seconds for trial in self.journal.trials)  # of rows that lay in the folder
        self.rows: list[Trial] = []  # whole runs, and plans that were skipped
        self.probes: list[Trial] = []
        self.n_run = 0  # processes started by this session
        self.n_resumed = 0
        self.is_budget_spent = False
        self.cut: Trial | None = None  # what the end of the budget broke off; it says nothing of its plan
        self._known: dict[tuple[Plan, str], Trial] = {}
        self._ahead = dict(self.planned)  # kind → trials that may still come
        self._refusals: list[Refusal] = []
        self._round: int | None = None  # of the comparison that runs
        self._ready_s = 0.0  # into the search, when its first process was begun

    @property
    def left_s(self) -> float:
        """Seconds left of the budget; infinite without one."""
        return math.inf if self.budget_s is None else self.budget_s - self.elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Wall time of this search."""
        return self.clock() - self._start_s

    @property
    def common_error(self) -> Sequence[Trial]:
        """Rows of one error that ``N_ALIKE`` plans or more met while nothing of their kind ran; else none.

        Nothing further is begun then but on request. Out of memory and a deadline are no such errors: another plan may
        well fit. Neither are estimates on fake tensors, which cannot run every model.
        """
        rows = [*self.rows, *self.probes]
        alike: dict[str, list[Trial]] = {}
        for row in rows:
            if row.status == "error" and row.kind != "memory":
                words = (row.reason or "").partition(" (log: ")[0]  # each trial has a log of its own
                alike.setdefault(words, []).append(row)
        for failed in alike.values():
            kinds = {*WHOLE_RUNS, *(row.kind for row in failed)}
            has_run = any(row.status == "ok" and row.kind in kinds for row in rows)
            if len({row.plan for row in failed}) >= N_ALIKE and not has_run:
                return failed
        return ()

    def find_shortfall(self) -> Refusal | None:
        """Say why the same budget would begin nothing that ends; None where a search goes on from these rows."""
        least = min(self._refusals, key=lambda refusal: refusal.search_s, default=None)
        if least is None or self.budget_s is None or least.search_s <= self.budget_s:
            return None
        return least

    def run(self, strategy: Strategy, *, may_use_reserve: bool = False, despite_errors: bool = False) -> bool:
        """Run a strategy to its end; False when the budget, or an error that every plan meets, ended it first."""
        try:
            wish = next(strategy)
            while True:
                if isinstance(wish, Ask) and wish.together:
                    self._round = self.journal.enter_round(wish.comparison, wish.together)
                answer = None
                key = self._find_key(wish)
                if isinstance(wish, Skip) or key[:2] in self._known or self.journal.holds(key):
                    answer = self._answer(wish)
                elif not despite_errors and self.common_error:
                    strategy.close()
                    return False
                elif not self._must_stop(wish, may_use_reserve=may_use_reserve):
                    answer = self._answer(wish)
                if answer is None:
                    self.is_budget_spent = True
                    strategy.close()
                    return False
                wish = strategy.send(answer)
        except StopIteration:
            return True

    def adopt_rest(self, kinds: Collection[str] = (*WHOLE_RUNS, *PROBES)) -> None:
        """Take in the rows of earlier sessions that nobody asked for: a resumed search never reports less."""
        for trial in self.journal.take_rest(kinds):
            self._keep(trial, is_resumed=True)

    def _must_stop(self, wish: Ask, *, may_use_reserve: bool) -> bool:
        """Whether the next trial would not fit. The first whole run begins while any time is left: without it there is
        nothing to say, and the probes before it leave time for one."""
        if self.budget_s is None:
            return False
        whole_s = self._estimate_s(END_TO_END)
        has_run = any(row.status != "skipped" for row in self.rows)
        next_s = max(1, len(wish.together)) * self._estimate_s(wish.kind, wish.plan)
        kept_s = 0.0 if has_run or wish.kind not in PROBES else whole_s
        search_s = (self._ready_s if self.n_run else self.elapsed_s) + next_s + kept_s
        if not may_use_reserve:
            reserve_s = self.reserve_trials * whole_s
            kept_s += min(reserve_s, self.reserve_share * self.budget_s)
            search_s = min(search_s + reserve_s, search_s / (1 - self.reserve_share))
        left_s = self.left_s
        is_first = wish.kind not in PROBES and not has_run
        must_stop = left_s <= 0 or (not is_first and next_s + kept_s > left_s)
        if must_stop and self.cut is None:  # what comes after a run that was broken off would not be begun before it
            n_runs = len(wish.together) or 1
            refusal = Refusal(next_s=next_s, n_runs=n_runs, kept_s=kept_s, left_s=left_s, search_s=search_s)
            self._refusals.append(refusal)
        return must_stop

    def _estimate_s(self, kind: str, plan: Plan | None = None) -> float:
        """Estimate the seconds of a trial: its plan's last, else the median of its like; 0 before the first."""
        ran = self._list_ran()
        alike = [row for row in ran if row.kind == kind or (row.kind in WHOLE_RUNS and kind in WHOLE_RUNS)]
        own = [row.seconds for row in alike if row.plan == plan]
        if own:
            return own[-1]
        others = alike or [row for row in ran if row.kind != "memory"] or ran  # estimates of memory run no step
        return statistics.median([row.seconds for row in others]) if others else 0.0

    def _find_key(self, wish: Ask | Skip) -> Key:
        if isinstance(wish, Skip):
            return wish.plan, END_TO_END, None, None
        return wish.plan, wish.kind, wish.comparison, None if wish.comparison is None else self._round

    def _answer(self, wish: Ask | Skip) -> Trial | None:
        """Return the row, run or known; None where the end of the budget broke the trial off."""
        key = self._find_key(wish)
        if key[:2] in self._known:
            return self._known[key[:2]]
        found = self.journal.take(key)
        if found is not None:
            return self._keep(found, is_resumed=True)
        id = self.journal.next_id()
        if isinstance(wish, Ask):
            trial = self._run_trial(wish, id)
        else:
            why, reason = wish.why, wish.reason
            trial = build_row(wish.plan, id=id, why=why, status="skipped", reason=reason, n_devices=self.n_devices)
        if trial is not None:
            self.journal.append(trial)
        return None if trial is None else self._keep(trial)

    def _run_trial(self, wish: Ask, id: str) -> Trial | None:
        # Probes, whole runs, repeats: what an earlier stage did not need never comes. A whole run before any probe is
        # the user's own plan.
        if wish.kind not in PROBES and (self.probes or wish.kind != END_TO_END):
            is_over = (*PROBES, END_TO_END) if wish.kind != END_TO_END else PROBES
            self._ahead |= dict.fromkeys(is_over, 0)
        n_done, n_planned = self._count()
        self.on_event(
            TrialStarted(id=id, plan=wish.plan, why=wish.why, kind=wish.kind, n_done=n_done, n_planned=n_planned)
        )
        if not self.n_run:
            self._ready_s = self.elapsed_s
        left_s = self.left_s
        trial = self.target(wish.plan, id=id, why=wish.why, kind=wish.kind)
        self.n_run += 1
        if trial.status == "timeout" and self.left_s <= 0:
            self.cut = trial
            search_s = self._ready_s + trial.seconds
            self._refusals.append(Refusal(next_s=trial.seconds, left_s=left_s, search_s=search_s, is_cut=True))
            self.on_event(TrialCut(id=id, seconds=trial.seconds))
            return None
        if wish.comparison is not None:
            trial = dataclasses.replace(trial, comparison=wish.comparison, round=self._round)
        return trial

    def _keep(self, trial: Trial, *, is_resumed: bool = False) -> Trial:
        self.n_resumed += is_resumed
        if trial.kind in (END_TO_END, *PROBES):
            self._known[trial.plan, trial.kind] = trial
        (self.probes if trial.kind in PROBES else self.rows).append(trial)
        stage = REPEAT if trial.kind == BASELINE else trial.kind
        self._ahead[stage] = max(0, self._ahead.get(stage, 0) - 1)
        n_done, n_planned = self._count()
        left_s = self._estimate_left_s()
        self.on_event(
            TrialDone(trial=trial, n_done=n_done, n_planned=n_planned, seconds_left=left_s, is_resumed=is_resumed)
        )
        return trial

    def _list_ran(self) -> list[Trial]:
        return [row for row in (*self.rows, *self.probes) if row.seconds > 0]

    def _estimate_left_s(self) -> float | None:
        """Estimate the seconds left at most: what may come, each as long as its like, within the budget."""
        ahead_s = sum(n_left * self._estimate_s(kind) for kind, n_left in self._ahead.items())
        left_s = max(0.0, min(ahead_s if self._list_ran() else math.inf, self.left_s))
        return left_s if math.isfinite(left_s) else None

    def _count(self) -> tuple[int, int]:
        """Count the trials that are done, and all that are planned, no more than the budget holds at this pace."""
        n_done, n_left, ran = len(self.rows) + len(self.probes), sum(self._ahead.values()), self._list_ran()
        if self.budget_s is not None and ran:
            n_left = min(n_left, max(0, int(self.left_s / statistics.fmean(row.seconds for row in ran))))
        return n_done, n_done + n_left
