"""A window has the gradient of one large batch; of a loss that compares samples, with gradient caching only."""

import random

import numpy as np
import pytest
import step_cases
import torch
from step_cases import assert_same, compute_norms, make_views, take_step, train
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fulltilt.engine.measured.probes import run_memory_probe
from fulltilt.errors import UsageError
from fulltilt.tasks.losses import NtXent


def build_float():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def make_double_views(batch, generator):
    return make_views((batch[0].double(), batch[1]), generator)


def repeat_rows(batch, generator):
    """Views without a draw: the model's own randomness is what makes them differ."""
    return batch[0].repeat_interleave(2, dim=0), batch[1]


def build(batch_size, accumulate, **more):
    given = {
        "model": lambda: build_float().double(),
        "loss": NtXent(0.2),
        "prepare": make_double_views,
        "couples_samples": True,
    }
    return step_cases.build_small_run(batch_size, accumulate, **given | more)


def make_double(batch, generator):
    return batch[0].double(), batch[1]


PLAIN = {"loss": nn.CrossEntropyLoss(), "prepare": make_double, "couples_samples": False}


@pytest.mark.parametrize("kind", [{}, PLAIN], ids=["cached", "plain"])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize(("batch_size", "accumulate"), [(16, 4), (32, 2), (8, 8)])
def test_the_window_is_one_batch_also_where_the_end_of_the_epoch_cuts_it_short(batch_size, accumulate, clip_norm, kind):
    whole = train(build(64, 1, clip_norm=clip_norm, **kind))
    run = build(batch_size, accumulate, clip_norm=clip_norm, **kind)
    parts = train(run)
    assert_same(whole, parts)
    assert [o.n_micro for o in parts[0]] == [accumulate, -(-36 // batch_size)] * 2
    assert run.steps_per_epoch == 2


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


FLOAT = {"model": build_float, "prepare": make_views, "loss": mild_loss}


@pytest.mark.parametrize(("precision", "rtol", "atol"), [("bf16", 0.1, 2e-2), ("fp16", 0.05, 5e-3)])
def test_mixed_precision_is_close_to_the_large_batch(precision, rtol, atol):
    common = FLOAT | {"clip_norm": 1e-3, "plan": {"precision": precision}}
    whole, parts = build(64, 1, **common), build(16, 4, **common)
    assert_same(train(whole), train(parts), rtol=rtol, atol=atol)
    assert parts.setup.state["autocast_dtype"] == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    if parts.setup.scaler is not None:
        assert parts.setup.scaler.get_scale() == 2.0**16, "no step overflowed"


@pytest.mark.parametrize(("kind", "precision", "norm"), [(FLOAT, "fp16", 1e-3), (PLAIN, "fp32", 0.05)])
def test_clipping_sees_the_unscaled_gradient_of_the_window(kind, precision, norm):
    assert min(compute_norms(train(build(16, 4, **kind), 1)[1])) > norm
    clipped = build(16, 4, clip_norm=norm, plan={"precision": precision}, **kind)
    assert compute_norms(train(clipped, 1)[1]) == pytest.approx([norm, norm], rel=1e-2)


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_gradients_are_unscaled_before_clipping_and_stepping(fused):
    common = PLAIN | {"model": build_float, "prepare": None, "clip_norm": 0.05}
    whole = train(build(64, 1, plan={"fused_optimizer": fused}, **common))
    scaled = build(16, 4, plan={"fused_optimizer": fused, "precision": "fp16"}, **common)
    parts = train(scaled)
    assert_same(whole, parts, rtol=0.1, atol=2e-3)
    assert [float(o.loss) for o in parts[0]] == pytest.approx([float(o.loss) for o in whole[0]], rel=1e-2, abs=1e-3)
    assert scaled.setup.scaler.get_scale() == 2.0**16, "no step overflowed"


def test_a_step_that_overflows_leaves_the_weights_and_halves_the_scale():
    def overflow(outputs, targets):
        return outputs.double().square().mean() * 1e38

    given = PLAIN | {"loss": overflow, "model": build_float, "prepare": None}
    run = build(16, 2, plan={"precision": "fp16"}, **given)
    before = [p.detach().clone() for p in run.setup.model.parameters()]
    take_step(run)
    assert all(map(torch.equal, run.setup.model.parameters(), before))
    assert run.setup.scaler.get_scale() == 2.0**15


class Noisy(nn.Module):
    """Draws from every generator that models are known to draw from, and notes what it gave."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4)
        self.given = []

    def forward(self, x):
        x = functional.dropout(torch.tanh(self.one(x)), 0.3, self.training)
        x = x * torch.from_numpy(1 + 0.1 * np.random.standard_normal(x.shape[1])).to(x) + random.random()
        out = self.two(x)
        self.given.append(out.detach().clone())
        return out


def build_equal_samples():
    """Outputs differ by draws alone."""
    return TensorDataset(torch.ones(64, 6), torch.zeros(64, dtype=torch.int64))


@pytest.mark.parametrize(
    ("device", "precision"),
    [("cpu", "fp32"), *(pytest.param("cuda", p, marks=pytest.mark.gpu) for p in ("fp32", "bf16", "fp16"))],
)
def test_the_second_forward_draws_what_the_first_drew_and_the_next_window_anew(device, precision):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    given = {"model": Noisy, "prepare": repeat_rows, "dataset": build_equal_samples, "loss": mild_loss}
    run = build(8, 4, device=device, plan={"precision": precision}, **given)
    train(run, 1)
    given = [tensor.tolist() for tensor in run.setup.model.given]
    assert given[:4] + given[8:12] == given[4:8] + given[12:]
    assert len(set(map(str, given))) == 8


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
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def compute_in_one_graph(run, n_micro):
    batches, outputs = run.start_epoch(0), []
    for _ in range(n_micro):
        rows, _ = make_double_views(next(batches), run.generator)
        outputs.append(run.setup.model(rows))
    NtXent(0.2)(torch.cat(outputs)).backward()
    return [p.grad for p in run.setup.model.parameters()]


def test_running_statistics_move_once_a_step():
    given = {"model": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()}
    cached, plain = build(16, 4, **given), build(16, 4, couples_samples=False, **given)
    take_step(cached)
    take_step(plain)
    buffers, expected = (dict(run.setup.model.named_buffers()) for run in (cached, plain))
    torch.testing.assert_close(buffers, expected, rtol=1e-12, atol=0)
    assert cached.setup.model[1].num_batches_tracked == 4


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
    given = {
        "model": lambda: TwoTowers().double(),
        "loss": match_towers,
        "prepare": lambda batch, generator: ((batch[0].double(), batch[0].double() ** 2), None),
    }
    runs = build(64, 1, **given), build(16, 4, **given)
    found = ((take_step(run).loss, run.setup.model.left.weight) for run in runs)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_observers_get_the_window():
    seen = []
    train(build(16, 4), 1, observe=lambda outputs, targets: seen.append((len(outputs), len(targets))))
    assert seen == [(128, 64), (72, 36)]


def test_checkpointed_activations_give_the_same_gradients():
    def build_blocks():
        layers = [layer for _ in range(6) for layer in (nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(6, 4)).double()

    free = train(build(16, 4, model=build_blocks))
    saved = train(build(16, 4, model=build_blocks, plan={"activation_checkpointing": True}))
    assert_same(free, saved)


def test_memory_on_fake_tensors_is_that_of_a_micro_batch_and_what_the_window_holds():
    layers = [nn.Linear(64, 64), *(nn.Tanh() for _ in range(37)), nn.Linear(64, 4)]
    given = {
        "model": lambda: nn.Sequential(*layers).double(),
        "dataset": lambda: TensorDataset(torch.zeros(256, 64), torch.zeros(256, dtype=torch.int64)),
    }
    runs = (build(*sizes, **given) for sizes in ((128, 1), (32, 4), (32, 8)))
    whole, parts, longer = (run_memory_probe(run).memory_allocated_peak_gib for run in runs)
    assert parts < 0.6 * whole
    assert parts < longer
