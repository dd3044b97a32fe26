"""Files to a Config: shapes, spellings, overrides, references, grids, and every way to get it wrong."""

from __future__ import annotations

import pytest

from fulltilt.config import config_from_values, load_config, load_points
from fulltilt.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write_file(text: str | bytes, name: str = "config.yaml"):
        file = tmp_path / name
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write_file


def load_grid(path):
    return [config for _, config in load_points(path)]


def fail(path, overrides=()) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value)


DESIGN = """\
task: classification                    # a comment
model: wideresnet(depth=28, width=2)
data:
  dataset: cifar10(root=data)
  transform: {train: "random_crop(32, padding=4) | random_flip | normalize", val: "normalize"}
  batch_size: 256
  num_workers: 4
  pin_memory: true
optim: {optimizer: sgd, lr: 1e-1, schedule: cosine}
speed: {precision: bf16, accumulate: 1, compile: false, channels_last: true, cudnn_benchmark: true}
run: {epochs: 30, device: auto, seed: 42, checkpoint_every: 1 epoch}
benchmark: {batch_sizes: [64, 128, 256], num_workers_options: [0, 2, 4], steps_per_test: 10, \
test_mixed_precision: true, test_pin_memory: true}
targets: {batch_latency_ms: {p99: 100}, memory_gib: 16, samples_per_hour: 10000, response_s: {p95: 2}}
"""


def test_sectioned_file(write):
    file = write(DESIGN)
    config = load_config(file)
    assert config.data.batch_size == 256
    assert config.data.transform.train == "random_crop(32, padding=4) | random_flip | normalize"
    assert config.optim.lr == 0.1
    assert config.speed.precision == "bf16"
    assert config.run.epochs == 30
    assert config.benchmark.batch_sizes == [64, 128, 256]
    assert config.targets.batch_latency_ms == {"p99": 100.0}
    assert config.base_dir == str(file.parent.resolve())
    assert config.source == str(file)
    assert config.provenance["data.batch_size"] == f"{file}:6"
    assert config.provenance["optim.lr"] == f"{file}:9"
    assert config.provenance["run.log_every_n_steps"] == "default"


def test_flat_file_of_guide_000(write):
    file = write(
        "batch_size: 64\n"
        "gradient_accumulation_steps: 2  # as 128\n"
        "num_workers: 4\n"
        "pin_memory: true\n"
        "persistent_workers: true\n"
        "model: wideresnet(depth=28, width=2)\n"
        "transform:\n"
        '  train: "resize(size=128) | random_flip"\n'
        "dataloader:\n"
        "  train: basic(split=train, shuffle=true, prefetch_factor=2)\n"
        "  val: basic(split=val, shuffle=false, batch_size=500)\n"
        "use_amp: true\n"
        "device: [0, 1, 2, 3]\n"
    )
    config = load_config(file)
    assert (config.data.batch_size, config.speed.accumulate, config.data.num_workers) == (64, 2, 4)
    assert config.data.prefetch_factor == 2
    assert config.data.val_batch_size == 500
    assert config.data.transform.train == "resize(size=128) | random_flip"
    assert config.data.transform.val is None
    assert config.speed.precision == "auto"
    assert config.run.device == [0, 1, 2, 3]
    assert config.provenance["speed.precision"] == f"alias use_amp ({file}:12)"
    assert config.provenance["data.transform.train"] == f"alias transform.train ({file}:8)"
    assert config.provenance["data.prefetch_factor"] == f"alias dataloader.train ({file}:10)"


