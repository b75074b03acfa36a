"""``poetmodel sweep``: many problems by many methods, in a store that can be resumed."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from poetmodel.cli import completion, graphs, options
from poetmodel.cli.failures import Status, print_faults, print_warnings
from poetmodel.cli.output import console, is_quiet, listing, print_json, show
from poetmodel.errors import InputError, listed
from poetmodel.graph.catalogue import InputShape
from poetmodel.problem import DeadlineCounts
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.table import Table

    from poetmodel.bench import Progress
    from poetmodel.bench.tables import Row

EPILOG: Final = "Example: poetmodel sweep mlp --devices rpi4b --ram 70%,90% --out sweep"

MAX_WORKERS: Final = 256
"""Most processes that can be requested."""


def _listed(
    what: str,
    metavar: str,
    text: str,
    panel: str,
    names: Callable[[], completion.Offer] | None = None,
) -> Any:
    return typer.Option(
        what,
        metavar=metavar,
        autocompletion=None if names is None else completion.several(names),
        help=text,
        rich_help_panel=panel,
        show_default=False,
    )


ModelsArgument = Annotated[
    list[str],
    typer.Argument(
        autocompletion=completion.one(completion.models),
        metavar="MODELS...",
        help="Built-in networks, or graph files.",
    ),
]
BatchesOption = Annotated[
    str | None, _listed("--batch", "N,...", "Batch sizes, for built-in networks.", options.WHAT)
]
ImagesOption = Annotated[
    str | None, _listed("--image", "N,...", "Sides of square images in pixels.", options.WHAT)
]
SequencesOption = Annotated[
    str | None, _listed("--sequence", "N,...", "Tokens of a sample.", options.WHAT)
]
DevicesOption = Annotated[
    str,
    _listed("--devices", "NAME,...", "Devices, by name or file.", options.WHAT, completion.devices),
]
RamOption = Annotated[
    str, _listed("--ram", "SIZE,...", "RAM budgets, such as 20%,30%,256KiB.", options.LIMITS)
]
DeadlineOption = Annotated[
    str,
    _listed(
        "--deadline", "TIME,...", "Deadlines, such as none,110%. Default: none.", options.LIMITS
    ),
]
MethodsOption = Annotated[
    str,
    _listed(
        "--methods",
        "NAME,...",
        "Methods, as --method of solve. Default: optimal.",
        "Methods",
        completion.methods,
    ),
]
BackendsOption = Annotated[
    str,
    _listed(
        "--backends",
        "NAME,...",
        "Solvers: highs, scip, gurobi. Default: highs.",
        "Methods",
        completion.backends,
    ),
]
FolderOption = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder of the records. Runs that are recorded there are not repeated.",
        rich_help_panel=options.OUTPUT,
    ),
]
WorkersOption = Annotated[
    int,
    typer.Option(
        "--workers", min=1, max=MAX_WORKERS, help="Worker processes.", rich_help_panel="Run"
    ),
]
SchedulerOption = Annotated[
    str | None,
    _listed("--scheduler", "tcp://HOST:PORT", "Dask scheduler in place of local processes.", "Run"),
]
ColdOption = Annotated[
    bool,
    typer.Option(
        "--cold",
        help="Do not start solves from the schedule of the next smaller budget.",
        rich_help_panel="Run",
    ),
]
ParetoOption = Annotated[
    bool,
    typer.Option(
        "--pareto",
        help="Write and show the Pareto front of energy, RAM and time, with what is proven.",
        rich_help_panel=options.OUTPUT,
    ),
]
ParquetOption = Annotated[
    bool,
    typer.Option(
        "--parquet",
        help="Also write cells.parquet; needs pandas and pyarrow.",
        rich_help_panel=options.OUTPUT,
    ),
]
PlotOption = Annotated[
    Path | None,
    _listed("--plot", "FILE", "Draw overhead against RAM: .svg, .png or .pdf.", options.OUTPUT),
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, help="Seed of the solves.", rich_help_panel=options.HOW)
]
CountsOption = Annotated[
    DeadlineCounts | None,
    _listed(
        "--deadline-counts",
        "MODE",
        "Which time the deadline limits: compute, serial, overlap.",
        options.LIMITS,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("sweep", epilog=EPILOG)(sweep)


def sweep(  # noqa: PLR0913 - one for each option
    models: ModelsArgument,
    *,
    batch: BatchesOption = None,
    image: ImagesOption = None,
    sequence: SequencesOption = None,
    devices: DevicesOption,
    ram: RamOption,
    out: FolderOption,
    deadline: DeadlineOption = "none",
    deadline_counts: CountsOption = None,
    methods: MethodsOption = "optimal",
    backends: BackendsOption = "highs",
    time_limit: options.TimeLimitOption = 60.0,
    gap: options.GapOption = 1e-4,
    threads: options.ThreadsOption = 1,
    seed: SeedOption = 0,
    workers: WorkersOption = 1,
    scheduler: SchedulerOption = None,
    cold: ColdOption = False,
    pareto: ParetoOption = False,
    parquet: ParquetOption = False,
    plot: PlotOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,  # noqa: ARG001 - acts while it is parsed
) -> None:
    """Solve every combination of models, devices, limits and methods, and record each."""
    from poetmodel import bench
    from poetmodel.bench import tables

    if plot is not None:
        from poetmodel.bench.pictures import check_form

        check_form(plot)
    settings = bench.Settings(
        deadline_counts=None if deadline_counts is None else str(deadline_counts),
        time_limit_s=time_limit,
        gap=gap,
        threads=threads,
        seed=seed,
    )
    cells = bench.grid(
        models,
        _names(devices, "--devices"),
        ram=_names(ram, "--ram"),
        shapes=[
            InputShape(batch=samples, image=side, sequence=tokens)
            for samples in _sizes(batch, "--batch")
            for side in _sizes(image, "--image")
            for tokens in _sizes(sequence, "--sequence")
        ],
        deadlines=[None if name == "none" else name for name in _names(deadline, "--deadline")],
        methods=_names(methods, "--methods"),
        backends=[_backend(name) for name in _names(backends, "--backends")],
        settings=settings,
    )
    with progress_bar(wanted=not json) as on_progress:
        records = bench.sweep(
            cells,
            out,
            workers=workers,
            scheduler=scheduler,
            warm=not cold,
            on_progress=on_progress,
        )
    found = tables.rows(records)
    front = tables.pareto(found) if pareto else []
    tables.write_csv(out / "cells.csv", found)
    if pareto:
        tables.write_csv(out / "pareto.csv", front)
    if parquet:
        tables.write_parquet(out / "cells.parquet", found)
    if plot is not None:
        from poetmodel.bench.pictures import draw, overheads

        draw(plot, overheads(found))
    _deliver(found, front, json=json, pareto=pareto)
    _warn(found)
    failed = [row for row in found if row["status"] == "failed"]
    if failed:
        reasons = [f"{row['model']} | {row['method']}: {row['reason']}" for row in failed]
        print_faults([f"{len(failed)} of {len(found)} runs failed", *reasons])
        raise typer.Exit(Status.FAILURE)


def _warn(found: Sequence[Row]) -> None:
    """Warn about runs whose peak and resident bytes exceed the RAM of their device."""
    over = [row for row in found if row["fits_device"] is False]
    if over:
        places = dict.fromkeys(f"{row['model']} on {row['device']}" for row in over)
        verb = "does" if len(over) == 1 else "do"
        print_warnings(
            [
                f"{len(over)} of {len(found)} runs {verb} not fit the RAM of their device with all "
                f"resident bytes: {listed(places)}"
            ]
        )


def _names(text: str, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        msg = f"{option}: expected names with commas between them, got {text!r}"
        raise InputError(msg)
    return names


def _sizes(text: str | None, option: str) -> list[int | None]:
    """Return the sizes of a network's input; without any, its own."""
    if text is None:
        return [None]
    try:
        return [graphs.size(name) for name in _names(text, option)]
    except typer.BadParameter as error:
        msg = f"{option}: {error}"
        raise InputError(msg) from None


