"""Checkmate's approximation: round the checkpoints of the linear relaxation, then recompute."""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.backends.worker import run_interruptibly
from poetmodel.baselines.engine import cheapest
from poetmodel.baselines.homes import all_in_ram
from poetmodel.baselines.paging import within_budget
from poetmodel.baselines.running import checkmate
from poetmodel.clock import check_time_limit, time_left_s
from poetmodel.errors import InputError, MethodNotApplicableError, TimeLimitError
from poetmodel.graph import checkpoint_all_profile
from poetmodel.heuristics.execution import last_needs
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.model.grouping import Grouping
from poetmodel.schedule import (
    GraphIdentity,
    Schedule,
    pairs_of_rows,
    spans_of_rows,
    with_immediate_page_outs,
)
from poetmodel.solver.lazy.linear import add_rows, kept_levels
from poetmodel.solver.lazy.params import LazyParams
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.request import PATIENCE_S, Request
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem

    Checkpoints = NDArray[np.bool_]
    """Which tensors are in RAM as each stage begins, shape (stages, tensors)."""

PUBLISHED, DETERMINISTIC, RANDOMIZED = ROUNDING_RULES = ("published", "deterministic", "randomized")
"""Variants of `checkmate_rounding`."""
ALLOWANCE: Final = 0.1
"""Share of the RAM budget that the relaxation leaves free (the paper's figure)."""
ALLOWANCES: Final = (ALLOWANCE, 0.05, 0.0)
"""Allowances that are tried; a budget near the least RAM has no relaxation with the first one."""
THRESHOLD: Final = 0.5
"""Least share of a checkpoint that is rounded up (the paper's figure)."""
THRESHOLDS: Final = (THRESHOLD, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9)
"""Thresholds that are tried, as in the authors' code."""
DRAWS: Final = 100
"""Randomized roundings of each relaxation, as in the authors' code."""
LONGEST_S: Final = 3600.0
"""Time limit of the relaxation without any other [s]."""


@all_in_ram
def checkmate_rounding(problem: Problem, rule: str = "", *, seed: int = 0) -> Schedule:
    """Round the checkpoints of Checkmate's linear relaxation, and recompute what is missing.

    The same seed gives the same schedule.

    Two phases, as in section 5 of the paper. The first solves the linear relaxation of
    `poetmodel.baselines.running.checkmate` within the budget less an allowance, and rounds its
    checkpoints: the share of each tensor that is in RAM as a stage begins. The second adds the
    fewest computations with which the rounded checkpoints can be executed: a stage computes what is
    a checkpoint of the next stage and none of its own, and whatever these nodes read that is no
    checkpoint of the stage, as far back as needed. Rounding knows no budget, so a schedule may
    exceed it; of those that keep it the best is taken.

    The `rule` says how shares are rounded. Without one, all are tried.

    - ``published``: deterministically, up from a threshold of 0.5, with an allowance of 10 %.
    - ``deterministic``: by nine thresholds from 0.1 to 0.9, the same for all checkpoints, as in the
      authors' code, with allowances of 10, 5 and 0 %.
    - ``randomized``: a hundred times, up with a probability of the share, with these allowances.

    Interpretations. The relaxation is that of the program of `lazy`, without cuts, whose rows are
    added as long as they raise its value: it has fewer columns than the published one, and its
    memory is counted by the rules of execution here. A column says for all stages between two reads
    of a tensor whether it stays, so they are rounded together, too. What cannot be recomputed is a
    checkpoint as long as a node may need it. A checkpoint that serves nothing is dropped.

    Takes the time of up to three linear programs; each rounding takes time in proportion to the
    number of stages times tensors.
    """
    if rule not in ("", *ROUNDING_RULES):
        raise InputError(f"rule {rule!r}: expected one of {', '.join(ROUNDING_RULES)}")
    relaxed = cache(partial(_Relaxation, problem))
    thresholds = THRESHOLDS if rule in ("", DETERMINISTIC) else (THRESHOLD,)
    allowances = (ALLOWANCE,) if rule == PUBLISHED else ALLOWANCES
    generator = np.random.default_rng(seed)

    def draw(share: float) -> bool:
        return bool(generator.random() < share)

    def rounded(allowance: float, is_up: Callable[[float], bool]) -> Schedule:
        return relaxed(allowance).rounded(is_up)

    def roundings() -> Iterator[Callable[[], Schedule]]:
        for allowance in allowances if rule != RANDOMIZED else ():
            for threshold in thresholds:
                yield partial(rounded, allowance, partial(operator.le, threshold))
        for allowance in allowances if rule in ("", RANDOMIZED) else ():
            yield from itertools.repeat(partial(rounded, allowance, draw), DRAWS)

    return cheapest(problem, roundings())


