"""The linear phase: add violated rows and cuts to linear relaxations."""

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
class LinearSolution:
    """The last point and value of a linear relaxation."""

    x: NDArray[Any] | None
    """The last point; None if no solve returned one."""
    value: float
    """The best value, in units of the objective."""
    infeasible: bool = False
    """Whether the relaxation is proved to have no point."""


def add_cuts(
    session: Session,
    relaxation: Relaxation,
    on_cut_point: Callable[[Relaxation, NDArray[Any]], None] | None = None,
) -> LinearSolution:
    """Solve a linear relaxation and add violated cuts, until the value stops rising.

    Each solve starts from the basis of the last one, and raises the session's bound. Calls
    `on_cut_point` with each point before cuts exclude it.
    """
    params = session.params
    n_idle_rounds = 0
    solution = LinearSolution(None, float("-inf"))
    basis: Basis | None = None
    for round_index in range(params.cut_rounds):
        raw = session.relax(relaxation.cut_form().linear_relaxation(), basis=basis)
        if raw is None or raw.x is None or raw.bound is None:
            if raw is not None and raw.is_infeasible:
                return LinearSolution(None, 0.0, infeasible=True)
            return solution
        session.raise_bound(safe_bound(session.problem, raw.bound) * relaxation.unit)
        is_gain = raw.bound > solution.value + params.cut_gain_ratio * abs(raw.bound)
        n_idle_rounds = 0 if is_gain else n_idle_rounds + 1
        solution = LinearSolution(raw.x, max(solution.value, raw.bound))
        is_last_round = (
            round_index == params.cut_rounds - 1 or n_idle_rounds >= params.rounds_without_gain
        )
        if is_last_round or session.done() or raw.status != SolverStatus.OPTIMAL:
            break
        if on_cut_point is not None:
            on_cut_point(relaxation, raw.x)
            if session.done():
                break
        solved_cuts = relaxation.cuts
        relaxation.drop_slack(raw.x)
        violated_cuts = relaxation.separate(raw.x, params.cut_violation)
        if not violated_cuts:
            break
        relaxation.cuts += violated_cuts
        basis = carried_basis(raw.basis, relaxation, solved_cuts)
    return solution


def carried_basis(
    basis: Basis | None, relaxation: Relaxation, solved_cuts: Sequence[Cut]
) -> Basis | None:
    """Adapt the basis of a solve to the current cuts; cuts that are new are basic.

    `solved_cuts` are the cuts of that solve, in the order of its rows.
    """
    if basis is None:
        return None
    n_rows = relaxation.form.n_rows
    old_positions = {
        id(cut): row for cut, row in zip(solved_cuts, basis.rows[n_rows:], strict=True)
    }
    cuts = [old_positions.get(id(cut), basis.basic) for cut in relaxation.cuts]
    return replace(basis, rows=[*basis.rows[:n_rows], *cuts])


def add_rows(
    session: Session,
    grouping: Grouping,
    on_solution: Callable[[Relaxation, NDArray[Any]], None] | None = None,
    on_cut_point: Callable[[Relaxation, NDArray[Any]], None] | None = None,
) -> tuple[Relaxation, LinearSolution]:
    """Enforce more rows while that raises the linear bound.

    Rows are the worst stages of the sequences that the solution violates. In a large relaxation
    they alternate with stages that are tight at the incumbent, and so may be tight at the optimum.

    Few rows are added at a time, because finer groups have more columns; twice as many after a
    round without gain. Calls `on_solution` with each solution, and `on_cut_point` with the points
    before it. Returns the relaxation with the fewest rows that has the best bound, and its
    solution: more rows would only make the integer problem harder.
    """
    params = session.params
    relaxation = session.build(grouping)
    solution = add_cuts(session, relaxation, on_cut_point)
    finest, finest_solution = relaxation, solution
    idle = 0
    while (
        finest_solution.x is not None and not session.done() and idle < params.rounds_without_gain
    ):
        if on_solution is not None:
            on_solution(finest, finest_solution.x)
            if session.done():
                break
        loads = stage_loads(finest, finest_solution.x)
        broken_rows = broken_stages(
            loads.tolist(), finest.claimed_ram(finest_solution.x) * (1 + ROUNDING)
        )
        enforced_rows = finest.grouping.stage_rows
        if enforced_rows.issuperset(broken_rows):
            break
        tight = _tight_stages(session) if finest.form.n_columns > params.large_columns else []
        in_turn = chain.from_iterable(zip_longest(broken_rows, tight))
        rows = [t for t in dict.fromkeys(in_turn) if t is not None and t not in enforced_rows]
        growth = int(params.linear_growth_ratio * finest.grouping.n_groups)
        max_rows = max(params.linear_rows, growth) << idle
        finest = session.build(finest.grouping.with_rows(rows[:max_rows]), finest)
        finest_solution = add_cuts(session, finest, on_cut_point)
        if finest_solution.infeasible:
            return finest, finest_solution
        if finest_solution.value - solution.value > params.row_gain_ratio * abs(
            finest_solution.value
        ):
            relaxation, solution, idle = finest, finest_solution, 0
        else:
            idle += 1
    return relaxation, solution


