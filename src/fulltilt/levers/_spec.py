"""A lever is one performance switch: its description, and the functions that apply it and read it back.

Each file of this folder that defines ``LEVER`` is one. None imports torch at the top: ``apply`` and ``observe`` do.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge

Stage = Literal["environment", "loader", "model", "compile", "optimizer", "step", "loop"]
STAGES: tuple[Stage, ...] = ("environment", "loader", "model", "compile", "optimizer", "step", "loop")
"""The order in which the engine applies levers; ``Setup`` says what each stage may change."""

Trade = Literal["speed", "memory", "numerics", "recipe", "reproducibility"]
Exactness = Literal["equal", "within tolerance", "another recipe"]
PlanValues: TypeAlias = Mapping[str, Any]  # lever name → value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of machine, model and data. A guard lets a value pass where a fact is ``None`` (unknown)."""

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
    n_threads: int | None = None  # of one operator on the CPU, as torch starts
    n_blocks_mixed: int | None = None  # blocks in a window of block shuffle, None where that is a full shuffle
    has_linear: bool | None = None  # linear or recurrent layers, which quantization changes
    has_attention: bool | None = None  # calls of scaled_dot_product_attention
    packages: tuple[str, ...] | None = None  # optional ones of inference that are installed


@dataclasses.dataclass(kw_only=True, slots=True)
class Setup:
    """A training run under construction. Each stage changes only its own part; the engine fills in the rest.

    environment: process-wide switches of torch. loader: ``loader_options`` (keywords of DataLoader) and
    ``worker_options``. model: ``model`` in place or replaced, already on the device. compile: ``forward``.
    optimizer: ``optimizer``, already built. step: ``autocast_dtype``, ``scaler``, ``input_memory_format``.
    loop: ``accumulate``, ``epoch_hooks``, ``exit_hooks``, step hooks of ``optimizer``.
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
    exit_hooks: list[Callable[[], None]] = dataclasses.field(default_factory=list)  # called when the run has ended
    loader: Any = None  # the DataLoader, once built: for observe
    notes: list[str] = dataclasses.field(default_factory=list)  # fallbacks taken, said to the user
    # What the first step saw, and what levers keep for themselves: for observe.
    state: dict[str, Any] = dataclasses.field(default_factory=dict)


AtLeastOne: TypeAlias = Annotated[int, Ge(1)]
Count: TypeAlias = AtLeastOne | None


def set_loader_option(name: str) -> Callable[[Setup, Any], None]:
    """Build the ``apply`` of a lever whose value is a keyword of the DataLoader."""
    return lambda setup, value: setup.loader_options.update({name: value})


def note_choice(name: str) -> Callable[[Setup, Any], None]:
    """Build the ``apply`` of a lever that what builds the run carries out: it finds the value in ``state``."""
    return lambda setup, value: setup.state.update({name: value})


def _say_nothing(*_: Any) -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """One performance switch, on or off unless ``type`` says otherwise."""

    name: str  # in a Plan
    key: str  # in the configuration: "data.num_workers"
    summary: str  # one sentence: what it does
    doc: str  # what it trades, when it helps, when it hurts, with figures and their source
    trades: tuple[Trade, ...]  # what may change
    stage: Stage  # when the engine applies it
    apply: Callable[[Setup, Any], None]  # puts the value into the Setup
    observe: Callable[[Setup], Any]  # reads the value in force back from a built run, in every trial
    type: Any = bool  # of a value, for the configuration schema
    default: Any = False  # PyTorch's own behaviour
    unit: str | None = None  # of the value, None for a switch
    restart: bool = False  # whether the value can only change with a new process
    # Variables of a value that a process has to have before it loads torch.
    environment: Callable[[Any], Mapping[str, str]] = lambda value: {}
    # Values worth trying on this machine when the user names none, cheapest first.
    candidates: Callable[[Facts], Sequence[Any]] = lambda facts: (False,)
    # Values that change what is learned where the others do not; never among ``candidates``.
    recipe_values: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()  # other spellings that the configuration accepts, dotted or bare: "use_amp"
    parse_alias: Callable[[str, Any], Any] | None = None  # turns an alias' value into one of this lever
    # Why a value cannot apply here, and what to know about one that does; neither is asked of None and False.
    obstacle: Callable[[Any, PlanValues, Facts], str | None] = _say_nothing
    remark: Callable[[Any, PlanValues, Facts], str | None] = _say_nothing
    report: Callable[[Setup], str | None] = _say_nothing  # what a run measured of the value, at its end
    # Values of other levers that this value depends on here: a search moves them together.
    needs: Callable[[Any, Facts], PlanValues] = lambda value, facts: {}
    complexity: Callable[[Any], float] = float  # a tie between two plans goes to the one with the smaller sum
    is_offered: bool = True  # False: a search tries it only when the user names it, and no advice mentions it

    @property
    def exactness(self) -> Exactness:
        """How losses and weights with one value compare to those with another; ``recipe_values`` are left out."""
        if "recipe" in self.trades:
            return "another recipe"
        return "within tolerance" if "numerics" in self.trades else "equal"

    def guard(self, value: Any, plan: PlanValues, facts: Facts) -> str | None:
        """Say why the value cannot apply here; a switch that is off always can."""
        return None if value is None or value is False else self.obstacle(value, plan, facts)

    def note(self, value: Any, plan: PlanValues, facts: Facts) -> str | None:
        """Say what to know about a value that applies."""
        return None if value is None or value is False else self.remark(value, plan, facts)

    def changes_recipe(self, value: Any) -> bool:
        """Whether ``value`` may change what is learned, compared with the lever's other values."""
        return "recipe" in self.trades or value in self.recipe_values
