"""``fulltilt infer search`` as a user runs it: candidates of a real model, killed in the middle and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fulltilt.hardware.proctree import find_marked

pytestmark = [pytest.mark.chaos, pytest.mark.alone]
ROOT = Path(__file__).parents[2]
MARK = "FULLTILT_TEST_SEARCH=1"
SEARCH = [sys.executable, "-m", "fulltilt", "infer", "search", ROOT / "configs" / "targets.yaml", "run.epochs=1"]
GOAL = ["targets.requests_per_s=30", "targets.samples_per_request=4", "targets.response_s={p95: 2}"]
WORDS = [*SEARCH, *GOAL, "--budget", "90s", "--json", "result.json"]
ENVIRONMENT = {**os.environ, "FULLTILT_TEST_SEARCH": "1"}


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A search that is killed once two answers are in its journal, and the same command again."""
    folder = tmp_path_factory.mktemp("search")
    journal = folder / "runs" / "infer" / "targets" / "search" / "search.jsonl"
    first = subprocess.Popen(WORDS, cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while first.poll() is None and (not journal.exists() or len(journal.read_text().splitlines()) < 2):
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    end_s = time.monotonic() + 10
    while find_marked(MARK) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert find_marked(MARK) == []
    kept = journal.read_text().splitlines()
    done = subprocess.run(WORDS, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert journal.read_text().splitlines()[: len(kept)] == kept
    return folder, kept, done, json.loads((folder / "result.json").read_text())


def test_a_search_that_was_killed_goes_on_and_keeps_its_budget(searched):
    _, kept, _, document = searched
    assert len(kept) >= 2
    assert document["seconds"] > sum(json.loads(line)["seconds"] for line in kept)


def test_eager_is_always_there_and_what_is_offered_was_proven(searched):
    *_, document = searched
    status = {row["name"]: row["status"] for row in document["candidates"]}
    assert status["eager fp32"] in ("baseline", "chosen")
    for row in document["candidates"]:
        if row["status"] == "offered" or (row["status"] == "chosen" and row["name"] != "eager fp32"):
            assert row["gain"]["verdict"] == "faster"
            assert row["gain"]["ci_pct"][0] > 0
            assert row["accuracy"]["sqnr_db"] >= 25
        elif row["name"] != "eager fp32":
            assert row["reason"]
    assert document["chosen"] in document["front"]


def test_what_was_chosen_is_an_artefact_with_its_policy_promise_and_evidence(searched):
    _, _, _, document = searched
    folder = Path(document["artefact"])
    manifest = json.loads((searched[0] / folder / "manifest.json").read_text())
    chosen = next(row for row in document["candidates"] if row["name"] == document["chosen"])
    assert manifest["plan"] == chosen["plan"]
    assert manifest["policy"] == chosen["policy"]
    assert manifest["promise"] == document["promise"]
    evidence = json.loads((searched[0] / folder / "evidence.json").read_text())
    assert evidence["search"]["candidate"]["name"] == document["chosen"]
    if chosen["live"]["verdict"] == "met":
        assert document["promise"]["limit_s"] == 2
        assert document["promise"]["measured_s"] < 2


def test_the_last_screen_begins_with_the_result_and_ends_with_what_to_do(searched):
    _, _, done, document = searched
    lines = done.stdout.splitlines()
    assert lines[0].startswith((document["chosen"], "Nothing is proven faster than eager fp32"))
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert document["next"] in done.stdout


def test_the_same_command_once_more_measures_nothing(searched):
    folder, _, _, document = searched
    before = (folder / document["out_dir"] / "search.jsonl").read_text()
    done = subprocess.run(WORDS, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / document["out_dir"] / "search.jsonl").read_text() == before


def test_what_was_promised_is_kept_when_it_is_served_and_loaded_and_verified_after(searched):
    """As the docs page has it: search, then serve, then load by the server's own promise, then verify."""
    folder, _, _, document = searched
    run = [sys.executable, "-m", "fulltilt", "infer"]
    serve = [*run, "serve", document["artefact"], "--port", "0", "--cache-mib", "0"]
    served = subprocess.Popen(serve, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        url = next(line for line in served.stdout if "is served at " in line).partition("is served at ")[2]
        url = url.partition(";")[0].strip()
        load = [*run, "load", url, "--json", "-"]
        done = subprocess.run(load, cwd=folder, capture_output=True, text=True)
        served.send_signal(signal.SIGTERM)
        assert served.wait(60) == 0
    finally:
        served.kill()
        served.stdout.close()
    loaded = json.loads(done.stdout)
    promise = document["promise"]
    assert {"requests_per_s", "quantile", "limit_s"} <= promise.keys()
    plan = {name: loaded["plan"][name] for name in ("requests_per_s", "quantile", "limit_s", "samples_per_request")}
    assert plan.items() <= promise.items()
    assert (done.returncode, loaded["verdict"], loaded["cached_share"]) == (0, "met", 0.0), done.stderr
    verified = subprocess.run([*run, "verify", document["artefact"]], cwd=folder, capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr
