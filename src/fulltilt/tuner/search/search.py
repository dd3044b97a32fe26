"""The stages of one search, and what they share."""

import contextlib
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fulltilt.hardware import has_c_compiler
from fulltilt.levers import Facts, default_plan
from fulltilt.records import WHOLE_RUN, Machine, Roof, TrialRequest, decode
from fulltilt.records.run_folder import RunFolder
from fulltilt.report import format_duration
from fulltilt.report.compare_sides import RESULT_FILE
from fulltilt.report.verdict import describe_origins
from fulltilt.tuner.picks.finalists import MEMORY_SAFETY_PCT, select_finalists
from fulltilt.tuner.question.default_budget import DEFAULT_BUDGET_S, compute_default_s
from fulltilt.tuner.question.grid_size import count_grid
from fulltilt.tuner.question.options import TuneOptions, find_limits, note_ranks
from fulltilt.tuner.question.question import Question
from fulltilt.tuner.question.space import Space, build_space
from fulltilt.tuner.search import strategies
from fulltilt.tuner.search.budget import ROOFS_S, compute_budget_s, compute_search_s
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.progress import OnEvent, SearchNoted, SearchStarted, TrialProgressed
from fulltilt.tuner.search.proof import LESS, Proof
from fulltilt.tuner.search.session import PROOF_S, Session
from fulltilt.tuner.trials.target import PROBE_ID, ROOFS_ID, ProbeResult, ProcessTarget


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """A search that is open: what its stages share."""

    question: Question
    folder: RunFolder
    target: ProcessTarget
    probe: ProbeResult  # what building the workload once has told
    space: Space
    session: Session
    memory_gib: float | None  # of the device; None: not known

    @property
    def options(self) -> TuneOptions:
        return self.question.options


@contextlib.contextmanager
def open_search(question: Question, folder: RunFolder, tell: OnEvent, start_s: float) -> Iterator[Search]:
    """Build the workload once, span the space of plans, and be ready to run them; end the trial processes after.

    ``start_s`` is when the search began, on ``time.monotonic``.

    Raises:
        NoPlanError: the budget ended first. FulltiltError: the workload cannot be built.
    """
    options = question.options
    notes = note_ranks(options)
    notes += () if folder.set_aside is None else (folder.set_aside,)
    for note in notes:  # at once: a search that fails or is interrupted has no result to say it
        tell(SearchNoted(message=note))
    limit_bytes, memory_gib = find_limits(options, question.machine)
    is_passing = options.device == "cpu" and options.memory_limit_bytes is None
    journal = Journal(folder, passing_limit_bytes=limit_bytes if is_passing else None)
    search_s = end_s = None
    if options.budget_s is not None and not options.is_budget_default:
        search_s, end_s = compute_search_s(options.budget_s), start_s + options.budget_s
    with contextlib.closing(_build_target(question, folder.path, limit_bytes, tell)) as target:
        target.runner.recall(journal.trials)
        # Rows of earlier runs in the folder cost nothing: while they counted, the same command could never go on.
        target.end_s = None if journal.n_found else end_s  # rows that are there are reported whatever is left
        probe = target.read_facts(default_plan({"batch_size": 1}))
        target.end_s = None if search_s is None else start_s + search_s
        if not folder.is_resumed:  # a first use of the data may have fetched or prepared them
            folder.state_fingerprint(question.list_fingerprint_parts())
        room = [] if memory_gib is None else [memory_gib * MEMORY_SAFETY_PCT / 100]
        room += [] if limit_bytes is None else [limit_bytes / 2**30]
        facts = merge_facts(probe.facts, question.machine, options)
        space = dataclasses.replace(_build_space(question, facts), memory_gib=min(room, default=None))
        session = Session(
            target,
            journal,
            budget_s=search_s,
            planned=strategies.count_planned(space, options.strategy),
            on_event=tell,
            start_s=start_s,
            n_devices=options.n_ranks,
            user_plan=space.user_plan,
        )
        _announce(space, session, question, folder, tell)
        if assumed := describe_origins(probe.workload, space.user_plan, source=question.aim.name_source()):
            tell(SearchNoted(message=f"taken as yours: {'; '.join(assumed)}"))
        space = dataclasses.replace(space, notes=(*notes, *space.notes))
        yield Search(question, folder, target, probe, space, session, memory_gib)


def check_workload(question: Question) -> None:
    """Build the workload once, outside of any run folder.

    Raises:
        FulltiltError: it cannot be built; of the class raised there.
    """
    limit_bytes, _ = find_limits(question.options, question.machine)
    with tempfile.TemporaryDirectory() as scratch:
        target = _build_target(question, Path(scratch), limit_bytes, lambda event: None)
        with contextlib.closing(target):
            target.read_facts(default_plan({"batch_size": 1}))


def run_strategy(search: Search) -> None:
    """Run the plans that the strategy asks for, and the settings as they were."""
    session, space = search.session, search.space
    session.run(strategies.skip_impossible(space))
    session.run(strategies.run_own_plan(space))
    if search.options.is_budget_default:
        _allot_time(search, max((row.seconds for row in session.rows if row.status == "ok"), default=0.0))
    strategy = strategies.STRATEGIES[search.options.strategy]
    session.run(strategy(space))
    if session.is_budget_spent and session.n_plans < 2:
        session.is_budget_spent = False  # nothing to compare: until there is, the search has what was kept back
        session.run(strategy(space), reserve_after_n=2)
    if space.axes and not any(row.status != "skipped" for row in session.rows):
        session.run(strategies.run_nearest(space))  # the budget went into probes


