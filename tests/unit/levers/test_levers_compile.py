"""compile: whole or block by block, equal blocks once, what is compiled again is told, and evaluation stays eager.

Graphs run uncompiled here (Dynamo's part without Inductor's), but in the last test: what is at stake is which graphs
there are, and Inductor takes 10 s a graph.
"""

import getpass
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from tests.unit.levers import lever_cases
from tests.unit.levers.lever_cases import take_steps
from torch import nn
from torch.utils.data import TensorDataset

from fulltilt.engine.build.run import Run
from fulltilt.engine.loop.evaluate import build_validation_loader, evaluate
from fulltilt.engine.measured.measurement import check_observed, measure_flops
from fulltilt.errors import PlanObstacleError
from fulltilt.hardware import has_c_compiler
from fulltilt.levers import compile as lever
from fulltilt.levers import find_reports

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


def build(value: Any, model: Any = Stack, **plan: Any) -> Run:
    return lever_cases.build(model, build_dataset, compile=value, **plan)


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    if request.node.get_closest_marker("slow") is None:
        lever_cases.compile_without_inductor(monkeypatch)
    monkeypatch.setenv(lever.CACHE_VARIABLE, str(tmp_path))
    config: Any = torch._dynamo.config
    before = config.recompile_limit
    torch._dynamo.reset()
    yield
    config.recompile_limit = before
    torch._dynamo.reset()


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_equal_blocks_share_one_graph_and_the_rest_stays_eager(is_checkpointed):
    run = build("regional", activation_checkpointing=is_checkpointed)
    losses = take_steps(run, 2)
    graphs = run.setup.state["compiled_graphs"]
    assert graphs.n_graphs == 1
    assert is_checkpointed or graphs.n_runs == 6
    assert run.setup.model.n_eager == 2
    observed = check_observed(run)
    assert (observed["compile"], observed["activation_checkpointing"]) == ("regional", is_checkpointed)
    assert losses == take_steps(build(False), 2)
    assert list(run.setup.model.state_dict()) == list(Stack().state_dict())


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
    take_steps(run, 2)
    graphs = run.setup.state["compiled_graphs"]
    assert (graphs.n_graphs, graphs.n_runs) == (10, 20)


@pytest.mark.parametrize("value", [True, "regional"])
def test_evaluation_and_counting_compile_nothing(value):
    run = build(value)
    assert lever.LEVER.observe(run.setup) is False, "nothing has run yet"
    take_steps(run, 1)
    assert lever.LEVER.observe(run.setup) == value
    assert run.setup.model.n_eager == (value == "regional")
    graphs = run.setup.state["compiled_graphs"]
    before = (graphs.n_graphs, graphs.n_runs)
    assert evaluate(run, build_validation_loader(run, batch_size=5))["loss"] > 0
    measure_flops(run, next(run.start_epoch(1)))
    assert (graphs.n_graphs, graphs.n_runs) == before
    take_steps(run, 1)
    assert graphs.n_runs > before[1]


@pytest.mark.parametrize("value", [True, "regional"])
def test_the_end_tells_graphs_and_why_any_was_compiled_again(value):
    run = build(value)
    take_steps(run, 2)
    assert "again" not in find_reports(run.plan, run.setup)[0]
    take_steps(run, 3)  # the last batch of the epoch is smaller
    (report,) = find_reports(run.plan, run.setup)
    assert report.startswith(f"compile={value}: 2 graphs compiled in ")
    assert os.environ[lever.CACHE_VARIABLE] in report
    assert "1 of them again for another shape or mode" in report
    assert "expected 8, actual 4" in report


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (True, {}),
        ("reduce-overhead", {"triton.cudagraphs": True}),
        ("max-autotune", {"max_autotune": True, "coordinate_descent_tuning": True}),
    ],
)
def test_each_mode_reaches_the_compiler_and_is_read_back(value, options, monkeypatch):
    asked = []

    def compile_fx(graph, *_, config_patches):
        asked.append(config_patches)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    setup = build(False).setup
    lever.LEVER.apply(setup, value)
    assert setup.forward is not None
    setup.forward(torch.randn(8, 6))
    assert asked == [options]
    assert lever.LEVER.observe(setup) == value


@pytest.mark.parametrize("n_skipped", [0, 2])
def test_graphs_that_became_no_cuda_graph_are_told(n_skipped, monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters["inductor"], "cudagraph_skips", n_skipped)
    run = build(True)
    take_steps(run, 1)
    (report,) = find_reports(run.plan, run.setup)
    assert ("2 of them without a CUDA graph" in report) == (n_skipped > 0)


def test_a_model_that_is_declined_is_told_and_not_taken_for_compiled():
    class Recurrent(nn.LSTM):
        def __init__(self) -> None:
            super().__init__(6, 3)

        def forward(self, x_BC: torch.Tensor) -> torch.Tensor:
            return super().forward(x_BC)[0]

    run = build(True, Recurrent)
    take_steps(run, 1)
    assert lever.LEVER.observe(run.setup) is False
    assert "declined the model" in find_reports(run.plan, run.setup)[0]


def test_a_model_without_repeated_blocks_is_told_before_it_trains():
    with pytest.raises(PlanObstacleError, match="no repeated blocks to compile; use compile true"):
        build("regional", lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))


def test_two_runs_never_share_their_counts():
    assert lever.CompiledGraphs() != lever.CompiledGraphs()


def test_compiled_code_goes_to_a_folder_that_stays(monkeypatch, tmp_path):
    own = str(tmp_path / "fulltilt" / "inductor")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lever.keep_cache()
    assert os.environ[lever.CACHE_VARIABLE] != own, "the user's own choice stays"
    monkeypatch.delenv(lever.CACHE_VARIABLE)
    lever.keep_cache()
    assert os.environ[lever.CACHE_VARIABLE] == own
    monkeypatch.setenv(lever.CACHE_VARIABLE, f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    lever.keep_cache()
    # torch names its own place once Inductor is imported, which run.deterministic leads to
    assert os.environ[lever.CACHE_VARIABLE] == own
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

    expected = take_steps(build(False), 2)
    hits = []
    with torch._inductor.config.patch(compile_threads=1):
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            torch.testing.assert_close(take_steps(build("regional"), 2), expected, rtol=1e-5, atol=1e-6)
            hits.append(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
    assert hits[0] == 0 < hits[1]
