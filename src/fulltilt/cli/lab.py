"""``fulltilt lab submit --local | list | logs | cancel``: run a grid of experiments over this machine's devices."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fulltilt.cli._shared import add_config_arguments, build_console, print_result, write_json
from fulltilt.errors import RunFolderError, StorageError, UsageError, strip_control_codes

if TYPE_CHECKING:
    from fulltilt.lab.records import Experiment
    from fulltilt.lab.store import Store

DEFAULT_LAB = "runs/lab"
LINE_BYTES = 1 << 20  # of a log at a time: a line without end takes no more memory than this
N_NEAREST = 3  # ids that an unknown one is answered with


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    submit = actions.add_parser(
        "submit",
        help="queue every point of a grid and run them here",
        description=(
            "Queue every point of a configuration's grid that is not there yet, and run all that is queued on the "
            "devices of run.device; without a GPU these are slots on the CPU. Interrupted or killed, the same command "
            "goes on from the checkpoints."
        ),
    )
    add_config_arguments(submit)
    submit.add_argument("--local", action="store_true", help="run them on this machine, in the foreground (required)")
    submit.add_argument("--retry", action="store_true", help="try its failed and cancelled experiments again")
    listing = actions.add_parser("list", help="states, metrics and devices of all experiments")
    for action in (submit, listing):
        action.add_argument("--json", metavar="F", help="write the experiments as JSON; -: to stdout")
    logs = actions.add_parser("logs", help="what the training of an experiment printed, all attempts")
    cancel = actions.add_parser("cancel", help="end an experiment, also one that runs")
    for action in (logs, cancel):
        action.add_argument("id", metavar="ID", help="of the experiment, as fulltilt lab list names it")
    for action in (submit, listing, logs, cancel):
        action.add_argument(
            "--lab", metavar="DIR", default=DEFAULT_LAB, help=f"the lab's folder (default {DEFAULT_LAB})"
        )


def run(args: argparse.Namespace) -> int:
    """Run one action and return its exit code."""
    if importlib.util.find_spec("sqlalchemy") is None:
        raise UsageError("the lab keeps its queue with SQLAlchemy, which is not installed; pip install 'fulltilt[lab]'")
    try:
        if args.action == "submit":
            from fulltilt.cli._lab_submit import run_submit

            return run_submit(args)
        from fulltilt.lab.store import open_store

        with contextlib.closing(open_store(Path(args.lab))) as store:
            return {"list": _run_list, "logs": _run_logs, "cancel": _run_cancel}[args.action](args, store)
    except (RunFolderError, StorageError) as error:  # the run folder's own flag is another one
        raise type(error)(str(error).replace("--out", "--lab")) from error


def _run_list(args: argparse.Namespace, store: Store) -> int:
    from fulltilt.lab import listing
    from fulltilt.lab.states import OWNED

    lab, found = Path(args.lab), store.read_experiments()
    write_json(args.json, listing.build_document(lab, found))
    if args.json == "-":
        return 0
    console = build_console()
    print_result(console, f"experiments in {lab}: {listing.describe_counts(found) or 'none yet'}")
    console.print(listing.build_table(lab, found, n_rows=None if args.verbose else listing.N_ROWS))
    if orphans := [experiment.id for experiment in found if experiment.state in OWNED]:
        from fulltilt.lab.cancelling import is_held

        if not is_held(lab):
            console.print(f"nobody looks after {', '.join(orphans)} any more; the same submit goes on", style="yellow")
    if len(found) > listing.N_ROWS and not args.verbose:
        console.print(f"{len(found) - listing.N_ROWS} more: --verbose")
    return 0


def _run_logs(args: argparse.Namespace, store: Store) -> int:
    from fulltilt.lab.local import LOG, find_out_dir

    experiment = _find(args, store)
    path = find_out_dir(Path(args.lab), experiment.id) / LOG
    if not path.is_file():
        raise UsageError(f"{experiment.id} is {experiment.state} and has printed nothing yet")
    with path.open("rb") as stream:
        while line := stream.readline(LINE_BYTES):
            text = line.decode(errors="replace")
            sys.stdout.write(strip_control_codes(text) if sys.stdout.isatty() else text)
    return 0


def _run_cancel(args: argparse.Namespace, store: Store) -> int:
    from fulltilt.lab.cancelling import cancel
    from fulltilt.lab.listing import describe_point
    from fulltilt.lab.states import OVER

    experiment = _find(args, store)
    if experiment.state in OVER:
        raise UsageError(f"{experiment.id} is over already ({experiment.state}); there is nothing to cancel")
    ended = cancel(Path(args.lab), store, experiment.id)
    what = "is cancelled" if ended.state == "cancelled" else f"was faster: it has {ended.state}"
    print_result(build_console(), f"{ended.id} ({describe_point(ended)}) {what}")
    return 0


def _find(args: argparse.Namespace, store: Store) -> Experiment:
    id = f"e{args.id}" if args.id.isdigit() else args.id
    found = {experiment.id: experiment for experiment in store.read_experiments()}
    if id not in found:
        near = difflib.get_close_matches(id, found, n=N_NEAREST, cutoff=0.0)
        known = f"did you mean {' or '.join(near)}? fulltilt lab list names all {len(found)}"
        raise UsageError(f"no experiment {id!r} in {args.lab}; {known if near else 'there are none yet'}")
    return found[id]
