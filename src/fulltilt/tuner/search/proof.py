"""Prove the best plan by turns: race the finalists, take back what is not worth it, hold the rest against the user's.

race    the finalists and the user's own plan; not where all are one of them less a change, as that is the next step,
        and not where the budget holds no more than what a recommendation takes
earn    the winner against itself without each of its changes; what does not earn its place goes
prove   what is left against the user's own plan, until that is decided or the time is over
"""

import dataclasses
import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from fulltilt.levers import BATCH, find_obstacles, list_changed
from fulltilt.records import Plan, Trial
from fulltilt.stats import Comparison, Evidence, Turns, is_look
from fulltilt.stats.alternation import LOOKS, WORTH_PCT
from fulltilt.tuner.picks.changes import changes_learning, compute_simplicity
from fulltilt.tuner.picks.finalists import filter_safe, find_recommendable
from fulltilt.tuner.picks.speed import read_rate
from fulltilt.tuner.question.space import Space, canonicalize
from fulltilt.tuner.search.session import Ask, TakeTurns, Wish, estimate_turn_s

N_RACE = 2  # groups of the race; one more for those that may still win, as one group may be off by half
BEHIND_PCT = 5.0  # of speed: a winner as far behind the user's own plan in each group is given up
AHEAD_PCT = 100.0  # of speed: a change that wins by this in each group belongs to what is proven first
WORTH_LOG = math.log1p(WORTH_PCT / 100)
N_EARN = 3  # groups in which each change is looked at first
N_SURE = LOOKS[3]  # groups, though the time is over, before a change or a plan goes that may be worth it
OVERTIME = 2.0  # times the limit, where the budget has no end: then not even these
MAX_WITHOUT = 4  # plans less one change that take turns with the winner at once
DROP_SHARE = 0.6  # of the time: after it no change is looked at further
LESS = "the fastest plan without some of its changes"  # why such a plan is run

