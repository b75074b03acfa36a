"""Comparison of all methods with the optimum on the same problems.

``--set own=FILE.py:FUNCTION --resume`` adds the runs of a user-defined method to a file of records.

The published graphs of Moccasin are not shipped, because their licence differs. They are included
if the environment variable ``MOCCASIN_DATA`` names the folder ``data`` of a checkout of
github.com/haoming-codes/moccasin.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grid
import poetmodel as pm
from grid import GAP, SMOKE_LIMIT_S
from harness import (
    ATTEMPTS,
    GRACE_S,
    PRELOADED,
    RecordedRun,
    Study,
    make_record,
    measure_core_fraction,
    measure_with_cpu_limit,
    warm_up,
)
from layered import make_random_layered
from poetmodel.baselines import METHODS, StateHomes, method, recompute_once
from poetmodel.baselines import run as run_method
from poetmodel.baselines.dtr import Runtime
from poetmodel.baselines.homes import remove_state, use_homes
from poetmodel.clock import limit_time
from poetmodel.device import Costs, Device, StorageMode
from poetmodel.errors import (
    InputError,
    MethodNotApplicableError,
    PoetModelError,
    TimeLimitError,
    join_names,
)
from poetmodel.graph import Phase, checkpoint_all_peak_bytes
from poetmodel.graph.zoo import MODELS
from poetmodel.heuristics.greedy import construct
from poetmodel.plan import Plan, check_plan
from poetmodel.problem import Quantity
from poetmodel.result import Status, Termination
from poetmodel.schedule import simulate
from poetmodel.schedule.instructions import Instruction, Op
from poetmodel.sweeps.measurement import FAILED, NOT_APPLICABLE
from poetmodel.sweeps.tables import model_gap

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule
    from poetmodel.sweeps.measurement import Record

KIND: Final = "compared"
"""Kind of the records."""
PUBLISHED, ZOO, CAPTURED, STEPS, DMA, TIME, LAYERED = KINDS = (
    "published",
    "zoo",
    "captured",
    "whole steps",
    "dma",
    "time",
    "layered",
)
"""Kinds of problems; the last has a separate table."""
MLPERF_TINY: Final = ("ds-cnn", "resnet8", "autoencoder", "mobilenetv1-vww")
"""Networks of the whole-step problems."""
PAGED, MAPPED = "nrf52840", "stm32f746"
"""A board with paged storage (SD card) and one with memory-mapped storage (flash)."""
LEAST_RAM: Final = "least"
"""Prefix of budgets between the minimum RAM and keep-all."""
MAIN: Final = KINDS[:-1]
"""Kinds of the main table."""
OPTIMAL: Final = "optimal"
PAPER: Final = "paper"
"""The published MILP, solved unchanged by the solver of the optimum."""
LIMIT_S, LAYERED_LIMIT_S = 15.0, 60.0
"""CPU time limit of a run, for all methods; that of layered graphs [s]."""
ORDER_SEED: Final = 29
"""Seed of the order of problems."""

# -- methods that are not in the registry ----------------------------------------------------------

GREEDY, SELECTIVE = "greedy", "selective"


@pm.method(GREEDY, summary="the greedy start of this package's search", source="this package")
def greedy(problem: Problem) -> Schedule:
    """Return the greedy schedule of the search; raise `MethodNotApplicableError` if none."""
    schedule = construct(problem)
    if schedule is None:
        raise MethodNotApplicableError("it finds no schedule")
    return schedule


_HEAVY_OPERATORS: Final = (
    "conv",
    "linear",
    "mm",
    "matmul",
    "qkv",
    "attention_scores",
    "dot_product",
)
"""Name fragments of the operators whose outputs selective checkpointing saves."""


@pm.method(
    SELECTIVE,
    summary="save the outputs of matrix products and convolutions, recompute the rest",
    source="selective activation checkpointing by operator, torchtitan, 2024",
)
@use_homes(StateHomes.RAM, forward_only=True)
def selective(problem: Problem) -> Schedule:
    """Return the fastest schedule that fits and saves outputs of heavy operators only.

    The outputs of all of them are saved, or of every second, third or fourth one. Raises
    `MethodNotApplicableError` if none of these schedules fits.
    """
    graph = problem.graph
    heavy = [
        i
        for i, k in enumerate(graph.node_of)
        if graph.nodes[k].phase == Phase.FORWARD
        and any(operator in graph.nodes[k].op for operator in _HEAVY_OPERATORS)
    ]
    fitting: list[tuple[float, Schedule]] = []
    for stride in range(1, 5):
        schedule = recompute_once(graph, heavy[::stride])
        simulation = simulate(graph, problem.costs, schedule)
        if simulation.peak_ram_bytes <= problem.usable_ram_bytes:
            fitting.append((simulation.compute_s or 0.0, schedule))
    if not fitting:
        raise MethodNotApplicableError("its saved tensors need more than the budget")
    return min(fitting, key=lambda pair: pair[0])[1]


VARIANTS: Final = ("capuchin:published", "dtr:eq", "dtr:msps", "dtr:liveness")
"""Variants of methods: Capuchin with its published rule alone, the best alternative scores of DTR's
paper, and DTR to which the inputs of each stage are known in advance."""
OWN_ORDER: Final = "dtr, own order"
"""DTR as the program of its runtime; a schedule in stages may need more RAM."""


def execute_dtr(problem: Problem) -> dict[str, Any]:
    """Run DTR's runtime and check its program as a plan; return the record's fields.

    Raises `MethodNotApplicableError` if the program violates a rule of plans or the budget.
    """
    state = problem.graph.state_tensors
    plain_problem = remove_state(problem, state) if state else problem
    runtime = Runtime(plain_problem, "full", plain_problem.usable_ram_bytes)
    runtime.run()
    final_frees = (Instruction(Op.FREE, i) for i in sorted(runtime.ram))
    plan = Plan(program=(*runtime.program, *final_frees), mode=StorageMode.BLOCKING)
    check = check_plan(
        plain_problem.graph,
        plain_problem.costs,
        plan,
        ram_budget_bytes=plain_problem.usable_ram_bytes,
    )
    if check.violations:
        raise MethodNotApplicableError(check.violations[0])
    energy_j, time_s = check.energy_j or 0.0, check.makespan_s or 0.0
    objective_value = time_s if problem.minimize == Quantity.TIME else energy_j
    return {
        "status": str(Status.FEASIBLE),
        "overhead": max(0.0, objective_value - problem.objective.baseline),
        "overhead_j": max(0.0, energy_j - problem.baseline_energy_j),
        "peak_ram_bytes": problem.usable_ram_bytes
        - plain_problem.usable_ram_bytes
        + check.peak_ram_bytes,
    }


EQUAL_METHOD: Final = "recompute-only"
"""A method that is left out: it is equal to ``checkmate``, because energy is proportional to time
in all problems here."""
STATE_METHODS: Final = ("resident", "zero-offload")
"""Methods that differ from all other methods only on graphs with state."""
WITHOUT_BACKWARD: Final = (OPTIMAL, GREEDY, "dtr", "capuchin", "chen-sqrt")
"""Methods for graphs without a backward pass."""


def list_methods(kind: str) -> tuple[str, ...]:
    """Return the methods for a kind of problems, the optimum first."""
    if kind == LAYERED:
        return WITHOUT_BACKWARD
    omitted = (EQUAL_METHOD, *(() if kind == STEPS else STATE_METHODS))
    shipped = (name for name in METHODS if name not in omitted)
    published_program = (PAPER,) if kind == PUBLISHED else ()
    return (*shipped, GREEDY, SELECTIVE, *VARIANTS, OWN_ORDER, *published_program)


# -- problems --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun(RecordedRun):
    """One problem, scheduled by one method."""

    kind: str
    """Kind of the problem, one of `KINDS`."""
    model: str
    """A model of the grid, a network of the zoo, ``NODES, SEED`` of a layered graph, or
    the name of a file of Moccasin."""
    device: str
    """A shipped device, or `grid.PROFILE` for measured costs."""
    ram: str
    """RAM budget in the notation of the grid or of `build_step_problem`."""
    method: str = OPTIMAL
    """Name of the method."""
    limit_s: float = LIMIT_S
    """CPU time limit, including the construction of the model [s]."""
    seed: int = 0
    """Seed of the solver."""

    @property
    def name(self) -> str:
        """Name of the run in records."""
        return " | ".join((self.kind, self.model, self.device, self.ram, self.method))

    def problem(self) -> Problem:
        """Build the problem."""
        if self.kind == STEPS:
            return build_step_problem(self.model, self.device, self.ram)
        if self.kind == LAYERED:
            graph = load_layered_graph(self.model)
            costs = Costs.estimate(graph, Device.load(self.device))
            return pm.Problem(graph, costs, ram=self.ram, paging=False)
        problem = grid.Instance(
            goal=0, model=self.model, device=self.device, ram=self.ram
        ).problem()
        return replace(problem, minimize=Quantity.TIME) if self.kind == TIME else problem


@cache
def build_step_graph(network: str) -> Graph:
    """Build a whole step with plain SGD, in place and in tiles of 32 KiB; cached."""
    return MODELS[network](state="sgd", in_place=True, tile="32KiB")


def build_step_problem(network: str, device_name: str, ram: str) -> Problem:
    """Build the problem of a whole step.

    The budget ``least+30%`` is 30 % of the way from the minimum RAM to the keep-all peak.
    """
    graph, device = build_step_graph(network), Device.load(device_name)
    problem = pm.Problem(graph, Costs.estimate(graph, device), ram="100%")
    prefix, _, percentage = ram.partition("+")
    if prefix != LEAST_RAM:
        return replace(problem, ram=ram)
    min_bytes, keep_all_bytes = problem.floor.bytes, checkpoint_all_peak_bytes(graph)
    return replace(
        problem, ram=min_bytes + (keep_all_bytes - min_bytes) * int(percentage.rstrip("%")) // 100
    )


DATA_VARIABLE: Final = "MOCCASIN_DATA"
"""Environment variable: the folder of Moccasin's graphs."""
_FILE_PATTERN: Final = "random_layered_n*.json"
NUMBER_SEPARATOR: Final = ", "
"""Separator of the numbers in the model name of a layered graph."""


