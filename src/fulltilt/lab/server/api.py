"""The routes of people and their commands: JSON in, JSON out."""

import dataclasses
import re
import secrets
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from fulltilt._version import __version__
from fulltilt.errors import UsageError
from fulltilt.lab import listing, operations, retention
from fulltilt.lab.lab import open_stream
from fulltilt.lab.operations import ACTIONS
from fulltilt.lab.records import Attempt, Code
from fulltilt.lab.redaction import redact
from fulltilt.lab.server.access import Owner, Reader, Submitter, get_lab, read_most
from fulltilt.lab.server.bodies import MOST_FILE_BYTES, Digest, stream_file, write_body
from fulltilt.lab.states import OVER, STATES
from fulltilt.records import VERSION

router = APIRouter(prefix="/api")
MOST_TEXT = 1 << 20  # characters of a configuration
LABEL = re.compile(r"[\w.@-]{1,64}")
MOST_INT = 2**62  # that a database and a file can count to
LOG_BYTES = 1 << 20  # of a log in one answer


class SentCode(BaseModel):
    digest: Digest
    root: str = Field(max_length=4096)
    entry: str = Field(max_length=4096)


class Submission(BaseModel):
    model_config = ConfigDict(extra="forbid")  # no environment, no command

    source: str = Field(max_length=4096)
    text: str = Field(max_length=MOST_TEXT)
    overrides: list[str] = Field(default_factory=list, max_length=1000)
    owner: str = Field(default="", max_length=100)
    priority: int = 0
    retry: bool = False
    code: SentCode | None = None


class Priority(BaseModel):
    priority: int


class NewToken(BaseModel):
    role: Literal["read", "submit", "join"]
    label: str = Field(default="", max_length=100)
    lasts_s: float | None = Field(default=None, gt=0)


class Pruning(BaseModel):
    older_than_s: float = Field(ge=0)
    states: list[Literal[*OVER]] = Field(default=list(OVER), min_length=1)  # type: ignore[valid-type]
    is_dry_run: bool = False


@router.get("/status")
def read_status(request: Request, token: Reader) -> dict[str, Any]:
    lab = get_lab(request)
    return {
        "version": VERSION,
        "fulltilt": __version__,
        "states": lab.store.count_states(),
        "last_event": lab.store.read_last_event(),
        "has_room": lab.store.has_room(),
        "stale": sorted(attempt.experiment for attempt in lab.leases.list_stale()),
    }


@router.get("/experiments")
def list_experiments(
    request: Request,
    token: Reader,
    state: Annotated[list[Literal[*STATES]] | None, Query()] = None,  # type: ignore[valid-type]
    sweep: str | None = None,
    urgent: Annotated[int | None, Query(ge=1, le=1000)] = None,
    limit: Annotated[int, Query(ge=1, le=100_000)] = 100_000,
    offset: Annotated[int, Query(ge=0, le=MOST_INT)] = 0,
) -> Response:
    lab = get_lab(request)
    if urgent is not None:
        found = lab.store.read_urgent(listing.URGENCY, urgent)
    else:
        found = lab.store.read_experiments(states=state, sweep=sweep, limit=limit, offset=offset)
    return Response(listing.write_document(lab.folder, found, read_most(request)), media_type="application/json")


@router.get("/experiments/{id}")
def show_experiment(request: Request, token: Reader, id: str, reveal: bool = False) -> dict[str, Any]:
    """Return all that is known of an experiment; secrets in it only with ``reveal``, to the lab's owner."""
    if reveal and token.role != "admin":
        raise HTTPException(403, "what is hidden only the owner of the lab may see")
    lab, hide = get_lab(request), (lambda value: value) if reveal else redact
    found = operations.find(lab, id)
    work = lab.store.read_work(found.id)
    plain = {"point": found.point, "overrides": found.overrides, "reason": found.reason} if reveal else {}
    return {
        "version": VERSION,
        "experiment": listing.build_entry(lab.folder, found) | plain,
        "attempts": hide(lab.store.read_attempts(found.id)),
        "events": list(map(dataclasses.asdict, lab.store.read_events(experiment=found.id))),
        "config": hide(work.config),
        "source": str(work.source),
        "files": sorted(artefact.name for artefact in lab.store.read_artefacts(found.id)),
    }


@router.get("/experiments/{id}/log")
def read_log(
    request: Request,
    token: Reader,
    id: str,
    attempt: Annotated[int, Query(ge=1, le=MOST_INT)],
    offset: Annotated[int, Query(ge=0, le=MOST_INT)] = 0,
    stream: Literal["log.txt", "events.jsonl"] = "log.txt",
) -> Response:
    """Return at most a mebibyte of what an attempt printed, from ``offset`` on."""
    lab = get_lab(request)
    found = operations.find(lab, id)
    try:
        with open_stream(lab.folder, Attempt(experiment=found.id, number=attempt), stream) as file:
            file.seek(offset)
            data = file.read(LOG_BYTES)
    except OSError:  # it is not there, or no file is so long
        data = b""
    return Response(data, media_type="application/octet-stream")


