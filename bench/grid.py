"""The grid: a fixed registry of instances on which times and gaps of solves are measured.

An instance is one problem with a solving method and a time limit. No instance is selected by its
result: budgets below the minimum RAM are included, proved infeasible and counted separately.
"""

from __future__ import annotations

import random
import resource
import time
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import poetmodel as pm
from harness import (
    RecordedRun,
    Study,
    describe_result,
    make_record,
    measure_peak_memory_bytes,
    open_records,
    warm_up,
)
from poetmodel.device import Costs, Device
from poetmodel.errors import PoetModelError
from poetmodel.graph import Graph, floor
from poetmodel.graph.catalogue import load_model
from poetmodel.problem import Problem
from poetmodel.sweeps.measurement import FAILED
from poetmodel.sweeps.tables import model_gap
from published import bert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyomo.environ as pyo

    from poetmodel import SolveProgress, SolveResult
    from poetmodel.sweeps.measurement import Record

KIND: Final = "cell"
"""Kind of the records."""
LIMIT_S, PAPER_LIMIT_S, SMOKE_LIMIT_S = 60.0, 120.0, 5.0
"""Wall time limits, model construction included: default, for ``paper``, for smoke runs [s]."""
GAP: Final = 1e-4
"""Gap of the overhead at which a solve stops."""
AGAIN_GAP: Final = 0.01
"""Gap above which ``--set again=FILE`` solves an instance again."""
RECORDED_RATIO: Final = 0.9
"""Ratio to the last recorded gap below which a new gap is recorded."""
FLOOR: Final = "floor+2%"
"""Name of the budget of 1.02 times the minimum RAM."""
ORDER_SEED: Final = 20
"""Seed of the order of instances."""

TRACED: Final = Path(__file__).resolve().parent / "traced"
"""Folder of graphs captured from PyTorch (``*.graph.json``) and their costs (``*.profile.csv``)."""
PROFILE: Final = "profile"
"""Device name that stands for the costs measured when a graph was captured."""
_TRACED_PREFIX: Final = "traced/"
_BERT_PREFIX: Final = "paper/bert-"
"""Prefixes of model names."""


METHODS: Final[dict[str, dict[str, str]]] = {
    "default": {},
    "compact": {"formulation": "compact"},
    "paper": {"formulation": "paper"},
    "paper, Gurobi": {"formulation": "paper", "backend": "gurobi"},
}
"""Options of `solve` for each method, by its name in tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance(RecordedRun):
    """One problem with a solving method, for one goal: a group of instances."""

    goal: int
    """Number of the goal, 1 to 7."""
    model: str
    """A shipped model, ``paper/bert-N`` of N blocks, or ``traced/NAME`` of a file in `TRACED`."""
    device: str
    """A shipped device, or `PROFILE`."""
    ram: str
    """RAM budget: a percentage of the keep-all peak, or `FLOOR`."""
    deadline: str | None = None
    """Limit of compute plus transfer time, as a percentage of the pass time."""
    method: str = "default"
    """One of `METHODS`."""
    limit_s: float = LIMIT_S
    """Wall time limit, model construction included [s]."""
    seed: int = 0
    """Seed of the solver."""

    @property
    def name(self) -> str:
        """Name of the instance in records."""
        deadline = f"serial {self.deadline}" if self.deadline else "no deadline"
        parts = (self.goal, self.model, self.device, self.ram, deadline, self.method, self.seed)
        return " | ".join(map(str, parts))

    def problem(self) -> Problem:
        """Build the problem."""
        graph = load_graph(self.model)
        ram = int(floor(graph).bytes * 1.02) if self.ram == FLOOR else self.ram
        return Problem(
            graph,
            load_costs(self.model, self.device),
            ram=ram,
            deadline=self.deadline,
            deadline_counts="serial" if self.deadline else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRun(RecordedRun):
    """An instance with further fields, such as solving options."""

    instance: Instance

    @classmethod
    def from_fields(cls, cell: dict[str, Any]) -> Self:
        """Create a run from one mapping with its fields and those of its instance."""
        instance_fields = {field.name for field in fields(Instance)}
        instance = Instance(**{name: cell[name] for name in instance_fields & cell.keys()})
        return cls(
            instance=instance, **{name: cell[name] for name in cell.keys() - instance_fields}
        )

    def to_dict(self) -> dict[str, Any]:
        """Return one mapping with the run's fields and those of its instance."""
        run_fields = asdict(self)
        return {**run_fields.pop("instance"), **run_fields}

    def with_limit(self, limit_s: float) -> Self:
        """Return the run with another limit [s]."""
        return replace(self, instance=self.instance.with_limit(limit_s))


