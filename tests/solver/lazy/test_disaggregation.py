"""From decisions per group to a schedule: by hand, and its loads against the verifier's walk."""

import pytest

from kit.instances import make_rng, random_graph, random_schedule, scarce_problem
from kit.relaxation import (
    SOLVER_TOLERANCE,
    disaggregate_point,
    find_violated_rows,
    make_relaxation,
    ram_limit,
    random_rows,
    solve_relaxation,
    whole_points,
)
from kit.rotation import parametrize_parts
from kit.worked import comb_graph, recompute_before_update_problem
from poetmodel.model.events import Events
from poetmodel.model.grouping import Grouping
from poetmodel.problem import Quantity
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.schedule import checkpoint_all, simulate
from poetmodel.solver.lazy.disaggregation import Disaggregation, GroupDecisions, disaggregate
from poetmodel.solver.outcome import make_candidate


def decided(kept=None, recomputed=None, paged_in=None):
    """Return decisions."""
    return GroupDecisions(
        kept=frozenset(kept or ()),
        recomputed=frozenset(recomputed or ()),
        paged_in=frozenset(paged_in or ()),
    )


def comb_events(grouping, events):
    """Return events of the comb of three teeth: those given, else none."""
    return Events(
        group_of=grouping.group_of,
        use_groups=((),) * 6,
        event_groups=tuple(events.get(i, ()) for i in range(6)),
        recompute_groups=((),) * 6,
        page_in_groups=((),) * 6,
    )


# -- by hand -------------------------------------------------------------------------------------
#
# The comb: f0 f1 f2 are made in stages 0, 1 and 2, g2 g1 g0 in 3, 4 and 5. f0 is read in 1 and 5,
# f1 in 2 and 4, f2 in 3, g2 in 4, g1 in 5. Row 2 leaves the groups of stages 0-2 and 3-5.

COMB = comb_graph(3)
GROUPS = Grouping(6, frozenset({2}))
EVENTS = comb_events(GROUPS, {0: (1,), 1: (1,), 2: (1,)})


def test_what_stays_in_its_group_is_held_from_its_step_to_its_last_reader():
    """One group, no decision: as keep-all has it, and with the loads of a span in each stage."""
    grouping = Grouping(6)
    placement = disaggregate(COMB, grouping, comb_events(grouping, {}), decided())
    assert placement.schedule() == checkpoint_all(COMB)
    assert placement.stage_loads() == [4, 8, 12, 13, 10, 6]
    placement = placement_of(COMB, checkpoint_all(COMB))
    whole = disaggregate(COMB, Grouping(6), comb_events(Grouping(6), {}), decided())
    assert len(whole.spans) < len(placement.spans)
    assert whole.stage_loads() == placement.stage_loads()


def test_what_comes_back_does_so_at_its_first_reader():
    """`f0`, not kept into stages 3-5, is made again or paged in for stage 5, its only reader.

    It is paged out right after the first computation; storage holds it from then on.
    """
    placement = disaggregate(COMB, GROUPS, EVENTS, decided({(1, 0), (2, 0)}, {(1, 0)}))
    assert placement.recomputed == [(5, 0)]
    assert sorted(placement.spans) == [(0, 1, 1), (1, 2, 4), (2, 3, 3), (3, 4, 4), (4, 5, 5)]
    assert violations_of(placement) == ()
    assert placement.stage_loads() == [4, 8, 8, 9, 6, 6]
    assert list(placement.step_loads()) == [(5, 0, 5)]  # beside g1
    placement = disaggregate(COMB, GROUPS, EVENTS, decided({(1, 0), (2, 0)}, None, {(1, 0)}))
    assert placement.paged_in == [(5, 0)]
    schedule = placement.schedule()
    assert (schedule.M_in, schedule.M_out) == (((5, 0),), ((0, 0),))
    assert tuple((t, 0) for t in range(1, 6)) == schedule.S_AUX
    assert violations_of(placement) == ()


def test_readers_of_state_are_recomputed_before_replacement():
    """And stays to its reader, in the same group."""
    problem = recompute_before_update_problem()
    relaxation = make_relaxation(problem, Grouping(6, frozenset({3})))
    raw = solve_relaxation(relaxation)
    placement = disaggregate_point(relaxation, raw.x)
    assert placement.recomputed == [(4, 2)]
    assert (2, 5, 5) in placement.spans
    checked = make_candidate(problem, placement.schedule())
    assert not checked.violations
    assert checked.value == pytest.approx(1.0)


def violations_of(placement):
    """Return what breaks the rules of execution."""
    return simulate(placement.graph, None, placement.schedule()).violations


# -- loads against the verifier's walk -----------------------------------------------------------
def placement_of(graph, schedule):
    """Return a schedule's decisions as a placement, one span for each entry of ``S_RAM``."""
    return Disaggregation(
        graph,
        spans=[(i, t, t) for t, i in schedule.S_RAM],
        recomputed=[(t, k) for t, k in schedule.R if k < t],
        paged_in=list(schedule.M_in),
    )


def check_loads(placement):
    """Compare every load of a placement with the RAM that the verifier finds; return how many."""
    simulation = simulate(placement.graph, None, placement.schedule())
    assert simulation.valid, simulation.violations
    curve = {(point.stage, point.node): point.ram_bytes for point in simulation.curve}
    loads = {(t, t): load for t, load in enumerate(placement.stage_loads())}
    loads |= {(t, k): load for t, k, load in placement.step_loads()}
    # A step that only frees something has a point of the walk, and no load of its own.
    assert {step: curve[step] for step in loads} == loads
    assert max(loads.values()) == simulation.peak_ram_bytes
    return len(loads)


def test_loads_are_what_the_verifier_finds():
    """At each step of 300 random schedules, wasteful ones, with copies made for nothing."""
    steps = 0
    for number in range(300):
        rng = make_rng(f"loads/{number}")
        graph = random_graph(rng, (1, 8))
        steps += check_loads(placement_of(graph, random_schedule(rng, graph)))
    assert steps > 1800


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
        placement = disaggregate_point(relaxation, x)
        check_loads(placement)
        stages, steps = find_violated_rows(placement, ram_limit(relaxation, x))
        assert not set(stages) & grouping.stage_rows, seed
        assert not set(steps) & grouping.step_rows, seed
        candidate = make_candidate(problem, placement.schedule())
        if stages or steps:
            assert all("peak RAM" in violation for violation in candidate.violations), seed
        else:
            assert candidate.violations == (), seed
        if problem.minimize != Quantity.RAM:
            cost = float(relaxation.form.objective @ x) * relaxation.unit
            assert candidate.value <= cost + SOLVER_TOLERANCE, seed
        busy += bool(placement.recomputed or placement.paged_in)
    assert busy > part.divide(400)
