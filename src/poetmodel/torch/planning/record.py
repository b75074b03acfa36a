"""The numbers of a plan, as every way into PyTorch records them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poetmodel.plan import Op
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from typing import Self

    from poetmodel.plan import Plan
    from poetmodel.result import SolveResult


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """A plan in numbers: budget, keep-all peak, and what its solve found."""

    name: str
    ram_budget_bytes: int
    keep_all_bytes: int
    """Peak with everything kept, 100 % of a budget [B]."""
    status: str
    gap: float | None
    """Gap of `overhead`, as a fraction; None if unknown."""
    overhead: float
    """Minimized quantity of recomputations and transfers, relative to that of a single pass."""
    recomputed: int
    """Number of recomputations."""
    solve_s: float
    device: str | None
    """Key of the device, or its name if it has no key; None for costs of this host."""

    @classmethod
    def of(cls, result: SolveResult, plan: Plan, /, **fields: Any) -> Self:
        """Return the record of a solve and the plan of its schedule; `fields` are the others."""
        problem = result.problem
        n_computations = sum(op == Op.COMPUTE for op, _ in plan.program)
        return cls(
            status=str(result.status),
            gap=result.gap,
            overhead=(result.overhead or 0.0) / (problem.objective.baseline or 1.0),
            recomputed=n_computations - len(problem.graph.nodes),
            solve_s=result.solve_s,
            **fields,
        )

    def describe_solve(self, *, pages: str = "") -> str:
        """Return recomputations, `pages`, overhead with its bound, device, status and time."""
        bound = "" if self.gap is None else f" (at least {self.overhead * (1 - self.gap):.1%})"
        return (
            f"{self.recomputed} recomputed{pages}, overhead {self.overhead:.1%}{bound} on "
            f"{self.device}, {self.status}, solved in {format_seconds(self.solve_s)}"
        )
