"""Define the arguments of ``fulltilt lab …``. What the actions load would make its help slow."""

from __future__ import annotations

import argparse
import platform
from typing import Any

from fulltilt.cli._listening import add_listening_arguments
from fulltilt.cli._shared import add_config_arguments
from fulltilt.lab.states import OVER

DEFAULT_LAB = "runs/lab"
ONE = {
    "show": "all that is known of an experiment: attempts, events, configuration, files",
    "logs": "what the training of an experiment printed, all attempts",
    "cancel": "end an experiment, also one that runs",
    "pause": "hold an experiment back; one that runs saves first",
    "resume": "queue an experiment again that was paused or held",
    "retry": "queue an experiment again that failed or was cancelled",
    "requeue": "queue an experiment again of which nothing is heard, since its machine is dead for certain",
    "priority": "set the priority of an experiment; higher ones start first",
    "remove": "remove an experiment that is over from the list",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    submit, serve, work, copies = _add_submit(actions), _add_serve(actions), _add_work(actions), _add_copies(actions)
    listing = actions.add_parser("list", help="states, metrics and devices of all experiments")
    export = actions.add_parser("export", help="points, metrics and seconds of all experiments as CSV")
    export.add_argument("file", metavar="FILE", help="CSV file to write; -: to stdout")
    one = {name: actions.add_parser(name, help=text) for name, text in ONE.items()}
    for action in one.values():
        action.add_argument("id", metavar="ID", help="of the experiment, as fulltilt lab list names it")
    one["logs"].add_argument("-f", "--follow", action="store_true", help="go on as it prints, until it is over")
    one["show"].add_argument("--reveal", action="store_true", help="secrets too; only with the token of the owner")
    one["priority"].add_argument("value", type=int, metavar="N", help="from -1000 to 1000")
    asking = [submit, listing, export, *one.values(), *_add_tokens(actions), _add_prune(actions)]
    for action in asking:
        _add_url(action)
    for action in (*asking, serve, work, *copies):
        action.add_argument("--json", metavar="F", help="write what there is to say as JSON; -: to stdout")
    for action in (*asking, serve, *copies):
        action.add_argument(
            "--lab", metavar="DIR", default=DEFAULT_LAB, help=f"the lab's folder (default {DEFAULT_LAB})"
        )


def _add_url(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--url",
        metavar="U",
        help="a lab on another machine; the environment's FULLTILT_LAB_TOKEN holds a token of it, as fulltilt lab "
        "token create makes one there, and FULLTILT_LAB_AUTHORITY the PEM file of a certificate that signed itself",
    )


def _add_submit(actions: Any) -> argparse.ArgumentParser:
    submit = actions.add_parser(
        "submit",
        help="queue every point of a grid",
        description=(
            "Queue every point of a configuration's grid that is not there yet: at the server of the lab, or with "
            "--local run all that is queued here, on the devices of run.device; without a GPU these are slots on the "
            "CPU. Interrupted or killed, the same command goes on from the checkpoints."
        ),
    )
    add_config_arguments(submit)
    submit.add_argument("--local", action="store_true", help="run them on this machine, in the foreground")
    submit.add_argument(
        "--retry", action="store_true", help="try what failed or was cancelled again, with the code as it is now"
    )
    submit.add_argument("--priority", type=int, default=0, metavar="N", help="higher ones start first (default 0)")
    return submit


def _add_serve(actions: Any) -> argparse.ArgumentParser:
    serve = actions.add_parser("serve", help="run the queue of a lab until stopped, for commands and browsers")
    add_listening_arguments(serve)
    serve.add_argument("--devices", default="auto", metavar="D", help="devices of this machine: auto, cpu, 0,1 or none")
    serve.add_argument(
        "--engine",
        choices=("local", "ray", "slurm"),
        help="who runs experiments: this machine; with ray also machines that join by fulltilt lab work (the default "
        "where others reach the server); or the Slurm cluster that sbatch reaches",
    )
    serve.add_argument("--slurm-partition", metavar="P", help="where Slurm jobs go (default: Slurm's)")
    serve.add_argument(
        "--database", metavar="URL", help="keep the records in PostgreSQL (default: in the lab's folder)"
    )
    serve.add_argument("--depot", metavar="URI", help="keep files at an fsspec URI (default: in the lab's folder)")
    return serve


def _add_work(actions: Any) -> argparse.ArgumentParser:
    work = actions.add_parser("work", help="offer this machine's devices to the lab on another, until stopped")
    work.add_argument("--url", required=True, metavar="U", help="the lab's server, as this machine reaches it")
    work.add_argument("--join-token", metavar="T", help="that the server printed; it is needed the first time only")
    work.add_argument("--name", default=platform.node(), help="of this machine in the lab (default its host name)")
    work.add_argument(
        "--folder", default="runs/machine", metavar="DIR", help="its own, for what runs here (default runs/machine)"
    )
    work.add_argument("--devices", default="auto", metavar="D", help="that it offers: auto, cpu, or numbers as 0,1")
    work.add_argument("--gpus", type=int, metavar="N", help="offer N simulated GPUs instead, which train on the CPU")
    work.add_argument("--authority", metavar="FILE", help="PEM file of who signed the server's certificate")
    return work


def _add_tokens(actions: Any) -> list[argparse.ArgumentParser]:
    tokens = actions.add_parser("token", help="make, list and remove tokens for others").add_subparsers(
        dest="token_action", metavar="ACTION", required=True
    )
    create = tokens.add_parser("create", help="make a token, and show it this once")
    create.add_argument(
        "--role",
        required=True,
        choices=("read", "submit", "join"),
        help="read: look at everything; submit: queue and cancel too; join: bring one machine, within ten minutes",
    )
    create.add_argument("--label", metavar="NAME", help="what it is called in the list (default: role and a number)")
    create.add_argument("--lasts", metavar="7d", help="how long it is good (default: until it is removed)")
    listing = tokens.add_parser("list", help="roles, labels and ends of the tokens, without the tokens")
    remove = tokens.add_parser("remove", help="make the tokens with a label useless")
    remove.add_argument("label", metavar="NAME", help="as fulltilt lab token list names it")
    return [create, listing, remove]


def _add_prune(actions: Any) -> argparse.ArgumentParser:
    prune = actions.add_parser(
        "prune",
        help="remove old experiments that are over, with their files",
        description="Remove experiments that are over and have not changed for some time, with their logs, results "
        "and checkpoints. Their points run again when they are submitted again.",
    )
    prune.add_argument("--older-than", required=True, metavar="30d", help="time since their last change of state")
    prune.add_argument("--state", nargs="+", choices=OVER, default=list(OVER), help="only these (default: all three)")
    prune.add_argument("--dry-run", action="store_true", help="name them, and remove nothing")
    return prune


def _add_copies(actions: Any) -> list[argparse.ArgumentParser]:
    backup = actions.add_parser("backup", help="save a lab to a tar file, also while it is served")
    backup.add_argument("file", metavar="FILE", help="tar file to write; the owner's token is not in it")
    restore = actions.add_parser("restore", help="make a lab of a backup; what ran then is queued again")
    restore.add_argument("file", metavar="FILE", help="that fulltilt lab backup wrote")
    return [backup, restore]
