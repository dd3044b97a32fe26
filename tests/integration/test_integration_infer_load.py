"""``fulltilt infer load`` as a user runs it, against a server on the loopback."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from tests.standin_server import Events, StandIn

LOAD = [sys.executable, "-m", "fulltilt", "infer", "load"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "FULLTILT_INFER_TOKEN": "of the environment"}
PATIENCE_S = 120
EASY = ["--requests-per-s", "1000", "--p99-ms", "60000", "--seconds", "2"]


def run_load(*words, expect=0, cwd=None):
    done = subprocess.run([*LOAD, *map(str, words)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def test_the_answer_is_the_first_line_and_json_holds_it_all(tmp_path):
    with StandIn() as server:
        done = run_load(server.url, *EASY, "--json", "load.json", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("The limit is met: p99 is ")
    assert "under 1,000 requests/s (0 % late)" in lines[0]
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert any("█" in line for line in lines), "the distribution"
    document = json.loads((tmp_path / "load.json").read_text())
    assert list(document)[:3] == ["version", "verdict", "why"]
    assert (document["verdict"], document["unanswered"]) == ("met", {})
    assert (document["plan"]["limit_s"], document["plan"]["timeout_s"]) == (60, 120)
    low, high = document["response_ms"]["p50"]["ci95"]
    assert low <= document["response_ms"]["p50"]["measured"] <= high
    assert sum(n for *_, n in document["histogram"]) == document["n_requests"]
    assert document["test"]["decision"] == "accepted"
    assert {str(body["inputs"]) for body in server.bodies} == {"[[0.5, 1.5]]", "[[2.5, 3.5]]"}, "the server's own"
    assert "Authorization: Bearer of the environment" in server.heads[0]


@pytest.mark.slow
def test_a_limit_out_of_reach_is_missed_at_once_and_refusals_are_told():
    with StandIn(answer=lambda number, body: (429, {}) if number % 2 else (200, {})) as server:
        words = [server.url, "--requests-per-s", "200", "--p99-ms", "60000", "--seconds", "60", "--verbose"]
        done = run_load(*words, expect=3)
    assert done.stdout.startswith(
        "The limit is missed: p99 is without an answer, beyond 60,000 ms, under 200 requests/s ("
    )
    assert "no proper answer, counted as late: 429: " in done.stdout
    assert "refused after" in done.stdout


def test_rate_limit_and_size_are_those_that_the_artefact_promises_unless_they_are_given():
    promise = {"requests_per_s": 321.0, "limit_s": 30.0, "quantile": 0.95, "samples_per_request": 2}
    with StandIn(documents={"/v1/manifest": {"promise": promise | {"measured_s": 0.0125}}}) as server:
        done = run_load(server.url, "--seconds", "1", "--json", "-")
        plan = json.loads(done.stdout)["plan"]
        assert (promise | {"promised_s": 0.0125}).items() <= plan.items()
        said = " ".join(done.stderr.split())
        assert "(12.5 ms when it was accepted), within 30,000 ms, under 321 requests/s" in said
        for rate, promised_s in ((321, 0.0125), (300, None)):
            limit = ("--requests-per-s", rate, "--limit-ms", "30000", "--percentile", "95")
            plan = json.loads(run_load(server.url, "--seconds", "1", *limit, "--json", "-").stdout)["plan"]
            assert (plan["samples_per_request"], plan["promised_s"]) == (2, promised_s)
    config = {"targets": {"requests_per_s": 50, "samples_per_request": 2}, "data": {"batch_size": 1}}
    with StandIn(documents={"/v1/manifest": {"promise": None, "config": {"config": config}}}) as server:
        plan = json.loads(run_load(server.url, "--seconds", "1", "--json", "-").stdout)["plan"]
        assert (plan["requests_per_s"], plan["samples_per_request"], plan["limit_s"]) == (50, 2, None)
    with StandIn(documents={"/v1/manifest": {"promise": None}}) as server:
        assert "--requests-per-s 20" in run_load(server.url, expect=2).stderr


def test_a_model_that_writes_is_asked_for_text_and_its_first_words_are_told():
    events = Events([{"token": 1}, {"token": 2}, {"done": True}], 0.01)
    promise = {"requests_per_s": 321.0, "limit_s": 1e-6, "quantile": 0.95, "samples_per_request": 1, "measured_s": 1e-7}
    documents = {
        "/v1/manifest": {"writes_text": True, "config": {"config": {"targets": {"new_tokens": 2}}}, "promise": promise},
        "/v1/samples": {"inputs": [list(range(12))] * 3},
    }
    with StandIn(documents=documents, answer=lambda number, body: (200, events)) as server:
        words = [server.url, "--requests-per-s", "20", "--seconds", "1", "--json", "-"]
        done = run_load(*words)
        assert "new words leave none for a prompt" in run_load(*words, "--new-tokens", "12", expect=2).stderr
    document = json.loads(done.stdout)
    assert {body["max_new_tokens"] for body in server.bodies} == {2}
    assert (document["plan"]["new_tokens"], document["unanswered"]) == (2, {})
    assert document["plan"]["limit_s"] is None, "what was promised of samples is not of texts"
    assert document["first_token_ms"]["p50"]["measured"] < document["response_ms"]["p50"]["measured"]
    assert document["tokens_per_s"] == pytest.approx(2 * document["answered_per_s"])
    assert "· first word: p50 " in done.stderr
    with StandIn(documents=documents | {"/v1/samples": {"inputs": [1.5]}}) as server:
        assert "but its samples are none" in run_load(server.url, *words[1:], expect=2).stderr
    with StandIn() as server:
        assert "is of a model that writes text" in run_load(server.url, *EASY, "--new-tokens", "3", expect=2).stderr


def test_another_server_is_loaded_at_its_path_with_samples_of_a_file(tmp_path):
    (tmp_path / "samples.json").write_text("[[1], [2], [3]]")
    (tmp_path / "token").write_text("of a file\n")
    with StandIn() as server:
        words = ["--inputs", "samples.json", "--scenario", "multi", "--seconds", "0.3", "--token-file", "token"]
        done = run_load(f"{server.url}/mine", *words, cwd=tmp_path)
    assert done.stdout.startswith("p99 is ")
    assert server.heads[0].startswith("POST /mine ")
    assert "Bearer of a file" in server.heads[0]
    assert server.bodies[0]["inputs"] == [[1], [2], [3], [1], [2], [3], [1], [2]], "one at a time, so in turn"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--requests-per-s", "1e9"], "sends at most 10,000 a second"),
        (["--requests-per-s", "0"], "--requests-per-s 0.0 has to be above 0"),
        (["--requests-per-s", "10", "--p99-ms", "-1"], "--p99-ms -1.0 has to be above 0"),
        (["--requests-per-s", "10", "--percentile", "100"], "has to be between 0 and 100"),
        (["--requests-per-s", "10", "--seed", "-1"], "--seed -1 must be 0 or more"),
        (["--requests-per-s", "10", "--samples-per-request", "1" + 400 * "0"], "above 0 and below 10,001"),
        (["--requests-per-s", "10", "--p99-ms", "5", "--limit-ms", "7"], "--p99-ms is a limit by itself"),
        (["--requests-per-s", "10", "--p99-ms", "5", "--percentile", "50"], "--percentile with --limit-ms"),
        (["--scenario", "single", "--requests-per-s", "10"], "leave --requests-per-s out"),
        (["--scenario", "offline", "--p99-ms", "10"], "offline has no response times"),
        (["--inputs", "missing.json", "--requests-per-s", "1"], "--inputs missing.json holds no JSON"),
        (["--token-file", "missing"], "--token-file missing cannot be read"),
    ],
)
def test_wrong_words_are_refused(words, said):
    with StandIn() as server:
        assert said in run_load(server.url, *words, expect=2).stderr
    assert server.bodies == []


def test_what_is_no_server_is_refused_with_the_remedy():
    with StandIn(documents={"/v1/samples": b"no JSON"}) as server:
        pass
    words = ["--requests-per-s", "5"]
    said = run_load(server.url, *words, expect=2).stderr
    assert "nobody answers at http://127.0.0.1:" in said
    assert "fulltilt infer serve" in said
    with StandIn(documents={"/v1/samples": b"no JSON"}) as server:
        assert "something that is no JSON" in run_load(server.url, *words, expect=2).stderr
    assert "nobody answers" in run_load(server.url, expect=2).stderr, "and not that it promises no rate"
    with StandIn(documents={"/v1/samples": {"inputs": []}}) as server:
        assert "holds no samples" in run_load(server.url, *words, expect=2).stderr


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((422, {"detail": "ids is ragged"}), '/v1/predict answers 422 X ({"detail": "ids is ragged"})'),
        ((200, b"<html>"), "/v1/predict answers with something that is no JSON"),
    ],
)
def test_what_can_never_be_answered_is_told_before_the_load(answer, said):
    with StandIn(answer=lambda number, body: answer) as server:
        assert said in run_load(server.url, "--requests-per-s", "5", expect=2).stderr
    assert len(server.bodies) == 1


def interrupt_load(server, *words, after, cwd=None):
    """Send Ctrl-C to a load of ten minutes after some requests → exit code, what it told, what it said."""
    command = [*LOAD, server.url, "--requests-per-s", "100", "--seconds", "600", *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=cwd, env=ENVIRONMENT, **streams)
    try:
        while len(server.bodies) < after:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        told, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, told, said


def test_what_was_measured_is_told_when_the_load_is_interrupted(tmp_path):
    with StandIn() as server:
        code, told, said = interrupt_load(server, "--json", "load.json", after=50, cwd=tmp_path)
    assert code == 130
    assert "; interrupted after" in " ".join(told.split("response")[0].split())
    assert said.splitlines()[-1] == "fulltilt infer: interrupted: what was measured until then is above"
    assert json.loads((tmp_path / "load.json").read_text())["n_requests"] >= 20


def test_a_load_that_is_interrupted_before_any_answer_says_that_it_was_interrupted():
    with StandIn(pause_s=lambda number: 0 if number == 0 else 60) as server:  # it answers the probe
        code, _, said = interrupt_load(server, after=3)
    assert (code, said) == (130, "fulltilt infer: interrupted\n")
