"""Checkpointed models train exactly like plain ones, with less kept between forward and backward."""

import copy

import pytest
import torch
from tests.unit.levers.lever_cases import CATALOGUE, Block
from torch import nn

from fulltilt.errors import PlanObstacleError, TrainingError
from fulltilt.levers import Setup
from fulltilt.levers.activation_checkpointing import (
    count_blocks,
    count_wrapped,
    find_blocks,
    find_named,
    without_checkpointing,
)

LEVER = CATALOGUE["activation_checkpointing"]


class Stages(nn.Module):
    """Stages of blocks, as image networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 1)
        self.stages = nn.ModuleList(nn.Sequential(Block(6, 0.3), Block(6, 0.3)) for _ in range(2))

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


def build_nested() -> nn.Module:
    """Chains inside a chain that is too short to be cut itself."""
    parts = [nn.Sequential(nn.Conv2d(n_in, 6, 3, padding=1), nn.BatchNorm2d(6), nn.SiLU()) for n_in in (3, 6)]
    return nn.Sequential(*parts)


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


MODELS = {"stages": Stages, "chain": build_chain, "nested": build_nested, "filling": Filling, "encoder": Encoder}


def wrap(model: nn.Module, value: bool | str = True) -> nn.Module:
    setup = Setup(device=torch.device("cpu"), model=model)
    LEVER.apply(setup, value)
    assert LEVER.observe(setup) == value
    return setup.model


def train(model: nn.Module, dtype: torch.dtype | None = None) -> list[float]:
    """Losses of three steps; gradients of the last one stay in the model."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        x_BCHW = torch.randn(4, 3, 8, 8)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(x_BCHW).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_equal_to_the_plain_model(name, dtype):
    torch.manual_seed(0)
    plain = MODELS[name]().train()
    wrapped = wrap(copy.deepcopy(plain))
    assert_trains_equally(plain, wrapped, dtype)


def assert_trains_equally(plain: nn.Module, wrapped: nn.Module, dtype: torch.dtype | None = None) -> None:
    assert train(plain, dtype) == train(wrapped, dtype)
    assert list(plain.state_dict()) == list(wrapped.state_dict())
    for (key, mine), theirs in zip(plain.state_dict().items(), wrapped.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), key  # running statistics among them, which move once a step
    for (key, mine), theirs in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), key


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


@pytest.mark.parametrize(("name", "n"), [("stages", 4), ("chain", 3), ("nested", 4), ("filling", 3), ("encoder", 3)])
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
    assert isinstance(twin.stages[0][0], Block)


def test_nothing_is_computed_twice_without_gradients_or_when_switched_off():
    wrapped, x_BCHW = wrap(Stages().train()), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        wrapped(x_BCHW)
    assert wrapped.stages[0][0].n_calls == 1
    with without_checkpointing(wrapped):
        wrapped(x_BCHW).sum().backward()
    assert wrapped.stages[0][0].n_calls == 2
    wrapped(x_BCHW).sum().backward()
    assert wrapped.stages[0][0].n_calls == 4


def test_a_block_that_overwrites_its_input_is_refused():
    class Overwriting(Block):
        def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
            return self.conv(x_BCHW.mul_(2.0))

    wrapped = wrap(nn.Sequential(nn.Conv2d(3, 4, 1), Overwriting(), Overwriting()).train())
    with pytest.raises(TrainingError, match="Overwriting changes its input in place"):
        wrapped(torch.randn(2, 3, 8, 8))


CHAIN = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


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
    wrapped = wrap(copy.deepcopy(plain), text)
    assert sorted(find_named(wrapped, text)) == names
    assert count_wrapped(wrapped) == len(names)
    assert_trains_equally(plain, wrapped)


@pytest.mark.parametrize(
    ("model", "value", "words"),
    [
        (Stages(), "stage", "there is no module 'stage'; did you mean stages"),
        (Stages(), "stages", r"ModuleList, which has no forward.*stages\.\*"),
        (nn.ModuleDict({"one": CHAIN[0], "two": CHAIN[1]}), True, "no repeated blocks"),
        (nn.LSTM(3, 4), True, "no repeated blocks"),
        (CHAIN, True, "no repeated blocks"),
    ],
)
def test_what_cannot_be_wrapped_is_explained(model, value, words):
    assert value is not True or count_blocks(model) == 0
    with pytest.raises(PlanObstacleError, match=words):
        wrap(model, value)
