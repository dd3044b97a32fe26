"""Every snippet of guide 000 that is configuration: it loads, builds, and passes the dry run on small data."""

from pathlib import Path

import pytest
import torch
from cifar10_files import write_cifar10

from fulltilt.config import load_config, load_points
from fulltilt.engine.check.checklist import run_checks
from fulltilt.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
NAMED = ("distributed_experiment", "parallel_grid")  # by the guide itself; it names no other snippet
FILES = [*sorted((CONFIGS / "guides").glob("000-*.yaml")), *(CONFIGS / f"{name}.yaml" for name in NAMED)]
SMALL = {  # what a dry run would take long for; the full-size values are checked without a step
    "000-large-model": ["model=resnet18"],
    "000-checkpointing": ["model=resnet18(num_classes=10)"],
    "000-random-resolution": ["data.transform.train=random_resized_crop(size=64, scale=(0.8, 1.0)) | normalize"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar10")
    write_cifar10(folder, 4)
    return folder


def load(path, *overrides):
    """The configuration; of a grid its first point."""
    return load_points(path, overrides)[0][1]


def test_every_topic_of_the_guide_has_a_file():
    topics = {path.stem.removeprefix("000-") for path in FILES}
    assert topics == {
        "accumulation", "batch-size", "cache", "checkpointing", "compile", "large-model", "memory-first",
        "mixed-precision", "prefetch", "random-resolution", "resolution", "small-model", "timm-model", "workers",
        *NAMED,
    }  # fmt: skip


# Dynamo looks whether an input has a gradient, and hides the warning in a way that a warning as error escapes;
# Inductor imports a part of torch that uses torch's own deprecated decorator.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_dry_run_finds_no_problem(path, data, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda graph, inputs, config_patches=None: graph.forward
    )
    monkeypatch.setattr("fulltilt.engine.build.facts.has_c_compiler", lambda: True)  # none is needed so far
    where = () if path.stem == "parallel_grid" else (f"data.path={data}",)  # its digits come with scikit-learn
    config = load(path, *where, "data.batch_size=2", "data.num_workers=0", *SMALL.get(path.stem, ()))
    items = run_checks(config, device="cpu", out_dir=tmp_path)
    assert [item for item in items if item.verdict == "problem"] == []
    assert any(item.name == "one step" for item in items)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("batch-size", "data.batch_size", 128),
        ("accumulation", "speed.accumulate", 2),
        ("mixed-precision", "speed.precision", "auto"),
        ("large-model", "model", "resnet152"),
        ("workers", "data.pin_memory", True),
        ("workers", "data.persistent_workers", True),
        ("prefetch", "data.prefetch_factor", 2),
        ("prefetch", "data.shuffle", True),
        ("resolution", "data.transform.train", "resize(size=128) | random_flip | normalize"),
        ("compile", "speed.compile", "regional"),
        ("checkpointing", "speed.activation_checkpointing", True),
        ("distributed_experiment", "run.device", [0, 1, 2, 3]),
        ("memory-first", "speed.accumulate", 2),
    ],
)
def test_the_guides_words_reach_their_keys(name, key, value):
    (path,) = (path for path in FILES if path.stem in (name, f"000-{name}"))
    found = load(path).to_values()
    for part in key.split("."):
        found = found[part]
    assert found == value


def test_the_grid_has_six_points_and_devices_are_no_axis_of_it():
    points = [config for _, config in load_points(CONFIGS / "parallel_grid.yaml")]
    assert [(p.optim.lr, p.data.batch_size) for p in points] == [
        (lr, size) for lr in (0.0001, 0.001, 0.01) for size in (64, 128)
    ]
    assert all(p.run.device == [0, 1, 2, 3] for p in points)
    with pytest.raises(ConfigError, match="6"):
        load_config(CONFIGS / "parallel_grid.yaml")
