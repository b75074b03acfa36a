"""A step to be scheduled within a RAM budget, of which a part is reserved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.budgets import Budget
from poetmodel.clock import now_s, processor_clock
from poetmodel.errors import BudgetError, quote
from poetmodel.heuristics.greedy import construct
from poetmodel.problem.infeasibility import missing_unit_hint
from poetmodel.solver import solve
from poetmodel.torch.planning.cache import is_final_result
from poetmodel.units import MAX_BYTES, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.torch.planning.cache import CachedSchedules
    from poetmodel.torch.planning.reserves import Reserves

REFUSING_S: Final = 1.0
"""CPU time of a search for the smallest sufficient budget, as for a refused budget [s]."""
REFUSING_NODE_S: Final = 1e-4
"""Additional CPU time of that search per node [s]."""
REFUSING_WALL_RATIO: Final = 30.0
"""Maximum wall-clock time of that search, relative to its CPU time, for a busy machine."""
_REFERENCE_BYTES: Final = 2**40
"""Bytes that stand for 100 % when a budget is only validated [B]."""
_MAX_PERCENT: Final = 100
"""Largest number without a unit that is probably a percentage."""


class LeastRam(NamedTuple):
    """The smallest budget that was found to suffice."""

    sufficient_bytes: int | None
    """A budget that suffices [B]; None if none was found."""
    needed_bytes: int = 0
    """Smaller budgets never suffice [B]; 0 if unknown."""

    @classmethod
    def from_result(cls, result: SolveResult, reserved_bytes: int) -> LeastRam:
        """Return the budget by a result of `find_min_ram`, plus reserves; None without schedule."""
        if result.simulation is None:
            return cls(None)
        return cls(
            result.simulation.peak_ram_bytes + reserved_bytes,
            ceil(result.bound or 0.0) + reserved_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class RamTask:
    """A problem whose RAM is a budget without its reserves, as every way into PyTorch states it."""

    name: str
    """Name of the step or graph, for messages."""
    problem: Problem
    """Its RAM is `usable_bytes`, or 1 B if the reserves take the whole budget."""
    budget_bytes: int
    reserves: Reserves
    keep_all_bytes: int
    """100 % of a budget [B]; 0 if unknown."""
    is_fraction: bool
    """Whether the budget is stated as a percentage."""
    notes: tuple[str, ...] = ()
    """Further sentences of the message, on bytes that the reserves do not list."""

    @property
    def usable_bytes(self) -> int:
        """The budget without the reserves; may be negative [B]."""
        return self.budget_bytes - self.reserves.bytes

    def solve(
        self,
        schedules: CachedSchedules,
        *,
        gap: float,
        time_limit_s: float,
        solve_from: Callable[[SolveResult | None], SolveResult],
    ) -> SolveResult:
        """Return the cached result if it is final, or else solve from it and store."""
        cached = schedules.load_result(self.problem, gap=gap)
        if cached is not None and is_final_result(cached, time_limit_s=time_limit_s):
            return cached
        result = solve_from(cached)
        if result is not cached:
            schedules.store(result)
        return result

    def make_error(self, least: LeastRam, *, is_proved: bool = True) -> BudgetError:
        """Return the error of a budget that is too small, with the least that suffices if known.

        Unless `is_proved`, its message is that no schedule was found in time.
        """
        size_text = format_bytes(self.budget_bytes) + self._format_percentage(self.budget_bytes)
        hint = ""
        if is_proved:
            message = f"ram: {size_text} is too little for {self.name}"
            if not self.is_fraction:
                hint = missing_unit_hint(self.budget_bytes, least.needed_bytes)
        else:
            message = f"ram: no schedule was found in time for {self.name} within {size_text}"
            hint = "; a longer time_limit may find it"
        sufficient_bytes, needed_bytes = least
        if sufficient_bytes is not None:
            ram_text = f"ram={sufficient_bytes}{self._format_percentage(sufficient_bytes)}"
            if needed_bytes >= sufficient_bytes:
                message += f": the minimum is {ram_text}"
            else:
                bound = f", and less than {needed_bytes:,} B never is" if needed_bytes else ""
                message += f": {ram_text} is enough{bound}"
        sentences = [message + hint]
        if self.reserves.bytes:
            sentences.append(f"{self.reserves.bytes:,} B of it are reserved: {self.reserves}")
        return BudgetError("; ".join((*sentences, *self.notes)))

    def _format_percentage(self, size_bytes: int) -> str:
        """Return a size as a percentage of `keep_all_bytes`, rounded up, in parentheses."""
        if not self.keep_all_bytes:
            return ""
        return f" ({ceil(1000 * size_bytes / self.keep_all_bytes) / 10:g}%)"


def find_min_ram(problem: Problem, gap: float) -> SolveResult:
    """Solve for the smallest peak RAM, up to the keep-all peak, instead of a problem's objective.

    Limited to `REFUSING_S` plus `REFUSING_NODE_S` per node of CPU time; maybe without a schedule.
    A greedy schedule, which `solve` gives little time, comes first.
    """
    limit_s = REFUSING_S + REFUSING_NODE_S * len(problem.graph.nodes)
    least = replace(problem, ram="100%", minimize="ram")
    with processor_clock(REFUSING_WALL_RATIO * limit_s):
        end_s = now_s() + limit_s
        start = construct(least, max_s=limit_s / 2)
        remaining_s = max(end_s - now_s(), limit_s / 4)  # the first fit in RAM has no limit
        return solve(least, time_limit=remaining_s, gap=gap, threads=1, start=start)


def check_budget(ram: object) -> None:
    """Raise `BudgetError` unless `ram` is a budget above 0; numbers up to 100 need a unit."""
    size = Budget.parse(ram).resolve(_REFERENCE_BYTES)  # type: ignore[arg-type]
    if size == 0:
        raise BudgetError(f"ram: expected more than 0 bytes, got {quote(ram)}")
    if size <= _MAX_PERCENT and str(ram).strip().isdigit():
        raise BudgetError(f"ram: {missing_unit_hint(size, MAX_BYTES).removeprefix('; ')}")
