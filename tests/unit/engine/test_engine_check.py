"""The dry run: a problem in the list instead of a traceback, and notes that come from what is really there."""

import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.fake_nvml import FakeNvml, build_status
from torch import nn
from torch.utils.data import TensorDataset
from training_cases import fail

from fulltilt import Workload
from fulltilt.config import config_from_values
from fulltilt.engine.build import assemble
from fulltilt.engine.check import checklist as checks
from fulltilt.engine.check.checklist import describe_error, run_checks
from fulltilt.errors import StorageError
from fulltilt.hardware import NvmlDevice, NvmlProcess
from fulltilt.records.run_folder import RunFolder

GIB = 2**30


def build_data():
    return TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))


def build_odd_data():
    return TensorDataset(torch.randn(65, 4), torch.randint(2, (65,)))


class Rigid(nn.Linear):
    """A batch of eight is written into it."""

    def __init__(self):
        super().__init__(4, 2)

    def forward(self, inputs):
        return super().forward(inputs.view(8, 4))


def build_norm():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def build_wide_data():
    return TensorDataset(torch.randn(64, 5), torch.randint(2, (64,)))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Check a workload with some parts of its own; return the first item of each name."""

    def run(*, values=None, memory_limit_bytes=None, **parts):
        given = {"model": lambda: nn.Linear(4, 2), "dataset": build_data, "loss": nn.CrossEntropyLoss()} | parts
        monkeypatch.setattr(assemble, "build_workload", lambda config: Workload(**given))
        config = config_from_values({"data": {"batch_size": 8}} | (values or {}), base_dir=str(tmp_path))
        options = {"rank_devices": ["cpu"] * (config.run.n_ranks or 0), "memory_limit_bytes": memory_limit_bytes}
        items = run_checks(config, device="cpu", out_dir=tmp_path / "runs", **options)
        return {item.name: item for item in reversed(items)}

    return run


def test_what_works_has_no_problem_and_says_what_one_step_took(run):
    items = run(validation=build_data)
    assert {item.verdict for item in items.values()} == {"ok"}
    assert "8 samples forward, backward and update; loss" in items["one step"].text
    assert "10 parameters, 64 samples, 8 steps an epoch" in items["build"].text
    assert "GiB" in items["memory"].text


def test_a_metric_that_is_the_mean_of_the_batch_is_a_problem(run):
    metrics = {"acc": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()}
    item = run(validation=build_data, metrics=metrics)["validation"]
    said = "metric acc returned a tensor of shape (); it must return one value a sample, (B,): leave out .mean()"
    assert (item.verdict, item.text) == ("problem", f"in the evaluation: {said}")


def test_every_note_of_the_build_is_an_item_of_its_own(monkeypatch, tmp_path):
    given = {"model": lambda: nn.Linear(4, 2), "dataset": build_data, "loss": nn.CrossEntropyLoss()}
    given["explain"] = lambda batch_size, accumulate: ["a first note", "a second note"]
    workload = Workload(**given, optimizer=lambda parameters: torch.optim.SGD([*parameters][:1], lr=0.1))
    monkeypatch.setattr(assemble, "build_workload", lambda config: workload)
    config = config_from_values({"data": {"batch_size": 8}}, base_dir=str(tmp_path))
    items = run_checks(config, device="cpu", out_dir=tmp_path)
    built = [(item.verdict, item.text) for item in items if item.name == "build"]
    assert built[0][0] == "ok"
    left_out = "the optimizer holds 8 of 10 parameters with gradients; the rest stays as it is"
    assert built[1:] == [("note", "a first note"), ("note", "a second note"), ("note", left_out)]


N_WORKERS = (os.cpu_count() or 1) + 1


@pytest.mark.parametrize(
    ("parts", "name", "verdict", "words"),
    [
        ({"loss": fail(RuntimeError("mat1 and mat2"))}, "one step", "problem", "RuntimeError: mat1 and mat2"),
        (
            {"loss": lambda outputs, targets: outputs.sum() * float("nan")},
            "one step",
            "problem",
            "the loss is nan in step 1 (",
        ),
        ({"validation": lambda: TensorDataset(torch.zeros(0, 4))}, "build", "problem", "the validation set of"),
        ({"validation": build_wide_data}, "validation", "problem", "features meet weights for"),
        (
            {"dataset": build_odd_data, "model": build_norm},
            *(
                "last batch",
                "problem",
                "1 of 8 samples: BatchNorm cannot train on one value per channel (in BatchNorm1d(",
            ),
        ),
        (
            {"model": Rigid, "validation": build_odd_data},
            "validation",
            "problem",
            "shape '[8, 4]' is invalid for input",
        ),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "loss", "note", "the sum over a batch, so speed.accumulate"),
        ({"loss": fail(SystemExit(0))}, "one step", "problem", "called sys.exit(0)"),
        ({}, "validation", "note", "there is no validation set"),
        ({"values": {"run": {"checkpoint_every": None}}}, "checkpoints", "note", "off"),
        (
            {"values": {"data": {"batch_size": 8, "num_workers": N_WORKERS}}},
            *("data workers", "note", f"{N_WORKERS} data workers"),
        ),
    ],
)
def test_what_would_ruin_a_run_is_named(run, parts, name, verdict, words):
    item = run(**parts)[name]
    assert item.verdict == verdict
    assert words in item.text


def test_a_loss_that_is_not_finite_is_told_in_the_words_of_train_and_nothing_is_stored(run, own_tmpdir):
    tensors = [*build_data().tensors]
    tensors[0][:] = float("nan")
    item = run(dataset=lambda: TensorDataset(*tensors))["one step"]
    said = r"the loss is nan in step 1 \(learning rate \S+, precision \w+\); the batch of step 1: it holds NaN or "
    said += r"infinity in sample \d+, .* and 3 more of the training set; mend these samples, or leave them out of .*"
    assert item.verdict == "problem"
    assert re.fullmatch(said, item.text)
    assert list(Path(tempfile.gettempdir()).glob("fulltilt-check-*")) == []


def test_of_data_that_are_not_there_no_disk_is_praised(run, tmp_path):
    name = "data on a local disk"
    assert run(values={"data": {"path": str(tmp_path)}})[name].text.startswith(f"{tmp_path} lies on ")
    assert name not in run(values={"data": {"path": str(tmp_path / "gone")}})


def test_a_model_that_cannot_be_built_leaves_the_checks_that_need_none(run):
    items = run(model=fail(ValueError("no such width")))
    assert items["build"].verdict == "problem"
    assert "no such width" in items["build"].text
    assert "one step" not in items
    assert "checkpoints" in items


def test_a_file_that_vanishes_while_files_are_counted_ends_nothing(run, monkeypatch, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "old.log").write_bytes(b"x" * 30 * 2**20)
    (tmp_path / "runs" / "gone.log").touch()
    stat = Path.stat

    def vanish(path, **options):
        found = stat(path, **options)
        if path.name == "gone.log":
            path.unlink()
        return found

    monkeypatch.setattr(Path, "stat", vanish)
    assert "30 MiB lie there" in run()["disk"].text


TWO = {"run": {"device": "cpu", "n_ranks": 2}, "data": {"batch_size": 7, "num_workers": 1}}


def test_over_ranks_the_step_is_that_of_one_ranks_part_and_none_is_started(run, monkeypatch):
    seen = []
    monkeypatch.setattr(checks, "read_memory_limit_bytes", lambda: 40 * GIB)

    def measure(outputs, targets):
        seen.append((os.getpid(), len(targets)))
        return nn.functional.cross_entropy(outputs, targets)

    items = run(values=TWO, loss=measure)
    assert seen == [(os.getpid(), 4)]
    assert items["one step"].text.startswith("4 samples (rank 0's part, of 2 ranks) forward")
    assert "2 ranks; of a micro-batch of 7 they get 4, 3 samples" in items["ranks"].text
    assert items["ranks"].verdict == "ok"
    assert "64 samples, 10 steps an epoch" in items["build"].text
    assert items["data workers"].text.startswith("2 data workers of 2 ranks")
    assert "of 20.00 GiB a rank, of 2 ranks (" in items["memory"].text
    assert not [name for name, item in items.items() if item.verdict == "problem"]


@pytest.mark.parametrize(
    ("values", "parts", "words"),
    [
        ({"data": {"batch_size": 1}}, {}, "batch_size 1 is over all 2 devices"),
        ({}, {"compares_samples": True}, "compares the samples of a batch"),
        ({"data": {"batch_size": 8, "on_bad_sample": "skip(limit=3)"}}, {}, "data.on_bad_sample skip"),
        ({"speed": {"shard": "full"}, "optim": {"ema": 0.9}}, {}, "optim.ema keeps the average"),
        ({"speed": {"shard": "full"}}, {"assess": lambda model, device: {}}, "assess the model by themselves"),
    ],
)
def test_what_train_refuses_over_ranks_is_a_problem(run, values, parts, words):
    """it came to light when the ranks had been started; with one process there is nothing to refuse"""
    two = run(values={"run": {"device": "cpu", "n_ranks": 2}} | values, **parts)
    assert two["ranks"].verdict == "problem"
    assert words in two["ranks"].text
    assert "ranks" not in run(values=values, **parts)


def test_the_gpu_is_shown_with_what_is_free_and_who_uses_it(monkeypatch):
    device = NvmlDevice(index=0, name="Card", uuid="GPU-1", memory_total_bytes=12 * GIB, compute_capability=(8, 6))
    status = build_status(
        memory_used_bytes=3 * GIB,
        memory_free_bytes=9 * GIB,
        processes=(NvmlProcess(pid=4711, memory_used_bytes=2 * GIB),),
    )
    monkeypatch.setattr(checks, "find_device_index", lambda device, nvml: 0)
    items = {item.name: item for item in checks.check_gpu("cuda:0", FakeNvml([device], {0: status}))}
    assert items["device"].text == "cuda:0: 9.00 GiB of 12.00 GiB free"
    assert "pid 4711" in items["other processes"].text


def test_an_error_is_told_in_the_users_terms():
    said = describe_error(MemoryError("Unable to allocate 7 GiB"))
    assert said.startswith("out of memory: MemoryError: Unable to allocate 7 GiB; use a smaller")
    assert describe_error(ValueError("")) == "ValueError: no message"


class Small(nn.Linear):
    """A model without room for more than ``n_rows`` samples, in the mode that it is made for."""

    def __init__(self, n_rows, is_training):
        super().__init__(4, 2)
        self.n_rows, self.is_training = n_rows, is_training

    def forward(self, x):
        if self.training == self.is_training and len(x) > self.n_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 rows.")
        return super().forward(x)


@pytest.mark.parametrize(
    ("name", "key", "goes_on"),
    [("one step", "batch_size", "batch_size 4 × accumulate 2"), ("validation", "val_batch_size", "val_batch_size 4")],
)
def test_want_of_memory_says_what_train_goes_on_with(run, name, key, goes_on):
    """It was told of a checkpoint that nobody had written."""
    parts = {"model": lambda: Small(6, name == "one step"), "validation": build_data}
    said = f"out of memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 9 rows.; use a smaller data.{key}"
    assert run(**parts)[name].text == f"{said}; train goes on with {goes_on}"
    values = {"data": {"batch_size": 8}, "run": {"on_out_of_memory": "stop"}}
    assert run(values=values, **parts)[name].text == said


def test_the_traceback_of_a_dataset_is_kept_where_no_run_lies(run, tmp_path, own_tmpdir):
    """It was lost in a project without the folder runs, and lay beside its runs in others."""

    class Bad(TensorDataset):
        def __getitem__(self, index):
            raise ValueError("no such pixel")

    assert run()["one step"].verdict == "ok"
    assert list(Path(tempfile.gettempdir()).glob("fulltilt-check-*")) == []
    said = run(dataset=lambda: Bad(*build_data().tensors))["one step"].text
    log = Path(re.search(r"\(log: (.*)\)", said)[1])
    assert 'raise ValueError("no such pixel")' in log.read_text()
    assert log.parent.name.startswith("fulltilt-check-")
    assert not (tmp_path / "runs").exists()


def test_the_disk_needs_three_times_the_state_of_model_and_optimizer(run):
    parts = {"model": lambda: nn.Linear(4, 2**18), "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    items = run(**parts)
    assert items["disk"].text.startswith("checkpoints and logs need about 15 MiB in ")


@pytest.mark.parametrize("target", [None, "gone"])
def test_a_place_that_can_be_no_folder_is_refused_in_the_words_of_train(run, tmp_path, target):
    place = tmp_path / "runs"
    place.write_text("") if target is None else place.symlink_to(target)
    with pytest.raises(StorageError) as refused:
        RunFolder(place, fingerprint_parts={}, command="train", results=[])
    item = run()["disk"]
    assert (item.verdict, item.text) == ("problem", str(refused.value))
    assert item.text == f"{place} is no folder, and one is needed; give another place with --out"


def test_a_step_within_the_memory_limit_is_told_as_an_estimate_and_taken(run):
    items = run(memory_limit_bytes=GIB)
    assert items["memory limit"].verdict == "ok"
    assert re.search(r"estimated for cpu.* of the limit of 1\.00 GiB", items["memory limit"].text)
    assert "one step" in items


def test_a_process_above_the_limit_is_a_problem_whatever_the_estimate_says(run):
    """848 MiB were estimated and 1.58 GiB measured: ``ok`` under a limit of 1 GiB."""
    items = run(memory_limit_bytes=10 * 2**20)
    assert items["memory limit"].verdict == "ok"
    assert items["memory"].verdict == "problem"
    assert " of 10 MiB " in items["memory"].text
    assert "the process held " in items["memory"].text, "half a batch of a few KiB gives nothing of it back"
    assert "before the step, so a smaller batch does not help: allow more than " in items["memory"].text


@pytest.mark.parametrize(
    ("used_gib", "held_gib", "said"),
    [
        (0.775, 0.341, "divide data.batch_size by 4 and set speed.accumulate 12"),
        (0.6, 0.1, "divide data.batch_size by 2 and set speed.accumulate 6"),
        (0.8, 0.52, "so a smaller batch does not help: allow more than 819 MiB"),
    ],
)
def test_how_much_smaller_a_batch_has_to_be_is_reckoned_from_what_it_can_give_back(used_gib, held_gib, said):
    """Half of a batch was too much, and it was said that no smaller one helps."""
    run = SimpleNamespace(batch_size=96, device=torch.device("cpu"), plan={"accumulate": 3})
    item = checks._check_memory(run, used_gib, held_gib, 1, 520 * 2**20)
    assert (item.verdict, item.text.endswith(said)) == ("problem", True), item.text


def build_wide_model():
    return nn.Sequential(nn.Linear(4, 4096), nn.ReLU(), nn.Linear(4096, 2))


def test_a_step_above_the_memory_limit_is_a_problem_with_a_micro_batch_that_fits_and_is_not_taken(run):
    values = {"data": {"batch_size": 64}}
    large, small = 64 * 4096 * 4, 8 * 4096 * 4  # of one of the wide layer's tensors
    items = run(values=values, model=build_wide_model, memory_limit_bytes=large + small)
    assert items["memory limit"].verdict == "problem"
    found = re.search(r"data\.batch_size=(\d+) speed\.accumulate=(\d+)", items["memory limit"].text)
    assert found is not None
    assert int(found[1]) < 64
    assert int(found[1]) * int(found[2]) == 64
    assert "speed.activation_checkpointing=true" in items["memory limit"].text
    assert "one step" not in items


def test_a_loss_that_compares_samples_is_pointed_to_gradient_caching(run):
    parts = {"model": build_wide_model, "compares_samples": True}
    items = run(memory_limit_bytes=1000, **parts)
    assert "exact_batch=true" in items["memory limit"].text
    assert "accumulate=" not in items["memory limit"].text


def test_a_step_that_needs_its_data_has_no_estimate_and_is_taken(run):
    def measure(outputs, targets):
        return outputs.mean() * outputs.detach().sum().item()

    items = run(memory_limit_bytes=1000, loss=measure)
    assert items["memory limit"].verdict == "note"
    assert "real probes" in items["memory limit"].text
    assert "one step" in items
