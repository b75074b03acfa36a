"""What a measurement keeps of a solve: its course, its end, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import measure as measuring
from grid import Cell
from measure import Course, measure, peak_memory_bytes
from poetmodel.errors import BackendUnavailableError
from poetmodel.solver import SolveProgress
from resuming import FAILED

if TYPE_CHECKING:
    import pytest

SMALL = Cell(goal=1, model="paper/linear", device="paper-m4", ram="70%", limit_s=5.0)


def test_course_notes_the_first_schedule_and_each_fall_of_the_gap() -> None:
    """Gaps that fall by little are left out, the first schedule and a closed gap never."""
    course = Course()
    states = [(0.1, None, 1.0), (0.2, 4.0, 1.0), (0.3, 3.99, 1.0), (0.4, 2.0, 1.0), (0.5, 1.0, 1.0)]
    for seconds, incumbent, bound in (*states, (0.6, 1.0, 1.0)):
        course.note(SolveProgress(seconds=seconds, incumbent=incumbent, bound=bound))
    assert course.first_schedule_s == 0.2
    assert course.gaps == [(0.2, 0.75), (0.4, 0.5), (0.5, 0.0)]


def test_measurement_is_plain_data_and_ends_where_the_solve_ended() -> None:
    """A proved cell has its gap, its course down to it, and nothing that JSON refuses."""
    facts = measure(SMALL)
    json.dumps(facts, allow_nan=False)
    assert facts["cell"] == SMALL.to_dict()
    assert facts["status"] == "optimal"
    assert facts["gap"] <= facts["requested_gap"]
    assert 0 < facts["first_schedule_s"] <= facts["seconds"]
    assert facts["gaps"][-1][1] <= facts["requested_gap"]
    assert facts["overhead_bound_j"] <= facts["overhead_j"] * (1 + 1e-9)
    assert facts["peak_memory_bytes"] > 2**20
    assert facts["versions"]["poetmodel"]


def test_paper_has_the_gap_of_its_own_model() -> None:
    """What ``paper`` proves is of its model, which is not the problem's."""
    facts = measure(replace(SMALL, method="paper", ram="90%", limit_s=30.0))
    assert facts["formulation"] == "paper"
    assert facts["gap"] <= facts["requested_gap"]
    assert facts["overhead_bound_j"] == 0.0
    assert facts["statistics"]["columns"] > 2000


def test_budget_below_the_floor_is_proved_infeasible() -> None:
    """A cell that nothing can solve is a result like any other."""
    facts = measure(Cell(goal=1, model="paper/linear", device="paper-m4", ram="1%"))
    assert facts["status"] == "infeasible"
    assert facts["ram_budget_bytes"] < facts["floor_bytes"]
    assert facts["first_schedule_s"] is None
    assert facts["gaps"] == []


def test_refusal_is_recorded_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing solver or a licence that is too small fails that cell only."""

    def refuse(*_: object, **__: object) -> None:
        raise BackendUnavailableError("no licence for that")

    monkeypatch.setattr(measuring.pm, "solve", refuse)
    facts = measure(SMALL)
    assert facts["status"] == FAILED
    assert facts["reason"] == "BackendUnavailableError: no licence for that"
    assert facts["cell"] == SMALL.to_dict()


def test_peak_memory_counts_what_was_ever_resident() -> None:
    """Memory that was given back still counts."""
    before = peak_memory_bytes()
    block = bytearray(before + 50_000_000)
    block[::4096] = bytes(len(block[::4096]))
    del block
    assert peak_memory_bytes() >= before + 40_000_000
