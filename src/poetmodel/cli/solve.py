"""``poetmodel solve``: find a schedule with minimum energy, time, RAM or writes, with a bound."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from poetmodel.baselines.registry import DEFAULT
from poetmodel.cli import options
from poetmodel.cli.failures import (
    print_device_ram_warnings,
    print_errors,
    print_warnings,
    result_exit_status,
)
from poetmodel.cli.inputs import (
    check_outputs,
    device_warnings,
    find_auto_tiles,
    read_costs,
    read_graph,
)
from poetmodel.cli.job import JobOptions, JobResult, make_job_result
from poetmodel.cli.output import fact_table, live_line, print_json, print_written, show
from poetmodel.cli.plan import arena_facts, save_plan_and_map
from poetmodel.errors import InputError, MethodNotApplicableError
from poetmodel.problem import Limits
from poetmodel.report.presenter import to_json_object
from poetmodel.solver.request import SearchOptions
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from poetmodel.cli.inputs import AutoTiles
    from poetmodel.graph import Graph
    from poetmodel.plan import Arena
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule
    from poetmodel.solver import Fitted
    from poetmodel.solver.request import OnProgress, SolveKeywords, SolveProgress
    from poetmodel.solver.sensitivity import Explanation
    from poetmodel.solver.tile_trials import ChosenTiles

MIN_NODES: Final = 2
"""Minimum number of nodes of a graph that has decisions."""

MIN_TIME_LIMIT_S: Final = 1e-3
"""Minimum time limit of the solve after trials of tile sizes [s]."""

INTERRUPTED_MESSAGE: Final = "interrupted before a schedule was found"
"""Message for Ctrl-C before a schedule is found."""

ADDRESSES_NOTE: Final = "these changes ignore addresses: --arena may need more RAM"
"""Note on the hints of an explanation, if addresses were requested."""


@options.group
class FileOptions:
    """Output files, written if a schedule was found, and whether the plan has addresses."""

    out: Path | None = options.output_option(
        None, "--out FILE", "Write the schedule to this file, *.schedule.json."
    )
    plan: Path | None = options.output_option(
        None, "--plan FILE", "Write the program that the device executes, *.plan.json."
    )
    arena: bool = options.output_option(
        False,
        "--arena",
        "With --plan: assign fixed offsets in one block of RAM; if the block exceeds the RAM "
        "budget, solve again with a smaller budget.",
    )
    plot: Path | None = options.output_option(
        None,
        "--plot FILE",
        "Draw the map of stages: .html, .svg, .png, .pdf.",
    )


@options.group
class SolveOutputOptions(options.OutputOptions):
    """Output settings, including the solver's log."""

    verbose: bool = options.output_option(False, "--verbose", "Print the solver's log on stderr.")


