"""The open loop over HTTP against a server on the loopback whose every answer is decided here."""

import asyncio
import json
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.standin_server import Events, StandIn

from fulltilt.cli import _infer_load
from fulltilt.cli._infer_load import _fetch_manifest, _read_promise, _read_stated
from fulltilt.errors import FulltiltError, UsageError
from fulltilt.infer.load.arrivals import plan_arrivals
from fulltilt.infer.load.http import HttpLoad, build_bodies, build_prompts, build_request, fetch
from fulltilt.infer.load.outcome import N_COLUMNS, LoadPlan, Responses
from fulltilt.infer.load.sender import MAX_TOLD, Sender
from fulltilt.infer.search.accept import load_server
from fulltilt.infer.search.policies import Goal

BODIES = build_bodies([1, 2, 3], 1)


def run_load(url, *, bodies=BODIES, token=None, **plan):
    plan = LoadPlan(url=url, **{"requests_per_s": 200.0, "seconds": 0.5, **plan})
    load = HttpLoad(plan, bodies, token=token)
    return load.run(), load


def test_every_request_of_the_schedule_is_sent_at_its_time_and_none_is_lost():
    with StandIn() as server:
        outcome, load = run_load(server.url, token="secret")
    responses = load.select()
    assert responses.due_s.tolist() == pytest.approx(
        [s for s in plan_arrivals("server", 100, 200.0, seed=0) if s <= 0.5]
    )
    assert len(server.bodies) == outcome.n_requests == len(responses) > 70
    assert (responses.generator_late_s >= 0).all()
    assert (responses.response_s > responses.generator_late_s).all()
    sent = [body["inputs"][0] for body in server.bodies]
    assert max(map(sent.count, (1, 2, 3))) - min(map(sent.count, (1, 2, 3))) <= 1, "in turn"
    assert server.heads[0].startswith("POST /v1/predict HTTP/1.1\r\n")
    assert "Authorization: Bearer secret\r\n" in server.heads[0]
    assert outcome.ended == "schedule"
    assert (outcome.verdict, outcome.unanswered, outcome.cached_share) == (None, {}, 0.0)


def test_a_stall_of_the_server_is_in_the_responses_of_all_who_came_meanwhile():
    with StandIn(pause_s=lambda number: 0.4 if number == 40 else 0.0) as server:
        outcome, _ = run_load(server.url, requests_per_s=100.0, seconds=1.0)
    assert outcome.response_ms["p90"].measured >= 100, "4 in 10 came during the stall, each waited for its rest"
    assert outcome.response_ms["max"].measured >= 400


def test_what_the_server_refuses_counts_as_late_and_is_named():
    refusals = {5: 429, 6: 503, 7: 504}
    with StandIn(answer=lambda number, body: (refusals.get(number, 200), {"cached": [True, False]})) as server:
        outcome, _ = run_load(server.url, limit_s=5.0, min_s=9.0, samples_per_request=2)
    assert outcome.unanswered == {"429": 1, "503": 1, "504": 1}
    assert outcome.late_share.measured == pytest.approx(3 / outcome.n_requests)
    assert outcome.response_ms["max"].measured == float("inf")
    assert outcome.cached_share == pytest.approx(0.5)


def test_a_request_that_is_never_answered_times_out_as_late():
    with StandIn(pause_s=lambda number: 0.0 if number < 10 else 60.0) as server:
        outcome, _ = run_load(server.url, limit_s=0.2, min_s=9.0, timeout_s=0.3)
    assert outcome.unanswered["timed out"] == outcome.n_requests - 10
    assert outcome.late_share.measured > 0.5


def test_a_server_that_dies_is_told_and_what_was_measured_is_kept():
    with StandIn(die_after=50) as server:
        outcome, _ = run_load(server.url, seconds=60.0, limit_s=1.0, min_s=99.0)
    assert outcome.ended == "the server was gone"
    assert outcome.n_requests - outcome.unanswered["connection broken"] == 50
    assert outcome.seconds < 30


def test_connections_that_the_server_closes_cost_no_request():
    with StandIn(closes=True) as server:
        outcome, _ = run_load(server.url)
    assert outcome.unanswered == {}
    assert server.n_connections >= outcome.n_requests == len(server.bodies)


def test_a_load_ends_as_soon_as_its_limit_is_proven():
    with StandIn() as server:
        outcome, _ = run_load(server.url, requests_per_s=1000.0, seconds=100.0, limit_s=60.0, min_s=0.1)
    assert (outcome.verdict, outcome.ended) == ("met", "decided")
    assert outcome.test.decision == "accepted"
    assert outcome.n_requests < 50_000


