"""A linear model as arrays: families of variables, families of rows, and the objective.

Formulations fill it. `poetmodel.backends.layout.to_standard_form` converts it to a standard form
for solvers, and `poetmodel.model.view.to_pyomo` to a Pyomo model that users extend.
"""

from __future__ import annotations

import math
from array import array
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from poetmodel.clock import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from poetmodel.model.decisions import Decisions, LivenessBounds
    from poetmodel.model.events import Events
    from poetmodel.model.formulation import Formulation
    from poetmodel.model.grouping import Grouping
    from poetmodel.problem import LinearRow, Problem
    from poetmodel.schedule import Schedule

Family = dict[Any, int]
"""Columns of a family of variables, by key."""


class Label(NamedTuple):
    """Family and key of a column or a row."""

    family: str
    """Name of the family of variables or constraints."""
    key: Any = None
    """Key in the family: an index, or a tuple of indices or names; None if the family has one
    member."""

    @property
    def name(self) -> str:
        """Label as text, in Pyomo's notation: ``family[index,index]``; ``family`` without a key."""
        if self.key is None:
            return self.family
        indices = self.key if isinstance(self.key, tuple) else (self.key,)
        return f"{self.family}[{','.join(map(str, indices))}]"


class RelationColumns(Protocol):
    """The relations of the paper, in terms of the columns of a model."""

    def entry(self, name: str, t: int, k: int) -> int:
        """Return the column of entry ``name[t,k]``; `ZERO` or `ONE` for a constant entry."""

    def nonzero_entries(self, is_one: Callable[[int], bool]) -> Iterator[tuple[str, int, int]]:
        """Yield (relation, stage, index) of each entry whose column `is_one`."""

    def column_values(self, schedule: Schedule) -> Iterator[tuple[int, float]]:
        """Yield (column, value) of each column whose value follows from a schedule."""


