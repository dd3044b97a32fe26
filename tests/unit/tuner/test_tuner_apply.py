"""The recommended plan in the user's own file."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from fulltilt.config import load_config, plan_of
from fulltilt.errors import NoPlanError, StorageError, UsageError
from fulltilt.levers import compute_plan_digest
from fulltilt.records import PhasesMs
from fulltilt.tuner.answer.apply import apply_result, check_target, find_varied_levers, plan_changes
from fulltilt.tuner.picks.recommend import LearningRate

TEXT = "model: small_cnn  # mine\ndata: {dataset: digits, batch_size: 32}\noptim: {lr: 0.1}  # tuned by hand\n"


def make_trial(plan, **measured):
    usual = {
        "samples_per_s": 1234.0, "samples_per_s_ci95": None, "is_busy": False, "observed": {}, "phases_ms": None,
        "n_devices": 1, "kind": "end_to_end", "status": "ok",
    }  # fmt: skip
    return types.SimpleNamespace(plan=plan, **(usual | measured))


def make_result(plan, rate, *, user_plan, ci95=None, runs=(), tried=(), probes=(), **measured):
    """A search that ran ``user_plan``, ``plan`` and the ``tried``, and recommends ``plan``."""
    trial = make_trial(plan, samples_per_s_ci95=ci95, **measured)
    pick = types.SimpleNamespace(trial=trial, runs_samples_per_s=runs)
    return types.SimpleNamespace(
        picks=types.SimpleNamespace(recommended=pick),
        learning_rate=rate,
        machine=types.SimpleNamespace(hostname_hash="00ab12"),
        workload={"name": "digits", "model": "CNN", "n_parameters": 10, "data": "Digits, 8 samples"},
        user_plan=user_plan,
        trials=(trial, *map(make_trial, (user_plan, *tried))),
        repeats=(),
        probes=probes,
        baseline=make_trial(user_plan),
    )


SAME_RATE = LearningRate(rule="none", start=0.1, to=0.1)
SQRT = LearningRate(rule="sqrt", start=0.1, to=0.2)
BUSY = {"is_busy": True, "cpu_pressure_pct": 98.0}
PROMISED = {"ci95": (100.0, 300.0), "runs": (150.0, 200.0)}


@pytest.fixture
def file(tmp_path):
    (tmp_path / "a.yaml").write_text(TEXT)
    return tmp_path / "a.yaml"


@pytest.fixture
def config(file):
    return load_config(file)


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        (tmp_path / "b.yaml").write_text(text)
        return tmp_path / "b.yaml"

    return write_file


def recommend(config, changes, rate=SAME_RATE, **more):
    user_plan = plan_of(config)
    return make_result(user_plan.replace(**changes), rate, user_plan=user_plan, **more)


def apply(file, searched, changes, rate=SAME_RATE, **more):
    """Apply a result → what became of the file, and its configuration then."""
    applied = apply_result(recommend(searched, changes, rate, **more), file, searched=searched)
    return applied, load_config(file)


def plan_values(result, config):
    return plan_changes(result, config, searched=config).values


def test_only_what_differs_is_written_and_comments_stay(config, file):
    changes = {"batch_size": 128, "compile": True}
    planned = plan_changes(recommend(config, changes, SQRT), config, searched=config)
    assert planned.values == {"data.batch_size": 128, "speed.compile": True, "optim.lr": 0.2}
    assert planned.plan == plan_of(config).replace(**changes)
    applied, written = apply(file, config, changes, SQRT)
    assert "+" in applied.diff
    assert (plan_of(written), written.optim.lr) == (planned.plan, 0.2)
    assert "# mine" in file.read_text()
    assert "# tuned by hand\n" in file.read_text()


def test_nothing_is_written_that_was_not_compared_with_the_settings_as_they_were(config, file):
    """A short budget wrote what had run alone into the file, with a line below it that nothing says it is faster."""
    result = recommend(config, {"num_workers": 2})
    result.baseline, result.picks.recommended.trial.id = None, "t9"
    said = r"left as it was.*nothing is known of how t9 compares.*larger --budget"
    with pytest.raises(NoPlanError, match=said) as kept:
        apply_result(result, file, searched=config)
    assert kept.value.exit_code == 3
    assert file.read_text() == TEXT


def test_a_file_that_holds_the_pick_already_is_left_alone(config, file):
    assert apply(file, config, {})[0].diff == ""
    assert file.read_text() == TEXT


@pytest.mark.parametrize("start", [None, 0.7])  # not known; set by the workload's own code
def test_a_rate_that_the_file_does_not_set_is_not_written(config, start):
    rate = LearningRate(rule="sqrt", start=start, to=None)
    planned = plan_changes(recommend(config, {"batch_size": 128}, rate), config, searched=config)
    assert planned.values == {"data.batch_size": 128}
    assert planned.notes == (
        "the learning rate is set by code, not by the file: scale it × 2 there (sqrt rule, effective batch 32 → 128)",
    )
    assert plan_values(recommend(config, {"num_workers": 2}, SQRT), config) == {"data.num_workers": 2}


def test_the_rate_follows_the_file_that_is_written_and_not_the_one_that_was_searched(config, write):
    """A rate that was made from the searched file's own once stood beside the batch of another file."""
    file = write("dataset: digits\nbatch_size: 64\nlearning_rate: 0.03  # mine\n")
    changes = {"batch_size": 128, "compile": True}
    _, written = apply(file, config, changes, SQRT, **PROMISED)
    assert (written.data.batch_size, written.optim.lr) == (128, pytest.approx(0.03 * 2**0.5, rel=1e-8))
    assert "  # mine\n" in file.read_text()
    once = file.read_text()
    assert apply(file, config, changes, SQRT, **PROMISED)[0].diff == "", "the second time nothing changes"
    assert file.read_text() == once