@options.command("poetmodel solve mlp --device mkr1000 --ram 70% --out mlp.json")
def solve(
    context: typer.Context,
    source: options.GraphOptions,
    costing: options.CostOptions,
    limits: Limits,
    own: options.ConstraintOptions,
    job_options: JobOptions,
    search: SearchOptions,
    files: FileOptions,
    output: SolveOutputOptions,
) -> None:
    """Find the training schedule with minimum energy (or --minimize) within the limits."""
    from poetmodel.problem.io import state_problem

    start_s = context.obj or time.monotonic()
    if files.arena and files.plan is None:
        raise InputError("--arena: addresses are part of a plan; give --plan FILE too")
    requested_tile = source.tile
    auto_tiles = find_auto_tiles(source, costing, limits, own.files)
    limits = source.case(limits=limits).absolute_limits()
    graph = read_graph(source) if auto_tiles is None else auto_tiles.candidates[0][1].graph
    _check_nodes(graph)
    job = job_options.to_job(limits)

    @cache
    def make_problem(graph: Graph) -> Problem:
        costs = read_costs(graph, costing)
        return state_problem(graph, costs, limits.with_job(job, graph), own.files)

    problem = make_problem(graph)
    check_outputs(
        ("--out", files.out),
        ("--plan", files.plan),
        ("--plot", files.plot),
        inputs=(
            source.model,
            source.graph,
            costing.device,
            costing.profile,
            *own.files,
        ),
    )
    if problem.costs.device is not None:
        print_warnings(device_warnings(problem.costs.device))
    read_s = time.monotonic() - start_s
    chosen_tiles, limit_s = None, search.time_limit_s
    if auto_tiles is not None:
        chosen_tiles, limit_s = _choose_tiles(
            auto_tiles, make_problem, search, show_progress=not output.json
        )
        source = replace(
            source, tile=auto_tiles.print_choice(chosen_tiles.tile_bytes, chosen_tiles.step)
        )
        problem = make_problem(chosen_tiles.step.graph)
    tile_result = None if chosen_tiles is None else chosen_tiles.result
    result, fitted = _solve_problem(
        problem, tile_result, search, limit_s, arena=files.arena, show_progress=not output.json
    )
    if chosen_tiles is not None:
        result = replace(result, time_limit_s=search.time_limit_s)
    if output.verbose and result.log:
        print(result.log.rstrip(), file=sys.stderr)
    if result.reduction:
        print_warnings([result.reduction])
    explanation = _explain_result(result, threads=search.threads)
    if files.arena and explanation is not None and explanation.working_remedies:
        explanation = replace(explanation, notes=(*explanation.notes, ADDRESSES_NOTE))
    job_result = None if job is None else make_job_result(job, result, threads=search.threads)
    _save_and_print(
        result,
        job_result,
        explanation,
        chosen_tiles,
        arena=None if fitted is None else fitted.arena,
        out=files.out,
        json=output.json,
        start_s=start_s,
        read_s=read_s,
    )
    print_warnings(_fit_hints(source, result, requested_tile), kind="hint")
    for path in save_plan_and_map(result, plan=files.plan, plot=files.plot, fitted=fitted):
        print_written(path)
    _print_reason(result, explanation)
    raise typer.Exit(result_exit_status(result))


def _check_nodes(graph: Graph) -> None:
    if len(graph.nodes) < MIN_NODES:
        raise InputError(
            f"graph {graph.name!r} has 1 node: nothing to keep, recompute or page; "
            f"solve needs at least {MIN_NODES}"
        )


def _choose_tiles(
    auto_tiles: AutoTiles,
    make_problem: Callable[[Graph], Problem],
    search: SearchOptions,
    *,
    show_progress: bool,
) -> tuple[ChosenTiles, float]:
    """Solve each candidate tile size; return that of smallest value, and the remaining time [s].

    The remaining time is 0 if the returned schedule is proved optimal, or after Ctrl-C.
    """
    from poetmodel.result import Termination
    from poetmodel.solver.request import Request
    from poetmodel.solver.tile_trials import find_cheapest_tiles

    clock = Request(time_limit_s=search.time_limit_s, gap=search.gap)

    def solve_trial(
        problem: Problem, *, time_limit: float, on_progress: OnProgress, **_: object
    ) -> SolveResult:
        return _run_method(
            problem, search, time_limit, show_progress=show_progress, on_progress=on_progress
        )

    chosen_tiles = find_cheapest_tiles(
        auto_tiles.candidates, lambda step: make_problem(step.graph), clock, solve=solve_trial
    )
    result = chosen_tiles.result
    is_final = result is not None and result.termination == Termination.PROVED
    return chosen_tiles, 0.0 if is_final or chosen_tiles.is_interrupted else max(
        clock.remaining_s(), MIN_TIME_LIMIT_S
    )


