"""Charts of the result pages, drawn from the records as SVG by matplotlib.

Each file contains a digest of its data, so that checking it needs no plotting library.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import statistics
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from measured import RESULTS, figure_records
from poetmodel.files import write_text
from poetmodel.sweeps.panels import data_digest, figure_panels
from poetmodel.sweeps.pictures import draw
from poetmodel.sweeps.summaries import overhead_ratio
from poetmodel.sweeps.tables import rows
from poetmodel.units import format_bytes
from scheme import add_dark_colours
from solve_tables import BEST, GOALS, OPTIMAL, VARIANTS, overheads, solves, times_least
from step_tables import equal_peak, named, smallest, training

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

WIDTH_INCHES: Final = 7.2
"""Width of the text on the site, so that texts in charts have nearly its size."""
BLUE, RED, GREEN, ORANGE, PURPLE = "#0072b2", "#b2182b", "#009e73", "#e69f00", "#cc79a7"
GREY, PALE = "#808080", "#cccccc"
COLOURS: Final = (BLUE, ORANGE, GREEN, PURPLE, RED, "#56b4e9", GREY)
"""Colours of lines, in order."""
_LONG_NUMBER: Final = re.compile(r"(\.\d\d)\d+")
"""Pattern of numbers with digits below a hundredth of a point, which are invisible."""
_TAG: Final = re.compile(r"<[^>]+>")
"""Pattern of a tag with its attributes; only tags contain coordinates."""
_STYLE: Final[Any] = MappingProxyType(
    {
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 9,
        "axes.titleweight": "bold",
        "font.size": 9,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "poetmodel",
    }
)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of a page."""

    shown: Any
    """The chart's data as JSON values; empty if records are missing."""
    paint: Callable[[Any, Any], None]
    """Function that draws the data into a matplotlib figure."""
    height_inches: float = 3.2

    @cached_property
    def digest(self) -> str:
        """Digest of the data."""
        text = json.dumps([self.paint.__name__, self.shown])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def current(self, path: Path) -> bool:
        """Return whether a file contains the current data of this picture."""
        return path.is_file() and f"data {self.digest}" in path.read_text(encoding="utf-8")

    def write(self, path: Path) -> None:
        """Draw the chart into a file. Equal data gives equal bytes."""
        import matplotlib as mpl
        from matplotlib.figure import Figure

        with mpl.rc_context(dict(_STYLE)):
            figure = Figure(figsize=(WIDTH_INCHES, self.height_inches), layout="constrained")
            self.paint(figure, self.shown)
            content = io.BytesIO()
            metadata = {"Date": None, "Description": f"data {self.digest}"}
            figure.savefig(content, format="svg", metadata=metadata)
        whole = content.getvalue().decode()
        drawn = _TAG.sub(lambda tag: _LONG_NUMBER.sub(r"\1", tag[0]), whole)
        write_text(path, add_dark_colours(drawn))


_SIZES: Final = tuple(2**k for k in range(15, 23))
"""Ticks of byte axes [B]."""


