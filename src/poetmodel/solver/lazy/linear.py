"""The linear phase: which rows matter, and a bound that cuts have tightened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from poetmodel.backends.protocol import Basis, SolverStatus
from poetmodel.solver.lazy.disaggregation import ROUNDING, broken_stages
from poetmodel.solver.outcome import safe_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from poetmodel.model.grouping import Grouping
    from poetmodel.solver.lazy.cuts import Cut
    from poetmodel.solver.lazy.relaxation import Relaxation
    from poetmodel.solver.lazy.session import Session


@dataclass(frozen=True, slots=True)
class LinearAnswer:
    """How a linear relaxation ended."""

    x: NDArray[Any] | None
    """Its last point; None where there is none."""
    value: float
    """Its last value, in units of the objective."""
    infeasible: bool = False
    """Whether it is proved to have no point."""


def add_cuts(
    session: Session,
    relaxation: Relaxation,
    between: Callable[[Relaxation, NDArray[Any]], None] | None = None,
) -> LinearAnswer:
    """Solve a linear relaxation and add cuts while that raises its value.

    Each solve begins from the basis of the last one. Points that are cut off are shown to
    `between`.
    """
    params = session.params
    idle = 0
    answer = LinearAnswer(None, float("-inf"))
    basis: Basis | None = None
    for turn in range(params.cut_rounds):
        raw = session.relax(relaxation.cut_form().relaxed(), basis=basis)
        if raw is None or raw.x is None or raw.bound is None:
            if raw is not None and raw.infeasible:
                return LinearAnswer(None, 0.0, infeasible=True)
            return answer
        session.raise_bound(safe_bound(session.problem, raw.bound) * relaxation.unit)
        gained = raw.bound > answer.value + params.cut_gain_ratio * abs(raw.bound)
        idle = 0 if gained else idle + 1
        answer = LinearAnswer(raw.x, max(answer.value, raw.bound))
        last = turn == params.cut_rounds - 1 or idle >= params.rounds_without_gain
        if last or session.done() or raw.status != SolverStatus.OPTIMAL:
            break
        if between is not None:
            between(relaxation, raw.x)
            if session.done():
                break
        solved = relaxation.cuts
        relaxation.drop_slack(raw.x)
        violated = relaxation.separate(raw.x, params.cut_violation)
        if not violated:
            break
        relaxation.cuts += violated
        basis = carried_basis(raw.basis, relaxation, solved)
    return answer


def carried_basis(
    basis: Basis | None, relaxation: Relaxation, solved: Sequence[Cut]
) -> Basis | None:
    """Return the basis of a solve with some cuts for the cuts that there are now."""
    if basis is None:
        return None
    n_rows = relaxation.form.n_rows
    known = {id(cut): row for cut, row in zip(solved, basis.rows[n_rows:], strict=True)}
    cuts = [known.get(id(cut), basis.basic) for cut in relaxation.cuts]
    return replace(basis, rows=[*basis.rows[:n_rows], *cuts])


def add_rows(
    session: Session,
    grouping: Grouping,
    on_answer: Callable[[Relaxation, NDArray[Any]], None] | None = None,
    between: Callable[[Relaxation, NDArray[Any]], None] | None = None,
) -> tuple[Relaxation, LinearAnswer]:
    """Enforce more rows while that raises the linear bound.

    These are the worst of the runs that the answer breaks; in a large relaxation, in turn with
    stages that are tight at the incumbent, and may be so at the optimum.

    Few at a time, for finer groups mean more columns; twice as many after a round without gain.
    Each answer is shown to `on_answer`, and those before it to `between`. Returned is the
    relaxation with the fewest rows that has the best bound: rows beyond that make the integer
    problem harder and prove nothing.
    """
    params = session.params
    relaxation = session.build(grouping)
    answer = add_cuts(session, relaxation, between)
    every, latest = relaxation, answer
    idle = 0
    while latest.x is not None and not session.done() and idle < params.rounds_without_gain:
        if on_answer is not None:
            on_answer(every, latest.x)
            if session.done():
                break
        loads = stage_loads(every, latest.x)
        broken = broken_stages(loads.tolist(), every.claimed_ram(latest.x) * (1 + ROUNDING))
        known = every.grouping.stage_rows
        if known.issuperset(broken):
            break
        tight = _tight_stages(session) if every.form.n_columns > params.large_columns else []
        in_turn = chain.from_iterable(zip_longest(broken, tight))
        rows = [t for t in dict.fromkeys(in_turn) if t is not None and t not in known]
        growth = int(params.linear_growth_ratio * every.grouping.n_groups)
        most = max(params.linear_rows, growth) << idle
        every = session.build(every.grouping.add(rows[:most]), every)
        latest = add_cuts(session, every, between)
        if latest.infeasible:
            return every, latest
        if latest.value - answer.value > params.row_gain_ratio * abs(latest.value):
            relaxation, answer, idle = every, latest, 0
        else:
            idle += 1
    return relaxation, answer


def _tight_stages(session: Session) -> list[int]:
    """Return the fullest stage of each run at which the incumbent leaves little RAM."""
    best = session.bounds.incumbent
    if best is None:
        return []
    loads = [point.ram_bytes for point in best.simulation.curve if point.node == point.stage]
    return broken_stages(loads, session.params.tight_ratio * session.problem.usable_ram_bytes)


def kept_levels(
    relaxation: Relaxation, x: NDArray[np.float64]
) -> Iterator[tuple[int, list[tuple[int, int, float]]]]:
    """Yield each tensor that is read with the spans of stages in which a point keeps it.

    A span (begin, end, level) says that `level` of the tensor stays in RAM across the ends of
    stages begin..end-1. What a group brings back is taken to be there from the first computation
    that reads it to the last one in the group, what it keeps on from there.
    """
    graph, grouping, events = (
        relaxation.problem.working_graph,
        relaxation.grouping,
        relaxation.events,
    )
    group_of = grouping.group_of
    sure = relaxation.events.kept
    for i, k in enumerate(graph.node_of):
        if not graph.users_of[i]:
            continue
        begin = group_of[k]
        keeps = []
        for a in range(len(events.events[i])):
            column = relaxation.kept.get((i, a))
            keeps.append(float((i, a) in sure) if column is None else float(x[column]))
        readers: dict[int, list[int]] = {}
        for j in graph.users_of[i]:
            readers.setdefault(group_of[j], []).append(j)
        after = max(readers.get(begin, [k]))
        spans = [(k, after, 1.0)]
        level = keeps[0] if keeps else 0.0
        for a, event in enumerate(events.events[i]):
            spans.append((after, grouping.last_stage[event - 1], level))
            first_stage, last_stage = grouping.first_stage[event], grouping.last_stage[event]
            here = readers.get(event)
            if here:
                spans.append((first_stage - 1, here[0], level))
                brought = _brought(relaxation, x, event, i, k)
                spans.append((here[0], here[-1], min(1.0, level + brought)))
                after = here[-1]
            else:
                spans.append((first_stage - 1, last_stage, level))
                after = last_stage
            level = keeps[a + 1] if a + 1 < len(keeps) else 0.0
        yield i, [span for span in spans if span[1] > span[0] and span[2] > 0]


def stage_loads(relaxation: Relaxation, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return about the bytes of every stage row for a fractional point, shape (stages,).

    Tensors are in RAM as `kept_levels` says.
    """
    graph = relaxation.problem.working_graph
    sizes = graph.tensor_bytes
    change = np.zeros(len(graph.nodes) + 1)
    for i, spans in kept_levels(relaxation, x):
        if not sizes[i]:
            continue
        held = _Span(change, sizes[i])
        for span in spans:
            held.add(*span)
        for q in (*graph.users_of[i], graph.node_of[i]):
            # A tensor of the stage's own step is not among those that cross it.
            own = held.at(q) * (1 - graph.shared_bytes_of[q].get(i, 0) / sizes[i])
            change[q] -= own
            change[q + 1] += own
    sizes = relaxation.problem.graph.tensor_bytes
    for i, column in relaxation.resident.items():
        home = _Span(change, sizes[i])
        home.add(0, len(graph.nodes), float(x[column]))
        for q in (*graph.users_of[i], graph.node_of[i]) if graph.tensor_bytes[i] else ():
            change[q] -= home.at(q)
            change[q + 1] += home.at(q)
    return np.array(graph.step_bytes, dtype=np.float64) + np.cumsum(change)[:-1]


class _Span:
    """Bytes of one tensor across the ends of stages."""

    def __init__(self, change: NDArray[np.float64], size: int) -> None:
        self.change = change
        self.size = size
        self.parts: list[tuple[int, int, float]] = []

    def add(self, begin: int, end: int, level: float) -> None:
        """Hold `level` of the tensor across the ends of stages begin..end-1."""
        if end > begin and level > 0:
            self.change[begin] += level * self.size
            self.change[end] -= level * self.size
            self.parts.append((begin, end, level))

    def at(self, stage: int) -> float:
        """Return the bytes held across the end of a stage [B]."""
        return self.size * sum(level for begin, end, level in self.parts if begin <= stage < end)


def _brought(relaxation: Relaxation, x: NDArray[np.float64], group: int, i: int, k: int) -> float:
    ways = (relaxation.paged_in.get((group, i)), relaxation.recomputed.get((group, k)))
    return float(sum(x[column] for column in ways if column is not None))