def test_there_and_back_again_the_rate_is_as_it_was(config, file):
    """Three digits of each rate added up to another rate after some searches."""
    for batch_size in (64, 32) * 3:
        rate = LearningRate(rule="sqrt", start=config.optim.lr, to=None)
        _, config = apply(file, config, {"batch_size": batch_size}, rate)
    assert config.optim.lr == pytest.approx(0.1, rel=1e-7)


def test_a_rate_inside_the_optimizer_is_the_one_that_changes(config, write):
    file = write("dataset: digits\nbatch_size: 32\noptim: {optimizer: 'sgd(lr=0.5, momentum=0.9)'}\n")
    _, written = apply(file, config, {"batch_size": 128}, SQRT)
    assert written.optim.optimizer == "sgd(lr=1.0, momentum=0.9)"
    assert "optim.lr" not in {key for key, place in written.provenance.items() if place != "default"}


def test_what_the_search_never_varied_stays_as_the_file_has_it(config, write):
    file = write("dataset: digits\nbatch_size: 32\ncompile: true\nprefetch_factor: 4\n")
    tried = [plan_of(config).replace(channels_last=True)]
    applied, written = apply(file, config, {"num_workers": 2}, tried=tried, **PROMISED)
    assert (written.speed.compile, written.data.prefetch_factor, written.data.num_workers) == (True, 4, 2)
    assert written.run.promise is None
    (note,) = applied.notes
    assert "compile True (measured with False), prefetch_factor 4 (measured with None)" in note


def test_what_only_a_probe_left_out_is_not_varied(write):
    """Probes of the step run without the loader's levers; that says nothing of the values those should have."""
    config = load_config(write(TEXT.replace("batch_size: 32", "batch_size: 32, placement: auto, num_workers: 2")))
    bare = plan_of(config).replace(num_workers=0, placement="stream")
    probes = [make_trial(plan, kind="device") for plan in (bare, bare.replace(compile=True))]
    result = recommend(config, {}, probes=probes)
    assert find_varied_levers(result) == {"compile"}
    assert plan_values(result, config) == {}


