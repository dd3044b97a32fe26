"""What a run needs memory for beside its usual steps, rehearsed once they are measured: a row's peak is a whole run's.

    steps             timed, by ``measured.py``
    largest samples   two steps on them, where samples differ in size
    evaluation        one batch, as ``train`` evaluates
    checkpoint        one, as ``train`` saves it, into a folder that is removed

Nothing here is timed or counted in the rate. Each part runs the code that ``train`` runs. What runs out of memory ends
the trial, and so does what ``train`` refuses (a metric that gives no value a sample); whatever else goes wrong is a
note, since the figures of the steps are true all the same.
"""

import contextlib
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from fulltilt.data import fast_collate
from fulltilt.data.batched import BatchedDataset
from fulltilt.engine.announce import is_out_of_memory, read_first_line
from fulltilt.engine.build.budget import count_bytes, estimate_state_bytes
from fulltilt.engine.build.run import Run
from fulltilt.engine.loop.evaluate import evaluate
from fulltilt.engine.loop.limits import read_limits
from fulltilt.engine.loop.saving import collect_checkpoint, save_session
from fulltilt.engine.loop.session import Session, build_session
from fulltilt.engine.measured.endless_steps import EndlessSteps
from fulltilt.errors import DeviceMemoryError, NonFiniteLossError, StorageError, UsageError, WorkerDiedError
from fulltilt.measure import MemoryMeter, MemoryPeaks
from fulltilt.records import format_bytes

Part = Literal["steps", "largest samples", "evaluation", "checkpoint"]

N_LARGEST_STEPS = 2  # the second one begins with what the first one left in the allocator
N_FIRST_LOOKS = 64  # samples that are all of one size here are taken to be so everywhere
MAX_LOOKS = 1024
MAX_LOOK_S = 2.0
MAX_CHECKPOINT_BYTES = 4 * 2**30
MAX_STEPS = 10**9  # of a run over a stream, whose schedule wants an end; its learning rate is never set here

PHRASES = {"largest samples": "a batch of the largest samples", "checkpoint": "a checkpoint"}
REMEDIES = {
    "largest samples": "use a smaller batch_size, or shorten the longest samples",
    "evaluation": "use a smaller data.val_batch_size, or a smaller validation set where data.placement holds it",
    "checkpoint": "use run.async_checkpoint false where it is on, or a smaller model",
}


class LargestSamples(NamedTuple):
    """A batch of a loader's largest samples: their numbers in the dataset, and how many were looked at."""

    indices: list[int]
    n_looked: int
    n_samples: int