def test_sections_of_guides_001_and_002(write):
    first = load_config(
        write(
            "data:\n  batch_size: 256\n  num_workers: 8\n  pin_memory: true\n"
            "training:\n  use_amp: true\n  learning_rate: 0.00015\n  gradient_accumulation_steps: 4\n"
            "benchmark:\n  batch_sizes: [1, 2, 8192]\n  num_workers_options: [0, 16]\n  steps_per_test: 10\n"
            "  test_mixed_precision: true\n  test_pin_memory: true\n"
        )
    )
    assert (first.speed.precision, first.optim.lr, first.speed.accumulate) == ("auto", 0.00015, 4)
    assert first.benchmark.num_workers_options == [0, 16]
    second = load_config(
        write(
            "data:\n  num_workers: 6\n"
            "gpu:\n  mixed_precision: false\n  gradient_accumulation: 4\n  cudnn_benchmark: true\n"
        )
    )
    assert (second.speed.precision, second.speed.accumulate, second.speed.cudnn_benchmark) == ("fp32", 4, True)


def test_component_calls_inside_braces_keep_their_commas(write):
    config = load_config(
        write(
            "dataloader: {train: basic(split=train, shuffle=false, prefetch_factor=3), val: basic(split=val)}\n"
            "optim: {optimizer: sgd(lr=0.1, momentum=0.9, nesterov=true), lr: 1e-2}\n"
        )
    )
    assert (config.data.prefetch_factor, config.data.shuffle) == (3, False)
    assert (config.optim.optimizer, config.optim.lr) == ("sgd(lr=0.1, momentum=0.9, nesterov=true)", 0.01)


def test_component_calls_inside_a_list_are_grid_points(write):
    points = load_grid(write("optimizer: [sgd(lr=1, momentum=true), adamw]\n"))
    assert [p.optim.optimizer for p in points] == ["sgd(lr=1, momentum=true)", "adamw"]


def test_two_spellings_that_agree(write):
    config = load_config(write("batch_size: 8\ndata: {batch_size: 8}\nuse_amp: true\ngpu: {mixed_precision: true}\n"))
    assert config.data.batch_size == 8
    assert config.provenance["data.batch_size"].endswith(":2")


def test_two_spellings_that_disagree_name_both_lines(write):
    file = write("batch_size: 8\n\ndata:\n  batch_size: 16\n")
    said = fail(file)
    assert f"{file}:4: data.batch_size" in said
    assert "batch_size in line 1 says 8" in said
    assert "says 16" in said


def test_use_amp_against_precision(write):
    said = fail(write("use_amp: false\nspeed: {precision: bf16}\n"))
    assert "says 'bf16'" in said
    assert "says false" in said


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
        f"{file}:9: model: model",
        "command line: optim.lr: lr 0: expected a number above 0",
        "command line: 'nonsense' is not key=value",
    ):
        assert expected in text
    assert "precision 'bf61': expected fp32 or tf32 or bf16 or fp16 or auto; did you mean bf16?" in text


