"""The dry run and the checklist before an experiment: one real step, then everything that ruins a run later."""

import contextlib
import dataclasses
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from fulltilt import errors
from fulltilt.config import Config
from fulltilt.data.loading.sampler import Share
from fulltilt.engine.announce import is_out_of_memory
from fulltilt.engine.build.budget import count_bytes, estimate_host_budget
from fulltilt.engine.build.facts import count_dataset
from fulltilt.engine.build.run import Run
from fulltilt.engine.loop.bad_batch import describe_loss, save_bad_batch
from fulltilt.engine.loop.endings import explain_error, tell_failure
from fulltilt.engine.loop.evaluate import add_derived, evaluate
from fulltilt.engine.loop.limits import read_limits
from fulltilt.engine.loop.opening import Job, open_session
from fulltilt.engine.loop.session import Session
from fulltilt.engine.loop.sizes import find_obstacle, plan_evaluation_sizes, plan_sizes
from fulltilt.engine.ranks.division import describe_split, find_obstacles
from fulltilt.engine.ranks.world import ALONE
from fulltilt.engine.step.cached_step import build_step
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.errors import ConfigError, DeviceMemoryError, FakeRunError, FulltiltError, find_log, strip_control_codes
from fulltilt.hardware import (
    Nvml,
    RealNvml,
    count_usable_cores,
    read_filesystem,
    read_memory_limit_bytes,
    read_rss_bytes,
)
from fulltilt.hardware.cpu import read_memory_bytes
from fulltilt.measure import FakePeak, MemoryMeter, NullTimer, estimate_memory
from fulltilt.measure.nested import count_samples, slice_samples
from fulltilt.measure.utilization import find_device_index
from fulltilt.records import format_bytes, format_gib
from fulltilt.records.run_folder import find_folder_obstacle

Verdict = Literal["ok", "note", "problem"]
MEMORY_NOTE_PCT = 80.0
GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class CheckItem:
    """One line of the checklist."""

    name: str
    verdict: Verdict
    text: str


def run_checks(
    config: Config,
    *,
    device: str,
    out_dir: Path,
    rank_devices: Sequence[str] = (),
    memory_limit_bytes: int | None = None,
) -> list[CheckItem]:
    """Build everything, take one training step and read one validation sample, then go through the checklist.

    Nothing raises for what is wrong with the workload: that becomes a problem in the list. A check that needs the run
    is left out when the run could not be built.

    For a run over several ranks none is started: what cannot be divided is known here, and the step is that of the
    first rank's part of a batch, on the first device.

    Args:
        device: "cpu", "cuda:0".
        rank_devices: Of a run over several processes, one each; empty: one process on ``device``.
        memory_limit_bytes: What a process of the run may use of its device; a step that is estimated above it is a
            problem, and is not taken.
    """
    n_ranks, nvml = max(1, len(rank_devices)), RealNvml()
    items = [item for name in dict.fromkeys(rank_devices or (device,)) for item in check_gpu(name, nvml)]
    with contextlib.ExitStack() as stack:
        try:
            session = _open_session(config, device, stack)
        except Exception as error:  # boundary to the user's own model and data: whatever it raises is a finding
            items += _list_problems("build", error)
            return [*items, *_check_data_path(config), _check_checkpoints(config)]
        run = session.run
        items += [*_check_build(run), *_check_ranks(run, n_ranks)]
        forecast = [] if memory_limit_bytes is None else [_check_memory_limit(run, memory_limit_bytes, n_ranks)]
        items += forecast
        fits = not any(item.verdict == "problem" for item in forecast)
        items += _check_one_step(session, n_ranks, memory_limit_bytes) if fits else []
        if n_ranks == 1 and all(item.verdict != "problem" for item in items):
            items += _check_other_sizes(run)
        items.append(_check_validation(session, evaluates=fits))
        items += [_check_workers(run, n_ranks), check_host_memory(run, n_ranks)]
        items += [*_check_data_path(config), _check_checkpoints(config), _check_disk(run, config, out_dir)]
    return items


def _open_session(config: Config, device: str, stack: contextlib.ExitStack) -> Session:
    """Open what ``train`` opens before its first step, by the same code; no folder is claimed.

    What it writes, the traceback of an error, lies in a temporary folder, which ``stack`` removes where it is empty.
    """
    folder = Path(tempfile.mkdtemp(prefix="fulltilt-check-"))
    stack.callback(lambda: any(folder.iterdir()) or folder.rmdir())
    job = Job(
        config=config,
        limits=read_limits(config, None, None),
        device=torch.device(device),
        out_dir=folder,
        listeners=(),
        resume=False,
        workload=None,
        training_metrics=False,
        world=ALONE,
    )
    return stack.enter_context(open_session(job, None))


