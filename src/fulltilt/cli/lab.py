"""``fulltilt lab …``: a durable queue of experiments over the devices of this machine, or of others."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._lab_keep import add_actions, run_backup, run_prune, run_restore, run_token
from fulltilt.cli._listening import add_listening_arguments
from fulltilt.cli._shared import add_config_arguments, build_console, print_result, write_json
from fulltilt.errors import RunFolderError, StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fulltilt.lab.client import Client

DEFAULT_LAB = "runs/lab"
FOLLOW_S = 0.5
NEEDED = ("sqlalchemy", "alembic", "fastapi", "uvicorn", "httpx2", "fsspec", "jinja2", "prometheus_client")
ONE = {
    "show": "all that is known of an experiment: attempts, events, configuration, files",
    "logs": "what the training of an experiment printed, all attempts",
    "cancel": "end an experiment, also one that runs",
    "pause": "hold an experiment back; one that runs saves first",
    "resume": "queue an experiment again that was paused or held",
    "retry": "queue an experiment again that failed or was cancelled",
    "priority": "set the priority of an experiment; higher ones start first",
    "remove": "remove an experiment that is over from the list",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
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
    submit.add_argument("--retry", action="store_true", help="try its failed and cancelled experiments again")
    submit.add_argument("--priority", type=int, default=0, metavar="N", help="higher ones start first (default 0)")
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
    listing = actions.add_parser("list", help="states, metrics and devices of all experiments")
    export = actions.add_parser("export", help="points, metrics and seconds of all experiments as CSV")
    export.add_argument("file", metavar="FILE", help="CSV file to write; -: to stdout")
    one = {name: actions.add_parser(name, help=text) for name, text in ONE.items()}
    for action in one.values():
        action.add_argument("id", metavar="ID", help="of the experiment, as fulltilt lab list names it")
    one["logs"].add_argument("-f", "--follow", action="store_true", help="go on as it prints, until it is over")
    one["show"].add_argument("--reveal", action="store_true", help="secrets too; only with the token of the owner")
    one["priority"].add_argument("value", type=int, metavar="N", help="from -1000 to 1000")
    speaking, local = add_actions(actions)
    for action in (submit, listing, *speaking, *(action for name, action in one.items() if name != "logs")):
        action.add_argument("--json", metavar="F", help="write what there is to say as JSON; -: to stdout")
    for action in (submit, serve, listing, export, *speaking, *local, *one.values()):
        action.add_argument(
            "--lab", metavar="DIR", default=DEFAULT_LAB, help=f"the lab's folder (default {DEFAULT_LAB})"
        )
    for action in (submit, listing, export, *speaking, *one.values()):
        action.add_argument(
            "--url",
            metavar="U",
            help="a lab on another machine; the environment's FULLTILT_LAB_TOKEN holds a token of it, as fulltilt lab "
            "token create makes one there, and FULLTILT_LAB_AUTHORITY the PEM file of a certificate that signed itself",
        )


def run(args: argparse.Namespace) -> int:
    """Run one action and return its exit code."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UsageError(f"the lab needs {', '.join(missing)}, which is not installed; pip install 'fulltilt[lab]'")
    try:
        if args.action == "serve":
            from fulltilt.cli._lab_serve import run_serve

            return run_serve(args)
        if args.action == "work":
            from fulltilt.cli._lab_work import run_work

            return run_work(args)
        if args.action == "submit":
            from fulltilt.cli._lab_submit import run_submit

            return run_submit(args)
        if args.action in LOCAL:
            return LOCAL[args.action](args)
        if args.action == "logs":
            from fulltilt.cli._lab_logs import run_logs

            return run_logs(args)
        from fulltilt.lab.client import connect

        with connect(Path(args.lab), address=find_address(args)) as client:
            return ACTIONS.get(args.action, _run_change)(args, client)
    except (RunFolderError, StorageError) as error:  # the run folder's own flag is another one
        raise type(error)(str(error).replace("--out", "--folder" if args.action == "work" else "--lab")) from error


