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


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("n_timesteps", [1, 2, 50, 1000])
def test_schedules_keep_the_variance_and_lose_the_signal(schedule, n_timesteps):
    betas = SCHEDULES[schedule](n_timesteps)
    assert betas.shape == (n_timesteps,)
    assert ((betas > 0) & (betas < 1)).all()
    prepare = NoisePrediction(betas, normalize="none")
    variance_T = prepare.signal_scale_T.square() + prepare.noise_scale_T.square()
    torch.testing.assert_close(variance_T, torch.ones(n_timesteps), atol=1e-6, rtol=0)
    assert (prepare.signal_scale_T.diff() < 0).all()
    if n_timesteps >= 50:
        assert prepare.signal_scale_T[0] > 0.97
        assert prepare.signal_scale_T[-1] < 0.05


def test_schedules_are_the_papers_at_1000_steps():
    betas = SCHEDULES["linear"](1000)
    assert betas[0].item() == pytest.approx(1e-4)
    assert betas[-1].item() == pytest.approx(0.02)
    assert (1 - betas).prod().item() == pytest.approx(4.04e-5, rel=0.01)  # share of the signal's variance left
    kept = (1 - SCHEDULES["cosine"](1000)).cumprod(0)
    expected = torch.cos(torch.tensor((0.5 + 0.008) / 1.008 * torch.pi / 2)) ** 2
    start = torch.cos(torch.tensor(0.008 / 1.008 * torch.pi / 2)) ** 2
    assert kept[499].item() == pytest.approx((expected / start).item(), rel=1e-4)


def test_the_noisy_input_is_made_of_the_target_noise():
    x, label = torch.randn(64, 2, 7, generator=seed(0)), torch.randn(64, 3, generator=seed(1))
    clean, kept_label = denoise(build_task(n_timesteps=100).prepare, (x, label))
    torch.testing.assert_close(clean, x, atol=1e-4, rtol=1e-4)
    assert torch.equal(kept_label, label)


def denoise(prepare, batch):
    """Take the noise that was told off the noisy input."""
    (x_noisy, t, label), noise = prepare(batch, seed(0))
    assert t.dtype is torch.int64
    noise_share, signal_share = (s[t].view(-1, 1, 1) for s in (prepare.noise_scale_T, prepare.signal_scale_T))
    return (x_noisy - noise_share * noise) / signal_share, label


def test_timesteps_are_uniform_and_noise_is_standard_normal():
    prepare = NoisePrediction(SCHEDULES["linear"](10), normalize="none")
    (_, t, _), noise = prepare((torch.zeros(20_000, 1, 2), torch.zeros(20_000, 1)), seed(0))
    counts = t.bincount(minlength=10)
    # 2,000 expected each; five standard deviations of a binomial are 212
    assert (counts - 2000).abs().max() < 212
    assert abs(noise.mean().item()) < 5 / 200
    assert abs(noise.var().item() - 1) < 5 * (2 / 40_000) ** 0.5


@pytest.mark.parametrize("batch", [(torch.rand(4, 2, 5), torch.rand(4, 3)), (torch.rand(3, 1, 8, 8), torch.arange(3))])
def test_draws_are_those_of_the_generator_whatever_the_global_one_is(batch):
    prepare, generator = build_task().prepare, seed(9)
    torch.manual_seed(1)
    (first, t_first, label), noise = prepare(batch, generator)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    (again, t_again, _), noise_again = prepare(batch, seed(9))
    torch.testing.assert_close([first, t_first, noise], [again, t_again, noise_again], rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(label, batch[1])
    assert first.shape == noise.shape == batch[0].shape
    assert not torch.equal(prepare(batch, generator)[1], noise), "the next batch has other noise"


def test_signals_are_compressed_and_missing_hits_become_zero():
    raw = torch.tensor([0.0, float("inf"), float("-inf"), float("nan"), 5e7, -600.0])
    compressed = compress_signals(raw)
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 5e7, 600.0]).log1p() * torch.tensor([1.0, 1, 1, 1, 1, -1])
    torch.testing.assert_close(compressed, expected)


def test_normalisation_is_applied_before_the_noise_and_to_the_labels():
    batch = (torch.full((4, 2, 5), 99.0), torch.full((4, 3), 5e7))
    clean, label = denoise(build_task(normalize="log").prepare, batch)
    assert label.max() < 18
    torch.testing.assert_close(clean, torch.full_like(clean, 100.0).log(), atol=2e-3, rtol=0)


def test_prepare_travels_without_its_copies_on_devices():
    prepare, batch = build_task().prepare, (torch.rand(4, 2, 5), torch.rand(4, 3))
    _, before = prepare(batch, seed(0))
    assert len(pickle.dumps(prepare)) == len(pickle.dumps(build_task().prepare))
    copy = pickle.loads(pickle.dumps(prepare))
    _, after = copy(batch, seed(0))
    assert torch.equal(before, after)


@pytest.mark.parametrize("batch", [torch.zeros(2, 3), (torch.zeros(2, 3),), (torch.zeros(2, 3), [0, 1]), {"x": 1}])
def test_a_batch_that_is_no_pair_of_tensors_is_refused(batch):
    with pytest.raises(UsageError, match="two tensors"):
        build_task().prepare(batch, seed(0))


def test_an_unknown_schedule_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean linear"):
        build_task(schedule="liner")
