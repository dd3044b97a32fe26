"""Do what people ask of a lab: submit, cancel, pause, resume, retry, priorities, remove, and make tokens."""

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path

from fulltilt.errors import UsageError
from fulltilt.lab.lab import Lab, find_out_dir
from fulltilt.lab.points import Grid, read_grid
from fulltilt.lab.records import Code, Experiment, is_plain_name
from fulltilt.lab.scheduling.order import Room, find_impossible
from fulltilt.lab.snapshot import pack_files
from fulltilt.lab.states import LIVE, OVER, WAITING
from fulltilt.lab.store import StaleAttemptError
from fulltilt.records.run_folder import write_atomic

PRIORITIES = range(-1000, 1001)
JOIN_S = 600.0  # a token to join is for now, and for one machine
N_TRIES = 20  # against a coordinator that moves the same experiment


def submit(
    lab: Lab,
    *,
    source: str,
    text: str,
    overrides: Sequence[str],
    owner: str,
    priority: int = 0,
    code: Code | None = None,
    rooms: Sequence[Room] = (),
) -> tuple[Grid, list[str], int]:
    """Queue what is missing of a grid → the grid, the ids of all points, how many are new.

    Args:
        source: The file it was read from; with the values it is what an experiment is known by.
        rooms: The machines there are; none: it is not known yet.

    Raises:
        ConfigError: the configuration is no good. UsageError: no machine can ever run it.
    """
    _check_priority(priority)
    grid = read_submission(lab, source=source, text=text, overrides=overrides, rooms=rooms)
    same = {"owner": owner, "priority": priority, "n_devices": grid.n_devices, "code": code}
    n_new = lab.store.add(source, grid.points, overrides, **same)
    lab.woken.set()
    known = lab.store.read_ids(source, {point.digest for point in grid.points})
    return grid, [known[point.digest] for point in grid.points], n_new


def read_submission(lab: Lab, *, source: str, text: str, overrides: Sequence[str], rooms: Sequence[Room] = ()) -> Grid:
    """Read the grid of a text that was sent, and keep the text.

    Raises:
        ConfigError: the configuration is no good. UsageError: no machine can ever run it.
    """
    digest, name = hashlib.sha256(text.encode()).hexdigest()[:16], Path(source).name
    if not is_plain_name(name):
        raise UsageError(f"{name!r} is no name of a file; give the configuration another one")
    path = write_atomic(lab.folder / "sweeps" / digest / name, text)
    grid = read_grid(str(path), overrides)
    if rooms and (obstacle := find_impossible(grid.n_devices, rooms)):
        raise UsageError(f"{Path(source).name} cannot run here: {obstacle}; ask for fewer, or add a machine")
    return grid


def keep_text(lab: Lab, name: str, text: str) -> Code:
    """Put a configuration that comes with no code beside it into the depot, for the nodes to fetch."""
    archive = pack_files({name: text.encode()})
    digest = hashlib.sha256(archive).hexdigest()
    if not lab.depot.has(digest):
        lab.depot.put_pieces([archive], digest)
    return Code(digest=digest, root="/nonexistent", entry=name)


def cancel(lab: Lab, id: str) -> Experiment:
    """End an experiment: at once where it waits, after it has saved where it runs. The wish outlives the server."""
    return _move(lab, id, {WAITING: "drop", LIVE: "cancel"}, "there is nothing to cancel")


def pause(lab: Lab, id: str) -> Experiment:
    """Hold an experiment back; one that runs saves first, and goes on from there after ``resume``."""
    return _move(lab, id, {("queued", "backoff"): "hold", ("leased", "running"): "pause"}, "there is nothing to pause")


def resume(lab: Lab, id: str) -> Experiment:
    """Queue an experiment again that was paused, or held because it was lost too often."""
    return _move(lab, id, {("held",): "release"}, "only what is held can be resumed")


def retry(lab: Lab, id: str) -> Experiment:
    """Queue an experiment again that failed or was cancelled."""
    return _move(lab, id, {("failed", "cancelled"): "retry"}, "only what failed or was cancelled can be tried again")


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
    """Return an experiment. Raises UsageError with the nearest ids if there is none of this name."""
    number = id.removeprefix("e")
    is_number = number.isascii() and number.isdecimal() and len(number) < 10
    found = lab.store.read_experiments(id=f"e{number}") if is_number else ()
    if not found:
        total = sum(lab.store.count_states().values())
        raise UsageError(f"there is no experiment {id!r}; there are {total}, and fulltilt lab list names them")
    return found[0]


def _move(lab: Lab, id: str, arrows: dict[tuple[str, ...], str], otherwise: str) -> Experiment:
    for _ in range(N_TRIES):
        found = find(lab, id)
        arrow = next((arrow for states, arrow in arrows.items() if found.state in states), None)
        if arrow is None:
            if arrows.get(LIVE) and found.state == "finalizing":
                return found
            raise UsageError(f"{found.id} is {found.state} already; {otherwise}")
        try:
            lab.store.advance(arrow, found.newest, n_lost=0 if arrow in ("release", "retry") else None)
        except StaleAttemptError:  # the coordinator was faster: look again
            continue
        moved = find(lab, id)
        if moved.wish is not None:
            lab.wish(moved.newest, moved.wish)
        lab.woken.set()
        return moved
    raise UsageError(f"{id} keeps changing; try again")


def _check_priority(priority: int) -> None:
    if priority not in PRIORITIES:
        raise UsageError(f"priority {priority} must be from {PRIORITIES[0]} to {PRIORITIES[-1]}")
