"""The recommended plan in the user's own file."""

from __future__ import annotations

import contextlib
import types
from pathlib import Path

import pytest

from fulltilt.config import load_config, plan_of
from fulltilt.errors import NoPlanError, StorageError, UsageError
from fulltilt.levers import compute_plan_digest
from fulltilt.records import PhasesMs
from fulltilt.records.promise import read_promise
from fulltilt.stats import Comparison
from fulltilt.tuner.answer.apply import apply_result, check_target, find_varied_levers, plan_changes
from fulltilt.tuner.picks.changes import LearningRate

TEXT = "model: small_cnn  # mine\ndata: {dataset: digits, batch_size: 32}\noptim: {lr: 0.1}  # tuned by hand\n"


def make_trial(plan, **measured):
    usual = {
        "samples_per_s": 1234.0, "samples_per_s_ci95": None, "is_busy": False, "observed": {}, "phases_ms": None,
        "n_devices": 1, "kind": "end_to_end", "status": "ok",
    }  # fmt: skip
    return types.SimpleNamespace(plan=plan, **(usual | measured))


GAIN = Comparison(verdict="faster", gain_pct=32.0, ci_pct=(24.0, 41.0), n_groups=6)
OPEN = Comparison(verdict="undecided", gain_pct=3.0, ci_pct=(-4.0, 11.0), n_groups=6)
SAME_RATE = LearningRate(rule="none", start=0.1, to=0.1)
SQRT = LearningRate(rule="sqrt", start=0.1, to=0.2)
BUSY = {"is_busy": True, "cpu_pressure_pct": 98.0}
FOLDER = "runs/tune/a"
PROMISED = {"ci95": (100.0, 300.0), "runs": (150.0, 200.0)}


@pytest.fixture(autouse=True)
def _folder_of_the_search(tmp_path, monkeypatch):
    (tmp_path / FOLDER).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


def read_own_promise(config):
    return read_promise(Path(config.base_dir, config.run.promise))


def recommend(
    config, changes, rate=SAME_RATE, *, user_plan=None, ci95=None, runs=(), gain=None, tried=(), probes=(), **measured
):
    """A search that ran the user's plan, that plan with ``changes`` and the ``tried``, and recommends the second.

    ``runs`` are the speeds of its turns.
    """
    user_plan = user_plan or plan_of(config)
    trial = make_trial(user_plan.replace(**changes), samples_per_s_ci95=ci95, **measured)
    return types.SimpleNamespace(
        picks=types.SimpleNamespace(recommended=types.SimpleNamespace(trial=trial, gain=gain)),
        learning_rate=rate,
        machine=types.SimpleNamespace(hostname_hash="00ab12"),
        workload={"name": "digits", "model": "CNN", "n_parameters": 10, "data": "Digits, 8 samples"},
        folder=FOLDER,
        user_plan=user_plan,
        trials=(trial, *map(make_trial, (user_plan, *tried))),
        repeats=tuple(make_trial(trial.plan, samples_per_s=rate, kind="repeat") for rate in runs),
        probes=probes,
        baseline=make_trial(user_plan),
    )


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="b.yaml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write_file


@pytest.fixture
def file(write):
    return write(TEXT, "a.yaml")


@pytest.fixture
def config(file):
    return load_config(file)


def apply(file, searched, changes, rate=SAME_RATE, **more):
    """Apply a result → what became of the file, and its configuration then."""
    applied = write_result(recommend(searched, changes, rate, **more), file, searched)
    return applied, load_config(file)


def write_result(result, file, searched):
    return apply_result(result, file, pick=result.picks.recommended, searched=searched)


def plan(result, config):
    return plan_changes(result, config, result.picks.recommended, searched=config)


def plan_values(result, config):
    return plan(result, config).values


def test_only_what_differs_is_written_and_comments_stay(config, file):
    changes = {"batch_size": 128, "compile": True}
    planned = plan(recommend(config, changes, SQRT), config)
    assert planned.values == {"data.batch_size": 128, "speed.compile": True, "optim.lr": 0.2}
    assert planned.plan == plan_of(config).replace(**changes)
    applied, written = apply(file, config, changes, SQRT)
    assert "+" in applied.diff
    assert (plan_of(written), written.optim.lr) == (planned.plan, 0.2)
    assert all(comment in file.read_text() for comment in ("# mine", "# tuned by hand\n"))
    assert apply(file, written, {})[0].diff == "", "it holds the pick already"


