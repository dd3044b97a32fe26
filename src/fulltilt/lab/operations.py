"""Do what people ask of a lab: submit, cancel, pause, resume, retry, priorities, remove, and make tokens."""

import contextlib
import hashlib
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fulltilt.errors import ConfigError, UsageError
from fulltilt.lab.lab import Lab, find_out_dir
from fulltilt.lab.points import Grid, read_grid
from fulltilt.lab.records import Code, Experiment, is_plain_name
from fulltilt.lab.scheduling.ends import End
from fulltilt.lab.scheduling.leases import STALE_S
from fulltilt.lab.scheduling.order import Room, find_impossible
from fulltilt.lab.settling import settle
from fulltilt.lab.snapshot import pack_files
from fulltilt.lab.states import LIVE, OVER, WAITING
from fulltilt.lab.store import StaleAttemptError
from fulltilt.records.run_folder import write_atomic

GIVEN_UP = End(outcome="preempted", reason="somebody said that its machine is dead")
PRIORITIES = range(-1000, 1001)
JOIN_S = 600.0  # a token to join is for now, and for one machine
N_TRIES = 20  # against a coordinator that moves the same experiment
ACTIONS: Mapping[str, tuple[Mapping[tuple[str, ...], str], str]] = {
    "cancel": ({WAITING: "drop", LIVE: "cancel"}, "there is nothing to cancel"),
    "pause": ({("queued", "backoff"): "hold", ("leased", "running"): "pause"}, "there is nothing to pause"),
    "resume": ({("held",): "release"}, "only what is held can be resumed"),
    "retry": ({("failed", "cancelled"): "retry"}, "only what failed or was cancelled can be tried again"),
    "requeue": ({}, f"only what nothing was heard of for {STALE_S:.0f} s can be given up; pause saves first"),
}
"""What people ask of an experiment: its state → the arrow, and what is said where no arrow begins there.

What runs saves first, and goes on from there. A wish is stored: it outlives the server.
``requeue`` has no arrows here: it settles an attempt whose lease still lasts, on the word of a person.
"""


def submit(
    lab: Lab,
    *,
    source: str,
    text: str,
    overrides: Sequence[str],
    owner: str,
    priority: int = 0,
    code: Code | None = None,
    rooms: Sequence[Room] | None = None,
    retry: bool = False,
) -> tuple[Grid, list[str], int, int]:
    """Queue what is missing of a grid → the grid, ids of all points, how many are new or run again.

    Args:
        source: The file it was read from; with the values it is what an experiment is known by.
        rooms: The machines there are; None, or none: it is not known yet.
        retry: What failed or was cancelled runs again, with the code that is sent now.

    Raises:
        ConfigError: the configuration is no good. UsageError: no machine can ever run it.
    """
    _check_priority(priority)
    grid = read_submission(source=source, text=text, overrides=overrides, rooms=rooms)
    sent = {"n_devices": grid.n_devices, "code": code}
    n_new = lab.store.add(source, grid.points, overrides, owner=owner, priority=priority, **sent)
    n_retried = lab.store.retry(source, grid.points, overrides, **sent) if retry else 0
    lab.woken.set()
    known = lab.store.read_ids(source, {point.digest for point in grid.points})
    return grid, [known[point.digest] for point in grid.points], n_new, n_retried


def read_submission(*, source: str, text: str, overrides: Sequence[str], rooms: Sequence[Room] | None = None) -> Grid:
    """Read the grid of a text that was sent.

    Raises:
        ConfigError: the configuration is no good. UsageError: no machine can ever run it.
    """
    if not is_plain_name(name := Path(source).name):
        raise UsageError(f"{name!r} is no name of a file; give the configuration another one")
    with tempfile.TemporaryDirectory() as folder:
        try:
            grid = read_grid(str(write_atomic(Path(folder, name), text)), overrides)
        except ConfigError as error:  # who sent it knows its name, and no folder of ours
            said, *problems = (str(each).replace(f"{folder}/", "") for each in (error, *error.problems))
            raise ConfigError(said, problems=list(map(ConfigError, problems))) from None
    if rooms and (obstacle := find_impossible(grid.n_devices, rooms)):
        raise UsageError(f"{name} cannot run here: {obstacle}; ask for fewer, or add a machine")
    return grid


