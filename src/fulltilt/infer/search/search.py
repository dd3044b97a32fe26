"""Find the fastest candidate: many are measured briefly, half go on, the last are proven in turns.

1. Eager fp32 is built; it says how long real samples are.
2. Every combination of engine, quantization and precision that can apply is built.
3. All are looked at in a few points of the service surface; the better half goes on.
4. The other levers (threads, attention, …) are tried on the two best.
5. Those that are left get the whole surface, and for each the simulation ranks the policies.
6. The best three take turns with eager on real samples, each with its policy, until it is decided who is faster.
7. Where a response is a target, they are served and loaded, and accepted by a sequential test.
"""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fulltilt.errors import FulltiltError
from fulltilt.infer.manifest import Policy
from fulltilt.infer.search.bench import Group, Order, ProcessBench
from fulltilt.infer.search.candidates import build_baseline, list_all, list_structures, list_variants, name_plan
from fulltilt.infer.search.lengths import Lengths, describe_lengths
from fulltilt.infer.search.policies import Goal, list_policies, rate_policies
from fulltilt.infer.search.result import OFFERED, Candidate, Gain
from fulltilt.infer.search.simulate import draw_arrivals
from fulltilt.infer.search.surface import Point, Surface, plan_points
from fulltilt.levers import Facts, Lever
from fulltilt.records import Plan, encode
from fulltilt.stats import Evidence, is_look
from fulltilt.stats.alternation import LEAST_GROUPS

NOTHING = "eager fp32 cannot be measured, so there is nothing to compare with"
NAIVE = "eager fp32 in order of arrival, padded to the longest"
NAIVE_BATCH = 16
GROUP_SIZE = 5  # processes that live at the same time, eager among them
LOOK_S, PROOF_S = 0.2, 0.4  # of timed blocks, for each pair of arms and stage; two rounds at least
N_FINALISTS = 3
N_VARIED = 2  # best candidates on which the other levers are tried
BUILD_SHARE, LOOK_SHARE = 0.5, 0.7  # of the budget, after which no candidate is built, and none looked at
PASS_S = 0.25  # of eager: how long a pass over real samples takes
PASS_SAMPLES = (32, 1024)
N_EXHAUSTIVE = 4  # groups of each candidate in the exhaustive search


