"""Tasks of a worker: read a graph, make a first schedule, solve, draw, explain, export.

Each task is a function of a job, plain values that the server sends, and a `Talk` with the server.
Every schedule that leaves a worker was verified here, and its figures come from the simulator.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from poetmodel.clock import time_limit
from poetmodel.device.ram import find_whole_step
from poetmodel.explore.choice import Catalogue, ExplorerChoice, Source, fingerprint
from poetmodel.graph import Graph, checkpoint_all_peak_bytes
from poetmodel.heuristics.greedy import construct, page_everything, trivial
from poetmodel.planner import verify
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.report.charts import graph_chart
from poetmodel.schedule import Schedule, Simulation
from poetmodel.solver.facade import solve as solve_problem
from poetmodel.solver.outcome import is_closed

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.problem import Problem
    from poetmodel.solver import SolveProgress

KEPT_GRAPHS: Final = 12
"""Graphs with their costs that a worker keeps."""
READ_S: Final = 20.0
"""Most time to read or make a graph [s]."""
FIRST_S: Final = 0.25
"""Most time to make a better first schedule than one that pages everything [s]."""
BOUND_EVERY_S: Final = 0.2
"""How often bounds alone are told [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A message: plain values, and bytes beside them."""

    values: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class StatedProblem:
    """A choice as a problem, whose limits change, and where its graph comes from."""

    choice: ExplorerChoice
    source: Source
    problem: Problem


@dataclass(slots=True)
class Talk:
    """A worker's side of the talk about one job."""

    catalogue: Catalogue
    tell: Callable[[Frame], None]
    """Sends something before the reply."""
    cancelled: Callable[[], bool]
    """Whether the server wants nothing of this job any more."""
    body: bytes = b""
    """Attachments of the job."""


def read_problem(job: dict[str, Any], talk: Talk) -> Problem:
    """Return the problem of a job: a choice with its RAM and its deadline."""
    known = read_choice(job, talk)
    limits = {"ram": job["ram_bytes"], "deadline": job["deadline_s"]}
    return replace(known.problem, **limits)


@lru_cache(maxsize=KEPT_GRAPHS)
def _read(catalogue: str, choice: str) -> StatedProblem:
    known = Catalogue.from_json(catalogue)
    wanted = ExplorerChoice.model_validate_json(choice)
    with time_limit(READ_S):
        source = known.source(wanted)
        costs = known.costs(source.graph, wanted)
        problem = known.problem(wanted, source.graph, costs)
    return StatedProblem(wanted, source, problem)


def read_choice(job: dict[str, Any], talk: Talk) -> StatedProblem:
    """Return the choice of a job as a problem; the last few are kept."""
    return _read(talk.catalogue.to_json(), json.dumps(job["choice"]))


def pack_schedule(graph: Graph, schedule: Schedule) -> bytes:
    """Return a schedule as compressed JSON, without its graph."""
    entries = schedule.entries(has_state=bool(graph.state_tensors))
    return zlib.compress(json.dumps(entries, allow_nan=False).encode())


def unpack_schedule(body: bytes) -> Schedule:
    """Return a packed schedule."""
    return Schedule.from_entries(json.loads(zlib.decompress(body)), None)


# -- a problem ---------------------------------------------------------------------------------


def prepare(job: dict[str, Any], talk: Talk) -> Frame:
    """Read the graph of a choice; reply with what a page needs of it, as JSON."""
    known = read_choice(job, talk)
    problem, graph = known.problem, known.source.graph
    device, resident = problem.costs.device, problem.resident_bytes
    paging = page_everything(problem)
    paged_s = None if paging is None else verify(problem, paging).simulation.time_s
    pass_s = problem.pass_time_s
    most_s = max(2 * pass_s, paged_s or 0.0)
    name = known.choice.shape.label(known.choice.model)
    choice, keep_all = known.choice, checkpoint_all_peak_bytes(graph)
    whole = None
    if device is not None and keep_all + graph.total_resident_bytes > device.ram_bytes:
        whole = find_whole_step(choice.model, choice.shape, device, paging=choice.paging)
    facts = {
        "problem": fingerprint(problem),
        "title": f"{name} on {known.choice.device}",
        "choice": known.choice.model_dump(),
        "floor_bytes": problem.floor.bytes + resident,
        "keep_all_bytes": keep_all + resident,
        "device_ram_bytes": None if device is None else device.ram_bytes,
        "resident_bytes": graph.total_resident_bytes,
        "whole_step": None if whole is None else asdict(whole),
        "baseline_energy_j": problem.baseline_energy_j,
        "objective": {"minimize": str(problem.minimize), "baseline": problem.objective.baseline},
        "deadline": {
            "least_s": pass_s,
            "default": None,
            "single_pass_s": pass_s,
            "most_s": most_s,
            "counts": str(problem.deadline_counts),
        },
    }
    drawn = {**facts, "graph": graph_chart(graph)}
    return Frame(values=facts, body=json.dumps(drawn, allow_nan=False).encode())


def gzipped(values: Any) -> bytes:
    """Return plain values as gzipped JSON, the same bytes for the same values."""
    return gzip.compress(json.dumps(values, allow_nan=False).encode(), compresslevel=5, mtime=0)


# -- a point -----------------------------------------------------------------------------------


def figures(problem: Problem, simulation: Simulation) -> dict[str, Any]:
    """Return the figures of a verified schedule that a point shows."""
    return {
        "value": problem.objective.overhead_of(simulation),
        "energy_j": simulation.energy_j,
        "overhead_j": simulation.overhead_j,
        "peak_ram_bytes": simulation.peak_ram_bytes,
        "needs_bytes": simulation.peak_ram_bytes + problem.resident_bytes,
        "makespan_s": simulation.makespan_s,
        "time_s": simulation.time_s,
    }


def begin(job: dict[str, Any], talk: Talk) -> Frame:
    """Make a first schedule quickly; reply with it, or with what forbids any."""
    problem = read_problem(job, talk)
    reason = infeasibility_reason(problem)
    if reason is not None:
        return Frame(values={"obstacle": reason})
    best: tuple[Schedule, Simulation] | None = None
    for make in (trivial, _greedy, page_everything):
        answer = make(problem)
        verdict = None if answer is None else verify(problem, answer)
        if answer is not None and verdict is not None and verdict.valid:
            best = answer, verdict.simulation
            break
    if best is None:
        return Frame()
    schedule, simulation = best
    return Frame(
        values={"found": figures(problem, simulation)},
        body=pack_schedule(problem.graph, schedule),
    )


def _greedy(problem: Problem) -> Schedule | None:
    return construct(problem, most_s=FIRST_S)


@dataclass(slots=True)
class _Progress:
    """Tells the server each better schedule and, now and then, the bound."""

    problem: Problem
    talk: Talk
    gap: float
    known: float
    """A bound that is proved already."""
    value: float | None = None
    bound: float = 0.0
    told_s: float = 0.0
    seen: set[int] = field(default_factory=set)

    def __call__(self, progress: SolveProgress) -> bool:
        if self.talk.cancelled():
            return False
        self.bound = max(self.bound, self.known, progress.overhead_bound or 0.0)
        schedule = progress.schedule
        better = progress.overhead is not None and (
            self.value is None or progress.overhead < self.value
        )
        if schedule is not None and better:
            self._tell_schedule(schedule, progress.seconds)
        elif time.monotonic() - self.told_s > BOUND_EVERY_S:
            self._tell({}, b"", progress.seconds)
        return not self.closed

    @property
    def closed(self) -> bool:
        """Whether the best schedule is within the gap of what is proved."""
        return self.value is not None and is_closed(self.problem, self.value, self.bound, self.gap)

    def _tell_schedule(self, schedule: Schedule, seconds: float) -> None:
        verdict = verify(self.problem, schedule)
        if not verdict.valid:
            return
        known = figures(self.problem, verdict.simulation)
        self.value = known["value"]
        self._tell({"found": known}, pack_schedule(self.problem.graph, schedule), seconds)

    def _tell(self, values: dict[str, Any], body: bytes, seconds: float) -> None:
        self.told_s = time.monotonic()
        told = {**values, "bound": self.bound, "seconds": seconds}
        self.talk.tell(Frame(values=told, body=body))


def solve(job: dict[str, Any], talk: Talk) -> Frame:
    """Solve a point, from a schedule if one came along; reply with how it ended."""
    problem = read_problem(job, talk)
    search = job["search"]
    start = unpack_schedule(talk.body) if talk.body else None
    if start is not None and not verify(problem, start).valid:
        start = None
    watch = _Progress(problem, talk, search["gap"], job["bound"])
    result = solve_problem(problem, start=start, on_progress=watch, **search)
    proved = result.status
    bound = watch.known
    if result.simulation is not None:
        measured = problem.objective.overhead_of(result.simulation)
        bound = max(bound, result.proven_bound - problem.objective.baseline)
        bound = min(bound, measured)
        if is_closed(problem, measured, bound, search["gap"]):
            proved = "optimal"  # type: ignore[assignment]
    reply = {
        "status": str(proved),
        "termination": str(result.termination),
        "reason": result.reason,
        "bound": bound,
        "build_s": result.build_s,
        "solve_s": result.solve_s,
        "versions": dict(result.versions),
    }
    if result.schedule is None or result.simulation is None:
        return Frame(values=reply)
    known = figures(problem, result.simulation)
    body = pack_schedule(problem.graph, result.schedule)
    return Frame(values=reply | {"found": known}, body=body)
