"""How ``simclr`` judges speed and what was learnt, and what its peer does."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from benchmarks import simclr
from benchmarks._simclr_loop import build_plain_loader, build_v2_loader, run_plain_steps
from benchmarks.simclr import MIN_MARGIN, judge_margins


def test_the_margin_over_seeds_has_students_interval():
    target = judge_margins([0.04, 0.05, 0.06, 0.05, 0.04, 0.06])
    # standard deviation 0.008944 over the root of 6, times 2.5706, the t quantile with 5 degrees of freedom
    assert target.measured == pytest.approx(0.05)
    assert target.ci95 == pytest.approx((0.05 - 0.009386, 0.05 + 0.009386), abs=1e-6)
    assert target.met is True
    assert judge_margins([MIN_MARGIN + d for d in (-0.02, 0.03, -0.01, 0.02, 0.0, 0.01)]).met is None
    assert judge_margins([1.0]).met is None, "one seed says nothing of others"


def test_views_are_held_against_the_better_of_torchvisions_arms():
    def build_round(ours, without, two):
        rates = {simclr.OURS: ours, "torchvision v2, 0 workers": without, "torchvision v2, 2 workers": two}
        return {name: (rate, rate) for name, rate in rates.items()}

    target = simclr.judge_against_v2([build_round(30.0, 10.0, 20.0), build_round(30.0, 12.0, 10.0)] * 3)
    assert target.measured == pytest.approx(2.0), "1.5 against two workers, 2.5 against none"
    assert target.met is True


def test_torchvisions_views_are_the_same_steps_and_a_pass_has_no_more_batches_than_asked():
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    images_NCHW = torch.randint(256, (40, 3, 12, 12), dtype=torch.uint8)
    batches = list(build_v2_loader(images_NCHW, 8, 10, n_batches=3, n_workers=0))
    assert len(batches) == 3
    for first_BCHW, second_BCHW in (batches[0], next(iter(build_plain_loader(images_NCHW, 8, 10)))):
        assert first_BCHW.shape == second_BCHW.shape == (10, 3, 8, 8)
        assert first_BCHW.dtype == torch.float32
        assert 0.5 < first_BCHW.max() <= 1
        assert not torch.equal(first_BCHW, second_BCHW)


@pytest.mark.parametrize("device", simclr.DEVICES)
def test_every_device_has_its_size_and_a_whole_window_of_images(device, tmp_path):
    size = simclr.SIZES[device]
    assert size.device == device
    config = simclr.build_config(tmp_path, size)
    found = (config.run.device, config.data.batch_size, config.speed.precision)
    assert found == (device, size.batch_size, size.precision)
    for quick in (True, False):
        n_images, n_labelled = simclr.count_images(size, quick=quick)
        assert n_images - n_labelled >= simclr.WINDOW * size.batch_size


def test_a_block_on_a_gpu_is_timed_between_two_looks_at_the_device(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronize"))
    for device, expected in (("cuda", ["synchronize", "block", "synchronize"]), ("cpu", ["block"])):
        order.clear()
        assert simclr.time_block(lambda: order.append("block"), 10, device)() > 0
        assert order == expected


def test_the_plain_loop_computes_in_the_precision_of_ours():
    model = torch.nn.Linear(4, 3)
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter([(torch.rand(4, 4), torch.rand(4, 4))] * 2)
    run_plain_steps(model, optimizer, batches, 1)
    run_plain_steps(model, optimizer, batches, 1, precision="bf16")
    assert seen == [torch.float32, torch.bfloat16]
