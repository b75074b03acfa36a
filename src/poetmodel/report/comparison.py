"""Results of earlier methods on the problem of a schedule, simulated and shown beside it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.baselines import method
from poetmodel.clock import rare_collections, time_limit
from poetmodel.errors import InputError, MethodNotApplicableError, PoetModelError, TimeLimitError
from poetmodel.planner import verify
from poetmodel.problem import Problem, Quantity, within
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.baselines import Method
    from poetmodel.report.subject import Subject
    from poetmodel.schedule import Schedule, Simulation

KEEP_ALL: Final = "checkpoint-all"
NAMES: Final = {
    KEEP_ALL: "keep-all",
    "offload-all": "paging everything",
    "chen-sqrt": "Chen √n",
    "rotor": "rotor",
    "dtr": "DTR",
}
"""The methods of a comparison, the quickest first, and what a page calls them."""
LARGER: Final = 6
"""Budgets, in equal ratios up to what keep-all takes, and one beyond, that a method gets which
needs more: one that frees late may need more than keep-all."""


METHOD_S: Final = 2.0
"""How long each method may take [s]."""
ALL_S: Final = 6.0
"""How long all methods may take for all schedules of a page [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Result of a method on a problem."""

    method: str
    """Its name for ``--method``."""
    simulation: Simulation | None = None
    """Simulation of its schedule; None if it has none."""
    broken: tuple[str, ...] = ()
    """The limits that its schedule breaks: ``ram``, ``storage``, ``deadline``, ``energy``, or
    ``other`` for a limit of one's own."""
    larger: bool = False
    """Whether it has no schedule within the RAM budget; then it was given as much as it needs."""
    reason: str = ""
    """Why it has no schedule."""

    @property
    def name(self) -> str:
        """Name on a page."""
        return NAMES.get(self.method, self.method)

    def peak_ram_bytes(self, beside: Subject) -> int:
        """Return its peak RAM in place of the schedule that it stands beside [B].

        What a compiled step reserves counts, but keep-all takes no more than that step would.
        """
        peak_bytes = 0 if self.simulation is None else self.simulation.peak_ram_bytes
        total_bytes = peak_bytes + beside.reserved_bytes
        return min(total_bytes, beside.keep_all_bytes) if self.method == KEEP_ALL else total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The methods for schedules that have the same limits."""

    subjects: tuple[Subject, ...]
    rivals: tuple[Rival, ...] = ()
    reason: str = ""
    """Why there is no comparison."""


def compare(subjects: Sequence[Subject], *, methods: Sequence[str] = ()) -> tuple[Comparison, ...]:
    """Let earlier methods, and some further ones, schedule the problems of schedules, each once.

    Each schedule is simulated. A method that keeps no schedule within the RAM budget gets more,
    so that it can be said how much it needs.

    Raises
    ------
    InputError
        If there is no such method, or one of them needs a solver.
    """
    for name in methods:
        if method(name).by_solver:
            raise InputError(
                f"method {name!r}: it needs a solver, which is not run for a page; solve with "
                f"--method {name} and give its schedule, too"
            )
    names = tuple(dict.fromkeys((*NAMES, *methods)))
    end_s = time.monotonic() + ALL_S
    groups: dict[str, list[Subject]] = {}
    for subject in subjects:
        groups.setdefault(_limits(subject), []).append(subject)
    comparisons = []
    for group in groups.values():
        reason = _obstacle(group[0])
        rivals = () if reason else tuple(_rivals(group[0].problem, names, end_s))
        comparisons.append(Comparison(subjects=tuple(group), rivals=rivals, reason=reason))
    return tuple(comparisons)


def comparison_facts(subject: Subject, comparisons: Sequence[Comparison]) -> dict[str, Any] | None:
    """Return the comparison of a schedule as plain values; None where nothing was compared."""
    for comparison in comparisons:
        if any(member.label == subject.label for member in comparison.subjects):
            rivals = [_facts(rival, subject) for rival in comparison.rivals]
            return {"reason": comparison.reason or None, "methods": rivals}
    return None


def _facts(rival: Rival, beside: Subject) -> dict[str, Any]:
    simulation = rival.simulation
    keys = ("energy_j", "overhead_j", "makespan_s", "written_bytes")
    return {
        "method": rival.method,
        "keeps_limits": simulation is not None and not rival.broken,
        "breaks": list(rival.broken),
        "reason": rival.reason or None,
        **{key: None if simulation is None else getattr(simulation, key) for key in keys},
        "peak_ram_bytes": None if simulation is None else rival.peak_ram_bytes(beside),
    }


def _limits(subject: Subject) -> str:
    """Return a key that schedules share which have the same limits on the same costs."""
    stated = subject.document.problem
    if stated is None or subject.costs is None:
        return f"{subject.label} alone"
    how = {"minimize", "weights", "method", "formulation", "backend", "time_limit_s", "gap"}
    device = subject.costs.device
    costs = (subject.costs.source, "" if device is None else device.short_name)
    return f"{stated.model_dump(exclude=how)} {costs}"


def _obstacle(subject: Subject) -> str:
    """Return the reason against a comparison; empty where there is none."""
    if subject.costs is None:
        return "there are no costs; give --device or --profile"
    if subject.document.problem is None:
        return "the file states no problem"
    return ""


def _rivals(problem: Problem, names: Sequence[str], end_s: float) -> Iterator[Rival]:
    for name in names:
        limit_s = min(METHOD_S, end_s - time.monotonic())
        if limit_s <= 0:
            reason = f"left out: the time of {format_seconds(ALL_S)} for all was over"
            yield Rival(method=name, reason=reason)
            continue
        try:
            with time_limit(limit_s), rare_collections():
                yield _rival(problem, method(name))
        except TimeLimitError:
            yield Rival(method=name, reason=f"not done within {format_seconds(limit_s)}")
        except PoetModelError as error:
            reason = str(error).removeprefix(f"method {name!r}").lstrip(": ")
            yield Rival(method=name, reason=reason)


def _rival(problem: Problem, entry: Method) -> Rival:
    function = entry.function()
    try:
        schedule, larger = function(problem), False
    except MethodNotApplicableError as error:
        schedule, larger = _with_more_ram(problem, entry, error), True
    verdict = verify(problem, schedule)
    if verdict.simulation.violations:
        first = verdict.simulation.violations[0]
        return Rival(method=entry.name, reason=f"its schedule breaks a rule of execution: {first}")
    broken = tuple(_broken(problem, verdict.simulation, len(verdict.violations)))
    return Rival(method=entry.name, simulation=verdict.simulation, broken=broken, larger=larger)


def _with_more_ram(problem: Problem, entry: Method, error: MethodNotApplicableError) -> Schedule:
    """Return the schedule of a method within the least of some larger budgets that it can use.

    Where none is enough, `error` is raised: it says why.
    """
    function, roomy = entry.function(), problem.without(Quantity.RAM)
    least, most = problem.ram_budget_bytes, roomy.ram_budget_bytes
    for step in range(1, LARGER + 2) if most > least else ():
        ram = round(least * (most / least) ** (step / LARGER))
        try:
            schedule: Schedule = function(replace(problem.resolved(), ram=ram))
        except MethodNotApplicableError:
            continue
        return schedule
    raise error


def _broken(problem: Problem, simulation: Simulation, violations: int) -> Iterator[str]:
    """Yield the limits that a schedule breaks; the number of violations tells of the others."""
    known = 0
    limit = problem.aux_limit_bytes
    if simulation.peak_ram_bytes > problem.usable_ram_bytes:
        known += 1
        yield "ram"
    if limit is not None and simulation.aux_used_bytes > limit:
        known += 1
        yield "storage"
    if not all(
        within(time_s, problem.deadline_s) for time_s in problem.limited_times_s(simulation)
    ):
        known += 1
        yield "deadline"
    if simulation.energy_j is not None and not within(simulation.energy_j, problem.energy_budget_j):
        known += 1
        yield "energy"
    if violations > known:
        yield "other"
