"""Define the configuration as a frozen pydantic model, whose fields of levers come from the catalogue."""

import hashlib
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationInfo,
    create_model,
    field_validator,
)

from fulltilt.config.bad_samples import parse_on_bad_sample
from fulltilt.config.calls import parse_call, parse_pipeline
from fulltilt.config.hints import admits, describe_type
from fulltilt.config.quantities import parse_interval, parse_warmup
from fulltilt.errors import ConfigError, format_nearest
from fulltilt.levers import Lever, load_catalogue, load_inference_catalogue

MAX_NAME_BYTES = 200  # file systems take 255, and a folder's name gets a number
CONFIG_ONLY: Mapping[str, tuple[str, ...]] = {"precision": ("auto",), "placement": ("auto",)}
"""Values a lever takes in a configuration and never in a Plan; the engine resolves them on the device."""


def _check(parse: Any) -> AfterValidator:
    """Build a validator that keeps the value as the user wrote it, once ``parse`` has read it."""

    def check(value: Any) -> Any:
        try:
            parse(value)
        except ConfigError as error:
            raise ValueError(error.message) from None
        return value

    return AfterValidator(check)


def _check_device(device: str | int | list[int]) -> str | int | list[int]:
    if isinstance(device, str):
        kind, _, index = device.partition(":")
        if kind in ("tpu", "xla", "mps", "rocm", "xpu"):
            raise ValueError(f"{kind} is not supported; devices are auto, cpu, cuda, cuda:1 or a list like [0, 1]")
        if kind not in ("auto", "cpu", "cuda") or (":" in device and not (kind == "cuda" and index.isdecimal())):
            raise ValueError("expected auto, cpu, cuda, cuda:1, or a list of GPU numbers like [0, 1]")
    elif isinstance(device, list) and len(set(device)) < len(device):
        raise ValueError("names a GPU twice")
    return device


Call = Annotated[str, _check(parse_call)]
Pipeline = Annotated[str, _check(parse_pipeline)]
Text = Annotated[str, Field(coerce_numbers_to_str=True)]


def _check_folder_name(name: str) -> str:
    if not name.strip() or name in (".", "..") or "/" in name or "\\" in name:
        raise ValueError("names a folder of its own: give one word, without / and \\; --out says where else")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"has {len(name.encode())} bytes, and names a folder; give one of {MAX_NAME_BYTES} or less")
    return name


def _refuse_figures(value: Any) -> Any:
    if isinstance(value, Mapping):
        raise ValueError(
            "holds figures, as an earlier version wrote them, and has to name a file; remove it: the next "
            "fulltilt tune --apply writes one"
        )
    return value


FolderName = Annotated[Text, AfterValidator(_check_folder_name)]
Every = Annotated[Text | None, _check(parse_interval)]
WarmupValue = Annotated[int | float | str, _check(parse_warmup)]
PositiveFloat = Annotated[float, Gt(0)]
NaturalFloat = Annotated[float, Ge(0)]
Decay = Annotated[float, Gt(0), Lt(1)]
PositiveInt = Annotated[int, Ge(1)]
NaturalInt = Annotated[int, Ge(0)]
PositiveInts = Annotated[list[PositiveInt], Field(min_length=1)]
NaturalInts = Annotated[list[NaturalInt], Field(min_length=1)]
DeviceValue = Annotated[str | NaturalInt | NaturalInts, AfterValidator(_check_device)]
Seed = Annotated[int, Ge(0), Lt(2**32)]  # what every generator takes
LoggerName = Literal["csv", "tensorboard", "mlflow", "wandb"]
Percentile = Literal["p50", "p90", "p95", "p99", "mean", "max"]
Latency = Annotated[dict[Percentile, PositiveFloat], Field(min_length=1)]


def _holds_bool(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, bool) or any(map(_holds_bool, inside))


