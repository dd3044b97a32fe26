import dataclasses
import fcntl
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fulltilt.errors import NoPlanError, RunFolderError, StorageError, UsageError
from fulltilt.records.run_folder import (
    FolderChoice,
    RunFolder,
    append_line,
    find_folders,
    hold_folder,
    read_lines,
    write_atomic,
)

JOURNAL = "trials.jsonl"
PARTS = {"config": "c1", "machine": "m1"}


def open_run(path, parts=PARTS, command="tune", *, writes=None, logs=()):
    """A run folder; ``writes``: a line of its journal, after which it is closed."""
    given = {"results": [JOURNAL], "writes": ["report.html"], "logs": logs}
    folder = RunFolder(path, fingerprint_parts=parts, command=command, **given)
    if writes is not None:
        with folder:
            append_line(folder.path / JOURNAL, writes)
    return folder


def open_aging(path, data=1, **parts):
    """A run folder whose results are set aside when the size of its data changes."""
    parts = {**PARTS, "data": data, **parts}
    return RunFolder(path, fingerprint_parts=parts, command="tune", results=[JOURNAL, "verify"], aging=("data",))


def find(path, parts, aging=()):
    """The folder of a run and one for it to begin in, by name, and what differs in the first one."""
    given = {"results": [JOURNAL], "writes": ["report.html"], "aging": aging}
    found = find_folders(path, fingerprint_parts=parts, command="tune", **given)
    return found.own and found.own.name, found.free.name, found.foreign or found.change


def run_python(code, path):
    """What ``code`` printed in a process of its own, and how that ended; files end at 20 bytes where it says so."""
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
    code = "import sys; from pathlib import Path; path = Path(sys.argv[1])\n" + code.replace("LIMIT\n", limit)
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    return done.stdout, done.returncode


def test_the_same_run_resumes_and_another_is_refused_with_what_changed(tmp_path):
    assert not open_run(tmp_path / "run", writes="one").is_resumed
    assert open_run(tmp_path / "run", writes="two").is_resumed
    with pytest.raises(RunFolderError, match=r"changed: machine.*--out"):
        open_run(tmp_path / "run", {**PARTS, "machine": "m2"})
    with pytest.raises(RunFolderError, match="another command"):
        open_run(tmp_path / "run", command="train")
    (tmp_path / "run" / "fingerprint.json").write_text("{broken")
    with pytest.raises(RunFolderError, match="cannot be read"):
        open_run(tmp_path / "run")


def test_results_of_other_data_are_set_aside_and_said(tmp_path):
    data = {number: {"a.h5": {"n_bytes": number}} for number in (1, 2, 3)}
    for number in (1, 2):
        with open_aging(tmp_path, data[number]) as folder:
            assert not folder.is_resumed
            assert read_lines(folder.path / JOURNAL) == []
            append_line(folder.path / JOURNAL, f"of {number}")
            (tmp_path / "verify").mkdir()
    with open_aging(tmp_path, data[3]) as folder:
        assert folder.set_aside == (
            "earlier results are set aside as trials-2.jsonl, verify-2 (changed: data.a.h5.n_bytes 2 → 3)"
        )
        append_line(folder.path / JOURNAL, "of 3")
    assert [(tmp_path / f"trials-{number}.jsonl").read_text() for number in (1, 2)] == ["of 1\n", "of 2\n"]
    with open_aging(tmp_path, data[3]) as folder:
        assert folder.set_aside is None


def test_what_was_set_aside_is_said_by_the_first_run_that_has_a_result(tmp_path):
    """An edit that breaks the model moves the rows away."""
    with open_aging(tmp_path) as folder:
        append_line(folder.path / JOURNAL, "one")
    with open_aging(tmp_path, 2) as folder:
        folder.state_fingerprint({**PARTS, "data": 2})
    with open_aging(tmp_path) as folder:
        assert folder.set_aside.startswith("earlier results are set aside as trials-1.jsonl (changed: data")


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path):
    for name, mode in (("a", 0o600), ("b", 0o664), ("c", 0o755)):
        (tmp_path / name).write_text("old")
        (tmp_path / name).chmod(mode)
        assert write_atomic(tmp_path / name, "new").stat().st_mode & 0o7777 == mode
    assert write_atomic(tmp_path / "d", "new").stat().st_mode & 0o7777 == 0o644