@cache
def load_graph(model: str) -> Graph:
    """Read or build the graph of a model; cached."""
    if model.startswith(_TRACED_PREFIX):
        return Graph.load(TRACED / f"{model.removeprefix(_TRACED_PREFIX)}.graph.json")
    if model.startswith(_BERT_PREFIX):
        return bert(blocks=int(model.removeprefix(_BERT_PREFIX)))
    return load_model(model)


def load_costs(model: str, device: str) -> Costs:
    """Return the costs of a model's graph: estimated for a device, or measured for `PROFILE`."""
    if device == PROFILE:
        return Costs.load(TRACED / f"{model.removeprefix(_TRACED_PREFIX)}.profile.csv")
    return Costs.estimate(load_graph(model), Device.load(device))


# -- the goals -------------------------------------------------------------------------------------

_SHARED: Final = ("vgg16-cifar", "vgg16", "resnet18-cifar", "resnet18", "resnet50")
_PUBLISHED: Final = (*_SHARED, "transformer", "bert")
_PUBLISHED_DEVICES: Final = ("paper-m0", "paper-m4", "paper-a72")
_PUBLISHED_BUDGETS: Final = (FLOOR, "15%", *(f"{share}0%" for share in range(2, 10)))
_DEADLINES: Final = (None, "105%", "115%", "130%")

_ZOO: Final = (*_SHARED, "mobilenetv2", "bert-base")
_DEVICES: Final = ("mkr1000", "nrf52840", "rpi4b", "jetson-tx2")

_SCALE_LIMITS_S: Final = {24: 60.0, 48: 180.0, 96: 600.0}
"""Time limits by the number of blocks [s]."""

_COMPARED_BUDGETS: Final = {
    "paper/linear": ("50%", "70%", "90%"),
    "paper/transformer": (FLOOR, "90%"),
    "paper/vgg16-cifar": ("50%", "70%", "90%"),
    "paper/resnet18-cifar": ("50%", "70%", "90%"),
    "paper/bert": ("50%",),
}
_FOR_GUROBI: Final = ("paper/transformer",)
"""Graphs on which ``paper`` is also solved with Gurobi, whose bundled licence is limited to 2,000
columns and rows. The next larger graph, ``paper/linear``, has 2,680 columns."""


def _published_instances() -> Iterator[Instance]:
    axes = product(_PUBLISHED, _PUBLISHED_DEVICES, _PUBLISHED_BUDGETS, _DEADLINES)
    for model, device, ram, deadline in axes:
        yield Instance(goal=1, model=f"paper/{model}", device=device, ram=ram, deadline=deadline)


def _zoo_instances() -> Iterator[Instance]:
    for model, device, ram in product(_ZOO, _DEVICES, ("20%", "35%", "50%", "70%")):
        yield Instance(goal=2, model=model, device=device, ram=ram)


def _traced_instances() -> Iterator[Instance]:
    for path in sorted(TRACED.glob("*.graph.json")):
        model = _TRACED_PREFIX + path.name.removesuffix(".graph.json")
        axes = product((PROFILE, "rpi4b"), ("70%", "50%", "35%", "25%"), (None, "150%"))
        for device, ram, deadline in axes:
            yield Instance(goal=3, model=model, device=device, ram=ram, deadline=deadline)


def _captured_instances(folder: str, goal: int, limit_s: float) -> Iterator[Instance]:
    for path in sorted((TRACED / folder).glob("*.graph.json")):
        model = f"{_TRACED_PREFIX}{folder}/{path.name.removesuffix('.graph.json')}"
        for ram in ("60%", "40%", "25%", FLOOR):
            yield Instance(goal=goal, model=model, device=PROFILE, ram=ram, limit_s=limit_s)


