"""``poetmodel solve``: the schedule of least energy, with its proof."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import typer

from poetmodel.baselines.registry import DEFAULT
from poetmodel.cli import graphs, options, plan_output
from poetmodel.cli import job as job_options
from poetmodel.cli.failures import (
    Status,
    print_faults,
    print_hints,
    print_room_warning,
    print_warnings,
)
from poetmodel.cli.output import print_json, show
from poetmodel.cli.progress import live_line
from poetmodel.cli.waiting import Waiting
from poetmodel.errors import InputError, MethodNotApplicableError
from poetmodel.graph.catalogue import InputShape
from poetmodel.problem import Problem, Quantity

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.graph import Graph
    from poetmodel.result import SolveResult
    from poetmodel.solver.sensitivity import Explanation

EPILOG: Final = "Example: poetmodel solve mlp --device mkr1000 --ram 70% --out mlp.json"

MIN_NODES: Final = 2
"""Fewest nodes that leave anything to decide."""

TOO_EARLY: Final = "interrupted before a schedule was found"
"""The message of Ctrl-C before there is a schedule."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("solve", epilog=EPILOG)(solve)


def solve(  # noqa: PLR0913 - one parameter per option
    context: typer.Context,
    model: options.ModelArgument = None,
    *,
    graph: options.GraphOption = None,
    batch: graphs.BatchOption = None,
    image: graphs.ImageOption = None,
    sequence: graphs.SequenceOption = None,
    device: options.DeviceOption = None,
    profile: options.ProfileOption = None,
    ram: options.RamOption = None,
    aux: options.AuxOption = None,
    deadline: options.DeadlineOption = None,
    deadline_counts: options.DeadlineCountsOption = None,
    minimize: options.MinimizeOption = Quantity.ENERGY,
    energy_budget: options.EnergyBudgetOption = None,
    samples: job_options.SamplesOption = None,
    within: job_options.WithinOption = None,
    battery: job_options.BatteryOption = None,
    no_paging: options.NoPagingOption = False,
    no_recompute: options.NoRecomputeOption = False,
    count_parameters: options.CountParametersOption = False,
    method: options.MethodOption = DEFAULT,
    formulation: options.FormulationOption = None,
    backend: options.BackendOption = options.Backend.HIGHS,
    time_limit: options.TimeLimitOption = 60.0,
    gap: options.GapOption = 1e-4,
    threads: options.ThreadsOption = 1,
    out: options.OutOption = None,
    plan: plan_output.PlanFileOption = None,
    plot: plan_output.MapOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    verbose: options.VerboseOption = False,
) -> None:
    """Find the training schedule that needs the least energy within the limits."""
    waiting = Waiting(begun_s=context.obj or time.monotonic())
    shape = InputShape(batch=batch, image=image, sequence=sequence)
    training_graph = _large_enough(graphs.read_graph(model, graph, shape))
    board = options.read_device(device)
    costs = options.read_costs(training_graph, board, profile)
    job = job_options.read_job(
        samples, within, battery, deadline=deadline, energy_budget=energy_budget
    )
    step_deadline, step_energy = job_options.limits_of_a_step(
        job, training_graph, deadline=deadline, energy_budget=energy_budget
    )
    problem = Problem(
        training_graph,
        costs,
        ram=ram,
        deadline=step_deadline,
        deadline_counts=deadline_counts,
        aux_bytes=aux,
        recompute=not no_recompute,
        paging=not no_paging,
        minimize=minimize,
        energy_budget=step_energy,
        count_parameters=count_parameters,
    )
    inputs = (model, graph, device, profile)
    plan_output.check_targets(out, ("--plan", plan), ("--plot", plot), inputs=inputs)
    if board is not None:
        print_warnings(options.device_warnings(board))
    waiting = replace(waiting, solve_begun_s=time.monotonic())
    try:
        with live_line(problem, wanted=not json) as on_progress:
            from poetmodel.baselines import run

            result = run(
                problem,
                method,
                formulation=None if formulation is None else formulation.value,
                backend=backend.value,
                time_limit=time_limit,
                gap=gap,
                threads=threads,
                on_progress=on_progress,
            )
    except MethodNotApplicableError as error:
        if error.result is None:
            raise
        result = error.result
    except KeyboardInterrupt:  # before or after the search, which handles its own
        result = _interrupted(problem, method, time_limit=time_limit, gap=gap)
    if verbose and result.log:
        print(result.log.rstrip(), file=sys.stderr)
    if result.reduction and not quiet:
        print_warnings([result.reduction])
    explanation = _explain(result, threads=threads)
    reply = None if job is None else job_options.answer(job, result)
    _deliver(result, reply, explanation, out=out, json=json, waiting=waiting)
    if out is not None and result.schedule is not None:
        plan_output.told(out)
    for path in plan_output.deliver_beside(result, plan=plan, plot=plot):
        plan_output.told(path)
    raise typer.Exit(_status(result, explanation))


