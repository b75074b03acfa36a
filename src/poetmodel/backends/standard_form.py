"""`StandardForm`: a linear or mixed-integer model as arrays, the input of all back ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.errors import BackendError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from poetmodel.backends.sparse import csr_array
    from poetmodel.model.arrays import Family, Label, Model
    from poetmodel.problem import LinearRow

MINIMIZE: Final = 1
"""The smaller objective is the better one."""
MAXIMIZE: Final = -1
"""The larger objective is the better one."""

_INTEGER_TOLERANCE: Final = 1e-5
"""Maximum distance of an integer column of a solution from a whole number."""
ROUNDING_TOLERANCE: Final = 1e-9
"""Rounding error up to which crossed bounds of a row become equal (relative above 1), bounds of
integer columns count as whole numbers, and rows without coefficients count as satisfied."""
_MAX_ERRORS_PER_KIND: Final = 10
"""Maximum number of errors of one kind in a `ModelError`."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Map from the columns of an array model to those of its standard form.

    Fixed columns, and columns whose cost and coefficients are 0, have no column in the form.
    """

    model: Model
    """The array model."""
    positions: NDArray[np.int32]
    """Index in the form of each column of the model; -1 for columns that the form does not have."""
    fixed_values: NDArray[np.float64]
    """Value of each fixed column of the model, NaN for columns that are not fixed."""
    limits: Mapping[Label, LinearRow]
    """Limits before scaling, over columns of the model, by the label of their row."""

    def model_values(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert a solution of the form to the value of each column of the model, else 0."""
        values = np.where(np.isnan(self.fixed_values), 0.0, self.fixed_values)
        has_column = self.positions >= 0
        values[has_column] = x[self.positions[has_column]]
        return values

    def to_form_solution(
        self, n_columns: int, values: Iterable[tuple[int, float]]
    ) -> NDArray[np.float64]:
        """Return (model column, value) pairs by column of the form; NaN for columns without one."""
        x = np.full(n_columns, np.nan)
        for column, value in values:
            if self.positions[column] >= 0:
                x[self.positions[column]] = value
        return x

    def form_columns(self, family: Family) -> Family:
        """Return the form's columns of a family, by key; omit keys whose variable has no column."""
        columns = self.positions[list(family.values())].tolist() if family else []
        return {key: j for key, j in zip(family, columns, strict=True) if j >= 0}

    def exact_limit(self, limit: LinearRow) -> tuple[list[tuple[float, int]], Fraction]:
        """Return a limit as (coefficient, column of the form) terms, and its upper bound.

        The bound excludes fixed columns, and the least value of other columns that the form lacks.
        """
        terms, upper = [], Fraction(limit.upper)
        for value, column in limit.terms:
            position, fixed_value = int(self.positions[column]), float(self.fixed_values[column])
            if not math.isnan(fixed_value):
                upper -= Fraction(value) * round(fixed_value)
            elif position >= 0:
                terms.append((value, position))
            else:
                upper -= min(Fraction(value), Fraction(0))
        return terms, upper


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StandardForm:
    """A model: minimize or maximize ``objective @ x + offset``, with row bounds on ``matrix @ x``.

    Columns have bounds and may be integer. Arrays are read-only. Equality is identity.
    """

    matrix: csr_array
    """Coefficients, shape (n_rows, n_columns), float64, indices sorted; explicit zeros only in rows
    of `with_rows`."""
    objective: NDArray[np.float64]
    """Cost of each column."""
    offset: float
    """Constant of the objective."""
    sense: int
    """`MINIMIZE` (1) or `MAXIMIZE` (-1)."""
    lower: NDArray[np.float64]
    """Lower bound of each column, ``-inf`` without one; an integer for integer columns."""
    upper: NDArray[np.float64]
    """Upper bound of each column, ``inf`` without one; an integer for integer columns."""
    integer: NDArray[np.bool_]
    """Whether each column is integer."""
    row_lower: NDArray[np.float64]
    """Lower bound of each row, ``-inf`` without one."""
    row_upper: NDArray[np.float64]
    """Upper bound of each row, ``inf`` without one."""
    columns: Sequence[Any]
    """Identity of each column: a variable of a Pyomo model, a label or an index."""
    rows: Sequence[Any]
    """Identity of each row: a constraint of a Pyomo model, a label, a name or an index."""
    unused: tuple[Any, ...] = ()
    """Unfixed variables of the Pyomo model whose costs and coefficients are all 0; they have no
    column."""
    model: Any = None
    """The Pyomo model, referenced because its variables refer to it only weakly; None for forms
    that were made from arrays."""
    layout: Layout | None = None
    """Map from the columns of an array model to those of the form; None for forms of another
    origin."""

    def __post_init__(self) -> None:
        """Check sizes and sense, make the given arrays read-only, then check all numbers.

        Crossed bounds are no error: see `describe_contradiction`.
        """
        n_rows, n_columns = self.matrix.shape
        sizes = dict.fromkeys(("objective", "lower", "upper", "integer"), n_columns)
        sizes |= dict.fromkeys(("row_lower", "row_upper"), n_rows)
        arrays = {name: getattr(self, name) for name in sizes}
        errors = [
            f"{name}: expected {sizes[name]} values, got {array.size}"
            for name, array in arrays.items()
            if array.shape != (sizes[name],)
        ]
        errors += [
            f"{name}: expected {size} of them, got {len(items)}"
            for name, size, items in (
                ("columns", n_columns, self.columns),
                ("rows", n_rows, self.rows),
            )
            if len(items) != size
        ]
        if self.sense not in (MINIMIZE, MAXIMIZE):
            errors.append(f"sense: expected 1 (minimize) or -1 (maximize), got {self.sense!r}")
        if errors:
            raise ModelError(errors)
        matrix = (self.matrix.data, self.matrix.indices, self.matrix.indptr)
        for array in (*arrays.values(), *matrix):
            array.setflags(write=False)
        errors = self._describe_invalid_numbers()
        if errors:
            raise ModelError(errors)

    @classmethod
    def from_arrays(
        cls,
        matrix: Any,
        objective: ArrayLike,
        *,
        lower: ArrayLike = 0.0,
        upper: ArrayLike = np.inf,
        row_lower: ArrayLike = -np.inf,
        row_upper: ArrayLike = np.inf,
        integer: ArrayLike = False,
        offset: float = 0.0,
        sense: int = MINIMIZE,
        columns: Sequence[Any] | None = None,
        rows: Sequence[Any] | None = None,
    ) -> StandardForm:
        """Return a form from arrays, without a Pyomo model; raise `ModelError` if they are invalid.

        Bounds and integrality are one value for all, or one per column or row. All numbers are
        copied, coefficients of one entry are summed, and zeros are removed. Bounds of integer
        columns are tightened to whole numbers. If the bounds of a row cross by a rounding error
        alone, both become the upper one; other crossed bounds are no error: see
        `describe_contradiction`. Columns and rows are labelled by their indices by default.

        Examples
        --------
        >>> form = StandardForm.from_arrays([[1.0, 1.0]], [1.0, 2.0], row_lower=1.0, upper=1.0)
        >>> form.objective_value([0.0, 1.0])
        2.0
        """
        from poetmodel.backends.sparse import csr_array

        costs = np.array(objective, dtype=np.float64).reshape(-1)
        coefficients = csr_array(matrix, dtype=np.float64, copy=True)
        coefficients.sum_duplicates()
        coefficients.eliminate_zeros()
        n_rows, n_columns = coefficients.shape
        is_integer = _repeat_to_size(integer, n_columns, np.bool_)
        column_lower, column_upper = (
            _repeat_to_size(bound, n_columns, np.float64) for bound in (lower, upper)
        )
        row_lower_bounds, row_upper_bounds = (
            _repeat_to_size(bound, n_rows, np.float64) for bound in (row_lower, row_upper)
        )
        if is_integer.shape == column_lower.shape == column_upper.shape:
            column_lower = np.where(
                is_integer, np.ceil(column_lower - ROUNDING_TOLERANCE), column_lower
            )
            column_upper = np.where(
                is_integer, np.floor(column_upper + ROUNDING_TOLERANCE), column_upper
            )
        if row_lower_bounds.shape == row_upper_bounds.shape:
            magnitude = np.maximum(
                1.0, np.abs(np.where(np.isfinite(row_upper_bounds), row_upper_bounds, 0.0))
            )
            row_lower_bounds = np.where(
                (row_lower_bounds > row_upper_bounds)
                & (row_lower_bounds <= row_upper_bounds + ROUNDING_TOLERANCE * magnitude),
                row_upper_bounds,
                row_lower_bounds,
            )
        return cls(
            matrix=coefficients,
            objective=costs,
            offset=float(offset),
            sense=sense,
            lower=column_lower,
            upper=column_upper,
            integer=is_integer,
            row_lower=row_lower_bounds,
            row_upper=row_upper_bounds,
            columns=range(n_columns) if columns is None else columns,
            rows=range(n_rows) if rows is None else rows,
        )

    @property
    def n_columns(self) -> int:
        """Number of columns."""
        return int(self.matrix.shape[1])

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return int(self.matrix.shape[0])

    @property
    def is_mip(self) -> bool:
        """Whether any column is integer."""
        return bool(self.integer.any())

    def row_name(self, index: int) -> str:
        """Return the name of a row's constraint or label, or ``row`` and its index."""
        return _item_name(self.rows[index], "row")

    def column_name(self, index: int) -> str:
        """Return the name of a column's variable or label, or ``column`` and its index."""
        return _item_name(self.columns[index], "column")

    def objective_value(self, x: ArrayLike) -> float:
        """Return the objective at `x`."""
        return float(self.objective @ np.asarray(x, dtype=np.float64)) + self.offset

    def max_violation(self, x: ArrayLike) -> float:
        """Return the largest absolute violation of a row, bound or integrality at `x`, or 0."""
        values = np.asarray(x, dtype=np.float64)
        activity = self.matrix @ values
        violations = (
            self.row_lower - activity,
            activity - self.row_upper,
            self.lower - values,
            values - self.upper,
            np.abs(values - np.rint(values))[self.integer],
        )
        return max(0.0, *(float(violation.max(initial=0.0)) for violation in violations))

    def linear_relaxation(self) -> StandardForm:
        """Return the linear relaxation: the form with all columns continuous."""
        return replace(self, integer=np.zeros(self.n_columns, dtype=np.bool_))

    def with_rows(
        self, matrix: csr_array, lower: ArrayLike, upper: ArrayLike, names: Sequence[Any]
    ) -> StandardForm:
        """Return a new form with the rows of `matrix` appended, with their bounds and names."""
        from poetmodel.backends.sparse import csr_array, vstack

        new_rows = matrix.copy()
        new_rows.sum_duplicates()
        return replace(
            self,
            matrix=csr_array(vstack([self.matrix, new_rows], format="csr")),
            row_lower=np.append(self.row_lower, lower),
            row_upper=np.append(self.row_upper, upper),
            rows=(*self.rows, *names),
        )

    def describe_contradiction(self) -> str | None:
        """Return a message about the first column or row that no value satisfies, if any.

        `Solver.solve` calls no solver for such models, because solvers treat them differently.
        """
        for lower, upper, name_of in self._iterate_bounds():
            for k in np.flatnonzero(lower > upper)[:1]:
                return f"{name_of(k)}: no value is between {float(lower[k])} and {float(upper[k])}"
        has_no_terms = np.diff(self.matrix.indptr) == 0
        is_violated = has_no_terms & ~contains_zero(self.row_lower, self.row_upper)
        for i in np.flatnonzero(is_violated)[:1]:
            return f"{self.row_name(i)}: is violated for all values of the variables"
        return None

    def is_bounded(self) -> bool:
        """Return whether the bounds of the columns alone limit how good the objective can be."""
        minimized_costs = self.objective * self.sense
        is_unbounded = ((minimized_costs > 0) & np.isneginf(self.lower)) | (
            (minimized_costs < 0) & np.isposinf(self.upper)
        )
        return not bool(is_unbounded.any())

    def _iterate_bounds(self) -> Iterator[tuple[NDArray[Any], NDArray[Any], Callable[[int], str]]]:
        """Yield (lower bounds, upper bounds, naming function) of the columns, then of the rows."""
        yield self.lower, self.upper, self.column_name
        yield self.row_lower, self.row_upper, self.row_name

    def _describe_invalid_numbers(self) -> list[str]:
        """Return messages about numbers that are not finite and unusable bounds, ten per kind."""
        errors = []
        for i in np.flatnonzero(~np.isfinite(self.matrix.data))[:_MAX_ERRORS_PER_KIND]:
            row = int(np.searchsorted(self.matrix.indptr, i, side="right")) - 1
            column = self.column_name(int(self.matrix.indices[i]))
            errors.append(f"{self.row_name(row)}: the coefficient of {column} is not finite")
        for j in np.flatnonzero(~np.isfinite(self.objective))[:_MAX_ERRORS_PER_KIND]:
            errors.append(f"objective: the coefficient of {self.column_name(j)} is not finite")
        if not np.isfinite(self.offset):
            errors.append(f"objective: the constant is {self.offset}")
        for lower, upper, name_of in self._iterate_bounds():
            is_invalid = np.isnan(lower) | np.isnan(upper) | np.isposinf(lower) | np.isneginf(upper)
            errors += [
                f"{name_of(k)}: bounds {float(lower[k])} and {float(upper[k])} are not usable"
                for k in np.flatnonzero(is_invalid)[:_MAX_ERRORS_PER_KIND]
            ]
        return errors