def _scale_instances() -> Iterator[Instance]:
    for blocks, limit_s in _SCALE_LIMITS_S.items():
        model = f"{_BERT_PREFIX}{blocks}"
        for device, ram in product(("paper-m4", "paper-a72"), ("20%", "40%")):
            yield Instance(goal=4, model=model, device=device, ram=ram, limit_s=limit_s)


def _comparison_instances() -> Iterator[Instance]:
    for model, budgets in _COMPARED_BUDGETS.items():
        for device, ram in product(("paper-m4", "paper-a72"), budgets):
            instance = Instance(goal=5, model=model, device=device, ram=ram)
            yield instance
            yield replace(instance, method="compact")
            yield replace(instance, method="paper", limit_s=PAPER_LIMIT_S)
            if model in _FOR_GUROBI:
                yield replace(instance, method="paper, Gurobi", limit_s=PAPER_LIMIT_S)


_GOALS: Final[dict[int, Callable[[], Iterator[Instance]]]] = {
    1: _published_instances,
    2: _zoo_instances,
    3: _traced_instances,
    4: _scale_instances,
    5: _comparison_instances,
    6: partial(_captured_instances, "models", 6, LIMIT_S),
    7: partial(_captured_instances, "whole-steps", 7, 2 * LIMIT_S),
}
GOALS: Final = tuple(_GOALS)
"""Numbers of all goals."""
CAPTURED: Final = (6, 7)
"""Goals of captured models, without and with an optimizer, which have separate records."""


def instances(goals: Sequence[int] = GOALS) -> tuple[Instance, ...]:
    """Return the instances of some goals, in the registry's order."""
    return tuple(instance for goal in goals for instance in _GOALS[goal]())


def mix_instances(chosen: Sequence[Instance]) -> tuple[Instance, ...]:
    """Return instances in execution order: mixed, equal for equal instances.

    The instances of each goal are shuffled by a fixed seed and spread evenly, so that an
    interrupted series has about the same fraction of every goal.
    """
    positioned: list[tuple[float, int, Instance]] = []
    for goal in sorted({instance.goal for instance in chosen}):
        of_goal = [instance for instance in chosen if instance.goal == goal]
        random.Random(ORDER_SEED + goal).shuffle(of_goal)  # noqa: S311 (no secret)
        positioned.extend(
            ((i + 0.5) / len(of_goal), goal, instance) for i, instance in enumerate(of_goal)
        )
    return tuple(instance for _, _, instance in sorted(positioned, key=lambda entry: entry[:2]))


def make_smoke_instances() -> tuple[Instance, ...]:
    """Return an instance on the smallest graph for each goal, method and deadline."""
    traced = Instance(goal=3, model="", device="", ram="", deadline="150%")
    candidates = (*instances((1, 2, 4, 5, *CAPTURED)), traced)
    tiny: dict[str, Any] = {"model": "paper/linear", "device": "paper-m4", "limit_s": SMOKE_LIMIT_S}
    smallest = (
        replace(instance, **tiny, ram="70%" if instance.goal > 1 else FLOOR)
        for instance in candidates
    )
    return tuple(dict.fromkeys(smallest))


# -- one instance ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Course:
    """Progress of a solve: the time of its first schedule, and the gap over time."""

    first_schedule_s: float | None = None
    """Time of the first schedule, model construction included [s]."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Times [s] and gaps reached; each is 0, or below `RECORDED_RATIO` times the previous gap."""

    def record_progress(self, progress: SolveProgress) -> None:
        """Record the time of the first schedule and the gap; the progress callback of the solve."""
        if progress.value is None:
            return
        if self.first_schedule_s is None:
            self.first_schedule_s = progress.seconds
        self.record_gap(progress.seconds, progress.gap)

    def record_gap(self, seconds: float, gap: float | None) -> None:
        """Append a gap if it is the first, 0, or below `RECORDED_RATIO` times the last.

        None and gaps after 0 are ignored.
        """
        if gap is None or (self.gaps and gap >= RECORDED_RATIO * self.gaps[-1][1] and gap > 0.0):
            return
        if self.gaps and self.gaps[-1][1] == 0.0:
            return
        self.gaps.append((round(seconds, 3), float(f"{gap:.4g}")))


