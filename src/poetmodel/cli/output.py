"""Output: tables, texts or JSON on stdout; notes, a live line or a progress bar on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from poetmodel.report.presenter import Fact, escape_controls, listed_facts
from poetmodel.units import ESTIMATES, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from poetmodel.problem import Problem
    from poetmodel.problem.objective import Objective
    from poetmodel.solver.request import SolveProgress
    from poetmodel.sweeps import Progress

    OnProgress = Callable[[SolveProgress], None]


UNLIMITED_WIDTH: Final = 1_000_000
"""Width of a pipe or file [columns], so large that no line is wrapped or cut."""
MAX_LINE: Final = 2000
"""Maximum length of a printed line or title [characters]; the middle of a longer one is omitted."""
MAX_CELL: Final = 400
"""Maximum length of a table cell [characters]."""
MAX_WORD: Final = 240
"""Maximum length of a word in a line, such as a name or a path [characters]."""
MAX_WORD_IN_CELL: Final = 100
"""Maximum length of a word in a cell [characters]."""


class _Verbosity:
    """Process-wide setting: whether only errors, JSON and the solver's log are printed."""

    quiet = False


def set_quiet(quiet: bool) -> bool:
    """Set ``--quiet`` for the process; return `quiet`, as typer requires of a callback."""
    _Verbosity.quiet = quiet
    return quiet


def is_quiet() -> bool:
    """Return whether only errors, and JSON or a log if requested, are printed."""
    return _Verbosity.quiet


def print_note(text: str) -> None:
    """Print a line on stderr, unless quiet; control characters are escaped."""
    if not _Verbosity.quiet:
        print(escape_controls(text), file=sys.stderr)


def print_written(path: Path) -> None:
    """Print on stderr that a file was written, unless quiet."""
    print_note(f"wrote {path}")


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console of rich that prints texts unchanged: no markup, highlighting or emoji.

    The default of `width` is ``COLUMNS``, that of the terminal, or `UNLIMITED_WIDTH` for files.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if width is None and not stream.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        width = UNLIMITED_WIDTH
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width)


