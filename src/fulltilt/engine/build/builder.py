"""Builds a Run from a configuration and a plan, which gives each lever (tunable setting) a value."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from fulltilt.config import Config, config_from_values, parse_on_bad_sample
from fulltilt.data import BatchTransform, build_loader, build_mix
from fulltilt.data.seeds import compute_seed
from fulltilt.data.transforms.mixing import Mix
from fulltilt.engine.build.facts import count_dataset, describe, name_optimizer, refuse_loader, resolve_plan
from fulltilt.engine.build.run import Run
from fulltilt.engine.ranks.division import describe_split, find_obstacles_to_ranks, find_obstacles_to_shards
from fulltilt.engine.ranks.parallel import GradientSync
from fulltilt.engine.ranks.world import ALONE, World
from fulltilt.engine.step.average import WeightAverage
from fulltilt.engine.step.prefetch import CudaLane
from fulltilt.engine.step.rng import seed_everything
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.errors import DataError, DeviceError, PlanObstacleError, UsageError, format_nearest
from fulltilt.levers import STAGES, Setup, Stage, find_notes, find_obstacles, load_catalogue, settle_plan
from fulltilt.records import Plan
from fulltilt.tasks import Workload


def build_run(
    config: Config | None,
    plan: Plan,
    *,
    device: str | torch.device,
    workload: Workload | None = None,
    seed: int | None = None,
    strict: bool = True,
    world: World = ALONE,
    started_with: str | None = None,
) -> Run:
    """Build model, data and optimizer, and put every value of ``plan`` in force.

    Args:
        config: May be None when ``workload`` is given: then its defaults hold.
        plan: One value for every lever; a precision and a placement of "auto" are resolved here.
        device: "cpu", "cuda", "cuda:1".
        workload: The one that ``config`` names when None.
        seed: That of the configuration when None. Runs with one seed start from equal weights and see equal batches.
        strict: False takes switches that cannot apply here at their default, with a note (``levers.settle_plan``).
        world: The ranks that train together; all of them build, each on its own device.
        started_with: The placement that a run which goes on had, for one of "auto".

    Raises:
        PlanObstacleError: a value of the plan cannot apply to this model on this device.
        DataError: the dataset is empty or shorter than one batch.
        DeviceError: the device is not there.
        UsageError: the workload builds something that cannot be trained.
    """
    device = check_device(device)
    _check_complete(plan)
    if workload is None:
        if config is None:
            raise UsageError("build_run needs a configuration or a workload, and got neither")
        from fulltilt.engine.build.assemble import build_workload

        workload = build_workload(config)
    config = config or config_from_values({}, base_dir=".")
    run = _resolve(config, plan, workload, device, config.run.seed if seed is None else seed, world, started_with)
    _settle(run, strict)
    _apply_stage("environment", run)
    _apply_stage("loader", run)
    run.setup.loader = _build_loader(run)
    run.sync = _place_model(run)
    _apply_stage("compile", run)
    run.transform = build_transform(run.loader, run.setup, mix=build_mix(config.data.mix, run.dataset))
    if run.transform is not None and run.plan["compile"]:
        run.transform.compile(run.notes)
    run.setup.state["transform"] = run.transform
    _place_optimizer(run, strict)
    run.average = _average_weights(config, run.setup)
    if run.n_samples is not None:
        run.steps_per_epoch = -(-len(run.loader) // run.setup.accumulate)
    # What building consumed differs between plans; training starts from the same numbers. Ranks draw their own.
    own_seed = compute_seed(run.seed, world.rank) if world.rank else run.seed
    seed_everything(own_seed)
    run.generator.manual_seed(own_seed)
    if run.plan["device_prefetch"]:
        run.lane = CudaLane(device, TrainStep(run).place)
    return run


def _resolve(
    config: Config,
    plan: Plan,
    workload: Workload,
    device: torch.device,
    seed: int,
    world: World,
    started_with: str | None,
) -> Run:
    """Build data and model, and resolve the plan's values of "auto"; no lever is applied yet."""
    seed_everything(seed)
    dataset = workload.dataset()
    refuse_loader(dataset, f"training set of {workload.name}")
    seed_everything(seed)  # what the dataset draws does not change the model
    model = build_model(workload)
    world.arrive()  # before the first word between ranks: one that hangs in the user's code is behind the others
    n_samples = _check_length(dataset, plan["batch_size"], workload.name)
    facts = describe(model, dataset, device, is_batch_known=workload.collate is None, n_ranks=world.n_ranks)
    may_hold = parse_on_bad_sample(config.data.on_bad_sample) is None
    plan, notes = resolve_plan(plan, facts, may_hold=may_hold, started_with=started_with, world=world)
    return Run(
        config=config,
        plan=plan,
        workload=workload,
        setup=Setup(device=device, model=model, notes=notes),
        facts=facts,
        device=device,
        dataset=dataset,
        n_samples=n_samples,
        batch_size=plan["batch_size"],
        seed=seed,
        clip_norm=config.optim.clip_norm,
        generator=torch.Generator(device),
        loader_generator=torch.Generator().manual_seed(seed),
        notes=notes,
        world=world,
    )


