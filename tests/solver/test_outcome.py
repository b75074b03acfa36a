"""From a candidate and a bound to a result: what may be claimed, and what is an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kit.instances import seeded
from kit.worked import skip_graph, skip_problem
from poetmodel.device import Costs
from poetmodel.problem import Problem
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.schedule import Schedule, checkpoint_all
from poetmodel.solver.outcome import (
    EQUAL,
    Candidate,
    Outcome,
    finish,
    is_refuted,
    is_tight,
    reported_bound,
    verify_schedule,
)
from poetmodel.solver.request import Request

RECOMPUTED = Schedule(R=((0, 0), (1, 1), (2, 2), (3, 0), (3, 3)), S_RAM=((1, 0), (2, 1), (3, 2)))
"""`a` is recomputed for its last use: 1 J, 1 s, 12 bytes."""
PAGED = Schedule(
    R=((0, 0), (1, 1), (2, 2), (3, 3)),
    S_RAM=((1, 0), (2, 1), (3, 2)),
    S_AUX=((3, 0),),
    M_in=((3, 0),),
    M_out=((0, 0),),
)
"""`a` is paged: 2 J, 2 s, 12 bytes, 4 bytes written."""


def finished(problem: Problem, *, gap: float = 0.0, **outcome: Any) -> SolveResult:
    """Finish an outcome that the solver calls proved."""
    given = {"termination": Termination.PROVED, **outcome}
    return finish(problem, Request(gap=gap), Outcome(**given), formulation="compact")


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("minimize", "recomputed", "paged"),
    [("energy", 1.0, 2.0), ("time", 1.0, 2.0), ("ram", 12, 12), ("writes", 0, 4)],
)
def test_values_count_beyond_what_every_schedule_pays(
    minimize: str, recomputed: float, paged: float
) -> None:
    """10 J and 10 s of one pass are no part of them; RAM and writes count as they are."""
    problem = skip_problem(minimize=minimize)
    assert verify_schedule(problem, RECOMPUTED).value == recomputed
    assert verify_schedule(problem, PAGED).value == paged


def test_time_counts_in_the_meaning_of_the_deadline() -> None:
    """Where only compute time counts, paging takes none."""
    problem = skip_problem(minimize="time", deadline_counts="compute")
    assert verify_schedule(problem, PAGED).value == 0.0


def test_the_verifier_tells_violations() -> None:
    """A schedule above the budget is a candidate with violations."""
    candidate = verify_schedule(skip_problem(), checkpoint_all(skip_graph()))
    assert len(candidate.violations) == 1


@pytest.mark.parametrize(
    ("minimize", "least"), [("energy", 0.0), ("time", 0.0), ("writes", 0.0), ("ram", 12)]
)
def test_the_least_value_needs_no_solver(minimize: str, least: float) -> None:
    """The floor for RAM, else nothing."""
    assert skip_problem(minimize=minimize).objective.least == least


# -- equal up to rounding ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "bound", "expected"),
    [
        (1.0, 1.0, True),
        (1.0, 1.5, True),
        (0.0, 0.0, True),
        (1.0, 1.0 - 1e-12, True),
        (1.0, 1.0 - 1e-5, False),  # a hundred-thousandth of the overhead
        (1.0, 1.0 - 5e-7, False),  # little of the overhead, but 5e-8 of all energy
        (1.0, 1.0 - 5e-9, True),  # 5e-10 of all
        (1e-4, 1e-4 - 5e-9, False),  # 5e-10 of all, but 5e-5 of the overhead
        (1e-4, 1e-4 - 5e-11, True),
    ],
)
def test_a_bound_is_snapped_only_within_rounding_errors(
    value: float, bound: float, expected: bool
) -> None:
    """It must be close relative to the overhead and, by the contract's tolerance, to all energy."""
    assert is_tight(skip_problem(), value, bound) is expected