def _bytes_axis(axes: Any, max_bytes: float) -> None:
    from matplotlib.ticker import NullLocator

    ticks = [size for size in _SIZES if size <= max_bytes * 1.2]
    axes.set(xscale="log", xlim=(ticks[0], max_bytes * 1.5))
    axes.set_xticks(ticks, labels=[format_bytes(size).replace(".00", "") for size in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _rows_axis(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


# -- times to a proof ------------------------------------------------------------------------------


def times() -> Chart:
    """Return the chart of the fraction of instances proved to 1 % against time, for each grid."""
    shown = []
    runs = solves()
    for goal, of_goal in runs[~runs.infeasible & (runs.goal != 5)].groupby("goal"):
        found = sorted(of_goal.to_1.dropna().tolist())
        shown.append([GOALS[int(goal)], len(of_goal), found])
    return Chart(shown=shown, paint=_paint_times)


def _paint_times(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    for (heading, count, found), colour in zip(shown, COLOURS, strict=False):
        shares = [100 * (k + 1) / count for k in range(len(found))]
        label = f"{heading}: {len(found)} of {count}"
        axes.step(found, shares, where="post", color=colour, linewidth=2, label=label)
    axes.set(xscale="log", xlabel="time", ylim=(0, 103))
    axes.set_title("Problems proved to within 1 % of the optimum's overhead")
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.xaxis.set_major_formatter("{x:g} s")
    axes.legend(loc="lower right")


# -- compiled steps --------------------------------------------------------------------------------


def steps() -> Chart:
    """Return the chart of compiled step times beside the fastest peer within the same peak RAM."""
    shown: dict[str, list[list[float]]] = {}
    for duel in equal_peak(training("training")).dropna(subset=["own_time"]).itertuples():
        shown.setdefault(duel.network, []).append([duel.best_time, duel.own_time])
    return Chart(shown=shown, paint=_paint_steps, height_inches=3.4)


def _paint_steps(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    max_bytes = 1.02 * max(x for pairs in shown.values() for x, _ in pairs)
    axes.plot((0.9, max_bytes), (0.9, max_bytes), color=GREY, linewidth=1, linestyle="--")
    for (network, pairs), colour in zip(shown.items(), COLOURS, strict=False):
        axes.scatter(*zip(*pairs, strict=True), color=colour, s=22, alpha=0.8, label=network)
    high = 1.1 * max(y for pairs in shown.values() for _, y in pairs)
    axes.annotate("as quick", (high, high), (6, -12), textcoords="offset points")
    axes.set(xlim=(0.9, max_bytes), ylim=(0.85, high))
    axes.set_title("Compiled PyTorch steps and other ways to save memory, within the same peak")
    axes.set(xlabel="quickest other way, time over eager's", ylabel="compiled, time over eager's")
    axes.legend(loc="upper right", ncols=2)


# -- exported C ------------------------------------------------------------------------------------


def boards() -> Chart:
    """Return the chart of keep-all's RAM and the smallest RAM in which each network trains."""
    shown = {}
    for run, kept in smallest():
        sizes = [kept["ram_bytes"], run["ram_bytes"], run["limit_bytes"]]
        more = run["instructions"] / kept["instructions"]
        shown[named(run["network"]).replace("`", "")] = [*sizes, more, run["board"]]
    return Chart(shown=shown, paint=_paint_boards, height_inches=3.6)


def _paint_boards(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    kept, here, limits, more, places = zip(*shown.values(), strict=True)
    rows = range(len(shown))
    axes.hlines(rows, here, kept, color="#bbbbbb", linewidth=3)
    axes.plot(kept, rows, "o", color=GREY, markersize=8, label="keep-all")
    axes.plot(here, rows, "o", color=BLUE, markersize=8, label="on the board")
    axes.plot(limits, rows, "|", color=RED, markersize=16, markeredgewidth=2, label="its RAM")
    ends = map(max, kept, limits)
    for row, (size, times, board) in enumerate(zip(ends, more, places, strict=True)):
        text = f"{board}, {times:.2f} x instructions"
        axes.annotate(text, (size, row), (8, 0), textcoords="offset points", va="center", size=8)
    _bytes_axis(axes, max(kept))
    axes.set_xlim(2**16, max(kept) * 6)
    _rows_axis(axes, list(shown))
    title = "RAM of C that trains on a Cortex-M: stack, inputs and runtime included"
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, weight="bold")
    figure.legend(loc="outside lower center", ncols=3)


# -- methods ---------------------------------------------------------------------------------------

CURVES: Final = (
    ("published", "paper/vgg16-cifar", "paper-a72"),
    ("zoo", "resnet18-cifar", "nrf52840"),
    ("captured", "traced/models/vit", "profile"),
    ("whole steps", "resnet8", "nrf52840"),
    ("dma", "resnet18-cifar", "stm32h743"),
    ("time", "resnet18-cifar", "jetson-tx2"),
)
"""A network and a device for each kind of problem, solved over many budgets."""
_SHOWN: Final = 6
"""Methods drawn beside the optimum."""


def compared() -> Chart:
    """Return the chart of overhead against RAM for a network of each kind, with the proven bound.

    The best methods have the lowest median overhead of those that solve half of the problems.
    """
    runs = overheads()
    table = times_least(runs)
    able = table[(2 * table.solved >= table.tried) & ~table.method.isin((OPTIMAL, BEST, *VARIANTS))]
    best = [OPTIMAL, *able.nsmallest(_SHOWN, ["median_low", "median_high"]).method]
    shown: dict[str, Any] = {}
    for kind, model, device in CURVES:
        found = runs[(runs.kind == kind) & (runs.model == model) & (runs.device == device)]
        if found.empty:
            continue
        keep_all = found.keep_all_bytes.max()
        share = 100 * found.ram_budget_bytes / keep_all
        paid = 100 * found.value / found.single_pass
        points = found.assign(share=share, paid=paid).sort_values("share")
        lines = {
            method: points[(points.method == method) & points.paid.notna()][["share", "paid"]]
            for method in best
        }
        lines = {method: line.to_numpy().tolist() for method, line in lines.items() if len(line)}
        optimum = points[points.method == OPTIMAL]
        proof = optimum.overhead_bound.clip(lower=0)
        bound = optimum.assign(paid=100 * proof / optimum.single_pass)[["share", "paid"]]
        name = model.rpartition("/")[2]
        heading = f"{kind}: {name}" + ("" if device == "profile" else f" on {device}")
        shown[heading] = {
            "lines": lines,
            "bound": bound.to_numpy().tolist(),
            "peak": format_bytes(int(keep_all)),
        }
    return Chart(shown=shown, paint=_paint_compared, height_inches=9.6)


_FEW_DECADES: Final = 100
"""Ratio of an axis' limits below which it has ticks between powers of ten."""


def _paint_compared(figure: Any, shown: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = figure.subplots(3, 2, squeeze=False).ravel()
    names = dict.fromkeys(name for panel in shown.values() for name in panel["lines"])
    others = sorted(name for name in names if name != OPTIMAL)
    colours = dict(zip(others, COLOURS[1:], strict=False))
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    for axes, (heading, panel) in zip(panels, shown.items(), strict=False):
        for name, points in panel["lines"].items():
            paid = [(x, y) for x, y in points if y > 0]
            if not paid:
                continue
            if name == OPTIMAL:
                axes.plot(*zip(*paid, strict=True), "o-", color=BLUE, linewidth=2.4, markersize=4,
                          label=name, zorder=5)  # fmt: skip
                continue
            axes.plot(*zip(*paid, strict=True), color=colours[name], linewidth=1.2, marker=".",
                      markersize=4, label=name)  # fmt: skip
        below = [(x, y) for x, y in panel["bound"] if y > 0]
        if below:
            x, y = zip(*below, strict=True)
            floor = min(y) / 3
            axes.fill_between(x, floor, y, color=PALE, alpha=0.6, label="proved: nothing is here")
            axes.set_ylim(bottom=floor)
        axes.set(yscale="log", xlabel=f"RAM, share of keep-all's {panel['peak']}")
        axes.set_title(heading)
        axes.xaxis.set_major_formatter("{x:g} %")
        bottom, top = axes.get_ylim()
        if top < _FEW_DECADES * bottom:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.12g} %")
        axes.yaxis.set_minor_formatter(NullFormatter())
    known = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=4)
    figure.supylabel("energy (in the last panel: time) beyond a single pass", fontsize=9)


# -- figures of the paper --------------------------------------------------------------------------

FIGURES: Final = ("figure2", "figure3", "figure4", "figure5", "table3")


def overview() -> Chart:
    """Return the chart of each method's overhead relative to the optimum, one point per problem."""
    problems: dict[str, dict[str, float]] = {}
    for row in (row for name in FIGURES[1:4] for row in rows(figure_records(name))):
        ratio = overhead_ratio(row)
        if ratio is not None:
            place = json.dumps([row[key] for key in ("model", "device", "deadline", "ram")])
            problems.setdefault(place, {})[row["method"]] = ratio
    found: dict[str, list[float]] = {}
    for methods in problems.values():
        best = methods.pop(OPTIMAL, None)
        if best:
            for method, ratio in methods.items():
                found.setdefault(method, []).append(ratio / best)
    return Chart(shown=found, paint=_paint_overview, height_inches=4.2)


def _paint_overview(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    methods = sorted(shown, key=lambda name: statistics.median(shown[name]))
    for place, method in enumerate(methods):
        times = shown[method]
        axes.plot(times, [place] * len(times), "o", color=BLUE, alpha=0.35, markersize=5)
        axes.plot(statistics.median(times), place, "|", color=RED, markersize=14, mew=2)
    axes.axvline(1, color="#000000", linewidth=1.8)
    axes.set_yticks(range(len(methods)), methods)
    axes.set(xscale="log", ylim=(len(methods) - 0.5, -0.5))
    axes.set_title("Energy overhead of each method, in times the optimum's (the line)")
    axes.set_xlabel("a dot for each problem of Figures 3 to 5 that it solves; red: the median")
    axes.xaxis.set_major_formatter("{x:,g} x")


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A figure of the paper as ``poetmodel bench`` draws it."""

    name: str

    @cached_property
    def _panels(self) -> Any:
        def schedule(key: str) -> dict[str, Any] | None:
            path = RESULTS / "figures" / "schedules" / f"{key}.schedule.json"
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

        return figure_panels(self.name, rows(figure_records(self.name)), schedule)

    def current(self, path: Path) -> bool:
        """Return whether a file contains the current data of this picture."""
        mark = f"data {data_digest(self._panels)}"
        return path.is_file() and mark in path.read_text(encoding="utf-8")

    def write(self, path: Path) -> None:
        """Draw the picture into a file."""
        draw(path, self._panels)
        write_text(path, add_dark_colours(path.read_text(encoding="utf-8")))


# -- all of them -----------------------------------------------------------------------------------

CHARTS: Final[dict[str, Callable[[], Chart | PaperFigure]]] = {
    "compared.svg": compared,
    "results-time.svg": times,
    "results-pytorch.svg": steps,
    "boards-ram.svg": boards,
    "paper-overview.svg": overview,
    **{f"paper-{name}.svg": partial(PaperFigure, name=name) for name in FIGURES},
}
"""Function that returns each chart, by its path in ``docs``."""