def contains_zero(lower: Any, upper: Any) -> Any:
    """Return whether 0 is between bounds, numbers or arrays, within `ROUNDING_TOLERANCE`."""
    return (lower <= ROUNDING_TOLERANCE) & (upper >= -ROUNDING_TOLERANCE)


def round_integers(x: ArrayLike, form: StandardForm) -> NDArray[np.float64]:
    """Return a solver's solution of a form with its integer columns rounded; read-only.

    Raises `BackendError` for a wrong size or a value that is not finite or not whole.
    """
    values = np.array(x, dtype=np.float64)
    if values.shape != (form.n_columns,):
        raise BackendError(
            f"solution: expected {form.n_columns} values, one per column, got {values.size}"
        )
    for j in np.flatnonzero(~np.isfinite(values))[:1]:
        raise BackendError(f"solution: {form.column_name(j)} has the value {float(values[j])}")
    nearest_integers = np.rint(values)
    is_fractional = form.integer & (np.abs(values - nearest_integers) > _INTEGER_TOLERANCE)
    for j in np.flatnonzero(is_fractional)[:1]:
        raise BackendError(
            f"solution: {form.column_name(j)} must be whole within {_INTEGER_TOLERANCE}, "
            f"got {float(values[j])}; ask the solver for a smaller tolerance"
        )
    rounded = np.where(form.integer, nearest_integers, values) + 0.0  # + 0.0 turns -0.0 into 0.0
    rounded.setflags(write=False)
    return rounded


def _repeat_to_size(values: ArrayLike, size: int, dtype: Any) -> NDArray[Any]:
    """Return a new array of `values`; a scalar is repeated `size` times."""
    array = np.array(values, dtype=dtype)
    return np.full(size, array) if array.ndim == 0 else array


def _item_name(item: Any, kind: str) -> str:
    if isinstance(item, str):
        return item
    return f"{kind} {item}" if isinstance(item, int) else str(item.name)