def _large_enough(graph: Graph) -> Graph:
    if len(graph.nodes) < MIN_NODES:
        msg = (
            f"graph {graph.name!r} has 1 node: nothing to keep, recompute or page; "
            f"solve needs at least {MIN_NODES}"
        )
        raise InputError(msg)
    return graph


def _interrupted(problem: Problem, method: str, *, time_limit: float, gap: float) -> SolveResult:
    """Return the result of Ctrl-C outside of the search: no schedule."""
    from poetmodel.result import SolveResult, Termination
    from poetmodel.result import Status as Outcome

    return SolveResult(
        problem=problem,
        status=Outcome.UNKNOWN,
        termination=Termination.INTERRUPTED,
        reason=TOO_EARLY,
        method=method,
        time_limit_s=time_limit,
        requested_gap=gap,
    )


def _explain(result: SolveResult, *, threads: int) -> Explanation | None:
    """Return why a problem is infeasible and which changes would help; None for other results."""
    from poetmodel.result import Status as Outcome

    if result.status != Outcome.INFEASIBLE or result.method != DEFAULT:
        return None
    from poetmodel.solver.sensitivity.explanation import SHARE, explain_infeasible

    limit_s = SHARE * (result.time_limit_s or 1.0)
    try:
        return explain_infeasible(result, time_limit=limit_s, threads=threads)
    except KeyboardInterrupt:  # the result is known and stays
        return None


def _deliver(
    result: SolveResult,
    reply: job_options.Reply | None,
    explanation: Explanation | None,
    *,
    out: Path | None,
    json: bool,
    waiting: Waiting,
) -> None:
    """Write the file and print the result, also where the file cannot be written."""
    unwritten: InputError | None = None
    if out is not None and result.schedule is not None:
        try:
            result.save(out)
        except InputError as error:
            unwritten = error
    if json:
        document = result.to_dict()
        if reply is not None:
            document["job"] = reply.as_dict()
        if explanation is not None:
            document["infeasible"] = explanation.to_dict()
        print_json(document)
    elif result.schedule is not None:
        from poetmodel.cli.summary import result_table

        show(result_table(result, waiting), *(() if reply is None else (reply.table(),)))
    elif reply is not None:
        print_warnings(reply.sentences())
    print_room_warning(result.room)
    if unwritten is not None:
        raise unwritten


def _status(result: SolveResult, explanation: Explanation | None) -> Status:
    """Return the exit status of a result; print its reason on stderr unless it is a success."""
    from poetmodel.result import Status as Outcome
    from poetmodel.result import Termination

    if result.violations:
        print_faults(
            [
                f"the schedule of formulation {result.formulation!r} breaks a rule of execution; "
                "use another formulation for one that can run",
                *result.violations,
            ]
        )
        return Status.REJECTED
    if result.schedule is not None:
        return Status.SUCCESS
    if result.status == Outcome.INFEASIBLE:
        reason = result.reason if explanation is None else explanation.whole_reason
        print_faults([f"infeasible: {reason or 'no schedule keeps the limits'}"])
        print_hints(() if explanation is None else explanation.hints())
        return Status.INFEASIBLE
    if result.termination == Termination.INTERRUPTED:
        print_faults([TOO_EARLY])
    else:
        print_faults([result.reason or "no schedule was found within the limit"])
    return Status.NO_SCHEDULE
