"""Compiled PyTorch steps as files: read, judged, refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from poetmodel.errors import InputError
from poetmodel.problem import Problem
from poetmodel.report.facts import facts
from poetmodel.report.step_file import parse_step, step_subject
from poetmodel.solver import solve
from report_steps import RESERVED_BYTES, step_values
from worked import skip_problem


def test_a_step_is_judged_and_planned() -> None:
    """Its schedule has the figures of the solve, and all that is known of the step goes along."""
    problem = skip_problem()
    values = step_values(problem)
    found = step_subject(values, source="s.json", label="B")
    assert found.label == "B"
    assert found.verdict.valid
    assert found.simulation.energy_j == pytest.approx(solve(problem).energy_j)
    assert found.graph.sha256 == problem.graph.sha256
    assert found.check is not None
    assert found.check.peak_ram_bytes + RESERVED_BYTES == values["plan"]["peak_bytes"]
    (note,) = found.notes
    assert note.startswith("6 B of the step's budget are reserved")
    told = facts(found)["step"]
    assert told == {
        key: value for key, value in values.items() if key not in ("result", "scheduled")
    }
    assert facts(found)["commands"] == [f"step = {values['call']}\nprint(step.verify().summary())"]


def test_a_step_survives_json() -> None:
    """Written and read again it is the same; another object is none."""
    values = step_values(skip_problem())
    assert parse_step(json.dumps(values)) == values
    assert parse_step(json.dumps(values["result"])) is None
    assert parse_step("[]") is None
    assert parse_step("{") is None


def test_a_schedule_that_breaks_a_rule_is_told() -> None:
    """The verifier does not believe the file."""
    values = step_values(skip_problem())
    values["result"]["R"] = values["result"]["R"][:-1]
    found = step_subject(values, source="s.json")
    assert not found.verdict.valid
    assert found.plan is None


def test_a_plan_with_another_peak_is_told() -> None:
    """The page says so where its plan is not the one that ran."""
    values = step_values(skip_problem())
    values["plan"]["peak_bytes"] += 1
    notes = step_subject(values, source="s.json").notes
    assert any("another peak than the one that ran" in note for note in notes)


def test_costs_of_a_step_without_storage() -> None:
    """What cannot be paged has no costs of pages."""
    problem = skip_problem()
    costs = copy.copy(problem.costs)
    object.__setattr__(costs, "pages", None)
    unpaged = Problem(problem.graph, costs, ram="100%", paging=False)
    assert step_subject(step_values(unpaged), source="s.json").verdict.valid


def _without(*path: str) -> Any:
    def change(values: dict[str, Any]) -> None:
        for key in path[:-1]:
            values = values[key]
        del values[path[-1]]

    return change


def _with(value: Any, *path: str) -> Any:
    def change(values: dict[str, Any]) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("torch"), "s.json: torch: missing"),
        (_with(1, "surprise"), "s.json: surprise: unknown key; accepted are the keys of a step"),
        (_with("much", "budget_bytes"), "s.json: budget_bytes: "),
        (_with("later", "plan", "mode"), "s.json: plan.mode: "),
        (_with(float("nan"), "compile_s"), "s.json: compile_s: "),
        (_without("certificate", "equal"), "s.json: certificate.equal: missing"),
        (_without("scheduled", "graph", "nodes"), "nodes"),
        (_without("result", "problem"), "s.json: result.problem: missing"),
        (_without("result", "R"), "s.json: result: R: the file holds no schedule"),
        (_with("0" * 64, "result", "graph", "sha256"), "the schedule was made for graph"),
        (_with([1.0], "scheduled", "costs", "compute_time_s"), "expected a figure for each node"),
        (_with([-1.0] * 4, "scheduled", "costs", "compute_time_s"), "expected a finite number >="),
        (_with([1.0], "scheduled", "costs", "page_in_time_s"), "expected a figure for each node"),
    ],
)
def test_what_is_no_step_is_refused(change: Any, words: str) -> None:
    """The file and the key are named."""
    values = step_values(skip_problem())
    change(values)
    with pytest.raises(InputError) as caught:
        step_subject(values, source="s.json")
    assert words in str(caught.value)
    assert str(caught.value).startswith("s.json: ")
