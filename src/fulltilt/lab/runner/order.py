"""Define the order that starts an attempt: who it is for, and where to ask what to do."""

import base64
import dataclasses
import json
from collections.abc import Iterable, Mapping, MutableMapping

VARIABLE = "FULLTILT_ORDER"
MARK = "FULLTILT_ATTEMPT"  # in the environment of all that belongs to an attempt
MACHINE = "FULLTILT_MACHINE"  # in the environment of all that a machine of a cluster runs
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # where Ray tells a job what was sent with it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """An order to run one attempt. It is secret: its token speaks for the attempt.

    Attributes:
        url: Of the lab's server.
        mark: Names the attempt in the environment of its processes.
        root: Folder of the node for what its attempts write; one that is not absolute lies below the node's own.
        depot: URI of the depot, where the node reaches it itself; None: files go through the server.
        command: Trains; it takes the arguments of ``fulltilt train``. Empty: fulltilt itself.
        authority: PEM file of who signed the server's certificate; None: who the machine trusts.
        devices: Names of those it gets, where the machine says what they are; else the executor has seen to that.
    """

    url: str
    token: str
    mark: str
    node: str
    root: str
    depot: str | None = None
    command: tuple[str, ...] = ()
    authority: str | None = None
    devices: tuple[str, ...] = ()

    def to_environment(self) -> dict[str, str]:
        text = json.dumps(dataclasses.asdict(self))
        return {VARIABLE: base64.b64encode(text.encode()).decode()}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a machine of a cluster knows better than the server.

    Attributes:
        url: How it reaches the server.
        root: Its own folder for what attempts write.
        environs: Device → the environment of a training on it.
    """

    url: str
    root: str
    authority: str | None
    environs: Mapping[str, Mapping[str, str]]

    def to_environment(self) -> dict[str, str]:
        return {MACHINE: json.dumps(dataclasses.asdict(self))}


def take_order(environment: MutableMapping[str, str]) -> Order:
    """Take the order out of the environment, so that nothing that is started later sees it."""
    text = environment.pop(VARIABLE, None) or json.loads(environment.pop(RAY_JOB))["metadata"][VARIABLE]
    values = json.loads(base64.b64decode(text))
    order = Order(**values | {"command": tuple(values["command"]), "devices": tuple(values["devices"])})
    if not order.devices:
        return order
    machine = Machine(**json.loads(environment[MACHINE]))
    environment.update(join_environs(machine.environs[device] for device in order.devices))
    return dataclasses.replace(order, url=machine.url, root=machine.root, authority=machine.authority)


def join_environs(environs: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the environment of a training that has several devices."""
    joined: dict[str, str] = {}
    for environ in environs:
        for name, value in environ.items():
            is_list = name == "CUDA_VISIBLE_DEVICES" and joined.get(name)
            joined[name] = f"{joined[name]},{value}" if is_list else value
    return joined
