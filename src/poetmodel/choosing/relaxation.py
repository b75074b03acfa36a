"""A mixed-integer relaxation of the selection: sets of layers that may have a schedule.

A binary column for each layer states whether it is trained. The sum of the scores of the trained
layers is maximized, and at least one layer is trained. All other rows are necessary conditions of
every schedule. Cuts exclude sets that a solver proved infeasible, and single sets for which the
solver found neither a schedule nor a proof.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.choosing.pebbling import PebbleGame
from poetmodel.device import Costs
from poetmodel.device.cost import FREE
from poetmodel.graph import Graph, Phase, floor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from poetmodel.backends.protocol import RawSolution
    from poetmodel.backends.standard_form import StandardForm
    from poetmodel.choosing.freezing import Freezable
    from poetmodel.device import Device
    from poetmodel.device.cost import Cost
    from poetmodel.problem import Problem
    from poetmodel.solver.request import Request

LIMIT_TOLERANCE: Final = 1e-8
"""Relative tolerance of limits, so that rounding excludes no set."""
MAX_LIMITED_NODES: Final = 2
"""Maximum number of nodes in the backward pass at which rows limit the RAM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetCut:
    """A condition for all sets of layers that contain `layers`, or for `layers` alone.

    It is proven, unless `is_exact`: such a cut may exclude its set without a proof.
    """

    layers: frozenset[str]
    state_bytes: int | None = None
    """The cut applies if trained state in RAM has at least this size [B]; None: at any size."""
    extra_s: float | None = None
    """Time that the sets of the cut need beyond one computation of each node, and beyond the
    transfers and commits of the state of layers outside `layers` [s]; None: the sets have no
    schedule."""
    is_exact: bool = False
    """Whether the cut applies only to the set `layers`, not to its supersets; `state_bytes` and
    `extra_s` are then None."""


class _NodeCosts(NamedTuple):
    """Lower bounds on the times [s] and the energies [J] of all nodes, by index."""

    times_s: list[float]
    energies_j: list[float]


