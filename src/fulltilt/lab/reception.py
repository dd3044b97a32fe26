"""Answer the runners of attempts: what to do, go on or stop, bytes of logs, files, the end.

Every call names its attempt by a token. An attempt that is not the newest, or not live, is refused, and its runner ends
itself. Every call may be repeated: an answer can be lost after it took effect.
"""

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Mapping, Sequence
from typing import Any

from fulltilt.errors import StorageError, UsageError
from fulltilt.lab.lab import Lab, find_stream, open_stream
from fulltilt.lab.points import build_words, write_words
from fulltilt.lab.records import Artefact, Attempt, Experiment, is_plain_name
from fulltilt.lab.redaction import redact
from fulltilt.lab.scheduling.ends import End
from fulltilt.lab.scheduling.leases import ENDING_PART
from fulltilt.lab.settling import settle
from fulltilt.lab.states import LIVE
from fulltilt.lab.store import StaleAttemptError
from fulltilt.lab.versions import OF_TRAININGS, explain_difference

STREAMS = ("log.txt", "events.jsonl")
RENEWALS = 10  # in a term, about
LONGEST_WAIT_S = 15.0  # for the answer to a renewal


class FencedError(Exception):
    """The attempt is over, or another one has begun."""


def greet(lab: Lab, attempt: Attempt, *, pid: int, versions: Mapping[str, str]) -> dict[str, Any]:
    """Note that the runner is there, and return what it has to do.

    Raises:
        FencedError: another runner has begun, or its node has other versions than the server.
    """
    experiment = require_live(lab, attempt)
    if experiment.state == "leased":
        with contextlib.suppress(StaleAttemptError):  # cancelled just now, as the first renewal says; or begun
            lab.store.advance("start", attempt, pid=pid)
        experiment = require_live(lab, attempt)
    if experiment.pid not in (None, pid):
        raise FencedError(f"process {experiment.pid} runs attempt {attempt.number} of {attempt.experiment}, not {pid}")
    if versions and (differing := explain_difference(versions, experiment.node or "", OF_TRAININGS)):
        remedy = "install the same versions, and start the server again if its own have changed"
        settle(lab, attempt, End(outcome="infra_refused", reason=f"{differing}; {remedy}"))
        raise FencedError(differing)
    lab.leases.renew(attempt)
    work = lab.store.read_work(attempt.experiment)
    devices = ", ".join(experiment.devices)
    words = [*write_words(redact(experiment.point)), *redact(experiment.overrides)]
    said = " ".join([work.source.name, *words])
    return {
        "experiment": attempt.experiment,
        "attempt": attempt.number,
        "source": str(work.source),
        "code": work.code and dataclasses.asdict(work.code),
        "words": build_words(work.config),
        "title": f"== {attempt.experiment}, attempt {attempt.number} on {devices}: {said}",
        "n_devices": experiment.n_devices,
        "checkpoints": find_checkpoints(lab, attempt.experiment),
        "ttl_s": lab.term.ttl_s,
        "grace_s": lab.term.grace_s,
        "end_after_s": ENDING_PART * lab.term.ttl_s,
        "wait_s": min(LONGEST_WAIT_S, lab.term.ttl_s / RENEWALS),
    }


def renew(lab: Lab, attempt: Attempt) -> str | None:
    """Renew the lease and return what somebody wants of the attempt. Writes nothing to the disk."""
    experiment = require_live(lab, attempt)
    lab.leases.renew(attempt)
    lab.metrics.renewals.inc()
    return experiment.wish


def append(lab: Lab, attempt: Attempt, name: str, offset: int, data: bytes) -> int:
    """Append to a stream of the attempt and return its size. What does not begin at its end changes nothing."""
    require_live(lab, attempt)
    if name not in STREAMS:
        raise UsageError(f"there is no stream {name!r}; there are {', '.join(STREAMS)}")
    path = find_stream(lab.folder, attempt, name)
    require_room(lab, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_stream(lab.folder, attempt, name, "ab") as stream:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX)  # who gave up waiting sends again while the first call still writes
        size = stream.seek(0, os.SEEK_END)
        if offset != size:
            return size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[stream.write(rest) :]
        except OSError as error:
            os.ftruncate(stream.fileno(), size)
            raise StorageError(f"no space left for {path}; free some and try again") from error
        return size + len(data)


def commit_checkpoint(lab: Lab, attempt: Attempt, files: Sequence[Artefact]) -> None:
    """Make files of the depot the newest checkpoint: the next attempt starts from it."""
    require_live(lab, attempt)
    _keep(lab, attempt, files)


def finish(lab: Lab, attempt: Attempt, end: End, files: Sequence[Artefact]) -> str:
    """Take the end of an attempt and, where it succeeded, its files; return the state of the experiment."""
    if files:
        with contextlib.suppress(FencedError):  # what is over already is told again, or that another one has begun
            require_live(lab, attempt)
            _keep(lab, attempt, files)
    return settle(lab, attempt, end)


def find_checkpoints(lab: Lab, experiment: str) -> list[dict[str, Any]]:
    """Return the committed files of the newest attempt that has any, and of the one before: ``{name, digest}``."""
    found = lab.store.read_artefacts(experiment)
    attempts = sorted({artefact.attempt for artefact in found}, reverse=True)
    return [
        {"attempt": artefact.attempt, "name": artefact.name, "digest": artefact.digest}
        for artefact in found
        if artefact.attempt in attempts[:2] and lab.depot.has(artefact.digest)
    ]


def require_live(lab: Lab, attempt: Attempt) -> Experiment:
    """Return the experiment of a live attempt. Raises FencedError if it is over or another has begun."""
    found = lab.store.read_experiments(id=attempt.experiment)
    if not found or found[0].attempt != attempt.number or found[0].state not in LIVE:
        said = f"{found[0].state} at attempt {found[0].attempt}" if found else "gone"
        raise FencedError(f"attempt {attempt.number} of {attempt.experiment} is over: it is {said}")
    return found[0]


def require_room(lab: Lab, place: object) -> None:
    """Keep what is left of a full disk for changes of state. Raises StorageError."""
    if not lab.store.has_room():
        raise StorageError(f"no space left for {place}; free some and try again")


def require_readable(lab: Lab, attempt: Attempt, digest: str) -> None:
    """Raise FencedError unless the attempt is live and the file is its experiment's: a checkpoint, or its code."""
    require_live(lab, attempt)
    code = lab.store.read_work(attempt.experiment).code
    own = {artefact.digest for artefact in lab.store.read_artefacts(attempt.experiment)}
    if digest not in own | ({code.digest} if code else set()):
        raise FencedError(f"{digest} belongs to no attempt at {attempt.experiment}")


def _keep(lab: Lab, attempt: Attempt, files: Sequence[Artefact]) -> None:
    """Note the files, and remove those that they replace. Another attempt may have the same file."""
    with lab.filing:
        for file in files:
            if not is_plain_name(file.name) or file.name.startswith("."):
                raise UsageError(f"{file.name!r} cannot be the name of a file of an experiment")
            if not lab.depot.has(file.digest):
                raise UsageError(f"{file.name} ({file.digest}) is not in the depot; send it first")
        for digest in lab.store.add_artefacts(attempt, files):
            lab.depot.remove(digest)
