"""The pages of a lab: HTML of the same data as the JSON; htmx brings what changed."""

import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from markupsafe import Markup, escape

from fulltilt.errors import ConfigError, FulltiltError
from fulltilt.hardware.sampler import Sampler
from fulltilt.lab import listing, operations
from fulltilt.lab.export import format_csv
from fulltilt.lab.lab import Heard
from fulltilt.lab.records import Attempt, Experiment, Token
from fulltilt.lab.redaction import redact
from fulltilt.lab.scheduling.retries import is_barred
from fulltilt.lab.server.access import COOKIE, ROLES, Guesses, Reader, Submitter, allow, find_token, get_lab, read_most
from fulltilt.lab.server.live import read_mark
from fulltilt.lab.server.parallel import draw_parallel, list_axes
from fulltilt.lab.server.trainings import (
    describe_phases,
    draw_phases,
    find_log_start,
    list_environment,
    list_files,
    read_phases,
    read_run,
)
from fulltilt.lab.states import LIVE, STATES, WAITING
from fulltilt.report import format_duration
from fulltilt.report.charts import MAX_SERIES
from fulltilt.report.readings import list_lines
from fulltilt.report.training import TrainingRun
from fulltilt.report.training_curves import build_curves
from fulltilt.web.assets import answer_asset, build_environment

router = APIRouter()
HERE = Path(__file__).parent
NAV = (("/", "Overview"), ("/queue", "Queue"), ("/machines", "Machines"), ("/submit", "Submit"))
ROWS = 100  # of a table on a page
NEWEST = 10
COOKIE_S = 30 * 24 * 3600
EXAMPLE = "model: small_cnn\ndataset: digits\ntransform: normalize\nepochs: 3\nlr: [1e-3, 1e-2]\n"

environment = build_environment(HERE / "templates")
environment.filters |= {
    "point": listing.describe_point,
    "outcome": listing.describe_outcome,
    "duration": lambda seconds: "" if seconds is None else format_duration(seconds),
    "when": lambda time_s: time.strftime("%d %b %H:%M:%S", time.localtime(time_s)),
    "value": listing.show_value,
    "actions": lambda entry: operations.list_actions(entry["state"]),
    "waits": lambda entry: entry["state"] in WAITING,
}


@router.get("/login", dependencies=[Depends(allow("anyone"))])
def show_login() -> HTMLResponse:
    return _ask_token()


@router.post("/login", dependencies=[Depends(allow("anyone"))], max_body_size=4096)
async def sign_in(request: Request) -> Response:
    """Set the cookie of a browser whose user knows a token; guesses are slowed down, whoever makes them."""
    guesses: Guesses = request.app.state.guesses
    form = parse_qs((await request.body()).decode(errors="replace"))
    token = form.get("token", [""])[0].strip()
    address = request.client.host if request.client else ""
    if not guesses.may_try(address):
        return _ask_token("too many wrong tokens; wait a minute", 429)
    found = await run_in_threadpool(find_token, request, token)  # which may have to wait for the disk
    if found is None or found.role not in ROLES["read"]:
        guesses.note_failure(address)
        return _ask_token("this token is not known, or may not read", 401)
    answer = RedirectResponse("/", 303)
    is_secure = request.url.scheme == "https"
    answer.set_cookie(COOKIE, token, max_age=COOKIE_S, httponly=True, samesite="strict", secure=is_secure)
    return answer


@router.get("/")
def show_overview(request: Request, token: Reader) -> HTMLResponse:
    lab, mark = get_lab(request), read_mark(request)
    live = _build(request, lab.store.read_experiments(states=(*LIVE, "finalizing"), limit=ROWS))
    troubled = _build(request, lab.store.read_newest(("failed", "held"), NEWEST))
    done = _build(request, lab.store.read_newest(("succeeded",), NEWEST))
    said = listing.describe_states(lab.store.count_states())
    return _render(
        request, "overview.html", token, sentence=said or "Nothing is queued", live=live, troubled=troubled,
        done=done, best=listing.describe_best(done), mark=mark, is_empty=not said,
    )  # fmt: skip


