"""Verify an artefact where it is now: its files, its answers, its speed. After an upgrade, verifying admits it anew."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fulltilt.errors import FulltiltError, describe_error
from fulltilt.hardware import read_instruction_set
from fulltilt.infer.artefact import (
    Artefact,
    find_damage,
    find_mismatch,
    open_artefact,
    open_eager,
    read_manifest,
    read_surroundings,
    write_manifest,
)
from fulltilt.infer.gates.accuracy import compare_outputs
from fulltilt.infer.gates.effect import is_eager
from fulltilt.infer.gates.turns import measure_speed_up
from fulltilt.infer.process import run_measuring
from fulltilt.records import VERSION, decode, encode
from fulltilt.tuner.trials.measuring import Answer

LOG = "verify.log"
SAME_DB = 40.0  # of another release's rounding, also that of int8; the same one answers equally
SPEED_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One question to an artefact, and its answer."""

    name: str
    passed: bool
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What came of verifying an artefact; ``--json`` writes its fields in this order.

    Attributes:
        admitted: What it was built with and is no more, where it passed: its manifest now names what is here.
        speed_up_ci: Times as fast as eager fp32, in turns; None: it is eager fp32, or did not open.
    """

    version: int = VERSION
    passed: bool
    name: str
    folder: str
    plan: dict[str, Any]
    checks: tuple[Check, ...]
    speed_up_ci: tuple[float, float] | None
    admitted: str | None


def verify_artefact(folder: Path, *, on_progress: Callable[[int, int], None]) -> Verified:
    """Verify an artefact in a process of its own.

    Raises:
        FulltiltError: there is no artefact, or the process died.
    """
    read_manifest(folder)
    answer = run_measuring(
        {"folder": str(folder)}, log_path=folder / LOG, on_progress=on_progress, body=f"{__name__}:run"
    )
    return decode(Verified, answer)


def run(message: Mapping[str, Any], send: Answer) -> None:
    folder = Path(message["given"]["folder"])
    manifest = read_manifest(folder)
    checks, speed = [_check_files(folder)], None
    send({"progress": {"done": 1, "total": 4}})
    if checks[0].passed:
        checks.append(_check_opening(folder))
    if all(check.passed for check in checks):
        artefact = open_artefact(folder, must_match=False)
        checks.append(_check_answers(artefact))
        send({"progress": {"done": 3, "total": 4}})
        if not is_eager(manifest.plan):
            check, speed = _check_speed(artefact)
            checks.append(check)
    passed = all(check.passed for check in checks)
    other = find_mismatch(manifest)
    if passed and other:
        here = read_surroundings(manifest.device)
        write_manifest(folder, dataclasses.replace(manifest, built_with=here, cpu=read_instruction_set()))
    result = Verified(
        passed=passed,
        name=manifest.name,
        folder=str(folder),
        plan=manifest.plan,
        checks=tuple(checks),
        speed_up_ci=speed,
        admitted=other if passed else None,
    )
    send({"measured": encode(result)})


def _check_files(folder: Path) -> Check:
    manifest = read_manifest(folder)
    damage = find_damage(folder, manifest, sorted(manifest.files))
    return Check(name="files", passed=damage is None, text=damage or f"{len(manifest.files)} files as they were built")


def _check_opening(folder: Path) -> Check:
    try:
        artefact = open_artefact(folder, must_match=False)
    except FulltiltError as error:
        return Check(name="opens", passed=False, text=str(error))
    text = artefact.notes[0] if artefact.is_fallback else f"engine {artefact.plan['engine']} opens it"
    return Check(name="opens", passed=not artefact.is_fallback, text=text)


def _check_answers(artefact: Artefact) -> Check:
    try:
        answers = [artefact.answer([sample])[0] for sample in artefact.samples]
        sqnr_db, largest = compare_outputs(artefact.recorded, answers)
    except Exception as error:  # engines raise anything where they do not fit what is here
        return Check(name="answers", passed=False, text=describe_error(error).splitlines()[0])
    text = f"{len(answers)} samples answered, {sqnr_db:.0f} dB to the recorded outputs, largest error {largest:.2g}"
    return Check(name="answers", passed=sqnr_db >= SAME_DB, text=text)


def _check_speed(artefact: Artefact) -> tuple[Check, tuple[float, float]]:
    from fulltilt.infer.building import list_shapes

    eager = open_eager(artefact.folder, artefact.manifest)
    middle, low, high = measure_speed_up(eager, artefact.runner, list_shapes(artefact), limit_s=SPEED_S)
    text = f"{middle:.2f} times as fast as eager fp32 in turns ({low:.2f} to {high:.2f})"
    return Check(name="speed", passed=high >= 1, text=text), (low, high)
