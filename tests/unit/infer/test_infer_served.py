"""The model as it answers: levers in force, real samples, outputs that are numbers. And blocks on a fake clock."""

import re
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fulltilt.config import config_from_values
from fulltilt.engine.loop.train import train
from fulltilt.errors import (
    DataError,
    DeviceMemoryError,
    FulltiltError,
    PlanObstacleError,
    RunFolderError,
    StorageError,
    UsageError,
)
from fulltilt.infer.artefact import open_artefact
from fulltilt.infer.engines import _torch
from fulltilt.infer.measuring import BLOCK_S, MIN_BLOCKS, N_BLOCKS, measure_blocks, open_model, start_meter, warm_up
from fulltilt.infer.process import build_error, run_measuring
from fulltilt.infer.serve.eager import POLICY, prepare_eager
from fulltilt.infer.targets import Load
from fulltilt.records import Evidence
from fulltilt.tasks import Workload

SEEN: list[torch.Tensor] = []


class Watched(nn.Module):
    """Notes what it is called with, and in which precision it computes."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 2), factor

    def forward(self, x_BC):
        SEEN.append(x_BC)
        return {"logits": self.linear(x_BC) * self.factor}


def build_dataset():
    return TensorDataset(torch.arange(40.0).reshape(10, 4), torch.zeros(10, dtype=torch.long))


def build_own(model=Watched, **parts):
    return Workload(model=model, dataset=build_dataset, loss=lambda outputs, targets: outputs["logits"].sum(), **parts)


WORKLOADS = {
    "plain": build_own(),
    "divides": build_own(lambda: Watched(float("nan"))),
    "prepares": build_own(prepare=lambda batch, generator: ((batch[0] * 10,), batch[1])),
    "no_model": build_own(lambda: "resnet"),
}
plain, divides, prepares, no_model = WORKLOADS.values()


def build_requests(task="plain", *, samples=3, weights=None, **sections):
    config = config_from_values({"task": f"{__name__}:{task}", **sections}, base_dir="")
    message = {"config": config.to_values(), "base_dir": "", "provenance": {}, "device": "cpu", "weights": weights}
    return open_model(message, Load(requests_per_s=None, samples_per_request=samples, n_requests=0, seed=0))


@pytest.fixture(autouse=True)
def clean():
    threads = torch.get_num_threads()
    SEEN.clear()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("task", "scale"), [("plain", 1), ("prepares", 10)])
def test_requests_hold_real_samples_prepared_as_in_training_and_start_over(task, scale):
    requests = build_requests(task)
    SEEN.clear()
    calls_s = [requests.answer() for _ in range(10)]
    assert {x.shape for x in SEEN} == {(3, 4)}
    firsts = torch.cat([x[:, 0] for x in SEEN]).tolist()
    assert sorted(firsts) == sorted(3 * [4.0 * i * scale for i in range(10)]), "each of 10 samples three times"
    assert min(calls_s) > 0
    assert requests.said["inputs"] == "training set"
    assert not SEEN[0].requires_grad


def test_levers_of_inference_are_in_force_and_one_that_cannot_apply_is_refused_or_noted():
    requests = build_requests(speed={"precision": "bf16", "threads": 1, "compile": True})
    SEEN.clear()
    requests.answer()
    assert requests.said["levers"].items() >= {"engine": "eager", "precision": "bf16", "threads": 1}.items()
    assert SEEN[0].dtype == torch.bfloat16
    assert torch.get_num_threads() == 1
    of_training, of_answers = requests.said["notes"]
    assert of_training == "speed.compile is of training, it is not in force here"
    assert re.fullmatch(r"the error is \d\d dB below the answers of eager fp32", of_answers)
    with pytest.raises(UsageError, match=r"the error is \d\d dB .*inference.min_sqnr_db asks for 100"):
        build_requests(speed={"precision": "bf16"}, inference={"min_sqnr_db": 100})
    with pytest.raises(PlanObstacleError, match="precision=tf32: TF32 exists on NVIDIA"):
        build_requests(speed={"precision": "tf32"})
    with pytest.raises(PlanObstacleError, match="engine=compile, cuda_graphs=False: infer search builds"):
        build_requests(inference={"engine": "compile"})


@pytest.mark.parametrize(
    ("task", "refusal", "words"),
    [
        ("divides", FulltiltError, "outputs of the model are NaN or infinite"),
        ("no_model", UsageError, "the model of workload returned str; it must return"),
    ],
)
def test_what_cannot_answer_ends_the_measurement(task, refusal, words):
    with pytest.raises(refusal, match=words):
        build_requests(task)
    with pytest.raises(UsageError, match="are of models that write text"):
        build_requests(targets={"tokens_per_s": 1})


def test_weights_are_those_of_the_newest_checkpoint_and_no_other_models(tmp_path):
    values = {"task": "classification", "model": "mlp(hidden=8)", "data": {"dataset": "digits"}}
    config = config_from_values({**values, "run": {"epochs": 1, "device": "cpu"}}, base_dir="")
    result = train(config, out_dir=tmp_path)
    message = {"config": config.to_values(), "base_dir": "", "provenance": {}, "device": "cpu", "weights": tmp_path}
    said = open_model(message, Load(requests_per_s=None, samples_per_request=8, n_requests=0, seed=0)).said
    assert said["weights"]["metrics"] == result.metrics
    assert said["weights"]["step"] == result.step
    assert said["inputs"] == "validation set"
    with pytest.raises(RunFolderError, match="is of another model than Watched"):
        build_requests(weights=tmp_path)


def test_memory_has_a_peak_and_a_mean_below_it():
    before = start_meter("cpu")()[0]
    stop = start_meter("cpu")
    held = torch.ones(64 << 18)  # 64 MiB for the first half of the time
    time.sleep(0.3)
    del held
    time.sleep(0.3)
    peak_gib, mean_gib = stop()
    assert peak_gib > before + 0.05
    assert 0.5 * before < mean_gib < peak_gib - 0.01


def prepare(out_dir, *, n_threads=None, **sections):
    values = {"task": "tests.unit.infer.small_encoder:workload", "run": {"device": "cpu"}, **sections}
    config = config_from_values(values, base_dir="")
    return prepare_eager(config, out_dir, (), weights=None, n_threads=n_threads)


def test_a_configuration_is_served_by_the_model_that_was_loaded_as_its_artefact_was_built(tmp_path, monkeypatch):
    loads, rebuild = [], _torch.rebuild_module
    monkeypatch.setattr(_torch, "rebuild_module", lambda *given: loads.append(given) or rebuild(*given))
    built = prepare(tmp_path, n_threads=1)
    assert len(loads) == 1
    assert (built.plan["threads"], built.manifest.policy, built.manifest.accuracy) == (1, POLICY, None)
    opened = open_artefact(built.folder)
    assert opened.manifest == built.manifest
    mine, theirs = (each.answer(opened.samples[:3]) for each in (built, opened))
    assert all((a == b).all() for (a,), (b,) in zip(mine, theirs, strict=True))


def test_a_configuration_that_costs_more_accuracy_than_it_allows_is_not_served(tmp_path):
    int8 = {"quantization": "int8"}
    assert prepare(tmp_path, inference={**int8, "max_metric_drop_pct": 100}).manifest.accuracy.sqnr_db > 25
    refused = {**int8, "max_metric_drop_pct": 100, "min_sqnr_db": 100}
    with pytest.raises(UsageError, match=r"the error is \d+\.\d dB .*inference\.min_sqnr_db asks for 100"):
        prepare(tmp_path, inference=refused)
    assert not (tmp_path / "eager" / "manifest.json").exists(), "so nobody serves it by its folder"


class Clock:
    """Each answer takes ``batch_s``."""

    def __init__(self, batch_s):
        self.now_s, self.batch_s = 0.0, batch_s

    def __call__(self):
        return self.now_s

    def answer(self):
        self.now_s += self.batch_s
        return self.batch_s


@pytest.mark.parametrize(("batch_s", "n_blocks"), [(0.01, N_BLOCKS), (3.0, 10), (20.0, MIN_BLOCKS)])
def test_blocks_are_of_the_length_that_suits_the_model_and_hold_its_rate(batch_s, n_blocks):
    clock = Clock(batch_s)
    assert warm_up(clock.answer, clock=clock) == pytest.approx(batch_s)
    blocks = measure_blocks(clock.answer, 8, batch_s, send=lambda said: None, clock=clock)
    assert len(blocks) == n_blocks
    assert all(seconds >= BLOCK_S - 1e-6 for _, seconds in blocks)
    assert sum(n for n, _ in blocks) / sum(s for _, s in blocks) == pytest.approx(8 / batch_s)


@pytest.mark.parametrize(
    ("failure", "exit_code", "kind", "words"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, DeviceMemoryError, "ran out of memory"),
        (KeyError("head"), 1, FulltiltError, r"the model failed while it was measured \(KeyError: 'head'\)"),
        (DataError("too short; use another"), 1, UsageError, "^too short; use another$"),
        (StorageError("no space left for a; free some"), 1, StorageError, "^no space left for a; free some$"),
        (FulltiltError("3 outputs are NaN; train anew"), 1, FulltiltError, "^3 outputs are NaN; train anew "),
        (None, -11, FulltiltError, "ended by SIGSEGV.*last words"),
    ],
)
def test_the_end_of_the_measuring_process_is_told_in_a_sentence_that_names_its_log(
    failure, exit_code, kind, words, tmp_path
):
    from fulltilt.tuner.trials.trial import describe_failure

    log = tmp_path / "measuring.log"
    said = describe_failure(failure, "") if failure else {}
    evidence = Evidence(
        exit_code=exit_code,
        exception_type=said.get("exception_type"),
        exception_types=tuple(said.get("exception_types", "").split()),
        message=said.get("message", ""),
        stderr_tail="these were its last words\n",
    )
    error = build_error(evidence, log)
    assert type(error) is kind
    with pytest.raises(kind, match=words):
        raise error
    assert kind in (UsageError, StorageError) or str(log) in str(error)


def test_a_process_that_passes_its_deadline_is_ended_and_says_what_helps(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text("import time\ndef run(message, send):\n    time.sleep(60)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FulltiltError, match=r"no result after 0\.\d s, the deadline is 0\.5 s; give a larger --budget"):
        run_measuring({}, log_path=tmp_path / "a.log", on_progress=print, body="slow:run", deadline_s=0.5)
