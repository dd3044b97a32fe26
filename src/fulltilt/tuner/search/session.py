"""Drive a strategy: ask the target, keep the journal, count, and stop at the budget.

A strategy is a generator. It yields ``Ask`` (run this plan; the trial comes back from ``yield``), ``Skip`` (a row for a
plan that need not run) or ``TakeTurns``, and decides from what it gets. It does no I/O of its own, so a new strategy is
one function.
"""

import dataclasses
import math
import re
import statistics
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

from fulltilt.records import IN_TURNS, PROBES, WHOLE_RUN, Plan, Trial
from fulltilt.stats.alternation import LOOKS, MIN_ROUNDS, MOST_S
from fulltilt.tuner.search.budget import Refusal
from fulltilt.tuner.search.journal import Journal, Key
from fulltilt.tuner.search.progress import OnEvent, TrialCut, TrialDone, TrialStarted, TurnsDone
from fulltilt.tuner.trials.rows import build_row
from fulltilt.tuner.trials.target import Target

PROOF_S = 30.0  # kept back for the proof at least
PROOF_MARGIN = 1.1  # over what its first look is expected to take
RESERVE_SHARE = 0.4  # of the budget at most is kept back for it
TURNS_S = 0.3  # of a plan in a group of short steps
N_TURN_STEPS = 48  # of a plan in a group: two blocks in each of four rounds, of four steps and two that are not timed
N_ALIKE = 3  # plans that failed in the same words: fewer may be one lever's fault
N_ALIKE_OWN = 2  # where one of them is the user's own


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Run ``plan``, or a part of it: ``kind`` is ``records.WHOLE_RUN`` or one of ``records.PROBES``.

    Asked twice, the same is run once.

    Attributes:
        predicted_samples_per_s: By the strategy's models, where they chose the plan; kept in the row.
    """

    plan: Plan
    why: str
    kind: str = WHOLE_RUN
    predicted_samples_per_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TakeTurns:
    """Start a fresh process of each plan and have them take turns; a row of each comes back, or those that failed."""

    plans: tuple[Plan, ...]
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """Write a row for ``plan`` that says why it does not run."""

    plan: Plan
    reason: str
    why: str = "part of the grid"


Strategy = Generator[Ask | Skip, Trial, None]
Wish = Ask | Skip | TakeTurns


@dataclasses.dataclass
class Session:
    """A search in progress, which answers what strategies ask."""

    target: Target
    journal: Journal
    _: dataclasses.KW_ONLY
    budget_s: float | None = None  # wall time of this search; rows that lay in the folder cost none of it
    planned: Mapping[str, int] = dataclasses.field(default_factory=dict)  # kind → trials at most, for progress only
    on_event: OnEvent = lambda event: None
    clock: Callable[[], float] = time.monotonic
    start_s: float | None = None  # when the search began, on ``clock``; None: now
    n_devices: int = 1  # that a trial runs on; for the rows of plans that are skipped
    user_plan: Plan | None = None

    def __post_init__(self) -> None:
        self._start_s = self.clock() if self.start_s is None else self.start_s
        self.earlier_s = sum(trial.seconds for trial in self.journal.trials)  # of rows that lay in the folder
        self.rows: list[Trial] = []  # whole runs, and plans that were skipped
        self.turns: list[Trial] = []  # rows of groups in which plans took turns
        self.probes: list[Trial] = []
        self.n_run = 0  # processes started by this session
        self.n_resumed = 0
        self.is_budget_spent = False
        self.cut: Trial | None = None  # what the end of the budget broke off; it says nothing of its plan
        self._known: dict[tuple[Plan, str], Trial] = {}
        self._ahead = dict(self.planned)  # kind → trials that may still come
        self._refusals: list[Refusal] = []
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
    def n_plans(self) -> int:
        """How many plans have run to the end as a whole."""
        return len({row.plan for row in self.rows if row.status == "ok"})

    @property
    def common_error(self) -> Sequence[Trial]:
        """Rows of one error that several plans met while nothing of their kind ran; else none.

        Nothing further is begun then. Out of memory and a deadline are no such errors: another plan may well fit.
        Neither are estimates on fake tensors, which cannot run every model. Which sample, step or target it was is
        no part of an error.
        """
        rows = [*self.rows, *self.probes]
        alike: dict[str, list[Trial]] = {}
        for row in rows:
            if row.status == "error" and row.kind != "memory":
                words = (row.reason or "").partition(" (log: ")[0]  # each trial has a log of its own
                alike.setdefault(re.sub(r"(sample|step|target is) \d+", r"\1", words), []).append(row)
        for failed in alike.values():
            kinds = {WHOLE_RUN, *(row.kind for row in failed)}
            has_run = any(row.status == "ok" and row.kind in kinds for row in rows)
            plans = {row.plan for row in failed}
            if len(plans) >= (N_ALIKE_OWN if self.user_plan in plans else N_ALIKE) and not has_run:
                return failed
        return ()

    def find_shortfall(self) -> Refusal | None:
        """Say why the same budget would begin nothing that ends; None where a search goes on from these rows."""
        least = min(self._refusals, key=lambda refusal: refusal.search_s, default=None)
        if least is None or self.budget_s is None or least.search_s <= self.budget_s:
            return None
        return least

    def run(self, strategy: Generator[Wish, Any, Any], *, reserve_after_n: float = 0) -> bool:
        """Run a strategy to its end; False when the budget, or an error that every plan meets, ended it first.

        Args:
            reserve_after_n: Plans that have to have run before time is kept back for the proof.
        """
        try:
            wish = next(strategy)
            while True:
                answer = None
                if self._is_free(wish):
                    answer = self._answer(wish)
                elif self.common_error:
                    strategy.close()
                    return False
                elif isinstance(wish, Skip) or not self._must_stop(wish, reserve_after_n):
                    answer = self._answer(wish)
                if answer is None:
                    self.is_budget_spent = True
                    strategy.close()
                    return False
                wish = strategy.send(answer)
        except StopIteration:
            return True

    def adopt_rest(self, kinds: Collection[str] = (WHOLE_RUN, IN_TURNS, *PROBES)) -> None:
        """Take in the rows of earlier sessions that nobody asked for: a resumed search never reports less."""
        for trial in self.journal.take_rest(kinds):
            if trial.kind == IN_TURNS:
                self.turns.append(trial)
                self.n_resumed += 1
            else:
                self._keep(trial, is_resumed=True)

    def _is_free(self, wish: Wish) -> bool:
        """Whether a wish is answered without running anything."""
        if isinstance(wish, TakeTurns):
            return self.journal.holds_group(wish.plans)
        key = _find_key(wish)
        return isinstance(wish, Skip) or key in self._known or self.journal.holds(key)

    def _must_stop(self, wish: Ask | TakeTurns, reserve_after_n: float) -> bool:
        """Whether the next trial would not fit. The first whole run begins while any time is left: without it there is
        nothing to say, and the probes before it leave time for one."""
        if self.budget_s is None:
            return False
        has_run = any(row.status != "skipped" for row in self.rows)
        is_whole = isinstance(wish, Ask) and wish.kind not in PROBES
        next_s = self._estimate_wish_s(wish)
        kept_s = 0.0 if has_run or is_whole else self._estimate_s(WHOLE_RUN)
        search_s = (self._ready_s if self.n_run else self.elapsed_s) + next_s + kept_s
        if self.n_plans >= reserve_after_n:
            proof_s = self._estimate_proof_s()
            kept_s += min(proof_s, RESERVE_SHARE * self.budget_s)
            search_s = min(search_s + proof_s, search_s / (1 - RESERVE_SHARE))
        left_s = self.left_s
        must_stop = left_s <= 0 or ((has_run or not is_whole) and next_s + kept_s > left_s)
        if must_stop and self.cut is None:  # what comes after a run that was broken off would not be begun before it
            n_runs = 1 if isinstance(wish, Ask) else len(wish.plans)
            refusal = Refusal(next_s=next_s, n_runs=n_runs, kept_s=kept_s, left_s=left_s, search_s=search_s)
            self._refusals.append(refusal)
        return must_stop

    def _estimate_proof_s(self) -> float:
        """Estimate what has to be kept back: the groups to the first look at the user's own plan, another and a part
        of that, and a whole run of the part. Which one it will be is not known: it takes as long as the usual one."""
        fine = [row for row in self.rows if row.status == "ok"]
        others = [row for row in fine if row.plan != self.user_plan] or fine
        if not others:
            return PROOF_S
        own_s = sum(estimate_turn_s(row) for row in fine if row.plan == self.user_plan)
        groups_s = LOOKS[0] * (own_s + 2 * statistics.median(map(estimate_turn_s, others)))
        return max(PROOF_S, PROOF_MARGIN * groups_s + statistics.median(row.seconds for row in others))

    def _estimate_wish_s(self, wish: Ask | TakeTurns) -> float:
        if isinstance(wish, Ask):
            return self._estimate_s(wish.kind, wish.plan)
        known_s = {row.plan: estimate_turn_s(row) for row in self.rows if row.status == "ok"}
        known_s |= {row.plan: row.seconds for row in self.turns if row.status == "ok"}
        return sum(known_s[plan] if plan in known_s else self._estimate_s(WHOLE_RUN) for plan in wish.plans)

    def _estimate_s(self, kind: str, plan: Plan | None = None) -> float:
        """Estimate the seconds of a trial: its plan's last, else the median of its like; 0 before the first."""
        ran = self._list_ran()
        alike = [row for row in ran if row.kind == kind]
        own = [row.seconds for row in alike if row.plan == plan]
        if own:
            return own[-1]
        others = alike or [row for row in ran if row.kind != "memory"] or ran  # estimates of memory run no step
        return statistics.median([row.seconds for row in others]) if others else 0.0

    def _answer(self, wish: Wish) -> Trial | list[Trial] | None:
        """Return the row or rows, run or known; None where the end of the budget broke the trial off."""
        if isinstance(wish, TakeTurns):
            return self._answer_group(wish)
        key = _find_key(wish)
        if key in self._known:
            return self._known[key]
        found = self.journal.take(key)
        if found is not None:
            return self._keep(found, is_resumed=True)
        (id,) = self.journal.next_ids()
        if isinstance(wish, Ask):
            trial = self._run_trial(wish, id)
        else:
            why, reason = wish.why, wish.reason
            trial = build_row(wish.plan, id=id, why=why, status="skipped", reason=reason, n_devices=self.n_devices)
        if trial is not None:
            self.journal.append(trial)
        return None if trial is None else self._keep(trial)

    def _answer_group(self, wish: TakeTurns) -> list[Trial] | None:
        if found := self.journal.take_group(wish.plans):
            return self._keep_group(found, is_resumed=True)
        ids = self.journal.next_ids(len(wish.plans))
        self._tell_start(ids[0], wish.plans[0], wish.why, IN_TURNS)
        left_s, group = self.left_s, self.journal.count_groups() + 1
        rows = self.target.run_group(dict(zip(ids, wish.plans, strict=True)), why=wish.why)
        self.n_run += len(rows)
        if any(row.status == "timeout" for row in rows) and self.left_s <= 0:
            return self._cut(rows[0], left_s)
        rows = [dataclasses.replace(row, group=group) for row in rows]
        self.journal.append(*rows)
        return self._keep_group(rows)

    def _run_trial(self, wish: Ask, id: str) -> Trial | None:
        self._tell_start(id, wish.plan, wish.why, wish.kind)
        left_s = self.left_s
        trial = self.target(wish.plan, id=id, why=wish.why, kind=wish.kind)
        trial = dataclasses.replace(trial, predicted_samples_per_s=wish.predicted_samples_per_s)
        self.n_run += 1
        return self._cut(trial, left_s) if trial.status == "timeout" and self.left_s <= 0 else trial

    def _cut(self, trial: Trial, left_s: float) -> None:
        """Note what the end of the budget broke off."""
        self.cut = trial
        search_s = self._ready_s + trial.seconds
        self._refusals.append(Refusal(next_s=trial.seconds, left_s=left_s, search_s=search_s, is_cut=True))
        self.on_event(TrialCut(id=trial.id, seconds=trial.seconds))

    def _tell_start(self, id: str, plan: Plan, why: str, kind: str) -> None:
        # Probes, whole runs, turns: what an earlier stage did not need never comes. A whole run before any probe is the
        # user's own plan.
        if kind not in PROBES and (self.probes or kind == IN_TURNS):
            self._ahead |= dict.fromkeys((*PROBES, WHOLE_RUN) if kind == IN_TURNS else PROBES, 0)
        n_done, n_planned = self._count()
        self.on_event(TrialStarted(id=id, plan=plan, why=why, kind=kind, n_done=n_done, n_planned=n_planned))
        if not self.n_run:
            self._ready_s = self.elapsed_s

    def _keep(self, trial: Trial, *, is_resumed: bool = False) -> Trial:
        self.n_resumed += is_resumed
        self._known[trial.plan, trial.kind] = trial
        (self.probes if trial.kind in PROBES else self.rows).append(trial)
        self._ahead[trial.kind] = max(0, self._ahead.get(trial.kind, 0) - 1)
        n_done, n_planned = self._count()
        left_s = self._estimate_left_s()
        self.on_event(
            TrialDone(trial=trial, n_done=n_done, n_planned=n_planned, seconds_left=left_s, is_resumed=is_resumed)
        )
        return trial

    def _keep_group(self, rows: Sequence[Trial], *, is_resumed: bool = False) -> list[Trial]:
        self.n_resumed += is_resumed * len(rows)
        self.turns += rows
        self._ahead[IN_TURNS] = max(0, self._ahead.get(IN_TURNS, 0) - len(rows))
        n_done, n_planned = self._count()
        left_s = self._estimate_left_s()
        self.on_event(
            TurnsDone(rows=tuple(rows), n_done=n_done, n_planned=n_planned, seconds_left=left_s, is_resumed=is_resumed)
        )
        return list(rows)

    def _list_ran(self) -> list[Trial]:
        return [row for row in (*self.rows, *self.turns, *self.probes) if row.seconds > 0]

    def _estimate_left_s(self) -> float | None:
        """Estimate the seconds left at most: what may come, each as long as its like, within the budget."""
        ahead_s = sum(n_left * self._estimate_s(kind) for kind, n_left in self._ahead.items())
        left_s = max(0.0, min(ahead_s if self._list_ran() else math.inf, self.left_s))
        return left_s if math.isfinite(left_s) else None

    def _count(self) -> tuple[int, int]:
        """Count the trials that are done, and all that are planned, no more than the budget holds at this pace."""
        n_done = len(self.rows) + len(self.turns) + len(self.probes)
        n_left, ran = sum(self._ahead.values()), self._list_ran()
        if self.budget_s is not None and ran:
            n_left = min(n_left, max(0, int(self.left_s / statistics.fmean(row.seconds for row in ran))))
        return n_done, n_done + n_left


def estimate_turn_s(row: Trial) -> float:
    """Estimate the seconds of a plan's part of a group: it starts as its whole run did, and takes its blocks."""
    step_s = row.effective_batch_size / (row.samples_per_s or math.inf)
    start_s, blocks_s = max(0.0, row.seconds - row.n_steps * step_s), max(TURNS_S, 4 * MIN_ROUNDS * step_s)
    blocks_s = max(blocks_s, min(MOST_S / 2, N_TURN_STEPS * step_s))
    return min(row.seconds, start_s + blocks_s)


def _find_key(wish: Ask | Skip) -> Key:
    return wish.plan, wish.kind if isinstance(wish, Ask) else WHOLE_RUN
