"""Checkmate's approximation: round the checkpoints of the linear relaxation, then recompute."""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.backends.worker import run_interruptibly
from poetmodel.baselines.engine import select_best_schedule
from poetmodel.baselines.homes import use_homes_of
from poetmodel.baselines.paging import require_within_budget
from poetmodel.baselines.running import checkmate
from poetmodel.clock import check_time_limit, time_left_s
from poetmodel.errors import InputError, MethodNotApplicableError, TimeLimitError
from poetmodel.graph import checkpoint_all_profile
from poetmodel.heuristics.execution import last_possible_reads
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.model.grouping import Grouping
from poetmodel.problem import Quantity
from poetmodel.schedule import (
    GraphIdentity,
    Schedule,
    pairs_of_rows,
    spans_of_rows,
    with_immediate_page_outs,
)
from poetmodel.solver.lazy.linear import add_rows, kept_spans
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.policy import Policy
from poetmodel.solver.request import PATIENCE_S, Request
from poetmodel.solver.search import Search
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem

    Checkpoints = NDArray[np.bool_]
    """Whether each tensor is in RAM when each stage begins, shape (stages, tensors)."""

PUBLISHED, DETERMINISTIC, RANDOMIZED = ROUNDING_RULES = ("published", "deterministic", "randomized")
"""Variants of `checkmate_rounding`."""
ALLOWANCE: Final = 0.1
"""Fraction of the RAM budget that the relaxation leaves free, as in the paper."""
ALLOWANCES: Final = (ALLOWANCE, 0.05, 0.0)
"""Allowances that all rules except ``published`` try. With the first one, the relaxation may be
infeasible for a budget near the minimum RAM."""
THRESHOLD: Final = 0.5
"""Minimum fraction of a checkpoint that is rounded up, as in the paper."""
THRESHOLDS: Final = (THRESHOLD, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9)
"""Thresholds that are tried, as in the authors' code."""
DRAWS: Final = 100
"""Number of randomized roundings of each relaxation, as in the authors' code."""
MAX_RELAXATION_S: Final = 3600.0
"""Maximum time limit of each relaxation [s]."""


@use_homes_of("checkmate-rounding")
def checkmate_rounding(problem: Problem, rule: str = "", *, seed: int = 0) -> Schedule:
    """Round the checkpoints of Checkmate's linear relaxation, and recompute missing tensors.

    Equal seeds produce equal schedules, unless a time limit stops the method.

    As in section 5 of the paper, the first part solves the linear relaxation of
    `poetmodel.baselines.running.checkmate` within the budget less an allowance, and rounds its
    checkpoints: the fraction of each tensor that is in RAM when a stage begins. The second part
    adds the fewest computations with which the rounded checkpoints can be executed: a stage
    computes the next stage's checkpoints that are not its own, and all missing inputs, recursively.
    Rounding ignores the budget; the best schedule within the budget is returned.

    The `rule` selects the rounding. By default all rules are tried.

    - ``published``: deterministic, up from a threshold of 0.5, with an allowance of 10 %.
    - ``deterministic``: nine thresholds from 0.1 to 0.9, the same for all checkpoints, as in the
      authors' code, with allowances of 10, 5 and 0 %.
    - ``randomized``: a hundred times for each of these allowances, up with the fraction as
      probability.

    Interpretations. The relaxation is that of `lazy`, without cuts; rows are added as long as they
    raise its value. It has fewer columns than the published one, and counts memory by the rules of
    execution of this package. One column represents all stages between two reads of a tensor, so
    these are rounded together. Tensors that cannot be recomputed are checkpoints as long as a node
    may need them. Unused checkpoints are dropped. All state is in RAM. The relaxation omits
    user-defined constraints.
    """
    if rule not in ("", *ROUNDING_RULES):
        raise InputError(f"rule {rule!r}: expected one of {', '.join(ROUNDING_RULES)}")
    get_relaxation = cache(partial(_Relaxation, problem))
    thresholds = THRESHOLDS if rule in ("", DETERMINISTIC) else (THRESHOLD,)
    allowances = (ALLOWANCE,) if rule == PUBLISHED else ALLOWANCES
    rng = np.random.default_rng(seed)

    def round_randomly(fraction: float) -> bool:
        return bool(rng.random() < fraction)

    def round_with(allowance: float, rounds_up: Callable[[float], bool]) -> Schedule:
        return get_relaxation(allowance).round_checkpoints(rounds_up)

    def list_roundings() -> Iterator[Callable[[], Schedule]]:
        for allowance in allowances if rule != RANDOMIZED else ():
            for threshold in thresholds:
                yield partial(round_with, allowance, partial(operator.le, threshold))
        for allowance in allowances if rule in ("", RANDOMIZED) else ():
            yield from itertools.repeat(partial(round_with, allowance, round_randomly), DRAWS)

    return select_best_schedule(problem, list_roundings())


