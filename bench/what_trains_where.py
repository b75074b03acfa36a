"""Whole steps of built-in graphs: small networks with their state in the graph, on every board."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import poetmodel as pm
from grid import SMOKE_LIMIT_S, Course
from harness import RecordedRun, Study, peak_memory_bytes, record, warm_up
from poetmodel.baselines import run as run_method
from poetmodel.bench.measurement import FAILED, NOT_APPLICABLE
from poetmodel.device.io import device_names
from poetmodel.errors import MethodNotApplicableError, PoetModelError
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.graph.zoo import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from poetmodel.bench.measurement import Record
    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult

KIND: Final = "training step"
"""Kind of the records."""

LEAST, BOARDS, POLICIES, SPEED = PARTS = ("least", "boards", "policies", "speed")
"""The least RAM of a network; a network on a board; methods at equal RAM; larger networks."""

# -- networks and boards ---------------------------------------------------------------------------

NETWORKS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "ds-cnn": ("ds-cnn", {}),
        "resnet8": ("resnet8", {}),
        "autoencoder": ("autoencoder", {}),
        "mobilenetv1-vww": ("mobilenetv1-vww", {}),
        "mobilenetv2-035, 48 x 48": ("mobilenetv2-035", {}),
        "mobilenetv2-035, 96 x 96": ("mobilenetv2-035", {"image_size": 96}),
        "resnet18-cifar": ("resnet18-cifar", {}),
        "BERT, 4 blocks": ("transformer", {"blocks": 4}),
        "mlp": ("mlp", {}),
    }
)
"""Networks by the names that tables use: a model of the zoo, and its sizes."""
MLPERF_TINY: Final = ("ds-cnn", "resnet8", "autoencoder", "mobilenetv1-vww")
SMALL: Final = (*MLPERF_TINY, "mobilenetv2-035, 48 x 48", "mobilenetv2-035, 96 x 96")
"""Networks that are held against every board."""
LARGER: Final = ("resnet18-cifar", "BERT, 4 blocks")
"""Networks with state that are solved for their time alone."""

ACTIVATIONS, STATE, IN_PLACE, TILES = "activations", "state", "in place", "tiles"
GRAPHS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        ACTIVATIONS: {},
        STATE: {"state": "sgd"},
        IN_PLACE: {"state": "sgd", "in_place": True},
        TILES: {"state": "sgd", "in_place": True, "tile": "32KiB"},
    }
)
"""What is in the graph, as options of the zoo."""

PAGED, MAPPED = "nrf52840", "stm32f746"
"""Boards that stand for their kind of storage: an SD card, and flash that the core reads."""
LEAST_RAM: Final = "least"
"""What a budget between the least RAM and keep-all begins with."""
SHARES: Final = (0, 30, 60, 100)
"""Budgets: the least RAM and so many percent of what keep-all takes beyond it."""
SPEED_BUDGETS: Final = ("least+50%", "least+75%")
METHODS: Final = ("optimal", "resident", "zero-offload", "offload-all")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun(RecordedRun):
    """One training step, scheduled by one method."""

    part: str
    """One of `PARTS`."""
    network: str
    """One of `NETWORKS`."""
    graph: str
    """What is in the graph, one of `GRAPHS`."""
    device: str
    """A shipped device."""
    ram: str | None = None
    """RAM budget: a share of the keep-all peak, or from `LEAST_RAM` on; None for the device's."""
    minimize: str = "energy"
    """What is minimized."""
    paging: bool = True
    """Whether tensors may be paged; if not, all state is in RAM."""
    method: str = "optimal"
    """A method of `poetmodel.baselines`."""
    gap: float = 0.01
    """Gap at which a solve is done."""
    limit_s: float = 20.0
    """Wall time, building included [s]."""
    seed: int = 0
    """Seed of the solver."""

    @property
    def name(self) -> str:
        """What it is called in the records."""
        ram = self.minimize if self.minimize == "ram" else self.ram or "its RAM"
        paging = "paging" if self.paging else "no paging"
        parts = (self.part, self.network, self.graph, self.device, ram, paging, self.method)
        return " | ".join(parts)

    def problem(self) -> Problem:
        """Return what is to be scheduled."""
        graph, device = graph_of(self.network, self.graph), pm.Device.load(self.device)
        stated = pm.Problem(
            graph,
            pm.Costs.estimate(graph, device),
            ram="100%",
            minimize=self.minimize,
            paging=self.paging,
        )
        if self.ram is None:
            return replace(stated, ram=None)
        begin, plus, share = self.ram.partition("+")
        if begin != LEAST_RAM or not plus:
            return replace(stated, ram=self.ram)
        least, most = stated.floor.bytes, checkpoint_all_peak_bytes(graph)
        return replace(stated, ram=least + (most - least) * int(share.rstrip("%")) // 100)


@cache
def graph_of(network: str, graph: str) -> Graph:
    """Return the graph of a network with some of it in the graph, made once."""
    model, sizes = NETWORKS[network]
    return MODELS[model](**sizes, **GRAPHS[graph])


# -- runs ------------------------------------------------------------------------------------------


def _least() -> Iterator[StepRun]:
    """Yield the least RAM: without paging it depends on no device, with paging on the storage."""
    run = StepRun(
        part=LEAST, network="", graph="", device=PAGED, ram="100%", minimize="ram", gap=1e-4
    )
    for network in SMALL:
        for graph in GRAPHS:
            yield replace(run, network=network, graph=graph, paging=False, limit_s=12.0)
        for graph, device in product((IN_PLACE, TILES), (PAGED, MAPPED)):
            yield replace(run, network=network, graph=graph, device=device)


def boards() -> list[str]:
    """Return the devices whose storage has a size: the others are graphics cards."""
    return [name for name in device_names() if pm.Device.load(name).aux_bytes is not None]


def _boards() -> Iterator[StepRun]:
    for network, device in product(SMALL, boards()):
        yield StepRun(part=BOARDS, network=network, graph=TILES, device=device, limit_s=12.0)


def _policies() -> Iterator[StepRun]:
    """Yield each budget with all methods right after each other."""
    run = StepRun(part=POLICIES, network="", graph=TILES, device="", limit_s=15.0)
    for network, device, share in product(MLPERF_TINY, (PAGED, MAPPED), SHARES):
        at = replace(run, network=network, device=device, ram=f"{LEAST_RAM}+{share}%")
        yield from (replace(at, method=method) for method in METHODS)


def _speed() -> Iterator[StepRun]:
    run = StepRun(part=SPEED, network="", graph=IN_PLACE, device="rpi4b", gap=0.02, limit_s=60.0)
    for network, ram in product(LARGER, SPEED_BUDGETS):
        yield replace(run, network=network, ram=ram)


_RUNS: Final = {LEAST: _least, BOARDS: _boards, POLICIES: _policies, SPEED: _speed}


def runs(parts: tuple[str, ...] = PARTS) -> Iterator[StepRun]:
    """Yield the runs of some parts, in order."""
    for part in parts:
        yield from _RUNS[part]()


def smoke_runs() -> Iterator[StepRun]:
    """Yield every kind of run at its smallest size."""
    kinds = {(run.part, run.graph, run.device, run.paging, run.method): run for run in runs()}
    for run in kinds.values():
        if run.device in (PAGED, MAPPED, "rpi4b"):
            yield replace(run, network="mlp", limit_s=SMOKE_LIMIT_S)


# -- one run ---------------------------------------------------------------------------------------


def measure_step(fields: dict[str, Any], _start: None = None) -> Record:
    """Schedule a training step and return its record; its graph is made before the clock starts."""
    warm_up()
    run = StepRun(**fields)
    graph = graph_of(run.network, run.graph)
    course, begun, cpu_s = Course(), time.perf_counter(), time.process_time()
    problem, result, facts = run.problem(), None, dict[str, Any]()
    options: dict[str, Any] = {"time_limit": run.limit_s, "gap": run.gap, "seed": run.seed}
    try:
        result = run_method(problem, run.method, on_progress=course.note, **options)
    except MethodNotApplicableError as error:
        facts = {"status": NOT_APPLICABLE, "reason": str(error), **_limits(problem)}
    except PoetModelError as error:
        facts = {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - begun
    if result is not None:
        facts = {"status": str(result.status), **_facts(result)}
        course.reach(seconds, result.objective_gap)
    return record(
        KIND,
        run.name,
        cell=fields,
        workers=1,
        seconds=seconds,
        cpu_s=time.process_time() - cpu_s,
        gaps=course.gaps,
        peak_memory_bytes=peak_memory_bytes(),
        graph_nodes=len(graph.nodes),
        state_bytes=graph.state_bytes,
        resident_bytes=graph.total_resident_bytes,
        keep_all_bytes=checkpoint_all_peak_bytes(graph),
        **facts,
    )


def _limits(problem: Problem) -> dict[str, Any]:
    return {
        "ram_budget_bytes": problem.ram_budget_bytes,
        "floor_bytes": problem.floor.bytes,
        "baseline_energy_j": problem.baseline_energy_j,
        "pass_s": problem.pass_time_s,
    }


_COPIED: Final = (
    *("reason", "requested_gap", "objective_value", "overhead_j", "overhead_bound_j", "energy_j"),
    *("time_s", "makespan_s", "peak_ram_bytes", "written_bytes", "read_bytes", "build_s"),
    "solve_s",
)
"""Properties of a result that its record has under the same name."""


def _facts(result: SolveResult) -> dict[str, Any]:
    simulation, sizes = result.simulation, result.problem.graph.tensor_bytes
    in_ram = () if simulation is None else simulation.resident
    return {
        **_limits(result.problem),
        **{name: getattr(result, name) for name in _COPIED},
        "termination": str(result.termination),
        "gap": result.objective_gap,
        "objective_bound": result.proven_bound,
        "resident_state_bytes": sum(sizes[i] for i in in_ram),
        "steps_until_worn": None if simulation is None else simulation.steps_until_worn,
        "statistics": dict(result.statistics),
        "versions": dict(result.versions),
    }


STUDY: Final = Study(
    name="trains", kind=KIND, runs=runs, smoke_runs=smoke_runs, measure=measure_step
)
