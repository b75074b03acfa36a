"""Results of changing one limit of an infeasible problem, and the least amount that works."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from poetmodel.errors import listed
from poetmodel.planner import verify
from poetmodel.problem import RELATIVE_TOLERANCE, USER_OBJECTIVE, Constraint, Problem, Quantity
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.problem.parse import user_sum_faults
from poetmodel.problem.totals import CONSTANT, Count, unit_of_terms
from poetmodel.result import SolveResult, Status
from poetmodel.solver.sensitivity.limits import Limit
from poetmodel.solver.sensitivity.variants import ChangedProblem, solve_variants
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.graph import Graph

LEAST_S: Final = 0.05
"""Least time for one change [s]."""

NAMED: Final = 3
"""Most tensors that a sentence names."""
DIGITS: Final = 10
"""Digits of a time or energy that works; what they leave out is within the tolerance of limits."""
ROUNDED: Final = 1e-6
"""Relative error of a solver's bound on whole numbers."""
HALVINGS: Final = 12
"""How often the range is halved that has the RAM a plan with overlapping transfers needs."""


class Change(StrEnum):
    """Changeable limits of a problem."""

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
    """Batches of one sample, for networks of the zoo."""
    CONSTRAINT = "constraint"
    """An own constraint with another limit, or left out."""


Rows: TypeAlias = "tuple[Constraint, ...]"
"""A user constraint, or those of one rule."""
Stated: TypeAlias = "Change | Rows"
"""A limit, by the change that removes it, or user constraints."""


class _Amount(NamedTuple):
    """A limit that is an amount: fields of the problem with the stated and the parsed value."""

    stated: str
    allowed: str
    quantity: Quantity
    unit: str
    role: str