def build_transform(loader: DataLoader, setup: Setup, *, mix: Mix | None = None) -> BatchTransform | None:
    """Build the on-device transform of ``loader``'s batches: its detached pipeline, then ``mix``; None if neither."""
    pipeline = getattr(loader, "transform", None)
    if pipeline is None and mix is None:
        return None
    return BatchTransform(pipeline, mix=mix, memory_format=setup.input_memory_format)


def _average_weights(config: Config, setup: Setup) -> WeightAverage | None:
    """Build the average of the weights, which a hook of the optimizer keeps up.

    The hook does not run where an fp16 scaler leaves out a step, unless the optimizer is fused: that kernel skips the
    update on the device, and the average counts a step in which the weights stood still.
    """
    if config.optim.ema is None:
        return None
    average = WeightAverage(setup.model, config.optim.ema)
    setup.optimizer.register_step_post_hook(average.update)
    setup.notes.append(f"optim.ema={config.optim.ema}: evaluation takes the running average of the weights")
    return average


def check_device(device: str | torch.device) -> torch.device:
    """Check that the CPU or CUDA device exists and return it; plain ``cuda`` becomes ``cuda:0``.

    Raises:
        DeviceError: there is no such device; the message says what there is.
    """
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"device {device!r} is not a device torch knows ({str(error).splitlines()[0]})") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise DeviceError(f"device {device} is not supported; use cpu, cuda or cuda:N")
    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= n_devices:
        there = f"{n_devices} CUDA devices" if n_devices else "no CUDA device"
        raise DeviceError(f"device {device} is not there: torch {torch.__version__} sees {there}; use cpu, or auto")
    return torch.device("cuda", index)


def _check_complete(plan: Plan) -> None:
    catalogue = load_catalogue()
    for name in plan.keys() - catalogue.keys():
        raise PlanObstacleError(f"the plan names a lever {name!r} that there is not; {format_nearest(name, catalogue)}")
    missing = catalogue.keys() - plan.keys()
    if missing:
        raise PlanObstacleError(
            f"the plan has no value for {', '.join(sorted(missing))}; levers.default_plan(values) completes one"
        )


def _apply_stage(stage: Stage, run: Run) -> None:
    for name, lever in load_catalogue().items():
        if lever.stage == stage:
            lever.apply(run.setup, run.plan[name])


def _settle(run: Run, strict: bool) -> None:
    """Make the plan the one that will run; what changes is added to the notes."""
    if not strict:
        run.plan, changed = settle_plan(run.plan, run.facts)
        run.notes += changed
    obstacles = find_obstacles(run.plan, run.facts)
    if obstacles:
        raise PlanObstacleError("; ".join(obstacles))


def _check_length(dataset: Any, batch_size: int, name: str) -> int | None:
    n_samples = count_dataset(dataset)
    if n_samples == 0:
        raise DataError(f"the training set of {name} holds 0 samples; at least {batch_size} are needed for one batch")
    if n_samples is not None and batch_size > n_samples:
        raise DataError(
            f"batch_size {batch_size} is larger than the training set of {name} ({n_samples} samples); "
            f"use batch_size {n_samples} or less"
        )
    return n_samples


