"""accumulate: micro-steps whose gradients are added up before one optimizer step."""

from fulltilt.levers._spec import AtLeastOne, Facts, Lever, PlanValues, Setup


def _find_obstacle(value: int, plan: PlanValues, facts: Facts) -> str | None:
    batch_size = plan.get("batch_size")
    if value > 1 and facts.n_samples is not None and batch_size and batch_size * value > facts.n_samples:
        largest = facts.n_samples // batch_size
        remedy = f"accumulate {largest} or less" if largest else f"batch_size {facts.n_samples} or less"
        what = f"batch_size {batch_size} × accumulate {value}"
        return f"{what} is larger than the dataset ({facts.n_samples} samples); use {remedy}"
    return None


def _apply(setup: Setup, value: int) -> None:
    setup.accumulate = value


LEVER = Lever(
    name="accumulate",
    key="speed.accumulate",
    aliases=("gradient_accumulation", "gradient_accumulation_steps", "accumulate_grad_batches"),
    type=AtLeastOne,
    default=1,
    unit="micro-steps",
    summary="Micro-steps whose gradients are added up before one optimizer step.",
    doc=(
        "Keeps the effective batch (batch_size × accumulate) when memory only holds a smaller micro-batch. "
        "Gradients equal those of the large batch within rounding, the short window at the end of an epoch "
        "included, for losses that are means over samples. They do not for losses that compare samples of a batch "
        "(contrastive ones), and BatchNorm sees the micro-batch. It is slower per sample than one large batch "
        "wherever that fits; compared with the small batch alone the optimizer runs less often, which pays when its "
        "step is long."
    ),
    trades=("speed", "memory", "recipe"),
    stage="loop",
    candidates=lambda facts: (1, 2, 4, 8),
    obstacle=_find_obstacle,
    apply=_apply,
    observe=lambda setup: setup.state.get("n_micro", setup.accumulate),
)