@router.get("/experiments/{id}/files/{name}")
def read_file(request: Request, token: Reader, id: str, name: str, attempt: int | None = None) -> Response:
    """Return a file that an attempt sent, the newest one unless told, as an attachment."""
    lab = get_lab(request)
    found = operations.find(lab, id)
    known = (each for each in lab.store.read_artefacts(found.id) if attempt in (None, each.attempt))
    newest = next((each for each in known if each.name == name), None)
    if newest is None or not lab.depot.has(newest.digest):
        raise HTTPException(404, f"{found.id} has no file {name!r}")
    return stream_file(lab.depot, newest.digest, name=name)


@router.get("/events")
def list_events(request: Request, token: Reader, after: Annotated[int, Query(ge=0, le=MOST_INT)] = 0) -> dict[str, Any]:
    """Return the changes of state after number ``after``, with the experiments that changed as they are now."""
    lab = get_lab(request)
    events = lab.store.read_events(after=after, limit=1000)
    ids = {event.experiment for event in events}
    found = [each for id in ids for each in lab.store.read_experiments(id=id)]
    return {
        "events": list(map(dataclasses.asdict, events)),
        "experiments": {each.id: listing.build_entry(lab.folder, each) for each in found},
    }


@router.put("/files/{digest}", max_body_size=MOST_FILE_BYTES)
async def put_file(request: Request, token: Submitter, digest: Digest) -> dict[str, int]:
    return {"size": await write_body(request, get_lab(request).depot, digest)}


@router.head("/files/{digest}")
def has_file(request: Request, token: Submitter, digest: Digest) -> Response:
    return Response(status_code=200 if get_lab(request).depot.claim(digest) else 404)


@router.post("/sweeps")
def submit(request: Request, token: Submitter, body: Submission) -> dict[str, Any]:
    """Queue every point of a grid that is not there yet."""
    lab = get_lab(request)
    code = None if body.code is None else Code(**body.code.model_dump())
    if code is not None and not lab.depot.has(code.digest):
        raise UsageError(f"the code {code.digest} is not in the depot; send it first")
    given = body.model_dump(include={"source", "text", "overrides", "priority", "retry"})
    rooms, owner = request.app.state.read_rooms(), body.owner or token.label
    grid, ids, n_new, n_retried = operations.submit(lab, **given, owner=owner, code=code, rooms=rooms)
    sweep = operations.find(lab, ids[0]).sweep
    return {"ids": ids, "sweep": sweep, "n_new": n_new, "n_retried": n_retried, "axes": list(grid.points[0].values)}


@router.post("/experiments/{id}/priority")
def prioritise(request: Request, token: Submitter, id: str, body: Priority) -> dict[str, Any]:
    lab = get_lab(request)
    found = operations.prioritise(lab, id, body.priority)
    request.app.state.n_priorities += 1  # no event of an experiment, but pages show it
    return listing.build_entry(lab.folder, found)


@router.post("/experiments/{id}/{action}")
def act(request: Request, token: Submitter, id: str, action: Literal[*ACTIONS]) -> dict[str, Any]:  # type: ignore[valid-type]
    lab = get_lab(request)
    return listing.build_entry(lab.folder, operations.act(lab, action, id))


@router.delete("/experiments/{id}")
def remove(request: Request, token: Submitter, id: str) -> dict[str, Any]:
    lab = get_lab(request)
    return listing.build_entry(lab.folder, operations.remove(lab, id))


@router.post("/nodes/{name}/release")
def release_node(request: Request, token: Submitter, name: str) -> dict[str, Any]:
    operations.release_node(get_lab(request), name)
    return {}


@router.get("/nodes")
def list_nodes(request: Request, token: Reader) -> dict[str, Any]:
    lab = get_lab(request)
    nodes: list[dict[str, Any]] = []
    for node in lab.store.read_nodes():
        nodes.append({name: getattr(node, name) for name in ("name", "devices", "versions", "seen_s", "n_bad")})
        if (heard := lab.machines.get(node.name)) is not None:  # of a cluster
            nodes[-1] |= {"sample": heard.sample, "age_s": heard.read_age_s(), "is_leaving": heard.is_leaving}
    return {"nodes": nodes}


@router.get("/tokens")
def list_tokens(request: Request, token: Owner) -> dict[str, Any]:
    return {"tokens": get_lab(request).store.read_tokens()}


@router.post("/tokens")
def make_token(request: Request, token: Owner, body: NewToken) -> dict[str, str]:
    """Make a token: this answer is the only one that has it."""
    label = body.label or f"{body.role}-{secrets.token_hex(3)}"
    if not LABEL.fullmatch(label):
        raise UsageError(f"{label!r} cannot name a token; use up to 64 letters, digits and . _ @ -")
    made = operations.make_token(get_lab(request), role=body.role, label=label, lasts_s=body.lasts_s)
    return {"token": made, "role": body.role, "label": label}


@router.delete("/tokens/{label}")
def remove_tokens(request: Request, token: Owner, label: str) -> dict[str, int]:
    n = get_lab(request).store.remove_tokens(label)
    if not n:
        raise UsageError(f"there is no token labelled {label!r}; fulltilt lab token list names them")
    return {"n": n}


@router.post("/prune")
def prune(request: Request, token: Owner, body: Pruning) -> dict[str, Any]:
    return retention.prune(get_lab(request), **body.model_dump())
