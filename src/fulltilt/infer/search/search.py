"""Find the fastest candidate: many are measured briefly, half go on, the last are proven in turns.

1. Eager fp32 is built; it says how long real samples are.
2. Every combination of engine, quantization, precision and CUDA graphs that can apply is built.
3. All are looked at in a few points of the service surface; the better half goes on.
4. The other levers (threads, attention, …) are tried on the two best.
5. Those that are left get the whole surface, and for each the simulation chooses the policy.
6. The best three take turns with eager on real samples, each with its policy, until it is decided who is faster.
7. Where a response is a target, they are served and loaded, and accepted by a sequential test.

Each part has its share of the budget. It begins what is expected to end in that, and ends what does not.
"""

import contextlib
import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.infer.manifest import Policy
from fulltilt.infer.search.bench import Group, Order, ProcessBench
from fulltilt.infer.search.candidates import build_baseline, list_combinations, list_variants, name_plan
from fulltilt.infer.search.journal import OverError
from fulltilt.infer.search.policies import Goal, choose_policy, list_policies
from fulltilt.infer.search.result import OFFERED, OVER, Candidate, Status
from fulltilt.infer.search.simulate import BATCHES, Point, Surface, draw_arrivals, plan_points
from fulltilt.levers import Lever
from fulltilt.records import Plan, encode
from fulltilt.stats import Evidence, is_look
from fulltilt.stats.alternation import LEAST_GROUPS, LOOKS

NOTHING = "eager fp32 cannot be measured, so there is nothing to compare with"
LAST_WORD = "targets.response_s is until the last word of a text, which a search does not write"
GROUP_SIZE = 5  # processes that live at the same time, eager among them
LOOK_S, PROOF_S = 0.2, 0.4  # of timed blocks, for each pair of arms and stage; two rounds at least
N_FINALISTS = 3
N_VARIED = 2  # best candidates on which the other levers are tried
BUILD, VARY = 0.6, 0.85  # of the time before the proof: when all are built, and when their variants are
PROVE = 0.25  # of the budget, kept back for a proof at most; for one candidate whatever it takes
ACCEPT, ACCEPT_S = 0.2, 40.0  # kept back for loads: at most so much of the budget, and seconds of each
FAILED: dict[str, Status] = {"out_of_memory": "out_of_memory", "timeout": "timeout"}
FIRST_BATCHES = (1, 4)  # of eager, before the lengths are known
PASS_S, PASSES = 0.25, 6  # a pass of eager over real samples; an arm's part of a group takes so many, or less
PASS_SAMPLES = (32, 1024)


