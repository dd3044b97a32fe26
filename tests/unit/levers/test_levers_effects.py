"""Every lever changes what a run does, seen from inside the run; a lever without a case here fails."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.levers import lever_cases
from tests.unit.levers.lever_cases import CATALOGUE, N_CLASSES, Network, is_defined, observe, take_steps
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

from fulltilt.data import build_pipeline
from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.engine.build.run import Run
from fulltilt.errors import DataError
from fulltilt.levers import Setup, find_reports
from fulltilt.levers.expandable_segments import is_expandable, read_settings

N_SAMPLES = 24


class Images(Dataset):
    """Small images; ``look`` runs where the sample is loaded and travels as the target's second column."""

    def __init__(self, look: Callable[[], int] = lambda: 0, n_samples: int = N_SAMPLES):
        self.look, self.n_samples = look, n_samples

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(index))
        return image, torch.tensor([index % N_CLASSES, self.look()])


class Witness(Network):
    """Writes down what it sees of itself while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {"n_calls": 0}

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        h_BCHW = self.blocks(self.stem(x_BCHW))
        logits_BK = self.head(h_BCHW.mean((2, 3)))
        self.seen = {
            "n_calls": self.seen["n_calls"] + 1,
            "threads": torch.get_num_threads(),
            "dtype": logits_BK.dtype,
            "batch": len(x_BCHW),
            "has_channels_innermost": h_BCHW.stride()[1] == 1,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }
        return logits_BK


def compute_loss(logits_BK: torch.Tensor, targets_B2: torch.Tensor) -> torch.Tensor:
    return lever_cases.compute_loss(logits_BK, targets_B2[:, 0])


def build(*, dataset: Any = Images, model: Any = Witness, loss: Any = compute_loss, **plan: Any) -> Run:
    return lever_cases.build(model, dataset, loss=loss, **plan)


def train(run: Run, epochs: int = 1) -> dict[str, Any]:
    """Whole epochs; returns what the model saw."""
    for epoch in range(epochs):
        take_steps(run, epoch=epoch)
    return run.setup.model.seen


def load_looks(run: Run, epoch: int = 0) -> list[int]:
    """What ``look`` said for every sample of an epoch."""
    return torch.cat([targets[:, 1] for _, targets in run.start_epoch(epoch)]).tolist()


def see_in_the_model(name: str, key: str, expected: dict[Any, Any]) -> None:
    for value, seen in expected.items():
        with build(**{name: value}) as run:
            assert train(run)[key] == seen
            assert observe(run, name) == value


def see_batch_size() -> None:
    see_in_the_model("batch_size", "batch", {4: 4, 8: 8})
    with build(batch_size=4) as run:
        assert observe(run, "batch_size") == 4, "what the loader will deliver"


def see_threads() -> None:
    see_in_the_model("threads", "threads", {1: 1, 2: 2})


def see_channels_last() -> None:
    see_in_the_model("channels_last", "has_channels_innermost", {False: False, True: True})


def see_num_workers() -> None:
    for n in (0, 2):
        with build(dataset=lambda: Images(os.getpid), num_workers=n) as run:
            pids = set(load_looks(run))
            assert pids == {os.getpid()} if n == 0 else len(pids - {os.getpid()}) == n
            assert observe(run, "num_workers") == n


def see_persistent_workers() -> None:
    for value in (False, True):
        with build(dataset=lambda: Images(os.getpid), num_workers=1, persistent_workers=value) as run:
            assert (set(load_looks(run, 0)) == set(load_looks(run, 1))) is value
            assert observe(run, "persistent_workers") is value


def see_prefetch_factor() -> None:
    loaded = torch.zeros(1, dtype=torch.int64).share_memory_()

    for factor in (2, 4):
        loaded.zero_()
        dataset = Images(lambda: int(loaded.add_(1)), n_samples=80)
        with build(dataset=lambda dataset=dataset: dataset, num_workers=1, prefetch_factor=factor) as run:
            batches = run.start_epoch(0)
            next(batches)
            ahead = 8 * (1 + factor)
            deadline_s = time.monotonic() + 300
            while int(loaded) < ahead and time.monotonic() < deadline_s:
                time.sleep(0.01)
            time.sleep(0.1)
            assert int(loaded) == ahead, "one batch taken, so many ahead of it"
            assert observe(run, "prefetch_factor") == factor


def see_worker_threads() -> None:
    for n in (1, 2):
        with build(dataset=lambda: Images(torch.get_num_threads), num_workers=1, worker_threads=n) as run:
            assert observe(run, "worker_threads") is None, "no worker has started yet"
            assert set(load_looks(run)) == {n}
            assert observe(run, "worker_threads") == n


def see_pin_memory() -> None:
    """Without an accelerator there is nothing to pin for: the switch reaches the loader."""
    setup = Setup(device=torch.device("cpu"))
    CATALOGUE["pin_memory"].apply(setup, True)
    setup.loader = torch.utils.data.DataLoader(Images(), **setup.loader_options)
    assert setup.loader.pin_memory is True
    assert CATALOGUE["pin_memory"].observe(setup) is True
    with build() as run:
        train(run)
        assert observe(run, "pin_memory") is False


def see_cudnn_benchmark() -> None:
    """The flag is the process': a run that does not ask for it has it off in its steps, whatever ran before."""
    torch.backends.cudnn.benchmark = True
    with build() as run:
        assert train(run)["cudnn_benchmark"] is False
        assert observe(run, "cudnn_benchmark") is False
        CATALOGUE["cudnn_benchmark"].apply(run.setup, True)  # no plan for a CPU may ask for it
        assert train(run)["cudnn_benchmark"] is True
        assert observe(run, "cudnn_benchmark") is True


