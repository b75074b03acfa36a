"""A point: a problem at one RAM and one deadline, what is known of it, and how far its solve is.

A problem has all its points, one for each stop of the sliders that somebody wanted.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.result import relative_gap

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

KEPT_STOPS: Final = 500
"""Points of a problem that are kept though nothing of their own is known."""
FIGURES: Final = (
    "value",
    "energy_j",
    "overhead_j",
    "peak_ram_bytes",
    "needs_bytes",
    "makespan_s",
    "time_s",
)
"""A worker's report on a schedule."""


@dataclass(slots=True, kw_only=True)
class Point:
    """Results at one RAM and one deadline."""

    id: str
    problem: str
    ram_bytes: int
    deadline_s: float | None
    state: str = "waiting"
    """``waiting``, ``solving``, ``done``, ``cancelled`` or ``failed``."""
    status: str | None = None
    """Claim, as of a `SolveResult`; None while there is no schedule."""
    reason: str = ""
    """Why there is no schedule, or why the solve failed."""
    provisional: bool = False
    """Whether the schedule is one of another point, and the solve has not told any yet."""
    neighbour_bytes: int | None = None
    """The RAM of that point [B]."""
    lender: tuple[str, str] | None = None
    """Its id and digest."""
    value: float | None = None
    """Minimized value beyond the part that every schedule pays."""
    bound: float = 0.0
    """Proved bound on it."""
    energy_j: float | None = None
    overhead_j: float | None = None
    peak_ram_bytes: int | None = None
    needs_bytes: int | None = None
    """The least RAM budget that the schedule keeps [B]."""
    makespan_s: float | None = None
    time_s: float | None = None
    """The time that the deadline limits [s]."""
    seconds: float = 0.0
    """Time of all solves so far [s]."""
    revision: int = 0
    """Grows with each new schedule, and when the solve ends."""
    digest: str = ""
    """Names what is drawn at this revision."""
    proof: dict[str, Any] = field(default_factory=dict)
    """Further facts in the certificate of the schedule."""

    @property
    def gap(self) -> float | None:
        """Gap of what can be decided; None without a schedule."""
        return None if self.value is None else relative_gap(self.value, self.bound)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.state == "done"

    @property
    def is_proved(self) -> bool:
        """Whether a further solve could not tell more."""
        return self.is_over and self.status in ("optimal", "infeasible")

    @property
    def proof_rank(self) -> int:
        """Rank of its state: 0 while it is open, 1 after its solve, 2 with a proof."""
        return self.is_over + self.is_proved

    def take(self, figures: dict[str, Any], schedule: bytes) -> None:
        """Take over a schedule with its figures."""
        self.figures(figures)
        if self.status is None or self.status in ("unknown", "infeasible"):
            self.status = "feasible"
        self.revise(schedule)

    def figures(self, figures: dict[str, Any]) -> None:
        """Take over the figures of a schedule."""
        for name in FIGURES:
            setattr(self, name, figures[name])

    def end(self, ended: dict[str, Any], schedule: bytes, *, before_s: float) -> None:
        """Take over how a solve ended, with the best schedule; `before_s` went before it [s]."""
        figures = ended.get("found")
        better = figures is not None and (self.value is None or figures["value"] <= self.value)
        self.seconds = before_s + ended["build_s"] + ended["solve_s"]
        self.proof = {key: ended[key] for key in ("termination", "build_s", "versions")}
        self.proof["solve_s"] = before_s + ended["solve_s"]
        self.bound = max(self.bound, ended["bound"])
        self.state, self.provisional = "done", False
        if better or not schedule or ended["status"] == "optimal":
            self.status = ended["status"]
        self.reason = "" if schedule else ended["reason"]
        if figures is not None and better:
            self.figures(figures)
        if self.value is not None:
            self.bound = min(self.bound, self.value)
        self.revise(schedule)

    def revise(self, schedule: bytes) -> None:
        """Begin a revision: something new is to be drawn."""
        self.revision += 1
        stated = f"{self.id} {self.revision} {self.status} {self.bound!r} {self.state}"
        self.digest = hashlib.sha256(stated.encode() + schedule).hexdigest()[:16]

    def to_dict(self, baseline: float, *, minimize: str) -> dict[str, Any]:
        """Return it as the page gets it."""
        shown = asdict(self)
        for name in ("digest", "lender", "proof"):
            del shown[name]
        known = self.value is not None
        bound_j = baseline + self.bound if known and minimize == "energy" else None
        return shown | {"bound_j": bound_j, "gap": self.gap}


