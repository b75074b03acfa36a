"""Output: tables for people or one JSON value on stdout, a live line or a bar on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from poetmodel.report.presenter import Fact, escaped, rows
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


UNLIMITED: Final = 1_000_000
"""Columns of a pipe or file, which have no edge to wrap or cut at."""
MOST_SENTENCE: Final = 2000
"""Most characters of a line that names come into; the middle of a longer one is left out."""
MOST_CELL: Final = 400
"""The same for a cell of a table."""
MOST_NAME: Final = 240
"""The same for a word, such as a name or a path."""
MOST_NAME_IN_CELL: Final = 100
"""The same for a word in a cell."""


class _Voice:
    """Whether a command prints for people at all."""

    quiet = False


def set_quiet(quiet: bool) -> bool:
    """Set ``--quiet``: print only errors, and JSON if requested."""
    _Voice.quiet = quiet
    return quiet


def is_quiet() -> bool:
    """Whether only errors and JSON are printed."""
    return _Voice.quiet


def print_note(text: str) -> None:
    """Print a line on stderr, unless quiet."""
    if not _Voice.quiet:
        print(escaped(text), file=sys.stderr)


def print_written(path: Path) -> None:
    """Say on stderr that a file was written."""
    print_note(f"wrote {path}")


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that prints names as they are: no markup, no highlighting.

    Its default width is that of the terminal or of the environment variable ``COLUMNS``; a pipe or
    file has no edge.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if width is None and not stream.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        width = UNLIMITED
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width)


def print_json(document: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Print an object, one key a line, or a list, one object a line, as JSON on stdout.

    It is ASCII, so that no setting of a terminal or pipe can break it.
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
    """Print lines on stdout as they are, not wrapped, unless quiet."""
    if _Voice.quiet:
        return
    for line in lines:
        sys.stdout.write(printable(line) + "\n")


def show(*renderables: RenderableType) -> None:
    """Print tables and texts on stdout, unless quiet.

    Cells are wrapped between words to the width of the terminal. A table whose longest words need
    more is printed wider than the terminal: no word is ever broken, so that it can be copied.
    """
    from rich.table import Table

    if _Voice.quiet:
        return
    target = console()
    for renderable in renderables:
        if isinstance(renderable, Table):
            needed = _lay_out(renderable, target.width)
            wide = console(width=max(needed, target.width))
            with wide.capture() as captured:
                wide.print(renderable, crop=False)
            # A pipe gets no blanks at the ends of lines; on a terminal they may be coloured.
            text = captured.get()
            sys.stdout.write("".join(f"{line.rstrip()}\n" for line in text.splitlines()))
        else:
            target.print(renderable)


def _lay_out(table: Table, width: int) -> int:
    """Set the widths of a table's columns so that no word breaks; return the width of the table.

    Where even the longest words do not fit, names and paths may go on in the next line after one of
    ``._/``, but for those of a column that must stay on one line.
    """
    columns = table.columns
    texts = [[str(column.header), *map(str, column.cells)] for column in columns]
    most = [_longest(cells) for cells in texts]
    gaps = max(0, len(columns) - 1)
    # Between columns: padding on both sides and the divider of the box, which also has edges.
    beside = 3 * gaps + 2 if table.box is not None else 2 * gaps
    widths: list[int] = []
    for separator in (r"\s+", rf"\s+|{_WITHIN_NAMES}"):
        least = [
            whole if column.no_wrap else _longest(re.split(separator, " ".join(cells)))
            for column, cells, whole in zip(columns, texts, most, strict=True)
        ]
        shared = _shared(least, most, width - beside)
        if not widths or sum(shared) + beside <= width:
            widths = shared
        if sum(widths) + beside <= width:
            break
    for column, size in zip(columns, widths, strict=True):
        column.width = size
        column._cells = [_broken(str(cell), size) for cell in column.cells]  # noqa: SLF001
    return sum(widths) + beside


_WITHIN_NAMES: Final = r"(?<=[._/])(?=[^\W\d])"
"""Where a name may go on in the next line: after one of ``._/`` and before a letter."""


def _longest(texts: Iterable[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, texts), default=0)


def _broken(text: str, width: int) -> str:
    """Return a text whose words longer than a line go on in the next one after a separator."""
    if _longest(text.split()) <= width:
        return text
    lines = [""]
    for part in re.split(rf"{_WITHIN_NAMES}|(?<=\s)", text):
        if lines[-1] and _longest([lines[-1] + part.rstrip()]) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _shared(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Return widths between two bounds each that keep to the room together, as far as they can.

    All columns that are wider than a common width are cut down to it.
    """
    widths = list(most)
    for common in reversed(range(max(most, default=0))):
        if sum(widths) <= room:
            break
        widths = [max(a, min(b, common)) for a, b in zip(least, most, strict=True)]
    return widths