def test_what_the_search_left_as_it_was_stays_as_it_is_spelled(write):
    """``use_amp: true`` became ``bf16``, which nobody had chosen, where the only plan that ran was the user's own."""
    config = load_config(write(TEXT + "speed: {precision: auto}\n"))
    assert plan_of(config)["precision"] == "auto"
    ran, other = (plan_of(config).replace(precision=precision) for precision in ("bf16", "fp32"))
    assert plan_values(make_result(ran, SAME_RATE, user_plan=ran, tried=[other]), config) == {}
    assert plan_values(make_result(other, SAME_RATE, user_plan=ran), config) == {"speed.precision": "fp32"}


def test_a_value_that_was_tried_and_lost_is_taken_back(config, write):
    file = write("dataset: digits\nbatch_size: 32\ncompile: true\n")
    applied, written = apply(file, config, {}, tried=[plan_of(config).replace(compile=True)], **PROMISED)
    assert not applied.notes
    assert written.speed.compile is False
    assert written.run.promise is not None


@pytest.mark.parametrize(
    ("sizes", "expected", "n_notes"),
    [("batch_size: 256", (16, 16), 1), ("batch_size: 32", (16, 2), 0), ("batch_size: 40", (40, 1), 2)],
)
def test_the_effective_batch_stays_the_files_own_unless_it_was_free(config, write, sizes, expected, n_notes):
    file = write(f"dataset: digits\n{sizes}\nlearning_rate: 0.03\n")
    applied, written = apply(file, config, {"batch_size": 16, "accumulate": 2}, **PROMISED)
    assert (written.data.batch_size, written.speed.accumulate) == expected
    assert written.optim.lr == 0.03
    assert len(applied.notes) == n_notes


def test_every_spelling_of_a_lever_is_written(config, write):
    file = write(
        "data: {dataset: digits, batch_size: 32}\n"
        "gpu:\n    gradient_accumulation: 1  # STL-10\n    mixed_precision: false\n"
        "dataloader:\n  train: basic(prefetch_factor=2)\n"
    )
    plan = {"batch_size": 16, "accumulate": 2, "precision": "bf16", "prefetch_factor": 4, "num_workers": 2}
    apply_result(recommend(config, plan), file, searched=config)
    assert plan_of(load_config(file)) == plan_of(config).replace(**plan)
    written = file.read_text()
    assert "gradient_accumulation: 2  # STL-10\n    mixed_precision: bf16\n" in written
    assert "train: basic(prefetch_factor=4)" in written


def test_figures_of_an_earlier_search_go_and_the_users_comments_stay(write):
    file = write(TEXT + "speed:\n  compile: false  # slow to start\n")
    config = load_config(file)
    for rate, changes in ((0.0123, {"channels_last": True}), (2345.0, {"channels_last": True, "compile": True})):
        apply(file, config, changes, samples_per_s=rate, **PROMISED)
    written = file.read_text()
    assert "channels_last: true  # fulltilt tune: 2,345 samples/s" in written
    assert "compile: true  # slow to start\n" in written
    assert "0.0123" not in written


def test_what_was_measured_travels_with_the_settings(config, file):
    phases = PhasesMs(data_wait=1.5, h2d=None, forward=1, backward=1, optimizer=1, other=0, step=6.0)
    measured = {"observed": {"threads": 2}, "phases_ms": phases, "ci95": (1200.123, 1300.0), "runs": (1190.0, 1250.0)}
    applied, written = apply(file, config, {"batch_size": 128}, **measured)
    assert "promise" in applied.diff
    promise = written.run.promise
    assert promise.samples_per_s == [1190.0, 1300.0]  # the row's interval, widened to its runs side by side
    assert (promise.machine, promise.threads, promise.data_wait_pct) == ("00ab12", 2, 25.0)
    assert (promise.model, promise.n_parameters, promise.data) == ("CNN", 10, "Digits, 8 samples")
    assert promise.device is None  # the probe did not say
    assert promise.plan == compute_plan_digest(plan_of(config).replace(batch_size=128))
    assert promise.plan == compute_plan_digest(plan_of(written))
    assert apply(file, config, {"batch_size": 128}, **measured)[0].diff == ""


