"""Write the pages of results and the README's table from the newest records of benchmark runs.

``python scripts/make_results.py`` takes the last ``*-grid.jsonl`` of ``bench/results/`` for the
grid (``docs/results-grid.md``, its plot, and its part of ``docs/results.md``), the last
``*-training.jsonl`` for the comparison of training methods, and the last other file for all else;
``--check`` writes nothing and exits 1 where a page is not what the records say. Without a record
there is no page.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grid_pages
import grid_plot
import training_pages
from blocks import replace_block, table, update_pages
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "bench" / "results"
PAGE: Final = ROOT / "docs" / "results.md"
GRID_PAGE: Final = ROOT / "docs" / "results-grid.md"
GRID_PLOT: Final = ROOT / "docs" / "results-scale.svg"
README: Final = ROOT / "README.md"

SHIFT_S: Final = 1.0
"""Shift of geometric means [s]."""
METHODS: Final = ("default", "compact, events")
"""Columns of the tables, by the names of the methods."""
IN_README: Final = (
    ("resnet18-cifar", "rpi4b", "40%"),
    ("resnet50", "rpi4b", "50%"),
    ("bert-base", "rpi4b", "50%"),
    ("paper/vgg16-cifar", "paper-m4", "50%"),
    ("paper/vgg16-cifar", "paper-a72", "50%"),
    ("paper/resnet18-cifar", "paper-m4", "50%"),
    ("paper/resnet18-cifar", "paper-a72", "50%"),
)
"""Model, device and budget of the rows of the README's table."""
NOTHING_YET: Final = "No run is recorded yet."

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Run:
    """One record of a solve."""

    record: dict[str, Any]
    """The line."""

    @property
    def key(self) -> Key:
        """Model, device and budget."""
        case = self.record["case"]
        return case["model"], case["device"], case["ram"]

    @property
    def seconds(self) -> float:
        """Wall time [s]."""
        return float(self.record["seconds"])

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.record["case"]["method"]["name"])

    @property
    def gap(self) -> float | None:
        """Gap of what was solved: of the problem, or of a model that is another problem."""
        of_the_problem = self.method in ("default", "compact, all")
        gap = self.record["result"]["gap"] if of_the_problem else self.record["model_gap"]
        return None if gap is None else float(gap)

    @property
    def done(self) -> bool:
        """Whether it ended with the gap that was asked for."""
        return self.gap is not None and self.gap <= self.record["result"]["problem"]["gap"]

    @property
    def accepted(self) -> bool:
        """Whether there is a schedule that the judge accepts."""
        return self.overhead_ratio is not None and not self.record["result"]["violations"]

    @property
    def overhead_ratio(self) -> float | None:
        """Overhead over the baseline."""
        result = self.record["result"]
        if result["overhead_j"] is None or not result["baseline_energy_j"]:
            return None
        return float(result["overhead_j"] / result["baseline_energy_j"])

    def cell(self) -> str:
        """Return time, and gap where one is left."""
        text = seconds(self.seconds)
        if not self.done:
            text = f"**{text}**, gap {percent(self.gap)}"
        if self.record["result"]["violations"]:
            text += ", rejected"
        return text


def seconds(value: float) -> str:
    """Return a time with three digits."""
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"  # noqa: PLR2004


def percent(ratio: float | None, digits: int = 3) -> str:
    """Return a fraction as a percentage, or a dash."""
    return "-" if ratio is None else f"{100 * ratio:.{digits}g} %"


def solves(records: Sequence[dict[str, Any]], group: str) -> dict[Key, dict[str, list[Run]]]:
    """Return the solves of one table: by problem and method, seeds together, in the run's order."""
    found: dict[Key, dict[str, list[Run]]] = {}
    for record in records:
        if record["kind"] == "solve" and record["case"]["group"] == group:
            run = Run(record)
            found.setdefault(run.key, {}).setdefault(run.method, []).append(run)
    return found


def middle(runs: Sequence[Run]) -> Run:
    """Return the run of the median time among seeds, the slower of two."""
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def shifted_mean(times: Sequence[float]) -> float:
    """Return the geometric mean of times shifted by `SHIFT_S`."""
    return math.exp(statistics.fmean(math.log(time + SHIFT_S) for time in times)) - SHIFT_S


