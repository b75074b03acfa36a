"""``poetmodel sweep``, ``merge`` and ``bench``: resumable runs of many problems and methods."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from poetmodel.backends.registry import backend_names
from poetmodel.case.spelling import SWEPT_LIMITS
from poetmodel.cli import options
from poetmodel.cli.failures import ExitStatus
from poetmodel.cli.output import listing, progress_bar
from poetmodel.cli.reply import Reply
from poetmodel.errors import InputError, join_names
from poetmodel.files import read_text
from poetmodel.problem import Limits
from poetmodel.report.presenter import ValueFormatter, format_yes_no
from poetmodel.solver.request import SearchOptions
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from poetmodel.graph.catalogue import Variant
    from poetmodel.report.pictures import Map, Panel
    from poetmodel.sweeps.measurement import Record
    from poetmodel.sweeps.runs import Run
    from poetmodel.sweeps.tables import Row


MAX_WORKERS: Final = 256
"""Maximum number of worker processes."""

_methods_option = partial(options.option, rich_help_panel="Methods", show_default=False)
_run_option = partial(options.option, rich_help_panel="Run")


@options.group
class GridOptions:
    """The problems, all combinations of the values, and the folder of their records."""

    models: list[str] = options.argument(
        options.REQUIRED,
        "MODELS...",
        "Built-in networks, or graph files.",
    )
    batch: str | None = options.graph_option(
        None, "--batch N,...", "Batch sizes, for built-in networks."
    )
    image: str | None = options.graph_option(
        None, "--image N,...", "Sides of square images in pixels."
    )
    sequence: str | None = options.graph_option(None, "--sequence N,...", "Tokens of a sample.")
    devices: str = options.graph_option(
        options.REQUIRED,
        "--devices NAME,...",
        "Devices, by name or file.",
    )
    ram: str = options.limit_option(
        options.REQUIRED, "--ram SIZE,...", "RAM budgets, such as 20%,30%,256KiB."
    )
    out: Path = options.output_option(
        options.REQUIRED,
        "--out DIR",
        "Folder of the records. Runs that are recorded there are not repeated, unless they failed.",
    )
    deadline: str = options.limit_option(
        "none",
        "--deadline TIME,...",
        "Deadlines, such as none,110%. Default: none.",
        show_default=False,
    )
    constraints: Path | None = options.limit_option(
        None,
        "--constraints FILE",
        "User-defined constraints of all runs, *.toml, as --constraints of solve.",
    )
    methods: str = _methods_option(
        "optimal",
        "--methods NAME,...",
        "Methods, as --method of solve. Default: optimal.",
    )
    backends: str = _methods_option(
        backend_names()[0],
        "--backends NAME,...",
        f"Solvers: {', '.join(backend_names())}, or FILE.py:CLASS. Default: {backend_names()[0]}.",
    )


@options.group
class WorkersOption:
    """Number of local worker processes, or the Dask scheduler whose workers solve the runs."""

    workers: int = _run_option(1, "--workers", "Worker processes.", min=1, max=MAX_WORKERS)
    scheduler: str | None = _run_option(
        None,
        "--scheduler tcp://HOST:PORT",
        "Solve on the workers of this Dask scheduler in place of local processes.",
    )


@options.group
class RunOptions(WorkersOption):
    """Settings of the runs, and outputs."""

    seed: int = options.solve_option(0, "--seed", "Seed of the solves.", min=0)
    cold: bool = _run_option(
        False,
        "--cold",
        "Do not start solves from the schedule of the next smaller budget.",
    )
    shard: str | None = _run_option(
        None,
        "--shard I/N",
        "Solve every N-th run, from the I-th on; merge joins the folders.",
    )
    plot: Path | None = options.output_option(
        None, "--plot FILE", "Draw overhead against RAM: .svg, .png or .pdf."
    )
    pareto: bool = options.output_option(
        False, "--pareto", "Write and draw the Pareto front of energy, RAM and time."
    )


@options.command("poetmodel sweep mlp --devices rpi4b --ram 70%,90% --out sweep")
def sweep(
    problems: GridOptions,
    graph_options: Annotated[
        options.FileGraphOptions, options.without("graph", "batch", "image", "sequence")
    ],
    limits: Annotated[Limits, options.only(*SWEPT_LIMITS)],
    search: Annotated[SearchOptions, options.only("time_limit_s", "gap", "threads")],
    run_options: RunOptions,
    output: options.OutputOptions,
) -> Reply:
    """Solve every combination of models, devices, limits and methods, and record each run."""
    from poetmodel import sweeps

    _check_picture(run_options.plot)
    grid_runs = _grid_runs(
        problems, graph_options.variant, limits, replace(search, seed=run_options.seed)
    )
    if run_options.shard is not None:
        try:
            grid_runs = grid_runs[sweeps.shard(run_options.shard)]
        except InputError as error:
            raise error.with_prefix("--shard") from None
    with progress_bar(enabled=not output.json) as on_progress:
        records = sweeps.sweep(
            grid_runs,
            problems.out,
            workers=run_options.workers,
            scheduler=run_options.scheduler,
            warm=not run_options.cold,
            on_progress=on_progress,
        )
    return _write_records(records, problems.out, run_options)


@options.group
class MergeOptions:
    """The folders of sweeps to join, and the outputs."""

    folders: list[Path] = options.argument(
        options.REQUIRED, "FOLDERS...", "Folders of sweeps, such as those of --shard."
    )
    out: Path = options.output_option(
        options.REQUIRED, "--out DIR", "Folder for all records; it may contain some."
    )
    plot: Path | None = options.output_option(
        None, "--plot FILE", "Draw overhead against RAM: .svg, .png or .pdf."
    )
    pareto: bool = options.output_option(
        False, "--pareto", "Write and draw the Pareto front of energy, RAM and time."
    )


@options.command("poetmodel merge sweep --out merged")
def merge(
    merge_options: MergeOptions,
    output: options.OutputOptions,  # noqa: ARG001 - read where replies are printed
) -> Reply:
    """Join the records and schedules of several sweeps in one folder."""
    from poetmodel.sweeps.store import RECORDS, Store

    _check_picture(merge_options.plot)
    missing = [folder for folder in merge_options.folders if not (folder / RECORDS).is_file()]
    if missing:
        raise InputError(
            f"{folder}: expected the folder of a sweep, with {RECORDS}" for folder in missing
        )
    store = Store(merge_options.out)
    for folder in merge_options.folders:
        store.merge(Store(folder))
    return _write_records(store.records(), merge_options.out, merge_options)


def _check_picture(plot: Path | None) -> None:
    if plot is not None:
        from poetmodel.sweeps.pictures import check_suffix

        check_suffix(plot)


def _write_records(
    records: Sequence[Record], folder: Path, request: RunOptions | MergeOptions
) -> Reply:
    """Write tables of records and draw pictures; reply tables, with status 1 if a run failed."""
    from poetmodel.sweeps import panels, tables

    rows = tables.rows(records)
    front = tables.pareto(rows) if request.pareto else []
    tables.write_csv(folder / "cells.csv", rows)
    if request.pareto:
        tables.write_csv(folder / "pareto.csv", front)
    if request.plot is not None:
        from poetmodel.sweeps.pictures import draw

        draw(request.plot, panels.overhead_panels(rows))
    notes = _draw_pictures(folder / "pareto", panels.pareto_panels(front))[1] if front else []
    text = [_run_table("Runs", rows, proof_column="status")]
    if request.pareto:
        title = "Pareto front of energy, RAM and time"
        text.append(_run_table(title, front, proof_column="proven"))
    return _reply(
        rows,
        document={"cells": rows, **({"pareto": front} if request.pareto else {})},
        text=text,
        warnings=(*notes, *_device_ram_warnings(rows)),
    )


def _grid_runs(
    problems: GridOptions,
    variant: Variant,
    limits: Limits,
    search: SearchOptions,
) -> Sequence[Run]:
    """Return the runs that options state; errors in constraints begin with the file."""
    from poetmodel import sweeps
    from poetmodel.sweeps.runs import CONSTRAINTS_PREFIX

    text = None if problems.constraints is None else read_text(problems.constraints)
    settings = sweeps.Settings.from_limits(limits, search, constraints=text)
    try:
        return sweeps.grid(
            problems.models,
            _split_values(problems.devices, "--devices"),
            ram=_split_values(problems.ram, "--ram"),
            shapes=[
                replace(variant, batch=batch, image=image, sequence=sequence)
                for batch in _parse_sizes(problems.batch, "--batch")
                for image in _parse_sizes(problems.image, "--image")
                for sequence in _parse_sizes(problems.sequence, "--sequence")
            ],
            deadlines=[
                None if name == "none" else name
                for name in _split_values(problems.deadline, "--deadline")
            ],
            methods=_split_values(problems.methods, "--methods"),
            backends=_split_values(problems.backends, "--backends"),
            settings=settings,
        )
    except InputError as error:
        file_prefix = f"{problems.constraints}: "
        raise InputError(
            message.replace(CONSTRAINTS_PREFIX, file_prefix, 1) for message in error.faults
        ) from None


def _reply(
    rows: Sequence[Row],
    *,
    document: dict[str, Any],
    text: Iterable[RenderableType],
    warnings: Iterable[str],
) -> Reply:
    """Return a reply with the reasons and status 1 if a run failed."""
    failed_rows = [row for row in rows if row["status"] == "failed"]
    reasons = [f"{row['model']} | {row['method']}: {row['reason']}" for row in failed_rows]
    return Reply(
        document=document,
        text=text,
        warnings=warnings,
        errors=(f"{len(failed_rows)} of {len(rows)} runs failed", *reasons) if reasons else (),
        status=ExitStatus.FAILURE if reasons else ExitStatus.SUCCESS,
    )


def _device_ram_warnings(rows: Sequence[Row]) -> Iterator[str]:
    """Yield one warning about all runs whose peak and resident bytes exceed their device's RAM."""
    oversized_rows = [row for row in rows if row["fits_device"] is False]
    if oversized_rows:
        models_on_devices = dict.fromkeys(
            f"{row['model']} on {row['device']}" for row in oversized_rows
        )
        verb = "does" if len(oversized_rows) == 1 else "do"
        yield (
            f"{len(oversized_rows)} of {len(rows)} runs {verb} not fit the RAM of their device "
            f"with all resident bytes: {join_names(models_on_devices)}"
        )


