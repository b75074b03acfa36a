"""``compact`` without reductions: with all valid decisions, and the memory rows of ``compact``.

Users choose it to constrain decisions that the reductions remove, such as a page-out later than the
first computation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.model.compact import add_stage_limit_rows
from poetmodel.model.decisions import merge_terms
from poetmodel.model.formulation import AFTER_VARIABLES, Component, Formulation
from poetmodel.model.linear import scale_and_register_limit
from poetmodel.model.memory import add_memory_rows
from poetmodel.model.objective import LIMITS_AND_OBJECTIVE
from poetmodel.model.relations import TRIANGLE, TriangleRelations
from poetmodel.problem import LinearRow

if TYPE_CHECKING:
    from poetmodel.model.arrays import Model


def _presence_columns(m: Model, t: int, i: int) -> list[int]:
    """Return the columns of which at least one is 1 if stage `t` has a copy of tensor `i`."""
    columns = [m.R[t, m.problem.working_graph.node_of[i]]]
    if (t, i) in m.S_RAM:
        columns += [m.S_RAM[t, i], m.M_in[t, i]]
    return columns


def _add_input_rows(m: Model) -> None:
    """Require the inputs of a computed node in RAM.

    For every input `i` of node `j` and every stage ``t >= j``::

        R[t,j] <= R[t,node(i)] + S_RAM[t,i] + M_in[t,i]

    For state `w`, the right-hand side also has ``+ resident[w]``, because resident state is in RAM;
    other rows set S_RAM and M_in of resident state to 0. Inputs are those of the working graph,
    without state that is read in place.
    """
    graph = m.problem.working_graph
    m.begin_rows("inputs")
    for j, inputs in enumerate(graph.inputs_of):
        for i in inputs:
            resident_columns = [m.resident[i]] if i in m.resident else []
            for t in range(j, len(graph.nodes)):
                m.add_implication_row(
                    (t, j, i), m.R[t, j], _presence_columns(m, t, i) + resident_columns
                )


def _add_keeping_rows(m: Model) -> None:
    """Allow keeps only from RAM: ``S_RAM[t+1,i] <= R[t,node(i)] + S_RAM[t,i] + M_in[t,i]``."""
    m.begin_rows("keeping")
    for (t, i), column in m.S_RAM.items():
        m.add_implication_row((t, i), column, _presence_columns(m, t - 1, i))


def _add_on_storage_rows(m: Model) -> None:
    """Allow on storage only tensors that were paged out, or that are there from the start.

    For every tensor `i` that does not start on storage::

        S_AUX[t+1,i] <= S_AUX[t,i] + M_out[t,i]

    Only state that is not resident has copies or is on storage. Node `u` makes its replacement
    `w+`, which is paged out in the stage of `u`::

        S_RAM[t,w], S_AUX[t,w] <= 1 - resident[w]
        M_out[u,w+]            =  1 - resident[w]
    """
    graph = m.problem.working_graph
    home_columns = m.storage_home
    m.begin_rows("homes_kept")
    for (t, i), column in m.S_RAM.items():
        if i in m.resident and column not in m.fixed:
            m.add_implication_row((t, i), column, [home_columns[i]] if i in home_columns else [])
    m.begin_rows("written_back")
    for old, new in m.problem.graph.replacement_of.items():
        if old in home_columns:
            columns = (m.M_out[graph.node_of[new], new], home_columns[old])
            m.add_row((old, new), columns, (1.0, -1.0), lower=0.0, upper=0.0)
    m.begin_rows("on_storage")
    for (t, i), column in m.S_AUX.items():
        if i in m.resident:
            if column not in m.fixed:
                m.add_implication_row(
                    (t, i), column, [home_columns[i]] if i in home_columns else []
                )
        elif i not in graph.on_aux:
            sources = [m.S_AUX[t - 1, i]] if (t - 1, i) in m.S_AUX else []
            m.add_implication_row((t, i), column, [*sources, m.M_out[t - 1, i]])


def _add_from_storage_rows(m: Model) -> None:
    """Allow page-ins only of tensors that are on storage and not in RAM.

    ::

        M_in[t,i] <= S_AUX[t,i],    M_in[t,i] + S_RAM[t,i] <= 1
    """
    m.begin_rows("from_storage")
    for index, column in m.M_in.items():
        m.add_implication_row(index, column, [m.S_AUX[index]])
    m.begin_rows("once")
    for index, column in m.M_in.items():
        m.add_row(index, (column, m.S_RAM[index]), (1.0, 1.0), upper=1.0)


def _add_page_out_rows(m: Model) -> None:
    """Allow page-outs only from RAM: ``M_out[t,i] <= R[t,node(i)] + S_RAM[t,i] + M_in[t,i]``."""
    m.begin_rows("page_out")
    for (t, i), column in m.M_out.items():
        m.add_implication_row((t, i), column, _presence_columns(m, t, i))


def _add_all_memory_rows(m: Model) -> None:
    """Limit RAM at every step, with the rows of ``compact``."""
    n = len(m.problem.graph.nodes)
    add_memory_rows(m, TriangleRelations(m), {t: range(t + 1) for t in range(n)})


def _add_storage_rows(m: Model) -> None:
    """Limit the auxiliary storage, whose space is not reused.

    Adds neither variables nor rows if storage has no limit or paging is impossible. If the limit
    cannot bind, adds only the real variables `stored`, from 0 to 1; otherwise also registers the
    limit for cover cuts. Tensors that start on storage have no variable `stored`::

        sum(bytes[i] * stored[i]) + sum(bytes[w] * (1 - resident[w])) <= aux_limit_bytes
        stored[i] >= M_out[t,i]
    """
    problem = m.problem
    limit = problem.aux_limit_bytes
    if limit is None or not problem.can_page:
        return
    graph = problem.working_graph
    pageable_tensors = [i for i in range(len(graph.tensors)) if i not in graph.on_aux]
    m.add_variables("stored", pageable_tensors, integer=False)
    home_terms = ((problem.graph.tensor_bytes[i], column) for i, column in m.storage_home.items())
    terms = merge_terms(
        [*((graph.tensor_bytes[i], m.stored[i]) for i in pageable_tensors), *home_terms]
    )
    row = scale_and_register_limit(m, LinearRow.from_terms(terms, upper=limit, name="storage"))
    if row is None:
        return
    m.begin_rows("storage")
    m.add_linear_row(row)
    m.begin_rows("storing")
    for (t, i), column in m.M_out.items():
        if i in m.stored:
            m.add_implication_row((t, i), column, [m.stored[i]])


def _add_stage_limits(m: Model) -> None:
    """Add the rows of the per-stage user constraints."""
    add_stage_limit_rows(m, TriangleRelations(m), range(len(m.problem.stage_limits)))


UNREDUCED = Formulation(
    "compact-unreduced",
    (
        TRIANGLE,
        Component(
            "inputs", _add_input_rows, "POET (ICML 2022), constraint 1b, with M_in", AFTER_VARIABLES
        ),
        Component("keeping", _add_keeping_rows, "POET (ICML 2022), constraint 1c", AFTER_VARIABLES),
        Component(
            "on_storage", _add_on_storage_rows, "POET (ICML 2022), constraint 1d", AFTER_VARIABLES
        ),
        Component(
            "from_storage",
            _add_from_storage_rows,
            "POET (ICML 2022), constraint 1e",
            AFTER_VARIABLES,
        ),
        Component(
            "page_out",
            _add_page_out_rows,
            "POET (ICML 2022), constraint 1f, at the step itself",
            AFTER_VARIABLES,
        ),
        Component(
            "memory",
            _add_all_memory_rows,
            "Checkmate (MLSys 2020), equations 2 and 3, per step",
            AFTER_VARIABLES,
        ),
        Component(
            "storage",
            _add_storage_rows,
            "poetmodel: storage is finite, not reused",
            AFTER_VARIABLES,
        ),
        Component(
            "stage_limits",
            _add_stage_limits,
            "poetmodel: per-stage user constraints",
            AFTER_VARIABLES,
        ),
        *LIMITS_AND_OBJECTIVE,
    ),
)
