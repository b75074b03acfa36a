"""The figures of the paper (POET, ICML 2022), and the comparison of solvers, as sweeps."""

from poetmodel.bench.figures.panels import Map, Panel, draw, panels
from poetmodel.bench.figures.registry import FIGURES, Figure, Part, figure
from poetmodel.bench.figures.summaries import Summary, comparison, summary

__all__ = [
    "FIGURES",
    "Figure",
    "Map",
    "Panel",
    "Part",
    "Summary",
    "comparison",
    "draw",
    "figure",
    "panels",
    "summary",
]
