"""``fulltilt infer load``: load a server over HTTP, open loop, and hold its responses to a limit."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from math import exp, inf, isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._infer_check import SCENARIOS
from fulltilt.cli._shared import build_console, check_at_least, print_result, show_progress, write_json
from fulltilt.cli._signals import Terminated
from fulltilt.errors import UsageError
from fulltilt.records import format_rate
from fulltilt.report.latency import draw_histogram
from fulltilt.report.summary import count, format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fulltilt.infer.load.outcome import LoadOutcome, LoadPlan

EXIT_MISSED = 3
STYLES = {"met": "green", "missed": "bold red", "not proven": "yellow", None: None}
SAID = {
    "met": ("The limit is met", "within"),
    "missed": ("The limit is missed", "beyond"),
    "not proven": ("Not proven", "the limit is"),
}
N_SAMPLES = 256  # that is all a server has
MOST_TOKENS = 4097
MOST_SAMPLES = 10_001  # of a request: each begins one of its own, and all are held
PERCENTILE = 99.0
UNLIMITED_S, LIMITED_S = 10.0, 60.0
TIMEOUT_S = 30.0  # of a request, or twice the limit

HELP = "load a server over HTTP, open loop, and hold its responses to a limit"
DESCRIPTION = (
    "Sends requests to a server from a process of its own, at times that were drawn beforehand; a response counts from "
    "then on, however late it was sent, and what fails counts as late. With a limit the load ends as soon as a test "
    "that may be looked at all the time has decided. Rate and limit are those that the served artefact promises unless "
    "they are given; where it promises none, the rate is that of its configuration's targets. Exit code 0: the limit "
    "is met, or there is none; 3: it is missed or not proven."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="of the server; one with a path gets the requests there")
    parser.add_argument("--requests-per-s", type=float, metavar="R", help="requests that arrive a second")
    parser.add_argument(
        "--scenario",
        choices=("server", "single", "multi", "offline"),
        default="server",
        help="server (default): Poisson arrivals; single: one at a time; multi: one of 8 samples at a time; "
        "offline: as many as the server takes",
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="at most (60; without a limit 10)")
    parser.add_argument("--p99-ms", type=float, metavar="L", help="99 %% of the responses are to be within so long")
    parser.add_argument(
        "--percentile", type=float, default=PERCENTILE, metavar="P", help="another share, with --limit-ms"
    )
    parser.add_argument("--limit-ms", type=float, metavar="L", help="the limit of that share")
    parser.add_argument("--samples-per-request", type=int, metavar="N", help="default the server's, else 1; of multi 8")
    parser.add_argument(
        "--new-tokens", type=int, metavar="N", help="of a model that writes text: words of an answer (default its own)"
    )
    parser.add_argument("--inputs", metavar="FILE", help="JSON list of samples (default: the server's own)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the arrivals")
    parser.add_argument(
        "--token-file", metavar="F", help="holds the server's token (default: FULLTILT_INFER_TOKEN of the environment)"
    )
    parser.add_argument("--json", metavar="F", help="write the result as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    from fulltilt.infer.load.http import build_bodies, build_prompts, build_request, fetch

    token = read_token(args)
    check_flags(args)
    samples = read_samples(args, token)
    plan = plan_load(args, token)
    if plan.new_tokens:
        try:
            bodies = build_prompts(samples, plan.new_tokens, seed=plan.seed)
        except (TypeError, LookupError):
            raise UsageError(
                f"{args.url} writes text, but its samples are none; is it a fulltilt infer serve?"
            ) from None
    else:
        bodies = build_bodies(samples, plan.samples_per_request)
    build_request(plan, bodies, token)  # says what cannot be, before anything is sent
    try:
        # What can never be answered is told before the load.
        fetch(plan.target, body=bodies[0], token=token, patience_s=plan.timeout_s)
    except UsageError as error:
        raise UsageError(f"{error}; see that the server takes such samples, or give others by --inputs") from None
    console = build_console(to_stderr=args.json == "-", is_screen=True)

    def show(outcome: LoadOutcome) -> None:
        write_json(args.json, outcome)
        print_outcome(console, outcome, is_verbose=args.verbose)

    outcome = _run_one(plan, bodies, token, show)
    is_fine = outcome.verdict == "met" or (outcome.verdict is None and not (outcome.why or outcome.unanswered))
    return 0 if is_fine else EXIT_MISSED


def read_token(args: argparse.Namespace) -> str | None:
    token, where = os.environ.get("FULLTILT_INFER_TOKEN") or None, "FULLTILT_INFER_TOKEN"
    if args.token_file:
        where = f"--token-file {args.token_file}"
        try:
            token = Path(args.token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{where} cannot be read ({error}); name the server's file 'token'") from None
    if token and not (token.isascii() and token.isprintable()):
        raise UsageError(f"{where} holds no token; it is one line of plain letters")
    return token


def read_samples(args: argparse.Namespace, token: str | None) -> list[Any]:
    """Read the samples of the requests: of a file, or of the server itself."""
    from fulltilt.infer.load.http import fetch

    if args.inputs:
        try:
            found = json.loads(Path(args.inputs).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"--inputs {args.inputs} holds no JSON ({error}); write a list of samples") from None
        where = f"--inputs {args.inputs}"
    else:
        try:
            found = fetch(f"{args.url.rstrip('/')}/v1/samples?n={N_SAMPLES}", token=token)
        except UsageError as error:
            raise UsageError(
                f"{error}; start it by fulltilt infer serve, or give its --token-file, or --inputs FILE"
            ) from None
        where = args.url
    samples = found.get("inputs") if isinstance(found, dict) else found
    if not isinstance(samples, list) or not samples:
        raise UsageError(f'{where} holds no samples; a list of them, or {{"inputs": [sample, …]}}, is needed')
    return samples


def check_flags(args: argparse.Namespace) -> None:
    """Raise a UsageError where a flag has no such value, or two say different things."""
    from fulltilt.infer.load.http import split_url

    split_url(args.url)
    check_at_least(args, "--seed", 0)
    most = {"requests_per_s": inf, "seconds": inf, "p99_ms": inf, "limit_ms": inf}
    most |= {"samples_per_request": MOST_SAMPLES, "new_tokens": MOST_TOKENS}
    for name, below in most.items():
        if (value := getattr(args, name)) is not None and not 0 < value < below:
            raise UsageError(
                f"--{name.replace('_', '-')} {value!s:.40} has to be above 0 and below {below:,g}; change it"
            )
    if not 0 < args.percentile < 100:
        raise UsageError(f"--percentile {args.percentile:g} has to be between 0 and 100; the default is 99")
    if args.p99_ms and (args.limit_ms or args.percentile != PERCENTILE):
        raise UsageError("--p99-ms is a limit by itself; give it alone, or --percentile with --limit-ms")
    if args.scenario == "offline" and (args.p99_ms or args.limit_ms):
        raise UsageError("offline has no response times, everything arrives at once; leave the limit or --scenario out")
    if args.scenario != "server" and args.requests_per_s:
        raise UsageError(f"--scenario {args.scenario} sends as fast as it is answered; leave --requests-per-s out")


def plan_load(args: argparse.Namespace, token: str | None) -> LoadPlan:
    """Plan the load from flags, and from what the served artefact promises where they say nothing."""
    from fulltilt.infer.load.arrivals import SAMPLES_PER_REQUEST
    from fulltilt.infer.load.outcome import LoadPlan

    limit_ms, quantile = args.p99_ms or args.limit_ms, 0.99 if args.p99_ms else args.percentile / 100
    manifest, is_server = {} if args.inputs else _fetch_manifest(args.url, token), args.scenario == "server"
    new_tokens = _read_new_tokens(manifest, args.new_tokens)
    promise = _read_promise(manifest) if is_server and not new_tokens else None  # one is of whole samples
    told = promise or (_read_stated(manifest) if is_server else None)
    if promise and not limit_ms:
        limit_ms, quantile = 1000 * promise["limit_s"], promise["quantile"]
    rate_per_s = args.requests_per_s or (told["requests_per_s"] if told else None)
    if is_server and not rate_per_s:
        raise UsageError(
            "the server neither promises nor states a rate; say how many requests arrive, such as --requests-per-s 20"
        )
    longest_s = LIMITED_S if limit_ms else UNLIMITED_S
    usual = int(told["samples_per_request"]) if told else 1
    n_samples = args.samples_per_request or SAMPLES_PER_REQUEST.get(args.scenario, usual)
    load = {"requests_per_s": rate_per_s, "quantile": quantile, "samples_per_request": n_samples}
    is_promised = promise is not None and promise.items() >= load.items()
    return LoadPlan(
        url=args.url,
        scenario=args.scenario,
        requests_per_s=rate_per_s if is_server else None,
        seconds=args.seconds or longest_s,
        samples_per_request=1 if new_tokens else n_samples,
        quantile=quantile,
        limit_s=limit_ms and limit_ms / 1000,
        seed=args.seed,
        new_tokens=new_tokens,
        promised_s=promise["measured_s"] if promise and is_promised else None,
        timeout_s=max(TIMEOUT_S, 2 * (limit_ms or 0.0) / 1000),
    )


def _fetch_manifest(url: str, token: str | None) -> dict[str, Any]:
    """Fetch what the served artefact says of itself; another server says nothing."""
    from fulltilt.infer.load.http import fetch

    try:
        found = fetch(f"{url.rstrip('/')}/v1/manifest", token=token)
    except UsageError:
        return {}
    return found if isinstance(found, dict) else {}


def _read_new_tokens(manifest: dict[str, Any], given: int | None) -> int:
    """Return how many words a request asks for; 0 where the model writes none.

    Raises:
        UsageError: some were asked for by name all the same.
    """
    if not manifest.get("writes_text"):
        if given:
            raise UsageError("--new-tokens is of a model that writes text, and this one does not; leave it out")
        return 0
    try:
        return given or int(manifest["config"]["config"]["targets"]["new_tokens"])
    except (LookupError, TypeError, ValueError):
        raise UsageError("the server does not say how long its texts are; give --new-tokens") from None


def _read_stated(manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Read the load that the targets of the served configuration state, its rate where they do."""
    try:
        config = manifest["config"]["config"]
        targets, rate_per_s = config["targets"], config["targets"]["requests_per_s"]
        n_samples = float(targets["samples_per_request"] or config["data"]["batch_size"])
        return {"requests_per_s": rate_per_s and float(rate_per_s), "samples_per_request": n_samples}
    except (LookupError, TypeError, ValueError):
        return None


