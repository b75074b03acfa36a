"""Generated parts of hand-written pages, between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.

Shared by the scripts that keep pages current.
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


def update_pages(due: Mapping[Path, str], *, check: bool) -> int:
    """Write the pages that differ from what is due, or only say which; return the exit status."""
    status = 0
    for path, content in due.items():
        if path.is_file() and path.read_text(encoding="utf-8") == content:
            continue
        sys.stdout.write(f"{'stale' if check else 'wrote'} {path}\n")
        if check:
            status = 1
        else:
            write_text(path, content)
    return status


def main_of(due: Callable[[], Mapping[Path, str]], arguments: Sequence[str] | None) -> int:
    """Do what a script is asked for, which makes these pages; return the exit status."""
    parser = argparse.ArgumentParser(description="Write the pages that differ from what is due.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if not current")
    return update_pages(due(), check=parser.parse_args(arguments).check)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: int = 0) -> str:
    """Return a Markdown table; columns from number `right` on, if not 0, are set to the right."""
    rules = ["---:" if 0 < right <= place else "---" for place in range(len(heads))]
    lines = [heads, rules, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
