"""``fulltilt lab work``: be a machine of a lab's cluster until stopped."""

import argparse
import os
import signal
import time
from pathlib import Path

from fulltilt.cli._lab_serve import read_pool
from fulltilt.cli._shared import build_console, print_result, write_json
from fulltilt.engine.interrupt import catch_signals
from fulltilt.errors import UsageError
from fulltilt.lab.executors.cluster import require_ray
from fulltilt.lab.executors.local import build_slots
from fulltilt.lab.executors.ray_node import TURN_S, RayNode, build_simulated_slots
from fulltilt.lab.serving import read_boot
from fulltilt.records import VERSION
from fulltilt.records.run_folder import hold_folder

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one: its terminal is closed
SAID = "what runs here saves and goes to other machines; the same signal once more ends it at once"


def run_work(args: argparse.Namespace) -> int:
    """Work until SIGINT, SIGTERM or SIGHUP; then what runs here saves, and nothing stays behind."""
    require_ray()
    if args.gpus is not None and args.gpus < 1:
        raise UsageError(f"--gpus {args.gpus} leaves nothing to offer; give 1 or more")
    console, folder = build_console(is_screen=True), Path(args.folder)
    if args.gpus is None:
        slots = build_slots(read_pool(args.devices, others="cpu"))
    else:
        slots = build_simulated_slots(args.gpus)
    authority = None if args.authority is None else Path(args.authority)
    with hold_folder(folder), catch_signals(STOP_SIGNALS, is_patient=True, said=SAID) as stop:
        url = args.url.rstrip("/")
        node = RayNode(url=url, name=args.name, boot=read_boot(), folder=folder, slots=slots, authority=authority)
        token = args.join_token or node.read_own_token() or os.environ.get("FULLTILT_LAB_TOKEN")
        if not token:
            raise UsageError("no token to join with; the server prints one for --join-token, and each works once")
        node.join(token)
        try:
            devices = [slot.name for slot in slots]
            print_result(console, f"{node.name} works for the lab at {args.url}; devices: {', '.join(devices)}")
            write_json(args.json, {"version": VERSION, "name": node.name, "devices": devices})
            told = None
            while not stop:
                if (news := node.turn()) not in (None, told):
                    console.print(told := news, style="yellow", soft_wrap=True)
                time.sleep(TURN_S)
        finally:
            node.leave(lambda: stop.is_urgent)
    console.print(f"{node.name} has left the lab")
    return 0
