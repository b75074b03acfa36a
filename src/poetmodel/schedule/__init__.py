"""Schedules, their simulator and their verifier, which share no code with models and solvers."""

from poetmodel.schedule.identity import RELATIONS, GraphIdentity
from poetmodel.schedule.relations import (
    Schedule,
    checkpoint_all,
    paged_at_once,
    pairs_of_rows,
    spans_of_rows,
    storage_entries,
)
from poetmodel.schedule.simulation import MemoryPoint, Simulation, simulate
from poetmodel.schedule.verification import (
    ConstraintValue,
    Verdict,
    check_identity,
    check_schedule,
    constraint_values,
)

__all__ = [
    "RELATIONS",
    "ConstraintValue",
    "GraphIdentity",
    "MemoryPoint",
    "Schedule",
    "Simulation",
    "Verdict",
    "check_identity",
    "check_schedule",
    "checkpoint_all",
    "constraint_values",
    "paged_at_once",
    "pairs_of_rows",
    "simulate",
    "spans_of_rows",
    "storage_entries",
]