def _solve_problem(
    problem: Problem,
    known_result: SolveResult | None,
    search: SearchOptions,
    limit_s: float,
    *,
    arena: bool,
    show_progress: bool,
) -> tuple[SolveResult, Fitted | None]:
    """Solve a problem within `limit_s` [s], from the schedule of a known result if there is one.

    The second value is None without `arena`. If `limit_s` is 0, return the known result, if any.
    """
    start = None if known_result is None else known_result.schedule
    if arena:
        fitted = _fit_arena(
            problem, search, limit_s or MIN_TIME_LIMIT_S, show_progress=show_progress, start=start
        )
        return fitted.result, fitted
    if known_result is not None and limit_s <= 0:
        return known_result, None
    return _run_method(
        problem, search, limit_s or MIN_TIME_LIMIT_S, show_progress=show_progress, start=start
    ), None


def _fit_hints(
    source: options.GraphOptions, result: SolveResult, requested_tile: str | None
) -> Iterator[str]:
    """Yield hints for an infeasible step file, and for a network too large for its device."""
    from poetmodel.device.ram import find_whole_step
    from poetmodel.result import Status

    if source.case().is_step_file and result.status == Status.INFEASIBLE:
        tiles_text = (
            "without tiles" if source.tile in (None, "none") else f"in tiles of {source.tile}"
        )
        tile_hint = (
            ""
            if requested_tile == "auto"
            else "; --tile auto searches for tiles with which the step fits"
        )
        yield f"proved for the step {tiles_text}{tile_hint}"
    device_ram, device = result.device_ram, result.problem.costs.device
    if (
        device_ram is None
        or device_ram.fits
        or not device_ram.resident_bytes
        or source.model is None
    ):
        return
    whole_step = find_whole_step(source.model, source.variant, device, paging=result.problem.paging)
    if whole_step is not None:
        yield (
            f"with --state {whole_step.state} --in-place parameters and gradients are also "
            f"planned: the step then takes at least {format_bytes(whole_step.min_bytes)} of RAM "
            "in all"
        )


def _fit_arena(
    problem: Problem,
    search: SearchOptions,
    limit_s: float,
    *,
    show_progress: bool,
    start: Schedule | None,
) -> Fitted:
    """Solve by the method, if necessary with less RAM, until the addresses of the plan fit.

    All solves, plans and addresses together may take `limit_s` [s].
    """
    from poetmodel.solver import fit_arena

    def solve_problem(
        arena_problem: Problem, *, time_limit: float, start: Schedule | None = None
    ) -> SolveResult:
        return _run_method(
            arena_problem, search, time_limit, show_progress=show_progress, start=start
        )

    mode = problem.transfer_mode
    return fit_arena(problem, mode=mode, solve=solve_problem, time_limit=limit_s, start=start)


def _run_method(
    problem: Problem,
    search: SearchOptions,
    limit_s: float,
    *,
    show_progress: bool,
    start: Schedule | None = None,
    on_progress: OnProgress | None = None,
) -> SolveResult:
    """Solve a problem by the method and return the result, also after Ctrl-C.

    Only the default method uses `start`. `on_progress` stops the solve by returning False. If the
    method does not apply, returns its partial result.
    """
    try:
        with live_line(problem, enabled=show_progress) as update_line:

            def report_progress(progress: SolveProgress) -> bool | None:
                if update_line is not None:
                    update_line(progress)
                return None if on_progress is None else on_progress(progress)

            callback = update_line if on_progress is None else report_progress
            keywords: SolveKeywords = {
                "formulation": search.formulation,
                "backend": search.backend,
                "time_limit": limit_s,
                "gap": search.gap,
                "threads": search.threads,
                "on_progress": callback,
                "solver_options": search.solver_options,
            }
            if search.method == DEFAULT:
                from poetmodel.solver import solve as solve_optimally

                keywords["start"] = start
                return solve_optimally(problem, **keywords)
            from poetmodel.baselines import run

            return run(problem, search.method, **keywords)
    except MethodNotApplicableError as error:
        partial_result: SolveResult | None = error.result
        if partial_result is None:
            raise
        return partial_result
    except KeyboardInterrupt:  # outside the search, which handles Ctrl-C itself
        from poetmodel.result import SolveResult, Status, Termination

        return SolveResult(
            problem=problem,
            status=Status.UNKNOWN,
            termination=Termination.INTERRUPTED,
            reason=INTERRUPTED_MESSAGE,
            method=search.method,
            time_limit_s=limit_s,
            requested_gap=search.gap,
        )


