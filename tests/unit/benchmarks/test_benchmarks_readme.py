"""The README's table of claims says what the result files say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from benchmarks._readme import END, PAGES, ROWS, START, build_table, replace_table, say
from benchmarks._runner import RESULTS
from benchmarks._schema import BenchmarkResult
from scripts import draw_readme

from fulltilt.records import dumps, loads


@pytest.fixture
def results(tmp_path) -> Path:
    """Copies of the result files, all of one machine."""
    for stem in {row.stem for row in ROWS}:
        result = loads(BenchmarkResult, (RESULTS / f"{stem}.json").read_text("utf-8"))
        write(tmp_path, result, machine=dataclasses.replace(result.machine, cpu_model="Made Up", n_cores_usable=2))
    return tmp_path


def write(folder, result, **changes):
    (folder / f"{result.name}-cpu.json").write_text(dumps(dataclasses.replace(result, **changes)))


def read(folder, name):
    return loads(BenchmarkResult, (folder / f"{name}-cpu.json").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_readme_says_what_the_result_files_say(page):
    text = page.read_text("utf-8")
    assert text == replace_table(text, build_table()), "run python -m benchmarks._readme"


def test_a_row_follows_its_file(results):
    result = read(results, "memory_prediction")
    target = dataclasses.replace(result.targets[0], measured=0.7654, ci95=(0.5, None))
    write(results, result, targets=(target,))
    assert "| **0.77 %** (0.50 to no bound) | [memory_prediction]" in build_table(results)


def test_a_machine_is_named_where_it_is_another_than_that_of_most(results):
    result = read(results, "hdf5_loader")
    write(results, result, machine=dataclasses.replace(result.machine, cpu_model="Intel(R) Xeon(R) Processor"))
    head, *_ = table = build_table(results).splitlines()
    assert "2 cores of Made Up" in head
    (named,) = [line for line in table if line.endswith(", 2 cores of Intel Xeon |")]
    assert "[hdf5_loader]" in named


def test_a_page_without_markers_is_refused():
    assert replace_table(f"a\n{START}\nold\n{END}\nb\n", "| new |") == f"a\n{START}\n| new |\n{END}\nb\n"
    with pytest.raises(ValueError, match="needs a line"):
        replace_table(f"a\n{END}\n", "| new |")


def test_figures_are_printed_as_one_reads_them():
    assert [say(-8.4), say(-0.2), say(123_321.6), say(0.0049, 2)] == ["−8", "0", "123,322", "0.00"]


def test_the_picture_is_what_the_recorded_search_ended_with():
    assert draw_readme.PICTURE.read_text("utf-8") == draw_readme.draw_picture(), "run python scripts/draw_readme.py"