def _split_values(text: str, option: str) -> list[str]:
    """Split a text at commas, without blanks and empty values; `option` is the prefix of errors."""
    values = [value.strip() for value in text.split(",") if value.strip()]
    if not values:
        raise InputError(f"{option}: expected names with commas between them, got {text!r}")
    return values


def _parse_sizes(text: str | None, option: str) -> list[int | None]:
    """Return the input sizes of an option; [None], the network's default, without the option."""
    if text is None:
        return [None]
    try:
        return [options.parse_input_size(size) for size in _split_values(text, option)]
    except typer.BadParameter as error:
        raise InputError(f"{option}: {error}") from None


def _run_table(title: str, rows: Sequence[Row], *, proof_column: str) -> Table:
    """Return a table of runs; `proof_column` is ``status``, or ``proven`` for a Pareto front."""
    from poetmodel.sweeps.summaries import overhead_ratio

    heads = ("model, device", "RAM", "method", proof_column)
    metric_heads = ("overhead", "gap", "peak", "time")
    lines = [
        (
            f"{row['model']} {row['device']}",
            _join_texts(row["ram"], row["deadline"]),
            _join_texts(row["method"], row["backend"]),
            format_yes_no(row[proof_column])
            if isinstance(row[proof_column], bool)
            else row[proof_column],
            _format_value(overhead_ratio(row), "{:.3%}".format),
            _format_value(row["axis_gap"], lambda gap: "none" if gap == 1 else f"{gap:.2%}"),
            _format_value(row["peak_ram_bytes"], format_bytes),
            _format_value(row["makespan_s"], format_seconds),
        )
        for row in rows
    ]
    return listing(
        title, (*heads, *metric_heads), lines, n_text_columns=len(heads), whole_names=False
    )


