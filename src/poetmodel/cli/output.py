"""What goes to stdout: tables for people, or one JSON object."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Final

from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table

    from poetmodel.device.room import DeviceRoom

DEVICE_RAM: Final = "device RAM"
"""The row of a table about the RAM that the device has."""


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints names as they are: no markup, no highlighting."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def print_json(document: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Print an object, one key a line, or a list, one object a line, as JSON on stdout.

    It is ASCII, so that no setting of a terminal or pipe can break it.
    """
    if isinstance(document, dict):
        lines = [f"{json.dumps(key)}: {_compact(value)}" for key, value in document.items()]
        opening, closing = "{", "}"
    else:
        lines = [_compact(entry) for entry in document]
        opening, closing = "[", "]"
    sys.stdout.write(opening + ",\n ".join(lines) + closing + "\n")


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def print_text(*lines: str) -> None:
    """Print lines on stdout as they are, not wrapped."""
    for line in lines:
        sys.stdout.write(printable(line) + "\n")


def show(*renderables: RenderableType) -> None:
    """Print tables on stdout."""
    target = console()
    for renderable in renderables:
        target.print(renderable)


def figures(
    title: str, rows: Iterable[tuple[str, str, str]], *, alarms: Container[str] = ()
) -> Table:
    """Make a table of figures: what, how much, and a remark on each.

    Parameters
    ----------
    title : str
        Stands above it.
    rows : iterable of (str, str, str)
        The cells.
    alarms : container of str
        What stands in red.
    """
    from rich.table import Table

    table = Table(
        title=printable(title),
        title_style="bold",
        title_justify="left",
        box=None,
        show_header=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for row in rows:
        style = "bold red" if row[0] in alarms else None
        table.add_row(*(printable(cell.rstrip()) for cell in row), style=style)
    return table


def room_row(room: DeviceRoom | None) -> Iterator[tuple[str, str, str]]:
    """Yield the row that holds what a step takes against the RAM of the device, if there is one."""
    if room is not None:
        yield DEVICE_RAM, format_bytes(room.ram_bytes), room.remark()


def room_alarms(room: DeviceRoom | None) -> tuple[str, ...]:
    """Return the row that stands in red where the step does not fit the device."""
    return () if room is None or room.fits else (DEVICE_RAM,)


def listing(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: int = 1,
    whole_names: bool = True,
) -> Table:
    """Make a table with heads.

    Parameters
    ----------
    title : str
        Stands above it.
    heads : sequence of str
        One per column.
    rows : iterable of sequence of str
        The cells.
    left : int
        How many columns, from the first, hold words; the others hold numbers.
    whole_names : bool
        Whether the first column must stay on one line, so that it can be copied.
    """
    from rich import box
    from rich.table import Table

    table = Table(
        title=printable(title),
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for place, head in enumerate(heads):
        table.add_column(
            head,
            justify="left" if place < left else "right",
            overflow="fold",
            no_wrap=whole_names and place == 0,
        )
    for row in rows:
        table.add_row(*(printable(cell.rstrip()) for cell in row))
    return table


def printable(text: str) -> str:
    r"""Return a text with control characters spelled out, so that no name can steer a terminal.

    Examples
    --------
    >>> print(printable("a\x1b[31m b"))
    a\x1b[31m b
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def count(value: float | None) -> str:
    """Return a count for people, ready for a unit: ``11.69 M``, ``512``.

    Examples
    --------
    >>> count(11689512), count(512), count(None)
    ('11.69 M', '512 ', 'unknown')
    """
    if value is None:
        return "unknown"
    for letter, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {letter}"
    return f"{value:.4g} "


def percent(ratio: float, *, digits: int = 5) -> str:
    """Return a ratio as a percentage for people: ``12.5 %``.

    Examples
    --------
    >>> percent(0.125), percent(3e-15)
    ('12.5 %', '0 %')
    """
    return f"{round(100 * ratio, 5):.{digits}g} %"
