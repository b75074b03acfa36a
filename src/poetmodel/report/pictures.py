"""Kinds of actions with colours, units of axes, actions in stages, and data of still images."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from poetmodel.report.presenter import format_items

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from poetmodel.graph import Graph
    from poetmodel.schedule import Schedule


class Kind(StrEnum):
    """Kind of action that a bar or a cell shows; the value is its name in the legend."""

    COMPUTED = "computed"
    """First computation of a node."""
    RECOMPUTED = "recomputed"
    """Later computation of a node."""
    KEPT = "kept in RAM"
    """Tensor in RAM from an earlier stage, or resident state."""
    PAGED_IN = "paged in"
    """Transfer from storage."""
    PAGED_OUT = "paged out"
    """Transfer to storage."""
    STALL = "stall"
    """The core waits for the bus."""
    WORKSPACE = "workspace"
    """Workspace of a node while it is computed."""


COLOURS: Final[Mapping[Kind, str]] = {
    Kind.COMPUTED: "#0072B2",
    Kind.RECOMPUTED: "#E69F00",
    Kind.KEPT: "#C6DCEC",
    Kind.PAGED_IN: "#009E73",
    Kind.PAGED_OUT: "#CC79A7",
    Kind.STALL: "#D55E00",
    Kind.WORKSPACE: "#999999",
}
"""Colours of kinds, after Okabe and Ito, whose palette is distinguishable for the colour-blind."""
DARK_COLOURS: Final[Mapping[Kind, str]] = {
    Kind.COMPUTED: "#3A9BDC",
    Kind.RECOMPUTED: "#F0B93A",
    Kind.KEPT: "#3F6078",
    Kind.PAGED_IN: "#23C497",
    Kind.PAGED_OUT: "#E29AC4",
    Kind.STALL: "#F07F3C",
    Kind.WORKSPACE: "#8A949C",
}
"""The same hues for a dark background."""
RAM_KIND_COLOURS: Final = (
    ("#3F5B7C", "#5B7C9E"),
    ("#86BDE3", "#3C7FB1"),
    ("#B79BD6", "#8A6DB5"),
    ("#C4CAD0", "#78828B"),
    ("#8FA3A0", "#4F615E"),
)
"""Colours of state, activations, gradients, workspace and reserved bytes, on a light and on a dark
background."""


DIGITS: Final = 8
"""Significant digits of times and sizes in a chart."""


def round_for_chart(value: float) -> float:
    """Round a time or a size to `DIGITS` significant digits."""
    return float(f"{value:.{DIGITS}g}")


_TIME_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_SIZE_UNITS: Final = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def time_unit(max_s: float) -> tuple[float, str]:
    """Return the largest unit up to `max_s`, else the smallest: its length [s] and its name."""
    return _largest_unit(max_s, _TIME_UNITS)


def size_unit(max_bytes: float) -> tuple[float, str]:
    """Return the largest unit up to `max_bytes`, else the smallest: its size [B] and its name."""
    return _largest_unit(max_bytes, _SIZE_UNITS)


def _largest_unit(max_value: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """Return the largest unit that is at most `max_value`, else the smallest unit."""
    return next((unit for unit in units if max_value >= unit[0]), units[-1])


# -- stages of a schedule ----------------------------------------------------------------------


def format_move_counts(schedule: Schedule) -> str:
    """Return the counts of recomputations and transfers: ``1 recomputation, 0 page-outs, ...``."""
    counts = (
        (sum(k < t for t, k in schedule.R), "recomputation"),
        (len(schedule.M_out), "page-out"),
        (len(schedule.M_in), "page-in"),
    )
    return ", ".join(format_items(count, noun) for count, noun in counts)


def stage_actions(
    graph: Graph, schedule: Schedule
) -> dict[tuple[int, int], dict[Kind, tuple[int, ...]]]:
    """Return the tensors that each action affects, by (stage, node) and kind of action.

    The ``compute`` of a state node counts as page-in, or as kept if its tensor is resident.
    """
    actions: defaultdict[tuple[int, int], dict[Kind, tuple[int, ...]]] = defaultdict(dict)
    resident = set(schedule.resident)
    for t, k in schedule.R:
        kind = Kind.RECOMPUTED if k < t else Kind.COMPUTED
        if graph.nodes[k].is_state:  # read from storage, unless its tensor is resident
            kind = Kind.KEPT if resident.issuperset(graph.outputs_of[k]) else Kind.PAGED_IN
        actions[t, k][kind] = graph.outputs_of[k]
    for kind, pairs in (
        (Kind.KEPT, schedule.S_RAM),
        (Kind.PAGED_IN, schedule.M_in),
        (Kind.PAGED_OUT, schedule.M_out),
    ):
        for t, i in pairs:
            tensors_by_kind = actions[t, graph.node_of[i]]
            tensors_by_kind[kind] = (*tensors_by_kind.get(kind, ()), i)
    return dict(actions)


def dominant_kind(kinds: Container[Kind]) -> Kind:
    """Return the kind that colours a cell: computed, recomputed, paged in, kept, paged out."""
    priority = (Kind.COMPUTED, Kind.RECOMPUTED, Kind.PAGED_IN, Kind.KEPT)
    return next((kind for kind in priority if kind in kinds), Kind.PAGED_OUT)


# -- line charts, and maps side by side --------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes of a line chart."""

    title: str
    x_name: str
    y_name: str
    lines: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]
    """Name and points (x, y) of each line."""
    in_percent: bool = True
    """Whether the y axis is in percent, and logarithmic if a value is positive; False for a linear
    axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """Map of one schedule: the actions on each node in each stage."""

    title: str
    chart: Mapping[str, Any]
    """Cells of the map, as returned by `poetmodel.report.charts.map_chart`."""