def test_a_promise_of_an_earlier_search_gives_way(config, file):
    for low in (100.0, 200.0):
        _, written = apply(file, config, {}, ci95=(low, 300.0), runs=(low + 1, 299.0))
    assert written.run.promise.samples_per_s == [200.0, 300.0]
    assert file.read_text().count("promise") == 1


def test_a_promise_of_another_plan_does_not_outlive_it(config, file):
    """A search that can promise nothing once left the promise of the search before it beside its own plan."""
    _, promised = apply(file, config, {}, **PROMISED)
    assert promised.digest == config.digest, "a promise makes no other configuration: the search goes on in its folder"
    applied, written = apply(file, config, {})
    assert (applied.diff, written.run.promise is None) == ("", False)
    applied, written = apply(file, config, {"num_workers": 2}, ci95=(100.0, 300.0))
    assert written.run.promise is None
    assert applied.notes == ("no run.promise was written: the plan ran 0 times side by side, 2 are needed",)


@pytest.mark.parametrize("busy", ["row", "run beside it", None])
def test_a_promise_of_a_busy_machine_is_marked(config, file, busy):
    """From 0 to 1,000 samples/s was promised, and neither the file nor ``train`` said why so little."""
    result = recommend(config, {"compile": True}, **(BUSY if busy == "row" else {}), **PROMISED)
    if busy == "run beside it":
        result.repeats = (make_trial(result.picks.recommended.trial.plan, samples_per_s=150.0, **BUSY),)
    apply_result(result, file, searched=config)
    assert load_config(file).run.promise.cpu_pressure_pct == (98.0 if busy else None)
    assert ("# fulltilt tune: 1,234 samples/s, on a busy machine" in file.read_text()) == bool(busy)
    apply(file, config, {"compile": True}, **PROMISED)
    assert "busy" not in file.read_text(), "the mark goes with the figure"


def test_a_promise_outlives_a_lever_that_is_added_later(config):
    plan = plan_of(config).replace(batch_size=128)
    older = {name: value for name, value in plan.items() if name != "compile"}
    assert compute_plan_digest(older) == compute_plan_digest(plan)
    assert compute_plan_digest(plan.replace(compile=True)) != compute_plan_digest(plan)


@pytest.mark.parametrize(("measured", "written"), [(1, None), (2, 2)])
def test_a_file_gets_a_promise_of_as_many_processes_as_it_trains_in(write, measured, written):
    """What was measured on one device says nothing of several."""
    file = write(TEXT + "run: {device: cpu, n_ranks: 2}\nspeed:\n  threads: 1\n")
    applied, config = apply(file, load_config(file), {"compile": True}, n_devices=measured, **PROMISED)
    assert "compile" in applied.diff
    assert ("# fulltilt tune: 1,234 samples/s" in file.read_text()) == (written is not None)
    assert "# fulltilt tune" in file.read_text()
    assert (config.run.promise.n_ranks if config.run.promise is not None else None) == written


