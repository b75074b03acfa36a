"""The three answers of a report, and its figures."""

from __future__ import annotations

from dataclasses import replace

from poetmodel.report.facts import facts
from poetmodel.report.wording import answers, figures, look_up
from poetmodel.schedule import Schedule
from report_subjects import subject
from worked import skip_problem


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
    proof = answers(facts(subject(skip_problem(minimize="ram"))))[1]
    assert proof.word == "Proven optimal"
    assert "the least ram of this problem is 12 B or more" in proof.text


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


def test_figures_stand_beside_each_other() -> None:
    """A row per figure, a cell per schedule; what nobody states has no row."""
    both = [facts(subject(skip_problem())), facts(subject(skip_problem(recompute=False)))]
    rows = {row.key: row for _, part in figures(both) for row in part}
    assert [cell[0] for cell in rows["energy_j"].cells] == [11.0, 12.0]
    assert rows["peak_ram_bytes"].cells[0][1] == f"{both[0]['peak_ram_bytes']} B"
    assert "problem.deadline_s" not in rows
    assert look_up(both[0], "problem.missing.more") is None
