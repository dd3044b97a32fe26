"""The routes of machines: joining the cluster, and saying what their sensors read."""

import contextlib
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import BaseModel, Field

from fulltilt.errors import UsageError
from fulltilt.lab.lab import Heard
from fulltilt.lab.operations import make_token
from fulltilt.lab.records import Node, Token
from fulltilt.lab.scheduling.ends import End
from fulltilt.lab.server.access import UNKNOWN, allow, get_lab, read_token
from fulltilt.lab.settling import settle
from fulltilt.lab.states import LIVE
from fulltilt.lab.store import StaleAttemptError
from fulltilt.lab.versions import explain_difference

router = APIRouter(prefix="/api")
LABEL = "machine "  # and its name: the label of a machine's token
Plain = str | int | float | bool | None
Value = Plain | list[Plain] | dict[str, Plain] | list[dict[str, Plain]]
RESTARTED = End(outcome="lost", reason="its machine has started again")


class Join(BaseModel):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    boot: str = Field(max_length=100)
    versions: dict[str, str] = Field(max_length=10)
    devices: list[str] = Field(min_length=1, max_length=64)


class Readings(BaseModel):
    lines: list[Annotated[str, Field(max_length=300)]] = Field(default=[], max_length=70)
    sample: dict[str, Value | list[dict[str, Value]]] = Field(default={}, max_length=20)  # no deeper: it is shown
    busy: dict[str, Annotated[str, Field(max_length=300)]] = Field(default={}, max_length=64)
    is_leaving: bool = False


@router.post("/join")
def join(request: Request, token: Annotated[Token, Depends(allow("join"))], body: Join) -> dict[str, str]:
    """Let a machine into the cluster: it gets Ray's address and secret, and a token of its own.

    With its own token it comes back as often as it likes. One to join is used up by a machine that is let in, and not
    by one that is refused and may do better.
    """
    if request.app.state.invite is None:
        raise UsageError("this server takes no other machines; start it with fulltilt lab serve --engine ray")
    if token.role == "worker" and token.label != LABEL + body.name:
        raise HTTPException(403, f"this token is of {token.label}, and not of {body.name}")
    if differing := explain_difference(body.versions, body.name):
        raise UsageError(f"{differing}; install the same versions, and join again")
    lab = get_lab(request)
    with lab.joining:
        heard = lab.machines.get(body.name)
        is_here = body.name in {room.node for room in request.app.state.read_rooms() or ()}
        if token.role != "worker" and (is_here or (heard and heard.is_fresh())):
            raise UsageError(f"a machine named {body.name} is here already; give this one another --name")
        bundle = request.app.state.invite()
        if token.role == "join" and not lab.store.use_up(read_token(request) or ""):
            raise HTTPException(401, UNKNOWN)  # another machine was faster
        lab.machines[body.name] = Heard(at_s=time.monotonic())
    if lab.store.meet_node(Node(name=body.name, boot=body.boot, versions=body.versions, devices=body.devices)):
        for experiment in lab.store.read_experiments(states=LIVE):
            if experiment.node == body.name:
                with contextlib.suppress(StaleAttemptError):
                    settle(lab, experiment.newest, RESTARTED)
    lab.store.remove_tokens(LABEL + body.name)
    return bundle | {"token": make_token(lab, role="worker", label=LABEL + body.name)}


@router.post("/telemetry")
def tell(request: Request, token: Annotated[Token, Depends(allow("worker"))], body: Readings) -> dict[str, Any]:
    """Keep what a machine said last, in memory."""
    get_lab(request).machines[token.label.removeprefix(LABEL)] = Heard(at_s=time.monotonic(), **dict(body))
    return {}
