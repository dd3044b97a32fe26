"""``fulltilt lab token | prune | backup | restore``: what keeps a lab going for years."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fulltilt.cli._shared import build_console, print_result, write_json
from fulltilt.errors import UsageError

if TYPE_CHECKING:
    from fulltilt.lab.client import Client


def run_token(args: argparse.Namespace, client: Client) -> int:
    return {"create": _run_create, "list": _run_list, "remove": _run_remove}[args.token_action](args, client)


def _run_create(args: argparse.Namespace, client: Client) -> int:
    from fulltilt.config.quantities import parse_duration_s

    if args.role == "join" and args.lasts:
        raise UsageError("a token to join is good for ten minutes and one machine; leave --lasts out")
    body = {"role": args.role, "label": args.label or "", "lasts_s": args.lasts and parse_duration_s(args.lasts)}
    made = client.post("/api/tokens", body)
    write_json(args.json, made)
    if args.json == "-":
        return 0
    console = build_console()
    print_result(console, made["token"], soft_wrap=True)
    said = "in FULLTILT_LAB_TOKEN it serves commands with --url" if args.role != "join" else "it is good for 10 min"
    console.print(f"to {args.role}, called {made['label']}; {said}, and it is not shown again", soft_wrap=True)
    return 0


def _run_list(args: argparse.Namespace, client: Client) -> int:
    document = client.get("/api/tokens")
    write_json(args.json, document)
    if args.json == "-":
        return 0
    found, console = document["tokens"], build_console()
    print_result(console, f"{len(found)} tokens beside the owner's")
    for each in found:
        end = "until it is removed" if each["expires_s"] is None else f"until {_format_time(each['expires_s'])}"
        console.print(f"{each['label']}: {each['role']}, made {_format_time(each['created_s'])}, good {end}")
    return 0


def _run_remove(args: argparse.Namespace, client: Client) -> int:
    gone = client.delete(f"/api/tokens/{quote(args.label, safe='')}")
    write_json(args.json, gone)
    if args.json != "-":
        print_result(build_console(), f"{args.label} is removed: nobody gets in with it any more")
    return 0


def run_prune(args: argparse.Namespace, client: Client) -> int:
    from fulltilt.config.quantities import parse_duration_s

    body = {"older_than_s": parse_duration_s(args.older_than), "states": args.state, "is_dry_run": args.dry_run}
    ids: list[str] = []
    n_files, is_more = 0, True
    while is_more:
        done = client.post("/api/prune", body)
        ids, n_files, is_more = [*ids, *done["ids"]], n_files + done["n_files"], done["is_more"]
    write_json(args.json, {"ids": ids, "n_files": n_files})
    if args.json == "-":
        return 0
    console = build_console()
    if args.dry_run:
        print_result(console, f"{len(ids)} experiments would be removed")
        console.print(", ".join(ids), soft_wrap=True)
    else:
        print_result(console, f"{len(ids)} experiments are removed, and {n_files} files that nothing referred to")
    return 0


def run_backup(args: argparse.Namespace) -> int:
    from fulltilt.lab.backup import write_backup

    made = write_backup(Path(args.lab), Path(args.file))
    write_json(args.json, made)
    console = build_console()
    print_result(console, f"{_describe(made)} of {args.lab} are in {args.file}", soft_wrap=True)
    if made["n_missing"]:
        console.print(f"{made['n_missing']} files are not in its folder; where its --depot is elsewhere, copy that too")
    return 0


def run_restore(args: argparse.Namespace) -> int:
    from fulltilt.lab.backup import restore_backup

    made = restore_backup(Path(args.file), Path(args.lab))
    write_json(args.json, made)
    console = build_console()
    print_result(console, f"{_describe(made)} of {_format_time(made['time_s'])} are in {args.lab}", soft_wrap=True)
    console.print(f"what ran then is queued again; fulltilt lab serve --lab {args.lab} goes on", soft_wrap=True)
    return 0


def _describe(made: dict[str, Any]) -> str:
    return f"{sum(made['states'].values())} experiments and {made['n_files']} files"


def _format_time(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
