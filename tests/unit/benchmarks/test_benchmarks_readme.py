"""The README's table of claims says what the result files say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from benchmarks._readme import END, PAGE, ROWS, START, build_table, replace_table, say, say_range
from benchmarks._runner import RESULTS
from benchmarks._schema import BenchmarkResult

from fulltilt.records import dumps, loads


@pytest.fixture
def results(tmp_path) -> Path:
    """Copies of the result files, all of one machine."""
    for stem in ROWS:
        result = loads(BenchmarkResult, (RESULTS / f"{stem}.json").read_text("utf-8"))
        write(tmp_path, result, machine=dataclasses.replace(result.machine, cpu_model="Made Up", n_cores_usable=2))
    return tmp_path


def write(folder, result, **changes):
    (folder / f"{result.name}-cpu.json").write_text(dumps(dataclasses.replace(result, **changes)))


def read(folder, name):
    return loads(BenchmarkResult, (folder / f"{name}-cpu.json").read_text())


def change_arms(result, wanted, **changes):
    return tuple(dataclasses.replace(arm, **changes) if arm.arm == wanted else arm for arm in result.arms)


def find_row(table, name):
    (row,) = [line for line in table.splitlines() if f"[{name}]" in line]
    return row


def test_the_readme_says_what_the_result_files_say():
    page = PAGE.read_text("utf-8")
    assert page == replace_table(page, build_table()), "run python -m benchmarks._readme"


def test_a_row_follows_its_file(results):
    result = read(results, "cli_start")
    target = dataclasses.replace(result.targets[0], measured=0.7654, ci95=(0.5, None))
    write(results, result, targets=(target,))
    assert "| 0.765 s (0.500 to no bound) |" in find_row(build_table(results), "cli_start")


def test_a_machine_is_named_where_it_is_another_than_that_of_most(results):
    result = read(results, "hdf5_loader")
    write(results, result, machine=dataclasses.replace(result.machine, cpu_model="Intel(R) Xeon(R) Processor"))
    head, *_ = table = build_table(results).splitlines()
    assert "2 cores of Made Up" in head
    assert [line for line in table if line.endswith("; 2 cores of Intel Xeon |")] == [
        find_row("\n".join(table), "hdf5_loader")
    ]


def test_a_difference_of_a_loop_from_itself_is_told(results):
    result = read(results, "loop_overhead")
    for ci95, said in (((-9.0, -2.0), 2), ((-9.0, 2.0), 0), ((3.0, 4.0), 2)):
        write(results, result, arms=change_arms(result, "hand-written again", ci95=ci95))
        assert find_row(build_table(results), "loop_overhead").count("though it should be 0") == said


def test_comparisons_that_decide_nothing_are_counted_and_named(results):
    result = read(results, "batch_finders")
    ratios = [target for target in result.targets if "over that of" in target.name]
    changed = [dataclasses.replace(t, met=None if t.name.endswith("timm") else True) for t in ratios]
    write(results, result, targets=tuple(changed))
    row = find_row(build_table(results), "batch_finders")
    assert f"medians of {len(ratios)} comparisons; 2 of them undecided (timm); none" in row
    write(results, result, targets=tuple(dataclasses.replace(t, met=True) for t in ratios))
    assert "undecided" not in find_row(build_table(results), "batch_finders")


def test_a_page_without_markers_is_refused():
    assert replace_table(f"a\n{START}\nold\n{END}\nb\n", "| new |") == f"a\n{START}\n| new |\n{END}\nb\n"
    with pytest.raises(ValueError, match="needs a line"):
        replace_table(f"a\n{END}\n", "| new |")


def test_figures_are_printed_as_one_reads_them():
    assert [say(-8.4), say(-0.2), say(123_321.6), say(0.0049, 2)] == ["−8", "0", "123,322", "0.00"]
    assert [say_range([3.0, 1.2, 2.0], 1), say_range([0.9, 1.1])] == ["1.2 to 3.0", "1"]
