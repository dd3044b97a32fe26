"""Checkpointed models train exactly like plain ones, with less kept between forward and backward."""

import copy

import pytest
import torch
from torch import nn

from fulltilt.errors import PlanObstacleError, TrainingError
from fulltilt.levers import Setup, load_catalogue
from fulltilt.levers.activation_checkpointing import (
    count_blocks,
    count_wrapped,
    find_blocks,
    find_named,
    without_checkpointing,
)

LEVER = load_catalogue()["activation_checkpointing"]


class Residual(nn.Module):
    def __init__(self, width: int = 6):
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.drop = nn.Dropout(0.3)

    def forward(self, x_BCHW: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x_BCHW + self.drop(torch.relu(self.conv(self.norm(x_BCHW)))) * scale


class Stages(nn.Module):
    """Stages of blocks, as image networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 1)
        self.stages = nn.ModuleList(nn.Sequential(Residual(), Residual()) for _ in range(2))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        x_BCHW = self.stem(x_BCHW)
        for stage in self.stages:
            x_BCHW = stage(x_BCHW)
        return x_BCHW


def build_chain() -> nn.Module:
    layers: list[nn.Module] = []
    for n_in in (3, 6, 6):
        layers += [nn.Conv2d(n_in, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=None), nn.SiLU(inplace=True)]
    return nn.Sequential(*layers, nn.Dropout(0.2))


class Filling(nn.Module):
    """Passes each layer the list that it goes on filling."""

    class Layer(nn.Module):
        def __init__(self, n: int):
            super().__init__()
            self.conv = nn.Conv2d(3 * n, 3, 1)

        def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.relu(self.conv(torch.cat(parts, 1)))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(n) for n in (1, 2, 3))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        parts = [x_BCHW]
        for layer in self.layers:
            parts.append(layer(parts))
        return torch.cat(parts, 1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.body(x_BCHW.flatten(2)[..., :16])


MODELS = {"stages": Stages, "chain": build_chain, "filling": Filling, "encoder": Encoder}


def wrap(model: nn.Module) -> nn.Module:
    setup = Setup(device=torch.device("cpu"), model=model)
    LEVER.apply(setup, True)
    assert LEVER.observe(setup) is True
    return setup.model


def train(model: nn.Module, n_steps: int = 3, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Losses of a few steps; gradients of the last one stay in the model."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        x_BCHW = torch.randn(4, 3, 8, 8)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(x_BCHW).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_equal_to_the_plain_model(name, dtype):
    torch.manual_seed(0)
    plain = MODELS[name]().train()
    wrapped = wrap(copy.deepcopy(plain))
    assert torch.equal(torch.stack(train(plain, dtype=dtype)), torch.stack(train(wrapped, dtype=dtype)))
    assert list(plain.state_dict()) == list(wrapped.state_dict())
    for (key, mine), theirs in zip(plain.state_dict().items(), wrapped.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), key
    assert_equal_gradients(plain, wrapped)


def assert_equal_gradients(plain: nn.Module, wrapped: nn.Module) -> None:
    for (key, mine), theirs in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), key


def test_running_statistics_move_once_a_step():
    wrapped = wrap(Stages().train())
    train(wrapped, n_steps=3)
    norms = [m for m in wrapped.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [int(norm.num_batches_tracked) for norm in norms] == [3] * 4
    assert [norm.momentum for norm in norms] == [0.1] * 4


@pytest.mark.parametrize("name", MODELS)
def test_less_is_kept_for_the_backward_pass(name):
    def count_kept(model: nn.Module) -> int:
        sizes = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(torch.randn(4, 3, 8, 8))
        del output
        return sum(size for pointer, size in sizes.items() if pointer not in own)

    plain = MODELS[name]().train()
    assert count_kept(wrap(copy.deepcopy(plain))) < count_kept(plain)


@pytest.mark.parametrize(("name", "n"), [("stages", 4), ("chain", 3), ("filling", 3), ("encoder", 3)])
def test_blocks_are_found(name, n):
    model = MODELS[name]()
    assert count_blocks(model) == n
    blocks = find_blocks(model)
    inner = [m for block in blocks for m in block.modules() if m is not block]
    assert not {id(b) for b in blocks} & {id(m) for m in inner}
    assert count_wrapped(wrap(model)) == len(blocks)


def test_a_deep_copy_computes_with_its_own_weights():
    wrapped = wrap(Stages().eval())
    x_BCHW = torch.randn(2, 3, 8, 8)
    twin = copy.deepcopy(wrapped)
    before = wrapped(x_BCHW)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(wrapped(x_BCHW), before)
    assert not twin(x_BCHW).any()
    assert isinstance(twin.stages[0][0], Residual)


def test_nothing_is_computed_twice_without_gradients_or_when_switched_off():
    wrapped = wrap(Stages().train())
    calls = []
    wrapped.stages[0][0].conv.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        wrapped(torch.randn(2, 3, 8, 8))
    assert len(calls) == 1
    with without_checkpointing(wrapped):
        wrapped(torch.randn(2, 3, 8, 8)).sum().backward()
    assert len(calls) == 2
    wrapped(torch.randn(2, 3, 8, 8)).sum().backward()
    assert len(calls) == 4


def test_a_block_that_overwrites_its_input_is_refused():
    class Overwriting(Residual):
        def forward(self, x_BCHW: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return self.conv(x_BCHW.mul_(2.0))

    wrapped = wrap(nn.Sequential(nn.Conv2d(3, 6, 1), Overwriting(), Overwriting()).train())
    with pytest.raises(TrainingError, match="Overwriting changes its input in place"):
        wrapped(torch.randn(2, 3, 8, 8))


CHAIN = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


@pytest.mark.parametrize("model", [nn.ModuleDict({"one": CHAIN[0], "two": CHAIN[1]}), nn.LSTM(3, 4), CHAIN])
def test_a_model_without_blocks_is_refused(model):
    assert count_blocks(model) == 0
    with pytest.raises(PlanObstacleError, match="no repeated blocks"):
        wrap(model)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("stages.1", ["stages.1"]),
        ("stages.*.0", ["stages.0.0", "stages.1.0"]),
        ("stages.0, stages.0.1, stem", ["stages.0", "stem"]),
    ],
)
def test_named_modules_train_bit_equal_and_only_they_are_wrapped(text, names):
    torch.manual_seed(0)
    plain = Stages().train()
    setup = Setup(device=torch.device("cpu"), model=copy.deepcopy(plain))
    LEVER.apply(setup, text)
    assert LEVER.observe(setup) == text
    assert sorted(find_named(setup.model, text)) == names
    assert count_wrapped(setup.model) == len(names)
    assert torch.equal(torch.stack(train(plain)), torch.stack(train(setup.model)))
    assert_equal_gradients(plain, setup.model)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stage", "there is no module 'stage'; did you mean stages"),
        ("stages", r"ModuleList, which has no forward.*stages\.\*"),
    ],
)
def test_names_that_cannot_be_wrapped_are_explained(text, words):
    with pytest.raises(PlanObstacleError, match=words):
        LEVER.apply(Setup(device=torch.device("cpu"), model=Stages()), text)
