"""Change each limit of an infeasible problem by itself; find the smallest amount that suffices."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from poetmodel.errors import join_names
from poetmodel.planner import verify
from poetmodel.problem import RELATIVE_TOLERANCE, USER_OBJECTIVE, Constraint, Problem, Quantity
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.problem.parse import user_sum_faults
from poetmodel.problem.totals import CONSTANT, Count, unit_of_terms
from poetmodel.result import SolveResult, Status
from poetmodel.solver.sensitivity.limits import Limit
from poetmodel.solver.sensitivity.variants import Variants
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.graph import Graph
    from poetmodel.solver.request import SearchOptions

MIN_CHANGE_S: Final = 0.05
"""Minimum time for one change [s]."""

MAX_NAMED_TENSORS: Final = 3
"""Maximum number of tensors that a sentence names; if exactly one more exists, it is named, too."""
DIGITS: Final = 10
"""Digits of an amount in sentences, except bytes. The rounding is within the tolerance of
limits."""
BOUND_ERROR_RATIO: Final = 1e-6
"""Relative error of a solver's bound on whole numbers."""
MAX_HALVINGS: Final = 12
"""Number of iterations of the bisection for the RAM that a plan with overlapping transfers
needs."""


class Change(StrEnum):
    """Changes of a problem, each of one limit or of the batch size."""

    RAM = "ram"
    """More RAM."""
    TIME = "time"
    """A later deadline."""
    ENERGY = "energy"
    """A larger energy budget."""
    STORAGE = "storage"
    """More auxiliary storage."""
    PAGING = "paging"
    """Paging allowed."""
    RECOMPUTATION = "recomputation"
    """Recomputation allowed."""
    BATCH = "batch"
    """Batches of one sample, for built-in networks."""
    CONSTRAINT = "constraint"
    """A user-defined constraint with another limit, or removed."""


Rows: TypeAlias = "tuple[Constraint, ...]"
"""A user-defined constraint, or all constraints of one rule."""
StatedLimit: TypeAlias = "Change | Rows"
"""A limit, represented by the change that removes it; or user-defined constraints."""


class _Amount(NamedTuple):
    """A limit that is an amount."""

    quantity: Quantity
    """The quantity that the limit bounds; for storage with state see `_storage_terms`."""
    unit: str
    phrase: str
    """Words after the amount in a sentence."""


