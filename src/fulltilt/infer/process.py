"""Run a request in its own process, as the tuner runs a trial, and return the result."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fulltilt.errors import DeviceMemoryError, FulltiltError, StorageError, UsageError
from fulltilt.records import Evidence, TrialRequest, WorkloadSource, classify_outcome
from fulltilt.tuner.trials.client import Zygote
from fulltilt.tuner.trials.process import run_trial_process

BODY = "fulltilt.infer.measuring:run"
PRELOAD = ("fulltilt.tuner.trials.trial",)  # not torch: an artefact may do without


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request(TrialRequest):
    """Carries what is asked of a body beside what the watch over its process needs."""

    given: dict[str, Any]


def run_measuring(
    given: Mapping[str, Any],
    *,
    log_path: Path,
    on_progress: Callable[[int, int], None],
    environment: Mapping[str, str] | None = None,
    body: str = BODY,
    deadline_s: float = math.inf,
) -> dict[str, Any]:
    """Run a request in a process of its own and return what it measured. The process is gone when this returns.

    Args:
        environment: Variables that it has beside those of this process.
        body: ``module:function`` that takes ({"given": …}, send) and ends with ``send({"measured": …})``.
        deadline_s: After so long it is ended, which is a failure.

    Raises:
        UsageError: the configuration cannot be measured.
        DeviceMemoryError: memory ran out.
        FulltiltError: the model failed, or the process died; says how, and where its log is.
        StorageError: no space is left, or the log cannot be written.
    """
    source = WorkloadSource(config={}, base_dir="", import_paths=(os.getcwd(),))
    limits = {"deadline_s": deadline_s, "patience_s": math.inf}  # any deadline is one of the budget
    request = Request(kind="infer", source=source, device="", given=dict(given), **limits)
    start_log = log_path.with_stem(f"{log_path.stem}-start")
    with Zygote(start_log, body=body, preload=PRELOAD, environment=environment) as zygote:
        outcome = run_trial_process(
            request, zygote=zygote, log_path=log_path, on_progress=lambda said: on_progress(said["done"], said["total"])
        )
    if "measured" in outcome.reply and outcome.evidence.exit_code == 0:
        return outcome.reply["measured"]
    raise build_error(outcome.evidence, log_path)


def build_error(evidence: Evidence, log_path: Path) -> FulltiltError:
    """Return the error, with its exit code, that says in one sentence why nothing was measured."""
    types, log = evidence.exception_types, f"(log: {log_path})"
    for kind in (UsageError, StorageError):
        if kind.__name__ in types:
            return kind(evidence.message)
    if FulltiltError.__name__ in types and DeviceMemoryError.__name__ not in types:
        return FulltiltError(f"{evidence.message} {log}")
    status, reason = classify_outcome(dataclasses.replace(evidence, message=evidence.message.partition("\n")[0]))
    if status == "out_of_memory":
        return DeviceMemoryError(
            f"the model ran out of memory ({reason}); lower targets.samples_per_request, or use a smaller model {log}"
        )
    return FulltiltError(f"the model failed while it was measured ({reason}) {log}")
