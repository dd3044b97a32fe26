"""Steps of gradient caching and of language models read no value of a tensor on the host, with metrics on."""

from __future__ import annotations

import pytest
import torch
from reads import CountReads
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from training_cases import build_config, run_train

from fulltilt.tasks import Workload
from fulltilt.tasks.language import build_language_model
from fulltilt.tasks.models.bilm import bilm
from fulltilt.tasks.nt_xent import NtXent

N_WORDS = 40


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Windows(Dataset):
    vocab_size, n_classes, sample_shape = N_WORDS, None, (10,)

    def __init__(self, n_samples):
        self.n_samples = n_samples

    def __len__(self):
        return self.n_samples

    def __getitem__(self, index):
        words = (torch.arange(11) * 3 + index) % N_WORDS
        return words[:-1], words[1:]


def make_views(batch, generator):
    rows = batch[0].repeat_interleave(2, dim=0)
    return rows + 0.1 * torch.randn(rows.shape, generator=generator), batch[1]


def build_contrastive(n_samples):
    data = TensorDataset(torch.randn(n_samples, 6), torch.zeros(n_samples, dtype=torch.int64))
    return Workload(
        model=lambda: nn.Linear(6, 4), dataset=lambda: data, loss=NtXent(0.2), optimizer=sgd, prepare=make_views,
        couples_samples=True,
    )  # fmt: skip


def build_language(n_samples, **options):
    encoder = {"embedding": 8, "hidden": 12, "projection": 8, "dropout": 0.0, "depth": 1}
    return build_language_model(
        model=lambda: bilm(vocab_size=N_WORDS, **encoder), train=lambda: Windows(n_samples), optimizer=sgd, **options
    )


CASES = {
    "gradient caching": (build_contrastive, {}, {"data__batch_size": 4, "speed__accumulate": 4}),
    "full softmax": (build_language, {"softmax": "full", "training_metrics": True}, {}),
    "chunked softmax": (build_language, {"softmax": "chunked", "training_metrics": True}, {}),
    "adaptive softmax": (build_language, {"softmax": "adaptive", "cutoffs": [10]}, {}),
    "sampled softmax": (build_language, {"softmax": "sampled", "n_sampled": 8}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_epoch_of_three_times_the_steps_reads_nothing_more(tmp_path, case):
    build, options, changes = CASES[case]
    has_metrics = options.get("training_metrics", build is build_contrastive)
    counts = []
    for n_samples in (64, 192):
        config = build_config(
            run__epochs=1, run__log_every_n_steps=1000, run__evaluate_every=None, run__checkpoint_every=None,
            optim__warmup=0, **changes,
        )  # fmt: skip
        with CountReads() as counter:
            result, _ = run_train(
                tmp_path / str(n_samples), config, workload=build(n_samples, **options), training_metrics=has_metrics
            )
        counts.append((result.step, len(counter.reads)))
    (few, reads), (many, more) = counts
    assert many == 3 * few
    assert more == reads > 0