@cache
def load_layered_graph(model: str) -> Graph:
    """Generate a random layered graph, or read a graph of Moccasin, by its model name; cached."""
    if NUMBER_SEPARATOR in model:
        return make_random_layered(*map(int, model.split(NUMBER_SEPARATOR)))
    path = Path(os.environ[DATA_VARIABLE]) / f"{model}.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    inputs: dict[int, list[int]] = {node["name"]: [] for node in content["nodes"]}
    for edge in content["links"]:
        inputs[edge["1"]].append(edge["0"])
    nodes = {node["name"]: node for node in content["nodes"]}
    order = content["graph"]["order"]
    return pm.Graph(
        name=model,
        nodes=tuple(
            pm.operation(
                f"v{k}",
                output_bytes=nodes[k]["out_cost"] * 1024,
                flops=nodes[k]["duration"] * 1_000_000,
                inputs=tuple(f"v{i}" for i in inputs[k]),
                bytes_moved=0,
            )
            for k in order
        ),
    )


_PUBLISHED: Final = (
    "vgg16-cifar",
    "vgg16",
    "resnet18-cifar",
    "resnet18",
    "resnet50",
    "transformer",
    "bert",
)
_ZOO: Final = (
    "vgg16-cifar",
    "vgg16",
    "resnet18-cifar",
    "resnet18",
    "resnet50",
    "mobilenetv2",
    "bert-base",
)
_SHARES: Final = tuple(f"{share}0%" for share in range(2, 10))

