"""Records of measurements: one JSON line each, and where and with what they were made."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from poetmodel.bench.environment import machine
from poetmodel.schedule import RELATIONS

if TYPE_CHECKING:
    from pathlib import Path

    from cases import Case
    from poetmodel import SolveResult

SCHEMA: Final = 1
"""Version of the records."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """Appends records to a file, or drops them where there is none."""

    path: Path | None
    """A ``*.jsonl`` file."""

    def write(self, kind: str, name: str, *, seconds: float, **facts: Any) -> None:
        """Append one record.

        Parameters
        ----------
        kind : {'solve', 'build', 'startup'}
            What was measured.
        name : str
            Which one.
        seconds : float
            How long it took [s].
        **facts
            Whatever else belongs to it.
        """
        if self.path is None:
            return
        record = {
            "schema": SCHEMA,
            "kind": kind,
            "name": name,
            "seconds": seconds,
            "recorded": datetime.now(UTC).isoformat(timespec="seconds"),
            "load_average": os.getloadavg()[0],
            "machine": machine(),
            **facts,
        }
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, allow_nan=False) + "\n")


def solve_facts(case: Case, result: SolveResult) -> dict[str, Any]:
    """Return what a record says of one solve: the case, and the result without its relations."""
    document = result.to_dict()
    for name in ("nodes", "tensors", *RELATIONS):
        document.pop(name, None)
    schedule = result.schedule
    counts = None
    if schedule is not None:
        recomputed = len(schedule.R) - len(result.problem.graph.nodes)
        counts = {
            "recomputed": recomputed,
            "paged_out": len(schedule.M_out),
            "paged_in": len(schedule.M_in),
        }
    return {
        "case": asdict(case),
        "result": document,
        "termination": str(result.termination),
        "reason": result.reason,
        "model_gap": model_gap(result),
        "counts": counts,
        "statistics": dict(result.statistics),
        "versions": dict(result.versions),
    }


def model_gap(result: SolveResult) -> float | None:
    """Return the gap that the solver reached on the model that it was given.

    For a restriction (events) or a looser model (``paper``) that is no gap of the problem, but it
    tells how far the solver came.
    """
    value, bound = (result.statistics.get(key) for key in ("model_value", "model_bound"))
    if value is None or bound is None:
        return None
    return 0.0 if value <= 0 or bound >= value else float((value - bound) / value)