@dataclass(kw_only=True)
class ChoiceRelaxation:
    """The relaxation: all nonempty sets of layers that rows and cuts do not exclude.

    Notes
    -----
    Each row is valid for every set with a schedule:

    - A layer needs the nodes on which its update depends. The time and energy to compute each once,
      and to transfer or commit trained state, are within the limits that count them.

    - At up to `MAX_LIMITED_NODES` nodes of the backward pass, each earlier tensor that is read
      later is in RAM, or is paged in or recomputed later. The inputs of a later recomputation are
      in RAM or restored, too.

    - Each set with a layer needs, besides all resident state, the largest working set of a step
      that trains only this layer or, without paging, the bound of `PebbleGame`.
    """

    freezable: Freezable
    """The step that trains all layers."""
    problem: Problem
    """The problem of the graph that trains all layers, with limits as numbers."""
    layers: Mapping[str, tuple[str, ...]]
    """The names of the parameters of each layer."""
    scores: Mapping[str, float]
    """The score of each layer; above 0 for those in `layers`."""
    cuts: list[SetCut] = field(default_factory=list)
    """The cuts so far; the search adds to them."""

    def solve(self, request: Request) -> RawSolution:
        """Solve the relaxation in the remaining time; scores in the result are in `unit`."""
        from poetmodel.backends.registry import backend as find_backend

        limits = request.solver_limits(max(request.remaining_s(), 1e-3), rel_gap=1e-9)
        return find_backend(request.backend).solve(_Program(self).to_standard_form(), limits)

    def selected_layers(self, solution: RawSolution) -> tuple[str, ...]:
        """Return the layers that a solution trains; empty if `solution.x` is None."""
        values = () if solution.x is None else solution.x
        pairs = zip(self.layers, values, strict=False)
        return tuple(layer for layer, value in pairs if value > 1 / 2)

    @cached_property
    def unit(self) -> float:
        """The largest score, by which the objective of the program divides all scores."""
        return max(self.scores.values())

    @cached_property
    def nodes_for(self) -> Mapping[str, frozenset[int]]:
        """For each layer, the indices of the nodes needed to train it that not every step has."""
        nodes_of, common_nodes = self.freezable.nodes_needed_for, self.freezable.common_nodes
        return {
            layer: frozenset[int]().union(*(nodes_of[name] for name in names)) - common_nodes
            for layer, names in self.layers.items()
        }

    @cached_property
    def state_of(self) -> Mapping[str, tuple[int, ...]]:
        """For each layer, the indices of its parameters and of their optimizer state."""
        index, parameters = self.freezable.graph.tensor_index, self.freezable.parameters
        return {
            layer: tuple(index[tensor] for name in names for tensor in parameters[name])
            for layer, names in self.layers.items()
        }

    @cached_property
    def single_graphs(self) -> tuple[Graph, ...]:
        """For each parameter of `layers`, the graph of the step that trains only it."""
        return tuple(
            self._restricted_graph((name,)) for names in self.layers.values() for name in names
        )

    @cached_property
    def min_costs(self) -> _NodeCosts:
        """Lower bounds that are valid in all graphs that train some parameters of `layers`."""
        table, index = self.problem.table, self.freezable.graph.node_index
        times, energies = list(table.compute_time_s), list(table.compute_energy_j)
        device = find_estimate_device(self.problem)
        if device is not None:
            estimates = (Costs.estimate(graph, device) for graph in self.single_graphs)
            for name, cost in (pair for costs in estimates for pair in costs.compute.items()):
                k = index[name]
                times[k] = min(times[k], cost.time_s)
                energies[k] = min(energies[k], cost.energy_j)
        return _NodeCosts(times, energies)

    @cached_property
    def min_inputs(self) -> Sequence[frozenset[int]]:
        """For each node, the indices of the tensors that it reads in every step that has it."""
        full_graph = self.freezable.graph
        inputs_of = [frozenset(inputs) for inputs in full_graph.inputs_of]
        for graph in self.single_graphs:
            for node in graph.nodes:
                inputs_of[full_graph.node_index[node.name]] &= {
                    full_graph.tensor_index[name] for name in node.inputs
                }
        return inputs_of

    def min_node_bytes(self, k: int) -> int:
        """Return the smallest working set of node `k`, without state, over `single_graphs` [B]."""
        name = self.freezable.graph.nodes[k].name
        return min(
            graph.step_bytes[position]
            - sum(
                graph.tensor_bytes[i] for i in graph.inputs_of[position] if i in graph.state_tensors
            )
            for graph in self.single_graphs
            if (position := graph.node_index.get(name)) is not None
        )

    @cached_property
    def common_nodes_s(self) -> float:
        """Lower bound on the time to compute the nodes of every step once [s]."""
        times = self.min_costs.times_s
        return sum(times[k] for k in self.freezable.common_nodes)

    @cached_property
    def buffer_update_s(self) -> float:
        """Lower bound on the time of updates of buffers, which `common_nodes_s` includes [s]."""
        times = self.min_costs.times_s
        return sum(times[k] for k in self.freezable.buffer_updates)

    def extra_compute_s(self, layers: Collection[str]) -> float:
        """Return a lower bound on the time to compute the `nodes_for` of `layers` once [s]."""
        nodes = frozenset[int]().union(*(self.nodes_for[layer] for layer in layers))
        times = self.min_costs.times_s
        return sum(times[k] for k in nodes)

    def state_bytes(self, layers: Collection[str]) -> int:
        """Return the size of the parameters of `layers` and of their optimizer state [B]."""
        sizes = self.freezable.graph.tensor_bytes
        return sum(sizes[i] for layer in layers for i in self.state_of[layer])

    @cached_property
    def common_state_bytes(self) -> int:
        """Size of the state that every step replaces, such as running statistics [B]."""
        graph = self.freezable.graph
        return sum(
            graph.output_bytes[k] for k in self.freezable.common_nodes if graph.nodes[k].is_state
        )

    @cached_property
    def working_bytes(self) -> Mapping[str, int]:
        """For each layer, a lower bound on the RAM besides state of steps that train it [B]."""
        min_bytes_of_layer = {
            layer: self._max_working_set_bytes(names) for layer, names in self.layers.items()
        }
        if self.problem.can_page:
            return min_bytes_of_layer
        game = PebbleGame(self.freezable)
        for layer, names in self.layers.items():
            for name in names:
                min_bytes_of_layer[layer] = game.min_bytes(name, min_bytes_of_layer[layer])
        return min_bytes_of_layer

    @cached_property
    def min_working_bytes(self) -> int:
        """Lower bound on the RAM besides state of a step that trains no layer [B]."""
        return self._max_working_set_bytes(())

    @cached_property
    def excluded_layers(self) -> frozenset[str]:
        """The layers for which `min_ram_bytes` exceeds the usable RAM; no set trains them."""
        return frozenset(
            layer
            for layer in self.layers
            if self.min_ram_bytes(layer) > self.problem.usable_ram_bytes
        )

    def min_ram_bytes(self, layer: str) -> int:
        """Return a lower bound on the RAM of a step that trains only `layer`, with state [B]."""
        if self.problem.can_page:
            names, excludes_state = self.layers[layer], self.problem.reads_in_place
            return self._max_working_set_bytes(names, exclude_state=excludes_state)
        state_bytes = self.common_state_bytes + self.state_bytes([layer])
        return self.working_bytes[layer] + state_bytes

    @cached_property
    def max_state_bytes(self) -> int:
        """Maximum size of trained state in RAM beside `min_working_bytes` [B]; may be negative."""
        common_state_bytes = 0 if self.problem.can_page else self.common_state_bytes
        return self.problem.usable_ram_bytes - common_state_bytes - self.min_working_bytes

    def _max_working_set_bytes(
        self, parameters: Collection[str], *, exclude_state: bool = True
    ) -> int:
        """Return the largest working set of a step that trains only `parameters` [B]."""
        return floor(self._restricted_graph(parameters), memory_mapped=exclude_state).bytes

    def _restricted_graph(self, parameters: Collection[str]) -> Graph:
        """Return the graph of the step that trains only `parameters`, without metadata."""
        return Graph.from_valid(
            name="", nodes=self.freezable.restricted_nodes(parameters), batch_size=1, dtype="",
            resident_bytes={}, parameters=None, forward_macs=None, kernels=None,
        )  # fmt: skip


