"""Train for ``tune --verify``: does the recommended plan learn as well as the user's own, and how fast?

Both are trained by ``fulltilt train`` in processes of their own, in turn and with the same seeds, as the user would
train them. Quality is that of the validation set; time is training time, evaluation and checkpoints left out.
"""

import dataclasses
import hashlib
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.errors import NonFiniteLossError, TrainingError
from fulltilt.hardware.proctree import run_in_session
from fulltilt.records.run_folder import read_lines, write_atomic
from fulltilt.report.training import drop_repeated
from fulltilt.tuner.answer.picks import RULES, Pick
from fulltilt.tuner.answer.quality import ARMS, Arm, Verification, judge
from fulltilt.tuner.answer.result import TuneResult, build_epoch_seconds
from fulltilt.tuner.answer.savings import build_savings
from fulltilt.tuner.picks.changes import describe_changes
from fulltilt.tuner.trials.client import open_log

VERIFY_FOLDER = "verify"
N_PAIRS = 3
STOP_S = 30.0  # a run that is told to end saves a checkpoint first


def add_verification(result: TuneResult, verification: Verification) -> TuneResult:
    """Add what the trainings showed; where the recommended plan learned worse, the settings as they were stay."""
    reasons = {name: reason for name, reason in result.null_reasons.items() if name != "verification"}
    result = dataclasses.replace(result, verification=verification, null_reasons=reasons)
    own, worse = result.baseline, result.picks.recommended
    if own is None or not worse.proven or verification.verdict != "learns worse":
        return result
    n_samples, search_s = result.workload.get("n_samples"), result.search.seconds + result.search.earlier_s
    kept = Pick(trial=own, rule=RULES["overruled"], changes=describe_changes(own.plan, own.plan))
    picks = dataclasses.replace(result.picks, recommended=kept)
    before_samples_per_s = (result.savings and result.savings.before_samples_per_s) or math.nan
    savings, unsaved = build_savings(
        picks, baseline=own, before_samples_per_s=0.0, n_samples=n_samples, n_epochs=None, search_s=search_s
    )
    return dataclasses.replace(
        result,
        picks=dataclasses.replace(picks, unproven=dataclasses.replace(worse, proven=False, rule=RULES["worse"])),
        learning_rate=dataclasses.replace(result.learning_rate, to=result.learning_rate.start),
        epoch_seconds=build_epoch_seconds(kept, n_samples, before_samples_per_s),
        savings=savings,
        null_reasons=reasons | unsaved,
    )


def run_verification(
    words: Sequence[str],
    settings: Mapping[str, Any],
    *,
    folder: Path,
    seed: int,
    n_pairs: int = N_PAIRS,
    epochs: int | None = None,
    on_run: Callable[[Arm, int, int, int], None] | None = None,
) -> Verification:
    """Train both plans ``n_pairs`` times each. Started again in the same folder, it goes on where it was.

    Args:
        words: What the user would give ``fulltilt train``: the configuration, then ``key=value`` words.
        settings: Dotted key → value of the recommended plan, on top of ``words``; one at least.
        seed: Of the first pair; the others follow.
        epochs: Instead of ``run.epochs``.
        n_pairs: Trainings of each plan, two at least: the intervals are over pairs.
        on_run: Told the arm, its seed, how many runs are done and how many there will be, before each run.

    Raises:
        TrainingError: a run failed, or evaluated nothing; says where its log is.
    """
    runs: list[dict[str, Any]] = []
    for pair in range(n_pairs):
        for arm in ARMS if pair % 2 == 0 else reversed(ARMS):
            if on_run is not None:
                on_run(arm, seed + pair, len(runs), 2 * n_pairs)
            extra = [f"{key}={json.dumps(value)}" for key, value in settings.items()] if arm == "recommended" else []
            command = [*words, *extra, *([] if epochs is None else ["--epochs", str(epochs)])]
            # The name changes with what is trained, so that no run goes on from another plan's checkpoint.
            digest = hashlib.sha256(json.dumps(command).encode()).hexdigest()[:8]
            out = folder / f"{arm.replace(' ', '-')}-{digest}-seed{seed + pair}"
            document = _train([*command, f"run.seed={seed + pair}"], out)
            runs.append({**document, "arm": arm, "seed": seed + pair, "folder": str(out)})
    return judge(runs, settings)


def _train(command: Sequence[str], out: Path) -> dict[str, Any]:
    """Run one ``fulltilt train`` to its end, or read back a finished one; a broken-off one goes on.

    One that stopped itself because its loss diverged has come to its end too, and says so under ``diverged``.
    """
    result, log = out.with_suffix(".json"), out.with_suffix(".log")
    document = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {"error": "none yet"}
    if "error" not in document:
        return document
    fixed = ["--out", str(out), "--json", str(result), "--quiet", "--resume"]
    with open_log(log) as stream:
        result.unlink(missing_ok=True)  # why the last attempt ended: a refusal of this one would leave it there
        train = [sys.executable, "-m", "fulltilt", "train", *command, *fixed]
        code = run_in_session(train, grace_s=STOP_S, stdout=stream, stderr=subprocess.STDOUT)
    if code != 0 and (diverged := _read_divergence(out)) is not None:
        write_atomic(result, json.dumps(diverged))
    elif code != 0:
        said = log.read_text(encoding="utf-8").strip().splitlines() or ["it said nothing"]
        raise TrainingError(f"training for --verify ended with exit code {code}: {said[-1]} (log: {log})")
    return json.loads(result.read_text(encoding="utf-8"))


def _read_divergence(out: Path) -> dict[str, Any] | None:
    """Read how far a run that stopped over its loss got, from its events; None: it ended otherwise."""
    events = drop_repeated([json.loads(line) for line in read_lines(out / "events.jsonl")])
    reason = str(events[-1].get("reason", "")) if events else ""
    if NonFiniteLossError.__name__ not in reason:
        return None
    evaluations = [event for event in events if event["event"] == "Evaluated"]
    rates = [event["samples_per_s"] for event in events if event["event"] == "StepsDone"]
    rates = [rate for rate in rates if rate is not None]  # what is not finite is written as null
    return {
        "evaluations": evaluations,
        "training_seconds": evaluations[-1]["training_seconds"] if evaluations else 0.0,
        "samples_per_s": statistics.median(rates) if rates else 0.0,
        "diverged": reason,
    }
