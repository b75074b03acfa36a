"""Points: the state and the result of the solves at one RAM budget and one deadline.

A problem has one point for each position of the sliders that a session requested.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.result import relative_gap
from poetmodel.schedule.metrics import Display, metrics_at

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet
    from typing import Self

    from poetmodel.explore.settings import ExplorerSettings

MAX_IDLE_POINTS: Final = 500
"""Maximum number of unfinished points of a problem in memory without a schedule of their own, in
addition to points that are requested or being solved."""
OWN_METRICS: Final = ("value", "needs_bytes", "time_s")
"""Metrics that decide which schedule is lent or kept."""


def shown_metrics() -> tuple[str, ...]:
    """Return the metrics of the registry that points have beside these."""
    return tuple(metric.key for metric in metrics_at(Display.EXPLORER))


@dataclass(slots=True, kw_only=True)
class Point:
    """State and result of the solves at one RAM budget and one deadline."""

    id: str
    problem: str
    """Id of the problem."""
    ram_bytes: int
    deadline_s: float | None
    state: str = "waiting"
    """``waiting``, ``solving``, ``done``, ``cancelled`` or ``failed``."""
    status: str | None = None
    """Status as in a `SolveResult`; None until the first schedule or the end of a solve."""
    reason: str = ""
    """Reason why there is no schedule, or why the solve failed."""
    provisional: bool = False
    """Whether the schedule is that of another point, until the point's solve finds one of at most
    its value, or finishes."""
    neighbour_bytes: int | None = None
    """RAM budget of the neighbour whose schedule was last used [B]; None if none was."""
    lender: tuple[str, str] | None = None
    """Id and digest of the point whose schedule this is, if it is provisional."""
    value: float | None = None
    """Minimized quantity above its baseline; None without a schedule."""
    bound: float = 0.0
    """Proven lower bound on `value`."""
    needs_bytes: int | None = None
    """Smallest RAM budget that the schedule meets [B]."""
    time_s: float | None = None
    """Time that the deadline limits [s]."""
    metrics: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(shown_metrics()))
    """The `shown_metrics` of the schedule; None without a schedule."""
    seconds: float = 0.0
    """Time of all solves so far [s]."""
    revision: int = 0
    """Number that increases with each change of the drawing: a new schedule, the end of a solve, a
    provisional schedule that becomes the point's own, or a merge in the store."""
    digest: str = ""
    """Hash that identifies the drawing of this revision."""
    proof: dict[str, Any] = field(default_factory=dict)
    """Termination, times [s] and versions of the solve, for the certificate of the schedule."""

    @property
    def gap(self) -> float | None:
        """Gap of `value`; None without a schedule."""
        return None if self.value is None else relative_gap(self.value, self.bound)

    @property
    def is_finished(self) -> bool:
        """Whether the last solve has finished, neither cancelled nor failed.

        Also True for a point without a solve, if the schedule of a neighbour is proven optimal.
        """
        return self.state == "done"

    @property
    def is_proved(self) -> bool:
        """Whether the result is proven: optimal within the gap tolerance, or infeasible."""
        return self.is_finished and self.status in ("optimal", "infeasible")

    @property
    def proof_rank(self) -> int:
        """0 for an unfinished solve, 1 after its end, 2 if it also proved its result."""
        return self.is_finished + self.is_proved

    def set_schedule(self, metrics: dict[str, Any], schedule: bytes) -> None:
        """Set the metrics of a new schedule, add 1 to `revision`, and update `digest`.

        `schedule` is packed, and only used for the digest.
        """
        self.set_metrics(metrics)
        if self.status is None or self.status in ("unknown", "infeasible"):
            self.status = "feasible"
        self.begin_revision(schedule)

    @property
    def schedule_metrics(self) -> dict[str, Any]:
        """All metrics of the schedule, by name."""
        return {name: getattr(self, name) for name in OWN_METRICS} | self.metrics

    def set_metrics(self, metrics: dict[str, Any]) -> None:
        """Set all metrics from those of a schedule, by name."""
        for name in OWN_METRICS:
            setattr(self, name, metrics[name])
        self.metrics = {name: metrics.get(name) for name in shown_metrics()}

    def to_record(self) -> dict[str, Any]:
        """Return all fields as JSON values; metrics are keys beside them."""
        values = asdict(self)
        del values["metrics"]
        return values | self.metrics

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Return the point of a record; a metric that the record lacks is None."""
        names = {entry.name for entry in fields(cls)}
        values = {name: value for name, value in record.items() if name in names}
        values["lender"] = values["lender"] and tuple(values["lender"])
        return cls(**values, metrics={name: record.get(name) for name in shown_metrics()})

    def finish(self, result: dict[str, Any], schedule: bytes, *, earlier_s: float) -> None:
        """Set the result of a solve and the state ``done``, and begin a new revision.

        Metrics are replaced only by those of a value that is no higher; the bound is at most the
        value. `schedule` is the packed best schedule of the point, empty without one. `earlier_s`
        is the time of earlier solves.
        """
        new_metrics = result.get("metrics")
        is_better = new_metrics is not None and (
            self.value is None or new_metrics["value"] <= self.value
        )
        self.seconds = earlier_s + result["build_s"] + result["solve_s"]
        self.proof = {key: result[key] for key in ("termination", "build_s", "versions")}
        self.proof["solve_s"] = earlier_s + result["solve_s"]
        self.bound = max(self.bound, result["bound"])
        self.state, self.provisional = "done", False
        if is_better or not schedule or result["status"] == "optimal":
            self.status = result["status"]
        self.reason = "" if schedule else result["reason"]
        if new_metrics is not None and is_better:
            self.set_metrics(new_metrics)
        if self.value is not None:
            self.bound = min(self.bound, self.value)
        self.begin_revision(schedule)

    def begin_revision(self, schedule: bytes) -> None:
        """Increase the revision and update the digest, because the drawing of the point changes."""
        self.revision += 1
        content = f"{self.id} {self.revision} {self.status} {self.bound!r} {self.state}"
        self.digest = hashlib.sha256(content.encode() + schedule).hexdigest()[:16]

    def to_dict(self, baseline: float, *, minimize: str) -> dict[str, Any]:
        """Return the point as JSON values for the page, with `gap` and ``bound_j``.

        ``bound_j`` is None unless energy is minimized. `baseline` is of the minimized quantity.
        """
        values = self.to_record()
        for name in ("digest", "lender", "proof"):
            del values[name]
        has_schedule = self.value is not None
        bound_j = baseline + self.bound if has_schedule and minimize == "energy" else None
        return values | {"bound_j": bound_j, "gap": self.gap}


@dataclass(slots=True)
class OpenProblem:
    """A problem in memory, with its points."""

    id: str
    """Id of the problem."""
    settings: ExplorerSettings
    facts: dict[str, Any]
    """Facts about the problem, with the data of its graph: those of `tasks.prepare_problem`."""
    points: dict[str, Point] = field(default_factory=dict)
    """Points by id."""

    def describe(self, point: Point) -> dict[str, Any]:
        """Return a point as JSON values for the page."""
        objective = self.facts["objective"]
        return point.to_dict(objective["baseline"], minimize=objective["minimize"])

    def discard_idle(self, used_ids: AbstractSet[str | None]) -> None:
        """Discard all but the last `MAX_IDLE_POINTS` unused points without result and schedule."""
        idle_ids = [
            point_id
            for point_id, point in self.points.items()
            if not point.is_finished
            and (point.value is None or point.provisional)
            and point_id not in used_ids
        ]
        for point_id in idle_ids[:-MAX_IDLE_POINTS]:
            del self.points[point_id]

    def points_with_schedule(self) -> list[Point]:
        """Return the points with a schedule that is not provisional."""
        points = self.points.values()
        return [point for point in points if point.value is not None and not point.provisional]


def make_point_id(problem: str, ram_bytes: int, deadline_s: float | None) -> str:
    """Return the id of a point: a hash of its problem, RAM and deadline."""
    text = f"{problem} {ram_bytes} {deadline_s!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def merge_records(first: Point, second: Point, *, has_second_schedule: bool) -> tuple[Point, bool]:
    """Merge two records of a point; also return whether `second` is the record retained.

    The record with the lower value is retained, of equal values that with the higher `proof_rank`;
    `second` only if its schedule is available or its metrics equal those of `first`. If the other
    record has a higher bound, the retained one is copied with this bound, at most its value.
    """
    if first.value == second.value:
        is_available = has_second_schedule or first.schedule_metrics == second.schedule_metrics
        is_second = is_available and second.proof_rank >= first.proof_rank
    else:
        is_better = first.value is None or (second.value is not None and second.value < first.value)
        is_second = has_second_schedule and is_better
    best = second if is_second else first
    bound = max(first.bound, second.bound, 0.0)
    bound = bound if best.value is None else min(bound, best.value)
    if bound <= best.bound:
        return best, is_second
    return replace(best, bound=bound, proof=dict(best.proof)), is_second


def best_neighbour(
    point: Point, other_points: Iterable[Point], *, overlaps: bool = False
) -> Point | None:
    """Return the point of lowest value whose schedule meets the limits of `point`, if any.

    With `overlaps`, only points with at most the RAM budget of `point`: a plan that overlaps
    transfers may be slower with less RAM.
    """
    limit_s = math.inf if point.deadline_s is None else point.deadline_s
    fitting_points = [
        candidate
        for candidate in other_points
        if candidate.value is not None
        and (candidate.needs_bytes or 0) <= point.ram_bytes
        and (candidate.time_s or 0.0) <= limit_s
        and (not overlaps or candidate.ram_bytes <= point.ram_bytes)
    ]
    return min(
        fitting_points, key=lambda candidate: (candidate.value, -candidate.ram_bytes), default=None
    )


def inherited_bound(point: Point, other_points: Iterable[Point]) -> float:
    """Return the highest bound of points with at least the RAM and deadline of `point`, or 0."""
    limit_s = math.inf if point.deadline_s is None else point.deadline_s
    return max(
        (
            other.bound
            for other in other_points
            if other.ram_bytes >= point.ram_bytes
            and (math.inf if other.deadline_s is None else other.deadline_s) >= limit_s
        ),
        default=0.0,
    )
