"""``poetmodel solve``: the schedule of least energy, with its proof."""

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
from poetmodel.cli.failures import print_faults, print_room_warnings, print_warnings, status_of
from poetmodel.cli.inputs import (
    auto_tiles,
    check_outputs,
    device_warnings,
    is_step_file,
    ram_in_bytes,
    read_costs,
    read_graph,
)
from poetmodel.cli.job import JobOptions, Reply, answer
from poetmodel.cli.output import figures, live_line, print_json, print_written, show
from poetmodel.cli.plan import arena_facts, default_mode, save_beside
from poetmodel.errors import InputError, MethodNotApplicableError
from poetmodel.report.presenter import document
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
"""Fewest nodes that leave anything to decide."""

SHORTEST_S: Final = 1e-3
"""Time for a solve after the trials of tiles have used up all of it [s]."""

TOO_EARLY: Final = "interrupted before a schedule was found"
"""The message of Ctrl-C before there is a schedule."""

WITHOUT_ADDRESSES: Final = "these changes leave addresses aside: with --arena it may take more RAM"
"""Note on hints where addresses were asked for."""


@options.group
class FileOptions:
    """The files that are written, if there is a schedule."""

    out: Path | None = options.output(
        None, "--out FILE", "Write the schedule to this file, *.schedule.json."
    )
    plan: Path | None = options.output(
        None, "--plan FILE", "Write the program that the device runs, *.plan.json."
    )
    arena: bool = options.output(
        False,
        "--arena",
        "With --plan: give all that is in RAM a fixed offset; where the block is above the RAM "
        "budget, solve again with less.",
    )
    plot: Path | None = options.output(
        None,
        "--plot FILE",
        "Draw the map of stages: .html, .svg, .png, .pdf.",
    )


@options.group
class SolveOutputOptions(options.OutputOptions):
    """Output settings, with the solver's log."""

    verbose: bool = options.output(False, "--verbose", "Print the solver's log on stderr.")


@options.command("poetmodel solve mlp --device mkr1000 --ram 70% --out mlp.json")
def solve(
    context: typer.Context,
    source: options.GraphOptions,
    costing: options.CostOptions,
    limits: options.LimitOptions,
    whole: JobOptions,
    search: options.SearchOptions,
    files: FileOptions,
    output: SolveOutputOptions,
) -> None:
    """Find the training schedule that needs the least energy within the limits."""
    called_s = context.obj or time.monotonic()
    if files.arena and files.plan is None:
        raise InputError("--arena: addresses are part of a plan; give --plan FILE too")
    wanted_tile = source.tile
    auto = auto_tiles(source, costing, limits)
    limits = ram_in_bytes(source, limits)
    graph = read_graph(source) if auto is None else auto.candidates[0][1].graph
    _check_nodes(graph)
    job = whole.read(limits)

    @cache
    def stated(graph: Graph) -> Problem:
        return limits.problem(
            graph,
            read_costs(graph, costing),
            deadline=None if job is None else job.deadline_s(graph),
            energy_budget=None if job is None else job.energy_budget_j(graph),
        )

    problem = stated(graph)
    check_outputs(
        ("--out", files.out),
        ("--plan", files.plan),
        ("--plot", files.plot),
        inputs=(
            source.model,
            source.graph,
            costing.device,
            costing.profile,
            *(limits.constraints or ()),
        ),
    )
    if problem.costs.device is not None:
        print_warnings(device_warnings(problem.costs.device))
    read_s = time.monotonic() - called_s
    tiles, limit_s = None, search.time_limit
    if auto is not None:
        tiles, limit_s = _chosen_tiles(auto, stated, search, shown=not output.json)
        source = replace(source, tile=auto.print_choice(tiles.tile_bytes, tiles.step))
        problem = stated(tiles.step.graph)
    known = None if tiles is None else tiles.result
    result, fitted = _solved(
        problem, known, search, limit_s, arena=files.arena, shown=not output.json
    )
    if tiles is not None:
        result = replace(result, time_limit_s=search.time_limit)
    if output.verbose and result.log:
        print(result.log.rstrip(), file=sys.stderr)
    if result.reduction:
        print_warnings([result.reduction])
    explanation = _explain(result, threads=search.threads)
    if files.arena and explanation is not None and explanation.in_the_way:
        explanation = replace(explanation, notes=(*explanation.notes, WITHOUT_ADDRESSES))
    reply = None if job is None else answer(job, result, threads=search.threads)
    _deliver(
        result,
        reply,
        explanation,
        tiles,
        arena=None if fitted is None else fitted.arena,
        out=files.out,
        json=output.json,
        called_s=called_s,
        read_s=read_s,
    )
    print_warnings(_remedies(source, result, wanted_tile), kind="hint")
    for path in save_beside(result, plan=files.plan, plot=files.plot, fitted=fitted):
        print_written(path)
    _print_reason(result, explanation)
    raise typer.Exit(status_of(result))


