"""Evaluation: exact means over every sample, and no trace of it in the training that follows."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from training_cases import Points, add_noise, build_config, build_cpu_run, build_workload, fail, run_train

from fulltilt.engine.loop.evaluate import build_validation_loader, evaluate
from fulltilt.errors import DataError, UsageError
from fulltilt.records import EpochDone, StepsDone
from fulltilt.records.words import WordTable


@pytest.fixture
def make_run():
    runs = []

    def make(config=None, **changes):
        runs.append(build_cpu_run(config, **{"prepare": None} | changes))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def compute_by_hand(run, dataset):
    model = run.setup.model.eval()
    with torch.no_grad():
        outputs = model(dataset.inputs)
    model.train()
    return {
        "loss": nn.functional.cross_entropy(outputs, dataset.targets).item(),
        "accuracy": (outputs.argmax(1) == dataset.targets).float().mean().item(),
    }


@pytest.mark.parametrize(("batch_size", "num_workers"), [(1, 0), (7, 0), (16, 2), (31, 0), (64, 0)])
def test_means_do_not_depend_on_the_batch_size_nor_on_workers(make_run, batch_size, num_workers):
    run = make_run(build_config(data__num_workers=num_workers))
    found = evaluate(run, build_validation_loader(run, batch_size=batch_size))
    assert found == pytest.approx(compute_by_hand(run, Points(n_samples=31, noise=0)), rel=1e-5)


def test_the_model_is_in_evaluation_mode_without_a_graph_and_every_layer_gets_its_own_mode_back(make_run):
    run = make_run(build_config(speed__precision="bf16"))
    run.setup.model[1].eval()  # frozen on purpose
    seen, numerics = [], []
    run.setup.model.register_forward_hook(lambda module, args, out: seen.append(any(m.training for m in module)))
    run.setup.model[0].register_forward_hook(lambda *given: numerics.append((given[2].dtype, given[2].requires_grad)))
    statistics = run.setup.model[1].running_mean.clone()
    evaluate(run, build_validation_loader(run))
    assert set(seen) == {False}
    assert set(numerics) == {(torch.bfloat16, False)}, "the precision of training"
    assert [m.training for m in run.setup.model] == [True, False, True, True, True]
    assert torch.equal(run.setup.model[1].running_mean, statistics)
    run = make_run(metrics={"bad": fail(ValueError("metric"))})
    with pytest.raises(ValueError, match="metric"):
        evaluate(run, build_validation_loader(run))
    assert run.setup.model.training, "after an error too"


def test_training_goes_on_as_if_there_had_been_no_evaluation(tmp_path):
    losses = []
    for every in ("1 steps", None):
        _, recorder = run_train(tmp_path / str(every), build_config(run__evaluate_every=every))
        losses.append([(e.step, e.loss) for e in recorder.of(StepsDone)])
    assert losses[0] == losses[1]


def test_random_preparation_is_the_same_in_every_evaluation(make_run):
    run = make_run(prepare=add_noise)
    loader = build_validation_loader(run)
    state = run.generator.get_state()
    assert evaluate(run, loader) == evaluate(run, loader)
    assert torch.equal(run.generator.get_state(), state)


def test_it_stops_when_asked(make_run):
    run, answers = make_run(), [False, False, True]
    loader = build_validation_loader(run, batch_size=4)
    assert evaluate(run, loader, should_stop=lambda: answers.pop(0)) is None
    assert answers == []
    assert run.setup.model.training


class NothingToRead(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("dataset", [NothingToRead, lambda: Points(n_samples=0)])
def test_an_empty_validation_set_is_an_error(make_run, dataset):
    run = make_run(validation=dataset)
    with pytest.raises(DataError):
        evaluate(run, build_validation_loader(run))


class Named(Points):
    def __init__(self, *classes, words=(), **options):
        super().__init__(**options)
        if classes:
            self.classes = classes
        if words:
            self.word_table = WordTable(words=words, tokenizer="words", max_length=len(self))


@pytest.mark.parametrize(
    ("train", "val", "said"),
    [
        (
            (("hen", "fox"), ()),
            (("fox",), ()),
            "classes .* number 0 is 'hen' in training and 'fox' in validation; .* train/",
        ),
        (((), ("<unk>", "a")), ((), ("<unk>",)), "words .* number 1 is 'a' in training and None in .* --val FILE"),
    ],
)
def test_a_validation_set_with_other_numbers_for_words_or_classes_is_refused(make_run, train, val, said):
    """Its figures meant nothing, and nobody knew."""

    def make(train, val, **changes):
        sets = [functools.partial(Named, *classes, words=words) for classes, words in (train, val)]
        return make_run(dataset=sets[0], validation=functools.partial(sets[1], n_samples=31), **changes)

    with pytest.raises(DataError, match=said):
        build_validation_loader(make(train, val))
    for other in (train, ((), ())):
        assert build_validation_loader(make(train, other)) is not None
    if train[0]:
        assert build_validation_loader(make(train, val, prepare=add_noise)) is not None, "the targets may be others"


def test_figures_that_follow_from_means_and_those_assessed_by_the_workload_join_them(make_run):
    seen = []

    def assess(model, device):
        seen.append((model.training, torch.is_grad_enabled(), device.type))
        return {"n_parameters": float(sum(p.numel() for p in model.parameters()))}

    run = make_run(derive=lambda means: {"twice": 2 * means["loss"]}, assess=assess)
    found = evaluate(run, build_validation_loader(run))
    assert found["twice"] == 2 * found["loss"]
    assert found["n_parameters"] == sum(p.numel() for p in run.setup.model.parameters())
    assert seen == [(False, False, "cpu")]


@pytest.mark.parametrize("said", ["fine", None, {"f1": "high"}, {"f1": torch.ones(2)}, {"f1": 10**400}])
def test_what_is_assessed_must_be_figures_by_name(make_run, said):
    run = make_run(assess=lambda model, device: said)
    with pytest.raises(UsageError, match=r"assess of points returned .*; it must return a mapping of names to numbers"):
        evaluate(run, build_validation_loader(run))


def test_one_batch_to_try_it_out_may_lack_what_a_figure_divides_by(make_run):
    run = make_run(derive=lambda means: {"ratio": 1 / 0})
    assert evaluate(run, build_validation_loader(run), n_batches=1).keys() == {"loss", "accuracy"}
    with pytest.raises(ZeroDivisionError):
        evaluate(run, build_validation_loader(run))


def test_training_goes_without_a_figure_that_follows_from_a_metric_it_does_not_compute(tmp_path):
    result, recorder = run_train(tmp_path, workload=build_workload(derive=lambda means: {"err": 1 - means["accuracy"]}))
    assert "err" not in recorder.of(EpochDone)[-1].metrics
    assert recorder.list_notes("training has no 'accuracy' for derive of points")
    assert result.metrics["err"] == 1 - result.metrics["accuracy"]


def test_derived_training_figures_and_what_a_batch_means_are_told(tmp_path):
    parts = {
        "derive": lambda means: {"perplexity": math.exp(means["loss"])} if means else {},
        "explain": lambda batch_size, accumulate: [f"{batch_size * accumulate - 1} others"],
        "validation": None,
        "assess": lambda model, device: {"kept": 1.0},
    }
    result, recorder = run_train(tmp_path, workload=build_workload(**parts))
    assert result.metrics == {"kept": 1.0}, "a workload without a validation set still assesses"
    epoch = recorder.of(EpochDone)[-1]
    assert epoch.metrics["perplexity"] == pytest.approx(math.exp(epoch.loss))
    assert result.notes[-1].endswith("others")
