"""Linear rows of a model, which get a Pyomo expression only when somebody looks at one.

Memory rows have millions of terms. As arrays they are built and compiled in the time in which Pyomo
would make a few rows of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from pyomo.core.base.constraint import ConstraintData, IndexedConstraint

from poetmodel.clock import check_time_limit
from poetmodel.model.linear import relation
from poetmodel.problem import LinearRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import pyomo.core as pyo


def covered(variable: Any, by: Iterable[Any]) -> LinearRow:
    """Return the row ``variable <= sum of by``."""
    return LinearRow.of([(1, variable), *((-1, var) for var in by)], upper=0)


class RowConstraintData(ConstraintData):  # type: ignore[misc]
    """A constraint that holds a `LinearRow` until somebody wants its expression."""

    __slots__ = ()

    @property
    def row(self) -> LinearRow | None:
        """The row, None once it has an expression."""
        return self._expr if self._expr.__class__ is LinearRow else None

    @property
    def expr(self) -> Any:
        """The expression, made now if nobody has looked at it before."""
        row = self.row
        if row is not None:
            self._expr = relation(row)  # type: ignore[misc]
        return self._expr

    def set_value(self, expr: Any) -> None:
        """State another row in its place."""
        self.parent_component().was_changed = True
        super().set_value(expr)

    def to_bounded_expression(self, evaluate_bounds: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Return lower bound, body and upper bound, as any constraint does."""
        self.expr  # noqa: B018  # makes the expression
        return super().to_bounded_expression(evaluate_bounds)


class RowConstraint(IndexedConstraint):  # type: ignore[misc]
    """An indexed constraint of rows."""

    _ComponentDataClass = RowConstraintData

    def __init__(self, rows: Mapping[Any, LinearRow]) -> None:
        super().__init__(list(rows))
        self._rows: Mapping[Any, LinearRow] = rows
        self.was_changed = False
        """Whether a row was stated anew or deleted since."""

    def construct(self, data: Any = None) -> None:
        """Hold the rows; as Pyomo does for constraints made of a template, without a rule."""
        super().construct(data)
        component = ref(self)
        for index, row in self._rows.items():
            constraint = RowConstraintData()
            constraint._component = component  # noqa: SLF001
            constraint._index = index  # noqa: SLF001
            constraint._expr = row  # noqa: SLF001
            self._data[index] = constraint
        self._rows = {}

    def __delitem__(self, index: Any) -> None:
        """Delete a row."""
        self.was_changed = True
        super().__delitem__(index)


def row_constraint(index: Iterable[Any], rule: Callable[..., LinearRow | None]) -> pyo.Constraint:
    """Return a constraint with the rows that a rule returns for the indices, all of them tuples."""
    rows = {}
    for key in index:
        check_time_limit()
        row = rule(*key)
        if row is not None:
            rows[key if len(key) > 1 else key[0]] = row
    return RowConstraint(rows)
