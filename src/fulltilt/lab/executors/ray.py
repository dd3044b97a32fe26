"""Run attempts on a Ray cluster, as jobs of its REST interface, so that this process needs no Ray.

Ray knows machines and their free devices; it has no priorities and keeps nothing when its head dies. So it gets an
order only when devices are free, and what an attempt is, and how long it may live, is the lab's and the guard's. A
machine offers itself by a resource of its own (``fulltilt-NAME``), which also directs an order to it.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2 as httpx

from fulltilt.lab.executors import Place, RefusedError, Seen, name_mark
from fulltilt.lab.records import Attempt, Experiment
from fulltilt.lab.runner.order import Order

RESOURCE = "fulltilt-"
GUARD = ("python", "-m", "fulltilt.lab.runner.guard")
TIMEOUT_S = 10.0
SHARE = 0.001  # of the resource that names the machine
OVER = ("SUCCEEDED", "FAILED", "STOPPED")


class RayExecutor:
    """Sends attempts to the Ray cluster whose dashboard is at ``url``; ``token`` is the cluster's."""

    name = "ray"
    is_lasting = True

    def __init__(self, url: str, token: str):
        self._client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=TIMEOUT_S, trust_env=False
        )

    def read_places(self) -> Sequence[Place]:
        try:
            found = self._get("/nodes", view="summary")["data"]["summary"]
        except (httpx.HTTPError, KeyError, ValueError):
            return []
        return [place for node in found if (place := _read_place(node.get("raylet", {}))) is not None]

    def submit(self, attempt: Attempt, order: Order, node: str, devices: Sequence[str]) -> str:
        name = _name_job(order.mark)
        body = {
            "entrypoint": shlex.join(GUARD),
            "submission_id": name,
            "runtime_env": {"env_vars": order.to_environment()},
            "entrypoint_num_gpus": len(devices),
            "entrypoint_resources": {f"{RESOURCE}{node}": SHARE},
        }
        try:
            answer = self._client.post("/api/jobs/", json=body)
        except httpx.HTTPError as error:
            raise RefusedError(f"the Ray cluster does not answer: {error}") from error
        if answer.is_error and self._look(name) == "gone":
            raise RefusedError(f"the Ray cluster did not take it ({answer.status_code}): {answer.text.strip()[-300:]}")
        return name

    def poll(self, experiments: Sequence[Experiment]) -> Mapping[str, Seen]:
        return {experiment.id: self._look(_name_job(name_mark(experiment))) for experiment in experiments}

    def cancel(self, experiment: Experiment, *, is_urgent: bool) -> None:
        if is_urgent:  # else the next renewal tells the runner, which has more patience than Ray
            try:
                self._client.post(f"/api/jobs/{_name_job(name_mark(experiment))}/stop")
            except httpx.HTTPError:
                return

    def close(self) -> None:
        self._client.close()

    def _look(self, name: str) -> Seen:
        try:
            answer = self._client.get(f"/api/jobs/{name}")
            if answer.status_code == httpx.codes.NOT_FOUND:
                return "gone"
            return "gone" if answer.json()["status"] in OVER else "alive"
        except (httpx.HTTPError, KeyError, ValueError):
            return "unknown"

    def _get(self, path: str, **params: str) -> Any:
        return self._client.get(path, params=params).raise_for_status().json()


def _name_job(mark: str) -> str:
    return f"fulltilt-{mark.replace('/', '-')}"


def _read_place(raylet: Mapping[str, Any]) -> Place | None:
    if raylet.get("state") != "ALIVE":
        return None
    resources = raylet.get("resourcesTotal", {})
    name = next((key.removeprefix(RESOURCE) for key in resources if key.startswith(RESOURCE)), None)
    n_devices = int(resources.get("GPU", 0))
    return None if name is None else Place(node=name, devices=[f"cuda:{number}" for number in range(n_devices)])
