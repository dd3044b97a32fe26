"""``fulltilt infer serve``: serve an artefact, or a configuration in eager as it is, until a signal comes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._listening import add_listening_arguments, read_tls
from fulltilt.cli._shared import (
    add_workload_arguments,
    build_console,
    check_at_least,
    print_result,
    read_config_and_words,
    resolve_config_argument,
)
from fulltilt.cli._signals import unwind_on_signals
from fulltilt.errors import ConfigError, UsageError
from fulltilt.report.summary import count

if TYPE_CHECKING:
    from rich.console import Console

    from fulltilt.infer.artefact import Artefact
    from fulltilt.infer.serve.service import Settings

HELP = "serve an artefact, or a configuration as it is, over HTTP: batches, cache, limits, metrics, a page"
DESCRIPTION = (
    "POST /v1/predict answers samples; waiting ones share batches by length. A full line refuses with 429, a signal "
    "lets the service answer what it has and end. A configuration is served in eager fp32, its task is trained once."
)
MANIFEST = "manifest.json"
NEEDED = ("fastapi", "jinja2", "prometheus_client", "uvicorn")
N_WAITING = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser, metavar="ARTEFACT|CONFIG")
    parser.add_argument("--weights", metavar="RUN_DIR", help="of a CONFIG: the newest checkpoint of this training")
    add_listening_arguments(parser)
    parser.add_argument("--out", metavar="DIR", help="for cache, token, a CONFIG's model (default runs/infer/NAME)")
    parser.add_argument("--cache-mib", type=int, default=64, metavar="N", help="memory for answers (64; 0: no cache)")
    parser.add_argument("--cache-dir", metavar="DIR", help="where answers outlive the server (default --out)")
    parser.add_argument(
        "--cache-disk-mib", type=int, default=1024, metavar="N", help="their size there (1024; 0: none)"
    )
    parser.add_argument("--cache-expiry", default="24h", metavar="24h", help="how long an answer is kept (default 24h)")
    parser.add_argument(
        "--queue", type=int, metavar="N", help=f"samples that may wait (default {N_WAITING}, or one whole request)"
    )
    parser.add_argument("--deadline-ms", type=int, metavar="N", help="of requests without X-Deadline-Ms (default none)")
    parser.add_argument("--threads", type=int, metavar="N", help="of a replica (default what its plan says)")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="models beside each other (default 1)")
    parser.add_argument("--most-replicas", type=int, metavar="N", help="with ray: as many where requests wait")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="this process, or Ray Serve")


def run(args: argparse.Namespace) -> int:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UsageError(f"serving needs {', '.join(missing)}, which is not installed; pip install 'fulltilt[infer]'")
    least = {"--queue": 1, "--replicas": 1, "--threads": 1, "--deadline-ms": 1, "--cache-mib": 0, "--cache-disk-mib": 0}
    for flag, smallest in least.items():
        check_at_least(args, flag, smallest)
    if args.most_replicas is not None and args.engine != "ray":
        raise UsageError("--most-replicas needs --engine ray, which starts replicas where requests wait")
    if args.engine == "ray" and importlib.util.find_spec("ray") is None:
        raise UsageError("--engine ray needs Ray Serve, which is not installed; pip install 'fulltilt[ray]'")
    from fulltilt.infer.artefact import find_mismatch, open_artefact, read_manifest
    from fulltilt.web.listening import listen

    source, aside = resolve_config_argument(args), build_console(to_stderr=True)
    tls, expiry_s = read_tls(args), _read_expiry_s(args)
    listen(args.host, args.port).close()  # what cannot be used is told before a model is trained
    folder, out_dir, built = _find_artefact(args, source, aside)
    token, manifest = _read_token(args, out_dir), read_manifest(folder)
    settings = _build_settings(args, out_dir, expiry_s, manifest.config["config"])
    listening = {"host": args.host, "port": args.port, "token": token, "names": args.allow_host, "tls": tls}
    console = build_console(is_screen=True)

    def tell_start(url: str) -> None:
        place = out_dir / "token" if token else None
        _print_start(console, folder, url, place, writes_text=manifest.writes_text)

    def say(note: str) -> None:
        aside.print(f"note: {note}")

    if args.engine == "ray":
        if mismatch := find_mismatch(manifest):
            say(f"eager fp32 answers instead: {mismatch}")
        return _run_on_ray(args, folder, settings, listening, console, tell_start)
    from fulltilt.infer.serve.service import Service
    from fulltilt.infer.serve.serving import serve

    artefacts = [] if built is None else [built]
    artefacts += [open_artefact(folder, n_threads=args.threads) for _ in range(args.replicas - len(artefacts))]
    with contextlib.closing(Service(artefacts, settings, say=say, is_warmed_up=True)) as service:
        n_late = serve(service, **listening, on_start=tell_start)
    late = f"{count(n_late, 'request')} had no answer in time"
    told = late if n_late else "everything that was accepted was answered"
    console.print(f"stopped; {told}")
    return 0


def _run_on_ray(args, folder: Path, settings: Settings, listening: dict, console: Console, tell_start) -> int:
    import signal
    import socket

    from fulltilt.infer.serve import ray

    n_replicas = (args.replicas, max(args.replicas, args.most_replicas or 0))
    heard, hears = socket.socketpair()
    with heard, hears:
        hears.setblocking(False)
        signal.set_wakeup_fd(hears.fileno())  # Ray forks as it starts, where what a handler raises is lost
        try:
            ray.connect()
            unwind_on_signals()  # in place of Ray's own handlers, which abort
            url = ray.start(folder, settings, **listening, n_replicas=n_replicas, n_threads=args.threads)
            for number in (signal.SIGINT, signal.SIGTERM):  # none cuts short what follows
                signal.signal(number, lambda *_: None)
            tell_start(url)
            heard.recv(1)
        finally:
            ray.stop()
            signal.set_wakeup_fd(-1)
    console.print("stopped; replicas have answered what they took")
    return 0


def _find_artefact(args: argparse.Namespace, source: str, aside: Console) -> tuple[Path, Path, Artefact | None]:
    """Return the artefact's folder, one for what is kept, and the eager artefact that a CONFIG made."""
    folder = Path(source)
    if (folder / MANIFEST).is_file():
        if args.overrides or args.data_path or args.weights or args.device:
            raise UsageError(f"{folder} is an artefact, whose plan is settled; serve its CONFIG to change settings")
        return folder, Path(args.out or Path("runs") / "infer" / f"serve-{folder.resolve().name}"), None
    if folder.is_dir():
        raise UsageError(f"{folder} holds no {MANIFEST}; name an artefact's folder, or a configuration")
    args.config, args.config_flag = source, None
    config, words = read_config_and_words(args)
    out_dir = Path(args.out or Path("runs") / "infer" / config.run_name)
    aside.print(f"{source} is served in eager as it is; fulltilt infer search finds what is faster", soft_wrap=True)
    from fulltilt.infer.serve.eager import prepare_eager

    built = prepare_eager(config, out_dir, words, weights=args.weights, n_threads=args.threads)
    return built.folder, out_dir, built


