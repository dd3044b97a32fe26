"""A server of trials that searches in a test's own process share: each would load torch for its own."""

import copy

import pytest

from fulltilt.tuner.trials.client import Zygote


@pytest.fixture(scope="module")  # not longer: memory is measured differently in a process with children
def server_of_trials(tmp_path_factory):
    with Zygote(tmp_path_factory.mktemp("trials") / "zygote.log") as zygote:
        zygote.start()
        yield zygote


@pytest.fixture
def lent_server(server_of_trials, monkeypatch):
    """A search takes the server for its own, and it goes on when the search ends it."""

    def lend(log_path):
        lent = copy.copy(server_of_trials)
        lent.close = lambda: None
        return lent

    monkeypatch.setattr("fulltilt.tuner.trials.target.Zygote", lend)
