import pytest
import torch
from task_cases import take_steps
from torch import nn

from fulltilt.errors import ConfigError
from fulltilt.tasks import build_model
from fulltilt.tasks.models.sensor_transformer import SensorTransformer, attend

N_SENSORS = 20


def build(**changes):
    torch.manual_seed(0)
    geometry = torch.randn(3, N_SENSORS) * 500
    return SensorTransformer(**({"n_sensors": N_SENSORS, "n_labels": 6, "depth": 2, "geometry": geometry} | changes))


def draw_batch(n=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, N_SENSORS, generator=generator)
    return x, torch.randint(1000, (n,), generator=generator), torch.randn(n, 6, generator=generator)


def build_trained(**changes):
    model, batch = build(**changes), draw_batch(16)
    target = torch.randn(16, 2, N_SENSORS, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    take_steps(optimizer, lambda: nn.functional.mse_loss(model(*batch), target), 4)
    return model


def test_the_full_detector_goes_through_a_model_of_known_size():
    # tokens 5160·16; signal 2→16; place 3→16; time 128→16→16; label 6→16→16; no_label 16; head 16→2;
    # three blocks of qkv, out, mlp ×4 and six-fold steering; final steering.
    block = (16 * 48 + 48) + (16 * 16 + 16) + (16 * 64 + 64 + 64 * 16 + 16) + (16 * 96 + 96)
    outside = 5160 * 16 + 48 + 64 + (128 * 16 + 16 + 272) + (112 + 272) + 16 + 34 + (16 * 32 + 32)
    model = build_model("sensor_transformer").eval()
    assert sum(p.numel() for p in model.parameters()) == 3 * block + outside
    with torch.no_grad():
        assert model(torch.randn(1, 2, 5160), torch.tensor([3]), torch.randn(1, 6)).shape == (1, 2, 5160)


def test_every_parameter_learns_once_the_gates_have_opened():
    model = build_trained(label_dropout=0.5)
    model.zero_grad()
    model(*draw_batch(16)).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_timestep_label_geometry_and_signal_each_matter():
    model, (x, t, label) = build_trained().eval(), draw_batch()
    plain = model(x, t, label)
    moved = build(geometry=torch.randn(3, N_SENSORS))
    moved.load_state_dict({k: v for k, v in model.state_dict().items() if k != "geometry_S3"}, strict=False)
    others = {"signal": model(x + 1, t, label), "t": model(x, 999 - t, label), "label": model(x, t, label + 1)}
    for name, changed in {**others, "geometry": moved.eval()(x, t, label)}.items():
        assert (changed - plain).abs().max() > 1e-5, name


def test_sensors_see_each_other_and_samples_of_a_batch_do_not():
    model, (x, t, label) = build_trained().eval(), draw_batch()
    nudged = x.clone()
    nudged[:, 0, 0] += 5
    assert (model(nudged, t, label) - model(x, t, label))[:, :, 1:].abs().max() > 1e-6
    torch.testing.assert_close(model(x[:1], t[:1], label[:1]), model(x, t, label)[:1], rtol=1e-4, atol=1e-5)


def test_labels_are_dropped_in_training_only():
    model, (x, t, label) = build_trained(label_dropout=0.5), draw_batch()
    assert len({model(x, t, label).sum().item() for _ in range(8)}) > 1
    model.eval()
    assert torch.equal(model(x, t, label), model(x, t, label))


@pytest.mark.parametrize("width", [2, 3, 8])
def test_padded_heads_attend_as_narrow_ones_do(width):
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(2, 4, 10, width, generator=generator, dtype=torch.float64) for _ in range(3)]
    torch.testing.assert_close(attend(*parts, pad=-width % 8 or 8), attend(*parts), rtol=1e-10, atol=1e-12)


def test_neighbouring_timesteps_stay_apart_in_bf16():
    model = build(hidden=16).bfloat16()
    embedded = model._embed_time(torch.arange(990, 1000))
    assert embedded.dtype is torch.bfloat16
    assert len({tuple(row) for row in embedded.float().tolist()}) == 10


def test_it_runs_under_bf16_autocast_and_stays_finite():
    model = build_trained()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(*draw_batch()).float().square().mean()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_the_geometry_is_standardised_and_saved_with_the_model():
    places = build().state_dict()["geometry_S3"]
    assert places.shape == (N_SENSORS, 3)
    torch.testing.assert_close(places.mean(dim=0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(places.square().mean(), torch.tensor(1.0))
    # sensors all in one place do not divide by zero
    assert torch.isfinite(build(geometry=torch.full((3, N_SENSORS), 7.0)).geometry_S3).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 12, "heads": 8}, ["hidden 12", "heads 8", "[1, 2, 3, 4, 6, 12]"]),
        ({"geometry": torch.zeros(N_SENSORS, 3)}, ["(20, 3)", "(3, 20)"]),
        ({"geometry": torch.full((3, N_SENSORS), float("nan"))}, ["NaN", "xpmt"]),
    ],
)
def test_sizes_that_do_not_fit_are_explained(changes, words):
    with pytest.raises(ConfigError) as raised:
        build(**changes)
    assert [word for word in words if word not in str(raised.value)] == []
