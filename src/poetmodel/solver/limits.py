"""How far a problem's limits can go: the smallest RAM, the smallest deadline, the smallest energy.

Each is an optimum of the same problem with another quantity minimized: nothing is searched by
trying budgets one after the other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.room import room_figures
from poetmodel.errors import shown
from poetmodel.graph import floor
from poetmodel.problem import Quantity
from poetmodel.result import Status, Termination, relative_gap, unavoidable
from poetmodel.solver.facade import solve
from poetmodel.units import brief

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.device.room import DeviceRoom
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule

LEAST_S: Final = 0.1
"""Least time for one question [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The least amount of something that a problem can do with."""

    name: str
    """What was asked, as a key: ``keep_all``, ``recompute``, ``page``, ``both``, ``stated``,
    ``time`` or ``energy``; the first five are about RAM."""
    result: SolveResult
    """The schedule with the least amount, and the proof."""
    bound: float | None
    """Proven: there is no schedule with less, in the quantity's own unit; None without a
    schedule."""

    def __repr__(self) -> str:
        found = "none" if self.value is None else f"{self.value:.6g}"
        proof = "proven" if self.proven else f"bound {self.least}"
        return brief(self, shown(self.name), f"least {self.quantity} {found}, {proof}")

    @property
    def quantity(self) -> Quantity:
        """What was minimized."""
        return Quantity(self.result.problem.minimize)

    @property
    def resident_bytes(self) -> int:
        """What is resident and counted in a RAM budget [B]."""
        problem = self.result.problem
        return problem.ram_budget_bytes - problem.usable_ram_bytes

    @property
    def value(self) -> float | None:
        """The least amount found; for RAM the budget, with what is resident where that counts."""
        return self._stated(self.result.objective_value)

    @property
    def least(self) -> float | None:
        """No schedule can do with less than this, as `value` counts."""
        return self._stated(self.bound)

    @property
    def proven(self) -> bool:
        """Whether it is proved that nothing less will do, or that nothing will."""
        if self.result.status == Status.INFEASIBLE:
            return True
        value = self.result.objective_value
        return value is not None and self.bound is not None and self.bound >= value

    @property
    def room(self) -> DeviceRoom | None:
        """What the schedule takes of the device's RAM; None without a schedule or a device."""
        return self.result.room

    @property
    def gap(self) -> float | None:
        """How far the least amount may be below what was found.

        As a fraction of what is found beyond the part that every schedule pays.
        """
        value = self.result.objective_value
        if value is None or self.bound is None:
            return None
        paid = unavoidable(self.result.problem)
        return relative_gap(value - paid, self.bound - paid)

    @property
    def at_floor(self) -> bool:
        """Whether the peak of its schedule is the largest working set of one step."""
        simulation = self.result.simulation
        least = floor(self.result.problem.graph).bytes
        return simulation is not None and simulation.peak_ram_bytes == least

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain values, SI."""
        simulation, graph = self.result.simulation, self.result.problem.graph
        document: dict[str, Any] = {
            "minimize": str(self.quantity),
            "status": str(self.result.status),
            "value": self.value,
            "bound": self.least,
            "gap": self.gap,
            "proven": self.proven,
            "reason": self.result.reason or None,
            "stage": None,
            "node": None,
            "peak_ram_bytes": None,
            "tensors": None,
            **room_figures(self.room),
        }
        if simulation is not None:
            document["stage"] = simulation.peak.stage
            document["node"] = graph.nodes[simulation.peak.node].name
            document["peak_ram_bytes"] = simulation.peak_ram_bytes
            document["tensors"] = [graph.tensors[i].name for i in simulation.peak_tensors]
        return document

    def _stated(self, amount: float | None) -> float | None:
        if amount is None or self.quantity != Quantity.RAM:
            return amount
        return amount + self.resident_bytes


def find_limits(
    problem: Problem,
    *,
    backend: str = "highs",
    time_limit: float = 60.0,
    gap: float = 1e-4,
    threads: int = 1,
) -> tuple[Limit, ...]:
    """Find the smallest RAM, the smallest deadline and the smallest energy of a problem.

    Parameters
    ----------
    problem : Problem
        Graph, costs and limits; what it minimizes does not matter.
    backend, gap, threads
        As for `solve`, for each question.
    time_limit : float
        Wall time for all questions together [s].

    Returns
    -------
    tuple of Limit
        The smallest RAM when everything is kept, when tensors are recomputed, paged, and both, as
        far as the problem allows, without any other limit than its storage; with all of its limits,
        where it has more; then the smallest deadline for its RAM and energy budget, and the
        smallest energy for its RAM and deadline.

    Notes
    -----
    A schedule of a tighter question is one of a looser one, which begins with it; what is proved of
    the looser one holds for the tighter. Ctrl-C ends with the questions answered so far.
    """
    ends_s = time.monotonic() + time_limit
    questions = list(_questions(problem))
    found: list[Limit] = []
    for place, (name, asked) in enumerate(questions):
        part_s = max(LEAST_S, max(0.0, ends_s - time.monotonic()) / (len(questions) - place))
        start = _start(asked, found)
        if name == "page":
            part_s /= 2
            at_floor = paged_at_floor(asked, time_limit=part_s, backend=backend, threads=threads)
            start = at_floor or start
        result = solve(
            asked, backend=backend, time_limit=part_s, gap=gap, threads=threads, start=start
        )
        found.append(Limit(name=name, result=result, bound=result.objective_bound))
        if result.termination == Termination.INTERRUPTED:
            break
    return tuple(_with_common_bound(found))


def freed(problem: Problem, quantity: Quantity, **changes: Any) -> Problem:
    """Return a problem that minimizes a quantity, which it therefore does not limit.

    Parameters
    ----------
    problem : Problem
        Its other limits stay.
    quantity : Quantity
        RAM, time, energy or writes.
    **changes
        Further fields of the problem.
    """
    return problem.without(quantity, **{"minimize": str(quantity)} | changes)


def paged_at_floor(
    asked: Problem, *, time_limit: float, backend: str = "highs", threads: int = 1
) -> Schedule | None:
    """Return a schedule whose RAM no other can undercut, where paging alone gives one.

    Parameters
    ----------
    asked : Problem
        Its limits other than RAM are kept.
    time_limit : float
        Wall time for it [s].
    backend, threads
        As for `solve`.
    """
    resident = asked.ram_budget_bytes - asked.usable_ram_bytes
    tight = replace(
        asked,
        ram=floor(asked.graph).bytes + resident,
        minimize=str(Quantity.ENERGY),
        recompute=False,
    )
    return solve(tight, backend=backend, time_limit=time_limit, gap=1.0, threads=threads).schedule


def _questions(problem: Problem) -> Iterator[tuple[str, Problem]]:
    def least_ram(*, recompute: bool, paging: bool) -> Problem:
        return freed(
            problem,
            Quantity.RAM,
            recompute=recompute,
            paging=paging,
            deadline=None,
            energy_budget=None,
        )

    again, paging = problem.recompute, problem.can_page
    yield "keep_all", least_ram(recompute=False, paging=False)
    if again:
        yield "recompute", least_ram(recompute=True, paging=False)
    if paging:
        yield "page", least_ram(recompute=False, paging=True)
    if again and paging:
        yield "both", least_ram(recompute=True, paging=True)
    if problem.deadline_s is not None or problem.energy_budget_j is not None:
        yield "stated", freed(problem, Quantity.RAM)
    yield "time", freed(problem, Quantity.TIME)
    yield "energy", freed(problem, Quantity.ENERGY)


def _start(asked: Problem, found: Sequence[Limit]) -> Schedule | None:
    """Return the schedule of the least RAM so far, where RAM is requested."""
    if asked.minimize != Quantity.RAM:
        return None
    known = [limit.result for limit in found if limit.result.schedule is not None]
    if not known:
        return None
    return min(known, key=lambda result: result.objective_value or 0.0).schedule


def _with_common_bound(found: Sequence[Limit]) -> Iterator[Limit]:
    """Take what is proved for a looser question about RAM over to the tighter ones."""
    about_ram = [limit for limit in found if limit.quantity == Quantity.RAM]
    for limit in found:
        if limit.quantity != Quantity.RAM or limit.bound is None:
            yield limit
            continue
        looser = [other.bound or 0.0 for other in about_ram if _is_looser(other, limit)]
        yield replace(limit, bound=max(limit.bound, *looser, 0.0))


def _is_looser(one: Limit, other: Limit) -> bool:
    """Return whether every schedule of `other` is one of `one`, which has no further limit."""
    wide, narrow = one.result.problem, other.result.problem
    return (
        one.name != "stated"
        and wide.recompute >= narrow.recompute
        and wide.can_page >= narrow.can_page
    )