def measure(
    fields: dict[str, Any],
    _start: None = None,
    *,
    threads: int = 1,
    workers: int = 1,
    gap: float = GAP,
    stated: Callable[[Problem], Problem | pyo.ConcreteModel] = lambda problem: problem,
) -> Record:
    """Solve an instance; return its record. Loading the graph is not timed.

    ``seconds`` is wall time for stating, building, solving and verifying; ``stated_s`` is the part
    before `solve` is called. If the package refuses the instance, ``status`` is `FAILED` and
    ``reason`` contains the message. `stated` returns the problem or model to solve for the
    instance's problem.
    """
    instance = Instance(**fields)
    graph, method = load_graph(instance.model), METHODS[instance.method]
    course = Course()
    begin_cpu_s, begin_s, stated_s = time.process_time(), time.perf_counter(), None
    try:
        problem = stated(instance.problem())
        stated_s = time.perf_counter() - begin_s
        result = pm.solve(
            problem,
            formulation=method.get("formulation"),
            backend=method.get("backend", "highs"),
            time_limit=instance.limit_s,
            gap=gap,
            threads=threads,
            seed=instance.seed,
            on_progress=course.record_progress,
        )
    except PoetModelError as error:
        seconds = time.perf_counter() - begin_s
        facts: dict[str, Any] = {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
    else:
        seconds = time.perf_counter() - begin_s
        facts = _result_record(result, course, seconds)
    return make_record(
        KIND,
        instance.name,
        cell=fields,
        workers=workers,
        threads=threads,
        seconds=seconds,
        stated_s=stated_s,
        cpu_s=time.process_time() - begin_cpu_s,
        peak_memory_bytes=measure_peak_memory_bytes(),
        worker_memory_bytes=measure_peak_memory_bytes(resource.RUSAGE_CHILDREN),
        graph_nodes=len(graph.nodes),
        graph_tensors=len(graph.tensors),
        floor_bytes=floor(graph).bytes,
        **facts,
    )


def _result_record(result: SolveResult, course: Course, seconds: float) -> dict[str, Any]:
    gap = model_gap(result.statistics) if result.formulation == "paper" else result.gap
    if result.schedule is not None:
        if course.first_schedule_s is None:
            course.first_schedule_s = seconds
        course.record_gap(seconds, gap)
    return describe_result(result) | {
        "gap": gap,
        "first_schedule_s": course.first_schedule_s,
        "gaps": course.gaps,
    }


def measure_warm(fields: dict[str, Any], start: Mapping[str, Any]) -> Record:
    """Load the solver by a small solve, then call `measure` with the keyword arguments `start`."""
    warm_up()
    return measure(fields, None, **start)


# -- the study -------------------------------------------------------------------------------------


def is_open(record: Record) -> bool:
    """Return whether the default method ended with a gap above `AGAIN_GAP`, or without a result.

    Results are schedules and proofs of infeasibility.
    """
    gap = record.get("gap")
    is_unsolved = record["status"] == "unknown" if gap is None else gap > AGAIN_GAP
    return bool(record["cell"]["method"] == "default" and is_unsolved)


def runs(
    goals: tuple[int, ...] = (), again: str | None = None, sample: int | None = None
) -> tuple[Instance, ...]:
    """Return instances in execution order: of some goals, or those without a proof in a file.

    Parameters
    ----------
    goals : tuple of int
        By default all goals. Without `again` those of captured models are left out, because these
        are solved with two threads.
    again : str, optional
        A file of records; select the instances whose record satisfies `is_open`.
    sample : int, optional
        Number of instances to return, the first of the mixed order.
    """
    default_goals = GOALS if again else tuple(goal for goal in GOALS if goal not in CAPTURED)
    chosen = mix_instances(instances(goals or default_goals))
    if again:
        open_names = {
            record["name"] for record in open_records(Path(again)).records() if is_open(record)
        }
        chosen = tuple(instance for instance in chosen if instance.name in open_names)
    return chosen[:sample]


STUDY: Final = Study(
    name="grid",
    kind=KIND,
    runs=runs,
    smoke_runs=make_smoke_instances,
    measure=measure_warm,
    settings={"threads": 1},
    start_of=lambda _run, _store, settings: {key: settings[key] for key in ("threads", "workers")},
)
