"""Find the limits of a problem: the smallest RAM, deadline and energy with a schedule.

Each limit is the optimum of the problem with another minimized quantity, so no budgets are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poetmodel.device.ram import device_ram_metrics
from poetmodel.errors import quote
from poetmodel.problem import Problem, Quantity
from poetmodel.result import SolveResult, Status
from poetmodel.solver.fitting import align_problem
from poetmodel.solver.request import SearchOptions
from poetmodel.solver.sensitivity.variants import MIN_SOLVE_S, Variants
from poetmodel.units import brief

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from poetmodel.backends import OptionValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The smallest amount of RAM, time or energy with which a problem has a schedule."""

    name: str
    """``time``, ``energy``, or the kind of RAM limit. ``keep_all``, ``recompute``, ``page`` and
    ``both`` name the permitted decisions. ``stated`` is within the other limits of the problem, and
    ``block`` without them, with aligned tensors."""
    result: SolveResult
    """The result of the solve, with the schedule of the smallest amount if one was found."""

    def __repr__(self) -> str:
        value = "none" if self.value is None else f"{self.value:.6g}"
        proof = "proven" if self.proven else f"bound {self.bound}"
        return brief(self, quote(self.name), f"least {self.quantity} {value}, {proof}")

    @property
    def quantity(self) -> Quantity:
        """The quantity of which the limit is the smallest amount."""
        return Quantity(self.result.problem.minimize)

    @property
    def value(self) -> float | None:
        """Smallest amount found (RAM: budget with resident bytes); None without a schedule."""
        return self._as_budget(self.result.value)

    @property
    def bound(self) -> float | None:
        """Proven lower bound on each schedule's amount, as in `value`; None without a schedule."""
        return self._as_budget(self.result.objective_bound)

    @property
    def proven(self) -> bool:
        """Whether it is proven that no smaller amount suffices, or that no amount does."""
        if self.result.status == Status.INFEASIBLE:
            return True
        return self.value is not None and self.bound is not None and self.bound >= self.value

    @property
    def gap(self) -> float | None:
        """Gap, as a fraction of the smallest amount minus the baseline; None without a bound."""
        return None if self.bound is None else self.result.gap

    @property
    def is_at_floor(self) -> bool:
        """Whether the schedule's peak equals the minimum RAM; False without a schedule."""
        simulation, floor = self.result.simulation, self.result.problem.floor
        return simulation is not None and simulation.peak_ram_bytes == floor.bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the smallest amount, its bound, and the peak of its schedule, in SI units.

        The peak has stage, node, bytes and tensors. Also has the minimized quantity, gap, proof,
        status, reason (None for an empty one) and the RAM of the device, but not `name`. Values
        that need a schedule are None without one.
        """
        simulation, graph = self.result.simulation, self.result.problem.graph
        document: dict[str, Any] = {
            "minimize": str(self.quantity),
            "status": str(self.result.status),
            "value": self.value,
            "bound": self.bound,
            "gap": self.gap,
            "proven": self.proven,
            "reason": self.result.reason or None,
            **dict.fromkeys(("stage", "node", "peak_ram_bytes", "tensors")),
            **device_ram_metrics(self.result.device_ram),
        }
        if simulation is not None:
            document["stage"] = simulation.peak.stage
            document["node"] = graph.nodes[simulation.peak.node].name
            document["peak_ram_bytes"] = simulation.peak_ram_bytes
            document["tensors"] = [graph.tensors[i].name for i in simulation.peak_tensors]
        return document

    def _as_budget(self, amount: float | None) -> float | None:
        """Add the resident bytes to an amount of RAM; return other amounts and None unchanged."""
        if amount is None or self.quantity != Quantity.RAM:
            return amount
        return amount + self.result.problem.resident_bytes


def find_limits(
    problem: Problem,
    *,
    backend: str = "highs",
    time_limit: float = 60.0,
    gap: float = 1e-4,
    threads: int = 1,
    alignment: int | None = None,
    solver_options: Mapping[str, OptionValue] | None = None,
) -> tuple[Limit, ...]:
    """Find the smallest RAM, the smallest deadline and the smallest energy of a problem.

    Parameters
    ----------
    problem : Problem
        Graph, costs and limits; its minimized quantity is ignored.
    backend, gap, threads, solver_options
        As for `solve`.
    time_limit : float
        Wall time for all solves together [s]; each limit has at least 0.1 s.
    alignment : int, optional
        Also find the smallest RAM for tensors whose addresses are multiples of `alignment`, as in
        exported C, without deadline, energy budget and user-defined constraints [B].

    Returns
    -------
    tuple of Limit
        In this order: the smallest RAM with keep-all, with recomputation, with paging, and with
        recomputation and paging, if the problem permits them; the smallest RAM within deadline,
        energy budget and user-defined constraints, if the problem has any of the three; the
        smallest deadline; the smallest energy; the smallest RAM with `alignment`, if it is stated.
        The first four and the last ignore deadline, energy budget and user-defined constraints.
        Deadline and energy are within all other limits of the problem. All are within the storage
        limit; for the last, `alignment` bytes are added to it for each tensor. A limit without a
        schedule has the value None. After Ctrl-C, the tuple has the limits found so far. That of
        the interrupted solve is included, except in the search that precedes the limit with paging.
    """
    search = SearchOptions(
        backend=backend,
        time_limit_s=max(time_limit, MIN_SOLVE_S),
        gap=gap,
        threads=threads,
        solver_options=dict(solver_options or {}),
    )
    return search_limits(problem, search, alignment=alignment)


def search_limits(
    problem: Problem, search: SearchOptions, *, alignment: int | None = None
) -> tuple[Limit, ...]:
    """Find the limits of a problem with the options of a search, as `find_limits`."""
    named_problems = dict(_limit_problems(problem))
    if alignment is not None:
        aligned_problem = align_problem(problem, alignment)
        named_problems["block"] = _min_ram_problem(
            aligned_problem, recompute=aligned_problem.recompute, paging=aligned_problem.can_page
        )
    variants = Variants(len(named_problems), search)
    results = {
        name: variants.solve(limit_problem, gap=search.gap, tries_paging_first=name == "page")
        for name, limit_problem in named_problems.items()
    }
    return tuple(Limit(name=name, result=result) for name, result in results.items() if result)


def _limit_problems(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield the name of each `Limit` but ``block``, and the problem that minimizes its quantity."""
    for name, recompute, paging in (
        ("keep_all", False, False),
        ("recompute", True, False),
        ("page", False, True),
        ("both", True, True),
    ):
        if recompute <= problem.recompute and paging <= problem.can_page:
            yield name, _min_ram_problem(problem, recompute=recompute, paging=paging)
    limits = (problem.deadline_s, problem.energy_budget_j, problem.constraints or None)
    if any(limit is not None for limit in limits):
        yield "stated", problem.without_limits(Quantity.RAM, minimize=Quantity.RAM)
    yield "time", problem.without_limits(Quantity.TIME, minimize=Quantity.TIME)
    yield "energy", problem.without_limits(Quantity.ENERGY, minimize=Quantity.ENERGY)


def _min_ram_problem(problem: Problem, *, recompute: bool, paging: bool) -> Problem:
    """Return the problem that minimizes RAM within its storage limit, without other limits."""
    return problem.without_limits(
        Quantity.RAM,
        Quantity.TIME,
        Quantity.ENERGY,
        minimize=Quantity.RAM,
        recompute=recompute,
        paging=paging,
        constraints=(),
    )
