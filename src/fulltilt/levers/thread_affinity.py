"""thread_affinity: each thread that computes an operator on the CPU stays on a core of its own."""

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fulltilt.errors import PlanObstacleError
from fulltilt.levers._spec import Facts, Lever, PlanValues, Setup
from fulltilt.levers.threads import count_threads

NAME = "thread_affinity"
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_ON_DEVICE = f"it is about threads of operators on the CPU, and the step runs on the device; use {NAME} false"
_NO_SYSTEM = f"only Linux lets a program choose the cores of a thread; use {NAME} false"
_ONE_THREAD = f"an operator has one thread, which may run on any core; use {NAME} false, or threads 2 or more"

cores_before: list[int] = []
"""The cores of this process before its threads were pinned, empty while none is; one list, which changes."""


def list_cores() -> list[int]:
    """List the cores that this process may use, also while the calling thread is pinned to one of them."""
    if not hasattr(os, "sched_getaffinity"):  # no Linux
        return list(range(os.cpu_count() or 1))
    return cores_before or sorted(os.sched_getaffinity(0))


def leave_core(before: Sequence[int] = cores_before) -> None:
    """Let the calling thread, which inherited the core of a pinned one, use all cores again.

    Args:
        before: ``cores_before`` of the process that began this one.
    """
    if before:
        os.sched_setaffinity(0, before)


def share_cores(cores: Sequence[int], rank: int, n_ranks: int, first_siblings: Mapping[int, int]) -> list[int]:
    """List the cores of one rank, in the order in which its threads take them.

    Logical cores that share a physical one go to the same rank, and a second one of them is taken when all have one.

    Args:
        first_siblings: Logical core → the first of those on its physical core; itself where it is not there.
    """
    grouped = sorted(cores, key=lambda core: (first_siblings.get(core, core), core))
    share = grouped[len(grouped) * rank // n_ranks : len(grouped) * (rank + 1) // n_ranks] or grouped
    seconds: dict[int, int] = {}
    order = []
    for core in share:
        first = first_siblings.get(core, core)
        seconds[first] = seconds.get(first, -1) + 1
        order.append((seconds[first], core))
    return [core for _, core in sorted(order)]


def _read_first_siblings(cores: Sequence[int]) -> dict[int, int]:
    """Read which logical core comes first on each one's physical core, "0,4" or "0-1"; a container may hide it."""
    found = {}
    for core in cores:
        try:
            text = Path(SIBLINGS.format(core)).read_text()
        except OSError:
            continue
        found[core] = int(text.replace("-", ",").split(",")[0])
    return found


def _run_in_team(do: Callable[[int], None]) -> None:
    """Call a function in each thread that computes operators for this one, with the thread's number."""
    import torch

    # Asked of torch's own library, which finds the OpenMP that it computes with: others bring copies (scikit-learn).
    library = ctypes.CDLL(torch._C.__file__)
    try:
        run, read_number = library.GOMP_parallel, library.omp_get_thread_num
    except AttributeError:
        raise PlanObstacleError(
            f"{NAME}: torch {torch.__version__} computes without OpenMP; use {NAME} false"
        ) from None
    errors: list[OSError] = []

    def call(_: int | None) -> None:
        try:
            do(read_number())
        except OSError as error:  # nothing may be raised into OpenMP
            errors.append(error)

    run(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call), None, torch.get_num_threads(), 0)
    if errors:
        raise PlanObstacleError(f"{NAME}: the system refuses a thread its core ({errors[0]}); use {NAME} false")


def _pin() -> None:
    cores = list_cores()
    rank, n_ranks = (int(os.environ.get(name, usual)) for name, usual in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    share = share_cores(cores, rank, n_ranks, _read_first_siblings(cores))
    cores_before[:] = cores
    _run_in_team(lambda number: os.sched_setaffinity(0, {share[number % len(share)]}))


def _release() -> None:
    """Give all threads the cores that they had; this one too, which goes on after the run."""
    if cores_before:
        _run_in_team(lambda number: leave_core())
        cores_before.clear()


def _apply(setup: Setup, value: bool) -> None:
    _release()  # what an earlier run of this process left behind
    if value and setup.device.type == "cpu":
        _pin()
        # Threads that a smaller number of them ended begin anew on this thread's core.
        setup.epoch_hooks.append(lambda epoch: _pin())
        setup.exit_hooks.append(_release)


def _observe(setup: Setup) -> bool:
    """Whether each thread, asked itself, may run on one core alone, and no two on the same."""
    if not cores_before:
        return False
    found: dict[int, set[int]] = {}
    _run_in_team(lambda number: found.update({number: os.sched_getaffinity(0)}))
    return (
        len(found) > 1
        and all(len(cores) == 1 for cores in found.values())
        and len(set.union(*found.values())) == len(found)
    )


def _find_obstacle(value: bool, plan: PlanValues, facts: Facts) -> str | None:
    if facts.device_type != "cpu":
        return _ON_DEVICE
    if not hasattr(os, "sched_setaffinity"):
        return _NO_SYSTEM
    n_threads = count_threads(plan, facts)
    if n_threads > facts.n_cores_usable:
        return (
            f"{n_threads} threads have no core each, there are {facts.n_cores_usable}; use {NAME} false, or threads "
            f"{facts.n_cores_usable}"
        )
    return _ONE_THREAD if n_threads == 1 else None


def _candidates(facts: Facts) -> tuple[bool, ...]:
    return (False,) if _find_obstacle(True, {}, facts) else (False, True)


LEVER = Lever(
    name=NAME,
    key=f"speed.{NAME}",
    aliases=("core_affinity", "cpu_affinity"),
    summary="Each thread that computes an operator on the CPU stays on a core of its own.",
    doc=(
        "Without it the system moves threads as it likes: where another process is busy, two threads of one operator "
        "can find themselves on one core, where one spins and keeps the other from working. Pinned, a thread shares "
        "its core with that process at worst. Where several programs pin to the same first cores, they are in each "
        "other's way while others are free. Ranks get parts of the cores that do not overlap; threads take one logical "
        "core of each physical one first. Data workers and the thread that writes checkpoints keep all cores. "
        "OMP_PROC_BIND, which pins data workers too, is left alone."
    ),
    trades=("speed",),
    stage="loop",
    candidates=_candidates,
    obstacle=_find_obstacle,
    apply=_apply,
    observe=_observe,
)