def test_a_rate_that_the_file_does_not_set_is_not_written(config):
    said = "the learning rate is set by code, not by the file: scale it × 2 there (sqrt rule, effective batch 32 → 128)"
    for start in (None, 0.7):  # not known; set by the workload's own code
        rate = LearningRate(rule="sqrt", start=start, to=None)
        planned = plan(recommend(config, {"batch_size": 128}, rate), config)
        assert (planned.values, planned.notes) == ({"data.batch_size": 128}, (said,))
    assert plan_values(recommend(config, {"num_workers": 2}, SQRT), config) == {"data.num_workers": 2}


def test_the_rate_follows_the_file_that_is_written_and_not_the_one_that_was_searched(config, write):
    file = write("dataset: digits\nbatch_size: 64\nlearning_rate: 0.03  # mine\n")
    _, written = apply(file, config, {"batch_size": 128}, SQRT)
    assert (written.data.batch_size, written.optim.lr) == (128, pytest.approx(0.03 * 2**0.5, rel=1e-8))
    assert "  # mine\n" in file.read_text()
    assert apply(file, config, {"batch_size": 128}, SQRT)[0].diff == "", "the second time nothing changes"
    for batch_size in (64, 128, 64, 128):
        rate = LearningRate(rule="sqrt", start=written.optim.lr, to=None)
        _, written = apply(file, written, {"batch_size": batch_size}, rate)
    assert written.optim.lr == pytest.approx(0.03 * 2**0.5, rel=1e-7), "there and back again"
    # a rate inside the optimizer is the one that changes
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
    file = write("dataset: digits\nbatch_size: 32\ncompile: true\n")
    applied, written = apply(file, config, {}, tried=[plan_of(config).replace(compile=True)], **PROMISED)
    assert (applied.notes, written.speed.compile) == ((), False), "what was tried and lost is taken back"
    assert written.run.promise is not None


def test_what_only_a_probe_left_out_is_not_varied_and_what_the_search_left_alone_stays_as_it_is_spelled(write):
    """Probes of the step run without the loader's levers; that says nothing of the values those should have."""
    config = load_config(write(TEXT.replace("batch_size: 32", "batch_size: 32, placement: auto, num_workers: 2")))
    bare = plan_of(config).replace(num_workers=0, placement="stream")
    probes = [make_trial(plan, kind="device") for plan in (bare, bare.replace(compile=True))]
    result = recommend(config, {}, probes=probes)
    assert find_varied_levers(result) == {"compile"}
    assert plan_values(result, config) == {}
    # ``use_amp: true`` became ``bf16``, which nobody had chosen, where the only plan that ran was the user's own.
    config = load_config(write(TEXT + "speed: {precision: auto}\n"))
    assert plan_of(config)["precision"] == "auto"
    ran, other = (plan_of(config).replace(precision=precision) for precision in ("bf16", "fp32"))
    assert plan_values(recommend(config, {}, user_plan=ran, tried=[other]), config) == {}
    assert plan_values(recommend(config, other, user_plan=ran), config) == {"speed.precision": "fp32"}


@pytest.mark.parametrize(
    ("sizes", "expected", "n_notes"),
    [("batch_size: 256", (16, 16), 1), ("batch_size: 32", (16, 2), 0), ("batch_size: 40", (40, 1), 2)],
)
def test_the_effective_batch_stays_the_files_own_unless_it_was_free(config, write, sizes, expected, n_notes):
    file = write(f"dataset: digits\n{sizes}\nlearning_rate: 0.03\n")
    applied, written = apply(file, config, {"batch_size": 16, "accumulate": 2}, **PROMISED)
    assert (written.data.batch_size, written.speed.accumulate, written.optim.lr) == (*expected, 0.03)
    assert len(applied.notes) == n_notes


def test_every_spelling_of_a_lever_is_written(config, write):
    file = write(
        "data: {dataset: digits, batch_size: 32}\n"
        "gpu:\n    gradient_accumulation: 1  # STL-10\n    mixed_precision: false\n"
        "dataloader:\n  train: basic(prefetch_factor=2)\n"
    )
    plan = {"batch_size": 16, "accumulate": 2, "precision": "bf16", "prefetch_factor": 4, "num_workers": 2}
    write_result(recommend(config, plan), file, config)
    assert plan_of(load_config(file)) == plan_of(config).replace(**plan)
    written = file.read_text()
    assert "gradient_accumulation: 2  # STL-10\n    mixed_precision: bf16\n" in written
    assert "train: basic(prefetch_factor=4)" in written


