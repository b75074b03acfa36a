"""Pages, tables, benchmarks and catalogues of messages stay small."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = {"README.md": 1_400, "CHANGELOG.md": 500}
"""The most words that a page beside ``docs/`` may have, as `wc` counts them."""
PAGES = sorted(ROOT.glob("docs/**/*.md"))
ALL_PAGES = 61_500
"""The most words of all pages of ``docs/``, tables and code included."""
ROWS = 25
"""The most rows of a table; a longer one is a CSV file."""
LINES_OF_BENCHMARKS = 8_000
LINES_OF_MESSAGES = 2_000
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"^\|.*\n^\|[ :|-]+\n((?:^\|.*\n?)*)", re.MULTILINE)


def words(path: Path) -> int:
    """Return the number of words of a page, counted as `wc -w` does."""
    return len(path.read_text(encoding="utf-8").split())


def lines(paths: chain[Path]) -> int:
    """Return the number of lines of all files."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


@pytest.mark.parametrize("page", WORDS)
def test_page_is_short(page: str) -> None:
    """The first pages that a reader opens are short."""
    assert words(ROOT / page) <= WORDS[page]


def test_all_pages_are_short() -> None:
    """A reader gets through all pages in an afternoon."""
    assert sum(words(page) for page in PAGES) <= ALL_PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_short(page: Path) -> None:
    """No table is longer than a screen."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    long = [rows.splitlines()[0] for rows in TABLE.findall(text) if rows.count("\n|") >= ROWS]
    assert long == []


def test_benchmarks_are_small() -> None:
    """Benchmarks and scripts are small, and make no prose from templates."""
    assert lines(chain(ROOT.glob("bench/**/*.py"), ROOT.glob("scripts/**/*.py"))) <= (
        LINES_OF_BENCHMARKS
    )
    assert [*ROOT.glob("bench/**/*.j2"), *ROOT.glob("scripts/**/*.j2")] == []


def test_catalogues_of_messages_are_small() -> None:
    """A catalogue holds sentences that users read, not whole pages."""
    assert lines(chain(ROOT.glob("tests/**/messages/**/*.txt"))) <= LINES_OF_MESSAGES