CURVES: Final = (
    (PUBLISHED, "paper/vgg16-cifar", "paper-a72", (grid.FLOOR, *_SHARES)),
    (ZOO, "resnet18-cifar", "nrf52840", (grid.FLOOR, *_SHARES)),
    (CAPTURED, "traced/models/vit", grid.PROFILE, (grid.FLOOR, *_SHARES)),
    (STEPS, "resnet8", PAGED, tuple(f"least+{share}%" for share in (0, *range(10, 100, 15)))),
    (DMA, "resnet18-cifar", "stm32h743", (grid.FLOOR, *_SHARES[1::2])),
    (TIME, "resnet18-cifar", "jetson-tx2", (grid.FLOOR, *_SHARES[1::2])),
)
"""Problems of the chart: a network and a device for each kind, over budgets."""


def _list_problems(kind: str) -> Iterator[ComparedRun]:
    if kind == PUBLISHED:
        models = [f"paper/{model}" for model in _PUBLISHED]
        axes = product(models, ("paper-m4", "paper-a72"), (grid.FLOOR, "50%", "70%"))
    elif kind == ZOO:
        axes = product(_ZOO, ("nrf52840", "rpi4b"), (grid.FLOOR, "50%", "70%"))
    elif kind == CAPTURED:
        names = sorted(path.name for path in (grid.TRACED / "models").glob("*.graph.json"))
        models = [f"traced/models/{name.removesuffix('.graph.json')}" for name in names]
        axes = product(models, (grid.PROFILE,), ("80%", "60%", "40%"))
    elif kind == STEPS:
        budgets = tuple(f"{LEAST_RAM}+{share}%" for share in (0, 30, 60))
        axes = product(MLPERF_TINY, (PAGED, MAPPED), budgets)
    elif kind in (DMA, TIME):
        models = ["vgg16-cifar", "resnet18-cifar"]
        devices = ("jetson-tx2", "stm32h743" if kind == DMA else "nrf52840")
        axes = product(models, devices, (grid.FLOOR, "50%", "70%"))
    else:
        sizes = {100: range(3), 250: range(3), 500: range(2), 1000: range(1)}
        models = [
            f"{node_count}{NUMBER_SEPARATOR}{seed}"
            for node_count, seeds in sizes.items()
            for seed in seeds
        ]
        if DATA_VARIABLE in os.environ:
            models += sorted(
                path.stem for path in Path(os.environ[DATA_VARIABLE]).glob(_FILE_PATTERN)
            )
        axes = product(models, ("paper-m4",), ("90%", "80%"))
    for model, device, ram in axes:
        yield ComparedRun(kind=kind, model=model, device=device, ram=ram)
    for curve_kind, model, device, budgets in CURVES if kind in MAIN else ():
        for ram in budgets if curve_kind == kind else ():
            yield ComparedRun(kind=kind, model=model, device=device, ram=ram)