def test_figures_of_an_earlier_search_go_and_the_users_comments_stay(write):
    older = "fused_optimizer: true  # fulltilt tune: 2,345 samples/s, on a busy machine"
    file = write(TEXT + f"speed:\n  compile: false  # slow to start\n  {older}\n")
    config = load_config(file)
    for gain, more in ((OPEN, {}), (GAIN, {"compile": True})):
        apply(file, config, {"channels_last": True, **more}, gain=gain, **PROMISED)
        said = "1.32 × (1.24 to 1.41)" if gain is GAIN else "1.03 × (0.96 to 1.11), not proven"
        assert f"channels_last: true  # fulltilt tune: {said}\n" in file.read_text()
    written = file.read_text()
    assert "compile: true  # slow to start\n" in written
    assert (written.count("not proven"), written.count("samples/s")) == (0, 0)


def test_what_was_measured_travels_with_the_settings(config, file):
    phases = PhasesMs(data_wait=1.5, h2d=None, forward=1, backward=1, optimizer=1, other=0, step=6.0)
    measured = {"observed": {"threads": 2}, "phases_ms": phases, "ci95": (1200.123, 1300.0), "runs": (1190.0, 1250.0)}
    applied, written = apply(file, config, {"batch_size": 128}, **measured)
    digest = compute_plan_digest(plan_of(written))
    assert f"+  promise: runs/tune/a/promise-{digest}.json" in applied.diff, "not the 300 characters that are in it"
    promise = read_own_promise(written)
    assert promise.samples_per_s == (1190.0, 1300.0)  # the row's interval, widened to its runs side by side
    assert (promise.machine, promise.threads, promise.data_wait_pct) == ("00ab12", 2, 25.0)
    assert (promise.model, promise.n_parameters, promise.data) == ("CNN", 10, "Digits, 8 samples")
    assert promise.device is None  # the probe did not say
    plan = plan_of(written)
    older = {name: value for name, value in plan.items() if name != "compile"}
    assert promise.plan == compute_plan_digest(plan) == compute_plan_digest(older), "a lever may be added later"
    assert promise.plan != compute_plan_digest(plan.replace(compile=True))
    assert apply(file, config, {"batch_size": 128}, **measured)[0].diff == ""


def test_a_promise_gives_way_to_that_of_a_later_search_and_with_its_plan(config, file):
    for low in (100.0, 200.0):
        _, promised = apply(file, config, {}, ci95=(low, 300.0), runs=(low + 1, 299.0))
    assert read_own_promise(promised).samples_per_s == (200.0, 300.0)
    assert file.read_text().count("promise: ") == 1
    assert promised.digest == config.digest, "a promise makes no other configuration: the search goes on in its folder"
    assert apply(file, config, {})[0].diff == ""
    kept = file.read_text()
    Path(promised.base_dir, promised.run.promise).unlink()
    assert apply(file, config, {})[1].run.promise is None, "nor does a name of a file that is gone stay"
    file.write_text(kept)
    apply(file, config, {}, ci95=(200.0, 300.0), runs=(201.0, 299.0))
    applied, written = apply(file, config, {"num_workers": 2}, ci95=(100.0, 300.0))
    assert written.run.promise is None
    assert applied.notes == ("no run.promise was written: the plan took turns with others in less than two groups",)


def test_a_search_that_is_applied_to_two_files_keeps_the_promise_of_either(config, file, write):
    for path, n_workers in ((file, 1), (write(TEXT), 2)):
        apply(path, config, {"num_workers": n_workers}, **PROMISED)
    for path in (file, file.with_name("b.yaml")):
        written = load_config(path)
        assert read_own_promise(written).plan == compute_plan_digest(plan_of(written))


@pytest.mark.parametrize("runs", [(), (150.0,)])
def test_a_promise_needs_two_groups_of_turns(config, file, runs):
    """One process says nothing of how much the next one differs."""
    applied, written = apply(file, config, {"num_workers": 2}, ci95=(100.0, 300.0), runs=runs)
    assert (written.data.num_workers, written.run.promise) == (2, None)
    assert "less than two groups" in applied.notes[0]


