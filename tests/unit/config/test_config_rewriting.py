"""Settings written into the user's own file: the spelling, comments and order stay."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.config.strategies import FOLDER_NAMES

from fulltilt.config import load_config, load_points, write_settings
from fulltilt.config.loading import flatten
from fulltilt.errors import ConfigError

GUIDE_000 = """\
# scenario 1: little memory
batch_size: 64              # smaller batch
gradient_accumulation_steps: 2  # as 128
num_workers: 2

use_amp: true
dataloader:
  train: basic(split=train, shuffle=true, prefetch_factor=2)  # loads ahead
transform:
  train: "resize(size=128) | random_flip"  # lower resolution
# the end
"""

GUIDE_001 = """\
data:
  batch_size: 4096      # or 8192
  num_workers: 12
  pin_memory: true

training:
  use_amp: true         # required
  learning_rate: 0.0003 # by the sqrt rule

benchmark:
  # powers of two
  batch_sizes: [1, 2, 4]

  # steps per setting
  steps_per_test: 10
"""


def list_added(diff: str) -> list[str]:
    return [line[1:] for line in diff.splitlines()[2:] if line.startswith("+")]


def test_a_flat_file_keeps_its_spelling(write):
    file = write(GUIDE_000)
    changes = {
        "data.batch_size": 128,
        "speed.accumulate": 1,
        "speed.precision": "fp32",
        "data.prefetch_factor": 4,
        "data.transform.train": "normalize",
        "speed.channels_last": True,
    }
    diff = write_settings(file, changes, note="measured")
    assert list_added(diff) == [
        "batch_size: 128              # smaller batch",
        "gradient_accumulation_steps: 1  # as 128",
        "use_amp: false",
        "  train: basic(split=train, shuffle=true, prefetch_factor=4)  # loads ahead",
        "  train: normalize  # lower resolution",
        "channels_last: true  # measured",
    ]
    config = load_config(file)
    assert {key: flatten(config.to_values())[key] for key in changes} == changes


def test_a_value_already_there_changes_nothing(write):
    file = write(GUIDE_001)
    before = file.stat().st_mtime_ns
    assert write_settings(file, {"data.batch_size": 4096, "speed.precision": "auto"}) == ""
    assert file.stat().st_mtime_ns == before
    assert file.read_text() == GUIDE_001


# «before→after» marks what is rewritten.
@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("batch_size: «8→16»\ndata: {batch_size: «8→16», num_workers: 0}\n", {"data.batch_size": 16}),
        (
            'dataloader: {train: «basic(split=train, shuffle=true)→"basic(split=train, shuffle=false)"»}\n',
            {"data.shuffle": False},
        ),
        ("dataloader: {train: basic()}\n«→data:\n  shuffle: false\n»", {"data.shuffle": False}),
        (
            "gpu:\n    accumulate: «4→5»  # STL-10\n    cudnn_benchmark: true\n«→    compile: true\n»",
            {"speed.accumulate": 5, "speed.compile": True},
        ),
        (
            "training:\n  use_amp: «true→bf16»   # required\n  learning_rate: «3e-4→0.0002» # sqrt\n"
            "«→  accumulate: 2  # noted\n»data: {}\n",
            {"speed.precision": "bf16", "optim.lr": 0.0002, "speed.accumulate": 2},
        ),
        ("data:\n  batch_size: 8«→\n  num_workers: 2\n»", {"data.num_workers": 2}),
        ("data:\n  batch_size: 8«→\nspeed:\n  compile: true\n»", {"speed.compile": True}),
        ("speed:« {}→»\n«→  compile: true  # noted\n»lr: 1\ndata: {}\n", {"speed.compile": True}),
        ("speed:  # soon\n«→  compile: true  # noted\n»data: {}\n", {"speed.compile": True}),
        (
            "data: {}\nspeed:« null→\n  compile: true  # noted\n  accumulate: 2  # noted\n»",
            {"speed.compile": True, "speed.accumulate": 2},
        ),
        ("data:\n  transform:« {}→\n    val: a  # noted»\n  path: x\n", {"data.transform.val": "a"}),
        ("data: {transform: «{}→{val: a}», path: x}\n", {"data.transform.val": "a"}),
        ("data: {batch_size: 8«→, pin_memory: true»}\n", {"data.pin_memory": True}),
        ("{lr: 1, epochs: 2«→, speed.compile: true»}\n", {"speed.compile": True}),
        ("data:\n  batch_size:«→ 4»\nlr: 1\n", {"data.batch_size": 4}),
        (
            "benchmark:\n  batch_sizes:«\n    - 1  # one\n    - 2→ [8, 16]»\n  steps_per_test: 3\n",
            {"benchmark.batch_sizes": [8, 16]},
        ),
        ("lr: «[0.1, 0.2]→0.2»  # a grid\n", {"optim.lr": 0.2}),
        ("batch_size: «8→9»\r\nlr: 1\r\n«→epochs: 2\r\n»", {"data.batch_size": 9, "run.epochs": 2}),
        ("\ufefflr: «1→2.5»\n", {"optim.lr": 2.5}),
        ("model: «|\n  resnet18→\"f(b=' #x')\"»\nlr: 1\n", {"model": "f(b=' #x')"}),
        ("lr: «1→1.0e-05»\n", {"optim.lr": 1e-5}),
        ('name: «a→"null"»\nlr: 1\n', {"run.name": "null"}),
        ('name: «a→"yes: no"»\nlr: 1\n', {"run.name": "yes: no"}),
        ("'lr': «1→2.0»\n", {"optim.lr": 2.0}),
        ("data:\n  path: x\n«→  transform: {val: a}\n»", {"data.transform.val": "a"}),
        ("training: &t\n  seed: «1→2»\nrun:\n  <<: *t\n", {"run.seed": 2}),
        ('name: «a→"\\U0000007f\U0001f600\\n"»\n', {"run.name": "\x7f\U0001f600\n"}),
        ("batch_size: «&n 8→9»\n", {"data.batch_size": 9}),
        ("data:\n  path: x\n«→  pin_memory: true\n»\n# about speed\nspeed: {}\n", {"data.pin_memory": True}),
    ],
)
def test_shapes_of_files(write, text, changes):
    before, after = (re.sub("«(.*?)→(.*?)»", which, text, flags=re.S) for which in (r"\1", r"\2"))
    file = write(before)
    write_settings(file, changes, note="noted" if "# noted" in after else None)
    assert file.read_bytes().decode() == after


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        ("batch_size: &n 8\naccumulate: *n\n", {"data.batch_size": 16}, "cannot be rewritten .*alias"),
        ("batch_size: 8\nepochs: &n\n  8\nseed: *n\n", {"run.epochs": 16}, "cannot be rewritten .*alias"),
        ("training: &t\n  lr: 1\n  seed: 1\nrun:\n  <<: *t\n", {"run.seed": 2}, "unknown key"),
        ("transform: normalize\n", {"data.transform.train": "a"}, "on a line of its own first"),
        ("lr: 1\n", {"data.batch_size": 0}, "batch_size 0: expected a whole number of at least 1"),
        ("lr: 1\n", {"batch_size": 8}, "unknown key"),
        ("lr: 1\n", {"speed.precision": "fp64"}, "expected fp32"),
    ],
)
def test_refused_and_the_file_is_untouched(write, text, changes, said):
    file = write(text)
    with pytest.raises(ConfigError, match=said):
        write_settings(file, changes)
    assert file.read_text() == text


TEXTS = st.sampled_from([GUIDE_000, GUIDE_001, "lr: [1, 2]\n", "speed: {compile: true}"])
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "data.batch_size": st.integers(1, 9999),
        "data.num_workers": st.integers(0, 16),
        "data.pin_memory": st.booleans(),
        "data.prefetch_factor": st.none() | st.integers(1, 8),
        "optim.lr": st.floats(1e-9, 10),
        "speed.precision": st.sampled_from(["fp32", "bf16", "fp16", "tf32", "auto"]),
        "speed.accumulate": st.integers(1, 64),
        "speed.compile": st.booleans(),
        "run.name": FOLDER_NAMES,
        "model": st.sampled_from(["resnet18", "f(a=1, b=[x, 2])", "m:f(s='#, : {}')"]),
        "data.transform.val": st.sampled_from(["a | b(1, c='x')", "normalize"]),
        "benchmark.batch_sizes": st.lists(st.integers(1, 99), min_size=1, max_size=3),
        "run.device": st.sampled_from(["cuda:1", "cpu", [0, 1], 3]),
    },
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=TEXTS, changes=CHANGES)
def test_what_was_asked_for_and_nothing_else_changes(write, text, changes):
    file = write(text)
    before = flatten(load_points(file)[0][1].to_values())
    write_settings(file, changes, note="measured # twice")
    after = flatten(load_points(file)[0][1].to_values())
    assert after == {**before, **changes}
    written = file.read_text()
    for line in text.splitlines():
        comment = line.partition("#")[2]
        assert comment in written
    assert write_settings(file, changes) == ""
