"""Compiled PyTorch steps as files: read, judged, refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kit.report_steps import RESERVED_BYTES, step_values
from kit.worked import bench_device, skip_problem
from poetmodel.errors import InputError
from poetmodel.problem import Problem
from poetmodel.report.bars import comparison_bars
from poetmodel.report.comparison import compare, comparison_facts
from poetmodel.report.facts import facts, graph_facts
from poetmodel.report.figures import figures
from poetmodel.report.presenter import share
from poetmodel.report.step_file import parse_step, step_subject
from poetmodel.report.timeline import timeline_chart
from poetmodel.report.wording import answers
from poetmodel.solver import solve

if TYPE_CHECKING:
    from kit.messages import Told


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
    assert note.startswith("6 B of the step's RAM are reserved: inputs 6 B")
    told = facts(found)["step"]
    assert told == {
        key: value for key, value in values.items() if key not in ("result", "scheduled")
    }
    assert facts(found)["commands"] == [f"step = {values['call']}\nprint(step.verify().summary())"]


def test_the_ram_of_a_step_has_one_value() -> None:
    """Budget, peak and keep-all are those of the step in facts, charts and comparison alike."""
    values = step_values(skip_problem()) | {"keep_all_bytes": 20}
    one = step_subject(values, source="s.json")
    budget, peak = values["budget_bytes"], values["plan"]["peak_bytes"]
    found, chart = facts(one), timeline_chart(one)
    assert found["budget_bytes"] == found["problem"]["ram_budget_bytes"] == budget
    assert found["peak_ram_bytes"] == found["plan"]["peak_ram_bytes"] == peak
    assert found["binding"]["ram_bytes"] == peak
    assert graph_facts(one)["checkpoint_all_peak_bytes"] == 20
    assert (chart["budget"], max(chart["during"]), max(chart["ghost"][1])) == (budget, peak, 20)
    held = [sum(stay[1] for stay in chart["stays"] if stay[2] <= p < stay[3]) for p in (0, -1)]
    assert min(held) >= RESERVED_BYTES
    (comparison,) = compare([one])
    methods = {each["method"]: each for each in comparison_facts(one, [comparison])["methods"]}
    assert methods["checkpoint-all"]["peak_ram_bytes"] == 20
    bars = comparison_bars(comparison)
    (place,) = (k for k, column in enumerate(bars.columns) if column.key == "peak_ram_bytes")
    assert bars.lines[0].cells[place].value == peak
    assert bars.columns[place].limit_text == f"{budget} B"


def test_keep_all_of_operations_in_parts_has_a_name_of_its_own() -> None:
    """Where it takes less than the step as captured it is not what 100 % of a budget is."""
    one = step_subject(step_values(skip_problem()) | {"keep_all_bytes": 190}, source="s.json")
    chart, bars = timeline_chart(one), comparison_bars(compare([one])[0])
    assert max(chart["ghost"][1]) == 21
    assert chart["ghost_name"] == "keep-all in parts"
    assert bars.lines[1].name == "keep-all in parts"


def test_the_peak_of_a_step_is_that_of_its_plan() -> None:
    """Where transfers run beside the computing the plan may hold more than the schedule."""
    values = step_values(skip_problem())
    one = step_subject(values, source="s.json")
    assert one.check is not None
    more = replace(one.check, peak_ram_bytes=one.check.peak_ram_bytes + 3)
    later = replace(one, check=more)
    bars = comparison_bars(compare([later])[0])
    (place,) = (k for k, column in enumerate(bars.columns) if column.key == "peak_ram_bytes")
    peaks = (facts(later)["peak_ram_bytes"], facts(later)["plan"]["peak_ram_bytes"])
    assert {*peaks, bars.lines[0].cells[place].value} == {values["plan"]["peak_bytes"] + 3}


def measured(problem: Problem) -> Problem:
    """Return a problem with the same costs as if they were measured here, to take least time."""
    costs = replace(problem.costs, device=None)
    return replace(problem, costs=costs, minimize="time")


def test_a_step_that_takes_least_time_speaks_of_time() -> None:
    """Nobody asked for energies: answers, comparison, figures and table are about seconds."""
    one = step_subject(step_values(measured(skip_problem())), source="s.json")
    found = facts(one)
    assert not found["asks_energy"]
    price = answers(found)[2]
    share_of = found["makespan_s"] / found["pass_s"] - 1
    assert price.word == f"+{share(share_of)} time"
    assert " J" not in price.text
    bars = comparison_bars(compare([one])[0])
    assert bars.columns[0].name == "time above a single pass"
    assert bars.lines[0].cells[0].value == pytest.approx(share_of)
    assert not any(row[0].key.endswith("_j") for _, rows in figures([found]) for row in rows)


def test_energies_that_were_asked_for_are_told() -> None:
    """As the objective, as a limit, or of a device, then behind the time."""
    problem = skip_problem()
    timed = measured(problem)
    assert answers(facts(step_subject(step_values(problem), source="")))[2].word.endswith("energy")
    for asked in (
        replace(timed, energy_budget=100.0),
        replace(timed, costs=replace(timed.costs, device=bench_device())),
    ):
        price = answers(facts(step_subject(step_values(asked), source="s.json")))[2]
        if asked.energy_budget is not None:
            assert price.word.endswith("time")
            assert " J, " in price.text
        assert asked.asks_energy


def test_a_step_survives_json() -> None:
    """Written and read again it is the same; another object is none."""
    values = step_values(skip_problem())
    assert parse_step(json.dumps(values)) == values
    assert parse_step(json.dumps(values | {"format": "poetmodel-step", "version": 1})) == values
    for version in (True, 1.0, 2):  # what only equals the number is left for the check
        former = values | {"format": "poetmodel-step", "version": version}
        assert parse_step(json.dumps(former)) == former
    assert parse_step(json.dumps(values["result"])) is None
    assert parse_step(json.dumps({"format": "poetmodel-step", "version": 1})) is None
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
    "change",
    [
        _without("torch"),
        _with(1, "surprise"),
        _with(3, "version"),
        _with(2.0, "version"),
        _with("much", "budget_bytes"),
        _with("later", "plan", "mode"),
        _with(float("nan"), "compile_s"),
        _without("certificate", "equal"),
        _without("scheduled", "graph", "nodes"),
        _without("result", "problem"),
        _without("result", "R"),
        _with("0" * 64, "result", "graph", "sha256"),
        _with([1.0], "scheduled", "costs", "compute_time_s"),
        _with([-1.0] * 4, "scheduled", "costs", "compute_time_s"),
        _with([1.0], "scheduled", "costs", "page_in_time_s"),
    ],
    ids=[
        *("no torch", "surprise", "newer", "real version"),
        *("budget", "mode", "compile_s", "no equal", "no nodes"),
        *("no problem", "no schedule", "another graph", "one time", "times below 0", "one page-in"),
    ],
)
def test_what_is_no_step_is_refused(change: Any, told: Told) -> None:
    """The file and the key are named."""
    values = step_values(skip_problem())
    change(values)
    with told.raises(InputError):
        step_subject(values, source="s.json")
