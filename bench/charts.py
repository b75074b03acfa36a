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

from measured import RESULTS, read_figure_records
from poetmodel.files import write_text
from poetmodel.sweeps.panels import data_digest, figure_panels
from poetmodel.sweeps.pictures import draw
from poetmodel.sweeps.summaries import overhead_ratio
from poetmodel.sweeps.tables import rows
from poetmodel.units import format_bytes
from scheme import add_dark_colours
from solve_tables import (
    BEST,
    GOALS,
    OPTIMAL,
    VARIANTS,
    load_overheads,
    load_solves,
    summarize_methods,
)
from step_tables import compare_at_equal_peak, find_smallest_steps, format_network, load_training

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

WIDTH_INCHES: Final = 7.2
"""Width of the text on the site: fonts of charts appear in nearly their nominal size."""
BLUE, RED, GREEN, ORANGE, PURPLE = "#0072b2", "#b2182b", "#009e73", "#e69f00", "#cc79a7"
GREY, LIGHT_GREY = "#808080", "#cccccc"
COLOURS: Final = (BLUE, ORANGE, GREEN, PURPLE, RED, "#56b4e9", GREY)
"""Colours of lines, in order."""
_LONG_NUMBER: Final = re.compile(r"(\.\d\d)\d+")
"""Pattern of numbers with more than two decimals; smaller parts of a point are invisible."""
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
    """Data of the chart as JSON values; empty without records."""
    paint: Callable[[Any, Any], None]
    """Function that draws the data into a matplotlib figure; the digest contains its name."""
    height_inches: float = 3.2

    @cached_property
    def digest(self) -> str:
        """Digest of the data and of the name of `paint`."""
        text = json.dumps([self.paint.__name__, self.shown])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def is_current(self, path: Path) -> bool:
        """Return whether a file exists and contains the digest of this chart."""
        return path.is_file() and f"data {self.digest}" in path.read_text(encoding="utf-8")

    def write(self, path: Path) -> None:
        """Write the chart as an SVG file with its digest. Equal charts have equal bytes."""
        import matplotlib as mpl
        from matplotlib.figure import Figure

        with mpl.rc_context(dict(_STYLE)):
            figure = Figure(figsize=(WIDTH_INCHES, self.height_inches), layout="constrained")
            self.paint(figure, self.shown)
            buffer = io.BytesIO()
            metadata = {"Date": None, "Description": f"data {self.digest}"}
            figure.savefig(buffer, format="svg", metadata=metadata)
        svg = buffer.getvalue().decode()
        shortened = _TAG.sub(lambda tag: _LONG_NUMBER.sub(r"\1", tag[0]), svg)
        write_text(path, add_dark_colours(shortened))


_BYTE_TICKS: Final = tuple(2**k for k in range(15, 23))
"""Ticks of axes of bytes: powers of two [B]."""


