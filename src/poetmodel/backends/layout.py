"""From a model of arrays to a form, and where each of its columns is there."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from poetmodel.backends.standard_form import Layout, StandardForm
from poetmodel.clock import check_time_limit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from poetmodel.model.arrays import Model


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
