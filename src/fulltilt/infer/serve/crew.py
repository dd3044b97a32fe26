"""Run the model: a thread a replica takes batches, and finds which sample a failure is of."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np

from fulltilt.errors import describe_error
from fulltilt.infer.joining import Sample
from fulltilt.infer.serve.batcher import Entry, Line
from fulltilt.records import Evidence, classify_outcome

Answer = Callable[[Sequence[Sample]], list[Sample]]
Result = Sample | Exception
logger = logging.getLogger(__name__)


class LateError(Exception):
    """The deadline passed before the model began."""


class AnswerError(Exception):
    """The model cannot answer this sample."""


def answer_each(
    samples: Sequence[Sample], answer: Answer, on_memory: Callable[[int], None] = lambda n_samples: None
) -> list[Result]:
    """Answer a batch → outputs or an error for each sample. One that fails is halved.

    Outputs that are not finite are a failure of their sample, once it fails alone too.

    Args:
        on_memory: Called with the size of a batch that ran out of memory.
    """
    try:
        results = answer(samples)
        if len(results) != len(samples):
            raise AnswerError(f"the model returned {len(results)} outputs for {len(samples)} samples")
    except Exception as error:  # of the model or a library: it must not end the thread
        if is_memory_error(error):
            on_memory(len(samples))
        if len(samples) == 1:
            logger.info("the model failed", exc_info=error)
            return [AnswerError(f"the model failed on this sample: {describe_error(error)}")]
        middle = len(samples) // 2
        return [part for half in (samples[:middle], samples[middle:]) for part in answer_each(half, answer, on_memory)]
    return [
        outputs if (bad := find_not_finite(outputs)) is None else _answer_alone(sample, answer, bad, len(samples))
        for sample, outputs in zip(samples, results, strict=True)
    ]


def _answer_alone(sample: Sample, answer: Answer, bad: str, n_together: int) -> Result:
    """Try again alone what failed among others, which may have been to blame."""
    return AnswerError(bad) if n_together == 1 else answer_each([sample], answer)[0]


def find_not_finite(outputs: Sample) -> str | None:
    for array in outputs:
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            n_bad = int((~np.isfinite(array)).sum())
            return f"{n_bad} of {array.size} outputs of the model are NaN or infinite"
    return None


def is_memory_error(error: Exception) -> bool:
    types = tuple(each.__name__ for each in type(error).__mro__)
    evidence = Evidence(exception_type=types[0], exception_types=types, message=str(error))
    return classify_outcome(evidence)[0] == "out_of_memory"


class Crew:
    """The threads that run the model, and the lock around the line that they take from.

    Args:
        answers: One function a replica.
        settle: Told of results, from those threads: entries, their outputs or errors, seconds of the model.
        on_back_off: Told of the largest batch, whenever memory made it smaller.
        warm_up: Batches that every replica answers first, in its own thread: what compilers keep belongs to one.
    """

    def __init__(
        self,
        line: Line,
        answers: Sequence[Answer],
        settle: Callable[[Sequence[Entry], Sequence[Result], float], None],
        *,
        on_back_off: Callable[[int], None],
        warm_up: Sequence[Sequence[Sample]] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._line, self._settle, self._on_back_off, self._clock = line, settle, on_back_off, clock
        self._has_work = threading.Condition()
        self._is_closing, self._n_cold, self._warm_up = False, len(answers), warm_up
        self._threads = [
            threading.Thread(target=self._run, args=(answer,), name=f"model-{n}", daemon=True)
            for n, answer in enumerate(answers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def n_waiting(self) -> int:
        return len(self._line)

    @property
    def max_batch(self) -> int:
        return self._line.policy.max_batch

    @property
    def is_ready(self) -> bool:
        return self._n_cold == 0 and any(thread.is_alive() for thread in self._threads)

    def wait_until_ready(self) -> None:
        with self._has_work:
            self._has_work.wait_for(lambda: self._n_cold == 0)

    def submit(self, entries: Collection[Entry]) -> None:
        """Put entries in line. Raises FullError, and takes none, where there is no room."""
        with self._has_work:
            self._line.add(entries)
            self._has_work.notify(len(entries))

    def withdraw(self, entry: Entry) -> bool:
        """Say that one request less waits for an entry → whether it left the line."""
        with self._has_work:
            entry.n_waiters -= 1
            return entry.n_waiters == 0 and self._line.drop(entry)

    def close(self) -> None:
        """End the threads when the line is empty."""
        with self._has_work:
            self._is_closing = True
            self._has_work.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self, answer: Answer) -> None:
        for samples in self._warm_up:
            answer_each(samples, answer, self._back_off)
        with self._has_work:
            self._n_cold -= 1
            self._has_work.notify_all()
        while True:
            with self._has_work:
                self._has_work.wait_for(lambda: len(self._line) or self._is_closing)
                if not len(self._line):
                    return
                batch, late = self._line.take(self._clock())
            if late:
                self._settle(late, [LateError()] * len(late), 0.0)
            if batch:
                began_s = self._clock()
                results = answer_each([entry.sample for entry in batch], answer, self._back_off)
                self._settle(batch, results, self._clock() - began_s)

    def _back_off(self, n_samples: int) -> None:
        with self._has_work:
            is_smaller = self._line.back_off(n_samples)
        if is_smaller:
            self._on_back_off(self.max_batch)
