"""Pages and their parts, made by jinja2 from ``templates/*.md.j2`` and the records."""

from __future__ import annotations

import math
import re
import statistics
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2

from blocks import folded
from poetmodel.report.presenter import plural
from poetmodel.units import format_bytes
from result_pages import records

if TYPE_CHECKING:
    from collections.abc import Iterable

TEMPLATES: Final = Path(__file__).parent / "templates"
_OWN_LINE: Final = ("|", "#", "-", "<", "!", "  ")
"""What begins a line of Markdown that does not go on with the paragraph above it."""


def unwrapped(text: str) -> str:
    """Return Markdown with each paragraph and each row of a table on one line.

    Templates may break lines anywhere in a paragraph, and in a row of a table where the next line
    is indented; they may leave any number of lines empty.
    """
    lines: list[str] = []
    for line in text.splitlines():
        above = lines[-1] if lines else ""
        if above.startswith("|") and line.startswith("  "):
            lines[-1] = f"{above}{line.rstrip()[1:]}"
        elif line.strip() and above and not line.startswith(_OWN_LINE):
            lines[-1] = f"{above} {line.strip()}"
        else:
            lines.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def median(values: Iterable[float]) -> float | None:
    """Return the median; None of nothing."""
    known = list(values)
    return statistics.median(known) if known else None


def known(values: Iterable[Any]) -> list[Any]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def bytes_text(value: int | None) -> str:
    """Return a size, or a dash."""
    return "-" if value is None else format_bytes(value)


def digits(value: float | None, form: str) -> str:
    """Return a number in a form of Python's, or a dash."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def met(answers: Iterable[object]) -> str:
    """Return how many of some answers are yes."""
    told = [bool(answer) for answer in answers]
    return records.share_text(sum(told), len(told))


def figures(runs: Iterable[Any], name: str) -> list[Any]:
    """Return a figure of each run whose record has it."""
    return [run.record[name] for run in runs if name in run.record]


def ratios(rows: Iterable[Any], column: int, other: int) -> list[float]:
    """Return the ratios of two columns."""
    return [row[column] / row[other] for row in rows]


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 (Markdown, not HTML)
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {
        "bytes": bytes_text,
        "digits": digits,
        "figures": figures,
        "folded": lambda content, title: f"{folded(title, unwrapped(content))}\n",
        "known": known,
        "median": median,
        "met": met,
        "percent": records.percent_text,
        "percentile": records.percentile,
        "plural": plural,
        "ratios": ratios,
        "seconds": records.seconds_text,
        "whole": lambda ratio: f"{100 * ratio:.0f} %",
    }
    environment.globals |= {
        "circumstances": records.circumstances,
        "days": records.days_text,
        "measured": records.made_text,
        "share": records.share_text,
        "threads": records.threads_text,
    }
    return environment


def render(template: str, *, block: str | None = None, **context: Any) -> str:
    """Return a template filled with values, or one of its blocks."""
    loaded = _environment().get_template(f"{template}.md.j2")
    if block is None:
        return unwrapped(loaded.render(context))
    return unwrapped("".join(loaded.blocks[block](loaded.new_context(context))))
