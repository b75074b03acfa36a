"""``poetmodel solve``: find a schedule with minimum energy, time, RAM or writes, with a bound."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer  # noqa: TC002 - read from the annotations of commands

from poetmodel.cli import options
from poetmodel.cli.failures import print_warnings, result_exit_status
from poetmodel.cli.inputs import check_outputs, device_warnings, read_graph, warn_about_kernels
from poetmodel.cli.job import JobOptions, JobResult
from poetmodel.cli.output import fact_table, live_line
from poetmodel.cli.plan import arena_facts, save_plan_and_map
from poetmodel.cli.reply import Reply
from poetmodel.errors import InputError
from poetmodel.problem import Limits
from poetmodel.report.presenter import to_json_object
from poetmodel.solver.request import SearchOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from poetmodel.case.solving import CaseAnswer
    from poetmodel.graph import Graph

MIN_NODES: Final = 2
"""Minimum number of nodes of a graph that has decisions."""


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
) -> Reply:
    """Find the training schedule with minimum energy (or --minimize) within the limits."""
    from poetmodel.case.solving import LoadedCase, Placing, solve_case

    start_s = context.obj or time.monotonic()
    if files.arena and files.plan is None:
        raise InputError("--arena: addresses are part of a plan; give --plan FILE too")
    loaded = LoadedCase.read(
        source.case(costing, limits=limits, own=own, search=search),
        read_graph=partial(_read_graph, source),
        job=job_options.to_job(limits),
    )
    problem = loaded.problem
    check_outputs(
        ("--out", files.out),
        ("--plan", files.plan),
        ("--plot", files.plot),
        inputs=(source.model, source.graph, costing.device, costing.profile, *own.files),
    )
    warn_about_kernels(problem.graph, problem.costs.device)
    if problem.costs.device is not None:
        print_warnings(device_warnings(problem.costs.device))
    read_s = time.monotonic() - start_s
    with live_line(problem, enabled=not output.json) as on_progress:
        answer = solve_case(
            loaded,
            search.start(on_progress),
            placing=Placing() if files.arena else None,
            explains=True,
        )
    result = answer.result
    if output.verbose and result.log:
        print(result.log.rstrip(), file=sys.stderr)
    if result.reduction:
        print_warnings([result.reduction])
    job_result = None
    if loaded.job is not None:
        job_result = JobResult(job=loaded.job, result=result, limits=answer.used_limits)
    document = answer.to_dict()
    if job_result is not None:
        document["job"] = to_json_object(job_result.facts())
        if not output.json and result.schedule is None:
            print_warnings(job_result.infeasibility_notes())
    return Reply(
        document=document,
        text=_tables(answer, job_result, start_s=start_s, read_s=read_s),
        device_rams=(result.device_ram,),
        written=_write(answer, files),
        hints=answer.hints(),
        errors=answer.failure_reasons(),
        error_hints=() if answer.explanation is None else answer.explanation.hints(),
        status=result_exit_status(result),
    )


def _read_graph(source: options.GraphOptions) -> Graph:
    """Read the graph of the options; refuse one without decisions."""
    graph = read_graph(source)
    if len(graph.nodes) < MIN_NODES:
        raise InputError(
            f"graph {graph.name!r} has 1 node: nothing to keep, recompute or page; solve needs at "
            f"least {MIN_NODES}"
        )
    return graph


def _tables(
    answer: CaseAnswer, job_result: JobResult | None, *, start_s: float, read_s: float
) -> Iterator[Table]:
    """Yield the tables of an answer with a schedule; `start_s` is on the monotonic clock [s]."""
    from poetmodel.cli.summary import result_table, tile_facts

    result, tiles = answer.result, answer.tiles
    if result.schedule is None:
        return
    yield result_table(result, total_s=time.monotonic() - start_s, read_s=read_s)
    if job_result is not None:
        yield fact_table("The whole job", job_result.facts())
    if answer.planned is not None and answer.planned.arena is not None:
        yield fact_table("Addresses", arena_facts(answer.planned.arena))
    if tiles is not None and tiles.trials:
        yield fact_table("Tiles", tile_facts(tiles.tile_bytes, tiles.trials, result.problem))


def _write(answer: CaseAnswer, files: FileOptions) -> Iterator[Path]:
    """Save the schedule, if any, at once; further files and a failure follow while iterated."""
    result, failure = answer.result, None
    out = None if result.schedule is None else files.out
    try:
        if out is not None:
            result.save(out)
    except InputError as error:
        failure = error

    def report() -> Iterator[Path]:
        if failure is not None:
            raise failure
        if out is not None:
            yield out
        yield from save_plan_and_map(
            result, plan=files.plan, plot=files.plot, planned=answer.planned
        )

    return report()
