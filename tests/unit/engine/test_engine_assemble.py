"""From a configuration to a Workload: names found, facts of the data handed to the model, mistakes named."""

import re
import sys
from typing import Any

import pytest
import torch
from torch import nn

import fulltilt
from fulltilt.config import config_for_object, config_from_values, load_config, plan_of
from fulltilt.engine.build.assemble import build_workload, name_origins
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.build.optimizers import OPTIMIZERS
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.errors import ConfigError
from fulltilt.levers import default_plan
from fulltilt.measure import NullTimer

DIGITS: dict[str, Any] = {"model": "small_cnn(width=4)", "data": {"dataset": "digits"}}

USER_CODE = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset
import fulltilt

class Points(TensorDataset):
    """No split, so no validation set can be made of it."""
    n_classes = 2
    def __init__(self, n=32):
        super().__init__(torch.randn(n, 5), torch.randint(2, (n,)))

def build_net(width=4, n_classes=7):
    return nn.Sequential(nn.Linear(5, width), nn.Linear(width, n_classes))

def build_broken():
    raise ValueError("not mine to explain")

def own_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets) * 2

workload = fulltilt.Workload(model=build_net, dataset=Points, loss=nn.CrossEntropyLoss(), name="mine")

def make(width: int, path="usual"):
    return fulltilt.Workload(model=lambda: build_net(width, 2), dataset=Points, loss=own_loss,
                             optimizer=lambda p: torch.optim.SGD(p, lr=0.5), name=f"made {width} {path}")

def from_a_path(path, share=1.0):
    return make(1, torch.load(path))