@pytest.mark.parametrize("scenario", ["single", "multi"])
def test_a_stream_has_one_request_open_at_a_time(scenario):
    with StandIn(pause_s=lambda number: 0.01) as server:
        outcome, load = run_load(server.url, requests_per_s=None, scenario=scenario, seconds=0.4)
    assert server.n_connections == 1
    assert outcome.n_requests <= 41
    assert outcome.response_ms["p50"].measured >= 10
    assert np.all(np.diff(load.select().due_s) >= 0.01)


def test_offline_as_many_are_open_as_connections_allow():
    with StandIn(pause_s=lambda number: 0.01) as server:
        outcome, _ = run_load(server.url, requests_per_s=None, scenario="offline", seconds=0.4)
    assert 32 <= server.n_connections <= 64
    assert outcome.samples_per_s > 0


def test_words_are_counted_as_they_come_and_a_text_that_ends_with_an_error_is_late():
    words = [{"token": 3, "text": '{"token": '}, {"token": 4}, {"token": 5}]

    def write(number, body):
        assert body["max_new_tokens"] == 3
        return 200, Events([*words[:2], {"error": "deadline"}] if number == 4 else [*words, {"done": True}], 0.05)

    prompts = build_prompts([list(range(16)), [list(range(8)), [1] * 8]], 3, seed=0)
    sent = [json.loads(prompt)["tokens"] for prompt in prompts]
    assert [words == list(range(len(words))) and 1 <= len(words) <= 8 for words in sent] == [True, True]
    plan = {"scenario": "single", "requests_per_s": None, "new_tokens": 3, "seconds": 1.5, "limit_s": 5.0, "min_s": 9.0}
    with StandIn(answer=write) as server:
        outcome, _ = run_load(server.url, bodies=prompts, **plan)
    assert server.heads[0].startswith("POST /v1/generate HTTP/1.1\r\n")
    assert server.n_connections == 1
    assert outcome.unanswered == {"ended with an error": 1}
    assert outcome.tokens_per_s == pytest.approx(3 * outcome.answered_per_s)
    first_ms, whole_ms = outcome.first_token_ms["p50"].measured, outcome.response_ms["p50"].measured
    assert 0 < first_ms <= whole_ms - 100, "three pauses of 50 ms lie behind the first word"
    with pytest.raises(UsageError, match="16 new words leave none for a prompt: texts have 16 here"):
        build_prompts([list(range(16))], 16, seed=0)


def test_those_who_waited_for_a_connection_share_the_ones_there_are():
    with StandIn(pause_s=lambda number: 0.6 if number == 5 else 0.0) as server:
        outcome, _ = run_load(server.url, requests_per_s=2000.0, seconds=0.8)
    assert outcome.unanswered == {}
    assert outcome.ended == "schedule"
    assert 100 < server.n_connections <= 400


def test_an_interrupted_load_keeps_what_was_measured_and_no_process():
    with StandIn() as server:
        load = HttpLoad(LoadPlan(url=server.url, requests_per_s=50.0, seconds=600.0), BODIES)

        def interrupt(now_s, n_answers):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            load.run(on_look=interrupt)
    assert load.build_outcome().n_requests > 0
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    assert not [pid for pid in children if "load.sender" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_a_load_that_is_interrupted_before_any_answer_is_an_interruption(monkeypatch):
    def interrupt(self, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(HttpLoad, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _infer_load._run_one(LoadPlan(url="http://here", requests_per_s=1.0), BODIES, None, pytest.fail)


def test_of_many_open_requests_the_oldest_are_told_and_nothing_behind_them_counts(capsys):
    async def tell():
        sender = Sender({"host": "here", "port": 1, "is_tls": False, "scenario": "server"})
        sender._open = {n: (n * 0.001 - 10, n * 0.001 - 10) for n in range(MAX_TOLD + 100)}
        sender.write()

    asyncio.run(tell())
    rows = np.frombuffer(bytes.fromhex(json.loads(capsys.readouterr().out)["open"])).reshape(-1, N_COLUMNS)
    assert len(rows) == MAX_TOLD
    answered = [[-9.0, -9.0, -8.9, 200, 0, 0, 0]]
    kept = Responses(np.concatenate([rows, answered]), limit_s=0.1)
    assert kept.count_unanswered() == {"no answer yet": MAX_TOLD - 1}, "they are late, whatever comes"
    assert len(kept) == MAX_TOLD - 1


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"url": "http://127.0.0.1:1", "requests_per_s": 1e9}, "one process sends at most 10,000 a second"),
        ({"url": "http://127.0.0.1:1", "requests_per_s": 0.0}, "has to be above 0"),
        ({"url": "http://127.0.0.1:1", "requests_per_s": 1e4, "seconds": 1e6}, "give fewer seconds"),
        ({"url": "nowhere:80/x", "requests_per_s": 1.0}, "is no URL of a server"),
        ({"url": "ftp://127.0.0.1/", "requests_per_s": 1.0}, "is no URL of a server"),
        ({"url": "127.0.0.1:8000", "requests_per_s": 1.0}, "is no URL of a server; give one such as http://"),
        ({"url": "http://127.0.0.1:99999", "requests_per_s": 1.0}, "is no URL of a server"),
        ({"url": "http://127.0.0.1:x", "requests_per_s": 1.0}, "is no URL of a server"),
        ({"url": "http://[::1", "requests_per_s": 1.0}, "is no URL of a server"),
        ({"url": "http://127.0.0.1/a b", "requests_per_s": 1.0}, "is no URL of a server"),
        ({"url": "http://127.0.0.1:1", "requests_per_s": 1e-9}, "0 requests are not 1 to 2,000,000"),
    ],
)
def test_a_load_that_cannot_be_is_refused_beforehand(plan, said):
    with pytest.raises(UsageError, match=said):
        HttpLoad(LoadPlan(**plan), BODIES)


