"""The records that rooms exchange, frozen and with units in their names, and their JSON codec."""

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
from fulltilt.records.measurement import PHASES, Measurement, PhasesMs, format_rate
from fulltilt.records.outcome import Evidence, classify_outcome
from fulltilt.records.plan import Plan
from fulltilt.records.sizes import format_bytes, format_gib
from fulltilt.records.trial import (
    BUSY_PCT,
    PROBES,
    WHOLE_RUNS,
    Status,
    Trial,
    TrialRequest,
    WorkloadSource,
    find_damage,
    is_busy_pressure,
)

__all__ = [
    "BUSY_PCT",
    "PHASES",
    "PROBES",
    "VERSION",
    "WHOLE_RUNS",
    "CheckpointSaved",
    "CheckpointStarted",
    "Device",
    "EpochDone",
    "Evaluated",
    "Event",
    "Evidence",
    "Listener",
    "Machine",
    "Measurement",
    "Noted",
    "PhasesMs",
    "Plan",
    "Replanned",
    "Roof",
    "RunEnded",
    "RunStarted",
    "Status",
    "StepsDone",
    "Trial",
    "TrialRequest",
    "WorkloadSource",
    "classify_outcome",
    "decode",
    "dumps",
    "encode",
    "find_damage",
    "format_bytes",
    "format_gib",
    "format_rate",
    "is_busy_pressure",
    "loads",
]
