"""``Finding``: a line of code that a rule suspects, or that was proved to cost time."""

import dataclasses
from typing import Any, Literal

Verdict = Literal["act", "note", "unconfirmed"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the user's code that costs time; the fields are those of the JSON.

    Attributes:
        rule: Name of the rule, ``host-sync``.
        file: Path, relative to the current folder if below it.
        line: 1-based.
        verdict: "act": a gain above 1 % is proved; "note": measured, and not worth more; "unconfirmed": not proved.
        evidence: Figures by name; the names hold the units.
        gain_pct: Share of the step's time that is saved without the site, measured in the run; None: not proved.
        ceiling_pct: The most that removing the site could save, measured or bounded; None: unknown.
        numerics: What the fix does to results: "equal", "within_tolerance", "changed"; None: unknown.
        fix: What to do, in one sentence.
        diff: The change as a unified diff, where there is one.
    """

    rule: str
    file: str
    line: int
    verdict: Verdict
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)
    gain_pct: float | None = None
    gain_ci95_pct: tuple[float, float] | None = None
    ceiling_pct: float | None = None
    memory_gain_gib: float | None = None
    numerics: Literal["equal", "within_tolerance", "changed"] | None = None
    fix: str = ""
    diff: str | None = None
