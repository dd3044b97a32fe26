"""A search that can be killed: ``fulltilt.tune`` itself, over trials that are light and end in many ways.

As a program: ``python search_bodies.py FOLDER`` where FOLDER is the run folder. As a trial body: ``search_bodies:do``.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # from 128 on it runs out of memory
STARTS = "starts"  # one line a trial process, written before anything else

Answer = Any  # a Link


def do(request: Mapping[str, Any], answer: Answer) -> None:
    """Facts when asked for them; else what the plan says: its ends differ, and are the same each time."""
    if request.get("kind") == "facts":
        facts = {"device_type": "cpu", "n_cores_usable": 2, "n_samples": 10_000, "is_iterable": False}
        workload = {"learning_rate": 0.1, "notes": [], "n_samples": 10_000}
        return answer({"facts": facts, "workload": workload})
    with Path(os.environ["CHAOS_NOTES"], STARTS).open("a") as stream:
        stream.write(f"{request['id']}\n")
    from chaos_bodies import Child

    plan = request["plan"]
    child = Child(answer, Path(os.environ["CHAOS_NOTES"], "names"), request)
    time.sleep(0.02 * (plan["batch_size"] % 5))
    if plan["batch_size"] >= 128:
        return child.raise_error("MemoryError")
    if plan["batch_size"] == 8 and plan["num_workers"] == 1:
        return child.act("start_family, raise_error", {})
    if plan["batch_size"] == 16 and plan["num_workers"] == 0:
        return child.act("leave_tracked_memory, send", {"number": 9})
    rate = 100.0 * plan["batch_size"] ** 0.5 + 7 * plan["num_workers"]
    if request["kind"] != "turns":
        return child.act("start_family, leave_names, finish", {"rate": rate})
    child.start_family()
    child.act("leave_names", {})
    answer({"blocks": 0})
    for number, order in enumerate(answer.take_orders(), start=1):
        if order == "end":
            break
        time.sleep(0.005)
        answer({"block": {"n_samples": 10, "seconds": 10 / rate, "stalled_s": 0.0}, "blocks": number})
    return None


def main(folder: str) -> None:
    import fulltilt
    from fulltilt.tuner.trials import target
    from fulltilt.tuner.trials.process import Zygote

    target.Zygote = functools.partial(Zygote, body="search_bodies:do", preload=("json",))
    settings = {"benchmark.test_mixed_precision": False, "benchmark.test_pin_memory": False}
    result = fulltilt.tune(
        "search_bodies:workload", batch_sizes=BATCH_SIZES, num_workers=[0, 1, 2], device="cpu", exhaustive=True,
        out=folder, settings=settings,
    )  # fmt: skip
    print(result.search.n_resumed)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(sys.argv[1])
