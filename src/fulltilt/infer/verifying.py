"""Verify an artefact where it is now: its files, its answers, its speed. After an upgrade, verifying admits it anew."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fulltilt.errors import StorageError
from fulltilt.infer import artefact as artefacts
from fulltilt.infer.artefact import find_damage, find_mismatch, open_artefact, open_eager, read_manifest
from fulltilt.infer.gates.accuracy import compare_outputs
from fulltilt.infer.gates.effect import compare_speed, format_gain, is_eager
from fulltilt.infer.joining import join_samples, read_samples
from fulltilt.infer.manifest import Manifest
from fulltilt.infer.process import run_measuring
from fulltilt.infer.search.arm import build_batches
from fulltilt.records import VERSION
from fulltilt.tuner.trials.measuring import Answer

LOG = "verify.log"
CHECKS = ("files", "opens", "answers", "speed")
SAME_DB = 40.0  # of another release's rounding, also that of int8; the same one answers equally


def verify_artefact(folder: Path, *, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Verify an artefact in a process of its own, and return what ``--json`` writes.

    The first check that fails is the last. ``mismatch`` says what it was built with and is no more; where it passed and
    its folder can be written, it is ``admitted``: its manifest now names what is here.

    Raises:
        FulltiltError: there is no artefact, or the process died.
    """
    read_manifest(folder)
    place = folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())  # it may lie on what is read alone
    return run_measuring({"folder": str(folder)}, log_path=place / LOG, on_progress=on_progress, body=f"{__name__}:run")


def run(message: Mapping[str, Any], send: Answer) -> None:
    folder = Path(message["given"]["folder"])
    manifest, checks = read_manifest(folder), list[dict[str, Any]]()
    try:
        for passed, text in _examine(folder, manifest):
            checks.append({"name": CHECKS[len(checks)], "passed": passed, "text": text})
            send({"progress": {"done": len(checks), "total": len(CHECKS)}})
            if not passed:
                break
    except Exception as error:  # engines raise anything where they do not fit what is here
        checks.append({"name": CHECKS[len(checks)], "passed": False, "text": artefacts.tell(error)})
    passed, mismatch, admitted = all(check["passed"] for check in checks), find_mismatch(manifest), False
    if passed and mismatch:
        here = artefacts.read_surroundings(manifest.device)
        with contextlib.suppress(StorageError):
            artefacts.write_manifest(folder, dataclasses.replace(manifest, built_with=here))
            admitted = True
    found = {"version": VERSION, "passed": passed, "name": manifest.name, "folder": str(folder), "plan": manifest.plan}
    send({"measured": {**found, "checks": checks, "mismatch": mismatch, "admitted": admitted}})


def _examine(folder: Path, manifest: Manifest) -> Iterator[tuple[bool, str]]:
    """Ask one question after the other: whether it holds, and what was seen."""
    damage = find_damage(folder, manifest, sorted(manifest.files))
    yield damage is None, damage or f"{len(manifest.files)} files as they were built"
    artefact = open_artefact(folder, must_match=False)
    yield not artefact.notes, next(iter(artefact.notes), f"engine {manifest.plan['engine']} opens it")
    answers = [artefact.answer([sample])[0] for sample in artefact.samples]
    sqnr_db, largest = compare_outputs(read_samples(folder, "output"), answers)
    yield (
        sqnr_db >= SAME_DB,
        f"{len(answers)} samples answered, {sqnr_db:.0f} dB to the recorded outputs, largest error {largest:.2g}",
    )
    if not is_eager(manifest.plan):
        n_samples, eager = manifest.policy.max_batch if manifest.joins == "pad" else 1, open_eager(folder, manifest)
        batches = build_batches(artefact.samples, manifest, {"policy": manifest.policy, "n_samples": n_samples})
        served = [join_samples(batch, manifest.inputs) for batch in batches]
        ways = {"one by one": artefact.list_shapes((1,))}
        ways |= {f"in batches up to {n_samples}, as served": served} if n_samples > 1 else {}
        gains = {way: compare_speed(eager.run, artefact.run, shapes) for way, shapes in ways.items()}
        said = "; ".join(f"{format_gain(gain)} {way}" for way, gain in gains.items())
        yield list(gains.values())[-1].verdict != "slower", said
