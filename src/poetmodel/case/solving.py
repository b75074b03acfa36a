"""Solve a case: tiles, addresses, the job of its steps, and reasons for infeasibility."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.baselines.registry import DEFAULT
from poetmodel.case.tiles import StepTiles
from poetmodel.errors import MethodNotApplicableError, VerificationError
from poetmodel.plan.alignment import ALIGNMENT
from poetmodel.result import SolveResult, Status, Termination

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from poetmodel.case.case import Case
    from poetmodel.case.checked_plan import CheckedPlan
    from poetmodel.device import StorageMode
    from poetmodel.graph import Graph
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.problem import Problem
    from poetmodel.problem.job import Job
    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import Request
    from poetmodel.solver.sensitivity import Explanation, UsedLimit
    from poetmodel.solver.tile_trials import ChosenTiles

MIN_TIME_LIMIT_S: Final = 1e-3
"""Minimum time limit of a solve that follows others [s]."""
INTERRUPTED_RATIO: Final = 0.1
"""Fraction of the remaining time for what follows trials of tile sizes that Ctrl-C or the progress
callback ended: a solve then only has to plan the schedule that the trials found."""
LIMITS_TIME_RATIO: Final = 0.25
"""Time to decide which limits bind, as a fraction of the time limit of the step's solve."""
INTERRUPTED_MESSAGE: Final = "interrupted before a schedule was found"
"""Message for Ctrl-C before a schedule is found."""
ADDRESSES_NOTE: Final = "these changes ignore addresses: --arena may need more RAM"
"""Note on the hints of an explanation, if addresses were requested."""


@dataclass(frozen=True, kw_only=True)
class LoadedCase:
    """A case in memory: the problem of its graph, or of each tile size of its step."""

    case: Case
    """The case; its RAM budget is a size if it is in tiles."""
    problem: Problem
    """The problem of the graph, or of the first tile size."""
    tiles: StepTiles | None = None
    """The tile sizes to try; None for a graph."""
    job: Job | None = None

    @classmethod
    def read(
        cls,
        case: Case,
        *,
        read_graph: Callable[[], Graph] | None = None,
        job: Job | None = None,
    ) -> LoadedCase:
        """Read graph and costs of a case; `read_graph` replaces its own reader of graphs."""
        tiles = StepTiles.find(case)
        case = replace(case, limits=case.absolute_limits())
        if tiles is not None:
            graph = tiles.candidates[0][1].graph
        elif read_graph is not None:
            graph = read_graph()
        else:
            graph = case.load_graph()
        return cls(case=case, problem=_state_problem(case, graph, job), tiles=tiles, job=job)

    def problem_of(self, step: LoweredStep) -> Problem:
        """Return the problem of a candidate of `tiles`."""
        graph = step.graph
        if graph is self.problem.graph:
            return self.problem
        return _state_problem(self.case, graph, self.job)


