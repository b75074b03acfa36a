"""What ``trace`` and ``profile`` share: options, tracing, and tables of costs."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poetmodel.cli import completion, options
from poetmodel.errors import InputError
from poetmodel.units import format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import Costs, Device
    from poetmodel.graph import Graph
    from poetmodel.torch.profiling import Profile
    from poetmodel.torch.tracing import Trace

MEASURING = "How to measure"


def _repeats(text: str | int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        msg = f"expected a whole number from 1, got {str(text)!r}"
        raise typer.BadParameter(msg)
    return value


NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Name of the graph. Default: the class of the model.",
        show_default=False,
    ),
]
BoardOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME|FILE",
        autocompletion=completion.one(completion.devices),
        help="Do not measure: estimate the costs on this device from FLOP and bytes.",
        show_default=False,
    ),
]
PowerOption = Annotated[
    str | None,
    typer.Option(
        "--power-from",
        metavar="NAME|FILE",
        autocompletion=completion.one(completion.devices),
        help="A device whose power figures turn measured times into energies. "
        "Default: RAPL counters, else a nominal 1 W.",
        rich_help_panel=MEASURING,
        show_default=False,
    ),
]
FolderOption = Annotated[
    Path,
    typer.Option(
        "--folder",
        metavar="FOLDER",
        help="Folder for pages; page times are measured there.",
        rich_help_panel=MEASURING,
    ),
]
RepeatsOption = Annotated[
    int,
    typer.Option(
        "--repeats",
        metavar="N",
        parser=_repeats,
        help="Number of timed steps; the least time counts.",
        rich_help_panel=MEASURING,
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        parser=_repeats,
        help="Compute threads. Default: as PyTorch is set.",
        rich_help_panel=MEASURING,
        show_default=False,
    ),
]


def traced(target: str, *, name: str | None) -> Trace:
    """Trace what ``module:function`` returns; its output goes to stderr."""
    from poetmodel.torch.target import load_step
    from poetmodel.torch.tracing import trace

    with redirect_stdout(sys.stderr):
        step = load_step(target)
        return trace(step.model, step.loss_fn, step.inputs, name=name)


def measured(
    trace: Trace, *, folder: Path, repeats: int, threads: int | None, power_from: Device | None
) -> Profile:
    """Measure a trace on this host; its output goes to stderr."""
    from poetmodel.torch.profiling import measure

    with redirect_stdout(sys.stderr):
        return measure(
            trace, folder=folder, repeats=repeats, threads=threads, power_from=power_from
        )


def check_choice(device: str | None, power_from: str | None) -> None:
    """Raise if costs would be both estimated and measured."""
    if device is not None and power_from is not None:
        msg = "--device estimates all costs and --power-from is for measured ones: give only one"
        raise InputError(msg)


def estimated(graph: Graph, device: str) -> tuple[Costs, tuple[str, ...]]:
    """Return the estimates of a device, and a note on them."""
    from poetmodel.device import Costs

    board = options.read_device(device)
    if board is None:
        msg = "no device"
        raise InputError(msg)
    return Costs.estimate(graph, board), (
        f"costs: estimated for device {device} from FLOP and bytes; nothing was measured",
    )


def cost_figures(graph: Graph, costs: Costs) -> dict[str, Any]:
    """Return the sums of costs; page figures are None without storage."""
    table = costs.table(graph)
    paged = table.has_storage
    return {
        "compute_time_s": sum(table.compute_time_s),
        "compute_energy_j": sum(table.compute_energy_j),
        "page_in_time_s": sum(table.page_in_time_s) if paged else None,
        "page_out_time_s": sum(table.page_out_time_s) if paged else None,
    }


def cost_rows(graph: Graph, costs: Costs) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a table of costs."""
    sums = cost_figures(graph, costs)
    yield (
        "compute time",
        format_seconds(sums["compute_time_s"]),
        "of a single pass: every node computed once",
    )
    yield "compute energy", format_joules(sums["compute_energy_j"]), ""
    if sums["page_in_time_s"] is not None:
        yield "page-in time", format_seconds(sums["page_in_time_s"]), "of every tensor, once"
        yield "page-out time", format_seconds(sums["page_out_time_s"]), "of every tensor, once"
