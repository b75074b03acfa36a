"""The answers of a report: about schedules, and about compiled steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kit.report_steps import certificate, step_values
from kit.report_subjects import subject
from kit.worked import skip_problem
from poetmodel.problem import TotalsConstraint
from poetmodel.report.facts import facts
from poetmodel.report.figures import measured_rows
from poetmodel.report.wording import REMEDY, answers, step_answers
from poetmodel.schedule import Schedule


def test_answers_of_a_proven_schedule() -> None:
    """It fits, it is proven, and it costs 1 J on 10 J."""
    fit, proof, price = answers(facts(subject(skip_problem())))
    assert (fit.word, fit.mood) == ("Fits", "good")
    assert "of 13 B" in fit.text
    assert (proof.word, proof.mood) == ("Proven optimal", "good")
    assert "no schedule of this problem needs less than 11 J" in proof.text
    assert price.word == "+10 % energy"
    assert "11 J a step" in price.text
    assert "needs 10 J; 11 s, 10 % more" in price.text


def test_what_is_not_proven_is_not_called_so() -> None:
    """A gap is told as what could be saved; a bound of nothing, or none, proves nothing."""
    found = facts(subject(skip_problem()))
    proof = answers({**found, "status": "feasible", "gap": 0.25})[1]
    assert (proof.word, proof.mood) == ("Within 25 %", "warn")
    assert "at most 25 % of the energy overhead" in proof.text
    assert answers({**found, "status": "feasible", "gap": 1.0})[1].word == "Not proven"
    assert answers({**found, "gap": None, "bound_j": None})[1].word == "Unknown"


def test_rejected_schedule_is_told_first() -> None:
    """Nothing is claimed of it."""
    broken = Schedule(R=((0, 0), (1, 1), (2, 2), (3, 3)), S_RAM=((1, 0), (2, 1)))
    fit, proof, _ = answers(facts(subject(skip_problem(), broken)))
    assert (fit.word, fit.mood) == ("Rejected", "bad")
    assert (proof.word, proof.mood) == ("No", "bad")


def test_other_objectives_are_judged_by_their_own_gap() -> None:
    """With the least RAM asked for, the proof speaks of RAM."""
    found = facts(subject(skip_problem(minimize="ram")))
    assert (found["gap"], found["bound_j"], found["overhead_bound_j"]) == (0.0, None, None)
    proof = answers(found)[1]
    assert proof.word == "Proven optimal"
    assert "the least ram of this problem is 12 B or more" in proof.text


def test_own_objectives_and_constraints_are_told() -> None:
    """By their weights and their number."""
    rows = (TotalsConstraint(name="wear", terms=(("bytes_written", 1),), upper=4),)
    own = {"minimize": "own", "own_objective": (("energy_j", 1), ("page_ins:a", 0.5))}
    fit, proof, _ = answers(facts(subject(replace(skip_problem(), constraints=rows, **own))))
    assert fit.text.endswith("; 1 own constraint kept")
    assert proof.word == "Proven optimal"
    assert proof.text.startswith("energy_j + 0.5 page_ins:a has the bound 11; gap 0 %")


def test_without_costs_nothing_is_said_of_energy() -> None:
    """Unknown stays unknown."""
    found = facts(replace(subject(skip_problem()), costs=None))
    assert found["energy_j"] is found["makespan_s"] is found["gap"] is None
    assert [answer.word for answer in answers(found)] == ["Fits", "Unknown", "Unknown"]


def test_gap_is_between_the_judge_and_the_stated_bound() -> None:
    """A schedule that costs more than the file's gets the larger gap."""
    problem = skip_problem()
    paging = subject(skip_problem(recompute=False)).schedule
    found = facts(subject(problem, paging))
    assert (found["overhead_j"], found["overhead_bound_j"], found["gap"]) == (2.0, 1.0, 0.5)


def test_deadline_is_told() -> None:
    """The limit and what was used of it."""
    fit = answers(facts(subject(skip_problem(deadline="120%"))))[0]
    assert "deadline 12 s kept with 11 s" in fit.text


def told(**changes: Any) -> list[tuple[str, str, str]]:
    """Return word, text and mood of the answers about a step with such a certificate."""
    values = step_values(skip_problem(), certificate=certificate(**changes))
    return [(answer.word, answer.text, answer.mood) for answer in step_answers(values)]


def test_a_good_step() -> None:
    """Equal, kept, and the times side by side."""
    same, kept, fast = told()
    assert same == (
        "Equal",
        "all 9 results (loss, gradients, buffers) and the random generator, bit by bit",
        "good",
    )
    assert kept[0] == "Kept"
    assert kept[1].startswith("heap peak 90 B of ")
    assert kept[1].endswith("; that is 50 % of eager PyTorch's 180 B")
    assert fast[0] == "250 ms"
    assert fast[1].startswith(
        "eager PyTorch 125 ms; least of several steps each, 1 thread; planned "
    )


def test_differences_and_excess_are_told() -> None:
    """Neither is called good."""
    one = {"name": "loss", "largest": 0.5, "told": "by up to 0.5", "op": "loss/nll"}
    same, kept, _ = told(equal=False, differences=[one], random_equal=False, within_budget=False)
    assert same == (
        "Different",
        "1 of 9 results differ, listed below; the random generator ends in another state",
        "bad",
    )
    assert (kept[0], kept[2]) == ("Exceeded", "bad")
    (same, *_) = told(equal=False, random_equal=False)
    assert same[1] == "0 of 9 results differ; the random generator ends in another state"


def test_a_plan_for_another_device_is_called_so() -> None:
    """Its time is not that of the host where the step was measured."""
    values = step_values(skip_problem())
    values["plan"]["device"] = "Small Board"
    text = step_answers(values)[2].text
    assert text.startswith("eager PyTorch 125 ms; ")
    assert text.endswith(" on Small Board, not on the host where the step ran")
    del values["plan"]["device"]
    assert " on " not in step_answers(values)[2].text


def test_a_step_that_was_not_verified_says_how() -> None:
    """Nothing is claimed; the plan's figures are given as such."""
    values = step_values(skip_problem(), certificate=None)
    same, kept, fast = step_answers(values)
    assert (same.word, same.text, same.mood) == ("Not verified", REMEDY, "warn")
    assert "step.verify(" in REMEDY
    assert kept.word == fast.word == "Not measured"
    assert kept.text.startswith("the plan needs ")
    assert fast.text.startswith("planned ")
    for measured, _, eager in measured_rows(values):
        assert measured.value is None
        assert eager.value is None
