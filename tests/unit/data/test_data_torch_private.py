"""The private parts of torch's loader that ``worker_signals`` relies on: all there, in the torch that is installed."""

from __future__ import annotations

import pytest
from torch.utils.data._utils import signal_handling

from fulltilt.data import build_loader
from fulltilt.data.loading.worker_signals import disarm, end_workers, list_workers


@pytest.fixture
def iterator():
    loader = build_loader(range(8), batch_size=2, shuffle=False, drop_last=False, options={"num_workers": 2})
    iterator = iter(loader)
    yield iterator
    end_workers(iterator)


def test_every_private_part_is_there(iterator):
    assert callable(signal_handling._remove_worker_pids)
    parts = ("_workers", "_worker_pids_set", "_workers_status", "_index_queues", "_task_info", "_rcvd_idx")
    assert [name for name in (*parts, "_try_get_data", "_shutdown_workers") if not hasattr(iterator, name)] == []
    event = iterator._workers_done_event._event
    assert event._cond.acquire(True, 1)
    event._cond.release()
    assert event._flag.acquire(False) is False, "nobody has set it"
    assert all(callable(worker._popen.terminate) for worker in iterator._workers)
    assert all(queue._thread.is_alive() for queue in iterator._index_queues)
    assert iterator._rcvd_idx in iterator._task_info
    assert iterator._worker_pids_set


def test_workers_end_in_the_middle_of_an_epoch(iterator):
    next(iterator)
    workers = list_workers(iterator)
    assert len(workers) == 2
    end_workers(iterator)
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_a_disarmed_iterators_workers_may_die_without_a_word_from_torch(iterator):
    disarm(iterator)
    for worker in list_workers(iterator):
        worker.kill()
        worker.join(60)
    with pytest.raises(ValueError, match="Cannot find"):
        signal_handling._remove_worker_pids(id(iterator))