AMOUNTS: Final = {
    Change.RAM: _Amount("ram", "ram_budget_bytes", Quantity.RAM, "bytes", "of RAM"),
    Change.TIME: _Amount("deadline", "deadline_s", Quantity.TIME, "s", "as the deadline"),
    Change.ENERGY: _Amount(
        "energy_budget", "energy_budget_j", Quantity.ENERGY, "J", "as the energy budget"
    ),
    Change.STORAGE: _Amount("aux_bytes", "aux_limit_bytes", Quantity.WRITES, "bytes", "of storage"),
}
LIMITS: Final = {
    Change.RAM: "the RAM budget",
    Change.TIME: "the deadline",
    Change.ENERGY: "the energy budget",
    Change.STORAGE: "the storage",
    Change.PAGING: "no paging",
    Change.RECOMPUTATION: "no recomputation",
}
"""The limits that changes remove, in words."""
_IN_WORDS: Final = {
    Change.RAM: "more RAM",
    Change.TIME: "a later deadline",
    Change.ENERGY: "a larger energy budget",
    Change.STORAGE: "more storage",
    Change.PAGING: "paging",
    Change.RECOMPUTATION: "recomputation",
    Change.BATCH: "batch size 1",
}
_SIDES: Final = {"upper": "at most", "lower": "at least"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Result of one change, with all other limits as they are; amounts in bytes, s or J."""

    change: Change
    works: bool | None
    """True: a schedule was found. False: it is proven that there is none. None: not decided."""
    allowed: float | None = None
    """The limit as it is; None for what is not an amount."""
    nearest: float | None = None
    """The limit with which a schedule was found."""
    bound: float | None = None
    """Proven: with less than this there is none."""
    node: str | None = None
    """For RAM above the minimum RAM, the step at which that schedule takes most of it."""
    tensors: tuple[str, ...] = ()
    """The tensors in RAM at that step."""
    constraint: str | None = None
    """Name of the own constraint that is changed."""
    side: str | None = None
    """Which limit of it: ``upper`` or ``lower``; None where it is left out."""
    unit: str = ""
    """Unit of its sum, if it has one."""

    def __repr__(self) -> str:
        words = {True: "would do", False: "would not do", None: "not decided"}
        nearest = "" if self.nearest is None else f"nearest {self.nearest:.6g}"
        return brief(self, self._name, words[self.works], nearest)

    @property
    def _name(self) -> str:
        return str(self.change) if self.constraint is None else f"constraint {self.constraint!r}"

    def beyond_stated(self) -> Remedy:
        """Return it with what the proof says that no schedule keeps the limit as it is."""
        if self.constraint is not None or None in (self.bound, self.allowed):
            return self
        nearer = (self.allowed or 0) + (AMOUNTS[self.change].unit == "bytes")
        return replace(self, bound=max(self.bound or 0, nearer))

    @property
    def proven(self) -> bool:
        """Whether it is proven that nothing nearer works."""
        if self.works is None:
            return False
        if self.nearest is None or self.bound is None:
            return self.nearest is None
        return self.bound <= self.nearest if self.side == "lower" else self.bound >= self.nearest

    def sentence(self) -> str:
        """Return it in words."""
        change = _IN_WORDS.get(self.change, f"leaving out {self._name}")
        if self.works is None:
            return f"whether {change} alone would do was not decided in time"
        if not self.works:
            return f"{change} alone does not help"
        if self.nearest is None:
            without = f"without {self._name}"
            return f"feasible {without if self.constraint else f'with {change}'}"
        if self.side is not None:
            amount, unit = f"{self._name} {_SIDES[self.side]} ", self.unit
            begin, amount = "feasible with", amount + _exact(self.nearest, unit)
        else:
            kind = AMOUNTS[self.change]
            amount, unit = f"{_exact(self.nearest, kind.unit)} {kind.role}", kind.unit
            begin = "feasible from" if self.proven else "feasible with"
        if self.node is not None:
            tensors = listed(self.tensors, max_names=NAMED)
            amount += f", which {self.node!r} takes with {tensors} in RAM"
        if self.proven:
            return f"{begin} {amount}"
        least = _exact(self.bound or 0.0, unit)
        beyond = "more" if self.side == "lower" else "less"
        return f"{begin} {amount}; {beyond} than {least} is proven infeasible, the rest is open"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, SI."""
        values = asdict(self) | {"proven": self.proven, "tensors": list(self.tensors)}
        others = () if self.constraint is not None else ("constraint", "side", "unit")
        return {key: value for key, value in values.items() if key not in others}


class _Attempt(NamedTuple):
    """A change, the problem with it, and a function that turns the result into a remedy."""

    change: Change
    variant: ChangedProblem | None
    """None if the change is known not to help."""
    read: Callable[[SolveResult], Remedy]


def stated_limits(problem: Problem) -> Iterator[Change]:
    """Yield what limits a problem, beside own constraints, by the change that frees it."""
    all_bytes = sum(problem.graph.tensor_bytes)
    for change, kind in AMOUNTS.items():
        allowed = getattr(problem, kind.allowed)
        if allowed is not None and (
            change != Change.STORAGE or (problem.can_page and allowed < all_bytes)
        ):
            yield change
    if not problem.paging and problem.table.has_storage:
        yield Change.PAGING
    if not problem.recompute:
        yield Change.RECOMPUTATION


def find_remedies(
    problem: Problem,
    *,
    conflict: Sequence[Stated] | None,
    time_limit: float,
    threads: int,
) -> tuple[Remedy, ...]:
    """Solve an infeasible problem with each change by itself, within `time_limit` [s].

    `conflict` are limits that no schedule keeps together, or None: a change of any other limit is
    known not to help.
    """
    attempts = list(_attempts(problem, conflict))
    results = iter(
        solve_variants(
            [attempt.variant for attempt in attempts if attempt.variant is not None],
            time_limit=time_limit,
            least_s=LEAST_S,
            threads=threads,
        )
    )
    remedies = []
    for attempt in attempts:
        if attempt.variant is None:
            kind = AMOUNTS.get(attempt.change)
            allowed = None if kind is None else getattr(problem, kind.allowed)
            remedies.append(Remedy(change=attempt.change, works=False, allowed=allowed))
        elif (result := next(results, None)) is not None:  # all, unless interrupted
            remedies.append(attempt.read(result))
    return tuple(remedies)


def _attempts(problem: Problem, conflict: Sequence[Stated] | None) -> Iterator[_Attempt]:
    """Yield the problem with each limit left out, and minimized if it is an amount."""
    for change in stated_limits(problem):
        variant = ChangedProblem(problem=without_limits(problem, change), gap=1.0)
        if change in AMOUNTS:
            minimized = replace(variant.problem, minimize=AMOUNTS[change].quantity)
            if change == Change.STORAGE and problem.graph.state_tensors:
                terms = tuple(_storage_used(problem.graph))
                minimized = replace(variant.problem, minimize=USER_OBJECTIVE, own_objective=terms)
            paging_first = change == Change.RAM and problem.can_page
            variant = ChangedProblem(problem=minimized, gap=0.0, paging_first=paging_first)
        helps = conflict is None or change in conflict
        yield _Attempt(change, variant if helps else None, partial(_remedy, problem, change))
    small = _of_one_sample(problem)
    if small is not None:
        read = partial(_remedy, problem, Change.BATCH)
        yield _Attempt(Change.BATCH, ChangedProblem(problem=small, gap=1.0), read)
    for rows in [stated for stated in conflict or () if isinstance(stated, tuple)]:
        without = without_limits(problem, rows, minimize=Quantity.ENERGY)
        variant = ChangedProblem(problem=without, gap=1.0)
        row = rows[0]
        if _is_one_sided(rows):
            sign = 1 if row.lower is None else -1
            terms = tuple((key, sign * weight) for key, weight in row.terms.items())
            least = replace(without, minimize=USER_OBJECTIVE, own_objective=terms)
            variant = ChangedProblem(problem=least, gap=0.0)
        yield _Attempt(Change.CONSTRAINT, variant, partial(_row_remedy, problem, rows))


def _storage_used(graph: Graph) -> Iterator[tuple[str, float]]:
    """Yield the terms of the storage that a schedule uses: homes, and what else is paged out [B].

    Without state that is what it writes: a tensor is paged out once.
    """
    homes = {*graph.state_tensors, *graph.replacement_of.values()}
    for i, size in enumerate(graph.tensor_bytes):
        name = graph.tensors[i].name
        if i in graph.state_tensors:
            yield f"{Count.RESIDENT}:{name}", -size
        elif i not in homes and not graph.starts_on_storage[i]:
            yield f"{Count.PAGE_OUTS}:{name}", size
    yield CONSTANT, graph.state_bytes


def without_limits(problem: Problem, *limits: Stated, **changes: Any) -> Problem:
    """Return a problem without some of its limits and user constraints, with other `changes`."""
    quantities = [kind.quantity for change, kind in AMOUNTS.items() if change in limits]
    dropped = {row for stated in limits if isinstance(stated, tuple) for row in stated}
    return problem.without(
        *quantities,
        paging=problem.paging or Change.PAGING in limits,
        recompute=problem.recompute or Change.RECOMPUTATION in limits,
        constraints=tuple(row for row in problem.constraints if row not in dropped),
        **changes,
    )


def constraint_name(rows: Rows) -> str:
    """Return the name of a user constraint, or of those of one rule: ``once[...]``."""
    first = rows[0].name
    return first if len(rows) == 1 else f"{first.rpartition('[')[0]}[...]"


def _is_one_sided(rows: Rows) -> bool:
    """Return whether there is one constraint, with one limit, on totals."""
    one_sided = rows[0].lower is None or rows[0].upper is None
    return len(rows) == 1 and one_sided and not rows[0].is_per_stage


def _of_one_sample(problem: Problem) -> Problem | None:
    """Return the problem with batches of 1, for a built-in network with estimated costs.

    Absolute limits and user constraints stay as they are. None for other graphs and costs.
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
    small = make(batch_size=1)
    if any(user_sum_faults(small, problem.constraints, problem.own_objective)):
        return None
    return replace(problem.resolved(), graph=small, costs=Costs.estimate(small, device))


def _remedy(problem: Problem, change: Change, result: SolveResult) -> Remedy:
    works = result.schedule is not None
    decided = works or result.status == Status.INFEASIBLE
    kind, simulation = AMOUNTS.get(change), result.simulation
    allowed = None if kind is None else getattr(problem, kind.allowed)
    remedy = Remedy(change=change, works=works if decided else None, allowed=allowed)
    if kind is None or simulation is None:
        return remedy
    limit, graph = Limit(name=change, result=result), problem.graph
    amount = simulation.aux_used_bytes if change == Change.STORAGE else limit.value
    nearest = _accepted_from(problem, kind, result, amount or 0.0)
    bound = limit.bound if result.problem.minimize != USER_OBJECTIVE else _whole_bound(result)
    above_minimum = change == Change.RAM and infeasibility_reason(problem) is None
    return replace(
        remedy,
        works=works if nearest is not None else None,
        nearest=nearest,
        bound=bound,
        node=graph.nodes[simulation.peak.node].name if above_minimum else None,
        tensors=tuple(graph.tensors[i].name for i in simulation.peak_tensors),
    )


def _row_remedy(problem: Problem, rows: Rows, result: SolveResult) -> Remedy:
    row = rows[0]
    works = result.schedule is not None
    decided = works or result.status == Status.INFEASIBLE
    remedy = Remedy(
        change=Change.CONSTRAINT,
        works=works if decided else None,
        constraint=constraint_name(rows),
        unit=unit_of_terms(row.terms.items()),
    )
    value = result.value
    if value is None or not _is_one_sided(rows):
        return remedy
    side, sign = ("upper", 1) if row.lower is None else ("lower", -1)
    least = result.bound or 0.0
    if all(isinstance(weight, int) for weight in row.terms.values()) and isinstance(value, int):
        least = _whole_bound(result)
    elif least >= value - RELATIVE_TOLERANCE * abs(value):
        least = value
    nearest = _accepted_limit(problem, row, side, sign * value, result)
    proven = nearest is not None and least == value
    return replace(
        remedy,
        works=works if nearest is not None else None,
        side=side,
        allowed=getattr(row, side),
        nearest=nearest,
        bound=nearest if proven else sign * least,
    )


def _whole_bound(result: SolveResult) -> float:
    """Return the bound of an own objective whose values are whole numbers, rounded up."""
    value, least = result.value or 0.0, result.bound or 0.0
    return min(value, math.ceil(least - ROUNDED * max(1.0, abs(least))))


def _accepted_limit(
    problem: Problem, row: Constraint, side: str, value: float, result: SolveResult
) -> float | None:
    """Return a limit of a constraint, equal to a value, that the verifier accepts; None without."""
    others = without_limits(problem, (row,)).constraints
    for limit in (value if isinstance(value, int) else float(f"{value:.{DIGITS}g}"), value):
        limits: dict[str, Any] = {side: limit}
        stated = replace(problem, constraints=(*others, replace(row, **limits)))
        if verify(stated, result.require_schedule()).valid:
            return limit
    return None


def _accepted_from(
    problem: Problem, kind: _Amount, result: SolveResult, amount: float
) -> float | None:
    """Return the least amount tried, from `amount`, as whose limit the verifier accepts a schedule.

    Transfers that run beside the computing take longer in less RAM: a schedule that was found with
    plenty of it may miss a deadline in no more than its own peak.
    """
    schedule = result.require_schedule()

    def accepts(limit: float) -> bool:
        stated = int(limit) if kind.unit == "bytes" else float(f"{limit:.{DIGITS}g}")
        limits: dict[str, Any] = {kind.stated: stated}
        return verify(replace(problem, **limits), schedule).valid

    if accepts(amount):
        return amount
    if kind.quantity != Quantity.RAM:
        return None
    low, high = int(amount), result.problem.ram_budget_bytes
    if high <= low or not accepts(high):
        return None
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        low, high = (low, middle) if accepts(middle) else (middle, high)
    return high


def _exact(amount: float, unit: str) -> str:
    if unit != "bytes":
        return f"{amount:.{DIGITS}g} {unit}".rstrip()
    rounded = format_bytes(amount)
    return f"{amount:.0f} bytes" + (f" ({rounded})" if not rounded.endswith(" B") else "")