def _read_promise(manifest: dict[str, Any]) -> dict[str, float] | None:
    names = "requests_per_s", "limit_s", "quantile", "samples_per_request", "measured_s"
    try:
        promise = {name: float(manifest["promise"][name]) for name in names}
    except (LookupError, TypeError, ValueError):
        return None  # the flags have to say it
    return promise if promise["limit_s"] > 0 and 0 < promise["quantile"] < 1 else None


def _run_one(
    plan: LoadPlan, bodies: list[str], token: str | None, show: Callable[[LoadOutcome], None] = lambda outcome: None
) -> LoadOutcome:
    """Run a load and show what it found, also where it is interrupted."""
    from fulltilt.infer.load.http import HttpLoad

    load = HttpLoad(plan, bodies, token=token)
    try:
        with show_progress("loading") as progress:
            outcome = load.run(
                on_look=lambda now_s, n_answers: progress(
                    min(now_s, plan.seconds), max(plan.seconds, now_s), count(n_answers, "answer")
                )
            )
    except (KeyboardInterrupt, Terminated) as interruption:
        if len(load.select()):
            interruption.add_note("what was measured until then is above")
            show(load.build_outcome())
        raise
    show(outcome)
    return outcome


def print_outcome(console: Console, outcome: LoadOutcome, *, is_verbose: bool) -> None:
    verdict = outcome.verdict or ("not proven" if outcome.why else None)
    print_result(console, describe_outcome(outcome), style=STYLES[verdict])
    console.print(_build_table(outcome))
    limit_s = outcome.plan.limit_s
    for line in draw_histogram(outcome.histogram, limit=limit_s and 1000 * limit_s):
        console.print(line)
    for line in [*_describe_load(outcome), *(_describe_details(outcome) if is_verbose else [])]:
        console.print(f"· {line}")


