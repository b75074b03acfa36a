"""The public function `solve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.clock import infrequent_gc
from poetmodel.errors import InputError, quote
from poetmodel.problem import Problem
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.result import SolveResult, Termination
from poetmodel.schedule import Schedule, check_identity
from poetmodel.solver.request import Request
from poetmodel.solver.search import Search
from poetmodel.solver.task import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyomo.environ as pyo

    from poetmodel.backends import OptionValue
    from poetmodel.backends.solver import Solver
    from poetmodel.solver.request import OnProgress


DEFAULT_FORMULATION: Final = "lazy"
"""The formulation of a problem unless another one is requested."""


def solve(
    problem_or_model: Problem | pyo.ConcreteModel,
    *,
    formulation: str | None = None,
    backend: str = "highs",
    time_limit: float = 60.0,
    gap: float = 1e-4,
    threads: int = 1,
    seed: int = 0,
    start: Schedule | None = None,
    on_progress: OnProgress | None = None,
    solver_options: Mapping[str, OptionValue] | None = None,
) -> SolveResult:
    """Find the best schedule of a problem or model, and prove a bound on its value.

    Parameters
    ----------
    problem_or_model : Problem or ConcreteModel
        A problem, or a model from `build`, which may be extended. Solutions of the solver are
        loaded into the variables of a model.
    formulation : {'lazy', 'compact', 'paper'}, optional
        Formulation of a problem, by default ``lazy``. A model is solved as it was built; another
        formulation than that of the model is refused.
    backend : {'highs', 'scip', 'gurobi'}
        Name of the solver; also a name that `poetmodel.backends.register` added, or
        ``FILE.py:CLASS``.
    time_limit : float
        Wall time for the whole call, building included [s].
    gap : float
        Stop when the gap of the overhead, or of a model's user-defined objective, is at most this.
    threads : int
        Maximum number of threads. With two or more, ``lazy`` searches for schedules in a second
        process during the proof.
    seed : int
        Seed of the solver and of heuristics.
    start : Schedule, optional
        A first schedule for the problem. The solve begins from the best of this schedule, if it is
        valid, and the schedules of built-in heuristics; ``paper`` begins without a schedule.
    on_progress : callable, optional
        Called with a `SolveProgress` at irregular intervals; returning False stops the solve.
    solver_options : mapping of str to bool, int, float or str, optional
        Options of the solver by its own names, for each of its solves, such as
        ``{"mip_heuristic_effort": 0.2}`` for HiGHS. Time limit, threads, seed and gap are
        parameters of this function; options for these and for the log are refused.

    Returns
    -------
    SolveResult
        The verified schedule with its bound, or the reason why there is no schedule. A schedule of
        ``paper`` may have violations.

    Raises
    ------
    InputError
        If the problem, the model, the formulation, a parameter, the start or the type of a solver
        option cannot be used.
    BackendUnavailableError
        If the solver is missing, or its licence refuses the model.
    BackendError
        If the solver fails, has no such option or refuses its value.
    VerificationError
        If the verifier rejects a solution of an exact or user-defined formulation.
    TooLargeError
        If the deadline of a problem counts ``overlap``, and spans with invalid entries of the start
        have more than `MAX_PAIRS` pairs.

    Notes
    -----
    Ctrl-C during the search ends the solve with the best schedule so far. For a large model whose
    additions a problem can state, a warning is logged.
    """
    request = Request.of_keywords(
        formulation=formulation,
        backend=backend,
        time_limit=time_limit,
        gap=gap,
        threads=threads,
        seed=seed,
        on_progress=on_progress,
        solver_options=solver_options,
    )
    return execute(problem_or_model, request, start)


def execute(
    problem_or_model: Problem | pyo.ConcreteModel, request: Request, start: Schedule | None = None
) -> SolveResult:
    """Solve a problem or model as `solve` does, within the time that is left of a request."""
    from poetmodel.backends.registry import backend as find_backend

    solver = find_backend(request.backend)
    solver.versions()
    _check_capabilities(solver)
    solver.check_options(request.solver_options)
    with infrequent_gc():
        task = _make_task(problem_or_model, request.formulation)
        problem, reason = task.problem, infeasibility_reason(task.problem)
        if start is not None:
            if not isinstance(start, Schedule):
                raise InputError(f"start: expected a Schedule, got {quote(start)}")
            check_identity(problem.graph, start)
        search = Search(problem=problem, request=request)
        if reason is not None:
            search.end(Termination.PROVED, reason, is_infeasible=True)
        elif problem.is_overlapping:
            from poetmodel.solver.makespan import TransferWeightSearch

            TransferWeightSearch(search, task, start).find_schedule()
        else:
            task.solve(search, start)
        return search.result(formulation=task.formulation, reduction=task.reduction)


def _check_capabilities(solver: Solver) -> None:
    """Raise `InputError` if a solver cannot solve models with integers."""
    if not solver.capabilities.integers:
        raise InputError(
            f"backend {solver.name!r}: {solver.display_name} solves no models with integers"
        )


def _make_task(problem_or_model: Problem | pyo.ConcreteModel, formulation: str | None) -> Task:
    """Return the task of a problem and a formulation, or of a model from `build`."""
    if not isinstance(problem_or_model, Problem):
        from poetmodel.solver.extended import ModelTask

        return ModelTask.from_model(problem_or_model, formulation)
    name = formulation or DEFAULT_FORMULATION
    _check_formulation(problem_or_model, name)
    return Task(problem=problem_or_model, formulation=name)


def _check_formulation(problem: Problem, formulation: str) -> None:
    """Raise an error if a formulation is unknown, or ``paper`` cannot state the problem."""
    if formulation == DEFAULT_FORMULATION:
        return
    from poetmodel.model import FORMULATIONS
    from poetmodel.model.paper import check_supported

    if formulation not in FORMULATIONS:
        raise InputError(
            f"formulation: expected lazy, {' or '.join(FORMULATIONS)}, got {formulation!r}"
        )
    if formulation == "paper":
        check_supported(problem)