def _list_problems(name: str, error: Exception) -> list[CheckItem]:
    """Make an item of each problem of an error."""
    problems = (isinstance(error, ConfigError) and error.problems) or [error]
    return [CheckItem(name, "problem", describe_error(problem)) for problem in problems]


def check_gpu(device: str, nvml: Nvml) -> list[CheckItem]:
    """Tell the free memory of the GPU, and who else uses it."""
    if not device.startswith("cuda"):
        return [CheckItem("device", "ok", f"{device}, {count_usable_cores()} usable cores")]
    index = find_device_index(torch.device(device), nvml)
    status = nvml.read_status(index) if index is not None else None
    if status is None or status.memory_free_bytes is None or status.memory_used_bytes is None:
        return [CheckItem("device", "note", f"{device}: the driver does not say what is free")]
    total = status.memory_free_bytes + status.memory_used_bytes
    free = f"{device}: {format_bytes(status.memory_free_bytes)} of {format_bytes(total)} free"
    items = [CheckItem("device", "ok", free)]
    if status.processes:
        pids = ", ".join(str(process.pid) for process in status.processes)
        used = f"{len(status.processes)} other processes use the GPU (pid {pids}): figures and memory will suffer"
        items.append(CheckItem("other processes", "note", used))
    return items


def _check_build(run: Run) -> list[CheckItem]:
    n_parameters = sum(p.numel() for p in run.setup.model.parameters())
    n_trainable = sum(p.numel() for p in run.setup.model.parameters() if p.requires_grad)
    n_held = sum(p.numel() for group in run.setup.optimizer.param_groups for p in group["params"] if p.requires_grad)
    size = f"{run.n_samples} samples" if run.n_samples is not None else "a stream of samples"
    steps = f", {run.steps_per_epoch} steps an epoch" if run.steps_per_epoch else ""
    text = f"{run.workload.name}: {n_parameters:,} parameters, {size}{steps}"
    notes = [*run.notes]
    if n_held < n_trainable:
        notes.append(
            f"the optimizer holds {n_held:,} of {n_trainable:,} parameters with gradients; the rest stays as it is"
        )
    return [CheckItem("build", "ok", text), *(CheckItem("build", "note", note) for note in notes)]


def _check_ranks(run: Run, n_ranks: int) -> list[CheckItem]:
    """Name what ``train`` refuses to divide; nothing for one process."""
    if n_ranks == 1:
        return []
    obstacles = find_obstacles(n_ranks, run.batch_size, run.config, run.workload, run.setup.model)
    if obstacles:
        return [CheckItem("ranks", "problem", obstacle) for obstacle in obstacles]
    split, *notes = describe_split(run.setup.model, run.loader, n_ranks)
    return [CheckItem("ranks", "ok", split), *(CheckItem("ranks", "note", note) for note in notes)]


def _check_one_step(session: Session, n_ranks: int, memory_limit_bytes: int | None) -> list[CheckItem]:
    """Take one optimizer step on real batches: does it run, is the loss a number, how much memory does it take.

    Of several ranks it is the first one's, whose part of a batch is the largest.
    """
    run = session.run
    is_gpu = run.device.type == "cuda"
    meter = MemoryMeter(run.device)
    meter.start()
    held_gib = 0.0 if is_gpu else (read_rss_bytes(os.getpid()) or 0) / GIB
    try:
        with tell_failure(session):
            batches = session.start_epoch()
            session.learning_rate.set_step(0)
            outcome = session.step(batches if n_ranks == 1 else _cut(batches, n_ranks), NullTimer())
            loss = float(outcome.loss) if outcome is not None else math.nan
            with contextlib.suppress(KeyError, ArithmeticError):  # as at the end of an epoch
                add_derived(run.workload, {} if outcome is None else {"loss": loss})
    except Exception as error:  # boundary to the user's own model and data
        meter.stop()
        return [CheckItem("one step", "problem", _describe_failure(session, run, error))]
    peaks = meter.stop()
    if outcome is None:
        return [CheckItem("one step", "problem", str(run.build_empty_error(1)))]
    whose = "" if n_ranks == 1 else f" (rank 0's part, of {n_ranks} ranks)"
    text = f"{outcome.n_samples} samples{whose} forward, backward and update; loss {loss:.4g}"
    if not math.isfinite(loss):  # in the words of train
        said = describe_loss(loss, "step 1", session.learning_rate.compute_lr(0), run.plan["precision"])
        text = "; ".join([said, *save_bad_batch(session, step=1, loss=loss, is_kept=False)])
    step = CheckItem("one step", "ok" if math.isfinite(loss) else "problem", text)
    used_gib = peaks.reserved_peak_gib if is_gpu else peaks.rss_peak_gib
    if memory_limit_bytes is not None and not is_gpu:
        used_gib = meter.own_peak_gib or used_gib  # the limit is of one process: data workers have their own
    return [step, _check_memory(run, used_gib, held_gib, n_ranks, memory_limit_bytes)]


