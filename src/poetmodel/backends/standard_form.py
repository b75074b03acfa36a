"""A linear model as arrays: what back ends read, whoever wrote the model."""

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

SLACK: Final = 1e-9
"""By how much bounds may cross, or an integer bound miss a whole number, through rounding alone."""
_NAMED: Final = 10
"""Faults of one kind that are named; a model with more of them is as wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the columns of a model are in a form; the others are fixed, or in no row."""

    model: Model
    positions: NDArray[np.int32]
    """For each column of the model its column in the form, -1 where it has none."""
    fixed: NDArray[np.float64]
    """For each column of the model the value that it is fixed to, NaN where it is not."""
    limits: Mapping[Label, LinearRow]
    """Exact limits of rows of the form, over columns of the model."""

    def values(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the value of each column of the model at a point of the form."""
        values = np.where(np.isnan(self.fixed), 0.0, self.fixed)
        free = self.positions >= 0
        values[free] = x[self.positions[free]]
        return values

    def point(self, n_columns: int, values: Iterable[tuple[int, float]]) -> NDArray[np.float64]:
        """Return a point of the form from (column of the model, value); NaN for other columns."""
        x = np.full(n_columns, np.nan)
        for column, value in values:
            if self.positions[column] >= 0:
                x[self.positions[column]] = value
        return x

    def of(self, family: Family) -> Family:
        """Return the columns of the form of a family of variables, of those that have one."""
        columns = self.positions[list(family.values())].tolist() if family else []
        return {key: j for key, j in zip(family, columns, strict=True) if j >= 0}

    def exact(self, limit: LinearRow) -> tuple[list[tuple[float, int]], Fraction]:
        """Return a limit as terms over columns of the form, and its right-hand side.

        One that has no column is in no row, for it is too small there: it takes off what it can.
        """
        terms, upper = [], Fraction(limit.upper)
        for value, column in limit.terms:
            position, fixed = int(self.positions[column]), float(self.fixed[column])
            if not math.isnan(fixed):
                upper -= Fraction(value) * round(fixed)
            elif position >= 0:
                terms.append((value, position))
            else:
                upper -= min(Fraction(value), Fraction(0))
        return terms, upper


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StandardForm:
    """Optimise ``objective @ x + offset`` within ``row_lower <= matrix @ x <= row_upper``.

    Arrays are read-only. A form equals itself only.
    """

    matrix: csr_array
    """Coefficients, shape (n_rows, n_columns), float64, indices sorted, no explicit zeros."""
    objective: NDArray[np.float64]
    """Cost of each column."""
    offset: float
    """Constant of the objective."""
    sense: int
    """`MINIMIZE` (1) or `MAXIMIZE` (-1)."""
    lower: NDArray[np.float64]
    """Lower bound of each column, ``-inf`` without one; whole for integers."""
    upper: NDArray[np.float64]
    """Upper bound of each column, ``inf`` without one; whole for integers."""
    integer: NDArray[np.bool_]
    """Which columns are integer."""
    row_lower: NDArray[np.float64]
    """Lower bound of each row, ``-inf`` without one."""
    row_upper: NDArray[np.float64]
    """Upper bound of each row, ``inf`` without one."""
    columns: Sequence[Any]
    """Meaning of the columns: variables of a Pyomo model, labels, or plain indices."""
    rows: Sequence[Any]
    """Meaning of the rows: labels, names, or plain indices."""
    unused: tuple[Any, ...] = ()
    """Free variables of the Pyomo model that no row and no objective mentions; not columns."""
    model: Any = None
    """The Pyomo model, kept alive since its variables hold it only weakly; None for arrays."""
    layout: Layout | None = None
    """Where the columns of a model of arrays are; None for a form of anything else."""

    def __post_init__(self) -> None:
        n_rows, n_columns = self.matrix.shape
        sizes = dict.fromkeys(("objective", "lower", "upper", "integer"), n_columns)
        sizes |= dict.fromkeys(("row_lower", "row_upper"), n_rows)
        arrays = {name: getattr(self, name) for name in sizes}
        faults = [
            f"{name}: expected {sizes[name]} values, got {array.size}"
            for name, array in arrays.items()
            if array.shape != (sizes[name],)
        ]
        faults += [
            f"{name}: expected {size} of them, got {len(items)}"
            for name, size, items in (
                ("columns", n_columns, self.columns),
                ("rows", n_rows, self.rows),
            )
            if len(items) != size
        ]
        if self.sense not in (MINIMIZE, MAXIMIZE):
            faults.append(f"sense: expected 1 (minimise) or -1 (maximise), got {self.sense!r}")
        if faults:
            raise ModelError(faults)
        matrix = (self.matrix.data, self.matrix.indices, self.matrix.indptr)
        for array in (*arrays.values(), *matrix):
            array.setflags(write=False)
        faults = self._wild_numbers()
        if faults:
            raise ModelError(faults)

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
        """Return a form of arrays; it needs no Pyomo model.

        Bounds and integrality are one value for all, or one per column or row. Bounds of integers
        move inwards to whole numbers, and row bounds that cross by rounding errors alone become
        equal. Columns and rows stand for their indices by default.

        Examples
        --------
        >>> form = StandardForm.from_arrays([[1.0, 1.0]], [1.0, 2.0], row_lower=1.0, upper=1.0)
        >>> form.value([0.0, 1.0])
        2.0
        """
        from poetmodel.backends.sparse import csr_array

        costs = np.array(objective, dtype=np.float64).reshape(-1)
        coefficients = csr_array(matrix, dtype=np.float64, copy=True)
        coefficients.sum_duplicates()
        coefficients.eliminate_zeros()
        n_rows, n_columns = coefficients.shape
        whole = _spread(integer, n_columns, np.bool_)
        least, most = (_spread(bound, n_columns, np.float64) for bound in (lower, upper))
        low, up = (_spread(bound, n_rows, np.float64) for bound in (row_lower, row_upper))
        if whole.shape == least.shape == most.shape:
            least = np.where(whole, np.ceil(least - SLACK), least)
            most = np.where(whole, np.floor(most + SLACK), most)
        if low.shape == up.shape:
            size = np.maximum(1.0, np.abs(np.where(np.isfinite(up), up, 0.0)))
            low = np.where((low > up) & (low <= up + SLACK * size), up, low)
        return cls(
            matrix=coefficients,
            objective=costs,
            offset=float(offset),
            sense=sense,
            lower=least,
            upper=most,
            integer=whole,
            row_lower=low,
            row_upper=up,
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
        """Return the name of a row: of the user's constraint where there is one."""
        return _name(self.rows[index], "row")

    def column_name(self, index: int) -> str:
        """Return the name of a column: of the user's variable where there is one."""
        return _name(self.columns[index], "column")

    def value(self, x: ArrayLike) -> float:
        """Return the objective at `x`."""
        return float(self.objective @ np.asarray(x, dtype=np.float64)) + self.offset

    def violation(self, x: ArrayLike) -> float:
        """Return by how much `x` breaks its worst row, bound or integrality, absolutely."""
        values = np.asarray(x, dtype=np.float64)
        activity = self.matrix @ values
        parts = (
            self.row_lower - activity,
            activity - self.row_upper,
            self.lower - values,
            values - self.upper,
            np.abs(values - np.rint(values))[self.integer],
        )
        return max(0.0, *(float(part.max()) for part in parts if part.size), 0.0)

    def relaxed(self) -> StandardForm:
        """Return the form without integrality."""
        return replace(self, integer=np.zeros(self.n_columns, dtype=np.bool_))

    def with_rows(
        self, matrix: csr_array, lower: ArrayLike, upper: ArrayLike, names: Sequence[Any]
    ) -> StandardForm:
        """Return the form with further rows: coefficients, bounds and what they stand for."""
        from poetmodel.backends.sparse import csr_array, vstack

        block = matrix.copy()
        block.sum_duplicates()
        return replace(
            self,
            matrix=csr_array(vstack([self.matrix, block], format="csr")),
            row_lower=np.append(self.row_lower, lower),
            row_upper=np.append(self.row_upper, upper),
            rows=(*self.rows, *names),
        )

    def contradiction(self) -> str | None:
        """Return a sentence on a column or row that no value satisfies, or None.

        Solvers differ in how they take crossed bounds and empty rows; this settles both before
        any of them is called.
        """
        for low, up, name in self._sides():
            for k in np.flatnonzero(low > up)[:1]:
                return f"{name(k)}: no value lies between {float(low[k])} and {float(up[k])}"
        empty = np.diff(self.matrix.indptr) == 0
        broken = empty & ((self.row_lower > SLACK) | (self.row_upper < -SLACK))
        for i in np.flatnonzero(broken)[:1]:
            return f"{self.row_name(i)}: is violated whatever the variables are"
        return None

    def is_bounded(self) -> bool:
        """Return whether the bounds of the columns alone keep the objective finite."""
        steps = self.objective * self.sense
        endless = ((steps > 0) & np.isneginf(self.lower)) | ((steps < 0) & np.isposinf(self.upper))
        return not bool(endless.any())

    def _sides(self) -> Iterator[tuple[NDArray[Any], NDArray[Any], Callable[[int], str]]]:
        """Iterate over lower and upper bounds, of columns and of rows, with what names them."""
        yield self.lower, self.upper, self.column_name
        yield self.row_lower, self.row_upper, self.row_name

    def _wild_numbers(self) -> list[str]:
        """Name the coefficients, costs and bounds that are not the numbers they have to be."""
        faults = []
        for i in np.flatnonzero(~np.isfinite(self.matrix.data))[:_NAMED]:
            row = int(np.searchsorted(self.matrix.indptr, i, side="right")) - 1
            column = self.column_name(int(self.matrix.indices[i]))
            faults.append(f"{self.row_name(row)}: the coefficient of {column} is not finite")
        for j in np.flatnonzero(~np.isfinite(self.objective))[:_NAMED]:
            faults.append(f"objective: the coefficient of {self.column_name(j)} is not finite")
        if not np.isfinite(self.offset):
            faults.append(f"objective: the constant is {self.offset}")
        for low, up, name in self._sides():
            wild = np.isnan(low) | np.isnan(up) | np.isposinf(low) | np.isneginf(up)
            faults += [
                f"{name(k)}: bounds {float(low[k])} and {float(up[k])} are not usable"
                for k in np.flatnonzero(wild)[:_NAMED]
            ]
        return faults


def round_binaries(
    x: ArrayLike, form: StandardForm, tolerance: float = 1e-5
) -> NDArray[np.float64]:
    """Return a solver's solution of a form with its integer columns rounded, read-only.

    Integers farther than the tolerance from a whole number are refused.
    """
    values = np.array(x, dtype=np.float64)
    if values.shape != (form.n_columns,):
        raise BackendError(
            f"solution: expected {form.n_columns} values, one per column, got {values.size}"
        )
    for j in np.flatnonzero(~np.isfinite(values))[:1]:
        raise BackendError(f"solution: {form.column_name(j)} has the value {float(values[j])}")
    whole = np.rint(values)
    for j in np.flatnonzero(form.integer & (np.abs(values - whole) > tolerance))[:1]:
        raise BackendError(
            f"solution: {form.column_name(j)} must be whole within {tolerance}, "
            f"got {float(values[j])}; ask the solver for a smaller tolerance"
        )
    rounded = np.where(form.integer, whole, values) + 0.0  # + 0.0 turns -0.0 into 0.0
    rounded.setflags(write=False)
    return rounded


def _spread(values: ArrayLike, size: int, dtype: Any) -> NDArray[Any]:
    """Return one value per item; a single value stands for all."""
    array = np.array(values, dtype=dtype)
    return np.full(size, array) if array.ndim == 0 else array


def _name(item: Any, kind: str) -> str:
    if isinstance(item, str):
        return item
    return f"{kind} {item}" if isinstance(item, int) else str(item.name)
