"""Files to a Config: shapes, spellings, overrides, references, grids, and every way to get it wrong."""

import itertools
import subprocess
import sys

import pytest

from fulltilt.config import load_config, load_points
from fulltilt.config.loading import flatten
from fulltilt.errors import ConfigError


def fail(path, overrides=()) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value)


def test_a_sectioned_file_has_its_values_places_and_defaults(write):
    file = write("data:\n  batch_size: 256\noptim: {lr: 1e-1}\ntargets: {batch_latency_ms: {p99: 100}}\n")
    config = load_config(file)
    assert (config.data.batch_size, config.optim.lr, config.targets.batch_latency_ms) == (256, 0.1, {"p99": 100.0})
    assert (config.base_dir, config.source) == (str(file.parent.resolve()), str(file))
    places = [config.provenance[key] for key in ("data.batch_size", "optim.lr", "run.log_every_n_steps")]
    assert places == [f"{file}:2", f"{file}:3", "default"]


GUIDE_000 = """\
batch_size: 64
gradient_accumulation_steps: 2  # as 128
num_workers: 4
model: wideresnet(depth=28, width=2)
transform:
  train: "resize(size=128) | random_flip"
dataloader:
  train: basic(split=train, shuffle=true, prefetch_factor=2)
  val: basic(split=val, shuffle=false, batch_size=500)
use_amp: true
device: [0, 1, 2, 3]
"""
GUIDE_001 = """\
data: {batch_size: 256, num_workers: 8}
training: {use_amp: true, learning_rate: 0.00015, gradient_accumulation_steps: 4}
benchmark: {num_workers_options: [0, 16]}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            GUIDE_000,
            {
                "data.batch_size": 64,
                "speed.accumulate": 2,
                "data.num_workers": 4,
                "data.prefetch_factor": 2,
                "data.val_batch_size": 500,
                "data.transform.train": "resize(size=128) | random_flip",
                "data.transform.val": None,
                "speed.precision": "auto",
                "run.device": [0, 1, 2, 3],
            },
        ),
        (GUIDE_001, {"speed.precision": "auto", "optim.lr": 0.00015, "benchmark.num_workers_options": [0, 16]}),
        (
            "gpu: {mixed_precision: false, gradient_accumulation: 4, cudnn_benchmark: true, empty_cache_freq: 5}",
            {
                "speed.precision": "fp32",
                "speed.accumulate": 4,
                "speed.cudnn_benchmark": True,
                "speed.empty_cache_every": "5 epochs",
            },
        ),
        (
            "dataloader: {train: basic(split=train, shuffle=false, prefetch_factor=3), val: basic(split=val)}\n"
            "optim: {optimizer: sgd(lr=0.1, momentum=0.9), lr: 1e-2}\n",
            {"data.prefetch_factor": 3, "data.shuffle": False, "optim.optimizer": "sgd(lr=0.1, momentum=0.9)"},
        ),
        ("batch_size: 8\ndata: {batch_size: 8}\nuse_amp: true\ngpu: {mixed_precision: true}\n", {"data.batch_size": 8}),
        (b"\xef\xbb\xbfepochs: 3\r\nlr: 1\r\n", {"run.epochs": 3}),
        (
            "data: &d\n  batch_size: 8\n  num_workers: 2\ntraining:\n  <<: *d\n  lr: 0.5\n",
            {"data.batch_size": 8, "optim.lr": 0.5},
        ),
        ("lr: 1e-4\nname: yes\nepochs: 0o17\n", {"optim.lr": 1e-4, "run.name": "yes", "run.epochs": 15}),
        ("name: 2024-01-01\nseed: 4294967295\n", {"run.name": "2024-01-01", "run.seed": 2**32 - 1}),
        # References have a type when they are the whole value, and reach defaults and lists.
        (
            "batch_size: 48\nval_batch_size: ${data.batch_size}\nmodel: net(width=${batch_size}, flag=${pin_memory})\n",
            {"data.val_batch_size": 48, "model": "net(width=48, flag=false)"},
        ),
        (
            "benchmark: {batch_sizes: [1, '${data.batch_size}']}\ndata: {val_batch_size: '${run.epochs}'}",
            {"benchmark.batch_sizes": [1, 32], "data.val_batch_size": 10},
        ),
    ],
)
def test_shapes_and_spellings(write, text, expected):
    values = flatten(load_config(write(text)).to_values())
    assert {key: values[key] for key in expected} == expected


def test_provenance_of_other_spellings(write):
    file = write(GUIDE_000)
    provenance = load_config(file).provenance
    assert provenance["speed.precision"] == f"alias use_amp ({file}:10)"
    assert provenance["data.transform.train"] == f"alias transform.train ({file}:6)"
    assert provenance["data.prefetch_factor"] == f"alias dataloader.train ({file}:8)"
    assert load_config(write("batch_size: 8\ndata: {batch_size: 8}")).provenance["data.batch_size"] == f"{file}:2"


def test_all_problems_come_in_one_error(write):
    file = write(
        "data:\n  batch_siz: 64\n  num_workers: -1\n  batch_size: 0\n"
        "optim: 3\nrun: {epochs: abc}\nspeed: {precision: bf61}\nempty_cash_freq: 5\nmodel: resnet(\n"
    )
    lines = fail(file, ["lr=0", "nonsense"]).splitlines()
    assert lines[0] == "10 problems:"
    assert len(lines) == 11
    text = "\n".join(lines)
    for expected in (
        f"{file}:2: data.batch_siz: unknown key with the value 64; did you mean batch_size?",
        f"{file}:3: data.num_workers: num_workers -1: expected a whole number of at least 0",
        f"{file}:4: data.batch_size: batch_size 0: expected a whole number of at least 1",
        f"{file}:5: optim: is a section and holds keys, not 3",
        f"{file}:6: run.epochs: epochs 'abc': expected a whole number of at least 1",
        f"{file}:8: empty_cash_freq: unknown key with the value 5",
        f"{file}:9: model: 'resnet(': expected",
        "command line: optim.lr: lr 0: expected a number above 0",
        "command line: 'nonsense' is not key=value",
    ):
        assert expected in text
    assert "precision 'bf61': expected fp32 or tf32 or bf16 or fp16 or auto; did you mean bf16?" in text
    with pytest.raises(ConfigError, match="num_workers -1") as error:
        load_config(write("# text\nnum_workers: -1\n"))
    assert (error.value.file, error.value.line, error.value.key) == (str(file), 2, "data.num_workers")
    assert error.value.exit_code == 2


def test_keys_of_the_top_are_not_said_to_belong_to_a_key_that_holds_none(write):
    said = fail(write("lr: 1"), ["model.checkpoint=x"])
    assert (
        "model.checkpoint: unknown key with the value 'x'; did you mean run.checkpoint_every? valid: benchmark," in said
    )


LEAST_ONE = ("batch_size", "accumulate", "prefetch_factor", "threads")
ANCHORS_THAT_MULTIPLY = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch_size: true", "true and false are not numbers"),
        ("batch_size: null", "batch_size null"),
        ("batch_size: many", "expected a whole number"),
        *((f"{name}: 0", f"{name} 0: expected a whole number of at least 1") for name in LEAST_ONE),
        ("lr: .nan", "lr nan"),
        ("lr: 1e400", "lr inf: expected a finite number above 0"),
        ("device: tpu", "tpu is not supported"),
        ("device: cuda:x", "expected auto, cpu, cuda"),
        ("device: []", "with at least 1 entry"),
        ("device: [0, 0]", "twice"),
        ("device: -1", "device -1"),
        ("device: true", "true and false are not numbers"),
        ("pin_memory: maybe", "expected true or false"),
        ("checkpoint_every: 1", "'1' does not say how often"),
        ("warmup: -3", "warmup -3"),
        ("benchmark: {batch_sizes: [8, 0]}", "batch_sizes [8, 0]"),
        ("benchmark: {batch_sizes: []}", "at least 1 entry"),
        ("benchmark: {levers: {compil: [true]}}", "did you mean compile"),
        ("benchmark: {levers: {precision: [fp64]}}", "precision: 'fp64'"),
        ("benchmark: {levers: {precision: [auto]}}", "precision: 'auto'"),
        ("targets: {batch_latency_ms: {p98: 1}}", "p50 or p90"),
        ("targets: {batch_latency_ms: 100}", "a mapping"),
        ("model: {name: resnet}", "expected text"),
        ("data: {transform: {train: 'a | | b'}}", "data.transform.train: 'a | | b': expected a component name"),
        ("transform: 'a | | b'", "data.transform.train: train (given as transform): 'a | | b': expected"),
        ("data: {trasnform: a}", "did you mean transform"),
        ("dataloader: {train: fast(shuffle=true)}", "unknown loader fast"),
        ("dataloader: {tset: basic()}", "no loader 'tset'"),
        ("dataloader: {train: basic(split=val)}", "must be 'train'"),
        ("dataloader: {val: basic(shuffle=true)}", "must be false"),
        ("dataloader: {train: basic(prefetch=2)}", "did you mean prefetch_factor"),
        ("dataloader: 3", "no loader 'train' can be made of 3"),
        ("dataloader: {train: 'basic(batch_size=x(1))'}", "batch_size x(1) (given as dataloader.train)"),
        ("targets: {batch_latency_ms: {p99: true}}", "true and false are not numbers"),
        ("transform: {tran: a}", "did you mean train"),
        ("batch_size: ${data.transform}", "data.transform.train and data.transform.val; name one"),
        ("learning_rate: -1", "lr -1 (given as learning_rate)"),
        ("<<: 3", "unknown key"),
        ("lr: []", "empty list"),
        ("lr: !grid []", "empty list"),
        ("benchmark: {batch_sizes: [!grid [1, 2]]}", "grid inside a value"),
        ("lr: [[0.1, 0.2]]", "expected a number"),
        ("data: [1]", "is a section"),
        ("lr: ${data.batch_siz}", "did you mean"),
        ("lr: ${lr}", "refers to itself: optim.lr → optim.lr"),
        ("lr: ${warmup}\nwarmup: ${lr}", "refers to itself"),
        ("model: f(${data.batch_size)", "without a key"),
        ("lr: ${benchmark.batch_sizes}\nbenchmark: {batch_sizes: [1, 2]}", "expected a number"),
        ("model: f(\nlr: 1", "expected a value at column 3"),
        ("device: [0\nlr: 1", "not YAML"),
        ("data: {val_batch_size: ${epochs}}", "quotes around"),
        ("lr: 1\nlr: 2", "stands here and in line 1"),
        ("lr: 1\nlr: 2\noptim:\n  clip_norm: 1\n  clip_norm: 2\n", "2 problems:"),
        ("lr:\t1\n\tx: 2", "spaces"),
        ("lr: !!python/object/apply:os.system [ls]", "unknown tag !!python/object/apply:os.system"),
        ("lr: !!int abc", "is not int"),
        ("", "is empty"),
        ("- 1\n- 2\n", "holds a list"),
        ("word", "holds the single value 'word'"),
        ("lr: 1\n---\nlr: 2\n", "second document"),
        ("lr: \x01\n", "not YAML"),
        ("? [a, b]\n: 1", "single word"),
        ("lr: &x [*x]", "levels"),
        (ANCHORS_THAT_MULTIPLY, "more than 100000 values"),
        ("lr: " + "[" * 1500, "nested deeper"),
        (b"lr: 1\nname: \xff\xfe\n", "config.yaml:2: byte 0xff is not UTF-8"),
        (b"#" * (2**20 + 1), "larger than 1 MiB"),
        ("batch_size: 8\n\ndata:\n  batch_size: 16\n", "config.yaml:4: data.batch_size: data.batch_size says 16"),
        ("batch_size: 8\n\ndata:\n  batch_size: 16\n", "batch_size in line 1 says 8"),
        ("use_amp: false\nspeed: {precision: bf16}\n", "precision says 'bf16', use_amp in line 1 says false"),
        ("seq_len: 128", "it is an argument of a component, for instance dataset: text(seq_len=…)"),
        ("data.depth: 2", "it is an argument of a component, for instance model: bilm(depth=…)"),
        ("seed: 4294967296", "run.seed"),
        *((f"run: {{name: '{name}'}}", "names a folder of its own") for name in ("../elsewhere", "a/b", "..", " ")),
        (f"run: {{name: {'ä' * 101}}}", "has 202 bytes, and names a folder; give one of 200 or less"),
        ("run: {promise: {samples_per_s: [1, 2], plan: a}}", "holds figures, as an earlier version wrote them"),
        ("run: {promise: {samples_per_s: [1, 2]}}", "remove it: the next fulltilt tune --apply writes one"),
    ],
)
def test_refused(write, text, said):
    message = fail(write(text))
    assert said in message
    assert "config.yaml" in message


def test_a_missing_file_and_a_folder_name_their_neighbours(write, tmp_path):
    write("lr: 1", "digits.yaml")
    assert "no such file; in that folder: digits.yaml" in fail(tmp_path / "digit.yaml")
    assert "is a folder; name a file in it; in that folder: digits.yaml" in fail(tmp_path)


def test_a_device_without_end_is_refused_as_a_file_that_is_too_large_and_a_pipe_is_read(tmp_path):
    """10 GB of /dev/zero were read in 18 s."""
    code = (
        "import resource\nfrom fulltilt.config.reading import read_text\nfrom fulltilt.errors import ConfigError\n"
        "print(read_text('/dev/stdin'))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))\n"
        "try:\n    read_text('/dev/zero')\nexcept ConfigError as error:\n    print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], input="lr: 1", capture_output=True, text=True)
    assert ended.stdout.splitlines() == ["lr: 1", "/dev/zero: is larger than 1 MiB; is it a data file?"]


def test_a_module_without_an_object_is_told_how_one_is_named(write, tmp_path, monkeypatch):
    write("", "mine.py")
    monkeypatch.chdir(tmp_path)
    assert fail("mine") == "mine: no such file; mine.py is code: name an object in it, mine:NAME"


def test_overrides_win_and_say_so(write):
    file = write("training: {use_amp: true}\nlr: [0.1, 0.2]\n")
    config = load_config(
        file,
        ["lr=3e-4", "use_amp=false", "data.batch_size=7", "run={epochs: 2, seed: 1}", "model=net(a=1, b=2)", "seed=5"],
    )
    assert (config.optim.lr, config.speed.precision, config.data.batch_size) == (3e-4, "fp32", 7)
    assert (config.run.epochs, config.run.seed, config.model) == (2, 5, "net(a=1, b=2)")
    assert config.provenance["optim.lr"] == "alias lr (command line)"
    assert config.provenance["data.batch_size"] == "command line"
    assert load_config(file, ["lr=0.1", "lr=0.2"]).optim.lr == 0.2
    assert load_config(file, ["lr=0.1", "learning_rate=0.1"]).optim.lr == 0.1
    assert load_config(file, ["lr=1", "run.device=[0, 1]"]).run.device == [0, 1]
    assert load_config(file, ["lr=1", "run.checkpoint_every=null"]).run.checkpoint_every is None
    assert "did you mean batch_size" in fail(file, ["data.batchsize=3"])
    assert "no lever named compil; did you mean compile" in fail(file, ["benchmark.levers.compil=[true]"])
    assert "learning_rate says 0.2, lr says 0.1; keep one" in fail(file, ["lr=0.1", "learning_rate=0.2"])


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("benchmark.levers.precision=[fp32, bf16]", "benchmark.levers='{precision: [fp32, bf16]}'"),
        ("benchmark.levers.threads=[null, 1]", "benchmark.levers='{threads: [null, 1]}'"),
        ("benchmark.levers.compile=true", "benchmark.levers='{compile: [true]}'"),
        ("targets.batch_latency_ms.p99=100", "targets.batch_latency_ms='{p99: 100}'"),
        ("targets.response_s.p95=0.5", "targets.response_s='{p95: 0.5}'"),
    ],
)
def test_an_entry_of_a_mapping_is_answered_with_the_override_that_works(write, word, remedy):
    file = write("model: small_cnn\ndata: {dataset: digits}\n")
    assert f"is given as a whole, which replaces the file's: {remedy}" in fail(file, [word])
    key, _, value = remedy.partition("=")
    taken = load_config(file, [f"{key}={value.strip(chr(39))}"]).to_values()
    section, name, entry = word.split("=")[0].split(".")
    assert entry in taken[section][name]


GRID = "lr: [0.0001, 0.001, 0.01]\nbatch_size: [64, 128]\ndevice: [0, 1, 2, 3]\nmodel: net(width=${batch_size})\n"
SPLITS = ("data.transform.train", "data.transform.val")


def test_the_grid_of_guide_000_is_six_points_on_four_devices(write):
    points, configs = zip(*load_points(write(GRID)), strict=True)
    expected = itertools.product((0.0001, 0.001, 0.01), (64, 128))
    assert [(point["optim.lr"], point["data.batch_size"]) for point in points] == [*expected]
    assert {tuple(config.run.device) for config in configs} == {(0, 1, 2, 3)}
    assert [config.model for config in configs[:2]] == ["net(width=64)", "net(width=128)"]
    assert len({config.digest for config in configs}) == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer: [sgd(lr=1, momentum=true), adamw]", [{"optim.optimizer": "sgd(lr=1, momentum=true)"}, ...]),
        (
            "device: !grid [cpu, [0, 1]]\nuse_amp: [true, false]\n",
            [{"run.device": d, "speed.precision": p} for d in ("cpu", [0, 1]) for p in ("auto", "fp32")],
        ),
        ("transform: [normalize, to_float]", [dict.fromkeys(SPLITS, "normalize"), dict.fromkeys(SPLITS, "to_float")]),
        ("transform: ['a(b=${batch_size})', c]\nbatch_size: 8\n", [dict.fromkeys(SPLITS, "a(b=8)"), ...]),
        ("batch_size: 8", [{}]),
    ],
)
def test_a_point_is_the_values_of_its_axes_resolved(write, text, expected):
    points = [point for point, _ in load_points(write(text))]
    assert len(points) == len(expected)
    assert all(wanted in (point, ...) for point, wanted in zip(points, expected, strict=True))


def test_a_point_of_a_grid_is_what_its_values_are_alone(write):
    text = "lr: [1.0, 0.5]\nbatch_size: [8, 16]\nmodel: net(a=${lr}, b=${batch_size})\nseed: 3\n"
    found = load_points(write(text))
    for point, config in found:
        alone = load_config(write(text), [f"{key}={value}" for key, value in point.items()])
        assert config == alone
        assert (config.source, config.run_name) == (alone.source, alone.run_name)
        assert config.provenance["run.seed"] == alone.provenance["run.seed"]
    texts = [config.model for _, config in load_points(write("lr: [1, 1.0]\nmodel: net(a=${lr})\n"))]
    assert texts == ["net(a=1)", "net(a=1.0)"]


def test_values_that_are_good_alone_and_bad_together_are_refused(write):
    text = "path: [a, b]\nname: [c, b]\nmodel: net(${data.path}=1, ${run.name}=2)\ndataset: digits\n"
    assert len(load_points(write(text.replace("[c, b]", "[c, d]")))) == 4
    with pytest.raises(ConfigError, match="model"):
        load_points(write(text))


def test_one_configuration_refuses_a_grid_with_its_size_and_takes_a_point_that_overrides_choose(write):
    assert "a list at a key makes a grid, as optim.lr: [0.1, 0.2], and fulltilt lab" in fail(write("grid: {lr: [1]}"))
    said = fail(write(GRID))
    assert "makes a grid of 6 points (optim.lr × 3, data.batch_size × 2) and" in said
    assert "choose: optim.lr=0.0001 data.batch_size=64" in said
    path = write(GRID)
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["run.epochs=3", "model=mlp(depth=1, hidden=2)"])
    command = f"fulltilt lab submit --local {path} run.epochs=3 'model=mlp(depth=1, hidden=2)'"
    assert str(caught.value).endswith(f"or run all of them: {command}")
    assert load_config(write(GRID), ["optim.lr=0.5", "data.batch_size=64"]).optim.lr == 0.5


def test_every_bad_value_of_a_grid_is_named_once_and_a_grid_without_end_is_refused(write):
    said = fail(write("lr: [0.1, -1, 0]\nbatch_size: [8, 16]\n"))
    assert said.splitlines()[0] == "2 problems:"
    assert all(part in said for part in ("lr -1", "lr 0"))
    sizes = ", ".join(map(str, range(1, 60)))
    with pytest.raises(ConfigError, match="grid of 205379 points"):
        load_points(write("".join(f"{key}: [{sizes}]\n" for key in ("batch_size", "epochs", "accumulate"))))