def describe_outcome(outcome: LoadOutcome) -> str:
    """Return the result in one sentence."""
    plan = outcome.plan
    name = f"p{100 * plan.quantile:g}"
    figure_ms = outcome.response_ms[name.replace(".", "")].measured
    figure = "without an answer" if isinf(figure_ms) else f"{format_rate(figure_ms)} ms"
    if plan.promised_s is not None:
        figure += f" ({format_rate(1000 * plan.promised_s)} ms when it was accepted)"
    rate = f" under {format_rate(plan.requests_per_s)} requests/s" if plan.requests_per_s else ""
    if plan.scenario == "offline":
        said = f"{format_rate(outcome.samples_per_s)} samples/s, {count(outcome.n_requests, 'request')} at once"
    elif plan.limit_s is None or outcome.late_share is None:
        said = f"{name} is {figure}{rate}"
    else:
        limit = f"{format_rate(1000 * plan.limit_s)} ms"
        met, within = SAID[outcome.verdict or "not proven"]
        late = format_rate(100 * outcome.late_share.measured)
        said = f"{met}: {name} is {figure}, {within} {limit},{rate} ({late} % late)"
    why = f"; {outcome.why}" if outcome.why else ""
    cached = f"; {100 * outcome.cached_share:.0f} % of the samples came from the cache" if outcome.cached_share else ""
    is_whole = outcome.ended in ("schedule", "decided")
    end = "" if is_whole else f"; {outcome.ended} after {format_duration(outcome.seconds)}"
    return f"{said}{why}{cached}{end}."


