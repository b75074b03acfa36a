"""``paper``: Algorithm 1 of POET as published, for comparison and teaching.

Its memory recurrence misses what the simulator sees: a page-in's destination counts one stage late,
and a tensor that nobody reads is never freed. Its schedules are verified like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.errors import ModelError
from poetmodel.model.formulation import AFTER_VARIABLES, Component, Formulation
from poetmodel.model.objective import DEADLINE, OBJECTIVE, OWN_CONSTRAINTS
from poetmodel.model.relations import TRIANGLE
from poetmodel.problem import LinearRow, Problem, Quantity

if TYPE_CHECKING:
    from poetmodel.model.arrays import Model


def check_fits(problem: Problem) -> None:
    """Raise `ModelError` for a problem that Algorithm 1 cannot state."""
    graph = problem.graph
    faults = []
    several = [node.name for node in graph.nodes if len(node.outputs) != 1]
    if several:
        faults.append(
            f"formulation 'paper' knows nodes with one output each, not {several[0]!r}; use lazy "
            "or compact"
        )
    stored = [node.name for node in graph.nodes if node.on_aux]
    if stored:
        faults.append(
            f"formulation 'paper' knows no nodes on auxiliary storage such as {stored[0]!r}; "
            "use lazy or compact"
        )
    if graph.version > 1:
        faults.append(
            "formulation 'paper' knows no state tensors and no in-place operators; "
            "use lazy or compact"
        )
    if problem.minimize != Quantity.ENERGY:
        faults.append(
            f"formulation 'paper' minimizes energy only, not {problem.minimize}; "
            "use lazy or compact"
        )
    if problem.energy_budget_j is not None:
        faults.append("formulation 'paper' has no energy budget; use lazy or compact")
    if problem.stage_limits:
        faults.append("formulation 'paper' knows no constraints on stages; use lazy or compact")
    if faults:
        raise ModelError(faults)


def _inputs_resident(m: Model) -> None:
    """Compute a node only when its inputs are in RAM.

    For every edge ``(i, j)`` and stage ``t``::

        R[t,j] <= R[t,i] + S_RAM[t,i]
    """
    m.begin_rows("inputs_resident")
    for j, inputs in enumerate(m.problem.graph.inputs_of):
        for i in inputs:
            for t in range(j, len(m.problem.graph.nodes)):
                held = [m.S_RAM[t, i]] if i < t else []
                m.cover((t, i, j), m.R[t, j], [m.R[t, i], *held])


def _ram_continuity(m: Model) -> None:
    """Hold in RAM only what was there, was computed, or was paged in.

    ::

        S_RAM[t+1,i] <= R[t,i] + S_RAM[t,i] + M_in[t,i]
    """
    m.begin_rows("ram_continuity")
    for (t, i), column in m.S_RAM.items():
        before = [m.S_RAM[t - 1, i], m.M_in[t - 1, i]] if i < t - 1 else []
        m.cover((t, i), column, [m.R[t - 1, i], *before])


def _aux_continuity(m: Model) -> None:
    """Hold on storage only what was there or was paged out.

    ::

        S_AUX[t+1,i] <= S_AUX[t,i] + M_out[t,i]
    """
    m.begin_rows("aux_continuity")
    for (t, i), column in m.S_AUX.items():
        before = [m.S_AUX[t - 1, i]] if i < t - 1 else []
        m.cover((t, i), column, [m.M_out[t - 1, i], *before])


def _page_in_source(m: Model) -> None:
    """Page in only what is on storage.

    ::

        M_in[t,i] <= S_AUX[t,i]
    """
    m.begin_rows("page_in_source")
    for index, column in m.M_in.items():
        m.cover(index, column, [m.S_AUX[index]])


def _page_out_source(m: Model) -> None:
    """Page out only what was in RAM when the stage began.

    ::

        M_out[t,i] <= S_RAM[t,i]    (so M_out[t,t] = 0)
    """
    m.begin_rows("page_out_source")
    for (t, i), column in m.M_out.items():
        if column not in m.fixed:
            m.cover((t, i), column, [] if i == t else [m.S_RAM[t, i]])


def _freeing(m: Model) -> None:
    """Free a tensor after the last step of a stage that reads it.

    For every edge ``(i, k)`` and stage ``t >= k``, with the hazards ``H`` that forbid freeing `i`
    after step `k`, and their number `h_max`::

        H[t,i,k] = (1 - R[t,k]) + S_RAM[t+1,i] + sum(R[t,j] for readers j > k of i, j <= t)
        1 - FREE[t,i,k] <= H[t,i,k] <= h_max * (1 - FREE[t,i,k])

    `h_max` is one for each summand: the largest value that `H` can take.
    """
    graph = m.problem.graph
    n = len(graph.nodes)
    edges = [(i, k) for k, inputs in enumerate(graph.inputs_of) for i in inputs]
    index = [(t, i, k) for i, k in edges for t in range(k, n)]
    m.add_variables("FREE", index)

    def hazards(t: int, i: int, k: int) -> tuple[list[int], list[float]]:
        columns = [m.R[t, k]]
        if t + 1 < n:
            columns.append(m.S_RAM[t + 1, i])
        columns += [m.R[t, j] for j in graph.users_of[i] if k < j <= t]
        return columns, [-1.0, *[1.0] * (len(columns) - 1)]

    m.begin_rows("freeing_lower")
    for (t, i, k), free in m.FREE.items():
        columns, signs = hazards(t, i, k)
        m.add_row((t, i, k), [*columns, free], [*signs, 1.0], lower=0.0)
    m.begin_rows("freeing_upper")
    for (t, i, k), free in m.FREE.items():
        columns, signs = hazards(t, i, k)
        most = len(columns)
        m.add_row((t, i, k), [*columns, free], [*signs, most], upper=most - 1)


def _memory(m: Model) -> None:
    """Follow the memory in use through the steps of a stage, and bound it.

    In units of the budget, over the steps ``k <= t``::

        U[t,0]   = sum(bytes[i] * S_RAM[t,i]) + bytes[0] * R[t,0]
        U[t,k+1] = U[t,k] - sum(bytes[i] * FREE[t,i,k] for inputs i of k) + bytes[k+1] * R[t,k+1]
        U[t,k]  <= budget
    """
    graph, limit = m.problem.graph, m.problem.usable_ram_bytes
    # A budget that leaves nothing is infeasible, which U >= 0 with this bound still says.
    unit = max(limit, 1)
    size = [bytes_ / unit for bytes_ in graph.tensor_bytes]
    index = list(m.R)
    most = min(limit, unit) / unit if limit > 0 else 0.0
    m.add_variables("U", index, upper=most, integer=False)
    m.begin_rows("memory")
    for (t, k), in_use in m.U.items():
        terms = [(-1.0, in_use), (size[k], m.R[t, k])]
        if k == 0:
            terms += [(size[i], m.S_RAM[t, i]) for i in range(t)]
        else:
            terms.append((1.0, m.U[t, k - 1]))
            terms += [(-size[i], m.FREE[t, i, k - 1]) for i in graph.inputs_of[k - 1]]
        m.add_linear_row(LinearRow.of(terms, lower=0.0, upper=0.0, key=(t, k)))


PAPER = Formulation(
    "paper",
    (
        TRIANGLE,
        Component("inputs_resident", _inputs_resident, "POET (ICML 2022), 1b", AFTER_VARIABLES),
        Component("ram_continuity", _ram_continuity, "POET (ICML 2022), 1c", AFTER_VARIABLES),
        Component("aux_continuity", _aux_continuity, "POET (ICML 2022), 1d", AFTER_VARIABLES),
        Component("page_in_source", _page_in_source, "POET (ICML 2022), 1e", AFTER_VARIABLES),
        Component("page_out_source", _page_out_source, "POET (ICML 2022), 1f", AFTER_VARIABLES),
        Component("freeing", _freeing, "Checkmate (MLSys 2020), equation 3", AFTER_VARIABLES),
        Component(
            "memory",
            _memory,
            "Checkmate (MLSys 2020), equation 2",
            AFTER_VARIABLES | {"freeing"},
        ),
        DEADLINE,
        OWN_CONSTRAINTS,
        OBJECTIVE,
    ),
)
