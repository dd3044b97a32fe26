"""Answer samples: from the cache, together with who asks the same, or by the model. All of it in one event loop."""

import asyncio
import contextlib
import dataclasses
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from fulltilt.infer.joining import Sample, read_length
from fulltilt.infer.manifest import Manifest, Policy
from fulltilt.infer.serve.batcher import Entry, Line
from fulltilt.infer.serve.cache import Cache
from fulltilt.infer.serve.crew import Crew, LateError, Result
from fulltilt.infer.serve.disk import Disk
from fulltilt.infer.serve.figures import Figures
from fulltilt.records import dumps
from fulltilt.records.words import WordTable

LOOK_S = 0.1  # between looks at whether a client is still there
MIB = 1 << 20


class Servable(Protocol):
    """What of an artefact is served."""

    manifest: Manifest
    notes: tuple[str, ...]
    samples: tuple[Sample, ...]

    def answer(self, samples: Sequence[Sample]) -> list[Sample]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a service keeps and refuses.

    Attributes:
        cache_mib: Memory for answers; 0: there is no cache at all, and equal requests are not joined.
        cache_dir: Where answers outlive the server; None: nowhere.
        n_waiting: Samples in line; a request that finds no room is refused with 429.
        deadline_s: Of a request that brings none; None: it waits as long as it takes.
    """

    cache_mib: int = 64
    cache_dir: str | None = None
    cache_disk_mib: int = 1024
    cache_expiry_s: float = 24 * 3600.0
    n_waiting: int = 256
    deadline_s: float | None = None


class GoneError(Exception):
    """The client went away."""


class TooManyError(Exception):
    """A request has more samples than may ever wait."""


@dataclasses.dataclass(slots=True)
class Asked:
    """One sample of a request: answered already, or by an entry that perhaps others wait for too."""

    source: str
    outputs: Sample | None = None
    entry: Entry | None = None


class Service:
    """Serves artefacts that are the same: one model thread each.

    Attributes:
        notes: What a user should know: why eager answers, what memory and disk did.

    Args:
        say: Told of every note.
        is_warmed_up: Each replica answers its shortest sample, and a full batch of its longest, before it is ready.
    """

    def __init__(
        self,
        artefacts: Sequence[Servable],
        settings: Settings,
        *,
        say: Callable[[str], None] = lambda note: None,
        is_warmed_up: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._say, self._clock, self.settings = say, clock, settings
        first = artefacts[0]
        self.manifest, self.samples = first.manifest, first.samples
        self.folder: Path | None = getattr(first, "folder", None)
        self.word_table = None if self.folder is None else WordTable.read(self.folder)
        self.notes: list[str] = []
        for text in first.notes:
            self.note(text)
        self.figures = Figures(clock=clock)
        self.is_draining, self.n_open = False, 0
        self._flights: dict[bytes, Entry] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._policy = self.manifest.policy if self.manifest.joins == "pad" else Policy()
        self.cache = self._build_cache(first)
        self.crew = Crew(
            Line(self._policy, capacity=settings.n_waiting),
            [artefact.answer for artefact in artefacts],
            self._settle_soon,
            on_back_off=self._note_back_off,
            warm_up=self._choose_warm_up() if is_warmed_up else (),
            clock=clock,
        )
        self.figures.watch("waiting_samples", "Samples in line", lambda: self.crew.n_waiting)
        self.figures.watch("max_batch", "Largest batch that memory allows", lambda: self.crew.max_batch)
        self.figures.watch("cache_bytes", "Memory of the cache", lambda: self.cache.n_bytes if self.cache else 0)
        self.figures.watch("padding_share", "Of all elements along the length", lambda: self.figures.padding_share)

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and self.crew.is_ready

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._say(text)

    def compute_retry_s(self) -> int:
        """Return in how many whole seconds who waits now has been answered, as far as one can say."""
        return max(1, math.ceil(self.crew.n_waiting * self.figures.model_s_per_sample))

    async def answer(
        self, samples: Sequence[Sample], *, deadline_s: float | None, is_gone: Callable[[], Awaitable[bool]]
    ) -> list[tuple[Result, str]]:
        """Return the outputs, or an error, of each sample and where it came from.

        Args:
            deadline_s: By the service's clock.

        Raises:
            FullError, TooManyError: there is no room, now or ever.
            LateError: the deadline passed before the model began with a sample.
            GoneError: nobody waits any more.
        """
        asked = self._ask(samples, math.inf if deadline_s is None else deadline_s)
        await self._wait([each.entry for each in asked if each.entry], deadline_s, is_gone)
        found: list[tuple[Result, str]] = []
        for each in asked:
            self.figures.note_source(each.source)
            outputs = each.outputs if each.entry is None else each.entry.answer.result()
            found.append((outputs, each.source))
        return found

    def close(self) -> None:
        self.crew.close()
        if self.cache is not None:
            self.cache.close()

    def _choose_warm_up(self) -> list[list[Sample]]:
        samples = sorted(self.samples, key=lambda sample: read_length(sample, self.manifest.inputs))
        longest = read_length(samples[-1], self.manifest.inputs)
        by_tokens = (self._policy.max_tokens or math.inf) // longest
        return [samples[:1], [samples[-1]] * int(max(1, min(self._policy.max_batch, by_tokens)))]

    def _build_cache(self, artefact: Servable) -> Cache | None:
        settings = self.settings
        if settings.cache_mib == 0:
            return None
        most_bytes = settings.cache_disk_mib * MIB
        disk = Disk(Path(settings.cache_dir), most_bytes=most_bytes, say=self.note) if settings.cache_dir else None
        return Cache(
            artefact=hashlib.sha256(dumps(self.manifest).encode()).hexdigest(),
            parameters=dumps(list(artefact.notes)),  # where eager stands in, its answers are others
            memory_bytes=settings.cache_mib * MIB,
            expiry_s=settings.cache_expiry_s,
            disk=disk,
        )

    def _ask(self, samples: Sequence[Sample], deadline_s: float) -> list[Asked]:
        self._loop = self._loop or asyncio.get_running_loop()
        if len(samples) > self.settings.n_waiting:
            raise TooManyError(
                f"{len(samples)} samples are more than may wait ({self.settings.n_waiting}); send fewer in a request"
            )
        asked, new, joined = [], [], []
        mine: dict[bytes, Entry] = {}
        for sample in samples:
            key = self.cache.build_key(sample) if self.cache else None
            hit = key and self.cache and self.cache.get(key)
            flight = key and (mine.get(key) or self._flights.get(key))
            if hit:
                asked.append(Asked(hit[1], outputs=hit[0]))
            elif flight:
                joined.append(flight)
                asked.append(Asked("shared", entry=flight))
            else:
                length = read_length(sample, self.manifest.inputs)
                entry = Entry(sample, length, self._loop.create_future(), key=key, deadline_s=deadline_s)
                new.append(entry)
                asked.append(Asked("model", entry=entry))
                if key:
                    mine[key] = entry
        self.crew.submit(new)
        self._flights |= mine
        for entry in joined:
            entry.n_waiters += 1
            entry.deadline_s = max(entry.deadline_s, deadline_s)
        return asked

    async def _wait(
        self, entries: Sequence[Entry], deadline_s: float | None, is_gone: Callable[[], Awaitable[bool]]
    ) -> None:
        pending = {entry.answer for entry in entries}
        while pending:
            left_s = math.inf if deadline_s is None else max(0.0, deadline_s - self._clock())
            _, pending = await asyncio.wait(pending, timeout=min(LOOK_S, left_s + 0.001))
            if not pending:
                break
            error = None
            if deadline_s is not None and self._clock() > deadline_s:
                if all(entry.began_s is None for entry in entries):
                    error = LateError
                deadline_s = None  # the line drops what has not begun
            if error or await is_gone():
                for entry in entries:
                    if self.crew.withdraw(entry):
                        self._end_flight(entry)
                raise error or GoneError

    def _settle_soon(self, entries: Sequence[Entry], results: Sequence[Result], model_s: float) -> None:
        """Bring results from a model's thread to the loop."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(self._settle, entries, results, model_s)

    def _settle(self, entries: Sequence[Entry], results: Sequence[Result], model_s: float) -> None:
        if model_s:
            lengths = [entry.length for entry in entries]
            multiple = self._policy.length_multiple
            self.figures.note_batch(lengths, -(-max(lengths) // multiple) * multiple, model_s)
        for entry, result in zip(entries, results, strict=True):
            self._end_flight(entry)
            if entry.key and self.cache and not isinstance(result, Exception):
                self.cache.put(entry.key, result)
            entry.answer.set_result(result)

    def _end_flight(self, entry: Entry) -> None:
        if entry.key and self._flights.get(entry.key) is entry:
            del self._flights[entry.key]

    def _note_back_off(self, max_batch: int) -> None:
        self.figures.note_back_off()
        self.note(f"memory ran out; from now on a batch has at most {max_batch} samples")