def keep_text(lab: Lab, name: str, text: str) -> Code:
    """Put a configuration that comes with no code beside it into the depot, for the nodes to fetch."""
    archive = pack_files({name: text.encode()})
    digest = hashlib.sha256(archive).hexdigest()
    if not lab.depot.claim(digest):
        lab.depot.put_pieces([archive], digest)
    return Code(digest=digest, root="/nonexistent", entry=name)


def act(lab: Lab, action: str, id: str) -> Experiment:
    """Do one of ``ACTIONS``, and return what became of the experiment.

    Raises:
        UsageError: there is none, or it is in no state for that.
    """
    arrows, otherwise = ACTIONS[action]
    for _ in range(N_TRIES):
        found = find(lab, id)
        if action == "requeue" and found.newest in lab.leases.list_stale():
            with contextlib.suppress(StaleAttemptError):
                settle(lab, found.newest, GIVEN_UP)
            return find(lab, id)
        arrow = next((arrow for states, arrow in arrows.items() if found.state in states), None)
        if arrow is None:
            if action == "cancel" and found.state == "finalizing":
                return found
            raise UsageError(f"{found.id} is {found.state} already; {otherwise}")
        try:
            lab.store.advance(arrow, found.newest, n_lost=0 if arrow in ("release", "retry") else None)
        except StaleAttemptError:  # the coordinator was faster: look again
            continue
        moved = find(lab, id)
        if moved.wish is not None:
            lab.wishes[moved.newest] = moved.wish
        lab.woken.set()
        return moved
    raise UsageError(f"{id} keeps changing; try again")


def list_actions(state: str) -> list[str]:
    """Return those of ``ACTIONS`` that an experiment in a state can be asked for."""
    return [name for name, (arrows, _) in ACTIONS.items() if any(state in states for states in arrows)]


def prioritise(lab: Lab, id: str, priority: int) -> Experiment:
    """Set the priority of an experiment: higher ones start first."""
    _check_priority(priority)
    find(lab, id)
    lab.store.set_priority(id, priority)
    lab.woken.set()
    return find(lab, id)


def remove(lab: Lab, id: str) -> Experiment:
    """Remove an experiment that is over from the records; its folder goes to ``removed``."""
    found = find(lab, id)
    if found.state not in OVER:
        raise UsageError(f"{id} is {found.state}; fulltilt lab cancel {id} first")
    lab.store.remove(found)
    folder = find_out_dir(lab.folder, id)
    if folder.exists():
        target = lab.folder / "removed" / id
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)
    return found


def release_node(lab: Lab, name: str) -> None:
    """Let a machine take experiments again that lost several in a row."""
    if name not in {node.name for node in lab.store.read_nodes()}:
        raise UsageError(f"there is no machine {name!r}; the page of machines names them")
    lab.store.mark_node(name, n_bad=0, last_bad=None)
    lab.woken.set()


def make_token(lab: Lab, *, role: str, label: str, lasts_s: float | None = None) -> str:
    """Make a token and return it: only its digest is stored, so nothing shows it a second time.

    Args:
        role: As in ``Token``; one to join works once, and for ten minutes.
        label: Names it in lists and for its removal; several may have the same.
        lasts_s: None: until it is removed.
    """
    token = secrets.token_urlsafe(24)
    is_join = role == "join"
    lab.store.add_token(token, role=role, label=label, lasts_s=JOIN_S if is_join else lasts_s, is_single_use=is_join)
    return token


def find(lab: Lab, id: str) -> Experiment:
    """Return an experiment. Raises UsageError if there is none of this name."""
    number = id.removeprefix("e")
    is_number = number.isascii() and number.isdecimal() and len(number) < 10
    found = lab.store.read_experiments(id=f"e{number}") if is_number else ()
    if not found:
        total = sum(lab.store.count_states().values())
        raise UsageError(f"there is no experiment {id!r}; there are {total}, and fulltilt lab list names them")
    return found[0]


def _check_priority(priority: int) -> None:
    if priority not in PRIORITIES:
        raise UsageError(f"priority {priority} must be from {PRIORITIES[0]} to {PRIORITIES[-1]}")
