"""The result of a search, and its JSON contract (``tune.schema.json`` in ``fulltilt.tuner``)."""

import dataclasses
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fulltilt.records import VERSION, Machine, Plan, Trial, decode, encode
from fulltilt.records.run_folder import write_atomic
from fulltilt.report.compare_sides import RESULT_FILE
from fulltilt.report.html import build_tune_html, build_tune_summary
from fulltilt.report.summary import count, describe_plan, format_duration
from fulltilt.report.trials_csv import build_trials_csv
from fulltilt.report.turns import name_sides
from fulltilt.report.verdict import describe_verdict
from fulltilt.tuner.answer.advice import Advice
from fulltilt.tuner.answer.hints import Hint
from fulltilt.tuner.answer.picks import Pick, Picks
from fulltilt.tuner.answer.quality import Verification
from fulltilt.tuner.answer.savings import Savings
from fulltilt.tuner.picks.changes import LearningRate
from fulltilt.tuner.search.proof import LeverEffect

CSV_FILE, PAGE_FILE = "trials.csv", "report.html"
RESULT_FILES = (RESULT_FILE, CSV_FILE, PAGE_FILE)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SearchSummary:
    """How the rows of a search came about.

    Attributes:
        grid_size: Rows that the full grid has, plans that come to the same counted once.
        n_trials: Rows in ``trials``.
        n_end_to_end: Whole runs, those of earlier searches in the same folder included.
        n_repeats: Rows of plans that took turns.
        n_groups: Groups of processes in which plans took turns.
        n_resumed: Rows taken from the run folder instead of being run.
        n_probes: Trials that ran a part of the step; those on fake tensors, which run nothing, left out.
        n_collapsed: Combinations of the axes that came to the same plan as another one.
        seconds: Wall time of this run of the command.
        earlier_s: What the rows took that earlier runs left in the folder; on top of ``seconds``.
        memory_limit_gib: What rows were held against; the recommended one keeps below ``memory_safety_pct`` of it.
        stopped_by_budget: True when the strategy had more to try.
        stalled_pct: Of the time of its turns, that of steps that took over five times as long as quick ones, for the
            plan that stalled most.
        takes_turns: False where the plans of a group ran one after the other instead of living at the same time.
        waits_passively: Whether threads slept while they waited (``wait_policy``) in turns, and stayed on a core each
            where they could (``thread_affinity``), since steps stalled.
        n_off_grid: Of the plans that ran, those that the grid does not hold: the settings as they were, mostly.
    """

    strategy: str
    grid_size: int
    n_trials: int
    n_end_to_end: int
    n_out_of_memory: int
    seconds: float
    earlier_s: float = 0.0
    n_skipped: int = 0
    n_repeats: int = 0
    n_resumed: int = 0
    n_probes: int = 0
    n_collapsed: int = 0
    memory_limit_gib: float | None = None
    memory_safety_pct: float = 80.0
    stopped_by_budget: bool = False
    n_groups: int = 0
    stalled_pct: float | None = None
    takes_turns: bool = True
    waits_passively: bool = False
    n_off_grid: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpochSeconds:
    """Time of one pass over the training set with the recommended plan, from its measured throughput.

    Training alone: evaluation and checkpoints come on top.
    """

    estimate: float | None
    ci95: tuple[float, float] | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TuneResult:
    """What ``fulltilt tune`` found. ``to_json_text`` is the stable document; ``read`` takes one back."""

    version: int = VERSION
    machine: Machine
    workload: dict[str, Any]
    trials: tuple[Trial, ...]
    picks: Picks
    search: SearchSummary
    learning_rate: LearningRate
    epoch_seconds: EpochSeconds
    user_plan: Plan
    baseline: Trial | None = None  # the user's plan as measured
    repeats: tuple[Trial, ...] = ()  # plans in turns: their speed alone, group by group
    levers: tuple[LeverEffect, ...] = ()  # what each change of the fastest plan is worth
    probes: tuple[Trial, ...] = ()  # of parts of the step: kinds device, loader, memory
    savings: Savings | None = None
    advice: Advice | None = None
    verification: Verification | None = None
    hints: tuple[Hint, ...] = ()
    notes: tuple[str, ...] = ()
    null_reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    folder: str | None = None

    def to_document(self) -> dict[str, Any]:
        """Return the JSON contract as plain values."""
        return encode(self)

    def __repr__(self) -> str:
        pick, document = self.picks.best.trial, self.to_document()
        took, page = format_duration(self.search.seconds), Path(self.folder) / PAGE_FILE if self.folder else "no folder"
        return "\n".join(
            (
                describe_verdict(document),
                f"{name_sides(document)[pick.id]} {pick.id}: {describe_plan(pick.plan)}",
                f"{count(len(self.trials), 'plan')} in {took}: {page}",
            )
        )

    def _repr_html_(self) -> str:
        """Show a notebook the first part of the page."""
        return build_tune_summary(self.to_document())

    def to_json_text(self) -> str:
        return json.dumps(self.to_document(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> "TuneResult":
        """Build a result from its document.

        Raises:
            ValueError: a key is missing or has another type; names it.
        """
        return decode(cls, document)


def write_result(result: TuneResult, folder: Path) -> list[Path]:
    """Write the result, all its rows for a spreadsheet, and the page. The caller holds the folder's lock.

    Raises:
        StorageError: no space left.
    """
    document = result.to_document()
    return [
        write_atomic(folder / RESULT_FILE, result.to_json_text()),
        write_atomic(folder / CSV_FILE, build_trials_csv(document)),
        write_atomic(folder / PAGE_FILE, build_tune_html(document)),
    ]


def build_epoch_seconds(pick: Pick, n_samples: int | None, before_samples_per_s: float) -> EpochSeconds:
    """Compute samples over samples per second: as in the turns that decided, else as in the plan's whole run.

    Args:
        before_samples_per_s: Of the user's own plan in turns; nan where it took none.
    """
    rate, interval = pick.trial.samples_per_s, pick.trial.samples_per_s_ci95
    if not n_samples or not rate:
        return EpochSeconds(estimate=None, ci95=None)
    if before_samples_per_s > 0:
        gains_pct = (0.0, 0.0, 0.0) if pick.gain is None else (pick.gain.gain_pct, *pick.gain.ci_pct)
        rate, *ends = (before_samples_per_s * (1 + gain_pct / 100) for gain_pct in gains_pct)
        interval = None if pick.gain is None else (ends[0], ends[1])
    if interval is None or min(interval) <= 0:
        return EpochSeconds(estimate=n_samples / rate, ci95=None)
    return EpochSeconds(estimate=n_samples / rate, ci95=(n_samples / interval[1], n_samples / interval[0]))


def read_schema() -> dict[str, Any]:
    """Read the JSON Schema of the document."""
    return json.loads((resources.files("fulltilt.tuner") / "tune.schema.json").read_text(encoding="utf-8"))
