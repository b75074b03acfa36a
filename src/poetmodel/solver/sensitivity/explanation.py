"""Why a problem has no schedule, in plain words, and the nearest problems that have one.

Each limit is changed by itself: the problem is solved for the least RAM, time, energy or storage
that would do while the other limits stay.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.errors import listed
from poetmodel.planner import verify
from poetmodel.problem import DEADLINE_ROWS, Problem, Quantity
from poetmodel.problem.infeasibility import obstacle, obstacles
from poetmodel.result import SolveResult, Status
from poetmodel.solver.facade import solve
from poetmodel.solver.sensitivity.limits import Limit
from poetmodel.solver.sensitivity.variants import Variant, solve_variants
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyomo.environ as pyo


SHARE: Final = 0.2
"""Part of the time limit that an explanation may take beside the solve."""
LEAST_S: Final = 0.05
"""Least time for one change [s]."""
NAMED: Final = 3
"""Most tensors that a sentence names."""
DIGITS: Final = 10
"""Digits of a time or energy that works; what they leave out is within the tolerance of limits."""
HALVINGS: Final = 12
"""How often the range is halved that has the RAM a plan with overlapping transfers needs."""


class Change(StrEnum):
    """What of a problem could be changed."""

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


class _Amount(NamedTuple):
    """A limit that is an amount: fields of the problem with the stated and the parsed value."""

    stated: str
    allowed: str
    quantity: Quantity
    unit: str
    role: str


_AMOUNTS: Final = {
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
    Change.BATCH: "batch size 1",
}
_RULES: Final = {
    "memory": "the RAM budget",
    "storage": "the storage",
    "energy_budget": "the energy budget",
    **dict.fromkeys(DEADLINE_ROWS, "the deadline"),
}
"""The limits that rows of a model state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What comes of one change, with all other limits as they are; amounts in bytes, s or J."""

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

    def __repr__(self) -> str:
        words = {True: "would do", False: "would not do", None: "not decided"}
        nearest = "" if self.nearest is None else f"nearest {self.nearest:.6g}"
        return brief(self, str(self.change), words[self.works], nearest)

    @property
    def proven(self) -> bool:
        """Whether it is proven that nothing nearer works."""
        if self.works is None:
            return False
        return self.nearest is None or (self.bound is not None and self.bound >= self.nearest)

    def sentence(self) -> str:
        """Return it in words."""
        change = _IN_WORDS[self.change]
        if self.works is None:
            return f"whether {change} alone would do was not decided in time"
        if not self.works:
            return f"{change} alone does not help"
        if self.nearest is None:
            return f"feasible with {change}"
        kind = _AMOUNTS[self.change]
        amount = f"{_exact(self.nearest, kind.unit)} {kind.role}"
        if self.node is not None:
            tensors = listed(self.tensors, most=NAMED)
            amount += f", which {self.node!r} takes with {tensors} in RAM"
        if self.proven:
            return f"feasible from {amount}"
        least = _exact(self.bound or 0.0, kind.unit)
        return f"feasible with {amount}; all that is proven is that less than {least} does not do"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, SI."""
        return asdict(self) | {"proven": self.proven, "tensors": list(self.tensors)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a problem has no schedule, and which changes would help."""

    reason: str
    """The reason that the solve gave."""
    obstacles: tuple[str, ...]
    """Limits that no schedule keeps whatever the others are, in words."""
    remedies: tuple[Remedy, ...]
    """What comes of each change by itself."""
    constraints: tuple[str, ...] = ()
    """Names of constraints added to a model that contradict each other or the limits."""
    limits: tuple[str, ...] = ()
    """What else of the model takes part in that, in words."""
    notes: tuple[str, ...] = ()
    """Further remarks."""

    def __repr__(self) -> str:
        works = [str(remedy.change) for remedy in self.remedies if remedy.works]
        return brief(self, f"would do: {' or '.join(works)}" if works else "", self.reason)

    @property
    def in_the_way(self) -> tuple[Remedy, ...]:
        """The changes each of which is enough."""
        return tuple(remedy for remedy in self.remedies if remedy.works)

    @property
    def whole_reason(self) -> str:
        """The reason together with all other limits that no schedule keeps, each said once."""
        return "; ".join(dict.fromkeys(part for part in (self.reason, *self.obstacles) if part))

    def sentences(self) -> Iterator[str]:
        """Yield it in words, beyond the reason, one line each."""
        yield from (fault for fault in self.obstacles if fault != self.reason)
        yield from self.hints()

    def hints(self) -> Iterator[str]:
        """Yield in words what would do, and what was found not to."""
        if self.constraints:
            rows = listed(self.constraints)
            beside = f" together with {' and '.join(self.limits)}" if self.limits else ""
            yield f"these added constraints cannot hold{beside}: {rows}"
        yield from (remedy.sentence() for remedy in self.in_the_way)
        others = [remedy for remedy in self.remedies if not remedy.works]
        if not self.in_the_way and len(others) > 1 and all(r.works is False for r in others):
            yield "no single limit is enough to change: at least two must give way"
        else:
            yield from (r.sentence() for r in others if r.works is None or not self.in_the_way)
        yield from self.notes

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, SI."""
        return {
            "reason": self.reason,
            "sentences": list(self.sentences()),
            "obstacles": list(self.obstacles),
            "changes": [remedy.to_dict() for remedy in self.remedies],
            "constraints": list(self.constraints),
            "limits": list(self.limits),
        }


def explain_infeasible(
    result: SolveResult,
    *,
    model: pyo.ConcreteModel | None = None,
    time_limit: float = 10.0,
    threads: int = 1,
) -> Explanation:
    """Find out why a problem that was proven infeasible has no schedule.

    Parameters
    ----------
    result : SolveResult
        With the proof that there is no schedule.
    model : ConcreteModel, optional
        The model that was solved, if one was: if the problem alone has a schedule, the answer is
        which of the constraints added to it are in conflict.
    time_limit : float
        Wall time for all of it [s].
    threads : int
        As for `solve`.

    Returns
    -------
    Explanation
        Changes of one limit each, with the least amount that works; every "does not help" is
        proven, every amount that works has a schedule that the verifier accepts.
    """
    ends_s = time.monotonic() + time_limit
    problem = result.problem
    if model is not None:
        conflict = _conflict_of_added_rows(result, model, ends_s=ends_s, threads=threads)
        if conflict is not None:
            return conflict
    changes = dict(_changes(problem))
    left_s = ends_s - time.monotonic()
    variants = list(changes.values())
    results = solve_variants(variants, time_limit=left_s, least_s=LEAST_S, threads=threads)
    remedies = [
        _remedy(problem, change, found) for change, found in zip(changes, results, strict=False)
    ]
    return Explanation(
        reason=result.reason,
        obstacles=tuple(obstacles(problem)),
        remedies=tuple(remedies),
        notes=tuple(_notes(problem, remedies)),
    )


def _changes(problem: Problem) -> Iterator[tuple[Change, Variant]]:
    """Yield the problem with each limit left out, and minimized if it is an amount."""
    for change, kind in _AMOUNTS.items():
        allowed = getattr(problem, kind.allowed)
        all_bytes = sum(problem.graph.tensor_bytes)
        if allowed is None or (
            change == Change.STORAGE and not (problem.can_page and allowed < all_bytes)
        ):
            continue
        changed = problem.without(kind.quantity, minimize=kind.quantity)
        paging_first = change == Change.RAM and problem.can_page
        yield change, Variant(problem=changed, gap=0.0, paging_first=paging_first)
    if not problem.paging and problem.table.has_storage:
        yield Change.PAGING, Variant(problem=replace(problem, paging=True), gap=1.0)
    if not problem.recompute:
        yield Change.RECOMPUTATION, Variant(problem=replace(problem, recompute=True), gap=1.0)
    small = _of_one_sample(problem)
    if small is not None:
        yield Change.BATCH, Variant(problem=small, gap=1.0)


def _of_one_sample(problem: Problem) -> Problem | None:
    """Return the problem with batches of 1, for a network of the zoo with estimated costs.

    Absolute limits stay as they are.
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
    return replace(problem.resolved(), graph=small, costs=Costs.estimate(small, device))


def _remedy(problem: Problem, change: Change, found: SolveResult) -> Remedy:
    works = found.schedule is not None
    decided = works or found.status == Status.INFEASIBLE
    kind, simulation = _AMOUNTS.get(change), found.simulation
    allowed = None if kind is None else getattr(problem, kind.allowed)
    remedy = Remedy(change=change, works=works if decided else None, allowed=allowed)
    if kind is None or simulation is None:
        return remedy
    limit, graph = Limit(name=change, result=found), problem.graph
    amount = simulation.aux_used_bytes if change == Change.STORAGE else limit.value
    nearest = _accepted_from(problem, kind, found, amount or 0.0)
    above_minimum = change == Change.RAM and obstacle(problem) is None
    return replace(
        remedy,
        works=works if nearest is not None else None,
        nearest=nearest,
        bound=limit.bound,
        node=graph.nodes[simulation.peak.node].name if above_minimum else None,
        tensors=tuple(graph.tensors[i].name for i in simulation.peak_tensors),
    )


def _accepted_from(
    problem: Problem, kind: _Amount, found: SolveResult, amount: float
) -> float | None:
    """Return the least amount tried, from `amount`, as whose limit the verifier accepts a schedule.

    Transfers that run beside the computing take longer in less RAM: a schedule that was found with
    plenty of it may miss a deadline in no more than its own peak.
    """
    schedule = found.require_schedule()

    def accepts(limit: float) -> bool:
        stated = int(limit) if kind.unit == "bytes" else float(f"{limit:.{DIGITS}g}")
        limits: dict[str, Any] = {kind.stated: stated}
        return verify(replace(problem, **limits), schedule).valid

    if accepts(amount):
        return amount
    if kind.quantity != Quantity.RAM:
        return None
    low, high = int(amount), found.problem.ram_budget_bytes
    if high <= low or not accepts(high):
        return None
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        low, high = (low, middle) if accepts(middle) else (middle, high)
    return high


def _notes(problem: Problem, remedies: Sequence[Remedy]) -> Iterator[str]:
    device = problem.costs.device
    for remedy in remedies:
        enough = remedy.nearest if remedy.change == Change.RAM else None
        if device is not None and enough is not None and enough > device.ram_bytes:
            ram = format_bytes(device.ram_bytes)
            yield f"that is more than the {ram} of RAM that device {device.key or device.name} has"
    resident = problem.resident_bytes
    if resident:
        yield (
            f"{resident:,} bytes ({format_bytes(resident)}) are counted for parameters, gradients "
            "and optimizer state"
        )
    size = problem.graph.batch_size
    if size > 1 and obstacle(problem) is not None:
        yield f"a step trains on a batch of {size}; a graph made for a smaller one takes less RAM"


def _conflict_of_added_rows(
    result: SolveResult, model: pyo.ConcreteModel, *, ends_s: float, threads: int
) -> Explanation | None:
    """Explain a model whose problem has a schedule without what was added; None for others."""
    from poetmodel.backends.compiler import compile_model
    from poetmodel.backends.conflict import find_conflict

    left_s = ends_s - time.monotonic()
    without = solve(result.problem, time_limit=max(LEAST_S, left_s / 2), gap=1.0, threads=threads)
    if without.schedule is None:
        return None
    form = compile_model(model)
    conflict = find_conflict(form, time_s=max(LEAST_S, ends_s - time.monotonic()))
    added, others = [], []
    for row in (form.rows[i] for i in conflict):
        home = row if isinstance(row, str) else row.parent_component().name
        component = home.split("[")[0]
        if component in model.stated_rows:
            others.append(_RULES.get(component, "the rules of execution"))
        else:
            added.append(row if isinstance(row, str) else row.name)
    notes = ["without what was added to the model there is a schedule"]
    if not added:
        notes.append(
            "which of the added constraints are to blame was not found in time"
            if not conflict
            else "no added constraint takes part: look at variables that are fixed or bounded"
        )
    return Explanation(
        reason=result.reason,
        obstacles=(),
        remedies=(),
        constraints=tuple(dict.fromkeys(added)),
        limits=tuple(dict.fromkeys(others)),
        notes=tuple(notes),
    )


def _exact(amount: float, unit: str) -> str:
    if unit != "bytes":
        return f"{amount:.{DIGITS}g} {unit}"
    rounded = format_bytes(amount)
    return f"{amount:.0f} bytes" + (f" ({rounded})" if not rounded.endswith(" B") else "")
