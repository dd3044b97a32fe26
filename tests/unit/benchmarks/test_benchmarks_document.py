"""docs/measured.md says what the result files say."""

from __future__ import annotations

from benchmarks._document import build_page
from benchmarks._runner import ROOT
from benchmarks._schema import BenchmarkResult, build_arm, judge

from fulltilt.hardware import read_machine
from fulltilt.records import dumps

PAGE = ROOT / "docs" / "measured.md"


def write_result(folder, name, **changes):
    samples = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    arm = build_arm(samples, case="a | b", arm="ours", metric="ratio", unit_of_replication="round")
    values = {
        "name": name, "claim": "It is fast.", "command": "c", "date": "2026-01-31", "device": "cpu",
        "machine": read_machine(), "versions": {}, "seconds": 1.0, "arms": (arm,), "targets": (),
    }  # fmt: skip
    (folder / f"{name}-cpu.json").write_text(dumps(BenchmarkResult(**values | changes)))


def test_the_page_is_what_the_result_files_say():
    assert PAGE.read_text("utf-8") == build_page(), "run python -m benchmarks._document > docs/measured.md"


def test_targets_have_their_figures_and_their_verdict(tmp_path):
    targets = (
        judge("speed", 3.5, (1.0, 6.0), at_least=0.5),
        judge("cost", 3.5, (1.0, None), at_most=2.0),
        judge("count", 3, None, at_most=2),
    )
    write_result(tmp_path, "made_up", targets=targets, commit="abc123", is_dirty=True, cpu_pressure_pct=12.4)
    text = build_page(tmp_path)
    assert "2026-01-31, code of abc123 with changes" in text
    assert "waited for a core 12 % of the time" in text
    assert "| speed | at least 0.5 | 3.5 (1 to 6) | met |" in text
    assert "| cost | at most 2 | 3.5 (1 to no bound) | undecided |" in text
    assert "| count | at most 2 | 3 | missed |" in text


def test_a_result_without_targets_shows_its_arms(tmp_path):
    write_result(tmp_path, "first")
    write_result(tmp_path, "second")
    text = build_page(tmp_path)
    assert text.index("## first, cpu") < text.index("## second, cpu")
    assert "| a \\| b | ours | 3.5 (1 to 6) ratio | 6 |" in text
    assert "code of" not in text


def test_recorded_grids_stand_beside_the_targets(tmp_path):
    """Only arms of results without targets were shown: the only real timings of the search stood on no page."""
    common = {"metric": "regret_pct", "unit_of_replication": "search"}
    arms = [
        build_arm([0.0, 0.0, 9.0], case="recorded: digits", arm="ours", **common),
        build_arm([1.0, 1.0, 1.0], case="recorded: digits", arm="largest", **common),
        build_arm([14.25, 14.25, 15.0], case="recorded: images", arm="ours", **common),
        build_arm([1.0, 1.0, 1.0], case="336 points", arm="ours", **common),
    ]
    write_result(tmp_path, "replay", arms=tuple(arms), targets=(judge("speed", 3.5, (1.0, 6.0), at_least=0.5),))
    text = build_page(tmp_path)
    assert (
        "| speed | at least 0.5 | 3.5 (1 to 6) | met |\n\n| recorded grid, speed lost in the median (p90) of 3" in text
    )
    assert "searches, % | digits | images |\n|" in text
    assert "| ours | 0 (9) | 14.2 (15) |\n| largest | 1 (1) |  |" in text
    assert "336 points" not in text


def test_figures_without_spread_have_no_interval(tmp_path):
    arm = build_arm([2.5] * 6, case="c", arm="a", metric="peak_gib", unit_of_replication="process")
    write_result(tmp_path, "first", arms=(arm,))
    assert "| c | a | 2.5 (the same in each process) peak_gib | 6 |" in build_page(tmp_path)