def _build_table(outcome: LoadOutcome) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("response", "ms", "95 % interval"):
        table.add_column(name, justify="left" if name == "response" else "right")
    for name, estimate in outcome.response_ms.items():
        low, high = ("no bound" if isinf(bound) else format_rate(bound) for bound in estimate.ci95)
        measured = "no answer" if isinf(estimate.measured) else format_rate(estimate.measured)
        table.add_row(
            "p99.9" if name == "p999" else name, measured, "largest seen" if name == "max" else f"{low} to {high}"
        )
    return table


def _describe_load(outcome: LoadOutcome) -> list[str]:
    plan = outcome.plan
    rate = f" at {format_rate(plan.requests_per_s)}/s" if plan.requests_per_s else ""
    each = count(plan.new_tokens, "word") if plan.new_tokens else count(plan.samples_per_request, "sample")
    lines = [
        f"load: {count(outcome.n_requests, 'request')} of {each} in "
        f"{format_duration(outcome.seconds)}, {SCENARIOS[plan.scenario]}{rate}; "
        f"{format_rate(outcome.answered_per_s)}/s answered"
    ]
    if outcome.unanswered:
        failed = ", ".join(f"{name}: {n:,}" for name, n in outcome.unanswered.items())
        lines.append(f"no proper answer, counted as late: {failed}")
    if outcome.tokens_per_s is not None:
        first = ", ".join(f"{name} {format_rate(each.measured)} ms" for name, each in outcome.first_token_ms.items())
        lines.append(f"first word: {first.replace('p999', 'p99.9')}; {format_rate(outcome.tokens_per_s)} words/s")
    late_ms = outcome.generator_late_ms
    lines.append(f"the generator itself was {late_ms['p50']:.2g} ms late in the median, {late_ms['p99']:.2g} ms at p99")
    return lines


def _describe_details(outcome: LoadOutcome) -> list[str]:
    from fulltilt.stats.sequential import ALPHA, compute_threshold

    test = outcome.test
    lines = [f"dependence: {outcome.dependence:.2g} neighbouring responses say as much as one"]
    if test is not None:
        lines.append(
            f"test: {test.decision} after {count(test.n_blocks, 'block')}; evidence {test.evidence_for:.3g} for, "
            f"{test.evidence_against:.3g} against, {exp(compute_threshold(ALPHA)):.4g} decides"
        )
    return [*lines, f"ended: {outcome.ended}"]
