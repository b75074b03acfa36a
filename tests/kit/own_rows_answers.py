"""The ways to solve a problem with own constraints and objectives, and what must hold then."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pyomo.environ as pyo

from kit.oracle import optimum
from kit.own_rows import own_rows_problem
from poetmodel.errors import PoetModelError
from poetmodel.model import build
from poetmodel.problem import OWN, Problem
from poetmodel.result import Status
from poetmodel.schedule import verify
from poetmodel.solver import solve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kit.oracle import Optimum
    from poetmodel.problem.totals import Terms
    from poetmodel.result import SolveResult
    from poetmodel.solver.request import SolveProgress

WAYS: Final = ("lazy", "compact", "unreduced", "built", "by hand")
"""Three formulations, a model that `build` made of the problem, and a model of the problem without
its own constraints and objective, to which a user adds them."""
EXACT: Final = 1e-6
"""What figures may be off by: the instances have small numbers, in quarters at the finest."""


# -- ways to an answer ---------------------------------------------------------------------------


def answer(problem: Problem, way: str, **options: Any) -> SolveResult:
    """Solve a problem one of the ways."""
    if way == "unreduced":
        return solve(build(problem, reductions=False), **options)
    if way == "built":
        return solve(build(problem), **options)
    if way == "by hand":
        return solve(built_by_hand(problem), **options)
    return solve(problem, formulation=way, **options)


def built_by_hand(problem: Problem) -> pyo.ConcreteModel:
    """Return a model whose own constraints a user states over the relations."""
    plain = problem.minimize if problem.minimize != OWN else "energy"
    model = build(
        replace(problem, constraints=(), own_objective=(), minimize=plain), reductions=False
    )
    graph = problem.graph
    model.out_once = pyo.Constraint(
        range(len(graph.tensors)), rule=lambda m, i: _count(m, problem, "page_outs", i) <= 1
    )
    model.own = pyo.ConstraintList()
    for row in problem.constraints:
        # Pyomo takes no relation between numbers, which a sum may be: what is made last.
        body = total(model, problem, row.terms) + model.R[0, 0] - model.R[0, 0]
        near = max(map(abs, (row.lower or 0, row.upper or 0)))
        slack = 0.0 if _is_whole(row.terms) else 1e-9 * near
        if row.upper is not None:
            model.own.add(body <= row.upper + slack)
        if row.lower is not None:
            model.own.add(body >= row.lower - slack)
    if problem.minimize == OWN:
        model.objective.deactivate()
        model.mine = pyo.Objective(expr=total(model, problem, problem.own_objective))
    return model


def _is_whole(terms: Terms) -> bool:
    figures = ("energy_j", "compute_s", "transfer_s")
    return all(isinstance(value, int) and key not in figures for key, value in terms)


def _count(m: pyo.ConcreteModel, problem: Problem, count: str, index: int) -> Any:
    graph = problem.graph
    stages = range(len(graph.nodes))
    if count == "recomputations":
        return sum(m.R[t, index] for t in stages if t > index)
    if count == "resident":
        return m.resident[index]
    first = graph.node_of[index]
    if count == "page_ins":
        # The first read of state on storage is no entry of M_in.
        is_read = index in graph.state_tensors and not problem.reads_in_place
        home = 1 - m.resident[index] if is_read else 0
        return home + sum(m.M_in[t, index] for t in stages if t > first)
    return sum(m.M_out[t, index] for t in stages if t >= first)


def total(m: pyo.ConcreteModel, problem: Problem, terms: Terms) -> Any:
    """Return a sum of totals over the relations of a model."""
    graph, table = problem.graph, problem.table
    device = problem.costs.device
    idle_w = device.idle_power_w if device is not None else 0.0
    moving_w = idle_w if problem.deadline_counts == "serial" else 0.0
    none = [0.0] * len(graph.tensors)
    in_s, out_s = table.page_in_time_s or none, table.page_out_time_s or none
    in_j, out_j = table.page_in_energy_j or none, table.page_out_energy_j or none
    compute_s, compute_j = table.compute_time_s, table.compute_energy_j
    passed = [j + idle_w * s for j, s in zip(compute_j, compute_s, strict=True)]
    moved_in = [j + moving_w * s for j, s in zip(in_j, in_s, strict=True)]
    moved_out = [j + moving_w * s for j, s in zip(out_j, out_s, strict=True)]
    sizes = graph.tensor_bytes
    sums: dict[str, tuple[Any, Any, Any]] = {
        "energy_j": (passed, moved_in, moved_out),
        "compute_s": (compute_s, none, none),
        "transfer_s": ([0.0] * len(graph.nodes), in_s, out_s),
        "bytes_read": ([0] * len(graph.nodes), sizes, none),
        "bytes_written": ([0] * len(graph.nodes), none, sizes),
    }
    expression: Any = 0
    for key, weight in terms:
        kind, _, name = key.partition(":")
        if key == "constant":
            expression += weight
        elif key in sums:
            compute, page_in, page_out = sums[key]
            single = sum(compute) if key in ("energy_j", "compute_s") else 0
            counted = (
                ("recomputations", compute), ("page_ins", page_in), ("page_outs", page_out)
            )  # fmt: skip
            expression += weight * (
                single
                + sum(
                    value * _count(m, problem, count, index)
                    for count, values in counted
                    for index, value in enumerate(values)
                    if value
                )
            )
        else:
            index = graph.node_index if kind == "recomputations" else graph.tensor_index
            expression += weight * _count(m, problem, kind, index[name])
    return expression


# -- what must hold ------------------------------------------------------------------------------


def fault(
    problem: Problem, best: Optimum | None, result: SolveResult, *, settled: bool = True
) -> str:
    """Return what of a result is wrong against exhaustive search, or nothing.

    Without `settled` the solve may have ended before it could say much.
    """
    if best is None:
        honest = (Status.INFEASIBLE,) if settled else (Status.INFEASIBLE, Status.UNKNOWN)
        return "" if result.status in honest else f"infeasible, got {result.status}"
    if result.status == Status.INFEASIBLE or (settled and result.status != Status.OPTIMAL):
        return f"optimum {best.value}, got {result.status} ({result.reason})"
    known = result.to_dict()["objective"]
    bounds = [result.objective_bound if result.own_objective is None else None, known["bound"]]
    for bound in bounds:
        if bound is not None and bound > best.value + _off(best.value):
            return f"optimum {best.value}, bound {bound}"
    if result.schedule is None:
        return ""
    verdict = verify(problem, result.schedule)
    if verdict.violations:
        return f"violations {verdict.violations}"
    value = problem.objective.measured(verdict.simulation)
    if abs(value - known["value"]) > _off(value):
        return f"value {value}, said {known['value']}"
    beyond = value - best.value
    if beyond < -_off(value):
        return f"the search found {best.value}, and {value} is better"
    above = value - problem.objective.baseline
    scale = above if result.own_objective is None else abs(value)
    if result.status == Status.OPTIMAL and beyond > result.requested_gap * scale + _off(value):
        return f"called optimal at {value}, optimum {best.value}"
    return ""


def _off(value: float) -> float:
    return EXACT * max(1.0, abs(value))


class Watch:
    """Follows a solve, and notes bounds above the optimum on the way."""

    def __init__(self, problem: Problem, best: Optimum | None) -> None:
        baseline = problem.objective.baseline if problem.minimize != "ram" else 0.0
        self.most = None if best is None else best.value - baseline
        self.fault = ""
        self.calls = 0

    def __call__(self, progress: SolveProgress) -> None:
        """Note what is reported."""
        self.calls += 1
        if self.most is None:
            if progress.incumbent is not None:
                self.fault = f"infeasible, incumbent {progress.incumbent}"
            return
        if progress.bound is not None and progress.bound > self.most + _off(self.most):
            self.fault = f"optimum {self.most}, bound {progress.bound} on the way"
        if progress.incumbent is not None and progress.incumbent < self.most - _off(self.most):
            self.fault = f"optimum {self.most}, incumbent {progress.incumbent} on the way"


def faults(
    seeds: Iterable[str],
    way: str,
    make: Callable[[str], Problem] = own_rows_problem,
    **options: Any,
) -> dict[str, str]:
    """Return the instances on which search and a way differ, by seed."""
    found = {}
    for seed in seeds:
        problem = make(seed)
        best = optimum(problem)
        watch = Watch(problem, best)
        watched = {} if way == "by hand" else {"on_progress": watch}
        settled = options.get("time_limit", 60.0) >= 60.0
        try:
            result = answer(problem, way, **{"gap": 0.0, **watched, **options})
            what = fault(problem, best, result, settled=settled) or watch.fault
        except PoetModelError as error:
            what = f"{type(error).__name__}: {error}"
        if what:
            found[seed] = what
    return found
