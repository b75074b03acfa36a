"""The answers of a report: about schedules, and about compiled steps."""

from dataclasses import replace

import pytest

from kit.report_steps import certificate, step_values
from kit.report_subjects import subject
from kit.worked import skip_problem
from poetmodel.problem import Constraint
from poetmodel.report.facts import facts
from poetmodel.report.figures import measured_rows
from poetmodel.report.wording import REMEDY, answers, step_answers
from poetmodel.schedule import Schedule

WEAR = Constraint(name="wear", terms={"bytes_written": 1}, upper=4)
OWN = {"minimize": "own", "own_objective": (("energy_j", 1), ("page_ins:a", 0.5))}
BROKEN = Schedule(R=((0, 0), (1, 1), (2, 2), (3, 3)), S_RAM=((1, 0), (2, 1)))


def lines(found):
    """Return answers with their mood, one a line."""
    return "\n".join(f"{answer.mood}: {answer.word}: {answer.text}" for answer in found)


@pytest.mark.parametrize(
    ("limits", "changes"),
    [
        pytest.param({}, {}, id="proven"),
        pytest.param({}, {"status": "feasible", "gap": 0.25}, id="a gap"),
        pytest.param({}, {"status": "feasible", "gap": 1.0}, id="a bound of nothing"),
        pytest.param({}, {"gap": None, "bound_j": None}, id="no bound"),
        pytest.param({"deadline": "120%"}, {}, id="deadline"),
        pytest.param({"minimize": "ram"}, {}, id="least RAM"),
    ],
)
def test_answers_about_a_schedule(limits, changes, told):
    """It fits in 13 B and costs 1 J on 10 J; what is not proven is not called so."""
    told(lines(answers(facts(subject(skip_problem(**limits))) | changes)))


def test_rejected_schedules_and_own_wishes_are_told(told):
    """Of a broken one nothing is claimed; own objectives come by weights and their number."""
    told(lines(answers(facts(subject(skip_problem(), BROKEN)))), "rejected")
    problem = replace(skip_problem(), constraints=(WEAR,), **OWN)
    told(lines(answers(facts(subject(problem)))), "own")


def test_without_costs_nothing_is_said_of_energy():
    """Unknown stays unknown.

    A schedule that costs more than the file's gets the larger gap, to the stated bound.
    """
    found = facts(replace(subject(skip_problem()), costs=None))
    assert found["energy_j"] is found["makespan_s"] is found["gap"] is None
    assert [answer.word for answer in answers(found)] == ["Fits", "Unknown", "Unknown"]
    problem = skip_problem()
    paging = subject(skip_problem(recompute=False)).schedule
    found = facts(subject(problem, paging))
    assert (found["overhead_j"], found["overhead_bound_j"], found["gap"]) == (2.0, 1.0, 0.5)


LOSS = {"name": "loss", "largest": 0.5, "told": "by up to 0.5", "op": "loss/nll"}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="good"),
        pytest.param(
            {
                "equal": False,
                "differences": [LOSS],
                "random_equal": False,
                "within_budget": False,
            },
            id="different and above",
        ),
        pytest.param({"equal": False, "random_equal": False}, id="random state alone"),
    ],
)
def test_answers_about_a_step(changes, told):
    """Equal, kept, and the times side by side; differences and excess are not called good."""
    told(lines(step_answers(step_values(skip_problem(), certificate=certificate(**changes)))))


@pytest.mark.parametrize("device", ["Small Board", None])
def test_a_plan_for_another_device_is_called_so(device, told):
    """Its time is not that of the host where the step was measured."""
    values = step_values(skip_problem())
    values["plan"]["device"] = device
    if device is None:
        del values["plan"]["device"]
    told(step_answers(values)[2].text)


def test_a_step_that_was_not_verified_says_how(told):
    """Nothing is claimed; the plan's figures are given as such."""
    values = step_values(skip_problem(), certificate=None)
    found = step_answers(values)
    told(lines(found))
    assert found[0].text == REMEDY
    for measured, _, eager in measured_rows(values):
        assert measured.value is None
        assert eager.value is None