@dataclasses.dataclass
class Search:
    """One search, over what it has measured so far."""

    bench: ProcessBench
    catalogue: Mapping[str, Lever]
    own: Mapping[str, Any]  # the user's plan of training: its threads are kept
    goal: Goal
    budget_s: float
    n_groups: int = 0
    cpu_pressure_pct: float | None = None  # the most of a group of the proof
    are_alone: bool = False  # samples that cannot share a batch

    def __post_init__(self) -> None:
        self.baseline = build_baseline(self.catalogue, self.own)
        self.base = name_plan(self.baseline, self.baseline)
        self.candidates: dict[str, Candidate] = {}
        self.not_applicable: dict[str, str] = {}
        kept_s = min(N_FINALISTS * ACCEPT_S, ACCEPT * self.budget_s) if self.goal.is_capacity else 0.0
        self._proof_end_s = self._look_end_s = self.budget_s - kept_s
        self._surface: dict[Point, Evidence[str]] = defaultdict(Evidence)
        self._proof: Evidence[str] = Evidence()
        self._build_s: dict[str, float] = {}  # engine → of the last candidate
        self._start_s, self._stage_s = 0.0, dict[float, float]()  # of an arm: to start; seconds of blocks → of a stage

    def run(self) -> None:
        """Search by halving.

        Raises:
            FulltiltError: eager fp32 itself cannot be built or measured.
        """
        self.start()
        plans, self.not_applicable = list_combinations(self.catalogue, self.facts, self.baseline)
        names = self.build(plans, end_s=BUILD * self._look_end_s)
        self.look(names, is_coarse=True, n_groups=1, end_s=VARY * self._look_end_s)
        kept = self.keep_best(names, max(N_FINALISTS, (len(names) + 1) // 2))
        self.reserve(kept[:N_FINALISTS])
        varied = [self.candidates[name].plan for name in (*kept[:N_VARIED], self.base)]
        variants = [variant for plan in varied for variant in list_variants(self.catalogue, self.facts, plan)]
        added = self.build(variants, end_s=VARY * self._look_end_s)
        self.look([*kept, *added], is_coarse=False, n_groups=2, end_s=self._look_end_s)
        self.finish([*kept, *added])

    def start(self) -> None:
        """Build eager fp32 and measure its longest sample, however long that takes."""
        row = self.candidates[self.base] = Candidate(name=self.base, plan=self.baseline)
        self._build(row, math.inf)
        if not row.is_alive:
            raise FulltiltError(f"{NOTHING}: {row.reason}")
        row.status = "baseline"
        stages = [{self.base: {"batch": batch, "length": None}} for batch in FIRST_BATCHES]
        group = self.measure("longest", [self.base], stages, 0.0, math.inf)
        self.lengths = tuple(group.arms[self.base]["lengths"])
        self.arrivals = draw_arrivals(self.lengths, self.goal.samples_per_request)
        for batch, turns in zip(FIRST_BATCHES, group.stages, strict=True):
            self._surface[max(self.lengths), batch].add(turns)
        self._rate(self.base)
        self._stage_s[LOOK_S] = max(self._stage_s[0.0], 2 * LOOK_S)  # that one had no timed block
        self.reserve([self.base] * 2)  # others may be like it

    def reserve(self, names: Sequence[str]) -> None:
        """Keep time back for a proof: of the first candidate in any case, of all within their part of the budget."""
        rows, longest = [self.candidates[name] for name in (self.base, *names)], max(self.lengths)
        n_samples = self.order_passes([(row.name, row.policy) for row in rows])[self.base]["n_samples"]
        longest_per_s = max(self._surface[longest, batch].estimate_rate(self.base) for batch in FIRST_BATCHES)
        pass_s = n_samples * statistics.fmean(self.lengths) / longest / longest_per_s
        self._stage_s[PROOF_S] = PASSES * max(PASS_S, pass_s)
        one_s, all_s = (self._expect_s([self.base, *some], 1, PROOF_S) for some in (names[:1], names))
        self._look_end_s = self._proof_end_s - max(LEAST_GROUPS * one_s, min(PROVE * self.budget_s, LOOKS[0] * all_s))

    def build(self, plans: Sequence[Plan], *, end_s: float) -> list[str]:
        """Build candidates as long as there is time → those that have an artefact."""
        named = {name_plan(plan, self.baseline): plan for plan in plans}
        new = {name: Candidate(name=name, plan=plan) for name, plan in named.items() if name not in self.candidates}
        self.candidates |= new
        for row in new.values():
            self._build(row, end_s)
        return [name for name, row in new.items() if row.is_alive]

    def _build(self, row: Candidate, end_s: float) -> None:
        engine, known_s = row.plan["engine"], self._build_s
        expected_s = known_s.get(engine, max(known_s.values(), default=0.0))
        try:
            done = self.bench.build(row.name, row.plan, limit_s=end_s - self.bench.spent_s, expected_s=expected_s)
        except OverError:
            row.drop("untried", f"{OVER} it was built")
            return
        row.build_s = known_s[engine] = done.seconds
        if done.manifest is not None:
            row.accuracy, self.are_alone = done.manifest.accuracy, done.manifest.joins != "pad"
            if done.manifest.writes_text and self.goal.limit_s:
                raise UsageError(f"{LAST_WORD}; leave it out by targets.response_s=null, and hold it by infer check")
        if done.facts is not None:
            self.facts = done.facts
        if done.status is not None:
            row.drop(done.status, done.reason or "it could not be built")

    def look(self, names: Sequence[str], *, is_coarse: bool, n_groups: int, end_s: float) -> None:
        """Measure points of candidates beside eager, and choose their policies."""
        one_s = 1 / self._surface[max(self.lengths), 1].estimate_rate(self.base)
        points = plan_points(self.lengths, one_s, is_coarse=is_coarse, max_batch=1 if self.are_alone else BATCHES[-1])
        for number in range(n_groups):
            rest = [name for name in names if self.candidates[name].is_alive]
            while True:
                arms = [self.base, *rest[: GROUP_SIZE - 1]]
                while len(arms) > 2 and self._expect_s(arms, len(points), LOOK_S) > end_s - self.bench.spent_s:
                    arms.pop()  # it is measured with the next ones, or not at all
                rest = rest[len(arms) - 1 :]
                stages = [{arm: {"batch": batch, "length": length} for arm in arms} for length, batch in points]
                with contextlib.suppress(OverError):  # those that come after may take less
                    group = self.measure(f"look {number} at {len(points)}", arms, stages, LOOK_S, end_s)
                    for point, turns in zip(points, group.stages, strict=True):
                        self._surface[point].add(turns)
                if not rest:
                    break
        for name in (self.base, *filter(lambda name: self.candidates[name].is_alive, names)):
            if self._list_points(name):
                self._rate(name)
            else:
                self.candidates[name].drop("untried", f"{OVER} it was measured")

    def measure(
        self, question: str, arms: list[str], stages: Sequence[Mapping[str, Order]], seconds: float, end_s: float
    ) -> Group:
        """Measure a group; an arm that fails is dropped, and the others are measured without it.

        Raises:
            OverError: there is no time for it.
        """
        while True:
            orders = [{arm: order for arm, order in stage.items() if arm in arms} for stage in stages]
            limits_s = {"limit_s": end_s - self.bench.spent_s, "expected_s": self._expect_s(arms, len(stages), seconds)}
            group = self.bench.measure(question, orders, seconds, **limits_s)
            if group.failed is None:
                break
            name, status, reason = group.failed
            if name == self.base:
                raise FulltiltError(f"{NOTHING}: {reason}")
            self.candidates[name].drop(FAILED.get(status, "failed"), reason)
            arms = [arm for arm in arms if arm != name]
        self.n_groups += 1
        self._start_s = max(0.0, group.open_s - sum(group.arms[arm]["cold_start_s"] for arm in arms)) / len(arms)
        self._stage_s[seconds] = (group.seconds - group.open_s) / len(arms) / len(stages)
        for arm in arms:
            row, said = self.candidates[arm], group.arms[arm]
            row.cold_start_s, row.memory_gib = said["cold_start_s"], said["memory_gib"]
        return group

    def _expect_s(self, arms: Sequence[str], n_stages: int, seconds: float) -> float:
        rows, base_s = [self.candidates[arm] for arm in arms], self.candidates[self.base].cold_start_s or 0.0
        cold_s = [row.cold_start_s or max(base_s, (row.build_s or 0.0) / 2) for row in rows]  # building opens it, too
        return sum(cold_s) + len(arms) * (self._start_s + n_stages * self._stage_s.get(seconds, 0.0))

    def _rate(self, name: str) -> None:
        """Choose the policy of a candidate by its surface so far."""
        row, points = self.candidates[name], self._list_points(name)
        seconds = [batch / self.estimate_rate(self._surface[length, batch], name) for length, batch in points]
        row.surface = Surface(points=tuple(points), seconds=tuple(seconds), is_recorded=row.plan["cuda_graphs"])
        service, policies = row.surface.build_service(), self.list_policies()
        found = choose_policy(policies, service, self.lengths, self.goal, self.arrivals)
        row.policy, row.samples_per_s, row.response_s, row.capacity_requests_per_s = found

    def _list_points(self, name: str) -> list[Point]:
        return sorted(point for point, evidence in self._surface.items() if evidence.count_groups([name]))

    def list_policies(self) -> list[Policy]:
        return [Policy()] if self.are_alone else list_policies(self.lengths)

    def estimate_rate(self, evidence: Evidence[str], name: str) -> float:
        """Estimate a rate as eager's times what the candidate is faster: so a slow minute of the machine cancels."""
        ratios = evidence.list_log_ratios(self.base, name)
        return evidence.estimate_rate(self.base) * math.exp(statistics.median(ratios))

    def keep_best(self, names: Sequence[str], n: int) -> list[str]:
        """Keep the ``n`` best of those that are still in the search, best first; the others are behind."""
        alive = [row for row in (self.candidates[name] for name in names) if row.is_alive]
        ranked = sorted(alive, key=lambda row: -row.score(self.goal))
        for row in ranked[n:]:
            share = 100 * (1 - row.score(self.goal) / (ranked[0].score(self.goal) or 1.0))
            row.drop("behind", f"{share:.0f} % behind {ranked[0].name} where it was looked at")
        return [row.name for row in ranked[:n]]

    def finish(self, names: Sequence[str]) -> None:
        """Prove the best, refuse what is too large, and accept under load."""
        self.prove(self.keep_best(names, N_FINALISTS))
        limit_gib = self.goal.memory_gib or math.inf
        for row in self.offered:
            if row.status != "baseline" and (row.memory_gib or 0.0) > limit_gib:
                row.drop("refused", f"holds {row.memory_gib:.2f} GiB, targets.memory_gib is {limit_gib:g}")
        if self.goal.is_capacity:
            self.accept()

    def prove(self, names: list[str]) -> None:
        """Prove finalists faster than eager, or not: at a time as many as there is time for, the best first."""
        while True:
            left_s, some = self._proof_end_s - self.bench.spent_s, list[str]()
            for name in names:  # for one the fewest groups of a claim are enough; others join up to the first decision
                n_groups = LOOKS[0] if some else LEAST_GROUPS
                if n_groups * self._expect_s([self.base, *some, name], 1, PROOF_S) <= left_s:
                    some.append(name)
            if not some:
                break
            self._take_turns(some)
            names = [name for name in names if name not in some]
            if self.goal.is_capacity and len(self.offered) > 1:  # what is left is for the loads
                break
        for name in names:
            self.candidates[name].drop("untried", f"{OVER} it was proven")
        for row in filter(lambda row: row.gain, self.candidates.values()):  # of one rate of eager, over all groups
            row.samples_per_s = self.estimate_rate(self._proof, row.name)

    def _take_turns(self, names: Sequence[str]) -> None:
        """Have candidates take turns with eager on real samples until it is decided who is faster."""
        base, *rows = (self.candidates[name] for name in (self.base, *names))
        orders = self.order_passes([(row.name, row.policy) for row in (base, *rows)])
        while alive := [row.name for row in rows if row.is_alive]:
            number = self._proof.count_groups([self.base, *alive])
            if is_look(number) and all(self._proof.compare(self.base, name).is_decided for name in alive):
                break
            try:
                group = self.measure(f"proof {number}", [self.base, *alive], [orders], PROOF_S, self._proof_end_s)
            except OverError:
                break
            self._proof.add(group.stages[0])
            self.cpu_pressure_pct = max(group.cpu_pressure_pct or 0.0, self.cpu_pressure_pct or 0.0)
            base.samples_per_s = self._proof.estimate_rate(self.base)
        for row in filter(lambda row: row.is_alive, rows):
            known = self._proof.compare(self.base, row.name)
            row.gain = known if known.n_groups >= LEAST_GROUPS else None
            if row.gain is None:
                row.drop("untried", f"{OVER} it was proven")
            elif known.verdict == "faster":
                row.status = "offered"
            else:
                low, high = (1 + pct / 100 for pct in known.ci_pct)
                row.drop("slower", f"not proven faster than eager fp32 ({low:.2f} to {high:.2f} times)")

    def order_passes(self, policies: Sequence[tuple[str, Policy | None]]) -> dict[str, Order]:
        """Order passes over what eager answers in a quarter second, and a whole batch of each policy at least."""
        least, most = PASS_SAMPLES
        wanted = math.ceil(PASS_S * (self.candidates[self.base].samples_per_s or 1.0))
        n_samples = max(least, min(most, wanted), *(policy.max_batch for _, policy in policies if policy))
        return {arm: {"policy": encode(policy), "n_samples": n_samples} for arm, policy in policies}

    def accept(self) -> None:
        """Serve and load the best, and eager where none of them is accepted; who misses is not offered, eager apart."""
        expected_s, is_accepted = 0.0, False
        for number, row in enumerate(sorted(self.offered, key=lambda row: -row.score(self.goal))):
            if number >= N_FINALISTS and is_accepted:
                break
            begin_s = self.bench.spent_s
            limits_s = {"limit_s": self.budget_s - begin_s, "expected_s": expected_s}
            try:
                row.live = self.bench.accept(row, self.goal, **limits_s)
            except OverError:
                row.reason = f"{OVER} it was accepted under load"
                continue
            expected_s = self.bench.spent_s - begin_s
            is_accepted |= row.live.verdict == "met"
            if row.live.verdict == "missed" and row.status != "baseline":
                row.drop("refused", f"missed under load: {row.live.why or 'too many responses were late'}")
            elif row.live.why and not row.live.n_responses and row.status != "baseline":
                row.drop("failed", f"could not be loaded: {row.live.why}")

    @property
    def offered(self) -> list[Candidate]:
        return [row for row in self.candidates.values() if row.status in OFFERED]