def _allot_time(search: Search, run_s: float) -> None:
    """Hold the search to the default budget, now that it is known how long a run takes."""
    session = search.session
    budget_s = compute_default_s(run_s)
    session.budget_s = compute_search_s(budget_s)
    search.target.end_s = time.monotonic() + session.left_s
    if budget_s > DEFAULT_BUDGET_S:
        now, usual = format_duration(budget_s), format_duration(DEFAULT_BUDGET_S)
        said = f"a run takes {format_duration(run_s)}: the search takes at most {now}, not {usual}; --budget sets it"
        session.on_event(SearchNoted(message=said))


def run_proof(session: Session, space: Space) -> Proof:
    """Have the fastest plans and the settings as they were take turns, until it is decided what to recommend."""
    asked = list(session.rows)
    session.adopt_rest((WHOLE_RUN,))  # those of another strategy in this folder: the best of them is a finalist, too
    # Neither runs of an earlier proof nor the clock: the same search asks for the same again when it is resumed.
    rows = [*asked, *(row for row in session.rows[len(asked) :] if row.why != LESS)]
    finalists = select_finalists(rows, limit_gib=space.memory_gib)
    search_s = sum(row.seconds for row in (*rows, *session.probes))
    room_s = math.inf if session.budget_s is None else session.budget_s - search_s
    proof = Proof(space, rows, finalists, limit_s=max(PROOF_S, search_s), room_s=room_s)
    session.run(proof.run(), reserve_after_n=math.inf)
    session.adopt_rest()
    return proof


def measure_roofs(search: Search) -> tuple[tuple[Roof, ...], str]:
    """Measure the roofs of the device; where there are none, say why.

    They are measured beside the trials they judge: a search that only read its rows back takes the roofs of then.
    """
    target, session, document = search.target, search.session, search.folder.path / RESULT_FILE
    if session.n_run or not document.exists():
        left_s = None if session.budget_s is None else compute_budget_s(session.budget_s) - session.elapsed_s
        target.end_s = None if left_s is None else time.monotonic() + left_s
        if left_s is not None and left_s < ROOFS_S:
            return (), f"less than {ROOFS_S:g} s of the budget were left for roofs; a larger --budget holds them too"
        roofs = target.read_roofs(default_plan({"batch_size": 1}))
        return roofs, f"no roof could be measured; see {search.folder.path / 'logs' / f'{ROOFS_ID}.log'}"
    try:
        found = json.loads(document.read_text(encoding="utf-8"))["machine"].get("roofs", ())
        return tuple(decode(Roof, roof) for roof in found), "none was, when these rows ran"
    # Cut short or edited: it is written anew from the rows.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return (), f"the {RESULT_FILE} that held them could not be read"


def merge_facts(facts: Facts, machine: Machine, options: TuneOptions) -> Facts:
    """Complete what a trial read of the machine; with several ranks, for one of them."""
    n_ranks, free_bytes = options.n_ranks, facts.free_ram_bytes
    n_cores = machine.n_cores_usable if facts.n_cores_usable <= 1 else facts.n_cores_usable
    if free_bytes is not None:  # the limit of a trial is a rank's already
        free_bytes = min(free_bytes, machine.memory_available_bytes // n_ranks)
    return dataclasses.replace(
        facts,
        device_type=options.device.partition(":")[0],
        n_ranks=n_ranks,
        has_c_compiler=has_c_compiler() if facts.has_c_compiler is None else facts.has_c_compiler,
        n_cores_usable=max(1, n_cores // n_ranks),
        free_ram_bytes=free_bytes,
    )


def _build_space(question: Question, facts: Facts, **changes: bool) -> Space:
    options = question.options
    given = {"all_levers": options.strategy == "model_first", "named_only": options.named_only, **changes}
    return build_space(
        question.aim.config,
        facts,
        batch_sizes=options.batch_sizes,
        num_workers=options.num_workers,
        free_batch=options.free_batch,
        **given,
    )


def _build_target(question: Question, folder: Path, limit_bytes: int | None, tell: OnEvent) -> ProcessTarget:
    options, aim = question.options, question.aim

    def tell_progress(id: str, values: Mapping[str, Any]) -> None:
        if id not in (PROBE_ID, ROOFS_ID):
            tell(TrialProgressed(id=id, values=values))

    usual = TrialRequest(
        source=aim.source,
        device=options.device,
        n_steps=options.n_steps,
        seed=aim.config.run.seed,
        memory_limit_bytes=limit_bytes,
        deadline_s=options.deadline_s,
        max_measure_s=options.max_measure_s,
        rank_devices=options.rank_devices,
    )
    return ProcessTarget(usual, folder, on_progress=tell_progress)


def _announce(space: Space, session: Session, question: Question, folder: RunFolder, tell: OnEvent) -> None:
    options, full = question.options, None
    if options.named_only:
        full = _build_space(question, space.facts, all_levers=True, named_only=False)
    started = SearchStarted(
        strategy=strategies.name_strategy(options.strategy),
        grid_size=count_grid(space),
        n_planned=sum(session.planned.values()),
        n_resumed=session.journal.n_found,
        device=options.device,
        folder=str(folder.path),
        user_plan=space.user_plan,
        memory_room_gib=space.memory_gib,
        budget_s=options.budget_s,
        is_budget_default=options.is_budget_default,
        levers_left_out=() if full is None else tuple(name for name in full.axes if name not in space.axes),
        full_grid_size=0 if full is None else count_grid(full),
    )
    for event in (started, *(SearchNoted(message=note) for note in (*session.journal.notes, *space.notes))):
        tell(event)
