"""Symmetry: count interchangeable decisions, so that a solver branches on their number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.backends.sparse import coo_array, csr_array
from poetmodel.model.arrays import Label
from poetmodel.problem import LIMITED_SUMS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from poetmodel.backends.protocol import RawSolution
    from poetmodel.backends.standard_form import StandardForm
    from poetmodel.solver.lazy.session import Session

COUNTED_LIMITS: Final = frozenset({"storage", *LIMITED_SUMS})
"""Families of rows that limit a sum over all decisions."""
QUOTIENT_TOLERANCE: Final = 1e-4
"""Distance below a whole number up to which a quotient is rounded up, because limits have
tolerances."""
_HALF: Final = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class CountedClass:
    """Interchangeable columns, and the columns that count those with the value 1."""

    members: NDArray[np.int64]
    """Columns with the same cost and the same coefficients in every limit."""
    counters: range
    """Columns of the counted form: the u-th is 1 if at least ``u`` members are 1, u = 1, 2, ..."""


@dataclass(frozen=True, slots=True, eq=False)
class CountedForm:
    """A form with additional columns, which count interchangeable columns and have their costs."""

    form: StandardForm
    """The extended form. The columns of the original form are first."""
    n_columns: int
    """Number of columns of the original form."""
    counted_classes: tuple[CountedClass, ...]

    def extend_point(self, x: NDArray[Any] | None) -> NDArray[Any] | None:
        """Extend a point of the original form; None if it has more members at 1 than counters.

        Such a point is not below the cutoff of `count_equal_columns`, or exceeds a limit.
        """
        if x is None:
            return None
        extended_point = np.zeros(self.form.n_columns)
        extended_point[: self.n_columns] = x
        for counted_class in self.counted_classes:
            count = int((x[counted_class.members] > _HALF).sum())
            if count > len(counted_class.counters):
                return None
            extended_point[counted_class.counters.start : counted_class.counters.start + count] = (
                1.0
            )
        return extended_point


def solve_with_counts(
    session: Session,
    form: StandardForm,
    *,
    extra_limits: dict[str, float],
    start: NDArray[Any] | None,
    **settings: Any,
) -> RawSolution | None:
    """Solve a relaxation, with counters of interchangeable decisions unless the gap is small.

    The solution has the columns of `form`; points of progress reports may have more.
    """
    policy, counted_form = session.policy, None
    if session.search.gap() > policy.small_gap_ratio:
        cutoff = extra_limits.get("objective_cutoff")
        counted_form = count_equal_columns(form, cutoff, min_use_ratio=policy.counted_use_ratio)
    if counted_form is None:
        return session.solve_form(form, extra_limits=extra_limits, start=start, **settings)
    raw = session.solve_form(
        counted_form.form,
        extra_limits=extra_limits,
        start=counted_form.extend_point(start),
        **settings,
    )
    if raw is None or raw.x is None:
        return raw
    return replace(raw, x=raw.x[: counted_form.n_columns])


def count_equal_columns(
    form: StandardForm, cutoff: float | None, *, min_use_ratio: float
) -> CountedForm | None:
    """Return a form with counters of interchangeable decisions; None if there are none to count.

    A form without limits on sums over all decisions has no counters, nor has one with a negative
    cost, a negative coefficient in a limit or an infinite upper limit. The counters represent only
    points below `cutoff`, in units of the objective; None for no cutoff. Decisions are counted if
    each uses more than `min_use_ratio` of the cutoff or of a limit.

    Notes
    -----
    Binary columns with the same cost and the same coefficients in the rows of limits differ only in
    the memory rows and the graph. If two limits must be met at once, the linear relaxation takes a
    fraction of an expensive decision. A solver that branches on single columns moves this fraction
    from one column to the next. For a class ``C`` of equal columns, with
    ``at_least[1] >= at_least[2] >= ...``::

        sum(x[j] for j in C)  =  sum(at_least[u] for u = 1, 2, ...)

    and the ``at_least`` replace the ``x`` in the objective and in the limits. Every 0/1 point below
    the cutoff and within each limit has exactly one such extension, of the same value. The number
    of ``at_least`` is an upper bound on the columns in ``C`` that are 1 at such a point.
    """
    limit_rows = counted_limit_rows(form)
    if not limit_rows or form.objective.min(initial=0.0) < 0.0:
        return None
    classes = _symmetry_classes(form, limit_rows, cutoff, min_use_ratio)
    if not classes:
        return None
    n_columns = form.n_columns
    objective = np.concatenate((form.objective, np.zeros(sum(max_ones for _, max_ones in classes))))
    limit_coefficients = form.matrix[limit_rows].toarray()
    counter_coefficients = np.zeros((len(limit_rows), objective.size - n_columns))
    counted_classes = []
    first_counter = n_columns
    for members, max_ones in classes:
        counted_classes.append(
            CountedClass(members, range(first_counter, first_counter + max_ones))
        )
        objective[first_counter : first_counter + max_ones] = objective[members[0]]
        objective[members] = 0.0
        counter_coefficients[
            :, first_counter - n_columns : first_counter - n_columns + max_ones
        ] = limit_coefficients[:, members[:1]]
        limit_coefficients[:, members] = 0.0
        first_counter += max_ones
    counted_form = _add_counters(
        form,
        objective,
        (limit_rows, np.hstack((limit_coefficients, counter_coefficients))),
        counted_classes,
    )
    return CountedForm(counted_form, n_columns, tuple(counted_classes))


def counted_limit_rows(form: StandardForm) -> list[int]:
    """Return the indices of rows that limit a sum over all decisions: those of `COUNTED_LIMITS`."""
    return [
        row_index
        for row_index, row in enumerate(form.rows)
        if (row.family if isinstance(row, Label) else row) in COUNTED_LIMITS
    ]


def _symmetry_classes(
    form: StandardForm, limit_rows: list[int], cutoff: float | None, min_use_ratio: float
) -> list[tuple[NDArray[np.int64], int]]:
    """Return classes of binary columns with equal costs and uses, and how many can be 1 in each."""
    coefficients = form.matrix[limit_rows].toarray()
    limit_values = form.row_upper[limit_rows]
    if (coefficients < 0.0).any() or not np.isfinite(limit_values).all():
        return []
    is_binary = form.integer & (form.lower == 0.0) & (form.upper == 1.0)
    columns_by_use: dict[tuple[float, ...], list[int]] = {}
    for column in np.flatnonzero(
        is_binary & ((form.objective > 0.0) | (coefficients > 0.0).any(axis=0))
    ):
        columns_by_use.setdefault((form.objective[column], *coefficients[:, column]), []).append(
            int(column)
        )
    classes = []
    max_cost = np.inf if cutoff is None else cutoff - form.offset
    for (cost, *use), members in columns_by_use.items():
        pairs = [(cost, max_cost), *zip(use, limit_values, strict=True)]
        use_ratio = max(
            (
                amount / limit_value
                for amount, limit_value in pairs
                if amount > 0.0 and limit_value > 0.0
            ),
            default=0.0,
        )
        upper_bounds = (
            int(limit_value / amount + QUOTIENT_TOLERANCE)
            for amount, limit_value in pairs
            if amount > 0.0 and limit_value < np.inf
        )
        max_ones = min(upper_bounds, default=len(members))
        if len(members) > 1 and use_ratio > min_use_ratio and max_ones > 0:
            classes.append((np.array(members), min(max_ones, len(members))))
    return classes


def _add_counters(
    form: StandardForm,
    objective: NDArray[np.float64],
    limits: tuple[list[int], NDArray[np.float64]],
    counted_classes: list[CountedClass],
) -> StandardForm:
    """Return the form with binary counters as last columns, and new coefficients in limits.

    New rows equate the sums of a class's members and counters, and require that its counters do not
    ascend. `limits` has the indices of limit rows and their new coefficients.
    """
    n_columns, n_counters = form.n_columns, objective.size - form.n_columns
    entries: list[tuple[int, int, float]] = []
    """(row, column, value) of each entry in the new rows."""
    row_upper, row_names = [], []
    n_rows = form.n_rows
    for counted_class in counted_classes:
        entries += [(n_rows, int(j), 1.0) for j in counted_class.members]
        entries += [(n_rows, counter, -1.0) for counter in counted_class.counters]
        n_rows += 1
        for counter in counted_class.counters[:-1]:
            entries += [(n_rows, counter, 1.0), (n_rows, counter + 1, -1.0)]
            n_rows += 1
        n_order_rows = len(counted_class.counters) - 1
        row_upper += [0.0, *[np.inf] * n_order_rows]
        row_names += ["count", *["order of counts"] * n_order_rows]
    old_entries = form.matrix.tocoo()
    is_retained = ~np.isin(old_entries.coords[0], limits[0])
    rows, columns = (old_entries.coords[axis][is_retained] for axis in (0, 1))
    limit_rows, limit_columns = np.nonzero(limits[1])
    values = np.concatenate(
        (
            old_entries.data[is_retained],
            limits[1][limit_rows, limit_columns],
            np.array([value for _, _, value in entries]),
        )
    )
    matrix = coo_array(
        (
            values,
            (
                np.concatenate(
                    (rows, np.array(limits[0])[limit_rows], [row for row, _, _ in entries])
                ),
                np.concatenate((columns, limit_columns, [column for _, column, _ in entries])),
            ),
        ),
        shape=(n_rows, n_columns + n_counters),
    )
    return replace(
        form,
        matrix=csr_array(matrix),
        objective=objective,
        lower=np.concatenate((form.lower, np.zeros(n_counters))),
        upper=np.concatenate((form.upper, np.ones(n_counters))),
        integer=np.concatenate((form.integer, np.ones(n_counters, dtype=np.bool_))),
        row_lower=np.concatenate((form.row_lower, np.zeros(len(row_names)))),
        row_upper=np.concatenate((form.row_upper, row_upper)),
        columns=(*form.columns, *(f"count {i}" for i in range(n_counters))),
        rows=(*form.rows, *row_names),
    )
