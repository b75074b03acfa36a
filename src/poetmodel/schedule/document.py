"""What a schedule file, ``*.schedule.json``, holds; writing it needs no parser."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from poetmodel.data import write_text
from poetmodel.errors import ScheduleError
from poetmodel.schedule.relations import RELATIONS

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.schedule.relations import Schedule

FORMAT: Final = "poetmodel-schedule"
VERSION: Final = 1
OWN: Final = "own"
"""What `minimize` of the objective says where a model had an objective of its own."""

STATED: Final = (
    "energy_j",
    "bound_j",
    "baseline_energy_j",
    "overhead_j",
    "overhead_bound_j",
    "gap",
    "peak_ram_bytes",
    "compute_s",
    "transfer_s",
    "makespan_s",
    "build_s",
    "solve_s",
)
"""The figures of a schedule file."""


def schedule_to_dict(schedule: Schedule) -> dict[str, Any]:
    """Return relations, names and the identity of the graph as plain values."""
    identity = schedule.identity
    relations = {name: [list(pair) for pair in getattr(schedule, name)] for name in RELATIONS}
    return {
        "format": FORMAT,
        "version": VERSION,
        "graph": identity and {"name": identity.name, "sha256": identity.sha256},
        "nodes": list(identity.nodes) if identity else None,
        "tensors": list(identity.tensors) if identity else None,
        **relations,
    }


def save_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a file of bare relations.

    Raises
    ------
    ScheduleError
        If the schedule does not say which graph it belongs to.
    """
    if schedule.identity is None:
        msg = "the schedule names no graph; make it with identity=GraphIdentity.of(graph)"
        raise ScheduleError(msg)
    write_text(path, dump(schedule_to_dict(schedule)))


def dump(document: dict[str, Any]) -> str:
    """Return the JSON text of a schedule or plan file: one key a line, each value on one line."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False, ensure_ascii=False)}"
        for key, value in document.items()
    ]
    return "{" + ",\n ".join(lines) + "}\n"