def _read_expiry_s(args: argparse.Namespace) -> float:
    from fulltilt.config import parse_duration_s

    try:
        return parse_duration_s(args.cache_expiry)
    except ConfigError as error:
        raise UsageError(f"--cache-expiry {error}") from None


def _build_settings(args: argparse.Namespace, out_dir: Path, expiry_s: float, config: dict[str, Any]) -> Settings:
    from fulltilt.infer.serve.service import Settings

    whole = config["targets"]["samples_per_request"] or config["data"]["batch_size"]
    return Settings(
        cache_mib=args.cache_mib,
        cache_dir=Path(args.cache_dir or out_dir).resolve() if args.cache_disk_mib else None,
        cache_disk_mib=args.cache_disk_mib,
        cache_expiry_s=expiry_s,
        n_waiting=args.queue or max(N_WAITING, whole),
        deadline_s=None if args.deadline_ms is None else args.deadline_ms / 1000,
    )


def _read_token(args: argparse.Namespace, out_dir: Path) -> str | None:
    """Return the token that clients need: none where only this machine reaches the server."""
    from fulltilt.records.run_folder import find_folder_obstacle
    from fulltilt.web.gate import read_or_make_token
    from fulltilt.web.listening import LOOPBACK

    if args.host in LOOPBACK:
        return None
    if obstacle := find_folder_obstacle(out_dir):
        raise UsageError(f"the token has no place: {obstacle}")
    out_dir.mkdir(parents=True, exist_ok=True)
    return read_or_make_token(out_dir)


def _print_start(console: Console, folder: Path, url: str, token: Path | None, *, writes_text: bool) -> None:
    print_result(
        console, f"{folder} is served at {url}; Ctrl-C lets it answer what it has, and ends it", soft_wrap=True
    )
    head = f'-H "Authorization: Bearer $(cat {token})" ' if token else ""
    ask = f"curl -s {head}{url}/v1/samples | curl -s {head}{url}/v1/predict --json @-"
    if writes_text:
        ask = f"""curl -sN {head}{url}/v1/generate -d '{{"tokens": [1], "max_new_tokens": 8}}'"""
    console.print(f"try: {ask}", soft_wrap=True)
    if token:
        console.print(f"a browser asks for a password: it is the token in {token}", soft_wrap=True)
    sys.stdout.flush()
