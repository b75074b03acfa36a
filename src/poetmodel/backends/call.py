"""One call of a solver: what it gets, and what it reports from inside, guarded."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from poetmodel.backends.protocol import BackendProgress, Basis, Limits, OnProgress
from poetmodel.backends.standard_form import StandardForm, round_binaries

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray


_TICK_S: Final = 0.1
"""Shortest time between two reports without a new solution [s]."""
_INFINITE: Final = 1e20
"""Solvers write "none" as this or more."""


def finite(value: float) -> float | None:
    """Return a solver's number, None where it stands for *none*."""
    return float(value) if math.isfinite(value) and abs(value) < _INFINITE else None


class SolverCall:
    """Input of a solver, and its callbacks to the back end: clock, progress, stop, log.

    No exception leaves it: one from the user's callbacks is kept, the solver has to stop, and
    `raise_failure` raises it once the solver is out of the way. Solvers, left alone with one,
    crash, swallow it, or carry on to their limit.
    """

    def __init__(
        self,
        form: StandardForm,
        limits: Limits,
        on_progress: OnProgress | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.form = form
        self.limits = limits
        self.options = dict(limits.options)
        self.start: NDArray[np.float64] | None = None
        """Values to begin from; NaN where none is given."""
        self.basis: Basis | None = None
        """Basis to begin from, where the solver can."""
        self.on_progress = on_progress
        self._stop = stop
        self._failure: BaseException | None = None
        self._refused = False
        self._incumbent: float | None = None
        self._bound: float | None = None
        self._began = time.perf_counter()
        self._reported = self._began
        self._nodes: int | None = None
        self.root_bound: float | None = None
        """Bound before the first branching, as far as the solver has told."""
        self.build_s = 0.0
        """Time until the solver was ready to start [s]."""

    @property
    def elapsed_s(self) -> float:
        """Time since the call began [s]."""
        return time.perf_counter() - self._began

    @property
    def remaining_s(self) -> float | None:
        """Rest of the time limit [s], 0 or more; None without a limit."""
        limit_s = self.limits.time_s
        return None if limit_s is None else max(0.0, limit_s - self.elapsed_s)

    def built(self) -> float | None:
        """Note that the solver is ready to start; return what is left of the time [s]."""
        self.build_s = self.elapsed_s
        return self.remaining_s

    @property
    def stopping(self) -> bool:
        """Whether the solver has to stop."""
        return self._refused or (self._stop is not None and self._stop.is_set())

    def solution(
        self, objective: float, x: Callable[[], NDArray[np.float64]], bound: float | None = None
    ) -> bool:
        """Report a solution; return whether the solver has to stop.

        `x`, which returns its values, is called only if it is the best so far and somebody looks.
        """
        self._raise_bound(bound)
        known = self._incumbent
        if known is None or self.form.sense * (known - objective) > 0:
            self._incumbent = objective
            if self.on_progress is not None:
                self._guard(lambda: self._report(round_binaries(x(), self.form)))
        return self.stopping

    def tick(self, bound: float | None = None, nodes: float | None = None) -> bool:
        """Report that the solver is alive; return whether it has to stop.

        With at most one of its `nodes` done the bound is that of the root.
        """
        self._raise_bound(bound)
        self._nodes = self._nodes if nodes is None else int(nodes)
        if nodes is not None and nodes <= 1 and bound is not None:
            self.root_bound = bound
        if self.on_progress is not None and time.perf_counter() - self._reported > _TICK_S:
            self._guard(lambda: self._report(None))
        return self.stopping

    def write(self, text: str) -> None:
        """Pass on a piece of the solver's log."""
        listener = self.limits.log
        if listener is not None and text:
            self._guard(lambda: listener(text))

    def forget(self) -> None:
        """Begin again: a run went wrong, and so did perhaps what it reported."""
        self._incumbent = None
        self._bound = self.root_bound = self._nodes = None
        self._refused = self._failure is not None

    def raise_failure(self) -> None:
        """Raise what a callback raised during the solve, if one did."""
        if self._failure is not None:
            raise self._failure

    def _report(self, x: NDArray[np.float64] | None) -> None:
        if self._refused:
            return
        self._reported = time.perf_counter()
        progress = BackendProgress(
            incumbent=self._incumbent, bound=self._bound, x=x, nodes=self._nodes
        )
        if self.on_progress is not None and self.on_progress(progress) is False:
            self._refused = True

    def _raise_bound(self, bound: float | None) -> None:
        """Keep the best bound seen, never one beyond the cutoff, which solvers take for proven."""
        sense = self.form.sense
        if bound is None:
            return
        cutoff = self.limits.objective_cutoff
        if cutoff is not None:
            bound = sense * min(sense * bound, sense * cutoff)
        if self._bound is None or sense * (bound - self._bound) > 0:
            self._bound = bound

    def _guard(self, call: Callable[[], None]) -> None:
        """Make a call to the user's code; none after one that failed."""
        if self._failure is not None:
            return
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - whatever it is, raised again after the solve
            self._failure = error
            self._refused = True
