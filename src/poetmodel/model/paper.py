"""``paper``: Algorithm 1 of POET as published, for comparison and teaching.

The memory recurrence differs from the simulator: the RAM of a page-in counts one stage late,
workspaces do not count, and a tensor that no step of a stage reads is not freed in that stage.
Storage is not limited. Schedules are verified like those of other formulations.

``paper`` supports only nodes with one output. Other graphs are reduced first: see `merge_outputs`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from poetmodel.device import Costs
from poetmodel.errors import ModelError
from poetmodel.graph import Graph, Tensor
from poetmodel.model.formulation import AFTER_VARIABLES, Component, Formulation
from poetmodel.model.objective import DEADLINE, OBJECTIVE, USER_TOTALS
from poetmodel.model.relations import TRIANGLE, ZERO, TriangleRelations
from poetmodel.problem import LinearRow, Problem, Quantity
from poetmodel.schedule import RELATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.model.arrays import Model


def check_supported(problem: Problem) -> None:
    """Raise `ModelError` with one message for each feature that ``paper`` lacks."""
    graph = problem.graph
    errors = []
    stored_nodes = [node.name for node in graph.nodes if node.on_aux]
    if stored_nodes:
        errors.append(
            f"formulation 'paper' has no nodes on auxiliary storage such as {stored_nodes[0]!r}; "
            "use lazy or compact"
        )
    if graph.version > 1:
        errors.append(
            "formulation 'paper' has no state tensors and no in-place operators; "
            "use lazy or compact"
        )
    if problem.minimize != Quantity.ENERGY:
        errors.append(
            f"formulation 'paper' minimizes energy only, not {problem.minimize}; "
            "use lazy or compact"
        )
    if problem.energy_budget_j is not None:
        errors.append("formulation 'paper' has no energy budget; use lazy or compact")
    if problem.stage_limits:
        errors.append("formulation 'paper' has no constraints on stages; use lazy or compact")
    if errors:
        raise ModelError(errors)


def describe_reduction(graph: Graph) -> str | None:
    """Return a sentence on the change of a graph by `merge_outputs`; None without a change."""
    node_names = [node.name for node in graph.nodes if len(node.outputs) != 1]
    if not node_names:
        return None
    return (
        f"formulation 'paper' supports one output per node: the outputs of a node are merged to "
        f"one tensor, kept, recomputed and paged together ({len(node_names)} of {len(graph.nodes)} "
        f"nodes have several or none, such as {node_names[0]!r}); the schedule is verified on the "
        "graph itself"
    )


def merge_outputs(problem: Problem) -> Problem:
    """Return the problem with the outputs of each node merged to one tensor of the node's name.

    Paging it costs as much as paging the outputs that have readers. Percentages become absolute
    limits. User-defined constraints name tensors: they are dropped, and `map_to_original_tensors`
    adds them.
    """
    graph, cost_table = problem.graph, problem.table
    outputs_of_node = used_outputs(graph)
    nodes = tuple(
        replace(
            node,
            inputs=tuple(
                dict.fromkeys(graph.nodes[graph.node_of[i]].name for i in graph.inputs_of[k])
            ),
            outputs=(Tensor(name=node.name, bytes=node.output_bytes),),
        )
        for k, node in enumerate(graph.nodes)
    )
    merged_graph = replace(graph, nodes=nodes)

    def sum_costs(
        times: Sequence[float], energies: Sequence[float]
    ) -> list[tuple[float, float]] | None:
        """Return (time, energy) of paging the read outputs of each node; None without storage."""
        if not cost_table.has_storage:
            return None
        return [
            (sum(times[i] for i in outputs), sum(energies[i] for i in outputs))
            for outputs in outputs_of_node
        ]

    costs = Costs.from_arrays(
        merged_graph,
        compute_time_s=cost_table.compute_time_s,
        compute_energy_j=cost_table.compute_energy_j,
        page_in=sum_costs(cost_table.page_in_time_s, cost_table.page_in_energy_j),
        page_out=sum_costs(cost_table.page_out_time_s, cost_table.page_out_energy_j),
        device=problem.costs.device,
    )
    return replace(problem.resolved(), graph=merged_graph, costs=costs, constraints=())


def used_outputs(graph: Graph) -> list[tuple[int, ...]]:
    """Return for each node its outputs that have readers."""
    return [tuple(i for i in outputs if graph.users_of[i]) for outputs in graph.outputs_of]


def map_to_original_tensors(m: Model, problem: Problem) -> None:
    """Change a model of the merged problem to refer to the tensors of the original `problem`.

    Every output with readers has the columns of its node. Appends ``_of_node`` to the family of
    each relation but ``R``, adds user-defined constraints, and sets `Model.problem`,
    `Model.decisions` and `Model.relations`.
    """
    outputs_of_node = used_outputs(problem.graph)
    node_families = {name: f"{name}_of_node" for name in RELATIONS[1:]}
    m.families = {node_families.get(name, name): columns for name, columns in m.families.items()}
    m.decisions = replace(
        m.decisions,
        page_ins=[(i, column) for k, column in m.decisions.page_ins for i in outputs_of_node[k]],
        page_outs=[(i, column) for k, column in m.decisions.page_outs for i in outputs_of_node[k]],
    )
    m.problem = problem
    USER_TOTALS.build(m)
    m.relations = NodeRelations(m)


class NodeRelations(TriangleRelations):
    """Entries of the relations for a graph whose model has one merged tensor per node."""

    def entry(self, name: str, t: int, k: int) -> int:
        """Return the column of entry ``name[t,k]``; `ZERO` for a tensor without readers.

        `k` is a node for ``R``, otherwise a tensor. All read tensors of a node share a column.
        """
        if name == "R":
            return self.m.R[t, k]
        graph = self.problem.graph
        if not graph.users_of[k]:
            return ZERO
        return self.m.families[f"{name}_of_node"][t, graph.node_of[k]]

    def nonzero_entries(self, is_one: Callable[[int], bool]) -> Iterator[tuple[str, int, int]]:
        """Yield (relation, stage, node or tensor) of every entry that is 1."""
        outputs_of_node = used_outputs(self.problem.graph)
        yield from (("R", t, k) for (t, k), column in self.m.R.items() if is_one(column))
        for name in RELATIONS[1:]:
            for (t, k), column in self.m.families[f"{name}_of_node"].items():
                if is_one(column):
                    yield from ((name, t, i) for i in outputs_of_node[k])


def _add_inputs_resident_rows(m: Model) -> None:
    """Require the inputs of a computed node in RAM.

    For every node ``j``, node ``i`` whose only tensor it reads, and stage ``t >= j``::

        R[t,j] <= R[t,i] + S_RAM[t,i]
    """
    m.begin_rows("inputs_resident")
    for j, inputs in enumerate(m.problem.graph.inputs_of):
        for i in inputs:
            for t in range(j, len(m.problem.graph.nodes)):
                ram_columns = [m.S_RAM[t, i]] if i < t else []
                m.add_implication_row((t, i, j), m.R[t, j], [m.R[t, i], *ram_columns])


def _add_ram_continuity_rows(m: Model) -> None:
    """Allow in RAM only tensors that were in RAM, computed or paged in, one stage before.

    ::

        S_RAM[t+1,i] <= R[t,i] + S_RAM[t,i] + M_in[t,i]
    """
    m.begin_rows("ram_continuity")
    for (t, i), column in m.S_RAM.items():
        sources = [m.S_RAM[t - 1, i], m.M_in[t - 1, i]] if i < t - 1 else []
        m.add_implication_row((t, i), column, [m.R[t - 1, i], *sources])


def _add_aux_continuity_rows(m: Model) -> None:
    """Allow on storage only tensors that were on storage or paged out, one stage before.

    ::

        S_AUX[t+1,i] <= S_AUX[t,i] + M_out[t,i]
    """
    m.begin_rows("aux_continuity")
    for (t, i), column in m.S_AUX.items():
        sources = [m.S_AUX[t - 1, i]] if i < t - 1 else []
        m.add_implication_row((t, i), column, [m.M_out[t - 1, i], *sources])


def _add_page_in_source_rows(m: Model) -> None:
    """Allow page-ins only of tensors on storage: ``M_in[t,i] <= S_AUX[t,i]``."""
    m.begin_rows("page_in_source")
    for index, column in m.M_in.items():
        m.add_implication_row(index, column, [m.S_AUX[index]])


def _add_page_out_source_rows(m: Model) -> None:
    """Allow page-outs only of tensors that were in RAM when the stage began.

    ::

        M_out[t,i] <= S_RAM[t,i]    (so M_out[t,t] = 0)
    """
    m.begin_rows("page_out_source")
    for (t, i), column in m.M_out.items():
        if column not in m.fixed:
            m.add_implication_row((t, i), column, [] if i == t else [m.S_RAM[t, i]])


def _add_freeing_rows(m: Model) -> None:
    """Free a tensor after the last step of a stage that reads it, unless it is kept.

    Adds the binary variables ``FREE``. For every edge ``(i, k)`` and stage ``t >= k``, `H` is the
    number of hazards, each of which forbids freeing `i` after step `k`, and `h_max` its maximum,
    the number of summands::

        H[t,i,k] = (1 - R[t,k]) + S_RAM[t+1,i] + sum(R[t,j] for readers j > k of i, j <= t)
        1 - FREE[t,i,k] <= H[t,i,k] <= h_max * (1 - FREE[t,i,k])

    In the last stage, `H` has no summand ``S_RAM``.
    """
    graph = m.problem.graph
    n = len(graph.nodes)
    edges = [(i, k) for k, inputs in enumerate(graph.inputs_of) for i in inputs]
    index = [(t, i, k) for i, k in edges for t in range(k, n)]
    m.add_variables("FREE", index)

    def hazard_terms(t: int, i: int, k: int) -> tuple[list[int], list[float]]:
        """Return the columns of `H` and their signs, without the constant 1."""
        columns = [m.R[t, k]]
        if t + 1 < n:
            columns.append(m.S_RAM[t + 1, i])
        columns += [m.R[t, j] for j in graph.users_of[i] if k < j <= t]
        return columns, [-1.0, *[1.0] * (len(columns) - 1)]

    m.begin_rows("freeing_lower")
    for (t, i, k), free_column in m.FREE.items():
        columns, signs = hazard_terms(t, i, k)
        m.add_row((t, i, k), [*columns, free_column], [*signs, 1.0], lower=0.0)
    m.begin_rows("freeing_upper")
    for (t, i, k), free_column in m.FREE.items():
        columns, signs = hazard_terms(t, i, k)
        h_max = len(columns)
        m.add_row((t, i, k), [*columns, free_column], [*signs, h_max], upper=h_max - 1)


def _add_all_memory_rows(m: Model) -> None:
    """Compute the RAM in use at each step of a stage, without workspaces, and limit it.

    Adds the real variables ``U``, over the steps ``k <= t``. The model divides all bytes by the
    budget::

        U[t,0]   = sum(bytes[i] * S_RAM[t,i]) + bytes[0] * R[t,0]
        U[t,k+1] = U[t,k] - sum(bytes[i] * FREE[t,i,k] for inputs i of k) + bytes[k+1] * R[t,k+1]
        U[t,k]  <= budget
    """
    graph, limit_bytes = m.problem.graph, m.problem.usable_ram_bytes
    # With a budget of 0 bytes or less, U is fixed to 0: no tensor with bytes can be in RAM.
    unit_bytes = max(limit_bytes, 1)
    sizes = [size / unit_bytes for size in graph.tensor_bytes]
    max_usage = 1.0 if limit_bytes > 0 else 0.0
    m.add_variables("U", list(m.R), upper=max_usage, integer=False)
    m.begin_rows("memory")
    for (t, k), usage_column in m.U.items():
        terms = [(-1.0, usage_column), (sizes[k], m.R[t, k])]
        if k == 0:
            terms += [(sizes[i], m.S_RAM[t, i]) for i in range(t)]
        else:
            terms.append((1.0, m.U[t, k - 1]))
            terms += [(-sizes[i], m.FREE[t, i, k - 1]) for i in graph.inputs_of[k - 1]]
        m.add_linear_row(LinearRow.from_terms(terms, lower=0.0, upper=0.0, key=(t, k)))


PAPER = Formulation(
    "paper",
    (
        TRIANGLE,
        Component(
            "inputs_resident", _add_inputs_resident_rows, "POET (ICML 2022), 1b", AFTER_VARIABLES
        ),
        Component(
            "ram_continuity", _add_ram_continuity_rows, "POET (ICML 2022), 1c", AFTER_VARIABLES
        ),
        Component(
            "aux_continuity", _add_aux_continuity_rows, "POET (ICML 2022), 1d", AFTER_VARIABLES
        ),
        Component(
            "page_in_source", _add_page_in_source_rows, "POET (ICML 2022), 1e", AFTER_VARIABLES
        ),
        Component(
            "page_out_source", _add_page_out_source_rows, "POET (ICML 2022), 1f", AFTER_VARIABLES
        ),
        Component(
            "freeing", _add_freeing_rows, "Checkmate (MLSys 2020), equation 3", AFTER_VARIABLES
        ),
        Component(
            "memory",
            _add_all_memory_rows,
            "Checkmate (MLSys 2020), equation 2",
            AFTER_VARIABLES | {"freeing"},
        ),
        DEADLINE,
        USER_TOTALS,
        OBJECTIVE,
    ),
)
