"""Pictures of plans and schedules, described once and drawn as PNG, SVG or HTML."""

from poetmodel.report.drawing import check_picture, draw
from poetmodel.report.pictures import Bar, Cell, Curve, Grid, Kind, Lane, Timeline
from poetmodel.report.stages import stage_map
from poetmodel.report.timeline import plan_timeline

__all__ = [
    "Bar",
    "Cell",
    "Curve",
    "Grid",
    "Kind",
    "Lane",
    "Timeline",
    "check_picture",
    "draw",
    "plan_timeline",
    "stage_map",
]
