"""What a running command shows on stderr: a live line, the bar of a sweep."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from poetmodel.cli.output import console, is_quiet
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.text import Text

    from poetmodel.bench import Progress
    from poetmodel.problem import Problem
    from poetmodel.problem.objective import Objective
    from poetmodel.solver.request import SolveProgress

    OnProgress = Callable[[SolveProgress], None]


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
        incumbent = f"{objective.label} {_amount(latest.incumbent, objective)}"
        return f"{incumbent}  bound {_amount(latest.bound, objective)}  {gap}{seconds}"

    def __rich__(self) -> Text:
        """Return what rich draws."""
        from rich.text import Text

        return Text(self.text(), no_wrap=True, overflow="ellipsis")


def _amount(value: float | None, objective: Objective) -> str:
    if value is None:
        return "none yet"
    if objective.baseline > 0:
        return f"{value / objective.baseline:.4%}"
    return objective.format(value) if objective.in_bytes else f"{value:.4g}"


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
        yield lambda progress: print(_words(progress), file=sys.stderr)
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda progress: bar.update(
            task, total=progress.total, completed=progress.done, description=_words(progress)
        )


def _words(progress: Progress) -> str:
    left = progress.remaining_s
    text = f"{progress.done} of {progress.total} runs done, {progress.failed} failed"
    return text if left is None else f"{text}, about {format_seconds(left)} left"
