"""Draw what a service does now, and did in the last minute."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from fulltilt.infer.serve.figures import RECENT_S
from fulltilt.infer.serve.service import Service
from fulltilt.infer.serve.wire import describe_inputs
from fulltilt.records import format_rate
from fulltilt.report.charts import Point, build_curve_chart
from fulltilt.report.latency import build_latency_chart
from fulltilt.web.assets import build_environment

environment = build_environment(Path(__file__).parent / "templates")


def render_page(service: Service) -> str:
    requests, span_s = service.figures.list_requests()
    end_s, response_s, status = requests.T
    responses_ms = np.sort(1000 * response_s[status == 200]).tolist()
    return environment.get_template("service.html").render(
        service=service,
        takes=describe_inputs(service.manifest),
        sentence=_describe_load(service, status, responses_ms, max(1.0, span_s)),
        load=Markup(_draw_load((time.monotonic() - end_s).astype(int), status, int(span_s))),
        latency=Markup(build_latency_chart({"responses": responses_ms})),
    )


def _describe_load(service: Service, status: NDArray[np.float64], responses_ms: Sequence[float], span_s: float) -> str:
    said = [f"{format_rate(len(status) / span_s)} requests/s in the last {span_s:.0f} s"]
    if responses_ms:
        p50, p99 = np.quantile(responses_ms, [0.5, 0.99])
        said.append(f"p50 {p50:.3g} ms, p99 {p99:.3g} ms")
    n_refused = (status >= 400).sum()
    said += [f"{n_refused} refused or failed"] if n_refused else []
    said.append(f"{service.n_waiting} of {service.settings.n_waiting} places in line taken")
    return "; ".join(said)


def _draw_load(ago_s: NDArray[np.int64], status: NDArray[np.float64], span_s: int) -> str:
    """Draw requests of each whole second; the one that runs is left out."""
    groups = {"answered": ago_s[status < 400], "refused or failed": ago_s[status >= 400]}
    counts = {name: np.bincount(group, minlength=span_s + 1).tolist() for name, group in groups.items()}
    lines = {
        name: [[Point(x=RECENT_S - ago, y=each[ago], label=f"{each[ago]} {name}") for ago in range(span_s, 0, -1)]]
        for name, each in counts.items()
        if any(each) or name == "answered"
    }
    return build_curve_chart(lines, x_title=f"seconds, {RECENT_S} is now", y_title="requests/s")
