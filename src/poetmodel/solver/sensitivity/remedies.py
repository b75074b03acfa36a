"""Results of changing one limit of an infeasible problem, and the least amount that works."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.errors import listed
from poetmodel.planner import verify
from poetmodel.problem import OWN, Problem, Quantity
from poetmodel.problem.infeasibility import obstacle
from poetmodel.problem.totals import CONSTANT, Count
from poetmodel.result import SolveResult, Status
from poetmodel.solver.sensitivity.limits import Limit
from poetmodel.solver.sensitivity.variants import ChangedProblem, solve_variants
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.graph import Graph

LEAST_S: Final = 0.05
"""Least time for one change [s]."""

NAMED: Final = 3
"""Most tensors, or own constraints, that a sentence names."""
MOST_RULES: Final = 5
"""Most rules of own constraints that are left out one by one; of more, all are at once."""
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
    CONSTRAINT = "constraint"
    """Own constraints left out."""


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
_IN_WORDS: Final = {
    Change.RAM: "more RAM",
    Change.TIME: "a later deadline",
    Change.ENERGY: "a larger energy budget",
    Change.STORAGE: "more storage",
    Change.PAGING: "paging",
    Change.RECOMPUTATION: "recomputation",
}


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
    constraints: tuple[str, ...] = ()
    """Names of the own constraints that are left out."""

    def __repr__(self) -> str:
        words = {True: "would do", False: "would not do", None: "not decided"}
        nearest = "" if self.nearest is None else f"nearest {self.nearest:.6g}"
        return brief(self, self._name, words[self.works], nearest)

    @property
    def _name(self) -> str:
        if not self.constraints:
            return str(self.change)
        names = listed(map(repr, self.constraints), most=NAMED)
        return f"constraint{'s' * (len(self.constraints) > 1)} {names}"

    def beyond_stated(self) -> Remedy:
        """Return it with what the proof says that no schedule keeps the limit as it is."""
        if None in (self.bound, self.allowed):
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
        return self.bound >= self.nearest

    def sentence(self) -> str:
        """Return it in words."""
        change = _IN_WORDS.get(self.change, f"leaving out {self._name}")
        if self.works is None:
            return f"whether {change} alone would do was not decided in time"
        if not self.works:
            return f"{change} alone does not help"
        if self.nearest is None:
            return f"feasible {f'without {self._name}' if self.constraints else f'with {change}'}"
        kind = AMOUNTS[self.change]
        amount = f"{_exact(self.nearest, kind.unit)} {kind.role}"
        if self.node is not None:
            tensors = listed(self.tensors, most=NAMED)
            amount += f", which {self.node!r} takes with {tensors} in RAM"
        if self.proven:
            return f"feasible from {amount}"
        least = _exact(self.bound or 0.0, kind.unit)
        return f"feasible with {amount}; less than {least} is proven infeasible, the rest is open"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, SI."""
        values = asdict(self) | {"proven": self.proven}
        values |= {name: list(values[name]) for name in ("tensors", "constraints")}
        if self.change != Change.CONSTRAINT:
            del values["constraints"]
        return values


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


def find_remedies(problem: Problem, *, time_limit: float, threads: int) -> tuple[Remedy, ...]:
    """Find what comes of each change of an infeasible problem by itself, in `time_limit` [s]."""
    limits = [(change, _without(problem, change)) for change in stated_limits(problem)]
    groups = list(_own_constraints(problem))
    own = [
        ChangedProblem(
            problem=problem.without(
                minimize=Quantity.ENERGY,
                constraints=tuple(row for row in problem.constraints if row.name not in names),
            ),
            gap=1.0,
        )
        for names in groups
    ]
    results = solve_variants(
        [*(variant for _, variant in limits), *own],
        time_limit=time_limit,
        least_s=LEAST_S,
        threads=threads,
    )
    changes = [*((change, ()) for change, _ in limits), *((Change.CONSTRAINT, g) for g in groups)]
    return tuple(  # fewer results than changes where it was interrupted
        _remedy(problem, change, names, result)
        for (change, names), result in zip(changes, results, strict=False)
    )


def _without(problem: Problem, change: Change) -> ChangedProblem:
    """Return the problem with a limit left out, and minimized if it is an amount."""
    kind = AMOUNTS.get(change)
    free = problem.without(
        *(() if kind is None else (kind.quantity,)),
        paging=problem.paging or change == Change.PAGING,
        recompute=problem.recompute or change == Change.RECOMPUTATION,
    )
    if kind is None:
        return ChangedProblem(problem=free, gap=1.0)
    minimized = replace(free, minimize=kind.quantity)
    if change == Change.STORAGE and problem.graph.state_tensors:
        terms = tuple(_storage_used(problem.graph))
        minimized = replace(free, minimize=OWN, own_objective=terms)
    paging_first = change == Change.RAM and problem.can_page
    return ChangedProblem(problem=minimized, gap=0.0, paging_first=paging_first)


def _own_constraints(problem: Problem) -> Iterator[tuple[str, ...]]:
    """Yield the names of own constraints to leave out: those of each rule, and of all together.

    The rows ``name[...]`` of one rule go together.
    """
    rules: dict[str, tuple[str, ...]] = {}
    for row in problem.constraints:
        rule = row.name.rpartition("[")[0] if row.name.endswith("]") else row.name
        rules[rule] = (*rules.get(rule, ()), row.name)
    if len(rules) <= MOST_RULES:
        yield from rules.values()
    if len(rules) > 1:
        yield tuple(row.name for row in problem.constraints)


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


def _remedy(
    problem: Problem, change: Change, names: tuple[str, ...], result: SolveResult
) -> Remedy:
    works = result.schedule is not None
    decided = works or result.status == Status.INFEASIBLE
    kind, simulation = AMOUNTS.get(change), result.simulation
    allowed = None if kind is None else getattr(problem, kind.allowed)
    remedy = Remedy(
        change=change, works=works if decided else None, allowed=allowed, constraints=names
    )
    if kind is None or simulation is None:
        return remedy
    limit, graph = Limit(name=change, result=result), problem.graph
    amount = simulation.aux_used_bytes if change == Change.STORAGE else limit.value
    nearest = _accepted_from(problem, kind, result, amount or 0.0)
    bound = limit.bound if result.problem.minimize != OWN else _whole_bound(result)
    above_minimum = change == Change.RAM and obstacle(problem) is None
    return replace(
        remedy,
        works=works if nearest is not None else None,
        nearest=nearest,
        bound=bound,
        node=graph.nodes[simulation.peak.node].name if above_minimum else None,
        tensors=tuple(graph.tensors[i].name for i in simulation.peak_tensors),
    )


def _whole_bound(result: SolveResult) -> float:
    """Return the bound of an own objective whose values are whole numbers, rounded up."""
    value, least = result.value or 0.0, result.bound or 0.0
    return min(value, math.ceil(least - ROUNDED * max(1.0, abs(least))))


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