def _tight_stages(session: Session) -> list[int]:
    """Return the fullest stage of each sequence above `tight_ratio` of the RAM in the incumbent."""
    best = session.bounds.incumbent
    if best is None:
        return []
    loads = [point.ram_bytes for point in best.simulation.curve if point.node == point.stage]
    return broken_stages(loads, session.params.tight_ratio * session.problem.usable_ram_bytes)


def kept_spans(
    relaxation: Relaxation, x: NDArray[np.float64]
) -> Iterator[tuple[int, list[tuple[int, int, float]]]]:
    """Yield each tensor that has readers, with the spans of stages in which a point keeps it.

    In a span (begin, end, level), the fraction `level` of the tensor stays in RAM across the ends
    of stages begin..end-1. A tensor restored in a group is assumed in RAM from the first to the
    last computation in the group that reads it, and afterwards if the group keeps it.
    """
    graph, grouping, events = (
        relaxation.problem.working_graph,
        relaxation.grouping,
        relaxation.events,
    )
    group_of = grouping.group_of
    always_kept = relaxation.events.free_keeps
    for i, k in enumerate(graph.node_of):
        if not graph.users_of[i]:
            continue
        begin = group_of[k]
        levels = []
        for a in range(len(events.event_groups[i])):
            column = relaxation.kept.get((i, a))
            levels.append(float((i, a) in always_kept) if column is None else float(x[column]))
        readers: dict[int, list[int]] = {}
        for j in graph.users_of[i]:
            readers.setdefault(group_of[j], []).append(j)
        last_reader = max(readers.get(begin, [k]))
        spans = [(k, last_reader, 1.0)]
        level = levels[0] if levels else 0.0
        for a, event in enumerate(events.event_groups[i]):
            spans.append((last_reader, grouping.last_stage[event - 1], level))
            first_stage, last_stage = grouping.first_stage[event], grouping.last_stage[event]
            reader_nodes = readers.get(event)
            if reader_nodes:
                spans.append((first_stage - 1, reader_nodes[0], level))
                restored = _restored_level(relaxation, x, event, i, k)
                spans.append((reader_nodes[0], reader_nodes[-1], min(1.0, level + restored)))
                last_reader = reader_nodes[-1]
            else:
                spans.append((first_stage - 1, last_stage, level))
                last_reader = last_stage
            level = levels[a + 1] if a + 1 < len(levels) else 0.0
        yield i, [span for span in spans if span[1] > span[0] and span[2] > 0]


def stage_loads(relaxation: Relaxation, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Estimate the bytes of every stage row for a fractional point, shape (stages,).

    Tensors are in RAM in the spans of `kept_spans`.
    """
    graph = relaxation.problem.working_graph
    sizes = graph.tensor_bytes
    change = np.zeros(len(graph.nodes) + 1)
    for i, spans in kept_spans(relaxation, x):
        if not sizes[i]:
            continue
        held_bytes = _HeldBytes(change, sizes[i])
        for span in spans:
            held_bytes.add(*span)
        for q in (*graph.users_of[i], graph.node_of[i]):
            # Inputs and outputs of the stage's last step count in `step_bytes` already.
            crossing_bytes = held_bytes.at(q) * (1 - graph.shared_bytes_of[q].get(i, 0) / sizes[i])
            change[q] -= crossing_bytes
            change[q + 1] += crossing_bytes
    sizes = relaxation.problem.graph.tensor_bytes
    for i, column in relaxation.resident.items():
        home = _HeldBytes(change, sizes[i])
        home.add(0, len(graph.nodes), float(x[column]))
        for q in (*graph.users_of[i], graph.node_of[i]) if graph.tensor_bytes[i] else ():
            change[q] -= home.at(q)
            change[q + 1] += home.at(q)
    return np.array(graph.step_bytes, dtype=np.float64) + np.cumsum(change)[:-1]


class _HeldBytes:
    """Bytes of one tensor in RAM across the ends of stages.

    Adds them to the differences `change`.
    """

    def __init__(self, change: NDArray[np.float64], size: int) -> None:
        self.change = change
        self.size = size
        self.spans: list[tuple[int, int, float]] = []

    def add(self, begin: int, end: int, level: float) -> None:
        """Add `level` of the tensor across the ends of stages begin..end-1."""
        if end > begin and level > 0:
            self.change[begin] += level * self.size
            self.change[end] -= level * self.size
            self.spans.append((begin, end, level))

    def at(self, stage: int) -> float:
        """Return the bytes in RAM across the end of a stage [B]."""
        return self.size * sum(level for begin, end, level in self.spans if begin <= stage < end)


def _restored_level(
    relaxation: Relaxation, x: NDArray[np.float64], group: int, i: int, k: int
) -> float:
    """Return the fraction of tensor `i` that a group pages in or recomputes."""
    columns = (relaxation.paged_in.get((group, i)), relaxation.recomputed.get((group, k)))
    return float(sum(x[column] for column in columns if column is not None))
