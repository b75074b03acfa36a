"""Which sets of layers could be trained at all: a relaxation, as a mixed-integer program.

A binary column for each layer says whether it is trained, and the sum of their scores is maximal.
The rows are what every schedule pays; cuts exclude sets that a solver proved infeasible.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from poetmodel.choosing.pebbling import PebbleGame
from poetmodel.device import Costs
from poetmodel.device.cost import FREE
from poetmodel.graph import Graph, Phase, floor
from poetmodel.problem import DeadlineCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from poetmodel.backends.protocol import OptionValue, RawSolution
    from poetmodel.backends.standard_form import StandardForm
    from poetmodel.choosing.freezing import Freezable
    from poetmodel.device import Device
    from poetmodel.device.cost import Cost
    from poetmodel.problem import Problem

SLACK: Final = 1e-8
"""By how much limits are loosened, relatively, so that rounding excludes nothing."""
MOMENTS: Final = 2
"""How many moments of the backward pass have rows on what must be in RAM then, or come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetCut:
    """What is proved of all sets that train some layers, and maybe others."""

    layers: frozenset[str]
    state_bytes: int | None = None
    """It holds where trained state is at least this, all of it in RAM [B]; None: in any case."""
    extra_s: float | None = None
    """Time beyond one pass, and beyond transfers of the state of others, that they need [s]; None:
    they have no schedule."""
    exactly: bool = False
    """Whether it holds only for the set of these layers, and for none with others."""


