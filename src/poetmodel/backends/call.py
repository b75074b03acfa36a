"""Input of one solver call, and the callbacks through which the solver reports progress."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from poetmodel.backends.protocol import BackendProgress, Basis, Limits, OnProgress
from poetmodel.backends.standard_form import StandardForm, round_integers

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray


_MIN_REPORT_INTERVAL_S: Final = 0.1
"""Minimum time between a progress report without a new solution and the report before it, or the
start of the call [s]."""
_INFINITE: Final = 1e20
"""Magnitude from which on a bound of a solver means "no bound"."""


def finite_or_none(value: float) -> float | None:
    """Return a number reported by a solver; None for NaN and for magnitudes of 1e20 or more."""
    return float(value) if math.isfinite(value) and abs(value) < _INFINITE else None


class SolverCall:
    """Model, limits and start of one solve; receives progress and log of the solver.

    Exceptions of the user's callbacks are stored until `raise_failure`: solvers crash or ignore an
    exception inside their callbacks.
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
        """Copy of `Limits.options`, which the back end may change before another solve."""
        self.start: NDArray[np.float64] | None = None
        """Start value of each column; NaN for columns without one. None without a start."""
        self.basis: Basis | None = None
        """Basis for a warm start, used by solvers that support it."""
        self.on_progress = on_progress
        self._stop = stop
        self._failure: BaseException | None = None
        self._stop_requested = False
        self._incumbent: float | None = None
        self._bound: float | None = None
        self._start_s = time.perf_counter()
        self._last_report_s = self._start_s
        self._n_nodes: int | None = None
        self.root_bound: float | None = None
        """Bound before the first branching; None until the solver reports one."""
        self.build_s = 0.0
        """Time from the start of the call until the solver's model was last built [s]; 0 before."""

    @property
    def elapsed_s(self) -> float:
        """Wall time since the start of the call [s]."""
        return time.perf_counter() - self._start_s

    @property
    def remaining_s(self) -> float | None:
        """Remaining wall time until the limit [s], 0 or more; None without a limit."""
        limit_s = self.limits.time_s
        return None if limit_s is None else max(0.0, limit_s - self.elapsed_s)

    def finish_build(self) -> float | None:
        """Store the build time; return the remaining time [s], or None without a time limit."""
        self.build_s = self.elapsed_s
        return self.remaining_s

    @property
    def should_stop(self) -> bool:
        """Whether `on_progress`, an exception or the stop event requested that the solver stops."""
        return self._stop_requested or (self._stop is not None and self._stop.is_set())

    def report_solution(
        self,
        objective: float,
        read_values: Callable[[], NDArray[np.float64]],
        bound: float | None = None,
    ) -> bool:
        """Record the best bound; record and report a better solution; return `should_stop`.

        `read_values` returns the value of each column; it is called for a better solution only.
        """
        self._record_bound(bound)
        incumbent = self._incumbent
        if incumbent is None or self.form.sense * (incumbent - objective) > 0:
            self._incumbent = objective
            if self.on_progress is not None:
                self._call_guarded(lambda: self._report(round_integers(read_values(), self.form)))
        return self.should_stop

    def report_progress(self, bound: float | None = None, nodes: float | None = None) -> bool:
        """Record bound and node count, call `on_progress` (every 0.1 s), and return `should_stop`.

        With at most one node the bound is also `root_bound`.
        """
        self._record_bound(bound)
        self._n_nodes = self._n_nodes if nodes is None else int(nodes)
        if nodes is not None and nodes <= 1 and bound is not None:
            self.root_bound = bound
        if (
            self.on_progress is not None
            and time.perf_counter() - self._last_report_s > _MIN_REPORT_INTERVAL_S
        ):
            self._call_guarded(lambda: self._report(None))
        return self.should_stop

    def write_log(self, text: str) -> None:
        """Pass new text of the log to `Limits.log`, if that is set and no callback has failed."""
        log = self.limits.log
        if log is not None and text:
            self._call_guarded(lambda: log(text))

    def discard_progress(self) -> None:
        """Discard incumbent, bounds and nodes, which may be wrong, before a second solve.

        Reports the restart to `on_progress`, after the withdrawal of a stop that it requested.
        """
        self._incumbent = None
        self._bound = self.root_bound = self._n_nodes = None
        self._stop_requested = self._failure is not None
        if self.on_progress is not None:
            self._call_guarded(lambda: self._report(None, is_restart=True))

    def raise_failure(self) -> None:
        """Raise the first exception that a callback raised during the solve, if any."""
        if self._failure is not None:
            raise self._failure

    def _report(self, x: NDArray[np.float64] | None, *, is_restart: bool = False) -> None:
        """Call `on_progress`, with `x` if there is a new incumbent; False requests a stop."""
        if self._stop_requested:
            return
        self._last_report_s = time.perf_counter()
        progress = BackendProgress(
            incumbent=self._incumbent,
            bound=self._bound,
            x=x,
            nodes=self._n_nodes,
            is_restart=is_restart,
        )
        if self.on_progress is not None and self.on_progress(progress) is False:
            self._stop_requested = True

    def _record_bound(self, bound: float | None) -> None:
        """Store a bound, clipped at the cutoff (beyond it nothing is proven), if it is tighter."""
        sense = self.form.sense
        if bound is None:
            return
        cutoff = self.limits.objective_cutoff
        if cutoff is not None:
            bound = sense * min(sense * bound, sense * cutoff)
        if self._bound is None or sense * (bound - self._bound) > 0:
            self._bound = bound

    def _call_guarded(self, callback: Callable[[], None]) -> None:
        """Call a callback unless one has failed; store any exception, and request a stop for it."""
        if self._failure is not None:
            return
        try:
            callback()
        except BaseException as error:  # noqa: BLE001 - raised again after the solve
            self._failure = error
            self._stop_requested = True
