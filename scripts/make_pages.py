"""Write the tables, CSV files and pictures of the results, and the numbers that pages quote.

``python scripts/make_pages.py`` fills the blocks from ``<!-- begin table NAME -->`` to
``<!-- end table -->``, and the numbers from ``<!--=NAME-->`` to ``<!--/-->``, in README.md and
``docs/`` from the newest records of ``bench/results/``, writes ``docs/results/csv/`` and draws the
pictures that are not current. ``--check`` writes nothing and exits 1 if a file is not current. A
line must not begin with a number's mark, which would end the paragraph. Tables need pandas,
pictures matplotlib.
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
from tables import CSVS, TABLES, compute_quoted_numbers, format_csv  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DOCS: Final = ROOT / "docs"
CSV_FOLDER: Final = DOCS / "results" / "csv"
_BLOCK: Final = re.compile(r"<!-- begin table (\S+) -->\n.*?<!-- end table -->", re.DOTALL)
_NUMBER: Final = re.compile(r"(<!--=(\w+)-->).*?(<!--/-->)", re.DOTALL)


def fill_tables(page: str) -> str:
    """Return a page with the current content of its tables.

    Raises
    ------
    KeyError
        If the page names an unknown table.
    """

    def render_block(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- begin table {name} -->\n\n{TABLES[name]()}\n\n<!-- end table -->"

    return _BLOCK.sub(render_block, page)


def fill_numbers(page: str, numbers: Mapping[str, str]) -> str:
    """Return a page with the current numbers that it quotes.

    Raises
    ------
    KeyError
        If the page names an unknown number.
    """
    return _NUMBER.sub(lambda match: f"{match[1]}{numbers[match[2]]}{match[3]}", page)


def render_files() -> dict[Path, str]:
    """Return the current content of each page with tables or numbers and of each CSV file."""
    texts = {path: path.read_text("utf-8") for path in [ROOT / "README.md", *DOCS.rglob("*.md")]}
    numbers = compute_quoted_numbers()
    pages = {
        path: fill_numbers(fill_tables(text), numbers)
        for path, text in texts.items()
        if _BLOCK.search(text) or _NUMBER.search(text)
    }
    return pages | {
        CSV_FOLDER / f"{name}.csv": format_csv(make_frame()) for name, make_frame in CSVS.items()
    }


def update_charts(*, check: bool) -> int:
    """Draw the pictures that are not current, and print their paths.

    With `check`, draw nothing; return 1 if any picture is not current, otherwise 0.
    """
    status = 0
    for name, make_chart in CHARTS.items():
        chart, path = make_chart(), DOCS / name
        if chart.is_current(path):
            continue
        sys.stdout.write(f"{'stale' if check else 'wrote'} {path}\n")
        if check:
            status = 1
        else:
            chart.write(path)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check pages, CSV files and pictures; return the exit status."""
    parser = argparse.ArgumentParser(description="Write the tables and pictures of results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if not current")
    check = parser.parse_args(arguments).check
    return max(update_pages(render_files(), check=check), update_charts(check=check))


if __name__ == "__main__":
    sys.exit(main())
