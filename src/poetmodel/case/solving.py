"""Solve a case: tiles, addresses, the job of its steps, and reasons for infeasibility."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

from poetmodel.baselines.registry import DEFAULT
from poetmodel.case.tiles import AutoTiles
from poetmodel.errors import InputError, MethodNotApplicableError
from poetmodel.result import SolveResult, Status, Termination

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from poetmodel.case.case import Case
    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.problem.job import Job
    from poetmodel.schedule import Schedule
    from poetmodel.solver import Fitted
    from poetmodel.solver.request import OnProgress, Request, SearchOptions, SolveProgress
    from poetmodel.solver.sensitivity import Explanation, UsedLimit
    from poetmodel.solver.tile_trials import ChosenTiles

    Watch = Callable[[Problem], AbstractContextManager[OnProgress | None]]
    """Returns a context in which a solve of a problem reports to a callback."""

MIN_NODES: Final = 2
"""Minimum number of nodes of a graph that has decisions."""
MIN_TIME_LIMIT_S: Final = 1e-3
"""Minimum time limit of the solve after trials of tile sizes [s]."""
LIMITS_TIME_RATIO: Final = 0.25
"""Time to decide which limits bind, as a fraction of the time limit of the step's solve."""
INTERRUPTED_MESSAGE: Final = "interrupted before a schedule was found"
"""Message for Ctrl-C before a schedule is found."""
ADDRESSES_NOTE: Final = "these changes ignore addresses: --arena may need more RAM"
"""Note on the hints of an explanation, if addresses were requested."""


def _no_watch(_problem: Problem) -> AbstractContextManager[None]:
    return nullcontext()


