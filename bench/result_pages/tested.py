"""The chart of the page on correctness: how many cases are compared, read from its own table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from result_pages.drawing import BLUE, ORANGE, Chart

if TYPE_CHECKING:
    from collections.abc import Iterator

CHART: Final = "tested-cases.svg"
"""Name of the chart."""
_HEADING: Final = "## Optimality"
_ROW: Final = re.compile(r"^\| (.+?) \| ([\d,]+) \| ([\d,]*) ?\|", re.MULTILINE)


def chart(page: str) -> Chart:
    """Return the cases of each comparison with the optimum, quick and slow.

    Parameters
    ----------
    page : str
        The text of the page; the table is the one below `_HEADING`.
    """
    _, _, text = page.partition(_HEADING)
    shown = list(_rows(text.partition("\n## ")[0]))
    return Chart(shown=shown, paint=_paint, height_inches=3.6)


def _rows(text: str) -> Iterator[list[Any]]:
    for what, quick, slow in _ROW.findall(text):
        name = re.split(r"[:,(]", re.sub(r"[`*]", "", what))[0].strip()
        yield [name, *(int(count.replace(",", "") or 0) for count in (quick, slow))]


def _paint(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    names, quick, slow = zip(*shown, strict=True)
    places = range(len(shown))
    axes.barh(places, quick, color=BLUE, height=0.7, label="quick tests")
    axes.barh(places, slow, left=quick, color=ORANGE, height=0.7, label="slow tests")
    for place, count in enumerate(map(sum, zip(quick, slow, strict=True))):
        axes.annotate(f"{count:,}", (count, place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, names)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max(map(sum, zip(quick, slow, strict=True))))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="lower right")
    figure.suptitle(
        "Cases held against a known optimum, or against each other", size=9, weight="bold"
    )