def see_deterministic() -> None:
    """An operator without a reproducible form ends the run; on a CPU few have none, put_ among them."""

    def loss(logits_BK: torch.Tensor, targets_B2: torch.Tensor) -> torch.Tensor:
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))
        return compute_loss(logits_BK, targets_B2)

    try:
        for value in (True, False):
            with build(loss=loss, deterministic=value) as run:
                assert observe(run, "deterministic") is value
                with pytest.raises(RuntimeError, match="put_") if value else contextlib.nullcontext():
                    train(run)
        assert "was on and is off" in " ".join(run.notes)
    finally:
        torch.use_deterministic_algorithms(False)


def test_settings_of_the_allocator_are_read_from_a_snapshot_where_torch_tells_them_nowhere_else(monkeypatch):
    told = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True", "expandable_segments": False}
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": told})
    assert is_expandable(read_settings()) is False
    assert read_settings().startswith("max_split_size_mb:512,")


def see_expandable_segments() -> None:
    """Without a GPU there is no such allocator: nothing is set there."""
    before = torch._C._accelerator_getAllocatorSettings()
    with build() as run:
        assert observe(run, "expandable_segments") is False
        CATALOGUE["expandable_segments"].apply(run.setup, True)
    assert torch._C._accelerator_getAllocatorSettings() == before
    # The setting itself can be made and read anywhere, beside what the environment set.
    setup = Setup(device=torch.device("cuda"))
    try:
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:512")
        CATALOGUE["expandable_segments"].apply(setup, True)
        assert torch._C._accelerator_getAllocatorSettings() == "max_split_size_mb:512,expandable_segments:True"
        CATALOGUE["expandable_segments"].apply(setup, False)
        assert is_expandable(torch._C._accelerator_getAllocatorSettings()) is False
        assert "goes without it" in setup.notes[0]
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def see_empty_cache_every() -> None:
    """The run's own steps and epochs are counted; what would be called on a GPU is recorded here."""
    calls: list[int] = []
    for value, n_expected in (("2 steps", 4), ("2 epochs", 1), (None, 0)):
        calls.clear()
        with build() as run, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
            CATALOGUE["empty_cache_every"].apply(run.setup, value)
            assert observe(run, "empty_cache_every") == value
            train(run, epochs=3)  # 9 steps
            assert len(calls) == n_expected
            report = find_reports({"empty_cache_every": value}, run.setup)
            assert bool(report) is (value is not None)
            assert all(f"{len(calls)} calls took" in line and "does not prevent" in line for line in report)


def see_precision() -> None:
    for value, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with build(precision=value) as run:
            assert train(run)["dtype"] is dtype
            assert run.setup.state["autocast_dtype"] is (None if value == "fp32" else dtype)
            assert (run.setup.scaler is not None) is (value == "fp16")
            assert observe(run, "precision") == value
    torch.set_float32_matmul_precision("high")
    with build(precision="fp32") as run:
        assert train(run)["matmul_precision"] == "highest", "an earlier plan's tf32 does not reach these steps"
        assert observe(run, "precision") == "fp32"
        CATALOGUE["precision"].apply(run.setup, "tf32")  # no plan for a CPU may ask for it
        assert train(run)["matmul_precision"] == "high"
        assert observe(run, "precision") == "tf32"


def see_activation_checkpointing() -> None:
    for value in (False, True):
        with build(activation_checkpointing=value) as run:
            assert train(run)["n_calls"] == 3
            assert [block.n_calls for block in run.setup.model.blocks] == [6, 6] if value else [3, 3]
            assert observe(run, "activation_checkpointing") is value
    with build(activation_checkpointing="blocks.1, head") as run:
        train(run)
        assert [block.n_calls for block in run.setup.model.blocks] == [3, 6]
        assert observe(run, "activation_checkpointing") == "blocks.1, head"


