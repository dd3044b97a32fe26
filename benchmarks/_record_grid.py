"""Runs the whole grid of a configuration, so that strategies can be scored against it later without the machine.

    python -m benchmarks._record_grid configs/digits.yaml --out benchmarks/recordings/grid-digits-cpu.json

Every plan runs ``--repeats`` times as a whole, in rounds that turn around (A B C, then C B A), so that drift hits all
plans alike; between the first two rounds the parts run by themselves: memory on fake tensors, the device without the
loader, the loader without the device. Then ``--groups`` times all plans take turns with the user's own, a few at once
and each time with others: that is the truth of the recording. What was run is kept in ``runs/record_grid`` and is not
run again when the same recording is started anew. It runs unchanged on a GPU: ``--device cuda``.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import platform
import random
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._machines_recorded import VERSION, GridRecording, find_line, find_part
from benchmarks._runner import read_versions
from fulltilt.config import config_for_object, load_config
from fulltilt.errors import FulltiltError, UsageError
from fulltilt.hardware import read_machine
from fulltilt.levers import find_obstacles
from fulltilt.records import Plan, Trial
from fulltilt.records.run_folder import RunFolder, write_atomic
from fulltilt.tuner.question.options import build_options
from fulltilt.tuner.question.question import Question
from fulltilt.tuner.question.source import resolve_target
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search.journal import JOURNAL_FILE
from fulltilt.tuner.search.progress import SearchEvent, TrialDone
from fulltilt.tuner.search.search import open_search
from fulltilt.tuner.search.session import Ask, Session, Strategy, TakeTurns
from fulltilt.tuner.search.strategies import exhaustive, run_own_plan

N_AT_ONCE = 5  # plans that take turns, the user's own among them


def run_recording(session: Session, space: Space, *, n_repeats: int, n_groups: int) -> list[Trial]:
    """Run the grid, the parts, the further rounds and the groups; return the rows in the order they ran."""
    session.run(exhaustive(space))
    session.run(run_own_plan(space))
    fitting = [row.plan for row in session.rows if row.status == "ok"]
    session.run(probe_parts(space))
    for number in range(2, n_repeats + 1):  # a session runs no plan twice
        plans = fitting if number % 2 else fitting[::-1]
        dataclasses.replace(session).run(Ask(plan=plan, why=f"round {number} of the grid") for plan in plans)
    session.run(take_turns(fitting, space.user_plan, n_groups=n_groups))
    return session.journal.trials


def take_turns(plans: Sequence[Plan], own: Plan, *, n_groups: int) -> Generator[TakeTurns, Any, None]:
    """Ask for groups of the user's own plan and a few others, until each was in so many."""
    others = [plan for plan in plans if plan != own]
    for number in range(n_groups):
        order = random.Random(number).sample(others, len(others))
        for start in range(0, len(order), N_AT_ONCE - 1):
            few = order[start : start + N_AT_ONCE - 1]
            yield TakeTurns(plans=(own, *few), why=f"group {number + 1} of the grid")


def list_parts(space: Space) -> Iterator[Ask]:
    """Yield every part of a plan that a search may ask for, once; batches ascend within what they share."""
    for kind in ("memory", "device", "loader"):
        for plan in dict.fromkeys(find_part(plan, kind) for plan in space.grid()):
            if not find_obstacles(plan, space.facts):
                yield Ask(plan=plan, why=f"the {kind} part of the grid", kind=kind)


def probe_parts(space: Space) -> Strategy:
    """Ask for the parts, without device probes above a batch of their line that ran out of memory."""
    too_large: dict[Plan, int] = {}
    for wish in list_parts(space):
        line = find_line(wish.plan)
        limit = too_large.get(line) if wish.kind == "device" else None
        if limit is None or wish.plan["batch_size"] < limit:
            trial = yield wish
            if wish.kind == "device" and trial.status == "out_of_memory":
                too_large[line] = wish.plan["batch_size"]


def record_grid(args: argparse.Namespace, command: str) -> GridRecording:
    """Record and write the file.

    Raises:
        UsageError: a grid without a plan. FulltiltError: arguments that cannot be used, a workload that cannot be
            built, or a folder of rows that holds another recording.
    """
    load = load_config if Path(args.config).exists() or ":" not in args.config else config_for_object
    aim = resolve_target(load(args.config, args.settings))
    options = build_options(
        aim.config, batch_sizes=args.batch_sizes, num_workers=args.num_workers, device=args.device, exhaustive=True
    )
    question = Question(aim, options, read_machine())
    parts, path = question.list_fingerprint_parts(), find_rows_folder(args.out)
    with (
        RunFolder(path, fingerprint_parts=parts, command="record_grid", results=[JOURNAL_FILE]) as folder,
        open_search(question, folder, _say_progress, time.monotonic()) as search,
    ):
        space = search.space
        if not space.axes:
            reasons = "; ".join(reason for _, reason in space.skipped)
            raise UsageError(f"the grid has no plan that can run: {reasons}")
        rows = run_recording(search.session, space, n_repeats=args.repeats, n_groups=args.groups)
    recording = GridRecording(
        version=VERSION,
        name=args.out.stem.removeprefix("grid-"),
        device=options.device,
        command=command,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        workload=search.probe.workload,
        machine=question.machine,
        versions={"python": platform.python_version()} | read_versions(("fulltilt", "torch", "torchvision", "numpy")),
        axes=dict(space.axes),
        base=space.base,
        user_plan=space.user_plan,
        effective_batch_size=space.effective_batch_size,
        facts=space.facts,
        memory_gib=search.memory_gib,
        n_repeats=args.repeats,
        seconds=search.session.elapsed_s,
        rows=tuple(map(_strip, rows)),
    )
    write_atomic(args.out, recording.to_text())
    return recording


def find_rows_folder(out: Path) -> Path:
    """Return where the rows of a recording lie while it runs, and its logs."""
    return Path("runs") / "record_grid" / out.stem


def _strip(row: Trial) -> Trial:
    """Leave out what only repeats the plan, and paths of this machine."""
    reason = None if row.reason is None else row.reason.partition(" (log: ")[0]
    return dataclasses.replace(row, observed={}, reason=reason)


def _say_progress(event: SearchEvent) -> None:
    if isinstance(event, TrialDone):
        row = event.trial
        figure = row.status if row.samples_per_s is None else f"{row.samples_per_s:.4g} samples/s"
        print(f"{event.n_done} done: {row.kind}, {figure}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks._record_grid", description=__doc__.partition("\n")[0])
    parser.add_argument("config", metavar="CONFIG|module:object")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that win over the file")
    parser.add_argument("--out", type=Path, required=True, help="recordings/grid-NAME-DEVICE.json")
    parser.add_argument("--repeats", type=int, default=3, help="whole runs a plan")
    parser.add_argument("--groups", type=int, default=12, help="groups of fresh processes in which a plan takes turns")
    parser.add_argument("--device")
    parser.add_argument("--batch-sizes", type=int, nargs="+")
    parser.add_argument("--num-workers", type=int, nargs="+")
    args = parser.parse_args(given)
    try:
        recording = record_grid(args, " ".join(["python -m benchmarks._record_grid", *given]))
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {find_rows_folder(args.out)}", file=sys.stderr)
        return 130
    except FulltiltError as error:
        print(f"record_grid: {error}", file=sys.stderr)
        return error.exit_code
    n_ok = sum(row.status == "ok" for row in recording.rows)
    print(f"{args.out}: {len(recording.rows)} rows, {n_ok} of them ok, in {recording.seconds / 60:.1f} min")
    return 0


if __name__ == "__main__":
    sys.exit(main())
