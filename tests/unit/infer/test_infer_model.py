"""The model with its real samples: inputs, padding and lengths are found from the data and held against its collate."""

import numpy as np
import pytest
import torch
from tests.unit.infer.small_encoder import Texts, collate
from torch import nn
from torch.utils.data import TensorDataset

from fulltilt.config import config_from_values
from fulltilt.errors import DataError, FulltiltError
from fulltilt.infer.joining import join_samples, split_outputs
from fulltilt.infer.manifest import InputSpec
from fulltilt.infer.model import build_inference_model
from fulltilt.tasks import Workload


def open_model(task, **values):
    config = config_from_values({"task": task, "run": {"device": "cpu"}, **values}, base_dir="")
    return build_inference_model(config, device="cpu", n_samples=24)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, batch):
        scores = self.linear(batch["x"]) * batch["scale"][:, None]
        return {"loss": scores.sum(), "scores": scores, "kind": "a word"}


def pair_up(samples):
    x, y = torch.utils.data.default_collate(samples)
    return {"x": x, "scale": x[:, 0]}, y


def end_with_end(samples):
    ids, labels = zip(*samples, strict=True)
    ends = [torch.cat([i, torch.tensor([7])]) for i in ids]  # a token of its own behind the longest
    return nn.utils.rnn.pad_sequence(ends, batch_first=True, padding_value=9)[:, 1:], torch.tensor(labels)


def own(model, **parts):
    dataset = parts.pop("dataset", lambda: TensorDataset(torch.randn(20, 4), torch.arange(20) % 2))
    return Workload(model=model, dataset=dataset, loss=nn.CrossEntropyLoss(), **parts)


def pad_in_front(samples):
    ids, labels = zip(*samples, strict=True)
    longest = max(map(len, ids))
    return torch.stack([nn.functional.pad(i, (longest - len(i), 0)) for i in ids]), torch.tensor(labels)


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def embed():
    return nn.Sequential(nn.Embedding(60, 4), nn.AdaptiveAvgPool2d((1, 3)), nn.Flatten())


by_name = own(Named, collate=pair_up)
noisy = own(lambda: nn.Linear(4, 2), prepare=lambda batch, draws: (batch[0] + torch.rand(4, generator=draws), batch[1]))
other_pad = own(embed, dataset=Texts, collate=end_with_end)
in_front = own(embed, dataset=Texts, collate=pad_in_front)
longer = own(lambda: Lambda(lambda x: torch.cat([x[:, :1], x], 1).float()), dataset=Texts, collate=collate)
nested = own(Named, collate=lambda samples: (([torch.zeros(1)], torch.zeros(1)), torch.zeros(1)))
broken = own(lambda: nn.Sequential(nn.Linear(4, 2), nn.Hardtanh(float("nan"), float("nan"))))
no_collate = own(embed, dataset=Texts)
no_answers = own(lambda: nn.Sequential(nn.Linear(4, 2), Lambda(lambda y: y.sum())))
of_the_batch = own(lambda: nn.Sequential(nn.Linear(4, 2), Lambda(lambda y: y.sum(0))))


def test_a_text_model_has_a_length_a_pad_and_samples_that_join_as_its_own_collate_joins_them():
    model = open_model("tests.unit.infer.small_encoder:with_states")
    assert model.inputs == (InputSpec(name="ids_BT", dtype="int64", shape=(None,), pad=0.0, below=50),), (
        "rows of its embedding"
    )
    assert (model.joins, model.outputs_vary, model.notes) == ("pad", (False, True), ())
    lengths = [len(sample[0]) for sample in model.samples]
    assert (len(lengths), model.max_length) == (24, max(lengths))
    assert model.facts.has_attention
    assert model.facts.has_linear
    together = model.answer(model.samples[:6])
    assert [states.shape for _, states in together] == [(length, 32) for length in lengths[:6]], "padding is cut off"
    alone = [model.answer([sample])[0] for sample in model.samples[:6]]
    for (scores, states), (own_scores, own_states) in zip(together, alone, strict=True):
        np.testing.assert_allclose(scores, own_scores, atol=1e-5)
        np.testing.assert_allclose(states, own_states, atol=1e-5)


def test_samples_that_are_longer_than_is_answered_are_left_out():
    model = open_model("tests.unit.infer.small_encoder:workload", inference={"max_length": 9})
    lengths = [len(sample[0]) for sample in model.samples]
    assert max(lengths) <= model.max_length == 9
    assert 0 < len(lengths) == len(model.targets) < 24
    whole = open_model("tests.unit.infer.small_encoder:workload")
    labels = {sample[0].tobytes(): int(label) for sample, label in zip(whole.samples, whole.targets, strict=True)}
    assert [int(label) for label in model.targets] == [labels[sample[0].tobytes()] for sample in model.samples]
    with pytest.raises(DataError, match=r"inference\.max_length is 2, and all of 24 samples are longer; set it higher"):
        open_model("tests.unit.infer.small_encoder:workload", inference={"max_length": 2})


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("tests.unit.infer.small_encoder:unmasked", "padding changes the model's answers"),
        (f"{__name__}:noisy", "another way than by padding at the end"),
        (f"{__name__}:longer", "an output has another length than its sample"),
        (f"{__name__}:in_front", "fills input with several values"),
        (f"{__name__}:no_collate", "cannot join them"),
    ],
)
def test_a_model_whose_samples_cannot_share_a_batch_is_answered_one_by_one_and_says_why(task, why):
    model = open_model(task)
    assert model.joins == "alone"
    assert why in model.notes[0]


def test_the_pad_is_the_one_that_collate_fills_with():
    model = open_model(f"{__name__}:other_pad")
    assert [spec.pad for spec in model.inputs] == [9.0]


def test_inputs_by_name_stay_a_mapping_and_metrics_get_the_outputs_in_their_own_form():
    model = open_model(f"{__name__}:by_name")
    assert [spec.name for spec in model.inputs] == ["x", "scale"]
    assert model.module.takes_mapping
    assert model.max_length is None
    outputs = model.answer(model.samples[:3])
    assert [len(arrays) for arrays in outputs] == [1, 1, 1], "a loss of the batch is no answer to a sample"
    built = model.rebuild(outputs[1])
    assert built["kind"] == "a word"
    assert built["scores"].tolist() == [outputs[1][0].tolist()]


def test_what_no_artefact_can_hold_is_refused_with_the_reason():
    with pytest.raises(DataError, match="without further nesting"):
        open_model(f"{__name__}:nested")
    for task, shapes in (("no_answers", r"\[\]"), ("of_the_batch", r"\[\(2,\)\]")):
        with pytest.raises(DataError, match=f"outputs of 1 samples have shapes {shapes}; answer each sample"):
            open_model(f"{__name__}:{task}")
    with pytest.raises(FulltiltError, match="NaN or infinite"):
        open_model(f"{__name__}:broken")


def test_padding_is_to_the_longest_and_to_two_at_least():
    specs = (InputSpec(name="x", dtype="int64", shape=(None, 2), pad=5),)
    one, three = (np.ones((1, 2), np.int64),), (np.ones((3, 2), np.int64),)
    assert join_samples([one], specs)[0].tolist() == [[[1, 1], [5, 5]]]
    assert join_samples([one, three], specs)[0].shape == (2, 3, 2)
    outputs = (np.arange(8).reshape(2, 4), np.arange(2))
    assert [a.tolist() for a, _ in split_outputs(outputs, [1, 3], (True, False))] == [[0], [4, 5, 6]]