def see_fused_optimizer() -> None:
    class Operators(TorchDispatchMode):
        names: set[str]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.add(str(func))
            return func(*args, **(kwargs or {}))

    for value in (False, True):
        with build(fused_optimizer=value) as run, Operators() as operators:
            operators.names = set()
            train(run)
            assert any(name.startswith("aten._fused_adamw_") for name in operators.names) is value
            assert observe(run, "fused_optimizer") is value


def see_accumulate() -> None:
    for value, n_updates in ((1, 3), (3, 1)):
        with build(accumulate=value) as run:
            updates: list[int] = []
            run.setup.optimizer.register_step_post_hook(lambda *_, updates=updates: updates.append(1))
            assert train(run)["n_calls"] == 3
            assert len(updates) == n_updates
            assert observe(run, "accumulate") == value


def see_placement() -> None:
    """Every value delivers the samples of the file, and the rows really lie where it says."""
    for value in ("stream", "memory_map", "ram", "block_shuffled"):
        with tempfile.TemporaryDirectory() as folder:
            _see_placement(value, Path(folder) / "rows.h5")


def _see_placement(value: str, path: Path) -> None:
    labels = np.stack([np.arange(N_SAMPLES) % N_CLASSES, np.arange(N_SAMPLES)], axis=1)
    images, dataset = lever_cases.write_rows(path, labels)
    with build(dataset=dataset, placement=value) as run:
        assert observe(run, "placement") == value
        batches = list(run.start_epoch(0))
        rows = torch.cat([targets[:, 1] for _, targets in batches])
        assert sorted(rows.tolist()) == list(range(N_SAMPLES))
        assert np.array_equal(torch.cat([inputs for inputs, _ in batches]).numpy(), images[rows.numpy()])
        assert train(run)["batch"] == 8
        path.write_bytes(b"")
        if value == "ram":
            assert len(list(run.start_epoch(1))) == 3, "nothing is read from the file any more"
        elif value != "block_shuffled":  # whose window holds all of this small file
            with pytest.raises(DataError, match="was cut"):
                list(run.start_epoch(1))


def see_transforms() -> None:
    """Where the pixels become numbers: bytes leave the loader and reach the model as the loader would give them."""
    images = torch.randint(0, 256, (N_SAMPLES, 2, 6, 6), dtype=torch.uint8)
    targets = torch.stack([torch.arange(N_SAMPLES) % N_CLASSES, torch.arange(N_SAMPLES)], dim=1)
    pipeline = build_pipeline("normalize(mean=[0.5], std=[0.5])")
    dataset = MemoryImages("own", images, targets, classes="abc", transform=pipeline)
    reached: dict[str, list[torch.Tensor]] = {"loader": [], "device": []}
    for value, dtype in (("loader", torch.float32), ("device", torch.uint8)):
        with build(dataset=lambda: dataset, transforms=value) as run:
            assert observe(run, "transforms") == value
            batch, _ = next(run.start_epoch(0))
            assert batch.dtype is dtype
            run.setup.model.register_forward_pre_hook(
                lambda _, inputs, kept=reached[value]: kept.append(inputs[0].clone())
            )
            train(run)
            assert observe(run, "transforms") == value
    assert torch.equal(reached["loader"][0], reached["device"][0])


def see_device_prefetch() -> None:
    """Without a GPU there is nothing to copy to; test_engine_prefetch.py sees the copies of a fake."""
    with build() as run:
        train(run)
        assert observe(run, "device_prefetch") is False
        assert run.lane is None


SEEN_ELSEWHERE = {
    "compile": "test_levers_compile.py::test_evaluation_and_counting_compile_nothing",
    "retain_freed_memory": "test_levers_retain_freed_memory.py::test_asking_under_a_memory_limit_changes_nothing",
    "thread_affinity": "test_levers_thread_affinity.py::test_each_thread_has_a_core_of_its_own_until_the_run_ends",
    "wait_policy": (
        "test_levers_wait_policy.py::"
        "test_a_passive_thread_sleeps_at_once_an_active_one_never_and_by_default_it_spins_first"
    ),
}


# Inductor imports a part of torch that uses torch's own deprecated decorator.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", CATALOGUE)
def test_lever_changes_the_run(name: str) -> None:
    if name in SEEN_ELSEWHERE:
        assert is_defined(SEEN_ELSEWHERE[name])
        return
    assert f"see_{name}" in globals(), f"lever {name} has no effect case: write see_{name}"
    globals()[f"see_{name}"]()
