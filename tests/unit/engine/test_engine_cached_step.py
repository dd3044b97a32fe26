"""A window with gradient caching has the loss and the gradient of one large batch; plain accumulation has not."""

import random

import numpy as np
import pytest
import step_cases
import torch
from step_cases import assert_same, compute_norms, take_step, train
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fulltilt.engine.measured.measurement import run_measured
from fulltilt.engine.measured.probes import run_memory_probe
from fulltilt.engine.step.cached_step import CachedStep, build_step
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.errors import UsageError
from fulltilt.tasks.nt_xent import NtXent


def build_float():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def build_model():
    return build_float().double()


def make_views(batch, generator):
    """Two noisy copies of every row, one after the other."""
    x, y = batch
    rows = x.double().repeat_interleave(2, dim=0)
    return rows + 0.1 * torch.randn(rows.shape, generator=generator, dtype=rows.dtype), y


def make_float_views(batch, generator):
    rows, y = make_views(batch, generator)
    return rows.float(), y


def repeat_rows(batch, generator):
    """Views without a draw: the model's own randomness is what makes them differ."""
    x, y = batch
    return x.double().repeat_interleave(2, dim=0), y


def build(batch_size, accumulate, **more):
    given = {"model": build_model, "loss": NtXent(0.2), "prepare": make_views, "couples_samples": True}
    return step_cases.build_small_run(batch_size, accumulate, **given | more)


@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize(("batch_size", "accumulate"), [(16, 4), (32, 2), (8, 8)])
def test_the_window_is_one_batch(batch_size, accumulate, clip_norm):
    whole = train(build(64, 1, clip_norm=clip_norm))
    assert_same(whole, train(build(batch_size, accumulate, clip_norm=clip_norm)))


def test_plain_accumulation_is_another_loss():
    """What gradient caching is for: with it left out, loss and gradient are those of fewer negatives."""
    (whole, *_), (gradients, *_) = train(build(64, 1), 1)
    (plain, *_), (other, *_) = train(build(16, 4, couples_samples=False), 1)
    assert plain.loss < 0.8 * whole.loss
    mine, theirs = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (gradients, other))
    assert functional.cosine_similarity(mine, theirs, dim=0) < 0.999


def mild_loss(outputs, targets):
    """Whose gradient, times the scale of fp16, does not overflow."""
    return 0.01 * NtXent(0.5)(outputs)


@pytest.mark.parametrize(("precision", "rtol", "atol"), [("bf16", 0.1, 2e-2), ("fp16", 0.05, 5e-3)])
def test_mixed_precision_is_close_to_the_large_batch(precision, rtol, atol):
    common = {"model": build_float, "prepare": make_float_views, "loss": mild_loss, "clip_norm": 1e-3}
    common["plan"] = {"precision": precision}
    whole, parts = build(64, 1, **common), build(16, 4, **common)
    assert_same(train(whole), train(parts), rtol=rtol, atol=atol)
    assert parts.setup.state["autocast_dtype"] == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    if parts.setup.scaler is not None:
        assert parts.setup.scaler.get_scale() == 2.0**16, "no step overflowed"


def test_clipping_sees_the_unscaled_gradient_of_the_window():
    common = {"model": build_float, "prepare": make_float_views, "loss": mild_loss}
    assert min(compute_norms(train(build(16, 4, **common), 1)[1])) > 1e-3
    clipped = build(16, 4, clip_norm=1e-3, plan={"precision": "fp16"}, **common)
    assert compute_norms(train(clipped, 1)[1]) == pytest.approx([1e-3, 1e-3], rel=1e-2)


class Noisy(nn.Module):
    """Draws from every generator that models are known to draw from, and notes what it gave."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4)
        self.given = []

    def forward(self, x):
        x = functional.dropout(torch.tanh(self.one(x)), 0.3, self.training)
        x = x * torch.from_numpy(1 + 0.1 * np.random.standard_normal(x.shape[1])) + random.random()
        out = self.two(x)
        self.given.append(out.detach().clone())
        return out


def test_the_second_forward_draws_what_the_first_drew():
    run = build(16, 4, model=lambda: Noisy().double(), prepare=repeat_rows)
    train(run, 1)
    first, second = run.setup.model.given[:4], run.setup.model.given[4:8]
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(first[0], first[1])


class Hidden(nn.Module):
    """Draws from a generator that nobody knows of."""

    def __init__(self):
        super().__init__()
        self.layer, self.own = nn.Linear(6, 4), np.random.default_rng(0)

    def forward(self, x):
        return self.layer(x * torch.from_numpy(self.own.integers(0, 2, x.shape[1])))


class Summed(nn.Linear):
    def forward(self, x):
        return super().forward(x).sum()


class Turning(nn.Linear):
    """Nests its outputs in another way every time."""

    n_calls = 0

    def forward(self, x):
        self.n_calls += 1
        return super().forward(x) if self.n_calls % 2 else (super().forward(x),)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Turning(6, 2), "nested differently"),
        (Hidden, "gave other outputs for the same inputs"),
        (lambda: Summed(6, 2), "without a batch dimension"),
    ],
)
def test_outputs_that_cannot_be_replayed_or_joined_are_refused(model, words):
    with pytest.raises(UsageError, match=words):
        take_step(build(16, 4, model=lambda: model().double()))


def test_random_numbers_go_on_after_the_window():
    """Rewinding must not make the next step see the same draws again."""
    run = build(16, 2, model=lambda: Noisy().double(), prepare=repeat_rows, dataset=build_equal_samples)
    train(run, 1)
    given = run.setup.model.given
    assert len({tensor.sum().item() for tensor in given}) == len(given) // 2


def build_equal_samples():
    """Outputs differ by draws alone."""
    return TensorDataset(torch.ones(64, 6), torch.zeros(64, dtype=torch.int64))


class Drifting(nn.Module):
    """A state that a forward changes and the next one reads, as spectral norm has."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        scale = self.scale.mul_(1.5).clone()
        return self.layer(x) * scale + torch.arange(4) * scale


