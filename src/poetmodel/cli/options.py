"""The options that commands share, and how costs are read from them."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from poetmodel.baselines.registry import method
from poetmodel.cli import completion
from poetmodel.cli.output import set_quiet
from poetmodel.errors import InputError
from poetmodel.problem import DeadlineCounts, Quantity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.device import Costs, Device
    from poetmodel.graph import Graph

WHAT: Final = "What to schedule"
LIMITS: Final = "Limits"
HOW: Final = "How to solve"
OUTPUT: Final = "Output"

MAX_THREADS: Final = 1024
"""Most threads that can be requested."""


class Backend(StrEnum):
    """The solvers that ``--backend`` names."""

    HIGHS = "highs"
    """HiGHS, which is built in."""
    SCIP = "scip"
    """SCIP, with ``poetmodel[scip]``."""
    GUROBI = "gurobi"
    """Gurobi, with ``poetmodel[gurobi]`` and its licence."""


class Formulation(StrEnum):
    """The formulations that ``--formulation`` names."""

    LAZY = "lazy"
    """Exact; solves a small relaxation and adds rows until its answer is valid."""
    COMPACT = "compact"
    """Exact; one model."""
    PAPER = "paper"
    """Algorithm 1 of the paper as published; its schedules may break the rules of execution."""


def _number_of_seconds(text: str | float) -> float:
    return _number(text, "a number of seconds above 0, such as 60", strict=True)


def _fraction(text: str | float) -> float:
    return _number(text, "a fraction from 0, such as 0.01 for 1 %", strict=False)


def _number(text: str | float, wanted: str, *, strict: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (strict and value == 0):
        msg = f"expected {wanted}, got {str(text)!r}"
        raise typer.BadParameter(msg)
    return value


def _count(text: str | int) -> int:
    return whole_number(text, MAX_THREADS)


def whole_number(text: str | int, most: int) -> int:
    """Return a whole number from 1 to `most`, as an option states it."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= most:
        msg = f"expected a whole number from 1 to {most}, got {str(text)!r}"
        raise typer.BadParameter(msg)
    return value


