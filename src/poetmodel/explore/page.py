"""The explorer's page: the report's page, with sliders; all it shows comes over the API."""

from __future__ import annotations

from typing import Final

from poetmodel.data import installed
from poetmodel.problem import Quantity
from poetmodel.report.facts import CHOICES
from poetmodel.report.folding import HEADS
from poetmodel.report.template import render

CHARTS: Final = ("timeline", "gauge", "progress", "network", "decisions", "map")
"""The types of the charts of an answer, in the order in which they are drawn."""
STATES: Final = ("sgd", "momentum", "adam", "frozen")
"""The state that may be in the graph."""


def explorer_page() -> str:
    """Return the explorer as the text of an HTML page; its data come over the API."""
    return render(
        "explore.html.jinja",
        package="poetmodel.explore",
        chart_scripts=CHARTS,
        charts={"graph": None, "charts": []},
        quantities=[str(quantity) for quantity in Quantity],
        states=STATES,
        decision_heads=HEADS,
        choices=list(CHOICES.values()),
        version=installed("poetmodel") or "",
    )
