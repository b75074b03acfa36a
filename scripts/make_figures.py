"""Write the tables and pictures of ``docs/paper-figures.md`` from kept records.

``poetmodel bench NAME --out DIR`` makes the records; ``DIR/cells.jsonl`` is kept as
``bench/results/figures/NAME.jsonl``, and ``DIR/schedules`` of figure2, which shows maps, beside it.
``python scripts/make_figures.py`` rewrites the generated blocks of the page and draws the pictures
beside it; ``--check`` writes nothing, needs no matplotlib, and exits 1 where something is not what
the records say.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from blocks import replace_block, table, update_pages
from poetmodel.baselines import method_names
from poetmodel.bench.figures import FIGURES
from poetmodel.bench.pictures import digest, draw, panels
from poetmodel.bench.summaries import summary
from poetmodel.bench.tables import rows

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).resolve().parents[1]
RECORDS: Final = ROOT / "bench" / "results" / "figures"
PAGE: Final = ROOT / "docs" / "paper-figures.md"
NOTHING_YET: Final = "No run is recorded yet."

Record = dict[str, Any]


def read(name: str) -> list[Record]:
    """Return the kept records of a figure, the last of each cell; [] where there are none.

    They come by model and device as in the file, then by method and budget, in whatever order
    several workers have written them.
    """
    path = RECORDS / f"{name}.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    found = list({record["key"]: record for record in map(json.loads, lines)}.values())
    groups = list(dict.fromkeys(_group(record) for record in found))
    methods = method_names()

    def place(record: Record) -> tuple[float, ...]:
        cell = record["cell"]
        share = float(cell["ram"].rstrip("%"))
        return groups.index(_group(record)), methods.index(cell["method"]), share

    return sorted(found, key=place)


def schedule(key: str) -> dict[str, Any] | None:
    """Return the kept schedule of a cell, None where there is none."""
    path = RECORDS / "schedules" / f"{key}.schedule.json"
    if not path.is_file():
        return None
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _group(record: Record) -> tuple[Any, ...]:
    return tuple(record["cell"][name] for name in ("model", "device", "deadline"))


def picture(name: str) -> Path:
    """Return where the picture of a figure is."""
    return PAGE.with_name(f"paper-{name}.svg")


def circumstances(records: Sequence[Record]) -> str:
    """Return when, where and how the records were made."""
    machine = records[0]["machine"]
    days = " to ".join(sorted({record["recorded"][:10] for record in (records[0], records[-1])}))
    settings = [record["cell"]["settings"] for record in records]
    limits = ", ".join(
        f"{limit:g}" for limit in sorted({each["time_limit_s"] for each in settings})
    )
    seeds = ", ".join(str(seed) for seed in sorted({each["seed"] for each in settings}))
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    warm = sum(bool(record.get("warm_start")) for record in records)
    cpu_s = sum(record.get("cpu_s", 0.0) for record in records)
    wall_s = sum(record.get("seconds", 0.0) for record in records)
    return (
        f"*{len(records)} cells, {days}; {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['system']}, Python {machine['python']}, {versions}. Limit of each solve: "
        f"{limits} s; gap {settings[0]['gap']:g}; one thread; seed {seeds}; "
        f"{warm} solves began with the schedule of a smaller budget. The cells took "
        f"{cpu_s / 60:.1f} min of computing, {wall_s / 60:.1f} min by the clock.*"
    )


def block(name: str) -> str:
    """Return the generated block of a figure."""
    records = read(name)
    if not records:
        return NOTHING_YET
    figure = FIGURES[name]
    parts = [f"![{figure.title}]({picture(name).name})", circumstances(records)]
    if figure.paper:
        parts.append(f"**The paper:** {figure.paper}")
    for part in summary(name, rows(records)):
        parts += [f"**{part.title}**", table(part.heads, part.rows, right=part.words)]
    return "\n\n".join(parts)


def page(text: str) -> str:
    """Return the page with every block current."""
    for name in FIGURES:
        text = replace_block(text, name, block(name))
    return text


def update_pictures(*, check: bool) -> int:
    """Draw the pictures that are not what the records say, or only say so; return the status."""
    status = 0
    for name in FIGURES:
        records, path = read(name), picture(name)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check page and pictures; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if not current")
    options = parser.parse_args(arguments)
    due = {PAGE: page(PAGE.read_text(encoding="utf-8"))}
    return max(update_pages(due, check=options.check), update_pictures(check=options.check))


if __name__ == "__main__":
    sys.exit(main())