def figures(title: str, facts: Iterable[Fact]) -> Table:
    """Make a table of the facts that people read: what, how much, and a note; alarms are red."""
    shown = [((fact.name or "", fact.text, fact.note), fact.alarm) for fact in rows(facts)]
    texts = [text for cells, _ in shown for text in cells]
    table = _titled(title, texts, box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for cells, alarm in shown:
        table.add_row(*map(_cell, cells), style="bold red" if alarm else None)
    return table


def listing(
    title: str,
    heads: Sequence[str],
    lines: Iterable[Sequence[str]],
    *,
    left: int = 1,
    whole_names: bool = True,
) -> Table:
    """Make a table with heads.

    The first `left` columns hold words; the others hold numbers. With `whole_names` the first one
    stays on one line, so that it can be copied.
    """
    from rich import box

    lines = list(lines)
    texts = [*heads, *(text for line in lines for text in line)]
    table = _titled(title, texts, box=box.SIMPLE_HEAD)
    for column, head in enumerate(heads):
        table.add_column(
            head,
            justify="left" if column < left else "right",
            overflow="fold",
            no_wrap=whole_names and column == 0,
        )
    for line in lines:
        table.add_row(*map(_cell, line))
    return table


_ENERGY: Final = re.compile(r"\d [kmµnp]?J\b|\boverhead\b")
"""What a table shows that has energies."""


def _titled(title: str, texts: Iterable[str], **style: Any) -> Table:
    from rich.table import Table

    if any(map(_ENERGY.search, texts)):
        title = f"{title} ({ESTIMATES})"
    style |= {"title_style": "bold", "title_justify": "left", "pad_edge": False}
    return Table(title=printable(title), **style)


def _cell(text: str) -> str:
    return printable(text.rstrip(), most=MOST_CELL, most_of_a_word=MOST_NAME_IN_CELL)


def printable(text: str, *, most: int = MOST_SENTENCE, most_of_a_word: int = MOST_NAME) -> str:
    """Return a text for people: control characters spelled out, endless names and lists cut.

    Of a text, and of each word, that is longer than so many characters the middle is left out.
    """
    short = escaped(_without_middle(text, 4 * most))
    words = re.sub(r"\S+", lambda match: _without_middle(match[0], most_of_a_word), short)
    return _without_middle(words, most)


def _without_middle(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 3]}...{text[-tail:]}"


# -- while a command runs ----------------------------------------------------------------------


class LiveLine:
    """One line with what is done and, of a solve, incumbent, bound and gap; seconds advance."""

    def __init__(self, problem: Problem | None = None, doing: str = "solving") -> None:
        self._problem = problem
        self._doing = doing
        self._start_s = time.monotonic()
        self._latest: SolveProgress | None = None

    def update(self, progress: SolveProgress) -> None:
        """Store the latest progress of the solve."""
        self._latest = progress

    def text(self) -> str:
        """Return the line."""
        seconds = f"{time.monotonic() - self._start_s:.0f} s"
        latest = self._latest
        gap = "" if latest is None or latest.gap is None else f"gap {latest.gap:.2%}  "
        if latest is None or self._problem is None:
            return f"{self._doing}, {gap}{seconds}"
        objective = self._problem.objective
        incumbent = f"{objective.label} {_amount(latest.overhead, objective)}"
        return f"{incumbent}  bound {_amount(latest.overhead_bound, objective)}  {gap}{seconds}"

    def __rich__(self) -> Text:
        """Return the text that rich draws."""
        from rich.text import Text

        return Text(self.text(), no_wrap=True, overflow="ellipsis")


def _amount(value: float | None, objective: Objective) -> str:
    if value is None:
        return "none yet"
    if objective.baseline > 0:
        return f"{value / objective.baseline:.4%}"
    return objective.format(value) if objective.is_in_bytes else f"{value:.4g}"


@contextmanager
def live_line(
    problem: Problem | None = None, *, wanted: bool, doing: str = "solving"
) -> Iterator[OnProgress | None]:
    """Show the live line while the body runs, if it is wanted and stderr is a terminal.

    Without a problem it says what is done, and of a solve the gap alone.
    """
    if is_quiet() or not (wanted and sys.stderr.isatty()):
        yield None
        return
    from rich.live import Live

    line = LiveLine(problem, doing)
    target = console(stderr=True)
    with Live(line, console=target, transient=True, redirect_stdout=False, refresh_per_second=5):
        yield line.update


@contextmanager
def progress_bar(*, wanted: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Show the progress of a sweep on stderr: a bar in a terminal, else a line for each run."""
    if not wanted or is_quiet():
        yield None
        return
    if not sys.stderr.isatty():
        yield lambda progress: print(_done(progress), file=sys.stderr)
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda progress: bar.update(
            task, total=progress.total, completed=progress.done, description=_done(progress)
        )


def _done(progress: Progress) -> str:
    left = progress.remaining_s
    text = f"{progress.done} of {progress.total} runs done, {progress.failed} failed"
    return text if left is None else f"{text}, about {format_seconds(left)} left"
