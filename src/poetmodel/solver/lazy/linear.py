"""The linear phase: add violated rows and cuts to linear relaxations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from poetmodel.backends.protocol import Basis, SolverStatus
from poetmodel.solver.lazy.disaggregation import ROUNDING, violated_stages
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
    """The last point and the largest value of the solves of a linear relaxation."""

    x: NDArray[Any] | None
    """The last point; None if no solve returned one, or if the relaxation is infeasible."""
    value: float
    """The largest bound of a solve, in units of the objective; minus infinity without one, and 0 if
    the relaxation is infeasible."""
    is_infeasible: bool = False
    """Whether the relaxation is proved to have no point."""


def add_cuts(
    session: Session,
    relaxation: Relaxation,
    on_cut_point: Callable[[Relaxation, NDArray[Any]], None] | None = None,
) -> LinearSolution:
    """Solve a linear relaxation and add violated cuts to it, until its value stops rising.

    Raises the proven bound. `on_cut_point` gets each point before cuts are added.
    """
    policy = session.policy
    n_idle_rounds = 0
    solution = LinearSolution(None, float("-inf"))
    basis: Basis | None = None
    for round_index in range(policy.cut_rounds):
        raw = session.solve_form(relaxation.form_with_all_cuts().linear_relaxation(), basis=basis)
        if raw is None or raw.x is None or raw.bound is None:
            if raw is not None and raw.is_infeasible:
                return LinearSolution(None, 0.0, is_infeasible=True)
            return solution
        session.search.prove(safe_bound(session.search.problem, raw.bound) * relaxation.unit)
        is_gain = raw.bound > solution.value + policy.cut_gain_ratio * abs(raw.bound)
        n_idle_rounds = 0 if is_gain else n_idle_rounds + 1
        solution = LinearSolution(raw.x, max(solution.value, raw.bound))
        is_last_round = (
            round_index == policy.cut_rounds - 1 or n_idle_rounds >= policy.rounds_without_gain
        )
        if is_last_round or session.search.is_done() or raw.status != SolverStatus.OPTIMAL:
            break
        if on_cut_point is not None:
            on_cut_point(relaxation, raw.x)
            if session.search.is_done():
                break
        solved_cuts = relaxation.cuts
        relaxation.drop_slack_cuts(raw.x)
        violated_cuts = relaxation.separate(raw.x, policy.cut_violation)
        if not violated_cuts:
            break
        relaxation.cuts += violated_cuts
        basis = adapt_basis(raw.basis, relaxation, solved_cuts)
    return solution


def adapt_basis(
    basis: Basis | None, relaxation: Relaxation, solved_cuts: Sequence[Cut]
) -> Basis | None:
    """Adapt the basis of a solve with `solved_cuts` to current cuts; new ones are basic."""
    if basis is None:
        return None
    n_rows = relaxation.form.n_rows
    old_positions = {
        id(cut): row for cut, row in zip(solved_cuts, basis.rows[n_rows:], strict=True)
    }
    cut_rows = [old_positions.get(id(cut), basis.basic) for cut in relaxation.cuts]
    return replace(basis, rows=[*basis.rows[:n_rows], *cut_rows])


def add_rows(
    session: Session,
    grouping: Grouping,
    on_solution: Callable[[Relaxation, NDArray[Any]], None] | None = None,
    on_cut_point: Callable[[Relaxation, NDArray[Any]], None] | None = None,
) -> tuple[Relaxation, LinearSolution]:
    """Enforce more stage rows than those of `grouping` while that raises the linear bound.

    Few rows are added at a time, because finer groups have more columns. Returns the relaxation of
    the last round with a gain: more rows would only make the integer problem harder. `on_solution`
    gets each point before rows are added.
    """
    policy = session.policy
    relaxation = session.build_relaxation(grouping)
    solution = add_cuts(session, relaxation, on_cut_point)
    finest_relaxation, finest_solution = relaxation, solution
    n_idle_rounds = 0
    while (
        finest_solution.x is not None
        and not session.search.is_done()
        and n_idle_rounds < policy.rounds_without_gain
    ):
        if on_solution is not None:
            on_solution(finest_relaxation, finest_solution.x)
            if session.search.is_done():
                break
        loads = stage_loads(finest_relaxation, finest_solution.x)
        worst_stages = violated_stages(
            loads.tolist(), finest_relaxation.claimed_ram_bytes(finest_solution.x) * (1 + ROUNDING)
        )
        enforced_stages = finest_relaxation.grouping.stage_rows
        if enforced_stages.issuperset(worst_stages):
            break
        tight_stages = (
            _tight_stages(session)
            if finest_relaxation.form.n_columns > policy.large_columns
            else []
        )
        alternating_stages = chain.from_iterable(zip_longest(worst_stages, tight_stages))
        new_stages = [
            t
            for t in dict.fromkeys(alternating_stages)
            if t is not None and t not in enforced_stages
        ]
        growth = int(policy.linear_growth_ratio * finest_relaxation.grouping.n_groups)
        max_rows = max(policy.linear_rows, growth) << n_idle_rounds
        finest_relaxation = session.build_relaxation(
            finest_relaxation.grouping.with_rows(new_stages[:max_rows]), finest_relaxation
        )
        finest_solution = add_cuts(session, finest_relaxation, on_cut_point)
        if finest_solution.is_infeasible:
            return finest_relaxation, finest_solution
        if finest_solution.value - solution.value > policy.row_gain_ratio * abs(
            finest_solution.value
        ):
            relaxation, solution, n_idle_rounds = finest_relaxation, finest_solution, 0
        else:
            n_idle_rounds += 1
    return relaxation, solution


def _tight_stages(session: Session) -> list[int]:
    """Return stages where the incumbent uses over `tight_ratio` of the RAM, fullest first."""
    incumbent = session.search.best
    if incumbent is None:
        return []
    loads = [point.ram_bytes for point in incumbent.simulation.curve if point.node == point.stage]
    return violated_stages(
        loads, session.policy.tight_ratio * session.search.problem.usable_ram_bytes
    )


def kept_spans(
    relaxation: Relaxation, x: NDArray[np.float64]
) -> Iterator[tuple[int, list[tuple[int, int, float]]]]:
    """Yield each tensor with readers, and the spans (begin, end, level) in which a point keeps it.

    The fraction `level` stays in RAM across the ends of stages begin..end-1. Recomputations that
    read the tensor are ignored.
    """
    graph, grouping, events = (
        relaxation.problem.working_graph,
        relaxation.grouping,
        relaxation.events,
    )
    group_of = grouping.group_of
    free_keeps = relaxation.events.free_keeps
    for i, k in enumerate(graph.node_of):
        if not graph.users_of[i]:
            continue
        first_group = group_of[k]
        levels = []
        for a in range(len(events.event_groups[i])):
            column = relaxation.kept.get((i, a))
            levels.append(float((i, a) in free_keeps) if column is None else float(x[column]))
        readers: dict[int, list[int]] = {}
        for j in graph.users_of[i]:
            readers.setdefault(group_of[j], []).append(j)
        last_reader = max(readers.get(first_group, [k]))
        spans = [(k, last_reader, 1.0)]
        level = levels[0] if levels else 0.0
        for a, event in enumerate(events.event_groups[i]):
            spans.append((last_reader, grouping.last_stage[event - 1], level))
            first_stage, last_stage = grouping.first_stage[event], grouping.last_stage[event]
            reader_nodes = readers.get(event)
            if reader_nodes:
                spans.append((first_stage - 1, reader_nodes[0], level))
                restored_level = _restored_level(relaxation, x, event, i, k)
                spans.append((reader_nodes[0], reader_nodes[-1], min(1.0, level + restored_level)))
                last_reader = reader_nodes[-1]
            else:
                spans.append((first_stage - 1, last_stage, level))
                last_reader = last_stage
            level = levels[a + 1] if a + 1 < len(levels) else 0.0
        yield i, [span for span in spans if span[1] > span[0] and span[2] > 0]


def stage_loads(relaxation: Relaxation, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the RAM at the last step of each stage for a fractional point [B].

    A tensor counts by its `kept_spans`. Recomputations count nothing else: neither their workspace
    nor the inputs that they read.
    """
    graph = relaxation.problem.working_graph
    sizes = graph.tensor_bytes
    differences = np.zeros(len(graph.nodes) + 1)
    for i, spans in kept_spans(relaxation, x):
        if not sizes[i]:
            continue
        held_bytes = _HeldBytes(differences, sizes[i])
        for span in spans:
            held_bytes.add_span(*span)
        for k in (*graph.users_of[i], graph.node_of[i]):
            # Inputs and outputs of the stage's last step count in `step_bytes` already.
            crossing_bytes = held_bytes.bytes_at(k) * (
                1 - graph.shared_bytes_of[k].get(i, 0) / sizes[i]
            )
            differences[k] -= crossing_bytes
            differences[k + 1] += crossing_bytes
    sizes = relaxation.problem.graph.tensor_bytes
    for i, column in relaxation.resident.items():
        home_bytes = _HeldBytes(differences, sizes[i])
        home_bytes.add_span(0, len(graph.nodes), float(x[column]))
        for k in (*graph.users_of[i], graph.node_of[i]) if graph.tensor_bytes[i] else ():
            differences[k] -= home_bytes.bytes_at(k)
            differences[k + 1] += home_bytes.bytes_at(k)
    return np.array(graph.step_bytes, dtype=np.float64) + np.cumsum(differences)[:-1]


class _HeldBytes:
    """Bytes of a tensor in RAM across stage ends, added to `differences` (of sums by stage)."""

    def __init__(self, differences: NDArray[np.float64], size: int) -> None:
        self.differences = differences
        self.size = size
        self.spans: list[tuple[int, int, float]] = []

    def add_span(self, begin: int, end: int, level: float) -> None:
        """Add `level` of the tensor across the ends of stages begin..end-1, if there are any."""
        if end > begin and level > 0:
            self.differences[begin] += level * self.size
            self.differences[end] -= level * self.size
            self.spans.append((begin, end, level))

    def bytes_at(self, stage: int) -> float:
        """Return the bytes of the tensor in RAM across the end of a stage [B]."""
        return self.size * sum(level for begin, end, level in self.spans if begin <= stage < end)


def _restored_level(
    relaxation: Relaxation, x: NDArray[np.float64], group: int, i: int, k: int
) -> float:
    """Return the restored fraction of tensor `i` (node `k`) in `group`, maybe above 1."""
    columns = (relaxation.paged_in.get((group, i)), relaxation.recomputed.get((group, k)))
    return float(sum(x[column] for column in columns if column is not None))
