"""``fulltilt infer serve`` as a user runs it: on this machine, and on Ray Serve with two replicas."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from tests.faults.leftovers import find_processes, mark_processes
from tests.integration.test_integration_infer import OWN

from fulltilt.cli import run_command
from fulltilt.infer.serve import ray as on_ray
from fulltilt.infer.serve.service import Settings

PATIENCE_S = 300


@contextlib.contextmanager
def start(folder, *words, until="is served at "):
    """Serve the user's own workload, and yield the process, the URL and what was printed."""
    (folder / "own.py").write_text(OWN)
    command = [sys.executable, "-m", "fulltilt", "infer", "serve", *map(str, words)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    }
    with (folder / "said.txt").open("w+") as said:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT)
        try:
            until_s = time.monotonic() + PATIENCE_S
            while until not in (text := (folder / "said.txt").read_text()):
                assert process.poll() is None, text
                assert time.monotonic() < until_s, text
                time.sleep(0.1)
            yield process, text.partition("is served at ")[2].partition(";")[0], folder / "said.txt"
        finally:
            process.kill()
            process.wait()


def await_nobody(mark):
    """Wait until no process with the mark is left. Ray's agents take a minute to see that their parent has gone."""
    until_s = time.monotonic() + PATIENCE_S
    while (left := find_processes(mark)) and time.monotonic() < until_s:
        time.sleep(0.5)
    assert left == []


def call(url, body=None, token=None):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.slow
def test_a_configuration_is_served_as_it_is_and_ends_at_a_signal(tmp_path):
    with start(tmp_path, "own:workload", "--port", "0", "--cache-expiry", "1h") as (process, url, said):
        status, samples = call(f"{url}/v1/samples?n=3")
        assert (status, len(samples["inputs"]), len(samples["inputs"][0])) == (200, 3, 8)
        status, answered = call(f"{url}/v1/predict", json.dumps(samples).encode())
        assert (status, len(answered["outputs"]), len(answered["outputs"][0])) == (200, 3, 2)
        assert call(f"{url}/v1/predict", json.dumps(samples).encode())[1]["cached"] == [True] * 3
        status, refused = call(f"{url}/v1/predict", b'{"inputs": [[1, 2]]}')
        assert (status, "expected x: float32 of shape [8]" in refused) == (422, True), refused
        manifest = call(f"{url}/v1/manifest")[1]
        assert (manifest["plan"]["engine"], manifest["joins"], manifest["policy"]["max_batch"]) == ("eager", "pad", 8)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    text = said.read_text()
    assert "own:workload is served in eager as it is; fulltilt infer search finds what is faster" in text
    assert f"try: curl -s {url}/v1/samples | curl -s {url}/v1/predict --json @-" in text
    assert text.splitlines()[-1] == "stopped; everything that was accepted was answered"
    with start(
        tmp_path, tmp_path / "runs/infer/own_workload/eager", "--port", "0", "--cache-dir", "runs/infer/own_workload"
    ) as served:
        assert call(f"{served[1]}/v1/predict", json.dumps(samples).encode())[1]["cached"] == [True] * 3, "from disk"


