"""A few consecutive stages of a schedule chosen anew, by an integer program: a neighbourhood."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.backends.protocol import Limits
from poetmodel.backends.sparse import csr_array
from poetmodel.backends.standard_form import MINIMIZE, StandardForm
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.penalties import PenalizedObjective, price
from poetmodel.heuristics.restorations import Restoration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from poetmodel.problem import Coefficients, Problem
    from poetmodel.solver.lazy.session import Session

Terms = list[tuple[int, float]]
CUTOFF: Final = 1e-3
"""How much a window must gain, in thousandths of the value."""
DEAREST: Final = 1e4
"""What dearer decisions cost, in thousandths of the value: no better schedule has one."""
LEAST: Final = 1e-9
"""Least coefficient that is stated."""
_ONE: Final = -1
"""Stands for a column that is 1."""


@dataclass(slots=True)
class _Program:
    """Columns from 0 to 1 and rows, as they are stated."""

    costs: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[Terms] = field(default_factory=list)
    least: list[float] = field(default_factory=list)

    def column(self, cost: float = 0.0, *, integer: bool = True) -> int:
        """Return a new column."""
        self.costs.append(cost)
        self.integer.append(integer)
        return len(self.costs) - 1

    def at_least(self, terms: Terms, least: float) -> None:
        """State that a sum is no less."""
        total: dict[int, float] = {}
        for column, value in terms:
            total[column] = total.get(column, 0.0) + value
        self.rows.append([one for one in total.items() if abs(one[1]) >= LEAST])
        self.least.append(least)

    def form(self, unit: float) -> StandardForm:
        """Return it as arrays, the objective in these units."""
        counts = [len(terms) for terms in self.rows]
        matrix = csr_array(
            (
                np.array([value for terms in self.rows for _, value in terms], dtype=np.float64),
                np.array([column for terms in self.rows for column, _ in terms], dtype=np.int64),
                np.concatenate(([0], np.cumsum(counts))),
            ),
            shape=(len(self.rows), len(self.costs)),
        )
        n = len(self.costs)
        return StandardForm(
            matrix=matrix,
            objective=np.minimum(np.array(self.costs) / unit, DEAREST),
            offset=0.0,
            sense=MINIMIZE,
            lower=np.zeros(n),
            upper=np.ones(n),
            integer=np.array(self.integer),
            row_lower=np.array(self.least),
            row_upper=np.full(len(self.rows), np.inf),
            columns=range(n),
            rows=range(len(self.rows)),
        )


class Window:
    """The integer program of the stages `first` to `last` of a partial schedule.

    All else stays as it is: what later stages take from the window is there at its end, and what
    it takes from earlier ones is there at its beginning if they have it, or have room to keep it.
    Inside, every step keeps within RAM as the simulator counts it, but for what writing in place
    saves. State keeps its homes. An answer is a neighbour of the partial schedule; whether it is
    valid the verifier says.
    """

    def __init__(
        self,
        problem: Problem,
        partial: PartialSchedule,
        first: int,
        last: int,
        *,
        prices: Coefficients,
        most_nodes: int,
    ) -> None:
        self.problem, self.partial, self.prices = problem, partial, prices
        self.stages = range(first, last + 1)
        self.graph = partial.working
        self.resident = partial.resident
        self.resident_bytes = sum(partial.sizes[i] for i in self.resident)
        self.last_stages = problem.graph.last_stages
        self.program = _Program()
        self.nodes = self._candidates(most_nodes)
        self.tensors = self._tensors()
        self.unit = 1.0 / max(1, problem.usable_ram_bytes)
        self.kept: dict[tuple[int, int], int] = {}
        self.recomputed: dict[tuple[int, int], int] = {}
        self.paged_in: dict[tuple[int, int], int] = {}
        self.paged_out: dict[int, int] = {}
        self._state_columns()
        for t in self.stages:
            self._state_stage(t)
        self._state_beginning()

    # -- what is decided -------------------------------------------------------------------------

    def _candidates(self, most: int) -> list[int]:
        """Return the nodes that may be recomputed, those nearest to what the window reads first."""
        problem, graph = self.problem, self.graph
        found: dict[int, None] = {}
        for t in self.stages:
            found.update(dict.fromkeys(sorted(self.partial.recomputed[t])))
        level = {i for t in self.stages for i in graph.inputs_of[t]}
        level |= {i for k in found for i in graph.inputs_of[k]}
        level |= {i for i in range(len(graph.tensor_bytes)) if self._is_wanted_after(i)}
        seen: set[int] = set()
        while level and len(found) < most:
            nodes = {graph.node_of[i] for i in level}
            fresh = sorted(k for k in nodes if problem.may_recompute(k) and k not in found)
            found.update(dict.fromkeys(fresh[: most - len(found)]))
            seen |= level
            level = {i for k in fresh for i in graph.inputs_of[k]} - seen
        return sorted(k for k in found if k < self.stages[-1])

    def _is_wanted_after(self, i: int) -> bool:
        after = self.stages[-1] + 1
        return after < len(self.graph.nodes) and self.partial.enters(i, after)

    def _tensors(self) -> list[int]:
        graph, partial = self.graph, self.partial
        found = {i for t in self.stages for i in (*graph.inputs_of[t], *graph.outputs_of[t])}
        found |= {i for k in self.nodes for i in (*graph.inputs_of[k], *graph.outputs_of[k])}
        for i in range(len(graph.tensor_bytes)):
            if partial.enters(i, self.stages[0]) or self._is_wanted_after(i):
                found.add(i)
        return sorted(found - self.resident)

    def _state_columns(self) -> None:
        program, graph, stages = self.program, self.graph, self.stages
        for i in self.tensors:
            for t in range(max(stages[0], graph.node_of[i] + 1), stages[-1] + 2):
                if t < len(graph.nodes):
                    self.kept[t, i] = program.column()
            if self.problem.can_page:
                self._state_pages(i)
        for k in self.nodes:
            for t in range(max(stages[0], k + 1), min(stages[-1], self.last_stages[k]) + 1):
                self.recomputed[t, k] = program.column(self.prices.compute[k])

    def _state_pages(self, i: int) -> None:
        """State the page-ins of a tensor, and its page-out where nothing else pays for it."""
        program, partial, stages = self.program, self.partial, self.stages
        inside = sum(i in partial.paged_in[t] for t in stages)
        if not partial.stored[i] and partial.page_ins[i] == inside and i not in partial.paged_out:
            self.paged_out[i] = program.column(self.prices.page_out[i])
        last = min(stages[-1], self.problem.graph.last_page_in(i))
        for t in range(max(stages[0], self.graph.node_of[i] + 1), last + 1):
            self.paged_in[t, i] = program.column(self.prices.page_in[i])
            if i in self.paged_out:
                program.at_least([(self.paged_out[i], 1.0), (self.paged_in[t, i], -1.0)], 0.0)

    # -- rules -----------------------------------------------------------------------------------

    def _sources(self, t: int, i: int) -> Terms:
        """Return the ways in which stage `t` has tensor `i`, of an earlier stage."""
        ways = (
            self.kept.get((t, i)),
            self.paged_in.get((t, i)),
            self.recomputed.get((t, self.graph.node_of[i])),
        )
        return [(column, 1.0) for column in ways if column is not None]

    def _inputs(self, k: int) -> list[int]:
        """Return what a step reads but for resident state, which is always there."""
        return [i for i in self.graph.inputs_of[k] if i not in self.resident]

    def _state_stage(self, t: int) -> None:
        program, graph = self.program, self.graph
        steps = [k for k in self.nodes if (t, k) in self.recomputed]
        for i in self._inputs(t):
            program.at_least(self._sources(t, i), 1.0)
        for k in steps:
            for i in self._inputs(k):
                program.at_least([*self._sources(t, i), (self.recomputed[t, k], -1.0)], 0.0)
        for i in self.tensors:
            if graph.node_of[i] < t and (t + 1, i) in self.kept:
                program.at_least([*self._sources(t, i), (self.kept[t + 1, i], -1.0)], 0.0)
        self._state_memory(t, steps)

    def _state_memory(self, t: int, steps: Sequence[int]) -> None:
        """Keep every step of a stage within RAM: what is there until its last reader, or longer."""
        graph, unit = self.graph, self.unit
        counted: dict[int, Terms] = {k: [] for k in (*steps, t)}
        fixed = dict.fromkeys(counted, self.resident_bytes * unit)
        fixed[t] += graph.nodes[t].workspace_bytes * unit
        for k in steps:
            counted[k].append((self.recomputed[t, k], graph.nodes[k].workspace_bytes * unit))
        for i in self.tensors:
            node, size = graph.node_of[i], graph.tensor_bytes[i] * unit
            if not size or node > t:
                continue
            levels = self._levels(t, i, steps)
            for k, terms in counted.items():
                if k < node:
                    level = self.kept.get((t, i))
                else:
                    level = next(column for begin, column in levels if begin <= k)
                if level == _ONE:
                    fixed[k] += size
                elif level is not None:
                    terms.append((level, size))
        for k, terms in counted.items():
            self.program.at_least([(at, -value) for at, value in terms], fixed[k] - 1.0)

    def _levels(self, t: int, i: int, steps: Sequence[int]) -> list[tuple[int, int | None]]:
        """Return whether a tensor that has come is in RAM in stage `t`, by the step from which on.

        As columns, the last step first; None where it is not.
        """
        node = self.graph.node_of[i]
        level = self.kept.get((t + 1, i))
        levels: list[tuple[int, int | None]] = []
        for reader in (t, *reversed(steps)):
            if reader > node and i in self.graph.inputs_of[reader]:
                levels.append((reader + 1, level))
                level = _ONE if reader == t else self._above(level, self.recomputed[t, reader])
        if node == t:
            level = _ONE
        elif node in steps:
            level = self._above(level, self.recomputed[t, node])
        return [*levels, (node, level)]

    def _above(self, one: int | None, other: int) -> int:
        """Return a column that is no less than two others; one of them may be 1 or 0 (None)."""
        if one is None:
            return other
        if one == _ONE:
            return one
        column = self.program.column(integer=False)
        self.program.at_least([(column, 1.0), (one, -1.0)], 0.0)
        self.program.at_least([(column, 1.0), (other, -1.0)], 0.0)
        return column

    def _state_beginning(self) -> None:
        """Let enter what earlier stages have or can keep; let leave what later ones take."""
        program, partial, first = self.program, self.partial, self.stages[0]
        after = self.stages[-1] + 1
        room = self.problem.usable_ram_bytes - partial.peaks()
        changes: dict[int, Terms] = {}
        for i in self.tensors:
            at = self.kept.get((first, i))
            size = partial.sizes[i]
            if at is not None and not partial.enters(i, first):
                begin = partial.kept_from(i, first)
                if begin < first and int(room[begin:first].min()) < size:
                    program.at_least([(at, -1.0)], 0.0)
                elif size:
                    for t in range(begin, first):
                        changes.setdefault(t, []).append((at, -size * self.unit))
            if (after, i) in self.kept and self._is_wanted_after(i):
                program.at_least([(self.kept[after, i], 1.0)], 1.0)
        for t, terms in changes.items():
            program.at_least(terms, -int(room[t]) * self.unit)

    # -- answers ---------------------------------------------------------------------------------

    def cost(self, prices: Coefficients) -> float:
        """Return what the partial schedule pays in the window, with page-outs for it alone."""
        partial = self.partial
        paid = sum(prices.compute[k] for t in self.stages for k in partial.recomputed[t])
        arriving = [i for t in self.stages for i in partial.paged_in[t]]
        paid += sum(prices.page_in[i] for i in arriving)
        return paid + sum(prices.page_out[i] for i in set(arriving) & self.paged_out.keys())

    def limit(self, prices: Coefficients, most: float) -> None:
        """Let the window use no more of a limited quantity than this."""

        def part(amount: float) -> float:
            return -min(amount / most, 2.0) if most > 0 else -float(amount > 0)

        terms = [(at, part(prices.compute[k])) for (_, k), at in self.recomputed.items()]
        terms += [(at, part(prices.page_in[i])) for (_, i), at in self.paged_in.items()]
        terms += [(at, part(prices.page_out[i])) for i, at in self.paged_out.items()]
        self.program.at_least(terms, -1.0 if most > 0 else 0.0)

    def form(self, unit: float) -> StandardForm:
        """Return the program, its objective in these units."""
        return self.program.form(unit)

    def restorations(self, x: NDArray[Any]) -> list[Restoration]:
        """Return those of an answer, with those outside of the window."""
        chosen = [
            *((t, k, True) for (t, k), at in self.recomputed.items() if round(x[at])),
            *((t, i, False) for (t, i), at in self.paged_in.items() if round(x[at])),
        ]
        graph = self.problem.graph
        return [
            *(
                one
                for one in self.partial.restorations()
                if one.stage not in self.stages or one.is_storage_home(graph)
            ),
            *(Restoration(*one) for one in chosen),
        ]


class WindowSearch:
    """Goes over the windows of the incumbent, the dearest first, and offers neighbours.

    Windows that overlap by half cover all stages. After a pass without gain they are half as long
    again.
    """

    def __init__(self, session: Session, *, is_waited_for: Callable[[], bool]) -> None:
        self.session = session
        self.is_waited_for = is_waited_for
        self.objective = PenalizedObjective(session.problem)
        self.rng = Random(session.request.seed)  # noqa: S311 - nothing secret about it
        self.stages = session.params.window_stages
        self._begins: list[int] = []
        self._gained = True

    @staticmethod
    def is_for(problem: Problem) -> bool:
        """Return whether windows know all that a problem asks for."""
        objective = PenalizedObjective(problem)
        return objective.rows is None and problem.objective.is_sum

    def turn(self) -> list[Restoration] | None:
        """Choose one window anew; return a schedule that pays less, if there is one."""
        session, problem = self.session, self.session.problem
        best, params = session.bounds.incumbent, session.params
        if best is None or best.value <= 0:
            return None
        graph, n = problem.graph, len(problem.graph.nodes)
        partial = PartialSchedule.of(graph, best.schedule, working=problem.working_graph)
        if not self._begins:
            self._begin_pass(partial)
        first = self._begins.pop()
        window = Window(
            problem,
            partial,
            first,
            min(n, first + self.stages) - 1,
            prices=self.objective.objective,
            most_nodes=params.window_nodes,
        )
        before = window.cost(self.objective.objective)
        if before <= 0:
            return None
        for prices, slack in self.objective.limits:
            window.limit(prices, slack - price(prices, partial) + window.cost(prices))
        unit = best.value / 1000
        remaining_s = session.request.remaining_s()
        if remaining_s <= 0:
            return None
        limits = Limits(
            time_s=min(params.window_most_s, remaining_s),
            rel_gap=session.request.gap,
            seed=session.request.seed,
            objective_cutoff=before / unit - CUTOFF,
        )
        raw = session.solver.solve(
            window.form(unit),
            limits,
            on_progress=lambda _: not (session.stop.is_set() or self.is_waited_for()),
            stop=session.stop,
        )
        if raw.x is None:
            return None
        self._gained = True
        return window.restorations(raw.x)

    def _begin_pass(self, partial: PartialSchedule) -> None:
        """Order the windows of the next pass."""
        n = len(partial.recomputed)
        if not self._gained:
            self.stages += self.stages // 2
        if self.stages > n:
            self.stages = min(n, self.session.params.window_stages)
        self._gained = False
        prices, half = self.objective.objective, max(1, self.stages // 2)
        paid = [
            sum(prices.compute[k] for k in partial.recomputed[t])
            + sum(prices.page_in[i] + prices.page_out[i] for i in partial.paged_in[t])
            for t in range(n)
        ]
        begins = range(self.rng.randrange(half), max(1, n - half), half)
        self._begins = sorted(begins, key=lambda t: sum(paid[t : t + self.stages]))
