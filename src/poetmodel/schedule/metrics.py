"""The registry of metrics: all numbers that files, JSON, tables and pages state of a schedule.

A new metric is one entry of `METRICS`, and its computation in the simulator if `Simulation` (or
`PlanCheck`) does not have it yet. Readers and writers of files, ``verify``, ``diff``, tables and
report pages ask `metrics_at` for their metrics. Nothing here computes or checks a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class MetricUnit(StrEnum):
    """Units of metrics."""

    BYTES = "B"
    SECONDS = "s"
    JOULES = "J"
    FRACTION = "fraction"
    STEPS = "training steps"
    COUNT = "count"


class Group(StrEnum):
    """Metrics that stand together wherever they are shown."""

    ENERGY = "energy"
    PROOF = "proven bounds on the energy"
    MEMORY = "RAM"
    WORK = "time of the core and of the bus"
    STEP = "time of a training step"
    STORAGE = "storage and its traffic"
    WEAR = "wear of the storage"
    EFFORT = "time of the solve"


class Display(StrEnum):
    """Documents and tables that have metrics."""

    FILE = "schedule file"
    """Also the JSON of ``solve`` and the records of sweeps."""
    SWEEP = "CSV of a sweep"
    SOLVE = "table of solve"
    PLAN_FILE = "plan file"
    PLAN = "table of plan"
    VERIFY = "verify"
    VERIFY_PLAN = "verify of a plan"
    DIFF = "diff"
    EXPLAIN = "explain"
    REPORT = "JSON of report"
    PAGE = "report page"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number that is stated of a schedule or a plan."""

    key: str
    """Its key in files and JSON."""
    name: str
    """Its name in tables."""
    unit: MetricUnit
    meaning: str
    group: Group
    of: Callable[[Any], float | None] | None
    """Reads it from a `Simulation`, or a `PlanCheck` for plans; None for claims of the solve,
    which no simulation computes."""
    stated: frozenset[Display]
    """Files and JSON that have it."""
    listed: frozenset[Display] = frozenset()
    """Tables and pages in which people read it."""
    page_name: str = ""
    """Its name on report pages, if another one."""
    as_exact_as: str = ""
    """Key of a metric of which it is a difference, so that it has its rounding errors."""

    @property
    def needs_costs(self) -> bool:
        """Whether it is known only with costs: an energy or a time."""
        return self.unit in (MetricUnit.JOULES, MetricUnit.SECONDS)


def _make_metric(
    key: str,
    name: str,
    unit: MetricUnit,
    meaning: str,
    group: Group,
    *,
    is_claimed: bool = False,
    **places: Any,
) -> Metric:
    """Return a metric that the solve claims, or that is the attribute `key` of a simulation."""
    of = None if is_claimed else attrgetter(key)
    return Metric(key=key, name=name, unit=unit, meaning=meaning, group=group, of=of, **places)


_SCHEDULES: Final = frozenset(
    {
        Display.FILE,
        Display.SWEEP,
        Display.VERIFY,
        Display.DIFF,
        Display.EXPLAIN,
        Display.REPORT,
    }
)
_PLANS: Final = frozenset({Display.PLAN_FILE, Display.VERIFY_PLAN})
_COMMANDS: Final = frozenset({Display.VERIFY, Display.VERIFY_PLAN, Display.DIFF, Display.REPORT})
_TABLES: Final = frozenset(
    {
        Display.SOLVE,
        Display.PLAN,
        Display.VERIFY,
        Display.VERIFY_PLAN,
        Display.PAGE,
    }
)