class Section(BaseModel):
    """Refuses unknown keys, infinities, and true and false where numbers belong."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        hint = cls.model_fields[str(info.field_name)].annotation
        is_section = isinstance(hint, type) and issubclass(hint, BaseModel)
        if not is_section and _holds_bool(value) and not admits(hint, bool, Any, deep=True):
            raise ValueError("true and false are not numbers")
        return value

    if TYPE_CHECKING:  # the generated fields of levers

        def __getattr__(self, name: str) -> Any: ...


def _key(default: Any, description: str) -> Any:
    return Field(default=default, description=description)


class Transform(Section):
    train: Pipeline | None = _key(None, "Transforms of training samples, `a | b(c=1)`.")
    val: Pipeline | None = _key(None, "Transforms of validation samples.")


class _Data(Section):
    dataset: Call | None = _key(None, "The dataset as a component call, `cifar10(root=data)`.")
    path: str | None = _key(None, "File or folder of the data; goes to the dataset as `path`.")
    val_dataset: Call | None = _key(None, "Validation dataset; null: `dataset` with `split=val`.")
    transform: Transform = Transform()
    mix: Pipeline | None = _key(
        None, "Mix training images in pairs: `mixup(alpha=0.2)`, `cutmix(alpha=1)`; `a | b`: one of them."
    )
    on_bad_sample: Annotated[str, _check(parse_on_bad_sample)] = _key(
        "stop",
        "A sample that cannot be read: `stop`, or `skip(limit=100)`: another one of its batch stands in for "
        "each of so many, told by name. On one device, and batches only: an error where all samples are read "
        "beforehand (placement ram, device) or encoded to features.",
    )
    shuffle: bool = _key(True, "Shuffle the training set anew every epoch.")
    drop_last: bool = _key(False, "Leave out the last, shorter training batch.")
    val_batch_size: PositiveInt | None = _key(
        None, "Samples of a validation batch; null: batch_size. Less where it does not fit."
    )


class Optim(Section):
    optimizer: Call = _key("adamw", "The optimizer as a component call, `sgd(momentum=0.9)`.")
    lr: PositiveFloat = _key(1e-3, "Learning rate after warm-up.")
    weight_decay: NaturalFloat | None = _key(None, "Weight decay; null: the optimizer's own default.")
    schedule: Call = _key("constant", "Learning rate over time: constant, cosine, linear, step(…).")
    warmup: WarmupValue = _key(0, "Warm-up: steps (500), epochs ('1 epoch') or a fraction (0.05).")
    clip_norm: PositiveFloat | None = _key(None, "Largest gradient norm; null: no clipping.")
    ema: Decay | None = _key(None, "Decay of a running average of the weights (0.999), which is evaluated; null: none.")


class _Speed(Section):
    shard: Literal["auto", "none", "full"] = _key(
        "auto",
        "Over several devices: every one holds the weights (none) or a part of them (full, FSDP2); auto: full where "
        "they would not fit.",
    )
    static_graph: bool = _key(
        True, "Over several devices: the same weights take part in every step; false: look each time."
    )


class _RunSection(Section):
    name: FolderName | None = _key(None, "Name of the run, and of its folder; null: the name of the file.")
    epochs: PositiveInt = _key(10, "Passes over the training set.")
    device: DeviceValue = _key("auto", "auto, cpu, cuda, cuda:1, or a list of GPU numbers.")
    n_ranks: PositiveInt | None = _key(
        None, "Training processes, one a device (on `cpu` any number); null: as `device` says."
    )
    max_restarts: NaturalInt = _key(0, "Restarts from the newest checkpoint when a training process dies or hangs.")
    hang_timeout_s: PositiveFloat | None = _key(
        None,
        "Seconds that one training process may stand still while the others wait for it; null: 20, with "
        "compile 600. Before its first step `start_timeout_s` holds, if that is more.",
    )
    start_timeout_s: PositiveFloat = _key(
        600.0, "Seconds that one training process may need to start and take a step while others wait for it."
    )
    seed: Seed = _key(42, "Seed of initialisation, order and augmentation.")
    checkpoint_every: Every = _key("1 epoch", "'1 epoch', '500 steps' or null.")
    evaluate_every: Every = _key("1 epoch", "'1 epoch', '500 steps' or null.")
    log_every_n_steps: PositiveInt = _key(10, "Optimizer steps between two log lines.")
    loggers: list[LoggerName] = _key(["csv"], "Who takes the curves: csv, tensorboard, mlflow, wandb.")
    on_out_of_memory: Literal["replan", "stop"] = _key(
        "replan",
        "Go on from the last step with the largest smaller micro-batch that divides the effective batch, "
        "and more accumulation, on a CPU in a fresh process; or stop. Runs over several devices go on from the newest "
        "checkpoint. Streams that several workers share or that drop their last batch always stop, and so do runs that "
        "torchrun started.",
    )
    on_full_disk: Literal["stop", "continue"] = _key(
        "stop",
        "When a checkpoint cannot be written; the one before is kept either way. The last one of a run has "
        "to be written: without it the run ends as failed.",
    )
    async_checkpoint: bool = _key(
        False,
        "Write checkpoints beside training, from a copy in host memory. Where every core trains this "
        "stalls training longer than writing them between steps, with a core left to the writer a third as long "
        "(benchmarks/results/checkpoint_stall-cpu.json in the repository); it was not measured on a GPU.",
    )
    promise: Annotated[Text | None, BeforeValidator(_refuse_figures)] = _key(
        None,
        "File with the speed that `tune --apply` measured, of all training processes together; `train` with as many "
        "says when it falls out of it, and why.",
    )


class Benchmark(Section):
    batch_sizes: PositiveInts | None = _key(None, "Batch sizes to try; naming them frees the effective batch.")
    num_workers_options: NaturalInts | None = _key(None, "Worker counts to try; null: from the machine.")
    steps_per_test: PositiveInt = _key(10, "Timed optimizer steps per trial, at least.")
    test_mixed_precision: bool | None = _key(None, "Try mixed precision; null: the tuner decides.")
    test_pin_memory: bool | None = _key(None, "Try pinned memory; null: the tuner decides.")
    levers: dict[str, Annotated[list[Any], Field(min_length=1)]] | None = _key(
        None,
        "Values to try of further levers, `{compile: [false, true]}`; null: what suits the machine, of every lever "
        "that leaves the recipe alone (with `--exhaustive` and `--quick`, none).",
    )

    @field_validator("levers")
    @classmethod
    def _check_levers(cls, levers: dict[str, list[Any]] | None) -> dict[str, list[Any]] | None:
        if levers is None:
            return None
        catalogue = load_catalogue()
        for name in levers.keys() - catalogue.keys():
            raise ValueError(f"no lever named {name!r}; {format_nearest(name, catalogue)}")
        return {name: [_check_lever_value(catalogue[name], v) for v in values] for name, values in levers.items()}


class Targets(Section):
    batch_latency_ms: Latency | None = _key(
        None, "Largest time of one batch in the model under the load, `{p99: 100}`."
    )
    memory_gib: PositiveFloat | None = _key(None, "Most memory of the device used.")
    samples_per_hour: PositiveFloat | None = _key(None, "Smallest throughput, batch after batch.")
    response_s: Latency | None = _key(None, "Largest time from scheduled arrival to answer under the load, `{p95: 2}`.")
    first_token_s: Latency | None = _key(
        None, "Of models that write text: largest time from scheduled arrival to the first new word, `{p95: 0.5}`."
    )
    tokens_per_s: PositiveFloat | None = _key(
        None, "Of models that write text: smallest rate of new words, request after request."
    )
    new_tokens: PositiveInt = _key(64, "Of models that write text: new words that a request asks for.")
    scenario: Literal["server", "single", "multi", "offline"] = _key(
        "server",
        "How requests arrive, as MLPerf has it. `server`: at random times (Poisson); `single`: each when the one "
        "before is answered; `multi`: so, with 8 samples; `offline`: all at once.",
    )
    requests_per_s: PositiveFloat | None = _key(
        None,
        "The load of a server: requests that arrive a second. `batch_latency_ms`, `response_s` and "
        "`first_token_s` need it.",
    )
    samples_per_request: PositiveInt | None = _key(
        None, "Samples of a request, one batch; null: `data.batch_size`, 1 of `single`, 8 of `multi`."
    )


class _Inference(Section):
    max_length: PositiveInt | None = _key(
        None, "Longest sample that is answered; null: the longest of the validation data that were looked at."
    )
    min_sqnr_db: PositiveFloat = _key(
        25.0,
        "Power of the outputs over that of their error against eager fp32, in decibels, that an artefact has at least.",
    )
    max_metric_drop_pct: NaturalFloat = _key(
        1.0, "Most that the workload's metric may lose against eager fp32, whole interval, as a share of its value."
    )


def _check_lever_value(lever: Lever, value: Any) -> Any:
    try:
        if isinstance(value, bool) and not admits(lever.type, bool, Any):
            raise ValueError
        return TypeAdapter(lever.type).validate_python(value)
    except ValueError:
        raise ValueError(f"{lever.name}: {value!r}: expected {describe_type(lever.type)}") from None


def _lever_fields(section: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for lever in (*load_catalogue().values(), *load_inference_catalogue().values()):
        home, _, name = lever.key.partition(".")
        if home == section and name not in fields:
            extra = CONFIG_ONLY.get(lever.name, ())
            hint = typing.Union[(lever.type, Literal[extra])] if extra else lever.type  # noqa: UP007
            fields[name] = (hint, Field(lever.default, description=lever.summary))
    return fields


if TYPE_CHECKING:

    class Data(_Data): ...

    class Speed(_Speed): ...

    class RunSection(_RunSection): ...

    class Inference(_Inference): ...
else:
    Data = create_model("Data", __base__=_Data, **_lever_fields("data"))
    Speed = create_model("Speed", __base__=_Speed, **_lever_fields("speed"))
    RunSection = create_model("RunSection", __base__=_RunSection, **_lever_fields("run"))
    Inference = create_model("Inference", __base__=_Inference, **_lever_fields("inference"))


class Config(Section):
    """Holds a validated, resolved configuration, in which no alias, no reference and no grid is left.

    Two are equal when their values and their ``base_dir`` are.

    Attributes:
        provenance: Where each value came from, by dotted key: "file:line", "command line", "default",
            "alias use_amp (file:line)".
        base_dir: The folder that relative paths in the values start from.
        source: The file, when there was one.
    """

    task: Call = _key("classification", "classification, diffusion, … or module:object.")
    model: Call | None = _key(None, "`wideresnet(depth=28)`, `timm:convnext_tiny`, `my_module:build`.")
    loss: Call | None = _key(None, "The loss as a component call; null: the task's own.")
    data: Data = Data()
    optim: Optim = Optim()
    speed: Speed = Speed()
    run: RunSection = RunSection()
    benchmark: Benchmark = Benchmark()
    targets: Targets = Targets()
    inference: Inference = Inference()

    _base_dir: str = PrivateAttr("")
    _source: str | None = PrivateAttr(None)
    _provenance: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def base_dir(self) -> str:
        return self._base_dir

    @property
    def source(self) -> str | None:
        return self._source

    @property
    def run_name(self) -> str:
        """Return the configured name of the run, else that of the file, else that of the task."""
        file = Path(self._source).stem if self._source else None
        return self.run.name or file or parse_call(self.task).name.replace(":", "_")

    @property
    def provenance(self) -> dict[str, str]:
        return dict(self._provenance)

    def to_values(self) -> dict[str, Any]:
        """Return plain, JSON-ready values, of which ``config_from_values`` makes an equal Config."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """Return a stable hash of the values, without the folder they lie in and what a search promised."""
        values = self.to_values()
        values["run"].pop("promise")
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.base_dir == other.base_dir and self.to_values() == other.to_values()

    def __hash__(self) -> int:
        return hash((self.digest, self.base_dir))


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a resolved configuration in its canonical spelling."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