def list_problems(kinds: Sequence[str] = KINDS) -> tuple[ComparedRun, ...]:
    """Return the feasible problems as runs of the optimum, in execution order.

    Kinds are mixed, so that an interrupted series is a fair sample; layered graphs are last.
    """
    positioned: list[tuple[float, ComparedRun]] = []
    for number, kind in enumerate(kinds):
        kind_runs = [run for run in dict.fromkeys(_list_problems(kind)) if _has_min_ram(run)]
        if kind != LAYERED:
            random.Random(ORDER_SEED + number).shuffle(kind_runs)  # noqa: S311 (no secret)
        offset = 1.0 if kind == LAYERED else 0.0
        positioned += [
            (offset + (i + 0.5) / len(kind_runs), run) for i, run in enumerate(kind_runs)
        ]
    return tuple(run for _, run in sorted(positioned, key=lambda pair: pair[0]))


def _has_min_ram(run: ComparedRun) -> bool:
    problem = run.problem()
    return problem.usable_ram_bytes >= problem.floor.bytes


def runs(kinds: tuple[str, ...] = KINDS, own: tuple[str, ...] = ()) -> Iterator[ComparedRun]:
    """Yield the runs of some kinds: for each problem all methods in sequence, then those of `own`.

    Raises `InputError` for unknown kinds and methods.
    """
    for name in own:
        method(name)  # fails here rather than in every run
    unknown_kinds = [kind for kind in kinds if kind not in KINDS]
    if unknown_kinds:
        raise InputError(
            f"kinds: no kind is called {join_names(unknown_kinds)}; known are {', '.join(KINDS)}; "
            "another setting needs a --set of its own"
        )
    for problem in list_problems(kinds):
        limit_s = LAYERED_LIMIT_S if problem.kind == LAYERED else LIMIT_S
        for name in (*list_methods(problem.kind), *own):
            yield replace(problem, method=name, limit_s=limit_s)