def test_a_promise_is_of_the_turns_where_the_whole_run_has_no_interval(config, file):
    _, written = apply(file, config, {"num_workers": 2}, runs=(150.0, 210.0, 180.0))
    assert read_own_promise(written).samples_per_s == (150.0, 210.0)


def test_another_pick_than_the_recommended_one_is_written_where_it_is_asked_for(config, file):
    result = recommend(config, {}, tried=[plan_of(config).replace(num_workers=2)])
    best = types.SimpleNamespace(trial=result.trials[-1], gain=None)
    apply_result(result, file, pick=best, searched=config)
    assert load_config(file).data.num_workers == 2


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_promise_of_a_busy_machine_is_marked(config, file, is_busy):
    apply(file, config, {"compile": True}, **(BUSY if is_busy else {}), **PROMISED)
    assert read_own_promise(load_config(file)).cpu_pressure_pct == (98.0 if is_busy else None)


@pytest.mark.parametrize(("measured", "written"), [(1, None), (2, 2)])
def test_a_file_gets_a_promise_of_as_many_processes_as_it_trains_in(write, measured, written):
    file = write(TEXT + "run: {device: cpu, n_ranks: 2}\nspeed:\n  threads: 1\n")
    _, config = apply(file, load_config(file), {"compile": True}, n_devices=measured, gain=GAIN, **PROMISED)
    figure = ": 1.32 × (1.24 to 1.41)" if written else ""
    assert f"compile: true  # fulltilt tune{figure}\n" in file.read_text()
    assert (read_own_promise(config).n_ranks if config.run.promise else None) == written


def test_a_file_that_is_not_writable_or_whose_settings_did_not_run_is_refused_and_stays(config, file):
    """A rename asks for the folder's permission alone: a file of mode 444 was rewritten, and writable afterwards."""
    file.chmod(0o444)
    with pytest.raises(StorageError, match=r"a\.yaml is not writable \(mode 444\); chmod u\+w"):
        apply(file, config, {"num_workers": 2})
    assert (file.read_text(), file.stat().st_mode & 0o7777) == (TEXT, 0o444)
    result = recommend(config, {"num_workers": 2})
    result.baseline, result.picks.recommended.trial.id = None, "t9"
    file.chmod(0o640)
    with pytest.raises(NoPlanError, match=r"left as it was.*nothing is known of how t9 compares.*larger --budget"):
        write_result(result, file, config)
    assert file.read_text() == TEXT
    assert apply(file, config, {"num_workers": 2})[0].diff
    assert file.stat().st_mode & 0o7777 == 0o640


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("{model: wideresnet, data: {dataset: digits}}", r"model wideresnet \(searched: small_cnn\); search it by"),
        ("{model: small_cnn, data: {dataset: cifar10(root=x)}}", r"data.dataset cifar10 \(searched: digits\)"),
        ("{task: diffusion, model: small_cnn, data: {dataset: digits}}", r"diffusion \(searched: classification\)"),
        ("{model: small_cnn(width=8), data: {dataset: digits}}", r"small_cnn\(width=8\) \(searched: small_cnn\)"),
    ],
)
def test_a_file_of_another_workload_is_refused_and_stays(write, other, said):
    searched = load_config(write(f"task: classification\n{TEXT}", "searched.yaml"))
    file = write(other)
    with pytest.raises(UsageError, match=said) as refused:
        write_result(recommend(searched, {"threads": 1}), file, searched)
    assert refused.value.exit_code == 2
    assert file.read_text() == other


@pytest.mark.parametrize(
    ("there", "here", "is_same"),
    [
        ("cifar10(root=/mnt), path: /mnt/b", "cifar10", True),
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
    text = "{{model: 'wideresnet({})', data: {{dataset: {}}}}}"
    searched = load_config(write(text.format("width=2, depth=16", there), "searched.yaml"))
    file = write(text.format("depth=16, width=2", here))
    expected = contextlib.nullcontext() if is_same else pytest.raises(UsageError, match="another workload")
    with expected:
        check_target(file, searched=searched)


def test_the_files_of_guide_001_are_of_one_workload():
    folder = Path(__file__).parents[3] / "configs"
    searched = load_config(folder / "checking_gpu_optimization.yaml", ["data.path=/mnt/data.h5"])
    assert check_target(folder / "default.yaml", searched=searched).model == searched.model
