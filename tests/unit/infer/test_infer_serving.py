"""What a server keeps and bounds of its requests, what it leaves out of collections of garbage, and how it ends."""

import asyncio
import contextlib
import gc
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.infer.fake_artefact import FakeArtefact
from tests.unit.infer.test_infer_service import Server, post, wait_for

from fulltilt.infer.serve import app, serving
from fulltilt.infer.serve.figures import MOST_RECENT, Figures
from fulltilt.infer.serve.page import render_page
from fulltilt.infer.serve.service import Service, Settings

TOLD = {"host": "127.0.0.1", "port": 0, "token": None, "on_start": lambda url: None}


@pytest.fixture
def service():
    with contextlib.closing(Service([FakeArtefact()], Settings())) as service:
        yield service
    gc.unfreeze()


def test_the_last_requests_are_kept_as_numbers_and_not_as_objects_that_are_searched_for_garbage():
    figures, kept = Figures(), MOST_RECENT + 10
    for status in (200, 429):
        figures.note_request(status, 0.001)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(kept - 2):
        figures.note_request(200, 0.002)
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    requests, _ = figures.list_requests()
    assert len(requests) == MOST_RECENT
    assert np.unique(requests[:, 1:], axis=0).tolist() == [[0.002, 200]], "the oldest are gone"


def test_the_page_tells_the_rate_of_the_seconds_that_it_knows(service, monkeypatch):
    clock = [time.monotonic() - 15]
    service.figures.began_s -= 60
    monkeypatch.setattr("fulltilt.infer.serve.figures.time", SimpleNamespace(monotonic=lambda: clock[0]))
    for _ in range(MOST_RECENT):
        clock[0] += 15 / MOST_RECENT
        service.figures.note_request(200, 0.002)
    assert "3,333 requests/s in the last 15 s" in render_page(service)


def test_what_libraries_have_loaded_is_not_searched_for_garbage_while_requests_wait(service, monkeypatch):
    """The first collection of it took 0.3 s, in which the first requests stood still."""
    frozen = []
    monkeypatch.setattr(serving.DrainingServer, "run", lambda self, sockets: frozen.append(gc.get_freeze_count()))
    serving.serve(service, **TOLD)
    assert frozen[0] > 10_000


def test_requests_that_the_drain_was_too_short_for_are_counted(service, monkeypatch):
    monkeypatch.setattr(serving, "MOST_DRAIN_S", 0.0)

    def run(self, sockets):
        self.handle_exit(signal.SIGTERM, None)
        assert self.config.timeout_graceful_shutdown == 1, "the drain has had its time by then"
        service.n_open = 3
        assert asyncio.run(self.on_tick(1))

    monkeypatch.setattr(serving.DrainingServer, "run", run)
    assert serving.serve(service, **TOLD) == 3


def test_bodies_that_are_held_are_bounded_together(monkeypatch):
    monkeypatch.setattr(app, "MOST_HELD_BYTES", 50)
    server, spaces = Server(), " " * 30

    async def converse(client):
        server.model.gate.clear()
        held = asyncio.create_task(post(client, '{"inputs": [[1]]}' + spaces))
        await wait_for(server.model.has_begun.is_set)
        refused = await post(client, '{"inputs": [[2]]}' + spaces)
        server.model.gate.set()
        return refused, await held, await post(client, '{"inputs": [[2]]}' + spaces)

    refused, held, later = server.run(converse)
    assert [answer.status_code for answer in (refused, held, later)] == [429, 200, 200]
    assert int(refused.headers["retry-after"]) >= 1


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(app, "MOST_BODY_S", 0.05)
    server = Server()

    async def converse(client):
        async def send_slowly():
            yield b'{"inputs": '
            await asyncio.sleep(5)
            yield b"[[1]]}"

        refused = await client.post("/v1/predict", content=send_slowly())
        return refused, await post(client, [[1]]), server.service.n_open

    refused, answered, n_open = server.run(converse)
    assert (refused.status_code, answered.status_code, n_open) == (408, 200, 0)
    assert "over 0.05 s" in refused.json()["error"]


def test_a_body_of_which_nothing_comes_does_not_hold_up_a_server_that_drains(monkeypatch):
    monkeypatch.setattr(app, "SILENCE_S", 0.05)
    server = Server()

    async def converse(client):
        async def stop_halfway():
            yield b'{"inputs": '
            server.service.is_draining = True
            await asyncio.sleep(5)

        return await client.post("/v1/predict", content=stop_halfway()), server.service.n_open

    refused, n_open = server.run(converse)
    assert (refused.status_code, refused.headers["retry-after"], n_open) == (503, "1", 0)


def test_a_failure_that_nobody_expected_is_noted_as_one(monkeypatch):
    async def fail(*_, **__):
        raise OSError("planted")

    server = Server()
    monkeypatch.setattr(server.service, "answer", fail)
    with pytest.raises(OSError, match="planted"):
        server.ask([[1]])
    ((_, _, status),), _ = server.service.figures.list_requests()
    assert (status, server.service.n_open) == (500, 0)
