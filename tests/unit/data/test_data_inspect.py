"""What ``inspect`` says of a file, and that it measured it."""

import dataclasses
import itertools
import time

import h5py
import numpy as np
import pytest
from data_cases import write_hdf5

from fulltilt.data import inspect_hdf5
from fulltilt.data.tables import hdf5_inspect, hdf5_layout, hdf5_rates, hdf5_rows
from fulltilt.data.tables.hdf5_file import find_layouts
from fulltilt.data.tables.hdf5_mapped import STREAM_WINDOW_BYTES, MappedRows
from fulltilt.data.tables.hdf5_rates import drop_cache, read_cached_pct
from fulltilt.errors import DataError, UsageError
from fulltilt.hardware import Filesystem

ACCESSES = ["random", "block_shuffled", "sequential", "random_row_by_row"]
SECONDS = 0.02  # of each way of reading
NOTHING = "every row is one piece of the file: nothing to repack"
AWAY = Filesystem(type="nfs4", is_network=True, free_bytes=None)


@pytest.fixture
def path(tmp_path):
    x = np.random.default_rng(0).random((2000, 64, 4), dtype=np.float32)
    cut = {"data": x[:1900], "chunks": (500, 8, 1)}
    packed = {"data": x[:1000], "chunks": (250, 64, 4), "compression": "gzip", "shuffle": True}
    others = {"names": ["a"] * 5, "g/label": np.arange(2000)}
    return write_hdf5(tmp_path / "f.h5", whole=x, cut=cut, packed=packed, **others)


def inspect(path, *names, **options):
    return {r.name: r for r in inspect_hdf5(path, names, seconds=SECONDS, batch_size=100, **options).datasets}


def test_layouts_are_described_and_the_largest_is_measured(path):
    reports = inspect(path)
    assert reports.keys() == {"whole", "cut", "packed", "names", "g/label"}
    cut = reports["cut"]
    assert (cut.shape, cut.dtype, cut.chunks, cut.filters) == ((1900, 64, 4), "float32", (500, 8, 1), ())
    assert (cut.row_bytes, cut.chunk_rows, cut.n_chunks_a_row) == (1024, 500, 32)
    assert reports["packed"].filters == ("shuffle", "gzip")
    assert reports["packed"].stored_bytes < reports["packed"].n_bytes == 1000 * 1024
    assert [name for name, report in reports.items() if report.rates] == ["whole"], "the largest of numbers"
    assert reports["names"].null_reasons == {"rates": "not measured: name it with --dataset"}
    assert (reports["whole"].advice, reports["whole"].command) == (NOTHING, None)


def test_every_way_of_reading_is_timed_over_rows_that_were_read(path):
    reports = inspect(path, "packed", "cut", "g/label")
    for name in ("packed", "cut", "g/label"):
        report = reports[name]
        assert [rate.access for rate in report.rates] == ACCESSES
        for rate in report.rates:
            assert rate.n_rows >= rate.rows_a_read >= 1
            assert rate.seconds >= SECONDS
            assert rate.rows_per_s == pytest.approx(rate.n_rows / rate.seconds)
            if rate.rows_per_s_ci95 is None:
                assert "too few reads" in report.null_reasons[f"rates.{rate.access}.rows_per_s_ci95"]
            else:
                assert rate.rows_per_s_ci95[0] <= rate.rows_per_s <= rate.rows_per_s_ci95[1]
    assert reports["whole"].rates == ()