class _Relaxation:
    """Fractional checkpoints of a linear relaxation, and the roundings that were tried."""

    def __init__(self, problem: Problem, allowance: float) -> None:
        self.problem, self.graph = problem, problem.graph
        usable = problem.usable_ram_bytes
        self.fractional_spans = _solve_for_fractions(problem, usable - int(allowance * usable))
        """(tensor, first stage, last stage, fraction): from the first to the last stage, this
        fraction of the tensor is in RAM when each stage begins."""
        self.pinned_checkpoints = _pin_checkpoints(problem)
        """Checkpoints that every rounding contains."""
        self.tried_checkpoints: set[bytes] = set()
        """Packed checkpoints of all roundings so far."""

    def round_checkpoints(self, rounds_up: Callable[[float], bool]) -> Schedule:
        """Return the schedule of a rounding by `rounds_up`; refuse checkpoints tried before."""
        check_time_limit()
        checkpoints = self.pinned_checkpoints.copy()
        for i, first, last, fraction in self.fractional_spans:
            if rounds_up(fraction):
                checkpoints[first : last + 1, i] = True
        packed_checkpoints = np.packbits(checkpoints).tobytes()
        if packed_checkpoints in self.tried_checkpoints:
            raise MethodNotApplicableError("its checkpoints have been tried before")
        self.tried_checkpoints.add(packed_checkpoints)
        return require_within_budget(self.problem, complete_schedule(self.graph, checkpoints))


def _solve_for_fractions(problem: Problem, ram_bytes: int) -> list[tuple[int, int, int, float]]:
    """Solve the relaxation (or refuse); return (tensor, first stage, last stage, RAM fraction)."""
    relaxed_problem = replace(
        checkmate(replace(problem, constraints=(), user_objective=(), minimize=Quantity.TIME)),
        ram=problem.resident_bytes + max(1, ram_bytes),
    )
    infeasible_error = MethodNotApplicableError(
        f"its linear relaxation has no solution within {format_bytes(ram_bytes)}"
    )
    if ram_bytes < relaxed_problem.floor.bytes:
        raise infeasible_error
    ram_by_stage = checkpoint_all_profile(problem.graph)
    initial_grouping = Grouping(
        len(ram_by_stage), frozenset({max(range(len(ram_by_stage)), key=ram_by_stage.__getitem__)})
    )
    request = Request(
        time_limit_s=max(1e-3, min(time_left_s(), MAX_RELAXATION_S)),
        policy=Policy(cuts=frozenset()),
    )
    session = Session(Search(problem=relaxed_problem, request=request))
    relaxation, solution = run_interruptibly(
        partial(add_rows, session, initial_grouping),
        session.search.stop_event,
        max_s=request.time_limit_s + PATIENCE_S,
    )
    if session.search.stop_event.is_set():
        raise KeyboardInterrupt
    if solution.is_infeasible:
        raise infeasible_error
    if solution.x is None:
        raise TimeLimitError("the linear relaxation was not solved within the time limit")
    return [
        (i, stage_before + 1, last_stage, fraction)
        for i, spans in kept_spans(relaxation, solution.x)
        for stage_before, last_stage, fraction in spans
    ]


def _pin_checkpoints(problem: Problem) -> Checkpoints:
    """Return the checkpoints of tensors that cannot be recomputed, shape (stages, tensors).

    Each is kept after its node's stage until the last stage that can read it.
    """
    graph = problem.graph
    recomputable = {i for i, k in enumerate(graph.node_of) if problem.may_recompute(k)}
    checkpoints = np.zeros((len(graph.nodes), len(graph.tensors)), dtype=bool)
    for i, last_read in enumerate(last_possible_reads(graph, recomputable)):
        if i not in recomputable:
            checkpoints[graph.node_of[i] + 1 : last_read + 1, i] = True
    return checkpoints


def complete_schedule(graph: Graph, checkpoints: Checkpoints) -> Schedule:
    """Return the schedule with the fewest computations that make all checkpoints.

    ``checkpoints[t, i]`` is whether tensor `i` is in RAM when stage `t` begins. Unused ones are
    dropped in the end, with their recomputations.
    """
    checkpoints_of_stage = [set(np.flatnonzero(row).tolist()) for row in checkpoints]
    nodes_of_stage = []
    for t in range(len(graph.nodes)):
        check_time_limit()
        new_checkpoints = (
            checkpoints_of_stage[t + 1] - checkpoints_of_stage[t]
            if t + 1 < len(checkpoints_of_stage)
            else ()
        )
        nodes = {t, *(graph.node_of[i] for i in new_checkpoints)}
        pending_nodes = list(nodes)
        while pending_nodes:
            missing_nodes = {
                graph.node_of[i]
                for i in graph.inputs_of[pending_nodes.pop()]
                if i not in checkpoints_of_stage[t]
            }
            pending_nodes += missing_nodes - nodes
            nodes |= missing_nodes
        nodes_of_stage.append(nodes)
    schedule = with_immediate_page_outs(
        graph,
        R=pairs_of_rows(nodes_of_stage),
        kept=spans_of_rows(checkpoints_of_stage),
        M_in=(),
        identity=GraphIdentity.from_graph(graph),
    )
    return PartialSchedule.from_schedule(graph, schedule).schedule()
