"""What a running command shows on stderr: the live line of a solve, the bar of a sweep."""

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
    from poetmodel.solver.request import SolveProgress

    OnProgress = Callable[[SolveProgress], None]


class LiveLine:
    """One line with incumbent, bound, gap and seconds; the seconds advance by themselves."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._start_s = time.monotonic()
        self._latest: SolveProgress | None = None

    def update(self, progress: SolveProgress) -> None:
        """Store the latest progress of the solve."""
        self._latest = progress

    def text(self) -> str:
        """Return the line."""
        seconds = f"{time.monotonic() - self._start_s:.0f} s"
        latest = self._latest
        if latest is None:
            return f"solving, {seconds}"
        incumbent = f"{self._problem.objective.label} {self._amount(latest.incumbent)}"
        gap = "" if latest.gap is None else f"gap {latest.gap:.2%}  "
        return f"{incumbent}  bound {self._amount(latest.bound)}  {gap}{seconds}"

    def __rich__(self) -> Text:
        """Return what rich draws."""
        from rich.text import Text

        return Text(self.text(), no_wrap=True, overflow="ellipsis")

    def _amount(self, value: float | None) -> str:
        if value is None:
            return "none yet"
        objective = self._problem.objective
        if objective.baseline > 0:
            return f"{value / objective.baseline:.4%}"
        return objective.format(value) if objective.in_bytes else f"{value:.4g}"


@contextmanager
def live_line(problem: Problem, *, wanted: bool) -> Iterator[OnProgress | None]:
    """Show the live line while the body runs, if it is wanted and stderr is a terminal."""
    if is_quiet() or not (wanted and sys.stderr.isatty()):
        yield None
        return
    from rich.live import Live

    line = LiveLine(problem)
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
