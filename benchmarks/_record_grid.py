"""Runs the whole grid of a configuration, so that strategies can be scored against it later without the machine.

    python -m benchmarks._record_grid configs/digits.yaml --out benchmarks/recordings/grid-digits-cpu.json

Every plan runs ``--repeats`` times in fresh trial processes, in rounds that turn around (A B C, then C B A), so that
drift hits all plans alike; between the first two rounds the parts run by themselves: memory on fake tensors, the device
without the loader, the loader without the device. What was run is kept in ``runs/record_grid`` and is not run again
when the same recording is started anew. It runs unchanged on a GPU: ``--device cuda``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fulltilt
from benchmarks._machines_recorded import VERSION, GridRecording, find_line, find_part
from fulltilt.errors import FulltiltError, UsageError
from fulltilt.hardware import has_c_compiler, read_machine
from fulltilt.levers import default_plan, find_obstacles
from fulltilt.records import Machine, Plan, Trial, TrialRequest
from fulltilt.records.run_folder import RunFolder, write_atomic
from fulltilt.tuner.question.options import TuneOptions, build_options, find_limits
from fulltilt.tuner.question.source import TuneTarget, resolve_target
from fulltilt.tuner.question.space import Space, build_space
from fulltilt.tuner.search.journal import JOURNAL_FILE, Journal
from fulltilt.tuner.search.progress import SearchEvent, TrialDone
from fulltilt.tuner.search.session import BASELINE, END_TO_END, REPEAT, Ask, Session, Strategy
from fulltilt.tuner.search.strategies import exhaustive
from fulltilt.tuner.trials.target import ProcessTarget, Target


def run_recording(
    target: Target,
    journal: Journal,
    space: Space,
    *,
    n_repeats: int,
    on_event: Callable[[SearchEvent], None] = lambda event: None,
) -> Session:
    """Run the grid, the parts, and the further rounds; the session holds the rows."""
    session = Session(target, journal, on_event=on_event, planned=count_planned(space, n_repeats))
    session.run(exhaustive(space))
    session.run(_run_own_plan(space))
    fitting = [row.plan for row in session.rows if row.status == "ok"]
    session.run(probe_parts(space))
    session.run(_repeat(fitting, n_rounds=n_repeats - 1))
    session.adopt_rest()
    return session


def count_planned(space: Space, n_repeats: int) -> dict[str, int]:
    """Count the processes of each kind, at most."""
    n_plans = len(space.grid()) + 1
    parts = Counter(wish.kind for wish in list_parts(space))
    return {**parts, END_TO_END: n_plans, REPEAT: (n_repeats - 1) * n_plans}


def list_parts(space: Space) -> Iterator[Ask]:
    """Yield every part of a plan that a search may ask for, once; batches ascend within what they share."""
    for kind in ("memory", "device", "loader"):
        for plan in dict.fromkeys(find_part(plan, kind) for plan in space.grid()):
            if not find_obstacles(plan, space.facts):
                yield Ask(plan=plan, why=f"the {kind} part of the grid", kind=kind)


def probe_parts(space: Space) -> Strategy:
    """Ask for the parts, but for no device probe above a batch of the same line that ran out of memory."""
    too_large: dict[Plan, int] = {}
    for wish in list_parts(space):
        line = find_line(wish.plan)
        limit = too_large.get(line) if wish.kind == "device" else None
        if limit is None or wish.plan["batch_size"] < limit:
            trial = yield wish
            if wish.kind == "device" and trial.status == "out_of_memory":
                too_large[line] = wish.plan["batch_size"]


def _run_own_plan(space: Space) -> Strategy:
    """Ask for the user's plan where it is no point of the grid: a search measures it beside its finalists."""
    if space.user_plan not in space.grid() and not find_obstacles(space.user_plan, space.facts):
        yield Ask(plan=space.user_plan, why="the user's own plan", kind=BASELINE)


def _repeat(plans: Sequence[Plan], *, n_rounds: int) -> Strategy:
    for number in range(n_rounds):
        for plan in reversed(plans) if number % 2 == 0 else plans:
            yield Ask(plan=plan, why=f"round {number + 2} of the grid", kind=REPEAT)