def test_what_does_not_age_is_refused_whatever_else_changed(tmp_path):
    with open_aging(tmp_path) as folder:
        append_line(folder.path / JOURNAL, "one")
    with pytest.raises(RunFolderError, match=r"changed: data.*machine m1 → m2"):
        open_aging(tmp_path, 2, machine="m2")
    assert read_lines(tmp_path / JOURNAL) == ["one"]


def test_a_fingerprint_that_is_stated_later_is_the_one_that_counts(tmp_path):
    """Data that the first search fetched are there from the start of the second one."""
    with open_aging(tmp_path, 0) as folder:
        folder.state_fingerprint({**PARTS, "data": 9})
        append_line(folder.path / JOURNAL, "one")
    with open_aging(tmp_path, 9) as folder:
        assert folder.is_resumed


def test_a_second_process_is_refused_while_the_first_lives(tmp_path):
    folder = open_run(tmp_path)
    with pytest.raises(RunFolderError, match=f"in use by process {os.getpid()}"):
        open_run(tmp_path)
    folder.close()
    open_run(tmp_path).close()


def test_a_command_that_only_looks_for_its_folder_refuses_it_to_nobody(tmp_path, monkeypatch):
    open_run(tmp_path).close()
    look = (tmp_path / ".lock").open()
    fcntl.flock(look, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda seconds: look.close())
    open_run(tmp_path).close()
    assert look.closed


def refuse_run(path, act):
    with open_run(path):
        act()
        raise RunFolderError("refused")


def test_a_run_that_is_refused_leaves_no_folder_but_one_that_was_there_or_holds_something(tmp_path):
    (tmp_path / "there").mkdir()
    for name, act in (("new", int), ("there", int), ("begun", lambda: append_line(tmp_path / "begun" / JOURNAL, "1"))):
        with pytest.raises(RunFolderError, match="refused"):
            refuse_run(tmp_path / name, act)
    assert {path.name for path in tmp_path.iterdir()} == {"there", "begun"}
    assert not any((tmp_path / "there").iterdir())


@pytest.mark.parametrize(("command", "whose"), [("train", "of fulltilt train"), (None, "of another origin")])
def test_files_of_others_are_not_written_over_and_a_refusal_leaves_nothing_beside_them(tmp_path, command, whose):
    folder = tmp_path / "mine"
    folder.mkdir()
    if command:
        open_run(folder, command=command).close()
    (folder / "report.html").touch()
    before = sorted(os.listdir(folder))
    with pytest.raises(RunFolderError, match=f"mine holds report.html {whose}, and a run writes there; give another"):
        open_run(folder)
    assert sorted(os.listdir(folder)) == before
    assert find(folder, PARTS) == (None, "mine-2", f"report.html {whose}")


@pytest.mark.parametrize(("error", "stays"), [(UsageError, False), (NoPlanError, True)])
def test_the_logs_of_a_search_that_was_refused_go_with_its_folder_unless_they_tell_more(tmp_path, error, stays):
    """``fulltilt tune`` with a wrong path left a folder behind in which there was nothing but logs."""

    def search(logs):
        with open_run(tmp_path / "new", logs=logs):
            (tmp_path / "new" / "logs").mkdir()
            (tmp_path / "new" / "logs" / "facts.log").touch()
            raise error("the data are not there")

    with pytest.raises(error):
        search(["logs"])
    assert (tmp_path / "new").exists() == stays


def test_who_waits_for_a_folder_that_goes_locks_the_next_one(tmp_path):
    """Else two runs would hold it: one the lock file that is gone, one the lock file that is there."""
    found = []
    waiting = threading.Thread(target=lambda: found.append(open_run(tmp_path / "run")))
    with pytest.raises(RunFolderError, match="refused"):
        refuse_run(tmp_path / "run", lambda: (waiting.start(), time.sleep(0.03)))
    waiting.join()
    with pytest.raises(RunFolderError, match="is in use"):
        open_run(tmp_path / "run")
    found[0].close()