def test_a_single_problem_carries_its_place(write):
    file = write("# text\nnum_workers: -1\n")
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert (error.value.file, error.value.line, error.value.key) == (str(file), 2, "data.num_workers")
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch_size: true", "true and false are not numbers"),
        ("batch_size: 2.5", "batch_size 2.5"),
        ("batch_size: null", "batch_size null"),
        ("batch_size: many", "expected a whole number"),
        ("num_workers: -1", "num_workers -1"),
        ("lr: .nan", "lr nan"),
        ("lr: .inf", "lr inf"),
        ("lr: -1", "expected a number above 0"),
        ("epochs: 0", "epochs 0"),
        ("seed: -1", "seed -1"),
        ("device: tpu", "tpu is not supported"),
        ("device: cuda:x", "expected auto, cpu, cuda"),
        ("device: []", "with at least 1 entry"),
        ("device: [0, 0]", "twice"),
        ("device: -1", "device -1"),
        ("pin_memory: maybe", "expected true or false"),
        ("checkpoint_every: 1", "'1' does not say how often"),
        ("checkpoint_every: '1'", "1 epoch"),
        ("warmup: -3", "warmup -3"),
        ("benchmark: {batch_sizes: [8, 0]}", "batch_sizes [8, 0]"),
        ("benchmark: {batch_sizes: []}", "at least 1 entry"),
        ("benchmark: {levers: {compil: [true]}}", "did you mean compile"),
        ("benchmark: {levers: {precision: [fp64]}}", "precision: 'fp64'"),
        ("benchmark: {levers: {precision: [auto]}}", "precision: 'auto'"),
        ("targets: {batch_latency_ms: {p98: 1}}", "p50 or p90"),
        ("targets: {batch_latency_ms: 100}", "a mapping"),
        ("model: {name: resnet}", "expected text"),
        ("data: {transform: {train: 'a | | b'}}", "component name"),
        ("data: {trasnform: a}", "did you mean transform"),
        ("dataloader: {train: fast(shuffle=true)}", "unknown loader fast"),
        ("dataloader: {tset: basic()}", "no loader 'tset'"),
        ("dataloader: {train: basic(split=val)}", "must be 'train'"),
        ("dataloader: {val: basic(shuffle=true)}", "must be false"),
        ("dataloader: {train: basic(prefetch=2)}", "did you mean prefetch_factor"),
        ("dataloader: 3", "no loader 'train' can be made of 3"),
        ("dataloader: {train: 'basic(batch_size=x(1))'}", "batch_size x(1) (given as dataloader.train)"),
        ("device: true", "true and false are not numbers"),
        ("device: [true]", "true and false are not numbers"),
        ("device: 1.5", "device 1.5"),
        ("targets: {batch_latency_ms: {p99: true}}", "true and false are not numbers"),
        ("transform: {tran: a}", "did you mean train"),
        ("batch_size: ${data.transform}", "data.transform.train and data.transform.val; name one"),
        ("<<: 3", "unknown key"),
        ("learning_rate: -1", "lr -1 (given as learning_rate)"),
        ("lr: []", "empty list"),
        ("lr: !grid []", "empty list"),
        ("benchmark: {batch_sizes: [!grid [1, 2]]}", "grid inside a value"),
        ("lr: [[0.1, 0.2]]", "expected a number"),
        ("data: [1]", "is a section"),
        ("a.b.c: 1", "unknown key"),
        ("lr: ${data.batch_siz}", "did you mean"),
        ("lr: ${lr}", "refers to itself: optim.lr → optim.lr"),
        ("lr: ${warmup}\nwarmup: ${lr}", "refers to itself"),
        ("model: f(${data.batch_size)", "without a key"),
        ("lr: ${benchmark.batch_sizes}\nbenchmark: {batch_sizes: [1, 2]}", "expected a number"),
        ("model: f(\nlr: 1", "expected a value at column 3"),
        ("device: [0\nlr: 1", "not YAML"),
        ("data: {val_batch_size: ${epochs}}", "quotes around"),
        ("lr: 1\nlr: 2", "stands here and in line 1"),
        ("lr:\t1\n\tx: 2", "spaces"),
        ("lr: !!python/object/apply:os.system [ls]", "unknown tag !!python/object/apply:os.system"),
        ("lr: !secret 3", "unknown tag !secret"),
        ("lr: !!int abc", "is not int"),
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- 1\n- 2\n", "holds a list"),
        ("word", "holds the single value 'word'"),
        ("lr: 1\n---\nlr: 2\n", "second document"),
        ("lr: \x01\n", "not YAML"),
        ("? [a, b]\n: 1", "single word"),
        ("lr: &x [*x]", "levels"),
        ("lr: " + "[" * 1500, "nested deeper"),
    ],
)
def test_refused(write, text, said):
    message = fail(write(text))
    assert said in message
    assert "config.yaml" in message


def test_anchors_that_multiply_are_stopped(write):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "more than 100000 values" in fail(write("\n".join(lines)))


def test_bytes_that_are_no_text(write):
    said = fail(write(b"lr: 1\nname: \xff\xfe\n"))
    assert ":2:" in said
    assert "UTF-8" in said


def test_a_byte_order_mark_is_no_problem(write):
    assert load_config(write(b"\xef\xbb\xbfepochs: 3\r\nlr: 1\r\n")).run.epochs == 3


def test_missing_file_names_its_neighbours(write):
    write("lr: 1", "digits.yaml")
    said = fail(write("lr: 1").parent / "digit.yaml")
    assert "no such file; in that folder: digits.yaml" in said


