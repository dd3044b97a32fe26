"""The picks of a search: whole rows of its table, each with the rule that chose it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fulltilt.errors import NoPlanError
from fulltilt.records import Plan, Trial, decode, encode, format_gib
from fulltilt.stats import Comparison
from fulltilt.stats.alternation import WORTH_PCT
from fulltilt.tuner.picks.changes import describe_changes
from fulltilt.tuner.picks.failures import describe_failures, find_failure_remedy
from fulltilt.tuner.picks.finalists import MEMORY_SAFETY_PCT, filter_safe, filter_smallest
from fulltilt.tuner.picks.speed import read_rate
from fulltilt.tuner.search.proof import Proof

MEMORY_SPEED_SHARE_PCT = 90.0  # of the best speed: what the pick with the least memory may cost


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pick:
    """A whole row of the table, and why it was picked.

    Attributes:
        proven: Whether it is recommended because turns with the user's own settings proved it faster; None where that
            was not the question.
        gain: Over the user's own settings, in turns; None where there were fewer than two groups of them.
        tied_with: Ids of the rows of plans that took turns with this one, and were not told from it.
        changes: "recipe" and "numerics": what differs from the user's plan in a way that can change what is
            learned, one sentence each; empty where nothing does.
    """

    trial: Trial
    rule: str
    proven: bool | None = None
    gain: Comparison | None = None
    tied_with: tuple[str, ...] = ()
    changes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        fields = {field.name: encode(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return fields.pop("trial") | fields

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Pick":
        return cls(
            trial=decode(Trial, data),
            rule=data["rule"],
            proven=data["proven"],
            gain=None if data["gain"] is None else decode(Comparison, data["gain"]),
            tied_with=tuple(data["tied_with"]),
            changes={name: tuple(lines) for name, lines in data["changes"].items()},
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Picks:
    """The picks of a search.

    Attributes:
        recommended: What is proven to be faster than the user's own settings, else those.
        unproven: The best other plan in turns, where its gain could not be proven or it learned worse; else None.
        efficiency, memory: None when no row has a memory figure.
    """

    throughput: Pick
    efficiency: Pick | None
    recommended: Pick
    memory: Pick | None = None
    unproven: Pick | None = None

    @property
    def best(self) -> Pick:
        """The plan that came out ahead, proven or not."""
        return self.unproven or self.recommended


RULES = {
    "throughput": "most samples/s of {n} plans that ran",
    "efficiency": "most samples/s per GiB of {n} plans with a memory figure",
    "memory": f"least memory of {{n}} plans with at least {MEMORY_SPEED_SHARE_PCT:g} % of the best speed",
    "proven": "took turns with the settings as they were and is proven faster by more than 1 %; {memory}",
    "kept": "the settings as they were: no other plan is proven faster in the turns that decide; {memory}",
    "unlooked": "faster in turns with the settings as they were; some changes were not looked at; {memory}",
    "overruled": "the settings as they were: the plan that is faster learned worse in the trainings of --verify",
    "worse": "faster than the settings as they were in turns, but learned worse in the trainings of --verify",
    "alone": "fastest of {n} plans that ran; the settings as they were did not: nothing says what it gains; {memory}",
    "unproven": "the best other plan in turns, not proven to be faster than the settings as they were; {memory}",
}
"""Name of a rule → its words."""


def pick(
    rows: Sequence[Trial],
    proof: Proof,
    *,
    user_plan: Plan,
    memory_limit_gib: float | None,
) -> Picks:
    """Pick from the rows of the table (one a plan) by what the proof showed.

    Args:
        memory_limit_gib: What the device, or the limit of the search, allows; None when it is not known.

    Raises:
        NoPlanError: no row is ok; says how the rows ended.
    """
    fine = [row for row in rows if row.status == "ok"]
    if not fine:
        raise NoPlanError(describe_failures(rows), remedy=find_failure_remedy(rows))
    choose = _Chooser(fine, proof, user_plan, memory_limit_gib)
    recommended, unproven = choose.pick_recommended()
    return Picks(
        throughput=choose.pick_fastest(),
        efficiency=choose.pick_efficient(),
        memory=choose.pick_small(),
        recommended=recommended,
        unproven=unproven,
    )


class _Chooser:
    """Builds picks from rows and what the proof showed."""

    def __init__(self, rows: Sequence[Trial], proof: Proof, user_plan: Plan, memory_limit_gib: float | None):
        self._rows, self._proof, self._user_plan, self._memory_limit_gib = rows, proof, user_plan, memory_limit_gib
        self._row_of = {row.plan: row for row in rows}
        met = {plan for plan in self._row_of if proof.evidence.count_groups([plan])}
        self._met = [row for row in rows if row.plan in met]

    def pick_recommended(self) -> tuple[Pick, Pick | None]:
        """Pick what is proven; else the settings as they were, and what came out ahead of them."""
        proof, own = self._proof, self._row_of.get(self._user_plan)
        best = self._row_of[proof.best]
        if own is None:
            return self._build(best, "alone"), None
        if proof.is_proven:
            return self._build(best, "proven"), None
        is_faster = proof.gain is not None and proof.gain.verdict == "faster"
        other = None if best is own else self._build(best, "unlooked" if is_faster else "unproven")
        return self._build(own, "kept"), other

    def pick_fastest(self) -> Pick:
        """Pick the fastest of the plans that took turns, where any did: single runs are fast by luck."""
        evidence, best = self._proof.evidence, self._proof.best
        met = [row for row in self._met if evidence.count_groups([best, row.plan])]  # others had left for being slow
        if not met:
            return self._build(max(self._rows, key=read_rate), "throughput")
        return self._build(max(met, key=lambda row: evidence.compare(best, row.plan).gain_pct), "throughput")

    def pick_efficient(self) -> Pick | None:
        known = [(read_rate(row) / memory, row) for row in self._rows if (memory := row.device_memory_peak_gib)]
        return None if not known else self._build(max(known, key=lambda pair: pair[0])[1], "efficiency", n=len(known))

    def pick_small(self) -> Pick | None:
        """Pick the least memory that still trains at an acceptable speed; of rows with as little the fastest."""
        least = max(map(read_rate, self._rows)) * MEMORY_SPEED_SHARE_PCT / 100
        known = [row for row in self._rows if read_rate(row) >= least and row.device_memory_peak_gib is not None]
        return None if not known else self._build(max(filter_smallest(known), key=read_rate), "memory", n=len(known))

    def _describe_memory(self, row: Trial) -> str:
        if self._memory_limit_gib is None:
            return "the memory of the device is not known, so no limit was applied"
        limit_gib = self._memory_limit_gib * MEMORY_SAFETY_PCT / 100
        safe = filter_safe(self._rows, limit_gib)
        has = f"memory at most {format_gib(limit_gib)}, {MEMORY_SAFETY_PCT:g} % of {format_gib(self._memory_limit_gib)}"
        if row in safe:
            return has
        if safe:
            return f"other plans have {has}"
        return f"no plan has {has}" + ("; this one is of those with the least" * (row in filter_smallest(self._rows)))

    def _build(self, row: Trial, rule: str, *, n: int | None = None) -> Pick:
        proof = self._proof
        gain = None
        if proof.base not in (None, row.plan) and proof.evidence.count_groups([proof.base, row.plan]) > 1:
            gain = proof.evidence.compare(proof.base, row.plan)
        tied = [other.id for other in self._met if other is not row and self._is_tied(other.plan, row.plan)]
        return Pick(
            trial=row,
            rule=RULES[rule].format(n=len(self._rows) if n is None else n, memory=self._describe_memory(row)),
            proven={"proven": True, "unproven": False, "unlooked": False}.get(rule),
            gain=gain,
            tied_with=tuple(tied),
            changes=describe_changes(self._user_plan, row.plan),
        )

    def _is_tied(self, plan: Plan, picked: Plan) -> bool:
        """Whether the turns of two plans leave open which is faster, or find them equal."""
        if not self._proof.evidence.count_groups([plan, picked]):
            return False
        found = self._proof.evidence.compare(picked, plan)
        return found.verdict in ("equal", "undecided") and found.ci_pct[1] > -WORTH_PCT
