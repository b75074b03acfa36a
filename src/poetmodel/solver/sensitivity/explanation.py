"""Why a problem has no schedule, in plain words, and the nearest problems that have one.

Each limit is changed by itself: the problem is solved for the least RAM, time, energy or storage
that would do while the other limits stay.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import listed
from poetmodel.problem.infeasibility import obstacle, obstacles
from poetmodel.solver.facade import solve
from poetmodel.solver.sensitivity.remedies import LEAST_S, Change, Remedy, find_remedies
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyomo.environ as pyo

    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult


SHARE: Final = 0.2
"""Part of the time limit that an explanation may take beside the solve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a problem has no schedule, and which changes would help."""

    reason: str
    """The reason that the solve gave."""
    obstacles: tuple[str, ...]
    """Limits that no schedule keeps whatever the others are, in words."""
    remedies: tuple[Remedy, ...]
    """Result of each change by itself."""
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
        others = [part for part in dict.fromkeys(self.obstacles) if part not in self.reason]
        return "; ".join(part for part in (self.reason, *others) if part)

    def sentences(self) -> Iterator[str]:
        """Yield it in words, beyond the reason, one line each."""
        yield from (fault for fault in self.obstacles if fault != self.reason)
        yield from self.hints()

    def hints(self) -> Iterator[str]:
        """Yield in words what would do, and what was found not to."""
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
        what was added to it.
    time_limit : float
        Wall time for all of it [s].
    threads : int
        As for `solve`.

    Returns
    -------
    Explanation
        Changes of one limit each, with the least amount that works; every "does not help" is
        proven, every amount that works has a schedule that the verifier accepts. Own constraints
        are left out rule by rule, and all together.
    """
    ends_s = time.monotonic() + time_limit
    problem = result.problem
    if model is not None:
        limit_s = max(LEAST_S, time_limit / 2)
        if solve(problem, time_limit=limit_s, gap=1.0, threads=threads).schedule is not None:
            notes = tuple(_without_additions(model))
            return Explanation(reason=result.reason, obstacles=(), remedies=(), notes=notes)
    left_s = ends_s - time.monotonic()
    remedies = find_remedies(problem, time_limit=left_s, threads=threads)
    if model is None:
        remedies = tuple(remedy.beyond_stated() for remedy in remedies)
    return Explanation(
        reason=result.reason,
        obstacles=tuple(obstacles(problem)),
        remedies=remedies,
        notes=tuple(_notes(problem, remedies)),
    )


def _notes(problem: Problem, remedies: Sequence[Remedy]) -> Iterator[str]:
    device = problem.costs.device
    for remedy in remedies:
        enough = remedy.nearest if remedy.change == Change.RAM else None
        if device is not None and enough is not None and enough > device.ram_bytes:
            ram = format_bytes(device.ram_bytes)
            yield f"that is more than the {ram} of RAM that device {device.short_name} has"
    resident = problem.resident_bytes
    if resident:
        yield (
            f"{resident:,} bytes ({format_bytes(resident)}) are counted for parameters, gradients "
            "and optimizer state"
        )
    if _holds_gradient_at_floor(problem):
        yield (
            "that step holds the whole gradient of a parameter; where a graph splits larger "
            "parameters, as --tile 32KiB does for built-in networks, it takes less RAM"
        )
    size = problem.graph.batch_size
    if size > 1 and obstacle(problem) is not None:
        yield f"a step trains on a batch of {size}; a graph made for a smaller one takes less RAM"


def _holds_gradient_at_floor(problem: Problem) -> bool:
    """Return whether RAM lacks for a step whose largest tensor is the gradient of a parameter."""
    graph, floor = problem.graph, problem.floor
    if not graph.replacement_of or floor.bytes <= problem.usable_ram_bytes:
        return False
    updates = {graph.node_of[new] for new in graph.state_of}
    tensors = (*graph.inputs_of[floor.node], *graph.outputs_of[floor.node])
    largest = max(tensors, key=graph.tensor_bytes.__getitem__)
    return floor.node in updates or bool(updates.intersection(graph.users_of[largest]))


def _without_additions(model: pyo.ConcreteModel) -> Iterator[str]:
    """Yield that there is a schedule without what was added to a model, and what that is."""
    from pyomo.core import Constraint

    rows = model.component_objects(Constraint, active=True)
    added = [row.name for row in rows if row.name not in model.stated_rows]
    of_these = f" (constraint{'s' * (len(added) > 1)} {listed(added)})" if added else ""
    yield f"without what was added to the model{of_these} there is a schedule"
    if not added:
        yield "no constraint was added: look at variables that are fixed or bounded"
