"""Read one side of a comparison, a result file or a run folder, into the same shape for every kind.

Kinds: ``tune`` (its JSON, or its folder), ``train`` (its JSON, or its folder, which says more), ``benchmark`` (a result
file of ``python -m benchmarks``).
"""

import dataclasses
import functools
import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fulltilt.errors import UsageError, strip_control_codes
from fulltilt.records import IN_TURNS, VERSION
from fulltilt.records.run_folder import read_lines
from fulltilt.records.settings import flatten_settings
from fulltilt.report.quality import Curve, find_direction
from fulltilt.report.table import read_memory_gib
from fulltilt.report.training import EVENTS_FILE, drop_repeated

RESULT_FILE = "tune.json"
Kind = Literal["tune", "train", "benchmark"]
Better = Literal["higher", "lower"]

_MARKS: Mapping[Kind, tuple[str, ...]] = {
    "tune": ("trials", "picks"),
    "train": ("training_seconds", "samples_per_s", "reason"),
    "benchmark": ("arms", "claim"),
}
_RECIPE = ("task", "model", "loss", "data", "optim")  # of a configuration: what decides how a run learns
_IDENTITY = ("hostname_hash", "cpu_model", "n_cores_usable", "memory_total_bytes", "memory_limit_bytes", "system")
_BETTER: Mapping[str | None, Better | None] = {"rising": "higher", "falling": "lower", None: None}
ONE_RUN: Mapping[str, Any] = {"unit_of_replication": "run", "n_runs": 1}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Something measured, with its independent repetitions.

    Attributes:
        name: With its unit, such as "recommended: samples_per_s".
        samples: One value per repetition.
        unit_of_replication: What a repetition is: "run in a process of its own", "epoch of one run".
        n_runs: Runs the samples come from; with one, they say nothing about how runs differ.
        better: Which direction is better; None where that is not known.
        shown: The value that the search's own table shows, of one whole run; None where it is no figure of a search.

    Raises:
        ValueError: a sample is not a finite number.
    """

    name: str
    samples: tuple[float, ...]
    unit_of_replication: str
    n_runs: int
    better: Better | None = None
    shown: float | None = None

    def __post_init__(self) -> None:
        for sample in self.samples:
            if not isinstance(sample, int | float) or not math.isfinite(sample):
                raise ValueError(f"{self.name} is {sample!r}, and no number")

    @property
    def statistic(self) -> Literal["one value", "geometric mean", "median"]:
        """Name what ``value`` is; values that are not above 0 have no geometric mean."""
        if len(self.samples) == 1:
            return "one value"
        return "geometric mean" if min(self.samples) > 0 else "median"

    @property
    def value(self) -> float:
        """Compute the samples as one figure."""
        is_mean = self.statistic == "geometric mean"
        return (statistics.geometric_mean if is_mean else statistics.median)(self.samples)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """What one file or folder holds.

    Attributes:
        identity: What must be the same for speeds to be of one machine; None where the file does not say.
        versions, workload: By name, as far as the file says.
        plans: By pick, and "settings as they were"; "run" for a training run.
        rates_by_plan: Median samples per second of every plan that ran as a whole, by its JSON text.
        curves: Of a training: metric → quality over training seconds, evaluation by evaluation.
        digest: Of the file that was read: the same for a copy of it.
    """

    path: str
    kind: Kind
    name: str
    identity: Mapping[str, Any] | None = None
    versions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    workload: Mapping[str, Any]
    plans: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    figures: tuple[Figure, ...]
    rates_by_plan: Mapping[str, float] = dataclasses.field(default_factory=dict)
    curves: Mapping[str, Curve] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    digest: str = ""


def read_side(path: str | Path) -> Side:
    """Read a result file or a run folder.

    Raises:
        UsageError: it is not there, is no JSON, is of another version, or is not a whole result.
    """
    file = _find_file(Path(path))
    kind: Kind = "train"
    read = functools.partial(_read_train_folder, file.parent)
    if file.name != EVENTS_FILE:
        document = _load(file)
        kind = _find_kind(file, document)
        readers = {"tune": _read_tune, "train": _read_train, "benchmark": _read_benchmark}
        read = functools.partial(readers[kind], file, document)
    try:
        side = read()
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise UsageError(
            f"{path} looks like the result of {kind}, but is not whole: {error!r}; make the result again"
        ) from None
    with file.open("rb") as stream:
        return dataclasses.replace(side, digest=hashlib.file_digest(stream, "sha256").hexdigest())


def _find_file(place: Path) -> Path:
    """Find the file of a run folder to read; any other place is one itself."""
    if not place.is_dir():
        return place
    for name in (RESULT_FILE, EVENTS_FILE):
        if (place / name).exists():
            return place / name
    raise UsageError(
        f"{place} holds neither {RESULT_FILE} nor {EVENTS_FILE}; name the folder of a search or a training"
    )


def _load(path: Path) -> Any:
    try:
        return _strip(json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant))
    except FileNotFoundError:
        raise UsageError(f"there is no file or folder {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON ({error}); give a file that --json wrote") from None


def _strip(value: Any) -> Any:
    """Remove what would steer a terminal from all texts: a file may come from somebody else."""
    if isinstance(value, Mapping):
        return {strip_control_codes(key): _strip(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_strip(inner) for inner in value]
    return strip_control_codes(value) if isinstance(value, str) else value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no value of JSON")


def _find_kind(path: Path, document: Any) -> Kind:
    known = document if isinstance(document, Mapping) else {}
    if "error" in known and "rc" in known:
        raise UsageError(f"{path} says why {known.get('command') or 'a command'} has no result: {known['error']}")
    kinds: list[Kind] = [kind for kind, keys in _MARKS.items() if all(key in known for key in keys)]
    if not kinds:
        raise UsageError(f"{path} is no result of {', '.join(_MARKS)}; give what --json wrote, or a run folder")
    version = known.get("version", VERSION)
    if version != VERSION:
        raise UsageError(
            f"{path} is of version {version!r} of the result format, this fulltilt reads version {VERSION}; compare it "
            "with the fulltilt that wrote it, or make the result again"
        )
    return kinds[0]


def _read_tune(path: Path, document: Mapping[str, Any]) -> Side:
    machine = document["machine"]
    ok = [row for row in (*document["trials"], *document.get("repeats", ())) if row["status"] == "ok"]
    rows = [row for row in ok if row.get("samples_per_s")]
    picks = {name: pick for name, pick in document["picks"].items() if pick}
    rates = {row["id"]: row["samples_per_s"] for row in rows}
    if changed := [name for name, pick in picks.items() if rates.get(pick["id"]) != pick["samples_per_s"]]:
        raise ValueError(f"no row has the id and the rate of the pick {changed[0]}")
    by_plan: dict[str, list[float]] = {}
    for row in rows:
        by_plan.setdefault(json.dumps(row["plan"], sort_keys=True), []).append(row["samples_per_s"])
    plans = {name: pick["plan"] for name, pick in picks.items()}
    first_picks = sorted(picks, key=lambda name: name != "recommended")
    return Side(
        path=str(path),
        kind="tune",
        name=document["workload"]["name"],
        identity=_read_identity(machine),
        versions={"python": machine.get("python"), **machine.get("packages", {})},
        workload=document["workload"],
        plans=plans | {"settings as they were": document.get("user_plan") or {}},
        figures=tuple(figure for name in first_picks for figure in _read_pick(name, picks[name], rows, document)),
        rates_by_plan={plan: statistics.median(rates) for plan, rates in by_plan.items()},
    )


def _read_pick(
    name: str, pick: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], document: Mapping[str, Any]
) -> Iterator[Figure]:
    """Yield speed, memory and, for the recommended plan, time of an epoch, run by run.

    Where a plan took turns with others, the run that made it a finalist does not count: it was chosen for being fast.
    """
    turns = [row for row in rows if row["plan"] == pick["plan"] and row.get("kind") == IN_TURNS]
    own = turns or [pick]
    rates, rate = tuple(row["samples_per_s"] for row in own), pick["samples_per_s"]
    shared: dict[str, Any] = {"unit_of_replication": "run in a process of its own", "n_runs": len(own)}
    yield Figure(name=f"{name}: samples_per_s", samples=rates, better="higher", shown=rate, **shared)
    if memory_gib := read_memory_gib(pick):
        yield Figure(name=f"{name}: memory_gib", samples=(memory_gib,), better="lower", shown=memory_gib, **ONE_RUN)
    estimate_s = (document.get("epoch_seconds") or {}).get("estimate")
    if name == "recommended" and estimate_s and rate:
        n_samples = document["workload"].get("n_samples") or estimate_s * rate
        seconds = tuple(n_samples / each for each in rates)
        yield Figure(name=f"{name}: epoch_seconds", samples=seconds, better="lower", shown=estimate_s, **shared)


def _read_train(path: Path, document: Mapping[str, Any]) -> Side:
    rate = document["samples_per_s"]
    speed = [] if rate is None else [Figure(name="samples_per_s", samples=(rate,), better="higher", **ONE_RUN)]
    return Side(
        path=str(path),
        kind="train",
        name=Path(document.get("out_dir") or path).name,
        workload={"epochs": document.get("epoch"), "steps": document.get("step")},
        figures=(*speed, *_read_quality(document.get("metrics") or {}, document.get("loss"))),
        curves=_read_curves(document.get("evaluations") or ()),
        notes=(
            "the JSON of a training names no workload, no plan and no machine, so whether both trained the same cannot "
            "be told; its run folder has the first two",
        ),
    )


def _read_train_folder(folder: Path) -> Side:
    """Read the event log: the plan, and every epoch's speed, without the first of three or more."""
    events = drop_repeated([json.loads(line) for line in read_lines(folder / EVENTS_FILE)])
    started = next((event for event in events if event["event"] == "RunStarted"), None)
    epochs = [event for event in events if event["event"] == "EpochDone" and event["samples_per_s"] > 0]
    if started is None or not epochs:
        raise UsageError(f"{folder} holds no whole epoch yet; train for at least one before it is compared")
    timed = epochs[1:] if len(epochs) >= 3 else epochs
    first = ", its first left out, which warms up" if len(timed) < len(epochs) else ""
    shared: dict[str, Any] = {"unit_of_replication": "epoch of one run", "n_runs": 1}
    evaluations = [event for event in events if event["event"] == "Evaluated"]
    return Side(
        path=str(folder),
        kind="train",
        name=started["name"],
        workload={
            **{key: started.get(key) for key in ("name", "device", "n_parameters", "n_samples")},
            "epochs": len(epochs),
            **_read_recipe(started.get("config") or {}, started["plan"]),
        },
        plans={"run": started["plan"]},
        figures=(
            Figure(name="samples_per_s", samples=tuple(e["samples_per_s"] for e in timed), better="higher", **shared),
            Figure(name="epoch_seconds", samples=tuple(e["seconds"] for e in timed), better="lower", **shared),
            *_read_quality(evaluations[-1]["metrics"] if evaluations else {}, epochs[-1]["loss"]),
        ),
        curves=_read_curves(evaluations),
        notes=(
            "the folder of a training does not say which machine ran it",
            f"speed is by its {len(epochs)} epochs{first}; the figure at the end of a training is of all its time",
        ),
    )