def _method_name(text: str) -> str:
    try:
        return method(text).name
    except InputError as error:
        raise typer.BadParameter(str(error)) from error


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        autocompletion=completion.one(completion.models),
        help="A built-in network (see 'poetmodel models'), or a graph file.",
        show_default=False,
    ),
]
GraphOption = Annotated[
    str | None,
    typer.Option(
        "--graph",
        metavar="FILE",
        help="A graph file, *.graph.json.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME|FILE",
        autocompletion=completion.one(completion.devices),
        help="A built-in device (see 'poetmodel devices'), or a device file, *.toml.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Measured costs, *.csv. They replace the device's estimates.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
RamOption = Annotated[
    str | None,
    typer.Option(
        "--ram",
        metavar="SIZE",
        help="RAM budget: 256KiB, 1.5MB, or 50% of the keep-all peak. Default: the device's.",
        rich_help_panel=LIMITS,
        show_default=False,
    ),
]
AuxOption = Annotated[
    str | None,
    typer.Option(
        "--aux",
        metavar="SIZE",
        help="Storage for paged tensors. Default: the device's, else unlimited.",
        rich_help_panel=LIMITS,
        show_default=False,
    ),
]
DeadlineOption = Annotated[
    str | None,
    typer.Option(
        "--deadline",
        metavar="TIME",
        help="Time limit of a step: 1.5s, 20ms, or 110% of a single pass over all nodes.",
        rich_help_panel=LIMITS,
        show_default=False,
    ),
]
DeadlineCountsOption = Annotated[
    DeadlineCounts | None,
    typer.Option(
        "--deadline-counts",
        help="Which time the deadline limits. Default: by the device's storage mode, else serial.",
        rich_help_panel=LIMITS,
        show_default=False,
    ),
]
EnergyBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--energy-budget",
        metavar="ENERGY",
        help="Energy limit of a step: 2.5J, 1.2Wh, or 105% of the baseline.",
        rich_help_panel=LIMITS,
        show_default=False,
    ),
]
MinimizeOption = Annotated[
    Quantity,
    typer.Option("--minimize", help="What to minimize.", rich_help_panel=LIMITS),
]
NoPagingOption = Annotated[
    bool,
    typer.Option("--no-paging", help="Do not page, only recompute.", rich_help_panel=LIMITS),
]
NoRecomputeOption = Annotated[
    bool,
    typer.Option("--no-recompute", help="Do not recompute, only page.", rich_help_panel=LIMITS),
]
CountParametersOption = Annotated[
    bool,
    typer.Option(
        "--count-parameters",
        help="Count parameters, gradients and optimizer state in the RAM budget.",
        rich_help_panel=LIMITS,
    ),
]
MethodOption = Annotated[
    str,
    typer.Option(
        "--method",
        metavar="NAME",
        autocompletion=completion.one(completion.methods),
        parser=_method_name,
        help="How to find the schedule: optimal, or an earlier method to compare with, such as "
        "checkpoint-all, chen-sqrt, rotor or dtr.",
        rich_help_panel=HOW,
    ),
]
FormulationOption = Annotated[
    Formulation | None,
    typer.Option(
        "--formulation",
        help="The formulation to solve. Default: lazy.",
        rich_help_panel=HOW,
        show_default=False,
    ),
]
BackendOption = Annotated[
    Backend, typer.Option("--backend", help="The solver.", rich_help_panel=HOW)
]
TimeLimitOption = Annotated[
    float,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        parser=_number_of_seconds,
        help="Wall-clock limit in seconds, for building and solving.",
        rich_help_panel=HOW,
    ),
]
GapOption = Annotated[
    float,
    typer.Option(
        "--gap",
        metavar="FRACTION",
        parser=_fraction,
        help="Gap tolerance, as a fraction of the overhead: stop when the gap is at most this.",
        rich_help_panel=HOW,
    ),
]
ThreadsOption = Annotated[
    int,
    typer.Option(
        "--threads",
        metavar="N",
        parser=_count,
        help="Threads. With 2 or more, `lazy` runs a primal worker beside the proof.",
        rich_help_panel=HOW,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write the schedule to this file, *.schedule.json.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print JSON on stdout, and nothing else.", rich_help_panel=OUTPUT),
]
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet",
        callback=set_quiet,
        help="Print nothing but errors, and JSON with --json.",
        rich_help_panel=OUTPUT,
    ),
]
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", help="Print the solver's log on stderr.", rich_help_panel=OUTPUT),
]


def read_device(device: str | None) -> Device | None:
    """Return the device of a ``--device`` option: a built-in one, or that of a file."""
    if device is None:
        return None
    from poetmodel.device.io import load_device

    return load_device(device)


def read_costs(graph: Graph, device: Device | None, profile: str | None) -> Costs:
    """Return the measured costs of a profile, or else the estimates of a device.

    Raises
    ------
    InputError
        If neither is given, or the profile cannot be read.
    """
    from poetmodel.device import Costs

    if profile is not None:
        from poetmodel.device.io import load_profile

        return load_profile(profile, device=device)
    if device is None:
        msg = (
            "no costs: give --device NAME|FILE ('poetmodel devices' lists the names) or "
            "--profile FILE"
        )
        raise InputError(msg)
    return Costs.estimate(graph, device)


def device_warnings(device: Device) -> tuple[str, ...]:
    """Return what looks wrong about a device, in sentences."""
    from poetmodel.device.sanity import sanity_warnings

    return tuple(f"device {device.key or device.name}: {text}" for text in sanity_warnings(device))


def check_output(out: Path | None, *, inputs: Iterable[str | None], option: str = "--out") -> None:
    """Raise unless the file `out` of an option can be written and is not an input.

    Raises
    ------
    InputError
        If the folder is missing or read-only, or the file is an input.
    """
    if out is None:
        return
    from poetmodel.data import check_writable

    for name in inputs:
        if name is not None and out.exists() and Path(name).exists() and out.samefile(name):
            msg = f"{option} {out}: this is an input file; give another name"
            raise InputError(msg)
    check_writable(out)