def _check_other_sizes(run: Run) -> list[CheckItem]:
    """Try the size of an epoch's last batch; and note a loss that sums, which other sizes of a batch change."""
    seen: list[Any] = []
    batch = next(run.start_epoch(0))
    n_samples = count_samples(batch)
    n_last = 0 if run.n_samples is None or run.loader.drop_last else run.n_samples % run.batch_size
    try:
        with torch.no_grad():
            step = TrainStep(run, observe=lambda *pair: seen.append(pair), forward=run.setup.model)
            if n_last:
                step.compute_loss(slice_samples(batch, n_samples, slice(n_last)))
    except Exception as error:  # boundary to the user's own model
        said = describe_error(explain_error(error) or error)
        said += "" if "drop_last" in said else "; data.drop_last=true leaves that batch out"
        return [
            CheckItem("last batch", "problem", f"an epoch's last one has {n_last} of {run.batch_size} samples: {said}")
        ]
    if n_samples < 2 or run.workload.couples_samples or run.workload.compares_samples:
        return []
    with torch.no_grad(), contextlib.suppress(Exception):  # of parts of a batch a loss of the user's may know nothing
        whole = float(step.compute_loss(batch))
        halves = [slice(n_samples // 2), slice(n_samples // 2, None)]
        parts = [slice_samples(seen[-1], n_samples, half) for half in halves]
        total = sum(float(run.workload.loss(outputs, targets)) for outputs, targets in parts)
        if math.isclose(whole, total, rel_tol=1e-3) and abs(whole) > 1e-6:
            said = "the sum over a batch, so speed.accumulate and a shorter last batch change the step; have it return "
            return [CheckItem("loss", "note", f"{said}the mean, as with reduction='mean'")]
    return []


def _describe_failure(s: Session, run: Run, error: Exception) -> str:
    """Describe what ended a step or an evaluation of ``run``; of want of memory, say how ``train`` would go on."""
    if not isinstance(error, DeviceMemoryError) or error.__cause__ is None:
        return describe_error(error)
    is_evaluation = run.doing == "evaluation"
    sizes = plan_evaluation_sizes(run, None) if is_evaluation else plan_sizes(run, None)
    said = describe_error(error.__cause__, "data.val_batch_size" if is_evaluation else "data.batch_size")
    if sizes is None or s.limits.on_out_of_memory == "stop" or find_obstacle(run):
        return said
    smaller = f"batch_size {sizes.batch_size} × accumulate {sizes.accumulate}"
    return f"{said}; train goes on with {f'val_batch_size {sizes.val_batch_size}' if is_evaluation else smaller}"


def _cut(batches: Iterator[Any], n_ranks: int) -> Iterator[Any]:
    for batch in batches:
        n_samples = count_samples(batch)
        yield slice_samples(batch, n_samples, Share(0, n_ranks).cut(n_samples))


def _check_memory(
    run: Run, used_gib: float | None, held_gib: float, n_ranks: int, memory_limit_bytes: int | None
) -> CheckItem:
    """Tell whether the batch fits, with room to spare. Ranks on a CPU share its memory; on GPUs each has its own.

    Args:
        used_gib: Peak of the step, as it was measured: of the process where there is a limit, else with its workers.
        held_gib: Of the peak, what the process held before the step: a smaller batch does not give it back.
        memory_limit_bytes: What a process may use; above it is a problem.
    """
    if used_gib is None:
        return CheckItem("memory", "note", "the peak of one step could not be read")
    whose = ""
    if run.device.type == "cuda":
        capacity_gib = torch.cuda.get_device_properties(run.device).total_memory / GIB
    else:
        capacity_gib = (read_memory_limit_bytes() or read_memory_bytes()[0]) / GIB / n_ranks
        whose = "" if n_ranks == 1 else f" a rank, of {n_ranks} ranks"
    limit_gib = math.inf if memory_limit_bytes is None else memory_limit_bytes / GIB
    capacity_gib = min(capacity_gib, limit_gib)
    share_pct = 100 * used_gib / capacity_gib
    text = f"one step peaks at {format_gib(used_gib)} of {format_gib(capacity_gib)}{whose} ({share_pct:.0f} %)"
    if share_pct <= MEMORY_NOTE_PCT:
        return CheckItem("memory", "ok", text)
    parts = [2**k for k in range(1, int(math.log2(run.batch_size)) + 1)]
    n_parts = next((n for n in parts if held_gib + (used_gib - held_gib) / n < capacity_gib), 0)
    remedy = f"divide data.batch_size by {n_parts} and set speed.accumulate {n_parts * run.plan['accumulate']}"
    if not n_parts:
        remedy = f"the process held {format_gib(held_gib)} before the step, so a smaller batch does not help: "
        remedy += f"allow more than {format_gib(used_gib)}"
    return CheckItem("memory", "problem" if used_gib > limit_gib else "note", f"{text}: {remedy}")


def _check_memory_limit(run: Run, limit_bytes: int, n_ranks: int) -> CheckItem:
    """Estimate whether a training step fits the limit, before anything of that size is allocated.

    The estimate counts the tensors of a step (``measure.fake_memory`` says what it cannot see): what fits by a little
    may still run out, what does not fit does not. Of several ranks it is the first one's, whose part is the largest.
    """
    name = "memory limit"
    try:
        batch = next(run.start_epoch(0))
        peak = _estimate(run, batch, run.batch_size, run.setup.accumulate, n_ranks)
        remedy = _find_remedy(run, batch, limit_bytes, n_ranks) if peak.total_bytes > limit_bytes else None
    except FakeRunError as error:
        return CheckItem(name, "note", f"not known: {error}")
    except Exception as error:  # boundary to the user's own model and data
        return CheckItem(name, "problem", describe_error(error))
    text = f"estimated for {run.device} from the shapes of its tensors, not measured: {format_bytes(peak.total_bytes)}"
    text += (
        f" at the peak ({peak.batch_size} samples at a time, {format_bytes(peak.activations_bytes)} of it activations)"
    )
    if remedy is not None:
        return CheckItem(name, "problem", f"{text}, above the limit of {format_bytes(limit_bytes)}: {remedy}")
    text += f", {100 * peak.total_bytes / limit_bytes:.0f} % of the limit of {format_bytes(limit_bytes)}"
    return CheckItem(name, "ok", f"{text}; scratch of operators and what the process holds besides tensors come on top")


def _find_remedy(run: Run, batch: Any, limit_bytes: int, n_ranks: int) -> str:
    remedies = []
    if run.workload.compares_samples and not run.workload.couples_samples:
        remedies.append(
            "the loss compares the samples of a micro-batch, so accumulation would change it; gradient caching would "
            "not: task contrastive(exact_batch=true)"
        )
    elif smaller := _find_smaller(run, batch, limit_bytes, n_ranks):
        batch_size, accumulate, n_bytes = smaller
        how = ", one batch by gradient caching" if run.workload.couples_samples else ""
        remedies.append(
            f"data.batch_size={batch_size} speed.accumulate={accumulate} (the same effective batch{how}) is estimated "
            f"at {format_bytes(n_bytes)}"
        )
    if run.plan["activation_checkpointing"] in (None, False, "off"):
        remedies.append("speed.activation_checkpointing=true, where the model has blocks, keeps fewer activations")
    return "; or ".join(remedies) or "no smaller micro-batch is estimated to fit: use a smaller model"


def _find_smaller(run: Run, batch: Any, limit_bytes: int, n_ranks: int) -> tuple[int, int, int] | None:
    """Find the first halving of the micro-batch that fits: its size, micro-steps of the same effective batch, bytes."""
    batch_size, accumulate = run.batch_size, run.setup.accumulate
    while batch_size % 2 == 0 and batch_size // 2 >= n_ranks:
        batch_size, accumulate = batch_size // 2, accumulate * 2
        n_bytes = _estimate(run, batch, batch_size, accumulate, n_ranks).total_bytes
        if n_bytes <= limit_bytes:
            return batch_size, accumulate, n_bytes
    return None


def _estimate(run: Run, batch: Any, batch_size: int, accumulate: int, n_ranks: int) -> FakePeak:
    changed = dataclasses.replace(run, setup=dataclasses.replace(run.setup, accumulate=accumulate))
    return estimate_memory(changed, -(-batch_size // n_ranks), batch=batch, build_step=build_step)


def _check_validation(session: Session, *, evaluates: bool) -> CheckItem:
    """Tell the validation set; ``evaluates`` evaluates one batch of it, where the run evaluates."""
    run = session.run
    if session.validation is None:
        if run.workload.assess is not None:
            return CheckItem("validation", "ok", "the task assesses the model itself at evaluations")
        return CheckItem("validation", "note", "there is no validation set: quality goes unseen")
    n_samples = count_dataset(session.validation.dataset)
    text = "a stream of samples" if n_samples is None else f"{n_samples} samples"
    if session.limits.evaluate_every is None:
        return CheckItem("validation", "note", f"{text}, never evaluated: run.evaluate_every is off")
    if not evaluates:
        return CheckItem("validation", "ok", text)
    try:
        with tell_failure(session):
            evaluate(run, session.validation, n_batches=1)
    except Exception as error:  # boundary to the user's own data
        return CheckItem("validation", "problem", _describe_failure(session, run, error))
    return CheckItem("validation", "ok", f"{text}{'; assess is not tried out' if run.workload.assess else ''}")


def _check_workers(run: Run, n_ranks: int) -> CheckItem:
    n_workers, n_cores = n_ranks * run.plan["num_workers"], count_usable_cores()
    of_ranks = "" if n_ranks == 1 else f" of {n_ranks} ranks"
    text = f"{n_workers} data workers{of_ranks} on {n_cores} usable cores"
    if n_workers > n_cores:
        return CheckItem("data workers", "note", f"{text}: they will take turns; see fulltilt tune")
    return CheckItem("data workers", "ok", text)


def check_host_memory(run: Run, n_ranks: int = 1) -> CheckItem:
    """Compare batches on their way and copies for checkpoints with free memory and /dev/shm."""
    budget = estimate_host_budget(run, n_ranks)
    if budget is None:
        return CheckItem("host memory", "note", "not known: no sample can be looked at beforehand")
    problem = budget.find_problem()
    return CheckItem("host memory", "problem" if problem else "ok", problem or budget.describe())


def _check_data_path(config: Config) -> list[CheckItem]:
    """Say on which file system the data lies; a place that is not there is the data set's to judge."""
    name = "data on a local disk"
    if not config.data.path:
        return [CheckItem(name, "ok", "no data.path: the dataset knows its place")]
    path = Path(config.base_dir) / config.data.path
    if not os.path.exists(path):
        return []
    filesystem = read_filesystem(path)
    text = f"{config.data.path} lies on {filesystem.type or 'an unknown file system'}"
    if filesystem.is_network:
        return [CheckItem(name, "note", f"{text}, over the network: copy it to a local disk first")]
    return [CheckItem(name, "ok", text)]


def _check_checkpoints(config: Config) -> CheckItem:
    every = config.run.checkpoint_every
    if every is None:
        text = "off: a run that stops starts again from nothing; set run.checkpoint_every: 1 epoch"
        return CheckItem("checkpoints", "note", text)
    return CheckItem("checkpoints", "ok", f"every {every}")


def _check_disk(run: Run, config: Config, out_dir: Path) -> CheckItem:
    """Tell the room for checkpoints (two kept, one being written), and what earlier runs left there."""
    if obstacle := find_folder_obstacle(out_dir):
        return CheckItem("disk", "problem", obstacle)
    state = [run.setup.model.state_dict(), run.setup.optimizer.state_dict()]
    need = 3 * count_bytes(state) if config.run.checkpoint_every else 0
    free = read_filesystem(out_dir).free_bytes
    earlier = 0
    for parent, _, names in os.walk(out_dir):
        for name in names:
            with contextlib.suppress(OSError):  # a file that vanishes meanwhile is none
                earlier += (Path(parent) / name).lstat().st_size
    text = f"checkpoints and logs need about {format_bytes(need)} in {out_dir}"
    text += f", {format_bytes(free)} are free" if free is not None else ""
    text += f"; {format_bytes(earlier)} lie there from earlier runs" if earlier else ""
    return CheckItem("disk", "problem" if free is not None and need > free else "ok", text)


def describe_error(error: BaseException, size: str = "data.batch_size") -> str:
    """Put an error in the user's terms, as ``train`` does, or as out of memory."""
    if isinstance(error, FulltiltError) or not is_out_of_memory(error):
        return errors.describe_error(error) + find_log(error)
    said = strip_control_codes(f"{type(error).__name__}: {str(error).strip() or 'no message'}")
    return f"out of memory: {said}; use a smaller {size}"
