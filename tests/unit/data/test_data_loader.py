"""The loader: whole batches, order, seeds, threads, collation."""

import os
import random
import traceback

import numpy as np
import pytest
import torch
from data_cases import assert_equal, make_generator
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fulltilt.data import DATASETS, build_loader, fast_collate
from fulltilt.data.loading.worker_signals import end_workers
from fulltilt.errors import DataError


class Squares(Dataset):
    """Plain dataset of one call per sample."""

    def __init__(self, n=20):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor([index, index**2], dtype=torch.float32), index


class OnlyWhole(Squares):
    def __getitem__(self, index):
        raise AssertionError("a sample was asked for one by one")


class Batches(OnlyWhole):
    def get_batch(self, indices):
        rows = torch.tensor(indices)
        return torch.stack([rows, rows**2], 1).float(), rows


class Lists(OnlyWhole):
    """Torch's own batched protocol."""

    def __getitems__(self, indices):
        return [Squares.__getitem__(self, index) for index in indices]


class Noise(Squares):
    """A user's augmentation with all three global generators."""

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()]), index


class Surroundings(Squares):
    def __getitem__(self, index):
        return os.getpid(), torch.get_num_threads()


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.full((2,), float(i)), i) for i in range(7)])


class Uneven(Squares):
    def __getitem__(self, index):
        return torch.zeros(3, 4 + index % 2), 0


def load(dataset, *, workers=0, epoch=0, start=0, seed=5, batch_size=6, **more):
    options = {"shuffle": True, "drop_last": False, **more}
    loader = build_loader(dataset, batch_size=batch_size, seed=seed, options={"num_workers": workers}, **options)
    loader.sampler.set_epoch(epoch, start)
    batches = iter(loader)
    try:
        return list(batches)
    finally:
        if workers:
            end_workers(batches)  # left to the garbage collector after an error, it takes 5 s


@pytest.mark.parametrize("kind", [Squares, Batches, Lists])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_kind_of_dataset_gives_the_same_batches(kind, workers):
    batches = load(kind(), workers=workers)
    assert [len(targets) for _, targets in batches] == [6, 6, 6, 2]
    assert [len(targets) for _, targets in load(kind(), workers=workers, drop_last=True)] == [6, 6, 6]
    assert all(torch.equal(inputs[:, 1], targets.float() ** 2) for inputs, targets in batches)
    assert_equal(batches, load(Squares()))


def test_shuffled_epochs_differ_by_the_seed_too_and_unshuffled_are_in_order():
    first, second = (torch.cat([t for _, t in load(Batches(), epoch=e)]).tolist() for e in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))
    assert torch.cat([t for _, t in load(Batches(), shuffle=False)]).tolist() == list(range(20))
    orders = []
    for seed in (1, 1, 2):
        options = {"shuffle": True, "drop_last": False, "generator": make_generator(seed)}
        orders.append(next(iter(build_loader(Batches(), batch_size=20, **options)))[1].tolist())
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_augmented_batches_do_not_depend_on_workers_or_on_where_an_epoch_was_resumed(workers):
    dataset = DATASETS["digits"](transform="random_crop(8, padding=2) | random_flip | normalize")
    whole = load(dataset, epoch=3, batch_size=256)
    again = load(dataset, epoch=3, start=512, batch_size=256, workers=workers)
    assert_equal(again, whole[2:])
    other = load(dataset, epoch=4, batch_size=256, workers=workers)
    assert not torch.equal(other[0][0], whole[0][0])


def test_same_order_augments_differently_in_each_epoch_with_persistent_workers():
    dataset = DATASETS["digits"](transform="random_crop(8, padding=2)")
    options = {"num_workers": 1, "persistent_workers": True}
    loader = build_loader(dataset, batch_size=700, shuffle=False, drop_last=False, options=options, seed=1)
    passes = []
    for epoch in (0, 1, 0):
        loader.sampler.set_epoch(epoch)
        passes.append(torch.cat([inputs for inputs, _ in loader]))
    assert torch.equal(passes[0], passes[2])
    assert not torch.equal(passes[0], passes[1])


