"""Small random graphs, also with state, their problems and schedules, reproducible by seed.

Bytes, times and energies are small integers, so that sums are exact and ties are common, except in
*scaled* instances.
"""

import random
from dataclasses import replace

from kit.worked import bench_device, make_node, make_state_node
from poetmodel.device import Cost, Costs, PageCost, StorageMode
from poetmodel.errors import InputError
from poetmodel.graph import Graph, Node, Phase, Tensor, checkpoint_all_peak_bytes, floor, operation
from poetmodel.problem import Problem
from poetmodel.schedule import Schedule, simulate


def make_rng(seed):
    """Return a random number generator that depends on `seed` alone."""
    return random.Random(seed)  # noqa: S311 - reproducible, nothing to keep secret


def random_graph(
    rng,
    n=(3, 6),
    *,
    two_outputs=True,
    no_outputs=True,
    workspace=True,
    on_aux=True,
    non_recomputable=True,
    zero_bytes=True,
    resident=False,
    density=None,
    max_bytes=9,
    name="random",
):
    """Draw a graph of nodes ``n0``, ``n1``, ...; names of second tensors end in ``.b``.

    `n` is the number of nodes, or its range. Each switch permits the property of its name. Tensors
    and workspaces have up to `max_bytes`. A node reads each earlier tensor with the probability
    `density`, by default random; without inputs, it mostly reads the last tensor.
    """
    size = n if isinstance(n, int) else rng.randint(*n)
    chance = density if density is not None else rng.choice((0.2, 0.4, 0.6))
    nodes = []
    tensors = []
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
            make_node(
                f"n{k}",
                inputs,
                outputs,
                workspace_bytes=rng.randint(1, max_bytes)
                if workspace and rng.random() < 0.25
                else 0,
                recomputable=not (non_recomputable and rng.random() < 0.2),
                on_aux=on_aux and not inputs and bool(names) and rng.random() < 0.4,
            )
        )
        tensors.extend(names)
    kinds = {"parameters": rng.randint(0, 20), "gradients": rng.randint(0, 20)} if resident else {}
    return Graph(name=name, nodes=tuple(nodes), resident_bytes=kinds)


def random_costs(rng, graph, *, zero_cost=True, storage=True, idle=True, mode=StorageMode.BLOCKING):
    """Draw integer costs of a graph, also 0 if `zero_cost`, on a device with or without storage.

    If `idle`, the device may have an idle power of 0.5, 1 or 2 W.
    """
    dear = rng.choice((3, 6, 12))
    cheap = rng.choice((2, 4, 12))

    def draw(most):
        return 0 if zero_cost and rng.random() < 0.12 else rng.randint(1, most)

    power = rng.choice((0.5, 1.0, 2.0)) if idle and rng.random() < 0.3 else 0.0
    pages = [[(draw(cheap), draw(cheap)) for _ in graph.tensors] for _ in range(2)]
    return Costs.from_arrays(
        graph,
        compute_time_s=[0 if node.is_state else draw(dear) for node in graph.nodes],
        compute_energy_j=[0 if node.is_state else draw(dear) for node in graph.nodes],
        page_in=pages[0] if storage else None,
        page_out=pages[1] if storage else None,
        device=bench_device(idle_power_w=power, mode=mode, has_storage=storage),
    )


