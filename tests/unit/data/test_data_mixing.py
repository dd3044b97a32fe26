"""Mixup and CutMix: what is mixed, by how much, and that the targets say so."""

import pytest
import torch
from data_cases import make_generator

from fulltilt.data import build_mix
from fulltilt.data.transforms.mixing import draw_beta
from fulltilt.errors import ConfigError, DataError

N, K = 64, 10


class Classes:
    n_classes = K


def make_batch():
    """Image i is i everywhere, so that a mixture tells its parts."""
    return torch.arange(N).float()[:, None, None, None].expand(-1, 3, 8, 12).clone(), torch.arange(N) % K


def test_mixup_blends_every_image_with_another_one_by_a_share_of_its_own():
    images, targets = make_batch()
    mixed, shares = build_mix("mixup(alpha=1)", Classes())((images, targets), make_generator())
    assert torch.equal(mixed, mixed[:, :1, :1, :1].expand_as(mixed))
    assert len(set(mixed[:, 0, 0, 0].tolist())) > N * 0.9
    torch.testing.assert_close(shares.sum(1), torch.ones(N))
    number, partner = torch.arange(N)[:, None], torch.arange(N)[None]
    own_NN = torch.where(number == partner, 1.0, (mixed[:, :1, 0, 0] - partner) / (number - partner))
    one_hot = torch.nn.functional.one_hot(targets, K)
    expected_NNK = own_NN[..., None] * one_hot[:, None] + (1 - own_NN[..., None]) * one_hot[None]
    is_share = (own_NN >= -1e-5) & (own_NN <= 1 + 1e-5)
    assert (is_share & ((expected_NNK - shares[:, None]).abs().amax(2) < 1e-4)).any(1).all()


def test_cutmix_pastes_one_box_and_counts_its_area():
    images, targets = make_batch()
    mixed, shares = build_mix("cutmix", Classes())((images, targets), make_generator())
    partners = []
    for i in range(N):
        box = (mixed[i] != i).any(0)
        others = mixed[i][:, box].unique().tolist()
        if not others:
            continue
        (partner,) = map(int, others)
        partners.append(partner)
        assert box.any(1).sum() * box.any(0).sum() == box.sum()
        expected = torch.zeros(K)
        expected[i % K] += 1 - box.float().mean()
        expected[partner % K] += box.float().mean()
        torch.testing.assert_close(shares[i], expected)
    assert len(set(partners)) > N // 2


def test_of_two_ways_each_image_takes_one():
    images, targets = make_batch()
    mixed, _ = build_mix("mixup(alpha=1) | cutmix", Classes())((images, targets), make_generator())
    is_flat = (mixed == mixed[:, :1, :1, :1]).flatten(1).all(1)
    is_whole = mixed[:, 0, 0, 0] == mixed[:, 0, 0, 0].round()
    assert 15 < int((is_flat & ~is_whole).sum()) < 50
    assert int((~is_flat).sum()) > 10


def test_a_mixture_follows_its_generator_and_no_other():
    batch, mix = make_batch(), build_mix("mixup | cutmix", Classes())
    state = torch.get_rng_state()
    first, again, other = (mix(batch, make_generator(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0, 5.0])
def test_shares_have_the_mean_and_variance_of_a_beta(alpha):
    shares = draw_beta(alpha, 20000, make_generator()).double()
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(shares.mean() - 0.5) < 5 * (variance / 20000) ** 0.5
    assert abs(shares.var() / variance - 1) < 0.06
    assert bool(((shares >= 0) & (shares <= 1)).all())


def test_what_cannot_be_mixed_is_refused():
    with pytest.raises(DataError, match="tells no n_classes"):
        build_mix("mixup", object())
    with pytest.raises(ConfigError, match=r"alpha=0\.0: expected a number of at least 0\.01"):
        build_mix("cutmix(alpha=0.0)", Classes())
    with pytest.raises(ConfigError, match="mixup"):
        build_mix("mixupp", Classes())
    with pytest.raises(DataError, match=r"\(4, 2\) torch\.float32"):
        build_mix("mixup", Classes())((torch.rand(4, 2), torch.arange(4)), make_generator())
    assert build_mix(None, object()) is None
