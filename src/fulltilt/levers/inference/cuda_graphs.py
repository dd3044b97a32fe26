"""cuda_graphs: a compiled model is replayed as one recorded graph."""

from fulltilt.levers._spec import Facts, Lever, PlanValues, note_choice


def _find_obstacle(value: bool, plan: PlanValues, facts: Facts) -> str | None:
    if facts.device_type != "cuda":
        return "CUDA graphs exist on NVIDIA GPUs only; use cuda_graphs false"
    return "torch.compile records them; set engine compile" if plan.get("engine", "compile") != "compile" else None


LEVER = Lever(
    name="cuda_graphs",
    key="inference.cuda_graphs",
    summary="A compiled model is recorded once a shape and replayed as one launch.",
    doc=(
        "Takes away the launch of every kernel, which is most of the time of a small batch: an encoder of MiniLM's "
        "size on an RTX 4090 went from 1.34 to 2.96 times as fast as eager (Aureliolo/synthorg#2743). Each shape is "
        "recorded by itself and keeps its memory, so it wants few shapes: pad lengths to a multiple. A shape that is "
        "recorded anew at every request is slower than eager (pytorch/pytorch#188150); the effect gate counts "
        "recordings over the declared shapes."
    ),
    trades=("speed", "memory"),
    stage="compile",
    restart=True,
    candidates=lambda facts: (False, True) if facts.device_type == "cuda" else (False,),
    obstacle=_find_obstacle,
    apply=note_choice("cuda_graphs"),
    observe=lambda setup: setup.state.get("cuda_graphs", False),
)