@dataclass(slots=True)
class Opened:
    """A problem that somebody looks at."""

    name: str
    facts: dict[str, Any]
    """The worker's report on it."""
    drawn: str
    """The same for the page with the graph, as JSON, but for the last brace."""
    points: dict[str, Point] = field(default_factory=dict)

    def describe(self, point: Point) -> dict[str, Any]:
        """Return a point as the page gets it."""
        objective = self.facts["objective"]
        return point.to_dict(objective["baseline"], minimize=objective["minimize"])

    def forget(self, used: AbstractSet[str | None]) -> None:
        """Forget the oldest stops of a slider that left nothing behind."""
        idle = [
            name
            for name, point in self.points.items()
            if not point.is_over and (point.value is None or point.provisional) and name not in used
        ]
        for name in idle[:-KEPT_STOPS]:
            del self.points[name]

    def front(self) -> list[Point]:
        """Return the points that have a schedule of their own."""
        points = self.points.values()
        return [point for point in points if point.value is not None and not point.provisional]


def point_id(problem: str, ram_bytes: int, deadline_s: float | None) -> str:
    """Return the id of a point: what its problem, its RAM and its deadline come to."""
    stated = f"{problem} {ram_bytes} {deadline_s!r}"
    return hashlib.sha256(stated.encode()).hexdigest()[:20]


def merge_records(before: Point, new: Point, *, carried: bool) -> tuple[Point, bool]:
    """Merge two records of a point; also return whether the schedule is the one of `new`.

    The better schedule is kept, of equal ones that with the higher `proof_rank`; and the higher
    bound. A better value of `new` counts only with its schedule (`carried`).
    """
    if before.value == new.value:
        figures = carried or all(getattr(before, name) == getattr(new, name) for name in FIGURES)
        is_new = figures and new.proof_rank >= before.proof_rank
    else:
        lower = before.value is None or (new.value is not None and new.value < before.value)
        is_new = carried and lower
    best = new if is_new else before
    bound = max(before.bound, new.bound, 0.0)
    bound = bound if best.value is None else min(bound, best.value)
    if bound <= best.bound:
        return best, is_new
    return replace(best, bound=bound, proof=dict(best.proof)), is_new


def neighbour(point: Point, others: Iterable[Point], *, overlaps: bool = False) -> Point | None:
    """Return the point whose schedule is the best one that keeps the limits of another point.

    Where time is the makespan of a plan that `overlaps` transfers with the computing, one in less
    RAM may be slower: the schedule is one of as much RAM, or less.
    """
    limit_s = math.inf if point.deadline_s is None else point.deadline_s
    fitting = [
        other
        for other in others
        if other.value is not None
        and (other.needs_bytes or 0) <= point.ram_bytes
        and (other.time_s or 0.0) <= limit_s
        and (not overlaps or other.ram_bytes <= point.ram_bytes)
    ]
    return min(fitting, key=lambda other: (other.value, -other.ram_bytes), default=None)


def known_bound(point: Point, others: Iterable[Point]) -> float:
    """Return the best bound that is proved where there is as much RAM and time, or more."""
    limit_s = math.inf if point.deadline_s is None else point.deadline_s
    return max(
        (
            other.bound
            for other in others
            if other.ram_bytes >= point.ram_bytes
            and (math.inf if other.deadline_s is None else other.deadline_s) >= limit_s
        ),
        default=0.0,
    )
