"""The state machine: what may follow what, and that nothing ends twice, whatever is tried in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulltilt.lab.records import Attempt, Point
from fulltilt.lab.states import ARROWS, OVER, OWNED, STATES
from fulltilt.lab.store import StaleAttemptError, Store, open_store


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    return open_store(tmp_path_factory.mktemp("lab"), create=True)


def add_experiment(store: Store, source) -> str:
    """One more row, of a file that has none yet."""
    known = {found.id for found in store.read_experiments()}
    store.add(source, [Point(values={}, config={}, digest=f"digest {len(known)}")], [])
    (id,) = {found.id for found in store.read_experiments()} - known
    return id


def take(store: Store, arrow: str, attempt: Attempt) -> None:
    if arrow == "lease":
        (found,) = store.read_experiments(id=attempt.experiment)
        if found.attempt != attempt.number:
            raise StaleAttemptError
        store.lease(found, node="here", devices=["cpu:0"], n_threads=1)
    else:
        store.advance(arrow, attempt)


def test_the_table_is_whole():
    assert {arrow.target for arrow in ARROWS.values()} == set(STATES)
    assert all(set(arrow.sources) <= set(STATES) for arrow in ARROWS.values())
    assert "succeeded" not in {source for arrow in ARROWS.values() for source in arrow.sources}
    assert {source for arrow in ARROWS.values() for source in arrow.sources} >= set(OWNED)


def test_every_arrow_starts_where_the_table_says_and_nowhere_else(store, tmp_path):
    ways = {"queued": [], "leased": ["lease"], "running": ["lease", "start"], "cancelled": ["drop"]}
    ways |= {"finalizing": [*ways["running"], "finish"], "cancelling": [*ways["running"], "cancel"]}
    ways |= {"succeeded": [*ways["finalizing"], "commit"], "failed": [*ways["running"], "fail"]}
    assert set(ways) == set(STATES)
    for state, way in ways.items():
        for name, arrow in ARROWS.items():
            id = add_experiment(store, tmp_path / "grid.yaml")
            for step in way:
                take(store, step, store.read_experiments(id=id)[0].newest)
            (before,) = store.read_experiments(id=id)
            assert before.state == state
            if state in arrow.sources:
                take(store, name, before.newest)
                assert store.read_experiments(id=id)[0].state == arrow.target
            else:
                with pytest.raises(StaleAttemptError):
                    take(store, name, before.newest)
                assert store.read_experiments(id=id) == (before,)


@settings(max_examples=25)
@given(tries=st.lists(st.tuples(st.sampled_from(sorted(ARROWS)), st.integers(0, 3)), max_size=25))
def test_whatever_is_tried_one_result_is_accepted_at_most(store, tmp_path_factory, tries):
    id = add_experiment(store, tmp_path_factory.getbasetemp() / "grid.yaml")
    first = max(event.seq for event in store.read_events())
    n_accepted, state, number = 0, "queued", 0
    for name, attempt in tries:
        is_legal = state in ARROWS[name].sources and attempt == number
        try:
            take(store, name, Attempt(experiment=id, number=attempt))
        except StaleAttemptError:
            assert not is_legal
        else:
            assert is_legal
            n_accepted += name == "commit"
            state, number = ARROWS[name].target, number + (name == "lease")
        (found,) = store.read_experiments(id=id)
        assert (found.state, found.attempt) == (state, number)
        assert n_accepted == (state == "succeeded")
    events = store.read_events(after=first)
    for before, event in zip(["queued", *(event.state for event in events)], events, strict=False):
        assert before in ARROWS[event.arrow].sources
    assert sum(event.state in OVER for event in events) >= (state in OVER)
