"""What keeps a lab for years: a backup that is whole or none, and the removal of what nobody needs any more."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import time
from pathlib import Path

import pytest
from tests.lab_cases import build_points, lease

from fulltilt.errors import StorageError, UsageError
from fulltilt.lab import backup, operations
from fulltilt.lab.backup import MANIFEST, restore_backup, write_backup
from fulltilt.lab.coordinator import Coordinator
from fulltilt.lab.lab import Lab
from fulltilt.lab.records import Artefact, Attempt, Code
from fulltilt.lab.retention import prune
from fulltilt.lab.scheduling.ends import End
from fulltilt.lab.serving import open_lab
from fulltilt.lab.settling import settle

DAY_S = 86_400.0
LARGE = os.urandom(1 << 20)  # is linked where a small file is copied


def keep(lab: Lab, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    lab.depot.put_pieces([content], digest)
    return digest


def start(lab: Lab, id: str) -> Attempt:
    found = lab.store.read_experiments(id=id)[0]
    attempt, _ = lease(lab.store, found)
    lab.store.advance("start", attempt)
    return attempt


def save(lab: Lab, attempt: Attempt, content: bytes, name: str = "checkpoint.pt") -> str:
    digest = keep(lab, content)
    gone = lab.store.add_artefacts(attempt, [Artefact(name=name, digest=digest, n_bytes=len(content))])
    for each in gone:
        lab.depot.remove(each)
    return digest


@pytest.fixture
def lab(tmp_path):
    """e1 has succeeded, e2 runs and has a checkpoint, e3 shall pause, e4 is queued, e5 is cancelled."""
    folder = tmp_path / "lab"
    folder.mkdir()
    with open_lab(folder, create=True) as lab:
        code = Code(digest=keep(lab, b"code"), root="/somewhere", entry="grid.yaml")
        lab.store.add("/somewhere/grid.yaml", build_points(5), [], code=code)
        first, second, third = (start(lab, id) for id in ("e1", "e2", "e3"))
        (folder / "e1").mkdir()
        (folder / "e1" / "log-1.txt").write_text("what it printed\n")
        save(lab, first, LARGE, name="weights.pt")
        settle(lab, first, End(outcome="succeeded", metrics={"loss": 0.5}))
        save(lab, second, b"step 7")
        operations.act(lab, "pause", third.experiment)
        operations.act(lab, "cancel", "e5")
        (folder / "token").write_text("the owner's secret\n")
        yield lab


def read_files(lab, id: str) -> list[bytes]:
    found = []
    for each in lab.store.read_artefacts(id):
        with lab.depot.open(each.digest) as stream:
            found.append(stream.read())
    return found


def test_a_lab_comes_back_with_its_results_and_what_ran_is_queued_again(lab, tmp_path):
    made = write_backup(lab.folder, tmp_path / "lab.tar")
    assert made["n_missing"] == 0
    assert b"the owner's secret" not in (tmp_path / "lab.tar").read_bytes()
    assert (tmp_path / "lab.tar").stat().st_size < 2 * len(LARGE), "a file with two names is in it once"
    restored = restore_backup(tmp_path / "lab.tar", tmp_path / "new")
    assert restored == made
    assert {each.id: each.state for each in lab.store.read_experiments()}["e2"] == "running", "nothing happens to it"
    with open_lab(tmp_path / "new") as new:
        states = {each.id: each.state for each in new.store.read_experiments()}
        assert states == {"e1": "succeeded", "e2": "queued", "e3": "held", "e4": "queued", "e5": "cancelled"}
        assert new.store.read_experiments(id="e1")[0].metrics == {"loss": 0.5}
        assert read_files(new, "e2") == [b"step 7"]
        code = new.store.read_work("e4").code
        assert code is not None
        assert new.depot.has(code.digest)
    assert (tmp_path / "new" / "e1" / "weights.pt").read_bytes() == LARGE
    assert (tmp_path / "new" / "e1" / "log-1.txt").read_text() == "what it printed\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lab", "lab.tar", "new"], "nothing else is left"


def test_a_checkpoint_that_is_replaced_while_the_backup_is_written_is_in_it_by_its_new_name(lab, tmp_path, monkeypatch):
    steps = iter([b"step 8", b"step 9"])
    copy = backup.copy_database

    def copy_and_train_on(source, target):
        copy(source, target)
        if content := next(steps, None):
            save(lab, Attempt(experiment="e2", number=1), content)

    monkeypatch.setattr(backup, "copy_database", copy_and_train_on)
    assert write_backup(lab.folder, tmp_path / "lab.tar")["n_missing"] == 0
    restore_backup(tmp_path / "lab.tar", tmp_path / "new")
    with open_lab(tmp_path / "new") as new:
        assert read_files(new, "e2") == [b"step 9"]


def test_a_file_that_is_gone_for_good_is_counted_and_the_rest_is_saved(lab, tmp_path):
    lab.depot.remove(lab.store.read_artefacts("e2")[0].digest)
    assert write_backup(lab.folder, tmp_path / "lab.tar")["n_missing"] == 1
    restore_backup(tmp_path / "lab.tar", tmp_path / "new")


def test_a_lab_whose_records_are_elsewhere_says_what_to_save_it_with(tmp_path):
    with pytest.raises(UsageError, match=r"with pg_dump, and copy .* its --depot"):
        write_backup(tmp_path, tmp_path / "lab.tar")
    assert not (tmp_path / "lab.tar").exists()


def test_a_folder_that_holds_something_is_left_as_it_is(lab, tmp_path):
    write_backup(lab.folder, tmp_path / "lab.tar")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty; name a new folder"):
        restore_backup(tmp_path / "lab.tar", tmp_path / "new")
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["mine.txt"]


def rewrite(file: Path, change) -> None:
    """Write a tar file again, each member as ``change`` returns it: its header and its content."""
    with tarfile.open(file) as old:
        found = [(info, b"" if info.islnk() else old.extractfile(info).read()) for info in old]
    with tarfile.open(file, "w") as new:
        for info, content in found:
            info, content = change(info, content)
            info.size = len(content)
            new.addfile(info, io.BytesIO(content))


def spoil_file(info, content):
    return info, bytes(len(content)) if info.name.startswith("depot/") else content


def spoil_database(info, content):
    return info, content[:8192] + bytes(len(content) - 8192) if info.name == "lab.db" else content


def lead_out(info, content):
    info.name = "../../outside" if info.name == MANIFEST else info.name
    return info, content


def make_link(info, content):
    if info.name.endswith("log-1.txt"):
        info.type, info.linkname, content = tarfile.SYMTYPE, "/etc/passwd", b""
    return info, content


def leave_out_manifest(info, content):
    info.name = "e1/other" if info.name == MANIFEST else info.name
    return info, content


@pytest.mark.parametrize("change", [spoil_file, spoil_database, lead_out, make_link, leave_out_manifest])
def test_a_backup_that_was_changed_makes_no_lab(lab, tmp_path, change):
    (place := tmp_path / "here").mkdir()
    write_backup(lab.folder, place / "lab.tar")
    rewrite(place / "lab.tar", change)
    with pytest.raises(StorageError, match=r"backup|damaged"):
        restore_backup(place / "lab.tar", place / "new")
    assert [each.name for each in place.iterdir()] == ["lab.tar"]
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_backup_that_arrived_in_part_makes_no_lab(lab, tmp_path, part):
    write_backup(lab.folder, tmp_path / "lab.tar")
    content = (tmp_path / "lab.tar").read_bytes()
    (tmp_path / "lab.tar").write_bytes(content[: int(part * len(content))])
    with pytest.raises(StorageError, match=r"whole backup|ends before"):
        restore_backup(tmp_path / "lab.tar", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match="does not exist"):
        restore_backup(tmp_path / "other.tar", tmp_path / "new")


def age(lab: Lab, monkeypatch, days: float) -> None:
    """Make it so many days later, for the records and for the depot."""
    now_s = time.time()
    monkeypatch.setattr("time.time", lambda: now_s + days * DAY_S)


def list_files(lab: Lab) -> set[str]:
    return {path.name for path in (lab.folder / "depot").glob("*/*")}


def test_what_is_over_and_old_goes_with_its_files_and_what_is_not_stays(lab, monkeypatch):
    for place in ("e5", "local/e5", "removed/e9"):
        (lab.folder / place).mkdir(parents=True)
        (lab.folder / place / "log-1.txt").write_text("old")
    (code,) = {lab.store.read_work(id).code.digest for id in ("e1", "e2")}
    orphan, checkpoint = keep(lab, b"nobody's"), lab.store.read_artefacts("e2")[0].digest
    age(lab, monkeypatch, 40)
    operations.act(lab, "retry", "e5")
    operations.act(lab, "cancel", "e5")
    assert prune(lab, older_than_s=30 * DAY_S, is_dry_run=True)["ids"] == ["e1"]
    assert prune(lab, older_than_s=50 * DAY_S) == {"ids": [], "n_files": 1, "is_more": False}
    assert orphan not in list_files(lab)
    assert (lab.folder / "e1" / "weights.pt").exists()
    done = prune(lab, older_than_s=30 * DAY_S)
    assert (done["ids"], done["n_files"]) == (["e1"], 1)
    assert [each.id for each in lab.store.read_experiments()] == ["e2", "e3", "e4", "e5"]
    assert list_files(lab) == {code, checkpoint}
    assert not (lab.folder / "e1").exists()
    assert not (lab.folder / "removed" / "e9").exists()
    age(lab, monkeypatch, 40)
    assert prune(lab, older_than_s=30 * DAY_S, states=("failed",))["ids"] == []
    assert prune(lab, older_than_s=30 * DAY_S)["ids"] == ["e5"]
    assert not (lab.folder / "local" / "e5").exists()
    assert len(lab.store.read_experiments()) == 3, "what runs, is held or waits is never old"


def test_a_file_that_was_just_asked_for_is_spared_until_it_is_used(lab, monkeypatch):
    digest = keep(lab, b"sent before")
    os.utime(lab.folder / "depot" / digest[:2] / digest, (0, 0))
    assert lab.depot.claim(digest)
    assert prune(lab, older_than_s=30 * DAY_S)["n_files"] == 0
    os.utime(lab.folder / "depot" / digest[:2] / digest, (0, 0))
    assert prune(lab, older_than_s=30 * DAY_S)["n_files"] == 1
    assert not lab.depot.claim(digest)


def test_a_file_that_is_asked_for_while_old_ones_are_looked_for_is_spared(lab, monkeypatch):
    digest, read = keep(lab, b"sent before"), lab.store.read_digests
    os.utime(lab.folder / "depot" / digest[:2] / digest, (0, 0))
    monkeypatch.setattr(lab.store, "read_digests", lambda: (read(), lab.depot.claim(digest))[0])
    assert prune(lab, older_than_s=30 * DAY_S)["n_files"] == 0
    assert lab.depot.has(digest)


def test_many_go_in_several_turns_and_the_log_of_changes_goes_on(lab, monkeypatch, caplog):
    monkeypatch.setattr("fulltilt.lab.retention.MOST_AT_ONCE", 1)
    caplog.set_level("INFO")
    coordinator = Coordinator(lab, [], lambda *_: None)
    age(lab, monkeypatch, 40)
    turns = [prune(lab, older_than_s=DAY_S) for _ in range(3)]
    assert [(turn["ids"], turn["is_more"]) for turn in turns] == [(["e1"], True), (["e5"], True), ([], False)]
    coordinator._tell_changes()
    operations.act(lab, "cancel", "e4")  # its event has a number that one of e5's had
    coordinator._tell_changes()
    assert [r.fields["state"] for r in caplog.records if r.event == "state"] == ["cancelled"]