def _backend(name: str) -> str:
    try:
        return options.Backend(name).value
    except ValueError:
        known = ", ".join(options.Backend)
        msg = f"--backends: expected some of {known}, got {name!r}"
        raise InputError(msg) from None


def _deliver(found: Sequence[Row], front: Sequence[Row], *, json: bool, pareto: bool) -> None:
    if json:
        print_json({"cells": found, **({"pareto": front} if pareto else {})})
        return
    show(_table("Runs", found, proof="status"))
    if pareto:
        show(_table("Pareto front of energy, RAM and time", front, proof="proven"))


def _table(title: str, found: Sequence[Row], *, proof: str) -> Table:
    heads = ("model, device", "RAM", "method", proof)
    figures = ("overhead", "gap", "peak", "time")
    lines = [
        (
            f"{row['model']} {row['device']}",
            _words_of(row["ram"], row["deadline"]),
            _words_of(row["method"], row["backend"]),
            _proof(row[proof]),
            _share(row),
            _figure(row["axis_gap"], lambda gap: "none" if gap == 1 else f"{gap:.2%}"),
            _figure(row["peak_ram_bytes"], format_bytes),
            _figure(row["makespan_s"], format_seconds),
        )
        for row in found
    ]
    return listing(title, (*heads, *figures), lines, left=len(heads), whole_names=False)


def _words_of(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)


def _proof(value: str | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value


def _share(row: Row) -> str:
    if row["overhead_j"] is None or not row["baseline_energy_j"]:
        return ""
    return f"{row['overhead_j'] / row['baseline_energy_j']:.3%}"


def _figure(value: float | None, form: Callable[[Any], str]) -> str:
    return "" if value is None else form(value)


@contextmanager
def progress_bar(*, wanted: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Show the progress of a sweep on stderr: a bar in a terminal, else a line for each run."""
    if not wanted or is_quiet():
        yield None
        return
    if not sys.stderr.isatty():
        yield lambda progress: print(_words(progress), file=sys.stderr)
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda progress: bar.update(
            task, total=progress.total, completed=progress.done, description=_words(progress)
        )


def _words(progress: Progress) -> str:
    left = progress.remaining_s
    text = f"{progress.done} of {progress.total} runs done, {progress.failed} failed"
    return text if left is None else f"{text}, about {format_seconds(left)} left"
