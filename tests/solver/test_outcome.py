"""Results of candidates and bounds: permitted claims, and errors."""

import pytest

from kit.instances import make_rng
from kit.worked import skip_graph, skip_problem
from poetmodel.device import Costs
from poetmodel.problem import Problem
from poetmodel.result import Status, Termination
from poetmodel.schedule import Schedule, checkpoint_all
from poetmodel.solver.outcome import (
    EQUALITY_TOLERANCE,
    is_tight,
    make_candidate,
    reported_bound,
)
from poetmodel.solver.request import Request
from poetmodel.solver.search import Search

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
KEPT = checkpoint_all(skip_graph())
"""All is kept: 15 bytes, which is above the budget."""


def finished(problem, *, gap=0.0, **fields):
    """Return the result of a search that the solver calls proved."""
    given = {"termination": Termination.PROVED, **fields}
    search = Search(problem=problem, request=Request(gap=gap), **given)
    return search.result(formulation="compact")


# -- values ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("minimize", "counts", "recomputed", "paged", "least"),
    [
        ("energy", "serial", 1.0, 2.0, 0.0),
        ("time", "serial", 1.0, 2.0, 0.0),
        ("time", "compute", 1.0, 0.0, 0.0),
        ("ram", "serial", 12, 12, 12),
        ("writes", "serial", 0, 4, 0.0),
    ],
)
def test_values_count_beyond_what_every_schedule_pays(minimize, counts, recomputed, paged, least):
    """10 J and 10 s of one pass are excluded; RAM and writes are whole.

    The minimum needs no solver: it is the floor for RAM, else 0.
    """
    problem = skip_problem(minimize=minimize, deadline_counts=counts)
    assert make_candidate(problem, RECOMPUTED).value == recomputed
    assert make_candidate(problem, PAGED).value == paged
    assert problem.objective.known_bound == least


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
def test_a_bound_is_snapped_only_within_rounding_errors(value, bound, expected):
    """It must be close relative to the overhead and, by the contract's tolerance, to all energy."""
    assert is_tight(skip_problem(), value, bound) is expected


@pytest.mark.parametrize("minimize", ["ram", "writes"])
def test_bytes_are_whole(minimize):
    """A bound reaches the next whole number of bytes, but not one byte more, whatever the sum."""
    problem = skip_problem(minimize=minimize)
    assert is_tight(problem, 4e9, 4e9 - 0.4)
    assert not is_tight(problem, 4e9, 4e9 - 1)


# -- bounds ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("limits", "schedule", "bound", "reported"),
    [
        pytest.param({}, PAGED, 1.0, 1.0, id="below the value"),
        pytest.param({}, PAGED, 2.0 - 1e-12, 2.0, id="rounded down"),
        pytest.param({}, PAGED, 2.0 + 0.5 * EQUALITY_TOLERANCE, 2.0, id="rounded up"),
        pytest.param({}, KEPT, 2.1, 0.0, id="above a value that the verifier rejects"),
        pytest.param({"minimize": "ram", "ram": 15}, KEPT, 3.0, 12, id="below the floor of RAM"),
    ],
)
def test_the_bound_that_is_reported(limits, schedule, bound, reported):
    """It is as proved, but equal to the value up to rounding errors, and at least the floor."""
    problem = skip_problem(**limits)
    assert reported_bound(problem, make_candidate(problem, schedule), bound) == reported


def test_bytes_are_refuted_by_one():
    """They are whole, so one byte above the peak is no rounding error. A candidate is frozen."""
    problem = skip_problem(minimize="ram")
    candidate = make_candidate(problem, PAGED)
    for more, refuted in ((0.0, False), (0.4, False), (1.0, True)):
        bound = candidate.value + more
        search = Search(problem=problem, request=Request(), best=candidate, bound=bound)
        assert search.is_refuted() == refuted
    candidate = make_candidate(skip_problem(), PAGED)
    with pytest.raises(AttributeError):
        candidate.value = 0.0