def test_a_file_that_is_not_writable_is_refused_and_stays(config, file):
    """A rename asks for the folder's permission alone: a file of mode 444 was rewritten, and writable afterwards."""
    file.chmod(0o444)
    with pytest.raises(StorageError, match=r"a\.yaml is not writable \(mode 444\); chmod u\+w"):
        apply(file, config, {"num_workers": 2})
    assert (file.read_text(), file.stat().st_mode & 0o7777) == (TEXT, 0o444)
    file.chmod(0o640)
    assert apply(file, config, {"num_workers": 2})[0].diff
    assert file.stat().st_mode & 0o7777 == 0o640


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("model: wideresnet\ndata: {dataset: digits}\n", r"model wideresnet \(searched: small_cnn\); search it by"),
        ("model: small_cnn\ndata: {dataset: 'cifar10(root=../data)'}\n", r"data.dataset cifar10 \(searched: digits\)"),
        (
            "task: diffusion\nmodel: small_cnn\ndata: {dataset: digits}\n",
            r"task diffusion \(searched: classification\)",
        ),
        ("model: small_cnn(width=8)\ndata: {dataset: digits}\n", r"model small_cnn\(width=8\) \(searched: small_cnn\)"),
    ],
)
def test_a_file_of_another_workload_is_refused_and_stays(config, write, other, said):
    """``threads: 1  # fulltilt tune`` once stood in the file of another model, which nobody had measured."""
    file = write(other)
    searched = load_config(write(f"task: classification\n{TEXT}").rename(file.with_name("searched.yaml")))
    file = write(other)
    with pytest.raises(UsageError, match=said) as refused:
        apply_result(recommend(searched, {"threads": 1}), file, searched=searched)
    assert refused.value.exit_code == 2
    assert file.read_text() == other


def test_where_the_data_lie_makes_no_other_workload(write):
    file = write("data:\n  path: data.h5\n  dataset: cifar10(root=../data)\n  batch_size: 32\n")
    other = (
        "model: wideresnet(width=2, depth=16)\ndata: {dataset: 'cifar10(root=/mnt)', path: /mnt/b, batch_size: 32}\n"
    )
    searched = load_config(write(other).rename(file.with_name("searched.yaml")))
    file = write("model: wideresnet(depth=16, width=2)\ndata: {dataset: cifar10, batch_size: 32}\n")
    assert apply_result(recommend(searched, {"threads": 1}), file, searched=searched).diff
    assert load_config(file).speed.threads == 1


@pytest.mark.parametrize(
    ("there", "here", "is_same"),
    [
        ("image_folder(/scratch/x)", "image_folder(/data/x)", True),
        ("image_folder(/scratch/x)", "image_folder(root=data/x)", True),
        ("'mine:build([a.h5, b.h5], 64)'", "'mine:build([/mnt/a.h5], 64)'", True),
        ("'mine:build(folder=/scratch/x)'", "'mine:build(folder=~/x)'", True),
        ("'mine:build(searched.yaml)'", "'mine:build(/data/x.yaml)'", True),
        ("'mine:build(/scratch/x, 64)'", "'mine:build(/data/x, 32)'", False),
        ("'mine:build(events.h5, raw/input)'", "'mine:build(events.h5, clean/label)'", False),
        ("'mine:build(v1.5)'", "'mine:build(v2.0)'", False),
        ("image_folder(/scratch/x)", "cifar10(/scratch/x)", False),
    ],
)
def test_a_path_that_is_given_by_its_place_is_no_other_data_set(write, there, here, is_same):
    """A file with the data on another disk was refused, though ``root=`` of the same was not."""
    file = write(f"model: small_cnn\ndata: {{dataset: {there}}}\n")
    searched = load_config(file.rename(file.with_name("searched.yaml")))
    file = write(f"model: small_cnn\ndata: {{dataset: {here}}}\n")
    if is_same:
        assert check_target(file, searched=searched).model == "small_cnn"
    else:
        with pytest.raises(UsageError, match="another workload"):
            check_target(file, searched=searched)


def test_the_files_of_guide_001_are_of_one_workload():
    folder = Path(__file__).parents[3] / "configs"
    searched = load_config(folder / "checking_gpu_optimization.yaml", ["data.path=/mnt/data.h5"])
    assert check_target(folder / "default.yaml", searched=searched).model == searched.model
    with pytest.raises(UsageError, match=r"default\.yaml is of another workload"):
        check_target(folder / "default.yaml", searched=load_config(folder / "digits.yaml"))