class _Relaxation:
    """The checkpoints of a linear relaxation."""

    def __init__(self, problem: Problem, allowance: float) -> None:
        self.problem, self.graph = problem, problem.graph
        usable = problem.usable_ram_bytes
        self.levels = _kept_levels(problem, usable - int(allowance * usable))
        """For each span of stages in which a tensor stays in part: tensor, first and last stage
        that begin with it, share."""
        self.pinned = _pin_checkpoints(problem)
        self.seen: set[bytes] = set()
        """Rounded checkpoints so far."""

    def rounded(self, is_up: Callable[[float], bool]) -> Schedule:
        """Return the schedule of some rounding of the shares, if it keeps the budget."""
        check_time_limit()
        checkpoints = self.pinned.copy()
        for i, first, last, share in self.levels:
            if is_up(share):
                checkpoints[first : last + 1, i] = True
        key = np.packbits(checkpoints).tobytes()
        if key in self.seen:
            raise MethodNotApplicableError("its checkpoints have been tried before")
        self.seen.add(key)
        return within_budget(self.problem, complete(self.graph, checkpoints))


def _kept_levels(problem: Problem, ram_bytes: int) -> list[tuple[int, int, int, float]]:
    """Solve the relaxation within some RAM, and return the checkpoints with their shares."""
    relaxed = replace(
        checkmate(replace(problem, constraints=(), own_objective=())),
        ram=problem.resident_bytes + max(1, ram_bytes),
    )
    none = MethodNotApplicableError(
        f"its linear relaxation has no solution within {format_bytes(ram_bytes)}"
    )
    if ram_bytes < relaxed.floor.bytes:
        raise none
    loads = checkpoint_all_profile(problem.graph)
    first = Grouping(len(loads), frozenset({max(range(len(loads)), key=loads.__getitem__)}))
    request = Request(time_limit_s=max(1e-3, min(time_left_s(), LONGEST_S)))
    session = Session(relaxed, request, params=LazyParams(cuts=frozenset()))
    relaxation, answer = run_interruptibly(
        partial(add_rows, session, first), session.stop, most_s=request.time_limit_s + PATIENCE_S
    )
    if session.stop.is_set():
        raise KeyboardInterrupt
    if answer.infeasible:
        raise none
    if answer.x is None:
        raise TimeLimitError("the linear relaxation was not solved within the time limit")
    return [
        (i, begin + 1, end, level)
        for i, spans in kept_levels(relaxation, answer.x)
        for begin, end, level in spans
    ]


def _pin_checkpoints(problem: Problem) -> Checkpoints:
    """Return the checkpoints of tensors that cannot be recomputed, up to their last need."""
    graph = problem.graph
    again = {i for i, k in enumerate(graph.node_of) if problem.may_recompute(k)}
    pinned = np.zeros((len(graph.nodes), len(graph.tensors)), dtype=bool)
    for i, last in enumerate(last_needs(graph, again)):
        if i not in again:
            pinned[graph.node_of[i] + 1 : last + 1, i] = True
    return pinned


def complete(graph: Graph, checkpoints: Checkpoints) -> Schedule:
    """Return the schedule with the fewest computations that has some checkpoints."""
    kept = [set(np.flatnonzero(row).tolist()) for row in checkpoints]
    computed = []
    for t in range(len(graph.nodes)):
        check_time_limit()
        after = kept[t + 1] - kept[t] if t + 1 < len(kept) else ()
        nodes = {t, *(graph.node_of[i] for i in after)}
        todo = list(nodes)
        while todo:
            missing = {graph.node_of[i] for i in graph.inputs_of[todo.pop()] if i not in kept[t]}
            todo += missing - nodes
            nodes |= missing
        computed.append(nodes)
    schedule = with_immediate_page_outs(
        graph,
        R=pairs_of_rows(computed),
        kept=spans_of_rows(kept),
        M_in=(),
        identity=GraphIdentity.of(graph),
    )
    return PartialSchedule.of(graph, schedule).schedule()
