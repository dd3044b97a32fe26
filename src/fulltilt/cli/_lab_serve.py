"""``fulltilt lab serve``: run the queue of a lab until it is stopped."""

import argparse
import importlib.util
import logging
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from fulltilt.cli._listening import read_tls
from fulltilt.cli._shared import build_console, print_result, write_json
from fulltilt.engine.interrupt import catch_signals
from fulltilt.errors import UsageError
from fulltilt.lab import operations
from fulltilt.lab.executors import Executor
from fulltilt.lab.executors.cluster import WILDCARDS, find_ip, read_head, require_ray
from fulltilt.lab.executors.local import LocalExecutor
from fulltilt.lab.executors.ray import RayExecutor
from fulltilt.lab.lab import RUNNER_LOGS
from fulltilt.lab.scheduling.order import Room
from fulltilt.lab.serving import open_lab, serve
from fulltilt.lab.states import LIVE
from fulltilt.records import VERSION
from fulltilt.records.run_folder import hold_folder
from fulltilt.web.listening import LOOPBACK

TURN_S = 0.5
POOL = re.compile(r"auto|cpu|cuda(:\d+)?|\d+(,\d+)*", re.ASCII)
COMMAND_S = 5.0  # a command that reads a lab which nobody serves holds its folder meanwhile


def run_serve(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; what runs goes on, and the next server finds it."""
    (screen := logging.StreamHandler(sys.stderr)).setLevel(logging.WARNING)  # the rest goes to server.log
    logging.basicConfig(handlers=[screen], format="%(asctime)s %(name)s %(message)s")
    folder, console = Path(args.lab), build_console(is_screen=True)
    tls = read_tls(args)
    engine = args.engine or ("ray" if _takes_machines(args) else "local")
    executors = ENGINES[engine](args, folder / RUNNER_LOGS)
    ray = next((executor for executor in executors if isinstance(executor, RayExecutor)), None)
    with (
        hold_folder(folder, patience_s=COMMAND_S),
        open_lab(folder, database=args.database, depot=args.depot, create=True) as lab,
        serve(lab, executors, host=args.host, port=args.port, names=args.allow_host, tls=tls) as (address, coordinator),
        catch_signals((signal.SIGINT, signal.SIGTERM)) as stop,
    ):
        rooms, join = coordinator.read_rooms(), None
        print_result(console, f"the lab {folder} is served at {address.url}; {_describe_devices(engine, rooms)}")
        secret = f"#{address.token}" if console.is_terminal else f", with the token in {folder / 'token'}"
        # To join, a machine is told another address than runners; Slurm's have that of the URL alone.
        if engine != "local" and (args.host if ray is not None else urlsplit(address.url).hostname) in LOOPBACK:
            console.print("other machines cannot reach it there: --host gives an address that they can", soft_wrap=True)
        console.print(f"in a browser: {address.url}/login{secret}", soft_wrap=True)  # a log keeps no token
        console.print(f"for commands here: fulltilt lab submit CONFIG --lab {folder}", soft_wrap=True)
        if ray is not None:
            token = operations.make_token(lab, role="join", label="lab-serve")
            url = address.url.replace("127.0.0.1", find_ip(args.host)) if args.host in WILDCARDS else address.url
            join = f"fulltilt lab work --url {url} --join-token {token}"
            console.print(f"another machine joins, once and within ten minutes: {join}", soft_wrap=True)
            console.print(f"tokens for more: fulltilt lab token create --role join --lab {folder}", soft_wrap=True)
        devices = {room.node: list(room.free) for room in rooms}
        said = {"version": VERSION, "url": address.url, "devices": devices, "token_file": str(folder / "token")}
        write_json(args.json, said | {"join": join})
        while not stop:
            time.sleep(TURN_S)
        coordinator.is_draining = True
        if ray is not None and not any(each.engine == ray.name for each in lab.store.read_experiments(states=LIVE)):
            ray.end_head()  # nobody needs it; machines that work for the lab wait for the next one
    console.print("stopped; what runs goes on, and fulltilt lab serve finds it again")
    return 0


def _describe_devices(engine: str, rooms: Sequence[Room]) -> str:
    if engine == "local":
        return f"devices here: {', '.join(device for room in rooms for device in room.free) or 'none'}"
    return f"devices by {engine}: {sum(room.n_devices for room in rooms)} on {len(rooms)} machines"


def _build_local(args: argparse.Namespace, logs: Path) -> list[Executor]:
    return [] if args.devices == "none" else [LocalExecutor(read_pool(args.devices), logs=logs, is_lasting=True)]


def _build_ray(args: argparse.Namespace, logs: Path) -> list[Executor]:
    require_ray()
    return [*_build_local(args, logs), RayExecutor(Path(args.lab), host=args.host)]


def _build_slurm(args: argparse.Namespace, logs: Path) -> list[Executor]:
    from fulltilt.lab.executors.slurm import SlurmExecutor

    return [SlurmExecutor(logs=logs, partition=args.slurm_partition)]


ENGINES = {"local": _build_local, "ray": _build_ray, "slurm": _build_slurm}


def _takes_machines(args: argparse.Namespace) -> bool:
    """Return whether other machines may join unasked: where they did before, or where others reach the server."""
    is_reached = args.host not in LOOPBACK and importlib.util.find_spec("ray") is not None
    return is_reached or read_head(Path(args.lab)) is not None


def read_pool(text: str, *, others: str = "cpu, none") -> str | list[int]:
    """Read what ``--devices`` names. What is misspelt must not mean every GPU."""
    if not POOL.fullmatch(text):
        raise UsageError(f"--devices {text}: expected auto, {others} or numbers such as 0,1")
    return [int(number) for number in text.split(",")] if text[0].isdecimal() else text