def _join_texts(*texts: str | None) -> str:
    return ", ".join(text for text in texts if text)


def _format_value(value: float | None, format_number: ValueFormatter) -> str:
    return "" if value is None else format_number(value)


# -- figures of the paper ----------------------------------------------------------------------

DEFAULT_FOLDER: Final = Path("poetmodel-bench")
"""Parent of the default output folders of figures."""
PICTURE_SUFFIXES: Final = (".svg", ".png")
"""Suffixes of the pictures that are drawn of each figure and each Pareto front."""


@options.group
class FigureOptions:
    """The figure, and its settings."""

    name: str = options.argument(
        options.REQUIRED,
        "NAME",
        "figure2, figure3, figure4, figure5, table3 of the POET paper; instances: write the "
        "instance library; check: verify solutions of it.",
    )
    folders: list[Path] | None = options.argument(
        None, "[FOLDERS]...", "For instances: DIR. For check: DIR and SOLUTIONS."
    )
    mps: str | None = options.output_option(
        None, "--mps NAME,...", "With instances: also write MPS files of these problems."
    )
    quick: bool = options.solve_option(False, "--quick", "Fewer budgets, shorter limits.")
    out: Path | None = options.output_option(
        None,
        "--out DIR",
        "Folder of records, tables and pictures. Runs that are recorded there are not "
        "repeated, unless they failed. Default: poetmodel-bench/NAME.",
    )
    time_limit_s: float | None = options.solve_option(
        None,
        "--time-limit TIME",
        "Limit of each solve: seconds, or a time such as 5min. Default: the figure's.",
        parser=options.parse_seconds,
    )


