"""Data that is missing, damaged or hostile, disks without room, and workers that die."""

import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from tests.unit.data.data_cases import write_hdf5
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils import signal_handling

from fulltilt.data import DATASETS, build_loader, explain_loader_error, make_sensor_hdf5
from fulltilt.data.loading import worker_signals
from fulltilt.data.loading.worker_signals import end_workers, list_workers
from fulltilt.engine.step.data_waits import DataWaits
from fulltilt.errors import DataError, StorageError, UsageError, WorkerDiedError
from fulltilt.tuner.trials.measuring import explain_workers

hdf5, cifar10 = DATASETS["hdf5"], DATASETS["cifar10"]


class Ends(Dataset):
    """A dataset whose worker ends itself at sample 5."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == 5:
            self.how()
        return torch.zeros(2), index


def throw(error):
    raise error


def build(how, batch_size=2, **options):
    return build_loader(Ends(how), batch_size=batch_size, shuffle=False, drop_last=False, options=options)


def load_all(how, num_workers=1, **options):
    batches = iter(build(how, num_workers=num_workers, **options))
    try:
        return [targets.tolist() for _, targets in batches]
    except Exception:
        end_workers(batches)  # left to the garbage collector, a living worker is waited for over 5 s
        raise


# torch's handler may interrupt torch's own search for the cause, which then leaves a temporary file open.
leaves_torch_files = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def kills_workers(own_tmpdir):
    yield
    gc.collect()  # the file is left here, and not in the middle of another test


def explain(load):
    """At once, as the engine does: torch's handler of a child's death may go off a moment after the first error."""
    try:
        load()
    except Exception as error:
        return explain_loader_error(error)
    raise AssertionError("nothing was raised")


@leaves_torch_files
@pytest.mark.usefixtures("kills_workers")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda: signal.raise_signal(signal.SIGKILL), "killed by SIGKILL; most .* memory: use fewer num_workers"),
        (lambda: signal.raise_signal(signal.SIGSEGV), "killed by SIGSEGV; run with num_workers 0"),
        (lambda: os._exit(7), "ended with exit code 7; run with num_workers 0"),
    ],
)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_dead_worker_is_explained(how, words, persistent):
    explained = explain(lambda: load_all(how, persistent_workers=persistent))
    assert isinstance(explained, WorkerDiedError)
    assert re.fullmatch(rf"data worker \(pid \d+\) died: {words}.*", str(explained))


@leaves_torch_files
@pytest.mark.usefixtures("kills_workers")
@pytest.mark.parametrize("hand_on", [iter, DataWaits().count])
def test_a_worker_killed_from_outside_is_explained_whatever_hands_its_batches_on(hand_on, monkeypatch):
    """A run that holds itself to a promise counts the time that it waits for batches."""
    monkeypatch.setattr(worker_signals, "POLL_S", 0.1)
    batches = iter(build(lambda: None, batch_size=1, num_workers=1))
    handed = hand_on(batches)
    next(handed)
    (worker,) = list_workers(batches)
    torchs = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it raises wherever this thread is
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    signal.signal(signal.SIGCHLD, torchs)
    assert f"(pid {worker.pid}) died: killed by SIGKILL" in str(explain(lambda: list(handed)))
    with pytest.raises(ValueError, match="Cannot find"):  # torch's handler no longer knows of it
        signal_handling._remove_worker_pids(id(batches))


@pytest.mark.parametrize(
    ("torchs", "words"),
    [
        (
            "(pid 12) is killed by signal: Bus error. It is possible that dataloader's workers are out",
            r"SIGBUS; /dev/shm has [\d.]+ \w+ of [\d.]+ \w+ free; shared memory .* --shm-size",
        ),
        ("(pid(s) 12, 13) exited unexpectedly", r"pid 12, 13\) died: ended without a word"),
        ("(pid 9) is killed by signal: Odd signal. ", r"killed by a signal \(Odd signal\)"),
    ],
)
def test_every_spelling_of_torch_is_read(torchs, words):
    assert re.search(words, str(explain_loader_error(RuntimeError(f"DataLoader worker {torchs}"))))


@pytest.mark.parametrize(
    "error", [RuntimeError("DataLoader worker (pid(s) 12, 14, 15) exited unexpectedly"), ConnectionResetError()]
)
def test_every_worker_that_died_is_named(error):
    ends = {12: -9, 13: None, 14: -9, 15: 3}
    workers = [SimpleNamespace(pid=pid, exitcode=code, join=lambda timeout: None) for pid, code in ends.items()]
    error.data_iterator = SimpleNamespace(_workers=workers, _worker_pids_set=False)
    said = str(explain_loader_error(error))
    assert said.startswith(
        "data worker (pid 12, 14, 15) died: killed by SIGKILL and ended with exit code 3; most often"
    )


def test_our_own_error_in_a_worker_keeps_its_words_and_loses_the_traceback():
    said = "row 5 of x.h5 is damaged; copy it again"
    explained = explain(lambda: load_all(lambda: throw(DataError(said))))
    assert (type(explained), str(explained)) == (DataError, said)


LINE = f"{__file__}:{throw.__code__.co_firstlineno + 1}"
SKIP = "data.on_bad_sample=skip(limit=100) leaves such samples out"
MEND = f"mend the code there, or raise OSError there where a sample is damaged: {SKIP}"


@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "said", "remedy"),
    [
        (ValueError("bad row\nof many"), "ValueError: bad row", SKIP),
        (FileNotFoundError(2, "no such file", "5.png"), "FileNotFoundError: [Errno 2] no such file: '5.png'", SKIP),
        (KeyError("label"), "KeyError: 'label'", MEND),
        (RuntimeError(), "RuntimeError", MEND),
    ],
)
def test_an_error_of_a_data_set_names_sample_line_and_remedy_with_workers_and_without(n_workers, error, said, remedy):
    """Two plans that fail alike say the same words, by which a search knows that it need not go on."""
    with pytest.raises(DataError) as caught, explain_workers():
        load_all(lambda: throw(error), n_workers)
    assert str(caught.value) == f"sample 5 of Ends cannot be read: {said} ({LINE}); {remedy}"


def test_an_error_of_a_stream_or_of_a_whole_batch_says_where():
    class Stream(IterableDataset):
        def __iter__(self):
            throw(ValueError("of a stream"))

    class Whole(Ends):
        def get_batch(self, indices):
            throw(ValueError("of a batch"))

    given = {"batch_size": 2, "shuffle": False, "drop_last": False, "options": {"num_workers": 1}}
    said = []
    for dataset in (Stream(), Whole(None)):
        batches = iter(build_loader(dataset, **given))
        said.append(str(explain(lambda batches=batches: next(batches))))
        end_workers(batches)
    assert said[0] == f"a data worker met ValueError: of a stream ({LINE}); mend the data, or the code there"
    assert said[1].startswith("a batch that begins with sample 0 of Whole cannot be read: ValueError: of a batch")


def test_without_workers_a_stream_or_a_collate_that_fails_is_one_message_too():
    class Begins(IterableDataset):
        def __iter__(self):
            throw(ValueError("no such row"))

    class Breaks(Begins):
        def __iter__(self):
            yield torch.zeros(2), 0
            throw(ValueError("no such row"))

    def fail_to_join(samples):
        throw(ValueError("no such row"))

    given = {"batch_size": 1, "shuffle": False, "drop_last": False, "options": {"num_workers": 0}}
    for dataset, parts in ((Begins(), {}), (Breaks(), {}), (Ends(lambda: None), {"collate": fail_to_join})):
        said = str(explain(lambda dataset=dataset, parts=parts: list(build_loader(dataset, **given, **parts))))
        read = f"a batch of {type(dataset).__name__} cannot be read: ValueError: no such row ({LINE})"
        assert said == f"{read}; mend the data, or the code there"


@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")])
def test_want_of_memory_and_what_no_data_set_raised_is_left_alone(n_workers, error):
    assert explain(lambda: load_all(lambda: throw(error), n_workers)) is None
    assert explain_loader_error(ValueError("of the model")) is None
    assert explain_loader_error(KeyError("x")) is None
    plain = DataError("as it was")
    assert explain_loader_error(plain) is plain


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.h5", None, "does not exist; check data.path or --data-path"),
        ("", None, "is a folder"),
        ("text.h5", lambda whole: b"a,b,c\n" * 100, "is not an HDF5 file"),
        ("empty.h5", lambda whole: b"", "is empty"),
        ("cut.h5", lambda whole: whole[:30_000], "is truncated: 30,000 bytes"),
        ("head.h5", lambda whole: whole[:8], "(truncated|cannot be opened|not an HDF5)"),
    ],
)
def test_hdf5_files_that_are_none(tmp_path, name, content, words):
    if content:
        whole = write_hdf5(tmp_path / "whole.h5", input=np.zeros((5000, 4), "f4"), label=np.arange(5000))
        (tmp_path / name).write_bytes(content(whole.read_bytes()))
    with pytest.raises(DataError, match=words):
        hdf5(path=str(tmp_path / name))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"path": None}, r"set data\.path"),
        ({"inputs": "inputs"}, r"inputs is not in it; did you mean input\?.*label \(50,\)"),
        ({"targets": "group"}, r"group is a group; .*group/weights \(50, 2\)"),
        ({"targets": "label/deeper"}, "is not in it"),
        ({"path": "bare.h5"}, "no datasets at all"),
        ({"transform": "random_flip"}, r"works on images \(C, H, W\)"),
        ({"transform": "random_flip", "inputs": "rows"}, r"works on images \(C, H, W\)"),
    ],
)
def test_hdf5_names_that_are_not_there_and_inputs_that_are_no_images(tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    write_hdf5("bare.h5")
    more = {"group/weights": np.zeros((50, 2)), "rows": np.zeros((50, 2, 7))}
    write_hdf5("f.h5", input=np.zeros((50, 4)), label=np.arange(50), **more)
    with pytest.raises(DataError, match=words):
        hdf5(**{"path": "f.h5", **given})


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        (np.zeros((5, 2)), np.zeros(4), "numbers of rows differ: input 5, label 4"),
        (np.zeros((0, 2)), np.zeros(0), r"shape \(0, 2\); at least one row"),
        (np.float32(3), np.zeros(1), "at least one row"),
        (np.zeros(5), np.array([b"a"] * 5), "only whole numbers and floats"),
        (np.zeros(4, np.dtype([("a", "f4"), ("b", "i4")])), np.zeros(4), "input holds .*only whole numbers and floats"),
        (["a", "b", "c", "d"], np.zeros(4), "input holds .*only whole numbers and floats"),
        (h5py.Empty("f4"), np.arange(4), "input is empty"),
        (np.zeros(1), np.zeros(1), "leaves none for val"),
    ],
)
def test_hdf5_contents_that_cannot_train(tmp_path, inputs, targets, words):
    path = write_hdf5(tmp_path / "f.h5", input=inputs, label=targets)
    with pytest.raises(DataError, match=words):
        hdf5("val", path=str(path))


def test_a_loader_of_no_batch_or_fewer_than_no_workers_is_refused():
    for batch_size, workers in ((0, 0), (-1, 0), (2, -1)):
        with pytest.raises(UsageError, match=f"batch_size {batch_size} .* num_workers {workers}"):
            build(None, batch_size=batch_size, num_workers=workers)


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("trap",)


def write_batches(folder, content):
    """CIFAR-10 as pickles, all of them alike."""
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_wants_to_run_code_is_refused_before_it_does(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    content = {b"data": np.zeros((1, 3072), np.uint8), b"labels": [Hostile()]}
    write_batches(tmp_path, pickle.dumps(content, protocol=protocol))
    with pytest.raises(DataError, match=r"data_batch_1 cannot be read.*mkdir; only numpy arrays"):
        cifar10(path=str(tmp_path))
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        b"not a pickle",
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2]})[:-40],
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": np.zeros((2, 3072), np.float32), b"labels": [1, 2]}),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 10]}),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": ["a", "b"]}),
    ],
)
def test_damaged_pickles_are_named(tmp_path, content):
    write_batches(tmp_path, content)
    with pytest.raises(DataError, match="data_batch_1"):
        cifar10(path=str(tmp_path))


def test_pickles_damaged_anywhere_never_end_in_another_error(tmp_path):
    rng = np.random.default_rng(0)
    content = {b"data": rng.integers(0, 256, (1, 3072), dtype=np.uint8), b"labels": [1], b"filenames": [b"x.png"]}
    whole = pickle.dumps(content, protocol=2)
    for _ in range(300):
        damaged = bytearray(whole)
        for position in rng.integers(0, len(whole), 2):
            damaged[position if rng.random() < 0.5 else position % 200] = rng.integers(0, 256)
        (tmp_path / "test_batch").write_bytes(bytes(damaged))
        try:
            dataset = cifar10("val", path=str(tmp_path))
        except DataError as error:
            assert "test_batch" in str(error)  # noqa: PT017 - either outcome is right, another exception is not
        else:
            assert dataset.images.shape[1:] == (3, 32, 32)


@pytest.mark.parametrize(
    ("path", "split", "files", "words"),
    [
        ("none", "train", {}, "does not exist"),
        ("", "train", {}, "no CIFAR-10 in"),
        ("", "train", {"cifar-10-python.tar.gz": b""}, r"cifar-10-python\.tar\.gz is there"),
        ("cifar-10-python.tar.gz", "train", {"cifar-10-python.tar.gz": b""}, "is a file and no tar"),
        ("", "val", {"test_batch.bin": b"\1" * 3072}, "3072 bytes, no whole number of 3073"),
        ("", "train", {"test_batch.bin": b"\1" * 3072}, r"data_batch_1\.bin is missing"),
        ("", "val", {"test_batch.bin": b"\x0b" * 3073}, "classes from 11 to 11"),
    ],
)
def test_cifar10_that_is_not_there_or_not_whole(tmp_path, path, split, files, words):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        cifar10(split, path=str(tmp_path / path))


def test_no_room_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(StorageError, match=r"needs [\d,]+\.\d+ TiB and .* has [\d.,]+ \w+ free; .*fewer events"):
        make_sensor_hdf5(tmp_path / "s.h5", 1_000_000_000)
    assert list(tmp_path.iterdir()) == []


def test_room_that_runs_out_leaves_no_file_and_is_said(tmp_path):
    write_hdf5(tmp_path / "in.h5", x={"data": np.random.rand(4000, 64), "chunks": (100, 10), "compression": "gzip"})
    script = """
        import resource, signal
        from fulltilt.data import make_sensor_hdf5, repack_hdf5
        from fulltilt.errors import StorageError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        for write, given in (
            (make_sensor_hdf5, {"path": "out.h5", "n_samples": 4000, "n_sensors": 100}),
            (repack_hdf5, {"source": "in.h5", "target": "out.h5"}),
            (repack_hdf5, {"source": "in.h5", "target": "out.h5", "compression": "gzip"}),
        ):
            try:
                write(**given)
            except StorageError as error:
                print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr, done.stdout.count("no space left for out.h5")) == (0, "", 3)
    assert [file.name for file in tmp_path.iterdir()] == ["in.h5"]


def test_an_interrupt_leaves_the_old_file_and_nothing_else(tmp_path):
    path = make_sensor_hdf5(tmp_path / "s.h5", 10, 60)
    before = path.read_bytes()

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_sensor_hdf5(path, 1000, 60, force=True, progress=interrupt)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
