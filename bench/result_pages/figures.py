"""The tables and pictures of the paper's figures.

``poetmodel bench NAME --out DIR`` makes the records; ``DIR/cells.jsonl`` is kept as
``bench/results/figures/NAME.jsonl``, and ``DIR/schedules`` of figure2, which shows maps, beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import TYPE_CHECKING, Any, Final

from blocks import replace_block, table
from poetmodel.baselines import method_names
from poetmodel.bench.figures import FIGURES
from poetmodel.bench.measurement import REFUSED
from poetmodel.bench.pictures import digest, draw, panels
from poetmodel.bench.store import RecordFile
from poetmodel.bench.summaries import overhead_ratio, summary, without
from poetmodel.bench.tables import rows
from result_pages.drawing import BLUE, RED, Chart
from result_pages.records import versions_text
from result_pages.rendering import render
from solver_tables import comparison

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from poetmodel.bench.measurement import Record

NOTHING_YET: Final = "No run is recorded yet."


def read(folder: Path, name: str) -> list[Record]:
    """Return the kept records of a figure, the last of each run; [] where there are none.

    They come by model and device as in the file, then by method and budget, in whatever order
    several workers have written them.
    """
    found = RecordFile(folder / f"{name}.jsonl", lambda record: str(record["key"])).records()
    groups = list(dict.fromkeys(_group(record) for record in found))
    methods = method_names()

    def place(record: Record) -> tuple[float, ...]:
        cell = record["cell"]
        share = float(cell["ram"].rstrip("%"))
        return groups.index(_group(record)), methods.index(cell["method"]), share

    return sorted(found, key=place)


def _group(record: Record) -> tuple[Any, ...]:
    return tuple(record["cell"][name] for name in ("model", "device", "deadline"))


def block(name: str, records: Sequence[Record], picture: str) -> str:
    """Return the generated block of a figure, which shows a picture."""
    if not records:
        return NOTHING_YET
    settings = [record["cell"]["settings"] for record in records]
    return render(
        "paper-figure",
        figure=FIGURES[name],
        picture=picture,
        records=records,
        machine=records[0]["machine"],
        versions=versions_text(records[0]["machine"]),
        days=sorted({record["recorded"][:10] for record in (records[0], records[-1])}),
        gap=settings[0]["gap"],
        limits=sorted({setting["time_limit_s"] for setting in settings}),
        seeds=sorted({setting["seed"] for setting in settings}),
        warm=sum(bool(record.get("warm_start")) for record in records),
        cpu_s=sum(record.get("cpu_s", 0.0) for record in records),
        wall_s=sum(record.get("seconds", 0.0) for record in records),
        tables=[
            (part.title, table(part.heads, part.rows, right=part.words))
            for part in summary(name, rows(records))
        ],
    )


# -- all of them together --------------------------------------------------------------------------

OVERVIEW: Final = ("figure3", "figure4", "figure5")
"""Figures whose problems are compared."""
_MAIN: Final = "optimal"


def readme_solvers(folder: Path) -> str:
    """Return the README's table of solvers: each problem and formulation within the longest limit.

    A cell is the time to the proof, or the gap that the limit left.
    """
    records = read(folder, "solvers")
    if not records:
        return NOTHING_YET
    found = rows(records)
    limit_s = max(row["time_limit_s"] for row in found)
    solvers = dict.fromkeys(str(row["backend"]) for row in found)
    lines = [
        (f"`{part.title}`".replace(" on ", "` on ", 1).rstrip("`"), formulation, *cells.values())
        for part in comparison([row for row in found if row["time_limit_s"] == limit_s])
        for formulation, cells in _by_formulation(part.rows, solvers).items()
    ]
    return render(
        "solvers-readme",
        table=table(("problem", "formulation", *solvers), lines),
        limit_s=limit_s,
        records=records,
    )


def _by_formulation(
    ended: Sequence[Sequence[str]], solvers: Iterable[str]
) -> dict[str, dict[str, str]]:
    """Return how each solver ended with each formulation, by both."""
    found: dict[str, dict[str, str]] = {}
    for solver, formulation, _, status, _, _, gap, seconds in ended:
        cells = found.setdefault(f"`{formulation}`", dict.fromkeys(solvers, "-"))
        if status == without({"status": REFUSED}):
            cells[solver] = status
        elif gap in ("-", "none in time"):
            cells[solver] = f"no solution in {seconds}"
        else:
            cells[solver] = seconds if gap == "0 %" else f"gap {gap} after {seconds}"
    return found


def overview(folder: Path) -> Chart:
    """Return the overhead of each method over the optimum's, a point for each problem."""
    problems: dict[str, dict[str, float]] = {}
    for row in (row for name in OVERVIEW for row in rows(read(folder, name))):
        ratio = overhead_ratio(row)
        if ratio is not None:
            place = json.dumps([row[key] for key in ("model", "device", "deadline", "ram")])
            problems.setdefault(place, {})[row["method"]] = ratio
    found: dict[str, list[float]] = {}
    for methods in problems.values():
        best = methods.pop(_MAIN, None)
        if best:
            for method, ratio in methods.items():
                found.setdefault(method, []).append(ratio / best)
    return Chart(shown=found, paint=_paint_overview, height_inches=4.2)


def _paint_overview(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    methods = sorted(shown, key=lambda name: statistics.median(shown[name]))
    for place, method in enumerate(methods):
        times = shown[method]
        axes.plot(times, [place] * len(times), "o", color=BLUE, alpha=0.35, markersize=5)
        axes.plot(statistics.median(times), place, "|", color=RED, markersize=14, mew=2)
    axes.axvline(1, color="#000000", linewidth=1.8)
    axes.set_yticks(range(len(methods)), methods)
    axes.set(xscale="log", ylim=(len(methods) - 0.5, -0.5))
    axes.set_title("Energy overhead of each method, in times the optimum's (the line)")
    axes.set_xlabel("a dot for each problem of Figures 3 to 5 that it solves; red: the median")
    axes.xaxis.set_major_formatter("{x:,g} x")


# -- blocks ----------------------------------------------------------------------------------------


def picture_of(page: Path, name: str) -> Path:
    """Return where the picture of a figure is: beside its page."""
    return page.with_name(f"paper-{name}.svg")


def page_text(page: Path, folder: Path) -> str:
    """Return the content of the page with every block current."""
    text = page.read_text(encoding="utf-8")
    for name in FIGURES:
        records = read(folder, name)
        text = replace_block(text, name, block(name, records, picture_of(page, name).name))
    return text


def update_pictures(page: Path, folder: Path, *, check: bool) -> int:
    """Draw the pictures that are not what the records say, or only say so; return the status."""
    status = 0

    def schedule(key: str) -> dict[str, Any] | None:
        path = folder / "schedules" / f"{key}.schedule.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    for name in FIGURES:
        records, path = read(folder, name), picture_of(page, name)
        if not records:
            continue
        shown = panels(name, rows(records), schedule)
        if path.is_file() and f"data {digest(shown)}" in path.read_text(encoding="utf-8"):
            continue
        sys.stdout.write(f"{'stale' if check else 'wrote'} {path}\n")
        if check:
            status = 1
        else:
            draw(path, shown)
    return status