@pytest.mark.slow
def test_others_need_the_token_and_the_network_has_to_be_trusted_by_name(tmp_path):
    command = [sys.executable, "-m", "fulltilt", "infer", "serve", "own:workload", "--host", "0.0.0.0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "--insecure-lan" in done.stderr) == (2, True)
    with start(tmp_path, "own:workload", "--host", "0.0.0.0", "--insecure-lan", "--port", "0") as (_, url, said):
        assert call(f"{url}/v1/manifest")[0] == 401
        token = tmp_path / "runs" / "infer" / "own_workload" / "token"
        assert str(token.relative_to(tmp_path)) in said.read_text()
        assert token.read_text().strip() not in said.read_text()
        assert call(f"{url}/v1/manifest", token=token.read_text().strip())[0] == 200


@pytest.mark.slow
def test_ray_serve_starts_another_replica_where_requests_wait_and_both_answer_as_one_server(tmp_path, monkeypatch):
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed")
    mark = mark_processes(monkeypatch)
    words = ("own:workload", "--engine", "ray", "--replicas", "1", "--most-replicas", "2", "--queue", "4")
    words = (*words, "--cache-mib", "0", "--port", 18000 + os.getpid() % 1000)
    with start(tmp_path, *words) as (process, url, said), ThreadPoolExecutor() as pool:
        samples = json.dumps(call(f"{url}/v1/samples?n=1")[1]).encode()
        alone, seen = call(f"{url}/v1/predict", samples)[1]["outputs"], {call(f"{url}/healthz")[1]["process"]}
        until_s = time.monotonic() + PATIENCE_S

        def ask_on():
            while len(seen) == 1 and time.monotonic() < until_s:
                call(f"{url}/v1/predict", samples)

        asking = [pool.submit(ask_on) for _ in range(4)]
        while len(seen) == 1 and time.monotonic() < until_s:
            seen.add(call(f"{url}/healthz")[1]["process"])
            time.sleep(0.1)
        assert [each.result() for each in asking] == [None] * 4
        assert len(seen) == 2, said.read_text()
        niceness = {os.getpriority(os.PRIO_PROCESS, each) for each in (os.getpid(), *seen)}
        assert len(niceness) == 1, "other work does not come before the answers"
        answers = [call(f"{url}/v1/predict", samples) for _ in range(20)]
        assert {status for status, _ in answers} == {200}
        assert all(answer["outputs"] == alone for _, answer in answers)
        assert call(f"{url}/v1/predict", b'{"inputs": [[1, 2]]}')[0] == 422

        def ask_until_refused():
            """Return the status of each answer; the last is that of who found nobody."""
            seen = [200]
            while seen[-1] == 200:
                seen.append(call(f"{url}/v1/predict", samples)[0])
            return seen

        asking = [pool.submit(ask_until_refused) for _ in range(4)]
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, said.read_text()
        assert [each.result()[-1] for each in asking] == [404] * 4, "nobody's line was cut"
    await_nobody(mark)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "n_gpus"), [("cuda:0", 1), ("cpu", 0)])
def test_a_replica_asks_ray_for_the_gpu_that_its_artefact_needs(tmp_path, monkeypatch, device, n_gpus):
    """Ray hides all GPUs from a process that asked for none."""
    serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed")
    asked = []
    monkeypatch.setattr(serve, "start", lambda **options: None)
    monkeypatch.setattr(serve, "run", lambda application, **options: asked.append(application))
    monkeypatch.setattr(on_ray, "read_manifest", lambda folder: SimpleNamespace(device=device))
    listening = {"host": "127.0.0.1", "port": 1, "token": None, "names": (), "tls": None}
    on_ray.start(tmp_path, Settings(), **listening, n_replicas=(1, 1), n_threads=2)
    options = asked[0]._bound_deployment.ray_actor_options
    assert (options["num_gpus"], options["num_cpus"]) == (n_gpus, 2)


@pytest.mark.slow
def test_a_signal_while_ray_starts_ends_all_that_was_started(tmp_path, monkeypatch):
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed")
    mark = mark_processes(monkeypatch)
    words = ("own:workload", "--engine", "ray", "--port", 17000 + os.getpid() % 1000)
    with start(tmp_path, *words, until="Started Serve in namespace") as (process, _, said):
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) in (0, 143), said.read_text()
    await_nobody(mark)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_ray_swallows_as_it_starts_ends_the_server_once_it_has_started(tmp_path, monkeypatch, number):
    """Ray forks as it starts; what a handler raises in a fork's hooks is lost."""
    done, before = [], [(each, signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    def connect():
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)
        done.append("connected")

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setattr(on_ray, "connect", connect)
    monkeypatch.setattr(on_ray, "start", lambda *_, **options: done.append("started") or "http://127.0.0.1:1")
    monkeypatch.setattr(on_ray, "stop", lambda: done.append("stopped"))
    try:
        assert run_command(["infer", "serve", "own:workload", "--engine", "ray", "--port", "0"]) == 0
    finally:
        for each, handler in before:
            signal.signal(each, handler)
    assert done == ["connected", "started", "stopped"]
