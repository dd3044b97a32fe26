"""Serve on this machine until a signal ends it, and lose nothing that was accepted."""

import asyncio
import contextlib
import functools
import gc
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from fulltilt.engine.interrupt import ECHO_S
from fulltilt.infer.serve.app import build_app
from fulltilt.infer.serve.service import Service
from fulltilt.web.listening import Tls, build_settings, format_url, list_hosts, listen

LEAST_DRAIN_S = 0.5  # so long who comes hears that the service drains, instead of finding nobody
LAST_S = 0.2  # for requests of connections that were just made
MOST_DRAIN_S, GRACE_S = 60, 1  # of requests that were counted; then of a page and the like
KEEP_ALIVE_S = 75  # longer than clients and proxies keep idle connections: who closes first must not be we


class DrainingServer(uvicorn.Server):
    """Drains at the first signal: it answers what it has, refuses what comes, and ends. The second ends it at once."""

    def __init__(self, settings: uvicorn.Config, service: Service):
        super().__init__(settings)
        self._service, self._drains_since_s, self.n_late = service, 0.0, 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self._service.is_draining:
            self._service.is_draining, self._drains_since_s = True, now_s
        elif now_s - self._drains_since_s > ECHO_S:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

    async def on_tick(self, counter: int) -> bool:
        is_over = await super().on_tick(counter)
        if not self._service.is_draining:
            return is_over
        drained_s = time.monotonic() - self._drains_since_s
        is_empty = self._service.n_open == 0 and drained_s >= LEAST_DRAIN_S
        if drained_s >= MOST_DRAIN_S:
            self.n_late = self._service.n_open
        return is_over or is_empty or drained_s >= MOST_DRAIN_S

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, hear out who is connected by then, and end."""
        loop, connecting = asyncio.get_running_loop(), []
        build = functools.partial(
            self.config.http_protocol_class,  # type: ignore[arg-type]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state,
        )  # fmt: skip
        for listener in sockets or ():
            with contextlib.suppress(OSError):  # there is none, or no room for one
                while True:  # closing the listener would reset who is connected to it and not taken yet
                    line, _ = listener.accept()
                    connecting.append(loop.connect_accepted_socket(build, line, ssl=self.config.ssl))
        for server in self.servers:
            server.close()
        await asyncio.gather(*connecting, return_exceptions=True)
        await asyncio.sleep(LAST_S)
        await super().shutdown(sockets)


def serve(
    service: Service,
    *,
    host: str,
    port: int,
    token: str | None,
    names: Sequence[str] = (),
    tls: Tls | None = None,
    on_start: Callable[[str], None],
) -> int:
    """Serve in this thread until a signal comes; Ctrl-C is one → how many requests the drain was too short for.

    Args:
        port: 0: any that is free.
        on_start: Told the URL, when it can be reached.

    Raises:
        UsageError: the address cannot be used.
    """
    with contextlib.closing(listen(host, port)) as listener:
        app = build_app(service, token=token, hosts=list_hosts(host, names))
        settings = build_settings(app, tls, grace_s=GRACE_S, keep_alive_s=KEEP_ALIVE_S)
        on_start(format_url(host, listener.getsockname()[1], tls, names))  # connections wait in the listener meanwhile
        gc.collect()
        gc.freeze()  # what libraries have loaded stays: else the first requests wait while all of it is searched
        server = DrainingServer(settings, service)
        server.run(sockets=[listener])
    return server.n_late
