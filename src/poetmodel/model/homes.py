"""Where state tensors have their homes, in RAM or on storage: the variables, and their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.model.arrays import Model
    from poetmodel.schedule import Schedule


def declare_homes(m: Model) -> None:
    """Declare where state has its home; without paging it is in RAM.

    ::

        resident[w] + storage_home[w] = 1
    """
    problem = m.problem
    state = problem.graph.state_tensors
    m.add_variables("resident", state)
    m.add_variables("storage_home", state if problem.can_page else ())
    m.begin_rows("home")
    for i, column in m.storage_home.items():
        m.add_row(i, (m.resident[i], column), (1.0, 1.0), lower=1.0, upper=1.0)
    for i, column in m.resident.items():
        if i not in m.storage_home:
            m.fixed[column] = 1.0


def assigned_homes(m: Model, schedule: Schedule) -> Iterator[tuple[int, float]]:
    """Yield (column, value) of the homes that a schedule states."""
    homes = set(schedule.resident)
    yield from ((column, float(i in homes)) for i, column in m.resident.items())
    yield from ((column, float(i not in homes)) for i, column in m.storage_home.items())
