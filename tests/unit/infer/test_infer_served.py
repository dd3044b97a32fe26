"""The model as it answers: levers in force, real samples, outputs that are numbers. And blocks on a fake clock."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fulltilt.config import config_from_values
from fulltilt.engine.loop.train import train
from fulltilt.errors import DataError, DeviceMemoryError, FulltiltError, PlanObstacleError, RunFolderError, UsageError
from fulltilt.infer.measuring import BLOCK_S, MIN_BLOCKS, N_BLOCKS, measure_blocks, warm_up
from fulltilt.infer.process import build_error
from fulltilt.infer.served import ServedModel
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


def build_served(task="plain", *, samples=3, speed=None, weights=None, **sections):
    values = {"task": f"{__name__}:{task}", "run": {"device": "cpu"}, "speed": speed or {}, **sections}
    config = config_from_values(values, base_dir="")
    return ServedModel(config, device="cpu", samples_per_request=samples, weights=weights)


@pytest.fixture(autouse=True)
def clean():
    threads = torch.get_num_threads()
    SEEN.clear()
    yield
    torch.set_num_threads(threads)


def test_requests_hold_the_real_samples_in_order_and_start_over_without_a_short_one():
    model = build_served()
    calls_s = [model.answer() for _ in range(4)]
    assert [x[:, 0].tolist() for x in SEEN] == [[0, 4, 8], [12, 16, 20], [24, 28, 32], [0, 4, 8]]
    assert min(calls_s) > 0
    assert model.dataset_name == "training set"
    assert not SEEN[0].requires_grad
    build_served("prepares").answer()
    assert SEEN[-1][:, 0].tolist() == [0, 40, 80], "inputs are prepared as in training"


def test_levers_of_inference_are_in_force_and_one_that_cannot_apply_is_refused_or_noted():
    model = build_served(speed={"precision": "bf16", "threads": 1})
    model.answer()
    assert model.read_levers() == {"channels_last": False, "compile": False, "precision": "bf16", "threads": 1}
    assert torch.get_num_threads() == 1
    for speed, why in (({"channels_last": True}, "the model has no 2-d convolution"), ({"precision": "tf32"}, "")):
        ((name, value),) = speed.items()
        with pytest.raises(PlanObstacleError, match=f"{name}={value}.*{why}"):
            build_served(speed=speed)
    assert any("pin_memory=True cannot apply" in note for note in build_served(data={"pin_memory": True}).notes)


@pytest.mark.parametrize(
    ("task", "samples", "refusal", "words"),
    [
        ("divides", 3, FulltiltError, "6 of 6 outputs of the model are NaN or infinite"),
        ("plain", 11, DataError, "holds fewer than 11 samples, which is one request; lower"),
        ("no_model", 3, UsageError, "the model is str; the function of the workload must"),
    ],
)
def test_what_cannot_answer_ends_the_measurement(task, samples, refusal, words):
    with pytest.raises(refusal, match=words):
        build_served(task, samples=samples).answer()


def test_weights_are_those_of_the_newest_checkpoint_and_no_other_models(tmp_path):
    values = {"model": "mlp(hidden=8)", "data": {"dataset": "digits"}, "run": {"epochs": 1, "device": "cpu"}}
    config = config_from_values(values, base_dir="")
    result = train(config, out_dir=tmp_path)
    model = ServedModel(config, device="cpu", samples_per_request=8, weights=tmp_path)
    assert model.weights["metrics"] == result.metrics
    assert model.weights["step"] == result.step
    assert model.dataset_name == "validation set"
    with pytest.raises(RunFolderError, match="is of another model than Watched"):
        build_served(weights=tmp_path)


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
    blocks = measure_blocks(clock.answer, 8, batch_s, tell=lambda: None, clock=clock)
    assert len(blocks) == n_blocks
    assert all(seconds >= BLOCK_S - 1e-6 for _, seconds in blocks)
    assert sum(n for n, _ in blocks) / sum(s for _, s in blocks) == pytest.approx(8 / batch_s)


@pytest.mark.parametrize(
    ("failure", "exit_code", "kind", "words"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, DeviceMemoryError, "ran out of memory"),
        (KeyError("head"), 1, FulltiltError, r"the model failed while it was measured \(KeyError: 'head'\)"),
        (DataError("too short; use another"), 1, UsageError, "^too short; use another$"),
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
    assert kind is UsageError or str(log) in str(error)
