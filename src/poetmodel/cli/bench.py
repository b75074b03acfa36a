"""``poetmodel bench``: figures of the paper, and a comparison of solvers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from poetmodel.cli import completion, options
from poetmodel.cli.failures import Status, print_faults, print_warnings
from poetmodel.cli.output import listing, print_json, show
from poetmodel.cli.sweep import WorkersOption, progress_bar
from poetmodel.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.bench.figures import Figure
    from poetmodel.bench.pictures import Map, Panel
    from poetmodel.bench.tables import Row

EPILOG: Final = "Example: poetmodel bench figure5 --quick"
FOLDER: Final = Path("poetmodel-bench")
"""Parent of the default folders of all figures."""
FORMS: Final = (".svg", ".png")
"""Pictures that are drawn."""

NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        autocompletion=completion.one(completion.figures),
        help="figure2, figure3, figure4, figure5, table3: of the POET paper. solvers: HiGHS, SCIP "
        "and Gurobi on two formulations.",
    ),
]
QuickOption = Annotated[
    bool,
    typer.Option(
        "--quick", help="Fewer budgets, one seed, shorter limits.", rich_help_panel=options.HOW
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder of records, tables and pictures. Runs that are recorded there are not "
        "repeated. Default: poetmodel-bench/NAME.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]
LimitOption = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        min=0.001,
        help="Limit of each solve. Default: the figure's.",
        rich_help_panel=options.HOW,
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("bench", epilog=EPILOG)(bench)


def bench(
    name: NameArgument,
    *,
    quick: QuickOption = False,
    out: FolderOption = None,
    time_limit: LimitOption = None,
    workers: WorkersOption = 1,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,  # noqa: ARG001 - acts while it is parsed
) -> None:
    """Reproduce a figure of the paper: records, a table and a picture; can be resumed."""
    from poetmodel.bench import figures, pictures, sweep, tables
    from poetmodel.bench.store import Store

    if time_limit is not None and not math.isfinite(time_limit):
        msg = f"--time-limit: expected a number of seconds above 0, got {time_limit}"
        raise InputError(msg)
    figure = figures.figure(name)
    folder = FOLDER / name if out is None else out
    runs = figure.runs(quick=quick, time_limit_s=time_limit)
    with progress_bar(wanted=not json) as on_progress:
        records = sweep(runs, folder, workers=workers, warm=figure.warm, on_progress=on_progress)
    found = tables.rows(records)
    tables.write_csv(folder / "cells.csv", found)
    shown = pictures.panels(name, found, Store(folder).schedule)
    drawn, notes = _draw(folder / name, shown)
    if json:
        print_json(_document(figure, found, drawn, notes))
    else:
        _show(figure, found)
        print_warnings(notes)
    failed = [row for row in found if row["status"] == "failed"]
    if failed:
        reasons = [f"{row['model']} | {row['method']}: {row['reason']}" for row in failed]
        print_faults([f"{len(failed)} of {len(found)} runs failed", *reasons])
        raise typer.Exit(Status.FAILURE)


def _draw(stem: Path, shown: Sequence[Panel] | Sequence[Map]) -> tuple[list[Path], list[str]]:
    """Draw the pictures; return their files, and notes on what is missing."""
    from poetmodel.bench.pictures import check_form, draw

    paths = [stem.with_suffix(form) for form in FORMS]
    try:
        for path in paths:
            check_form(path)
    except InputError as error:
        return [], [f"no picture is drawn: {error}"]
    for path in paths:
        draw(path, shown)
    return paths, []


def _document(
    figure: Figure, found: Sequence[Row], pictures: Sequence[Path], notes: Sequence[str]
) -> dict[str, Any]:
    from poetmodel.bench.summaries import summary

    return {
        "name": figure.name,
        "title": figure.title,
        "paper": figure.paper or None,
        "cells": list(found),
        "tables": [
            {"title": table.title, "heads": list(table.heads), "rows": list(table.rows)}
            for table in summary(figure.name, found)
        ],
        "pictures": [str(path) for path in pictures],
        "notes": list(notes),
    }


def _show(figure: Figure, found: Sequence[Row]) -> None:
    from poetmodel.bench.summaries import summary

    tables = summary(figure.name, found)
    show(
        *(
            listing(table.title, table.heads, table.rows, left=table.words, whole_names=False)
            for table in tables
        )
    )
    if figure.paper:
        show(f"The paper: {figure.paper}")
