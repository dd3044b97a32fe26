"""compile: whole or block by block, equal blocks once, what is compiled again is told, and evaluation stays eager.

Graphs run uncompiled here (Dynamo's part without Inductor's), but in the last test: what is at stake is which graphs
there are, and Inductor takes 10 s a graph.
"""

import getpass
import os
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch.utils.data import TensorDataset

from fulltilt.engine.build.builder import build_run
from fulltilt.engine.build.run import Run
from fulltilt.engine.loop.evaluate import build_validation_loader, evaluate
from fulltilt.engine.measured.measurement import check_observed, measure_flops
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.errors import PlanObstacleError
from fulltilt.hardware import has_c_compiler
from fulltilt.levers import compile as lever
from fulltilt.levers import default_plan, find_reports
from fulltilt.measure import NullTimer
from fulltilt.tasks import Workload

N_SAMPLES = 20  # batches of 8, 8 and 4

pytestmark = [
    # Dynamo looks whether an input has a gradient, and hides the warning in a way that a warning as error escapes.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # Inductor imports a part of torch that uses torch's own deprecated decorator.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x_BC: torch.Tensor) -> torch.Tensor:
        return x_BC + torch.tanh(self.linear(x_BC))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 3)
        self.n_eager = 0

    def forward(self, x_BC: torch.Tensor) -> torch.Tensor:
        self.n_eager += not torch.compiler.is_compiling()
        x_BC = self.stem(x_BC)
        for block in self.blocks:
            x_BC = block(x_BC)
        return self.head(x_BC)


def build_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x_BC = torch.randn(N_SAMPLES, 6, generator=generator)
    return TensorDataset(x_BC, torch.randint(3, (N_SAMPLES,), generator=generator))


def build(value: Any, model: Callable[[], nn.Module] = Stack, **plan: Any) -> Run:
    workload = Workload(model=model, dataset=build_dataset, validation=build_dataset, loss=nn.CrossEntropyLoss())
    full = default_plan({"batch_size": 8, "threads": 1, "compile": value} | plan)
    return build_run(None, full, device="cpu", workload=workload, seed=1)


def train(run: Run, n_steps: int) -> list[float]:
    step, batches, losses = TrainStep(run), run.start_epoch(0), []
    for _ in range(n_steps):
        outcome = step(batches, NullTimer())
        assert outcome is not None
        losses.append(float(outcome.loss))
    return losses


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(lever.CACHE_VARIABLE, str(tmp_path))
    config: Any = torch._dynamo.config
    before = config.recompile_limit
    torch._dynamo.reset()
    yield
    config.recompile_limit = before
    torch._dynamo.reset()


@pytest.fixture
def dynamo_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def pass_on(graph: Any, example_inputs: Any, config_patches: Any = None) -> Any:
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", pass_on)
    monkeypatch.setattr("fulltilt.engine.build.facts.has_c_compiler", lambda: True)  # none is needed so far


@pytest.mark.usefixtures("dynamo_only")
def test_equal_blocks_share_one_graph_and_the_rest_stays_eager():
    run = build("regional")
    losses = train(run, 2)
    graphs = run.setup.state["compiled_graphs"]
    assert (graphs.n_graphs, graphs.n_runs) == (1, 6)
    assert run.setup.model.n_eager == 2
    assert check_observed(run)["compile"] == "regional"
    assert losses == train(build(False), 2)
    assert list(run.setup.model.state_dict()) == list(Stack().state_dict())


@pytest.mark.usefixtures("dynamo_only")
def test_more_shapes_than_dynamos_limit_are_all_compiled():
    class Growing(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(8 + i) for i in range(10))

        def forward(self, x_BC: torch.Tensor) -> torch.Tensor:
            x_BC = self.stem(x_BC)
            for i, block in enumerate(self.blocks):
                x_BC = block(nn.functional.pad(x_BC, (0, min(i, 1))))
            return self.head(x_BC[:, :8])

    run = build("regional", Growing)
    train(run, 2)
    graphs = run.setup.state["compiled_graphs"]
    assert (graphs.n_graphs, graphs.n_runs) == (10, 20)


