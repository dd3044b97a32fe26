"""Define what an artefact says of itself: inputs, plan, batching and promise."""

import dataclasses
from typing import Any

from fulltilt.records import VERSION


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """One input of the model, without the batch dimension.

    Attributes:
        dtype: Of numpy: "float32", "int64".
        shape: None stands for the length, which differs between samples; only the first dimension can.
        pad: What fills a shorter sample of a batch.
        below: Of numbers of words: each is 0 or more, and below this; None: nobody knows.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    pad: float = 0.0
    below: int | None = None

    @property
    def varies(self) -> bool:
        return None in self.shape


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How waiting requests are put together, whenever the model is free.

    Attributes:
        max_tokens: Samples times the longest length of a batch; None: no bound.
    """

    max_batch: int = 1
    max_tokens: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What was accepted live: under this load the share ``quantile`` of responses (p99: 0.99) was within the limit."""

    requests_per_s: float
    quantile: float
    limit_s: float
    measured_s: float
    n_responses: int
    samples_per_request: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """How the outputs differ from those of the same model in eager fp32, over real samples and boundary lengths.

    Attributes:
        sqnr_db: Power of the outputs over power of the error, 200 at most (where they are equal).
        changed_labels_pct: Samples whose largest output is another; None where outputs are no scores of classes.
        metric: That which may have lost most, of those of the workload.
        metric_drop_ci95: Interval of what it lost, over pairs of samples.
    """

    sqnr_db: float
    max_abs_error: float
    n_samples: int
    changed_labels_pct: float | None = None
    metric: str | None = None
    metric_fp32: float | None = None
    metric_here: float | None = None
    metric_drop_ci95: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Describes an artefact.

    Attributes:
        plan: Levers of inference by name, all of them.
        max_length: Longest sample that was declared; None where no input varies.
        joins: "pad": samples share a batch by ``joining``; "alone": a sample is a batch of its own, because
            joining does not reproduce the workload's own ``collate``, or answers depend on padding.
        outputs_vary: For each output, whether its first dimension behind the batch is the length.
        takes_mapping: The model is called with one mapping of its inputs by name, not with the inputs as arguments.
        writes_text: The model can write on from a prompt, word by word.
        built_with: What built it: versions of python, torch and onnxruntime, instruction set ("AVX2"), GPU.
        files: Name → SHA-256, of all files but the manifest.
        config: Values, base folder and provenance of the configuration, as ``config_from_values`` takes them.
    """

    version: int = VERSION
    name: str
    plan: dict[str, Any]
    device: str
    inputs: tuple[InputSpec, ...]
    max_length: int | None
    joins: str = "pad"
    outputs_vary: tuple[bool, ...] = ()
    takes_mapping: bool = False
    writes_text: bool = False
    policy: Policy = Policy()
    promise: Promise | None = None
    accuracy: Accuracy | None = None
    built_with: dict[str, str]
    n_parameters: int
    files: dict[str, str]
    config: dict[str, Any]
