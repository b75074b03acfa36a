"""Counting equal decisions: a solver should branch on how many, not on which."""

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
"""Constraints that limit a sum over decisions."""
ROUNDING: Final = 1e-4
"""By how much a quotient may miss a whole number through tolerances."""
_HALF: Final = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Equal columns, and the columns that say how many of them are 1."""

    members: NDArray[np.int64]
    """Equal columns: same cost, same use of every limit."""
    counters: range
    """Columns ``at least 1``, ``at least 2``, ... of the counted form."""


@dataclass(frozen=True, slots=True, eq=False)
class CountedForm:
    """A form with further columns that count equal ones, in place of which they pay."""

    form: StandardForm
    """The columns of the form that it was made of come first."""
    n_columns: int
    """How many those are."""
    tallies: tuple[Tally, ...]

    def point(self, x: NDArray[Any] | None) -> NDArray[Any] | None:
        """Return a point of the form that it was made of as one of this form.

        None where there is none, or where it has more equal decisions than any that is looked for.
        """
        if x is None:
            return None
        whole = np.zeros(self.form.n_columns)
        whole[: self.n_columns] = x
        for tally in self.tallies:
            count = int((x[tally.members] > _HALF).sum())
            if count > len(tally.counters):
                return None
            whole[tally.counters.start : tally.counters.start + count] = 1.0
        return whole


def relax_counted(
    session: Session,
    form: StandardForm,
    *,
    targets: dict[str, float],
    start: NDArray[Any] | None,
    **settings: Any,
) -> RawSolution | None:
    """Solve a relaxation, with equal decisions counted where that is worth it.

    As `Session.relax` otherwise; the answer is one in the columns of `form`. Near the end of a
    proof counters are only more columns.
    """
    params, counted = session.params, None
    if session.bounds.gap() > params.small_gap_ratio:
        cutoff = targets.get("objective_cutoff")
        counted = count_equal(form, cutoff, least_part=params.counted_part_ratio)
    if counted is None:
        return session.relax(form, targets=targets, start=start, **settings)
    raw = session.relax(counted.form, targets=targets, start=counted.point(start), **settings)
    if raw is None or raw.x is None:
        return raw
    return replace(raw, x=raw.x[: counted.n_columns])


def count_equal(
    form: StandardForm, cutoff: float | None, *, least_part: float
) -> CountedForm | None:
    """Return a form in which equal decisions are counted, or None where that is of no use.

    A relaxation without a limit on time, energy or storage has nothing that counting would tell.
    Only points below `cutoff` are looked for, in units of the objective. One decision must take
    more than `least_part` of the best value, or of a limit.

    Notes
    -----
    Columns of binaries with the same cost and the same coefficients in the rows of limits are told
    apart by the memory rows and the graph only. Where two limits must be kept at once, the linear
    relaxation takes a fraction of an expensive decision, which a solver that branches on single
    columns moves from one to the next of them. For a class ``C`` of equal columns, with
    ``at_least[1] >= at_least[2] >= ...``::

        sum(x[j] for j in C)  =  sum(at_least[u] for u = 1, 2, ...)

    and the ``at_least`` stand for the ``x`` in the objective and in the limits. Every 0/1 point has
    exactly one such extension, of the same value. There are as many ``at_least`` as can be 1 below
    the cutoff and within each limit.
    """
    limits = counted_limits(form)
    if not limits or form.objective.min(initial=0.0) < 0.0:
        return None
    classes = _classes(form, limits, cutoff, least_part)
    if not classes:
        return None
    n = form.n_columns
    objective = np.concatenate((form.objective, np.zeros(sum(most for _, most in classes))))
    swapped = form.matrix[limits].toarray()
    further = np.zeros((len(limits), objective.size - n))
    tallies = []
    begin = n
    for members, most in classes:
        tallies.append(Tally(members, range(begin, begin + most)))
        objective[begin : begin + most] = objective[members[0]]
        objective[members] = 0.0
        further[:, begin - n : begin - n + most] = swapped[:, members[:1]]
        swapped[:, members] = 0.0
        begin += most
    counted = _extended(form, objective, (limits, np.hstack((swapped, further))), tallies)
    return CountedForm(counted, n, tuple(tallies))


def counted_limits(form: StandardForm) -> list[int]:
    """Return the rows that limit a sum over all decisions: time, energy, storage."""
    return [
        r
        for r, row in enumerate(form.rows)
        if (row.family if isinstance(row, Label) else row) in COUNTED_LIMITS
    ]


def _classes(
    form: StandardForm, limits: list[int], cutoff: float | None, least_part: float
) -> list[tuple[NDArray[np.int64], int]]:
    """Return the equal columns worth counting, and the most of them that can be 1."""
    uses = form.matrix[limits].toarray()
    tops = form.row_upper[limits]
    if (uses < 0.0).any() or not np.isfinite(tops).all():
        return []
    binary = form.integer & (form.lower == 0.0) & (form.upper == 1.0)
    alike: dict[tuple[float, ...], list[int]] = {}
    for j in np.flatnonzero(binary & ((form.objective > 0.0) | (uses > 0.0).any(axis=0))):
        alike.setdefault((form.objective[j], *uses[:, j]), []).append(int(j))
    classes = []
    best = np.inf if cutoff is None else cutoff - form.offset
    for (cost, *use), members in alike.items():
        pairs = [(cost, best), *zip(use, tops, strict=True)]
        share = max((part / top for part, top in pairs if part > 0.0 and top > 0.0), default=0.0)
        caps = (int(top / part + ROUNDING) for part, top in pairs if part > 0.0 and top < np.inf)
        most = min(caps, default=len(members))
        if len(members) > 1 and share > least_part and most > 0:
            classes.append((np.array(members), min(most, len(members))))
    return classes


def _extended(
    form: StandardForm,
    objective: NDArray[np.float64],
    limits: tuple[list[int], NDArray[np.float64]],
    tallies: list[Tally],
) -> StandardForm:
    n, added = form.n_columns, objective.size - form.n_columns
    entries: list[tuple[int, int, float]] = []
    most, names = [], []
    row = form.n_rows
    for tally in tallies:
        entries += [(row, int(j), 1.0) for j in tally.members]
        entries += [(row, u, -1.0) for u in tally.counters]
        row += 1
        for u in tally.counters[:-1]:
            entries += [(row, u, 1.0), (row, u + 1, -1.0)]
            row += 1
        orders = len(tally.counters) - 1
        most += [0.0, *[np.inf] * orders]
        names += ["count", *["order of counts"] * orders]
    old = form.matrix.tocoo()
    keep = ~np.isin(old.coords[0], limits[0])
    rows, columns = (old.coords[axis][keep] for axis in (0, 1))
    at, j = np.nonzero(limits[1])
    values = np.concatenate(
        (old.data[keep], limits[1][at, j], np.array([value for _, _, value in entries]))
    )
    matrix = coo_array(
        (
            values,
            (
                np.concatenate((rows, np.array(limits[0])[at], [r for r, _, _ in entries])),
                np.concatenate((columns, j, [c for _, c, _ in entries])),
            ),
        ),
        shape=(row, n + added),
    )
    return replace(
        form,
        matrix=csr_array(matrix),
        objective=objective,
        lower=np.concatenate((form.lower, np.zeros(added))),
        upper=np.concatenate((form.upper, np.ones(added))),
        integer=np.concatenate((form.integer, np.ones(added, dtype=np.bool_))),
        row_lower=np.concatenate((form.row_lower, np.zeros(len(names)))),
        row_upper=np.concatenate((form.row_upper, most)),
        columns=(*form.columns, *(f"count {u}" for u in range(added))),
        rows=(*form.rows, *names),
    )
