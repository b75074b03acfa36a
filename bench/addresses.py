"""Fragmentation of addresses: plans of the zoo and of captured networks, with and without search.

``python bench/addresses.py --out bench/results/$(date +%F)-addresses.jsonl`` solves each problem
for some seconds, plans its schedule and places all copies; ``python scripts/make_results.py`` puts
the figures into ``docs/concepts/plans.md``. Networks for microcontrollers come from PyTorch.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from harness import latest, parsed, record
from poetmodel.device import Costs, Device, StorageMode
from poetmodel.errors import InputError
from poetmodel.graph import Graph, floor, zoo
from poetmodel.placement.lifetimes import blocks_of
from poetmodel.placement.packing import UNPLACED, Packing
from poetmodel.placement.placing import place
from poetmodel.plan import check_arena
from poetmodel.planner import make_plan
from poetmodel.problem import Problem
from poetmodel.solver import solve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.plan import Plan

KIND: Final = "addresses"
"""Kind of the records."""
TRACED: Final = Path(__file__).resolve().parent / "traced"
SHARES: Final = ("35%", "50%")
"""RAM budgets, of the keep-all peak."""
NEAR: Final = 1.05
"""Where no share is above the minimum RAM, so many times that is the budget."""
TINY: Final = ("autoencoder", "ds-cnn", "resnet8", "mobilenetv1-vww", "mobilenetv2-035")
"""Networks of the zoo that are measured with their state too."""


def networks(group: str) -> Iterator[tuple[str, Graph, Costs]]:
    """Yield name, graph and costs of the networks of a group."""
    large, small = Device.load("rpi4b"), Device.load("nrf52840")
    if group == "traced":
        for path in sorted(TRACED.glob("*.graph.json")):
            graph = Graph.load(path)
            name = path.name.partition(".")[0]
            yield name, graph, Costs.load(path.with_name(f"{name}.profile.csv"))
    elif group == "zoo":
        for name, make in zoo.MODELS.items():
            graph = make()
            yield name, graph, Costs.estimate(graph, large)
    elif group == "zoo, with state":
        for name in TINY:
            graph = zoo.MODELS[name](state="sgd", in_place=True)
            yield name, graph, Costs.estimate(graph, small)
    else:
        for name, graph in _captured():
            yield name, graph, Costs.estimate(graph, small)


GROUPS: Final = ("traced", "zoo", "zoo, with state", "captured, with state")


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


def budgets(graph: Graph, costs: Costs) -> Iterator[str | int]:
    """Yield the budgets of a network."""
    least = floor(graph).bytes
    whole = Problem(graph, costs, ram="100%").ram_budget_bytes
    shares = [share for share in SHARES if whole * float(share[:-1]) / 100 >= least]
    if shares:
        yield from shares
    else:
        yield int(NEAR * least)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases that the file does not have; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", choices=GROUPS, action="append", help="some groups only")
    parser.add_argument("--limit", type=float, default=10.0, help="of each solve [s]")
    options = parsed(parser, "addresses.jsonl", arguments)
    records = latest(options.out)
    for group in options.group or GROUPS:
        for name, graph, costs in networks(group):
            for ram in budgets(graph, costs):
                for made in _case(group, name, graph, costs, ram, options.limit):
                    records.add(made)
                    sys.stdout.write(f"{made['name']}: {made['arena_bytes']:,} B\n")
                    sys.stdout.flush()
    return 0


def _case(
    group: str, name: str, graph: Graph, costs: Costs, ram: str | int, limit_s: float
) -> Iterator[dict[str, Any]]:
    try:
        problem = Problem(graph, costs, ram=ram)
        result = solve(problem, time_limit=limit_s, gap=0.01)
    except InputError as error:
        sys.stdout.write(f"{name} at {ram}: {error}\n")
        return
    if result.schedule is None:
        sys.stdout.write(f"{name} at {ram}: {result.reason}\n")
        return
    pages = bool(result.schedule.M_in or result.schedule.M_out)
    for mode in StorageMode if pages else (StorageMode.BLOCKING,):
        usable = problem.usable_ram_bytes
        plan = make_plan(graph, costs, result.schedule, mode=mode, ram_budget_bytes=usable)
        cell = {"group": group, "network": name, "ram": str(ram), "mode": str(mode)}
        facts = measured(graph, plan)
        yield record(KIND, " | ".join(cell.values()), cell=cell, limit_s=limit_s, **facts)


if __name__ == "__main__":
    sys.exit(main())
