"""Pictures of plans and schedules, described once and drawn as PNG, SVG or HTML."""

from poetmodel.report.drawing import check_picture, draw
from poetmodel.report.pictures import (
    Bar,
    Curve,
    Grid,
    GridCell,
    Kind,
    Lane,
    Timeline,
    plan_timeline,
    stage_map,
)

__all__ = [
    "Bar",
    "Curve",
    "Grid",
    "GridCell",
    "Kind",
    "Lane",
    "Timeline",
    "check_picture",
    "draw",
    "plan_timeline",
    "stage_map",
]
