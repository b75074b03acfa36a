"""The README's comparison of solvers, with a limit in processor time.

``python bench/solver_runs.py --out bench/results/figures/solvers.jsonl`` makes the quick runs of
``poetmodel bench solvers`` and those of its largest network; ``python scripts/make_results.py``
makes the tables of them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from harness import ATTEMPTS, FreshProcesses, core_share_of, parsed, run_all, within_core
from poetmodel.bench.figures import figure
from poetmodel.bench.measurement import blank, measure, prepare
from poetmodel.bench.runs import Run
from poetmodel.bench.store import RecordFile
from run_grid import GRACE_S, PRELOADED, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the runs; return the exit status: 130 where that was stopped."""
    options = parsed(argparse.ArgumentParser(description=__doc__), "solvers.jsonl", arguments)
    return run_all(
        list(runs()),
        RecordFile(options.out, lambda record: record["key"]),
        measure_solver,
        FreshProcesses(1, preloaded=PRELOADED, grace_s=ATTEMPTS * GRACE_S),
        kind="cell",
    )


if __name__ == "__main__":
    sys.exit(main())
