"""Where state tensors have their homes, in RAM or on storage: the variables, and their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyomo.core as pyo

from poetmodel.model.rows import row_constraint
from poetmodel.problem import LinearRow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.schedule import Schedule


def declare_homes(m: pyo.ConcreteModel) -> None:
    """Declare where state has its home; without paging it is in RAM.

    ::

        resident[w] + storage_home[w] = 1
    """
    problem = m.problem
    state = problem.graph.state_tensors
    m.resident = pyo.Var(state, domain=pyo.Binary)
    m.storage_home = pyo.Var(state if problem.can_page else (), domain=pyo.Binary)
    m.home = row_constraint(
        [(i,) for i in m.storage_home],
        lambda i: LinearRow.of([(1, m.resident[i]), (1, m.storage_home[i])], lower=1, upper=1),
    )
    for i in m.resident:
        if i not in m.storage_home:
            m.resident[i].fix(1)


def assigned_homes(
    m: pyo.ConcreteModel, schedule: Schedule, values: dict[int, float]
) -> Iterator[tuple[Any, float]]:
    """Yield (variable, value) of the homes that a schedule states; note those in RAM in `values`.

    `values` are by `id`, for `poetmodel.model.memory.assign_memory`.
    """
    homes = set(schedule.resident)
    for i, var in m.resident.items():
        values[id(var)] = float(i in homes)
        yield var, values[id(var)]
    yield from ((var, float(i not in homes)) for i, var in m.storage_home.items())
