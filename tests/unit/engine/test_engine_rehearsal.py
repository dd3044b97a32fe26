"""A row's memory is that of a whole run: what comes after the steps is run too, and in nobody's rate."""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from training_cases import CONSTANT, N_FEATURES, Points, PointStream, build_config, build_model, build_workload, fail

from fulltilt.config import plan_of
from fulltilt.data import build_loader
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.measured import rehearsal
from fulltilt.engine.measured.measurement import run_measured
from fulltilt.engine.measured.probes import run_device_probe, run_memory_probe
from fulltilt.engine.measured.rehearsal import MAX_LOOKS, find_largest_samples
from fulltilt.errors import DeviceMemoryError, NonFiniteLossError, UsageError


class Words(Dataset):
    """Sentences of 4 words, one of 40."""

    def __init__(self, n_samples: int = 48, longest: int = 29):
        self.n_samples, self.longest = n_samples, longest

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(40 if index == self.longest else 4)


def pad(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True), torch.zeros(len(samples))


class Lengths(nn.Module):
    """Remembers the shapes of batches that it saw, training and evaluation apart."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(())), {True: [], False: []}

    def forward(self, words_BT: torch.Tensor) -> torch.Tensor:
        self.seen[self.training].append(tuple(words_BT.shape))
        return (self.weight * words_BT).mean(1)


LENGTHS = {"dataset": Words, "collate": pad, "loss": nn.functional.mse_loss, "model": Lengths}
LENGTHS |= {"prepare": None, "metrics": {}}


class Saved(nn.Linear):
    """Counts how often its state is asked for."""

    n_saves = 0

    def get_extra_state(self) -> int:
        self.n_saves += 1
        return self.n_saves

    def set_extra_state(self, state: int) -> None: ...


def build(settings=None, **changes):
    config = build_config(**CONSTANT | (settings or {}))
    return build_run(config, plan_of(config).replace(threads=1), device="cpu", workload=build_workload(**changes))


def measure(run, how=run_measured, on_part=lambda part: None):
    parts, options = [], {"max_warmup_s": 1.0} if how is run_measured else {}

    def note(part):
        parts.append(part)
        on_part(part)

    with run:
        return how(run, n_steps=4, max_measure_s=1.0, on_part=note, **options), parts


def list_memory_notes(result):
    return [note for note in result.notes if note.startswith("memory:")]


def test_a_run_evaluates_one_batch_and_saves_once():
    run = build(validation=lambda: Points(n_samples=64, noise=0), model=lambda: Saved(N_FEATURES, 3))
    saved = run.setup.model.n_saves
    seen = []
    run.setup.model.register_forward_hook(lambda model, inputs, _: seen.append((model.training, len(inputs[0]))))
    result, parts = measure(run)
    assert parts == ["evaluation", "checkpoint"]
    assert [n for is_training, n in seen if not is_training] == [16]
    assert run.setup.model.n_saves == saved + 1
    assert run.setup.model.training
    assert result.memory_peak_part in ("steps", *parts)
    assert list_memory_notes(result) == []


def test_the_peak_of_an_evaluation_with_large_batches_is_the_rows():
    n_features = 2**13

    class Wide(Dataset):
        def __len__(self):
            return 4096

        def get_batch(self, indices):
            return torch.ones(len(indices), n_features), torch.zeros(len(indices), dtype=torch.long)

    def measure_wide(**data):
        fields = {"dataset": Wide, "validation": Wide, "prepare": None, "metrics": {}}
        return measure(build({"data__batch_size": 4} | data, model=lambda: nn.Linear(n_features, 3), **fields))[0]

    small, large = measure_wide(), measure_wide(data__val_batch_size=4096)
    assert large.memory_peak_part == "evaluation"
    grown_bytes = (large.memory_rss_peak_gib - small.memory_rss_peak_gib) * 2**30
    assert grown_bytes > 0.7 * 4096 * n_features * 4, "128 MiB of inputs"


@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_on_the_largest_samples_follow_where_samples_differ_in_size(accumulate):
    run = build({"speed__accumulate": accumulate}, **LENGTHS, validation=lambda: Words(longest=47))
    _, parts = measure(run)
    assert parts == ["largest samples", "evaluation", "checkpoint"]
    seen = run.setup.model.seen
    assert seen[True][-2 * accumulate :] == [(16, 40)] * 2 * accumulate, "all micro-batches of a window"
    assert seen[False] == [(16, 40)], "the long one is the last of the validation set"
    assert measure(build(**LENGTHS, validation=None), run_device_probe)[1][0] == "largest samples", "in a probe too"


def test_samples_that_are_stacked_are_not_looked_at():
    class Unread(TensorDataset):
        def __getitem__(self, index):
            raise AssertionError("a sample was read")

    assert find_largest_samples(load(Unread(torch.zeros(9, 2)), collate=None), 4) is None
    assert find_largest_samples(DataLoader(PointStream(), batch_size=4), 4) is None


def load(dataset, collate=pad, batch_size=4):
    return build_loader(dataset, batch_size=batch_size, shuffle=True, drop_last=False, collate=collate, seed=1)


def test_the_largest_of_those_looked_at_come_first_and_others_fill_the_batch():
    found = find_largest_samples(load(Words(n_samples=6, longest=4)), 4)
    assert (found.indices[0], len(set(found.indices)), found.n_looked, found.n_samples) == (4, 4, 6, 6)
    assert find_largest_samples(load(Words(longest=-1)), 4) is None, "all of one size"
    many = find_largest_samples(load(Words(n_samples=64 * MAX_LOOKS, longest=64 * 64)), 4 * MAX_LOOKS)
    assert (many.indices[0], many.n_looked) == (64 * 64, MAX_LOOKS)
    assert len(set(many.indices)) == 4 * MAX_LOOKS


def test_looking_for_the_largest_ends_when_its_time_is_over():
    ticks = itertools.count(step=1.0)
    found = find_largest_samples(load(Words(n_samples=100, longest=1)), 4, clock=lambda: next(ticks))
    assert found is not None
    assert found.n_looked < 10
    assert found.indices[0] == 1


def refuse(words):
    class Refusing(nn.Linear):
        def forward(self, inputs):
            if not self.training:
                raise RuntimeError(words)
            return super().forward(inputs)

    return lambda: Refusing(N_FEATURES, 3)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"model": refuse("DefaultCPUAllocator: can't allocate memory")}, r"run with batch_size 16 .*val_batch_size"),
        ({"validation": fail(MemoryError("no room for the rows"))}, "no room for the rows"),
    ],
)
def test_out_of_memory_in_a_part_ends_the_trial_and_names_the_part(parts, words):
    with pytest.raises(DeviceMemoryError, match=f"in the part 'evaluation' .*{words}"):
        measure(build(**parts))


def test_a_metric_that_train_would_refuse_ends_the_trial():
    with pytest.raises(UsageError, match=r"metric acc returned float; it must return one value a sample, \(B,\)"):
        measure(build(metrics={"acc": lambda outputs, targets: outputs.mean().item()}))


COSINE, STREAM = {"optim__schedule": "cosine"}, {"dataset": PointStream}


@pytest.mark.parametrize(
    ("settings", "fields", "parts", "said"),
    [
        ({"run__evaluate_every": None}, {}, ["checkpoint"], None),
        ({}, {"validation": None}, ["checkpoint"], None),
        ({}, {"model": refuse("shapes do not fit")}, ["evaluation", "checkpoint"], "shapes do not fit"),
        ({}, {"assess": fail(AssertionError("ran"))}, ["evaluation", "checkpoint"], "assessment of points"),
        # A schedule of a stream has no end; the learning rate is never set here.
        *((COSINE | {"optim__warmup": n}, STREAM, ["evaluation", "checkpoint"], None) for n in (0, 500)),
    ],
)
def test_what_cannot_be_rehearsed_is_left_out_and_said_so(settings, fields, parts, said):
    result, found = measure(build(settings, **fields))
    assert found == parts
    notes = list_memory_notes(result)
    assert any(said in note for note in notes) if said else notes == []
    assert result.samples_per_s > 0


@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_is_left_of_the_checkpoint_and_one_without_a_disk_or_time_is_a_note(tmp_path, monkeypatch, is_async):
    settings = {"run__async_checkpoint": is_async}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result, _ = measure(build(settings))
    assert not list(tmp_path.iterdir())
    assert list_memory_notes(result) == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    result, parts = measure(build(settings))
    assert parts[-1] == "checkpoint"
    assert any("a checkpoint could not be rehearsed" in note and "gone" in note for note in result.notes)
    monkeypatch.setattr(rehearsal, "MAX_CHECKPOINT_BYTES", 10)
    result, parts = measure(build(settings))
    assert parts == ["evaluation"]
    assert any("takes too long for a trial; the peak is without it" in note for note in result.notes)


def test_weights_that_cannot_be_saved_end_the_trial():
    """The last loss was finite still; ``train`` would stop at its first checkpoint."""
    run = build(validation=None)
    with pytest.raises(NonFiniteLossError, match="parameters hold NaN"):
        measure(run, on_part=lambda part: nn.init.constant_(run.setup.model[0].bias, float("nan")))


def test_workers_of_an_epoch_that_ends_before_the_evaluation_are_gone_by_then():
    alive = []
    measure(build({"data__num_workers": 1}), on_part=lambda part: alive.append(len(multiprocessing.active_children())))
    assert alive[0] == 0


def test_the_estimate_on_fake_tensors_evaluates_with_the_validation_batch():
    with build({"data__val_batch_size": 4096}, model=build_model) as large, build(model=build_model) as small:
        peaks = [run_memory_probe(run).memory_allocated_peak_gib for run in (small, large)]
    assert (peaks[1] - peaks[0]) * 2**30 > 4096 * N_FEATURES * 4