def test_a_killed_holder_leaves_the_folder_free(tmp_path):
    code = (
        "import os, signal\n"
        "from fulltilt.records.run_folder import RunFolder, append_line\n"
        "parts = {'config': 'c1', 'machine': 'm1'}\n"
        "folder = RunFolder(path, fingerprint_parts=parts, command='tune', results=['trials.jsonl'])\n"
        "append_line(folder.path / 'trials.jsonl', 'one')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run_python(code, tmp_path) == ("", -9)
    with open_run(tmp_path) as folder:
        assert folder.is_resumed
        assert read_lines(folder.path / JOURNAL) == ["one"]


def test_a_torn_last_line_is_left_out_and_then_cut_off(tmp_path):
    journal = tmp_path / "trials.jsonl"
    journal.write_text("one\ntwo\nthr")
    assert read_lines(journal) == ["one", "two"]
    append_line(journal, "three")
    assert journal.read_text() == "one\ntwo\nthree\n"
    with pytest.raises(ValueError, match="line break"):
        append_line(journal, "a\nb")


def test_a_full_disk_keeps_the_whole_lines(tmp_path):
    """RLIMIT_FSIZE makes a real short write with EFBIG, where a full disk gives ENOSPC."""
    code = (
        "from fulltilt.errors import StorageError\nfrom fulltilt.records.run_folder import append_line\nLIMIT\n"
        "append_line(path, 'x' * 10)\ntry:\n    append_line(path, 'y' * 15)\n"
        "except StorageError as error:\n    print(error)\n"
    )
    said, code = run_python(code, tmp_path / "j")
    assert "cannot be written" in said
    assert ((tmp_path / "j").read_text(), code) == ("x" * 10 + "\n", 0)
    (tmp_path / "full").symlink_to("/dev/full")  # answers every write with ENOSPC
    with pytest.raises(StorageError, match=r"no space left.*free some"):
        append_line(tmp_path / "full", "one")


def test_a_failed_atomic_write_leaves_the_old_file_and_no_other(tmp_path):
    code = (
        "from fulltilt.errors import StorageError\nfrom fulltilt.records.run_folder import write_atomic\nLIMIT\n"
        "try:\n    write_atomic(path, 'y' * 100)\nexcept StorageError:\n    print('refused')\n"
    )
    file = write_atomic(tmp_path / "result.json", "old")
    assert run_python(code, file) == ("refused\n", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert file.read_text() == "old"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            {"optim": {"lr": 0.002, "betas": [0.9, 0.99]}, "data": {"path": None, "batch_size": 8}},
            {"optim": {"betas": [0.9, 0.99], "lr": 0.5}, "data": {"path": None, "batch_size": 8}},
            "(changed: optim.lr 0.002 → 0.5)",
        ),
        ({"a": None, "b": True}, {"a": 2, "b": False}, "(changed: a none → 2, b true → false)"),
    ],
)
def test_what_changed_is_named_down_to_the_key_as_a_configuration_has_it(tmp_path, before, after, said):
    open_run(tmp_path, before, writes="one")
    with pytest.raises(RunFolderError, match=re.escape(said)):
        open_run(tmp_path, after)


def test_a_run_that_ended_before_its_first_result_does_not_hold_the_folder(tmp_path):
    open_run(tmp_path).close()
    assert not open_run(tmp_path, {**PARTS, "config": "c2"}, writes="one").is_resumed
    with pytest.raises(RunFolderError, match="changed: config"):
        open_run(tmp_path)


def test_a_link_keeps_leading_to_its_file_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_atomic(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_atomic(pipe, "through")
    reader.join(300)
    assert read == ["through"]
    assert pipe.is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"link.json", "pipe", "real.json"}


