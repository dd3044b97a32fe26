"""Answer a batch by the model, and find which sample a failure is of."""

from collections.abc import Callable, Sequence

import numpy as np

from fulltilt.errors import describe_error
from fulltilt.infer.joining import Sample
from fulltilt.records import Evidence, classify_outcome

Answer = Callable[[Sequence[Sample]], list[Sample]]


class AnswerError(Exception):
    """The model cannot answer this sample."""


Result = Sample | AnswerError


def answer_each(samples: Sequence[Sample], answer: Answer, on_memory: Callable[[int], None]) -> list[Result]:
    """Answer a batch → outputs or an error for each sample. One that fails is halved.

    Outputs that are not finite are a failure of their sample, once it fails alone too.

    Args:
        on_memory: Called with the size of a batch that ran out of memory.
    """
    results, failed = list[Sample](), None
    try:
        results = answer(samples)
        if len(results) != len(samples):
            raise AnswerError(f"the model returned {len(results)} outputs for {len(samples)} samples")
    except (Exception, SystemExit) as error:  # of the model or a library: it must not end the thread
        failed = describe_error(error)
        if is_memory_error(error):
            on_memory(len(samples))
    if failed is not None:  # not above: an error that is handled keeps the memory of the call
        if len(samples) == 1:
            return [AnswerError(f"the model failed on this sample: {failed}")]
        middle = len(samples) // 2
        return [part for half in (samples[:middle], samples[middle:]) for part in answer_each(half, answer, on_memory)]
    return [
        outputs if (bad := _find_not_finite(outputs)) is None
        # Alone again, since others of its batch may have been to blame.
        else answer_each([sample], answer, on_memory)[0] if len(samples) > 1 else AnswerError(bad)
        for sample, outputs in zip(samples, results, strict=True)
    ]  # fmt: skip


def is_memory_error(error: BaseException) -> bool:
    types = tuple(each.__name__ for each in type(error).__mro__)
    evidence = Evidence(exception_type=types[0], exception_types=types, message=str(error))
    return classify_outcome(evidence)[0] == "out_of_memory"


def _find_not_finite(outputs: Sample) -> str | None:
    for array in outputs:
        if array.dtype.kind == "f" and (n_bad := array.size - np.count_nonzero(np.isfinite(array))):
            return f"{n_bad} of {array.size} outputs of the model are NaN or infinite"
    return None
