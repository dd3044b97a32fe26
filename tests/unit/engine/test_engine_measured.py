"""A measured run: figures of what ran, every lever read back, and errors where a figure would be a lie."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from step_cases import build_small_run
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from training_cases import fail

from fulltilt.data.transforms.batch_transform import BatchTransform
from fulltilt.engine.build.run import Run
from fulltilt.engine.measured.measurement import EndlessSteps, check_observed, measure_flops, run_measured
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.errors import NonFiniteLossError, TrainingError
from fulltilt.levers import load_catalogue
from fulltilt.measure import NullTimer
from fulltilt.measure.nested import slice_samples
from fulltilt.records import Measurement, decode, encode


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 3))


def build_dataset() -> Dataset:
    return TensorDataset(torch.randn(40, 12), torch.randint(3, (40,)))


def build(plan: dict[str, Any] | None = None, **fields: Any) -> Run:
    return build_small_run(16, plan=plan, **{"model": build_model, "dataset": build_dataset} | fields)


def test_a_measurement_holds_what_ran():
    told: list[int] = []
    with build({"num_workers": 1, "persistent_workers": True, "batch_size": 8, "accumulate": 2}) as run:
        result = run_measured(run, n_steps=10, on_progress=told.append)
    assert result.n_steps >= 10
    assert run.steps_per_epoch == 3
    assert result.n_steps % 3 == 0, "short epochs are timed whole"
    low, high = result.samples_per_s_ci95
    assert 0 < low <= result.samples_per_s <= high
    assert result.observed == dict(run.plan) | {"prefetch_factor": 2}
    assert result.first_loss > 0
    assert result.last_loss > 0
    assert result.flops_per_sample == 3 * 2 * (12 * 10 + 10 * 10 + 10 * 3) - 2 * 12 * 10, "no gradient of the inputs"
    assert result.flops_coverage_pct == 100
    assert result.memory_rss_peak_gib > 0
    assert result.gpu_utilization_pct is None
    assert told == sorted(told)
    assert told[-1] >= result.n_steps + result.n_warmup_steps
    empty = {f.name for f in dataclasses.fields(result) if getattr(result, f.name) is None}
    assert empty == {f for f in result.null_reasons if f != "phases_ms"} & empty
    assert decode(Measurement, encode(result)) == result


def test_epochs_follow_one_another_with_their_tails():
    run = build()
    steps = EndlessSteps(run, NullTimer())
    assert [steps() for _ in range(7)] == [16, 16, 8, 16, 16, 8, 16]
    assert steps.n_done == 7
    assert len(steps.take_batch()[0]) == 16


@pytest.mark.parametrize(
    ("n_good", "words"), [(0, "nan by step 1; lower optim.lr, or set optim.clip_norm$"), (6, r"nan by step \d+")]
)
def test_a_loss_that_is_no_number_ends_the_measurement(n_good, words):
    factors = itertools.chain([1.0] * n_good, itertools.repeat(float("nan")))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets) * next(factors)

    with pytest.raises(NonFiniteLossError, match=words):
        run_measured(build(loss=loss), n_steps=8)


def test_a_value_that_is_not_in_force_is_an_error():
    run = build({"precision": "bf16"})
    TrainStep(run)(run.start_epoch(0), NullTimer())
    assert check_observed(run).keys() == load_catalogue().keys()
    run.setup.autocast_dtype = None
    TrainStep(run)(run.start_epoch(0), NullTimer())
    with pytest.raises(TrainingError, match="precision: plan says bf16, in force fp32") as caught:
        check_observed(run)
    remedy = "leave these settings alone in the workload's own code, or name in the configuration what is in force"
    assert caught.value.remedy == remedy


def test_a_model_that_changes_the_threads_or_cannot_be_compiled_is_caught(monkeypatch):
    class Greedy(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            torch.set_num_threads(2)
            return super().forward(input)

    class Eager(nn.Linear):
        @torch._dynamo.disable
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input)

    monkeypatch.setattr("fulltilt.engine.build.facts.has_c_compiler", lambda: True)  # nothing comes to be compiled
    with pytest.raises(TrainingError, match="compile: plan says True, in force False"):
        run_measured(build({"compile": True}, model=lambda: Eager(12, 3)), n_steps=4)
    try:
        with pytest.raises(TrainingError, match="threads: plan says 1, in force 2"):
            run_measured(build(model=lambda: Greedy(12, 3)), n_steps=4)
    finally:
        torch.set_num_threads(1)


def test_samples_are_taken_from_nested_batches():
    batch = ({"a": torch.arange(10), "b": torch.zeros(3)}, [torch.zeros(10, 2), "text"])
    small = slice_samples(batch, 10, slice(4))
    assert small[0]["a"].tolist() == [0, 1, 2, 3]
    assert small[0]["b"].shape == (3,)
    assert small[1][0].shape == (4, 2)
    assert small[1][1] == "text"


def test_flops_are_those_without_recomputation_or_have_a_reason():
    def measure(plan: dict[str, Any], **fields: Any) -> Any:
        run = build(plan, **fields)
        return measure_flops(run, next(run.start_epoch(0)))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(outputs) != 16:
            raise ValueError("only batches of 16")
        return nn.functional.cross_entropy(outputs, targets)

    assert measure({"activation_checkpointing": True}) == measure({})
    assert measure({})[2] is None
    reason = "the step could not be counted with 8 samples: only batches of 16"
    assert measure({}, loss=loss) == (None, None, reason)


def test_flops_of_a_mixed_batch_are_counted_where_the_model_is(monkeypatch):
    """Mixing draws from a generator of the device: a batch that still lies on the host is an error on a GPU."""
    seen = []

    def mix(batch, generator):
        seen.append(batch[0].dtype)
        return batch[0].float(), batch[1]

    run = build()
    run.transform = BatchTransform(None, mix=mix)
    monkeypatch.setattr(TrainStep, "place", lambda self, batch: (batch[0].double(), batch[1]))  # stands for a copy
    assert measure_flops(run, next(run.start_epoch(0)))[2] is None
    assert seen == [torch.float64]


def test_counting_flops_does_not_compile_the_transforms_for_its_small_batch(monkeypatch):
    class Pass:
        def draw(self, images, generator):
            return images

        def apply(self, images, drawn):
            return images

    run = build()
    run.transform = BatchTransform(Pass())
    run.transform._apply = fail(AssertionError("a compiled graph ran with another size"))
    monkeypatch.setattr("fulltilt.data.transforms.batch_transform.check_images", lambda images: None)
    assert measure_flops(run, (torch.zeros(16, 12), torch.zeros(16, dtype=torch.long)))[2] is None
