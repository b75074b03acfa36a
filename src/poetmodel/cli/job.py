"""A whole training job on the command line: its options, its limits, and the answer on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from poetmodel.cli.output import figures, percent
from poetmodel.errors import InputError
from poetmodel.job import Job
from poetmodel.units import format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from poetmodel.graph import Graph
    from poetmodel.result import SolveResult
    from poetmodel.solver.sensitivity.limits import UsedLimit

PANEL: Final = "The whole job"

SamplesOption = Annotated[
    int | None,
    typer.Option(
        "--samples",
        metavar="COUNT",
        help="Samples to train on, over all epochs. A step takes one batch of the graph.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
WithinOption = Annotated[
    str | None,
    typer.Option(
        "--within",
        metavar="TIME",
        help="Time for all samples, such as 6h. It sets the deadline of a step.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
BatteryOption = Annotated[
    str | None,
    typer.Option(
        "--battery",
        metavar="ENERGY",
        help="Energy for all samples, such as 1.2Wh. It sets the energy budget of a step.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]

QUESTION_SHARE: Final = 0.25
"""Largest part of the time limit to find out, for each limit, whether the step is at it."""


def read_job(
    samples: int | None,
    within: str | None,
    battery: str | None,
    *,
    deadline: str | None,
    energy_budget: str | None,
) -> Job | None:
    """Return the job that the options state, if any.

    Raises
    ------
    InputError
        If samples are missing, or two options state the same limit.
    """
    faults = []
    if samples is None and (within is not None or battery is not None):
        faults.append("samples: --within and --battery limit a whole job: give its --samples COUNT")
    if within is not None and deadline is not None:
        faults.append("within: it sets the deadline of a step; leave out --deadline or --within")
    if battery is not None and energy_budget is not None:
        faults.append(
            "battery: it sets the energy budget of a step; leave out --energy-budget or --battery"
        )
    if faults:
        raise InputError(faults)
    return None if samples is None else Job(samples=samples, within=within, battery=battery)


def limits_of_a_step(
    job: Job | None, graph: Graph, *, deadline: str | None, energy_budget: str | None
) -> tuple[str | float | None, str | float | None]:
    """Return the deadline and the energy budget of a step, from the job or from the options."""
    if job is None:
        return deadline, energy_budget
    deadline_s, budget_j = job.deadline_s(graph), job.energy_budget_j(graph)
    return (
        deadline if deadline_s is None else deadline_s,
        energy_budget if budget_j is None else budget_j,
    )


def answer(job: Job, result: SolveResult) -> Reply:
    """Find out which limits a solved step is at."""
    from poetmodel.solver.sensitivity.limits import used_limits

    limit_s = QUESTION_SHARE * (result.time_limit_s or 1.0)
    return Reply(job=job, result=result, limits=used_limits(result, time_limit=limit_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer on a job: its time, its energy, and the limits that its steps are at."""

    job: Job
    """The job."""
    result: SolveResult
    """One step of it."""
    limits: tuple[UsedLimit, ...]
    """For each limit, whether the step is at it."""

    @property
    def steps(self) -> int:
        """Steps of the whole job."""
        return self.job.steps(self.result.problem.graph)

    @property
    def total_s(self) -> float | None:
        """Time of the whole job, as the deadline counts it [s]."""
        simulation = self.result.simulation
        return None if simulation is None else self.steps * (simulation.time_s or 0.0)

    @property
    def total_j(self) -> float | None:
        """Energy of the whole job [J]."""
        simulation = self.result.simulation
        return None if simulation is None else self.steps * (simulation.energy_j or 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as plain values in SI units."""
        return {
            "samples": self.job.samples,
            "steps": self.steps,
            "within_s": self.job.within_s,
            "battery_j": self.job.battery_j,
            "total_s": self.total_s,
            "total_j": self.total_j,
            "limits": [
                {
                    "limit": str(limit.quantity),
                    "binding": str(limit.state),
                    "used": limit.used,
                    "allowed": limit.allowed,
                    "minimized_without": limit.without,
                }
                for limit in self.limits
            ],
        }

    def table(self) -> Table:
        """Make the table of a job whose step has a schedule."""
        size = self.result.problem.graph.batch_size
        batch = "one sample each" if size == 1 else f"batches of {size}"
        job = self.job
        rows = [
            ("samples", f"{job.samples:,}", f"{self.steps:,} steps, {batch}"),
            (
                "takes",
                format_seconds(self.total_s or 0.0),
                _share(self.total_s, job.within_s, "time", format_seconds),
            ),
            (
                "needs",
                format_joules(self.total_j or 0.0),
                _share(self.total_j, job.battery_j, "battery", format_joules),
            ),
            *(self._row(limit) for limit in self.limits),
        ]
        return figures("The whole job", rows)

    def _row(self, limit: UsedLimit) -> tuple[str, str, str]:
        problem = self.result.problem
        form = problem.quantity(limit.quantity).format
        used = "" if limit.used is None else f"{form(limit.used)} of "
        remark = f"{used}{form(limit.allowed)} a step"
        if limit.state == "binds" and limit.without is not None:
            without = problem.objective.format(limit.without)
            remark += f"; without this limit: {problem.minimize} {without}"
        return _NAMES[limit.quantity], _WORDS[limit.state], remark

    def sentences(self) -> Iterator[str]:
        """Yield why a step has no schedule, in sentences."""
        graph = self.result.problem.graph
        amounts = []
        if self.job.within_s is not None:
            amounts.append(format_seconds(self.job.deadline_s(graph) or 0.0))
        if self.job.battery_j is not None:
            amounts.append(format_joules(self.job.energy_budget_j(graph) or 0.0))
        if amounts:
            yield f"each of the {self.steps:,} steps may take {' and '.join(amounts)}"
        for limit in self.limits:
            if limit.state == "binds":
                yield f"without the {_NAMES[limit.quantity]} there is a schedule"
            elif limit.state == "impossible":
                name = _NAMES[limit.quantity]
                yield f"no schedule keeps the {name}, even without the other limits"


def _share(
    total: float | None, limit: float | None, what: str, form: Callable[[float], str]
) -> str:
    if total is None or limit is None:
        return "the whole job"
    return f"{percent(total / limit, digits=3)} of the {what} of {form(limit)}"


_NAMES: Final = {"ram": "RAM budget", "time": "deadline", "energy": "energy budget"}
_WORDS: Final = {
    "binds": "at its limit",
    "slack": "not at its limit",
    "impossible": "too small",
    "open": "not known in time",
}
