"""Closing lines of every run: which contract suites met the real thing, and which could not and why."""

import fcntl
import os
import signal
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says something of the machine and nothing of the code.
settings.register_profile("fulltilt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fulltilt")

# A shell's background job is started with Ctrl-C ignored, and what it starts inherits that: the tests of it must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What the shell or a CI system says of its terminal, its trackers and its ranks is not what the tests are about.
FOREIGN = (
    *("TERM", "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_", "PYTHONWARNINGS", "XDG_CACHE_HOME"),
    *("WANDB_", "MLFLOW_", "NETRC", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_"),
)
for name in tuple(os.environ):
    if name in FOREIGN or name.startswith(tuple(prefix for prefix in FOREIGN if prefix.endswith("_"))):
        del os.environ[name]


def pytest_collection_modifyitems(items):
    """What torch warns of on a GPU differs by card and version, and is no failure of ours."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


RUN, QUEUE = Path(__file__), Path(__file__).parents[1] / "pyproject.toml"
"""What the processes of a test run lock, in place of files made for it: whether a test runs, and who is next."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Processes of one pytest-xdist run share the machine; a test marked ``alone`` has it to itself.

    Who waits holds the queue's lock, so that a test that wants to be alone is not overtaken for ever.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with RUN.open() as run, QUEUE.open() as queue:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(run, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(run, fcntl.LOCK_UN)  # processes that the test forked hold the file open too


@pytest.fixture
def own_tmpdir(tmp_path_factory, monkeypatch):
    """For tests in which data workers are killed: what a worker leaves then, a folder with its socket, lies in here.

    Its path is short: that of a socket may have 107 characters.
    """
    folder = tmp_path_factory.mktemp("own")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A real Slurm, for all tests of a process."""
    from tests.slurm_cluster import find_missing, run_slurm

    if missing := find_missing():
        pytest.skip(f"needs slurm-wlm and munge; there is no {', '.join(missing)}")
    with run_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


REAL = {
    "clock": ("host", "cuda"),
    "nvml": ("real",),
    "target": ("process",),
    "store": ("sqlite", "postgresql"),
    "executor": ("local", "slurm"),
}
"""Contract suite → the ids of its parameters that stand for the real thing; the others are its fakes."""


def read_contract_id(nodeid):
    """``tests/contract/test_contract_clock.py::test_x[host]`` → ("clock", "host"); None for other tests."""
    path, _, rest = nodeid.partition("::")
    file = Path(path)
    if file.parent.name != "contract" or "[" not in rest:
        return None
    return file.stem.removeprefix("test_contract_"), rest.partition("[")[2].rstrip("]").split("-")[0]


def pytest_terminal_summary(terminalreporter):
    counts, reasons = defaultdict(Counter), defaultdict(set)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            found = read_contract_id(report.nodeid)
            if found is None:
                continue
            counts[found][outcome] += 1
            if outcome == "skipped" and isinstance(report.longrepr, tuple):
                reasons[found].add(report.longrepr[2].removeprefix("Skipped: "))
    if not counts:
        return
    terminalreporter.section("contract suites against the real thing")
    for suite, names in REAL.items():
        for name in names:
            seen = counts.get((suite, name))
            said = ", ".join(f"{n} {outcome}" for outcome, n in seen.items()) if seen else "did not run"
            why = f" ({'; '.join(sorted(reasons[suite, name]))})" if reasons.get((suite, name)) else ""
            terminalreporter.write_line(f"{suite:<8} {name:<8} {said}{why}")