@router.get("/queue")
def show_queue(
    request: Request,
    token: Reader,
    state: Literal[*STATES] | None = None,  # type: ignore[valid-type]
    sweep: str | None = None,
    offset: Annotated[int, Query(ge=0, le=2**62)] = 0,
) -> HTMLResponse:
    lab, mark = get_lab(request), read_mark(request)
    counts = lab.store.count_states(sweep=sweep)
    found = lab.store.read_experiments(states=state and (state,), sweep=sweep, limit=ROWS + 1, offset=offset)
    entries = _build(request, found[:ROWS])

    def address(at: int = 0, only: str | None = state) -> str:
        given = {"state": only, "sweep": sweep, "offset": at or None}
        return "/queue?" + urlencode({name: value for name, value in given.items() if value is not None})

    return _render(
        request, "queue.html", token, entries=entries, state=state, sweep=sweep, offset=offset, url=address(offset),
        mark=mark, is_live=any(entry["state"] in LIVE for entry in entries),
        states=[(name, counts[name], address(only=name)) for name in listing.COUNTED if counts.get(name)],
        before=address(max(0, offset - ROWS)), after=address(offset + ROWS) if len(found) > ROWS else None,
    )  # fmt: skip


@router.get("/experiments/{id}")
def show_experiment(
    request: Request, token: Reader, id: str, attempt: Annotated[int | None, Query(ge=1)] = None
) -> HTMLResponse:
    """Show an experiment, and the log of one attempt at it: the newest, unless another is asked for."""
    lab = get_lab(request)
    mark = read_mark(request, operations.find(lab, id).id)
    found = operations.find(lab, id)
    attempts = redact(lab.store.read_attempts(found.id))
    for each in attempts:
        each["seconds"] = None if each["ended_s"] is None else each["ended_s"] - each["started_s"]
    run = read_run(lab, found.id, found.attempt)
    phases, n_steps = read_phases(lab, found.newest)
    files, checkpoints = list_files(lab.store.read_artefacts(found.id))
    shown = Attempt(experiment=found.id, number=attempt or max(1, found.attempt))
    return _render(
        request, "experiment.html", token, mark=mark, entry=_build(request, [found])[0], attempts=attempts,
        is_live=found.state in LIVE, curves=_draw({"": run} if run else {}),
        phases=Markup(draw_phases(phases, n_steps)), breakdown=describe_phases(phases),
        files=files, checkpoints=checkpoints,
        environment=list_environment(lab, found, run), attempt=attempt, shown=shown.number,
        log_start=find_log_start(lab, shown),
        config=json.dumps(redact(lab.store.read_work(found.id).config), indent=2, ensure_ascii=False),
    )  # fmt: skip


@router.get("/compare")
def compare(
    request: Request,
    token: Reader,
    id: Annotated[list[str], Query(max_length=500)] = [],  # noqa: B006
) -> HTMLResponse:
    """Lay the curves of several experiments over each other, beside their settings and results."""
    lab = get_lab(request)
    found = [operations.find(lab, each) for each in dict.fromkeys(id)]
    entries = _build(request, found)
    logged = ((each.id, run) for each in found if (run := read_run(lab, each.id, each.attempt)))
    shown = dict(itertools.islice(logged, MAX_SERIES))  # the logs of the others are not even read
    n_left_out = len(found) - len(shown) if len(shown) == MAX_SERIES else 0
    sentence = listing.describe_best(entries) or f"{len(entries)} experiments"
    return _render(
        request, "compare.html", token, entries=entries, sentence=sentence, n_left_out=n_left_out,
        curves=_draw(shown), parallel=Markup(draw_parallel(entries)),
        axes=list_axes(entries), export="/export.csv?" + urlencode([("id", each.id) for each in found]),
    )  # fmt: skip


@router.get("/export.csv")
def export(request: Request, token: Reader, id: Annotated[list[str] | None, Query(max_length=500)] = None) -> Response:
    lab = get_lab(request)
    found = lab.store.read_experiments() if id is None else [operations.find(lab, each) for each in id]
    headers = {"Content-Disposition": 'attachment; filename="experiments.csv"'}
    return Response(format_csv(_build(request, found)), media_type="text/csv", headers=headers)


@router.get("/machines")
def show_machines(request: Request, token: Reader) -> HTMLResponse:
    lab = get_lab(request)
    live = lab.store.read_experiments(states=LIVE)
    nodes = [
        {
            "name": node.name,
            "devices": node.devices,
            "in_use": [f"{device} ({each.id})" for each in live if each.node == node.name for device in each.devices],
            "versions": ", ".join(f"{name} {version}" for name, version in node.versions.items()),
            "is_barred": is_barred(node),
            "readings": _read_sensors(request, node.name),
        }
        for node in lab.store.read_nodes()
    ]
    return _render(request, "machines.html", token, nodes=nodes)


