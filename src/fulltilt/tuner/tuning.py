"""Run the whole search for the fastest training settings: ``tune``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.config import Config
from fulltilt.errors import OtherRunError, ResultUnwrittenError, StorageError, UsageError
from fulltilt.hardware import read_machine
from fulltilt.records.run_folder import RunFolder, find_folders
from fulltilt.tuner.answer.conclude import conclude
from fulltilt.tuner.answer.result import RESULT_FILES, TuneResult, write_result
from fulltilt.tuner.answer.verify import VERIFY_FOLDER
from fulltilt.tuner.question.options import LearningRateRule, build_options
from fulltilt.tuner.question.question import CODE, DATA, Question
from fulltilt.tuner.question.source import resolve_target
from fulltilt.tuner.search.journal import JOURNAL_FILE
from fulltilt.tuner.search.progress import OnEvent, PickMade, SearchNoted
from fulltilt.tuner.search.search import check_workload, measure_roofs, open_search, run_proof, run_strategy
from fulltilt.tuner.trials.target import LOGS
from fulltilt.tuner.trials.trial import refuse_inside_trial

if TYPE_CHECKING:
    from fulltilt.tasks import Workload


def tune(
    target: Config | Workload | str | os.PathLike[str],
    *,
    data_path: str | os.PathLike[str] | None = None,
    batch_sizes: Sequence[int] | None = None,
    num_workers: Sequence[int] | None = None,
    steps: int | None = None,
    device: str | None = None,
    memory_limit: str | int | None = None,
    exhaustive: bool = False,
    named_only: bool = False,
    quick: bool = False,
    budget: str | float | None = None,
    free_batch: bool = False,
    lr_rule: LearningRateRule = "sqrt",
    out: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    on_event: OnEvent | None = None,
    deadline: str | float | None = None,
) -> TuneResult:
    """Run a workload under many settings; recommend the fastest that ran without failure and fit in memory.

    Args:
        target: A Config, a Workload, a configuration file, or ``"module:object"``.
        data_path: Where the data lies (``data.path``).
        batch_sizes: Batch sizes to try; naming them frees the effective batch.
        num_workers: Worker counts to try.
        steps: Timed optimizer steps per trial, at least.
        device: auto, cpu, cuda or cuda:N.
        memory_limit: Bytes, or text such as ``12GiB``; a trial of which a process needs more is out of memory.
        exhaustive: Run the whole grid, instead of probing parts and running whole what may be the best.
        named_only: Vary nothing but batch sizes and worker counts that are named, AMP and pinning where the
            configuration asks, and ``benchmark.levers``. Where ``batch_sizes`` or ``num_workers`` name them, all their
            combinations run.
        quick: The same search with few and short trials, 90 s unless ``budget`` says otherwise.
        budget: Seconds, or text such as ``6m``, for this call: what would end later is not begun, or ended. Rows that
            are in the folder already cost none of it. By default 3 minutes, more where single runs are long; none
            where all named values are run (``exhaustive``, ``named_only``).
        free_batch: Let the effective batch change.
        lr_rule: How the learning rate follows an effective batch that changed: sqrt, linear or none.
        out: The run folder. By default ``runs/tune/<name>``, or ``<name>-2`` and so on where that holds another search;
            the same search resumes in its own.
        settings: Dotted keys that win over the configuration.
        on_event: Gets progress records as the search goes.
        deadline: Wall time of one trial, in seconds or text such as ``10m``; 120 s, 60 s when quick, and 60 s more over
            several processes.

    Raises:
        UsageError: wrong arguments, or called inside a trial. NoPlanError: no plan can run, or none did in the budget.
        RunFolderError: the folder is in use, or ``out`` holds another search. StorageError: no space; rows are kept.
        ResultUnwrittenError: no space left at the very end; it carries the result.
        KeyboardInterrupt: after the running trial was ended; the rows measured so far are in the folder.
    """
    start_s, tell = time.monotonic(), on_event or (lambda event: None)
    refuse_inside_trial("fulltilt.tune")
    if not sys.platform.startswith("linux"):
        raise UsageError(f"tune runs on Linux and WSL2; this is {sys.platform}")
    if not isinstance(settings, Mapping | None):
        raise UsageError(f"settings {settings!r} is no mapping; give keys and values, as {{'data.batch_size': 64}}")
    named = {} if data_path is None else {"data.path": str(Path(data_path).resolve())}
    aim = resolve_target(target, {**(settings or {}), **named})
    options = build_options(
        aim.config, batch_sizes=batch_sizes, num_workers=num_workers, steps=steps, device=device,
        memory_limit=memory_limit, exhaustive=exhaustive, named_only=named_only, quick=quick, budget=budget,
        free_batch=free_batch, lr_rule=lr_rule, deadline=deadline,
    )  # fmt: skip
    question = Question(aim, options, read_machine())
    with _open_folder(question, None if out is None else Path(out), tell) as folder:
        with open_search(question, folder, tell, start_s) as search:
            run_strategy(search)
            proof = run_proof(search.session, search.space)
            roofs = measure_roofs(search)
        return _answer(conclude(search, proof, *roofs), folder.path, tell)


def _open_folder(question: Question, out: Path | None, tell: OnEvent) -> RunFolder:
    """Open the folder that was named, else that of this very search, else one where it can begin.

    Raises:
        RunFolderError: it is in use, or the one that was named holds another search.
        FulltiltError: that, and the workload cannot be built: another folder would not help.
    """
    results = [JOURNAL_FILE, VERIFY_FOLDER, *RESULT_FILES]
    parts = question.list_fingerprint_parts()
    claim: dict[str, Any] = {"fingerprint_parts": parts, "command": "tune", "results": results, "writes": results}
    claim |= {"aging": (CODE, DATA)}
    if out is not None:
        try:
            return RunFolder(out, **claim, logs=LOGS)
        except OtherRunError:
            check_workload(question)
            raise
    found = find_folders(Path("runs") / "tune" / question.aim.name, **claim)
    path = found.own or found.free
    if said := found.explain(path):
        tell(SearchNoted(message=said))
    return RunFolder(path, **claim, logs=LOGS)


def _answer(result: TuneResult, folder: Path, tell: OnEvent) -> TuneResult:
    """Tell the picks, and write the files while the folder is held."""
    for name in ("throughput", "efficiency", "memory", "recommended"):
        chosen = getattr(result.picks, name)
        if chosen is not None:
            tell(PickMade(name=name, trial=chosen.trial, rule=chosen.rule))
    try:
        write_result(result, folder)
    except StorageError as error:
        raise ResultUnwrittenError(str(error), result) from error
    return result