@options.command("poetmodel bench figure5 --quick")
def bench(
    request: FigureOptions, worker_options: WorkersOption, output: options.OutputOptions
) -> Reply:
    """Reproduce a figure of the paper, or write the instance library or check its solutions."""
    from poetmodel.cli import instances

    folders = request.folders or []
    if len(folders) != instances.N_FOLDERS.get(request.name, 0):
        expected = instances.EXPECTED_FOLDERS.get(
            request.name, "no folder; the records go to --out"
        )
        raise InputError(f"bench {request.name}: expected {expected}")
    if request.mps is not None and request.name != instances.WRITE:
        raise InputError(f"--mps: only 'poetmodel bench {instances.WRITE}' has this option")
    if request.name == instances.WRITE:
        return instances.write_instances(folders[0], request.mps)
    if request.name == instances.CHECK:
        return instances.check_solutions(folders[0], folders[1])
    return _reproduce_figure(request, worker_options, output)


def _reproduce_figure(
    request: FigureOptions, worker_options: WorkersOption, output: options.OutputOptions
) -> Reply:
    """Solve the unfinished runs of a figure; write records, ``cells.csv`` and pictures."""
    from poetmodel.sweeps import figures, panels, summaries, tables
    from poetmodel.sweeps import sweep as run_sweep
    from poetmodel.sweeps.store import Store

    limit_s, name = request.time_limit_s, request.name
    figure = figures.find_figure(name)
    folder = DEFAULT_FOLDER / name if request.out is None else request.out
    figure_runs = figure.runs(quick=request.quick, time_limit_s=limit_s)
    with progress_bar(enabled=not output.json) as on_progress:
        records = run_sweep(
            figure_runs,
            folder,
            workers=worker_options.workers,
            scheduler=worker_options.scheduler,
            on_progress=on_progress,
        )
    run_rows = tables.rows(records)
    tables.write_csv(folder / "cells.csv", run_rows)
    figure_panels = panels.figure_panels(name, run_rows, Store(folder).load_schedule)
    pictures, notes = _draw_pictures(folder / name, figure_panels)
    summary_tables = summaries.figure_summaries(name, run_rows)
    from rich.text import Text

    document = {
        "name": name,
        "title": figure.title,
        "paper": figure.paper,
        "cells": run_rows,
        "tables": [
            {"title": table.title, "heads": table.heads, "rows": table.rows}
            for table in summary_tables
        ],
        "pictures": [str(path) for path in pictures],
        "notes": notes,
    }
    tables_of_text = [
        listing(
            table.title,
            table.heads,
            table.rows,
            n_text_columns=table.n_text_columns,
            whole_names=False,
        )
        for table in summary_tables
    ]
    return _reply(
        run_rows,
        document=document,
        text=(*tables_of_text, Text(f"The paper: {figure.paper}")),
        warnings=() if output.json else notes,
    )


def _draw_pictures(
    stem: Path, panels: Sequence[Panel] | Sequence[Map]
) -> tuple[list[Path], list[str]]:
    """Draw files of `PICTURE_SUFFIXES`; return the paths, and notes if none can be drawn."""
    from poetmodel.sweeps.pictures import check_suffix, draw

    paths = [stem.with_suffix(suffix) for suffix in PICTURE_SUFFIXES]
    try:
        for path in paths:
            check_suffix(path)
    except InputError as error:
        return [], [f"no picture is drawn: {error}"]
    for path in paths:
        draw(path, panels)
    return paths, []