@dataclasses.dataclass
class Search:
    """One search, over what it has measured so far."""

    bench: ProcessBench
    catalogue: Mapping[str, Lever]
    facts: Facts
    own: Mapping[str, Any]  # the user's plan of training: its threads are kept
    goal: Goal
    budget_s: float
    n_groups: int = 0
    cpu_pressure_pct: float | None = None  # the most of a group of the proof
    gain_over_naive: Gain | None = None
    are_alone: bool = False  # samples that cannot share a batch

    def __post_init__(self) -> None:
        self.baseline = build_baseline(self.catalogue, self.own)
        self.base = name_plan(self.baseline, self.baseline)
        self.candidates: dict[str, Candidate] = {}
        self.not_applicable: dict[str, str] = {}
        self._surface: dict[Point, Evidence[str]] = defaultdict(Evidence)
        self._jitter: dict[str, list[float]] = defaultdict(list)
        self._proof: Evidence[str] = Evidence()
        self._block_s = 0.0  # that an arm took for a stage, its start included, when it was last looked at

    def run(self) -> None:
        """Search by halving.

        Raises:
            FulltiltError: eager fp32 itself cannot be built or measured.
        """
        self.start()
        plans, self.not_applicable = list_structures(self.catalogue, self.facts, self.baseline)
        names = self.build(plans)
        self.look(names, self.plan_points(is_coarse=True), 1)
        kept = self.keep_best(names, max(N_FINALISTS, (len(names) + 1) // 2))
        varied = [self.base, *names] if len(names) < N_VARIED else [*self.rank(names)[:N_VARIED], self.base]
        variants = [p for name in varied for p in list_variants(self.catalogue, self.facts, self.candidates[name].plan)]
        added = self.build(list(dict.fromkeys(variants)))
        self.look([*kept, *added], self.plan_points(is_coarse=False), 2)
        finalists = self.keep_best([*kept, *added], N_FINALISTS)
        self.prove(finalists)

    def run_exhaustive(self) -> None:
        """Measure every plan with every policy in turns with eager, without models and without halving."""
        self.start()
        names = self.build(list_all(self.catalogue, self.facts, self.baseline), share=math.inf)
        self.look([], self.plan_points(is_coarse=True), 1)
        for name in names:
            self._measure_policies(name)
        self.prove(self.keep_best(names, N_FINALISTS))

    def start(self) -> None:
        """Build eager fp32 and read the lengths of its samples."""
        plan = self.baseline
        self.candidates[self.base] = row = Candidate(name=self.base, plan=plan)
        self.build([plan], share=math.inf)
        if row.status != "untried":
            raise FulltiltError(f"{NOTHING}: {row.reason}")
        row.status = "baseline"
        group = self.bench.measure("longest", {self.base: self.base}, [{self.base: {"batch": 1, "length": None}}], 0.0)
        if group.failed:
            raise FulltiltError(f"{NOTHING}: {group.failed[2]}")
        self.lengths: Lengths = describe_lengths(group.arms[self.base].lengths)
        self._one_s = 1 / group.stages[0][self.base].samples_per_s
        self.arrivals = draw_arrivals(self.lengths.values, self.goal.samples_per_request)

    def build(self, plans: Sequence[Plan], *, share: float = BUILD_SHARE) -> list[str]:
        """Build candidates while their share of the budget lasts → those that have an artefact."""
        built, longest_s = list[str](), 0.0
        for plan in plans:
            name = name_plan(plan, self.baseline)
            row = self.candidates.setdefault(name, Candidate(name=name, plan=plan))
            if row.build_s is not None:
                continue
            if self.bench.spent_s + longest_s > share * self.budget_s:
                row.drop("untried", "the budget was over before it was built; give a larger --budget")
                continue
            done = self.bench.build(name, plan)
            row.build_s, longest_s = done.seconds, max(longest_s, done.seconds)
            if done.manifest is not None:
                row.accuracy = done.manifest.accuracy
                self.are_alone = done.manifest.joins != "pad"
            if done.status is not None:
                row.drop(done.status, done.reason or "it could not be built")
            else:
                built.append(name)
        return built

    def plan_points(self, *, is_coarse: bool) -> tuple[Point, ...]:
        return plan_points(self.lengths, self._one_s, is_coarse=is_coarse, max_batch=1 if self.are_alone else None)

    def _list_policies(self, plan: Plan) -> list[Policy]:
        return [Policy()] if self.are_alone else list_policies(self.lengths, plan)

    def look(self, names: Sequence[str], points: Sequence[Point], n_groups: int) -> None:
        """Measure points of candidates beside eager, and rate their policies."""
        for number in range(n_groups):
            for at in range(0, max(1, len(names)), GROUP_SIZE - 1):
                chunk = [name for name in names[at : at + GROUP_SIZE - 1] if self.candidates[name].status == "untried"]
                cost_s = self._block_s * (len(chunk) + 1) * len(points)
                if self.bench.spent_s + cost_s < LOOK_SHARE * self.budget_s or not self._block_s:
                    self._look_at(chunk, points, number)
        for name in (self.base, *names):
            if self.candidates[name].status in ("untried", "baseline"):
                self._rate(name)

    def _look_at(self, names: Sequence[str], points: Sequence[Point], number: int) -> None:
        arms = {name: name for name in (self.base, *names)}
        stages = [{arm: {"batch": p.batch, "length": p.length} for arm in arms} for p in points]
        arms, group = self._measure(f"look {number} at {len(points)}", arms, stages, LOOK_S)
        self._block_s = group.seconds / (len(arms) * len(points))
        for i, point in enumerate(points):
            self._surface[point].add(group.stages[i])
            for arm in arms:
                calls_s = group.arms[arm].calls_s[i]
                middle = statistics.median(calls_s)
                self._jitter[arm] += [call_s / middle for call_s in calls_s]

    def _measure(
        self, question: str, arms: dict[str, str], stages: Sequence[Mapping[str, Order]], seconds: float
    ) -> tuple[dict[str, str], Group]:
        """Measure a group; an arm that fails is dropped, and the others are measured without it."""
        while True:
            group = self.bench.measure(question, arms, stages, seconds)
            if group.failed is None:
                break
            name, status, reason = group.failed
            if arms[name] == self.base:
                raise FulltiltError(f"{NOTHING}: {reason}")
            self.candidates[arms[name]].drop(status, reason)
            arms = {arm: its for arm, its in arms.items() if arm != name}
            stages = [{arm: order for arm, order in stage.items() if arm in arms} for stage in stages]
        self.n_groups += 1
        for arm, seen in group.arms.items():
            row = self.candidates[arms[arm]]
            row.cold_start_s = seen.cold_start_s
            row.memory_gib = max(row.memory_gib or 0.0, seen.memory_gib)
        return arms, group

    def _rate(self, name: str) -> None:
        """Rate the policies of a candidate by its surface so far."""
        row = self.candidates[name]
        row.surface = self._build_surface(name)
        policies, service = self._list_policies(row.plan), row.surface.build_service()
        rated = rate_policies(policies, service, self.lengths, self.goal, self.arrivals)[0]
        row.policy, row.samples_per_s = rated.policy, rated.samples_per_s
        row.response_s, row.capacity_requests_per_s = rated.response_s, rated.capacity_requests_per_s

    def _build_surface(self, name: str) -> Surface:
        points = sorted(point for point, evidence in self._surface.items() if evidence.count_groups([name]))
        return Surface(
            points=tuple(points),
            seconds=tuple(point.batch / self._estimate_rate(self._surface[point], name) for point in points),
            jitter=tuple(sorted(self._jitter[name])) or (1.0,),
        )

    def _estimate_rate(self, evidence: Evidence[str], name: str) -> float:
        """Estimate a rate as eager's times what the candidate is faster: so a slow minute of the machine cancels."""
        ratios = evidence.list_log_ratios(self.base, name)
        return evidence.estimate_rate(self.base) * math.exp(statistics.median(ratios))

    def rank(self, names: Sequence[str]) -> list[str]:
        """Sort candidates that are still in the search, the best first."""
        alive = [name for name in names if self.candidates[name].status == "untried"]
        return sorted(alive, key=self._score, reverse=True)

    def _score(self, name: str) -> float:
        row = self.candidates[name]
        return (row.capacity_requests_per_s if self.goal.is_capacity else row.samples_per_s) or 0.0

    def keep_best(self, names: Sequence[str], n: int) -> list[str]:
        """Keep the ``n`` best; the others are behind."""
        ranked = self.rank(names)
        for name in ranked[n:]:
            share = 100 * (1 - self._score(name) / (self._score(ranked[0]) or 1.0))
            self.candidates[name].drop("behind", f"{share:.0f} % behind {ranked[0]} where it was looked at")
        return ranked[:n]

    def prove(self, names: Sequence[str]) -> None:
        """Have finalists take turns with eager on real samples until it is decided who is faster."""
        arms = {name: name for name in (self.base, *names)}
        n_samples = self._count_pass((self.base, *names))
        orders: dict[str, Order] = {arm: self._order(self.candidates[arm].policy, n_samples) for arm in arms}
        if self.lengths.vary and not self.are_alone:
            arms[NAIVE] = self.base
            padded = Policy(max_batch=NAIVE_BATCH, length_multiple=self.lengths.longest)
            orders[NAIVE] = self._order(padded, n_samples, in_order=True)
        number = 0
        while names:
            begin_s = self.bench.spent_s
            kept, group = self._measure(f"proof {number}", arms, [{arm: orders[arm] for arm in arms}], PROOF_S)
            arms, number = kept, number + 1
            self._proof.add(group.stages[0])
            self.cpu_pressure_pct = max(group.cpu_pressure_pct or 0.0, self.cpu_pressure_pct or 0.0)
            others = [arm for arm in arms if arm not in (self.base, NAIVE)]
            is_decided = all(self._proof.compare(self.base, arm).is_decided for arm in others)
            is_over = 2 * self.bench.spent_s - begin_s > self.budget_s
            if (is_look(number) and is_decided) or (number >= LEAST_GROUPS and is_over):
                break
        for name in names:
            self._judge(name)
        if number:
            self.candidates[self.base].samples_per_s = self._proof.estimate_rate(self.base)
        if NAIVE in arms and number:
            best = max((arm for arm in arms if arm != NAIVE), key=lambda arm: self._estimate_rate(self._proof, arm))
            self.gain_over_naive = self._compare(NAIVE, best)

    def _judge(self, name: str) -> None:
        row = self.candidates[name]
        if row.status != "untried":
            return
        row.gain = self._compare(self.base, name)
        row.samples_per_s = self._estimate_rate(self._proof, name)
        low, high = row.gain.ci
        if row.gain.verdict == "faster":
            row.status = "offered"
        else:
            bounds = "" if low is None or high is None else f" ({low:.2f} to {high:.2f} times)"
            row.drop("slower", f"not proven faster than eager fp32{bounds}")

    def _compare(self, base: str, arm: str) -> Gain:
        known = self._proof.compare(base, arm)
        low, high = (1 + pct / 100 if math.isfinite(pct) else None for pct in known.ci_pct)
        return Gain(times=known.speedup, ci=(low, high), verdict=known.verdict, n_groups=known.n_groups)

    def _count_pass(self, names: Iterable[str]) -> int:
        """Count the samples of a pass: a quarter second of eager's, and a whole batch of every policy."""
        policies = [self.candidates[name].policy or Policy() for name in names]
        wanted = math.ceil(PASS_S * (self.candidates[self.base].samples_per_s or 1.0))
        return max(PASS_SAMPLES[0], *(policy.max_batch for policy in policies), min(PASS_SAMPLES[1], wanted))

    def _order(self, policy: Policy | None, n_samples: int, *, in_order: bool = False) -> Order:
        return {"policy": encode(policy), "n_samples": n_samples} | ({"in_order": True} if in_order else {})

    def _measure_policies(self, name: str) -> None:
        """Measure all policies of a candidate, eager beside it with its best one, and take the best."""
        policies = self._list_policies(self.candidates[name].plan)
        n_samples = max(max(p.max_batch for p in policies), self._count_pass([self.base]))
        base = self._order(self.candidates[self.base].policy, n_samples)
        stages = [{self.base: base, name: self._order(policy, n_samples)} for policy in policies]
        found: list[Evidence[str]] = [Evidence() for _ in policies]
        for number in range(N_EXHAUSTIVE):
            arms = {self.base: self.base, name: name}
            _, group = self._measure(f"policies {number}", arms, stages, PROOF_S)
            if not group.stages or name not in group.stages[0]:
                return
            for evidence, turns in zip(found, group.stages, strict=True):
                evidence.add(turns)
        rates = [self._estimate_rate(evidence, name) for evidence in found]
        row, best = self.candidates[name], max(range(len(rates)), key=rates.__getitem__)
        row.policy, row.samples_per_s = policies[best], rates[best]

    @property
    def offered(self) -> list[Candidate]:
        return [row for row in self.candidates.values() if row.status in OFFERED]