@pytest.mark.parametrize("minimize", ["ram", "writes"])
def test_bytes_are_whole(minimize: str) -> None:
    """A bound reaches the next whole number of bytes, but not one byte more, whatever the sum."""
    problem = skip_problem(minimize=minimize)
    assert is_tight(problem, 4e9, 4e9 - 0.4)
    assert not is_tight(problem, 4e9, 4e9 - 1)


# -- bounds ------------------------------------------------------------------------------------


def test_a_bound_below_the_value_is_reported_as_it_is() -> None:
    """The gap is what is missing."""
    candidate = verify_schedule(skip_problem(), PAGED)
    assert reported_bound(skip_problem(), candidate, 1.0) == 1.0


def test_a_bound_at_the_value_up_to_rounding_is_the_value() -> None:
    """Above or below by rounding errors alone: the gap is 0."""
    candidate = verify_schedule(skip_problem(), PAGED)
    assert reported_bound(skip_problem(), candidate, 2.0 - 1e-12) == 2.0
    assert reported_bound(skip_problem(), candidate, 2.0 + 0.5 * EQUAL) == 2.0


def test_a_bound_above_a_valid_value_proves_nothing() -> None:
    """The schedule is verified, so the bound is wrong: no bound, no optimality, and why."""
    candidate = verify_schedule(skip_problem(), PAGED)
    result = finished(skip_problem(), candidate=candidate, bound=2.1)
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.STALLED)
    assert result.overhead_bound_j == 0.0
    assert "refutes" in result.reason


def test_bytes_are_refuted_by_one() -> None:
    """They are whole, so a bound one byte above the peak is no rounding error."""
    problem = skip_problem(minimize="ram")
    candidate = verify_schedule(problem, PAGED)
    for more, refuted in ((0.0, False), (0.4, False), (1.0, True)):
        outcome = Outcome(
            termination=Termination.PROVED, candidate=candidate, bound=candidate.value + more
        )
        assert is_refuted(problem, outcome) == refuted


def test_a_bound_above_a_rejected_value_is_none() -> None:
    """What the verifier rejects proves nothing of the bound."""
    problem = skip_problem()
    rejected = verify_schedule(problem, checkpoint_all(skip_graph()))
    assert reported_bound(problem, rejected, 2.1) == rejected.value == 0.0


def test_the_floor_bounds_ram() -> None:
    """Even where the solver has proved less."""
    problem = skip_problem(minimize="ram", ram=15)
    whole = verify_schedule(problem, checkpoint_all(skip_graph()))
    assert reported_bound(problem, whole, 3.0) == 12


# -- results -----------------------------------------------------------------------------------


def test_a_gap_of_zero_is_optimal() -> None:
    """Value and bound agree."""
    result = finished(
        skip_problem(), candidate=verify_schedule(skip_problem(), RECOMPUTED), bound=1.0
    )
    assert (result.status, result.termination) == (Status.OPTIMAL, Termination.PROVED)
    assert (result.energy_j, result.bound_j, result.gap) == (11.0, 11.0, 0.0)


@pytest.mark.parametrize(
    ("requested", "status"), [(0.5, Status.OPTIMAL), (0.6, Status.OPTIMAL), (0.4, Status.FEASIBLE)]
)
def test_optimal_means_the_requested_gap(requested: float, status: Status) -> None:
    """The gap is of the overhead: bound 1 J of 2 J is 50 %, though 8 % of all energy."""
    candidate = verify_schedule(skip_problem(), PAGED)
    result = finished(skip_problem(), gap=requested, candidate=candidate, bound=1.0)
    assert (result.status, result.gap) == (status, 0.5)
    assert (result.overhead_bound_j, result.bound_j) == (1.0, 11.0)