@dataclass(kw_only=True)
class ChoiceRelaxation:
    """The sets of layers that nothing excludes so far.

    Notes
    -----
    Each row holds for every set with a schedule:

    - A layer needs the nodes that its update depends on. What they take of time and energy once is
      within the limits, with the transfers of trained state whose home is on storage.
    - At some moments of the backward pass, each tensor from before that is read later is in RAM,
      or is paged in or computed again after it; then what computes it is there or comes back too.
    - The largest working set of a step that trains one layer alone, or what recomputing takes where
      nothing may be paged, is needed by each set with this layer, beside all resident state.
    """

    freezable: Freezable
    problem: Problem
    """With the graph in which all is trained, and numbers for limits."""
    layers: Mapping[str, tuple[str, ...]]
    """The parameters of each layer."""
    scores: Mapping[str, float]
    """Of each layer, above 0."""
    cuts: list[SetCut] = field(default_factory=list)

    def solve(
        self,
        backend: str,
        time_limit: float,
        *,
        seed: int = 0,
        solver_options: Mapping[str, OptionValue] | None = None,
    ) -> RawSolution:
        """Return the best set that nothing excludes, and a bound for all in units of `unit`."""
        from poetmodel.backends.protocol import Limits
        from poetmodel.backends.registry import backend as find_backend

        limits = Limits(time_s=time_limit, rel_gap=1e-9, seed=seed, options=solver_options or {})
        return find_backend(backend).solve(_Program(self).form(), limits)

    def chosen(self, solution: RawSolution) -> tuple[str, ...]:
        """Return the layers that a solution trains."""
        values = () if solution.x is None else solution.x
        pairs = zip(self.layers, values, strict=False)
        return tuple(layer for layer, value in pairs if value > 1 / 2)

    @cached_property
    def unit(self) -> float:
        """The largest score, in which the program counts scores."""
        return max(self.scores.values())

    @cached_property
    def nodes_for(self) -> Mapping[str, frozenset[int]]:
        """For each layer the nodes that training it needs beside those of every step."""
        needed, always = self.freezable.needed_for, self.freezable.always
        return {
            layer: frozenset[int]().union(*(needed[name] for name in names)) - always
            for layer, names in self.layers.items()
        }

    @cached_property
    def state_of(self) -> Mapping[str, tuple[int, ...]]:
        """For each layer its state tensors, by number in the graph."""
        index, parameters = self.freezable.graph.tensor_index, self.freezable.parameters
        return {
            layer: tuple(index[tensor] for name in names for tensor in parameters[name])
            for layer, names in self.layers.items()
        }

    @cached_property
    def alone(self) -> tuple[Graph, ...]:
        """For each parameter the graph of a step that trains it alone."""
        return tuple(self._graph((name,)) for names in self.layers.values() for name in names)

    @cached_property
    def least_costs(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """For each node the least time [s] and energy [J], whichever of its outputs are wanted."""
        table, index = self.problem.table, self.freezable.graph.node_index
        times, energies = list(table.compute_time_s), list(table.compute_energy_j)
        device = _estimating(self.problem)
        if device is not None:
            estimates = (Costs.estimate(graph, device) for graph in self.alone)
            for name, cost in (pair for costs in estimates for pair in costs.compute.items()):
                k = index[name]
                times[k] = min(times[k], cost.time_s)
                energies[k] = min(energies[k], cost.energy_j)
        return tuple(times), tuple(energies)

    @cached_property
    def least_read(self) -> Sequence[frozenset[int]]:
        """For each node what it reads, whichever of its outputs are wanted."""
        whole = self.freezable.graph
        read = [frozenset(inputs) for inputs in whole.inputs_of]
        for graph in self.alone:
            for node in graph.nodes:
                read[whole.node_index[node.name]] &= {whole.tensor_index[x] for x in node.inputs}
        return read

    def least_step_bytes(self, k: int) -> int:
        """Return the least working set of a node that training needs, without state [B]."""
        name = self.freezable.graph.nodes[k].name
        return min(
            graph.step_bytes[at]
            - sum(graph.tensor_bytes[i] for i in graph.inputs_of[at] if i in graph.state_tensors)
            for graph in self.alone
            if (at := graph.node_index.get(name)) is not None
        )

    @cached_property
    def always_s(self) -> float:
        """Time of one computation of the nodes of every step [s]."""
        times = self.least_costs[0]
        return sum(times[k] for k in self.freezable.always)

    @cached_property
    def renewal_s(self) -> float:
        """The part of it for updates of buffers [s]."""
        times = self.least_costs[0]
        return sum(times[k] for k in self.freezable.renewals)

    def pass_s(self, layers: Collection[str]) -> float:
        """Return the time of one computation of what some layers need beside all others [s]."""
        nodes = frozenset[int]().union(*(self.nodes_for[layer] for layer in layers))
        times = self.least_costs[0]
        return sum(times[k] for k in nodes)

    def state_bytes(self, layers: Collection[str]) -> int:
        """Return the state of some layers together [B]."""
        sizes = self.freezable.graph.tensor_bytes
        return sum(sizes[i] for layer in layers for i in self.state_of[layer])

    @cached_property
    def always_state_bytes(self) -> int:
        """State that every step replaces [B]."""
        graph = self.freezable.graph
        return sum(graph.output_bytes[k] for k in self.freezable.always if graph.nodes[k].is_state)

    @cached_property
    def working_bytes(self) -> Mapping[str, int]:
        """For each layer the least RAM beside state of a step that trains it, and maybe others [B].

        Where nothing is paged it is what recomputing takes; else the largest working set.
        """
        taken = {layer: self._working_bytes(names) for layer, names in self.layers.items()}
        if self.problem.can_page:
            return taken
        game = PebbleGame(self.freezable)
        for layer, names in self.layers.items():
            for name in names:
                taken[layer] = game.least_bytes(name, taken[layer])
        return taken

    @cached_property
    def least_bytes(self) -> int:
        """The same of a step that trains nothing [B]."""
        return self._working_bytes(())

    @cached_property
    def excluded(self) -> frozenset[str]:
        """The layers that need more than the RAM in one step even if they are trained alone."""
        return frozenset(
            layer
            for layer in self.layers
            if self.floor_bytes(layer) > self.problem.usable_ram_bytes
        )

    def floor_bytes(self, layer: str) -> int:
        """Return the least RAM of a step that trains one layer alone [B]."""
        if self.problem.can_page:
            names, mapped = self.layers[layer], self.problem.reads_in_place
            return self._working_bytes(names, without_state=mapped)
        state_bytes = self.always_state_bytes + self.state_bytes([layer])
        return self.working_bytes[layer] + state_bytes

    @cached_property
    def room_bytes(self) -> int:
        """Most that trained state may take of the RAM, beside the least working set [B]."""
        always = 0 if self.problem.can_page else self.always_state_bytes
        return self.problem.usable_ram_bytes - always - self.least_bytes

    def _working_bytes(self, names: Collection[str], *, without_state: bool = True) -> int:
        return floor(self._graph(names), memory_mapped=without_state).bytes

    def _graph(self, names: Collection[str]) -> Graph:
        return Graph.from_valid(
            name="", nodes=self.freezable.restricted(names), batch_size=1, dtype="",
            resident_bytes={}, parameters=None, forward_macs=None, kernels=None,
        )  # fmt: skip


class _Program:
    """The columns and rows of a relaxation."""

    def __init__(self, relaxation: ChoiceRelaxation) -> None:
        self.of = relaxation
        self.problem = relaxation.problem
        self.graph = relaxation.freezable.graph
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[tuple[Mapping[int, float], float]] = []
        """Coefficients, and the most that their sum may be."""
        self.trained = {
            layer: self._column(float(layer not in relaxation.excluded), whole=True)
            for layer in relaxation.layers
        }
        self._limit(dict.fromkeys(self.trained.values(), -1.0), -1.0)
        self.computed = self._computed()
        self.resident = self._resident()
        self.state = self._column(float("inf"))
        """How much of the state that is trained is resident [B]."""
        self.recomputed: dict[int, int] = {}
        """For each node the column that says whether it is computed again after some moment."""
        self.paged: dict[int, int] = {}
        """For each tensor the column that says whether it is paged in after some moment."""
        self._limit_ram()
        for moment in self._moments():
            self._limit_ram_at(moment)
        self._limit_time_and_energy()
        for cut in relaxation.cuts:
            self._add(cut)

    def form(self) -> StandardForm:
        """Return the program for a solver."""
        from poetmodel.backends.sparse import coo_array
        from poetmodel.backends.standard_form import MAXIMIZE, StandardForm

        entries = [
            (value, row, column)
            for row, (coefficients, _) in enumerate(self.rows)
            for column, value in coefficients.items()
        ]
        values, rows, columns = zip(*entries, strict=True)
        objective = [0.0] * len(self.upper)
        for layer, column in self.trained.items():
            objective[column] = self.of.scores[layer] / self.of.unit
        return StandardForm.from_arrays(
            coo_array((values, (rows, columns)), shape=(len(self.rows), len(self.upper))),
            objective,
            upper=self.upper,
            row_upper=[most for _, most in self.rows],
            integer=self.whole,
            sense=MAXIMIZE,
        )

    # -- columns -----------------------------------------------------------------------------------

    def _column(self, upper: float = 1.0, *, whole: bool = False) -> int:
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.upper) - 1

    def _computed(self) -> dict[int, int]:
        """Return the columns that say whether nodes are computed, those of every step left out.

        Nodes that the same layers need have one column: at least that of each layer.
        """
        layers_for: dict[int, set[str]] = {}
        for layer, nodes in self.of.nodes_for.items():
            for k in nodes:
                layers_for.setdefault(k, set()).add(layer)
        groups = {frozenset([layer]): column for layer, column in self.trained.items()}
        keys = {frozenset(layers) for layers in layers_for.values()}.difference(groups)
        for key in sorted(keys, key=lambda key: (len(key), sorted(key))):
            largest = max((part for part in groups if part < key), key=len)
            column = self._column()
            for part in (largest, *(frozenset([layer]) for layer in key - largest)):
                self._limit({groups[part]: 1.0, column: -1.0}, 0.0)
            groups[key] = column
        return {k: groups[frozenset(layers)] for k, layers in layers_for.items()}

    def _resident(self) -> dict[int, int]:
        """Return the column of the home in RAM of each state tensor that may be trained."""
        columns: dict[int, int] = {}
        for layer, state in self.of.state_of.items():
            for i in state:
                columns[i] = self.trained[layer]
                if self.problem.can_page:
                    columns[i] = self._column()
                    self._limit({columns[i]: 1.0, self.trained[layer]: -1.0}, 0.0)
        return columns

    # -- rows --------------------------------------------------------------------------------------

    def _limit(self, row: Mapping[int, float], most: float, unit: float = 0.0) -> None:
        """Add a row; with a unit it is of that size, and loose enough for rounding."""
        if unit:
            row = {column: value / unit for column, value in row.items() if value}
            most = most / unit + SLACK * max(1.0, abs(most / unit))
        self.rows.append((row, most))

    def _limit_ram(self) -> None:
        """Limit resident state beside the largest working set, and state on storage."""
        of, sizes = self.of, self.graph.tensor_bytes
        unit = max(1.0, of.room_bytes)
        row = {self.state: -1.0}
        for i, column in self.resident.items():
            row[column] = row.get(column, 0.0) + sizes[i] / unit
        self._limit(row, 0.0)
        for layer, column in self.trained.items():
            more = of.working_bytes[layer] - of.least_bytes
            self._limit({self.state: unit, column: more}, of.room_bytes, unit)
        storage_bytes = self.problem.aux_limit_bytes
        if self.problem.can_page and storage_bytes is not None:
            row = {}
            for layer, state in of.state_of.items():
                row[self.trained[layer]] = float(sum(sizes[i] for i in state))
                row |= {self.resident[i]: -float(sizes[i]) for i in state}
            self._limit(row, storage_bytes, max(1.0, storage_bytes))

    def _limit_time_and_energy(self) -> None:
        problem, table = self.problem, self.problem.table
        if problem.deadline_s is not None:
            row, most = self._time()
            self._add_again(row, self.of.least_costs[0])
            if problem.deadline_counts == DeadlineCounts.SERIAL:
                self._add_paged(row, table.page_in_time_s, table.page_out_time_s)
            self._limit(row, most, problem.deadline_s or 1.0)
            if problem.deadline_counts == DeadlineCounts.OVERLAP:
                moved = self._moved(table.page_in_time_s, table.page_out_time_s)
                self._add_paged(moved, table.page_in_time_s, table.page_out_time_s)
                self._limit(moved, problem.deadline_s, problem.deadline_s or 1.0)
        if problem.energy_budget_j is not None:
            idle_w = problem.idle_power_w
            computing = [e + idle_w * s for s, e in zip(*self.of.least_costs, strict=True)]
            moved = self._moved(table.page_in_energy_j, table.page_out_energy_j)
            always_j = self._add_committed(moved, attrgetter("energy_j"))
            row, most = self._computing(computing, moved, problem.energy_budget_j - always_j)
            self._add_again(row, computing)
            self._add_paged(row, table.page_in_energy_j, table.page_out_energy_j)
            self._limit(row, most, problem.energy_budget_j or 1.0)

    def _add_again(self, row: dict[int, float], costs: Sequence[float]) -> None:
        row |= {column: costs[k] for k, column in self.recomputed.items()}

    def _add_paged(
        self, row: dict[int, float], into: Sequence[float], out: Sequence[float]
    ) -> None:
        row |= {column: into[i] + out[i] for i, column in self.paged.items()}

    def _time(self, apart: Collection[str] = ()) -> tuple[dict[int, float], float]:
        """Return the time of a pass and of transfers, but of some layers' state; and its limit."""
        table, moved = self.problem.table, dict[int, float]()
        left_s = self.problem.deadline_s or 0.0
        if self.problem.deadline_counts == DeadlineCounts.SERIAL:
            moved = self._moved(table.page_in_time_s, table.page_out_time_s, apart)
            left_s -= self._add_committed(moved, attrgetter("time_s"), apart)
        return self._computing(self.of.least_costs[0], moved, left_s)

    def _computing(
        self, costs: Sequence[float], moved: Mapping[int, float], most: float
    ) -> tuple[dict[int, float], float]:
        """Return transfers and one computation of each node as a row, and what is left for it."""
        row = dict(moved)
        for k, column in self.computed.items():
            row[column] = row.get(column, 0.0) + costs[k]
        return row, most - sum(costs[k] for k in self.of.freezable.always)

    def _moved(
        self, into: Sequence[float], out: Sequence[float], apart: Collection[str] = ()
    ) -> dict[int, float]:
        """Return the cost of reads and writes of state on storage, without that of some layers."""
        row: dict[int, float] = {}
        if not self.problem.can_page:
            return row
        news, commit = self.graph.replacement_of, self.problem.table.commit
        parts = () if commit is None else commit.replacements
        for layer, state in self.of.state_of.items():
            for i in state if layer not in apart else ():
                cost = 0.0 if news[i] in parts else out[news[i]]
                cost += 0.0 if self.problem.reads_in_place else into[i]
                for column, value in ((self.trained[layer], cost), (self.resident[i], -cost)):
                    row[column] = row.get(column, 0.0) + value
        return row

    def _add_committed(
        self, row: dict[int, float], cost: Callable[[Cost], float], apart: Collection[str] = ()
    ) -> float:
        """Add what commits cost for the state of each layer, but some; return that of all steps.

        A generation takes no fewer blocks than its bytes fill.
        """
        commit = self.problem.table.commit
        if commit is None:
            return 0.0
        left = {new: cost(least) for new, least in commit.min_costs.items()}
        for layer, state in self.of.state_of.items():
            added = sum(left.pop(self.graph.replacement_of[i]) for i in state)
            if layer not in apart:
                row[self.trained[layer]] = row.get(self.trained[layer], 0.0) + added
        return sum(left.values())

    def _add(self, cut: SetCut) -> None:
        """Add the row of a cut: ``active`` is 1 where it holds, else 0 or less."""
        active = {self.trained[layer]: 1.0 for layer in cut.layers}
        missing = len(active) - 1.0
        if cut.exactly:
            active |= {c: -1.0 for c in self.trained.values() if c not in active}
        if cut.state_bytes is not None:
            room, least = self.of.room_bytes, cut.state_bytes
            unit = max(1.0, room)
            enough = self._column(whole=True)
            self._limit({self.state: unit, enough: least - 1.0 - room}, least - 1.0, unit)
            active[enough] = 1.0
            missing += 1.0
        if cut.extra_s is None:
            self._limit(active, missing)
            return
        deadline_s = self.problem.deadline_s or 0.0
        row, most = self._time(apart=cut.layers)
        for column, times in active.items():
            row[column] = row.get(column, 0.0) + times * cut.extra_s
        self._limit(row, most + missing * cut.extra_s, deadline_s or 1.0)

    # -- what must be in RAM, or come back ---------------------------------------------------------

    def _moments(self) -> Iterator[int]:
        """Yield nodes of the backward pass after which rows say what must be in RAM."""
        problem = self.problem
        limited = problem.deadline_s is not None or problem.energy_budget_j is not None
        if not limited and (problem.can_page or problem.recompute):
            return  # everything may come back at no price
        nodes = self.graph.nodes
        backward = [k for k in sorted(self.computed) if nodes[k].phase == Phase.BACKWARD]
        count = min(MOMENTS, len(backward))
        yield from (backward[part * len(backward) // count] for part in range(count))

    def _limit_ram_at(self, moment: int) -> None:
        """Limit what is in RAM when a node has been computed first, or the last before it."""
        graph, sizes = self.graph, self.graph.tensor_bytes
        before = [
            i
            for i, k in enumerate(graph.node_of)
            if k <= moment and not graph.nodes[k].is_state and i not in graph.state_of
        ]
        kept = {i: self._column() for i in before}
        back = {
            i: [column, *([self._part_of(self.paged, i)] if self.problem.can_page else [])]
            for i, column in kept.items()
        }
        again = self._again(before)
        for i in before:
            if graph.node_of[i] in again:
                back[i].append(again[graph.node_of[i]])
        freezable, read = self.of.freezable, self.of.least_read
        # Buffers may be renewed before, and what layers of score 0 need is not computed.
        needed = self.computed.keys() | (freezable.always - freezable.renewals)
        for i in before:
            later = [k for k in graph.users_of[i] if k > moment and k in needed and i in read[k]]
            for reader in {self.computed.get(k) for k in later}:
                self._limit_back(reader, back[i])
        for k, column in again.items():
            for i in read[k]:
                if i in back:
                    self._limit_back(column, back[i])
        own = {*graph.inputs_of[moment], *graph.outputs_of[moment]}
        working = self.of.least_step_bytes(moment)
        room = float(self.of.room_bytes + self.of.least_bytes)
        unit = max(1.0, room)
        row = {kept[i]: float(sizes[i]) for i in before if i not in own}
        row[self.state] = float(max(1, self.of.room_bytes))
        row[self.computed[moment]] = float(working)
        self._limit(row, room, unit)

    def _limit_back(self, reader: int | None, columns: Sequence[int]) -> None:
        """Let one of some columns be 1 where a reader is computed; None stands for each step."""
        row = dict.fromkeys(columns, -1.0)
        self._limit(row if reader is None else row | {reader: 1.0}, -1.0 if reader is None else 0.0)

    def _again(self, tensors: Sequence[int]) -> dict[int, int]:
        """Return for nodes that may be recomputed after a moment the column that says so."""
        columns: dict[int, int] = {}
        for k in dict.fromkeys(self.graph.node_of[i] for i in tensors):
            if self.problem.may_recompute(k):
                columns[k] = self._part_of(self.recomputed, k)
        return columns

    def _part_of(self, totals: dict[int, int], key: int) -> int:
        """Return a column of one moment that is at most that of all moments."""
        column = self._column()
        if key not in totals:
            totals[key] = self._column()
        self._limit({column: 1.0, totals[key]: -1.0}, 0.0)
        return column


def costs_for(graph: Graph, problem: Problem) -> Costs:
    """Return the costs of a part of a problem's graph: estimated anew, or those that it states."""
    costs, device = problem.costs, _estimating(problem)
    if device is not None:
        return Costs.estimate(graph, device)
    computing = [node.name for node in graph.nodes if not node.is_state]
    return replace(
        costs,
        compute={name: costs.compute.get(name, FREE) for name in computing},
        pages=None
        if costs.pages is None
        else {tensor.name: costs.pages[tensor.name] for tensor in graph.tensors},
    )


def _estimating(problem: Problem) -> Device | None:
    """Return the device that the costs of a problem are estimated for; None where they are not."""
    device = problem.costs.device
    if device is None:
        return None
    estimate = replace(Costs.estimate(problem.graph, device), commit=problem.commit)
    return device if problem.costs == estimate else None
