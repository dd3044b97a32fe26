"""Draw what a service does now, and did in the last minute."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
from markupsafe import Markup

from fulltilt.infer.serve.figures import RECENT_S, SOURCES, Request
from fulltilt.infer.serve.service import Service
from fulltilt.infer.serve.wire import describe_input
from fulltilt.records import format_rate
from fulltilt.report.charts import COLOURS, Bar, Point, build_bar_chart, build_curve_chart

N_QUANTILES = 100
LATENCY = "response, ms"
WORDS = dict(zip(SOURCES, ("the model", "a request beside", "memory", "disk"), strict=True))
environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render_page(service: Service) -> str:
    figures = service.figures
    requests = figures.list_requests()
    page = environment.get_template("page.html")
    return page.render(
        name=service.manifest.name,
        state="ready" if service.is_ready else "draining" if service.is_draining else "not ready",
        sentence=_describe_load(service, requests),
        load=Markup(_draw_load(requests, figures.now_s, figures.began_s)),
        latency=Markup(_draw_latency(requests)),
        batches=Markup(_draw_batches(figures.count_batches())),
        sources=Markup(_draw_sources(figures.sources)),
        facts=_list_facts(service),
        notes=service.notes,
    )


def _describe_load(service: Service, requests: Sequence[Request]) -> str:
    figures = service.figures
    span_s = max(1.0, min(RECENT_S, figures.now_s - figures.began_s))
    said = [f"{format_rate(len(requests) / span_s)} requests/s in the last {span_s:.0f} s"]
    responses_ms = [1000 * request.response_s for request in requests if request.status == 200]
    if responses_ms:
        p50, p99 = np.quantile(responses_ms, [0.5, 0.99])
        said.append(f"p50 {p50:.3g} ms, p99 {p99:.3g} ms")
    n_refused = sum(request.status >= 400 for request in requests)
    said += [f"{n_refused} refused or failed"] if n_refused else []
    said.append(f"{service.crew.n_waiting} of {service.settings.n_waiting} places in line taken")
    return "; ".join(said)


def _draw_load(requests: Sequence[Request], now_s: float, began_s: float) -> str:
    """Draw requests of each whole second; the one that runs is left out."""
    groups = {"answered": Counter[int](), "refused or failed": Counter[int]()}
    for request in requests:
        groups["refused or failed" if request.status >= 400 else "answered"][int(now_s - request.end_s)] += 1
    seconds = range(min(RECENT_S, int(now_s - began_s)), 0, -1)
    lines = {
        name: [[Point(x=RECENT_S - ago, y=counts[ago], label=f"{counts[ago]} {name}") for ago in seconds]]
        for name, counts in groups.items()
        if len(seconds) > 1 and (counts or name == "answered")
    }
    return build_curve_chart(lines, x_title=f"seconds, {RECENT_S} is now", y_title="requests/s")


def _draw_latency(requests: Sequence[Request]) -> str:
    responses_ms = [1000 * request.response_s for request in requests if request.status == 200]
    if not responses_ms:
        return build_curve_chart({}, x_title=LATENCY, y_title="%")
    shares = np.linspace(0, 1, N_QUANTILES + 1)
    values = np.quantile(responses_ms, shares, method="inverted_cdf")
    points = [
        Point(x=value, y=100 * share, label=f"{100 * share:.0f} % within {value:.3g} ms")
        for value, share in zip(values.tolist(), shares.tolist(), strict=True)
    ]
    return build_curve_chart({"": [points]}, x_title=LATENCY, y_title="% of responses")


def _draw_batches(counts: dict[int, int]) -> str:
    bars = [
        Bar(label=f"{size // 2 + 1} to {size}" if size > 2 else str(size), figure=f"{n:,}", parts={"batches": n})
        for size, n in counts.items()
    ]
    return build_bar_chart(bars, x_title="batches, by samples", colours={"batches": COLOURS[0]})


def _draw_sources(counts: dict[str, int]) -> str:
    whole = sum(counts.values())
    if not whole:
        return build_bar_chart([], x_title="", colours={})
    share = 100 * (whole - counts["model"]) / whole
    parts = {WORDS[name]: float(n) for name, n in counts.items()}
    bar = Bar(label=f"{whole:,} samples", figure=f"{share:.0f} % without the model", parts=parts)
    return build_bar_chart([bar], x_title="samples", colours=dict(zip(parts, COLOURS, strict=False)))


def _list_facts(service: Service) -> list[tuple[str, str]]:
    manifest, policy, promise = service.manifest, service.manifest.policy, service.manifest.promise
    tokens = f", {policy.max_tokens:,} padded elements" if policy.max_tokens else ""
    facts = [
        ("takes", "\n".join(describe_input(spec, manifest.max_length) for spec in manifest.inputs)),
        ("plan", ", ".join(f"{name} {value}" for name, value in manifest.plan.items() if value is not None)),
        ("batches", f"up to {service.crew.max_batch} samples{tokens}"),
        ("padding", f"{100 * service.figures.padding_share:.0f} % of what the model computed"),
        ("cache", f"{service.cache.n_answers:,} answers in memory" if service.cache else "none"),
        ("device", f"{manifest.device}, {manifest.n_parameters:,} parameters"),
    ]
    if promise is not None:
        said = f"p{100 * promise.quantile:g} within {1000 * promise.limit_s:g} ms"
        facts.append(("promise", f"{said} under {format_rate(promise.requests_per_s)} requests/s"))
    return facts
