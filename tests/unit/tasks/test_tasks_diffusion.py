import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fulltilt.errors import UsageError
from fulltilt.tasks import TASKS
from fulltilt.tasks.diffusion import SCHEDULES, NoisePrediction, compress_signals


def build_task(**arguments):
    dataset = TensorDataset(torch.rand(8, 2, 5), torch.rand(8, 3))
    return TASKS["diffusion"](model=nn.Identity, train=lambda: dataset, **arguments)


def seed(value):
    return torch.Generator().manual_seed(value)


def test_the_task_predicts_noise_under_mse():
    workload = build_task(validation=lambda: None, name="events")
    assert workload.name == "events"
    assert workload.loss(torch.zeros(2, 3), torch.full((2, 3), 2.0)).item() == 4.0
    assert list(workload.metrics) == ["squared_error"]
    assert workload.validation is not None


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("n_timesteps", [1, 2, 50, 1000])
def test_schedules_keep_the_variance_and_lose_the_signal(schedule, n_timesteps):
    betas = SCHEDULES[schedule](n_timesteps)
    assert betas.shape == (n_timesteps,)
    assert betas.min() > 0
    assert betas.max() < 1
    prepare = NoisePrediction(betas, normalize="none")
    torch.testing.assert_close(
        prepare.signal_scale_T.square() + prepare.noise_scale_T.square(), torch.ones(n_timesteps), atol=1e-6, rtol=0
    )
    assert (prepare.signal_scale_T.diff() < 0).all()
    if n_timesteps >= 50:
        assert prepare.signal_scale_T[0] > 0.97
        assert prepare.signal_scale_T[-1] < 0.05


def test_the_linear_schedule_is_the_papers_at_1000_steps():
    betas = SCHEDULES["linear"](1000)
    assert betas[0].item() == pytest.approx(1e-4)
    assert betas[-1].item() == pytest.approx(0.02)
    assert (1 - betas).prod().item() == pytest.approx(4.04e-5, rel=0.01)  # share of the signal's variance left


def test_the_cosine_schedule_follows_its_formula():
    kept = (1 - SCHEDULES["cosine"](1000)).cumprod(0)
    expected = torch.cos(torch.tensor((0.5 + 0.008) / 1.008 * torch.pi / 2)) ** 2
    start = torch.cos(torch.tensor(0.008 / 1.008 * torch.pi / 2)) ** 2
    assert kept[499].item() == pytest.approx((expected / start).item(), rel=1e-4)


def test_the_noisy_input_is_made_of_the_target_noise():
    prepare = NoisePrediction(SCHEDULES["linear"](100), normalize="none")
    x, label = torch.randn(64, 2, 7, generator=seed(0)), torch.randn(64, 3, generator=seed(1))
    (x_noisy, t, kept_label), noise = prepare((x, label), seed(2))
    signal_share = prepare.signal_scale_T[t].view(-1, 1, 1)
    noise_share = prepare.noise_scale_T[t].view(-1, 1, 1)
    torch.testing.assert_close((x_noisy - noise_share * noise) / signal_share, x, atol=1e-4, rtol=1e-4)
    assert torch.equal(kept_label, label)
    assert t.dtype is torch.int64
    assert t.min() >= 0
    assert t.max() < 100


def test_timesteps_are_uniform_and_noise_is_standard_normal():
    prepare = NoisePrediction(SCHEDULES["linear"](10), normalize="none")
    (_, t, _), noise = prepare((torch.zeros(20_000, 1, 2), torch.zeros(20_000, 1)), seed(0))
    counts = t.bincount(minlength=10)
    # 2,000 expected each; five standard deviations of a binomial are 212
    assert (counts - 2000).abs().max() < 212
    assert abs(noise.mean().item()) < 5 / 200
    assert abs(noise.var().item() - 1) < 5 * (2 / 40_000) ** 0.5


def test_the_same_generator_state_gives_the_same_draws_whatever_the_global_one_is():
    prepare, batch = build_task().prepare, (torch.rand(4, 2, 5), torch.rand(4, 3))
    torch.manual_seed(1)
    (first, t_first, _), noise_first = prepare(batch, seed(9))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    (again, t_again, _), noise_again = prepare(batch, seed(9))
    assert torch.equal(first, again)
    assert torch.equal(t_first, t_again)
    assert torch.equal(noise_first, noise_again)
    assert torch.equal(torch.get_rng_state(), state)


def test_other_seeds_and_later_batches_draw_otherwise():
    prepare, batch, generator = build_task().prepare, (torch.rand(4, 2, 5), torch.rand(4, 3)), seed(9)
    _, first = prepare(batch, generator)
    _, second = prepare(batch, generator)
    assert not torch.equal(first, second)


def test_signals_are_compressed_and_missing_hits_become_zero():
    raw = torch.tensor([0.0, float("inf"), float("-inf"), float("nan"), 5e7, -600.0])
    compressed = compress_signals(raw)
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 5e7, 600.0]).log1p() * torch.tensor([1.0, 1, 1, 1, 1, -1])
    torch.testing.assert_close(compressed, expected)


def test_normalisation_is_applied_before_the_noise_and_to_the_labels():
    batch = (torch.full((4, 2, 5), 99.0), torch.full((4, 3), 5e7))
    (noisy, t, label), noise = build_task(normalize="log").prepare(batch, seed(0))
    (plain, _, plain_label), _ = build_task().prepare(batch, seed(0))
    assert label.max() < 18
    assert plain_label.max() == 5e7
    scales = NoisePrediction(SCHEDULES["linear"](1000), normalize="none")
    clean = (noisy - scales.noise_scale_T[t].view(-1, 1, 1) * noise) / scales.signal_scale_T[t].view(-1, 1, 1)
    torch.testing.assert_close(clean, torch.full_like(clean, 100.0).log(), atol=2e-3, rtol=0)
    assert not torch.equal(noisy, plain)


def test_images_diffuse_too():
    (x_noisy, _, label), noise = build_task(schedule="cosine").prepare(
        (torch.rand(3, 1, 8, 8), torch.tensor([1, 2, 3])), seed(0)
    )
    assert x_noisy.shape == noise.shape == (3, 1, 8, 8)
    assert torch.equal(label, torch.tensor([1, 2, 3]))


def test_prepare_travels_without_its_copies_on_devices():
    prepare, batch = build_task().prepare, (torch.rand(4, 2, 5), torch.rand(4, 3))
    _, before = prepare(batch, seed(0))
    copy = pickle.loads(pickle.dumps(prepare))
    assert copy._on_device == {}
    _, after = copy(batch, seed(0))
    assert torch.equal(before, after)


@pytest.mark.parametrize("batch", [torch.zeros(2, 3), (torch.zeros(2, 3),), (torch.zeros(2, 3), [0, 1]), {"x": 1}])
def test_a_batch_that_is_no_pair_of_tensors_is_refused(batch):
    with pytest.raises(UsageError, match="two tensors"):
        build_task().prepare(batch, seed(0))


def test_an_unknown_schedule_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean linear"):
        build_task(schedule="liner")