def _check_nodes(graph: Graph) -> None:
    if len(graph.nodes) < MIN_NODES:
        raise InputError(
            f"graph {graph.name!r} has 1 node: nothing to keep, recompute or page; "
            f"solve needs at least {MIN_NODES}"
        )


def _chosen_tiles(
    auto: AutoTiles,
    stated: Callable[[Graph], Problem],
    search: options.SearchOptions,
    *,
    shown: bool,
) -> tuple[ChosenTiles, float]:
    """Return the size of tiles with the best schedule of the method, and the time left [s].

    No time is left if its schedule is proved, or after Ctrl-C.
    """
    from poetmodel.result import Termination
    from poetmodel.solver.request import Request
    from poetmodel.solver.tile_trials import cheapest_tiles

    clock = Request(time_limit_s=search.time_limit, gap=search.gap)

    def tried(
        problem: Problem, *, time_limit: float, on_progress: OnProgress, **_: object
    ) -> SolveResult:
        return _run(problem, search, time_limit, shown=shown, watch=on_progress)

    tiles = cheapest_tiles(auto.candidates, lambda step: stated(step.graph), clock, solve=tried)
    result = tiles.result
    is_final = result is not None and result.termination == Termination.PROVED
    return tiles, 0.0 if is_final or tiles.interrupted else max(clock.remaining_s(), SHORTEST_S)


def _solved(
    problem: Problem,
    known: SolveResult | None,
    search: options.SearchOptions,
    limit_s: float,
    *,
    arena: bool,
    shown: bool,
) -> tuple[SolveResult, Fitted | None]:
    """Return the result of the method, from a known one on; with addresses if `arena`.

    Without time left the known one is returned.
    """
    start = None if known is None else known.schedule
    if arena:
        fitted = _fit(problem, search, limit_s or SHORTEST_S, shown=shown, start=start)
        return fitted.result, fitted
    if known is not None and limit_s <= 0:
        return known, None
    return _run(problem, search, limit_s or SHORTEST_S, shown=shown, start=start), None


def _remedies(
    source: options.GraphOptions, result: SolveResult, wanted_tile: str | None
) -> Iterator[str]:
    """Yield what makes a step fit: its state in the graph of a network, tiles of a step file."""
    from poetmodel.device.ram import find_whole_step
    from poetmodel.result import Status

    name = source.model if source.graph is None else source.graph
    if is_step_file(name) and result.status == Status.INFEASIBLE:
        tiles = "whole" if source.tile in (None, "none") else f"in tiles of {source.tile}"
        other = "" if wanted_tile == "auto" else "; --tile auto looks for tiles in which it fits"
        yield f"proved of the step {tiles}{other}"
    room, device = result.room, result.problem.costs.device
    if room is None or room.fits or not room.resident_bytes or source.model is None:
        return
    whole = find_whole_step(source.model, source.shape, device, paging=result.problem.paging)
    if whole is not None:
        yield (
            f"with --state {whole.state} --in-place parameters and gradients are planned too: the "
            f"step then takes at least {format_bytes(whole.min_bytes)} of RAM in all"
        )


def _fit(
    problem: Problem,
    search: options.SearchOptions,
    limit_s: float,
    *,
    shown: bool,
    start: Schedule | None,
) -> Fitted:
    """Return the result of the method with a plan and addresses that fit."""
    from poetmodel.solver import fit_arena

    def solved(stated: Problem, *, time_limit: float, start: Schedule | None = None) -> SolveResult:
        return _run(stated, search, time_limit, shown=shown, start=start)

    mode, _ = default_mode(problem.costs.device, problem.deadline_counts)
    return fit_arena(problem, mode=mode, solve=solved, time_limit=limit_s, start=start)


