"""Choose which queued experiments start next, and on which machine. Pure functions of records.

Higher priority first; among equals the owner with the fewest devices in use, then age. An experiment that takes several
devices gets them on one machine or none. For the first that finds no room a machine is reserved, and nothing else is
started there, so it cannot starve; the others go on.
"""

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fulltilt.lab.records import Experiment


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The devices of one machine.

    Attributes:
        free: Names of those that nobody uses.
        n_devices: How many it has in all.
        is_barred: It takes nothing at present.
    """

    node: str
    free: Sequence[str]
    n_devices: int
    is_barred: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """An experiment that begins now, and the devices it gets."""

    experiment: Experiment
    node: str
    devices: Sequence[str]


def plan_starts(
    queued: Iterable[Experiment],
    rooms: Sequence[Room],
    *,
    in_use: Mapping[str, int] | None = None,
    avoid: Mapping[str, str] | None = None,
) -> list[Start]:
    """Pair queued experiments with free devices.

    Args:
        queued: The first of each owner's; those beyond what can start now need not be there.
        in_use: Devices that each owner's experiments use.
        avoid: Experiment → the machine where its last attempt was lost; taken only where there is no other.

    Cost: O((experiments + starts) × log) and one look at the machines per size in demand.
    """
    machines = _Machines(rooms)
    starts: list[Start] = []
    has_reserved = False  # one at a time: machines kept for all that wait would stand idle
    for experiment in _order(queued, in_use or {}, is_full=lambda: not machines.n_free):
        found = machines.take(experiment.n_devices, avoid=(avoid or {}).get(experiment.id))
        if found is None and not has_reserved:
            has_reserved = machines.reserve(experiment.n_devices)
        elif found is not None:
            starts.append(Start(experiment=experiment, node=found[0], devices=found[1]))
    return starts


def find_impossible(n_devices: int, rooms: Sequence[Room]) -> str | None:
    """Say why no machine can ever run an experiment of ``n_devices``; None where one can."""
    most = max((room.n_devices for room in rooms), default=0)
    if n_devices <= most:
        return None
    return f"it takes {n_devices} devices on one machine, and the largest here has {most}"


def _order(
    queued: Iterable[Experiment], in_use: Mapping[str, int], *, is_full: Callable[[], bool]
) -> Iterator[Experiment]:
    """Yield experiments in the order in which they are served; each that is yielded counts for its owner."""
    waiting: dict[str, list[tuple[int, int, Experiment]]] = defaultdict(list)
    for experiment in queued:
        waiting[experiment.owner].append((-experiment.priority, int(experiment.id[1:]), experiment))
    used = dict(in_use)
    heads: list[tuple[int, int, int, str]] = []
    for owner, line in waiting.items():
        heapq.heapify(line)
        heapq.heappush(heads, _place(line, used.get(owner, 0), owner))
    while heads and not is_full():
        *_, owner = heapq.heappop(heads)
        *_, experiment = heapq.heappop(waiting[owner])
        yield experiment
        used[owner] = used.get(owner, 0) + experiment.n_devices
        if waiting[owner]:
            heapq.heappush(heads, _place(waiting[owner], used[owner], owner))


def _place(line: Sequence[tuple[int, int, Experiment]], n_used: int, owner: str) -> tuple[int, int, int, str]:
    priority, age, _ = line[0]
    return priority, n_used, age, owner


class _Machines:
    """Free devices by machine, with the machines of each free number together: the tightest fit is found at once."""

    def __init__(self, rooms: Sequence[Room]):
        self._free = {room.node: list(room.free) for room in rooms if not room.is_barred}
        self._size = {room.node: room.n_devices for room in rooms}
        self._by_number: dict[int, dict[str, None]] = defaultdict(dict)
        for node, free in self._free.items():
            self._by_number[len(free)][node] = None
        self.n_free = sum(map(len, self._free.values()))

    def take(self, n: int, *, avoid: str | None) -> tuple[str, list[str]] | None:
        """Take ``n`` devices of the machine on which they leave the fewest idle; None where none has so many."""
        second = None
        for number in sorted(number for number, nodes in self._by_number.items() if number >= n and nodes):
            for node in self._by_number[number]:
                if node != avoid:
                    return self._take_of(node, n)
                second = node
        return None if second is None else self._take_of(second, n)

    def reserve(self, n: int) -> bool:
        """Keep for an experiment that waits the machine that lacks the fewest devices; False: none is so large."""
        fitting = [node for node in self._free if self._size[node] >= n]
        if not fitting:
            return False
        node = max(fitting, key=lambda node: len(self._free[node]))
        self.n_free -= len(self._free[node])
        del self._by_number[len(self._free[node])][node]
        del self._free[node]
        return True

    def _take_of(self, node: str, n: int) -> tuple[str, list[str]]:
        free = self._free[node]
        del self._by_number[len(free)][node]
        taken, self._free[node] = free[:n], free[n:]
        self._by_number[len(free) - n][node] = None
        self.n_free -= n
        return node, taken
