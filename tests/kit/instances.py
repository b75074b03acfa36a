"""Small random problems, reproducible by seed, for tests that compare two ways to the same answer.

All bytes, times and energies are small integers, so that sums are exact and ties are common.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from poetmodel.device import Compute, Cost, Costs, Device, PageCost, Storage, StorageMode, Transfer
from poetmodel.graph import Graph, Node, Tensor, checkpoint_all_peak_bytes, floor
from poetmodel.problem import Problem
from poetmodel.schedule import Schedule, simulate

if TYPE_CHECKING:
    from collections.abc import Iterator

Range = int | tuple[int, int]


def seeded(seed: int | str) -> random.Random:
    """Return a generator whose numbers depend on `seed` alone."""
    return random.Random(seed)  # noqa: S311 - reproducible, nothing to keep secret


def random_graph(
    rng: random.Random,
    n: Range = (3, 6),
    *,
    two_outputs: bool = True,
    no_outputs: bool = True,
    workspace: bool = True,
    on_aux: bool = True,
    non_recomputable: bool = True,
    zero_bytes: bool = True,
    resident: bool = False,
    density: float | None = None,
    max_bytes: int = 9,
    name: str = "random",
) -> Graph:
    """Make a random graph.

    Parameters
    ----------
    rng : random.Random
        Everything random comes from it.
    n : int or (int, int)
        Number of nodes, or the least and the largest number.
    two_outputs, no_outputs : bool
        Whether some nodes may make two tensors, or none.
    workspace, on_aux, non_recomputable, zero_bytes, resident : bool
        Whether these may occur.
    density : float, optional
        Chance that a node reads an earlier tensor; default random. A node that would read nothing
        mostly reads the tensor before it.
    max_bytes : int
        Size of the largest tensors and workspaces [B].
    name : str
        Name of the graph.

    Returns
    -------
    Graph
        With nodes ``n0``, ``n1``, ...; tensors have the node's name, second ones ``.b`` after it.
    """
    size = n if isinstance(n, int) else rng.randint(*n)
    chance = density if density is not None else rng.choice((0.2, 0.4, 0.6))
    nodes: list[Node] = []
    tensors: list[str] = []
    for k in range(size):
        inputs = [name for name in tensors if rng.random() < chance]
        if not inputs and tensors and rng.random() < 0.8:
            inputs = [tensors[-1]]
        names = [f"n{k}"]
        if two_outputs and rng.random() < 0.2:
            names.append(f"n{k}.b")
        elif no_outputs and k > 0 and rng.random() < 0.1:
            names = []
        least = 0 if zero_bytes and rng.random() < 0.15 else 1
        outputs = tuple(
            Tensor(name=made, bytes=0 if least == 0 else rng.randint(1, max_bytes))
            for made in names
        )
        nodes.append(
            Node(
                name=f"n{k}",
                op="op",
                phase="forward",
                inputs=tuple(inputs),
                outputs=outputs,
                workspace_bytes=(
                    rng.randint(1, max_bytes) if workspace and rng.random() < 0.25 else 0
                ),
                recomputable=not (non_recomputable and rng.random() < 0.2),
                on_aux=on_aux and not inputs and bool(names) and rng.random() < 0.4,
            )
        )
        tensors.extend(names)
    kinds = {"parameters": rng.randint(0, 20), "gradients": rng.randint(0, 20)} if resident else {}
    return Graph(name=name, nodes=tuple(nodes), resident_bytes=kinds)


def bench_device(
    *,
    idle_power_w: float = 0.0,
    mode: StorageMode | str = StorageMode.BLOCKING,
    storage: bool = True,
    ram_bytes: int = 2**20,
    aux_bytes: int | None = None,
    memory_mapped: bool = False,
) -> Device:
    """Make a device of round figures: 1 FLOP/s and 1 B/s at 1 W each, no latency."""
    way = Transfer(latency_s=0.0, bytes_per_s=1.0, power_w=1.0)
    return Device(
        name="bench",
        ram_bytes=ram_bytes,
        aux_bytes=aux_bytes,
        compute=Compute(flops_per_s=1.0, power_w=1.0),
        storage=Storage(
            mode=StorageMode(mode), page_in=way, page_out=way, memory_mapped=memory_mapped
        )
        if storage
        else None,
        idle_power_w=idle_power_w,
    )


def random_costs(
    rng: random.Random,
    graph: Graph,
    *,
    zero_cost: bool = True,
    storage: bool = True,
    idle: bool = True,
    mode: StorageMode | str = StorageMode.BLOCKING,
) -> Costs:
    """Make random integer costs of a graph.

    Parameters
    ----------
    rng : random.Random
        Everything random comes from it.
    graph : Graph
        Gives the nodes and tensors.
    zero_cost : bool
        Whether some costs may be 0.
    storage : bool
        Whether tensors can be paged.
    idle : bool
        Whether the device may draw idle power (half a watt, one or two).
    mode : StorageMode or str
        Of the device's storage.

    Returns
    -------
    Costs
        With a device that carries the idle power.
    """
    dear = rng.choice((3, 6, 12))
    cheap = rng.choice((2, 4, 12))

    def draw(most: int) -> int:
        return 0 if zero_cost and rng.random() < 0.12 else rng.randint(1, most)

    power = rng.choice((0.5, 1.0, 2.0)) if idle and rng.random() < 0.3 else 0.0
    pages = [[(draw(cheap), draw(cheap)) for _ in graph.tensors] for _ in range(2)]
    return Costs.from_arrays(
        graph,
        compute_time_s=[0 if node.is_state else draw(dear) for node in graph.nodes],
        compute_energy_j=[0 if node.is_state else draw(dear) for node in graph.nodes],
        page_in=pages[0] if storage else None,
        page_out=pages[1] if storage else None,
        device=bench_device(idle_power_w=power, mode=mode, storage=storage),
    )


def random_problem(
    rng: random.Random,
    graph: Graph,
    costs: Costs,
    *,
    deadline: bool = True,
    aux_limit: bool = True,
    energy_budget: bool = True,
    switches: bool = True,
    below_floor: bool = False,
    **fixed: Any,
) -> Problem:
    """Make a random problem over a graph and its costs.

    Parameters
    ----------
    rng : random.Random
        Everything random comes from it.
    graph, costs
        What it is about.
    deadline, aux_limit, energy_budget : bool
        Whether there may be such a limit.
    switches : bool
        Whether recomputation or paging may be switched off.
    below_floor : bool
        Whether the RAM budget may, now and then, be below the floor.
    **fixed
        Arguments of `Problem` that are taken as they are, such as ``minimize="time"``.

    Returns
    -------
    Problem
        With a RAM budget from the floor to the checkpoint-all peak, mostly below that; not always
        feasible.
    """
    low, high = floor(graph).bytes, checkpoint_all_peak_bytes(graph)
    least = max(1, low // 2 if below_floor and rng.random() < 0.2 else low)
    ram = rng.randint(least, max(least, high - 1)) if rng.random() < 0.9 else max(1, high)
    table = costs.table(graph)
    pass_s, pass_j = sum(table.compute_time_s), sum(table.compute_energy_j)
    dearest_s, dearest_j = max(table.compute_time_s), max(table.compute_energy_j)
    idle_w = costs.device.idle_power_w if costs.device is not None else 0.0
    drawn: dict[str, Any] = {
        "deadline": pass_s + rng.randint(0, int(2 * dearest_s) + 4),
        "aux_bytes": rng.randint(0, 1 + sum(graph.tensor_bytes)),
        "energy_budget": pass_j + idle_w * pass_s + rng.randint(0, int(2 * dearest_j) + 6),
        "recompute": False,
        "paging": False,
    }
    chosen: dict[str, Any] = {
        "ram": ram,
        "deadline_counts": rng.choice(("compute", "serial")),
        "minimize": rng.choice(("energy", "energy", "time", "ram", "writes")),
    }
    for key, allowed, chance in (
        ("deadline", deadline, 0.5),
        ("aux_bytes", aux_limit, 0.3),
        ("energy_budget", energy_budget, 0.15),
        ("recompute", switches, 0.15),
        ("paging", switches, 0.2),
    ):
        if rng.random() < chance and allowed:
            chosen[key] = drawn[key]
    for key in ("deadline", "energy_budget"):
        if chosen.get(key) == 0:
            del chosen[key]
    return Problem(graph, costs, **{**chosen, **fixed})


_GRAPH_KEYS = frozenset(
    (
        "two_outputs", "no_outputs", "workspace", "on_aux", "non_recomputable", "zero_bytes",
        "resident", "density", "max_bytes", "name",
    )
)  # fmt: skip
_COST_KEYS = frozenset(("zero_cost", "storage", "idle", "mode"))


def random_instance(rng: random.Random, n: Range = (3, 6), **choices: Any) -> Problem:
    """Make a random problem: graph, costs and limits.

    Parameters
    ----------
    rng : random.Random
        Everything random comes from it.
    n : int or (int, int)
        Number of nodes, or the least and the largest number.
    **choices
        Keywords of `random_graph`, `random_costs` and `random_problem`, each to its own; what none
        of them knows goes to `Problem` as it is (``minimize="ram"``, ``paging=False``).

    Returns
    -------
    Problem
        Not always feasible.
    """
    of_graph = {key: value for key, value in choices.items() if key in _GRAPH_KEYS}
    of_costs = {key: value for key, value in choices.items() if key in _COST_KEYS}
    rest = {
        key: value for key, value in choices.items() if key not in of_graph and key not in of_costs
    }
    graph = random_graph(rng, n, **of_graph)
    return random_problem(rng, graph, random_costs(rng, graph, **of_costs), **rest)


def random_instances(
    count: int, n: Range = (3, 6), *, seed: int = 0, **choices: Any
) -> Iterator[Problem]:
    """Yield `count` random problems; the one of each seed is always the same.

    Problem number `c` comes from ``seeded(f"{seed}/{c}")``, so that a failure can be looked
    at alone; see `random_instance` for the rest.
    """
    for number in range(count):
        yield random_instance(seeded(f"{seed}/{number}"), n, **choices)


def random_schedule(
    rng: random.Random,
    graph: Graph,
    *,
    recompute: bool = True,
    paging: bool = True,
    thrift: float | None = None,
) -> Schedule:
    """Make a random valid schedule, in general a wasteful one.

    Parameters
    ----------
    rng : random.Random
        Everything random comes from it.
    graph : Graph
        What is scheduled.
    recompute, paging : bool
        Whether tensors may be recomputed, and paged.
    thrift : float, optional
        Chance that a tensor is let go where it can be had again; default random.

    Returns
    -------
    Schedule
        Valid by the rules of execution; no budget is kept.
    """
    drop = thrift if thrift is not None else rng.random()
    waste = rng.choice((0.0, 0.1, 0.4))
    n, made_by = len(graph.nodes), graph.node_of
    again = [recompute and node.recomputable for node in graph.nodes]
    stored = {i for i, k in enumerate(made_by) if graph.nodes[k].on_aux}
    held: set[int] = set()
    R, S_RAM, S_AUX, M_in, M_out = relations = [set[tuple[int, int]]() for _ in range(5)]  # noqa: N806
    for t in range(n):
        listed = {i for i in stored if made_by[i] < t and paging}
        lost = {
            i
            for i in held
            if rng.random() < drop and (i in listed or again[made_by[i]] or not graph.users_of[i])
        }
        kept = held - lost
        computed = {t} | {k for k in range(t) if again[k] and rng.random() < waste}
        read = {i for i in listed - kept if rng.random() < waste}
        for k in range(t, -1, -1):
            for i in graph.inputs_of[k] if k in computed else ():
                if i in kept or i in read or made_by[i] in computed:
                    continue
                if i in listed and (not again[made_by[i]] or rng.random() < 0.5):
                    read.add(i)
                else:
                    computed.add(made_by[i])
        held = kept | read | {i for k in computed for i in graph.outputs_of[k]}
        written = {i for i in held if paging and rng.random() < (0.3 if made_by[i] == t else waste)}
        stored |= written
        unread = {i for i in listed - read if rng.random() < waste}
        for relation, members in zip(
            relations, (computed, kept, listed - unread, read, written), strict=True
        ):
            relation.update((t, member) for member in members)
    return Schedule(
        R=tuple(R), S_RAM=tuple(S_RAM), S_AUX=tuple(S_AUX), M_in=tuple(M_in), M_out=tuple(M_out)
    )


def scaled_instance(rng: random.Random, n: Range = (3, 5)) -> Problem:
    """Make a random problem whose bytes, times and energies span the scales that files allow.

    Bytes lie between 1 and 2**53, costs between 1e-15 and 1e15 of their usual figures, each by
    itself or all together, zeros among them. Limits are what random schedules take, to the byte,
    or one byte more or less.

    Parameters
    ----------
    rng : random.Random
        Everything random comes from it.
    n : int or (int, int)
        Number of nodes, or the least and the largest number.

    Returns
    -------
    Problem
        Not always feasible.
    """
    graph = _with_sizes(random_graph(rng, n), rng)
    while floor(graph).bytes == checkpoint_all_peak_bytes(graph):  # nothing to decide
        graph = _with_sizes(random_graph(rng, n), rng)
    costs = _with_scales(random_costs(rng, graph), rng)
    schedules = [random_schedule(rng, graph, thrift=rng.random()) for _ in range(30)]
    schedule = min(schedules, key=lambda found: simulate(graph, costs, found).peak_ram_bytes)
    done = simulate(graph, costs, schedule)
    within = rng.randint(floor(graph).bytes, checkpoint_all_peak_bytes(graph) - 1)
    ram = rng.choice((done.peak_ram_bytes, within)) + rng.choice((-1, 0, 0, 1))
    ram = min(ram, 2**53)
    problem = Problem(graph, costs, ram=max(1, ram))
    stored = {i for _, i in schedule.M_out if rng.random() < 0.8}
    aux_bytes = sum(graph.tensor_bytes[i] for i in stored) + rng.choice((-1, 0, 0, 1))
    near = rng.choice((1.0, 1.0, 1.0 - 1e-6, 1.0 + 1e-6, 1.1, 2.0))
    counts = rng.choice(("compute", "serial"))
    time_s = done.compute_s + (done.transfer_s if counts == "serial" else 0.0)
    limits: dict[str, Any] = {"deadline_counts": counts}
    if rng.random() < 0.4 and time_s > 0:
        limits["deadline"] = max(problem.pass_time_s, time_s * near)
    if rng.random() < 0.4:
        limits["aux_bytes"] = min(max(0, aux_bytes), 2**53)
    if rng.random() < 0.25 and done.energy_j:
        limits["energy_budget"] = max(problem.baseline_energy_j, done.energy_j * near)
    for name, chance in (("recompute", 0.1), ("paging", 0.1)):
        if rng.random() < chance:
            limits[name] = False
    minimize = rng.choice(("energy", "time", "ram", "writes"))
    return Problem(graph, costs, ram=problem.ram_budget_bytes, minimize=minimize, **limits)


def _with_sizes(graph: Graph, rng: random.Random) -> Graph:
    """Give the tensors and workspaces of a graph other sizes; what has none keeps none."""
    style = rng.choice(("powers", "heavy", "few"))
    bits = rng.choice((8, 31, 40, 52))
    heavy = [rng.randint(2 ** (bits - 1), 2**bits) for _ in range(3)]

    def size(before: int) -> int:
        if not before:
            return 0
        if style == "powers":
            return int(2 ** rng.uniform(0, bits))
        if style == "heavy":
            return before * (2**bits // 16) + rng.randint(0, 9)
        return rng.choice((1, 7, *heavy))

    return replace(
        graph,
        nodes=tuple(
            replace(
                node,
                outputs=tuple(replace(made, bytes=size(made.bytes)) for made in node.outputs),
                workspace_bytes=size(node.workspace_bytes),
            )
            for node in graph.nodes
        ),
    )


def _with_scales(costs: Costs, rng: random.Random) -> Costs:
    """Multiply costs by powers of ten: all by one, each by its own, or a few by a large one."""
    style = rng.choice(("plain", "all", "each", "few"))
    whole = {"time": 10 ** rng.uniform(-15, 15), "energy": 10 ** rng.uniform(-15, 15)}

    def scale(name: str) -> float:
        if style == "plain":
            return 1.0
        if style == "all":
            return whole[name]
        if style == "each":
            return 10 ** rng.uniform(-15, 15)
        return 1e15 if rng.random() < 0.15 else 1.0

    def scaled(cost: Cost) -> Cost:
        return Cost(cost.time_s * scale("time"), cost.energy_j * scale("energy"))

    return replace(
        costs,
        compute={name: scaled(cost) for name, cost in costs.compute.items()},
        pages=None
        if costs.pages is None
        else {
            name: PageCost(scaled(page.page_in), scaled(page.page_out))
            for name, page in costs.pages.items()
        },
    )
