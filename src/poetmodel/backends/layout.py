"""From a model of arrays to a form, and where each of its columns is there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from poetmodel.backends.standard_form import StandardForm
from poetmodel.clock import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from poetmodel.model.arrays import Family, Label, Model
    from poetmodel.problem import LinearRow


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


def form_of(model: Model) -> StandardForm:
    """Return the form of a model.

    Families of columns are in the order in which costs and rows name the first one of each. Columns
    that nothing mentions are left out, and fixed ones are folded into constants. A row without
    columns that does not hold makes the model infeasible: the form is then that one contradiction,
    under the row's name.
    """
    from poetmodel.backends.sparse import csr_array

    fixed = np.full(model.n_columns, np.nan)
    fixed[list(model.fixed)] = list(model.fixed.values())
    free = np.isnan(fixed)
    rows, columns, values = model.terms()
    n_rows = len(model.keys)
    lower, upper = np.array(model.row_lower), np.array(model.row_upper)
    varies = free[columns]
    if not varies.all():
        constants = np.where(varies, 0.0, values * np.where(free, 0.0, fixed)[columns])
        taken = np.bincount(rows, weights=constants, minlength=n_rows)
        lower, upper = lower - taken, upper - taken
        rows, columns, values = rows[varies], columns[varies], values[varies]
    check_time_limit()
    filled = np.bincount(rows, minlength=n_rows) > 0
    labels = model.row_labels()
    broken = np.flatnonzero(~filled & ~((lower <= 0) & (upper >= 0)))
    if broken.size:
        form = StandardForm.from_arrays(
            np.zeros((1, 0)), [], row_lower=1.0, rows=(labels[broken[0]],)
        )
        positions = np.full(model.n_columns, -1, dtype=np.int32)
        return replace(form, layout=Layout(model, positions, fixed, {}))
    costs = np.zeros(model.n_columns)
    offset = model.offset
    for cost, column in model.costs:
        if free[column]:
            costs[column] += cost
        else:
            offset += cost * fixed[column]
    used = costs != 0
    used[columns[values != 0]] = True
    order = _order(model, np.concatenate(([c for _, c in model.costs], columns)).astype(np.int64))
    order = order[used[order]]
    positions = np.full(model.n_columns, -1, dtype=np.int32)
    positions[order] = np.arange(order.size, dtype=np.int32)
    check_time_limit()
    said = values != 0
    counts = np.bincount(rows[said], minlength=n_rows)[filled]
    ends = np.concatenate(([0], np.cumsum(counts)))
    matrix = csr_array(
        (values[said], positions[columns[said]], ends), shape=(counts.size, order.size)
    )
    names = model.column_labels()
    form = StandardForm.from_arrays(
        matrix,
        costs[order],
        lower=np.array(model.lower)[order],
        upper=np.array(model.upper)[order],
        integer=np.array(model.integer, dtype=np.bool_)[order],
        row_lower=lower[filled],
        row_upper=upper[filled],
        offset=offset,
        columns=[names[column] for column in order.tolist()],
        rows=labels if filled.all() else list(compress(labels, filled.tolist())),
    )
    return replace(form, layout=Layout(model, positions, fixed, model.limits))


def layout_of(form: StandardForm) -> Layout:
    """Return the positions of a model's columns in its form."""
    if form.layout is None:
        msg = "the form is not that of a model of arrays"
        raise ValueError(msg)
    return form.layout


def _order(model: Model, mentioned: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return all columns, those of the family that is mentioned first before those of others."""
    sizes = [len(columns) for columns in model.families.values()]
    family = np.repeat(np.arange(len(sizes)), sizes)
    named, first = np.unique(family[mentioned], return_index=True)
    rank = np.full(len(sizes), mentioned.size)
    rank[named] = first
    return np.argsort(rank[family], kind="stable")