def smoke_runs() -> Iterator[ComparedRun]:
    """Yield all methods on a small problem of each kind, except `ZOO` and `CAPTURED`."""
    smallest = {
        PUBLISHED: ("paper/linear", "paper-m4", "70%"),
        STEPS: ("mlp", PAGED, "least+50%"),
        DMA: ("mlp", "stm32h743", "70%"),
        TIME: ("mlp", "stm32h743", "70%"),
        LAYERED: ("20, 0", "paper-m4", "90%"),
    }
    for kind, (model, device, ram) in smallest.items():
        limit_s = 1.0 if kind == STEPS else SMOKE_LIMIT_S
        run = ComparedRun(kind=kind, model=model, device=device, ram=ram, limit_s=limit_s)
        yield from (replace(run, method=name) for name in list_methods(kind))


# -- one run ---------------------------------------------------------------------------------------


def measure_method(fields: dict[str, Any], _start: None = None) -> Record:
    """Schedule a problem with a method; return the record. Loading the graph is not timed."""
    run = ComparedRun(**fields)
    core_fraction = measure_core_fraction(warm_up) if _uses_solver(run) else 1.0
    problem = run.problem()
    facts = measure_with_cpu_limit(
        run.limit_s, lambda wall_s: _execute_method(run, wall_s), core_fraction=core_fraction
    )
    return make_record(
        KIND,
        run.name,
        cell=fields,
        workers=1,
        threads=1,
        graph_nodes=len(problem.graph.nodes),
        ram_budget_bytes=problem.ram_budget_bytes,
        floor_bytes=problem.floor.bytes,
        keep_all_bytes=checkpoint_all_peak_bytes(problem.graph),
        baseline_energy_j=problem.baseline_energy_j,
        baseline=problem.objective.baseline,
        **facts,
    )


def _uses_solver(run: ComparedRun) -> bool:
    return run.method == PAPER or (run.method != OWN_ORDER and method(run.method).uses_solver)


def _execute_method(run: ComparedRun, wall_s: float) -> dict[str, Any]:
    """Execute a method within `wall_s` [s]; return the record's fields. Errors become a status."""
    problem, name, options = run.problem(), run.method, dict[str, Any]()
    if name == PAPER:
        name, options = OPTIMAL, {"formulation": PAPER}
    try:
        if name == OWN_ORDER:
            with limit_time(wall_s):
                return execute_dtr(problem)
        result = run_method(problem, name, time_limit=wall_s, gap=GAP, seed=run.seed, **options)
        if result.termination == Termination.INTERRUPTED:
            raise KeyboardInterrupt
        return _result_record(result)
    except TimeLimitError:
        return {"status": str(Status.UNKNOWN), "termination": str(Termination.TIME_LIMIT)}
    except MethodNotApplicableError as error:
        return {"status": NOT_APPLICABLE, "reason": str(error)}
    except PoetModelError as error:
        return {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}


def _result_record(result: SolveResult) -> dict[str, Any]:
    is_valid, baseline = not result.violations, result.problem.objective.baseline
    statistics = result.statistics
    return {
        "status": str(result.status),
        "termination": str(result.termination),
        "reason": result.reason or "; ".join(result.violations[:1]),
        "gap": result.gap,
        "requested_gap": result.requested_gap,
        "overhead": result.overhead if is_valid else None,
        "overhead_bound": result.proven_bound - baseline,
        "overhead_j": result.overhead_j if is_valid else None,
        "overhead_bound_j": result.overhead_bound_j,
        "primal_integral_s": result.primal_integral_s,
        "gaps": [(round(at_s, 3), float(f"{gap:.4g}")) for at_s, gap in result.gap_over_time],
        "peak_ram_bytes": result.simulation and result.simulation.peak_ram_bytes,
        "restricted": statistics.get("restricted_status"),
        "model_gap": model_gap(statistics),
    }


STUDY: Final = Study(
    name="compared",
    kind=KIND,
    runs=runs,
    smoke_runs=smoke_runs,
    measure=measure_method,
    preloaded=(*PRELOADED, "compared"),
    grace_s=ATTEMPTS * GRACE_S,
)