def random_problem(
    rng,
    graph,
    costs,
    *,
    deadline=True,
    aux_limit=True,
    energy_budget=True,
    switches=True,
    below_floor=False,
    **fixed,
):
    """Draw a problem over a graph and its costs, which may be infeasible.

    Its RAM is mostly from the minimum RAM to below the keep-all peak; if `below_floor`, at times
    below the minimum RAM. Each other switch permits the limit of its name, or (`switches`) a
    problem without paging or recomputation. `fixed` are arguments of `Problem`.
    """
    low, high = floor(graph).bytes, checkpoint_all_peak_bytes(graph)
    least = max(1, low // 2 if below_floor and rng.random() < 0.2 else low)
    ram = rng.randint(least, max(least, high - 1)) if rng.random() < 0.9 else max(1, high)
    table = costs.table(graph)
    pass_s, pass_j = sum(table.compute_time_s), sum(table.compute_energy_j)
    dearest_s, dearest_j = max(table.compute_time_s), max(table.compute_energy_j)
    idle_w = costs.device.idle_power_w if costs.device is not None else 0.0
    drawn = {
        "deadline": pass_s + rng.randint(0, int(2 * dearest_s) + 4),
        "aux_bytes": rng.randint(0, 1 + sum(graph.tensor_bytes)),
        "energy_budget": pass_j + idle_w * pass_s + rng.randint(0, int(2 * dearest_j) + 6),
        "recompute": False,
        "paging": False,
    }
    chosen = {
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


def random_instance(rng, n=(3, 6), **choices):
    """Draw a problem of `n` nodes, a number or a range, which may be infeasible.

    `choices` are options of `random_graph`, `random_costs` or `random_problem`, or arguments of
    `Problem`.
    """
    of_graph = {key: value for key, value in choices.items() if key in _GRAPH_KEYS}
    of_costs = {key: value for key, value in choices.items() if key in _COST_KEYS}
    rest = {
        key: value for key, value in choices.items() if key not in of_graph and key not in of_costs
    }
    graph = random_graph(rng, n, **of_graph)
    return random_problem(rng, graph, random_costs(rng, graph, **of_costs), **rest)


def random_instances(count, n=(3, 6), *, seed=0, **choices):
    """Yield `count` problems of `random_instance`, with its options.

    Problem number `c` is drawn by ``make_rng(f"{seed}/{c}")``, so that a failure can be reproduced
    alone.
    """
    for number in range(count):
        yield random_instance(make_rng(f"{seed}/{number}"), n, **choices)


def random_schedule(rng, graph, *, recompute=True, paging=True, thrift=None, mapped=False):
    """Draw a schedule that follows the rules, mostly a wasteful one; limits are ignored.

    `thrift` is the probability of evicting a tensor that can be restored, by default random. If
    `mapped`, storage is memory-mapped. Returns None if a needed tensor cannot be restored, because
    state that it depends on was replaced.
    """
    made_by, state_tensors = graph.node_of, set(graph.state_tensors)
    drop = rng.random() * (0.7 if graph.version > 1 else 1.0) if thrift is None else thrift
    waste = rng.choice((0.0, 0.1, 0.4))
    share = rng.choice((0.0, 0.3, 0.6, 1.0)) if graph.version > 1 else 0.0
    resident = {i for i in state_tensors if rng.random() < share}
    apart = resident | (state_tensors if mapped else set())
    renewed = {new: old for old, new in graph.replacement_of.items()}
    stored = {i for i, k in enumerate(made_by) if graph.nodes[k].on_aux}
    stored |= state_tensors - resident
    held = set()
    stages = []
    for t in range(len(graph.nodes)):
        gone = {old for new, old in renewed.items() if made_by[new] < t}
        again = [
            recompute and node.recomputable and not node.is_state and not gone & {*reads}
            for node, reads in zip(graph.nodes[:t], graph.inputs_of[:t], strict=True)
        ]
        listed = {i for i in stored if made_by[i] < t and paging} - gone
        readable = listed - apart - renewed.keys()
        unused = {i for i in held if not graph.users_of[i] and graph.version < 2}
        lost = {
            i
            for i in held
            if rng.random() < drop and (i in listed or again[made_by[i]] or i in unused)
        }
        kept = held - lost - gone - apart - renewed.keys()
        computed = {t} | {k for k in range(t) if again[k] and rng.random() < waste}
        read = {i for i in readable - kept if rng.random() < waste}
        for k in range(t, -1, -1):
            for i in graph.inputs_of[k] if k in computed else ():
                if i in kept or i in read or made_by[i] in computed or i in apart:
                    continue
                if i in readable and (not again[made_by[i]] or rng.random() < 0.5):
                    read.add(i)
                elif again[made_by[i]]:
                    computed.add(made_by[i])
                else:
                    return None
        held = kept | read | {i for k in computed for i in graph.outputs_of[k]}
        written = {
            i
            for i in held - state_tensors - renewed.keys()
            if paging and rng.random() < (0.3 if made_by[i] == t else waste)
        }
        back = {i for i in graph.outputs_of[t] if i in renewed and renewed[i] not in resident}
        written |= back
        stored |= written
        unread = {i for i in listed - read if rng.random() < waste}
        stages.append((computed, kept, listed - unread, read, written))
    R, S_RAM, S_AUX, M_in, M_out = (  # noqa: N806
        tuple((t, member) for t, stage in enumerate(stages) for member in stage[relation])
        for relation in range(5)
    )
    return Schedule(R=R, S_RAM=S_RAM, S_AUX=S_AUX, M_in=M_in, M_out=M_out, resident=(*resident,))


def scaled_instance(rng, n=(3, 5)):
    """Draw a problem whose bytes, times and energies have any scale that files permit.

    Bytes are up to 2**53. Costs are multiplied by factors from 1e-15 to 1e15, each by its own or
    all by one. Limits are the totals of a random schedule, or close to them, RAM to one byte. The
    problem may be infeasible.
    """
    graph = _with_sizes(random_graph(rng, n), rng)
    while floor(graph).bytes == checkpoint_all_peak_bytes(graph):  # no decision is possible
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
    limits = {"deadline_counts": counts}
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


def _with_sizes(graph, rng, bits=(8, 31, 40, 52)):
    """Return the graph with random sizes of tensors and workspaces; 0 bytes remain 0."""
    style, bits = rng.choice(("powers", "heavy", "few")), rng.choice(bits)
    heavy = [rng.randint(2 ** (bits - 1), 2**bits) for _ in range(3)]

    def size(before):
        if not before:
            return 0
        if style == "powers":
            return int(2 ** rng.uniform(0, bits))
        if style == "heavy":
            return before * (2**bits // 16) + rng.randint(0, 9)
        return rng.choice((1, 7, *heavy))

    known = {}
    nodes = []
    for node in graph.nodes:
        for made in node.outputs:
            known[made.name] = known[made.replaces] if made.replaces else size(made.bytes)
        outputs = tuple(replace(made, bytes=known[made.name]) for made in node.outputs)
        space = size(node.workspace_bytes)
        nodes.append(replace(node, outputs=outputs, workspace_bytes=space))
    return replace(graph, nodes=tuple(nodes))


def _with_scales(costs, rng):
    """Return costs times powers of ten: none, one for all, one for each, or 1e15 for a few."""
    style = rng.choice(("plain", "all", "each", "few"))
    whole = {"time": 10 ** rng.uniform(-15, 15), "energy": 10 ** rng.uniform(-15, 15)}

    def scale(name):
        if style == "plain":
            return 1.0
        if style == "all":
            return whole[name]
        if style == "each":
            return 10 ** rng.uniform(-15, 15)
        return 1e15 if rng.random() < 0.15 else 1.0

    def scaled(cost):
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


def random_training_graph(rng, layers, *, reads=0.7):
    """Draw a network with skips and second outputs, and its backward pass.

    `reads` is the probability that a backward node reads each input and output of its layer.
    """
    nodes = [Node(name="x", op="op", phase="input", outputs=(Tensor(name="x", bytes=3),))]
    made = ["x"]
    for k in range(1, layers + 1):
        inputs = [made[-1]]
        if rng.random() < 0.4:
            inputs.append(rng.choice(made))
        names = [f"f{k}", f"f{k}.b"] if rng.random() < 0.3 else [f"f{k}"]
        nodes.append(
            Node(
                name=f"f{k}",
                op="op",
                phase="forward" if k < layers else "loss",
                inputs=tuple(inputs),
                outputs=tuple(Tensor(name=name, bytes=rng.randint(1, 9)) for name in names),
                workspace_bytes=rng.choice((0, 0, 4)),
                recomputable=rng.random() < 0.9,
            )
        )
        made.append(f"f{k}")
    outputs = {node.name: [tensor.name for tensor in node.outputs] for node in nodes}
    for node in reversed(nodes[1:]):
        read = [name for name in (*node.inputs, *outputs[node.name]) if rng.random() < reads]
        last = nodes[-1].name if nodes[-1].phase == "backward" else outputs[node.name][0]
        nodes.append(
            operation(
                f"g.{node.name}",
                output_bytes=rng.randint(1, 9),
                phase="backward",
                inputs=(last, *read),
            )
        )
    return Graph(name="random training", nodes=tuple(nodes))


def varied_graph(rng, n):
    """Draw a graph of `n` nodes, with many workspaces, outputs or zero sizes, or with none."""
    several, empty = rng.choice((0, 0, 0.3)), rng.choice((0, 0.2))
    spaces, once = rng.choice((0, 0.4, 1)), rng.choice((0, 0.3))
    density, most = rng.choice((0.15, 0.25, 0.4)), rng.choice((2, 4, 9))
    stored = rng.choice((0, 0, 0.6))
    nodes = []
    tensors = []
    for k in range(n):
        inputs = [name for name in tensors if rng.random() < density]
        if not inputs and tensors and rng.random() < 0.7:
            inputs = [tensors[-1]]
        names = [f"n{k}", *(f"n{k}.b" for _ in range(rng.random() < several))]
        sizes = [0 if rng.random() < empty else rng.randint(1, most) for _ in names]
        nodes.append(
            make_node(
                f"n{k}",
                inputs,
                [Tensor(name=n, bytes=b) for n, b in zip(names, sizes, strict=True)],
                workspace_bytes=rng.randint(1, most) if rng.random() < spaces else 0,
                recomputable=rng.random() >= once,
                on_aux=not inputs and rng.random() < stored,
            )
        )
        tensors += names
    return Graph(name="varied", nodes=tuple(nodes))


def pointwise_graph(rng, n):
    """Draw a graph of `n` nodes, many of which are the only reader of a tensor.

    Their outputs are mostly not larger than that tensor. Nodes of the second half read many
    earlier tensors.
    """
    nodes = []
    shared = []
    alone = {}
    for k in range(n):
        late = k > n / 2
        inputs = [name for name in shared if rng.random() < (0.5 if late else 0.2)]
        size = rng.randint(2, 6)
        if alone:
            name, most = alone.popitem()
            size = rng.randint(1, most + rng.choice((0, 0, 3)))
            inputs = [name, *(inputs if rng.random() < 0.5 else [])]
        nodes.append(
            operation(
                f"n{k}",
                output_bytes=size,
                inputs=tuple(inputs),
                workspace_bytes=rng.choice((0, 0, 3)),
            )
        )
        if not late and rng.random() < 0.6:
            alone[f"n{k}"] = size
        else:
            shared.append(f"n{k}")
    return Graph(name="pointwise", nodes=tuple(nodes))


def scarce_problem(seed, n, graph_of=varied_graph, **fixed):
    """Draw a problem whose RAM is below the keep-all peak, often little above the minimum RAM.

    Graphs whose minimum RAM is the keep-all peak, as in most small ones, are drawn again: a budget
    for them is infeasible or no limit. `graph_of(rng, n)` draws a graph.
    """
    rng = make_rng(seed)
    while True:
        graph = graph_of(rng, n if isinstance(n, int) else rng.randint(*n))
        low, high = max(1, floor(graph).bytes), checkpoint_all_peak_bytes(graph)
        if low < high:
            break
    ram = rng.randint(low, min(high - 1, low + rng.choice((2, high))))
    costs = random_costs(rng, graph)
    free = {name: rng.random() < 0.5 for name in ("deadline", "energy_budget", "aux_limit")}
    switches = rng.random() < 0.4
    return random_problem(rng, graph, costs, **{"ram": ram, "switches": switches, **free, **fixed})


def random_step(rng, n=(3, 7), *, max_bytes=9, flops=0):
    """Draw a training step with state that is read, replaced or neither, and in-place pairs.

    Nodes have up to two outputs beside replacements of state. Zero sizes, inputs on storage,
    workspaces and nodes that are not recomputable occur.
    """
    nodes = []
    plain = []
    held = {}  # bytes of state that is not replaced yet
    chance = rng.choice((0.3, 0.5, 0.7))

    def size():
        return 0 if rng.random() < 0.08 else rng.randint(1, max_bytes)

    count = rng.randint(*n)
    while len(nodes) < count:
        k = len(nodes)
        if rng.random() < 0.3:
            held[f"w{k}"] = size()
            nodes.append(make_state_node(f"w{k}", held[f"w{k}"]))
            continue
        read = [name for name in plain if rng.random() < chance]
        reads_state = [name for name in held if rng.random() < chance]
        replaced = [name for name in reads_state if rng.random() < 0.4]
        made = [Tensor(name=f"n{k}{end}", bytes=size()) for end in ("", ".b")]
        made = made[: rng.choice((0, 1, 1, 1, 2) if replaced else (1, 1, 1, 1, 2))]
        givers = rng.sample(read, len(read))
        pairs = {
            tensor.name: giver
            for tensor, giver in zip(made, givers, strict=False)
            if rng.random() < 0.6
        }
        replacements = [
            Tensor(name=f"{name}+", bytes=held.pop(name), replaces=name) for name in replaced
        ]
        outputs = [*made, *replacements]
        rng.shuffle(outputs)
        inputs = [*read, *reads_state]
        rng.shuffle(inputs)
        nodes.append(
            Node(
                name=f"n{k}",
                op="op",
                phase=Phase.UPDATE if replaced else Phase.FORWARD,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                workspace_bytes=size() if rng.random() < 0.25 else 0,
                flops=rng.randint(0, flops),
                recomputable=not replaced and rng.random() < 0.85,
                on_aux=not inputs and bool(made) and rng.random() < 0.3,
                in_place=tuple(pairs.items()),
            )
        )
        plain += [tensor.name for tensor in made]
    return Graph(name="step", nodes=tuple(nodes))


def state_costs(rng, graph, *, mapped=False):
    """Draw a time and an energy above 0 for each computation and transfer; 0 for state nodes.

    Storage is memory-mapped if `mapped`.
    """
    device = bench_device(aux_bytes=10**6)
    assert device.storage is not None
    count = len(graph.tensors)
    work = [0 if node.is_state else 1 for node in graph.nodes]

    def figures():
        return [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(count)]

    return Costs.from_arrays(
        graph,
        compute_time_s=[some * rng.randint(1, 9) for some in work],
        compute_energy_j=[some * rng.randint(1, 9) for some in work],
        page_in=figures(),
        page_out=figures(),
        device=replace(device, storage=replace(device.storage, memory_mapped=mapped)),
    )


def random_state_problems(count, n, *, seed, at_floor=False, **stated):
    """Yield `count` problems with state and budgets from the minimum RAM to the keep-all peak.

    If `at_floor`, budgets are the minimum RAM. Objective, switches of paging and recomputation,
    deadline and storage are drawn, unless they are in `stated`.
    """
    number = made = 0
    while made < count:
        rng = make_rng(f"state problem/{seed}/{number}")
        number += 1
        graph, mapped = random_step(rng, n), rng.random() < 0.25
        least = floor(graph, memory_mapped=mapped).bytes
        peak = checkpoint_all_peak_bytes(graph)
        drawn = {
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
            continue  # no node takes time, of which the deadline is a percentage
        made += 1
        yield problem


def _replaces_two(graph):
    replaced = set(graph.replacement_of.values())
    return any(len(replaced.intersection(made)) > 1 for made in graph.outputs_of)


def _has_late_reader(graph):
    """Return whether a recomputable reader of state has an output read after the replacement."""
    return any(
        graph.nodes[k].recomputable
        and any(max(graph.users_of[i], default=0) > graph.node_of[new] for i in graph.outputs_of[k])
        for old, new in graph.replacement_of.items()
        for k in graph.users_of[old]
    )


def state_problem(seed, n=(3, 5), **fixed):
    """Draw a problem over a training step with state or in-place operators, with all limits.

    With probability 3/4, RAM is from the minimum RAM to below the keep-all peak, often close to
    the minimum. With 1/5, storage is memory-mapped. With 2/5, a recomputable reader of state has an
    output that is read after the replacement; with 1/5, a node replaces two state tensors.
    """
    rng = make_rng(f"state/{seed}")
    scarce, mapped = rng.random() < 0.75, rng.random() < 0.2
    kind = rng.choice((None, None, _replaces_two, _has_late_reader, _has_late_reader))
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
    storage = replace(device.storage, memory_mapped=mapped)
    costs = replace(costs, device=replace(device, storage=storage))
    return random_problem(rng, graph, costs, below_floor=True, **fixed)


def scaled_state_problem(seed, n=(3, 5)):
    """Draw a problem of `state_problem` with bytes up to 2**50, and RAM of at least the minimum."""
    problem, rng = state_problem(seed, n), make_rng(f"scaled state/{seed}")
    graph = _with_sizes(problem.graph, rng, (31, 40, 49))
    low = max(1, floor(graph, memory_mapped=problem.reads_in_place).bytes)
    high = max(low, checkpoint_all_peak_bytes(graph))
    limits = {"ram": rng.choice((low, low + 1, rng.randint(low, high)))}
    if rng.random() < 0.4:
        limits["aux_bytes"] = rng.randint(0, sum(graph.tensor_bytes))
    minimize = rng.choice(("energy", "time", "ram", "writes", "writes"))
    return replace(problem, graph=graph, minimize=minimize, **limits)
