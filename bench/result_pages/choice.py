"""What `docs/guides/choose.md` says of scores and RAM, and the chart beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from result_pages.drawing import BLUE, GREY, ORANGE, Chart
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHART: Final = "choice.svg"
"""Name of the chart."""
_KIB: Final = 2**10


def block(records: Sequence[Mapping[str, Any]], source: str) -> str:
    """Return a row for each network and budget."""
    return render("choice", records=records, source=source, chart=CHART)


def chart(records: Sequence[Mapping[str, Any]]) -> Chart:
    """Return the scores against the RAM, network by network: best, bound, and both rules."""
    shown: dict[str, list[list[float]]] = {}
    for record in records:
        total, rules = record["total"], record["rules"]
        scores = (
            record["score"], record["bound"], rules["greedy"]["score"], rules["last"]["score"]
        )  # fmt: skip
        line = [record["ram_budget_bytes"] / _KIB, *(100 * score / total for score in scores)]
        shown.setdefault(record["cell"]["network"], []).append(line)
    return Chart(shown=shown, paint=_paint)


def _paint(figure: Any, shown: Any) -> None:
    panels = figure.subplots(1, len(shown), squeeze=False, sharey=True).ravel()
    for axes, (network, lines) in zip(panels, shown.items(), strict=True):
        ram, best, bound, greedy, last = zip(*sorted(lines), strict=True)
        axes.plot(ram, bound, "_", color=BLUE, markersize=14, label="proven bound")
        axes.plot(ram, best, "o-", color=BLUE, linewidth=2, label="best set")
        axes.plot(ram, greedy, "s--", color=ORANGE, linewidth=1, label="greedy")
        axes.plot(ram, last, "^--", color=GREY, linewidth=1, label="last layers")
        axes.set(title=network, xlabel="RAM [KiB]", ylim=(0, 103))
        axes.yaxis.set_major_formatter("{x:g} %")
    panels[0].set_ylabel("score, of that of all layers")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
