"""Run attempts on the machines of a Ray cluster, by its Jobs REST interface.

Ray knows machines and what is free on them. It has no priorities, and its head forgets all when it dies, while what it
started may live on. So it gets an order only when the devices are free; how long an attempt may live is the guard's,
and only what Ray itself has seen end is ``gone``.
"""

import dataclasses
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx

from fulltilt.errors import UsageError
from fulltilt.lab.executors import AwayError, Place, RefusedError, Seen, name_job, name_mark
from fulltilt.lab.executors.cluster import LOG, MARK, PYTHON, RESOURCE, read_end_of_log, read_head, start_head
from fulltilt.lab.records import Attempt, Experiment
from fulltilt.lab.runner.order import Order

# Ray gives every job one thread and its own secret; a training takes what the machine gives it, and no secret.
GUARD = f'exec env -u {MARK} -u RAY_AUTH_TOKEN_PATH -u OMP_NUM_THREADS "${PYTHON}" -m fulltilt.lab.runner.guard'
TIMEOUT_S = 10.0
START_S = 90.0
PLACES_S, LOOK_S = 1.0, 3.0  # between looks at the machines, and at an attempt


class RayExecutor:
    """Sends attempts to the Ray cluster of a lab. Its head runs here, and outlives this process.

    Args:
        folder: Of the lab. A head that an earlier server has left running is taken over.
        host: Where the server listens; the head does too.
    """

    name = "ray"
    is_lasting = True

    def __init__(self, folder: Path, *, host: str, transport: httpx.BaseTransport | None = None):
        self._folder, self._host = folder, host
        self._client = httpx.Client(timeout=TIMEOUT_S, transport=transport, trust_env=False)
        self._head, self._turn = read_head(folder), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._places: Sequence[Place] | None = None  # None: it is not known
        self._read_s = float("-inf")
        self._seen: dict[str, tuple[float, Seen]] = {}

    def invite(self) -> dict[str, str]:
        """Start the head if none runs → what another machine needs to join it.

        Raises:
            UsageError: it does not start.
        """
        with self._turn:
            if self._head is None or not self._head.is_running():
                self._start_head()
            head = self._head
        assert head is not None
        until_s = time.monotonic() + START_S
        while not self._answers():
            if time.monotonic() > until_s or not head.is_running():
                said = read_end_of_log(self._folder) or "it said nothing"
                raise UsageError(f"Ray's head did not start ({said}); see {self._folder / LOG}")
            time.sleep(0.2)
        return {"address": head.address, "secret": head.token}

    def end_head(self) -> None:
        """End the head, and with it the cluster; the next machine that joins starts another."""
        if self._head is not None:
            self._head.end()
        if self._process is not None:
            self._process.wait()

    def read_places(self) -> Sequence[Place]:
        if self._head is not None and time.monotonic() - self._read_s > PLACES_S:
            try:
                nodes = self._get("/api/v0/nodes", limit=10_000)["data"]["result"]["result"]
                self._places = _read_places(nodes)
            except (httpx.HTTPError, KeyError, TypeError, ValueError):
                self._places = None
            self._read_s = time.monotonic()
        return self._places or ()

    def submit(self, attempt: Attempt, order: Order, node: str, devices: Sequence[str]) -> str:
        assert self._head is not None
        name, depot = name_job(order.mark), order.depot if "://" in (order.depot or "") else None
        order = dataclasses.replace(order, depot=depot, devices=tuple(devices))
        body = {
            "entrypoint": GUARD,
            "submission_id": name,
            "metadata": order.to_environment(),
            "entrypoint_num_gpus": sum(not device.startswith("cpu") for device in devices),
            "entrypoint_resources": {f"{RESOURCE}{node}:{device}": 1 for device in devices},
        }
        self._seen.pop(name, None)
        try:
            answer = self._call("POST", "/api/jobs/", json=body)
            if answer.is_error:  # perhaps since it is there already
                self._get(f"/api/jobs/{name}")
        except httpx.TransportError as error:
            raise AwayError(f"the Ray cluster does not answer: {error}") from error
        except httpx.HTTPStatusError as error:
            raise RefusedError(f"the Ray cluster did not take it: {error}") from error
        return f"{self._head.mark}/{name}"

    def poll(self, experiments: Sequence[Experiment]) -> Mapping[str, Seen]:
        self.read_places()
        places = None if self._places is None else {place.node for place in self._places}
        names = {each.id: name_job(name_mark(each)) for each in experiments}
        self._seen = {name: self._seen.get(name, (float("-inf"), "unknown")) for name in names.values()}
        for experiment in experiments:
            name, now_s = names[experiment.id], time.monotonic()
            if now_s - self._seen[name][0] > LOOK_S:
                try:
                    self._seen[name] = now_s, self._look(experiment, name, places)
                except (httpx.HTTPError, KeyError, TypeError, ValueError):  # nobody waits for one after the other
                    return dict.fromkeys(names, "unknown")
        return {id: self._seen[name][1] for id, name in names.items()}

    def cancel(self, experiment: Experiment, *, is_urgent: bool) -> None:
        if is_urgent:  # else the next renewal tells the runner, which is more patient than Ray
            try:
                self._call("POST", f"/api/jobs/{name_job(name_mark(experiment))}/stop")
            except httpx.HTTPError:
                return

    def close(self) -> None:
        self._client.close()

    def _look(self, experiment: Experiment, name: str, places: set[str] | None) -> Seen:
        answer = self._call("GET", f"/api/jobs/{name}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return "gone" if self._was_sent_here(experiment) else "unknown"
        job = answer.raise_for_status().json()
        status, has_begun = job["status"], job["driver_node_id"] is not None
        if status in ("SUCCEEDED", "STOPPED") or job["driver_exit_code"] is not None:
            return "gone"
        if status == "FAILED":  # Ray has lost sight of it; it may live on where the machine cannot be reached
            return "unknown" if has_begun else "gone"
        if status == "PENDING":  # where its machine is gone and comes back, the order is void
            return "waiting" if places is None or experiment.node in places else "gone"
        return "alive"

    def _was_sent_here(self, experiment: Experiment) -> bool:
        """Return whether no earlier head can have got the order. One that died has left no word of its jobs."""
        assert self._head is not None
        if experiment.ref is not None:
            return experiment.ref.startswith(f"{self._head.mark}/")
        return experiment.started_s is None or experiment.started_s > self._head.started_s

    def _answers(self) -> bool:
        try:
            return self._call("GET", "/api/version").is_success
        except httpx.HTTPError:
            return False

    def _start_head(self) -> None:
        old = self._process
        self._head, self._process = start_head(self._folder, host=self._host, now_s=time.time())
        while self._process.poll() is None and not self._head.is_running():
            time.sleep(0.01)  # the mark of what was just started is not to be read at once
        if old is not None:
            old.wait()

    def _get(self, path: str, **params: Any) -> Any:
        return self._call("GET", path, params=params).raise_for_status().json()

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        assert self._head is not None
        headers = {"Authorization": f"Bearer {self._head.token}"}
        return self._client.request(method, f"{self._head.dashboard}{path}", headers=headers, **options)


def _read_places(nodes: Sequence[Mapping[str, Any]]) -> list[Place]:
    found: dict[str, list[str]] = {}
    for name in sorted({name for node in nodes if node["state"] == "ALIVE" for name in node["resources_total"]}):
        if name.startswith(RESOURCE):
            machine, _, device = name.removeprefix(RESOURCE).partition(":")
            found.setdefault(machine, []).append(device)
    return [Place(node=machine, devices=devices, says_itself=True) for machine, devices in found.items()]
