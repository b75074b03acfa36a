"""A solver of one's own: the MILP solver of SciPy."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from scipy.optimize import Bounds, LinearConstraint, milp

from poetmodel.backends import Capabilities, RawSolution, SolverStatus
from poetmodel.backends.solver import Solver


class Milp(Solver):
    """`scipy.optimize.milp` as a back end."""

    name = "milp"
    display_name = "scipy.optimize.milp"
    package = "scipy"
    remedy = "pip install scipy"
    capabilities = Capabilities(
        starts=False, callbacks=False, cutoffs=False, absolute_gap=False, log=False, threads=False
    )
    statuses: Final[Mapping[int, SolverStatus]] = MappingProxyType(
        {
            0: SolverStatus.OPTIMAL,
            1: SolverStatus.TIME_LIMIT,
            2: SolverStatus.INFEASIBLE,
            3: SolverStatus.INFEASIBLE_OR_UNBOUNDED,
        }
    )

    def versions(self) -> dict[str, str]:
        """Return the version of SciPy."""
        return dict.fromkeys((self.name, self.package), self.import_package().__version__)

    def run(self, call: Any) -> RawSolution:
        """Solve a model in standard form; it has rows, and integer and continuous columns."""
        form, remaining_s = call.form, call.finish_build()
        if remaining_s == 0.0:
            return RawSolution(status=SolverStatus.TIME_LIMIT)
        options = {"mip_rel_gap": call.limits.rel_gap}
        result = milp(
            form.sense * form.objective,
            integrality=form.integer.astype(int),
            bounds=Bounds(form.lower, form.upper),
            constraints=LinearConstraint(form.matrix, form.row_lower, form.row_upper),
            options=options | ({} if remaining_s is None else {"time_limit": remaining_s}),
        )
        status = self.translate_status(result.status, self.statuses)
        if result.mip_dual_bound is None:
            return RawSolution(status=status, x=result.x)
        bound = form.sense * result.mip_dual_bound + form.offset
        return RawSolution(status=status, x=result.x, bound=bound)
