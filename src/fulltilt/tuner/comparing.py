"""Compare two configurations by having their trainings take turns on this machine: ``fulltilt compare``."""

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulltilt.config import Config, plan_of
from fulltilt.errors import NoPlanError, TrainingError
from fulltilt.hardware import read_machine
from fulltilt.records import VERSION, Machine, Plan, TrialRequest
from fulltilt.records.settings import flatten_settings
from fulltilt.stats import Comparison, alternate
from fulltilt.tuner.question.options import RANK_START_S, build_options, find_limits
from fulltilt.tuner.question.source import resolve_target
from fulltilt.tuner.trials.client import Zygote, Zygotes
from fulltilt.tuner.trials.live import ArmFailedError, GroupRunner
from fulltilt.tuner.trials.trial import refuse_inside_trial

LIMIT_S = 60.0
LEAST_START_S = 60.0  # that a process has to build its model and data and to warm up
LAST_LINES = 5  # of the log of processes that cannot start


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparedSide:
    """Holds one of the two configurations, and its speed in turns: A's own, and that times what B gains."""

    name: str
    plan: Plan
    samples_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConfigComparison:
    """What came of comparing configuration B with configuration A, measured in turns.

    Attributes:
        differences: Dotted key → its value in A and in B.
        stalled_pct: Of the timed seconds, those of steps that took over five times as long as usual.
        takes_turns: False where whole processes ran one after the other instead.
        waits_passively: Whether threads slept while they waited (``wait_policy``) and stayed on a core each where they
            could (``thread_affinity``), since steps stalled otherwise.
    """

    version: int = VERSION
    kind: str = "measured"
    a: ComparedSide
    b: ComparedSide
    comparison: Comparison
    differences: dict[str, tuple[Any, Any]]
    stalled_pct: float
    takes_turns: bool
    waits_passively: bool
    seconds: float
    machine: Machine


def compare_configs(
    a: Config,
    b: Config,
    *,
    names: tuple[str, str] = ("A", "B"),
    limit_s: float = LIMIT_S,
    on_group: Callable[[Comparison], Any] = lambda comparison: None,
) -> ConfigComparison:
    """Train both in turns until it is decided which is faster, or the time is over.

    Args:
        limit_s: Seconds; four groups are measured whatever it is.
        on_group: Told what is known after each group.

    Raises:
        NoPlanError: one of them cannot be trained; says which and why. UsageError: called inside a trial.
        TrainingError: no process can be started.
    """
    refuse_inside_trial("fulltilt.compare")
    machine = read_machine()
    requests = {it: _build_request(it, config, machine, limit_s) for it, config in zip("ab", (a, b), strict=True)}
    begin_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="fulltilt-compare-") as folder,
        Zygotes(Zygote(Path(folder) / "zygote.log")) as zygotes,
    ):
        runner = GroupRunner(zygotes.find, Path(folder))
        try:
            evidence = alternate(lambda: runner(requests), "a", "b", limit_s=limit_s, on_group=on_group)
        except ArmFailedError as error:
            shown = dict(zip("ab", names, strict=True))[str(error.name)]
            reason = error.reason.partition(" (log: ")[0]
            raise NoPlanError(f"{shown} cannot be trained here ({error.status}): {reason}") from None
        except TrainingError as error:  # the log that it names goes with the folder
            said, _, log = str(error).partition(" (log: ")
            words = Path(log.removesuffix(")")).read_text(errors="replace").split("\n") if log else []
            raise TrainingError("\n".join((said, *filter(None, words[-LAST_LINES:])))) from None
    rate, found = evidence.estimate_rate("a"), evidence.compare("a", "b")
    mine, theirs = (dict(flatten_settings(config.to_values())) for config in (a, b))
    return ConfigComparison(
        a=ComparedSide(name=names[0], plan=requests["a"].plan, samples_per_s=rate),
        b=ComparedSide(name=names[1], plan=requests["b"].plan, samples_per_s=rate * found.speedup),
        comparison=found,
        differences={
            key: (mine.get(key), theirs.get(key))
            for key in dict.fromkeys((*mine, *theirs))
            if mine.get(key) != theirs.get(key) and not key.startswith("run.promise")
        },
        stalled_pct=evidence.stalled_pct,
        takes_turns=runner.takes_turns,
        waits_passively=runner.waits_passively,
        seconds=time.monotonic() - begin_s,
        machine=machine,
    )


def _build_request(id: str, config: Config, machine: Machine, limit_s: float) -> TrialRequest:
    options = build_options(config)
    limit_bytes, _ = find_limits(options, machine)
    deadline_s = max(LEAST_START_S, 2 * limit_s) + (RANK_START_S if options.rank_devices else 0.0)
    return TrialRequest(
        id=id,
        source=resolve_target(config).source,
        plan=plan_of(config),
        device=options.device,
        n_steps=options.n_steps,
        seed=config.run.seed,
        memory_limit_bytes=limit_bytes,
        deadline_s=deadline_s,
        patience_s=1.25 * deadline_s,  # above it: whatever is late needs a larger budget
        max_measure_s=options.max_measure_s,
        rank_devices=options.rank_devices,
    )
