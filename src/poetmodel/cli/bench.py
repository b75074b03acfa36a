"""``poetmodel bench``: figures of the paper, and a comparison of solvers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from poetmodel.cli import completion
from poetmodel.cli.failures import print_warnings
from poetmodel.cli.options import REQUIRED, OutputOptions, argument, command, group, how, output
from poetmodel.cli.output import listing, print_json, show
from poetmodel.cli.progress import progress_bar
from poetmodel.cli.sweep import WorkersOption, fail_if_failed
from poetmodel.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.report.pictures import Map, Panel

FOLDER: Final = Path("poetmodel-bench")
"""Parent of the default folders of all figures."""
FORMS: Final = (".svg", ".png")


@group
class FigureOptions:
    """The figure, and how it is made."""

    name: str = argument(
        REQUIRED,
        "NAME",
        "figure2, figure3, figure4, figure5, table3: of the POET paper. solvers: HiGHS, SCIP "
        "and Gurobi on two formulations.",
        autocompletion=completion.figures,
    )
    quick: bool = how(False, "--quick", "Fewer budgets, one seed, shorter limits.")
    out: Path | None = output(
        None,
        "--out DIR",
        "Folder of records, tables and pictures. Runs that are recorded there are not "
        "repeated. Default: poetmodel-bench/NAME.",
    )
    time_limit: float | None = how(
        None, "--time-limit SECONDS", "Limit of each solve. Default: the figure's.", min=0.001
    )


@command("poetmodel bench figure5 --quick")
def bench(wanted: FigureOptions, runs: WorkersOption, output: OutputOptions) -> None:
    """Reproduce a figure of the paper: records, a table and a picture; can be resumed."""
    from poetmodel.bench import figures, pictures, summaries, sweep, tables
    from poetmodel.bench.store import Store

    limit_s, name = wanted.time_limit, wanted.name
    if limit_s is not None and not math.isfinite(limit_s):
        raise InputError(f"--time-limit: expected a number of seconds above 0, got {limit_s}")
    figure = figures.figure(name)
    folder = FOLDER / name if wanted.out is None else wanted.out
    figure_runs = figure.runs(quick=wanted.quick, time_limit_s=limit_s)
    with progress_bar(wanted=not output.json) as on_progress:
        records = sweep(
            figure_runs, folder, workers=runs.workers, warm=figure.warm, on_progress=on_progress
        )
    found = tables.rows(records)
    tables.write_csv(folder / "cells.csv", found)
    shown = pictures.panels(name, found, Store(folder).schedule)
    drawn, notes = _draw(folder / name, shown)
    summary = summaries.summary(name, found)
    if output.json:
        print_json(
            {
                "name": name,
                "title": figure.title,
                "paper": figure.paper or None,
                "cells": found,
                "tables": [
                    {"title": table.title, "heads": table.heads, "rows": table.rows}
                    for table in summary
                ],
                "pictures": [str(path) for path in drawn],
                "notes": notes,
            }
        )
    else:
        for table in summary:
            heads, rows = table.heads, table.rows
            show(listing(table.title, heads, rows, left=table.words, whole_names=False))
        if figure.paper:
            show(f"The paper: {figure.paper}")
        print_warnings(notes)
    fail_if_failed(found)


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