def _explain_result(result: SolveResult, *, threads: int) -> Explanation | None:
    """Return the explanation of an infeasible result of the default method, else None."""
    from poetmodel.result import Status

    if result.status != Status.INFEASIBLE or result.method != DEFAULT:
        return None
    from poetmodel.solver.sensitivity.explanation import EXPLANATION_FRACTION, explain_infeasible

    limit_s = EXPLANATION_FRACTION * (result.time_limit_s or 1.0)
    try:
        return explain_infeasible(result, time_limit=limit_s, threads=threads)
    except KeyboardInterrupt:  # the result stays without an explanation
        return None


def _save_and_print(
    result: SolveResult,
    job_result: JobResult | None,
    explanation: Explanation | None,
    chosen_tiles: ChosenTiles | None,
    *,
    arena: Arena | None,
    out: Path | None,
    json: bool,
    start_s: float,
    read_s: float,
) -> None:
    """Write the schedule file, and print the result as JSON or tables.

    A failed write is reported after the result is printed. `start_s` is on the monotonic clock [s].
    """
    write_error: InputError | None = None
    if out is not None and result.schedule is not None:
        try:
            result.save(out)
        except InputError as error:
            write_error = error
    if json:
        print_json({**result.to_dict(), **_extra_values(job_result, explanation, chosen_tiles)})
    elif result.schedule is not None:
        from poetmodel.cli.summary import result_table

        table = result_table(result, total_s=time.monotonic() - start_s, read_s=read_s)
        show(table, *_extra_tables(result, job_result, chosen_tiles, arena))
    elif job_result is not None:
        print_warnings(job_result.infeasibility_notes())
    print_device_ram_warnings(result.device_ram)
    if write_error is not None:
        raise write_error
    if out is not None and result.schedule is not None:
        print_written(out)


def _extra_values(
    job_result: JobResult | None, explanation: Explanation | None, chosen_tiles: ChosenTiles | None
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if chosen_tiles is not None:
        values["tile_bytes"] = chosen_tiles.tile_bytes
        values["tile_trials"] = [trial.to_dict() for trial in chosen_tiles.trials]
    if job_result is not None:
        values["job"] = to_json_object(job_result.facts())
    if explanation is not None:
        values["infeasible"] = explanation.to_dict()
    return values


def _extra_tables(
    result: SolveResult,
    job_result: JobResult | None,
    chosen_tiles: ChosenTiles | None,
    arena: Arena | None,
) -> Iterator[Table]:
    from poetmodel.cli.summary import tile_facts

    if job_result is not None:
        yield fact_table("The whole job", job_result.facts())
    if arena is not None:
        yield fact_table("Addresses", arena_facts(arena))
    if chosen_tiles is not None and chosen_tiles.trials:
        yield fact_table(
            "Tiles", tile_facts(chosen_tiles.tile_bytes, chosen_tiles.trials, result.problem)
        )


def _print_reason(result: SolveResult, explanation: Explanation | None) -> None:
    from poetmodel.result import Status, Termination

    if result.violations:
        message = (
            f"the schedule of formulation {result.formulation!r} violates a rule or a limit; "
            "use another formulation"
        )
        print_errors([message, *result.violations])
    elif result.status == Status.INFEASIBLE:
        reason = result.reason if explanation is None else explanation.whole_reason
        print_errors([f"infeasible: {reason or 'no schedule meets the limits'}"])
        print_warnings(() if explanation is None else explanation.hints(), kind="hint")
    elif result.schedule is None:
        is_interrupted = result.termination == Termination.INTERRUPTED
        reason = INTERRUPTED_MESSAGE if is_interrupted else result.reason
        print_errors([reason or "no schedule was found within the limit"])
