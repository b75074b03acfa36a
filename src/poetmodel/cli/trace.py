"""``poetmodel trace``: captures a PyTorch module and its loss as a graph file, with a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from poetmodel.cli import inspect, options, tracing
from poetmodel.cli.failures import print_warnings
from poetmodel.cli.output import figures, print_json, print_note, print_text, show
from poetmodel.errors import InputError
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from poetmodel.device import Costs
    from poetmodel.torch.tracing import Trace

EPILOG: Final = "Example: poetmodel trace train:step --out net.graph.json"

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="A function without arguments that returns (model, loss_fn, inputs), with the target "
        "as the last input. MODULE may be path/file.py.",
        show_default=False,
    ),
]
GraphOutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write the graph file, *.graph.json, and its costs next to it, *.profile.csv.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]
ProfileOutOption = Annotated[
    Path | None,
    typer.Option(
        "--profile-out",
        metavar="FILE",
        help="Write the costs, *.csv: measured on this host, or estimated for --device. "
        "Default: next to the graph.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("trace", epilog=EPILOG)(trace)


def trace(
    target: TargetArgument,
    *,
    name: tracing.NameOption = None,
    device: tracing.BoardOption = None,
    power_from: tracing.PowerOption = None,
    folder: tracing.FolderOption = Path(),
    repeats: tracing.RepeatsOption = 5,
    threads: tracing.ThreadsOption = None,
    out: GraphOutOption = None,
    profile_out: ProfileOutOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,  # noqa: ARG001 - acts while it is parsed
) -> None:
    """Capture a training step of a PyTorch module: forward pass, loss and backward pass."""
    tracing.check_choice(device, power_from)
    meter = options.read_device(power_from)
    options.read_device(device)
    if out is not None and out.suffix != ".json":
        msg = f"--out {out}: expected a name that ends in .graph.json"
        raise InputError(msg)
    if out is not None and profile_out is None:
        profile_out = _beside(out)
    for path in (out, profile_out):
        options.check_output(path, inputs=())
    traced = tracing.traced(target, name=name)
    if out is not None:
        traced.graph.save(out)
    costs: Costs | None = None
    notes: tuple[str, ...] = ()
    if device is not None:
        costs, notes = tracing.estimated(traced.graph, device)
    elif profile_out is not None:
        profile = tracing.measured(
            traced, folder=folder, repeats=repeats, threads=threads, power_from=meter
        )
        costs, notes = profile.costs, profile.notes
    if profile_out is not None and costs is not None:
        from poetmodel.device.io import save_profile

        save_profile(costs, profile_out)
    _show(traced, costs, notes, json=json)
    written = [path for path in (out, profile_out) if path is not None]
    for path in written:
        print_note(f"wrote {path}")
    if not written:
        print_warnings(["nothing was written: give --out FILE for the graph"])


def _beside(graph: Path) -> Path:
    """Return the default profile file of a graph file."""
    stem = graph.name.removesuffix(".json").removesuffix(".graph")
    return graph.with_name(f"{stem}.profile.csv")


def _show(traced: Trace, costs: Costs | None, notes: tuple[str, ...], *, json: bool) -> None:
    graph = traced.graph
    if json:
        document = inspect.as_dict(graph) | {"held_bytes": traced.held_bytes, "notes": list(notes)}
        if costs is not None:
            document["costs"] = tracing.cost_figures(graph, costs)
        print_json(document)
        return
    show(*inspect.tables(graph))
    if traced.held_bytes:
        print_text(
            f"a step holds {format_bytes(traced.held_bytes)} of results to its end (the loss, new "
            f"buffer values); 'solve' does not count them: reduce --ram by {traced.held_bytes:,} B"
        )
    if costs is not None:
        show(figures("Costs", tracing.cost_rows(graph, costs)))
        print_text(*notes)
