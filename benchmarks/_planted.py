"""Measure what work that is added to steps costs: in one process that takes steps with and without.

It costs more than its own time, most of all beside other work, where a scheduler gives threads that compute without a
pause less of a core that others want. No process is stopped here, and none differs from another: the figure owes
nothing to what it is held against.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time

from benchmarks._burning import BurningNet, build
from benchmarks._runner import ROOT
from fulltilt.config import config_for_object, plan_of
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.measured.turns import BlockRunner
from fulltilt.levers.wait_policy import VARIABLES
from fulltilt.stats import Block, run_round

SETTINGS = ["run.device=cpu", "data.batch_size=64", "data.num_workers=0"]
"""Of the steps that are bound by the step, here as in what is compared."""


def measure_planted(extra: float, seconds: float, *, is_busy: bool) -> list[float]:
    """Measure round by round how many times as fast steps are without ``extra`` work.

    Args:
        is_busy: As plans take turns beside other work: threads sleep while they wait, and stay on a core each.
    """
    command = [sys.executable, "-m", __name__, str(extra), str(seconds), *["busy"][:is_busy]]
    environment = os.environ | (VARIABLES["passive"] if is_busy else {})
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def take_rounds(extra: float, seconds: float, *, is_busy: bool) -> list[float]:
    """Take blocks with and without the work, round by round, in this process; see ``measure_planted``."""
    config = config_for_object(f"{build.__module__}:build(extra={extra})", SETTINGS)
    speedups = list[float]()
    plan = plan_of(config).replace(thread_affinity=is_busy)
    with build_run(config, plan, device="cpu", strict=False) as run:  # not pinned where there is one thread
        (net,) = (module for module in run.setup.model.modules() if isinstance(module, BurningNet))
        runner = BlockRunner(run)
        runner.warm_up()

        def run_block(each: float) -> Block:
            net.charge.extra = each
            return runner.take_block()

        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            rates = {
                each: sum(block.n_samples for block in blocks) / sum(block.seconds for block in blocks)
                for each, blocks in run_round([0.0, extra], run_block, random.Random()).items()
            }
            speedups.append(rates[0.0] / rates[extra])
    return speedups


if __name__ == "__main__":
    print(json.dumps(take_rounds(*map(float, sys.argv[1:3]), is_busy="busy" in sys.argv)))
