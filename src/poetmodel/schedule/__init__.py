"""Schedules, their simulator and their verifier, independent of models and solvers."""

from poetmodel.schedule.identity import RELATIONS, GraphIdentity
from poetmodel.schedule.relations import (
    Schedule,
    checkpoint_all,
    pairs_of_rows,
    spans_of_rows,
    storage_entries,
    with_immediate_page_outs,
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
    "pairs_of_rows",
    "simulate",
    "spans_of_rows",
    "storage_entries",
    "with_immediate_page_outs",
]
