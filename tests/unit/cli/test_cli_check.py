"""``fulltilt check`` beside ``fulltilt train``: what the one refuses before its first step, the other refuses too."""

import functools
import json
import shlex
import sys

import pytest

from fulltilt.cli import run_command

BASE = "model: small_cnn(width=2)\ndata: {dataset: digits, batch_size: 256}\nrun: {device: cpu, epochs: 1}\n"
FIVE = """\
model: small_cnn(wdth=3)
loss: cross_entrpy
data: {dataset: digits, transform: normalise}
optim:
  optimizer: sgd(momentum=-1)
  schedule: cosinus
"""
CODE = """
import sys
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
import fulltilt

class Points(TensorDataset):
    n_classes = 2
    def __init__(self, n=300):
        super().__init__(torch.randn(n, 5), torch.randint(2, (n,)))

class Torn(Points):
    def __getitem__(self, index):
        raise OSError(f"sample {index} is torn")

class Leaves(Points):
    def __getitem__(self, index):
        sys.exit(0)

class Stream(IterableDataset):
    n_classes = 2
    def __iter__(self):
        return iter(Points())

class Nothing:
    pass

def build_model(width=2):
    return nn.Linear(5, width)

def build_wide():
    return nn.Linear(7, 2)

def build_broken():
    raise ValueError("no such width")

def build_frozen():
    return nn.Linear(5, 2).requires_grad_(False)

def build_five():
    return 5

def build_optimizer(parameters):
    return 5

def lose(outputs, targets):
    raise RuntimeError("no loss today")

def lose_all(outputs, targets):
    return outputs

def raise_rate(total_steps):
    raise ValueError("no rate today")

def make_workload(**parts):
    given = {"model": build_model, "dataset": Points, "loss": nn.CrossEntropyLoss()}
    return fulltilt.Workload(**(given | parts))

def make_broken():
    raise KeyError("no workload today")

def make_blind():
    return make_workload(model=build_five)

def make_loaded():
    return make_workload(dataset=lambda: torch.utils.data.DataLoader(Points()))

class Dry(Stream):
    def __iter__(self):
        return iter(())

def make_dry():
    return make_workload(dataset=Dry)

def make_underived():
    return make_workload(derive=lambda means: None)

def make_miscounted():
    metrics = {"right": lambda outputs, targets: (outputs.argmax(1) == targets).float()}
    derive = lambda means: {"wrong": "none" if means["right"] else 0.0}
    return make_workload(validation=Points, metrics=metrics, derive=derive)

def make_detached():
    return make_workload(loss=lambda outputs, targets: outputs.mean().detach())

def make_counted():
    return make_workload(loss=lambda outputs, targets: (outputs.argmax(1) == targets).sum())

def make_complex():
    return make_workload(loss=lambda outputs, targets: outputs.mean() * 1j)

def make_emptied():
    return make_workload(prepare=lambda batch, generator: (batch[0][:0], batch[1][:0]))

def make_mapped():
    return make_workload(prepare=lambda batch, generator: {"inputs": batch[0], "targets": batch[1]})

def make_doubled():
    return make_workload(prepare=lambda batch, generator: (batch[0].double(), batch[1]))

class Texts(Points):
    def __getitem__(self, index):
        return "a word", 1

def make_texts():
    return make_workload(dataset=Texts)

class Vast(Points):
    def __len__(self):
        return 10**12

class Worded(Points):
    def __getitem__(self, index):
        return super().__getitem__(index)[0], "cat"

def make_worded():
    return make_workload(dataset=Worded)

class Negative(Points):
    def __getitem__(self, index):
        return super().__getitem__(index)[0], -1

def make_negative():
    return make_workload(dataset=Negative)

def raise_long():
    raise RuntimeError("long " * 5000 + chr(27) + "[31m")

def make_long():
    return make_workload(model=raise_long)

def make_shapeless():
    return make_workload(loss=nn.MSELoss())

def make_column():
    return make_workload(prepare=lambda batch, generator: (batch[0], batch[1][:, None]))

class Holed(Points):
    def __getitem__(self, index):
        return super().__getitem__(index) if index % 2 else None

def make_holed():
    return make_workload(dataset=Holed)

def make_vast():
    return make_workload(dataset=Vast)

def make_two_lines():
    return make_workload(name="one\\ntwo")

def make_none():
    return make_workload(dataset=lambda: None)

def make_rateless():
    return make_workload(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=float("nan")))

def make_meta():
    return make_workload(model=lambda: nn.Linear(5, 2, device="meta"))

def make_objects():
    return make_workload(explain=lambda batch_size, accumulate: [object()])

def make_unary():
    return make_workload(prepare=lambda batch: batch)

def make_twice():
    return make_workload(validation=Points, derive=lambda means: {"loss": 0.0})

def make_wide_validation():
    return make_workload(validation=lambda: TensorDataset(torch.randn(9, 7), torch.zeros(9, dtype=torch.int64)))

def make_sized(width: int):
    return make_workload()
"""
BROKEN = """\
schedule=cosinus
schedule=cosine(fianl=0.1)
schedule=cosine(final=-1)
schedule=step
schedule=step(size=0)
schedule=onecycle(warmup=soon)
schedule=own_parts:no_rate
schedule=own_parts:raise_rate
warmup=-3
lr=-1
lr=fast
'lr=[0.1, 0.2]'
optim.ema=2
optim.clip_norm=0
optimizer=adamm
optimizer=sgd(mom=0.9)
optimizer=sgd(momentum=-1)
optimizer=sgd(momentum=fast)
optimizer=sgd(nesterov=true)
optimizer=own_parts:sgd
optimizer=own_parts:build_optimizer
model=null
model=small_cn
model=small_cnn(wdth=3)
model=small_cnn(width=0)
'model=small_cnn(2, 3)'
model=mlp(hidden=two)
model=bilm
'model=bilm(vocab_size=9, hidden=8, projection=8)'
'model=torch.nn:LSTM(input_size=1, hidden_size=8, proj_size=8)'
model=no_such_module:build
data.dataset=own_parts:Points model=own_parts:build_modle
data.dataset=own_parts:Points model=own_parts:build_model(wdth=3)
data.dataset=own_parts:Points model=own_parts:build_broken
data.dataset=own_parts:Points model=own_parts:build_frozen
data.dataset=own_parts:Points model=own_parts:build_five
loss=cross_entrpy
loss=cross_entropy(label_smoothing=2)
loss=mse
loss=own_parts:build_five
loss=own_parts:lose
loss=own_parts:lose_all
data.dataset=null
data.dataset=digitz
data.dataset=digits(pth=x)
data.dataset=own_parts:Nothing
data.dataset=own_parts:Points(n=0)
data.dataset=own_parts:Torn model=own_parts:build_model
data.dataset=own_parts:Leaves model=own_parts:build_model
data.dataset=own_parts:Stream model=own_parts:build_model schedule=cosine
data.path=/nowhere
data.val_dataset=digitz
data.val_dataset=own_parts:Points(n=0)
data.on_bad_sample=skp
data.batchsize=3
batch_size=0
batch_size=100000
transform=normalise
transform=random_crop(0)
transform=random_crop(9)
'transform=normalize |'
'transform=normalize(mean=[0.5], std=[0])'
data.dataset=own_parts:Points model=own_parts:build_model data.transform.train=normalize
mix=mixupp
mix=mixup(alpha=0)
task=clasification
task=classification(metrics=[accurcy])
task=classification(metrcs=[accuracy])
task=own_parts:nothing
task=own_parts:build_five
task=own_parts:make_broken
task=own_parts:make_blind
task=own_parts:make_sized
task=own_parts:make_loaded
task=own_parts:make_dry
task=own_parts:make_underived
task=own_parts:make_detached # the loss does not depend on the model's parameters; compute it from the model's outputs
task=own_parts:make_counted # the loss is a number of torch.int64; it must be
task=own_parts:make_complex # the loss is a number of torch.complex64; it must be
task=own_parts:make_emptied # the inputs of a batch are empty: a tensor of shape (0, 5); mend the dataset
task=own_parts:make_mapped # a batch is a dict, expected (inputs, targets); change
task=own_parts:make_doubled # the data and the model's parameters differ in type: mat1 and mat2 must have
task=own_parts:make_texts # the inputs of a batch are 256 texts; turn them into tensors
task=own_parts:make_vast # Vast says that it holds 1,000,000,000,000 samples, whose order alone takes
task=own_parts:make_none # the training set of workload is of type NoneType; its function must return a Dataset
task=own_parts:make_rateless # the optimizer of workload has learning rate nan; give a finite number
task=own_parts:make_meta # lies on the device meta, without values; build it on the CPU
task=own_parts:make_objects # explain of workload returned list; it must return a list of texts
task=own_parts:make_worded # the targets of a batch are a tuple (in CrossEntropyLoss()); give numbers, such as
task=own_parts:make_negative # a target is -1, and classes are counted from 0; mend the targets, or leave such ones
task=own_parts:make_long # RuntimeError: long long
task=own_parts:make_shapeless # the outputs and the targets of a batch do not fit each other: Using a target size
task=own_parts:make_column # do not fit each other: 0D or 1D target tensor expected
task=own_parts:make_holed # the samples of a batch are of several types: NoneType, tuple; have the data set
data.dataset=own_parts:Points model=own_parts:build_wide # 5 features meet weights for 7 (in Linear(in_features=7
task=own_parts:make_unary # Workload prepare is called with (batch, generator), and that fails (too many
task=own_parts:make_two_lines # Workload name is 'one\\ntwo' (str); give a short text
data.dataset=own_parts:Stream model=own_parts:build_model num_workers=2 # use 1 at most
device=cuda:99
device=tpu
epochs=0
seed=-1
precision=fp12
run.loggers=[mlfow]
run.loggers=[wandb]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    (tmp_path / "own_parts.py").write_text(CODE)
    (tmp_path / "mine.yaml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    yield tmp_path
    sys.modules.pop("own_parts", None)


def ask(command, folder, *words):
    """Run a command on ``mine.yaml``; return its exit code and its document."""
    out = folder / f"{command}.json"
    code = run_command([command, "mine.yaml", *words, "--json", str(out)])
    return code, json.loads(out.read_text())


def list_problems(document):
    """Return what ``check`` found to be wrong, or what ended it."""
    texts = [document.get("error") or "", *(item["text"] for item in document.get("items", []))]
    is_problem = [True, *(item["verdict"] == "problem" for item in document.get("items", []))]
    return "\n".join(text for text, is_one in zip(texts, is_problem, strict=True) if is_one)


@pytest.mark.parametrize("case", BROKEN.splitlines())
def test_what_train_refuses_before_its_first_step_check_refuses_with_the_same_words(folder, case):
    case, _, said = case.partition(" # ")
    words = shlex.split(case)
    code, trained = ask("train", folder, *words, "--quiet", "--out", "run")
    assert code in (1, 2)
    assert not (folder / "run" / "checkpoint.pt").exists()
    code, checked = ask("check", folder, *words)
    assert code in (2, 3)
    assert trained["error"] in list_problems(checked)
    assert said in trained["error"]
    assert len(trained["error"]) < 1200


def test_quietly_it_says_what_is_wrong_all_the_same(folder, capsys):
    assert run_command(["check", "mine.yaml", "task=own_parts:make_broken", "--quiet"]) == 3
    head, *problems = capsys.readouterr().out.splitlines()
    assert head.startswith("Not ready: 1 of ")
    assert [line.partition(" ")[0] for line in problems] == ["problem"]


def test_five_mistakes_are_five_problems_of_both(folder, capsys):
    (folder / "mine.yaml").write_text(FIVE)
    code, trained = ask("train", folder, "--out", "run")
    head, *mistakes = trained["error"].splitlines()
    assert (code, head, len(mistakes)) == (2, "5 problems:", 5)
    code, checked = ask("check", folder)
    assert code == 3
    assert [item["text"] for item in checked["items"] if item["verdict"] == "problem"] == [m.strip() for m in mistakes]
    told = capsys.readouterr().out
    assert sum(line.startswith("problem build") for line in told.splitlines()) == 5


def test_long_items_are_cut_to_one_screen_and_told_whole_with_verbose(folder, capsys):
    long = {"cross_entrpy": "e" * 900, "cosinus": "c" * 900, "normalise": "n" * 900}
    (folder / "mine.yaml").write_text(functools.reduce(lambda text, each: text.replace(*each), long.items(), FIVE))
    assert run_command(["check", "mine.yaml"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert sum(line.startswith("problem build") for line in lines) == 5
    assert sum(line.endswith(" … (--verbose)") for line in lines) == 3
    assert run_command(["check", "mine.yaml", "--verbose"]) == 3
    told = "".join(line.strip() for line in capsys.readouterr().out.splitlines())
    assert all(name in told for name in long.values())


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_value_that_is_refused_hides_no_component(folder, capsys, command):
    (folder / "mine.yaml").write_text(FIVE.replace("digits,", "digits, batch_size: 0,"))
    assert run_command([command, "mine.yaml", "optim.lr=fast"]) == 2
    said = capsys.readouterr().err
    assert "7 problems:" in said
    assert "mine.yaml:3: data.batch_size" in said
    assert "mine.yaml:1: model" in said


def test_of_the_users_own_task_values_keys_and_names_are_told_at_once(folder, capsys):
    wrong = ["optim.lr=fast", "run.epoch=3", "optimizer=adamm", "schedule=cosinus"]
    assert run_command(["check", "own_parts:make_broken", *wrong]) == 2
    said = capsys.readouterr().err
    assert "4 problems:" in said
    assert all(part in said for part in ("lr 'fast'", "run.epoch", "'adamm'", "'cosinus'"))


def test_a_misspelt_key_is_not_told_as_missing(folder, capsys):
    (folder / "mine.yaml").write_text("modle: small_cnn\ndata: {dataset: digits}\nloss: cross_entrpy\n")
    assert run_command(["check", "mine.yaml"]) == 2
    said = capsys.readouterr().err
    assert "2 problems:" in said
    assert "a model is needed" not in said


def test_what_only_an_evaluation_would_find_is_found_before_the_training(folder):
    code, checked = ask("check", folder, "data.transform.val=random_crop(99)")
    assert code == 3
    assert "a window of 99 × 99 does not fit images of 8 × 8" in list_problems(checked)
    code, checked = ask("check", folder, "task=own_parts:make_miscounted")
    assert code == 3
    assert "derive of workload returned {'wrong': 'none'}" in list_problems(checked)
    _, checked = ask("check", folder, "task=own_parts:make_twice")
    assert "derive of workload returned loss, which is there already; give that" in list_problems(checked)
    _, checked = ask("check", folder, "task=own_parts:make_wide_validation")
    said = (
        "in the evaluation: 7 features meet weights for 5 (in Linear(in_features=5, out_features=2, bias=True)); give"
    )
    assert said in list_problems(checked)


def test_an_epoch_alone_shortens_the_warm_up_of_an_example_and_says_so(folder, capsys):
    small = ["model=small_cnn(width=2)", "data.dataset=digits", "transform=normalize", "num_workers=0", "device=cpu"]
    (folder / "mine.yaml").unlink()
    assert run_command(["init", "cifar10", "--out", "mine.yaml"]) == 0
    code, checked = ask("check", folder, *small, "run.epochs=1")
    assert (code, checked["n_problems"]) == (0, 0)
    said = "a warm-up of 11 steps (1 epoch) leaves nothing of a run of 11: it is shortened to 5, half of the run"
    assert said in [item["text"] for item in checked["items"] if item["name"] == "build"]
    capsys.readouterr()
    code, trained = ask("train", folder, *small, "--epochs", "1", "--out", "run")
    assert (code, trained["reason"], trained["epoch"]) == (0, "finished", 1)
    assert said in trained["notes"]