def _set_bytes_axis(axes: Any, max_bytes: float) -> None:
    from matplotlib.ticker import NullLocator

    ticks = [size for size in _BYTE_TICKS if size <= max_bytes * 1.2]
    axes.set(xscale="log", xlim=(ticks[0], max_bytes * 1.5))
    axes.set_xticks(ticks, labels=[format_bytes(size).replace(".00", "") for size in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _set_rows_axis(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


# -- times to a proof ------------------------------------------------------------------------------


def make_times_chart() -> Chart:
    """Return the chart of the fraction of instances proved to 1 % over time, for each goal."""
    data = []
    runs = load_solves()
    for goal, of_goal in runs[~runs.infeasible & (runs.goal != 5)].groupby("goal"):
        times_s = sorted(of_goal.to_1.dropna().tolist())
        data.append([GOALS[int(goal)], len(of_goal), times_s])
    return Chart(shown=data, paint=_paint_times)


def _paint_times(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    for (heading, count, times_s), colour in zip(shown, COLOURS, strict=False):
        percentages = [100 * (k + 1) / count for k in range(len(times_s))]
        label = f"{heading}: {len(times_s)} of {count}"
        axes.step(times_s, percentages, where="post", color=colour, linewidth=2, label=label)
    axes.set(xscale="log", xlabel="time", ylim=(0, 103))
    axes.set_title("Problems proved to within 1 % of the optimum's overhead")
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.xaxis.set_major_formatter("{x:g} s")
    axes.legend(loc="lower right")


# -- compiled steps --------------------------------------------------------------------------------


def make_steps_chart() -> Chart:
    """Return the chart of the times of compiled steps and of the fastest peers at equal peaks."""
    data: dict[str, list[list[float]]] = {}
    for duel in (
        compare_at_equal_peak(load_training("training")).dropna(subset=["own_time"]).itertuples()
    ):
        data.setdefault(duel.network, []).append([duel.best_time, duel.own_time])
    return Chart(shown=data, paint=_paint_steps, height_inches=3.4)


def _paint_steps(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    max_x = 1.02 * max(x for pairs in shown.values() for x, _ in pairs)
    axes.plot((0.9, max_x), (0.9, max_x), color=GREY, linewidth=1, linestyle="--")
    for (network, pairs), colour in zip(shown.items(), COLOURS, strict=False):
        axes.scatter(*zip(*pairs, strict=True), color=colour, s=22, alpha=0.8, label=network)
    max_time = 1.1 * max(y for pairs in shown.values() for _, y in pairs)
    axes.annotate("as quick", (max_time, max_time), (6, -12), textcoords="offset points")
    axes.set(xlim=(0.9, max_x), ylim=(0.85, max_time))
    axes.set_title("Compiled PyTorch steps and other ways to save memory, within the same peak")
    axes.set(xlabel="quickest other way, time over eager's", ylabel="compiled, time over eager's")
    axes.legend(loc="upper right", ncols=2)


# -- exported C ------------------------------------------------------------------------------------


def make_boards_chart() -> Chart:
    """Return the chart of keep-all's RAM and the smallest RAM in which each network trains."""
    data = {}
    for run, kept in find_smallest_steps():
        sizes = [kept["ram_bytes"], run["ram_bytes"], run["limit_bytes"]]
        ratio = run["instructions"] / kept["instructions"]
        data[format_network(run["network"]).replace("`", "")] = [*sizes, ratio, run["board"]]
    return Chart(shown=data, paint=_paint_boards, height_inches=3.6)


def _paint_boards(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    keep_all_bytes, ram_bytes, limit_bytes, ratios, board_names = zip(*shown.values(), strict=True)
    rows = range(len(shown))
    axes.hlines(rows, ram_bytes, keep_all_bytes, color="#bbbbbb", linewidth=3)
    axes.plot(keep_all_bytes, rows, "o", color=GREY, markersize=8, label="keep-all")
    axes.plot(ram_bytes, rows, "o", color=BLUE, markersize=8, label="on the board")
    axes.plot(limit_bytes, rows, "|", color=RED, markersize=16, markeredgewidth=2, label="its RAM")
    ends = map(max, keep_all_bytes, limit_bytes)
    for row, (size, ratio, board) in enumerate(zip(ends, ratios, board_names, strict=True)):
        text = f"{board}, {ratio:.2f} x instructions"
        axes.annotate(text, (size, row), (8, 0), textcoords="offset points", va="center", size=8)
    _set_bytes_axis(axes, max(keep_all_bytes))
    axes.set_xlim(2**16, max(keep_all_bytes) * 6)
    _set_rows_axis(axes, list(shown))
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
_MAX_METHODS: Final = 6
"""Maximum number of methods that are drawn in addition to the optimum."""


def make_methods_chart() -> Chart:
    """Return the chart of overhead over RAM for a network of each kind, with the proven bound.

    Shows the optimum and the `_MAX_METHODS` methods with the lowest median overhead that solve at
    least half of their problems.
    """
    all_runs = load_overheads()
    table = summarize_methods(all_runs)
    candidates = table[
        (2 * table.solved >= table.tried) & ~table.method.isin((OPTIMAL, BEST, *VARIANTS))
    ]
    best = [OPTIMAL, *candidates.nsmallest(_MAX_METHODS, ["median_low", "median_high"]).method]
    data: dict[str, Any] = {}
    for kind, model, device in CURVES:
        curve_runs = all_runs[
            (all_runs.kind == kind) & (all_runs.model == model) & (all_runs.device == device)
        ]
        if curve_runs.empty:
            continue
        keep_all = curve_runs.keep_all_bytes.max()
        percentages = 100 * curve_runs.ram_budget_bytes / keep_all
        overheads = 100 * curve_runs.value / curve_runs.single_pass
        points = curve_runs.assign(share=percentages, paid=overheads).sort_values("share")
        lines = {
            method: points[(points.method == method) & points.paid.notna()][["share", "paid"]]
            for method in best
        }
        lines = {method: line.to_numpy().tolist() for method, line in lines.items() if len(line)}
        optimum = points[points.method == OPTIMAL]
        bounds = optimum.overhead_bound.clip(lower=0)
        bound = optimum.assign(paid=100 * bounds / optimum.single_pass)[["share", "paid"]]
        model_name = model.rpartition("/")[2]
        heading = f"{kind}: {model_name}" + ("" if device == "profile" else f" on {device}")
        data[heading] = {
            "lines": lines,
            "bound": bound.to_numpy().tolist(),
            "peak": format_bytes(int(keep_all)),
        }
    return Chart(shown=data, paint=_paint_compared, height_inches=9.6)


_MAX_LABELLED_RATIO: Final = 100
"""Ratio of an axis' limits below which it has ticks between powers of ten."""


def _paint_compared(figure: Any, shown: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = figure.subplots(3, 2, squeeze=False).ravel()
    names = dict.fromkeys(name for panel in shown.values() for name in panel["lines"])
    other_methods = sorted(name for name in names if name != OPTIMAL)
    colours = dict(zip(other_methods, COLOURS[1:], strict=False))
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
        bound = [(x, y) for x, y in panel["bound"] if y > 0]
        if bound:
            x, y = zip(*bound, strict=True)
            floor = min(y) / 3
            axes.fill_between(
                x, floor, y, color=LIGHT_GREY, alpha=0.6, label="proved: nothing is here"
            )
            axes.set_ylim(bottom=floor)
        axes.set(yscale="log", xlabel=f"RAM, share of keep-all's {panel['peak']}")
        axes.set_title(heading)
        axes.xaxis.set_major_formatter("{x:g} %")
        bottom, top = axes.get_ylim()
        if top < _MAX_LABELLED_RATIO * bottom:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.12g} %")
        axes.yaxis.set_minor_formatter(NullFormatter())
    handles_by_label = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles_by_label.values(), handles_by_label.keys(), loc="outside lower center", ncols=4
    )
    figure.supylabel("energy (in the last panel: time) beyond a single pass", fontsize=9)


# -- figures of the paper --------------------------------------------------------------------------

FIGURES: Final = ("figure2", "figure3", "figure4", "figure5", "table3")


def make_overview_chart() -> Chart:
    """Return the chart of each method's overhead relative to the optimum, one point per problem."""
    problems: dict[str, dict[str, float]] = {}
    for row in (row for name in FIGURES[1:4] for row in rows(read_figure_records(name))):
        ratio = overhead_ratio(row)
        if ratio is not None:
            problem = json.dumps([row[key] for key in ("model", "device", "deadline", "ram")])
            problems.setdefault(problem, {})[row["method"]] = ratio
    ratios_by_method: dict[str, list[float]] = {}
    for methods in problems.values():
        optimum = methods.pop(OPTIMAL, None)
        if optimum:
            for method, ratio in methods.items():
                ratios_by_method.setdefault(method, []).append(ratio / optimum)
    return Chart(shown=ratios_by_method, paint=_paint_overview, height_inches=4.2)


def _paint_overview(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    methods = sorted(shown, key=lambda name: statistics.median(shown[name]))
    for row, method in enumerate(methods):
        ratios = shown[method]
        axes.plot(ratios, [row] * len(ratios), "o", color=BLUE, alpha=0.35, markersize=5)
        axes.plot(statistics.median(ratios), row, "|", color=RED, markersize=14, mew=2)
    axes.axvline(1, color="#000000", linewidth=1.8)
    axes.set_yticks(range(len(methods)), methods)
    axes.set(xscale="log", ylim=(len(methods) - 0.5, -0.5))
    axes.set_title("Energy overhead of each method, in times the optimum's (the line)")
    axes.set_xlabel("a dot for each problem of Figures 3 to 5 that it solves; red: the median")
    axes.xaxis.set_major_formatter("{x:,g} x")


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A figure of the paper as drawn by ``poetmodel bench``."""

    name: str

    @cached_property
    def _panels(self) -> Any:
        def read_schedule(key: str) -> dict[str, Any] | None:
            path = RESULTS / "figures" / "schedules" / f"{key}.schedule.json"
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

        return figure_panels(self.name, rows(read_figure_records(self.name)), read_schedule)

    def is_current(self, path: Path) -> bool:
        """Return whether a file exists and contains the digest of this figure's data."""
        mark = f"data {data_digest(self._panels)}"
        return path.is_file() and mark in path.read_text(encoding="utf-8")

    def write(self, path: Path) -> None:
        """Write the picture as an SVG file with its digest."""
        draw(path, self._panels)
        write_text(path, add_dark_colours(path.read_text(encoding="utf-8")))


# -- registry -----------------------------------------------------------------------------------

CHARTS: Final[dict[str, Callable[[], Chart | PaperFigure]]] = {
    "compared.svg": make_methods_chart,
    "results-time.svg": make_times_chart,
    "results-pytorch.svg": make_steps_chart,
    "boards-ram.svg": make_boards_chart,
    "paper-overview.svg": make_overview_chart,
    **{f"paper-{name}.svg": partial(PaperFigure, name=name) for name in FIGURES},
}
"""Function that returns each chart, by path in ``docs/``."""
