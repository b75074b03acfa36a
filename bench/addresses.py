"""Fragmentation of addresses: plans of the zoo and of captured networks, and their placement."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from harness import Cell, Study, record
from poetmodel.bench.measurement import FAILED
from poetmodel.device import Costs, Device, StorageMode
from poetmodel.graph import Graph, floor, zoo
from poetmodel.placement.lifetimes import blocks_of
from poetmodel.placement.packing import UNPLACED, Packing
from poetmodel.placement.placing import place
from poetmodel.plan import check_arena
from poetmodel.planner import make_plan
from poetmodel.problem import Problem
from poetmodel.solver import solve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.bench.measurement import Record
    from poetmodel.bench.store import RecordFile
    from poetmodel.plan import Plan

KIND: Final = "addresses"
"""Kind of the records."""
TRACED: Final = Path(__file__).resolve().parent / "traced"
SHARES: Final = ("35%", "50%")
"""RAM budgets, of the keep-all peak."""
NEAR: Final = 1.05
"""Where no share is above the minimum RAM, so many times that is the budget."""
LIMIT_S: Final = 10.0
"""Of each solve [s]."""
TINY: Final = ("autoencoder", "ds-cnn", "resnet8", "mobilenetv1-vww", "mobilenetv2-035")
"""Networks of the zoo that are measured with their state too."""


GROUPS: Final = ("traced", "zoo", "zoo, with state", "captured, with state")


@cache
def networks(group: str) -> dict[str, tuple[Graph, Costs]]:
    """Return graph and costs of the networks of a group, by name."""
    large, small = Device.load("rpi4b"), Device.load("nrf52840")
    if group == "traced":
        paths = sorted(TRACED.glob("*.graph.json"))
        names = [path.name.partition(".")[0] for path in paths]
        costs = [Costs.load(TRACED / f"{name}.profile.csv") for name in names]
        return dict(zip(names, zip(map(Graph.load, paths), costs, strict=True), strict=True))
    if group == "zoo":
        made, device = {name: make() for name, make in zoo.MODELS.items()}, large
    elif group == "zoo, with state":
        made, device = {x: zoo.MODELS[x](state="sgd", in_place=True) for x in TINY}, small
    else:
        made, device = dict(_captured()), small
    return {name: (graph, Costs.estimate(graph, device)) for name, graph in made.items()}


def _captured() -> Iterator[tuple[str, Graph]]:
    import torch

    from mcu.networks import NETWORKS
    from poetmodel.torch.step.trace import trace

    for name, make in NETWORKS.items():
        torch.manual_seed(0)
        model, loss, inputs = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        traced = trace(model, loss, inputs, name=name, optimizer=optimizer, measure_workspace=False)
        yield name, traced.graph


def runs(groups: tuple[str, ...] = GROUPS) -> Iterator[Cell]:
    """Yield each network within each budget."""
    for group in groups:
        for name, (graph, costs) in networks(group).items():
            for ram in budgets(graph, costs):
                yield run_of(group, name, str(ram))


def run_of(group: str, network: str, ram: str) -> Cell:
    """Return a run: a network within a budget. Its plan with DMA has a record of its own."""
    cell = {"group": group, "network": network, "ram": ram, "mode": str(StorageMode.BLOCKING)}
    return Cell(" | ".join(cell.values()), cell)


def budgets(graph: Graph, costs: Costs) -> Iterator[str | int]:
    """Yield the budgets of a network."""
    least = floor(graph).bytes
    whole = Problem(graph, costs, ram="100%").ram_budget_bytes
    shares = [share for share in SHARES if whole * float(share[:-1]) / 100 >= least]
    yield from shares or (int(NEAR * least),)


def in_order(graph: Graph, plan: Plan, alignment: int) -> int:
    """Return the size of the block where each copy lies lowest when it is made, as a heap would."""
    blocks = blocks_of(graph, plan, alignment)
    packing = Packing.of(blocks)
    offsets = np.full(len(blocks), UNPLACED, dtype=np.int64)
    for number in range(len(blocks)):
        offsets[number] = packing.lowest(number, offsets)
    return packing.top(offsets)


def measured(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Place a plan in several ways."""
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    arena = place(graph, plan)
    seconds, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    check = check_arena(graph, plan, arena)
    return {
        "nodes": len(graph.nodes),
        "instructions": len(plan.program),
        "offsets": len(arena.offsets),
        "lower_bound_bytes": arena.lower_bound_bytes,
        "arena_bytes": arena.bytes,
        "greedy_bytes": place(graph, plan, time_limit=0.0).bytes,
        "in_order_bytes": in_order(graph, plan, arena.alignment),
        "seconds": seconds,
        "cpu_s": cpu_s,
        "violations": [one for one in check.violations if "tensors may use" not in one],
    }


def measure(fields: dict[str, Any], store: RecordFile) -> Record:
    """Solve, plan and place; return the record, and add that of the plan with DMA to the file."""
    graph, costs = networks(fields["group"])[fields["network"]]
    ram = fields["ram"]
    problem = Problem(graph, costs, ram=ram if ram.endswith("%") else int(ram))
    result = solve(problem, time_limit=LIMIT_S, gap=0.01)
    if result.schedule is None:
        name = " | ".join(fields.values())
        return record(KIND, name, cell=fields, status=FAILED, reason=result.reason)
    made = []
    for mode in (StorageMode.BLOCKING, StorageMode.DMA):
        usable = problem.usable_ram_bytes
        plan = make_plan(graph, costs, result.schedule, mode=mode, ram_budget_bytes=usable)
        cell = {**fields, "mode": str(mode)}
        facts = measured(graph, plan)
        made.append(record(KIND, " | ".join(cell.values()), cell=cell, limit_s=LIMIT_S, **facts))
    if result.schedule.M_in or result.schedule.M_out:
        store.add(made[1])
    return made[0]


STUDY: Final = Study(
    name="addresses",
    kind=KIND,
    runs=runs,
    smoke_runs=lambda: [run_of("zoo", "mlp", "4552")],
    measure=measure,
    start_of=lambda _run, store, _settings: store,
    alone=False,
)