def _place_optimizer(run: Run, strict: bool) -> None:
    """Build the optimizer and apply the levers behind it; the plan and the facts now know it."""
    setup, workload = run.setup, run.workload
    parameters = [p for p in setup.model.parameters() if p.requires_grad]
    if not parameters:
        raise UsageError(f"the model of {workload.name} has no parameter that requires a gradient; nothing to train")
    optimizer = setup.optimizer = (workload.optimizer or optim.AdamW)(parameters)
    if not isinstance(optimizer, optim.Optimizer):
        raise UsageError(
            f"the optimizer of {workload.name} returned {type(optimizer).__name__}; it must return an Optimizer"
        )
    given = {id(parameter) for parameter in parameters}
    if given.isdisjoint(id(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            f"the optimizer of {workload.name} holds no parameter of the model; build it of those that it is given"
        )
    rates = [group.get("lr", 0.0) for group in optimizer.param_groups]
    if bad := [rate for rate in rates if rate is None or not math.isfinite(rate)]:
        raise UsageError(f"the optimizer of {workload.name} has learning rate {bad[0]}; give a finite number")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{type(optimizer).__name__} looks at the loss several times in a step, by a closure, which there is not; "
            "take another optimizer"
        )
    run.facts = dataclasses.replace(run.facts, optimizer=name_optimizer(optimizer))
    _settle(run, strict)
    for stage in STAGES[STAGES.index("optimizer") :]:
        _apply_stage(stage, run)
    run.notes += find_notes(run.plan, run.facts)
    said: Any = workload.explain(run.plan["batch_size"], run.plan["accumulate"]) if workload.explain else []
    if not isinstance(said, list | tuple) or not all(isinstance(note, str) for note in said):
        raise UsageError(f"explain of {workload.name} returned {type(said).__name__}; it must return a list of texts")
    run.notes += said


def _place_model(run: Run) -> GradientSync | None:
    """Place the model on its device, apply the levers of stage "model", and wrap it in what joins the ranks."""
    setup, config, world = run.setup, run.config, run.world
    setup.model.train()
    if not world.is_divided:
        setup.model = setup.model.to(setup.device)
        _apply_stage("model", run)
        setup.forward = setup.model
        return None
    from fulltilt.engine.ranks import parallel

    if obstacles := find_obstacles_to_ranks(world.n_ranks, run.batch_size, config, run.workload):
        raise UsageError("; ".join(obstacles))
    is_sharded, note = parallel.choose_shard(config.speed.shard, setup.model, setup.device, world)
    if not is_sharded:
        setup.model = setup.model.to(setup.device)
    _apply_stage("model", run)
    if is_sharded and (obstacles := find_obstacles_to_shards(setup.model, config, run.workload)):
        raise PlanObstacleError("; ".join(obstacles))
    if is_sharded:  # block by block onto the device: whole, it might not fit
        setup.forward, sync = parallel.shard(setup.model, setup.device, world)
    else:
        setup.forward, sync = parallel.replicate(setup.model, static_graph=config.speed.static_graph)
    run.notes += [note] if note else []
    run.notes += describe_split(setup.model, setup.loader, world.n_ranks)
    return sync


def _build_loader(run: Run) -> DataLoader:
    data, setup = run.config.data, run.setup
    loader_options = dict(setup.loader_options)
    loader = build_loader(
        run.dataset,
        batch_size=loader_options.pop("batch_size"),
        shuffle=data.shuffle,
        drop_last=data.drop_last,
        generator=run.loader_generator,
        options=loader_options,
        worker_options=setup.worker_options,
        collate=run.workload.collate,
        seed=run.seed,
        share=run.world.share,
        skip_limit=parse_on_bad_sample(data.on_bad_sample),
    )
    if loader.num_workers:
        seen = torch.zeros(loader.num_workers, dtype=torch.int32).share_memory_()
        setup.state["worker_threads"] = seen
        loader.worker_init_fn = functools.partial(_report_threads, loader.worker_init_fn, seen)
    return loader


def _report_threads(start: Callable[[int], None] | None, seen: Tensor, worker_id: int) -> None:
    """Tell the training process, from a data worker at its start, how many threads are in force there."""
    if start is not None:
        start(worker_id)
    seen[worker_id] = torch.get_num_threads()


def build_model(workload: Workload) -> nn.Module:
    """Build the model of a workload.

    Raises:
        UsageError: its function returns something else, or a model without shapes.
    """
    model = workload.model()
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model of {workload.name} returned {type(model).__name__}; it must return an nn.Module")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UsageError(
            f"the model of {workload.name} has parameters without a shape yet ({', '.join(lazy[:3])}); run one batch "
            "through it in the function that builds it"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(f"the model of {workload.name} lies on the device meta, without values; build it on the CPU")
    return model
