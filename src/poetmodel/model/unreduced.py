"""``compact`` without its reductions: every choice of the contract open, memory rows as exact.

For constraints of a user's own that make a choice matter which the reductions drop, such as a
page-out later than the first computation.
"""

from __future__ import annotations

from typing import Any

import pyomo.core as pyo

from poetmodel.model.formulation import AFTER_VARIABLES, Component, Formulation
from poetmodel.model.linear import merged, relation, stated_limit
from poetmodel.model.memory import state_memory
from poetmodel.model.objective import LIMITS_AND_OBJECTIVE
from poetmodel.model.relations import TRIANGLE, TriangleRelations
from poetmodel.model.rows import covered, row_constraint
from poetmodel.problem import LinearRow


def _present(m: pyo.ConcreteModel, t: int, i: int) -> list[Any]:
    """Return the variables of which one must hold for a copy of tensor `i` in stage `t`."""
    found = [m.R[t, m.problem.working_graph.node_of[i]]]
    if (t, i) in m.S_RAM:
        found += [m.S_RAM[t, i], m.M_in[t, i]]
    return found


def _inputs(m: pyo.ConcreteModel) -> None:
    """Compute a node only when its inputs are in RAM.

    For every input `i` of node `j` and every stage::

        R[t,j] <= R[t,node(i)] + S_RAM[t,i] + M_in[t,i]

    Resident state is in RAM: of state `w` the right-hand sides have ``+ resident[w]``, and copies
    are of state on storage only.
    """
    graph = m.problem.working_graph
    n = len(graph.nodes)
    index = [(t, j, i) for j, ins in enumerate(graph.inputs_of) for i in ins for t in range(j, n)]

    def read(t: int, j: int, i: int) -> LinearRow:
        home = [m.resident[i]] if i in m.resident else []
        return covered(m.R[t, j], _present(m, t, i) + home)

    m.inputs = row_constraint(index, read)


def _keeping(m: pyo.ConcreteModel) -> None:
    """Keep on only what is in RAM.

    ::

        S_RAM[t+1,i] <= R[t,node(i)] + S_RAM[t,i] + M_in[t,i]
    """
    m.keeping = row_constraint(m.S_RAM, lambda t, i: covered(m.S_RAM[t, i], _present(m, t - 1, i)))


def _on_storage(m: pyo.ConcreteModel) -> None:
    """Have on storage only what was paged out, or lay there from the start.

    ::

        S_AUX[t+1,i] <= S_AUX[t,i] + M_out[t,i]

    State that is not resident lies there, and what replaces it is paged out where it is made::

        S_RAM[t,w], S_AUX[t,w] <= 1 - resident[w]
        M_out[u,w+]            =  1 - resident[w]
    """
    graph = m.problem.working_graph
    stored = m.storage_home
    m.homes_kept = row_constraint(
        [(t, i) for t, i in m.S_RAM if i in m.resident and not m.S_RAM[t, i].fixed],
        lambda t, i: covered(m.S_RAM[t, i], [stored[i]] if i in stored else []),
    )
    m.written_back = row_constraint(
        [(old, new) for old, new in m.problem.graph.replacement_of.items() if old in stored],
        lambda old, new: LinearRow.of(
            [(1, m.M_out[graph.node_of[new], new]), (-1, stored[old])], lower=0, upper=0
        ),
    )

    def rule(t: int, i: int) -> LinearRow | None:
        if i in m.resident:
            if m.S_AUX[t, i].fixed:
                return None
            return covered(m.S_AUX[t, i], [stored[i]] if i in stored else [])
        if i in graph.on_aux:
            return None
        before = [m.S_AUX[t - 1, i]] if (t - 1, i) in m.S_AUX else []
        return covered(m.S_AUX[t, i], [*before, m.M_out[t - 1, i]])

    m.on_storage = row_constraint(m.S_AUX, rule)


def _from_storage(m: pyo.ConcreteModel) -> None:
    """Page in only what is on storage and not in RAM.

    ::

        M_in[t,i] <= S_AUX[t,i],    M_in[t,i] + S_RAM[t,i] <= 1
    """
    m.from_storage = row_constraint(m.M_in, lambda t, i: covered(m.M_in[t, i], [m.S_AUX[t, i]]))
    m.once = row_constraint(
        m.M_in, lambda t, i: LinearRow.of([(1, m.M_in[t, i]), (1, m.S_RAM[t, i])], upper=1)
    )


def _page_out(m: pyo.ConcreteModel) -> None:
    """Page out only what is in RAM.

    ::

        M_out[t,i] <= R[t,node(i)] + S_RAM[t,i] + M_in[t,i]
    """
    m.page_out = row_constraint(m.M_out, lambda t, i: covered(m.M_out[t, i], _present(m, t, i)))


def _memory(m: pyo.ConcreteModel) -> None:
    """Keep within RAM at every step: the rows of ``compact`` over the whole triangle."""
    state_memory(m, TriangleRelations(m))


def _storage(m: pyo.ConcreteModel) -> None:
    """Keep within the auxiliary storage; its space is not reused.

    ::

        sum(bytes[i] * stored[i]) + sum(bytes[w] * (1 - resident[w])) <= aux_bytes
        stored[i] >= M_out[t,i]
    """
    problem = m.problem
    limit = problem.aux_limit_bytes
    if limit is None or not problem.can_page:
        return
    graph = problem.working_graph
    written = [i for i in range(len(graph.tensors)) if i not in graph.on_aux]
    m.stored = pyo.Var(written, bounds=(0, 1))
    homes = ((problem.graph.tensor_bytes[i], var) for i, var in m.storage_home.items())
    terms = merged([*((graph.tensor_bytes[i], m.stored[i]) for i in written), *homes])
    row = stated_limit(m, LinearRow.of(terms, upper=limit, name="storage"))
    if row is None:
        return
    m.storage = pyo.Constraint(expr=relation(row))
    m.storing = row_constraint(
        [(t, i) for t, i in m.M_out if i in m.stored],
        lambda t, i: covered(m.M_out[t, i], [m.stored[i]]),
    )


UNREDUCED = Formulation(
    "compact-unreduced",
    (
        TRIANGLE,
        Component("inputs", _inputs, "POET (ICML 2022), constraint 1b, with M_in", AFTER_VARIABLES),
        Component("keeping", _keeping, "POET (ICML 2022), constraint 1c", AFTER_VARIABLES),
        Component("on_storage", _on_storage, "POET (ICML 2022), constraint 1d", AFTER_VARIABLES),
        Component(
            "from_storage", _from_storage, "POET (ICML 2022), constraint 1e", AFTER_VARIABLES
        ),
        Component(
            "page_out",
            _page_out,
            "POET (ICML 2022), constraint 1f, at the step itself",
            AFTER_VARIABLES,
        ),
        Component(
            "memory",
            _memory,
            "Checkmate (MLSys 2020), equations 2 and 3, per step",
            AFTER_VARIABLES,
        ),
        Component("storage", _storage, "poetmodel: storage is finite, not reused", AFTER_VARIABLES),
        *LIMITS_AND_OBJECTIVE,
    ),
)
