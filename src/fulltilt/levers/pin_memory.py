"""pin_memory: batches delivered in page-locked memory, so that copies to the GPU can overlap compute."""

from fulltilt.levers._spec import Lever, set_loader_option

_NO_ACCELERATOR = "there is no accelerator to pin memory for; use pin_memory false"
_ON_WSL = (
    "page-locked memory is scarce under WSL2 (0.5 to 1 GiB have been reported as the limit); use pin_memory "
    "false if CUDA reports out of memory while the device has room"
)

LEVER = Lever(
    name="pin_memory",
    key="data.pin_memory",
    summary="Batches are delivered in page-locked memory and copied to the GPU without blocking.",
    doc=(
        "Copies from page-locked memory run beside compute; the engine copies with non_blocking whenever this is on. "
        "It costs a thread, a host copy of each batch and memory that the system cannot swap. Reports go both ways: "
        "training speed doubled in ostris/ai-toolkit#813 and fell in allenai/allennlp#4670. Under WSL2 the budget is "
        "small: microsoft/WSL#14078 reports 500 MB in Docker, microsoft/WSL#8447 CUDA out of memory because of it."
    ),
    trades=("speed", "memory"),
    stage="loader",
    candidates=lambda facts: (False, True) if facts.device_type == "cuda" else (False,),
    obstacle=lambda value, plan, facts: _NO_ACCELERATOR if facts.device_type == "cpu" else None,
    remark=lambda value, plan, facts: _ON_WSL if facts.is_wsl else None,
    apply=set_loader_option("pin_memory"),
    observe=lambda setup: setup.state.get("pinned", setup.loader.pin_memory),
)