def find_address(args: argparse.Namespace) -> Any:
    """Return the address that ``--url`` names, with the token of the environment; None without ``--url``."""
    from fulltilt.lab.serving import Address

    if args.url is None:
        return None
    token, authority = os.environ.get("FULLTILT_LAB_TOKEN"), os.environ.get("FULLTILT_LAB_AUTHORITY")
    if not token:
        raise UsageError("FULLTILT_LAB_TOKEN holds no token; the server printed one, or its lab's folder has it")
    if authority and not Path(authority).is_file():
        raise UsageError(f"FULLTILT_LAB_AUTHORITY: {authority} is no file; name the PEM file of the certificate")
    return Address(url=args.url.rstrip("/"), token=token, authority=authority or None)


def _run_list(args: argparse.Namespace, client: Client) -> int:
    from fulltilt.lab import listing

    document = client.get("/api/experiments")
    write_json(args.json, document)
    if args.json == "-":
        return 0
    console, found = build_console(), document["experiments"]
    where = args.url or args.lab
    print_result(console, f"experiments in {where}: {listing.describe_counts(found) or 'none yet'}")
    if not client.get("/api/status")["has_room"]:
        console.print("the disk of the lab is full: nothing starts until there is room", style="yellow")
    console.print(listing.build_table(found, n_rows=None if args.verbose else listing.N_ROWS))
    if len(found) > listing.N_ROWS and not args.verbose:
        console.print(f"{len(found) - listing.N_ROWS} more: --verbose")
    return 0


def _run_show(args: argparse.Namespace, client: Client) -> int:
    from fulltilt.lab import listing
    from fulltilt.report import format_duration

    document = client.get(f"/api/experiments/{args.id}", **({"reveal": True} if args.reveal else {}))
    write_json(args.json, document)
    if args.json == "-":
        return 0
    console, found = build_console(is_screen=True), document["experiment"]
    said = found["reason"] or listing.describe_metrics(found["metrics"])
    is_over = found["state"] in ("succeeded", "failed")
    sentence = f"{found['id']} ({listing.describe_point(found)}) {'has' if is_over else 'is'} {found['state']}"
    sentence += f": {said}" if said else ""
    print_result(console, sentence, soft_wrap=True)
    console.print(f"from {document['source']}, priority {found['priority']}, folder {found['out_dir']}", soft_wrap=True)
    for attempt in document["attempts"]:
        ended_s = attempt["ended_s"] or time.time()
        console.print(
            f"attempt {attempt['number']} on {attempt['node']} ({', '.join(attempt['devices'])}), "
            f"{format_duration(ended_s - attempt['started_s'])}: "
            + ": ".join(filter(None, (attempt["outcome"] or "under way", attempt["reason"]))),
            soft_wrap=True,
        )
    return 0


def _run_change(args: argparse.Namespace, client: Client) -> int:
    """Do one thing to one experiment, and say what became of it."""
    from fulltilt.lab import listing

    if args.action == "priority":
        found = client.post(f"/api/experiments/{args.id}/priority", {"priority": args.value})
    elif args.action == "remove":
        found = client.delete(f"/api/experiments/{args.id}")
    else:
        found = client.post(f"/api/experiments/{args.id}/{args.action}")
    while found["state"] == "cancelling":  # it saves first
        time.sleep(FOLLOW_S)
        found = client.get(f"/api/experiments/{args.id}")["experiment"]
    write_json(args.json, found)
    if args.json == "-":
        return 0
    said = {"priority": f"has priority {found['priority']}", "remove": "is removed"}
    what = said.get(args.action, f"is {found['state']}")
    if args.action in ("cancel", "pause") and found["state"] == "succeeded":
        what = "was faster: it has succeeded"
    print_result(build_console(), f"{found['id']} ({listing.describe_point(found)}) {what}")
    return 0


def _run_export(args: argparse.Namespace, client: Client) -> int:
    from fulltilt.lab.export import write_csv

    found = client.get("/api/experiments")["experiments"]
    if args.file == "-":
        write_csv(found, sys.stdout)
        return 0
    import io

    from fulltilt.records.run_folder import write_atomic

    text = io.StringIO(newline="")
    write_csv(found, text)
    write_atomic(Path(args.file), text.getvalue())
    print_result(build_console(), f"{len(found)} experiments are in {args.file}")
    return 0


ACTIONS: dict[str, Callable[[argparse.Namespace, Client], int]] = {
    "list": _run_list,
    "show": _run_show,
    "export": _run_export,
    "token": run_token,
    "prune": run_prune,
}
LOCAL: dict[str, Callable[[argparse.Namespace], int]] = {"backup": run_backup, "restore": run_restore}
