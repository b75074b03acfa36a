"""The value of more RAM: a problem solved again with a little more of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from poetmodel.planner import verify
from poetmodel.problem import Quantity
from poetmodel.solver.sensitivity.variants import ChangedProblem, solve_variants
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

MORE_RAM: Final = (0.01, 0.05)
"""How much more RAM its value is for, as parts of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreRam:
    """The value of a larger RAM budget."""

    more_bytes: int
    """How much larger [B]."""
    saved_j: float | None
    """Energy that a schedule found with it saves [J]."""
    most_j: float | None
    """Proven: no schedule in that much RAM saves more than this [J]."""

    @property
    def saved_j_per_kb(self) -> float | None:
        """Savings of 1000 more bytes on average [J]."""
        return None if self.saved_j is None else self.saved_j / (self.more_bytes / 1000)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, SI."""
        return asdict(self) | {"saved_j_per_kb": self.saved_j_per_kb}


def value_of_ram(
    problem: Problem, schedule: Schedule, *, time_limit: float = 10.0, threads: int = 1
) -> tuple[MoreRam, ...]:
    """Find what a little more RAM saves: one answer for each of `MORE_RAM`, where there is more."""
    energy_j = verify(problem, schedule).simulation.energy_j or 0.0
    ram = problem.ram_budget_bytes
    more = [max(1, math.ceil(part * ram)) for part in MORE_RAM]
    more = [size for size in more if ram + size <= MAX_BYTES]
    variants = [
        ChangedProblem(problem=replace(problem, ram=ram + size, minimize=Quantity.ENERGY))
        for size in more
    ]
    results = solve_variants(variants, time_limit=time_limit, threads=threads, start=schedule)
    answers = []
    for size, result in zip_longest(more, results):
        after_j = None if result is None else result.energy_j
        bound_j = None if result is None else result.objective_bound
        answers.append(
            MoreRam(
                more_bytes=size,
                saved_j=None if after_j is None else energy_j - after_j,
                most_j=energy_j - (problem.baseline_energy_j if bound_j is None else bound_j),
            )
        )
    return tuple(answers)
