"""The picture of a plan over time, in values that know no drawing library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.room import part_of
from poetmodel.plan import Op, Plan, PlanCheck
from poetmodel.report.pictures import Kind, in_order
from poetmodel.report.timeline import AGAIN, FIRST_READ, LETTERS, ORIGINS, plan_chart
from poetmodel.schedule.machine import Origin
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.graph import Graph

BARS: Final[Mapping[str, tuple[str, Kind]]] = {
    LETTERS[Op.COMPUTE]: ("core", Kind.COMPUTED),
    AGAIN: ("core", Kind.RECOMPUTED),
    LETTERS[Op.WAIT]: ("core", Kind.STALL),
    FIRST_READ: ("bus", Kind.PAGED_IN),
    LETTERS[Op.PAGE_IN]: ("bus", Kind.PAGED_IN),
    LETTERS[Op.PAGE_OUT]: ("bus", Kind.PAGED_OUT),
}
"""The lane of what takes time, and its kind."""
COPIES: Final[Mapping[Origin, Kind]] = {
    Origin.RECOMPUTED: Kind.RECOMPUTED,
    Origin.PAGED_IN: Kind.PAGED_IN,
}
"""Marks of copies that did not come by the first computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stretch of time on a lane, in the unit of the time axis."""

    start: float
    end: float
    kind: Kind
    name: str
    """Stands on it where there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """One copy of a tensor, or one workspace, in a stack of all that is in RAM."""

    part: int
    """Kind, an index of `poetmodel.device.room.PARTS`."""
    kind: Kind | None
    """How it came, if not by the first computation."""
    name: str
    """Stands on it where there is room."""
    runs: tuple[tuple[float, float, float, float], ...]
    """Start, end, lowest and highest value of stretches one after the other, as the rest moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Lanes of bars, from the top, above a stack of bands over one time axis."""

    title: str
    time_name: str
    """Label of the time axis, unit included."""
    lanes: Mapping[str, tuple[Bar, ...]]
    """Their bars in order of time, by name."""
    curve_name: str
    """Label of the axis of the stack, unit included."""
    bands: tuple[Band, ...]
    """From the bottom."""
    points: tuple[tuple[float, float], ...]
    """(time, value) of the whole stack: the value holds from this time to the next."""
    ghost: tuple[tuple[float, float], ...]
    """Bytes of keep-all, likewise."""
    ghost_name: str
    limit: float | None
    """A limit of the stack to draw, if there is one."""
    limit_name: str

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of bars that occur."""
        return in_order(bar.kind for bars in self.lanes.values() for bar in bars)

    @property
    def copies(self) -> tuple[Kind, ...]:
        """The kinds of bands that occur."""
        return in_order(band.kind for band in self.bands)

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts that occur."""
        return tuple(sorted({band.part for band in self.bands}))


def outline(runs: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return the corners of a band: along its top, and back along its bottom."""
    top = [(time, run[3]) for run in runs for time in run[:2]]
    bottom = [(time, run[2]) for run in runs for time in run[:2]]
    return [*top, *reversed(bottom)]


def plan_timeline(graph: Graph, plan: Plan, check: PlanCheck) -> Timeline:
    """Describe the picture of a plan, of which `check` knows the times.

    There is a lane for the core, with its stalls, one for the bus, and the stack. In a blocking
    plan the core is busy while the bus is.
    """
    chart = plan_chart(graph, plan, check)
    scale, levels = chart["scale"], _levels(chart)
    end = levels[-1][1]
    values = [
        (time, (chart["after"] if after else chart["during"])[p] / scale)
        for (p, after), time in levels[:-1]
    ]
    places, kept = chart["ghost"]
    ghost = [(levels[2 * p][1], value / scale) for p, value in zip(places, kept, strict=True)]
    on_device = f" on {plan.device}" if plan.device else ""
    stall = f", stall {format_seconds(check.stall_s)}" if check.stall_s else ""
    return Timeline(
        title=(
            f"{graph.name}{on_device}, {plan.mode} transfers: "
            f"{format_seconds(check.makespan_s or 0.0)}{stall}, peak RAM "
            f"{format_bytes(check.peak_ram_bytes)}"
        ),
        time_name="instruction" if chart["issued"] is None else f"time [{chart['unit']}]",
        lanes=_lanes(graph, chart),
        curve_name=f"RAM [{chart['size']}]",
        bands=tuple(_bands(graph, chart, levels)),
        points=(*values, (end, values[-1][1] if values else 0.0)),
        ghost=(*ghost, (end, ghost[-1][1])) if ghost else (),
        ghost_name=f"keep-all {format_bytes(max(kept, default=0))}",
        limit=None if chart["budget"] is None else chart["budget"] / scale,
        limit_name=chart["budget_name"],
    )


def _levels(chart: Mapping[str, Any]) -> list[tuple[tuple[int, bool], float]]:
    """Return the begin and the end of each instruction, and of all.

    Each is (position, whether after it) and the time from which on its RAM is in use.
    """
    n, issued = len(chart["ops"]), chart["issued"]
    if issued is None:
        begins = [float(p) for p in range(n + 1)]
        done = begins[1:]
    else:
        begins, done = issued, list(issued[:-1])
        for p, _, end in chart["work"]:
            if BARS[chart["ops"][p]][1] in (Kind.COMPUTED, Kind.RECOMPUTED):
                done[p] = end
    levels = [
        ((p, after), (done if after else begins)[p]) for p in range(n) for after in (False, True)
    ]
    return [*levels, ((n, False), begins[n])]


def _lanes(graph: Graph, chart: Mapping[str, Any]) -> dict[str, tuple[Bar, ...]]:
    """Return every bar that takes time, by its lane."""
    lanes: dict[str, list[Bar]] = {"core": [], "bus": []}
    for p, start, end in chart["work"]:
        lane, kind = BARS[chart["ops"][p]]
        computes = kind in (Kind.COMPUTED, Kind.RECOMPUTED)
        known = graph.nodes if computes else graph.tensors
        name = known[chart["of"][p]].name
        lanes[lane].append(Bar(start=start, end=end, kind=kind, name=name))
    return {name: tuple(bars) for name, bars in lanes.items() if bars or name == "core"}


def _bands(
    graph: Graph, chart: Mapping[str, Any], levels: list[tuple[tuple[int, bool], float]]
) -> Iterator[Band]:
    """Yield what is in RAM for some time, stacked by part and then as it comes."""
    times = [time for _, time in levels]
    shown = [at for at in range(len(times) - 1) if times[at + 1] > times[at]]
    base = dict.fromkeys(shown, 0)
    scale = chart["scale"]
    bands = sorted(
        (part_of(graph, stay[0] if stay[0] >= 0 else None), max(stay[2], 0), -stay[3], stay)
        for stay in chart["stays"]
    )
    for part, begin, _, stay in bands:
        what, size, _, end, origin, _, given_at, given, *_ = stay
        runs: list[list[float]] = []
        last = min(2 * end + 1, len(times) - 1)
        for at in range(2 * begin, last):
            if at not in base:
                continue
            low = base[at]
            base[at] = high = low + size - (given if 0 <= given_at <= at // 2 else 0)
            if runs and runs[-1][1:] == [times[at], low / scale, high / scale]:
                runs[-1][1] = times[at + 1]
            else:
                runs.append([times[at], times[at + 1], low / scale, high / scale])
        if runs:
            yield Band(
                part=part,
                kind=COPIES.get(ORIGINS[origin]),
                name=graph.tensors[what].name if what >= 0 else graph.nodes[-1 - what].name,
                runs=tuple((run[0], run[1], run[2], run[3]) for run in runs),
            )
