"""Run the same application on Ray Serve: replicas in processes of their own, on one machine or many, autoscaled."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from fulltilt.errors import UsageError
from fulltilt.infer.serve.service import Settings
from fulltilt.infer.serve.serving import KEEP_ALIVE_S
from fulltilt.web.listening import LOOPBACK, WILDCARDS, Tls, format_url, list_hosts

NAME, ADDRESS = "fulltilt-infer", "RAY_ADDRESS"
GRACE_S = 60.0
WAITING_SHARE = 0.25  # of the places in line: where more wait at a replica, Ray starts another


def prepare() -> None:
    """Load Ray Serve. A cluster of our own asks for a token, which Ray reads as it is loaded.

    Raises:
        UsageError: it is not installed.
    """
    if ADDRESS not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_urlsafe(24)}
    try:
        import ray.serve  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"Ray Serve is not whole: {error.name} is missing; pip install 'fulltilt[ray]'") from None


def start(
    folder: Path,
    settings: Settings,
    *,
    host: str,
    port: int,
    token: str | None,
    names: Sequence[str] = (),
    tls: Tls | None = None,
    n_replicas: tuple[int, int],
    n_threads: int | None = None,
) -> str:
    """Start replicas in the cluster that RAY_ADDRESS names, or in one of their own → the URL.

    Args:
        folder: Of the artefact, under the same path on every machine.
        n_replicas: Fewest and most; Ray chooses by how many requests wait.
    """
    import ray
    from ray import serve

    if ADDRESS in os.environ:
        ray.init(log_to_driver=False)
    else:  # not one that another program has started here
        ray.init("local", include_dashboard=False, log_to_driver=False, _node_ip_address=LOOPBACK[0])
    tls_files = {} if tls is None else {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key)}
    serve.start(http_options={"host": host, "port": port, "keep_alive_timeout_s": KEEP_ALIVE_S, **tls_files})
    application = build_application(
        folder, settings, token=token, hosts=list_hosts(host, names), n_replicas=n_replicas, n_threads=n_threads
    )
    serve.run(application, name=NAME, route_prefix="/")
    return format_url(next(iter(names), LOOPBACK[0] if host in WILDCARDS else host), port, tls)


def build_application(
    folder: Path,
    settings: Settings,
    *,
    token: str | None,
    hosts: set[str],
    n_replicas: tuple[int, int],
    n_threads: int | None,
):
    """Build the deployment; each replica opens the artefact and builds the application when it starts."""
    from ray import serve

    place = str(folder.resolve())

    def build():
        from fulltilt.infer.artefact import open_artefact
        from fulltilt.infer.serve.app import build_app
        from fulltilt.infer.serve.service import Service

        service = Service([open_artefact(Path(place), n_threads=n_threads)], settings, is_warmed_up=True)
        service.crew.wait_until_ready()
        return build_app(service, token=token, hosts=hosts)

    fewest, most = n_replicas
    deployment = serve.deployment(
        name=NAME,
        max_ongoing_requests=2 * settings.n_waiting,  # beyond its places a replica refuses by itself, and says when
        autoscaling_config={
            "min_replicas": fewest,
            "max_replicas": most,
            "target_ongoing_requests": max(1, int(WAITING_SHARE * settings.n_waiting)),
        },
        graceful_shutdown_timeout_s=GRACE_S,
        ray_actor_options={"num_cpus": n_threads or 1},
    )(serve.ingress(build)())
    return deployment.bind()


def stop() -> None:
    """End the replicas when they have answered what they took, and the cluster where it was started here."""
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()
