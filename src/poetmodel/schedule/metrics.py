"""The registry of metrics: numbers of schedules and plans in files, JSON, tables and pages.

To add a metric, add an entry to `METRICS` and, if `Simulation` (or `PlanCheck`) lacks it, its
computation in the simulator. Readers and writers of files, ``verify``, ``diff``, tables and report
pages get their metrics from `metrics_at`. This module neither computes nor checks metrics.
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
    """Groups of metrics that are displayed together."""

    ENERGY = "energy"
    PROOF = "proven bounds on the energy"
    MEMORY = "RAM"
    WORK = "time of the core and of the bus"
    STEP = "time of a training step"
    STORAGE = "storage and its traffic"
    WEAR = "wear of the storage"
    EFFORT = "time of the solve"


class Display(StrEnum):
    """Documents and tables that contain metrics."""

    FILE = "schedule file"
    """Schedule files, the JSON of ``solve`` and the records of sweeps."""
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
    EXPLORER = "explorer"
    """The points of the explorer (``J``), and the cells of its page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of a schedule or a plan."""

    key: str
    """Key in files and JSON."""
    name: str
    """Name in tables."""
    unit: MetricUnit
    """Unit in files and JSON."""
    meaning: str
    """Definition of the metric."""
    group: Group
    """Group with which the metric is displayed."""
    value_of: Callable[[Any], float | None] | None
    """Function that returns the metric of a `Simulation` or `PlanCheck`; None for claims of a
    solve, which simulations do not compute."""
    files: frozenset[Display]
    """Files and JSON documents that contain the metric."""
    tables: frozenset[Display] = frozenset()
    """Tables and pages that display the metric."""
    page_name: str = ""
    """Name on report pages; empty if it is `name`."""
    exactness_key: str = ""
    """For a difference of two values, the key of the larger one, which sets the rounding error."""

    @property
    def needs_costs(self) -> bool:
        """Whether the metric is an energy or a time; simulations compute these only with costs."""
        return self.unit in (MetricUnit.JOULES, MetricUnit.SECONDS)


def _make_metric(
    key: str,
    name: str,
    unit: MetricUnit,
    meaning: str,
    group: Group,
    cells: str,
    *,
    is_claimed: bool = False,
    value_of: Callable[[Any], float | None] | None = None,
    **other_fields: Any,
) -> Metric:
    """Return a metric with the value of attribute `key` of a simulation, or of `value_of` it.

    `cells` has one word per `Display`: ``J`` for JSON or file, ``T`` for table or page, ``JT`` for
    both, ``-`` for neither. With `is_claimed`, only a solve states it: simulations have no value.
    """
    words = dict(zip(Display, cells.split(), strict=True))
    return Metric(
        key=key,
        name=name,
        unit=unit,
        meaning=meaning,
        group=group,
        value_of=None if is_claimed else value_of or attrgetter(key),
        files=frozenset(display for display, word in words.items() if "J" in word),
        tables=frozenset(display for display, word in words.items() if "T" in word),
        **other_fields,
    )


METRICS: Final[tuple[Metric, ...]] = (
    # The last line of an entry has a cell for each display:
    #    file, sweep, solve, plan file, plan, verify, verify of a plan, diff, explain, report, page,
    #    explorer
    _make_metric(
        "energy_j",
        "energy",
        MetricUnit.JOULES,
        "energy of a training step, idle power included",
        Group.ENERGY,
        "J  J  T  J  T  JT JT JT JT J  T  JT",
        page_name="energy of a step",
    ),
    _make_metric(
        "bound_j",
        "proven bound",
        MetricUnit.JOULES,
        "proven lower bound on the energy of every schedule of the problem",
        Group.PROOF,
        "J  -  -  -  -  -  -  -  -  -  T  -",
        page_name="proven bound on the energy",
        is_claimed=True,
    ),
    _make_metric(
        "baseline_energy_j",
        "baseline",
        MetricUnit.JOULES,
        "energy of a single pass, which computes every node once",
        Group.ENERGY,
        "J  J  -  -  -  J  -  -  -  J  T  -",
        page_name="baseline: a single pass",
    ),
    _make_metric(
        "overhead_j",
        "overhead",
        MetricUnit.JOULES,
        "energy beyond the baseline",
        Group.ENERGY,
        "J  J  T  -  -  J  -  JT J  J  T  J",
        exactness_key="energy_j",
    ),
    _make_metric(
        "overhead_bound_j",
        "proven bound on the overhead",
        MetricUnit.JOULES,
        "proven lower bound on the overhead of every schedule of the problem",
        Group.PROOF,
        "J  J  -  -  -  -  -  -  -  -  T  -",
        is_claimed=True,
    ),
    _make_metric(
        "gap",
        "gap",
        MetricUnit.FRACTION,
        "distance between the energy overhead and its bound, relative to the overhead",
        Group.PROOF,
        "J  J  -  -  -  -  -  -  -  -  -  -",
        is_claimed=True,
    ),
    _make_metric(
        "peak_ram_bytes",
        "peak RAM",
        MetricUnit.BYTES,
        "maximum RAM use, without resident bytes",
        Group.MEMORY,
        "J  J  T  J  T  JT JT JT J  J  T  JT",
    ),
    _make_metric(
        "written_bytes",
        "paged out",
        MetricUnit.BYTES,
        "bytes paged out, each transfer counted, and those that commits write",
        Group.STORAGE,
        "J  -  -  -  -  JT JT JT -  J  T  -",
    ),
    _make_metric(
        "read_bytes",
        "paged in",
        MetricUnit.BYTES,
        "bytes paged in, each transfer counted, first reads of state on storage included",
        Group.STORAGE,
        "-  -  -  -  -  JT JT JT -  J  T  -",
    ),
    _make_metric(
        "aux_used_bytes",
        "storage used",
        MetricUnit.BYTES,
        "sizes of state on storage and of paged-out tensors, except samples and replacements",
        Group.STORAGE,
        "-  -  -  -  T  JT JT -  -  J  T  -",
    ),
    _make_metric(
        "steps_until_worn",
        "storage worn",
        MetricUnit.STEPS,
        "training steps that the storage endures, with ideal wear levelling",
        Group.WEAR,
        "J  -  T  -  -  JT -  -  -  J  T  -",
        page_name="steps until the storage is worn",
    ),
    _make_metric(
        "compute_s",
        "compute time",
        MetricUnit.SECONDS,
        "compute time of a training step",
        Group.WORK,
        "J  J  T  J  T  JT JT J  -  J  T  -",
    ),
    _make_metric(
        "transfer_s",
        "transfer time",
        MetricUnit.SECONDS,
        "transfer time of a training step, commits included",
        Group.WORK,
        "J  J  T  J  T  JT JT J  -  J  T  -",
    ),
    _make_metric(
        "time_s",
        "time",
        MetricUnit.SECONDS,
        "time of a training step that the deadline limits",
        Group.STEP,
        "-  -  -  -  -  J  -  JT J  -  -  -",
    ),
    _make_metric(
        "makespan_s",
        "makespan",
        MetricUnit.SECONDS,
        "time of a training step from begin to end",
        Group.STEP,
        "J  J  T  J  T  JT JT -  -  J  T  JT",
    ),
    _make_metric(
        "stall_s",
        "stall",
        MetricUnit.SECONDS,
        "time that the core waits for the bus",
        Group.STEP,
        "-  -  -  J  T  -  J  -  -  -  -  -",
    ),
    _make_metric(
        "build_s",
        "time to build models",
        MetricUnit.SECONDS,
        "time to build and compile models",
        Group.EFFORT,
        "J  J  -  -  -  -  -  -  -  J  T  -",
        is_claimed=True,
    ),
    _make_metric(
        "solve_s",
        "time to search, solve and verify",
        MetricUnit.SECONDS,
        "all other wall time of the solve",
        Group.EFFORT,
        "J  J  -  -  -  -  -  -  -  J  T  -",
        is_claimed=True,
    ),
    _make_metric(
        "primal_integral_s",
        "primal integral",
        MetricUnit.SECONDS,
        "primal gap to the schedule found, integrated over the solve",
        Group.EFFORT,
        "J  J  -  -  -  -  -  -  -  J  T  -",
        is_claimed=True,
    ),
)
"""All metrics, in the order of schedule files."""

_FIRST_KEYS: Final[Mapping[Display, tuple[str, ...]]] = {
    Display.PLAN_FILE: ("makespan_s", "stall_s", "transfer_s", "compute_s"),
    Display.VERIFY_PLAN: ("makespan_s", "stall_s", "energy_j", "compute_s", "transfer_s"),
    Display.PLAN: ("makespan_s", "compute_s", "transfer_s", "stall_s"),
    Display.REPORT: ("aux_used_bytes", "solve_s"),
    Display.PAGE: ("aux_used_bytes",),
    Display.EXPLORER: ("energy_j", "overhead_j", "makespan_s"),
}
"""Keys of metrics that come first in a display, if its order differs from that of files."""


def metrics_at(display: Display, *groups: Group) -> tuple[Metric, ...]:
    """Return the metrics of a display; with `groups`, only those of these groups."""
    first_keys = _FIRST_KEYS.get(display, ())
    metrics = [
        metric
        for metric in METRICS
        if display in metric.files | metric.tables and metric.group in (groups or Group)
    ]
    rank = {key: position for position, key in enumerate(first_keys)}
    return tuple(sorted(metrics, key=lambda metric: rank.get(metric.key, len(first_keys))))


def simulated_metrics(display: Display, simulation: object) -> dict[str, float | None]:
    """Return the simulated metrics of a display, by key; omit metrics that only a solve claims."""
    return {
        metric.key: metric.value_of(simulation)
        for metric in metrics_at(display)
        if metric.value_of is not None
    }
