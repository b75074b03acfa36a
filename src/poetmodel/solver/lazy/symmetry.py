"""Symmetry: count interchangeable decisions, so that a solver branches on the number of them."""

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
"""Families of rows that limit a sum over decisions."""
QUOTIENT_TOLERANCE: Final = 1e-4
"""Maximum distance of a quotient below a whole number that is due to tolerances."""
_HALF: Final = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Interchangeable columns, and the columns that count how many of them are 1."""

    members: NDArray[np.int64]
    """Columns with the same cost and the same coefficients in every limit."""
    counters: range
    """Columns ``at least 1``, ``at least 2``, ... of the counted form."""


@dataclass(frozen=True, slots=True, eq=False)
class CountedForm:
    """A form with additional columns that count interchangeable ones and have their costs."""

    form: StandardForm
    """The form. The columns of the original form come first."""
    n_columns: int
    """Number of columns of the original form."""
    tallies: tuple[Tally, ...]

    def point(self, x: NDArray[Any] | None) -> NDArray[Any] | None:
        """Extend a point of the original form to a point of this form.

        Return None for None, or if more interchangeable columns are 1 than the cutoff or a limit
        permits.
        """
        if x is None:
            return None
        extended_point = np.zeros(self.form.n_columns)
        extended_point[: self.n_columns] = x
        for tally in self.tallies:
            count = int((x[tally.members] > _HALF).sum())
            if count > len(tally.counters):
                return None
            extended_point[tally.counters.start : tally.counters.start + count] = 1.0
        return extended_point


def solve_with_counts(
    session: Session,
    form: StandardForm,
    *,
    targets: dict[str, float],
    start: NDArray[Any] | None,
    **settings: Any,
) -> RawSolution | None:
    """Solve a relaxation, with counters of interchangeable decisions if these help.

    The solution has the columns of `form`. Other arguments are those of `Session.relax`. At a small
    gap, counters would only add columns.
    """
    params, counted_form = session.params, None
    if session.bounds.gap() > params.small_gap_ratio:
        cutoff = targets.get("objective_cutoff")
        counted_form = count_equal_columns(form, cutoff, min_use_ratio=params.counted_part_ratio)
    if counted_form is None:
        return session.relax(form, targets=targets, start=start, **settings)
    raw = session.relax(
        counted_form.form, targets=targets, start=counted_form.point(start), **settings
    )
    if raw is None or raw.x is None:
        return raw
    return replace(raw, x=raw.x[: counted_form.n_columns])


def count_equal_columns(
    form: StandardForm, cutoff: float | None, *, min_use_ratio: float
) -> CountedForm | None:
    """Return a form with counters of interchangeable decisions; None if it has no use for them.

    A relaxation without a limit on time, energy or storage has none. The counters represent only
    points below `cutoff`, in units of the objective. Decisions are counted if one of them uses more
    than `min_use_ratio` of the best value, or of a limit.

    Notes
    -----
    Binary columns with the same cost and the same coefficients in the rows of limits differ only in
    the memory rows and the graph. If two limits must be met at once, the linear relaxation takes a
    fraction of an expensive decision. A solver that branches on single columns moves this fraction
    from one column to the next. For a class ``C`` of equal columns, with
    ``at_least[1] >= at_least[2] >= ...``::

        sum(x[j] for j in C)  =  sum(at_least[u] for u = 1, 2, ...)

    and the ``at_least`` replace the ``x`` in the objective and in the limits. Every 0/1 point has
    exactly one such extension, of the same value. The number of ``at_least`` is an upper bound on
    the columns in ``C`` that are 1 below the cutoff and within each limit.
    """
    limits = counted_limits(form)
    if not limits or form.objective.min(initial=0.0) < 0.0:
        return None
    classes = _symmetry_classes(form, limits, cutoff, min_use_ratio)
    if not classes:
        return None
    n = form.n_columns
    objective = np.concatenate((form.objective, np.zeros(sum(max_ones for _, max_ones in classes))))
    limit_coefficients = form.matrix[limits].toarray()
    counter_coefficients = np.zeros((len(limits), objective.size - n))
    tallies = []
    begin = n
    for members, max_ones in classes:
        tallies.append(Tally(members, range(begin, begin + max_ones)))
        objective[begin : begin + max_ones] = objective[members[0]]
        objective[members] = 0.0
        counter_coefficients[:, begin - n : begin - n + max_ones] = limit_coefficients[
            :, members[:1]
        ]
        limit_coefficients[:, members] = 0.0
        begin += max_ones
    counted_form = _add_counters(
        form, objective, (limits, np.hstack((limit_coefficients, counter_coefficients))), tallies
    )
    return CountedForm(counted_form, n, tuple(tallies))


def counted_limits(form: StandardForm) -> list[int]:
    """Return the indices of rows that limit a sum over all decisions: time, energy, storage."""
    return [
        r
        for r, row in enumerate(form.rows)
        if (row.family if isinstance(row, Label) else row) in COUNTED_LIMITS
    ]


def _symmetry_classes(
    form: StandardForm, limits: list[int], cutoff: float | None, min_use_ratio: float
) -> list[tuple[NDArray[np.int64], int]]:
    """Return classes of interchangeable binary columns, with an upper bound on how many are 1.

    Skips columns that use at most `min_use_ratio` of every limit and of the cutoff.
    """
    uses = form.matrix[limits].toarray()
    limit_values = form.row_upper[limits]
    if (uses < 0.0).any() or not np.isfinite(limit_values).all():
        return []
    binary = form.integer & (form.lower == 0.0) & (form.upper == 1.0)
    columns_by_use: dict[tuple[float, ...], list[int]] = {}
    for j in np.flatnonzero(binary & ((form.objective > 0.0) | (uses > 0.0).any(axis=0))):
        columns_by_use.setdefault((form.objective[j], *uses[:, j]), []).append(int(j))
    classes = []
    best = np.inf if cutoff is None else cutoff - form.offset
    for (cost, *use), members in columns_by_use.items():
        pairs = [(cost, best), *zip(use, limit_values, strict=True)]
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
    tallies: list[Tally],
) -> StandardForm:
    """Return the form with counters, the rows that define them, and replaced limits.

    `limits` has the indices of the limit rows and their new coefficients.
    """
    n, n_counters = form.n_columns, objective.size - form.n_columns
    entries: list[tuple[int, int, float]] = []
    row_upper, row_names = [], []
    row = form.n_rows
    for tally in tallies:
        entries += [(row, int(j), 1.0) for j in tally.members]
        entries += [(row, u, -1.0) for u in tally.counters]
        row += 1
        for u in tally.counters[:-1]:
            entries += [(row, u, 1.0), (row, u + 1, -1.0)]
            row += 1
        orders = len(tally.counters) - 1
        row_upper += [0.0, *[np.inf] * orders]
        row_names += ["count", *["order of counts"] * orders]
    old_entries = form.matrix.tocoo()
    is_retained = ~np.isin(old_entries.coords[0], limits[0])
    rows, columns = (old_entries.coords[axis][is_retained] for axis in (0, 1))
    limit_rows, j = np.nonzero(limits[1])
    values = np.concatenate(
        (
            old_entries.data[is_retained],
            limits[1][limit_rows, j],
            np.array([value for _, _, value in entries]),
        )
    )
    matrix = coo_array(
        (
            values,
            (
                np.concatenate((rows, np.array(limits[0])[limit_rows], [r for r, _, _ in entries])),
                np.concatenate((columns, j, [c for _, c, _ in entries])),
            ),
        ),
        shape=(row, n + n_counters),
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
        columns=(*form.columns, *(f"count {u}" for u in range(n_counters))),
        rows=(*form.rows, *row_names),
    )