@pytest.mark.parametrize("model", [lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 4)), Drifting])
def test_gradients_are_those_of_the_very_masks_and_states_that_the_loss_saw(model):
    """Against one backward through the whole window, where nothing is replayed: the masks differ by micro-batch."""
    expected = compute_in_one_graph(build(16, 4, model=lambda: model().double()), 4)
    _, (found, *_) = train(build(16, 4, model=lambda: model().double()), 1)
    for mine, theirs in zip(expected, found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)


def compute_in_one_graph(run, n_micro):
    batches, outputs = run.start_epoch(0), []
    for _ in range(n_micro):
        rows, _ = make_views(next(batches), run.generator)
        outputs.append(run.setup.model(rows))
    NtXent(0.2)(torch.cat(outputs)).backward()
    return [p.grad for p in run.setup.model.parameters()]


def test_running_statistics_move_once_a_step():
    def build_normed():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()

    cached, plain = build(16, 4, model=build_normed), build(16, 4, model=build_normed, couples_samples=False)
    take_step(cached)
    take_step(plain)
    for mine, theirs in zip(cached.setup.model.buffers(), plain.setup.model.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)
    assert cached.setup.model[1].num_batches_tracked == 4


def test_it_is_taken_only_where_samples_are_coupled_in_a_window():
    assert type(build_step(build(16, 4))) is CachedStep
    assert type(build_step(build(16, 1))) is TrainStep
    assert type(build_step(build(16, 4, couples_samples=False))) is TrainStep


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)
        self.unused = nn.Linear(6, 1)

    def forward(self, x, y):
        return {"left": self.left(x), "right": self.right(y), "aside": self.unused(x)}


def match_towers(outputs, targets):
    logits = outputs["left"] @ outputs["right"].T
    return functional.cross_entropy(logits, torch.arange(len(logits)))


def test_several_inputs_and_outputs_of_which_one_is_not_in_the_loss():
    common = {
        "model": lambda: TwoTowers().double(),
        "loss": match_towers,
        "prepare": lambda batch, generator: ((batch[0].double(), batch[0].double() ** 2), None),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    losses = []
    for batch_size, accumulate in ((64, 1), (16, 4)):
        run = build(batch_size, accumulate, **common)
        losses.append((take_step(run).loss, run.setup.model.left.weight.detach().clone()))
    for mine, theirs in zip(*losses, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_observers_get_the_window():
    seen = []
    train(build(16, 4), 1, observe=lambda outputs, targets: seen.append((len(outputs), len(targets))))
    assert seen == [(128, 64), (72, 36)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_on_a_gpu_masks_are_replayed_and_the_window_is_one_graph(precision):
    """The device's own generator is rewound: the second forward gives what the first gave, bit for bit."""

    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 4))
            self.given = []

        def forward(self, x):
            self.given.append(self.layers(x).detach())
            return self.layers(x)

    def make_device_views(batch, generator):
        x, y = batch
        rows = x.repeat_interleave(2, dim=0)
        return rows + 0.1 * torch.randn(rows.shape, generator=generator, device=rows.device), y

    run = build(
        16, 4, device="cuda", model=Noted, prepare=make_device_views, loss=mild_loss, plan={"precision": precision}
    )
    train(run, 1)
    given = run.setup.model.given
    for mine, theirs in zip(given[:4], given[4:8], strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(given[0], given[1])


def test_checkpointed_activations_give_the_same_gradients():
    def build_blocks():
        layers = [layer for _ in range(6) for layer in (nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(6, 4)).double()

    free = train(build(16, 4, model=build_blocks))
    saved = train(build(16, 4, model=build_blocks, plan={"activation_checkpointing": True}))
    assert_same(free, saved)


def test_a_trial_measures_it_with_its_phases():
    measurement = run_measured(build(16, 4), n_steps=4, max_measure_s=5)
    assert measurement.observed["accumulate"] == 4
    phases = measurement.phases_ms  # withheld where a busy machine made more than 5 % of a step no phase's
    assert phases is None or phases.forward is None or phases.forward > 0
    assert measurement.samples_per_s > 0


def test_memory_on_fake_tensors_is_that_of_a_micro_batch_and_what_the_window_holds():
    def peak(batch_size, accumulate):
        run = build(batch_size, accumulate, model=build_deep, dataset=build_wide)
        gib = run_memory_probe(run).memory_allocated_peak_gib
        assert gib is not None
        return gib

    whole, parts, longer = peak(128, 1), peak(32, 4), peak(32, 8)
    assert parts < 0.6 * whole
    assert parts < longer


def build_wide():
    return TensorDataset(torch.zeros(256, 64), torch.zeros(256, dtype=torch.int64))


def build_deep():
    return nn.Sequential(nn.Linear(64, 64), *(nn.Tanh() for _ in range(37)), nn.Linear(64, 4)).double()
