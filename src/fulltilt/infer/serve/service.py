"""Answer samples: from the cache, together with who asks the same, or by the model.

All of it happens in one event loop, but for the model, which runs in threads: one a replica.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from fulltilt.infer.artefact import Artefact
from fulltilt.infer.joining import Sample, read_length
from fulltilt.infer.manifest import Policy
from fulltilt.infer.serve.answering import Answer, Result, answer_each
from fulltilt.infer.serve.batcher import choose_batch
from fulltilt.infer.serve.cache import Cache
from fulltilt.infer.serve.disk import Disk
from fulltilt.infer.serve.figures import Figures
from fulltilt.records import dumps
from fulltilt.records.words import WordTable

GONE = 499  # what logs know of a client that went away; nobody reads it
LOOK_S = 0.1  # between looks at whether a client is still there


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
    cache_dir: Path | None = None
    cache_disk_mib: int = 1024
    cache_expiry_s: float = 24 * 3600.0
    n_waiting: int = 256
    deadline_s: float | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """A sample that the model is to answer, for all requests that want it.

    Attributes:
        key: Of the cache; without one, a key that nothing else has.
        n_waiters: Requests that want it; nobody answers what none wants.
    """

    sample: Sample
    length: int
    key: Any
    answer: asyncio.Future[Result]
    n_waiters: int = 1


class Service:
    """Serves artefacts that are the same: one model thread each.

    Attributes:
        notes: What a user should know: why eager answers, what memory and disk did.
        policy: Its ``max_batch`` falls when memory runs out, and stays there.

    Args:
        say: Told of every note.
        is_warmed_up: Each replica answers its shortest sample, and a full batch of its longest, before this returns.
    """

    def __init__(
        self,
        artefacts: Sequence[Artefact],
        settings: Settings,
        *,
        say: Callable[[str], None] = lambda note: None,
        is_warmed_up: bool = False,
    ):
        self._say, self.settings = say, settings
        self.artefact = first = artefacts[0]
        self.manifest, self.samples, self.word_table = first.manifest, first.samples, WordTable.read(first.folder)
        self.notes: list[str] = []
        for text in first.notes:
            self.note(text)
        self.figures = Figures()
        self.is_draining, self.n_open = False, 0
        self._has_work = threading.Condition()  # around the line, which replicas take from by themselves
        self._waiting: dict[Entry, None] = {}  # oldest first
        self._flights: dict[Any, Entry] = {}
        self.policy = self.manifest.policy if self.manifest.joins == "pad" else Policy()
        self.cache = self._build_cache(first)
        self._are_warm, self._is_closing = threading.Barrier(1 + len(artefacts)), False
        self._replicas = [
            threading.Thread(target=self._run, args=(each.answer, is_warmed_up), name="model", daemon=True)
            for each in artefacts
        ]
        for replica in self._replicas:
            replica.start()
        self._are_warm.wait()
        self.figures.watch("waiting_samples", "Samples in line", lambda: self.n_waiting)
        self.figures.watch("max_batch", "Largest batch that memory allows", lambda: self.policy.max_batch)
        self.figures.watch("cache_bytes", "Memory of the cache", lambda: self.cache.n_bytes if self.cache else 0)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def note(self, text: str) -> None:
        self.notes.append(text)
        with contextlib.suppress(OSError):  # nobody reads it any more; the thread of a model must not end by that
            self._say(text)

    def build_refusal(self, status: int, said: str) -> HTTPException:
        """Build a refusal that says when to come again: when who waits now will have been answered."""
        retry_s = max(1, math.ceil(self.n_waiting * self.figures.model_s_per_sample))
        return HTTPException(status, said, {"Retry-After": str(retry_s)})

    async def answer(
        self, samples: Sequence[Sample], *, deadline_s: float, is_gone: Callable[[], Awaitable[bool]]
    ) -> list[tuple[Result, str]]:
        """Return the outputs, or an error, of each sample and where it came from.

        Args:
            deadline_s: By the monotonic clock; infinite: none.

        Raises:
            HTTPException: there is no room (429); the deadline passed before the model had begun with every sample
                (504); nobody waits any more (499).
        """
        asked = self._ask(samples)
        await self._wait([each for each, _ in asked if isinstance(each, Entry)], deadline_s, is_gone)
        for _, source in asked:
            self.figures.note_source(source)
        return [(each.answer.result() if isinstance(each, Entry) else each, source) for each, source in asked]

    def close(self) -> None:
        with self._has_work:
            self._is_closing = True
            self._has_work.notify_all()
        for replica in self._replicas:
            replica.join(5.0)  # a model that hangs ends with the process
        if self.cache is not None:
            self.cache.close()

    def _warm_up(self, answer: Answer) -> None:
        samples = sorted(self.samples, key=lambda sample: read_length(sample, self.manifest.inputs))
        longest = read_length(samples[-1], self.manifest.inputs)
        by_tokens = (self.policy.max_tokens or math.inf) // longest
        for batch in (samples[:1], [samples[-1]] * int(max(1, min(self.policy.max_batch, by_tokens)))):
            answer_each(batch, answer, self._back_off)

    def _build_cache(self, artefact: Artefact) -> Cache | None:
        settings = self.settings
        if settings.cache_mib == 0:
            return None
        disk = settings.cache_dir and Disk(settings.cache_dir, most_bytes=settings.cache_disk_mib << 20, say=self.note)
        return Cache(  # where eager stands in, as notes say, its answers are others
            artefact=hashlib.sha256(dumps([self.manifest, list(artefact.notes)]).encode()).hexdigest(),
            memory_bytes=settings.cache_mib << 20,
            expiry_s=settings.cache_expiry_s,
            disk=disk,
        )

    def _ask(self, samples: Sequence[Sample]) -> list[tuple[Sample | Entry, str]]:
        """Find the answer of each sample, or the entry that brings it, and put new entries in line: all, or none."""
        asked: list[tuple[Sample | Entry, str]] = []
        new: dict[Any, Entry] = {}
        shared: list[Entry] = []
        for sample in samples:
            key: Any = self.cache.build_key(sample) if self.cache else object()
            if self.cache and (hit := self.cache.get(key)):
                asked.append(hit)
            elif flight := new.get(key) or self._flights.get(key):
                shared.append(flight)
                asked.append((flight, "shared"))
            else:
                length = read_length(sample, self.manifest.inputs)
                new[key] = Entry(sample, length, key, asyncio.get_running_loop().create_future())
                asked.append((new[key], "model"))
        if self.n_waiting + len(new) > self.settings.n_waiting:
            raise self.build_refusal(429, f"{self.n_waiting} samples wait already; come again later")
        for entry in shared:
            entry.n_waiters += 1
        self._flights |= new
        with self._has_work:
            self._waiting |= dict.fromkeys(new.values())
            self._has_work.notify(len(new))
        return asked

    async def _wait(self, entries: Sequence[Entry], deadline_s: float, is_gone: Callable[[], Awaitable[bool]]) -> None:
        pending = {entry.answer for entry in entries}
        try:
            while pending:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 and not any(entry in self._waiting for entry in entries):
                    left_s = deadline_s = math.inf  # the model has all of it
                _, pending = await asyncio.wait(pending, timeout=max(0.0, min(LOOK_S, left_s)))
                if pending and left_s <= 0:
                    raise HTTPException(504, "the deadline passed before the model began; give it more time")
                if pending and await is_gone():
                    raise HTTPException(GONE, "the client went away")
        except BaseException:  # cancelled too, as Ray does where the client went away
            with self._has_work:
                for entry in entries:
                    entry.n_waiters -= 1
                    if entry.n_waiters == 0 and entry in self._waiting:
                        del self._waiting[entry], self._flights[entry.key]
            raise

    def _run(self, answer: Answer, is_warmed_up: bool) -> None:
        """Answer batches in the thread of a replica, and bring their results to the loop."""
        if is_warmed_up:  # here, since what compilers keep belongs to a thread
            with contextlib.suppress(ValueError):  # samples are not as the manifest has them: requests will hear it
                self._warm_up(answer)
        self._are_warm.wait()
        while batch := self._take():
            began_s = time.monotonic()
            results = answer_each([entry.sample for entry in batch], answer, self._back_off)
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                loop = batch[0].answer.get_loop()
                loop.call_soon_threadsafe(self._settle, batch, results, time.monotonic() - began_s)

    def _take(self) -> list[Entry]:
        """Take the next batch out of line, once there is one; none when the service closes."""
        with self._has_work:
            self._has_work.wait_for(lambda: self._waiting or self._is_closing)
            waiting = list(self._waiting)
            batch = [waiting[place] for place in choose_batch(waiting, self.policy)] if waiting else []
            for entry in batch:
                del self._waiting[entry]
        return batch

    def _settle(self, batch: Sequence[Entry], results: Sequence[Result], model_s: float) -> None:
        self.figures.note_batch(len(batch), model_s)
        for entry, result in zip(batch, results, strict=True):
            del self._flights[entry.key]
            if self.cache and not isinstance(result, Exception):
                self.cache.put(entry.key, result)
            entry.answer.set_result(result)

    def _back_off(self, n_samples: int) -> None:
        """Halve the largest batch, after one of ``n_samples`` ran out of memory."""
        smaller = max(1, n_samples // 2)
        if smaller < self.policy.max_batch:
            self.policy = dataclasses.replace(self.policy, max_batch=smaller)
            self.note(f"memory ran out; from now on a batch has at most {smaller} samples")
