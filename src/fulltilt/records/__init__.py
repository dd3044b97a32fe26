"""The records that rooms exchange, frozen and with units in their names, and their JSON codec."""

# ruff: noqa: F401

from fulltilt.records._codec import VERSION, decode, dumps, encode, loads
from fulltilt.records.events import (
    CheckpointSaved,
    CheckpointStarted,
    EpochDone,
    Evaluated,
    Event,
    Listener,
    Noted,
    Replanned,
    RunEnded,
    RunStarted,
    StepsDone,
)
from fulltilt.records.machine import Device, Machine, Roof
from fulltilt.records.measurement import PHASES, Figures, Measurement, PhasesMs, format_rate
from fulltilt.records.outcome import Evidence, classify_outcome
from fulltilt.records.plan import Plan
from fulltilt.records.sizes import format_bytes, format_gib
from fulltilt.records.trial import (
    BUSY_PCT,
    IN_TURNS,
    PROBES,
    WHOLE_RUN,
    Status,
    Trial,
    TrialRequest,
    WorkloadSource,
    find_damage,
    is_busy_pressure,
)