def _run(
    problem: Problem,
    search: options.SearchOptions,
    limit_s: float,
    *,
    shown: bool,
    start: Schedule | None = None,
    watch: OnProgress | None = None,
) -> SolveResult:
    """Return the result of the method, also where it does not apply or is interrupted.

    `watch` observes the solve beside the live line, and ends it where it returns False.
    """
    try:
        with live_line(problem, wanted=shown) as line:

            def both(progress: SolveProgress) -> bool | None:
                if line is not None:
                    line(progress)
                return None if watch is None else watch(progress)

            on_progress = line if watch is None else both
            stated: SolveKeywords = {
                "formulation": None if search.formulation is None else search.formulation.value,
                "backend": search.backend,
                "time_limit": limit_s,
                "gap": search.gap,
                "threads": search.threads,
                "on_progress": on_progress,
                "solver_options": search.solver_options,
            }
            if search.method == DEFAULT:
                from poetmodel.solver import solve as find_best

                stated["start"] = start
                return find_best(problem, **stated)
            from poetmodel.baselines import run

            return run(problem, search.method, **stated)
    except MethodNotApplicableError as error:
        found: SolveResult | None = error.result
        if found is None:
            raise
        return found
    except KeyboardInterrupt:  # before or after the search, which handles its own
        from poetmodel.result import SolveResult, Status, Termination

        return SolveResult(
            problem=problem,
            status=Status.UNKNOWN,
            termination=Termination.INTERRUPTED,
            reason=TOO_EARLY,
            method=search.method,
            time_limit_s=limit_s,
            requested_gap=search.gap,
        )


def _explain(result: SolveResult, *, threads: int) -> Explanation | None:
    """Return the explanation of an infeasible problem, with remedies; None for other results."""
    from poetmodel.result import Status

    if result.status != Status.INFEASIBLE or result.method != DEFAULT:
        return None
    from poetmodel.solver.sensitivity.explanation import SHARE, explain_infeasible

    limit_s = SHARE * (result.time_limit_s or 1.0)
    try:
        return explain_infeasible(result, time_limit=limit_s, threads=threads)
    except KeyboardInterrupt:  # the result is known and stays
        return None


def _deliver(
    result: SolveResult,
    reply: Reply | None,
    explanation: Explanation | None,
    tiles: ChosenTiles | None,
    *,
    arena: Arena | None,
    out: Path | None,
    json: bool,
    called_s: float,
    read_s: float,
) -> None:
    """Write the file and print the result, also where the file cannot be written."""
    unwritten: InputError | None = None
    if out is not None and result.schedule is not None:
        try:
            result.save(out)
        except InputError as error:
            unwritten = error
    if json:
        print_json({**result.to_dict(), **_more_values(reply, explanation, tiles)})
    elif result.schedule is not None:
        from poetmodel.cli.summary import result_table

        table = result_table(result, total_s=time.monotonic() - called_s, read_s=read_s)
        show(table, *_more_tables(result, reply, tiles, arena))
    elif reply is not None:
        print_warnings(reply.sentences())
    print_room_warnings(result.room)
    if unwritten is not None:
        raise unwritten
    if out is not None and result.schedule is not None:
        print_written(out)


def _more_values(
    reply: Reply | None, explanation: Explanation | None, tiles: ChosenTiles | None
) -> dict[str, Any]:
    """Return what JSON has beside the content of the schedule file."""
    values: dict[str, Any] = {}
    if tiles is not None:
        values["tile_bytes"] = tiles.tile_bytes
        values["tile_trials"] = [trial.to_dict() for trial in tiles.trials]
    if reply is not None:
        values["job"] = document(reply.facts())
    if explanation is not None:
        values["infeasible"] = explanation.to_dict()
    return values


def _more_tables(
    result: SolveResult, reply: Reply | None, tiles: ChosenTiles | None, arena: Arena | None
) -> Iterator[Table]:
    """Yield the tables after that of the result."""
    from poetmodel.cli.summary import tile_facts

    if reply is not None:
        yield figures("The whole job", reply.facts())
    if arena is not None:
        yield figures("Addresses", arena_facts(arena))
    if tiles is not None and tiles.trials:
        yield figures("Tiles", tile_facts(tiles.tile_bytes, tiles.trials, result.problem))


def _print_reason(result: SolveResult, explanation: Explanation | None) -> None:
    """Print on stderr why a result is none that was asked for."""
    from poetmodel.result import Status, Termination

    if result.violations:
        message = (
            f"the schedule of formulation {result.formulation!r} breaks a rule of execution; "
            "use another formulation for one that can run"
        )
        print_faults([message, *result.violations])
    elif result.status == Status.INFEASIBLE:
        reason = result.reason if explanation is None else explanation.whole_reason
        print_faults([f"infeasible: {reason or 'no schedule keeps the limits'}"])
        print_warnings(() if explanation is None else explanation.hints(), kind="hint")
    elif result.schedule is None:
        interrupted = result.termination == Termination.INTERRUPTED
        reason = TOO_EARLY if interrupted else result.reason
        print_faults([reason or "no schedule was found within the limit"])