def test_what_is_no_server_of_ours_is_told_apart():
    with StandIn(documents={"/v1/samples": b"<html>"}) as server:
        with pytest.raises(UsageError, match="something that is no JSON"):
            fetch(f"{server.url}/v1/samples")
        with pytest.raises(UsageError, match="/v1/manifest answers 404"):
            fetch(f"{server.url}/v1/manifest")
    with pytest.raises(UsageError, match="here/v1' is no URL of a server"):
        fetch("here/v1")
    with pytest.raises(UsageError, match=r"nobody answers at http://127\.0\.0\.1:\d+/v1/samples \(.*refused"):
        fetch(f"{server.url}/v1/samples")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "something that is no HTTP"),
        (b"HTTP/1.1 200 X\r\nContent-Length: 500\r\n\r\n{", "something that is no JSON"),
        (b"HTTP/1.1 200 X\r\n\r\n" + 100_000 * b"[", "something that is no JSON"),
        (b"HTTP/1.1 500 Oh\r\n\r\n<p>\n a\n</p>", r"answers 500 Oh \(<p> a </p>\)$"),
        (b"", "nobody answers"),
    ],
)
def test_whatever_speaks_at_an_address_is_told_in_a_line(data, said):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with listener.accept()[0] as line:
                line.recv(10_000)
                line.sendall(data)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UsageError, match=said) as caught:
            fetch(f"http://127.0.0.1:{listener.getsockname()[1]}/v1/samples")
        thread.join()
    assert "\n" not in str(caught.value)


def test_a_promise_that_is_none_of_ours_is_none():
    promise = {"requests_per_s": 3, "limit_s": 1, "quantile": 0.9, "samples_per_request": 4, "measured_s": 0.5}
    half, wrong = {"limit_s": 1}, promise | {"quantile": 5}
    answers = [*({"promise": each} for each in (promise, None, "x", half, wrong)), [], 5]
    with StandIn(documents={f"/{n}/v1/manifest": answer for n, answer in enumerate(answers)}) as server:
        found = [_read_promise(_fetch_manifest(f"{server.url}/{n}", None)) for n in range(len(answers))]
    assert found == [promise] + [None] * 6


def test_where_nothing_is_promised_the_load_is_that_of_the_served_configuration():
    stated = [{"requests_per_s": rate, "samples_per_request": n} for rate, n in ((40, 2), (40, None), (None, 2))]
    config = {"data": {"batch_size": 7}}
    found = [_read_stated({"config": {"config": config | {"targets": each}}}) for each in (*stated, {}, None)]
    loads = [each and (each["requests_per_s"], each["samples_per_request"]) for each in found]
    assert loads == [(40, 2), (40, 7), (None, 2), None, None], "as check has it"


def test_what_a_server_does_not_take_is_said_before_it_is_loaded():
    with StandIn(answer=lambda number, body: (413, {"error": "3 samples are more than may wait (2)"})) as server:
        with pytest.raises(UsageError, match=r"413 .*more than may wait"):
            load_server(server.url, Goal(samples_per_request=3), 100.0, seconds=1.0, limit_s=1.0)
        assert [len(body["inputs"]) for body in server.bodies] == [3], "it was asked once"


def test_a_load_of_nothing_says_so():
    with StandIn() as server, pytest.raises(FulltiltError, match=r"no request to .* ended"):
        HttpLoad(LoadPlan(url=server.url, requests_per_s=1.0), BODIES).build_outcome()


def test_a_load_asks_the_path_and_the_query_that_were_given():
    (text,) = build_request(LoadPlan(url="http://here/v1/x?model=a", requests_per_s=1.0), ["{}"], None)["requests"]
    assert text.startswith("POST /v1/x?model=a HTTP/1.1\r\n")