# -- results -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("schedule", "requested", "gap", "status"),
    [
        (RECOMPUTED, 0.0, 0.0, Status.OPTIMAL),
        (PAGED, 0.5, 0.5, Status.OPTIMAL),
        (PAGED, 0.6, 0.5, Status.OPTIMAL),
        (PAGED, 0.4, 0.5, Status.FEASIBLE),
    ],
)
def test_optimal_means_the_requested_gap(schedule, requested, gap, status):
    """The gap is of the overhead: bound 1 J of 2 J is 50 %, though 8 % of all energy."""
    candidate = make_candidate(skip_problem(), schedule)
    result = finished(skip_problem(), gap=requested, best=candidate, bound=1.0)
    assert (result.status, result.gap) == (status, gap)
    assert (result.termination == Termination.PROVED) == (status == Status.OPTIMAL)
    assert (result.overhead_bound_j, result.bound_j) == (1.0, 11.0)


@pytest.mark.parametrize("minimize", ["energy", "time"])
def test_no_bound_is_above_its_value_in_the_last_digit(minimize):
    """Figures are sums in another order than baseline plus bound: the bound is never the larger."""
    rng = make_rng(minimize)
    rounded = 0
    for _ in range(40):
        graph = skip_graph(workspace=True)
        costs = Costs.from_arrays(
            graph,
            compute_time_s=[rng.random() for _ in graph.nodes],
            compute_energy_j=[rng.random() for _ in graph.nodes],
        )
        problem = Problem(graph, costs, ram=12, minimize=minimize)
        candidate = make_candidate(problem, RECOMPUTED)
        result = finished(problem, best=candidate, bound=candidate.value)
        value, bound = result.value or 0.0, result.objective_bound or 0.0
        rounded += value < problem.objective.baseline + candidate.value
        assert problem.objective.baseline < bound <= value
        stated = result.to_dict()
        assert stated["objective"]["bound"] <= stated["objective"]["value"]
        assert minimize != "energy" or stated["bound_j"] <= stated["energy_j"]
    assert rounded, "no sum was rounded"


LATE, STALLED = Termination.TIME_LIMIT, Termination.STALLED


@pytest.mark.parametrize(
    ("schedule", "outcome", "status", "termination", "bound_j", "words"),
    [
        # The schedule is verified, so a bound above it, or a proof that there is none, is wrong.
        (PAGED, {"bound": 2.1}, Status.FEASIBLE, STALLED, 10.0, "refutes"),
        (PAGED, {"is_infeasible": True}, Status.FEASIBLE, STALLED, 10.0, "refutes"),
        # A proof of less than requested is of something else, so it is not passed on.
        (PAGED, {}, Status.FEASIBLE, STALLED, 10.0, ""),
        (PAGED, {"termination": LATE, "bound": 1.0}, Status.FEASIBLE, LATE, 11.0, ""),
        # What the verifier rejects is feasible at most, whatever the solver proved.
        (KEPT, {"bound": 0.0}, Status.FEASIBLE, STALLED, 10.0, ""),
        # Without a schedule there has to be a proof.
        (None, {"termination": LATE, "reason": "slow"}, Status.UNKNOWN, LATE, None, "slow"),
        (None, {}, Status.UNKNOWN, STALLED, None, ""),
        (None, {"is_infeasible": True}, Status.INFEASIBLE, Termination.PROVED, None, ""),
    ],
)
def test_what_may_be_claimed(schedule, outcome, status, termination, bound_j, words):
    """Claims that a verified schedule does not refute; missing values are None, reasons stay."""
    candidate = schedule and make_candidate(skip_problem(), schedule)
    result = finished(skip_problem(), best=candidate, **outcome)
    assert (result.status, result.termination) == (status, termination)
    assert (result.schedule, result.bound_j) == (schedule, bound_j)
    assert result.violations == (candidate.violations if candidate else ())
    assert len(result.violations) == (schedule is KEPT)
    assert words in result.reason
    assert schedule or (result.energy_j, result.gap) == (None, None)


@pytest.mark.parametrize(("minimize", "value", "bound"), [("time", 12.0, 11.0), ("writes", 4, 1)])
def test_other_quantities_bound_no_energy(minimize, value, bound):
    """The bound is on the minimized quantity, not on the energy."""
    problem = skip_problem(minimize=minimize)
    result = finished(problem, best=make_candidate(problem, PAGED), bound=1.0)
    assert (result.value, result.objective_bound) == (value, bound)
    assert (result.bound_j, result.overhead_bound_j) == (None, 0.0)