def test_a_slow_file_gets_a_repack_that_was_tried_and_no_factor_where_a_cache_may_hold_it(path, monkeypatch):
    for number in ("", "-2"):
        path.with_name(f"f.repacked{number}.h5").touch()
    monkeypatch.setattr(hdf5_inspect, "_WORTH", 0.0)  # a busy machine may read the repacked sample slower than the file
    report = inspect(path, "packed")["packed"]
    assert report.repacked_sample_rows == 1000, "all there are"
    assert "cannot be told from less than 64 MiB" in report.advice
    assert " rows was read " not in report.advice
    assert "both warm, out of the page cache, " in report.advice
    assert f"{report.warm_random_rows_per_s:,.0f}" in report.advice
    assert f"→ {report.repacked_random_rows_per_s:,.0f}" in report.advice
    assert "takes 250 times its bytes through shuffle + gzip" in report.advice
    assert report.command == f"fulltilt data repack {path} {path.with_name('f.repacked-3.h5')} --dataset packed"
    assert hdf5_inspect.SAMPLE_BYTES > hdf5_inspect.SMALL_BYTES
    monkeypatch.setattr(hdf5_inspect, "SMALL_BYTES", 1000 * 1024)
    monkeypatch.setattr(hdf5_inspect, "SAMPLE_BYTES", 500 * 1024)
    report = inspect(path, "packed")["packed"]
    gain = report.repacked_random_rows_per_s / report.warm_random_rows_per_s
    assert f"a sample of 500 rows was read {gain:,.{0 if gain >= 10 else 1}f} times as fast" in report.advice
    monkeypatch.setattr(hdf5_inspect, "_WORTH", 1e9)
    report = inspect(path, "packed")["packed"]
    assert report.command is None
    assert report.advice.endswith("leave it")


@pytest.mark.parametrize("cold", [False, True])
def test_what_could_not_be_measured_says_why(path, cold):
    reports = {r.name: r for r in inspect_hdf5(path, ["whole", "packed"], seconds=1e-4, cold=cold).datasets}
    for report in (reports["whole"], reports["packed"]):
        missing = {f"rates.{rate.access}.rows_per_s_ci95" for rate in report.rates if rate.rows_per_s_ci95 is None}
        measured = ("warm_random_rows_per_s", "repacked_random_rows_per_s")
        missing |= {name for name in measured if getattr(report, name) is None}
        if report.repacked_random_rows_per_s is not None:
            missing |= {f"{name}_ci95" for name in measured if getattr(report, f"{name}_ci95") is None}
        assert missing <= report.null_reasons.keys()
        assert missing, "a tenth of a millisecond is too little for an interval of each"


def test_a_rate_has_the_interval_over_the_parts_of_its_measurement_or_says_why_not():
    rate = hdf5_rates._run("random", lambda rows: None, itertools.repeat(np.arange(10)), 1e9, 120)
    low, high = rate.rows_per_s_ci95
    assert rate.n_rows == 120
    assert low <= rate.rows_per_s <= high
    assert str(rate).startswith(f"{rate.rows_per_s:,.0f} ± ")
    rate = hdf5_rates._run("random", lambda rows: None, itertools.repeat(np.arange(10)), 1e-9, None)
    assert (rate.rows_per_s_ci95, str(rate)) == (None, f"{rate.rows_per_s:,.0f}"), "one read"
    assert "--batch-size" in hdf5_inspect._explain_intervals({"x": rate}, 1.0)["x_ci95"], "it was read to its end"
    assert "--seconds" in hdf5_inspect._explain_intervals({"x": rate}, rate.seconds)["x_ci95"]
    even = [(n * 100, n * 0.1) for n in range(6)]
    assert hdf5_rates._compute_interval(even) == pytest.approx((1000.0, 1000.0))
    low, high = hdf5_rates._compute_interval([(0, 0.0), (100, 0.1), (200, 0.3), (300, 0.4), (310, 0.41)])
    assert low < 310 / 0.41 < high
    assert hdf5_rates._compute_interval([(0, 0.0), (100, 0.1)]) is None


def test_the_reader_is_the_one_that_was_built(path, monkeypatch):
    reports = inspect(path, "whole", "cut", "packed")
    assert [reports[name].reader for name in ("whole", "cut", "packed")] == ["mapped", "mapped", "h5py"]
    with monkeypatch.context() as patched:
        patched.setattr(hdf5_rows, "read_filesystem", lambda path: AWAY)
        reports = inspect(path, "whole", "cut")
    assert (reports["whole"].reader, reports["cut"].reader) == ("pread", "h5py")
    assert reports["whole"].advice == NOTHING
    assert reports["cut"].read_bytes_a_row == 32 * 500 * 8 * 4, "h5py reads whole chunks"
    monkeypatch.setattr(hdf5_layout, "MAX_CHUNKS", 10)
    assert inspect(path, "cut")["cut"].reader == "h5py"
    monkeypatch.setattr(hdf5_layout, "_agrees", lambda *given: False)
    assert inspect(path, "whole")["whole"].reader == "h5py"


