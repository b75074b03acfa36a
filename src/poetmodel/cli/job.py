"""A whole training job on the command line: its options, and the answer on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from poetmodel.cli.options import LimitOptions, group, option
from poetmodel.errors import InputError
from poetmodel.problem import Quantity
from poetmodel.problem.job import Job
from poetmodel.report.presenter import Fact, Unit, percent, row
from poetmodel.units import format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.result import SolveResult
    from poetmodel.solver.sensitivity import UsedLimit


LIMITS_SHARE: Final = 0.25
"""Share of the time limit to find out which limits bind."""

_job = partial(option, rich_help_panel="The whole job")


@group
class JobOptions:
    """A whole job: its samples, its time and its energy."""

    samples: int | None = _job(
        None,
        "--samples COUNT",
        "Samples to train on, over all epochs. A step takes one batch of the graph.",
    )
    within: str | None = _job(
        None,
        "--within TIME",
        "Time for all samples, such as 6h. It sets the deadline of a step.",
    )
    battery: str | None = _job(
        None,
        "--battery ENERGY",
        "Energy for all samples, such as 1.2Wh. It sets the energy budget of a step.",
    )

    def read(self, limits: LimitOptions) -> Job | None:
        """Return the job, if there is one."""
        faults = []
        if self.samples is None and (self.within is not None or self.battery is not None):
            faults.append(
                "samples: --within and --battery limit a whole job: give its --samples COUNT"
            )
        if self.within is not None and limits.deadline is not None:
            faults.append(
                "within: it sets the deadline of a step; leave out --deadline or --within"
            )
        if self.battery is not None and limits.energy_budget is not None:
            faults.append(
                "battery: it sets the energy budget of a step; leave out --energy-budget or "
                "--battery"
            )
        if faults:
            raise InputError(faults)
        if self.samples is None:
            return None
        return Job(samples=self.samples, within=self.within, battery=self.battery)


def answer(job: Job, result: SolveResult, *, threads: int) -> Reply:
    """Find out which limits of a solved step bind."""
    from poetmodel.solver.sensitivity import find_used_limits

    limit_s = LIMITS_SHARE * (result.time_limit_s or 1.0)
    limits = find_used_limits(result, time_limit=limit_s, threads=threads)
    return Reply(job=job, result=result, limits=limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer on a job: its time, its energy, and the limits that bind."""

    job: Job
    result: SolveResult
    """One step of it."""
    limits: tuple[UsedLimit, ...] = ()
    """RAM, and the deadline and the energy budget of a step if stated."""

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

    def facts(self) -> Iterator[Fact]:
        """Yield the figures of the answer; people read of a job whose step has a schedule."""
        size = self.result.problem.graph.batch_size
        batch = "one sample each" if size == 1 else f"batches of {size}"
        note = f"{self.steps:,} steps, {batch}"
        yield Fact("samples", self.job.samples, "samples", "{:,}".format, note)
        yield Fact("steps", self.steps)
        yield Fact("within_s", self.job.within_s)
        yield Fact("battery_j", self.job.battery_j)
        of_time = _share(self.total_s, self.job.within_s, "time", format_seconds)
        yield Fact("total_s", self.total_s, "takes", format_seconds, of_time)
        of_battery = _share(self.total_j, self.job.battery_j, "battery", format_joules)
        yield Fact("total_j", self.total_j, "needs", format_joules, of_battery)
        yield Fact("limits", [limit.to_dict() for limit in self.limits])
        for limit in self.limits:
            yield row(_NAMES[limit.quantity], _WORDS[limit.state], self._gain(limit))

    def _gain(self, limit: UsedLimit) -> str:
        """Return in words how much a job needs less without a limit that binds."""
        if limit.state != "binds" or limit.saved is None:
            return ""
        problem, saved = self.result.problem, limit.saved
        if problem.minimize in (Quantity.ENERGY, Quantity.TIME):
            return f"{problem.objective.format(self.steps * saved)} less without it"
        return f"{problem.objective.format(saved)} less without it, a step"

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


_NAMES: Final = {
    Quantity.RAM: "RAM budget",
    Quantity.TIME: "deadline",
    Quantity.ENERGY: "energy budget",
}
_WORDS: Final = {
    "binds": "binds",
    "slack": "does not bind",
    "open": "not decided in time",
}
"""States of a limit, in words."""


def _share(total: float | None, limit: float | None, what: str, unit: Unit) -> str:
    if total is None or limit is None:
        return "the whole job"
    return f"{percent(total / limit, digits=3)} of the {what} of {unit(limit)}"
