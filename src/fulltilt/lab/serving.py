"""Open a lab, serve it, and schedule it: what ``lab serve`` and ``lab submit --local`` both are."""

import contextlib
import dataclasses
import functools
import json
import logging
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from fulltilt._version import __version__
from fulltilt.errors import UsageError
from fulltilt.hardware import RealNvml
from fulltilt.hardware.sampler import Sampler
from fulltilt.lab.coordinator import Coordinator
from fulltilt.lab.depot import Depot
from fulltilt.lab.executors import Executor
from fulltilt.lab.executors.ray import RayExecutor
from fulltilt.lab.lab import LOCAL, Lab
from fulltilt.lab.records import Node
from fulltilt.lab.runner.order import Order
from fulltilt.lab.scheduling.leases import Leases, Term
from fulltilt.lab.server.app import build_app
from fulltilt.lab.server_log import keep_log, tell
from fulltilt.lab.states import LIVE
from fulltilt.lab.store import DATABASE, open_store
from fulltilt.lab.versions import read_versions
from fulltilt.records.run_folder import write_atomic, write_secret
from fulltilt.web.gate import read_or_make_token
from fulltilt.web.listening import Tls, build_settings, format_url, list_hosts, listen

ADDRESS, PORT = "server.json", "port"  # the former in the lab's folder, while it is served
DEPOT = "depot"
STARTUP_S = 30.0
SAID = 5  # names of experiments in a sentence
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a lab is served, and the token of its owner.

    Attributes:
        authority: PEM file of who signed the server's certificate; None: who the machine trusts.
    """

    url: str
    token: str
    authority: str | None = None


@contextlib.contextmanager
def open_lab(
    folder: Path,
    *,
    database: str | None = None,
    depot: str | None = None,
    create: bool = False,
    term: Term | None = None,
) -> Iterator[Lab]:
    """Open a lab whose folder the caller holds.

    Args:
        database: URL of PostgreSQL; None: SQLite in the folder.
        depot: URI for files; None: a folder in the lab's.
    """
    term, folder = term or Term(), folder.resolve()
    if create and not (folder / DATABASE).exists():
        with contextlib.suppress(PermissionError):  # another's folder
            folder.chmod(0o700)  # records, logs and configurations are the owner's
    with contextlib.closing(open_store(folder, url=database, create=create)) as store:
        files = Depot(depot or folder / DEPOT)
        yield Lab(folder=folder, store=store, depot=files, term=term, leases=Leases(term, time.monotonic))


@contextlib.contextmanager
def serve(
    lab: Lab,
    executors: Sequence[Executor],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    names: Sequence[str] = (),
    tls: Tls | None = None,
    command: Sequence[str] = (),
) -> Iterator[tuple[Address, Coordinator]]:
    """Serve a lab and schedule it, in threads, for the length of the block.

    Args:
        port: 0: any that is free; the one of the last time where it still is, so that runners find it again.
        names: Under which the server is reached, beside ``host`` and this machine's own; the first is told to runners.
        command: Trains; empty: fulltilt itself.

    Raises:
        UsageError: the address cannot be used.
    """
    with contextlib.ExitStack() as stack, keep_log(lab.folder):
        listener = stack.enter_context(_listen_again(lab, host, port))
        nvml = stack.enter_context(contextlib.closing(RealNvml()))
        url, authority = format_url(host, listener.getsockname()[1], tls, names), tls and str(tls.certificate.resolve())
        address = Address(url=url, token=read_or_make_token(lab.folder), authority=authority)
        same = {"root": str(lab.folder / LOCAL), "depot": lab.depot.uri, "command": tuple(command)}
        coordinator = Coordinator(lab, executors, functools.partial(Order, url=url, authority=authority, **same))
        ray = next((executor for executor in executors if isinstance(executor, RayExecutor)), None)
        _meet_nodes(lab, [executor for executor in executors if executor is not ray])
        app = build_app(
            lab, token=address.token, hosts=list_hosts(host, names), read_rooms=coordinator.read_rooms,
            sampler=Sampler(nvml, folder=lab.folder), invite=ray and ray.invite,
        )  # fmt: skip
        for executor in executors:
            stack.callback(executor.close)
        server = uvicorn.Server(build_settings(app, tls))
        with _run(app, server, listener, coordinator, lab.folder / ADDRESS, address):
            logger.info("fulltilt %s serves at %s", __version__, url, extra=tell("started", url=url))
            yield address, coordinator
        logger.info("the server has ended", extra=tell("ended"))


def _meet_nodes(lab: Lab, executors: Sequence[Executor]) -> None:
    """Note the machines of engines that machines do not join by themselves."""
    for place in (place for executor in executors for place in executor.read_places()):
        is_own = place.node == platform.node()  # what another machine has installed is not known here
        boot, versions = (read_boot(), read_versions()) if is_own else ("", {})
        lab.store.meet_node(Node(name=place.node, boot=boot, versions=versions, devices=place.devices))


@contextlib.contextmanager
def _run(
    app: FastAPI,
    server: uvicorn.Server,
    listener: socket.socket,
    coordinator: Coordinator,
    path: Path,
    address: Address,
) -> Iterator[None]:
    """Run server and coordinator in threads for the length of the block, and say at ``path`` where that is."""
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server", daemon=True)
    scheduling = threading.Thread(target=coordinator.run, name="coordinator", daemon=True)
    serving.start()
    try:
        _wait_for(lambda: server.started or not serving.is_alive())
        if not server.started:
            raise UsageError(f"the server at {address.url} ended as it started; see what it printed")
        write_secret(path, json.dumps(dataclasses.asdict(address)))
        scheduling.start()
        yield
    finally:
        path.unlink(missing_ok=True)
        app.state.is_closing = True
        coordinator.stop()
        if scheduling.ident is not None:
            scheduling.join()
        server.should_exit = True
        serving.join()


def find_server(folder: Path) -> Address | None:
    """Return where the lab in a folder is served; None: nowhere, as far as its folder says."""
    try:
        return Address(**json.loads((folder / ADDRESS).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def read_boot() -> str:
    """Return what changes when this machine starts again."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"


def _listen_again(lab: Lab, host: str, port: int) -> socket.socket:
    """Listen at a port, and warn of attempts that look for the server at another; 0: the last one, or a free one."""
    note, last, since_s = lab.folder / PORT, 0, 0.0
    with contextlib.suppress(OSError, ValueError):
        last, since_s = int(note.read_text()), note.stat().st_mtime
    try:
        listener = listen(host, port or last)
    except UsageError:
        if port:
            raise
        listener = listen(host, 0)
    if (new := listener.getsockname()[1]) == last:
        return listener
    # Those that began before the last port was noted know an earlier one: this may be it.
    lost = [each for each in lab.store.read_experiments(states=LIVE) if (each.started_s or 0.0) >= since_s]
    write_atomic(note, f"{new}\n")
    if last and lost:
        said = "%s may still run and can hand nothing in: they look for the server at port %d, and it is at %d now; "
        said += "end it and start it with --port %d, else they are queued again when their leases run out, in %.0f min"
        minutes = lab.term.ttl_s / 60
        logger.warning(said, ", ".join(each.id for each in lost[:SAID]), last, new, last, minutes, extra=tell("moved"))
    return listener


def _wait_for(is_done: Callable[[], bool]) -> None:
    until_s = time.monotonic() + STARTUP_S
    while not is_done():
        if time.monotonic() > until_s:
            raise UsageError(f"the server did not start within {STARTUP_S:.0f} s; see its log")
        time.sleep(0.01)