def test_folder_and_too_large(write, tmp_path):
    assert "is a folder" in fail(tmp_path)
    assert "larger than 1 MiB" in fail(write(b"#" * (2**20 + 1)))


def test_anchors_and_merge_keys(write):
    config = load_config(write("data: &d\n  batch_size: 8\n  num_workers: 2\ntraining:\n  <<: *d\n  lr: 0.5\n"))
    assert (config.data.batch_size, config.optim.lr) == (8, 0.5)


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
    assert load_config(file, ["lr=1", "run.device=[0, 1]"]).run.device == [0, 1]
    assert load_config(file, ["lr=1", "run.checkpoint_every=null"]).run.checkpoint_every is None


def test_unknown_override_names_the_nearest(write):
    assert "did you mean batch_size" in fail(write("lr: 1"), ["data.batchsize=3"])


def test_references_are_typed_when_whole_and_text_inside_text(write):
    config = load_config(
        write(
            "batch_size: 48\nval_batch_size: ${data.batch_size}\nmodel: net(width=${batch_size}, flag=${pin_memory})\n"
        )
    )
    assert config.data.val_batch_size == 48
    assert config.model == "net(width=48, flag=false)"


def test_references_reach_defaults_and_lists(write):
    text = "benchmark: {batch_sizes: [1, '${data.batch_size}']}\ndata: {val_batch_size: '${run.epochs}'}"
    config = load_config(write(text))
    assert config.benchmark.batch_sizes == [1, config.data.batch_size]
    assert config.data.val_batch_size == config.run.epochs


GRID = "lr: [0.0001, 0.001, 0.01]\nbatch_size: [64, 128]\ndevice: [0, 1, 2, 3]\nmodel: net(width=${batch_size})\n"


def test_the_grid_of_guide_000_is_six_points_on_four_devices(write):
    points = load_grid(write(GRID))
    assert [(p.optim.lr, p.data.batch_size) for p in points] == [
        (lr, batch) for lr in (0.0001, 0.001, 0.01) for batch in (64, 128)
    ]
    assert {tuple(p.run.device) for p in points} == {(0, 1, 2, 3)}
    assert [p.model for p in points[:2]] == ["net(width=64)", "net(width=128)"]
    assert len({p.digest for p in points}) == 6


def test_a_point_is_the_values_of_its_axes_resolved(write):
    file = write("lr: [1, 2]\ntransform: ['a(b=${batch_size})', c]\nbatch_size: 8\n")
    values = [point for point, _ in load_points(file)]
    assert values[1] == {"optim.lr": 1.0, "data.transform.train": "c", "data.transform.val": "c"}
    assert values[2]["data.transform.train"] == "a(b=8)"
    assert [config for _, config in load_points(file)] == load_grid(file)
    assert load_points(file, ["lr=3", "transform=c"])[0][0] == {}


def test_one_configuration_refuses_a_grid_with_its_size(write):
    said = fail(write(GRID))
    assert "grid of 6 points (optim.lr × 3, data.batch_size × 2)" in said
    assert "choose: optim.lr=0.0001 data.batch_size=64" in said


def test_overrides_can_choose_a_point(write):
    assert load_config(write(GRID), ["optim.lr=0.5", "data.batch_size=64"]).optim.lr == 0.5


def test_grid_tag_makes_an_axis_of_a_key_that_takes_lists(write):
    points = load_grid(write("device: !grid [cpu, [0, 1]]\nuse_amp: [true, false]\n"))
    assert [(p.run.device, p.speed.precision) for p in points] == [
        ("cpu", "auto"),
        ("cpu", "fp32"),
        ([0, 1], "auto"),
        ([0, 1], "fp32"),
    ]


def test_one_transform_for_both_splits_is_one_axis(write):
    points = load_grid(write("transform: [normalize, to_float]\n"))
    assert [(p.data.transform.train, p.data.transform.val) for p in points] == [
        ("normalize", "normalize"),
        ("to_float", "to_float"),
    ]


