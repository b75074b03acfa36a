"""What compiling shows on a terminal while it runs: the stage that it is in, and seconds."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from poetmodel.solver.request import SolveProgress


@contextmanager
def stages_shown() -> Iterator[Callable[[str], None]]:
    """Give what names the stage; on stderr, and only if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("compiling")
        yield lambda stage: shown.update(task, description=f"compiling: {stage}")


def of_solve(tell: Callable[[str], None]) -> Callable[[SolveProgress], None]:
    """Return a callback of a solve that names its gap."""

    def solved_so_far(progress: SolveProgress) -> None:
        tell("solving" if progress.gap is None else f"solving, gap {progress.gap:.2%}")

    return solved_so_far
