"""The metrics of a lab for Prometheus, its health, and the watch that measures and logs requests.

No label grows with what people send: routes are templates, states and outcomes are our own words, and of owners
only the first few have a name.
"""

import logging
import shutil
import time
from collections.abc import Iterator, Mapping

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fulltilt.lab.lab import Lab
from fulltilt.lab.scheduling.retries import is_barred
from fulltilt.lab.server.access import Reader, allow, get_lab
from fulltilt.lab.server_log import tell
from fulltilt.lab.states import STATES

router = APIRouter()
logger = logging.getLogger(__name__)
MOST_OWNERS, OTHERS = 10, "(others)"
REFUSED = (401, 403, 413, 421, 429)


@router.get("/metrics")
def read_metrics(request: Request, token: Reader) -> Response:
    return Response(generate_latest(_Everything(get_lab(request))), media_type=CONTENT_TYPE_LATEST)


@router.get("/healthz", dependencies=[Depends(allow("anyone"))])
def read_health(request: Request) -> dict[str, str]:
    get_lab(request).store.read_last_event()
    return {"status": "ok"}


class _Everything(Collector):
    """Collects what was counted, and what the records say now."""

    def __init__(self, lab: Lab):
        self._lab = lab

    def collect(self) -> Iterator[Metric]:
        yield from self._lab.metrics.registry.collect()
        store, disk = self._lab.store, shutil.disk_usage(self._lab.folder)
        counts, barred = store.count_states(), [is_barred(node) for node in store.read_nodes()]
        yield _build("experiments", "Experiments", "state", {state: counts.get(state, 0) for state in STATES})
        yield _build("queued", "Queued experiments", "owner", _name_few(store.count_queued()))
        nodes = {"ready": barred.count(False), "barred": barred.count(True)}
        yield _build("nodes", "Machines that were ever met", "state", nodes)
        stale = len(self._lab.leases.list_stale())
        yield _build("stale_leases", "Live attempts that nothing was heard of for 30 s", "", {"": stale})
        yield _build("disk_free_bytes", "Room on the disk of the lab's folder", "", {"": disk.free})
        yield _build("disk_total_bytes", "Size of the disk of the lab's folder", "", {"": disk.total})
        yield _build("has_room", "0: the disk is full, and the queue waits", "", {"": store.has_room()})


class Watch:
    """Measures how long each request takes, and logs those that are refused: who asked for what, and no token.

    It goes around everything else of the application.
    """

    def __init__(self, app: ASGIApp, *, lab: Lab):
        self._app, self._lab = app, lab

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = time.perf_counter(), 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            route = _name_route(scope)
            self._lab.metrics.request_s.labels(route, status).observe(time.perf_counter() - began_s)
            if status in REFUSED:
                address = scope["client"][0] if scope.get("client") else None
                extra = tell("refused", route=route, status=status, client=address)
                logger.info("refused %s with %s", route, status, extra=extra)


def _name_route(scope: Scope) -> str:
    """Return the route of a request as it is written in the code; what has none is ``none``."""
    route = scope.get("route")
    if route is None or scope["method"] not in (getattr(route, "methods", None) or ()):
        return "none"
    return f"{scope['method']} {route.path}"


def _name_few(counts: dict[str, int]) -> dict[str, int]:
    """Return the owners with the longest queues, and the sum of all others."""
    owners = sorted(counts, key=lambda owner: -counts[owner])
    named = {owner: counts[owner] for owner in owners[:MOST_OWNERS]}
    return named | ({OTHERS: sum(counts[owner] for owner in owners[MOST_OWNERS:])} if len(owners) > MOST_OWNERS else {})


def _build(name: str, said: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"fulltilt_lab_{name}", said, labels=[label] if label else [])
    for key, value in values.items():
        family.add_metric([key] if label else [], value)
    return family