def test_every_bad_value_of_a_grid_is_named_once(write):
    said = fail(write("lr: [0.1, -1, 0]\nbatch_size: [8, 16]\n"))
    assert said.splitlines()[0] == "2 problems:"
    assert "lr -1" in said
    assert "lr 0" in said


def test_a_grid_without_end_is_refused(write):
    file = write(
        "".join(f"{k}: [{', '.join(map(str, range(1, 60)))}]\n" for k in ("batch_size", "epochs", "accumulate"))
    )
    with pytest.raises(ConfigError, match="grid of 205379 points"):
        load_grid(file)


def test_yaml_1_2(write):
    config = load_config(write("lr: 1e-4\nname: yes\nepochs: 0o17\n"))
    assert (config.optim.lr, config.run.name, config.run.epochs) == (1e-4, "yes", 15)
    assert load_config(write("name: 2024-01-01\n")).run.name == "2024-01-01"


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "..", " "])
def test_a_run_does_not_leave_its_folder_by_its_name(name):
    with pytest.raises(ConfigError, match="names a folder of its own"):
        config_from_values({"run": {"name": name}}, base_dir=".")


@pytest.mark.parametrize(("key", "written"), [("seq_len: 128", "text(seq_len=…)"), ("data.depth: 2", "bilm(depth=…)")])
def test_a_key_that_is_an_argument_of_a_component_is_told_where_it_belongs(write, key, written):
    assert (
        f"it is an argument of a component, for instance {'dataset' if 'seq' in key else 'model'}: {written}"
        in fail(write(f"{key}\n"))
    )


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
    with pytest.raises(ConfigError) as refused:
        load_config(file, [word])
    said = str(refused.value)
    assert f"is given as a whole, which replaces the file's: {remedy}" in said
    key, _, value = remedy.partition("=")
    section, _, name = key.partition(".")
    taken = getattr(getattr(load_config(file, [f"{key}={value.strip(chr(39))}"]), section), name)
    assert taken is not None
    assert word.split("=")[0] == f"{key}.{next(iter(taken))}"


def test_an_override_of_a_lever_that_is_not_there_names_the_levers(write):
    with pytest.raises(ConfigError, match="no lever named compil; did you mean compile"):
        load_config(write("model: small_cnn\ndata: {dataset: digits}\n"), ["benchmark.levers.compil=[true]"])


def test_a_seed_that_no_generator_takes_is_refused():
    assert config_from_values({"run": {"seed": 2**32 - 1}}, base_dir=".").run.seed == 2**32 - 1
    with pytest.raises(ConfigError, match=r"run\.seed"):
        config_from_values({"run": {"seed": 2**32}}, base_dir=".")


@pytest.mark.parametrize(
    ("promise", "said"),
    [
        ("{samples_per_s: [0, 1], plan: a, machine: b}", "promise.samples_per_s 0: "),
        ("{samples_per_s: [1, 2], machine: b}", "promise.plan: is missing"),
        ("{samples_per_s: [1, 2], plan: a, machine: b, speed: 3}", "promise.speed 3: is no key of it"),
        ("3", "expected the keys of promise, as fulltilt tune --apply writes them, or null"),
    ],
)
def test_what_is_wrong_inside_a_promise_is_named(write, promise, said):
    assert said in fail(write(f"run: {{promise: {promise}}}"))


def test_two_names_of_one_key_on_the_command_line_must_agree(write):
    file = write("lr: 1")
    assert "learning_rate says 0.2, lr says 0.1; keep one" in fail(file, ["lr=0.1", "learning_rate=0.2"])
    assert load_config(file, ["lr=0.1", "learning_rate=0.1"]).optim.lr == 0.1
    assert load_config(file, ["lr=0.1", "lr=0.2"]).optim.lr == 0.2


def test_an_infinite_number_is_told_to_be_one(write):
    assert "lr inf: expected a finite number above 0" in fail(write("lr: 1e400"))