class _Program:
    """A mixed-integer program with the columns and rows of a relaxation."""

    def __init__(self, relaxation: ChoiceRelaxation) -> None:
        self.relaxation = relaxation
        self.problem = relaxation.problem
        self.graph = relaxation.freezable.graph
        self.upper: list[float] = []
        """The upper bound of each column; all lower bounds are 0."""
        self.is_integer: list[bool] = []
        self.rows: list[tuple[Mapping[int, float], float]] = []
        """Coefficients by column, and the upper bound of each row."""
        self.train_column_of = {
            layer: self._add_column(float(layer not in relaxation.excluded_layers), is_integer=True)
            for layer in relaxation.layers
        }
        self._add_row(dict.fromkeys(self.train_column_of.values(), -1.0), -1.0)
        self.compute_column_of = self._add_computed_columns()
        self.resident_column_of = self._add_resident_columns()
        self.state_column = self._add_column(float("inf"))
        """Column that is at least the size of resident trained state. Its unit is
        `max_state_bytes`, at least 1 B."""
        self.recompute_column_of: dict[int, int] = {}
        """For each node, the column that states whether it is recomputed after a limited node."""
        self.page_in_column_of: dict[int, int] = {}
        """For each tensor, the column that states whether it is paged in after a limited node."""
        self._limit_ram()
        for k in self._limited_nodes():
            self._limit_ram_at(k)
        self._limit_time_and_energy()
        for cut in relaxation.cuts:
            self._add_cut(cut)

    def to_standard_form(self) -> StandardForm:
        """Return the program in standard form; it maximizes the scores / `relaxation.unit`."""
        from poetmodel.backends.sparse import coo_array
        from poetmodel.backends.standard_form import MAXIMIZE, StandardForm

        entries = [
            (value, row, column)
            for row, (coefficients, _) in enumerate(self.rows)
            for column, value in coefficients.items()
        ]
        values, rows, columns = zip(*entries, strict=True)
        objective = [0.0] * len(self.upper)
        for layer, column in self.train_column_of.items():
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
        self.upper.append(upper)
        self.is_integer.append(is_integer)
        return len(self.upper) - 1

    def _add_computed_columns(self) -> dict[int, int]:
        """Add columns that state whether nodes are computed; return the columns by node.

        Nodes needed by the same layers share a column; nodes of every step have none.
        """
        layers_for: dict[int, set[str]] = {}
        for layer, nodes in self.relaxation.nodes_for.items():
            for k in nodes:
                layers_for.setdefault(k, set()).add(layer)
        column_of = {frozenset([layer]): column for layer, column in self.train_column_of.items()}
        layer_sets = {frozenset(layers) for layers in layers_for.values()}.difference(column_of)
        for layer_set in sorted(
            layer_sets, key=lambda layer_set: (len(layer_set), sorted(layer_set))
        ):
            largest_subset = max((subset for subset in column_of if subset < layer_set), key=len)
            column = self._add_column()
            for subset in (
                largest_subset,
                *(frozenset([layer]) for layer in layer_set - largest_subset),
            ):
                self._add_row({column_of[subset]: 1.0, column: -1.0}, 0.0)
            column_of[layer_set] = column
        return {k: column_of[frozenset(layers)] for k, layers in layers_for.items()}

    def _add_resident_columns(self) -> dict[int, int]:
        """Return, by trained state tensor, the column that states whether its home is in RAM."""
        columns: dict[int, int] = {}
        for layer, state in self.relaxation.state_of.items():
            for i in state:
                columns[i] = self.train_column_of[layer]
                if self.problem.can_page:
                    columns[i] = self._add_column()
                    self._add_row({columns[i]: 1.0, self.train_column_of[layer]: -1.0}, 0.0)
        return columns

    # -- rows --------------------------------------------------------------------------------------

    def _add_row(self, row: Mapping[int, float], upper: float, unit: float = 0.0) -> None:
        """Add a row whose sum is at most `upper`; `unit` divides both, with a tolerance."""
        if unit:
            row = {column: value / unit for column, value in row.items() if value}
            upper = upper / unit + LIMIT_TOLERANCE * max(1.0, abs(upper / unit))
        self.rows.append((row, upper))

    def _limit_ram(self) -> None:
        """Add rows that limit the trained state in RAM and, with paging, on storage."""
        relaxation, sizes = self.relaxation, self.graph.tensor_bytes
        unit = max(1.0, relaxation.max_state_bytes)
        row = {self.state_column: -1.0}
        for i, column in self.resident_column_of.items():
            row[column] = row.get(column, 0.0) + sizes[i] / unit
        self._add_row(row, 0.0)
        for layer, column in self.train_column_of.items():
            extra_bytes = relaxation.working_bytes[layer] - relaxation.min_working_bytes
            self._add_row(
                {self.state_column: unit, column: extra_bytes}, relaxation.max_state_bytes, unit
            )
        storage_bytes = self.problem.aux_limit_bytes
        if self.problem.can_page and storage_bytes is not None:
            row = {}
            for layer, state in relaxation.state_of.items():
                row[self.train_column_of[layer]] = float(sum(sizes[i] for i in state))
                row |= {self.resident_column_of[i]: -float(sizes[i]) for i in state}
            self._add_row(row, storage_bytes, max(1.0, storage_bytes))

    def _limit_time_and_energy(self) -> None:
        """Add rows for deadline (with a second one for a makespan) and energy budget."""
        problem, table = self.problem, self.problem.table
        if problem.deadline_s is not None:
            row, upper = self._time_row()
            self._add_recomputation_costs(row, self.relaxation.min_costs.times_s)
            if problem.counts_transfers:
                self._add_paging_costs(row, table.page_in_time_s, table.page_out_time_s)
            self._add_row(row, upper, problem.deadline_s or 1.0)
            if problem.is_overlapping:
                transfers = self._transfer_costs(table.page_in_time_s, table.page_out_time_s)
                self._add_paging_costs(transfers, table.page_in_time_s, table.page_out_time_s)
                self._add_row(transfers, problem.deadline_s, problem.deadline_s or 1.0)
        if problem.energy_budget_j is not None:
            idle_w = problem.idle_power_w
            compute_j = [
                energy_j + idle_w * time_s
                for time_s, energy_j in zip(*self.relaxation.min_costs, strict=True)
            ]
            transfers = self._transfer_costs(table.page_in_energy_j, table.page_out_energy_j)
            common_j = self._add_commit_costs(transfers, attrgetter("energy_j"))
            row, upper = self._compute_row(compute_j, transfers, problem.energy_budget_j - common_j)
            self._add_recomputation_costs(row, compute_j)
            self._add_paging_costs(row, table.page_in_energy_j, table.page_out_energy_j)
            self._add_row(row, upper, problem.energy_budget_j or 1.0)

    def _add_recomputation_costs(self, row: dict[int, float], costs: Sequence[float]) -> None:
        row |= {column: costs[k] for k, column in self.recompute_column_of.items()}

    def _add_paging_costs(
        self, row: dict[int, float], page_in_costs: Sequence[float], page_out_costs: Sequence[float]
    ) -> None:
        """Set `row` at each column of `page_in_column_of` to the page-in plus page-out cost."""
        row |= {
            column: page_in_costs[i] + page_out_costs[i]
            for i, column in self.page_in_column_of.items()
        }

    def _time_row(self, excluded_layers: Collection[str] = ()) -> tuple[dict[int, float], float]:
        """Return the row of the time of a single pass, and its upper bound [s].

        The bound is the deadline minus times that do not depend on the chosen layers. Transfers and
        commits of the state of `excluded_layers` are not counted.
        """
        table, transfers = self.problem.table, dict[int, float]()
        remaining_s = self.problem.deadline_s or 0.0
        if self.problem.counts_transfers:
            transfers = self._transfer_costs(
                table.page_in_time_s, table.page_out_time_s, excluded_layers
            )
            remaining_s -= self._add_commit_costs(transfers, attrgetter("time_s"), excluded_layers)
        return self._compute_row(self.relaxation.min_costs.times_s, transfers, remaining_s)

    def _compute_row(
        self, costs: Sequence[float], transfers: Mapping[int, float], limit: float
    ) -> tuple[dict[int, float], float]:
        """Return `transfers` plus node costs by column, and `limit` minus costs of common nodes."""
        row = dict(transfers)
        for k, column in self.compute_column_of.items():
            row[column] = row.get(column, 0.0) + costs[k]
        return row, limit - sum(costs[k] for k in self.relaxation.freezable.common_nodes)

    def _transfer_costs(
        self,
        page_in_costs: Sequence[float],
        page_out_costs: Sequence[float],
        excluded_layers: Collection[str] = (),
    ) -> dict[int, float]:
        """Return the costs of transfers of trained state on storage, by column.

        The column of a layer has all of its state on storage; that of a home subtracts one tensor.
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
                for column, value in (
                    (self.train_column_of[layer], cost),
                    (self.resident_column_of[i], -cost),
                ):
                    costs_by_column[column] = costs_by_column.get(column, 0.0) + value
        return costs_by_column

    def _add_commit_costs(
        self,
        row: dict[int, float],
        read_cost: Callable[[Cost], float],
        excluded_layers: Collection[str] = (),
    ) -> float:
        """Add to `row` lower bounds on costs of commits by layer, except `excluded_layers`.

        `read_cost` selects time or energy. Returns the costs for state that every step replaces.
        """
        commit = self.problem.table.commit
        if commit is None:
            return 0.0
        remaining_costs = {new: read_cost(min_cost) for new, min_cost in commit.min_costs.items()}
        for layer, state in self.relaxation.state_of.items():
            layer_cost = sum(remaining_costs.pop(self.graph.replacement_of[i]) for i in state)
            if layer not in excluded_layers:
                row[self.train_column_of[layer]] = (
                    row.get(self.train_column_of[layer], 0.0) + layer_cost
                )
        common_nodes = self.relaxation.freezable.common_nodes
        return sum(
            cost for new, cost in remaining_costs.items() if self.graph.node_of[new] in common_nodes
        )

    def _add_cut(self, cut: SetCut) -> None:
        """Add the row of a cut; with `state_bytes`, first a column and a row for this size.

        The sum of ``active_row`` minus ``active_bound`` is 1 if the cut applies, else it can be 0
        or less. With `extra_s`, the row is that of the time plus this difference times `extra_s`.
        """
        active_row = {self.train_column_of[layer]: 1.0 for layer in cut.layers}
        active_bound = len(active_row) - 1.0
        if cut.is_exact:
            active_row |= {
                column: -1.0 for column in self.train_column_of.values() if column not in active_row
            }
        if cut.state_bytes is not None:
            max_bytes, min_bytes = self.relaxation.max_state_bytes, cut.state_bytes
            unit = max(1.0, max_bytes)
            reaches_state_column = self._add_column(is_integer=True)
            self._add_row(
                {self.state_column: unit, reaches_state_column: min_bytes - 1.0 - max_bytes},
                min_bytes - 1.0,
                unit,
            )
            active_row[reaches_state_column] = 1.0
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

    def _limited_nodes(self) -> Iterator[int]:
        """Yield up to `MAX_LIMITED_NODES` backward nodes to limit RAM at, if restoration costs."""
        problem = self.problem
        has_limit = problem.deadline_s is not None or problem.energy_budget_j is not None
        if not has_limit and (problem.can_page or problem.recompute):
            return  # restoring tensors is free
        nodes = self.graph.nodes
        backward_nodes = [
            k for k in sorted(self.compute_column_of) if nodes[k].phase == Phase.BACKWARD
        ]
        count = min(MAX_LIMITED_NODES, len(backward_nodes))
        yield from (backward_nodes[k * len(backward_nodes) // count] for k in range(count))

    def _limit_ram_at(self, limited_node: int) -> None:
        """Add columns and rows that limit the RAM at the first computation of `limited_node`."""
        graph, sizes = self.graph, self.graph.tensor_bytes
        earlier_tensors = [
            i
            for i, k in enumerate(graph.node_of)
            if k <= limited_node and not graph.nodes[k].is_state and i not in graph.state_of
        ]
        keep_columns = {i: self._add_column() for i in earlier_tensors}
        restore_columns = {i: [column] for i, column in keep_columns.items()}
        for i in earlier_tensors if self.problem.can_page else ():
            restore_columns[i].append(self._add_later_restoration_column(self.page_in_column_of, i))
        recompute_columns = self._add_recompute_columns(earlier_tensors)
        for i in earlier_tensors:
            if graph.node_of[i] in recompute_columns:
                restore_columns[i].append(recompute_columns[graph.node_of[i]])
        freezable, min_inputs = self.relaxation.freezable, self.relaxation.min_inputs
        # Skip buffer updates, which may run before the limited node, and nodes that only layers
        # outside `layers` (score 0) need: these are never computed.
        computed_nodes = self.compute_column_of.keys() | (
            freezable.common_nodes - freezable.buffer_updates
        )
        for i in earlier_tensors:
            later_readers = [
                k
                for k in graph.users_of[i]
                if k > limited_node and k in computed_nodes and i in min_inputs[k]
            ]
            for reader_column in {self.compute_column_of.get(k) for k in later_readers}:
                self._require_restoration(reader_column, restore_columns[i])
        for k, column in recompute_columns.items():
            for i in min_inputs[k]:
                if i in restore_columns:
                    self._require_restoration(column, restore_columns[i])
        node_tensors = {*graph.inputs_of[limited_node], *graph.outputs_of[limited_node]}
        working_bytes = self.relaxation.min_node_bytes(limited_node)
        ram_bytes = float(self.relaxation.max_state_bytes + self.relaxation.min_working_bytes)
        unit = max(1.0, ram_bytes)
        row = {keep_columns[i]: float(sizes[i]) for i in earlier_tensors if i not in node_tensors}
        row[self.state_column] = float(max(1, self.relaxation.max_state_bytes))
        row[self.compute_column_of[limited_node]] = float(working_bytes)
        self._add_row(row, ram_bytes, unit)

    def _require_restoration(self, reader_column: int | None, columns: Sequence[int]) -> None:
        """Require that `columns` sum to at least `reader_column`, or at least 1 if it is None."""
        row = dict.fromkeys(columns, -1.0)
        self._add_row(
            row if reader_column is None else row | {reader_column: 1.0},
            -1.0 if reader_column is None else 0.0,
        )

    def _add_recompute_columns(self, tensors: Sequence[int]) -> dict[int, int]:
        """Add a column for each maker of `tensors`: its recomputation after the limited node."""
        columns: dict[int, int] = {}
        for k in dict.fromkeys(self.graph.node_of[i] for i in tensors):
            if self.problem.may_recompute(k):
                columns[k] = self._add_later_restoration_column(self.recompute_column_of, k)
        return columns

    def _add_later_restoration_column(self, total_columns: dict[int, int], key: int) -> int:
        """Add and return a column: whether `key` is restored after the node of `_limit_ram_at`.

        It is at most the column of `key` in `total_columns`, which is added if missing.
        """
        column = self._add_column()
        if key not in total_columns:
            total_columns[key] = self._add_column()
        self._add_row({column: 1.0, total_columns[key]: -1.0}, 0.0)
        return column


def costs_for(graph: Graph, problem: Problem) -> Costs:
    """Return the costs of `graph`, whose tensors have names of tensors of the problem's graph.

    Estimates for a device are estimated again; a node without a cost in the problem is free.
    """
    costs, device = problem.costs, find_estimate_device(problem)
    if device is not None:
        return Costs.estimate(graph, device)
    compute_nodes = [node.name for node in graph.nodes if not node.is_state]
    return replace(
        costs,
        compute={name: costs.compute.get(name, FREE) for name in compute_nodes},
        pages=None
        if costs.pages is None
        else {tensor.name: costs.pages[tensor.name] for tensor in graph.tensors},
    )


def find_estimate_device(problem: Problem) -> Device | None:
    """Return the device of the problem's costs if they equal its estimates, otherwise None."""
    device = problem.costs.device
    if device is None:
        return None
    estimate = replace(Costs.estimate(problem.graph, device), commit=problem.commit)
    return device if problem.costs == estimate else None
