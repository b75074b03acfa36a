"""Write the pages of results and the README's table from the newest records of benchmark runs.

``python scripts/make_results.py`` takes the last ``*-grid.jsonl`` of ``bench/results/`` for the
grid (``docs/results-grid.md``, its plot, and its part of ``docs/results.md``), the last
``*-grid-again.jsonl`` for cells of it that were solved again with two threads, the last
``*-training.jsonl`` for the comparison of training methods, and the last other file for all else;
``--check`` writes nothing and exits 1 where a page is not what the records say. Without a record
there is no page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grid_pages
import grid_plot
import training_pages
from blocks import days_text, replace_block, table, update_pages, versions_text
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "bench" / "results"
PAGE: Final = ROOT / "docs" / "results.md"
GRID_PAGE: Final = ROOT / "docs" / "results-grid.md"
GRID_PLOT: Final = ROOT / "docs" / "results-scale.svg"
README: Final = ROOT / "README.md"

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
        """Gap that it ended with."""
        gap = self.record["result"]["gap"]
        return None if gap is None else float(gap)

    @property
    def time_text(self) -> str:
        """Its time, bold where it ran into its limit."""
        wanted = self.record["result"]["problem"]["gap"]
        text = seconds(self.seconds)
        return text if self.gap is not None and self.gap <= wanted else f"**{text}**"

    @property
    def overhead_ratio(self) -> float | None:
        """Overhead over the baseline."""
        result = self.record["result"]
        if result["overhead_j"] is None or not result["baseline_energy_j"]:
            return None
        return float(result["overhead_j"] / result["baseline_energy_j"])


def seconds(value: float) -> str:
    """Return a time with three digits."""
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"  # noqa: PLR2004


def percent(ratio: float | None, digits: int = 3) -> str:
    """Return a fraction as a percentage, or a dash."""
    return "-" if ratio is None else f"{100 * ratio:.{digits}g} %"


def solves(records: Sequence[dict[str, Any]], group: str) -> dict[Key, Run]:
    """Return the solves of one table by problem, in the run's order."""
    runs = [
        Run(record)
        for record in records
        if record["kind"] == "solve" and record["case"]["group"] == group
    ]
    return {run.key: run for run in runs}


def default_table(records: Sequence[dict[str, Any]], group: str) -> str:
    """Return the table of problems that are solved by default."""
    rows = []
    for (model, device, ram), run in solves(records, group).items():
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
                run.time_text,
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
    load = statistics.median(record["load_average"] for record in records)
    return (
        f"{days_text(records)}, {machine['cpu']}, {machine['cores']} cores, {machine['system']} "
        f"(median load {load:.1f}); Python {machine['python']}, {versions_text(machine)}."
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
        "## ResNet-18/CIFAR on a Raspberry Pi",
        default_table(records, "main"),
        "## Problems with a known optimum",
        "Compute time counts, no deadline; overhead over the baseline.",
        default_table(records, "reference"),
        "## The zoo",
        default_table(records, "zoo"),
        *sections,
        "## Stating the problem",
        build_table(records),
        "## Starting up",
        startup_table(records),
    ]
    return "\n\n".join(parts) + "\n"


def readme_table(
    records: Sequence[dict[str, Any]],
    cells: Sequence[dict[str, Any]],
    trained: Sequence[dict[str, Any]],
) -> str:
    """Return the README's block, of the records of all cases, the grid, and training methods."""
    compared = grid_pages.compared(cells)
    own = {**solves(records, "main"), **solves(records, "zoo")}
    rows = []
    for key in IN_README:
        published = compared.get(key, {})
        run = own.get(key) or published.get("default")
        if run is None:
            continue
        model, device, ram = key
        rows.append(
            (
                f"`{model}`",
                f"`{device}`",
                ram,
                percent(run.overhead_ratio),
                percent(run.gap),
                seconds(run.seconds),
                grid_pages.method_text(published.get("paper")),
            )
        )
    heads = ("network", "device", "RAM", "energy overhead", "proven gap", "time", "`paper`")
    return (
        f"{table(heads, rows, right=2)}\n\n"
        "RAM is relative to keep-all, overhead to a single pass, the gap to "
        "the overhead; `paper` is the published formulation with the same solver, bold where it "
        f"ran into its limit, with its own gap. {circumstances(records)} "
        f"{grid_pages.sentence(cells)}{training_pages.sentence(trained)}"
        "All of it: [docs/results.md](docs/results.md)."
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


def again_files() -> list[Path]:
    """Return the records of cells that were solved again with two threads, the newest last."""
    return sorted(RESULTS.glob("*-grid-again.jsonl"))


def registered_cells() -> dict[int, int]:
    """Return how many cells the registry of the grid has for each goal."""
    bench = str(ROOT / "bench")
    if bench not in sys.path:
        sys.path.append(bench)
    from grid import GOALS, instances

    return {goal: len(instances((goal,))) for goal in GOALS}


def due() -> dict[Path, str]:
    """Return the pages as they should be."""
    readme = README.read_text(encoding="utf-8")
    grids, trainings = grid_files(), sorted(RESULTS.glob("*-training.jsonl"))
    files = sorted(set(RESULTS.glob("*.jsonl")) - {*grids, *again_files(), *trainings})
    latest, cells, trained = read_newest(files), read_newest(grids), read_newest(trainings)
    if not latest:
        return {README: replace_block(readme, "results", NOTHING_YET)}
    pages, sections = {}, []
    if cells:
        sections.append(
            grid_pages.section(
                cells,
                grids[-1].name,
                plot=GRID_PLOT.name,
                registered=registered_cells(),
                again=read_newest(again_files()),
            )
        )
        pages[GRID_PAGE] = grid_pages.full_page(cells, grids[-1].name)
    if trained:
        sections.append(training_pages.section(trained, trainings[-1].name))
    pages[PAGE] = page(latest, files[-1].name, *sections)
    pages[README] = replace_block(readme, "results", readme_table(latest, cells, trained))
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
