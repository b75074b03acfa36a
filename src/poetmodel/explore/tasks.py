"""Tasks of a worker: read a graph, find a first schedule, solve.

Each task is a function of a job (a dict from the server) and a `JobContext`. A worker verifies
every schedule that it returns; the metrics are those of the simulator.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from poetmodel.case.solving import LoadedCase, solve_case
from poetmodel.clock import limit_time
from poetmodel.device.ram import find_whole_step
from poetmodel.explore.answer import Proof
from poetmodel.explore.settings import problem_fingerprint
from poetmodel.graph import Graph, checkpoint_all_peak_bytes
from poetmodel.heuristics.greedy import construct, keep_all_if_within_budgets, page_everything
from poetmodel.planner import verify
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.report.charts import graph_chart
from poetmodel.schedule import Schedule, Simulation
from poetmodel.schedule.metrics import Display, simulated_metrics
from poetmodel.solver.outcome import is_gap_closed

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.explore.settings import Catalogue, ExplorerSettings
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.problem import Problem
    from poetmodel.solver import SolveProgress
    from poetmodel.solver.request import SearchOptions

MAX_CACHED_GRAPHS: Final = 12
"""Maximum number of graphs with costs in a worker's cache."""
READ_LIMIT_S: Final = 20.0
"""Time limit to read or build a graph with its costs and problem [s]."""
FIRST_SCHEDULE_S: Final = 0.25
"""Time limit of the greedy heuristic, which completes its first schedule in any case [s]."""
BOUND_EVERY_S: Final = 0.2
"""Minimum interval between reports of bounds without a new schedule [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A message of a worker to the server: JSON values, and bytes."""

    values: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class PreparedCase:
    """Settings with their case, and the step of a step file; a job sets RAM and deadline."""

    settings: ExplorerSettings
    loaded: LoadedCase
    step: LoweredStep | None


@dataclass(slots=True)
class JobContext:
    """A worker's connection to the server during one job."""

    catalogue: Catalogue
    send: Callable[[Frame], None]
    """Send a frame before the reply."""
    is_cancelled: Callable[[], bool]
    """Return whether the server has cancelled the job."""
    body: bytes = b""
    """Packed schedule of the job; empty without one."""


def load_job_case(job: dict[str, Any], context: JobContext) -> LoadedCase:
    """Return the case of a job's settings, with the RAM and the deadline of the job."""
    loaded = load_prepared_case(job, context).loaded
    limits = {"ram": job["ram_bytes"], "deadline": job["deadline_s"]}
    return replace(loaded, problem=replace(loaded.problem, **limits))


@lru_cache(maxsize=MAX_CACHED_GRAPHS)
def _load_prepared_case(catalogue: Catalogue, settings: ExplorerSettings) -> PreparedCase:
    """Read graph, costs and problem within `READ_LIMIT_S`."""
    with limit_time(READ_LIMIT_S):
        case = catalogue.case(settings)
        step = case.load_step()
        read_graph = None if step is None else lambda: step.graph
        return PreparedCase(settings, LoadedCase.read(case, read_graph=read_graph), step)


def load_prepared_case(job: dict[str, Any], context: JobContext) -> PreparedCase:
    """Return the settings of a job with their case; cached."""
    return _load_prepared_case(context.catalogue, job["settings"])


def pack_schedule(graph: Graph, schedule: Schedule) -> bytes:
    """Return a schedule as JSON compressed by zlib, without the identity of its graph."""
    entries = schedule.entries(has_state=bool(graph.state_tensors))
    return zlib.compress(json.dumps(entries, allow_nan=False).encode())


def unpack_schedule(body: bytes) -> Schedule:
    """Return the schedule that `pack_schedule` packed, without the identity of its graph."""
    return Schedule.from_entries(json.loads(zlib.decompress(body)), None)


# -- problems ----------------------------------------------------------------------------------


def prepare_problem(job: dict[str, Any], context: JobContext) -> Frame:
    """Task: read the graph of a job's settings; return facts about the problem for the page."""
    prepared = load_prepared_case(job, context)
    problem, graph = prepared.loaded.problem, prepared.loaded.problem.graph
    device, resident_bytes = problem.costs.device, problem.resident_bytes
    page_all_schedule = page_everything(problem)
    page_all_s = (
        None if page_all_schedule is None else verify(problem, page_all_schedule).simulation.time_s
    )
    pass_s = problem.pass_time_s
    max_deadline_s = max(2 * pass_s, page_all_s or 0.0)
    model_name = prepared.settings.shape.label(prepared.settings.model)
    settings, keep_all_bytes = prepared.settings, checkpoint_all_peak_bytes(graph)
    whole_step = None
    if device is not None and keep_all_bytes + graph.total_resident_bytes > device.ram_bytes:
        whole_step = find_whole_step(
            settings.model, settings.shape, device, paging=settings.limits.paging
        )
    facts = {
        "problem": problem_fingerprint(problem),
        "title": f"{model_name} on {prepared.settings.device}",
        "settings": prepared.settings.to_dict(),
        "floor_bytes": problem.floor.bytes + resident_bytes,
        "keep_all_bytes": keep_all_bytes + resident_bytes,
        "device_ram_bytes": None if device is None else device.ram_bytes,
        "resident_bytes": graph.total_resident_bytes,
        "whole_step": None if whole_step is None else asdict(whole_step),
        "baseline_energy_j": problem.baseline_energy_j,
        "objective": {"minimize": str(problem.minimize), "baseline": problem.objective.baseline},
        "deadline": {
            "min_s": pass_s,
            "default": None,
            "single_pass_s": pass_s,
            "max_s": max_deadline_s,
            "counts": str(problem.deadline_counts),
        },
        "graph": graph_chart(graph),
    }
    return Frame(values=facts)