def test_cold_measurements_start_without_the_file_in_memory(path):
    report = inspect(path, "whole")["whole"]
    if report.cached_before_pct is None:
        pytest.skip("this file system does not tell what is in the page cache")
    assert report.cached_before_pct == 100, "just written"
    drop_cache(path)
    assert read_cached_pct(find_layouts(path, ["whole"])[0]) < 50
    again = inspect_hdf5(path, ["whole"], seconds=5, batch_size=100, cold=True)
    assert again.is_cold
    assert all(rate.n_rows <= 2000 for rate in again.datasets[-1].rates), "no row twice"


def test_a_batch_that_would_take_too_long_is_made_smaller(path):
    class SlowRows:
        def read(self, indices):
            time.sleep(0.002 * len(indices))

    rate = hdf5_rates.measure_rate("random", find_layouts(path, ["whole"])[0], SlowRows(), 100, 0.02, False)
    assert rate.rows_a_read <= 40
    with pytest.raises(UsageError, match="batch_size 0"):
        inspect_hdf5(path, batch_size=0)


def test_no_repack_is_advised_that_would_be_refused(path, monkeypatch):
    """netCDF files have dimension scales: references into the file, which a repacked one would lose."""
    monkeypatch.setattr(hdf5_inspect, "_WORTH", 0.0)
    with h5py.File(path, "r+") as file:
        file["g/label"].make_scale("event")
        file["packed"].dims[0].attach_scale(file["g/label"])
    report = inspect(path, "packed")["packed"]
    assert report.command is None
    assert "are references into the file" in report.advice
    assert "use h5repack" in report.advice


def test_what_is_measured_unasked_is_what_can_be_trained_on(tmp_path):
    ragged = {"shape": (3,), "dtype": h5py.vlen_dtype(np.int64)}
    reports = inspect(write_hdf5(tmp_path / "f.h5", names=["a"] * 5000, x=np.zeros((20, 2), np.float32), ragged=ragged))
    assert [name for name, report in reports.items() if report.rates] == ["x"]
    report = inspect(write_hdf5(tmp_path / "g.h5", ragged=ragged))["ragged"]
    assert "not measured: it holds values of variable length" in report.advice
    assert "variable length" in report.null_reasons["rates"]


@pytest.fixture
def folder(path, tmp_path):
    """Links into ``path`` and to nowhere, and files that hold nothing to inspect."""
    (tmp_path / "cut.h5").write_bytes(path.read_bytes()[:50_000])
    write_hdf5(tmp_path / "bare.h5", x=3.0)
    away, group = h5py.ExternalLink("f.h5", "/whole"), h5py.ExternalLink("f.h5", "/g")
    gone, lost = h5py.ExternalLink("other.h5", "/x"), h5py.SoftLink("/nothing")
    write_hdf5(tmp_path / "gone.h5", away=away, lost=lost, **{"g/gone": gone})
    write_hdf5(tmp_path / "links.h5", away=away, group=group, scalar=3.0, x=np.zeros((20, 2)), **{"g/gone": gone})
    return tmp_path


@pytest.mark.parametrize(
    ("name", "datasets", "words"),
    [
        ("f.h5", ["hole"], ["hole is not in it; did you mean whole"]),
        ("cut.h5", [], ["truncated"]),
        ("bare.h5", [], ["no dataset with rows"]),
        ("links.h5", ["away"], ["away is a link to /whole in ", "f.h5; inspect that file"]),
        ("links.h5", ["scalar"], ["scalar has shape () and so no rows"]),
        ("links.h5", ["group"], ["group is a group; ", "it holds: group/label (2000,)"]),
        ("links.h5", ["g/gone"], ["gone links to /x in other.h5, which cannot be opened; put that there"]),
        ("gone.h5", [], ["no dataset with rows", "away links to /whole in f.h5", "put there what a link leads to"]),
        ("gone.h5", [], ["g/gone links to /x in other.h5, which cannot be opened", "lost links to /nothing, which"]),
    ],
)
def test_files_and_names_that_cannot_be_inspected(folder, name, datasets, words):
    with pytest.raises(DataError) as refused:
        inspect_hdf5(folder / name, datasets)
    assert [said for said in words if said not in str(refused.value)] == []