METRICS: Final[tuple[Metric, ...]] = (
    _make_metric(
        "energy_j",
        "energy",
        MetricUnit.JOULES,
        "energy of a training step, idle power included",
        Group.ENERGY,
        stated=_SCHEDULES | _PLANS,
        listed=_TABLES | {Display.DIFF, Display.EXPLAIN},
        page_name="energy of a step",
    ),
    _make_metric(
        "bound_j",
        "proven bound",
        MetricUnit.JOULES,
        "proven lower bound on the energy of every schedule of the problem",
        Group.PROOF,
        stated=frozenset({Display.FILE}),
        listed=frozenset({Display.PAGE}),
        page_name="proven bound on the energy",
        is_claimed=True,
    ),
    _make_metric(
        "baseline_energy_j",
        "baseline",
        MetricUnit.JOULES,
        "energy of a single pass, which computes every node once",
        Group.ENERGY,
        stated=_SCHEDULES - {Display.DIFF, Display.EXPLAIN},
        listed=frozenset({Display.PAGE}),
        page_name="baseline: a single pass",
    ),
    _make_metric(
        "overhead_j",
        "overhead",
        MetricUnit.JOULES,
        "energy beyond the baseline",
        Group.ENERGY,
        stated=_SCHEDULES,
        listed=frozenset({Display.SOLVE, Display.DIFF, Display.PAGE}),
        as_exact_as="energy_j",
    ),
    _make_metric(
        "overhead_bound_j",
        "proven bound on the overhead",
        MetricUnit.JOULES,
        "proven lower bound on the overhead of every schedule of the problem",
        Group.PROOF,
        stated=frozenset({Display.FILE, Display.SWEEP}),
        listed=frozenset({Display.PAGE}),
        is_claimed=True,
    ),
    _make_metric(
        "gap",
        "gap",
        MetricUnit.FRACTION,
        "distance between the energy overhead and its bound, relative to the overhead",
        Group.PROOF,
        stated=frozenset({Display.FILE, Display.SWEEP}),
        is_claimed=True,
    ),
    _make_metric(
        "peak_ram_bytes",
        "peak RAM",
        MetricUnit.BYTES,
        "maximum RAM use, without resident bytes",
        Group.MEMORY,
        stated=_SCHEDULES | _PLANS,
        listed=_TABLES | {Display.DIFF},
    ),
    _make_metric(
        "written_bytes",
        "paged out",
        MetricUnit.BYTES,
        "bytes paged out, each transfer counted, and those that commits write",
        Group.STORAGE,
        stated=_COMMANDS | {Display.FILE},
        listed=_COMMANDS - {Display.REPORT} | {Display.PAGE},
    ),
    _make_metric(
        "read_bytes",
        "paged in",
        MetricUnit.BYTES,
        "bytes paged in, each transfer counted, first reads of state on storage included",
        Group.STORAGE,
        stated=_COMMANDS,
        listed=_COMMANDS - {Display.REPORT} | {Display.PAGE},
    ),
    _make_metric(
        "aux_used_bytes",
        "storage used",
        MetricUnit.BYTES,
        "sizes of all tensors ever paged out, and of state on storage",
        Group.STORAGE,
        stated=_COMMANDS - {Display.DIFF},
        listed=_TABLES - {Display.SOLVE},
    ),
    _make_metric(
        "steps_until_worn",
        "storage worn",
        MetricUnit.STEPS,
        "training steps that the storage endures, with ideal wear levelling",
        Group.WEAR,
        stated=frozenset({Display.FILE, Display.VERIFY, Display.REPORT}),
        listed=frozenset({Display.SOLVE, Display.VERIFY, Display.PAGE}),
        page_name="steps until the storage is worn",
    ),
    _make_metric(
        "compute_s",
        "compute time",
        MetricUnit.SECONDS,
        "compute time of a training step",
        Group.WORK,
        stated=_SCHEDULES - {Display.EXPLAIN} | _PLANS,
        listed=_TABLES,
    ),
    _make_metric(
        "transfer_s",
        "transfer time",
        MetricUnit.SECONDS,
        "transfer time of a training step, commits included",
        Group.WORK,
        stated=_SCHEDULES - {Display.EXPLAIN} | _PLANS,
        listed=_TABLES,
    ),
    _make_metric(
        "time_s",
        "time",
        MetricUnit.SECONDS,
        "time of a training step that the deadline limits",
        Group.STEP,
        stated=frozenset({Display.VERIFY, Display.DIFF, Display.EXPLAIN}),
        listed=frozenset({Display.DIFF}),
    ),
    _make_metric(
        "makespan_s",
        "makespan",
        MetricUnit.SECONDS,
        "time of a training step from begin to end",
        Group.STEP,
        stated=_SCHEDULES - {Display.DIFF, Display.EXPLAIN} | _PLANS,
        listed=_TABLES,
    ),
    _make_metric(
        "stall_s",
        "stall",
        MetricUnit.SECONDS,
        "time that the core waits for the bus",
        Group.STEP,
        stated=_PLANS,
        listed=frozenset({Display.PLAN}),
    ),
    _make_metric(
        "build_s",
        "time to build models",
        MetricUnit.SECONDS,
        "time to build and compile models",
        Group.EFFORT,
        stated=frozenset({Display.FILE, Display.SWEEP, Display.REPORT}),
        listed=frozenset({Display.PAGE}),
        is_claimed=True,
    ),
    _make_metric(
        "solve_s",
        "time to search, solve and verify",
        MetricUnit.SECONDS,
        "all other wall time of the solve",
        Group.EFFORT,
        stated=frozenset({Display.FILE, Display.SWEEP, Display.REPORT}),
        listed=frozenset({Display.PAGE}),
        is_claimed=True,
    ),
    _make_metric(
        "primal_integral_s",
        "primal integral",
        MetricUnit.SECONDS,
        "primal gap to the schedule found, integrated over the solve",
        Group.EFFORT,
        stated=frozenset({Display.FILE, Display.SWEEP, Display.REPORT}),
        listed=frozenset({Display.PAGE}),
        is_claimed=True,
    ),
)
"""All metrics, in the order of files."""

_FIRST: Final[Mapping[Display, tuple[str, ...]]] = {
    Display.PLAN_FILE: ("makespan_s", "stall_s", "transfer_s", "compute_s"),
    Display.VERIFY_PLAN: ("makespan_s", "stall_s", "energy_j", "compute_s", "transfer_s"),
    Display.PLAN: ("makespan_s", "compute_s", "transfer_s", "stall_s"),
    Display.REPORT: ("aux_used_bytes", "solve_s"),
    Display.PAGE: ("aux_used_bytes",),
}
"""Keys that come first in a display whose order is not that of files."""


def metrics_at(display: Display, *groups: Group) -> tuple[Metric, ...]:
    """Return the metrics of a display, in its order; without groups, those of all groups."""
    first = _FIRST.get(display, ())
    shown = [
        metric
        for metric in METRICS
        if display in metric.stated | metric.listed and metric.group in (groups or Group)
    ]
    rank = {key: number for number, key in enumerate(first)}
    return tuple(sorted(shown, key=lambda metric: rank.get(metric.key, len(first))))


def simulated_metrics(display: Display, simulation: object) -> dict[str, float | None]:
    """Return the metrics of a display that a simulation computes, by key."""
    return {m.key: m.of(simulation) for m in metrics_at(display) if m.of is not None}