def to_gzipped_json(values: Any) -> bytes:
    """Return values as gzipped JSON; equal JSON, also in the order of keys, gives equal bytes."""
    return gzip.compress(json.dumps(values, allow_nan=False).encode(), compresslevel=5, mtime=0)


# -- points ------------------------------------------------------------------------------------


def schedule_metrics(problem: Problem, simulation: Simulation) -> dict[str, Any]:
    """Return the metrics of a verified schedule for a point; ``value`` excludes the baseline."""
    return simulated_metrics(Display.EXPLORER, simulation) | {
        "value": problem.objective.overhead_of(simulation),
        "needs_bytes": simulation.peak_ram_bytes + problem.resident_bytes,
        "time_s": simulation.time_s,
    }


def find_first_schedule(job: dict[str, Any], context: JobContext) -> Frame:
    """Task: return a first schedule by heuristics with metrics; the frame is empty without one."""
    problem = load_job_case(job, context).problem
    if infeasibility_reason(problem) is not None:
        return Frame()
    first_valid: tuple[Schedule, Simulation] | None = None
    for heuristic in (keep_all_if_within_budgets, _construct_greedily, page_everything):
        candidate = heuristic(problem)
        verdict = None if candidate is None else verify(problem, candidate)
        if candidate is not None and verdict is not None and verdict.valid:
            first_valid = candidate, verdict.simulation
            break
    if first_valid is None:
        return Frame()
    schedule, simulation = first_valid
    return Frame(
        values={"metrics": schedule_metrics(problem, simulation)},
        body=pack_schedule(problem.graph, schedule),
    )


def _construct_greedily(problem: Problem) -> Schedule | None:
    return construct(problem, max_s=FIRST_SCHEDULE_S)


@dataclass(slots=True)
class _Progress:
    """Progress callback that sends each better schedule, and periodically the bound."""

    problem: Problem
    context: JobContext
    gap: float
    """Gap tolerance."""
    start_bound: float
    """Bound that was proven before the solve."""
    value: float | None = None
    """Minimized quantity of the best schedule above the baseline; None without one."""
    bound: float = 0.0
    """Proven lower bound on `value`."""
    last_sent_s: float = 0.0
    """Time of the last frame on the monotonic clock [s]."""

    def __call__(self, progress: SolveProgress) -> bool:
        """Raise `bound`; send a better valid schedule, or every `BOUND_EVERY_S` the bound alone.

        Return False, which stops the solve, if the gap is closed or the job is cancelled.
        """
        if self.context.is_cancelled():
            return False
        self.bound = max(self.bound, self.start_bound, progress.overhead_bound or 0.0)
        schedule = progress.schedule
        is_better = progress.overhead is not None and (
            self.value is None or progress.overhead < self.value
        )
        if schedule is not None and is_better:
            self._send_schedule(schedule, progress.seconds)
        elif time.monotonic() - self.last_sent_s > BOUND_EVERY_S:
            self._send({}, b"", progress.seconds)
        return not self.is_closed

    @property
    def is_closed(self) -> bool:
        """Whether the gap of the best schedule is within the tolerance; False without one."""
        return self.value is not None and is_gap_closed(
            self.problem, self.value, self.bound, self.gap
        )

    def _send_schedule(self, schedule: Schedule, seconds: float) -> None:
        verdict = verify(self.problem, schedule)
        if not verdict.valid:
            return
        metrics = schedule_metrics(self.problem, verdict.simulation)
        self.value = metrics["value"]
        self._send({"metrics": metrics}, pack_schedule(self.problem.graph, schedule), seconds)

    def _send(self, values: dict[str, Any], body: bytes, seconds: float) -> None:
        self.last_sent_s = time.monotonic()
        sent_values = {**values, "bound": self.bound, "seconds": seconds}
        self.context.send(Frame(values=sent_values, body=body))


def solve_point(job: dict[str, Any], context: JobContext) -> Frame:
    """Task: solve a point, from the schedule of the job if this is valid; return the result.

    Bounds and value exclude the baseline. The bound is at least the job's, at most the value.
    """
    loaded = load_job_case(job, context)
    problem = loaded.problem
    search: SearchOptions = job["search"]
    start = unpack_schedule(context.body) if context.body else None
    if start is not None and not verify(problem, start).valid:
        start = None
    progress = _Progress(problem, context, search.gap, job["answer"].bound)
    result = solve_case(loaded, search.start(progress), start=start).result
    status = result.status
    bound = progress.start_bound
    if result.simulation is not None:
        overhead = problem.objective.overhead_of(result.simulation)
        bound = max(bound, result.proven_bound - problem.objective.baseline)
        bound = min(bound, overhead)
        if is_gap_closed(problem, overhead, bound, search.gap):
            status = "optimal"  # type: ignore[assignment]
    proof = Proof(
        status=str(status),
        termination=str(result.termination),
        reason=result.reason,
        build_s=result.build_s,
        solve_s=result.solve_s,
        versions=dict(result.versions),
    )
    reply = {"bound": bound, "proof": proof}
    if result.schedule is None or result.simulation is None:
        return Frame(values=reply)
    metrics = schedule_metrics(problem, result.simulation)
    body = pack_schedule(problem.graph, result.schedule)
    return Frame(values=reply | {"metrics": metrics}, body=body)
