"""Runs of three solvers on two formulations, limited in CPU time, for the README's comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from harness import ATTEMPTS, GRACE_S, Study, measure_core_fraction, measure_with_cpu_limit, warm_up
from poetmodel.sweeps.measurement import fields_before_result, load_inputs, measure_run
from poetmodel.sweeps.runs import Run, Settings, grid

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.sweeps.measurement import Record

LIMITS_S: Final = (30.0,)
"""CPU time limits of a run [s]."""
LARGEST: Final = ("resnet18-cifar", "rpi4b", "70%")
"""The problem that quick benchmarks omit."""
_PROBLEMS: Final = (
    ("mlp", "mkr1000", "70%"),
    # both formulations fit Gurobi's bundled licence
    ("paper/transformer", "paper-m4", "90%"),
    ("paper/transformer", "paper-a72", "90%"),
    ("paper/linear", "paper-m4", "50%"),
    ("paper/vgg16-cifar", "paper-m4", "70%"),
    ("paper/vgg16-cifar", "paper-a72", "70%"),
)
"""Model, device and budget of each problem."""


def make_solver_runs(
    limit_s: float, problems: Iterable[tuple[str, str, str]] = _PROBLEMS
) -> Iterator[Run]:
    """Yield the runs of each solver and formulation on each problem.

    The formulation ``paper`` is solved only on the published graphs.
    """
    for model, device, ram in problems:
        is_published = model.startswith("paper/")
        yield from grid(
            (model,),
            (device,),
            ram=(ram,),
            backends=("highs", "scip", "gurobi"),
            formulations=("compact", "paper") if is_published else ("compact",),
            settings=Settings(deadline_counts="compute", time_limit_s=limit_s),
        )


@dataclass(frozen=True, slots=True)
class SolverRun:
    """A solver run with the interface of a study's runs."""

    run: Run

    @property
    def name(self) -> str:
        """Name of the run in records."""
        return f"{self.run.name} | {self.run.settings.time_limit_s:g} s"

    @property
    def key(self) -> str:
        """Key of the run in records."""
        return self.run.key

    def to_dict(self) -> dict[str, Any]:
        """Return the run's fields, including its limit."""
        return {"run": self.run.to_dict(), "limit_s": self.run.settings.time_limit_s}

    def with_limit(self, limit_s: float) -> SolverRun:
        """Return the run with another limit [s]."""
        settings = replace(self.run.settings, time_limit_s=limit_s)
        return replace(self, run=replace(self.run, settings=settings))


def runs() -> Iterator[SolverRun]:
    """Yield the runs of the README's table with each limit of `LIMITS_S`."""
    for limit_s in LIMITS_S:
        for run in make_solver_runs(limit_s, (*_PROBLEMS, LARGEST)):
            yield SolverRun(run)


def measure_solver(fields: dict[str, Any], _start: None = None) -> Record:
    """Solve a run within its CPU time limit; return its record. Reading inputs is not timed."""
    run = Run.from_dict(fields["run"])
    load_inputs(run)
    core_fraction = measure_core_fraction(warm_up)

    def measure_within(wall_s: float) -> Record:
        settings = {**fields["run"]["settings"], "time_limit_s": wall_s}
        return measure_run({**fields["run"], "settings": settings})

    return (
        measure_with_cpu_limit(fields["limit_s"], measure_within, core_fraction=core_fraction)
        | {"schedule": None}
        | fields_before_result(run)
    )


STUDY: Final = Study(
    name="solvers",
    kind="cell",
    runs=runs,
    smoke_runs=lambda: [next(iter(runs())).with_limit(2.0)],
    measure=measure_solver,
    grace_s=ATTEMPTS * GRACE_S,
    key_of=lambda record: record["key"],
)
