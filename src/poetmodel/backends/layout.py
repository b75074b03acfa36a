"""Convert an array model to a `StandardForm`, and map its columns to those of the form."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from poetmodel.backends.standard_form import Layout, StandardForm, contains_zero
from poetmodel.clock import check_time_limit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from poetmodel.model.arrays import Model


def to_standard_form(model: Model) -> StandardForm:
    """Return the standard form of an array model, with its `Layout`.

    Families of columns are ordered by their first mention in costs and rows. A violated constant
    row makes a form without columns and with this one row.
    """
    from poetmodel.backends.sparse import csr_array

    fixed_values = np.full(model.n_columns, np.nan)
    fixed_values[list(model.fixed)] = list(model.fixed.values())
    is_unfixed = np.isnan(fixed_values)
    rows, columns, values = model.terms()
    n_rows = len(model.keys)
    lower, upper = np.array(model.row_lower), np.array(model.row_upper)
    has_unfixed_column = is_unfixed[columns]
    if not has_unfixed_column.all():
        constants = np.where(
            has_unfixed_column, 0.0, values * np.where(is_unfixed, 0.0, fixed_values)[columns]
        )
        fixed_activity = np.bincount(rows, weights=constants, minlength=n_rows)
        lower, upper = lower - fixed_activity, upper - fixed_activity
        rows, columns, values = (
            rows[has_unfixed_column],
            columns[has_unfixed_column],
            values[has_unfixed_column],
        )
    check_time_limit()
    has_columns = np.bincount(rows, minlength=n_rows) > 0
    labels = model.row_labels()
    positions = np.full(model.n_columns, -1, dtype=np.int32)
    violated_rows = np.flatnonzero(~has_columns & ~contains_zero(lower, upper))
    if violated_rows.size:
        form = StandardForm.from_arrays(
            np.zeros((1, 0)), [], row_lower=1.0, rows=(labels[violated_rows[0]],)
        )
        return replace(form, layout=Layout(model, positions, fixed_values, {}))
    costs, offset = _sum_costs(model, fixed_values)
    is_used = costs != 0
    is_used[columns[values != 0]] = True
    order = _order_by_family(
        model, np.concatenate(([column for _, column in model.costs], columns)).astype(np.int64)
    )
    order = order[is_used[order]]
    positions[order] = np.arange(order.size, dtype=np.int32)
    check_time_limit()
    is_nonzero = values != 0
    terms_per_row = np.bincount(rows[is_nonzero], minlength=n_rows)[has_columns]
    row_starts = np.concatenate(([0], np.cumsum(terms_per_row)))
    matrix = csr_array(
        (values[is_nonzero], positions[columns[is_nonzero]], row_starts),
        shape=(terms_per_row.size, order.size),
    )
    column_labels = model.column_labels()
    form = StandardForm.from_arrays(
        matrix,
        costs[order],
        lower=np.array(model.lower)[order],
        upper=np.array(model.upper)[order],
        integer=np.array(model.integer, dtype=np.bool_)[order],
        row_lower=lower[has_columns],
        row_upper=upper[has_columns],
        offset=offset,
        columns=[column_labels[column] for column in order.tolist()],
        rows=labels if has_columns.all() else list(compress(labels, has_columns.tolist())),
    )
    return replace(form, layout=Layout(model, positions, fixed_values, model.limits))


def require_layout(form: StandardForm) -> Layout:
    """Return the layout of a form; raise ValueError if no array model is the form's origin."""
    if form.layout is None:
        msg = "the form was not made from an array model"
        raise ValueError(msg)
    return form.layout


def _sum_costs(
    model: Model, fixed_values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """Return the cost of each column, and the offset with the costs of columns of a fixed value."""
    costs, offset = np.zeros(model.n_columns), model.offset
    for cost, column in model.costs:
        if math.isnan(fixed_values[column]):
            costs[column] += cost
        else:
            offset += cost * fixed_values[column]
    return costs, offset


def _order_by_family(model: Model, columns_by_mention: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return all columns by the first mention of their family (none: last), then by index."""
    n_columns_of_family = [len(columns) for columns in model.families.values()]
    family_of_column = np.repeat(np.arange(len(n_columns_of_family)), n_columns_of_family)
    families_by_mention, first_mention = np.unique(
        family_of_column[columns_by_mention], return_index=True
    )
    rank = np.full(len(n_columns_of_family), columns_by_mention.size)
    rank[families_by_mention] = first_mention
    return np.argsort(rank[family_of_column], kind="stable")
