"""``fulltilt lab …``: a durable queue of experiments over the devices of this machine, or of others."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._lab_arguments import add_arguments
from fulltilt.cli._lab_keep import run_backup, run_prune, run_restore, run_token
from fulltilt.cli._shared import build_console, print_result, write_json
from fulltilt.errors import RunFolderError, StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fulltilt.lab.client import Client

__all__ = ["add_arguments", "find_address", "run"]

FOLLOW_S = 0.5
N_ATTEMPTS, N_CHARS = 12, 600  # that are shown of an experiment, the newest, and of its sentence: these fit a screen
NEEDED = ("sqlalchemy", "alembic", "fastapi", "uvicorn", "httpx2", "fsspec", "jinja2", "prometheus_client")


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

    is_whole = args.json is not None or args.verbose
    document = client.get("/api/experiments", **({} if is_whole else {"urgent": listing.N_ROWS}))
    write_json(args.json, document)
    if args.json == "-":
        return 0
    console, status = build_console(is_screen=not args.verbose), client.get("/api/status")
    found = sorted(document["experiments"], key=lambda entry: int(entry["id"][1:]))
    where = args.url or args.lab
    print_result(console, f"{listing.describe_states(status['states']) or 'no experiments yet'} in {where}")
    if not status["has_room"]:
        console.print("the disk of the lab is full: nothing starts until there is room", style="yellow")
    n_rows = None if args.verbose else listing.N_ROWS
    console.print(listing.build_table(found, width=console.width, n_rows=n_rows))
    n_more = 0 if args.verbose else sum(status["states"].values()) - listing.N_ROWS
    if n_more > 0:
        console.print(f"{n_more} more: --verbose")
    return 0


def _run_show(args: argparse.Namespace, client: Client) -> int:
    from fulltilt.lab import listing
    from fulltilt.report import format_duration
    from fulltilt.report.summary import count

    document = client.get(f"/api/experiments/{args.id}", **({"reveal": True} if args.reveal else {}))
    write_json(args.json, document)
    if args.json == "-":
        return 0
    console, found = build_console(is_screen=True), document["experiment"]
    said = found["reason"] or listing.describe_metrics(found["metrics"])
    is_over = found["state"] in ("succeeded", "failed")
    sentence = f"{found['id']} ({listing.describe_point(found)}) {'has' if is_over else 'is'} {found['state']}"
    sentence += f": {said}" if said else ""
    if not args.verbose:
        sentence = textwrap.shorten(sentence, N_CHARS, placeholder=" … (--verbose)")
    print_result(console, sentence, soft_wrap=args.verbose)
    console.print(f"from {document['source']}, priority {found['priority']}, folder {found['out_dir']}", soft_wrap=True)
    shown = document["attempts"] if args.verbose else document["attempts"][-N_ATTEMPTS:]
    if n_before := len(document["attempts"]) - len(shown):
        console.print(f"{count(n_before, 'earlier attempt')}: --verbose")
    for attempt in shown:
        took = format_duration((attempt["ended_s"] or time.time()) - attempt["started_s"])
        end = ": ".join(filter(None, (attempt["outcome"] or "under way", attempt["reason"])))
        line = f"attempt {attempt['number']} on {attempt['node']} ({', '.join(attempt['devices'])}), {took}: {end}"
        if args.verbose:
            console.print(line, soft_wrap=True)
        else:
            console.print(" ".join(line.split()), no_wrap=True, overflow="ellipsis")
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
    while found["state"] == "cancelling" and client.is_served:  # it saves first; without a server nobody hears of that
        time.sleep(FOLLOW_S)
        found = client.get(f"/api/experiments/{args.id}")["experiment"]
    write_json(args.json, found)
    if args.json == "-":
        return 0
    said = {"priority": f"has priority {found['priority']}", "remove": "is removed"}
    what = said.get(args.action, f"is {found['state']}")
    if args.action == "retry":
        what += ", with the code that was submitted; fulltilt lab submit CONFIG --retry sends it as it is now"
    if args.action in ("cancel", "pause") and found["state"] == "succeeded":
        what = "was faster: it has succeeded"
    print_result(build_console(), f"{found['id']} ({listing.describe_point(found)}) {what}")
    return 0


def _run_export(args: argparse.Namespace, client: Client) -> int:
    from fulltilt.lab.export import format_csv
    from fulltilt.records.run_folder import write_atomic

    document = client.get("/api/experiments")
    found = document["experiments"]
    write_json(args.json, document)
    if args.file == "-":
        sys.stdout.write(format_csv(found))
        return 0
    write_atomic(Path(args.file), format_csv(found))
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
