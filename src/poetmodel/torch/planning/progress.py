"""The progress of planning on a terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from poetmodel.solver.request import SolveProgress


@contextmanager
def show_phases(*, after_s: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Context manager that yields a function to show a text after "compiling: " on stderr.

    It shows nothing before `after_s`, after the block, or if stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task("compiling")
    timer = Timer(after_s, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda phase: progress.update(task, description=f"compiling: {phase}")
    finally:
        timer.cancel()
        timer.join()
        progress.stop()


def solve_progress_callback(
    show_phase: Callable[[str], None], time_limit_s: float
) -> Callable[[SolveProgress], None]:
    """Show the time limit, and return a progress callback for `solve` that adds the gap."""
    limit_text = f"at most {time_limit_s:g} s"
    show_phase(f"solving, {limit_text}")

    def show_gap(progress: SolveProgress) -> None:
        gap_text = "" if progress.gap is None else f", gap {progress.gap:.2%}"
        show_phase(f"solving{gap_text}, {limit_text}")

    return show_gap
