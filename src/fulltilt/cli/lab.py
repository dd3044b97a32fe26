"""``fulltilt lab submit --local | list | logs | cancel``: run a grid of experiments over this machine's devices."""

from __future__ import annotations

import argparse
import importlib.util

from fulltilt.cli._shared import add_config_arguments
from fulltilt.errors import RunFolderError, StorageError, UsageError

DEFAULT_LAB = "runs/lab"


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
    submit.add_argument("--quiet", action="store_true", help="the result in one sentence, nothing else")
    listing = actions.add_parser("list", help="states, metrics and devices of all experiments")
    listing.add_argument("--verbose", action="store_true", help="every row, not the most urgent ones")
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
    if importlib.util.find_spec("sqlalchemy") is None:
        raise UsageError("the lab keeps its queue with SQLAlchemy, which is not installed; pip install 'fulltilt[lab]'")
    from fulltilt.cli import _lab_actions as actions

    try:
        return getattr(actions, f"run_{args.action}")(args)
    except (RunFolderError, StorageError) as error:  # the run folder's own flag is another one
        raise type(error)(str(error).replace("--out", "--lab")) from error
