"""A linear model as arrays: families of variables, families of rows, and the objective.

Formulations fill it. `poetmodel.backends.layout.form_of` converts it to a standard form for
solvers, and `poetmodel.model.view` to a Pyomo model that users extend.
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

    from poetmodel.model.decisions import Decisions, Liveness
    from poetmodel.model.events import Events
    from poetmodel.model.formulation import Formulation
    from poetmodel.model.grouping import Grouping
    from poetmodel.problem import LinearRow, Problem
    from poetmodel.schedule import Schedule

Family = dict[Any, int]
"""Columns of a family of variables, by index."""


class Label(NamedTuple):
    """Family and index of a column or a row."""

    family: str
    """Name of the family of variables or constraints."""
    key: Any = None
    """Index in the family; None if the family has one member."""

    @property
    def name(self) -> str:
        """Name in Pyomo's notation."""
        if self.key is None:
            return self.family
        keys = self.key if isinstance(self.key, tuple) else (self.key,)
        return f"{self.family}[{','.join(map(str, keys))}]"


class StatedRelations(Protocol):
    """The relations of the paper, in terms of the columns of a model."""

    def entry(self, name: str, t: int, k: int) -> int:
        """Return the column of an entry of a relation, or a constant for a fixed entry."""

    def nonzero_entries(self, is_one: Callable[[int], bool]) -> Iterator[tuple[str, int, int]]:
        """Yield (relation, stage, index) of each entry that is 1.

        `is_one` gives the value of a column.
        """

    def assign(self, schedule: Schedule) -> Iterator[tuple[int, float]]:
        """Yield (column, value) for all decisions of a schedule."""