def test_a_users_random_dataset_repeats_in_workers_whatever_their_number_and_never_within_an_epoch():
    def values(**more):
        return torch.cat([inputs for inputs, _ in load(Noise(24), batch_size=4, **more)])

    one, two = values(workers=1), values(workers=2)
    assert torch.equal(one, two)
    assert not torch.equal(one, values(workers=1, epoch=1))
    assert len({tuple(row) for row in one.tolist()}) == 24
    assert torch.equal(one[8:], values(workers=2, start=8))


def test_loading_in_the_main_process_leaves_the_steps_generators_alone():
    def read_states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    dataset = DATASETS["digits"](transform="random_crop(8, padding=2) | random_flip | normalize")
    before = read_states()
    load(dataset, batch_size=512, generator=torch.Generator())
    assert read_states() == before


def test_batches_read_in_the_training_process_are_torchs_without_its_mark_for_the_profiler():
    def read(start):
        generator = make_generator(3)
        loader = build_loader(Squares(), batch_size=6, shuffle=True, drop_last=False, generator=generator, seed=1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            batches = list(start(loader))
        marks = [event for event in profiled.events() if event.name.startswith("enumerate(DataLoader)")]
        return batches, generator.get_state(), len(marks)

    ours, ours_state, n_marks = read(iter)
    torchs, torchs_state, n_marks_of_torch = read(DataLoader.__iter__)
    assert [batch[1].tolist() for batch in ours] == [batch[1].tolist() for batch in torchs]
    assert torch.equal(ours_state, torchs_state)
    assert (n_marks, n_marks_of_torch > 0) == (0, True)


@pytest.mark.parametrize("threads", [None, 2])
def test_worker_threads(threads):
    pids, counts = load(Surroundings(4), workers=1, worker_options={"threads": threads})[0]
    assert set(counts.tolist()) == {threads or 1}
    assert os.getpid() not in pids.tolist()


def test_own_collate_switches_whole_batches_off_and_an_iterable_dataset_keeps_its_own_order():
    batches = load(Lists(), collate=lambda samples: [target for _, target in samples], shuffle=False)
    assert batches[0] == [0, 1, 2, 3, 4, 5]
    loader = build_loader(Stream(), batch_size=3, shuffle=True, drop_last=True)
    assert [targets.tolist() for _, targets in loader] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_differ_in_shape_are_named(workers):
    with pytest.raises(DataError, match=r"\(3, 4\), \(3, 5\).*resize"):
        load(Uneven(), workers=workers)


def test_empty_dataset_and_one_without_length_are_refused():
    with pytest.raises(DataError, match="0 samples"):
        build_loader(Squares(0), batch_size=1, shuffle=False, drop_last=False)
    with pytest.raises(DataError, match="IterableDataset"):
        build_loader(object(), batch_size=1, shuffle=False, drop_last=False)


def test_fast_collate_agrees_with_torch():
    samples = [(torch.rand(3, 2), i, {"a": float(i), "b": [i, i]}, "x", np.float32(i)) for i in range(5)]
    ours, theirs = fast_collate(samples), torch.utils.data.default_collate(samples)
    assert torch.equal(ours[0], theirs[0])
    assert [str(part) for part in ours[1:]] == [str(part) for part in theirs[1:]]
    assert ours[1].dtype == torch.int64
    nested = [sample[2] for sample in samples]
    assert str(fast_collate(nested)) == str(torch.utils.data.default_collate(nested))


class Fails(Squares):
    """At sample 5."""

    def __init__(self, error):
        super().__init__(8)
        self.error = error

    def __getitem__(self, index):
        if index == 5:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (StopIteration(), DataError, "Fails raised StopIteration for a sample below its length 8"),
        (KeyError("missing"), KeyError, "sample 5 of Fails was being read"),
    ],
)
def test_an_error_of_a_dataset_never_ends_the_epoch_in_silence_and_names_the_sample(workers, error, kind, said):
    with pytest.raises(kind) as caught:
        load(Fails(error), workers=workers, batch_size=2, shuffle=False)
    assert said in "".join(traceback.format_exception(caught.value))
