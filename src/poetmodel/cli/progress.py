"""The live line: incumbent, bound and gap of a running solve."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from poetmodel.cli.output import console, is_quiet
from poetmodel.problem import Quantity
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.text import Text

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
        parts = [f"{self._name()} {self._amount(latest.incumbent)}"]
        parts.append(f"bound {self._amount(latest.bound)}")
        if latest.gap is not None:
            parts.append(f"gap {latest.gap:.2%}")
        return "  ".join([*parts, seconds])

    def __rich__(self) -> Text:
        """Return what rich draws."""
        from rich.text import Text

        return Text(self.text(), no_wrap=True, overflow="ellipsis")

    def _name(self) -> str:
        names = {
            Quantity.ENERGY: "energy overhead",
            Quantity.TIME: "time overhead",
            Quantity.RAM: "peak RAM",
            Quantity.WRITES: "bytes paged out",
        }
        return names[Quantity(self._problem.minimize)]

    def _amount(self, value: float | None) -> str:
        if value is None:
            return "none yet"
        minimize = self._problem.minimize
        if minimize == Quantity.ENERGY and self._problem.baseline_energy_j > 0:
            return f"{value / self._problem.baseline_energy_j:.4%}"
        if minimize == Quantity.TIME and self._problem.pass_time_s > 0:
            return f"{value / self._problem.pass_time_s:.4%}"
        if minimize in (Quantity.RAM, Quantity.WRITES):
            return format_bytes(value)
        return f"{value:.4g}"


@contextmanager
def live_line(problem: Problem, *, wanted: bool) -> Iterator[OnProgress | None]:
    """Show the live line on stderr while the body runs, if stderr is a terminal.

    Parameters
    ----------
    problem : Problem
        What is being solved.
    wanted : bool
        Whether to show it at all.

    Yields
    ------
    callable or None
        A callback for the progress of the solve.
    """
    if is_quiet() or not (wanted and sys.stderr.isatty()):
        yield None
        return
    from rich.live import Live

    line = LiveLine(problem)
    with Live(
        line,
        console=console(stderr=True),
        transient=True,
        redirect_stdout=False,
        refresh_per_second=5,
    ):
        yield line.update
