"""Points: one requested RAM budget and deadline of a problem each, with an `Answer`."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from poetmodel.result import relative_gap
from poetmodel.schedule.metrics import Display, metrics_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet
    from typing import Self

    from poetmodel.explore.settings import ExplorerSettings

MAX_IDLE_POINTS: Final = 500
"""Maximum number of unfinished points of a problem in memory without a schedule of their own, in
addition to points that are requested or being solved."""
OWN_METRICS: Final = ("value", "needs_bytes", "time_s")
"""Minimized quantity above its baseline, smallest RAM budget that a schedule meets [B], and time
that the deadline limits [s]: the metrics that decide where a schedule is valid and better."""


def shown_metrics() -> tuple[str, ...]:
    """Return the metrics of the registry that points have beside these."""
    return tuple(metric.key for metric in metrics_at(Display.EXPLORER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A schedule that meets the limits of a point; those of equal metrics are equal."""

    metrics: Mapping[str, float | None]
    """The `OWN_METRICS` and `shown_metrics`."""
    is_own: bool = True
    """Whether it was found at this point, or proved best there; not only borrowed."""
    lender: tuple[str, str] | None = None
    """Id and digest of the point that found it; None if this point did."""
    lender_bytes: int | None = None
    """RAM budget of the neighbour that lent it [B]."""
    packed: bytes = field(default=b"", compare=False, repr=False)
    """The packed schedule; empty if only the store has it."""

    @property
    def value(self) -> float:
        """Minimized quantity above its baseline."""
        return self.metrics["value"] or 0.0

    @property
    def rank(self) -> tuple[Any, ...]:
        """Better schedules rank higher: those of lower value, then the point's own."""
        others = [(name, value is not None, value or 0) for name, value in self.metrics.items()]
        return -self.value, self.is_own, self.lender_bytes or 0, sorted(others), self.lender or ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The end of a solve."""

    status: str
    """Status as in a `SolveResult`."""
    termination: str = "interrupted"
    reason: str = ""
    build_s: float = 0.0
    solve_s: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_conclusive(self) -> bool:
        """Whether the result is proven: optimal within the gap tolerance, or infeasible."""
        return self.status in ("optimal", "infeasible")

    @property
    def rank(self) -> tuple[Any, ...]:
        """Proven results rank higher, then later ones, whose times include those before."""
        texts = self.status, self.termination, self.reason, sorted(self.versions.items())
        return self.is_conclusive, self.solve_s, self.build_s, texts


NO_PROOF: Final = Proof(status="feasible")
"""The certificate of a schedule before a solve of its point has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is known of a point: a schedule, a bound and the end of a solve."""

    found: Found | None = None
    bound: float = 0.0
    """Proven lower bound on the value of every schedule, at most that of `found`."""
    proof: Proof | None = None
    """None until a solve has ended."""

    def merge(self, other: Answer) -> Answer:
        """Combine two answers to one problem: the better schedule, bound and end of a solve."""
        schedules = [found for found in (self.found, other.found) if found is not None]
        proofs = [proof for proof in (self.proof, other.proof) if proof is not None]
        # Of equal schedules, the one that is at hand.
        found = max(schedules, key=lambda each: (each.rank, bool(each.packed)), default=None)
        bound = max(self.bound, other.bound)
        return Answer(
            found=found,
            bound=bound if found is None else min(bound, found.value),
            proof=max(proofs, key=lambda proof: proof.rank, default=None),
        )

    @property
    def status(self) -> str | None:
        """Status as in a `SolveResult`; None before the first schedule or the end of a solve."""
        if self.found is not None:
            is_optimal = self.proof is not None and self.proof.status == "optimal"
            return "optimal" if is_optimal else "feasible"
        return None if self.proof is None else self.proof.status

    @property
    def gap(self) -> float | None:
        """Gap of the value; None without a schedule."""
        return None if self.found is None else relative_gap(self.found.value, self.bound)

    @property
    def is_proved(self) -> bool:
        """Whether a solve has proved the result."""
        return self.proof is not None and self.proof.is_conclusive

    @property
    def is_owned(self) -> bool:
        """Whether the point has a schedule that is not only borrowed."""
        return self.found is not None and self.found.is_own

    def end(self, proof: Proof) -> Answer:
        """Merge the end of a solve: the point has no better schedule than the one it borrowed."""
        found = None if self.found is None else replace(self.found, is_own=True)
        return replace(self, found=found).merge(Answer(proof=proof))

    def close(self, gap: float) -> Answer:
        """Return the answer as optimal if its bound proves that; else unchanged."""
        if self.found is None or self.is_proved or (self.gap or 0.0) > gap:
            return self
        return self.end(replace(self.proof or NO_PROOF, status="optimal", termination="proved"))


@dataclass(slots=True, kw_only=True)
class Point:
    """State and answer at one RAM budget and one deadline."""

    id: str
    problem: str
    """Id of the problem."""
    ram_bytes: int
    deadline_s: float | None
    state: str = "waiting"
    """``waiting``, ``solving``, ``done``, ``cancelled`` or ``failed``."""
    failure: str = ""
    """Reason why the solve failed."""
    answer: Answer = Answer()
    seconds: float = 0.0
    """Time of all solves so far [s]."""
    revision: int = 0
    """Number that increases with each change of the drawing: a new schedule, the end of a solve, or
    a borrowed schedule that becomes the point's own."""
    digest: str = ""
    """Hash that identifies the drawing of this revision."""

    @property
    def is_finished(self) -> bool:
        """Whether the last solve has ended, neither cancelled nor failed, or none is needed."""
        return self.state == "done"

    def take(self, answer: Answer) -> bool:
        """Merge an answer; return whether the drawing changes, which begins a new revision."""
        before = self.answer.found, self.answer.proof
        self.answer = self.answer.merge(answer)
        drawn = self.answer.found, self.answer.proof
        if drawn == before:
            return False
        self.revision += 1
        content = f"{self.id} {self.revision} {drawn!r} {self.answer.bound!r}".encode()
        packed = b"" if self.answer.found is None else self.answer.found.packed
        self.digest = hashlib.sha256(content + packed).hexdigest()[:16]
        return True

    def finish(self, proof: Proof) -> None:
        """Take the end of a solve."""
        self.take(self.answer.end(proof))
        self.state = "done"

    def lend(self, other: Point, *, overlaps: bool) -> Answer:
        """Return what is known of another point from this one: a schedule and a bound.

        With `overlaps`, no point with less RAM gets the schedule: its plan may be slower there.
        """
        own_s, limit_s = (
            math.inf if point.deadline_s is None else point.deadline_s for point in (self, other)
        )
        holds = self.ram_bytes >= other.ram_bytes and own_s >= limit_s
        found = self.answer.found
        if (
            found is None
            or (found.metrics["needs_bytes"] or 0) > other.ram_bytes
            or (found.metrics["time_s"] or 0.0) > limit_s
            or (overlaps and self.ram_bytes > other.ram_bytes)
        ):
            return Answer(bound=self.answer.bound if holds else 0.0)
        lender = (self.id, self.digest) if found.is_own else found.lender
        found = replace(found, is_own=False, lender=lender, lender_bytes=self.ram_bytes)
        return Answer(found=found, bound=self.answer.bound if holds else 0.0)

    def to_record(self) -> dict[str, Any]:
        """Return all fields as JSON values; those of the answer are keys beside them."""
        answer, found = self.answer, self.answer.found
        proof = answer.proof or (None if found is None else NO_PROOF)
        unknown: dict[str, float | None] = dict.fromkeys((*OWN_METRICS, *shown_metrics()))
        return {
            "id": self.id,
            "problem": self.problem,
            "ram_bytes": self.ram_bytes,
            "deadline_s": self.deadline_s,
            "state": self.state,
            "status": answer.status,
            "reason": self.failure or ("" if found or proof is None else proof.reason),
            "provisional": found is not None and not found.is_own,
            "neighbour_bytes": None if found is None else found.lender_bytes,
            "lender": None if found is None else found.lender,
            "bound": answer.bound,
            **(unknown if found is None else unknown | dict(found.metrics)),
            "seconds": self.seconds,
            "revision": self.revision,
            "digest": self.digest,
            "proof": {}
            if proof is None
            else {
                "termination": proof.termination,
                "build_s": proof.build_s,
                "versions": dict(proof.versions),
                "solve_s": proof.solve_s,
            },
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Return the point of a record; a metric that the record lacks is None."""
        found = proof = None
        if record["value"] is not None:
            found = Found(
                metrics={name: record.get(name) for name in (*OWN_METRICS, *shown_metrics())},
                is_own=not record["provisional"],
                lender=record["lender"] and tuple(record["lender"]),
                lender_bytes=record["neighbour_bytes"],
            )
        if record["state"] == "done":
            proof = Proof(
                status=record["status"] or "unknown", reason=record["reason"], **record["proof"]
            )
        return cls(
            id=record["id"],
            problem=record["problem"],
            ram_bytes=record["ram_bytes"],
            deadline_s=record["deadline_s"],
            state="cancelled" if proof is None else "done",
            answer=Answer(found=found, bound=record["bound"], proof=proof),
            seconds=record["seconds"],
            revision=record["revision"],
            digest=record["digest"],
        )

    def to_dict(self, baseline: float, *, minimize: str) -> dict[str, Any]:
        """Return the point as JSON values for the page, with ``gap`` and ``bound_j``.

        ``bound_j`` is None unless energy is minimized. `baseline` is of the minimized quantity.
        """
        values = self.to_record()
        for name in ("digest", "lender", "proof"):
            del values[name]
        has_energy = self.answer.found is not None and minimize == "energy"
        bound_j = baseline + self.answer.bound if has_energy else None
        return values | {"bound_j": bound_j, "gap": self.answer.gap}


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

    def borrow(self, point: Point) -> Answer:
        """Return all that the other points tell of a point."""
        overlaps = self.facts["deadline"]["counts"] == "overlap"
        lent = (
            other.lend(point, overlaps=overlaps)
            for other in self.points.values()
            if other is not point
        )
        return reduce(Answer.merge, lent, Answer())

    def discard_idle(self, used_ids: AbstractSet[str | None]) -> None:
        """Discard all but the last `MAX_IDLE_POINTS` unused points without result and schedule."""
        idle_ids = [
            point.id
            for point in self.points.values()
            if not (point.is_finished or point.answer.is_owned or point.id in used_ids)
        ]
        for point_id in idle_ids[:-MAX_IDLE_POINTS]:
            del self.points[point_id]

    def points_with_schedule(self) -> Iterable[Point]:
        """Return the points with a schedule of their own."""
        return [point for point in self.points.values() if point.answer.is_owned]


def make_point_id(problem: str, ram_bytes: int, deadline_s: float | None) -> str:
    """Return the id of a point: a hash of its problem, RAM and deadline."""
    text = f"{problem} {ram_bytes} {deadline_s!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]
