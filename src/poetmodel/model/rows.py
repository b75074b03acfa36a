"""Linear rows of a model, which get a Pyomo expression only when somebody looks at one.

Memory rows have millions of terms. As arrays they are built and compiled in the time in which Pyomo
would make a few rows of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from pyomo.core.base.constraint import ConstraintData, IndexedConstraint
from pyomo.core.expr.relational_expr import EqualityExpression, InequalityExpression

from poetmodel.clock import check_time_limit
from poetmodel.model.linear import Term, linear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np
    import pyomo.core as pyo
    from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class ArrayTerms(Collection[Term]):
    """Coefficients and variables as arrays; iterates over the pairs."""

    variables: list[Any]
    """Variables of the model, shared by many rows."""
    index: NDArray[np.int32]
    """For each term the place of its variable there; no place comes twice."""
    values: NDArray[Any]
    """For each term its coefficient."""

    def __iter__(self) -> Iterator[Term]:
        places = map(self.variables.__getitem__, self.index.tolist())
        return zip(self.values.tolist(), places, strict=True)

    def __len__(self) -> int:
        return len(self.values)

    def __contains__(self, term: object) -> bool:
        return any(term == own for own in self)


@dataclass(slots=True, eq=False)
class Row:
    """The row ``lower <= sum of terms <= upper``, with one side or with equal ones."""

    terms: Collection[Term]
    lower: float | None = None
    upper: float | None = None

    def expression(self) -> Any:
        """Return the row as Pyomo states it."""
        body = linear(self.terms)
        if self.lower is None:
            return InequalityExpression((body, self.upper), strict=False)
        if self.upper is None:
            return InequalityExpression((self.lower, body), strict=False)
        return EqualityExpression((body, self.upper))


def covered(variable: Any, by: Iterable[Any]) -> Row:
    """Return the row ``variable <= sum of by``."""
    return Row([(1, variable), *((-1, var) for var in by)], upper=0)


class RowConstraintData(ConstraintData):  # type: ignore[misc]
    """A constraint that holds a `Row` until somebody wants its expression."""

    __slots__ = ()

    @property
    def row(self) -> Row | None:
        """The row, None once it has an expression."""
        return self._expr if self._expr.__class__ is Row else None

    @property
    def expr(self) -> Any:
        """The expression, made now if nobody has looked at it before."""
        row = self.row
        if row is not None:
            self._expr = row.expression()  # type: ignore[misc]
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

    def __init__(self, rows: Mapping[Any, Row]) -> None:
        super().__init__(list(rows))
        self._rows: Mapping[Any, Row] = rows
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


def row_constraint(index: Iterable[Any], rule: Callable[..., Row | None]) -> pyo.Constraint:
    """Return a constraint with the rows that a rule returns for the indices, all of them tuples."""
    rows = {}
    for key in index:
        check_time_limit()
        row = rule(*key)
        if row is not None:
            rows[key if len(key) > 1 else key[0]] = row
    return RowConstraint(rows)
