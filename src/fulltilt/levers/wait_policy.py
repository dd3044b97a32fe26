"""wait_policy: a thread that waits for the others of its operator sleeps at once, or spins on its core."""

from collections.abc import Mapping
from typing import Any, Literal

from fulltilt.levers._environment import read_at_load
from fulltilt.levers._spec import Facts, Lever, PlanValues, Setup
from fulltilt.levers.threads import count_threads

NAME = "wait_policy"
POLICY, SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
# libgomp lets a number of spins overrule the policy, so one that the user has set would: each value names both.
VARIABLES: Mapping[Any, Mapping[str, str]] = {
    "passive": {POLICY: "passive", SPINS: "0"},
    "active": {POLICY: "active", SPINS: "infinity"},
}
_ONE_THREAD = f"an operator has one thread, which waits for no other; use {NAME} null, or threads 2 or more"
_ON_DEVICE = f"it is about threads of operators on the CPU, and the step runs on the device; use {NAME} null"


def _candidates(facts: Facts) -> tuple[str | None, ...]:
    """Offer to sleep where threads can wait for each other; to spin without end is for whoever asks for it."""
    return (None, "passive") if facts.device_type == "cpu" and count_threads({}, facts) > 1 else (None,)


def _find_obstacle(value: str, plan: PlanValues, facts: Facts) -> str | None:
    if facts.device_type != "cpu":
        return _ON_DEVICE
    return _ONE_THREAD if count_threads(plan, facts) == 1 else None


def _apply(setup: Setup, value: str | None) -> None:
    """Say where the value is not in force: nothing can put it there once the library is loaded."""
    if value is None or setup.device.type != "cpu":
        return
    if (found := _observe(setup)) != value:
        variables = " ".join(f"{name}={text}" for name, text in VARIABLES[value].items())
        setup.notes.append(
            f"{NAME}={value} is not in force, {found or 'the default of OpenMP'} is: torch was loaded before it could "
            f"be set; start this process with {variables}, or train with `fulltilt train`"
        )


def _observe(setup: Setup) -> str | None:
    """Read what OpenMP was loaded with; None where that leaves it to its default."""
    policy = (read_at_load(POLICY) or "").strip().lower()
    own = VARIABLES.get(policy)
    return policy if own is not None and read_at_load(SPINS) in (None, own[SPINS]) else None


LEVER = Lever(
    name=NAME,
    key=f"speed.{NAME}",
    type=Literal["passive", "active"] | None,
    default=None,
    summary="How threads of one operator wait for each other: null spins, then sleeps; passive sleeps; active spins.",
    doc=(
        "OpenMP divides an operator on the CPU among threads, which wait for the last one. By default they spin for "
        "some milliseconds before they sleep. Where another process takes a core, a thread spins on its core for as "
        "long as its partner has none, and the step takes many times as long; passive leaves the core to whoever "
        "has work. On a machine with nothing else to do it is slower: each operator has to wake its threads. active "
        "spins without end, and takes the cores from data workers too. The variables OMP_WAIT_POLICY and "
        "GOMP_SPINCOUNT decide it, which are read once, when torch is loaded: `fulltilt train` sets them before "
        "that, a process with torch in it needs them at its start. null leaves them as they are."
    ),
    trades=("speed",),
    stage="environment",
    restart=True,
    environment=lambda value: VARIABLES.get(value, {}),
    candidates=_candidates,
    obstacle=_find_obstacle,
    apply=_apply,
    observe=_observe,
    complexity=lambda value: 0.0 if value is None else 1.0,
)
