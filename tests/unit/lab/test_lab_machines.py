"""Machines of a cluster: who may join, what is heard of them, and what Ray's words about an attempt mean."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import threading

import httpx2 as httpx
import pytest
from tests.fake_nvml import FakeNvml, build_status
from tests.lab_cases import OWNER, ask, build_points, lease

from fulltilt.errors import UsageError
from fulltilt.hardware import NvmlDevice
from fulltilt.hardware.nvml import NvmlProcess
from fulltilt.hardware.sampler import Sampler
from fulltilt.lab.executors import AwayError
from fulltilt.lab.executors.cluster import HEAD, MARK, RESOURCE, Head
from fulltilt.lab.executors.local import Slot
from fulltilt.lab.executors.ray import LOOK_S, PLACES_S, RayExecutor
from fulltilt.lab.executors.ray_node import RayNode, build_simulated_slots
from fulltilt.lab.operations import make_token
from fulltilt.lab.records import Attempt, Experiment
from fulltilt.lab.runner.order import RAY_JOB, VARIABLE, Machine, Order, take_order
from fulltilt.lab.scheduling.order import Room
from fulltilt.lab.server.app import build_app
from fulltilt.lab.serving import open_lab
from fulltilt.lab.versions import read_versions
from fulltilt.report.readings import build_entry

BUNDLE = {"address": "10.0.0.1:6379", "secret": "of the cluster"}


class Server:
    def __init__(self, lab):
        self.lab, self.rooms = lab, [Room(node="n1", free=[], n_devices=2)]
        self.app = build_app(lab, token=OWNER, read_rooms=lambda: self.rooms, invite=lambda: BUNDLE)

    def __call__(self, method: str, path: str, token: str = OWNER, **options) -> httpx.Response:
        return ask(self.app, method, path, headers={"authorization": f"Bearer {token}"}, **options)

    def join(self, name: str, token: str = OWNER, **changed) -> httpx.Response:
        said = {"name": name, "boot": "first", "versions": read_versions(), "devices": ["cuda:0"]} | changed
        return self("POST", "/api/join", token, json=said)


@pytest.fixture
def server(tmp_path):
    with open_lab(tmp_path, create=True) as lab:
        yield Server(lab)


def test_a_machine_joins_once_by_a_token_and_gets_what_it_needs(server):
    token = make_token(server.lab, role="join", label="for n2")
    answer = server.join("n2", token)
    assert answer.json().items() >= BUNDLE.items()
    assert server.join("n3", token).status_code == 401, "it works once"
    assert [node.name for node in server.lab.store.read_nodes()] == ["n2"]
    assert server("GET", "/api/experiments", answer.json()["token"]).status_code == 403, "a machine reads nothing"


def test_other_versions_are_refused_with_both_values(server):
    answer = server.join("n2", versions=read_versions() | {"fulltilt": "0.0.1"})
    assert answer.status_code == 422
    assert f"fulltilt 0.0.1 on n2 and {read_versions()['fulltilt']} on the server" in answer.json()["error"]
    assert server.lab.store.read_nodes() == []


def test_a_machine_that_is_refused_tries_again_with_the_same_token(server):
    token = make_token(server.lab, role="join", label="for n2")
    assert "join again" in server.join("n2", token, versions=read_versions() | {"fulltilt": "0.0.1"}).json()["error"]
    assert "give this one another --name" in server.join("n1", token).json()["error"]
    assert server.join("n2", token).status_code == 200
    said = server.join("n3", token)
    assert (said.status_code, "fulltilt lab token create" in said.text) == (401, True)


def test_of_two_machines_with_one_token_that_join_at_once_one_is_let_in(server):
    token = make_token(server.lab, role="join", label="for one")
    others = []
    server.app.state.invite = lambda: others.append(server.lab.store.use_up(token)) or BUNDLE
    answer = server.join("n2", token)
    assert (answer.status_code, others) == (401, [True])
    assert server.lab.store.read_nodes() == []
    assert "n2" not in server.lab.machines


def test_a_name_that_is_in_use_is_refused_and_its_own_machine_comes_back(server):
    assert "n1 is here already" in server.join("n1").json()["error"], "the cluster has it"
    first = server.join("n2")
    assert "n2 is here already" in server.join("n2").json()["error"], "it was heard just now"
    own = first.json()["token"]
    assert server.join("n3", own).status_code == 403, "with the token of another machine"
    again = server.join("n2", own)
    assert again.status_code == 200
    assert server("POST", "/api/telemetry", own, json={}).status_code == 401, "the token before is void"
    assert server("POST", "/api/telemetry", again.json()["token"], json={}).status_code == 200


def test_of_two_of_one_name_that_join_while_the_head_starts_one_is_refused(server):
    answers = []
    other = threading.Thread(target=lambda: answers.append(server.join("n2")))

    def invite():
        if other.ident is None:
            other.start()
            other.join(0.3)  # it is through by now, or waits for this one
        return BUNDLE

    server.app.state.invite = invite
    first = server.join("n2")
    other.join()
    assert (first.status_code, answers[0].status_code) == (200, 422)
    assert server("POST", "/api/telemetry", first.json()["token"], json={}).status_code == 200


def test_an_authority_that_is_no_certificate_is_told(tmp_path):
    (tmp_path / "cert.pem").write_text("no certificate")
    for name in ("cert.pem", "none.pem"):
        with pytest.raises(UsageError, match=f"{name} cannot be used .*; name the PEM file"):
            RayNode(url="https://x", name="n2", boot="b", folder=tmp_path, slots=[], authority=tmp_path / name)


def test_without_an_engine_a_machine_is_told_what_is_missing(server):
    server.app.state.invite = None
    assert "--engine ray" in server.join("n2").json()["error"]


def test_what_a_machine_says_is_on_its_page_and_in_the_json(server):
    own = server.join("n2").json()["token"]
    said = {"lines": ["0 <b>A100</b> · 93 %"], "sample": {"cpu_pct": 12.5}, "is_leaving": True}
    server("POST", "/api/telemetry", own, json=said)
    page = server("GET", "/machines").text
    assert "0 &lt;b&gt;A100&lt;/b&gt; · 93 %" in page
    assert "is leaving" in page
    (node,) = server("GET", "/api/nodes").json()["nodes"]
    assert (node["sample"], node["is_leaving"]) == ({"cpu_pct": 12.5}, True)
    assert node["age_s"] < 60
    heard = server.lab.machines["n2"]
    server.lab.machines["n2"] = dataclasses.replace(heard, at_s=heard.at_s - 1000)
    assert "not heard for" in server("GET", "/machines").text


def test_all_that_sensors_read_of_gpus_is_kept_and_what_is_nested_without_end_is_not(server, tmp_path):
    device = NvmlDevice(index=0, uuid="GPU-0", name="H200", memory_total_bytes=1 << 37, compute_capability=(9, 0))
    processes = (NvmlProcess(pid=7, memory_used_bytes=None),)
    status = build_status(utilization_pct=93.0, throttle_reasons=("sw_power_cap",), processes=processes)
    sample = build_entry(Sampler(FakeNvml([device], {0: status}), folder=tmp_path).read())
    own = server.join("n2").json()["token"]
    assert server("POST", "/api/telemetry", own, json={"sample": sample}).status_code == 200
    deep: list = []
    for _ in range(300):
        deep = [deep]
    assert server("POST", "/api/telemetry", own, json={"sample": {"cpu_pct": deep}}).status_code == 422
    (node,) = server("GET", "/api/nodes").json()["nodes"]
    assert node["sample"] == json.loads(json.dumps(sample))


def test_a_machine_says_which_of_its_devices_others_use(server, tmp_path):
    device = NvmlDevice(index=0, uuid="GPU-0", name="H200", memory_total_bytes=1 << 37, compute_capability=(9, 0))
    others = tuple(NvmlProcess(pid=pid, memory_used_bytes=None) for pid in range(1000))
    slots = [Slot(name="cuda:0", device="cuda:0", environ={}, index=0), *build_simulated_slots(1)]
    node = RayNode(url="http://server", name="n2", boot="first", folder=tmp_path, slots=slots)
    node._nvml, node._token = FakeNvml([device], {0: build_status(processes=others)}), server.join("n2").json()["token"]
    node._post = lambda path, token, said: server("POST", path, token, json=said)
    node._tell(is_leaving=False)
    assert server.lab.machines["n2"].busy == {"cuda:0": "used by process 0, 1, 2"}


def test_what_a_machine_that_was_killed_has_left_of_ray_ends_as_it_joins_again(server, tmp_path, monkeypatch):
    started, folder = [], tmp_path / "n2"
    folder.mkdir()

    def start_ray(words, *, mark, **given):
        started.append(subprocess.Popen(["sleep", "600"], env={MARK: mark}, start_new_session=True))
        return started[-1]

    monkeypatch.setattr("fulltilt.lab.executors.ray_node.start_ray", start_ray)
    try:
        for _ in range(2):  # the first one never leaves
            slots = build_simulated_slots(1)
            node = RayNode(url="http://server", name="n2", boot="first", folder=folder, slots=slots)
            node._post = lambda path, token, said, **given: server("POST", path, token, json=said)
            node.join(node.read_own_token() or OWNER)
        first, second = started
        assert first.wait(60) == -signal.SIGKILL
        assert second.poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_machine_that_started_again_has_lost_its_attempts_and_nobody_elses(server):
    server.lab.store.add("/grid.yaml", build_points(2), [])
    own = server.join("n2").json()["token"]
    for found, node in zip(server.lab.store.read_experiments(), ("n2", "n1"), strict=True):
        lease(server.lab.store, found, node=node, engine="ray")
    own = server.join("n2", own).json()["token"]
    assert server.lab.store.count_states() == {"leased": 2}, "it is the same start: what ran there may live"
    server.join("n2", own, boot="second")
    assert [each.state for each in server.lab.store.read_experiments()] == ["backoff", "leased"]


class Ray:
    """Answers as Ray's dashboard does."""

    def __init__(self, folder):
        head = Head(address="127.0.0.1:1", dashboard="http://127.0.0.1:2", token="t", mark="head1", started_s=100.0)
        (folder / HEAD).write_text(json.dumps(dataclasses.asdict(head)))
        self.jobs, self.sent, self.is_away = {}, [], False
        self.nodes = [{"state": "ALIVE", "resources_total": {f"{RESOURCE}n1:cuda:{n}": 1.0 for n in range(2)}}]
        self.executor = RayExecutor(folder, host="127.0.0.1", transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_away:
            raise httpx.ConnectError("away", request=request)
        assert request.headers["authorization"] == "Bearer t"
        if request.url.path == "/api/v0/nodes":
            return httpx.Response(200, json={"data": {"result": {"result": self.nodes}}})
        if request.method == "POST":
            body = json.loads(request.content)
            if body["submission_id"] in self.jobs:
                return httpx.Response(500, text="already exists")
            self.sent.append(body)
            self.jobs[body["submission_id"]] = self.tell("PENDING")
            return httpx.Response(200, json={})
        name = request.url.path.rpartition("/")[2]
        return httpx.Response(200, json=self.jobs[name]) if name in self.jobs else httpx.Response(404)

    @staticmethod
    def tell(status: str, node: str | None = None, code: int | None = None) -> dict:
        return {"status": status, "driver_node_id": node, "driver_exit_code": code}

    def look(self, job: dict | None, node: str = "n1", **given) -> str:
        experiment = build_experiment(node, **given)
        self.jobs = {} if job is None else {f"fulltilt-e1-1-{'f' * 16}": job}
        self.executor._seen.clear()
        return self.executor.poll([experiment])["e1"]


def build_experiment(node: str = "n1", **given) -> Experiment:
    same = {"sweep": "s", "state": "running", "priority": 0, "point": {}, "overrides": (), "attempt": 1}
    return Experiment(id="e1", node=node, engine="ray", fence="f" * 64, **same, **given)


def test_a_head_whose_mark_is_not_to_be_read_at_once_is_waited_for(tmp_path, monkeypatch):
    head = Head(address="127.0.0.1:1", dashboard="", token="t", mark="m", started_s=0.0)
    looks, process = iter([False, False]), subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(Head, "is_running", lambda head: next(looks, True))
    monkeypatch.setattr("fulltilt.lab.executors.ray.start_head", lambda *place, **given: (head, process))
    executor = RayExecutor(tmp_path, host="127.0.0.1")
    answers = iter([False, False])
    monkeypatch.setattr(executor, "_answers", lambda: next(answers, True))
    try:
        assert executor.invite() == {"address": "127.0.0.1:1", "secret": "t"}
    finally:
        process.kill()
        process.wait()
        executor.close()


@pytest.fixture
def ray(tmp_path, monkeypatch):
    monkeypatch.setattr(Head, "is_running", lambda head: True)
    ray = Ray(tmp_path)
    ray.executor.read_places()
    yield ray
    ray.executor.close()


def test_only_what_ray_has_seen_end_is_gone(ray):
    assert ray.look(ray.tell("RUNNING", "node")) == "alive"
    assert ray.look(ray.tell("SUCCEEDED", "node", 0)) == "gone"
    assert ray.look(ray.tell("FAILED", "node", 1)) == "gone"
    assert ray.look(ray.tell("STOPPED", "node")) == "gone"
    assert ray.look(ray.tell("FAILED", "node")) == "unknown", "its machine was lost, which ends no process there"
    assert ray.look(ray.tell("FAILED")) == "gone", "it never began"


def test_a_machine_of_ray_has_each_device_once_and_says_itself_what_is_busy(ray):
    ray.executor._read_s -= 2 * PLACES_S
    ray.nodes *= 2  # it joined twice, and Ray has not missed the first one yet
    (place,) = ray.executor.read_places()
    assert (place.node, place.devices, place.says_itself) == ("n1", ["cuda:0", "cuda:1"], True)


def test_what_waits_for_a_machine_that_has_left_is_gone(ray):
    assert ray.look(ray.tell("PENDING")) == "waiting"
    assert ray.look(ray.tell("PENDING"), node="n2") == "gone"
    ray.executor._read_s -= 2 * PLACES_S
    ray.nodes = "no answer that is understood"
    assert ray.look(ray.tell("PENDING"), node="n2") == "waiting", "the machines are not known now"


def test_a_new_head_knows_nothing_of_what_was_sent_to_the_one_before(ray):
    assert ray.look(None, ref="head1/x") == "gone"
    assert ray.look(None, ref="head0/x") == "unknown"
    assert ray.look(None, started_s=99.0) == "unknown", "a server was killed as it sent it"
    assert ray.look(None, started_s=101.0) == "gone"


def test_a_head_that_cannot_be_reached_says_nothing(ray):
    ray.is_away = True
    assert ray.look(ray.tell("SUCCEEDED", "node", 0)) == "unknown"
    ray.executor._read_s -= 2 * PLACES_S
    assert ray.executor.read_places() == ()
    with pytest.raises(AwayError):
        ray.executor.submit(Attempt(experiment="e1", number=1), ORDER, "n1", ["cuda:1"])


def test_an_attempt_is_not_asked_after_at_every_turn(ray):
    ray.jobs = {f"fulltilt-e1-1-{'f' * 16}": ray.tell("RUNNING", "node")}
    assert ray.executor.poll([build_experiment()]) == {"e1": "alive"}
    ray.jobs.clear()
    assert ray.executor.poll([build_experiment(ref="head1/x")]) == {"e1": "alive"}
    name, (at_s, seen) = ray.executor._seen.popitem()
    ray.executor._seen[name] = at_s - 2 * LOOK_S, seen
    assert ray.executor.poll([build_experiment(ref="head1/x")]) == {"e1": "gone"}


ORDER = Order(
    url="http://server",
    token="of the attempt",
    mark=f"e1/1/{'f' * 16}",
    node="n1",
    root="/lab/local",
    depot="/lab/depot",
)


def test_an_order_asks_for_the_very_devices_and_travels_where_ray_logs_nothing(ray):
    ray.executor.submit(Attempt(experiment="e1", number=1), ORDER, "n1", ["cuda:1"])
    ray.executor.submit(Attempt(experiment="e1", number=1), ORDER, "n1", ["cuda:1"])
    (body,) = ray.sent
    assert body["entrypoint_resources"] == {f"{RESOURCE}n1:cuda:1": 1}
    assert body["entrypoint_num_gpus"] == 1
    assert list(body["metadata"]) == [VARIABLE]
    machine = Machine(
        url="http://10.0.0.1:8000", root="/mine", authority=None, environs={"cuda:1": {"CUDA_VISIBLE_DEVICES": "GPU-1"}}
    )
    environment = machine.to_environment() | {RAY_JOB: json.dumps({"metadata": body["metadata"]})}
    order = take_order(environment)
    assert (order.url, order.root, order.depot) == ("http://10.0.0.1:8000", "/mine", None)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert RAY_JOB not in environment, "nothing that is started later sees the order"


def test_no_head_is_started_where_nobody_ever_joined(tmp_path):
    executor = RayExecutor(tmp_path, host="127.0.0.1")
    assert executor.read_places() == ()
    assert list(tmp_path.iterdir()) == []
    executor.close()