@router.get("/submit")
def show_submit(request: Request, token: Submitter) -> HTMLResponse:
    return _render(request, "submit.html", token, text=EXAMPLE)


@router.post("/submit")
async def submit(request: Request, token: Submitter) -> HTMLResponse:
    """Say how many points a configuration has and what is wrong with it; queue it where asked to."""
    form = parse_qs((await request.body()).decode(errors="replace"))
    return await run_in_threadpool(_submit, request, token, form)  # a grid takes seconds, in which others are answered


def _submit(request: Request, token: Token, form: Mapping[str, list[str]]) -> HTMLResponse:
    name, text, priority, what = (form.get(key, [""])[0] for key in ("name", "text", "priority", "do"))
    if not re.fullmatch(r"[\w-]{1,70}\.ya?ml", name, re.ASCII):
        return _say("alarm", [f"{name!r} is no name of a file; use letters, digits, _ and -, then .yaml"])
    lab, rooms = get_lab(request), request.app.state.read_rooms()
    before = lab.store.read_last_event()
    try:
        if what != "submit":
            grid = operations.read_submission(source=name, text=text, overrides=(), rooms=rooms)
            return _say("note", [f"{_count(len(grid.points))}; nothing is wrong"])
        ids = operations.submit(
            lab, source=f"page:{name}", text=text, overrides=(), owner=token.label, priority=int(priority or 0),
            code=operations.keep_text(lab, name, text), rooms=rooms,
        )[1]  # fmt: skip
    except ConfigError as error:
        return _say("alarm", [str(problem).removeprefix("page:") for problem in error.problems or (error,)])
    except (FulltiltError, ValueError) as error:
        return _say("alarm", [str(error)])
    new = {event.experiment for event in lab.store.read_events(after=before) if event.arrow == "submit"}
    said = f"{_count(len(ids))}, {len(new & set(ids))} of them new; see the queue"
    return _say("note", [said], href="/queue?" + urlencode({"sweep": operations.find(lab, ids[0]).sweep}))


@router.get("/static/{name:path}", dependencies=[Depends(allow("anyone"))])
def read_asset(name: str) -> Response:
    return answer_asset(name, own=HERE / "static")


def _read_sensors(request: Request, node: str) -> Sequence[str]:
    """Return what a machine is doing, a line a GPU; of another machine what it said last."""
    sampler: Sampler | None = request.app.state.sampler
    if sampler is not None and node == request.app.state.here:
        return list_lines(sampler.read())
    heard: Heard | None = get_lab(request).machines.get(node)
    if heard is None:
        return []
    leaving = ["is leaving"] if heard.is_leaving else []
    return [*heard.lines, *leaving] if heard.is_fresh() else [f"not heard for {format_duration(heard.read_age_s())}"]


def _ask_token(said: str = "", status: int = 200) -> HTMLResponse:
    return HTMLResponse(environment.get_template("login.html").render(has_room=True, said=said), status)


def _render(request: Request, template: str, token: Token, **values: Any) -> HTMLResponse:
    may_change, lab = token.role in ROLES["submit"], get_lab(request)
    page = environment.get_template(template).render(
        nav=[entry for entry in NAV if may_change or entry[0] != "/submit"], here=request.url.path,
        may_change=may_change, has_room=lab.store.has_room(),
        stale={attempt.experiment for attempt in lab.leases.list_stale()}, **values,
    )  # fmt: skip
    return HTMLResponse(page)


def _say(kind: str, lines: Sequence[str], *, href: str | None = None) -> HTMLResponse:
    said = [Markup('<a href="{}">{}</a>').format(href, line) if href else escape(line) for line in lines]
    return HTMLResponse("".join(f'<p class="{kind}">{line}</p>' for line in said))


def _count(n_points: int) -> str:
    return "1 point" if n_points == 1 else f"{n_points:,} points"


def _build(request: Request, found: Sequence[Experiment]) -> list[dict[str, Any]]:
    folder, most = get_lab(request).folder, read_most(request)
    return [listing.build_entry(folder, each, most) for each in found]


def _draw(runs: Mapping[str, TrainingRun]) -> Markup:
    try:
        return Markup(build_curves(runs)) if runs else Markup()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # a runner may send anything
        return Markup('<p class="note">what these trainings logged cannot be drawn</p>')