@pytest.mark.usefixtures("dynamo_only")
@pytest.mark.parametrize("value", [True, "regional"])
def test_evaluation_and_counting_compile_nothing(value):
    run = build(value)
    train(run, 1)
    graphs = run.setup.state["compiled_graphs"]
    before = (graphs.n_graphs, graphs.n_runs)
    assert evaluate(run, build_validation_loader(run, batch_size=5))["loss"] > 0
    measure_flops(run, next(run.start_epoch(1)))
    assert (graphs.n_graphs, graphs.n_runs) == before
    train(run, 1)
    assert graphs.n_runs > before[1]


@pytest.mark.usefixtures("dynamo_only")
@pytest.mark.parametrize("value", [True, "regional"])
def test_the_end_tells_graphs_and_why_any_was_compiled_again(value):
    run = build(value)
    train(run, 2)
    assert "again" not in find_reports(run.plan, run.setup)[0]
    train(run, 3)  # the last batch of the epoch is smaller
    (report,) = find_reports(run.plan, run.setup)
    assert report.startswith(f"compile={value}: 2 graphs compiled in ")
    assert os.environ[lever.CACHE_VARIABLE] in report
    assert "1 of them again for another shape or mode" in report
    assert "expected 8, actual 4" in report


@pytest.mark.usefixtures("dynamo_only")
def test_a_model_that_is_declined_is_told_and_not_taken_for_compiled():
    class Recurrent(nn.LSTM):
        def __init__(self) -> None:
            super().__init__(6, 3)

        def forward(self, x_BC: torch.Tensor) -> torch.Tensor:
            return super().forward(x_BC)[0]

    run = build(True, Recurrent)
    train(run, 1)
    assert lever.LEVER.observe(run.setup) is False
    assert "declined the model" in find_reports(run.plan, run.setup)[0]


@pytest.mark.usefixtures("dynamo_only")
def test_checkpointed_blocks_share_one_graph_too():
    run = build("regional", activation_checkpointing=True)
    assert train(run, 2) == train(build(False), 2)
    observed = check_observed(run)
    assert (observed["compile"], observed["activation_checkpointing"]) == ("regional", True)
    assert run.setup.state["compiled_graphs"].n_graphs == 1


def test_a_model_without_repeated_blocks_is_told_before_it_trains():
    with pytest.raises(PlanObstacleError, match="no repeated blocks to compile; use compile true"):
        build("regional", lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))


def test_two_runs_never_share_their_counts():
    assert lever.CompiledGraphs() != lever.CompiledGraphs()


def test_compiled_code_goes_to_a_folder_that_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lever.keep_cache()
    assert os.environ[lever.CACHE_VARIABLE] != str(tmp_path / "fulltilt" / "inductor"), "the user's own choice stays"
    monkeypatch.delenv(lever.CACHE_VARIABLE)
    lever.keep_cache()
    assert os.environ[lever.CACHE_VARIABLE] == str(tmp_path / "fulltilt" / "inductor")
    monkeypatch.setenv(lever.CACHE_VARIABLE, f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    lever.keep_cache()
    said = "torch names its own place once Inductor is imported, which run.deterministic leads to"
    assert os.environ[lever.CACHE_VARIABLE] == str(tmp_path / "fulltilt" / "inductor"), said
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv(lever.CACHE_VARIABLE)
    lever.keep_cache()
    assert "torchinductor_" in os.environ[lever.CACHE_VARIABLE]


@pytest.mark.slow
@pytest.mark.skipif(
    not (has_c_compiler() and Path(sysconfig.get_path("include"), "Python.h").exists()),
    reason="torch.compile needs a C++ compiler and Python's headers, and one of them was not found",
)
def test_compiled_losses_are_those_of_eager_mode_and_the_second_run_finds_its_code():
    from torch._dynamo.utils import counters

    expected = train(build(False), 2)
    hits = []
    with torch._inductor.config.patch(compile_threads=1):
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            torch.testing.assert_close(train(build("regional"), 2), expected, rtol=1e-5, atol=1e-6)
            found = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
            hits.append(found)
    assert hits[0] == 0 < hits[1]
