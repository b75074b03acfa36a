"""Compiled PyTorch steps on a page."""

from dataclasses import replace

import pytest

from kit.report_subjects import RESERVED_BYTES, planned_subject, step_subject, step_values
from kit.worked import bench_device, skip_problem
from poetmodel.report.facts import graph_facts, schedule_facts
from poetmodel.report.presenter import format_ratio
from poetmodel.report.table_rows import metric_sections
from poetmodel.report.timeline import timeline_chart
from poetmodel.report.wording import schedule_answers
from poetmodel.solver import solve


def test_a_step_is_judged_and_planned():
    """Its schedule has the values of the solve, and the facts about the step are retained."""
    problem = skip_problem()
    values = step_values(problem)
    found = planned_subject(problem, values)
    assert found.verdict.valid
    assert found.simulation.energy_j == pytest.approx(solve(problem).energy_j)
    assert found.graph.sha256 == problem.graph.sha256
    assert found.planned.check.peak_ram_bytes + RESERVED_BYTES == values["plan"]["peak_bytes"]
    (note,) = found.notes
    assert note.startswith("6 B of the step's RAM are reserved: inputs 6 B")
    told = schedule_facts(found)["step"]
    assert told == values
    assert schedule_facts(found)["commands"] == [
        f"step = {values['call']}\nprint(step.verify().summary())"
    ]


def test_the_ram_of_a_step_has_one_value():
    """Budget, peak and keep-all are those of the step in facts and charts alike."""
    values = step_values(skip_problem(), keep_all_bytes=20)
    one = planned_subject(skip_problem(), values)
    budget, peak = values["budget_bytes"], values["plan"]["peak_bytes"]
    found, chart = schedule_facts(one), timeline_chart(one)
    assert found["budget_bytes"] == found["problem"]["ram_budget_bytes"] == budget
    assert found["peak_ram_bytes"] == found["plan"]["peak_ram_bytes"] == peak
    assert found["binding"]["ram_bytes"] == peak
    assert graph_facts(one)["checkpoint_all_peak_bytes"] == 20
    assert (chart["budget"], max(chart["during"]), max(chart["ghost"][1])) == (budget, peak, 20)
    held = [sum(stay[1] for stay in chart["stays"] if stay[2] <= p < stay[3]) for p in (0, -1)]
    assert min(held) >= RESERVED_BYTES


def test_keep_all_in_parts_has_a_name_and_the_peak_is_the_plans():
    """Keep-all of operations in parts needs less than the captured step, 100 % of a budget.

    The peak is that of the plan, which may hold more than the schedule during transfers.
    """
    one = step_subject(skip_problem(), keep_all_bytes=190)
    chart = timeline_chart(one)
    assert max(chart["ghost"][1]) == 21
    assert chart["ghost_name"] == "keep-all in pieces"
    values = step_values(skip_problem())
    one = planned_subject(skip_problem(), values)
    more = replace(one.planned.check, peak_ram_bytes=one.planned.check.peak_ram_bytes + 3)
    later = replace(one, planned=replace(one.planned, check=more))
    peaks = (
        schedule_facts(later)["peak_ram_bytes"],
        schedule_facts(later)["plan"]["peak_ram_bytes"],
    )
    assert {*peaks} == {values["plan"]["peak_bytes"] + 3}


def measured(problem):
    """Return a problem with the same costs as if they were measured here, to minimize time."""
    costs = replace(problem.costs, device=None)
    return replace(problem, costs=costs, minimize="time")


def test_a_step_that_takes_least_time_speaks_of_time():
    """Without a request for energies, answers, values and table are in seconds.

    Energies are shown if they are the objective, a limit, or of a device, then after the time.
    """
    one = step_subject(measured(skip_problem()))
    found = schedule_facts(one)
    assert not found["asks_energy"]
    price = schedule_answers(found)[2]
    share_of = found["makespan_s"] / found["pass_s"] - 1
    assert price.word == f"+{format_ratio(share_of)} time"
    assert " J" not in price.text
    assert not any(
        row[0].key.endswith("_j") for _, rows in metric_sections([found]) for row in rows
    )
    problem = skip_problem()
    timed = measured(problem)
    assert schedule_answers(schedule_facts(step_subject(problem)))[2].word.endswith("energy")
    for asked in (
        replace(timed, energy_budget=100.0),
        replace(timed, costs=replace(timed.costs, device=bench_device())),
    ):
        price = schedule_answers(schedule_facts(step_subject(asked)))[2]
        if asked.energy_budget is not None:
            assert price.word.endswith("time")
            assert " J, " in price.text
        assert asked.uses_energy