nothing = 5
'''


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    (tmp_path / "assemble_user_code.py").write_text(USER_CODE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "assemble_user_code", raising=False)
    return str(tmp_path)


def configure(values, base_dir="."):
    return config_from_values(values, base_dir=base_dir)


def build(optim):
    return build_run(configure(DIGITS | {"optim": optim}), default_plan({"batch_size": 64, "threads": 1}), device="cpu")


def test_digits_train_from_a_configuration():
    run = build({"optimizer": "sgd(momentum=0.9)", "lr": 0.1, "weight_decay": 0.01})
    group = run.setup.optimizer.param_groups[0]
    assert isinstance(run.setup.optimizer, torch.optim.SGD)
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.9, 0.01)
    assert run.n_samples == 1438
    assert TrainStep(run)(run.start_epoch(0), NullTimer()).loss.isfinite()
    own = build({"optimizer": "adamw(weight_decay=null)"}).setup.optimizer.defaults["weight_decay"]
    assert own == 0.01, "a weight decay of null is the optimizer's own"


def test_the_model_learns_of_the_data_and_the_validation_set_is_another():
    workload = build_workload(configure(DIGITS))
    images, _ = workload.dataset()[0]
    assert workload.model()(images[None]).shape == (1, 10)
    assert len(workload.validation()) == 359
    assert workload.dataset() is workload.dataset(), "loaded once"
    assert workload.metrics.keys() == {"accuracy"}
    data = {"dataset": "digits", "transform": {"train": "resize(12)", "val": "resize(10)"}}
    workload = build_workload(configure(DIGITS | {"data": data}))
    sets = workload.dataset(), workload.validation()
    assert [dataset[0][0].shape[-1] for dataset in sets] == [12, 10], "transforms belong to their split"


def test_a_loss_by_name_takes_its_arguments():
    logits, targets = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    workload = build_workload(configure(DIGITS | {"loss": "cross_entropy(label_smoothing=0.5)"}))
    expected = nn.functional.cross_entropy(logits, targets, label_smoothing=0.5)
    torch.testing.assert_close(workload.loss(logits, targets), expected)


def test_parts_of_the_users_own(user_code):
    module = "assemble_user_code"
    values = {
        "model": f"{module}:build_net(width=3)",
        "data": {"dataset": f"{module}:Points(n=20)"},
        "loss": f"{module}:own_loss",
        "optim": {"optimizer": "torch.optim:NAdam(momentum_decay=0.01)", "lr": 0.25},
    }
    workload = build_workload(configure(values, user_code))
    model = workload.model()
    assert (model[0].out_features, model[1].out_features, len(workload.dataset())) == (3, 2, 20)
    assert (workload.validation, workload.loss.__name__) == (None, "own_loss")
    optimizer = workload.optimizer(model.parameters())
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.NAdam, 0.25)


def test_a_workload_of_the_users_own_gets_an_optimizer_and_keeps_the_one_that_it_has(user_code):
    values = {"task": "assemble_user_code:workload", "optim": {"optimizer": "adam", "lr": 0.125}}
    made = {"task": "assemble_user_code:make(width=9)", "data": {"path": "here"}}
    found = []
    unsaid = {"task": "assemble_user_code:make(width=9)"}  # the function's own path stands
    for workload in (build_workload(configure(given, user_code)) for given in (values, made, unsaid)):
        optimizer = workload.optimizer(workload.model().parameters())
        found.append((workload.name, type(optimizer), optimizer.defaults["lr"]))
    own = [(f"made 9 {path}", torch.optim.SGD, 0.5) for path in ("here", "usual")]
    assert found == [("mine", torch.optim.Adam, 0.125), *own]


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"task": "clasification", **DIGITS}, "task", "classification"),
        ({"data": {"dataset": "digits"}}, "model", "a model is needed"),
        ({"model": "small_cnn"}, "data.dataset", "a dataset is needed; write one of cifar10"),
        (DIGITS | {"data": {"dataset": "digitz"}}, "data.dataset", "did you mean digits"),
        (DIGITS | {"loss": "cross_entrpy"}, "loss", "did you mean cross_entropy"),
        (DIGITS | {"optim": {"optimizer": "adamm"}}, "optim.optimizer", "did you mean adam"),
        ({"task": "no_such_module_anywhere:workload"}, "task", "no module"),
        ({"task": "assemble_user_code:workloat"}, "task", "did you mean workload"),
        ({"task": "assemble_user_code:nothing"}, "task", r"type int, expected a fulltilt.Workload.*; write work"),
        (
            {"task": "assemble_user_code:workload", "data": {"path": "here"}},
            "data.path",
            r"'here' would not be read: assemble_user_code:workload takes no path; .*, def workload\(path\): return",
        ),
        (
            DIGITS | {"data": {"dataset": "assemble_user_code:Points(n=9)", "path": "here"}},
            "data.path",
            r"'here' would not be read: assemble_user_code:Points\(n=9\) takes no path; leave it out",
        ),
        (
            {"task": "assemble_user_code:make(3, path=there)", "data": {"path": "here"}},
            "data.path",
            r"'here' would not be read: assemble_user_code:make\(3, path=there\) names its own; leave one out",
        ),
        (
            DIGITS | {"data": {"dataset": "text(path=there)", "path": "here"}},
            "data.path",
            r"'here' would not be read: text\(path=there\) names its own; leave it out",
        ),
        (
            {"task": "assemble_user_code:from_a_path(share=0.5)"},
            "data.path",
            "from_a_path takes a path, and none is given; name it with --data-path",
        ),
    ],
)
def test_mistakes_are_named_with_their_key(values, key, words, user_code):
    with pytest.raises(ConfigError, match=words) as caught:
        build_workload(configure(values, user_code))
    assert caught.value.key == key


def test_a_path_is_read_by_the_dataset_that_names_none_of_its_own():
    values = DIGITS | {"data": {"dataset": "text(path=there)", "val_dataset": "text", "path": "here"}}
    assert build_workload(configure(values)).validation is not None


REFUSED = "model", "model"
OWN_POINTS = {"data": {"dataset": "assemble_user_code:Points", "transform": {"train": "normalize"}}}


@pytest.mark.parametrize(
    ("changes", "field", "key", "words"),
    [
        ({"model": "small_cnn(wdth=3)"}, "model", "model", "width"),
        ({"data": {"dataset": "digits(pth=x)"}}, "dataset", "data.dataset", "path"),
        (OWN_POINTS, "dataset", "data.transform.train", "takes no transform"),
        ({"model": "bilm(vocab_size=9, hidden=8, projection=8)"}, *REFUSED, "proj_size has to be smaller"),
        ({"model": "torch.nn:LSTM(input_size=1, hidden_size=8, proj_size=8)"}, *REFUSED, "proj_size has to be smaller"),
        *(
            ({"optim": {"optimizer": f"sgd(momentum={value})"}}, "optimizer", "optim.optimizer", words)
            for value, words in (
                ("-1", r"sgd\(momentum=-1\): Invalid momentum value: -1.0"),
                ("fast", r"momentum='?fast'?: expected a number"),
            )
        ),
    ],
)
def test_mistakes_in_arguments_are_named_before_or_when_the_part_is_built(changes, field, key, words, user_code):
    with pytest.raises(ConfigError, match=words) as caught:
        getattr(build_workload(configure(DIGITS | changes, user_code)), field)()
    assert caught.value.key == key


def test_a_mistake_inside_the_users_own_model_keeps_its_trace(user_code):
    workload = build_workload(configure(DIGITS | {"model": "assemble_user_code:build_broken"}, user_code))
    with pytest.raises(ValueError, match="not mine to explain"):
        workload.model()


def test_all_mistakes_of_a_file_are_told_at_once_with_their_lines(tmp_path):
    lines = [
        *("model: small_cnn(wdth=3)", "loss: cross_entrpy", "data:", "  dataset: digits", "  transform: normalise"),
        *("optim:", "  optimizer: sgd(momentum=-1)", "  schedule: cosinus"),
    ]
    file = tmp_path / "mine.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"^5 problems:") as caught:
        build_workload(load_config(file))
    assert re.findall(rf"  {re.escape(str(file))}:(\d+): ([\w.]+): ", str(caught.value)) == [
        *(("1", "model"), ("2", "loss"), ("5", "data.transform.train"), ("7", "optim.optimizer")),
        ("8", "optim.schedule"),
    ]


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        (1, "model: small_cnn(wdth=3)"),
        (2, "loss: cross_entrpy"),
        (4, "  dataset: digitz"),
        (6, "  optimizer: sgd(wd=9)"),
    ],
)
def test_mistakes_are_told_with_their_file_and_line(tmp_path, line, bad):
    lines = "model: small_cnn\nloss: cross_entropy\ndata:\n  dataset: digits\noptim:\n  optimizer: sgd".splitlines()
    lines[line - 1] = bad
    file = tmp_path / "mine.yaml"
    file.write_text("\n".join(lines))
    config = load_config(file)
    given_on = config_from_values(config.to_values(), base_dir=config.base_dir, provenance=config.provenance)
    for read in (config, given_on):  # the second as a trial process has it
        with pytest.raises(ConfigError, match=f"{re.escape(str(file))}:{line}: "):
            build_run(read, plan_of(read), device="cpu")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_have_torchs_defaults(name):
    parameter = nn.Parameter(torch.ones(3, 3))  # muon takes matrices only
    optimizer = OPTIMIZERS[name]([parameter])
    assert optimizer.defaults == type(optimizer)([parameter]).defaults
    decayed = OPTIMIZERS[name]([parameter], weight_decay=0.0, lr=0.5)
    assert (decayed.defaults["weight_decay"], decayed.defaults["lr"]) == (0.0, 0.5)


def test_a_run_is_named_after_its_configuration():
    assert configure(DIGITS | {"run": {"name": "first"}}).run_name == "first"
    assert configure(DIGITS).run_name == "classification"
    assert config_for_object("my_module:workload").run_name == "my_module_workload"


@pytest.mark.parametrize(
    ("words", "batch", "optimizer", "rate"),
    [
        (["task=assemble_user_code:workload"], "default", "default", "default"),
        (["task=assemble_user_code:workload", "data.batch_size=8", "optim.lr=0.5"], "word", "default", "word"),
        (["task=assemble_user_code:workload", "optim.optimizer=sgd(lr=0.5)"], "default", "word", "word"),
        (["task=assemble_user_code:make(width=3)"], "default", "code", "code"),
    ],
)
def test_where_batch_size_optimizer_and_rate_came_from_is_known(user_code, words, batch, optimizer, rate, monkeypatch):
    monkeypatch.chdir(user_code)
    task, *others = words
    config = config_for_object(task.removeprefix("task="), others)
    names = {"default": "fulltilt's default", "code": "the workload's own code", "word": "command line"}
    found = name_origins(config, build_workload(config))
    assert found == {"batch_size": names[batch], "optimizer": names[optimizer], "learning_rate": names[rate]}


def test_a_workload_that_no_configuration_gave_an_optimizer_has_that_of_pytorch(user_code):
    workload = fulltilt.Workload(model=lambda: nn.Linear(2, 2), dataset=list, loss=nn.CrossEntropyLoss())
    found = name_origins(configure({}, user_code), workload)
    assert found["optimizer"] == found["learning_rate"] == "PyTorch's default"
