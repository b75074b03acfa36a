"""``poetmodel plan``: makes the program that a device runs from a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from poetmodel.cli import graphs, options
from poetmodel.cli.failures import Status, print_faults, print_room_warning, print_warnings
from poetmodel.cli.output import (
    count,
    figures,
    print_json,
    print_text,
    room_alarms,
    room_row,
    show,
)
from poetmodel.cli.plan_output import (
    Format,
    Planned,
    check_targets,
    default_mode,
    draw_plan,
    mode_notes,
    told,
    write,
)
from poetmodel.device import StorageMode
from poetmodel.device.room import DeviceRoom
from poetmodel.errors import (
    BudgetError,
    InputError,
    PlanError,
    ScheduleError,
)
from poetmodel.graph.catalogue import InputShape
from poetmodel.problem import Problem
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import Costs
    from poetmodel.graph import Graph
    from poetmodel.schedule.io import ScheduleDocument

EPILOG: Final = "Example: poetmodel plan mlp.json --graph mlp --format text"


ScheduleArgument = Annotated[
    Path,
    typer.Argument(
        metavar="SCHEDULE", help="A schedule file, *.schedule.json.", show_default=False
    ),
]
ModeOption = Annotated[
    StorageMode | None,
    typer.Option(
        "--mode",
        help="How transfers run. Default: the device's; else dma for an overlap schedule, else "
        "blocking.",
        rich_help_panel=options.WHAT,
        show_default=False,
    ),
]
RamOption = Annotated[
    str | None,
    typer.Option(
        "--ram",
        metavar="SIZE",
        help="RAM budget: 256KiB, 1.5MB, or 50% of the keep-all peak. Default: the budget "
        "of the schedule.",
        rich_help_panel=options.LIMITS,
        show_default=False,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write the plan.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="json is a plan file, text a listing for people, binary a few hundred bytes for a "
        "device.",
        rich_help_panel=options.OUTPUT,
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw core, bus and RAM over time: *.png, *.svg or *.html.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("plan", epilog=EPILOG)(plan)


def plan(  # noqa: PLR0913 - one parameter per option
    schedule: ScheduleArgument,
    *,
    graph: graphs.GraphOption = None,
    batch: graphs.BatchOption = None,
    image: graphs.ImageOption = None,
    sequence: graphs.SequenceOption = None,
    device: options.DeviceOption = None,
    profile: options.ProfileOption = None,
    mode: ModeOption = None,
    ram: RamOption = None,
    out: OutOption = None,
    form: FormatOption = Format.JSON,
    plot: PlotOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,  # noqa: ARG001 - acts while it is parsed
) -> None:
    """Make the program that a device runs, from a schedule file."""
    from poetmodel.schedule import check_identity
    from poetmodel.schedule.io import load_document

    if form == Format.BINARY and out is None:
        msg = "--format binary: give --out FILE for the bytes"
        raise InputError(msg)
    inputs = (str(schedule), graph, device, profile)
    check_targets(out, ("--plot", plot), inputs=inputs)
    document = load_document(schedule)
    shape = InputShape(batch=batch, image=image, sequence=sequence)
    identity = document.schedule.identity
    training_graph = graphs.graph_of(graph, shape, identity, source=str(schedule)).graph
    try:
        check_identity(training_graph, document.schedule)
        costs, notes = _costs(document, training_graph, device=device, profile=profile)
        budget = _budget(document, training_graph, costs, ram)
        meaning = None if document.problem is None else document.problem.deadline_counts
        if mode is None:
            notes += mode_notes(costs.device, meaning)
        print_warnings(notes)
        made = make(
            document,
            training_graph,
            costs,
            mode=mode or default_mode(costs.device, meaning),
            ram_budget_bytes=budget,
        )
    except (ScheduleError, PlanError) as error:
        raise error.within(str(schedule)) from None
    if made.check.violations:
        print_faults(made.check.violations)
        raise typer.Exit(Status.INFEASIBLE)
    _deliver(
        made,
        DeviceRoom.of(costs.device, training_graph, made.check.peak_ram_bytes),
        out=out,
        form=form,
        plot=plot,
        json=json,
    )


def make(
    document: ScheduleDocument,
    graph: Graph,
    costs: Costs,
    *,
    mode: StorageMode,
    ram_budget_bytes: int | None,
) -> Planned:
    """Plan the schedule of a file, and verify the plan.

    Raises
    ------
    PlanError
        If the schedule breaks a rule of execution.
    """
    from poetmodel.plan import check_plan
    from poetmodel.planner import make_plan

    made = make_plan(graph, costs, document.schedule, mode=mode, ram_budget_bytes=ram_budget_bytes)
    stated = document.problem
    room = stated.aux_bytes if stated is not None else None
    check = check_plan(graph, costs, made, aux_bytes=room)
    return Planned(graph=graph, plan=made, check=check)


def _costs(
    document: ScheduleDocument, graph: Graph, *, device: str | None, profile: str | None
) -> tuple[Costs, list[str]]:
    from poetmodel.cli.verify import known_device

    named = known_device(document.device)
    chosen = device if device is not None else named
    notes = []
    if device is None and profile is None and named is not None:
        notes.append(
            f"costs are the estimates of device {named}, which the file names; give --profile if "
            "it was solved with measured costs"
        )
    return options.read_costs(graph, options.read_device(chosen), profile), notes


def _budget(document: ScheduleDocument, graph: Graph, costs: Costs, ram: str | None) -> int | None:
    """Return the RAM for tensors: of the option, the file or the device; None without them."""
    stated = document.problem
    if ram is None and stated is None and costs.device is None:
        return None
    problem = Problem(
        graph,
        costs,
        ram=ram if ram is not None or stated is None else stated.ram_budget_bytes,
        count_parameters=stated is not None and stated.count_parameters,
    )
    if problem.usable_ram_bytes < 1:
        msg = (
            f"ram: {problem.ram_budget_bytes:,} B leave no RAM for tensors: "
            f"{graph.total_resident_bytes:,} bytes are resident"
        )
        raise BudgetError(msg)
    return problem.usable_ram_bytes


def _deliver(
    made: Planned,
    room: DeviceRoom | None,
    *,
    out: Path | None,
    form: Format,
    plot: Path | None,
    json: bool,
) -> None:
    from poetmodel.plan.listing import plan_listing

    if out is not None:
        write(made, out, form)
        told(out)
    if plot is not None:
        draw_plan(made, plot)
        told(plot)
    if json:
        print_json(made.plan.to_dict(made.check))
    elif form == Format.TEXT and out is None:
        print_text(*plan_listing(made.graph, made.plan, made.check).splitlines())
    else:
        rows = (*_rows(made), *room_row(room))
        show(figures(f"Plan for {made.graph.name}", rows, alarms=room_alarms(room)))
    print_room_warning(room)


def _rows(made: Planned) -> Iterator[tuple[str, str, str]]:
    from poetmodel.plan import Op, encode

    plan, check = made.plan, made.check
    times = dict.fromkeys(Op, 0)
    for op, _ in plan.program:
        times[op] += 1
    again = times[Op.COMPUTE] - len(made.graph.nodes)
    yield (
        "instructions",
        f"{len(plan.program):,}",
        f"{again} recomputations, {times[Op.PAGE_OUT]} page-outs, {times[Op.PAGE_IN]} page-ins",
    )
    yield "transfers", str(plan.mode), _MODES[plan.mode]
    yield "makespan", format_seconds(check.makespan_s or 0.0), ""
    yield "compute time", format_seconds(check.compute_s or 0.0), ""
    yield "transfer time", format_seconds(check.transfer_s or 0.0), ""
    if plan.mode == StorageMode.DMA:
        yield "stall", format_seconds(check.stall_s or 0.0), "the core waits for the bus"
    yield "energy", format_joules(check.energy_j or 0.0), ""
    budget = plan.ram_budget_bytes
    of = "" if budget is None else f"of a budget of {format_bytes(budget)}"
    yield "peak RAM", format_bytes(check.peak_ram_bytes), of
    yield "storage used", format_bytes(check.aux_used_bytes), ""
    yield "binary size", f"{count(len(encode(made.graph, plan)))}B", "with --format binary"


_MODES: Final = {
    StorageMode.BLOCKING: "the core waits for each",
    StorageMode.DMA: "one at a time, while the core computes",
}