class Model:
    """A linear model of a problem, filled by the components of a formulation.

    Columns and rows are numbered. Names are those of `docs/concepts/glossary.md`.
    """

    # Variables of compact and of its relaxations.
    kept: Family
    recomputed: Family
    paged_in: Family
    paged_out: Family
    resident: Family
    storage_home: Family
    recomputed_beside: Family
    paged_in_beside: Family
    live: Family
    # Variables over triangles of stages and nodes or tensors.
    R: Family
    S_RAM: Family
    S_AUX: Family
    M_in: Family
    M_out: Family
    stored: Family
    FREE: Family
    U: Family

    def __init__(self, problem: Problem, formulation: Formulation, *, exact: bool) -> None:
        """Begin a model without columns and rows; `exact` is whether its bound is valid."""
        self.problem = problem
        self.formulation = formulation
        self.name = f"{problem.graph.name} ({formulation.name})"
        self.exact = exact
        """Whether its bound is valid for the problem."""
        self.events: Events
        """Events of ``compact`` and its relaxations."""
        self.grouping: Grouping
        """Enforced memory rows, and groups of stages with common decisions."""
        self.recomputable: tuple[bool, ...] = ()
        self.decisions: Decisions
        self.relations: StatedRelations
        """The paper's relations, as columns; set when all components are built."""
        self.families: dict[str, Family] = {}
        self.lower: list[float] = []
        """Lower bound of each column."""
        self.upper: list[float] = []
        """Upper bound of each column."""
        self.integer: list[bool] = []
        """Whether each column is an integer."""
        self.fixed: dict[int, float] = {}
        """Value of each fixed column."""
        self.peak: int | None = None
        """Column of the peak RAM if that is minimized, else None."""
        self.live_for: tuple[Liveness, ...] = ()
        """Conditions of each column of `live`."""
        self.limits: dict[Label, LinearRow] = {}
        """Exact limits over columns, in their own units, by the label of the row that
        states them."""
        self.has_objective = False
        """Whether the objective is stated."""
        self.costs: list[tuple[float, int]] = []
        """(cost, column) of the objective, in units of `objective_unit`."""
        self.offset = 0.0
        """Constant of the objective."""
        self.objective_unit = 1.0
        self.keys: list[Any] = []
        """Index of each row in its family."""
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []
        self._begins: dict[str, int] = {}
        """First row of each family; a family ends where the next one begins."""
        self._columns = array("i")
        """Columns of all terms, row by row."""
        self._values = array("d")
        self._ends = [0]

    # -- columns -------------------------------------------------------------------------------

    def add_variables(
        self,
        family: str,
        index: Iterable[Any],
        *,
        upper: float | Sequence[float] = 1.0,
        integer: bool = True,
    ) -> Family:
        """Add a family of variables with lower bound 0, binary by default; return their columns."""
        begin = len(self.lower)
        columns = {key: column for column, key in enumerate(index, start=begin)}
        count = len(columns)
        self.families[family] = columns
        self.lower += [0.0] * count
        self.upper += upper if isinstance(upper, list) else [upper] * count  # type: ignore[list-item]
        self.integer += [integer] * count
        setattr(self, family, columns)
        return columns

    def add_variable(self, family: str, *, upper: float, lower: float = 0.0) -> int:
        """Add one real variable; return its column."""
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
        """Begin a family: rows added from now on belong to it.

        No effect if it is the current family.
        """
        if not self._begins or next(reversed(self._begins)) != family:
            self._begins[family] = len(self.keys)

    def add_row(
        self,
        key: Any,
        columns: Sequence[int],
        values: Sequence[float],
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
    ) -> None:
        """Add the row ``lower <= sum of value * column <= upper``; columns must be distinct."""
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
        """Add a row of arrays, for rows with thousands of terms."""
        check_time_limit()
        self._columns.frombytes(columns.astype(np.intc).tobytes())
        self._values.frombytes(values.astype(np.float64).tobytes())
        self._close_row(key, -math.inf, upper)

    def add_linear_row(self, row: LinearRow) -> None:
        """Add a `LinearRow` over columns with its own key."""
        columns, values = tuple(zip(*((c, v) for v, c in row.terms), strict=True)) or ((), ())
        self.add_row(row.key, columns, values, lower=row.lower, upper=row.upper)

    def add_implication_row(self, key: Any, column: int, by: Sequence[int]) -> None:
        """Add the row ``column <= sum of by``."""
        check_time_limit()
        self._columns.append(column)
        self._columns.extend(by)
        self._values.append(1.0)
        self._values.extend(repeat(-1.0, len(by)))
        self._close_row(key, -math.inf, 0.0)

    def add_infeasible_row(self, key: Any = None) -> None:
        """Add a row that no solution satisfies, in a form that every solver proves infeasible."""
        families = self.families
        zero = families["nothing"][None] if "nothing" in families else None
        if zero is None:
            zero = self.add_variable("nothing", upper=0.0)
        self.add_row(key, (zero,), (1.0,), lower=1.0)

    def _close_row(self, key: Any, lower: float, upper: float) -> None:
        self.keys.append(key)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        self._ends.append(len(self._columns))

    def terms(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Return row, column and value of all terms, row by row."""
        ends = np.array(self._ends, dtype=np.int64)
        counts = ends[1:] - ends[:-1]
        columns = np.array(self._columns, dtype=np.int64)
        return np.repeat(np.arange(len(counts)), counts), columns, np.array(self._values)

    @property
    def row_families(self) -> dict[str, range]:
        """Range of rows of each family of constraints."""
        ends = [*self._begins.values(), len(self.keys)]
        spans = (range(begin, end) for begin, end in pairwise(ends))
        return dict(zip(self._begins, spans, strict=True))

    def row_keys(self, family: str) -> list[Any]:
        """Return the indices of the rows of a family; [] if there is no such family."""
        rows = self.row_families.get(family, range(0))
        return self.keys[rows.start : rows.stop]

    def row_labels(self) -> list[Label]:
        """Return the label of each row."""
        labels: list[Label] = []
        for family, rows in self.row_families.items():
            labels.extend(map(Label, repeat(family), self.keys[rows.start : rows.stop]))
        return labels

    def term_slice(self, number: int) -> slice:
        """Return the slice of a row's terms among all terms."""
        return slice(self._ends[number], self._ends[number + 1])

    def n_terms(self, rows: range) -> int:
        """Return the number of terms of consecutive rows."""
        return self._ends[rows.stop] - self._ends[rows.start]

    def row(self, number: int) -> tuple[Iterator[tuple[float, int]], float, float]:
        """Return the terms (value, column) of a row, its lower bound and its upper bound."""
        span = self.term_slice(number)
        terms = zip(self._values[span], self._columns[span], strict=True)
        return terms, self.row_lower[number], self.row_upper[number]