class Rehearsal:
    """Runs the parts of a training run that come beside its steps.

    Make it before the first step, as ``train`` makes its session: what a run holds from start to end (rows of the
    validation set on the device, copies of buffers) is there beside the steps then.

    Args:
        run: Built; its configuration says how it evaluates and saves.
        saves: False leaves the checkpoint out, which takes as long as the disk does.

    Attributes:
        notes: What was not rehearsed, and why.
    """

    def __init__(self, run: Run, *, saves: bool = True):
        self._run, self._saves = run, saves
        self.notes: list[str] = []
        self._session: Session | None = None
        with self._guard("evaluation", "evaluation and a checkpoint"):
            limits = read_limits(run.config, None, max_steps=MAX_STEPS if run.steps_per_epoch is None else None)
            limits = dataclasses.replace(limits, on_full_disk="stop")  # raised, and told as a note here
            self._session = build_session(run, limits, Path())

    def play(
        self, steps: EndlessSteps, meter: MemoryMeter, on_part: Callable[[Part], None] | None = None
    ) -> dict[Part, MemoryPeaks]:
        """Run the parts that this run has, after the measured ``steps``, and return the peaks of each.

        Raises:
            DeviceMemoryError: memory ran out; says in which part.
            NonFiniteLossError: a weight is not finite, which ``train`` would not save.
            UsageError: ``train`` would refuse it too.
            WorkerDiedError: a data worker died.
        """
        peaks: dict[Part, MemoryPeaks] = {}
        for part, act in self._list_parts(steps):
            if on_part is not None:
                on_part(part)
            meter.start()
            try:
                with self._guard(part):
                    act()
            finally:
                peaks[part] = meter.stop()
        return peaks

    def _list_parts(self, steps: EndlessSteps) -> Iterator[tuple[Part, Callable[[], None]]]:
        run, s = self._run, self._session
        largest = self._find_largest(run.loader, run.batch_size)
        if largest is not None:
            yield "largest samples", lambda: self._step_on(steps, largest)
        if s is None:
            return
        if s.limits.evaluate_every is not None:
            if s.limits.evaluate_every.unit == "epochs":
                steps.leave_epoch()
            if run.workload.assess is not None:
                self.notes.append(f"memory: the assessment of {run.workload.name} (workload.assess) is not in the peak")
            if s.validation is not None:
                yield "evaluation", lambda: self._evaluate(s, s.validation)
        n_bytes = estimate_state_bytes(run)
        if self._saves and n_bytes > MAX_CHECKPOINT_BYTES:  # a trial has a deadline, and a disk may take 10 s for a GiB
            size = format_bytes(n_bytes)
            self.notes.append(
                f"memory: a checkpoint of about {size} takes too long for a trial; the peak is without it"
            )
        elif self._saves:
            yield "checkpoint", lambda: self._save(s)

    def _step_on(self, steps: EndlessSteps, largest: LargestSamples) -> None:
        n_batches = N_LARGEST_STEPS * self._run.setup.accumulate
        batches = RepeatedBatch(self._run.loader, largest.indices, n_batches)
        dealt = self._run.deal(batches, self._run.lane)  # type: ignore[arg-type]
        for _ in range(N_LARGEST_STEPS):
            steps.step_on(dealt)

    def _evaluate(self, s: Session, loader: Any) -> None:
        """Evaluate the first batch, or one of the largest samples where they differ in size."""
        largest = self._find_largest(loader, loader.batch_size)
        if largest is not None:
            loader = RepeatedBatch(loader, largest.indices, 1)
        evaluate(s.run, loader, n_batches=1)

    def _save(self, s: Session) -> None:
        with tempfile.TemporaryDirectory(prefix="fulltilt-checkpoint-") as folder:
            s.folder = Path(folder)
            save_session(s, is_last=False)
            collect_checkpoint(s)
        self.notes += s.announce.notes

    def _find_largest(self, loader: DataLoader, batch_size: int) -> LargestSamples | None:
        if self._run.world.is_divided:  # the ranks would have to agree on samples that each looks for by the clock
            note = "memory: over several processes the largest samples are not looked for"
            if _may_differ(loader) and note not in self.notes:
                self.notes.append(note)
            return None
        largest = None
        with self._guard("largest samples"):
            largest = find_largest_samples(loader, batch_size)
        if largest is not None and largest.n_looked < largest.n_samples:
            self.notes.append(
                f"memory: samples differ in size; the largest of {largest.n_looked} that were looked at, of "
                f"{largest.n_samples}, are in the peak"
            )
        return largest

    @contextlib.contextmanager
    def _guard(self, part: Part, what: str | None = None) -> Iterator[None]:
        """Let through what ends a trial, in words that name the part; note everything else."""
        try:
            yield
        except (NonFiniteLossError, UsageError, WorkerDiedError):
            raise
        except Exception as error:  # the boundary to the user's data, model and disk, in parts that are not timed
            first_line = read_first_line(error)
            if is_out_of_memory(error):
                raise DeviceMemoryError(
                    f"out of memory on {self._run.device} in the part '{part}' of a run with batch_size "
                    f"{self._run.batch_size} ({first_line}); {REMEDIES[part]}"
                ) from error
            if self._run.world.is_divided and not isinstance(error, StorageError):
                raise  # the other ranks would wait in this part for ever
            why = f"{type(error).__name__}: {first_line}"
            self.notes.append(
                f"memory: {what or PHRASES.get(part, part)} could not be rehearsed and the peak is without it ({why})"
            )


class RepeatedBatch:
    """Stands in for a loader: one batch of chosen samples, ``n`` times.

    Args:
        loader: Of a map-style dataset; reads and joins the samples.
    """

    def __init__(self, loader: Any, indices: list[int], n: int):
        self.transform = getattr(loader, "transform", None)
        self._batch, self._n = read_batch(loader, indices), n

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._n):
            yield self._batch


def find_largest_samples(
    loader: Any, batch_size: int, *, clock: Callable[[], float] = time.monotonic
) -> LargestSamples | None:
    """Find the largest samples of a loader's dataset; None where all have one size, or where it streams.

    Looks at samples spread over the dataset, each joined to a batch of its own: at 64, and where those differ at up to
    1,024, as far as two seconds reach. Samples that are stacked as they are must have one size and are not looked at.

    Raises:
        whatever the dataset raises for a sample that it cannot read.
    """
    if not _may_differ(loader):
        return None
    n_samples = len(loader.dataset)
    sizes: dict[int, int] = {}
    began_s = clock()
    for n_looks in (N_FIRST_LOOKS, MAX_LOOKS):
        for number in range(min(n_looks, n_samples)):
            index = number * n_samples // min(n_looks, n_samples)
            if index not in sizes and (len(sizes) < 2 or clock() - began_s < MAX_LOOK_S):
                sizes[index] = count_bytes(read_batch(loader, [index]))
        if len(set(sizes.values())) < 2:
            return None
    order = sorted(sizes, key=lambda index: -sizes[index])
    others = (index for index in range(n_samples) if index not in sizes)
    indices = list(itertools.islice(itertools.chain(order, others), batch_size))
    return LargestSamples(indices, n_looked=len(sizes), n_samples=n_samples)


def _may_differ(loader: Any) -> bool:
    """Tell whether code of the user's own joins the samples, which could make one size of several."""
    fetcher = loader.dataset
    if isinstance(fetcher, IterableDataset) or isinstance(fetcher.source, BatchedDataset):
        return False
    return fetcher.has_whole_batches or loader.collate_fn is not fast_collate


def read_batch(loader: Any, indices: list[int]) -> Any:
    """Read samples of a loader's map-style dataset, joined as the loader joins them."""
    return loader.collate_fn(loader.dataset.__getitems__(indices))
