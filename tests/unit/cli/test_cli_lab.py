"""What ``fulltilt lab list`` and ``lab show`` print: the answer first, on one screen."""

import pytest

from fulltilt.cli import lab, run_command
from fulltilt.cli._lab_serve import read_pool
from fulltilt.errors import UsageError

LONG = "RuntimeError: " + "a key is missing\n" * 90


class FakeClient:
    """Answers with experiments of long points, and one that failed thirty times for a long reason."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def get(self, path, **_):
        if path == "/api/status":
            return {"states": {"failed": 40}, "has_room": True}
        if path == "/api/experiments":
            return {"experiments": [build_entry(n) for n in range(1, 41)]}
        attempts = [
            {"number": n, "node": "a", "devices": ["cpu:0"], "started_s": 0.0, "ended_s": 9.0, "outcome": "failed",
             "reason": LONG}
            for n in range(1, 31)
        ]  # fmt: skip
        return {"experiment": build_entry(1), "source": "grid.yaml", "attempts": attempts}


def build_entry(n):
    point = {f"optim.a_long_name_{name}": 0.123456 for name in range(6)}
    return {"id": f"e{n}", "state": "failed", "point": point, "overrides": [], "attempt": 1, "seconds": 9.0,
            "metrics": {}, "reason": LONG, "devices": ["cpu:0"], "priority": 0, "out_dir": "lab/e1"}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence", "whole"),
    [
        (["list"], "40 failed in runs/lab", "e40"),
        (["show", "e1"], "e1 (a_long_name_0=0.1", "attempt 1 on"),
    ],
)
def test_the_answer_stands_first_on_one_screen_and_verbose_has_the_rest(monkeypatch, capsys, words, sentence, whole):
    monkeypatch.setattr("fulltilt.lab.client.connect", lambda *_, **__: FakeClient())
    assert run_command(["lab", *words, "--lab", "runs/lab"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0].startswith(sentence)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert "--verbose" in said
    assert whole not in said
    assert words == ["show", "e1"] or [line.split()[:2] for line in lines[2:4]] == [["e1", "failed"], ["e2", "failed"]]
    assert run_command(["lab", *words, "--lab", "runs/lab", "--verbose"]) == 0
    assert whole in capsys.readouterr().out


def test_the_newest_attempts_are_those_that_are_shown(monkeypatch, capsys):
    monkeypatch.setattr("fulltilt.lab.client.connect", lambda *_, **__: FakeClient())
    assert run_command(["lab", "show", "e1", "--lab", "runs/lab"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("attempt ")]
    assert [line.split()[1] for line in shown] == [str(n) for n in range(31 - lab.N_ATTEMPTS, 31)]


@pytest.mark.parametrize("text", ["0-3", "0, 1", "gpu0", "cuda:0,1", "cuda:", "none", "0,", "", "²"])
def test_devices_that_are_misspelt_are_refused_and_not_taken_for_every_gpu(text):
    with pytest.raises(UsageError, match="expected auto, cpu, none or numbers such as 0,1"):
        read_pool(text)
    with pytest.raises(UsageError, match="expected auto, cpu or numbers"):
        read_pool(text, others="cpu")


def test_devices_are_read_as_they_are_named():
    texts = ("auto", "cpu", "cuda", "cuda:1", "3", "0,1")
    assert list(map(read_pool, texts)) == ["auto", "cpu", "cuda", "cuda:1", [3], [0, 1]]


class Taker(FakeClient):
    is_served = True

    def post(self, path):
        return build_entry(1) | {"state": "queued"}

    def submit(self, *_, **__):
        return {"ids": ["e1", "e2", "e3", "e4"], "n_new": 1, "n_retried": 2, "sweep": "grid", "axes": []}


def test_what_runs_again_is_counted_and_the_code_that_it_runs_is_told(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("fulltilt.lab.client.connect", lambda *_, **__: Taker())
    monkeypatch.setattr("fulltilt.cli._lab_submit.connect", lambda *_, **__: Taker())
    monkeypatch.setenv("FULLTILT_LAB_TOKEN", "t")
    (tmp_path / "grid.yaml").write_text("lr: 0.1\n")
    assert run_command(["lab", "submit", str(tmp_path / "grid.yaml"), "--retry", "--url", "http://lab"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 experiments are queued, 2 of them again with the code as it is now, 1 were there before" in said
    assert run_command(["lab", "retry", "e1"]) == 0
    assert "is queued, with the code that was submitted" in " ".join(capsys.readouterr().out.split())
