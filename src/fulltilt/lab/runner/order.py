"""Define the order that starts an attempt on a node: who it is for, and where to ask what to do."""

import base64
import dataclasses
import json
from collections.abc import MutableMapping

VARIABLE = "FULLTILT_ORDER"
MARK = "FULLTILT_ATTEMPT"  # in the environment of all that belongs to an attempt


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """An order to run one attempt. It is secret: its token speaks for the attempt.

    Attributes:
        url: Of the lab's server.
        mark: Names the attempt in the environment of its processes.
        root: Folder of the node for what its attempts write; one that is not absolute lies below the node's own.
        depot: URI of the depot, where the node reaches it itself; None: files go through the server.
        device: ``cpu`` or ``cuda``; None: what the node has.
        command: Trains; it takes the arguments of ``fulltilt train``. Empty: fulltilt itself.
        authority: PEM file of who signed the server's certificate; None: who the machine trusts.
    """

    url: str
    token: str
    mark: str
    node: str
    root: str
    depot: str | None = None
    device: str | None = None
    command: tuple[str, ...] = ()
    authority: str | None = None

    def to_environment(self) -> dict[str, str]:
        text = json.dumps(dataclasses.asdict(self))
        return {VARIABLE: base64.b64encode(text.encode()).decode()}


def take_order(environment: MutableMapping[str, str]) -> Order:
    """Take the order out of the environment, so that nothing that is started later sees it."""
    values = json.loads(base64.b64decode(environment.pop(VARIABLE)))
    return Order(**values | {"command": tuple(values["command"])})