def _state_problem(case: Case, graph: Graph, job: Job | None) -> Problem:
    return replace(case, limits=case.limits.with_job(job, graph)).state_problem(graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """How tensors get addresses in one block of RAM."""

    mode: StorageMode | None = None
    """How transfers run; None for the mode of the problem."""
    alignment: int = ALIGNMENT
    """Addresses are multiples of it [B]."""
    available_bytes: int | None = None
    """As for `fit_arena`."""
    time_ratio: float = 1.0
    """Fraction of the remaining time; the rest is for later work of the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """What is left to solve after the trials of tile sizes."""

    problem: Problem
    request: Request
    """The search; its limit is the time that is left."""
    tiles: ChosenTiles | None = None
    """The chosen tile size, with the step; None for a graph."""
    start: Schedule | None = None
    """A first schedule."""
    result: SolveResult | None = None
    """The result, if nothing is left but addresses; None if the problem is still to solve."""

    def require_tiles(self) -> ChosenTiles:
        """Return the tiles of a step in memory, which always has them, if only the whole step."""
        if self.tiles is None:
            raise ValueError(self.problem.graph.name)
        return self.tiles


class Stages:
    """What a caller of `solve_case` adds to its stages: by default nothing."""

    def excess_bytes(self, step: LoweredStep, result: SolveResult) -> int:  # noqa: ARG002
        """Return the bytes by which the program of a trial of tiles exceeds a limit; 0 if none."""
        return 0

    def settle(self, remainder: Remainder) -> Remainder:
        """Return what is solved after the trials; an error ends the case before its solve."""
        return remainder


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseAnswer:
    """The result of a case, with its tiles, addresses, explanation and binding limits."""

    loaded: LoadedCase
    result: SolveResult
    tiles: ChosenTiles | None = None
    """The tile sizes that were tried; None for a graph."""
    planned: CheckedPlan | None = None
    """Plan and addresses with their checks; None without a schedule, or if none were requested."""
    explanation: Explanation | None = None
    """Reasons for infeasibility, if it is proven."""
    used_limits: tuple[UsedLimit, ...] = ()
    """Limits of a step of the job, and whether they bind."""

    def require_plan(self) -> CheckedPlan:
        """Return plan and addresses, which have no violations.

        Raises `NoScheduleError` without a schedule, `VerificationError` for violations.
        """
        self.result.require_schedule()
        if self.planned is None or self.planned.violations:
            source = self.result if self.planned is None else self.planned
            raise VerificationError(source.violations)
        return self.planned

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

        case, result = self.loaded.case, self.result
        is_auto = case.tile == "auto"
        if self.loaded.tiles is not None and self.tiles is not None:
            case, hint = self.loaded.tiles.choose(self.tiles.tile_bytes, self.tiles.step)
            yield hint
        if case.is_step_file and result.status == Status.INFEASIBLE:
            tiles_text = (
                "without tiles" if case.tile in (None, "none") else f"in tiles of {case.tile}"
            )
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
    loaded: LoadedCase,
    request: Request | None = None,
    *,
    start: Schedule | None = None,
    placing: Placing | None = None,
    stages: Stages | None = None,
    explains: bool = False,
) -> CaseAnswer:
    """Choose tiles, solve by the method, assign addresses, also until Ctrl-C.

    `request` is a search that has started; None starts that of the case. With `placing`, the plan
    has addresses. With `explains`, the answer has the reasons for infeasibility, and which limits
    of a job bind.
    """
    request = loaded.case.search.start() if request is None else request
    stages = Stages() if stages is None else stages
    rest, planned = stages.settle(_try_tiles(loaded, request, stages, start)), None
    if placing is not None:
        result, planned = _place_tensors(rest, placing)
    elif rest.result is not None:
        result = rest.result
    else:
        result = solve_by_method(rest.problem, rest.request, rest.start)
    result = replace(result, time_limit_s=request.time_limit_s)
    explanation: Explanation | None = None
    used_limits: tuple[UsedLimit, ...] = ()
    if explains:
        explanation = _explain(result, threads=request.threads, has_addresses=placing is not None)
        used_limits = _find_used_limits(result, loaded.job, threads=request.threads)
    return CaseAnswer(
        loaded=loaded,
        result=result,
        tiles=rest.tiles,
        planned=planned,
        explanation=explanation,
        used_limits=used_limits,
    )


def solve_by_method(
    problem: Problem, request: Request, start: Schedule | None = None
) -> SolveResult:
    """Solve a problem by the method of a request; return the result also after Ctrl-C.

    Only the default method uses `start`. If the method does not apply, returns its partial result,
    or raises `MethodNotApplicableError` without one.
    """
    try:
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


def _try_tiles(
    loaded: LoadedCase, request: Request, stages: Stages, start: Schedule | None
) -> Remainder:
    """Solve each candidate tile size; return what is left for that of smallest value."""
    from poetmodel.solver.tile_trials import ChosenTiles, find_cheapest_tiles

    step = loaded.case.step
    if loaded.tiles is None:
        tiles = None if step is None else ChosenTiles(tile_bytes=None, step=step)
        return Remainder(problem=loaded.problem, request=request, tiles=tiles, start=start)
    chosen = find_cheapest_tiles(
        loaded.tiles.candidates,
        loaded.problem_of,
        request,
        excess_bytes=stages.excess_bytes,
        solve=solve_by_method,
    )
    result = chosen.result
    is_final = result is not None and (
        chosen.is_interrupted or result.termination == Termination.PROVED
    )
    if chosen.trials:
        ratio = INTERRUPTED_RATIO if chosen.is_interrupted else 1.0
        limit_s = max(ratio * request.remaining_s(), MIN_TIME_LIMIT_S)
        request = request.restart(limit_s, request.on_progress)
    return Remainder(
        problem=loaded.problem if result is None else result.problem,
        request=request,
        tiles=chosen,
        start=start if result is None else result.schedule,
        result=result if is_final else None,
    )


def _place_tensors(rest: Remainder, placing: Placing) -> tuple[SolveResult, CheckedPlan | None]:
    """Solve by the method, if necessary with less RAM, until the addresses of the plan fit."""
    from poetmodel.case.checked_plan import CheckedPlan
    from poetmodel.solver.fitting import fit_arena

    request = rest.request
    # After Ctrl-C in trials, the limit is already a small part of the time.
    time_ratio = 1.0 if rest.tiles and rest.tiles.is_interrupted else placing.time_ratio

    def solve_problem(
        problem: Problem, *, time_limit: float, start: Schedule | None = None
    ) -> SolveResult:
        limited_request = request.restart(time_limit, request.on_progress)
        return solve_by_method(problem, limited_request, start)

    result, plan, arena = fit_arena(
        rest.problem,
        mode=placing.mode or rest.problem.transfer_mode,
        alignment=placing.alignment,
        solve=solve_problem,
        time_limit=max(time_ratio * request.remaining_s(), MIN_TIME_LIMIT_S),
        available_bytes=placing.available_bytes,
        start=rest.start,
    )
    return result, None if plan is None else CheckedPlan.of_plan(rest.problem, plan, arena)


def _explain(result: SolveResult, *, threads: int, has_addresses: bool) -> Explanation | None:
    """Return why a result of the default method is infeasible; None if it is not, or on Ctrl-C."""
    if result.status != Status.INFEASIBLE or result.method != DEFAULT:
        return None
    from poetmodel.solver.sensitivity.explanation import EXPLANATION_FRACTION, explain_infeasible

    limit_s = EXPLANATION_FRACTION * (result.time_limit_s or 1.0)
    try:
        explanation = explain_infeasible(result, time_limit=limit_s, threads=threads)
    except KeyboardInterrupt:  # the result stays without an explanation
        return None
    if has_addresses and explanation.working_remedies:
        return replace(explanation, notes=(*explanation.notes, ADDRESSES_NOTE))
    return explanation


def _find_used_limits(
    result: SolveResult, job: Job | None, *, threads: int
) -> tuple[UsedLimit, ...]:
    """Return whether each limit of a job's step binds, by a solve without it; () without a job."""
    if job is None:
        return ()
    from poetmodel.solver.sensitivity import find_used_limits

    limit_s = LIMITS_TIME_RATIO * (result.time_limit_s or 1.0)
    return tuple(find_used_limits(result, time_limit=limit_s, threads=threads))
