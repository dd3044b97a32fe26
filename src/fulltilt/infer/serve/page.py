"""Draw what a service does now, and did in the last minute."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup

from fulltilt.infer.serve.figures import RECENT_S, Request
from fulltilt.infer.serve.service import Service
from fulltilt.infer.serve.wire import describe_inputs
from fulltilt.records import format_rate
from fulltilt.report.charts import Point, build_curve_chart
from fulltilt.report.latency import build_latency_chart
from fulltilt.web.assets import build_environment

environment = build_environment(Path(__file__).parent / "templates")


def render_page(service: Service) -> str:
    requests = service.figures.list_requests()
    responses_ms = sorted(1000 * request.response_s for request in requests if request.status == 200)
    return environment.get_template("service.html").render(
        service=service,
        takes=describe_inputs(service.manifest),
        sentence=_describe_load(service, requests, responses_ms),
        load=Markup(_draw_load(requests, service.figures.began_s)),
        latency=Markup(build_latency_chart({"responses": responses_ms})),
    )


def _describe_load(service: Service, requests: Sequence[Request], responses_ms: Sequence[float]) -> str:
    span_s = max(1.0, min(RECENT_S, time.monotonic() - service.figures.began_s))
    said = [f"{format_rate(len(requests) / span_s)} requests/s in the last {span_s:.0f} s"]
    if responses_ms:
        p50, p99 = np.quantile(responses_ms, [0.5, 0.99])
        said.append(f"p50 {p50:.3g} ms, p99 {p99:.3g} ms")
    n_refused = sum(request.status >= 400 for request in requests)
    said += [f"{n_refused} refused or failed"] if n_refused else []
    said.append(f"{service.n_waiting} of {service.settings.n_waiting} places in line taken")
    return "; ".join(said)


def _draw_load(requests: Sequence[Request], began_s: float) -> str:
    """Draw requests of each whole second; the one that runs is left out."""
    now_s = time.monotonic()
    groups = {"answered": Counter[int](), "refused or failed": Counter[int]()}
    for request in requests:
        groups["refused or failed" if request.status >= 400 else "answered"][int(now_s - request.end_s)] += 1
    seconds = range(min(RECENT_S, int(now_s - began_s)), 0, -1)
    lines = {
        name: [[Point(x=RECENT_S - ago, y=counts[ago], label=f"{counts[ago]} {name}") for ago in seconds]]
        for name, counts in groups.items()
        if counts or name == "answered"
    }
    return build_curve_chart(lines, x_title=f"seconds, {RECENT_S} is now", y_title="requests/s")