AMOUNTS: Final = {
    Change.RAM: _Amount(Quantity.RAM, "bytes", "of RAM"),
    Change.TIME: _Amount(Quantity.TIME, "s", "as the deadline"),
    Change.ENERGY: _Amount(Quantity.ENERGY, "J", "as the energy budget"),
    Change.STORAGE: _Amount(Quantity.WRITES, "bytes", "of storage"),
}
"""The limit of each change that replaces an amount."""
LIMITS: Final = {
    Change.RAM: "the RAM budget",
    Change.TIME: "the deadline",
    Change.ENERGY: "the energy budget",
    Change.STORAGE: "the storage",
    Change.PAGING: "no paging",
    Change.RECOMPUTATION: "no recomputation",
}
"""Name of the limit that each change removes, in messages."""
_CHANGE_NAMES: Final = {
    Change.RAM: "more RAM",
    Change.TIME: "a later deadline",
    Change.ENERGY: "a larger energy budget",
    Change.STORAGE: "more storage",
    Change.PAGING: "paging",
    Change.RECOMPUTATION: "recomputation",
    Change.BATCH: "batch size 1",
}
_SIDE_TEXTS: Final = {"upper": "at most", "lower": "at least"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Result of one change, with all other limits unchanged.

    Amounts are in bytes, s or J; those of a constraint are in `unit`.
    """

    change: Change
    works: bool | None
    """True: a schedule was found. False: none exists, which is proven. None: not decided."""
    allowed: float | None = None
    """The present limit; None if the changed limit is no amount. For a constraint, also None if it
    is removed as a whole, or no schedule was found."""
    nearest: float | None = None
    """The limit nearest to the present one with which a schedule was found. None if none was found,
    if the changed limit is no amount, or if the constraint is removed as a whole."""
    bound: float | None = None
    """Proven: with a limit below `bound` (above `bound` for a lower limit), no schedule exists.
    None without a proof or a schedule."""
    node: str | None = None
    """For `Change.RAM` of a problem without an `infeasibility_reason`, the node at the peak of the
    schedule found; None otherwise."""
    tensors: tuple[str, ...] = ()
    """For a change of an amount, the tensors in RAM at the peak of the schedule found; () for
    constraints and without a schedule."""
    constraint: str | None = None
    """Name of the changed user-defined constraint; None for another change."""
    side: str | None = None
    """The changed limit of the constraint: ``upper`` or ``lower``. None for another change, if the
    constraint is removed as a whole, or if no schedule was found."""
    unit: str = ""
    """Unit of the constraint's sum; empty without one."""

    def __repr__(self) -> str:
        verdicts = {True: "would suffice", False: "would not suffice", None: "not decided"}
        nearest = "" if self.nearest is None else f"nearest {self.nearest:.6g}"
        return brief(self, self._name, verdicts[self.works], nearest)

    @property
    def _name(self) -> str:
        return str(self.change) if self.constraint is None else f"constraint {self.constraint!r}"

    def raise_bound_above_stated(self) -> Remedy:
        """Return the remedy with its bound raised to the present limit, in bytes to one byte above.

        A larger bound is not lowered. The present limit is proven infeasible. Remedies of
        user-defined constraints, and remedies without an amount or bound, are returned unchanged.
        """
        if self.constraint is not None or None in (self.bound, self.allowed):
            return self
        min_bound = (self.allowed or 0) + (AMOUNTS[self.change].unit == "bytes")
        return replace(self, bound=max(self.bound or 0, min_bound))

    @property
    def proven(self) -> bool:
        """Whether it is proven that no limit between the present one and `nearest` suffices.

        If `nearest` is None, whether `works` is not None.
        """
        if self.works is None:
            return False
        if self.nearest is None or self.bound is None:
            return self.nearest is None
        return self.bound <= self.nearest if self.side == "lower" else self.bound >= self.nearest

    def sentence(self) -> str:
        """Return a sentence for users: whether the change suffices for a feasible schedule.

        It has the limit `nearest`, if that is known, with `node` and `tensors` if there is a
        `node`. Unless that limit is `proven`, it also has `bound`.
        """
        change = _CHANGE_NAMES.get(self.change, f"leaving out {self._name}")
        if self.works is None:
            return f"whether {change} alone would suffice was not decided in time"
        if not self.works:
            return f"{change} alone does not help"
        if self.nearest is None:
            without_name = f"without {self._name}"
            return f"feasible {without_name if self.constraint else f'with {change}'}"
        if self.side is not None:
            amount, unit_name = f"{self._name} {_SIDE_TEXTS[self.side]} ", self.unit
            beginning, amount = "feasible with", amount + _format_exact(self.nearest, unit_name)
        else:
            amount_limit = AMOUNTS[self.change]
            amount, unit_name = (
                f"{_format_exact(self.nearest, amount_limit.unit)} {amount_limit.phrase}",
                amount_limit.unit,
            )
            beginning = "feasible from" if self.proven else "feasible with"
        if self.node is not None:
            tensors = join_names(self.tensors, max_names=MAX_NAMED_TENSORS)
            amount += f", which {self.node!r} takes with {tensors} in RAM"
        if self.proven:
            return f"{beginning} {amount}"
        bound_text = _format_exact(self.bound or 0.0, unit_name)
        comparison = "more" if self.side == "lower" else "less"
        return (
            f"{beginning} {amount}; {comparison} than {bound_text} is proven infeasible, "
            "the rest is open"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `proven` as plain values in SI units.

        `constraint`, `side` and `unit` are included only for a constraint.
        """
        values = asdict(self) | {"proven": self.proven, "tensors": list(self.tensors)}
        omitted_keys = () if self.constraint is not None else ("constraint", "side", "unit")
        return {key: value for key, value in values.items() if key not in omitted_keys}


class _Attempt(NamedTuple):
    """A change, the problem with that change, and a function that converts its result."""

    change: Change
    problem: Problem | None
    """The changed problem; None if it is known that the change does not suffice."""
    to_remedy: Callable[[SolveResult], Remedy]
    """Converts the result of the changed problem to a remedy."""
    gap: float = 1.0
    tries_paging_first: bool = False


def stated_limits(problem: Problem) -> Iterator[Change]:
    """Yield the change that removes each limit of a problem, in the order of `Change`.

    RAM is always limited. Forbidden recomputation or paging is a limit. Storage is one if tensors
    can be paged and it is smaller than all tensors together.
    """
    all_bytes = sum(problem.graph.tensor_bytes)
    for change in AMOUNTS:
        allowed = _present_limit(problem, change)
        if allowed is not None and (
            change != Change.STORAGE or (problem.can_page and allowed < all_bytes)
        ):
            yield change
    if not problem.paging and problem.table.has_storage:
        yield Change.PAGING
    if not problem.recompute:
        yield Change.RECOMPUTATION


def _present_limit(problem: Problem, change: Change) -> float | None:
    """Return the present amount of the limit that a change removes; None without an amount."""
    amount_limit = AMOUNTS.get(change)
    return None if amount_limit is None else problem.limit_on(amount_limit.quantity)


def find_remedies(
    problem: Problem,
    *,
    conflict: Sequence[StatedLimit] | None,
    search: SearchOptions,
) -> tuple[Remedy, ...]:
    """Solve an infeasible problem with each change by itself, within the time of a search.

    With a `conflict` (limits that no schedule meets together), only its members and the batch size
    are changed: a change of any other limit cannot suffice. Each change has at least
    `MIN_CHANGE_S`, also beyond that time. After Ctrl-C, some changes may be missing.
    """
    attempts = list(_make_attempts(problem, conflict))
    n_solves = sum(attempt.problem is not None for attempt in attempts)
    variants = Variants(n_solves, search, min_s=MIN_CHANGE_S)
    remedies = []
    for change, changed_problem, to_remedy, gap, tries_paging_first in attempts:
        if changed_problem is None:
            allowed = _present_limit(problem, change)
            remedies.append(Remedy(change=change, works=False, allowed=allowed))
            continue
        result = variants.solve(changed_problem, gap=gap, tries_paging_first=tries_paging_first)
        if result is not None:
            remedies.append(to_remedy(result))
    return tuple(remedies)


def _make_attempts(problem: Problem, conflict: Sequence[StatedLimit] | None) -> Iterator[_Attempt]:
    """Yield an attempt for each stated limit, the batch size, and each constraint in the conflict.

    A limit outside the conflict has no changed problem. Removed amounts and one-sided constraints
    are minimized instead; other changed problems stop at the first schedule.
    """
    for change in stated_limits(problem):
        attempt = _Attempt(
            change, without_limits(problem, change), partial(_make_remedy, problem, change)
        )
        if conflict is not None and change not in conflict:
            attempt = attempt._replace(problem=None)
        elif change in AMOUNTS:
            quantity: dict[str, Any] = {"minimize": AMOUNTS[change].quantity}
            if change == Change.STORAGE and problem.graph.state_tensors:
                terms = tuple(_storage_terms(problem.graph))
                quantity = {"minimize": USER_OBJECTIVE, "user_objective": terms}
            attempt = attempt._replace(
                problem=without_limits(problem, change, **quantity),
                gap=0.0,
                tries_paging_first=change == Change.RAM and problem.can_page,
            )
        yield attempt
    small_problem = _with_batch_size_1(problem)
    if small_problem is not None:
        yield _Attempt(Change.BATCH, small_problem, partial(_make_remedy, problem, Change.BATCH))
    for rows in [member for member in conflict or () if isinstance(member, tuple)]:
        relaxed_problem = without_limits(problem, rows, minimize=Quantity.ENERGY)
        row, gap = rows[0], 1.0
        if _is_one_sided(rows):
            sign = 1 if row.lower is None else -1
            terms = tuple((key, sign * weight) for key, weight in row.terms.items())
            relaxed_problem = replace(
                relaxed_problem, minimize=USER_OBJECTIVE, user_objective=terms
            )
            gap = 0.0
        to_remedy = partial(_make_row_remedy, problem, rows)
        yield _Attempt(Change.CONSTRAINT, relaxed_problem, to_remedy, gap)


def _storage_terms(graph: Graph) -> Iterator[tuple[str, float]]:
    """Yield the terms (key, bytes) of a user-defined objective: the storage that a schedule uses.

    It is the size of all state, minus that of resident state, plus that of page-outs. Replacements
    and tensors that start on storage take no more storage.
    """
    for i, size in enumerate(graph.tensor_bytes):
        name = graph.tensors[i].name
        if i in graph.state_tensors:
            yield f"{Count.RESIDENT}:{name}", -size
        elif i not in graph.state_of and not graph.starts_on_storage[i]:
            yield f"{Count.PAGE_OUTS}:{name}", size
    yield CONSTANT, graph.state_bytes


def without_limits(problem: Problem, *limits: StatedLimit, **changes: Any) -> Problem:
    """Return a problem without `limits`, with fields replaced by `changes`."""
    quantities = [
        amount_limit.quantity for change, amount_limit in AMOUNTS.items() if change in limits
    ]
    removed_rows = {row for limit in limits if isinstance(limit, tuple) for row in limit}
    return problem.without_limits(
        *quantities,
        paging=problem.paging or Change.PAGING in limits,
        recompute=problem.recompute or Change.RECOMPUTATION in limits,
        constraints=tuple(row for row in problem.constraints if row not in removed_rows),
        **changes,
    )


def constraint_name(rows: Rows) -> str:
    """Return the name of a user-defined constraint, or of the rule of several, as ``name[...]``."""
    first = rows[0].name
    return first if len(rows) == 1 else f"{first.rpartition('[')[0]}[...]"


def _is_one_sided(rows: Rows) -> bool:
    """Return whether `rows` is a single constraint on totals with a single limit."""
    has_one_limit = rows[0].lower is None or rows[0].upper is None
    return len(rows) == 1 and has_one_limit and not rows[0].is_per_stage


def _with_batch_size_1(problem: Problem) -> Problem | None:
    """Return the problem with batches of 1, for a built-in network with estimated costs.

    Amounts of limits are those of `problem`, even if stated as percentages. None if the batch is 1,
    or if constraints or weights do not fit the smaller graph.
    """
    from poetmodel.device import Costs
    from poetmodel.graph.zoo import MODELS

    graph, device = problem.graph, problem.costs.device
    make = MODELS.get(graph.name)
    if graph.batch_size == 1 or device is None or make is None:
        return None
    if make(batch_size=graph.batch_size).sha256 != graph.sha256:
        return None
    if Costs.estimate(graph, device).table(graph) != problem.table:
        return None
    small_graph = make(batch_size=1)
    if any(user_sum_faults(small_graph, problem.constraints, problem.user_objective)):
        return None
    return replace(problem.resolved(), graph=small_graph, costs=Costs.estimate(small_graph, device))


def _verdict(result: SolveResult) -> bool | None:
    """Return `Remedy.works` for the result of a changed problem."""
    if result.schedule is not None:
        return True
    return False if result.status == Status.INFEASIBLE else None


def _make_remedy(problem: Problem, change: Change, result: SolveResult) -> Remedy:
    """Convert the result of the problem with a changed limit or batch size to a remedy."""
    works, amount_limit, simulation = _verdict(result), AMOUNTS.get(change), result.simulation
    remedy = Remedy(change=change, works=works, allowed=_present_limit(problem, change))
    if amount_limit is None or simulation is None:
        return remedy
    limit, graph = Limit(name=change, result=result), problem.graph
    amount = simulation.aux_used_bytes if change == Change.STORAGE else limit.value
    nearest = _find_accepted_amount(problem, amount_limit, result, amount or 0.0)
    bound = limit.bound if result.problem.minimize != USER_OBJECTIVE else _integer_bound(result)
    exceeds_min_ram = change == Change.RAM and infeasibility_reason(problem) is None
    return replace(
        remedy,
        works=works if nearest is not None else None,
        nearest=nearest,
        bound=bound,
        node=graph.nodes[simulation.peak.node].name if exceeds_min_ram else None,
        tensors=tuple(graph.tensors[i].name for i in simulation.peak_tensors),
    )


def _make_row_remedy(problem: Problem, rows: Rows, result: SolveResult) -> Remedy:
    """Convert the result of the problem without user-defined constraints `rows` to a remedy.

    For a one-sided constraint on totals, `nearest` is the schedule's sum, maybe rounded. `works` is
    None if undecided, or if the verifier rejects the schedule with that limit.
    """
    row, works = rows[0], _verdict(result)
    remedy = Remedy(
        change=Change.CONSTRAINT,
        works=works,
        constraint=constraint_name(rows),
        unit=unit_of_terms(row.terms.items()),
    )
    value = result.value
    if value is None or not _is_one_sided(rows):
        return remedy
    side, sign = ("upper", 1) if row.lower is None else ("lower", -1)
    min_value = result.bound or 0.0
    if all(isinstance(weight, int) for weight in row.terms.values()) and isinstance(value, int):
        min_value = _integer_bound(result)
    elif min_value >= value - RELATIVE_TOLERANCE * abs(value):
        min_value = value
    nearest = _find_row_limit(problem, row, side, sign * value, result)
    is_proven = nearest is not None and min_value == value
    return replace(
        remedy,
        works=works if nearest is not None else None,
        side=side,
        allowed=getattr(row, side),
        nearest=nearest,
        bound=nearest if is_proven else sign * min_value,
    )


def _integer_bound(result: SolveResult) -> float:
    """Return the bound of an integer objective, rounded up after subtracting the solver's error."""
    value, min_value = result.value or 0.0, result.bound or 0.0
    return min(value, math.ceil(min_value - BOUND_ERROR_RATIO * max(1.0, abs(min_value))))


def _find_row_limit(
    problem: Problem, row: Constraint, side: str, value: float, result: SolveResult
) -> float | None:
    """Return a constraint's limit, about `value`, with which the result's schedule is valid."""
    other_rows = without_limits(problem, (row,)).constraints
    for limit in (value if isinstance(value, int) else float(f"{value:.{DIGITS}g}"), value):
        limits: dict[str, Any] = {side: limit}
        changed_problem = replace(problem, constraints=(*other_rows, replace(row, **limits)))
        if verify(changed_problem, result.require_schedule()).valid:
            return limit
    return None


def _find_accepted_amount(
    problem: Problem, amount_limit: _Amount, result: SolveResult, amount: float
) -> float | None:
    """Return the smallest tried limit from `amount` up that the result's schedule meets.

    Larger limits are only tried for RAM: overlapping transfers take longer with less RAM, so a
    schedule may miss its deadline if the budget is its peak.
    """
    schedule = result.require_schedule()

    def accepts(limit: float) -> bool:
        rounded_limit = int(limit) if amount_limit.unit == "bytes" else float(f"{limit:.{DIGITS}g}")
        return verify(problem.with_limit(amount_limit.quantity, rounded_limit), schedule).valid

    if accepts(amount):
        return amount
    if amount_limit.quantity != Quantity.RAM:
        return None
    low, high = int(amount), result.problem.ram_budget_bytes
    if high <= low or not accepts(high):
        return None
    for _ in range(MAX_HALVINGS):
        middle = (low + high) // 2
        low, high = (low, middle) if accepts(middle) else (middle, high)
    return high


def _format_exact(amount: float, unit: str) -> str:
    """Format an amount with `DIGITS` digits; bytes with all, and from 1 KiB on in two units."""
    if unit != "bytes":
        return f"{amount:.{DIGITS}g} {unit}".rstrip()
    rounded = format_bytes(amount)
    return f"{amount:.0f} bytes" + (f" ({rounded})" if not rounded.endswith(" B") else "")
