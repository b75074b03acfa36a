"""Bare rounds of ``lazy``: solve a relaxation, place its answer, enforce what it breaks, again.

Without a start, cuts, a search for schedules or first rows from elsewhere, so that merged stages
and rows within stages are what makes the answer right. The driver's own loop has all of these.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.model.events import recomputable_nodes
from poetmodel.model.grouping import Grouping
from poetmodel.problem import Quantity
from poetmodel.solver.lazy.relaxation import Relaxation
from poetmodel.solver.outcome import make_candidate

CLOSE = 1e-6
"""By how much a solver's figures may be off; everything in the instances is a small integer."""


class Found(NamedTuple):
    """What the rounds came to."""

    value: float | None
    """The least value beyond what every schedule pays; None if there is no schedule."""
    rounds: int
    """Relaxations that were solved."""
    grouping: Grouping
    """The rows enforced in the end."""


class RoundsError(Exception):
    """A promise of the rounds is broken."""


def no_rows(problem):
    """Return the grouping that enforces nothing: all stages are one."""
    return Grouping(len(problem.graph.nodes))


def random_rows(rng, problem, chance=0.3):
    """Return a grouping with random rows of stages, and half the times of steps."""
    n = len(problem.graph.nodes)
    stages = [t for t in range(n) if rng.random() < chance]
    of_steps = chance / 3 if rng.random() < 0.5 else 0.0
    steps = [(t, k) for t in range(n) for k in range(t) if rng.random() < of_steps]
    return no_rows(problem).with_rows(stages, steps)


def relaxation_of(problem, grouping):
    """Build the relaxation of a grouping."""
    return Relaxation.build(problem, grouping, recomputable_nodes(problem))


def least(form, unit=1.0, **targets):
    """Return the optimum of a form, None where it has no point."""
    raw = backend("highs").solve(form, Limits(rel_gap=0.0, **targets))
    assert raw.x is not None or raw.is_infeasible or raw.status == "cutoff"
    return None if raw.objective is None else raw.objective * unit


def whole_points(rng, relaxation, count):
    """Yield 0/1 points of a relaxation, found without cuts: best for random objectives."""
    form = relaxation.form
    for _ in range(count):
        costs = np.array([rng.uniform(-0.3, 1.0) for _ in range(form.n_columns)])
        if relaxation.problem.minimize == Quantity.RAM:  # else any peak would do
            costs[relaxation.peak_column] = 100.0
        raw = backend("highs").solve(replace(form, objective=costs), Limits(rel_gap=0.0))
        if raw.x is not None:
            yield raw.x


def activity(cut, x):
    """Return by how much a point is above a cut's right-hand side; negative where it breaks it."""
    return float(sum(value * x[column] for value, column in cut.terms)) - cut.lower


def solved(relaxation):
    """Solve a relaxation to the end."""
    form = relaxation.form_with_cuts(relaxation.cuts)
    return backend("highs").solve(form, Limits(rel_gap=0.0, time_s=120.0))


def ram_limit(relaxation, x):
    """Return the bytes that a point must not exceed: the budget, or the peak that it claims."""
    usable = relaxation.problem.usable_ram_bytes
    if relaxation.problem.minimize != Quantity.RAM:
        return usable
    return float(x[relaxation.peak_column]) * usable + CLOSE


def placed(relaxation, x):
    """Disaggregate a point to stages."""
    return relaxation.disaggregate(x)


def broken(placement, limit):
    """Return every row of stages, and of steps, that a placement breaks."""
    stages = [t for t, load in enumerate(placement.stage_loads()) if load > limit]
    return stages, [(t, k) for t, k, load in placement.step_loads() if load > limit]


def run_rounds(problem, grouping=None):
    """Add rows, one run at a time, until an answer placed on stages is a schedule.

    Raises
    ------
    RoundsError
        If an enforced row is broken by the placed answer, a bound falls, or the verifier does not
        find what the relaxation says.
    """
    current = no_rows(problem) if grouping is None else grouping
    count, bound = 0, 0.0
    while True:
        relaxation = relaxation_of(problem, current)
        raw = solved(relaxation)
        count += 1
        if raw.x is None or raw.objective is None:
            if not raw.is_infeasible:
                msg = f"the solver stopped with {raw.status}"
                raise RoundsError(msg)
            return Found(None, count, current)
        value = raw.objective * relaxation.unit
        if problem.minimize == Quantity.RAM:
            value = max(value, problem.floor.bytes)  # the model's own bound is a little below
        if value < bound - CLOSE:
            msg = f"round {count}: the bound falls from {bound} to {value}"
            raise RoundsError(msg)
        bound = value
        placement = placed(relaxation, raw.x)
        stages, steps = broken(placement, ram_limit(relaxation, raw.x))
        if set(stages) & current.stage_rows or set(steps) & current.step_rows:
            msg = f"round {count}: {stages} and {steps} are broken, and {current} enforced"
            raise RoundsError(msg)
        if not stages and not steps:
            _compare(problem, placement, value)
            return Found(value, count, current)
        # The steps only where all stage rows hold, as the driver does.
        current = current.with_rows(stages[:1], () if stages else steps[:1])


def _compare(problem, placement, value):
    candidate = make_candidate(problem, placement.schedule())
    if candidate.violations:
        msg = f"the verifier rejects the placed answer: {candidate.violations}"
        raise RoundsError(msg)
    # The answer of a relaxation may hold decisions that placing drops; it costs what is left.
    if abs(candidate.value - value) > CLOSE and problem.minimize != Quantity.RAM:
        msg = f"the relaxation says {value}, the verifier {candidate.value}"
        raise RoundsError(msg)
    if candidate.value > value + CLOSE:
        msg = f"the relaxation says {value}, the verifier {candidate.value}"
        raise RoundsError(msg)


def groupings_between(problem, rng, count):
    """Yield ever finer groupings, from none of the rows on."""
    grouping = no_rows(problem)
    for _ in range(count):
        yield grouping
        more = random_rows(rng, problem, 0.25)
        grouping = grouping.with_rows(tuple(more.stage_rows), tuple(more.step_rows))
