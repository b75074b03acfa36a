"""Plans that commands make, and the files that they are written to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from poetmodel.cli import options
from poetmodel.cli.failures import print_warnings
from poetmodel.cli.output import escaped, print_note
from poetmodel.device import StorageMode
from poetmodel.errors import InputError, VerificationError
from poetmodel.problem import DeadlineCounts

if TYPE_CHECKING:
    from poetmodel.device import Device
    from poetmodel.graph import Graph
    from poetmodel.plan import Plan, PlanCheck
    from poetmodel.result import SolveResult


class Format(StrEnum):
    """What ``--format`` names."""

    JSON = "json"
    """A plan file."""
    TEXT = "text"
    """A listing for people."""
    BINARY = "binary"
    """A few hundred bytes for a device."""


PlanFileOption = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="Write the program that the device runs, *.plan.json.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]
MapOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw what is computed, kept and moved in each stage: *.png, *.svg or *.html.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and what the verifier found."""

    graph: Graph
    """The graph."""
    plan: Plan
    """The program."""
    check: PlanCheck
    """What the verifier found."""


def default_mode(device: Device | None, deadline_counts: str | None) -> StorageMode:
    """Return the storage mode of a device; without one, the mode that the deadline implies."""
    if device is not None and device.storage is not None:
        return device.storage.mode
    return StorageMode.DMA if deadline_counts == DeadlineCounts.OVERLAP else StorageMode.BLOCKING


def mode_notes(device: Device | None, deadline_counts: str | None) -> list[str]:
    """Return notes on a plan whose mode was not chosen."""
    blocking = default_mode(device, deadline_counts) == StorageMode.BLOCKING
    if device is None or not blocking or deadline_counts != DeadlineCounts.OVERLAP:
        return []
    return [
        "the time of this schedule lets transfers overlap computation, but the core of "
        f"{device.key or device.name} waits for each transfer, and so does the plan; 'poetmodel "
        "plan --mode dma' makes one with overlap"
    ]


def plan_of(result: SolveResult) -> Planned:
    """Plan the schedule of a solve, in the mode of its device, within its RAM budget.

    Raises
    ------
    VerificationError
        If the verifier rejects the plan.
    """
    from poetmodel.plan import check_plan
    from poetmodel.planner import make_plan

    problem = result.problem
    made = make_plan(
        problem.graph,
        problem.costs,
        result.require_schedule(),
        mode=default_mode(problem.costs.device, problem.deadline_counts),
        ram_budget_bytes=problem.usable_ram_bytes,
    )
    check = check_plan(problem.graph, problem.costs, made, aux_bytes=problem.aux_limit_bytes)
    if check.violations:
        raise VerificationError(check.violations)
    return Planned(graph=problem.graph, plan=made, check=check)


def check_targets(
    out: Path | None, *others: tuple[str, Path | None], inputs: tuple[str | None, ...]
) -> None:
    """Raise unless all files can be written and are different.

    Parameters
    ----------
    out : Path, optional
        The file of ``--out``.
    *others : (str, Path or None)
        Further options and their files; that of ``--plot`` must be a known kind of picture.
    inputs : tuple of str
        The files that the command reads.
    """
    options.check_output(out, inputs=inputs)
    taken = {"--out": out}
    for option, path in others:
        if path is None:
            continue
        if option == "--plot":
            from poetmodel.report import check_picture

            check_picture(path)
        for earlier, name in taken.items():
            if name == path:
                msg = f"{option} {path}: {earlier} already names this file; give another name"
                raise InputError(msg)
        options.check_output(path, inputs=inputs, option=option)
        taken[option] = path


def deliver_beside(result: SolveResult, *, plan: Path | None, plot: Path | None) -> list[Path]:
    """Write the plan and the map of a solve; return the files written."""
    if result.schedule is None:
        return []
    written = []
    if plan is not None and result.violations:
        print_warnings([f"{plan} was not written: the schedule breaks a rule of execution"])
    elif plan is not None:
        print_warnings(mode_notes(result.problem.costs.device, str(result.problem.deadline_counts)))
        write(plan_of(result), plan, Format.JSON)
        written.append(plan)
    if plot is not None:
        from poetmodel.report import draw, stage_map

        draw(stage_map(result.problem.graph, result.schedule), plot)
        written.append(plot)
    return written


def write(made: Planned, path: Path, form: Format) -> None:
    """Write a plan in one of its formats."""
    from poetmodel.data import write_bytes, write_text
    from poetmodel.plan import encode
    from poetmodel.plan.listing import plan_listing

    if form == Format.BINARY:
        write_bytes(path, encode(made.graph, made.plan))
    elif form == Format.TEXT:
        lines = plan_listing(made.graph, made.plan, made.check).splitlines()
        write_text(path, "".join(f"{escaped(line)}\n" for line in lines))
    else:
        made.plan.save(path, made.check)


def draw_plan(made: Planned, path: Path) -> None:
    """Draw core, bus and RAM over time."""
    from poetmodel.report import draw, plan_timeline

    draw(plan_timeline(made.graph, made.plan, made.check), path)


def told(path: Path) -> None:
    """Say on stderr that a file was written."""
    print_note(f"wrote {path}")
