"""Build the doctor's JSON document from what was observed of a command."""

from typing import Any

import numpy as np

from fulltilt.attach.inside.blocks import N_WARM_UP
from fulltilt.doctor.breakdown import compute_breakdown_pct, compute_overhead_us
from fulltilt.doctor.observation import Observation
from fulltilt.doctor.proof import compute_proof
from fulltilt.doctor.rules import RULES, slow_transform
from fulltilt.records import VERSION, encode

MIN_STEPS = 20


def build_document(observation: Observation) -> dict[str, Any]:
    """Build the document: steps, their breakdown and findings; no findings if too few steps were seen."""
    plain = observation.plain
    has_enough = len(plain.rows) >= MIN_STEPS
    findings = [finding for rule in RULES for finding in rule.judge(observation)] if has_enough else []
    findings.sort(key=lambda finding: (finding.verdict != "act", -(finding.gain_pct or finding.ceiling_pct or 0.0)))
    proof = compute_proof(observation)
    return encode(
        {
            "version": VERSION,
            "steps": {
                "n": observation.n_steps,
                "n_counted": len(plain.rows),
                "wall_ms_median": float(np.median(plain.get("wall"))) / 1e6 if has_enough else None,
            },
            "device": observation.device,
            "torch": observation.torch,
            "breakdown_pct": compute_breakdown_pct(observation) if has_enough else {},
            "findings": findings,
            "joint_gain_pct": None,
            "a_a": {
                "effect_pct": proof.a_a_pct if proof else None,
                "ci95_pct": proof.a_a_ci95_pct if proof else None,
            },
            "checked": [
                rule.NAME for rule in RULES if rule is not slow_transform or slow_transform.can_judge(observation)
            ],
            "overhead_us_per_step": compute_overhead_us(observation),
            "n_processes": observation.n_processes,
            "failure": observation.failure,
            "notes": list(_list_notes(observation)),
        }
    )


def _list_notes(observation: Observation) -> list[str]:
    notes = []
    if not observation.n_steps:
        notes.append(
            "no optimizer step was seen: the command trains nothing with torch.optim, or in a process that was forked "
            "after torch was imported, or its Python ignores PYTHONPATH"
        )
    elif len(observation.plain.rows) < MIN_STEPS <= observation.n_edges:
        notes.append(
            f"{observation.n_edges} of {len(observation.rows)} steps begin a new iterator of a DataLoader, or follow a "
            "new optimizer, so too few are plain; make the iterator once before the loop, or longer epochs"
        )
    elif len(observation.plain.rows) < MIN_STEPS:
        notes.append(
            f"{len(observation.plain.rows)} steps could be counted after {N_WARM_UP} of warm-up, {MIN_STEPS} are "
            "needed; let the command take more steps"
        )
    elif not slow_transform.can_judge(observation):
        notes.append("steps wait for data, but the loading of samples could not be traced, as of an IterableDataset")
    if observation.device != "cpu":
        notes.append("times are the host's: on a GPU it waits for the device where it synchronises")
    if observation.failure:
        notes.append(f"the observer switched itself off ({observation.failure}); the figures are of the steps before")
    if observation.n_processes > 1:
        notes.append(f"{observation.n_processes} processes took steps; the figures are of the one with the most")
    return notes
