"""device_prefetch: the next batch is copied to the GPU on a stream of its own while the step computes."""

from fulltilt.levers._spec import Facts, Lever, PlanValues, Setup


def _find_obstacle(value: bool, plan: PlanValues, facts: Facts) -> str | None:
    if facts.device_type == "cpu":
        return "there is no device to copy batches to; use device_prefetch false"
    if plan.get("placement") == "device":
        return "batches are made on the device and are never copied there; use device_prefetch false"
    if not plan.get("pin_memory", True):
        return "a copy from memory that is not page-locked blocks; set pin_memory to true"
    return None


def _apply(setup: Setup, value: bool) -> None:
    setup.state["device_prefetch"] = value


LEVER = Lever(
    name="device_prefetch",
    key="data.device_prefetch",
    summary="The next batch is copied to the GPU on a stream of its own while the step computes.",
    doc=(
        "Copies from page-locked memory in the step's own stream wait for the kernels queued before them. On a second "
        "stream they run beside them, one batch ahead: it helps where copying takes a visible share of a step, and "
        "costs the memory of one more batch. The training process then asks the loader one batch earlier, so that a "
        "dataset without workers that draws from global random numbers draws them earlier too: a run of such a dataset "
        "that is resumed in the middle of an epoch draws other numbers from there on than if it had not been left."
    ),
    trades=("speed", "memory", "reproducibility"),
    stage="loop",
    # Probes of the parts cannot see it: it is tried where it is named.
    obstacle=_find_obstacle,
    apply=_apply,
    observe=lambda setup: setup.state.get("n_prefetched", 0) > 0,
    is_offered=False,
)
