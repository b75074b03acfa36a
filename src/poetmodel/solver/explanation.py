"""Why a problem has no schedule, in plain words, and the nearest problems that have one.

Each limit is changed by itself: the problem is solved for the least RAM, time, energy or storage
that would do while all other limits stay. Nothing here changes the answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import listed
from poetmodel.model.quantities import DEADLINE_ROWS
from poetmodel.problem import Quantity
from poetmodel.problem.infeasibility import obstacle, obstacles
from poetmodel.result import Status, Termination
from poetmodel.solver.facade import solve
from poetmodel.solver.limits import freed, paged_at_floor
from poetmodel.solver.outcome import verify_schedule
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyomo.environ as pyo

    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult

SHARE: Final = 0.2
"""Part of the time limit that an explanation may take beside the solve."""
LEAST_S: Final = 0.05
"""Least time for one question [s]."""
NAMED: Final = 3
"""Most tensors that a sentence names."""
DIGITS: Final = 10
"""Digits of a time or energy that works; what they leave out is within the tolerance of limits."""
TRIALS: Final = 12
"""Halvings of the range in which the RAM is looked for that a plan needs."""


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
    """Batches of one sample; only networks of the zoo can be made again so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What comes of one change, all other limits as they are."""

    change: Change
    """What is changed."""
    works: bool | None
    """True: a schedule was found. False: it is proved that there is none. None: not decided."""
    allowed: float | None = None
    """The limit as it is, in its own unit; None for what is allowed or not."""
    nearest: float | None = None
    """The limit with which a schedule was found."""
    bound: float | None = None
    """Proven: with less than this there is none."""
    node: str | None = None
    """For RAM above the floor, the step at which that schedule takes most of it."""
    tensors: tuple[str, ...] = ()
    """What is in RAM at that step."""

    def __repr__(self) -> str:
        words = {True: "would do", False: "would not do", None: "not decided"}
        nearest = "" if self.nearest is None else f"nearest {self.nearest:.6g}"
        return brief(self, str(self.change), words[self.works], nearest)

    @property
    def proven(self) -> bool:
        """Whether it is proved that nothing nearer works."""
        if self.works is None:
            return False
        return self.nearest is None or (self.bound is not None and self.bound >= self.nearest)

    def sentence(self) -> str:
        """Return it in words."""
        thing = _THINGS[self.change]
        if self.works is None:
            return f"whether {thing} alone would do was not decided in time"
        if not self.works:
            return f"{thing} alone does not help"
        if self.nearest is None:
            return f"feasible with {thing}"
        form = _FORMS[self.change]
        amount = f"{form(self.nearest)} {_OF[self.change]}{self._place()}"
        if self.proven:
            return f"feasible from {amount}"
        least = form(self.bound or 0.0)
        return f"feasible with {amount}; all that is proven is that less than {least} does not do"

    def _place(self) -> str:
        if self.node is None:
            return ""
        return f", which {self.node!r} takes with {listed(self.tensors, most=NAMED)} in RAM"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, SI."""
        return {
            "change": str(self.change),
            "works": self.works,
            "allowed": self.allowed,
            "nearest": self.nearest,
            "bound": self.bound,
            "proven": self.proven,
            "node": self.node,
            "tensors": list(self.tensors),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What stands in the way of a problem, and what would do."""

    reason: str
    """The reason that the solve gave."""
    obstacles: tuple[str, ...]
    """Limits that no schedule keeps whatever the others are, in words."""
    remedies: tuple[Remedy, ...]
    """What comes of each change by itself."""
    constraints: tuple[str, ...] = ()
    """Constraints added to a model that contradict each other or the limits, by name."""
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
    """Say what stands in the way of a problem that was proved infeasible.

    Parameters
    ----------
    result : SolveResult
        With the proof that there is no schedule.
    model : ConcreteModel, optional
        The model that was solved, where one was: constraints that were added to it are looked at
        if the problem without them has a schedule.
    time_limit : float
        Wall time for all of it [s].
    threads : int
        As for `solve`.

    Returns
    -------
    Explanation
        Changes of one limit each, with the least amount that works; every "does not help" is
        proved, every amount that works has a schedule that the verifier accepts.
    """
    ends_s = time.monotonic() + time_limit
    problem = result.problem
    if model is not None:
        own = _explain_own_rows(result, model, ends_s=ends_s, threads=threads)
        if own is not None:
            return own
    changes = list(_changes(problem))
    remedies = []
    for place, (change, changed) in enumerate(changes):
        left_s = max(0.0, ends_s - time.monotonic()) / (len(changes) - place)
        found = _solve(changed, change, time_limit=max(LEAST_S, left_s), threads=threads)
        remedies.append(_remedy(problem, change, found))
        if found.termination == Termination.INTERRUPTED:
            break
    return Explanation(
        reason=result.reason,
        obstacles=tuple(obstacles(problem)),
        remedies=tuple(remedies),
        notes=tuple(_notes(problem, remedies)),
    )


def _solve(changed: Problem, change: Change, *, time_limit: float, threads: int) -> SolveResult:
    """Solve for the least amount, or for any schedule where the change has no amount.

    The least RAM is often the floor, and paging alone reaches that soon.
    """
    start, gap = None, 0.0 if change in _FORMS else 1.0
    if change == Change.RAM and changed.can_page:
        time_limit /= 2
        start = paged_at_floor(changed, time_limit=time_limit, threads=threads)
    return solve(changed, time_limit=time_limit, gap=gap, threads=threads, start=start)


def _changes(problem: Problem) -> Iterator[tuple[Change, Problem]]:
    """Yield the problem with each limit of it left out and, where it is an amount, minimized."""
    yield Change.RAM, freed(problem, Quantity.RAM)
    if problem.deadline_s is not None:
        yield Change.TIME, freed(problem, Quantity.TIME)
    if problem.energy_budget_j is not None:
        yield Change.ENERGY, freed(problem, Quantity.ENERGY)
    limit = problem.aux_limit_bytes
    if problem.can_page and limit is not None and limit < sum(problem.graph.tensor_bytes):
        yield Change.STORAGE, freed(problem, Quantity.WRITES)
    if not problem.paging and problem.table.has_storage:
        yield Change.PAGING, replace(problem, paging=True)
    if not problem.recompute:
        yield Change.RECOMPUTATION, replace(problem, recompute=True)
    small = _one_sample(problem)
    if small is not None:
        yield Change.BATCH, small


def _one_sample(problem: Problem) -> Problem | None:
    """Return the problem with batches of 1, where it can be made: a network of the zoo, estimated.

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
    return replace(
        problem,
        graph=small,
        costs=Costs.estimate(small, device),
        ram=problem.ram_budget_bytes,
        deadline=problem.deadline_s,
        aux_bytes=problem.aux_limit_bytes,
        energy_budget=problem.energy_budget_j,
    )


def _remedy(problem: Problem, change: Change, found: SolveResult) -> Remedy:
    undecided = found.schedule is None and found.status != Status.INFEASIBLE
    works = None if undecided else found.schedule is not None
    allowed = _allowed(problem, change)
    simulation, graph = found.simulation, problem.graph
    if simulation is None or allowed is None:
        return Remedy(change=change, works=works, allowed=allowed)
    resident = problem.ram_budget_bytes - problem.usable_ram_bytes if change == Change.RAM else 0
    value, bound = found.objective_value or 0.0, found.objective_bound
    if change == Change.STORAGE:
        value = simulation.aux_used_bytes
    nearest = _accepted_from(problem, change, found, value + resident)
    above_floor = change == Change.RAM and obstacle(problem) is None
    return Remedy(
        change=change,
        works=works if nearest is not None else None,
        allowed=allowed,
        nearest=nearest,
        bound=None if bound is None else bound + resident,
        node=graph.nodes[simulation.peak.node].name if above_floor else None,
        tensors=tuple(graph.tensors[i].name for i in simulation.peak_tensors),
    )


def _accepted_from(
    problem: Problem, change: Change, found: SolveResult, amount: float
) -> float | None:
    """Return the least amount tried, from `amount`, as whose limit the verifier accepts a schedule.

    Transfers that run beside the computing take longer in less RAM: a schedule that was found with
    plenty of it may miss a deadline in no more than its own peak.
    """
    schedule, field = found.require_schedule(), _FIELDS[change]

    def accepts(limit: float) -> bool:
        stated = int(limit) if change in _WHOLE else float(f"{limit:.{DIGITS}g}")
        limits: dict[str, Any] = {field: stated}
        return not verify_schedule(replace(problem, **limits), schedule).violations

    if accepts(amount):
        return amount
    if change != Change.RAM:
        return None
    low, high = int(amount), found.problem.ram_budget_bytes
    if high <= low or not accepts(high):
        return None
    for _ in range(TRIALS):
        middle = (low + high) // 2
        low, high = (low, middle) if accepts(middle) else (middle, high)
    return high


def _allowed(problem: Problem, change: Change) -> float | None:
    amounts: dict[Change, float | None] = {
        Change.RAM: problem.ram_budget_bytes,
        Change.TIME: problem.deadline_s,
        Change.ENERGY: problem.energy_budget_j,
        Change.STORAGE: problem.aux_limit_bytes,
    }
    return amounts.get(change)


def _notes(problem: Problem, remedies: Sequence[Remedy]) -> Iterator[str]:
    device = problem.costs.device
    for remedy in remedies:
        enough = remedy.nearest if remedy.change == Change.RAM else None
        if device is not None and enough is not None and enough > device.ram_bytes:
            ram = format_bytes(device.ram_bytes)
            yield f"that is more than the {ram} of RAM that device {device.key or device.name} has"
    resident = problem.ram_budget_bytes - problem.usable_ram_bytes
    if resident:
        yield (
            f"{resident:,} bytes ({format_bytes(resident)}) are counted for parameters, gradients "
            "and optimizer state"
        )
    size = problem.graph.batch_size
    if size > 1 and obstacle(problem) is not None:
        yield f"a step trains on a batch of {size}; a graph made for a smaller one takes less RAM"


def _explain_own_rows(
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
    names = [] if conflict is None else [form.rows[i] for i in conflict.rows]
    added, stated = [], []
    for row in names:
        home = row if isinstance(row, str) else row.parent_component().name
        if home.split("[")[0] in model.stated_rows:
            stated.append(_RULES.get(home.split("[")[0], "the rules of execution"))
        else:
            added.append(row if isinstance(row, str) else row.name)
    notes = ["without what was added to the model there is a schedule"]
    if not added:
        notes.append(
            "which of the added constraints are to blame was not found in time"
            if conflict is None
            else "no added constraint takes part: look at variables that are fixed or bounded"
        )
    return Explanation(
        reason=result.reason,
        obstacles=(),
        remedies=(),
        constraints=tuple(dict.fromkeys(added)),
        limits=tuple(dict.fromkeys(stated)),
        notes=tuple(notes),
    )


_RULES: Final = {
    "memory": "the RAM budget",
    "storage": "the storage",
    "energy_budget": "the energy budget",
    **dict.fromkeys(DEADLINE_ROWS, "the deadline"),
}
"""What the limits among the rows of a model state."""
_FIELDS: Final = {
    Change.RAM: "ram",
    Change.TIME: "deadline",
    Change.ENERGY: "energy_budget",
    Change.STORAGE: "aux_bytes",
}
"""Fields of a problem that state the amounts."""
_WHOLE: Final = (Change.RAM, Change.STORAGE)
"""Amounts in whole bytes."""
_THINGS: Final = {
    Change.RAM: "more RAM",
    Change.TIME: "a later deadline",
    Change.ENERGY: "a larger energy budget",
    Change.STORAGE: "more storage",
    Change.PAGING: "paging",
    Change.RECOMPUTATION: "recomputation",
    Change.BATCH: "batch size 1",
}
_OF: Final = {
    Change.RAM: "of RAM",
    Change.TIME: "as the deadline",
    Change.ENERGY: "as the energy budget",
    Change.STORAGE: "of storage",
}


def _exact_bytes(size_bytes: float) -> str:
    rounded = format_bytes(size_bytes)
    return f"{size_bytes:.0f} bytes" + (f" ({rounded})" if not rounded.endswith(" B") else "")


def _exact_seconds(time_s: float) -> str:
    return f"{time_s:.{DIGITS}g} s"


def _exact_joules(energy_j: float) -> str:
    return f"{energy_j:.{DIGITS}g} J"


_FORMS: Final[Mapping[Change, Callable[[float], str]]] = {
    Change.RAM: _exact_bytes,
    Change.TIME: _exact_seconds,
    Change.ENERGY: _exact_joules,
    Change.STORAGE: _exact_bytes,
}
