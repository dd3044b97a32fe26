"""How long ``fulltilt --help`` takes, as a whole process, beside an empty Python."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks._runner import Context, Findings
from benchmarks._schema import build_arm, judge

CLAIM = "`fulltilt --help` answers within 0.3 s, because no room but errors is loaded."
NEEDS_PEERS = False
DEVICES = ("cpu",)

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "fulltilt --help": [str(Path(sys.executable).with_name("fulltilt")), "--help"],
    "fulltilt levers": [str(Path(sys.executable).with_name("fulltilt")), "levers"],
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
}


def run(context: Context) -> Findings:
    n = 3 if context.quick else 21
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for round_number in range(n + 1):
        for name, command in COMMANDS.items():
            started = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            if round_number:  # the first round reads files from the disk
                seconds[name].append(time.perf_counter() - started)
    arms = tuple(
        build_arm(
            values,
            case="whole process",
            arm=name,
            metric="seconds",
            unit_of_replication="process, the commands in turn",
        )
        for name, values in seconds.items()
    )
    answer = arms[1]
    return Findings(arms=arms, targets=(judge("fulltilt --help, s", answer.median, answer.ci95, at_most=0.3),))
