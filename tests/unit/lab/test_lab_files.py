"""The depot and the code snapshots: whole or not there, nothing outside of their folders."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
import time

import pytest

from fulltilt.errors import StorageError, UsageError
from fulltilt.lab.depot import LINK_BYTES, Depot
from fulltilt.lab.snapshot import find_root, link_what_is_left_out, pack_code, unpack_code


@pytest.fixture
def depot(tmp_path) -> Depot:
    return Depot(tmp_path / "depot")


def name(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_file_comes_back_as_it_was_and_twice_the_same_is_stored_once(depot, tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(b"weights")
    assert depot.put(path) == depot.put(path) == name(b"weights")
    depot.get(name(b"weights"), tmp_path / "to" / "b.pt")
    assert (tmp_path / "to" / "b.pt").read_bytes() == b"weights"
    assert depot.measure(name(b"weights")) == 7
    assert len([each for each in (tmp_path / "depot").rglob("*") if each.is_file()]) == 1


def test_a_large_file_on_the_same_disk_is_linked_and_what_replaces_it_changes_nothing(depot, tmp_path):
    path, content = tmp_path / "large.pt", b"x" * LINK_BYTES
    path.write_bytes(content)
    digest = depot.put(path)
    assert path.stat().st_nlink == 2
    (tmp_path / "new").write_bytes(b"newer")
    os.replace(tmp_path / "new", path)
    for _ in range(2):
        depot.link(digest, tmp_path / "again.pt")
    assert (tmp_path / "again.pt").read_bytes() == content
    assert {each.name for each in tmp_path.iterdir()} == {"again.pt", "depot", "large.pt"}, "nothing is left beside it"


def test_what_arrives_damaged_or_in_part_is_not_there(depot, tmp_path):
    with pytest.raises(StorageError, match="send it again"):
        depot.put_pieces([b"half"], name(b"whole"))

    def break_off():
        yield b"who"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        depot.put_pieces(break_off(), name(b"whole"))
    assert not depot.has(name(b"whole"))
    assert not [each for each in (tmp_path / "depot").rglob("*") if each.is_file()]


def test_a_depot_at_a_uri_that_is_no_folder_keeps_and_removes_files_too(tmp_path):
    depot = Depot(f"memory://{tmp_path.name}")
    path = tmp_path / "a.pt"
    path.write_bytes(b"x" * LINK_BYTES)
    digest = name(path.read_bytes())
    assert not depot.claim(digest)
    assert depot.put(path) == depot.put(path) == digest
    assert (depot.claim(digest), depot.measure(digest)) == (True, LINK_BYTES)
    for target in (tmp_path / "linked" / "b.pt", tmp_path / "got" / "b.pt"):
        (depot.link if "linked" in target.parts else depot.get)(digest, target)
        assert target.read_bytes() == path.read_bytes()
    assert path.stat().st_nlink == 1
    with pytest.raises(StorageError, match="send it again"):
        depot.put_pieces([b"half"], name(b"whole"))
    assert [each.rpartition("/")[2] for each in depot._system.find(depot._root)] == [digest], "no part of it is left"
    with pytest.raises(StorageError, match="holds no file"):
        depot.open(name(b"whole"))
    depot.put_pieces([b"new"], name(b"new"))
    assert depot.remove_older(time.time() + 60, spare=[digest]) == 1
    assert (depot.has(digest), depot.has(name(b"new"))) == (True, False)
    for _ in range(2):
        depot.remove(digest)
    assert not depot.has(digest)


def test_a_stored_file_that_changed_on_the_disk_is_not_handed_out(depot, tmp_path):
    depot.put_pieces([b"whole"], name(b"whole"))
    (stored,) = (each for each in (tmp_path / "depot").rglob("*") if each.is_file())
    stored.write_bytes(b"whale")
    with pytest.raises(StorageError, match="damaged"):
        depot.get(name(b"whole"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("digest", ["../../etc/passwd", "a" * 63, "A" * 64, "", "a" * 64 + "/.."])
def test_what_is_no_digest_names_no_file(depot, digest):
    with pytest.raises(StorageError, match="is no digest"):
        depot.has(digest)


def test_what_was_removed_is_gone_and_may_be_removed_again(depot):
    for content in (b"kept", b"gone"):
        depot.put_pieces([content], name(content))
    for _ in range(2):
        depot.remove(name(b"gone"))
    assert (depot.has(name(b"kept")), depot.has(name(b"gone"))) == (True, False)


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    for path, text in {
        "configs/grid.yaml": "lr: 1\n",
        "model.py": "x = 1\n",
        "data/big.bin": "0" * 100,
        "venv/pyvenv.cfg": "",
        "venv/lib.py": "",
        "runs/old.py": "",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def list_names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getnames()


def test_code_is_packed_and_data_is_not_and_the_same_code_gives_the_same_bytes(project):
    source = project / "configs" / "grid.yaml"
    first = pack_code(project, source)
    assert list_names(first) == ["configs/grid.yaml", "model.py"]
    os.utime(project / "model.py", (1, 1))
    assert pack_code(project, source) == first
    (project / "model.py").write_text("x = 2\n")
    assert pack_code(project, source) != first


def test_git_says_what_belongs_to_a_project(project, monkeypatch):
    for words in (["init", "-q"], ["config", "core.excludesFile", "/dev/null"]):
        subprocess.run(["git", "-C", project, *words], check=True)
    (project / ".gitignore").write_text("venv/\nruns/\nsecret.py\n")
    (project / "secret.py").write_text("")
    source = project / "configs" / "grid.yaml"
    assert find_root(source) == project
    assert list_names(pack_code(find_root(source), source)) == ["configs/grid.yaml", "model.py"]


def test_a_lab_in_the_project_is_no_code_and_its_token_stays_at_home(project):
    (project / "lab" / "e1").mkdir(parents=True)
    for name in (".lock", "token", "server.json", "e1/result.json"):
        (project / "lab" / name).write_text("secret")
    source = project / "configs" / "grid.yaml"
    assert list_names(pack_code(project, source)) == ["configs/grid.yaml", "model.py"]
    (project / ".gitignore").write_text("venv/\nruns/\n")
    for words in (["init", "-q"], ["config", "core.excludesFile", "/dev/null"]):
        subprocess.run(["git", "-C", project, *words], check=True)
    assert list_names(pack_code(project, source)) == ["configs/grid.yaml", "model.py"]


def test_without_git_the_working_directory_is_the_project_or_else_the_folder_of_the_file(project, monkeypatch):
    source = project / "configs" / "grid.yaml"
    monkeypatch.chdir(project)
    assert find_root(source) == project
    monkeypatch.chdir("/")
    assert find_root(source) == project / "configs"


def test_too_much_code_is_refused_with_the_remedy(project, monkeypatch):
    monkeypatch.setattr("fulltilt.lab.snapshot.MOST_BYTES", 8)
    with pytest.raises(UsageError, match="submit from the folder of the project"):
        pack_code(project, project / "configs" / "grid.yaml")


def test_code_is_laid_out_beside_links_to_the_data_it_was_packed_from(project, tmp_path):
    archive = tmp_path / "code.tar"
    archive.write_bytes(pack_code(project, project / "configs" / "grid.yaml"))
    (project / "model.py").write_text("x = 'edited later'\n")
    (project / "added.py").write_text("x = 'added later'\n")
    unpack_code(archive, tmp_path / "node" / "code", beside=project)
    laid = tmp_path / "node" / "code"
    assert (laid / "model.py").read_text() == "x = 1\n"
    assert (laid / "data" / "big.bin").read_text() == "0" * 100
    assert not (laid / "added.py").exists()
    unpack_code(archive, tmp_path / "elsewhere", beside=tmp_path / "not there")
    assert sorted(each.name for each in (tmp_path / "elsewhere").iterdir()) == ["configs", "model.py"]


def test_large_and_ignored_text_and_later_data_are_linked_and_later_code_is_not(project, tmp_path, monkeypatch):
    monkeypatch.setattr("fulltilt.lab.snapshot.MOST_FILE_BYTES", 50)
    for name in ("corpus.txt", "table.py"):
        (project / name).write_text("# many words\n" * 10)
    for words in (["init", "-q"], ["config", "core.excludesFile", "/dev/null"]):
        subprocess.run(["git", "-C", project, *words], check=True)
    (project / ".gitignore").write_text("venv/\nruns/\nlabels.json\n")
    (project / "labels.json").write_text("[1]")
    archive, laid = tmp_path / "code.tar", tmp_path / "node" / "code"
    archive.write_bytes(pack_code(project, project / "configs" / "grid.yaml"))
    assert list_names(archive.read_bytes()) == ["configs/grid.yaml", "model.py"]
    unpack_code(archive, laid, beside=project)
    (project / "later.csv").write_text("1,2")
    (project / "added.py").write_text("x = 'added later'\n")
    for _ in range(2):
        link_what_is_left_out(laid, project)
    assert (laid / "later.csv").read_text() == "1,2"
    for name in ("corpus.txt", "table.py", "labels.json"):
        assert (laid / name).read_text() == (project / name).read_text()
    assert not (laid / "added.py").exists()
