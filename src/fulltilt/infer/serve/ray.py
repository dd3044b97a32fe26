"""Run the same application on Ray Serve: replicas in processes of their own, on one machine or many, autoscaled."""

import contextlib
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from fulltilt.errors import UsageError
from fulltilt.infer.artefact import open_artefact, read_manifest
from fulltilt.infer.serve.app import build_app
from fulltilt.infer.serve.service import Service, Settings
from fulltilt.infer.serve.serving import KEEP_ALIVE_S, MOST_DRAIN_S
from fulltilt.web.listening import LOOPBACK, Tls, format_url, list_hosts

NAME, ADDRESS = "fulltilt-infer", "RAY_ADDRESS"
WAITING_SHARE = 0.25  # of the places in line: where more wait at a replica, Ray starts another


def connect() -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start one of our own, which asks for a token.

    Raises:
        UsageError: Ray Serve is not installed.
    """
    own = {}
    if ADDRESS not in os.environ:  # not what others have started here; Ray reads the variables as it is loaded
        own = {"address": "local", "include_dashboard": False, "_node_ip_address": LOOPBACK[0]}
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_urlsafe(24)}
        os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: other work would come before the answers
    try:
        import ray.serve
    except ModuleNotFoundError as error:
        raise UsageError(f"Ray Serve is not whole: {error.name} is missing; pip install 'fulltilt[ray]'") from None
    ray.init(log_to_driver=False, **own)


def start(
    folder: Path,
    settings: Settings,
    *,
    host: str,
    port: int,
    token: str | None,
    names: Sequence[str],
    tls: Tls | None,
    n_replicas: tuple[int, int],
    n_threads: int | None,
) -> str:
    """Start replicas in the cluster that this process is connected to → the URL.

    Args:
        folder: Of the artefact, under the same path on every machine.
        n_replicas: Fewest and most; Ray chooses by how many requests wait.
    """
    from ray import serve

    place, hosts, (fewest, most) = folder.resolve(), list_hosts(host, names), n_replicas

    def build():
        """Open the artefact and build the application, in each replica."""
        service = Service([open_artefact(place, n_threads=n_threads)], settings, is_warmed_up=True)
        return build_app(service, token=token, hosts=hosts)

    tls_files = {} if tls is None else {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key)}
    serve.start(http_options={"host": host, "port": port, "keep_alive_timeout_s": KEEP_ALIVE_S, **tls_files})
    most_waiting = max(1, int(WAITING_SHARE * settings.n_waiting))
    deployment = serve.deployment(
        name=NAME,
        max_ongoing_requests=2 * settings.n_waiting,  # beyond its places a replica refuses by itself, and says when
        autoscaling_config={"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": most_waiting},
        graceful_shutdown_timeout_s=MOST_DRAIN_S,
        ray_actor_options={"num_cpus": n_threads or 1, "num_gpus": int(read_manifest(place).device.startswith("cuda"))},
    )(serve.ingress(build)())
    serve.run(deployment.bind(), name=NAME, route_prefix="/")
    return format_url(host, port, tls, names)


def stop() -> None:
    """End the replicas when they have answered what they took, and the cluster where it was started here."""
    ray = sys.modules.get("ray")  # it may not be installed
    if ray and ray.is_initialized():
        with contextlib.suppress(ray.serve.exceptions.RayServeException):  # it never began
            ray.serve.delete(NAME)  # who comes hears 404 from then on; without it lines were cut
        ray.serve.shutdown()
        ray.shutdown()