class Model:
    """A linear model of a problem, filled by the components of a formulation.

    Columns and rows are numbered from 0. Methods that add a row raise `TimeLimitError` once the
    time limit has passed.
    """

    # Variables of compact and of its relaxations; some also of models over triangles.
    kept: Family
    recomputed: Family
    paged_in: Family
    paged_out: Family
    resident: Family
    storage_home: Family
    extra_recomputed: Family
    extra_paged_in: Family
    live: Family
    # Variables only of models over triangles of stages and nodes or tensors.
    R: Family
    S_RAM: Family
    S_AUX: Family
    M_in: Family
    M_out: Family
    stored: Family
    FREE: Family
    U: Family

    def __init__(
        self,
        problem: Problem,
        formulation: Formulation,
        *,
        exact: bool,
        has_true_costs: bool = False,
    ) -> None:
        self.problem = problem
        self.formulation = formulation
        self.name = f"{problem.graph.name} ({formulation.name})"
        self.exact = exact
        """Whether a bound of the model is valid for the problem."""
        self.has_true_costs = has_true_costs
        """Whether costs are not truncated, because the model leaves the package."""
        self.events: Events
        """Events of each tensor and node; unset in models over triangles."""
        self.grouping: Grouping
        """Enforced memory rows, and groups of stages with common decisions; unset like `events`."""
        self.recomputable: tuple[bool, ...] = ()
        """Whether each node may be recomputed; () except in relaxations."""
        self.decisions: Decisions
        """The columns that limits and the objective count."""
        self.relations: RelationColumns
        """The paper's relations in terms of columns; set after all components are built, and unset
        in relaxations."""
        self.families: dict[str, Family] = {}
        """Columns of each family of variables, by name and key."""
        self.lower: list[float] = []
        """Lower bound of each column."""
        self.upper: list[float] = []
        """Upper bound of each column."""
        self.integer: list[bool] = []
        """Whether each column is an integer variable."""
        self.fixed: dict[int, float] = {}
        """Value of each fixed column."""
        self.peak: int | None = None
        """Column of the peak RAM if the objective is the peak RAM, else None."""
        self.live_bounds: tuple[LivenessBounds, ...] = ()
        """Lower bounds on each column of `live`, in its order."""
        self.limits: dict[Label, LinearRow] = {}
        """Limits over columns before scaling, in units of the problem, by the label of their scaled
        row."""
        self.has_objective = False
        """Whether the objective was added."""
        self.costs: list[tuple[float, int]] = []
        """(cost, column) of the objective, in units of `objective_unit`."""
        self.offset = 0.0
        """Constant of the objective, in units of `objective_unit`."""
        self.objective_unit = 1.0
        """Unit of the costs, in the unit of the problem's objective."""
        self.keys: list[Any] = []
        """Key of each row in its family."""
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []
        self._first_rows: dict[str, int] = {}
        """First row of each family; a family ends where the next one begins."""
        self._columns = array("i")
        """Columns of all terms, in the order of rows."""
        self._values = array("d")
        self._term_ends = [0]
        """0, and for each row the number of terms up to its end."""

    # -- columns -------------------------------------------------------------------------------

    def add_variables(
        self,
        family: str,
        keys: Iterable[Any],
        *,
        upper: float | Sequence[float] = 1.0,
        integer: bool = True,
    ) -> Family:
        """Add variables from 0, by default binary, one for each key; return their columns by key.

        `upper` is one bound, or one per key. Sets the attribute of the family's name.
        """
        first_column = len(self.lower)
        columns = {key: column for column, key in enumerate(keys, start=first_column)}
        count = len(columns)
        self.families[family] = columns
        self.lower += [0.0] * count
        self.upper += [upper] * count if isinstance(upper, int | float) else upper
        self.integer += [integer] * count
        setattr(self, family, columns)
        return columns

    def add_variable(self, family: str, *, upper: float, lower: float = 0.0) -> int:
        """Add a real variable, the only one of its family; return its column; set no attribute."""
        column = len(self.lower)
        self.families[family] = {None: column}
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(False)
        return column

    @property
    def n_columns(self) -> int:
        """Number of columns, including fixed ones."""
        return len(self.lower)

    def column_labels(self) -> list[Label]:
        """Return the label of each column."""
        labels: list[Label] = []
        for family, columns in self.families.items():
            labels.extend(map(Label, repeat(family), columns))
        return labels

    # -- rows ----------------------------------------------------------------------------------

    def begin_rows(self, family: str) -> None:
        """Make `family` the family of all next rows; its rows must be consecutive (unchecked)."""
        if not self._first_rows or next(reversed(self._first_rows)) != family:
            self._first_rows[family] = len(self.keys)

    def add_row(
        self,
        key: Any,
        columns: Sequence[int],
        values: Sequence[float],
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
    ) -> None:
        """Add ``lower <= sum of value * column <= upper`` of distinct columns as row `key`."""
        check_time_limit()
        self._columns.extend(columns)
        self._values.extend(values)
        self._close_row(key, lower, upper)

    def add_array_row(
        self,
        key: Any,
        columns: NDArray[np.integer],
        values: NDArray[Any],
        *,
        upper: float,
    ) -> None:
        """Add ``sum of values * columns <= upper`` of distinct columns as row `key`."""
        check_time_limit()
        self._columns.frombytes(columns.astype(np.intc).tobytes())
        self._values.frombytes(values.astype(np.float64).tobytes())
        self._close_row(key, -math.inf, upper)

    def add_linear_row(self, row: LinearRow) -> None:
        """Add a `LinearRow` over columns to the current family, with its key and bounds."""
        columns, values = tuple(
            zip(*((column, value) for value, column in row.terms), strict=True)
        ) or ((), ())
        self.add_row(row.key, columns, values, lower=row.lower, upper=row.upper)

    def add_implication_row(self, key: Any, column: int, implied_columns: Sequence[int]) -> None:
        """Add ``column <= sum of implied_columns`` as row `key` of the latest family."""
        check_time_limit()
        self._columns.append(column)
        self._columns.extend(implied_columns)
        self._values.append(1.0)
        self._values.extend(repeat(-1.0, len(implied_columns)))
        self._close_row(key, -math.inf, 0.0)

    def add_infeasible_row(self, key: Any = None) -> None:
        """Add a row that every solver proves infeasible."""
        families = self.families
        zero = families["always_zero"][None] if "always_zero" in families else None
        if zero is None:
            zero = self.add_variable("always_zero", upper=0.0)
        self.add_row(key, (zero,), (1.0,), lower=1.0)

    def _close_row(self, key: Any, lower: float, upper: float) -> None:
        self.keys.append(key)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        self._term_ends.append(len(self._columns))

    def terms(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Return row, column and value of each term as three arrays, in the order of rows."""
        ends = np.array(self._term_ends, dtype=np.int64)
        counts = ends[1:] - ends[:-1]
        columns = np.array(self._columns, dtype=np.int64)
        return np.repeat(np.arange(len(counts)), counts), columns, np.array(self._values)

    @property
    def row_families(self) -> dict[str, range]:
        """Range of rows of each family of constraints."""
        family_ends = [*self._first_rows.values(), len(self.keys)]
        row_ranges = (range(first, stop) for first, stop in pairwise(family_ends))
        return dict(zip(self._first_rows, row_ranges, strict=True))

    def row_keys(self, family: str) -> list[Any]:
        """Return the keys of the rows of a family; [] if there is no such family."""
        rows = self.row_families.get(family, range(0))
        return self.keys[rows.start : rows.stop]

    def row_labels(self) -> list[Label]:
        """Return the label of each row."""
        labels: list[Label] = []
        for family, rows in self.row_families.items():
            labels.extend(map(Label, repeat(family), self.keys[rows.start : rows.stop]))
        return labels

    def term_slice(self, row: int) -> slice:
        """Return the slice of a row's terms among all terms."""
        return slice(self._term_ends[row], self._term_ends[row + 1])

    def n_terms(self, rows: range) -> int:
        """Return the number of terms of consecutive rows."""
        return self._term_ends[rows.stop] - self._term_ends[rows.start]

    def terms_and_bounds(self, row: int) -> tuple[Iterator[tuple[float, int]], float, float]:
        """Return the terms (value, column) of a row, its lower bound and its upper bound."""
        term_slice = self.term_slice(row)
        terms = zip(self._values[term_slice], self._columns[term_slice], strict=True)
        return terms, self.row_lower[row], self.row_upper[row]