def print_json(document: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Print an object, one key per line, or a list, one object per line, as JSON on stdout.

    ASCII, whatever the encoding of the terminal; printed even if quiet.
    """
    compact = partial(json.dumps, allow_nan=False)
    if isinstance(document, dict):
        lines = [f"{compact(key)}: {compact(value)}" for key, value in document.items()]
        opening, closing = "{", "}"
    else:
        lines = list(map(compact, document))
        opening, closing = "[", "]"
    sys.stdout.write(opening + ",\n ".join(lines) + closing + "\n")


def print_text(*lines: str) -> None:
    """Print lines on stdout, unless quiet, formatted by `printable` and not wrapped."""
    if _Verbosity.quiet:
        return
    for line in lines:
        sys.stdout.write(printable(line) + "\n")


def show(*renderables: RenderableType) -> None:
    """Print tables and texts on stdout, unless quiet; changes the widths and cells of the tables.

    A table whose words do not fit is printed wider than the terminal.
    """
    from rich.table import Table

    if _Verbosity.quiet:
        return
    terminal = console()
    for renderable in renderables:
        if isinstance(renderable, Table):
            table_width = _set_column_widths(renderable, terminal.width)
            wide_console = console(width=max(table_width, terminal.width))
            with wide_console.capture() as captured:
                wide_console.print(renderable, crop=False)
            # Strip trailing blanks: pipes do not need them, and a terminal may colour them.
            text = captured.get()
            sys.stdout.write("".join(f"{line.rstrip()}\n" for line in text.splitlines()))
        else:
            terminal.print(renderable)


def _set_column_widths(table: Table, width: int) -> int:
    """Set the widths of a table's columns, and wrap its cells; return the width of the table.

    If the longest words do not fit, names and paths are wrapped after one of ``._/``. If that does
    not fit either, no word breaks, and the table is wider than `width`.
    """
    columns = table.columns
    texts = [[str(column.header), *map(str, column.cells)] for column in columns]
    max_widths = [_max_width(cells) for cells in texts]
    n_dividers = max(0, len(columns) - 1)
    # With a box, dividers have padding on both sides, and there are edges. Without a box, two
    # blanks separate columns.
    border_width = 3 * n_dividers + 2 if table.box is not None else 2 * n_dividers
    widths: list[int] = []
    for separator in (r"\s+", rf"\s+|{_NAME_BREAK}"):
        min_widths = [
            max_width if column.no_wrap else _max_width(re.split(separator, " ".join(cells)))
            for column, cells, max_width in zip(columns, texts, max_widths, strict=True)
        ]
        fitted_widths = _fit_widths(min_widths, max_widths, width - border_width)
        if not widths or sum(fitted_widths) + border_width <= width:
            widths = fitted_widths
        if sum(widths) + border_width <= width:
            break
    for column, size in zip(columns, widths, strict=True):
        column.width = size
        column._cells = [_wrap_long_words(str(cell), size) for cell in column.cells]  # noqa: SLF001
    return sum(widths) + border_width


_NAME_BREAK: Final = r"(?<=[._/])(?=[^\W\d])"
"""Pattern of positions for wrapping a name: after one of ``._/``, before a letter or ``_``."""


def _max_width(texts: Iterable[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, texts), default=0)


def _wrap_long_words(text: str, width: int) -> str:
    """Return a text, wrapped to `width` [columns] where possible if one of its words is wider."""
    if _max_width(text.split()) <= width:
        return text
    lines = [""]
    for fragment in re.split(rf"{_NAME_BREAK}|(?<=\s)", text):
        if lines[-1] and _max_width([lines[-1] + fragment.rstrip()]) > width:
            lines.append("")
        lines[-1] += fragment
    return "\n".join(lines)


def _fit_widths(
    min_widths: Sequence[int], max_widths: Sequence[int], total_width: int
) -> list[int]:
    """Return column widths between lower and upper bounds, whose sum fits if possible."""
    widths = list(max_widths)
    for common_width in reversed(range(max(max_widths, default=0))):
        if sum(widths) <= total_width:
            break
        widths = [
            max(min_width, min(max_width, common_width))
            for min_width, max_width in zip(min_widths, max_widths, strict=True)
        ]
    return widths


def fact_table(title: str, facts: Iterable[Fact]) -> Table:
    """Return a table of the facts that have a name and a value; those with an alarm are red."""
    cells_and_alarms = [
        ((fact.name or "", fact.text, fact.note), fact.alarm) for fact in listed_facts(facts)
    ]
    texts = [text for cells, _ in cells_and_alarms for text in cells]
    table = _titled_table(title, texts, box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for cells, alarm in cells_and_alarms:
        table.add_row(*map(_format_cell, cells), style="bold red" if alarm else None)
    return table


def listing(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    n_text_columns: int = 1,
    whole_names: bool = True,
) -> Table:
    """Return a table of `rows` below `heads`; long texts and words are shortened.

    The first `n_text_columns` are aligned left. With `whole_names` the first is not wrapped.
    """
    from rich import box

    rows = list(rows)
    texts = [*heads, *(text for row in rows for text in row)]
    table = _titled_table(title, texts, box=box.SIMPLE_HEAD)
    for column, head in enumerate(heads):
        table.add_column(
            head,
            justify="left" if column < n_text_columns else "right",
            overflow="fold",
            no_wrap=whole_names and column == 0,
        )
    for row in rows:
        table.add_row(*map(_format_cell, row))
    return table


_ENERGY: Final = re.compile(r"\d [mun]?J\b|\boverhead\b")
"""Pattern of heads and cells with energies or overheads. The title of a table with such a text
states that energies are estimates."""


def _titled_table(title: str, texts: Iterable[str], **style: Any) -> Table:
    """Return an empty table, whose title has `ESTIMATES` if one of `texts` matches `_ENERGY`."""
    from rich.table import Table

    if any(map(_ENERGY.search, texts)):
        title = f"{title} ({ESTIMATES})"
    style |= {"title_style": "bold", "title_justify": "left", "pad_edge": False}
    return Table(title=printable(title), **style)


def _format_cell(text: str) -> str:
    return printable(text.rstrip(), max_characters=MAX_CELL, max_word=MAX_WORD_IN_CELL)


def printable(text: str, *, max_characters: int = MAX_LINE, max_word: int = MAX_WORD) -> str:
    """Escape control characters and line breaks, and shorten long words and texts."""
    escaped = escape_controls(_omit_middle(text, 4 * max_characters))
    shortened = re.sub(r"\S+", lambda match: _omit_middle(match[0], max_word), escaped)
    return _omit_middle(shortened, max_characters)


def _omit_middle(text: str, max_characters: int) -> str:
    if len(text) <= max_characters:
        return text
    tail_length = max_characters // 3
    return f"{text[: max_characters - tail_length - 3]}...{text[-tail_length:]}"


# -- progress of a command ---------------------------------------------------------------------


class LiveLine:
    """A line with the elapsed seconds, and with the activity or the progress of a solve."""

    def __init__(self, problem: Problem | None = None, activity: str = "solving") -> None:
        self._problem = problem
        self._activity = activity
        self._start_s = time.monotonic()
        self._latest: SolveProgress | None = None

    def update(self, progress: SolveProgress) -> None:
        """Store the latest progress of the solve."""
        self._latest = progress

    def text(self) -> str:
        """Return the text of the line, which ends with the gap if known and the elapsed seconds."""
        seconds = f"{time.monotonic() - self._start_s:.0f} s"
        latest = self._latest
        gap = "" if latest is None or latest.gap is None else f"gap {latest.gap:.2%}  "
        if latest is None or self._problem is None:
            return f"{self._activity}, {gap}{seconds}"
        objective = self._problem.objective
        if latest.baseline:  # that of the tiles that are tried
            objective = replace(objective, baseline=latest.baseline)
        incumbent = f"{objective.label} {_format_overhead(latest.overhead, objective)}"
        bound = _format_overhead(latest.overhead_bound, objective)
        return f"{incumbent}  bound {bound}  {gap}{seconds}"

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(self.text(), no_wrap=True, overflow="ellipsis")


def _format_overhead(value: float | None, objective: Objective) -> str:
    """Format an overhead, or a bound on it, as a percentage of the objective's baseline."""
    if value is None:
        return "none yet"
    if objective.baseline > 0:
        return f"{value / objective.baseline:.4%}"
    return objective.format(value) if objective.is_in_bytes else f"{value:.4g}"


@contextmanager
def live_line(
    problem: Problem | None = None, *, enabled: bool, activity: str = "solving"
) -> Iterator[OnProgress | None]:
    """Show a live line on a terminal, if enabled and not quiet; yield its callback, else None."""
    if is_quiet() or not (enabled and sys.stderr.isatty()):
        yield None
        return
    from rich.live import Live

    line = LiveLine(problem, activity)
    terminal = console(stderr=True)
    with Live(line, console=terminal, transient=True, redirect_stdout=False, refresh_per_second=5):
        yield line.update


@contextmanager
def progress_bar(*, enabled: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Show the progress of a sweep on stderr, as a bar or lines; yield its callback or None."""
    if not enabled or is_quiet():
        yield None
        return
    if not sys.stderr.isatty():
        yield lambda progress: print(_progress_text(progress), file=sys.stderr)
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console(stderr=True), transient=True) as bar:
        task_id = bar.add_task("")
        yield lambda progress: bar.update(
            task_id,
            total=progress.total,
            completed=progress.done,
            description=_progress_text(progress),
        )


def _progress_text(progress: Progress) -> str:
    remaining_s = progress.remaining_s
    text = f"{progress.done} of {progress.total} runs done, {progress.failed} failed"
    return text if remaining_s is None else f"{text}, about {format_seconds(remaining_s)} left"