Steps = Generator[Wish, Any, None]
Meeting = Generator[Wish, Any, list[Plan]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeverEffect:
    """What one change of the raced winner is worth: the winner against itself without the change.

    Attributes:
        names: Of the levers; batch size and accumulation change as one.
        gain: Of the winner over the plan without the change; where the recommended plan has this change alone, of that
            plan over the user's own.
        is_kept: Whether the recommended plan has the change.
    """

    names: tuple[str, ...]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    gain: Comparison
    is_kept: bool


class Proof:
    """Asks for the groups that decide between plans, and holds what they showed.

    Attributes:
        base: The user's own plan; None where it did not run, so that there is nothing to prove.
        best: The plan that came out ahead so far.
        winner: The one that won the race, with all of its changes.
        is_earned: Whether each change of ``best`` was looked at: not where the budget ended first.
        evidence: Of the groups after a race of several: who wins it had luck in it, too.
    """

    def __init__(
        self,
        space: Space,
        rows: Sequence[Trial],
        finalists: Sequence[Plan],
        *,
        limit_s: float,
        room_s: float = math.inf,
    ):
        """Get ready.

        Args:
            rows: Whole runs, one a plan; a plan that has none is run before it may be recommended.
            finalists: The fastest first.
            limit_s: Seconds of turns; each stage has its first groups whatever it is.
            room_s: Seconds that the budget has left: what matters most comes first where it does not hold all.
        """
        self._space, self._limit_s, self._room_s, self._spent_s = space, limit_s, room_s, 0.0
        self._turn_s = {row.plan: estimate_turn_s(row) for row in rows if row.status == "ok"}
        fine = find_recommendable([row for row in rows if row.status == "ok"], space.memory_gib)
        self._whole, self._fine = fine, {row.plan for row in fine}
        self._ran = {row.plan for row in rows}
        self._rates = {row.plan: read_rate(row) for row in fine}
        has_run = any(row.plan == space.user_plan and row.status == "ok" for row in rows)
        self.base = space.user_plan if has_run else None
        self.evidence: Evidence[Plan] = Evidence()  # of the race, and anew when that is over
        # One other plan at least takes turns: a single run of the user's own may have been fast by luck.
        ranked = [row.plan for row in sorted(fine, key=read_rate, reverse=True)]
        self._rivals = [plan for plan in (finalists if len(finalists) > 1 else ranked[:2]) if plan != self.base]
        self.best = self.winner = finalists[0] if finalists else space.user_plan
        self.is_earned = True
        self._without: dict[tuple[str, ...], Plan] = {}  # what was taken back → the winner without it
        self._parts: list[Plan] = []  # of the winner, that take turns with the user's own

    @property
    def gain(self) -> Comparison | None:
        """How much faster the best plan is than the user's own; None where they were not compared."""
        if self.base is None or self.best == self.base or not self.evidence.count_groups([self.base, self.best]):
            return None
        return self.evidence.compare(self.base, self.best)

    @property
    def levers(self) -> tuple[LeverEffect, ...]:
        """What each change of the race's winner is worth, as far as the time allowed."""
        own, winner = self._space.user_plan, self.winner
        alone = list_changed(own, self.best)
        return tuple(
            LeverEffect(
                names=names,
                before=tuple(own[name] for name in names),
                after=tuple(winner[name] for name in names),
                gain=(self.gain if alone == [names] else None) or self.evidence.compare(plan, winner),
                is_kept=any(self.best[name] != own[name] for name in names),
            )
            for names, plan in self._without.items()
        )

    def run(self) -> Steps:
        """Ask for groups until the best plan is known and its gain is decided, or the time is over."""
        whole = self._find_whole()
        if whole is not None:  # to take its changes back is to race with the others
            self.best = whole
        else:
            yield from self._race()
            self.evidence = Evidence() if len(self._rivals) > 1 else self.evidence
        self.winner = self.best
        try:
            if self.base not in (None, self.best):
                yield from self._earn(self.winner, self.base)
            if self.base not in (None, self.best):
                yield from self._prove(self.base)
        finally:  # the budget may have ended at any group, before what came out ahead was proven: more or less of it is
            if not (self.is_earned and self.is_proven):
                is_fair = self.is_proven or (self.is_earned and _is_harmless(self.best, self.winner))
                whole = [self.best, self.winner] if is_fair else []
                known = filter(self._is_faster, [*whole, *self._list_proven_parts()])
                self.best = min(known, key=self._count_idle, default=self.best)

    def _find_whole(self) -> Plan | None:
        """Find the finalist of which all others are that plan less some changes; None where there is none."""
        base = self.base
        if base is None or len(self._rivals) < 2:
            return None
        for plan in self._rivals:
            if all(self._is_part(other, plan, base) for other in self._rivals):
                return plan
        return None

    def _is_part(self, plan: Plan, whole: Plan, base: Plan) -> bool:
        """Whether a plan is another one with some of its changes taken back."""
        less = [names for names in list_changed(base, whole) if any(plan[name] != whole[name] for name in names)]
        return self._take_back(whole, base, *less) == plan

    def _race(self) -> Steps:
        plans = [*self._rivals, *([self.base] if self.base is not None else [])]
        if self.base is not None and self._rivals:
            first = self._rivals[0]
            if not self._has_room(N_RACE * plans + LOOKS[0] * self._list_least(first, self.base)):
                self.best = first
                return
        arms = yield from self._meet(plans, N_RACE, "the finalists take turns")
        rivals = self._rank([plan for plan in self._rivals if plan in arms])
        if not rivals:
            return
        leads = {plan: self.evidence.list_log_ratios(plan, rivals[0]) for plan in rivals}
        close = [plan for plan in rivals if min(leads[plan], default=0.0) < WORTH_LOG]
        arms = yield from self._meet(close, 1, "the finalists that may be the fastest")
        rivals = self._rank([plan for plan in close if plan in arms])
        if not rivals:
            return
        close = [plan for plan in rivals if self._compute_median_lead(rivals[0], plan) <= WORTH_LOG]
        base = self._space.user_plan
        self.best = min(close, key=lambda plan: (changes_learning(base, plan), *compute_simplicity(plan)))
        if self.base is not None:  # in each group: other work may have held up one
            behind = min(self.evidence.list_log_ratios(self.best, self.base), default=0.0)
            self.best = self.base if behind > math.log1p(BEHIND_PCT / 100) else self.best

    def _rank(self, plans: list[Plan]) -> list[Plan]:
        """Sort plans that raced, the fastest first."""
        return sorted(plans, key=lambda plan: self._compute_median_lead(plan, plans[0]), reverse=True)

    def _compute_median_lead(self, plan: Plan, other: Plan) -> float:
        """Compute the logarithm of a plan's speed over another's, in the median of the race's groups."""
        return statistics.median(self.evidence.list_log_ratios(other, plan) or [0.0])

    def _list_held(self, winner: Plan, base: Plan) -> list[Plan]:
        """List what takes turns beside the winner: the user's own, and a part that may do.

        That is what all plans share that ran half as fast as the winner or faster; where they share nothing, the
        winner without all that alters learning.
        """
        least = self._rates[winner] / (1 + AHEAD_PCT / 100)
        fast, changed = [plan for plan, rate in self._rates.items() if rate >= least], list_changed(base, winner)
        own = [names for names in changed if any(plan[name] != winner[name] for plan in fast for name in names)]
        parts = [self._take_back(winner, base, *less) for less in (own, _list_altering(base, winner))]
        return [base, *[part for part in parts if part not in (None, base, winner)][:1]]

    def _take_parts(self, plan: Plan, base: Plan) -> dict[tuple[str, ...], Plan]:
        """Return the plan less each of its changes, where that can run and is not the user's own."""
        parts = {names: self._take_back(plan, base, names) for names in list_changed(base, plan)}
        return {names: part for names, part in parts.items() if part is not None and part not in (base, plan)}

    def _earn(self, winner: Plan, base: Plan) -> Steps:
        """Take the winner's changes back one by one, and keep those that are worth it."""
        if len(list_changed(base, winner)) < 2:  # what one change is worth is what the plan is worth
            return
        self.is_earned = False  # until all is done: the budget may end at any group
        found, held = self._take_parts(winner, base), self._list_held(winner, base)
        self._parts = held[1:]
        asked = [winner, *held, *list(found.values())[:MAX_WITHOUT]]
        if not self._has_room(LOOKS[0] * asked):
            least = self._list_least(winner, base)
            ways = (list(dict.fromkeys([*least, *held])), least)
            otherwise = held if 1 < len(held) < len(least) else least
            first = next((plans for plans in ways if self._has_room(LOOKS[0] * plans)), otherwise)
            if first is held and not (yield from self._runs_whole(held[1])):  # later the budget may not hold its run
                held, first = [base], least
            yield from self._meet(first, LOOKS[0], "the fastest plan against the settings as they were")
        yield from self._look_at(found, winner, base, held)

    def _list_least(self, winner: Plan, base: Plan) -> list[Plan]:
        """List what has to meet before the winner can be recommended with all that it alters of learning."""
        parts = self._take_parts(winner, base)
        return [winner, base, *[parts[names] for names in _list_altering(base, winner) if names in parts]]

    def _look_at(self, found: Mapping[tuple[str, ...], Plan], winner: Plan, base: Plan, held: Sequence[Plan]) -> Steps:
        """Have the winner take turns with itself less each change, and with ``held`` until these are told."""
        order = sorted(found, key=lambda names: _is_harmless(found[names], winner))  # a stable order, these last
        is_first = True
        for start in range(0, len(order), MAX_WITHOUT):
            if start and self._spent_s > self._limit_s and _is_harmless(found[order[start]], winner):
                break
            batch, n_groups = {names: found[names] for names in order[start : start + MAX_WITHOUT]}, N_RACE
            known = {names: plan for names, plan in batch.items() if self._count_met(winner, plan) >= N_EARN}
            self._without |= known
            asked = {names: it for names, it in batch.items() if names not in known or self._is_open(winner, it)}
            yield from self._secure()
            while asked:
                if self._count_met(winner, *held) >= (N_RACE if is_first and self._list_clear() else N_EARN):
                    held, is_first = self._hold_rest(winner, base, held), False
                plans = [winner, *asked.values(), *held]
                arms = yield from self._meet(plans, n_groups, "the fastest plan, and less of it")
                if winner not in arms:
                    return
                held = [plan for plan in held if plan in arms]
                asked = {names: plan for names, plan in asked.items() if plan in arms}
                self._without |= asked
                yield from self._secure()
                n_met = self._count_met(winner, *asked.values())
                n_groups = 1 if n_met < LOOKS[0] else 2  # to the next look
                if n_met < N_EARN:
                    continue
                asked = {names: plan for names, plan in asked.items() if self._is_open(winner, plan)}
                if n_met >= self._compute_n_limit(DROP_SHARE, N_EARN):
                    break
        order = sorted(self._list_idle(), key=lambda names: self._lead_over(winner, names))
        self.best = yield from self._drop(winner, base, order)
        self.is_earned = True

    def _hold_rest(self, winner: Plan, base: Plan, held: Sequence[Plan]) -> list[Plan]:
        """Return the user's own and what is left of the winner without its idle changes, until these met often."""
        clear = self._list_clear()
        rest = self._take_back(winner, base, *(names for names in self._list_idle() if names not in clear))
        needed = [name for names in clear for name in names]
        parts = [rest, *(part for part in held if needed and all(part[name] == winner[name] for name in needed))]
        parts = [part for part in dict.fromkeys(parts) if part not in (None, base, winner)]
        self._parts += [part for part in parts if part not in self._parts]
        left = [part for part in parts if self._count_met(base, part) < LOOKS[0]]
        is_over = self.base is None or (not left and self._count_met(base, winner) >= LOOKS[0])
        return [] if is_over else [base, *left]

    def _secure(self) -> Steps:
        """Run the fastest proven part as a whole where the winner is not proven, or slower: the budget may end soon."""
        for part in self._list_proven_parts():
            if not self.is_proven or self.evidence.compare(part, self.winner).verdict == "slower":
                yield from self._runs_whole(part)
                return

    def _list_proven_parts(self) -> list[Plan]:
        """List the parts of the winner that are proven and hold nothing unproven, the fastest first."""
        parts = dict.fromkeys([*self._parts, *self._without.values()])
        proven = [part for part in parts if self._leads(part) and self._is_sound(part)]
        return sorted(proven, key=lambda part: self._compute_lead_pct(part, self._space.user_plan), reverse=True)

    def _is_sound(self, plan: Plan) -> bool:
        """Whether what a plan alters of learning is proven to be worth it, where the plan as a whole is."""
        own, idle = self._space.user_plan, self._list_idle()
        is_one = len(list_changed(own, plan)) == 1
        return is_one or all(names in self._without and names not in idle for names in _list_altering(own, plan))

    def _list_idle(self) -> list[tuple[str, ...]]:
        """List the winner's changes that are not shown to be worth it."""
        return [names for names, less in self._without.items() if not self._is_worth(self.winner, less)]

    def _count_idle(self, plan: Plan) -> int:
        """Count the changes of a plan that are not shown to be worth it."""
        return sum(any(plan[name] != self._space.user_plan[name] for name in names) for names in self._list_idle())

    def _list_clear(self) -> list[tuple[str, ...]]:
        """List the changes that won each group by far. A part of the winner has to have them, shown or not."""
        leads = {names: self.evidence.list_log_ratios(less, self.winner) for names, less in self._without.items()}
        return [names for names, each in leads.items() if each and min(each) > math.log1p(AHEAD_PCT / 100)]

    def _drop(self, winner: Plan, base: Plan, idle: Sequence[tuple[str, ...]]) -> Generator[Wish, Any, Plan]:
        """Return the winner without its idle changes, or the least useful: two may be idle because of each other."""
        if self._take_back(winner, base, *idle) == base:  # what is left is proven by the plan as a whole
            idle = idle[:-1]
        for dropped in filter(None, dict.fromkeys((tuple(idle), tuple(idle[:1])))):
            plan = self._take_back(winner, base, *dropped)
            if plan in (None, base) or not (yield from self._runs_whole(plan)):
                continue
            arms = [plan]
            if len(dropped) > 1 and self._count_met(winner, plan, base) < N_EARN:
                arms = yield from self._meet([winner, plan, base], N_EARN, "the fastest plan, and what is left of it")
            if plan in arms and (len(dropped) == 1 or self._compute_lead_pct(winner, plan) <= WORTH_PCT):
                return plan
        return winner

    def _prove(self, base: Plan) -> Steps:
        n_groups = self.evidence.count_groups([base, self.best])
        while n_groups < LOOKS[0] or not (is_look(n_groups) and self.evidence.compare(base, self.best).is_decided):
            if n_groups >= self._compute_n_limit(1.0, LOOKS[0]):
                return
            arms = yield from self._meet([base, self.best], 1, "the fastest plan against the settings as they were")
            if len(arms) < 2:
                return
            n_groups = self.evidence.count_groups([base, self.best])

    def _count_met(self, *plans: Plan) -> int:
        return self.evidence.count_groups(plans)

    def _has_room(self, plans: Sequence[Plan]) -> bool:
        """Whether the budget is expected to hold so many processes in turns."""
        usual_s = statistics.median(self._turn_s.values())
        return self._spent_s + sum(self._turn_s.get(plan, usual_s) for plan in plans) <= self._room_s

    def _compute_n_limit(self, share: float, least: int) -> int:
        """Compute how many groups a question may take: fewer when its share of the time is over."""
        if self._spent_s <= share * self._limit_s:
            return LOOKS[-1]
        end_s = self._room_s if math.isfinite(self._room_s) else OVERTIME * self._limit_s
        return N_SURE if self._spent_s <= end_s else least

    def _meet(self, plans: Sequence[Plan], n_groups: int, why: str) -> Meeting:
        """Have plans take turns in so many groups; return those that did not fail. No other stays base or best."""
        left, n_done = list(dict.fromkeys(plans)), 0
        while n_done < n_groups and len(left) > 1:
            rows: list[Trial] = yield TakeTurns(plans=tuple(left), why=why)
            self._spent_s += sum(row.seconds for row in rows)
            self._turn_s |= {row.plan: row.seconds for row in rows}
            failed = {row.plan for row in rows if row.status != "ok"}
            if failed:
                left = [plan for plan in left if plan not in failed]
                self._fine -= failed
                self._ran |= failed  # a run as a whole would not make it safe
                self.base = None if self.base in failed else self.base
                if self.best in failed:
                    ran = [plan for plan in left if plan in self._fine]
                    self.best = self.base or next(iter(ran), self._space.user_plan)
                continue
            n_done += 1
            self.evidence.add({row.plan: _read_turns(row) for row in rows})
        return left

    def _runs_whole(self, plan: Plan) -> Generator[Wish, Any, bool]:
        """Run a plan as a whole unless it was; return whether it may be recommended."""
        if plan not in self._ran:
            row: Trial = yield Ask(plan=plan, why=LESS)
            self._ran.add(plan)
            self._spent_s += row.seconds
            if row.status == "ok" and row in filter_safe([*self._whole, row], self._space.memory_gib):
                self._fine.add(plan)
        return plan in self._fine

    def _take_back(self, plan: Plan, base: Plan, *changes: tuple[str, ...]) -> Plan | None:
        """Return the plan with the user's own values of these levers; None where that cannot run."""
        own = {name: base[name] for names in changes for name in names}
        plan = canonicalize(plan.replace(**own), self._space.facts, keep=tuple(own))
        return None if find_obstacles(plan, self._space.facts) else plan

    def _lead_over(self, winner: Plan, names: tuple[str, ...]) -> float:
        return self._compute_lead_pct(winner, self._without[names])

    @property
    def is_proven(self) -> bool:
        """Whether the best plan is faster than the user's own, and holds nothing unproven that alters learning."""
        if self.base is None or not self._is_faster(self.best):
            return False
        return self.is_earned or self._is_sound(self.best)

    def _is_faster(self, plan: Plan) -> bool:
        return plan in self._fine and self._leads(plan)

    def _leads(self, plan: Plan) -> bool:
        return self.base is not None and self.evidence.compare(self.base, plan).verdict == "faster"

    def _is_worth(self, winner: Plan, without: Plan) -> bool:
        """Whether a change is worth 1 %; one of numerics or recipe has to be proven to gain, too.

        A batch size needs no proof of its own.
        """
        gain = self.evidence.compare(without, winner)
        return gain.gain_pct >= WORTH_PCT and (gain.ci_pct[0] > 0 or _is_harmless(without, winner))

    def _is_open(self, winner: Plan, without: Plan) -> bool:
        """Whether a change would be taken back though it may be worth 1 %."""
        gain = self.evidence.compare(without, winner)
        return not (gain.is_decided or self._is_worth(winner, without)) and gain.ci_pct[1] > WORTH_PCT

    def _compute_lead_pct(self, plan: Plan, other: Plan) -> float:
        return self.evidence.compare(other, plan).gain_pct


def _is_harmless(before: Plan, after: Plan) -> bool:
    """Whether what one plan changes of another leaves learning alone; a batch size is the user's to allow."""
    return not changes_learning(before.replace(**{name: after[name] for name in BATCH}), after)


def _list_altering(base: Plan, plan: Plan) -> list[tuple[str, ...]]:
    """List the changes that can alter what is learned; a batch size is the user's to allow."""
    changed = {names: base.replace(**{name: plan[name] for name in names}) for names in list_changed(base, plan)}
    return [names for names, alone in changed.items() if not _is_harmless(base, alone)]


def _read_turns(row: Trial) -> Turns:
    rate, stalled_pct = row.samples_per_s or math.nan, row.stalled_pct or 0.0
    return Turns(samples_per_s=rate, stalled_pct=stalled_pct, way=row.turns or "usual")
