"""Write the tables, CSV files and pictures of the results, and check the numbers that pages quote.

``python scripts/make_pages.py`` fills what stands between ``<!-- begin table NAME -->`` and
``<!-- end table -->`` in README.md and ``docs/`` from the newest records of ``bench/results/``,
writes ``docs/results/csv/`` and draws the pictures that are not current. ``--check`` writes
nothing. Exit status 1: something is not current, or a page lacks a sentence that it has to quote.
Tables need pandas, pictures matplotlib.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "bench"))

from blocks import update_pages  # noqa: E402
from charts import CHARTS  # noqa: E402
from quotes import QUOTES  # noqa: E402
from tables import CSVS, TABLES, claims, csv  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCS: Final = ROOT / "docs"
CSV_FOLDER: Final = DOCS / "results" / "csv"
_BLOCK: Final = re.compile(r"<!-- begin table (\S+) -->\n.*?<!-- end table -->", re.DOTALL)


def filled(page: str) -> str:
    """Return a page with its tables current.

    Raises
    ------
    KeyError
        If it asks for a table that there is not.
    """

    def block(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- begin table {name} -->\n\n{TABLES[name]()}\n\n<!-- end table -->"

    return _BLOCK.sub(block, page)


def due() -> dict[Path, str]:
    """Return the pages that have tables, and the CSV files, as they should be."""
    texts = {path: path.read_text("utf-8") for path in [ROOT / "README.md", *DOCS.rglob("*.md")]}
    pages = {path: filled(text) for path, text in texts.items() if _BLOCK.search(text)}
    return pages | {CSV_FOLDER / f"{name}.csv": csv(make()) for name, make in CSVS.items()}


def unquoted() -> list[str]:
    """Return which pages lack a sentence that their quoted numbers make due."""
    numbers, faults = claims(), []
    for name, sentence in QUOTES:
        words = " ".join(sentence.format(**numbers).split())
        if words not in " ".join((ROOT / name).read_text("utf-8").split()):
            faults.append(f"{name} lacks: {words}")
    return faults


def update_charts(*, check: bool) -> int:
    """Draw the pictures that are not current, or only name them; return the exit status."""
    status = 0
    for name, make in CHARTS.items():
        chart, path = make(), DOCS / name
        if chart.current(path):
            continue
        sys.stdout.write(f"{'stale' if check else 'wrote'} {path}\n")
        if check:
            status = 1
        else:
            chart.write(path)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check pages, files and pictures; return the exit status."""
    parser = argparse.ArgumentParser(description="Write what the records of results make due.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if not current")
    check = parser.parse_args(arguments).check
    status = max(update_pages(due(), check=check), update_charts(check=check))
    faults = unquoted()
    sys.stdout.writelines(f"{fault}\n" for fault in faults)
    return 1 if faults else status


if __name__ == "__main__":
    sys.exit(main())