def _read_recipe(config: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Read what is trained and how, as far as it is none of the plan's levers."""
    return {
        key: value
        for key, value in flatten_settings(config)
        if key.partition(".")[0] in _RECIPE and key.rpartition(".")[2] not in plan and value is not None
    }


def _read_curves(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Leave out figures that were not finite: they were written as null."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for evaluation in evaluations:
        for name, value in evaluation["metrics"].items():
            if value is not None and evaluation.get("training_seconds") is not None:
                curves.setdefault(name, []).append((evaluation["training_seconds"], value))
    return dict(curves)


def _read_quality(metrics: Mapping[str, float], training_loss: float | None) -> Iterator[Figure]:
    figures = {f"validation {name}": value for name, value in metrics.items()} | {"training loss": training_loss}
    for name, value in figures.items():
        if value is not None:
            yield Figure(name=name, samples=(value,), better=_BETTER[find_direction(name)], **ONE_RUN)


def _read_benchmark(path: Path, document: Mapping[str, Any]) -> Side:
    pressure_pct = document.get("cpu_pressure_pct")
    said = () if pressure_pct is None else (f"some task waited for a core {pressure_pct:.0f} % of the time",)
    return Side(
        path=str(path),
        kind="benchmark",
        name=document["name"],
        identity={**_read_identity(document["machine"]), "device": document["device"]},
        versions=document["versions"],
        workload={"name": document["name"], "claim": document["claim"]},
        figures=tuple(
            Figure(
                name=f"{arm['case']}, {arm['arm']}: {arm['metric']}",
                samples=_join_clusters(arm) or (arm["median"],),
                unit_of_replication=arm["unit_of_replication"],
                n_runs=arm["n"],
            )
            for arm in document["arms"]
        ),
        notes=said,
    )


def _join_clusters(arm: Mapping[str, Any]) -> tuple[float, ...]:
    """Take the median of samples that are of one thing (a model, a process), which stands for them."""
    groups: dict[str, list[float]] = {}
    for number, sample in enumerate(arm["samples"]):
        groups.setdefault(arm["clusters"][number] if arm.get("clusters") else str(number), []).append(sample)
    return tuple(map(statistics.median, groups.values()))


def _read_identity(machine: Mapping[str, Any]) -> dict[str, Any]:
    devices = ", ".join(device["name"] for device in machine.get("devices") or ())
    return {**{key: machine.get(key) for key in _IDENTITY}, "devices": devices or "none"}