def test_each_question_has_a_folder_and_finds_it_again(tmp_path):
    path, (first, second, third) = tmp_path / "run", ({**PARTS, "lr": lr} for lr in (1, 2, 3))
    assert find(path, first) == (None, "run", "")
    open_run(path, first, writes="one")
    assert find(path, first) == ("run", "run-2", "")
    assert find(path, second) == (None, "run-2", "changed: lr 1 → 2")
    open_run(tmp_path / "run-2", second, writes="one")
    assert find(path, second) == ("run-2", "run-3", "changed: lr 1 → 2")
    assert find(path, third) == (None, "run-3", "changed: lr 1 → 3")
    assert find(path, {**third, "lr": 1.5}, aging=["lr"])[0] in ("run", "run-2"), "only what ages has changed"
    (path / JOURNAL).unlink()
    assert find(path, third) == (None, "run", ""), "it holds nothing that would be lost"
    assert find(path, second)[0] == "run-2"
    open_run(path, command="train", writes="one")
    (path / "fingerprint.json").write_text("{broken")
    assert find(path, third)[:2] == (None, "run-3"), "whose that is cannot be read"


def test_a_part_that_moves_is_another_question_and_the_same_run_where_it_goes_on(tmp_path):
    path, moved = tmp_path / "run", {**PARTS, "data.path": "/b"}
    open_run(path, {**PARTS, "data.path": "/a"}, writes="one")
    given = {"command": "tune", "results": [JOURNAL]}
    found = find_folders(path, fingerprint_parts=moved, aging=("data.path",), **given)
    assert (found.own, found.is_aged, found.free) == (path, True, tmp_path / "run-2")
    assert found.change == "changed: data.path /a → /b"
    with RunFolder(path, fingerprint_parts=moved, moving=("data.path",), **given) as folder:
        assert folder.is_resumed
    with pytest.raises(RunFolderError, match="machine m1 → m2"):
        RunFolder(path, fingerprint_parts={**moved, "machine": "m2"}, moving=("data.path",), **given)


def test_of_folders_that_hold_the_same_run_the_newest_counts(tmp_path):
    for number, written_s in ((2, 1000), (3, 3000), (4, 2000)):
        open_run(tmp_path / f"run-{number}", writes="one")
        os.utime(tmp_path / f"run-{number}" / JOURNAL, (written_s, written_s))
    (tmp_path / "run-x").mkdir()
    assert find(tmp_path / "run", PARTS) == ("run-3", "run", "")


def test_a_run_that_is_not_in_the_usual_folder_is_said_to_be_elsewhere_and_why():
    usual, other = Path("run"), Path("run-2")
    choice = FolderChoice(usual=usual, own=None, free=other, change="changed: lr 1 → 2")
    assert choice.explain(other) == "run holds another run (changed: lr 1 → 2): this one is in run-2"
    assert choice.explain(usual) is None
    assert dataclasses.replace(choice, change="").explain(other) == "run holds this run already: this one is in run-2"
    assert dataclasses.replace(choice, change="", free=usual).explain(other) == "this one is in run-2"
    assert (
        dataclasses.replace(choice, foreign="a.csv of others").explain(other).startswith("run holds a.csv of others:")
    )


def test_a_folder_in_which_another_run_has_begun_is_not_free(tmp_path):
    with open_run(tmp_path / "run"):
        assert find(tmp_path / "run", {**PARTS, "lr": 2})[:2] == (None, "run-2")
        assert find(tmp_path / "run", PARTS)[0] == "run", "the same run is told that it is in use"
    assert find(tmp_path / "run", {**PARTS, "lr": 2})[1] == "run"


def test_who_is_patient_gets_a_folder_that_another_one_holds_for_a_moment(tmp_path):
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with hold_folder(tmp_path):
            held.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    with pytest.raises(RunFolderError, match="is in use by process"), hold_folder(tmp_path):
        pass
    threading.Timer(0.3, let_go.set).start()
    with hold_folder(tmp_path, patience_s=60.0):
        assert let_go.is_set()
    thread.join()
