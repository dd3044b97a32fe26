"""What a lever is: data about one performance switch, and the few functions that apply and read it.

A lever lives in one file of this folder that defines ``LEVER``; the catalogue finds it there. Nothing in
these files imports torch at the top: only ``apply`` and ``observe`` may, when they run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

Stage = Literal["environment", "loader", "model", "compile", "optimizer", "step", "loop"]
STAGES: tuple[Stage, ...] = ("environment", "loader", "model", "compile", "optimizer", "step", "loop")
"""The order in which the engine applies levers; what a stage may touch is said in ``Setup``."""

Trade = Literal["speed", "memory", "numerics", "recipe", "reproducibility"]
Exactness = Literal["equal", "within tolerance", "another recipe"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a guard may know. ``None`` is "not known (yet)": a guard then lets the value pass."""

    device_type: str  # "cpu" or "cuda"
    compute_capability: tuple[int, int] | None = None
    n_cores_usable: int = 1
    is_wsl: bool = False
    has_c_compiler: bool | None = None
    has_conv: bool | None = None  # 2-d convolutions in the model
    n_checkpointable: int | None = None  # blocks that activation checkpointing can wrap
    optimizer: str | None = None  # class name, "AdamW"
    n_samples: int | None = None  # length of the training set
    is_iterable: bool | None = None  # an IterableDataset
    has_any_conv: bool | None = None  # convolutions of any dimension
    has_native_bf16: bool | None = None  # bf16 arithmetic in hardware, not emulated
    placements: tuple[str, ...] | None = None  # values of the lever that this kind of dataset can take
    data_bytes: int | None = None  # all rows of the training set held in memory; of datasets that are tables of rows
    # Readings of the moment, left out of comparisons: what this process can still take of host memory, its control
    # group's limit included, and of the device's (None on a CPU).
    free_ram_bytes: int | None = dataclasses.field(default=None, compare=False)
    free_device_bytes: int | None = dataclasses.field(default=None, compare=False)
    transforms: Literal["none", "pipeline", "own"] | None = None  # of the training set: "own" is a user's callable
    is_held: bool | None = None  # the training set lies in host memory as it is; placement stream reads it there
    n_ranks: int = 1  # processes that train together and divide each micro-batch
    n_blocks_mixed: int | None = None  # blocks in a window of block shuffle, None where that is a full shuffle


@dataclasses.dataclass(kw_only=True, slots=True)
class Setup:
    """A training run under construction. Each stage may touch only its own part; the engine fills the rest.

    environment: process-wide switches of torch. loader: ``loader_options`` (keywords of DataLoader) and
    ``worker_options``. model: ``model`` in place or replaced, already on the device. compile: ``forward``.
    optimizer: ``optimizer``, already built. step: ``autocast_dtype``, ``scaler``, ``input_memory_format``.
    loop: ``accumulate``, ``epoch_hooks``, step hooks of ``optimizer``.
    """

    device: Any  # torch.device
    loader_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    worker_options: dict[str, Any] = dataclasses.field(default_factory=dict)  # "threads": per data worker
    model: Any = None  # nn.Module
    forward: Callable[..., Any] | None = None  # what the step calls: the model, or its compiled form
    optimizer: Any = None  # torch.optim.Optimizer
    autocast_dtype: Any = None  # torch.dtype, None: no autocast
    scaler: Any = None  # torch.amp.GradScaler, None: no scaling
    input_memory_format: Any = None  # torch.memory_format for 4-d inputs
    accumulate: int = 1
    epoch_hooks: list[Callable[[int], None]] = dataclasses.field(default_factory=list)  # told an epoch as it starts
    loader: Any = None  # the DataLoader, once built: for observe
    notes: list[str] = dataclasses.field(default_factory=list)  # fallbacks taken, said to the user
    state: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # what the first step saw, and levers' own: for observe


def _no_guard(value: Any, plan: Mapping[str, Any], facts: Facts) -> str | None:
    return None


def _no_needs(value: Any, facts: Facts) -> Mapping[str, Any]:
    return {}


def _no_report(setup: Setup) -> str | None:
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """One performance switch.

    Attributes:
        name: Its name in a Plan.
        key: Its key in the configuration, "data.num_workers".
        aliases: Other spellings that the configuration accepts, dotted or bare: "use_amp".
        type: The Python type of a value, as the configuration schema states it.
        default: The value when nobody says anything: PyTorch's own default behaviour.
        summary: One sentence: what it does.
        doc: What it trades, when it helps, when it hurts, with figures and their source.
        trades: What may change besides speed.
        recipe_values: Values that change what is learned where the lever's others do not; ``trades`` is without
            "recipe" then, and ``candidates`` never offers them.
        stage: When the engine applies it.
        restart: True when it cannot change inside a living process.
        unit: Unit of the value, None for a switch.
        candidates: Values worth trying on this machine when the user names none. Cheapest first.
        guard: Why the value cannot apply in this plan on this machine; None when it can.
        apply: Puts the value into the Setup.
        observe: Reads the value really in force back from a built run; the effect tests and every trial use it.
        needs: Values of other levers without which the value cannot apply here: a search moves them together.
        complexity: Of two tied plans the one with the smaller sum is the simpler one.
        parse_alias: Turns an alias' value into a value of this lever (``use_amp: true``).
        note: What the user should know about the value in this plan on this machine, though it applies; None: nothing.
        report: What a run measured of the value that was in force, for its end; None: nothing.
        is_offered: False: a search tries it only when the user names it, and no advice mentions it; it is no way to
            more speed.
    """

    name: str
    key: str
    type: Any
    default: Any
    summary: str
    doc: str
    trades: tuple[Trade, ...]
    stage: Stage
    restart: bool
    apply: Callable[[Setup, Any], None]
    observe: Callable[[Setup], Any]
    candidates: Callable[[Facts], Sequence[Any]]
    recipe_values: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()
    unit: str | None = None
    guard: Callable[[Any, Mapping[str, Any], Facts], str | None] = _no_guard
    needs: Callable[[Any, Facts], Mapping[str, Any]] = _no_needs
    complexity: Callable[[Any], float] = float
    parse_alias: Callable[[str, Any], Any] | None = None
    note: Callable[[Any, Mapping[str, Any], Facts], str | None] = _no_guard
    report: Callable[[Setup], str | None] = _no_report
    is_offered: bool = True

    @property
    def exactness(self) -> Exactness:
        """How losses and weights with one value compare to those with another, all else the same.

        Values of ``recipe_values`` are left out; the tests hold every lever to what this says.
        """
        if "recipe" in self.trades:
            return "another recipe"
        return "within tolerance" if "numerics" in self.trades else "equal"

    def changes_recipe(self, value: Any) -> bool:
        """Whether ``value`` may train on another recipe than the lever's other values do."""
        return "recipe" in self.trades or value in self.recipe_values
