"""Server, runners and trainings killed at random: nothing is lost, counts twice, lives twice or for ever."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from tests.faults.lab_torment import Torment, assert_whole

TTL_S, N_DEVICES = 3.0, 3
SECONDS, N_KILLS = 60.0, 50  # at least


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_random_nothing_is_lost_or_counts_twice_or_lives_twice(tmp_path):
    (tmp_path / "real").mkdir()
    torment = Torment(tmp_path / "real" / "lab", TTL_S, N_DEVICES)
    try:
        torment.run({torment.kill_server: 0.25, torment.kill_part: 0.75}, seconds=SECONDS, least=N_KILLS)
    finally:
        torment.end()
    print(dict(torment.done), f"{torment.n_experiments} experiments")
    assert torment.done.total() >= N_KILLS
    assert_whole(torment)
    for said, forge in FORGERIES:  # the check itself is no empty one
        forged = shutil.copytree(torment.folder.parent, tmp_path / "forged", symlinks=True)
        forge(forged)
        whole, torment.folder, torment.ticks = torment.folder.parent, forged / "lab", forged / "ticks"
        with pytest.raises(AssertionError, match=said):
            assert_whole(torment)
        torment.folder, torment.ticks = whole / "lab", whole / "ticks"
        shutil.rmtree(forged)


def live_at_once(folder: Path) -> None:
    times = next((folder / "ticks").glob("e1-*")).read_text().split()
    (folder / "ticks" / "e1-99-forged").write_text(times[len(times) // 2])


def list_logs(experiment: Path) -> list[Path]:
    """Logs of the attempts at an experiment, the accepted one's last."""
    return sorted(experiment.glob("log-*.txt"), key=lambda path: int(path.stem.partition("-")[2]))


def repeat_a_line(folder: Path) -> None:
    log = list_logs(folder / "lab" / "e1")[-1]
    log.write_text(log.read_text() + log.read_text().splitlines()[-1] + "\n")


def leave_half_a_line(folder: Path) -> None:
    log = list_logs(folder / "lab" / "e1")[-1]
    log.write_text(log.read_text() + "ste")


def mix_in_a_line_of_another(folder: Path) -> None:
    log = next(logs for each in (folder / "lab").glob("e*") if len(logs := list_logs(each)) > 1)[0]
    log.write_text(log.read_text() + "from step 0: optim.lr=0.5\n")


def change(statement: str):
    def forge(folder: Path) -> None:
        with contextlib.closing(sqlite3.connect(folder / "lab" / "lab.db", isolation_level=None)) as database:
            database.execute(statement)

    return forge


TWICE = "INSERT INTO event (experiment, attempt, arrow, state, time_s) "
TWICE += "SELECT experiment, attempt, arrow, state, time_s FROM event WHERE arrow = 'commit' LIMIT 1"
FORGERIES = [
    ("lived at once", live_at_once),
    ("every line, once", repeat_a_line),
    ("every line, once", leave_half_a_line),
    ("every line, once", mix_in_a_line_of_another),
    ("lost", change("UPDATE event SET state = 'failed' WHERE seq = (SELECT max(seq) FROM event)")),
    ("no arrow allows", change(TWICE)),
]
