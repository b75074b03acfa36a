"""A back end over ``scipy.optimize.milp``: all that a new solver needs.

``pytest -p kit.milp`` registers it.
"""

from types import MappingProxyType

import numpy as np

from poetmodel.backends import Capabilities, RawSolution, SolverStatus, register
from poetmodel.backends.solver import Solver
from poetmodel.errors import UnknownOptionError

OPTIONS = {"disp": bool, "presolve": bool, "node_limit": int, "mip_rel_gap": float}


class Milp(Solver):
    """The HiGHS in scipy, called by ``scipy.optimize.milp``."""

    name = "milp"
    display_name = "scipy.optimize.milp"
    package = "scipy"
    remedy = "pip install scipy"
    capabilities = Capabilities(
        starts=False, callbacks=False, cutoffs=False, absolute_gap=False, log=False, threads=False
    )
    statuses = MappingProxyType(
        {
            "7": SolverStatus.OPTIMAL,
            "8": SolverStatus.INFEASIBLE,
            "9": SolverStatus.INFEASIBLE_OR_UNBOUNDED,
            "10": SolverStatus.INFEASIBLE_OR_UNBOUNDED,
            "13": SolverStatus.TIME_LIMIT,
            "16": SolverStatus.OTHER_LIMIT,
        }
    )
    managed_options = MappingProxyType({"time_limit": "time_limit", "mip_rel_gap": "gap"})
    node_limit_option = "node_limit"
    gap_option = "mip_rel_gap"

    def versions(self):
        """Return the version of scipy, for the back end and for its package."""
        return dict.fromkeys((self.name, self.package), self.import_package().__version__)

    def run(self, call):
        """Solve a nontrivial model; raise `UnknownOptionError` for an unknown or invalid option."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        form, limits, remaining_s = call.form, call.limits, call.finish_build()
        if remaining_s == 0.0:
            return RawSolution(status=SolverStatus.TIME_LIMIT)
        options = {"mip_rel_gap": limits.rel_gap, "presolve": limits.presolve}
        for name, value in call.options.items():
            if not isinstance(value, OPTIONS.get(name, ())) or value < 0:
                raise UnknownOptionError(f"backend 'milp': knows no option {name!r} of {value!r}")
        options |= call.options | ({} if remaining_s is None else {"time_limit": remaining_s})
        rows = LinearConstraint(form.matrix, form.row_lower, form.row_upper)
        result = milp(
            form.sense * form.objective,
            integrality=form.integer.astype(int),
            bounds=Bounds(form.lower, form.upper),
            constraints=rows if form.n_rows else None,
            options=options,
        )
        _, _, code = result.message.partition("HiGHS Status ")
        status = self.translate_status(code.partition(":")[0], self.statuses)
        bound = result.mip_dual_bound if form.is_mip else result.fun
        if bound is None or not np.isfinite(bound):
            return RawSolution(status=status, x=result.x, nodes=0 if form.is_mip else None)
        nodes = int(result.mip_node_count) if form.is_mip else None
        return RawSolution(
            status=status, x=result.x, bound=form.sense * bound + form.offset, nodes=nodes
        )


def pytest_configure(config):  # noqa: ARG001 - the name makes it a hook
    """Register the back end when pytest loads this module as a plugin."""
    register(Milp)
