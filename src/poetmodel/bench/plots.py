"""A picture of a sweep: energy overhead against RAM, one line per method."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

from poetmodel.data import write_bytes
from poetmodel.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from poetmodel.bench.tables import Row

FORMS: Final = ("png", "svg", "pdf")
"""Endings of files that can be drawn."""
_LINE: Final = ("method", "backend")
_LINEAR_PERCENT: Final = 0.1
"""Overheads below this are drawn to a linear scale, larger ones to a logarithmic one [%]."""


def check_form(path: Path) -> None:
    """Raise `InputError` unless a picture can be written to a file of this name.

    Raises
    ------
    InputError
        If its ending is none of `FORMS`, or matplotlib is missing.
    """
    if path.suffix.removeprefix(".") not in FORMS:
        msg = f"{path}: expected a file that ends in {', '.join('.' + form for form in FORMS)}"
        raise InputError(msg)
    try:
        import matplotlib as mpl  # noqa: F401 - only whether it is there
    except ImportError:
        msg = f"{path}: pictures need the extra: pip install 'poetmodel[report]'"
        raise InputError(msg) from None


def plot(path: Path, found: Sequence[Row]) -> None:
    """Draw the energy overhead against the RAM budget, a panel per model, device and deadline.

    Parameters
    ----------
    path : Path
        The picture, ``.png``, ``.svg`` or ``.pdf``.
    found : sequence of dict
        As `poetmodel.bench.tables.rows` gives them. A method has the same colour in all panels.

    Raises
    ------
    InputError
        If the file cannot be written, or matplotlib is missing.
    """
    check_form(path)
    from matplotlib.figure import Figure

    panels: dict[tuple[str, ...], list[Row]] = {}
    for row in found:
        panels.setdefault(_words(row, "model", "device", "deadline"), []).append(row)
    colours = {
        name: f"C{place % 10}"
        for place, name in enumerate(dict.fromkeys(_words(row, *_LINE) for row in found))
    }
    height = max(2.6, 0.22 * len(colours))
    figure = Figure(figsize=(7.5, height * max(1, len(panels))), layout="constrained")
    axes = figure.subplots(max(1, len(panels)), squeeze=False)[:, 0]
    for axis, (title, panel) in zip(axes, panels.items(), strict=False):
        axis.set_title(", ".join(title))
        _draw(axis, panel, colours)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix("."))
    write_bytes(path, content.getvalue())


def _words(row: Row, *names: str) -> tuple[str, ...]:
    return tuple(row[name] for name in names if row[name])


def _draw(axis: Any, panel: Sequence[Row], colours: Mapping[tuple[str, ...], str]) -> None:
    lines: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in panel:
        if row["overhead_j"] is not None and row["baseline_energy_j"]:
            share = 100 * row["overhead_j"] / row["baseline_energy_j"]
            points = lines.setdefault(_words(row, *_LINE), [])
            points.append((row["ram_budget_bytes"] / 1024, share))
    for name, points in lines.items():
        ram_kib, shares = zip(*sorted(points), strict=True)
        axis.plot(
            ram_kib, shares, marker="o", markersize=3, color=colours[name], label=", ".join(name)
        )
    axis.set_yscale("symlog", linthresh=_LINEAR_PERCENT)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("RAM budget [KiB]")
    axis.set_ylabel("energy overhead [%]")
    if lines:
        axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
