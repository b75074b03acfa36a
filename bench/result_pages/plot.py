"""The plot of time and memory against the number of nodes, as SVG.

It carries a digest of what it shows, so that checking it needs no plotting library.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from result_pages.records import ONE_PERCENT, SolveRecord

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_STYLE: Final = {
    ("paper-m4", "20%"): ("#b2182b", "o"),
    ("paper-m4", "40%"): ("#ef8a62", "s"),
    ("paper-a72", "20%"): ("#2166ac", "^"),
    ("paper-a72", "40%"): ("#67a9cf", "D"),
}
"""Colour and marker by device and budget."""
_GIB: Final = 2**30

Point = tuple[int, float, bool, float]


def points(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[Point]]:
    """Return what is plotted: BERT of all sizes, by device and budget.

    Returns
    -------
    dict
        Lists of nodes, time to a gap of 1 % or else to the end [s], whether that gap was proved,
        and memory [B].
    """
    found: dict[tuple[str, str], list[Point]] = {key: [] for key in _STYLE}
    for record in records:
        run = SolveRecord(record)
        cell = run.cell
        key = cell["device"], cell["ram"]
        is_bert = cell["model"].startswith("paper/bert") and cell["goal"] in (1, 4)
        if key not in found or not is_bert or cell["deadline"] or "graph_nodes" not in record:
            continue
        seconds = run.time_to(ONE_PERCENT)
        found[key].append(
            (
                record["graph_nodes"],
                run.seconds if seconds is None else seconds,
                seconds is not None,
                record["peak_memory_bytes"],
            )
        )
    return {key: sorted(values) for key, values in found.items() if values}


def digest(records: Sequence[dict[str, Any]]) -> str:
    """Return what identifies the content of the plot."""
    shown = [[*key, values] for key, values in points(records).items()]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def current(path: Path, records: Sequence[dict[str, Any]]) -> bool:
    """Return whether a file shows these records."""
    return path.is_file() and f"data {digest(records)}" in path.read_text(encoding="utf-8")


def write_plot(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Draw the plot into a file."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({"svg.hashsalt": "poetmodel", "svg.fonttype": "none"}):
        figure = _figure(points(records))
        figure.savefig(path, metadata={"Date": None, "Description": f"data {digest(records)}"})
    plt.close(figure)


def _figure(plotted: dict[tuple[str, str], list[Point]]) -> Any:
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullLocator

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
    for (device, ram), values in plotted.items():
        colour, marker = _STYLE[device, ram]
        nodes, seconds, proved, memory = zip(*values, strict=True)
        name = f"{device}, {ram}"
        for axes, heights in ((left, seconds), (right, [value / _GIB for value in memory])):
            axes.plot(nodes, heights, color=colour, linewidth=1)
            faces = [colour if done else "white" for done in proved]
            axes.scatter(
                nodes, heights, c=faces, edgecolors=colour, marker=marker, label=name, zorder=3
            )
    left.set(xscale="log", yscale="log", xlabel="nodes", ylabel="time to a gap of 1 % [s]")
    right.set(xscale="log", xlabel="nodes", ylabel="memory of the process [GiB]", ylim=(0, None))
    ticks = sorted({point[0] for values in plotted.values() for point in values})
    for axes in (left, right):
        axes.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(visible=True, linewidth=0.3)
    left.yaxis.set_major_formatter("{x:g}")
    left.legend(fontsize="small", title="hollow: limit reached", title_fontsize="small")
    return figure
