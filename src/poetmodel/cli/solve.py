"""``poetmodel solve``: the schedule of least energy, with its proof."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import typer

from poetmodel.cli import options
from poetmodel.cli.failures import Status, print_faults, print_warnings
from poetmodel.cli.output import print_json, show
from poetmodel.cli.progress import live_line
from poetmodel.errors import InputError
from poetmodel.problem import Problem, Quantity

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.graph import Graph
    from poetmodel.result import SolveResult

EPILOG: Final = "Example: poetmodel solve mlp --device mkr1000 --ram 70% --out mlp.json"

MIN_NODES: Final = 2
"""Fewest nodes for which there is anything to decide."""

TOO_EARLY: Final = "interrupted before a schedule was found"
"""What Ctrl-C leaves where there is nothing to keep."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("solve", epilog=EPILOG)(solve)


def solve(  # noqa: PLR0913 - one parameter per option
    model: options.ModelArgument = None,
    *,
    graph: options.GraphOption = None,
    device: options.DeviceOption = None,
    profile: options.ProfileOption = None,
    ram: options.RamOption = None,
    aux: options.AuxOption = None,
    deadline: options.DeadlineOption = None,
    deadline_counts: options.DeadlineCountsOption = None,
    minimize: options.MinimizeOption = Quantity.ENERGY,
    energy_budget: options.EnergyBudgetOption = None,
    no_paging: options.NoPagingOption = False,
    no_recompute: options.NoRecomputeOption = False,
    count_parameters: options.CountParametersOption = False,
    formulation: options.FormulationOption = None,
    backend: options.BackendOption = options.Backend.HIGHS,
    time_limit: options.TimeLimitOption = 60.0,
    gap: options.GapOption = 1e-4,
    threads: options.ThreadsOption = 1,
    out: options.OutOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    verbose: options.VerboseOption = False,
) -> None:
    """Find the training schedule that needs the least energy within the limits."""
    training_graph = _large_enough(options.read_graph(model, graph))
    board = options.read_device(device)
    costs = options.read_costs(training_graph, board, profile)
    problem = Problem(
        training_graph,
        costs,
        ram=ram,
        deadline=deadline,
        deadline_counts=deadline_counts,
        aux_bytes=aux,
        recompute=not no_recompute,
        paging=not no_paging,
        minimize=minimize,
        energy_budget=energy_budget,
        count_parameters=count_parameters,
    )
    options.check_output(out, inputs=(model, graph, device, profile))
    if board is not None and not quiet:
        print_warnings(options.device_warnings(board))
    try:
        with live_line(problem, wanted=not (json or quiet)) as on_progress:
            from poetmodel.solve import solve as solve_problem

            result = solve_problem(
                problem,
                formulation=None if formulation is None else formulation.value,
                backend=backend.value,
                time_limit=time_limit,
                gap=gap,
                threads=threads,
                on_progress=on_progress,
            )
    except KeyboardInterrupt:
        print_faults([TOO_EARLY])
        raise typer.Exit(Status.NO_SCHEDULE) from None
    if verbose and result.log:
        print(result.log.rstrip(), file=sys.stderr)
    _deliver(result, out=out, json=json)
    if out is not None and result.schedule is not None and not quiet:
        print(f"wrote {out}", file=sys.stderr)
    raise typer.Exit(_status(result))


def _large_enough(graph: Graph) -> Graph:
    if len(graph.nodes) < MIN_NODES:
        msg = (
            f"graph {graph.name!r} has 1 node: nothing to keep, recompute or page; "
            f"solve needs at least {MIN_NODES}"
        )
        raise InputError(msg)
    return graph


def _deliver(result: SolveResult, *, out: Path | None, json: bool) -> None:
    """Write the file and print the result; a file that cannot be written does not hide it."""
    unwritten: InputError | None = None
    if out is not None and result.schedule is not None:
        try:
            result.save(out)
        except InputError as error:
            unwritten = error
    if json:
        print_json(result.to_dict())
    elif result.schedule is not None:
        from poetmodel.cli.summary import result_table

        show(result_table(result))
    if unwritten is not None:
        raise unwritten


def _status(result: SolveResult) -> Status:
    """Return the exit status of a result, with its reason on stderr where it is not a success."""
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
        print_faults([f"infeasible: {result.reason or 'no schedule keeps the limits'}"])
        return Status.INFEASIBLE
    if result.termination == Termination.INTERRUPTED:
        print_faults([TOO_EARLY])
    else:
        print_faults([result.reason or "no schedule was found within the limit"])
    return Status.NO_SCHEDULE
