"""A served model under load: a signal, a flood, and clients that hang up, over real connections."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from urllib.parse import urlsplit

import pytest

from fulltilt.engine.interrupt import ECHO_S

N_CLIENTS = 12


@contextlib.contextmanager
def start(batch_s, n_waiting=256, *, what="serve_adder"):
    command = [sys.executable, "-m", f"tests.faults.{what}", str(batch_s), str(n_waiting)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process, urlsplit(process.stdout.readline().strip()).port
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Client(threading.Thread):
    """Asks again and again on a connection that it keeps, until the server is gone.

    Attributes:
        seen: Statuses; "lost": the connection ended after the server had read the request.
    """

    def __init__(self, port, number, n_requests=10**6):
        super().__init__()
        self.port, self.number, self.n_requests, self.seen = port, number, n_requests, Counter()
        self.start()

    def run(self):
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        for n in range(self.n_requests):
            try:
                if line.sock is None:
                    line.connect()
            except OSError:
                break  # nobody listens any more: nothing was accepted
            try:
                line.request("POST", "/v1/predict", json.dumps({"inputs": [[self.number, n]]}))
                answer = line.getresponse()
            except (OSError, http.client.HTTPException):
                self.seen["lost"] += 1
                break
            body = json.loads(answer.read())
            self.seen[answer.status] += 1
            assert answer.status != 200 or body["outputs"] == [[self.number + n]]
            if answer.status == 503:
                assert answer.headers["connection"] == "close"
                time.sleep(0.1)  # as it was told to
        line.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_loses_nothing_that_was_accepted(number):
    with start(0.01) as (process, port):
        clients = [Client(port, n) for n in range(N_CLIENTS)]
        while sum(client.seen[200] for client in clients) < 60:
            time.sleep(0.01)
        process.send_signal(number)
        for client in clients:
            client.join()
        assert process.wait(20) == 0
        seen = sum((client.seen for client in clients), Counter())
        assert seen["lost"] == 0, seen
        assert set(seen) == {200, 503}
        assert int(process.stdout.readline()) == seen[200], "what the model answered has arrived"


def is_ready(port) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as line:
        line.request("GET", "/readyz")
        return line.getresponse().status == 200


def test_a_second_signal_ends_it_at_once():
    with (
        start(30.0) as (process, port),
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as line,
    ):
        line.request("POST", "/v1/predict", '{"inputs": [[1]]}')
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        while is_ready(port):
            time.sleep(0.01)
        time.sleep(2 * ECHO_S)  # one that comes sooner after it has seen the first is the same once more
        assert process.poll() is None, "it answers what it has"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_a_flood_is_refused_in_part_and_everybody_hears_something():
    with start(0.02, n_waiting=4) as (process, port):
        clients = [Client(port, 100 + n, n_requests=20) for n in range(4 * N_CLIENTS)]
        for client in clients:
            client.join()
        seen = sum((client.seen for client in clients), Counter())
        assert set(seen) == {200, 429}
        assert sum(seen.values()) == 4 * N_CLIENTS * 20
        assert process.poll() is None


def test_clients_that_hang_up_cost_the_others_nothing():
    with start(0.05) as (process, port):
        body = b'{"inputs": [[1, 1], [2, 1], [3, 1], [4, 1], [5, 1]]}'
        head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        for sent in (head + body, head + body[:9], head[:30]):
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port)) as line:
                    line.sendall(sent)
        client = Client(port, 7, n_requests=3)
        client.join()
        assert client.seen == {200: 3}
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@contextlib.contextmanager
def write(port, n_words):
    """Ask for a text and yield its events, which come as they are written."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    line.request("POST", "/v1/generate", json.dumps({"tokens": [1], "max_new_tokens": n_words}))
    answer = line.getresponse()
    assert answer.status == 200
    yield (json.loads(row.removeprefix(b"data: ")) for row in answer if row.strip())
    answer.close()
    line.close()


def test_a_text_is_written_to_its_end_at_a_signal_and_no_further_where_its_client_went_away():
    with start(0.05, what="serve_writer") as (process, port):
        with write(port, 1000) as events:
            assert [next(events)["token"] for _ in range(3)] == [0, 1, 2]
        begin_s = time.monotonic()
        with write(port, 40) as events:
            first = next(events)
            assert time.monotonic() - begin_s < 10, "it did not wait for a thousand words"
            process.send_signal(signal.SIGTERM)
            *words, last = [first, *events]
        assert [word["token"] for word in words] == [*range(40)]
        assert (last["done"], last["n_tokens"]) == (True, 40)
        assert process.wait(20) == 0
        assert int(process.stdout.readline()) < 40 + 200
