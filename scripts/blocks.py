"""Replacement of generated blocks in pages, from ``<!-- begin NAME -->`` to ``<!-- end NAME -->``.

Shared by the scripts that write generated pages.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from poetmodel.files import write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


def replace_block(page: str, name: str, content: str) -> str:
    """Return a page with new content between the two marks of a block.

    Raises
    ------
    ValueError
        Unless the page has exactly one such block.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        msg = f"expected one block between {begin!r} and {end!r}"
        raise ValueError(msg)
    return pattern.sub(lambda _: f"{begin}\n\n{content.strip()}\n\n{end}", page)


def update_pages(contents: Mapping[Path, str], *, check: bool) -> int:
    """Write each page whose content is not current, and print its path.

    With `check`, write nothing; return 1 if any page is not current, otherwise 0.
    """
    status = 0
    for path, content in contents.items():
        if path.is_file() and path.read_text(encoding="utf-8") == content:
            continue
        sys.stdout.write(f"{'stale' if check else 'wrote'} {path}\n")
        if check:
            status = 1
        else:
            write_text(path, content)
    return status


def run_page_script(
    render_pages: Callable[[], Mapping[Path, str]], arguments: Sequence[str] | None
) -> int:
    """Parse the arguments of a script and write or check its pages; return the exit status.

    Parameters
    ----------
    render_pages : callable
        Function that returns the current content of each page.
    arguments : sequence of str or None
        Command-line arguments; None for those of the process.
    """
    parser = argparse.ArgumentParser(description="Write the pages that differ from what is due.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if not current")
    return update_pages(render_pages(), check=parser.parse_args(arguments).check)


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: int = 0) -> str:
    """Format a Markdown table. Columns from index `right` on are right-aligned, unless it is 0."""
    rules = ["---:" if 0 < right <= column else "---" for column in range(len(headings))]
    lines = [headings, rules, *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)
