"""From decisions per group to a schedule: by hand, and rows, limits and costs by the verifier."""

import pytest

from kit.instances import make_rng, scarce_problem
from kit.relaxation import (
    SOLVER_TOLERANCE,
    find_violated_rows,
    make_relaxation,
    place_point,
    ram_limit,
    random_rows,
    solve_relaxation,
    whole_points,
)
from kit.rotation import parametrize_parts
from kit.worked import comb_graph, recompute_before_update_problem
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.restorations import PAGE_IN, RECOMPUTE, Restoration
from poetmodel.model.grouping import Grouping
from poetmodel.problem import Quantity
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.schedule import checkpoint_all, simulate
from poetmodel.solver.lazy.disaggregation import disaggregate, violated_steps
from poetmodel.solver.outcome import make_candidate

# -- by hand -------------------------------------------------------------------------------------
#
# The comb: f0 f1 f2 are made in stages 0, 1 and 2, g2 g1 g0 in 3, 4 and 5. f0 is read in 1 and 5,
# f1 in 2 and 4, f2 in 3, g2 in 4, g1 in 5. Row 2 leaves the groups of stages 0-2 and 3-5.

COMB = comb_graph(3)
GROUPS = Grouping(6, frozenset({2}))
KEPT = {(1, 1), (1, 2)}
"""f1 and f2 are in RAM when the second group begins."""


def test_what_stays_in_its_group_needs_nothing():
    """One group, no decision: as keep-all has it."""
    assert disaggregate(COMB, Grouping(6)) == []
    partial = PartialSchedule(COMB)
    assert partial.schedule() == checkpoint_all(COMB)
    assert partial.row_bytes.tolist() == [4, 8, 12, 13, 10, 6]


@pytest.mark.parametrize(("decision", "kind"), [("recomputed", RECOMPUTE), ("paged_in", PAGE_IN)])
def test_what_comes_back_does_so_at_its_first_reader(decision, kind):
    """`f0`, not kept into stages 3-5, is made again or paged in for stage 5, its only reader."""
    restorations = disaggregate(COMB, GROUPS, kept=KEPT, **{decision: {(1, 0)}})
    assert restorations == [Restoration(5, 0, kind)]
    partial = PartialSchedule(COMB, restorations)
    assert partial.row_bytes.tolist() == [4, 8, 8, 9, 6, 6]
    assert partial.peak(5) == 6
    assert partial.highest_step(5) == 5  # beside f0 and g1; the first step has 5 B
    assert violated_steps(partial, 5) == [(t, t) for t in (1, 2, 3, 4, 5)]


def test_what_nobody_needs_is_dropped():
    """A page-in of a kept tensor, or of one that no stage of the group reads, with its inputs."""
    assert disaggregate(COMB, GROUPS, kept=KEPT, paged_in={(1, 1)}) == []
    assert disaggregate(COMB, GROUPS, kept={(1, 0), *KEPT}, recomputed={(1, 0)}) == []
    for_next_group = Grouping(6, frozenset({2, 3}))
    kept = {(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)}
    assert disaggregate(COMB, for_next_group, kept=kept, paged_in={(2, 2)}) == []
    kept -= {(1, 0)}
    assert disaggregate(COMB, for_next_group, kept=kept, paged_in={(1, 0)}) == [
        Restoration(3, 0, PAGE_IN)  # the last stage of the group that keeps it for the next
    ]


def test_readers_of_state_are_recomputed_before_replacement():
    """And stay to their reader, in the same group."""
    problem = recompute_before_update_problem()
    relaxation = make_relaxation(problem, Grouping(6, frozenset({3})))
    raw = solve_relaxation(relaxation)
    schedule = place_point(relaxation, raw.x)
    assert (4, 2) in schedule.R
    assert schedule.is_kept(5, 2)
    checked = make_candidate(problem, schedule)
    assert not checked.violations
    assert checked.value == pytest.approx(1.0)


def test_the_highest_step_of_a_stage_is_told():
    """`f0` and `f1` are made again in stage 4; of its steps, the last needs no more than `f1`."""
    partial = PartialSchedule(COMB, [Restoration(4, 0, RECOMPUTE), Restoration(4, 1, RECOMPUTE)])
    curve = simulate(COMB, None, partial.schedule()).curve
    steps = {point.node: point.ram_bytes for point in curve if point.stage == 4}
    assert partial.peak(4) == max(steps.values()) == steps[partial.highest_step(4)]
    highest = partial.highest_step(4)
    assert violated_steps(partial, max(steps.values()) - 1)[-1] == (4, highest)


# -- whatever is decided -------------------------------------------------------------------------
def points(numbers):
    """Yield random relaxations with a random 0/1 point each: best for a random objective."""
    for number in numbers:
        seed = f"placement-random/{number}"
        problem = scarce_problem(seed, (4, 9))
        if infeasibility_reason(problem) is None:
            rng = make_rng(f"point of {seed}")
            rows = random_rows(rng, problem, rng.choice((0.2, 0.4, 0.7)))
            relaxation = make_relaxation(problem, rows)
            for x in whole_points(rng, relaxation, 1):
                yield seed, relaxation, x


@parametrize_parts(49)
def test_a_placed_point_keeps_rules_limits_and_enforced_rows(part):
    """Of 0/1 points, however wasteful: at no more cost, and short of RAM at other rows at most."""
    busy = 0
    for seed, relaxation, x in points(part.select(range(1960))):
        problem, grouping = relaxation.problem, relaxation.grouping
        schedule = place_point(relaxation, x)
        stages, steps = find_violated_rows(problem, schedule, ram_limit(relaxation, x))
        assert not set(stages) & grouping.stage_rows, seed
        assert not set(steps) & grouping.step_rows, seed
        candidate = make_candidate(problem, schedule)
        if stages or steps:
            assert all("peak RAM" in violation for violation in candidate.violations), seed
        else:
            assert candidate.violations == (), seed
        if problem.minimize != Quantity.RAM:
            cost = float(relaxation.form.objective @ x) * relaxation.unit
            assert candidate.value <= cost + SOLVER_TOLERANCE, seed
        busy += bool(schedule.M_in) or len(schedule.R) > len(problem.graph.nodes)
    assert busy > part.divide(400)