@pytest.mark.parametrize("name", ["soft", "soft_group/label", "g//label", "/g/label", "second"])
def test_a_dataset_is_measured_by_whatever_name_it_is_asked_for(path, name):
    """A soft link, a second name or another spelling printed the layouts, no rate and no advice, with exit code 0."""
    with h5py.File(path, "r+") as file:
        file["soft"] = h5py.SoftLink("/g/label")
        file["soft_group"] = h5py.SoftLink("/g")
        file["second"] = file["g/label"]
    measured = [report for report in inspect(path, name).values() if report.rates]
    assert [(report.shape, report.advice is not None) for report in measured] == [((2000,), True)]


def test_a_dataset_behind_a_link_is_read_out_of_the_file_it_lies_in(path, tmp_path):
    """Its name there was looked up in the file with the link: another dataset's rows, or a KeyError."""
    link = h5py.ExternalLink(path.name, "/whole")
    write_hdf5(tmp_path / "links.h5", away=link, whole=np.zeros((2000, 64, 4), np.float32))
    rows = hdf5_rows.build_rows(find_layouts(tmp_path / "links.h5", ["away"])[0])
    with h5py.File(path) as file:
        np.testing.assert_array_equal(rows.read(np.arange(3)), file["whole"][:3])


def test_rates_of_what_fits_into_a_cache_say_so(path, monkeypatch):
    """A file of a few kilobytes was read at 31,747 MiB/s, with no word but "warm"."""
    assert "are less than 64 MiB, and may be read out of the processor's cache" in inspect(path)["whole"].caveat
    assert inspect(path, cold=True)["whole"].caveat is None
    monkeypatch.setattr(hdf5_inspect, "SMALL_BYTES", 2000 * 1024)
    assert inspect(path)["whole"].caveat is None


def test_a_sample_is_read_in_the_order_of_random_batches(path):
    """The same batches over and over promised a quarter more of a repack than inspect of the new file then found."""

    class NotingRows:
        def __init__(self):
            self.reads = []

        def read(self, indices):
            self.reads.append(np.asarray(indices).tolist())

    layout = find_layouts(path, ["whole"])[0]
    plain, warm = NotingRows(), NotingRows()
    hdf5_rates.measure_rate("random", layout, plain, 100, 0.02, False)
    hdf5_rates.measure_warm_rate(layout, warm, 100, 0.02)
    n_before = 2 + 2000 // 100  # two reads that tell how long one takes, and every row once
    assert sorted(row for rows in warm.reads[2:n_before] for row in rows) == list(range(2000))
    timed, asked = warm.reads[n_before:], plain.reads[2:]
    assert min(len(timed), len(asked)) > 40, "more than twice round, or the orders could not differ"
    assert all(ours == theirs for ours, theirs in zip(timed, asked, strict=False))


def test_a_sample_is_read_as_the_whole_would_be(path, monkeypatch):
    """A sample fits the part of a file that stays mapped, and lies on a local disk; the whole may do neither."""
    sample = find_layouts(path, ["whole"])[0]
    whole = dataclasses.replace(sample, path=path.with_name("away.h5"), shape=(2000 * 400, 64, 4))
    rows = hdf5_rows.build_rows(sample, sample_of=whole)
    assert rows.window_bytes / sample.n_bytes == pytest.approx(STREAM_WINDOW_BYTES / whole.n_bytes, rel=1e-3)
    assert rows.window_bytes < sample.n_bytes, "pages are given back, as of the whole"
    here = Filesystem(type="ext4", is_network=False, free_bytes=None)
    monkeypatch.setattr(hdf5_rows, "read_filesystem", lambda path: AWAY if path == whole.path else here)
    assert isinstance(hdf5_rows.build_rows(sample, sample_of=whole), hdf5_rows.DirectRows)
    assert isinstance(hdf5_rows.build_rows(sample), MappedRows)