@pytest.mark.parametrize("minimize", ["energy", "time"])
def test_no_bound_is_above_its_value_in_the_last_digit(minimize: str) -> None:
    """Figures are sums in another order than baseline plus bound: the bound is never the larger."""
    rng = seeded(minimize)
    rounded = 0
    for _ in range(40):
        graph = skip_graph(workspace=True)
        costs = Costs.from_arrays(
            graph,
            compute_time_s=[rng.random() for _ in graph.nodes],
            compute_energy_j=[rng.random() for _ in graph.nodes],
        )
        problem = Problem(graph, costs, ram=12, minimize=minimize)
        candidate = verify_schedule(problem, RECOMPUTED)
        result = finished(problem, candidate=candidate, bound=candidate.value)
        value, bound = result.objective_value or 0.0, result.objective_bound or 0.0
        rounded += value < problem.objective.baseline + candidate.value
        assert problem.objective.baseline < bound <= value
        stated = result.to_dict()
        assert stated["objective"]["bound"] <= stated["objective"]["value"]
        assert minimize != "energy" or stated["bound_j"] <= stated["energy_j"]
    assert rounded, "no sum was rounded"


def test_a_solver_that_ends_with_less_than_requested_has_stalled() -> None:
    """Its own proof is of something else, so it is not passed on."""
    candidate = verify_schedule(skip_problem(), PAGED)
    assert finished(skip_problem(), candidate=candidate).termination == Termination.STALLED
    stopped = finished(
        skip_problem(), candidate=candidate, termination=Termination.TIME_LIMIT, bound=1.0
    )
    assert (stopped.status, stopped.termination) == (Status.FEASIBLE, Termination.TIME_LIMIT)


def test_no_candidate_and_no_proof_is_unknown() -> None:
    """Absent is None, and the reason is kept."""
    result = finished(skip_problem(), termination=Termination.TIME_LIMIT, reason="too slow")
    assert (result.status, result.reason) == (Status.UNKNOWN, "too slow")
    assert (result.schedule, result.energy_j, result.bound_j, result.gap) == (None,) * 4
    assert finished(skip_problem()).termination == Termination.STALLED


def test_proved_infeasible() -> None:
    """Only with a proof."""
    result = finished(skip_problem(), infeasible=True, reason="proved: ...")
    assert (result.status, result.termination) == (Status.INFEASIBLE, Termination.PROVED)


def test_infeasible_with_a_valid_schedule_is_feasible() -> None:
    """A schedule that the verifier accepts disproves the solver."""
    candidate = verify_schedule(skip_problem(), PAGED)
    result = finished(skip_problem(), infeasible=True, candidate=candidate)
    assert (result.status, result.schedule) == (Status.FEASIBLE, PAGED)
    assert "refutes" in result.reason


def test_a_rejected_schedule_is_feasible_at_most() -> None:
    """No bound, no optimality, whatever the solver proved."""
    candidate = verify_schedule(skip_problem(), checkpoint_all(skip_graph()))
    result = finished(skip_problem(), candidate=candidate, bound=0.0)
    assert (result.status, result.bound_j) == (Status.FEASIBLE, 10.0)
    assert result.violations == candidate.violations


@pytest.mark.parametrize(("minimize", "value", "bound"), [("time", 12.0, 11.0), ("writes", 4, 1)])
def test_other_quantities_bound_no_energy(minimize: str, value: float, bound: float) -> None:
    """The bound is of the minimized quantity; of the energy nothing is claimed."""
    problem = skip_problem(minimize=minimize)
    result = finished(problem, candidate=verify_schedule(problem, PAGED), bound=1.0)
    assert (result.objective_value, result.objective_bound) == (value, bound)
    assert (result.bound_j, result.overhead_bound_j) == (None, 0.0)


def test_a_candidate_is_frozen() -> None:
    """What the verifier has seen cannot change after."""
    candidate: Candidate = verify_schedule(skip_problem(), PAGED)
    assert replace(candidate, value=3.0).value == 3.0
    with pytest.raises(AttributeError):
        candidate.value = 0.0  # type: ignore[misc]
