"""Random problems of training steps with state tensors and in-place operators, by seed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kit.instances import bench_device, random_costs, random_problem, seeded
from kit.own_rows import constrained
from kit.state_steps import random_step, state, update
from poetmodel.device import Costs
from poetmodel.errors import InputError
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation
from poetmodel.problem import Problem

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from poetmodel.graph import Tensor


def state_costs(rng: random.Random, graph: Graph, *, mapped: bool = False) -> Costs:
    """Draw a time and an energy above 0 for everything; storage may be memory-mapped."""
    device = bench_device(aux_bytes=10**6)
    assert device.storage is not None
    count = len(graph.tensors)
    work = [0 if node.is_state else 1 for node in graph.nodes]

    def figures() -> list[tuple[float, float]]:
        return [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(count)]

    return Costs.from_arrays(
        graph,
        compute_time_s=[some * rng.randint(1, 9) for some in work],
        compute_energy_j=[some * rng.randint(1, 9) for some in work],
        page_in=figures(),
        page_out=figures(),
        device=replace(device, storage=replace(device.storage, memory_mapped=mapped)),
    )


def in_time_problem() -> Problem:
    """State a step in which `a`, read by `d`, must be made again before `w` is replaced by `u`.

    `a` reads `w`, and has no room beside the workspace of `b`. The best schedule makes it again in
    stage 4, that of `u`, for 1 J; pages are dearer.
    """
    graph = Graph(
        name="in time",
        nodes=(
            operation("c", output_bytes=1, phase="input"),
            state("w", 1),
            operation("a", output_bytes=10, inputs=("c", "w")),
            operation("b", output_bytes=1, inputs=("c",), workspace_bytes=10),
            update("u", "b", w=1),
            operation("d", output_bytes=1, inputs=("a",)),
        ),
    )
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1, 0, 1, 1, 1, 1],
        compute_energy_j=[1, 0, 1, 1, 1, 1],
        page_in=[(9, 9)] * len(graph.tensors),
        page_out=[(9, 9)] * len(graph.tensors),
    )
    return Problem(graph, costs, ram=14)


def random_state_problems(
    count: int, n: tuple[int, int], *, seed: int, at_floor: bool = False, **stated: Any
) -> Iterator[Problem]:
    """Yield problems with budgets from the floor to the keep-all peak, or at the floor.

    What is not `stated` is drawn: the objective, whether paging and recomputing are allowed, and
    now and then a deadline or little storage.
    """
    number = made = 0
    while made < count:
        rng = seeded(f"state problem/{seed}/{number}")
        number += 1
        graph, mapped = random_step(rng, n), rng.random() < 0.25
        least = floor(graph, memory_mapped=mapped).bytes
        peak = checkpoint_all_peak_bytes(graph)
        drawn: dict[str, Any] = {
            "ram": max(1, least if at_floor else rng.randint(least, peak)),
            "minimize": rng.choice(("energy", "energy", "time", "writes", "ram")),
            "deadline_counts": "serial",
            "paging": rng.random() < 0.9,
            "recompute": rng.random() < 0.85,
            "aux_bytes": rng.randint(0, 30) if rng.random() < 0.2 else None,
            "deadline": "150%" if rng.random() < 0.2 else None,
        }
        if drawn["minimize"] == "ram" and not at_floor:
            drawn["ram"] = max(1, peak)
        try:
            problem = Problem(graph, state_costs(rng, graph, mapped=mapped), **drawn | stated)
        except InputError:
            continue  # nothing in it takes time, of which the deadline is a fraction
        made += 1
        yield problem


def _replaces_two(graph: Graph) -> bool:
    replaced = set(graph.replacement_of.values())
    return any(len(replaced.intersection(made)) > 1 for made in graph.outputs_of)


def _reads_before(graph: Graph) -> bool:
    """Return whether what a recomputable reader of state makes is read after the replacement."""
    return any(
        graph.nodes[k].recomputable
        and any(max(graph.users_of[i], default=0) > graph.node_of[new] for i in graph.outputs_of[k])
        for old, new in graph.replacement_of.items()
        for k in graph.users_of[old]
    )


def state_problem(seed: str, n: tuple[int, int] = (3, 5), **fixed: Any) -> Problem:
    """Make a problem over a random training step that has state or operators in place: all limits.

    Three of four have less RAM than keep-all takes and as much as some step needs, half of them
    little more than that. Storage is memory-mapped in one of five. In two of five something that
    reads state could be computed again for a use after the replacement, in one of five a node
    replaces two.
    """
    rng = seeded(f"state/{seed}")
    scarce, mapped = rng.random() < 0.75, rng.random() < 0.2
    kind = rng.choice((None, None, _replaces_two, _reads_before, _reads_before))
    for _ in range(1000):
        graph = random_step(rng, n)
        low, high = floor(graph, memory_mapped=mapped).bytes, checkpoint_all_peak_bytes(graph)
        decides = graph.version == 2 and (low < high or not scarce)
        if decides and (kind is None or kind(graph)):
            break
    if scarce:
        low = max(1, low)
        most = max(low, min(high - 1, low + rng.choice((2, high))))
        fixed.setdefault("ram", rng.randint(low, most))
    costs = random_costs(rng, graph)
    device = costs.device
    assert device is not None
    assert device.storage is not None
    storage = replace(device.storage, memory_mapped=mapped)
    costs = replace(costs, device=replace(device, storage=storage))
    return random_problem(rng, graph, costs, below_floor=True, **fixed)


def state_rows_problem(seed: str, n: tuple[int, int] = (3, 5), **fixed: Any) -> Problem:
    """Make such a problem with own constraints, of homes too, and now and then an own objective."""
    return constrained(seeded(f"rows of state/{seed}"), state_problem(seed, n, **fixed))


def scaled_state_problem(seed: str, n: tuple[int, int] = (3, 5)) -> Problem:
    """Make such a problem of bytes between 1 and 2**50, at the floor or above; often of writes."""
    problem, rng = state_problem(seed, n), seeded(f"scaled state/{seed}")
    bits, style = rng.choice((31, 40, 50)), rng.choice(("heavy", "few", "powers"))
    few = [rng.randint(2 ** (bits - 1), 2**bits) for _ in range(3)]
    known: dict[str, int] = {}

    def size(made: Tensor) -> int:
        if made.replaces is not None:
            return known[made.replaces]
        known[made.name] = 0
        if made.bytes:
            known[made.name] = {
                "heavy": made.bytes * (2**bits // 16) + rng.randint(0, 9),
                "few": rng.choice((1, 7, *few)),
                "powers": int(2 ** rng.uniform(0, bits)),
            }[style]
        return known[made.name]

    nodes = tuple(
        replace(
            node,
            outputs=tuple(replace(made, bytes=size(made)) for made in node.outputs),
            workspace_bytes=node.workspace_bytes and rng.choice((3, few[0])),
        )
        for node in problem.graph.nodes
    )
    graph = replace(problem.graph, nodes=nodes)
    low = max(1, floor(graph, memory_mapped=problem.reads_in_place).bytes)
    high = max(low, checkpoint_all_peak_bytes(graph))
    limits: dict[str, Any] = {"ram": rng.choice((low, low + 1, rng.randint(low, high)))}
    if rng.random() < 0.4:
        limits["aux_bytes"] = rng.randint(0, sum(graph.tensor_bytes))
    minimize = rng.choice(("energy", "time", "ram", "writes", "writes"))
    return replace(problem, graph=graph, minimize=minimize, **limits)