def record_grid(args: argparse.Namespace, command: str) -> GridRecording:
    """Record and write the file.

    Raises:
        UsageError: arguments that cannot be used, or a grid without a plan. NoPlanError: the workload cannot be built.
        RunFolderError: the folder of its rows holds another recording.
    """
    aim = resolve_target(args.config, dict(map(_parse_setting, args.settings)))
    options = build_options(
        aim.config, batch_sizes=args.batch_sizes, num_workers=args.num_workers, steps=args.steps, device=args.device,
        memory_limit=args.memory_limit, exhaustive=True, quick=False, budget=None, free_batch=False, lr_rule="none",
        deadline=None,
    )  # fmt: skip
    machine = read_machine()
    parts = {
        "config": aim.config.digest, "code": fulltilt.__version__, "workload": aim.code, "machine": machine.cpu_model,
        "options": dataclasses.asdict(options), "n_repeats": args.repeats,
    }  # fmt: skip
    folder = RunFolder(
        find_rows_folder(args.out), fingerprint_parts=parts, command="record_grid", results=[JOURNAL_FILE]
    )
    with folder:
        name = args.name or args.out.stem.removeprefix("grid-")
        recording = _record(aim, options, machine, folder, name=name, n_repeats=args.repeats, command=command)
    write_atomic(args.out, recording.to_text())
    return recording


def find_rows_folder(out: Path) -> Path:
    """Return where the rows of a recording lie while it runs, and its logs."""
    return Path("runs") / "record_grid" / out.stem


def _record(
    aim: TuneTarget, options: TuneOptions, machine: Machine, folder: RunFolder, *, name: str, n_repeats: int,
    command: str,
) -> GridRecording:  # fmt: skip
    limit_bytes, memory_gib = find_limits(options, machine)
    usual = TrialRequest(
        source=aim.source, device=options.device, n_steps=options.n_steps, seed=aim.config.run.seed,
        memory_limit_bytes=limit_bytes, deadline_s=options.deadline_s,
        max_measure_s=options.max_measure_s,
    )  # fmt: skip
    with contextlib.closing(ProcessTarget(usual, folder.path)) as target:
        probe = target.read_facts(default_plan({"batch_size": 1}))
        facts = dataclasses.replace(  # with what the probe could not read inside its process
            probe.facts,
            device_type=options.device.partition(":")[0],
            has_c_compiler=has_c_compiler() if probe.facts.has_c_compiler is None else probe.facts.has_c_compiler,
            n_cores_usable=max(probe.facts.n_cores_usable, machine.n_cores_usable),
        )
        space = build_space(aim.config, facts, batch_sizes=options.batch_sizes, num_workers=options.num_workers)
        if not space.axes:
            reasons = "; ".join(reason for _, reason in space.skipped)
            raise UsageError(f"the grid has no plan that can run: {reasons}")
        session = run_recording(target, Journal(folder), space, n_repeats=n_repeats, on_event=_say_progress)
    rows = sorted((*session.rows, *session.probes), key=lambda row: int(row.id[1:]))
    packages = {distribution.name: distribution.version for distribution in importlib.metadata.distributions()}
    names = [name for name in ("fulltilt", "torch", "torchvision", "numpy") if name in packages]
    return GridRecording(
        version=VERSION,
        name=name,
        device=options.device,
        command=command,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        workload=probe.workload,
        machine=machine,
        versions={"python": platform.python_version()} | {name: packages[name] for name in names},
        axes=dict(space.axes),
        base=space.base,
        user_plan=space.user_plan,
        effective_batch_size=space.effective_batch_size,
        facts=facts,
        memory_gib=memory_gib,
        n_repeats=n_repeats,
        seconds=session.elapsed_s,
        rows=tuple(map(_strip, rows)),
    )


def _strip(row: Trial) -> Trial:
    """Leave out what only repeats the plan, and paths of this machine."""
    reason = None if row.reason is None else row.reason.partition(" (log: ")[0]
    return dataclasses.replace(row, observed={}, reason=reason)


def _say_progress(event: SearchEvent) -> None:
    if isinstance(event, TrialDone):
        row = event.trial
        left = "" if event.seconds_left is None else f", about {event.seconds_left / 60:.0f} min left"
        figure = row.status if row.samples_per_s is None else f"{row.samples_per_s:.4g} samples/s"
        print(f"{event.n_done} of {event.n_planned}{left}: {row.kind}, {figure}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks._record_grid", description=__doc__.partition("\n")[0])
    parser.add_argument("config", metavar="CONFIG|module:object")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that win over the file")
    parser.add_argument("--out", type=Path, required=True, help="recordings/grid-NAME-DEVICE.json")
    parser.add_argument("--name", help="of the recording; by default from the file's")
    parser.add_argument("--repeats", type=int, default=3, help="whole runs a plan")
    parser.add_argument("--device")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-sizes", type=int, nargs="+")
    parser.add_argument("--num-workers", type=int, nargs="+")
    parser.add_argument("--memory-limit")
    args = parser.parse_args(given)
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} leaves nothing to run; give 1 or more")
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


def _parse_setting(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign:
        raise UsageError(f"{text!r} is no setting; write key=value, data.batch_size=64")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


if __name__ == "__main__":
    sys.exit(main())
