"""The README's comparison of solvers, with a limit in processor time.

The runs are the quick ones of ``poetmodel bench solvers`` and those of its largest network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from harness import ATTEMPTS, GRACE_S, Study, core_share_of, warm_up, within_core
from poetmodel.bench.figures import figure
from poetmodel.bench.measurement import blank, measure, prepare
from poetmodel.bench.runs import Run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.bench.measurement import Record

LIMITS_S: Final = (30.0,)
"""Processor time of a run [s]."""
LARGEST: Final = "resnet18-cifar"
"""The network that quick runs leave out, at one budget."""


@dataclass(frozen=True, slots=True)
class SolverRun:
    """A run of the figure, as the queue of runs takes it."""

    run: Run

    @property
    def name(self) -> str:
        """What it is called in the records."""
        return f"{self.run.name} | {self.run.settings.time_limit_s:g} s"

    @property
    def key(self) -> str:
        """What identifies it in the records."""
        return self.run.key

    def to_dict(self) -> dict[str, Any]:
        """Return its fields, its limit among them."""
        return {"run": self.run.to_dict(), "limit_s": self.run.settings.time_limit_s}

    def limited(self, limit_s: float) -> SolverRun:
        """Return the run with another limit [s]."""
        settings = replace(self.run.settings, time_limit_s=limit_s)
        return replace(self, run=replace(self.run, settings=settings))


def runs() -> Iterator[SolverRun]:
    """Yield the runs of the README's table, and the same with the shorter limit."""
    solvers = figure("solvers")
    for limit_s in LIMITS_S:
        largest = (
            run
            for run in solvers.runs(time_limit_s=limit_s)
            if (run.model, run.ram, run.settings.seed) == (LARGEST, "70%", 0)
        )
        for run in (*solvers.runs(quick=True, time_limit_s=limit_s), *largest):
            yield SolverRun(run)


def measure_solver(fields: dict[str, Any], _start: None = None) -> Record:
    """Solve a run within its processor time, and return its record."""
    run = Run.from_dict(fields["run"])
    prepare(run)
    share = core_share_of(warm_up)

    def within(wall_s: float) -> Record:
        settings = {**fields["run"]["settings"], "time_limit_s": wall_s}
        return measure({**fields["run"], "settings": settings})

    return within_core(fields["limit_s"], within, share=share) | {"schedule": None} | blank(run)


STUDY: Final = Study(
    name="solvers",
    kind="cell",
    runs=runs,
    smoke_runs=lambda: [next(iter(runs())).limited(2.0)],
    measure=measure_solver,
    grace_s=ATTEMPTS * GRACE_S,
    key_of=lambda record: record["key"],
)
