"""Options of a whole training job, and its result as facts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from poetmodel.cli.options import group, option
from poetmodel.errors import InputError
from poetmodel.problem import Quantity
from poetmodel.problem.job import Job
from poetmodel.report.presenter import Fact, ValueFormatter, format_percent, text_fact
from poetmodel.units import format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.problem import Limits
    from poetmodel.result import SolveResult
    from poetmodel.solver.sensitivity import UsedLimit


_job_option = partial(option, rich_help_panel="The whole job")


@group
class JobOptions:
    """Options of a whole job: its samples, time and energy."""

    samples: int | None = _job_option(
        None,
        "--samples COUNT",
        "Samples to train on, over all epochs. A step takes one batch of the graph.",
    )
    within: str | None = _job_option(
        None,
        "--within TIME",
        "Time for all samples, such as 6h. It sets the deadline of a step.",
    )
    battery: str | None = _job_option(
        None,
        "--battery ENERGY",
        "Energy for all samples, such as 1.2Wh. It sets the energy budget of a step.",
    )

    def to_job(self, limits: Limits) -> Job | None:
        """Return the job; None without ``--samples``; `InputError` for a limit stated twice."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Result of a job: its time, its energy, and whether the limits of a step bind."""

    job: Job
    result: SolveResult
    """Result of one step."""
    limits: tuple[UsedLimit, ...] = ()
    """The RAM budget and, if stated, deadline and energy budget of a step, each with its state.
    Empty without a schedule."""

    @property
    def steps(self) -> int:
        """Number of steps of the job."""
        return self.job.steps(self.result.problem.graph)

    @property
    def total_s(self) -> float | None:
        """Time of the job, as the deadline counts it [s]; None without a schedule."""
        simulation = self.result.simulation
        return None if simulation is None else self.steps * (simulation.time_s or 0.0)

    @property
    def total_j(self) -> float | None:
        """Energy of the job [J]; None without a schedule."""
        simulation = self.result.simulation
        return None if simulation is None else self.steps * (simulation.energy_j or 0.0)

    def facts(self) -> Iterator[Fact]:
        """Yield samples, steps, limits, time and energy of the job, then `limits` of a step."""
        batch_size = self.result.problem.graph.batch_size
        batch = "one sample each" if batch_size == 1 else f"batches of {batch_size}"
        count_text = f"{self.steps:,} steps, {batch}"
        yield Fact("samples", self.job.samples, "samples", "{:,}".format, count_text)
        yield Fact("steps", self.steps)
        yield Fact("within_s", self.job.within_s)
        yield Fact("battery_j", self.job.battery_j)
        time_text = _format_fraction(self.total_s, self.job.within_s, "time", format_seconds)
        yield Fact("total_s", self.total_s, "takes", format_seconds, time_text)
        battery_text = _format_fraction(self.total_j, self.job.battery_j, "battery", format_joules)
        yield Fact("total_j", self.total_j, "needs", format_joules, battery_text)
        yield Fact("limits", [limit.to_dict() for limit in self.limits])
        for limit in self.limits:
            yield text_fact(
                _LIMIT_NAMES[limit.quantity], _STATE_TEXTS[limit.state], self._saving_text(limit)
            )

    def _saving_text(self, limit: UsedLimit) -> str:
        """Return the saving of the minimized quantity without a limit; "" unless the limit binds.

        An energy or a time is that of the whole job, another quantity that of a step.
        """
        if limit.state != "binds" or limit.saved is None:
            return ""
        problem, saved = self.result.problem, limit.saved
        if problem.minimize in (Quantity.ENERGY, Quantity.TIME):
            return f"{problem.objective.format(self.steps * saved)} less without it"
        return f"{problem.objective.format(saved)} less without it, a step"

    def infeasibility_notes(self) -> Iterator[str]:
        """Yield a note with a step's limits on time and energy, if the job sets at least one."""
        graph = self.result.problem.graph
        limit_texts = []
        if self.job.within_s is not None:
            limit_texts.append(format_seconds(self.job.deadline_s(graph) or 0.0))
        if self.job.battery_j is not None:
            limit_texts.append(format_joules(self.job.energy_budget_j(graph) or 0.0))
        if limit_texts:
            yield f"each of the {self.steps:,} steps may take {' and '.join(limit_texts)}"


_LIMIT_NAMES: Final = {
    Quantity.RAM: "RAM budget",
    Quantity.TIME: "deadline",
    Quantity.ENERGY: "energy budget",
}
"""Names of limits of a step, by the limited quantity."""
_STATE_TEXTS: Final = {
    "binds": "binds",
    "slack": "does not bind",
    "open": "not decided in time",
}
"""Texts of the states of a limit."""


def _format_fraction(
    total_value: float | None,
    limit_value: float | None,
    quantity: str,
    format_value: ValueFormatter,
) -> str:
    """Format a total as a percentage of its limit, such as ``80 % of the battery of 4,320 J``."""
    if total_value is None or limit_value is None:
        return "the whole job"
    fraction_text = format_percent(total_value / limit_value, digits=3)
    return f"{fraction_text} of the {quantity} of {format_value(limit_value)}"
