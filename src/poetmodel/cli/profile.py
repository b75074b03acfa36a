"""``poetmodel profile``: the cost of every operation and page, measured or estimated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from poetmodel.cli import completion, graphs, options, tracing
from poetmodel.cli.output import figures, print_json, print_note, print_text, show
from poetmodel.errors import InputError
from poetmodel.graph.catalogue import InputShape, read_model_or_file

if TYPE_CHECKING:
    from poetmodel.device import Costs, Device
    from poetmodel.graph import Graph

EPILOG: Final = "Example: poetmodel profile mlp --device mkr1000 --out mlp.csv"

WhatArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION|GRAPH",
        autocompletion=completion.one(completion.models),
        help="As for 'poetmodel trace'; with --device also a graph file or a built-in network.",
        show_default=False,
    ),
]
CsvOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write the profile, *.csv.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("profile", epilog=EPILOG)(profile)


def profile(  # noqa: PLR0913 - one parameter per option
    what: WhatArgument,
    *,
    batch: graphs.BatchOption = None,
    image: graphs.ImageOption = None,
    sequence: graphs.SequenceOption = None,
    name: tracing.NameOption = None,
    device: tracing.BoardOption = None,
    power_from: tracing.PowerOption = None,
    folder: tracing.FolderOption = Path(),
    repeats: tracing.RepeatsOption = 5,
    threads: tracing.ThreadsOption = None,
    out: CsvOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,  # noqa: ARG001 - acts while it is parsed
) -> None:
    """Measure a training step on this host: time per operation, page times, energies."""
    tracing.check_choice(device, power_from)
    shape = InputShape(batch=batch, image=image, sequence=sequence)
    _check_shape(what, shape)
    meter = options.read_device(power_from)
    options.check_output(out, inputs=(what,))
    if device is not None:
        graph, costs, notes = _estimate(what, shape, name=name, device=device)
    else:
        graph, costs, notes = _measure(
            what, name=name, folder=folder, repeats=repeats, threads=threads, meter=meter
        )
    if out is not None:
        from poetmodel.device.io import save_profile

        save_profile(costs, out)
    if json:
        print_json(
            {"graph": {"name": graph.name, "sha256": graph.sha256}}
            | tracing.cost_figures(graph, costs)
            | {"notes": list(notes)}
        )
    else:
        show(figures(f"Costs of {graph.name}", tracing.cost_rows(graph, costs)))
        print_text(*notes)
    if out is not None:
        print_note(f"wrote {out}")


def _check_shape(what: str, shape: InputShape) -> None:
    from poetmodel.torch.target import is_target

    if shape.given and is_target(what):
        msg = (
            f"{what}, {' '.join(shape.options)}: the function gives the inputs of a step; leave "
            "the option out"
        )
        raise InputError(msg)


def _estimate(
    what: str, shape: InputShape, *, name: str | None, device: str
) -> tuple[Graph, Costs, tuple[str, ...]]:
    from poetmodel.torch.target import is_target

    if is_target(what):
        graph = tracing.traced(what, name=name).graph
    else:
        graph = read_model_or_file(what, shape)
    return graph, *tracing.estimated(graph, device)


def _measure(
    what: str,
    *,
    name: str | None,
    folder: Path,
    repeats: int,
    threads: int | None,
    meter: Device | None,
) -> tuple[Graph, Costs, tuple[str, ...]]:
    from poetmodel.torch.target import is_target

    if not is_target(what):
        msg = (
            f"{what}: a graph cannot be run; give the MODULE:FUNCTION that it was traced from, or "
            "--device to estimate its costs"
        )
        raise InputError(msg)
    traced = tracing.traced(what, name=name)
    found = tracing.measured(
        traced, folder=folder, repeats=repeats, threads=threads, power_from=meter
    )
    return traced.graph, found.costs, found.notes
