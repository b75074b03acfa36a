"""The simulator against the reference, on schedules that are valid, and after random changes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kit.instances import (
    random_graph,
    random_schedule,
    random_state_schedule,
    random_step,
    seeded,
)
from kit.reference_simulator import reference_figures
from kit.rotation import Part, parts
from kit.worked import bench_device
from poetmodel.device import Costs
from poetmodel.schedule import RELATIONS, Schedule, simulate

if TYPE_CHECKING:
    import random

    from poetmodel.graph import Graph


def drawn(rng: random.Random) -> tuple[Graph, Schedule, bool]:
    """Return a graph, with state or without, a schedule, and whether storage is memory-mapped."""
    while rng.random() < 0.7:
        graph, mapped = random_step(rng), rng.random() < 0.3
        schedule = random_state_schedule(rng, graph, mapped=mapped)
        if schedule is not None:
            return graph, schedule, mapped
    graph = random_graph(rng, (2, 8))
    return graph, random_schedule(rng, graph), False


def changed(rng: random.Random, graph: Graph, schedule: Schedule) -> Schedule:
    """Change an entry: most are possible, some of no stage or index; or the home of a tensor."""
    n, m = len(graph.nodes), len(graph.tensors)
    name = rng.choice((*RELATIONS, "resident"))
    if name == "resident":
        return replace(schedule, resident=tuple({*schedule.resident} ^ {rng.randrange(-1, m + 1)}))
    pairs = set(getattr(schedule, name))
    limit = n if name == "R" else m
    if pairs and rng.random() < 0.5:
        pairs.remove(rng.choice(sorted(pairs)))
    if rng.random() < 0.7:
        margin = int(rng.random() < 0.1)
        t, k = rng.randrange(-margin, n + margin), rng.randrange(-margin, limit + margin)
        pairs ^= {(t, k)}
    return replace(schedule, **{name: tuple(pairs)})


@parts(16)
def test_simulator_agrees_with_the_reference(part: Part) -> None:
    """20,000 schedules as drawn and after some changes: the same figures, or both find a fault.

    The first fault is the same in the same words. What follows from it may differ.
    """
    counts = {True: 0, False: 0}
    for seed in part.of(range(20_000)):
        rng = seeded(f"reference/{seed}")
        graph, schedule, mapped = drawn(rng)
        costs = Costs.estimate(graph, bench_device(memory_mapped=mapped))
        for change in range(rng.choice((0, 1, 1, 1, 2, 4)) + 1):
            schedule = changed(rng, graph, schedule) if change else schedule
            run = simulate(graph, costs, schedule)
            expected = reference_figures(graph, schedule, mapped=mapped)
            counts[run.valid] += 1
            if run.valid:
                assert {name: getattr(run, name) for name in expected} == expected, seed
            else:
                assert run.violations[:1] == expected["violations"][:1], seed
    assert min(counts.values()) > part.share(20_000), counts
