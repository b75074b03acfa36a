"""Bare row generation: solve a relaxation, disaggregate it, enforce a violated row, repeat.

There are no start, no cuts, no primal heuristics and no initial rows, unlike in the loop of
``lazy``. So a correct result depends on groups of stages and on enforced rows alone.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.model.events import recomputable_nodes
from poetmodel.model.grouping import Grouping
from poetmodel.problem import Quantity
from poetmodel.schedule import simulate
from poetmodel.solver.lazy.relaxation import Relaxation
from poetmodel.solver.outcome import make_candidate

SOLVER_TOLERANCE = 1e-6
"""Absolute tolerance of a solver's values; all numbers of the instances are small integers."""


class RoundsOutcome(NamedTuple):
    """The result of row generation."""

    value: float | None
    """The minimum objective without the baseline; None if there is no schedule."""
    rounds: int
    """Number of solved relaxations."""
    grouping: Grouping
    """The rows enforced in the last relaxation."""


class RoundsError(Exception):
    """Row generation has an inconsistent result, such as a bound that falls."""


def group_all_stages(problem):
    """Return the grouping that enforces no row: all stages are one group."""
    return Grouping(len(problem.graph.nodes))


def random_rows(rng, problem, chance=0.3):
    """Draw a grouping with random rows of stages and, in half of the draws, of steps.

    `chance` is the probability of each stage row.
    """
    n = len(problem.graph.nodes)
    stages = [t for t in range(n) if rng.random() < chance]
    of_steps = chance / 3 if rng.random() < 0.5 else 0.0
    steps = [(t, k) for t in range(n) for k in range(t) if rng.random() < of_steps]
    return group_all_stages(problem).with_rows(stages, steps)


def make_relaxation(problem, grouping):
    """Return the relaxation of a problem for a grouping."""
    return Relaxation.build(problem, grouping, recomputable_nodes(problem))


def find_minimum(form, unit=1.0, **targets):
    """Return the optimum of a form, times `unit`; None without a solution.

    `targets` are further limits of the solve, such as a cutoff.
    """
    raw = backend("highs").solve(form, Limits(rel_gap=0.0, **targets))
    assert raw.x is not None or raw.is_infeasible or raw.status == "cutoff"
    return None if raw.objective is None else raw.objective * unit


def whole_points(rng, relaxation, count):
    """Yield optimal integer solutions of a relaxation without cuts for random objectives."""
    form = relaxation.form
    for _ in range(count):
        costs = np.array([rng.uniform(-0.3, 1.0) for _ in range(form.n_columns)])
        if relaxation.problem.minimize == Quantity.RAM:  # otherwise the peak is arbitrary
            costs[relaxation.peak_column] = 100.0
        raw = backend("highs").solve(replace(form, objective=costs), Limits(rel_gap=0.0))
        if raw.x is not None:
            yield raw.x


def compute_excess(cut, x):
    """Return the value of a cut at `x` minus its lower limit; negative if `x` violates the cut."""
    return float(sum(value * x[column] for value, column in cut.terms)) - cut.lower


def solve_relaxation(relaxation):
    """Solve a relaxation with its cuts to optimality; return the raw solution."""
    form = relaxation.form_with_cuts(relaxation.cuts)
    return backend("highs").solve(form, Limits(rel_gap=0.0, time_s=120.0))


def ram_limit(relaxation, x):
    """Return the limit on the RAM of a solution [B]: the budget, or its own peak if minimized."""
    usable = relaxation.problem.usable_ram_bytes
    if relaxation.problem.minimize != Quantity.RAM:
        return usable
    return float(x[relaxation.peak_column]) * usable + SOLVER_TOLERANCE


def place_point(relaxation, x):
    """Turn a solution over groups into a schedule."""
    problem = relaxation.problem
    restorations = relaxation.to_restorations(x)
    return PartialSchedule(
        problem.graph, restorations, working_graph=problem.working_graph
    ).schedule()


def find_violated_rows(problem, schedule, limit):
    """Return the rows of a schedule above a limit: stages, and (stage, node) steps."""
    simulation = simulate(problem.graph, problem.costs, schedule)
    above = [(point.stage, point.node) for point in simulation.curve if point.ram_bytes > limit]
    return [t for t, k in above if k == t], [(t, k) for t, k in above if k < t]


def run_rounds(problem, grouping=None):
    """Solve relaxations, with one more row each time, until a solution violates no row.

    Raises
    ------
    RoundsError
        If a solution violates an enforced row, a bound falls, the solver stops early, or the
        verifier rejects the schedule or computes another value.
    """
    current = group_all_stages(problem) if grouping is None else grouping
    count, bound = 0, 0.0
    while True:
        relaxation = make_relaxation(problem, current)
        raw = solve_relaxation(relaxation)
        count += 1
        if raw.x is None or raw.objective is None:
            if not raw.is_infeasible:
                msg = f"the solver stopped with {raw.status}"
                raise RoundsError(msg)
            return RoundsOutcome(None, count, current)
        value = raw.objective * relaxation.unit
        if problem.minimize == Quantity.RAM:
            value = max(value, problem.floor.bytes)  # the model's bound may be slightly lower
        if value < bound - SOLVER_TOLERANCE:
            msg = f"round {count}: the bound falls from {bound} to {value}"
            raise RoundsError(msg)
        bound = value
        schedule = place_point(relaxation, raw.x)
        stages, steps = find_violated_rows(problem, schedule, ram_limit(relaxation, raw.x))
        if set(stages) & current.stage_rows or set(steps) & current.step_rows:
            msg = f"round {count}: {stages} and {steps} are broken, and {current} enforced"
            raise RoundsError(msg)
        if not stages and not steps:
            _compare(problem, schedule, value)
            return RoundsOutcome(value, count, current)
        # Rows of steps only if no stage row is violated, as in `lazy`.
        current = current.with_rows(stages[:1], () if stages else steps[:1])


def _compare(problem, schedule, value):
    candidate = make_candidate(problem, schedule)
    if candidate.violations:
        msg = f"the verifier rejects the placed answer: {candidate.violations}"
        raise RoundsError(msg)
    # The peak may be lower than in the relaxation, because disaggregation drops decisions.
    if abs(candidate.value - value) > SOLVER_TOLERANCE and problem.minimize != Quantity.RAM:
        msg = f"the relaxation says {value}, the verifier {candidate.value}"
        raise RoundsError(msg)
    if candidate.value > value + SOLVER_TOLERANCE:
        msg = f"the relaxation says {value}, the verifier {candidate.value}"
        raise RoundsError(msg)


def draw_groupings(problem, rng, count):
    """Yield `count` groupings: the first has no row, each other one random further rows."""
    grouping = group_all_stages(problem)
    for _ in range(count):
        yield grouping
        more = random_rows(rng, problem, 0.25)
        grouping = grouping.with_rows(tuple(more.stage_rows), tuple(more.step_rows))
