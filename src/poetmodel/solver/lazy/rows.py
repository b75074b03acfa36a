"""Which memory rows an answer breaks, fractional or placed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from poetmodel.solver.lazy.disaggregation import Placement
    from poetmodel.solver.lazy.relaxation import Relaxation

SLACK: Final = 1e-7
"""How far above a limit that a solver computed a row must be to count as broken, relatively."""


def claimed_ram(relaxation: Relaxation, x: NDArray) -> float:  # type: ignore[type-arg]
    """Return the RAM that a point claims to keep within [B]: the budget, or about its own peak."""
    problem = relaxation.problem
    usable = problem.usable_ram_bytes
    if problem.objective.is_sum:
        return usable
    column = relaxation.column[id(relaxation.model.peak)]
    return min(float(x[column]) * problem.useful_ram_bytes * (1 + SLACK), usable)


def broken_stages(loads: Sequence[float], limit: float) -> list[int]:
    """Return the worst stage of each run of stages whose row ``(t, t)`` is broken, worst first."""
    worst: list[int] = []
    inside = False
    for t, load in enumerate(loads):
        broken = load > limit
        if broken and not inside:
            worst.append(t)
        elif broken and load > loads[worst[-1]]:
            worst[-1] = t
        inside = broken
    return sorted(worst, key=lambda t: -loads[t])


def broken_steps(placement: Placement, limit: float) -> list[tuple[int, int]]:
    """Return the worst step ``(t, k)``, ``k < t``, of each stage that breaks one."""
    worst: dict[int, tuple[int, int]] = {}
    for t, k, load in placement.step_loads():
        if load > limit and (t not in worst or load > worst[t][0]):
            worst[t] = (load, k)
    return [(t, k) for t, (_, k) in sorted(worst.items())]