def paper_tables(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a heading and a table for every published graph."""
    by_model: dict[str, list[tuple[str, ...]]] = {}
    for (model, device, ram), methods in solves(records, "paper").items():
        chosen = {name: middle(runs) for name, runs in methods.items()}
        valid = [run.overhead_ratio for run in chosen.values() if run.accepted]
        least = min((value for value in valid if value is not None), default=None)
        cells = [chosen[name].cell() if name in chosen else "-" for name in METHODS]
        row = (
            device,
            ram,
            percent(least, 5),
            *cells,
        )
        by_model.setdefault(model, []).append(row)
    heads = ("device", "RAM", "overhead", *METHODS)
    for model, rows in by_model.items():
        yield f"### `{model}`"
        yield table(heads, rows, right=1)


def summary_table(records: Sequence[dict[str, Any]]) -> str:
    """Return what each method reached over all published graphs."""
    cells = solves(records, "paper")
    rows = []
    for name in METHODS:
        runs = [middle(methods[name]) for methods in cells.values() if name in methods]
        if runs:
            done = sum(run.done for run in runs)
            mean = shifted_mean([run.seconds for run in runs])
            rows.append((name, f"{len(runs)}", f"{done}", seconds(mean)))
    return table(("method", "problems", "solved", "shifted geometric mean"), rows, right=1)


def default_table(records: Sequence[dict[str, Any]], group: str) -> str:
    """Return the table of problems that are solved by default."""
    rows = []
    for (model, device, ram), methods in solves(records, group).items():
        run = middle(methods["default"])
        result, counts = run.record["result"], run.record["counts"] or {}
        peak = result["peak_ram_bytes"]
        expected = run.record["case"]["expected_overhead_ratio"]
        rows.append(
            (
                f"`{model}`",
                device,
                ram,
                str(result["status"]),
                percent(run.overhead_ratio, 5),
                *([percent(expected, 5)] if group == "reference" else []),
                percent(result["gap"]),
                seconds(run.seconds),
                "-" if peak is None else format_bytes(peak),
                "/".join(
                    str(counts.get(key, "-")) for key in ("recomputed", "paged_out", "paged_in")
                ),
            )
        )
    known = ("known least",) if group == "reference" else ()
    heads = ("graph", "device", "RAM", "status", "overhead", *known, "gap", "time", "peak RAM")
    return table((*heads, "recomputed/out/in"), rows, right=4)


def build_table(records: Sequence[dict[str, Any]]) -> str:
    """Return times and sizes of building and compiling."""
    rows = [
        (
            record["name"].replace(" | ", ", "),
            seconds(record["seconds"]),
            f"{record['columns']:,}",
            f"{record['rows']:,}",
        )
        for record in records
        if record["kind"] == "build"
    ]
    return table(("model", "build and compile", "columns", "rows"), rows, right=1)


def startup_table(records: Sequence[dict[str, Any]]) -> str:
    """Return times of whole processes."""
    rows = [
        (f"`{record['name']}`", seconds(record["seconds"]), f"{record['rounds']}")
        for record in records
        if record["kind"] == "startup"
    ]
    return table(("process", "median time", "rounds"), rows, right=1)


def circumstances(records: Sequence[dict[str, Any]]) -> str:
    """Return when, where and with what the records were made, in a sentence or two."""
    machine = records[0]["machine"]
    days = sorted({record["recorded"][:10] for record in records})
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    load = statistics.median(record["load_average"] for record in records)
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"{when}, {machine['cpu']}, {machine['cores']} cores, {machine['system']} "
        f"(median load {load:.1f}); Python {machine['python']}, {versions}."
    )


def limits(records: Sequence[dict[str, Any]]) -> str:
    """Return the limits of the run, in words."""
    found = {Run(record).method: record["case"] for record in records if record["kind"] == "solve"}
    times = sorted({f"{case['limit_s']:g} s for {name}" for name, case in found.items()})
    gaps = {record["result"]["problem"]["gap"] for record in records if record["kind"] == "solve"}
    unasked = {
        record["result"]["problem"]["formulation"]
        for record in records
        if record["kind"] == "solve" and Run(record).method == "default"
    }
    return (
        f"Limits: {', '.join(times)}; gap {', '.join(map(str, sorted(gaps)))}; one thread. "
        f"Default is {', '.join(f'`{name}`' for name in sorted(unasked))}."
    )


def page(records: Sequence[dict[str, Any]], source: str, *sections: str) -> str:
    """Return the page of results, with what it says of other records."""
    parts = [
        "# Results",
        f"Generated from `bench/results/{source}` by `scripts/make_results.py`; "
        "[the protocol](../bench/protocol.md) says how it was measured.",
        circumstances(records),
        limits(records) + " Bold times ended at their limit, with the gap that was left.",
        "The figures of the paper, made again, are on [a page of their own](paper-figures.md).",
        "## The README's example",
        default_table(records, "main"),
        "## Problems with a known optimum",
        "Compute time counts, no deadline; overhead over the baseline.",
        default_table(records, "reference"),
        "## Published graphs",
        "Overhead is the least that any method found and the judge accepts. Gaps of "
        "`compact, events` are of that model; `paper` is compared with the grid.",
        summary_table(records),
        f"Means are shifted by {SHIFT_S:g} s; a time-out counts with the time that it took.",
        *paper_tables(records),
        "## The zoo",
        default_table(records, "zoo"),
        *sections,
        "## Stating the problem",
        build_table(records),
        "## Starting up",
        startup_table(records),
    ]
    return "\n\n".join(parts) + "\n"


def readme_table(records: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]]) -> str:
    """Return the README's block, of the records of all cases and of the grid."""
    published = grid_pages.compared(cells, "paper")
    found: dict[Key, dict[str, Run]] = {}
    for group in ("main", "zoo", "paper"):
        for key, methods in solves(records, group).items():
            found.setdefault(key, {}).update({name: middle(runs) for name, runs in methods.items()})
    rows = []
    for key in IN_README:
        runs = found.get(key, {})
        if "default" not in runs:
            continue
        run = runs["default"]
        model, device, ram = key
        rows.append(
            (
                f"`{model}`",
                f"`{device}`",
                ram,
                percent(run.overhead_ratio),
                percent(run.record["result"]["gap"]),
                seconds(run.seconds),
                published.get(key, "-"),
            )
        )
    heads = ("network", "device", "RAM", "energy overhead", "proven gap", "time", "`paper`")
    return (
        f"{table(heads, rows, right=2)}\n\n"
        "RAM is relative to keeping everything, overhead to computing everything once, the gap to "
        "the overhead; `paper` is the published formulation with the same solver, bold where it "
        f"ran into its limit, with its own gap. {circumstances(records)} "
        f"{grid_pages.sentence(cells)}All of it: [docs/results.md](docs/results.md)."
    )


def read_newest(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the records of the last file, the latest of each kind and name; [] without a file."""
    if not files:
        return []
    latest: dict[tuple[str, str], dict[str, Any]] = {}
    for line in files[-1].read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # a line that was cut off when its run was stopped
        latest[record["kind"], record["name"]] = record
    return list(latest.values())


def grid_files() -> list[Path]:
    """Return the records of the grid, the newest last."""
    return sorted(RESULTS.glob("*-grid.jsonl"))


def registered_cells() -> dict[int, int]:
    """Return how many cells the registry of the grid has for each goal."""
    bench = str(ROOT / "bench")
    if bench not in sys.path:
        sys.path.append(bench)
    from grid import GOALS, cells

    return {goal: len(cells((goal,))) for goal in GOALS}


def due() -> dict[Path, str]:
    """Return the pages as they should be."""
    readme = README.read_text(encoding="utf-8")
    grids, trainings = grid_files(), sorted(RESULTS.glob("*-training.jsonl"))
    files = sorted(set(RESULTS.glob("*.jsonl")) - {*grids, *trainings})
    latest, cells, trained = read_newest(files), read_newest(grids), read_newest(trainings)
    if not latest:
        return {README: replace_block(readme, "results", NOTHING_YET)}
    pages, sections = {}, []
    if cells:
        sections.append(
            grid_pages.section(
                cells, grids[-1].name, plot=GRID_PLOT.name, registered=registered_cells()
            )
        )
        pages[GRID_PAGE] = grid_pages.full_page(cells, grids[-1].name)
    if trained:
        sections.append(training_pages.section(trained, trainings[-1].name))
    pages[PAGE] = page(latest, files[-1].name, *sections)
    pages[README] = replace_block(readme, "results", readme_table(latest, cells))
    return pages


def update_plot(*, check: bool) -> int:
    """Draw the plot if it is not what the records say, or only say so; return the exit status."""
    cells = read_newest(grid_files())
    if not grid_plot.points(cells) or grid_plot.current(GRID_PLOT, cells):
        return 0
    sys.stdout.write(f"{'stale' if check else 'wrote'} {GRID_PLOT}\n")
    if not check:
        grid_plot.write_plot(GRID_PLOT, cells)
    return int(check)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if not current")
    options = parser.parse_args(arguments)
    pages = due()
    status = max(update_pages(pages, check=options.check), update_plot(check=options.check))
    for path in (PAGE, GRID_PAGE):
        if path not in pages and path.exists():
            sys.stdout.write(f"{path} has no record\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
