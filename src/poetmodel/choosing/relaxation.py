"""A mixed-integer relaxation of the selection: sets of layers that may have a schedule.

A binary column for each layer states whether it is trained; the sum of their scores is maximized.
Rows are necessary conditions of every schedule; cuts exclude sets that a solver proved infeasible.
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
"""Relative tolerance of limits, so that rounding excludes no set."""
MAX_MOMENTS: Final = 2
"""Maximum number of nodes in the backward pass with rows on the tensors in RAM or restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetCut:
    """A proven condition for all sets that train some layers, and possibly further ones."""

    layers: frozenset[str]
    state_bytes: int | None = None
    """The cut applies if trained state, all in RAM, has at least this size [B]; None: always."""
    extra_s: float | None = None
    """Time that the sets of the cut need beyond one pass and transfers of other layers' state [s];
    None: the sets have no schedule."""
    is_exact: bool = False
    """Whether the cut applies only to exactly this set, not to supersets."""


@dataclass(kw_only=True)
class ChoiceRelaxation:
    """The relaxation: all sets of layers that rows and cuts do not exclude.

    Notes
    -----
    Each row is valid for every set with a schedule:

    - A layer needs the nodes on which its update depends. Their time and energy, computed once, are
      within the limits, with the transfers of trained state whose home is on storage.

    - At some nodes of the backward pass, each earlier tensor that is read later is in RAM, or is
      paged in or recomputed later; then the inputs of its recomputation are in RAM or restored,
      too.

    - Each set with a layer needs, besides all resident state, the largest working set of a step
      that trains only this layer or, without paging, the RAM of recomputation.
    """

    freezable: Freezable
    problem: Problem
    """The problem of the graph that trains all layers, with limits as numbers."""
    layers: Mapping[str, tuple[str, ...]]
    """The parameters of each layer."""
    scores: Mapping[str, float]
    """The score of each layer, above 0."""
    cuts: list[SetCut] = field(default_factory=list)

    def solve(
        self,
        backend: str,
        time_limit: float,
        *,
        seed: int = 0,
        solver_options: Mapping[str, OptionValue] | None = None,
    ) -> RawSolution:
        """Return the solution with the highest score, and a bound on the scores of all sets.

        Scores and bound are in units of `unit`. Sets that rows or cuts exclude are no solutions.
        """
        from poetmodel.backends.protocol import Limits
        from poetmodel.backends.registry import backend as find_backend

        limits = Limits(time_s=time_limit, rel_gap=1e-9, seed=seed, options=solver_options or {})
        return find_backend(backend).solve(_Program(self).to_standard_form(), limits)

    def selected_layers(self, solution: RawSolution) -> tuple[str, ...]:
        """Return the layers that a solution trains."""
        values = () if solution.x is None else solution.x
        pairs = zip(self.layers, values, strict=False)
        return tuple(layer for layer, value in pairs if value > 1 / 2)

    @cached_property
    def unit(self) -> float:
        """The largest score, the unit of scores in the program."""
        return max(self.scores.values())

    @cached_property
    def nodes_for(self) -> Mapping[str, frozenset[int]]:
        """For each layer, the nodes needed to train it in addition to those of every step."""
        nodes_of, always = self.freezable.needed_for, self.freezable.always
        return {
            layer: frozenset[int]().union(*(nodes_of[name] for name in names)) - always
            for layer, names in self.layers.items()
        }

    @cached_property
    def state_of(self) -> Mapping[str, tuple[int, ...]]:
        """The state tensors of each layer, by index in the graph."""
        index, parameters = self.freezable.graph.tensor_index, self.freezable.parameters
        return {
            layer: tuple(index[tensor] for name in names for tensor in parameters[name])
            for layer, names in self.layers.items()
        }

    @cached_property
    def single_graphs(self) -> tuple[Graph, ...]:
        """For each parameter, the graph of the step that trains only it."""
        return tuple(
            self._restricted_graph((name,)) for names in self.layers.values() for name in names
        )

    @cached_property
    def min_costs(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Minimum time [s] and energy [J] of each node, for any subset of its outputs."""
        table, index = self.problem.table, self.freezable.graph.node_index
        times, energies = list(table.compute_time_s), list(table.compute_energy_j)
        device = _estimate_device(self.problem)
        if device is not None:
            estimates = (Costs.estimate(graph, device) for graph in self.single_graphs)
            for name, cost in (pair for costs in estimates for pair in costs.compute.items()):
                k = index[name]
                times[k] = min(times[k], cost.time_s)
                energies[k] = min(energies[k], cost.energy_j)
        return tuple(times), tuple(energies)

    @cached_property
    def min_inputs(self) -> Sequence[frozenset[int]]:
        """The inputs that each node reads for any subset of its outputs."""
        full_graph = self.freezable.graph
        inputs_of = [frozenset(inputs) for inputs in full_graph.inputs_of]
        for graph in self.single_graphs:
            for node in graph.nodes:
                inputs_of[full_graph.node_index[node.name]] &= {
                    full_graph.tensor_index[x] for x in node.inputs
                }
        return inputs_of

    def min_step_bytes(self, k: int) -> int:
        """Return the minimum working set of a node that training needs, without state [B]."""
        name = self.freezable.graph.nodes[k].name
        return min(
            graph.step_bytes[at]
            - sum(graph.tensor_bytes[i] for i in graph.inputs_of[at] if i in graph.state_tensors)
            for graph in self.single_graphs
            if (at := graph.node_index.get(name)) is not None
        )

    @cached_property
    def always_s(self) -> float:
        """Time to compute the nodes of every step once [s]."""
        times = self.min_costs[0]
        return sum(times[k] for k in self.freezable.always)

    @cached_property
    def buffer_update_s(self) -> float:
        """Time of the updates of buffers in `always_s` [s]."""
        times = self.min_costs[0]
        return sum(times[k] for k in self.freezable.buffer_updates)

    def pass_s(self, layers: Collection[str]) -> float:
        """Return the time to compute the additional nodes for some layers once [s]."""
        nodes = frozenset[int]().union(*(self.nodes_for[layer] for layer in layers))
        times = self.min_costs[0]
        return sum(times[k] for k in nodes)

    def state_bytes(self, layers: Collection[str]) -> int:
        """Return the size of the state of some layers [B]."""
        sizes = self.freezable.graph.tensor_bytes
        return sum(sizes[i] for layer in layers for i in self.state_of[layer])

    @cached_property
    def always_state_bytes(self) -> int:
        """Size of the state that every step replaces [B]."""
        graph = self.freezable.graph
        return sum(graph.output_bytes[k] for k in self.freezable.always if graph.nodes[k].is_state)

    @cached_property
    def working_bytes(self) -> Mapping[str, int]:
        """For each layer, a lower bound on the RAM besides state of steps that train it [B].

        Without paging, the bound is the result of `PebbleGame`; otherwise the largest working set.
        """
        bytes_of_layer = {layer: self._working_bytes(names) for layer, names in self.layers.items()}
        if self.problem.can_page:
            return bytes_of_layer
        game = PebbleGame(self.freezable)
        for layer, names in self.layers.items():
            for name in names:
                bytes_of_layer[layer] = game.min_bytes(name, bytes_of_layer[layer])
        return bytes_of_layer

    @cached_property
    def min_working_bytes(self) -> int:
        """Lower bound on the RAM besides state of a step that trains no layer [B]."""
        return self._working_bytes(())

    @cached_property
    def excluded(self) -> frozenset[str]:
        """The layers whose step exceeds the RAM even if only this layer is trained."""
        return frozenset(
            layer
            for layer in self.layers
            if self.floor_bytes(layer) > self.problem.usable_ram_bytes
        )

    def floor_bytes(self, layer: str) -> int:
        """Return a lower bound on the RAM of a step that trains only one layer [B]."""
        if self.problem.can_page:
            names, mapped = self.layers[layer], self.problem.reads_in_place
            return self._working_bytes(names, remove_state=mapped)
        state_bytes = self.always_state_bytes + self.state_bytes([layer])
        return self.working_bytes[layer] + state_bytes

    @cached_property
    def max_state_bytes(self) -> int:
        """Maximum size of trained state in RAM, besides the smallest working set [B]."""
        always = 0 if self.problem.can_page else self.always_state_bytes
        return self.problem.usable_ram_bytes - always - self.min_working_bytes

    def _working_bytes(self, names: Collection[str], *, remove_state: bool = True) -> int:
        """Return the largest working set of a step that trains some parameters [B]."""
        return floor(self._restricted_graph(names), memory_mapped=remove_state).bytes

    def _restricted_graph(self, names: Collection[str]) -> Graph:
        return Graph.from_valid(
            name="", nodes=self.freezable.restricted(names), batch_size=1, dtype="",
            resident_bytes={}, parameters=None, forward_macs=None, kernels=None,
        )  # fmt: skip


class _Program:
    """The columns and rows of a relaxation, as a mixed-integer program."""

    def __init__(self, relaxation: ChoiceRelaxation) -> None:
        """Add all columns and rows of a relaxation."""
        self.relaxation = relaxation
        self.problem = relaxation.problem
        self.graph = relaxation.freezable.graph
        self.upper: list[float] = []
        self.is_integer: list[bool] = []
        self.rows: list[tuple[Mapping[int, float], float]] = []
        """Coefficients by column, and the upper bound of each row."""
        self.trained = {
            layer: self._add_column(float(layer not in relaxation.excluded), is_integer=True)
            for layer in relaxation.layers
        }
        self._add_row(dict.fromkeys(self.trained.values(), -1.0), -1.0)
        self.computed = self._add_computed_columns()
        self.resident = self._add_resident_columns()
        self.state = self._add_column(float("inf"))
        """Column: the size of resident trained state [B]."""
        self.recomputed: dict[int, int] = {}
        """For each node, the column that states whether it is recomputed after any moment."""
        self.paged: dict[int, int] = {}
        """For each tensor, the column that states whether it is paged in after any moment."""
        self._limit_ram()
        for moment in self._moments():
            self._limit_ram_at(moment)
        self._limit_time_and_energy()
        for cut in relaxation.cuts:
            self._add_cut(cut)

    def to_standard_form(self) -> StandardForm:
        """Return the program in standard form for a solver."""
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
            objective[column] = self.relaxation.scores[layer] / self.relaxation.unit
        return StandardForm.from_arrays(
            coo_array((values, (rows, columns)), shape=(len(self.rows), len(self.upper))),
            objective,
            upper=self.upper,
            row_upper=[upper for _, upper in self.rows],
            integer=self.is_integer,
            sense=MAXIMIZE,
        )

    # -- columns -----------------------------------------------------------------------------------

    def _add_column(self, upper: float = 1.0, *, is_integer: bool = False) -> int:
        """Add a column from 0 to `upper`; return its index."""
        self.upper.append(upper)
        self.is_integer.append(is_integer)
        return len(self.upper) - 1

    def _add_computed_columns(self) -> dict[int, int]:
        """Add columns that state whether nodes are computed; return them by node.

        Nodes of every step have no column. Nodes needed by the same layers share a column, which is
        at least that of each layer.
        """
        layers_for: dict[int, set[str]] = {}
        for layer, nodes in self.relaxation.nodes_for.items():
            for k in nodes:
                layers_for.setdefault(k, set()).add(layer)
        groups = {frozenset([layer]): column for layer, column in self.trained.items()}
        keys = {frozenset(layers) for layers in layers_for.values()}.difference(groups)
        for key in sorted(keys, key=lambda key: (len(key), sorted(key))):
            largest = max((subset for subset in groups if subset < key), key=len)
            column = self._add_column()
            for subset in (largest, *(frozenset([layer]) for layer in key - largest)):
                self._add_row({groups[subset]: 1.0, column: -1.0}, 0.0)
            groups[key] = column
        return {k: groups[frozenset(layers)] for k, layers in layers_for.items()}

    def _add_resident_columns(self) -> dict[int, int]:
        """Add columns that state whether trained state tensors have their home in RAM; return them.

        Without paging, they are the columns of the layers.
        """
        columns: dict[int, int] = {}
        for layer, state in self.relaxation.state_of.items():
            for i in state:
                columns[i] = self.trained[layer]
                if self.problem.can_page:
                    columns[i] = self._add_column()
                    self._add_row({columns[i]: 1.0, self.trained[layer]: -1.0}, 0.0)
        return columns

    # -- rows --------------------------------------------------------------------------------------

    def _add_row(self, row: Mapping[int, float], upper: float, unit: float = 0.0) -> None:
        """Add a row: the sum is at most `upper`. With a `unit`, scale it and add a tolerance."""
        if unit:
            row = {column: value / unit for column, value in row.items() if value}
            upper = upper / unit + SLACK * max(1.0, abs(upper / unit))
        self.rows.append((row, upper))

    def _limit_ram(self) -> None:
        """Add rows for resident state besides the largest working set, and for state on storage."""
        of, sizes = self.relaxation, self.graph.tensor_bytes
        unit = max(1.0, of.max_state_bytes)
        row = {self.state: -1.0}
        for i, column in self.resident.items():
            row[column] = row.get(column, 0.0) + sizes[i] / unit
        self._add_row(row, 0.0)
        for layer, column in self.trained.items():
            extra_bytes = of.working_bytes[layer] - of.min_working_bytes
            self._add_row({self.state: unit, column: extra_bytes}, of.max_state_bytes, unit)
        storage_bytes = self.problem.aux_limit_bytes
        if self.problem.can_page and storage_bytes is not None:
            row = {}
            for layer, state in of.state_of.items():
                row[self.trained[layer]] = float(sum(sizes[i] for i in state))
                row |= {self.resident[i]: -float(sizes[i]) for i in state}
            self._add_row(row, storage_bytes, max(1.0, storage_bytes))

    def _limit_time_and_energy(self) -> None:
        """Add rows for the deadline and the energy budget."""
        problem, table = self.problem, self.problem.table
        if problem.deadline_s is not None:
            row, upper = self._time_row()
            self._add_recomputations(row, self.relaxation.min_costs[0])
            if problem.deadline_counts == DeadlineCounts.SERIAL:
                self._add_paged(row, table.page_in_time_s, table.page_out_time_s)
            self._add_row(row, upper, problem.deadline_s or 1.0)
            if problem.deadline_counts == DeadlineCounts.OVERLAP:
                transfers = self._transfer_costs(table.page_in_time_s, table.page_out_time_s)
                self._add_paged(transfers, table.page_in_time_s, table.page_out_time_s)
                self._add_row(transfers, problem.deadline_s, problem.deadline_s or 1.0)
        if problem.energy_budget_j is not None:
            idle_w = problem.idle_power_w
            compute_j = [e + idle_w * s for s, e in zip(*self.relaxation.min_costs, strict=True)]
            transfers = self._transfer_costs(table.page_in_energy_j, table.page_out_energy_j)
            always_j = self._add_commit_costs(transfers, attrgetter("energy_j"))
            row, upper = self._compute_row(compute_j, transfers, problem.energy_budget_j - always_j)
            self._add_recomputations(row, compute_j)
            self._add_paged(row, table.page_in_energy_j, table.page_out_energy_j)
            self._add_row(row, upper, problem.energy_budget_j or 1.0)

    def _add_recomputations(self, row: dict[int, float], costs: Sequence[float]) -> None:
        """Add the costs of recomputations to a row."""
        row |= {column: costs[k] for k, column in self.recomputed.items()}

    def _add_paged(
        self, row: dict[int, float], page_in_costs: Sequence[float], page_out_costs: Sequence[float]
    ) -> None:
        """Add the costs of paging to a row."""
        row |= {column: page_in_costs[i] + page_out_costs[i] for i, column in self.paged.items()}

    def _time_row(self, excluded_layers: Collection[str] = ()) -> tuple[dict[int, float], float]:
        """Return the row of a pass and its transfers, and its upper bound.

        Transfers of the state of some layers may be excluded.
        """
        table, transfers = self.problem.table, dict[int, float]()
        remaining_s = self.problem.deadline_s or 0.0
        if self.problem.deadline_counts == DeadlineCounts.SERIAL:
            transfers = self._transfer_costs(
                table.page_in_time_s, table.page_out_time_s, excluded_layers
            )
            remaining_s -= self._add_commit_costs(transfers, attrgetter("time_s"), excluded_layers)
        return self._compute_row(self.relaxation.min_costs[0], transfers, remaining_s)

    def _compute_row(
        self, costs: Sequence[float], transfers: Mapping[int, float], limit: float
    ) -> tuple[dict[int, float], float]:
        """Return a row of transfers and one computation of each node, and its upper bound.

        The bound is `limit` minus the costs of the nodes of every step.
        """
        row = dict(transfers)
        for k, column in self.computed.items():
            row[column] = row.get(column, 0.0) + costs[k]
        return row, limit - sum(costs[k] for k in self.relaxation.freezable.always)

    def _transfer_costs(
        self,
        page_in_costs: Sequence[float],
        page_out_costs: Sequence[float],
        excluded_layers: Collection[str] = (),
    ) -> dict[int, float]:
        """Return the costs of transfers of trained state on storage, by column.

        The state of some layers may be excluded.
        """
        costs_by_column: dict[int, float] = {}
        if not self.problem.can_page:
            return costs_by_column
        replacements, commit = self.graph.replacement_of, self.problem.table.commit
        committed_replacements = () if commit is None else commit.replacements
        for layer, state in self.relaxation.state_of.items():
            for i in state if layer not in excluded_layers else ():
                cost = (
                    0.0
                    if replacements[i] in committed_replacements
                    else page_out_costs[replacements[i]]
                )
                cost += 0.0 if self.problem.reads_in_place else page_in_costs[i]
                for column, value in ((self.trained[layer], cost), (self.resident[i], -cost)):
                    costs_by_column[column] = costs_by_column.get(column, 0.0) + value
        return costs_by_column

    def _add_commit_costs(
        self,
        row: dict[int, float],
        cost: Callable[[Cost], float],
        excluded_layers: Collection[str] = (),
    ) -> float:
        """Add the costs of committing the state of each layer to a row, except `excluded_layers`.

        Returns the costs of committing the state that belongs to no layer, which every step pays.
        These are lower bounds: a generation erases at least the blocks that its bytes fill.
        """
        commit = self.problem.table.commit
        if commit is None:
            return 0.0
        remaining_costs = {new: cost(min_cost) for new, min_cost in commit.min_costs.items()}
        for layer, state in self.relaxation.state_of.items():
            layer_cost = sum(remaining_costs.pop(self.graph.replacement_of[i]) for i in state)
            if layer not in excluded_layers:
                row[self.trained[layer]] = row.get(self.trained[layer], 0.0) + layer_cost
        return sum(remaining_costs.values())

    def _add_cut(self, cut: SetCut) -> None:
        """Add the row of a cut: ``active_row`` is 1 if the cut applies, otherwise 0 or less."""
        active_row = {self.trained[layer]: 1.0 for layer in cut.layers}
        active_bound = len(active_row) - 1.0
        if cut.is_exact:
            active_row |= {c: -1.0 for c in self.trained.values() if c not in active_row}
        if cut.state_bytes is not None:
            max_bytes, min_bytes = self.relaxation.max_state_bytes, cut.state_bytes
            unit = max(1.0, max_bytes)
            reaches_state = self._add_column(is_integer=True)
            self._add_row(
                {self.state: unit, reaches_state: min_bytes - 1.0 - max_bytes},
                min_bytes - 1.0,
                unit,
            )
            active_row[reaches_state] = 1.0
            active_bound += 1.0
        if cut.extra_s is None:
            self._add_row(active_row, active_bound)
            return
        deadline_s = self.problem.deadline_s or 0.0
        row, upper = self._time_row(excluded_layers=cut.layers)
        for column, coefficient in active_row.items():
            row[column] = row.get(column, 0.0) + coefficient * cut.extra_s
        self._add_row(row, upper + active_bound * cut.extra_s, deadline_s or 1.0)

    # -- tensors that must be in RAM or restored ---------------------------------------------------

    def _moments(self) -> Iterator[int]:
        """Yield the nodes of the backward pass at which rows limit the tensors in RAM.

        Yields none if restoring tensors has no cost in any limit.
        """
        problem = self.problem
        has_limit = problem.deadline_s is not None or problem.energy_budget_j is not None
        if not has_limit and (problem.can_page or problem.recompute):
            return  # restoring tensors is free
        nodes = self.graph.nodes
        backward_nodes = [k for k in sorted(self.computed) if nodes[k].phase == Phase.BACKWARD]
        count = min(MAX_MOMENTS, len(backward_nodes))
        yield from (backward_nodes[k * len(backward_nodes) // count] for k in range(count))

    def _limit_ram_at(self, moment: int) -> None:
        """Limit the RAM at a moment: the first computation of node `moment`.

        If the node is not computed, the moment is its position in execution order. Each tensor that
        was computed up to the moment and is read later must be in RAM at the moment, or restored
        later.
        """
        graph, sizes = self.graph, self.graph.tensor_bytes
        earlier_tensors = [
            i
            for i, k in enumerate(graph.node_of)
            if k <= moment and not graph.nodes[k].is_state and i not in graph.state_of
        ]
        keep_columns = {i: self._add_column() for i in earlier_tensors}
        restore_columns = {
            i: [column, *([self._moment_column(self.paged, i)] if self.problem.can_page else [])]
            for i, column in keep_columns.items()
        }
        recompute_columns = self._recompute_columns(earlier_tensors)
        for i in earlier_tensors:
            if graph.node_of[i] in recompute_columns:
                restore_columns[i].append(recompute_columns[graph.node_of[i]])
        freezable, min_inputs = self.relaxation.freezable, self.relaxation.min_inputs
        # Buffers may be updated before; nodes only for layers of score 0 are not computed.
        computed_nodes = self.computed.keys() | (freezable.always - freezable.buffer_updates)
        for i in earlier_tensors:
            later_readers = [
                k
                for k in graph.users_of[i]
                if k > moment and k in computed_nodes and i in min_inputs[k]
            ]
            for reader in {self.computed.get(k) for k in later_readers}:
                self._require_restored(reader, restore_columns[i])
        for k, column in recompute_columns.items():
            for i in min_inputs[k]:
                if i in restore_columns:
                    self._require_restored(column, restore_columns[i])
        own_tensors = {*graph.inputs_of[moment], *graph.outputs_of[moment]}
        working_bytes = self.relaxation.min_step_bytes(moment)
        ram_bytes = float(self.relaxation.max_state_bytes + self.relaxation.min_working_bytes)
        unit = max(1.0, ram_bytes)
        row = {keep_columns[i]: float(sizes[i]) for i in earlier_tensors if i not in own_tensors}
        row[self.state] = float(max(1, self.relaxation.max_state_bytes))
        row[self.computed[moment]] = float(working_bytes)
        self._add_row(row, ram_bytes, unit)

    def _require_restored(self, reader: int | None, columns: Sequence[int]) -> None:
        """Require that one of `columns` is 1 if the column `reader` is 1; None means always."""
        row = dict.fromkeys(columns, -1.0)
        self._add_row(
            row if reader is None else row | {reader: 1.0}, -1.0 if reader is None else 0.0
        )

    def _recompute_columns(self, tensors: Sequence[int]) -> dict[int, int]:
        """Add columns that are 1 if a node is recomputed after the moment; return them by node."""
        columns: dict[int, int] = {}
        for k in dict.fromkeys(self.graph.node_of[i] for i in tensors):
            if self.problem.may_recompute(k):
                columns[k] = self._moment_column(self.recomputed, k)
        return columns

    def _moment_column(self, totals: dict[int, int], key: int) -> int:
        """Add and return a column for one moment.

        It is at most the column of `key` in `totals`, which stands for all moments and is added if
        it is new.
        """
        column = self._add_column()
        if key not in totals:
            totals[key] = self._add_column()
        self._add_row({column: 1.0, totals[key]: -1.0}, 0.0)
        return column


def costs_for(graph: Graph, problem: Problem) -> Costs:
    """Return the costs of a subgraph of a problem: estimated again, or taken from the problem."""
    costs, device = problem.costs, _estimate_device(problem)
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


def _estimate_device(problem: Problem) -> Device | None:
    """Return the device whose estimates are the costs of a problem; None for other costs."""
    device = problem.costs.device
    if device is None:
        return None
    estimate = replace(Costs.estimate(problem.graph, device), commit=problem.commit)
    return device if problem.costs == estimate else None