class LoadedCase:
    """A case with its graph (of at least 2 nodes) or the tile sizes to try; makes its problems."""

    def __init__(
        self, case: Case, *, read_graph: Callable[[], Graph] | None = None, job: Job | None = None
    ) -> None:
        self.tiles = AutoTiles.find(case)
        self.case = replace(case, limits=case.absolute_limits())
        self.job = job
        if self.tiles is None:
            self.graph = (read_graph or case.load_graph)()
        else:
            self.graph = self.tiles.candidates[0][1].graph
        if len(self.graph.nodes) < MIN_NODES:
            raise InputError(
                f"graph {self.graph.name!r} has 1 node: nothing to keep, recompute or page; "
                f"solve needs at least {MIN_NODES}"
            )

        self.state_problem = cache(self._state_problem)
        """Returns the problem of the limits, and of the job, for a graph."""

    @property
    def problem(self) -> Problem:
        """The problem of the graph, or of the first tile size."""
        return self.state_problem(self.graph)

    def _state_problem(self, graph: Graph) -> Problem:
        limits = self.case.limits.with_job(self.job, graph)
        return replace(self.case, limits=limits).state_problem(graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseAnswer:
    """The result of a case, with its tiles, addresses, explanation and binding limits."""

    case: Case
    """The case with the chosen tile size."""
    stated_case: Case
    """The case as the command line states it, except a percentage of RAM."""
    result: SolveResult
    tiles: ChosenTiles | None = None
    """The tile sizes that were tried; None without ``--tile auto``."""
    fitted: Fitted | None = None
    """Plan and addresses; None if none were requested."""
    explanation: Explanation | None = None
    """Reasons for infeasibility, if it is proven."""
    job: Job | None = None
    used_limits: tuple[UsedLimit, ...] = ()
    """Limits of a step of the job, and whether they bind."""
    tile_hints: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Return result, tiles and explanation as JSON values."""
        values = self.result.to_dict()
        if self.tiles is not None:
            values["tile_bytes"] = self.tiles.tile_bytes
            values["tile_trials"] = [trial.to_dict() for trial in self.tiles.trials]
        if self.explanation is not None:
            values["infeasible"] = self.explanation.to_dict()
        return values

    def failure_reasons(self) -> Iterator[str]:
        """Yield violations, else the reason why there is no schedule; empty if one is valid."""
        result = self.result
        if result.violations:
            yield (
                f"the schedule of formulation {result.formulation!r} violates a rule or a limit; "
                "use another formulation"
            )
            yield from result.violations
        elif result.status == Status.INFEASIBLE:
            reason = result.reason if self.explanation is None else self.explanation.whole_reason
            yield f"infeasible: {reason or 'no schedule meets the limits'}"
        elif result.schedule is None:
            is_interrupted = result.termination == Termination.INTERRUPTED
            reason = INTERRUPTED_MESSAGE if is_interrupted else result.reason
            yield reason or "no schedule was found within the limit"

    def hints(self) -> Iterator[str]:
        """Yield the chosen tile size, and remedies: tiles, or a ``--state`` for too little RAM."""
        from poetmodel.device.ram import find_whole_step

        yield from self.tile_hints
        case, result = self.case, self.result
        if case.is_step_file and result.status == Status.INFEASIBLE:
            tiles_text = (
                "without tiles" if case.tile in (None, "none") else f"in tiles of {case.tile}"
            )
            is_auto = self.stated_case.tile == "auto"
            tile_hint = "; --tile auto searches for tiles with which the step fits"
            yield f"proved for the step {tiles_text}{'' if is_auto else tile_hint}"
        device_ram, device = result.device_ram, result.problem.costs.device
        if device_ram is None or device_ram.fits or not device_ram.resident_bytes:
            return
        whole_step = find_whole_step(
            case.source or "", case.shape, device, paging=result.problem.paging
        )
        if whole_step is not None:
            from poetmodel.units import format_bytes

            yield (
                f"with --state {whole_step.state} --in-place parameters and gradients are also "
                f"planned: the step then takes at least {format_bytes(whole_step.min_bytes)} of "
                "RAM in all"
            )


def solve_case(
    loaded: LoadedCase, *, has_arena: bool = False, watch: Watch = _no_watch
) -> CaseAnswer:
    """Solve a case, with addresses if `has_arena`, also until Ctrl-C; explain infeasibility."""
    case, search = loaded.case, loaded.case.search
    chosen, hints, limit_s, problem = None, [], search.time_limit_s, loaded.problem
    known = None
    if loaded.tiles is not None:
        chosen, limit_s = _choose_tiles(loaded.tiles, loaded, watch)
        case, hint = loaded.tiles.choose(chosen.tile_bytes, chosen.step)
        hints.append(hint)
        case = replace(case, limits=loaded.case.limits)
        problem, known = loaded.state_problem(chosen.step.graph), chosen.result
    start, fitted = None if known is None else known.schedule, None
    if has_arena:
        fitted = _fit_arena(problem, search, limit_s or MIN_TIME_LIMIT_S, start, watch)
        result = fitted.result
    elif known is not None and limit_s <= 0:
        result = known
    else:
        request = search.start().restart(limit_s or MIN_TIME_LIMIT_S)
        result = solve_by_method(problem, request, start, watch=watch)
    if chosen is not None:
        result = replace(result, time_limit_s=search.time_limit_s)
    explanation = _explain(result, threads=search.threads)
    if has_arena and explanation is not None and explanation.working_remedies:
        explanation = replace(explanation, notes=(*explanation.notes, ADDRESSES_NOTE))
    return CaseAnswer(
        case=case,
        stated_case=loaded.case,
        result=result,
        tiles=chosen,
        fitted=fitted,
        explanation=explanation,
        job=loaded.job,
        used_limits=_find_used_limits(result, loaded.job, threads=search.threads),
        tile_hints=tuple(hints),
    )


def solve_by_method(
    problem: Problem,
    request: Request,
    start: Schedule | None = None,
    *,
    watch: Watch = _no_watch,
) -> SolveResult:
    """Solve a problem by the method of a request; return the result also after Ctrl-C.

    Only the default method uses `start`. If the method does not apply, returns its partial result,
    or raises `MethodNotApplicableError` without one.
    """
    on_progress = request.on_progress
    try:
        with watch(problem) as show:

            def report(progress: SolveProgress) -> bool | None:
                if show is not None:
                    show(progress)
                return None if on_progress is None else on_progress(progress)

            request = replace(request, on_progress=show if on_progress is None else report)
            if request.method == DEFAULT:
                from poetmodel.solver.facade import execute

                return execute(problem, request, start)
            from poetmodel.baselines.running import run_method

            return run_method(problem, request)
    except MethodNotApplicableError as error:
        partial_result: SolveResult | None = error.result
        if partial_result is None:
            raise
        return partial_result
    except KeyboardInterrupt:  # outside the search, which handles Ctrl-C itself
        return SolveResult(
            problem=problem,
            status=Status.UNKNOWN,
            termination=Termination.INTERRUPTED,
            reason=INTERRUPTED_MESSAGE,
            method=request.method,
            time_limit_s=request.time_limit_s,
            requested_gap=request.gap,
        )


def _choose_tiles(tiles: AutoTiles, loaded: LoadedCase, watch: Watch) -> tuple[ChosenTiles, float]:
    """Solve each candidate tile size; return that of smallest value, and the remaining time [s].

    The remaining time is 0 if the returned schedule is proved optimal, or after Ctrl-C.
    """
    from poetmodel.solver.tile_trials import find_cheapest_tiles

    clock = loaded.case.search.start()
    chosen = find_cheapest_tiles(
        tiles.candidates,
        lambda step: loaded.state_problem(step.graph),
        clock,
        solve=partial(solve_by_method, watch=watch),
    )
    is_final = chosen.result is not None and chosen.result.termination == Termination.PROVED
    return chosen, 0.0 if is_final or chosen.is_interrupted else max(
        clock.remaining_s(), MIN_TIME_LIMIT_S
    )


def _fit_arena(
    problem: Problem, search: SearchOptions, limit_s: float, start: Schedule | None, watch: Watch
) -> Fitted:
    """Solve by the method, if necessary with less RAM, until the addresses of the plan fit."""
    from poetmodel.solver import fit_arena

    def solve_problem(
        arena_problem: Problem, *, time_limit: float, start: Schedule | None = None
    ) -> SolveResult:
        request = search.start().restart(time_limit)
        return solve_by_method(arena_problem, request, start, watch=watch)

    mode = problem.transfer_mode
    return fit_arena(problem, mode=mode, solve=solve_problem, time_limit=limit_s, start=start)


def _explain(result: SolveResult, *, threads: int) -> Explanation | None:
    """Return why a result of the default method is infeasible; None if it is not, or on Ctrl-C."""
    if result.status != Status.INFEASIBLE or result.method != DEFAULT:
        return None
    from poetmodel.solver.sensitivity.explanation import EXPLANATION_FRACTION, explain_infeasible

    limit_s = EXPLANATION_FRACTION * (result.time_limit_s or 1.0)
    try:
        return explain_infeasible(result, time_limit=limit_s, threads=threads)
    except KeyboardInterrupt:  # the result stays without an explanation
        return None


def _find_used_limits(
    result: SolveResult, job: Job | None, *, threads: int
) -> tuple[UsedLimit, ...]:
    """Return whether each limit of a job's step binds, by a solve without it; () without a job."""
    if job is None:
        return ()
    from poetmodel.solver.sensitivity import find_used_limits

    limit_s = LIMITS_TIME_RATIO * (result.time_limit_s or 1.0)
    return tuple(find_used_limits(result, time_limit=limit_s, threads=threads))
