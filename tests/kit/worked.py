"""Small graphs whose schedules can be worked out by hand, and problems over them."""

from dataclasses import replace

from poetmodel.device import Compute, Costs, Device, Storage, StorageMode, Transfer
from poetmodel.graph import Graph, Node, Phase, Tensor, operation
from poetmodel.problem import Problem


def skip_graph(*, mask=False, workspace=False, **of_a):
    """Make four nodes in a row and one tensor that skips two of them.

    ====  ====== ===== ========= =============================
    node  reads  bytes workspace RAM when all is kept
    ====  ====== ===== ========= =============================
    a            4               4
    b     a      6     (1)       4 + 6 = 10
    c     b      5 (4+1)         4 + 6 + 5 = 15, the peak
    d     a, c   3               4 + 5 + 3 = 12, the floor
    ====  ====== ===== ========= =============================

    With `mask`, `c` makes two tensors, of 4 and 1 bytes, both read by `d`; with `workspace`, `b`
    needs 1 byte. Other attributes are of the node `a`.
    """
    parts = (Tensor(name="c", bytes=4), Tensor(name="c.mask", bytes=1))
    return Graph(
        name="skip",
        nodes=(
            operation("a", output_bytes=4, **of_a),
            operation("b", output_bytes=6, inputs=("a",), workspace_bytes=int(workspace)),
            making("c", ("b",), parts if mask else (Tensor(name="c", bytes=5),)),
            operation("d", output_bytes=3, inputs=("a", "c", "c.mask") if mask else ("a", "c")),
        ),
    )


def written(*lines):
    """Make a graph of lines ``name[!] bytes[+workspace] [inputs] [@phase]``.

    ``!`` is computed once, and the phase is forward unless it is stated; ``;`` parts lines too.
    """
    nodes = []
    for line in "; ".join(lines).split("; "):
        name, size, *words = line.split()
        taken, _, space = size.partition("+")
        nodes.append(
            operation(
                name.rstrip("!"),
                output_bytes=int(taken),
                inputs=tuple(word for word in words if word[0] != "@"),
                workspace_bytes=int(space or 0),
                phase=next((word[1:] for word in words if word[0] == "@"), "forward"),
                recomputable=not name.endswith("!"),
            )
        )
    return Graph(name="written", nodes=tuple(nodes))


def renamed(graph):
    """Return a graph in which nodes and tensors have other names, in the same order."""
    nodes = (
        replace(
            node,
            name=f"_{node.name}",
            inputs=tuple(f"_{name}" for name in node.inputs),
            outputs=tuple(replace(made, name=f"_{made.name}") for made in node.outputs),
        )
        for node in graph.nodes
    )
    return replace(graph, name="renamed", nodes=tuple(nodes))


def making(name, inputs, outputs, **more):
    """Return a node of the forward pass that reads tensors by name and makes some."""
    given = {"inputs": tuple(inputs), "outputs": tuple(outputs), **more}
    return Node(name=name, op="op", phase="forward", **given)


def costs_of(graph, times_s, energies_j=None, pages=None, out=None, *, device=None):
    """Make costs; energies are the times and page-outs the page-ins unless they are given."""
    return Costs.from_arrays(
        graph,
        compute_time_s=times_s,
        compute_energy_j=times_s if energies_j is None else energies_j,
        page_in=pages,
        page_out=pages if out is None else out,
        device=device,
    )


def even_costs(graph, *, page_in=(1.0, 1.0), page_out=(1.0, 1.0), device=None):
    """Make costs of 1 s and 1 J for the first node, 2 and 2 for the second and so on.

    Every page-in and page-out costs the same, (time, energy); None takes the storage away.
    """
    rising = [1.0 + k for k in range(len(graph.nodes))]
    tensors = len(graph.tensors)
    return costs_of(
        graph,
        rising,
        pages=None if page_in is None else [page_in] * tensors,
        out=None if page_out is None else [page_out] * tensors,
        device=device,
    )


def skip_problem(**limits):
    """State the problem of `skip_graph` with `even_costs`; by default 13 bytes of RAM.

    Something must leave RAM while `c` is computed, and only `a` can. The baseline is 10 J.

    ========================== =========================================== ========
    best schedules             how `a` is had again in stage 3             overhead
    ========================== =========================================== ========
    recomputation and paging   recomputed: 1 J                             1 J
    paging only                paged out and in: 1 J + 1 J                 2 J
    ========================== =========================================== ========
    """
    graph = skip_graph()
    return Problem(graph, even_costs(graph), **{"ram": 13, **limits})


def comb_graph(teeth=3):
    """Make a forward chain of `teeth` nodes and a backward chain that reads it in reverse.

    Forward ``f0 f1 ...`` of 4 bytes each read their predecessor; backward ``g2 g1 g0`` of 1 byte
    each read their predecessor and the forward tensor of their number.
    """
    forward = [
        operation(f"f{k}", output_bytes=4, inputs=(f"f{k - 1}",) if k else ()) for k in range(teeth)
    ]
    backward = [
        operation(
            f"g{k}",
            output_bytes=1,
            phase="backward",
            inputs=(f"f{k}",) if k == teeth - 1 else (f"f{k}", f"g{k + 1}"),
        )
        for k in reversed(range(teeth))
    ]
    return Graph(name="comb", nodes=(*forward, *backward))


def gap_graph():
    """Return a, b, c, d = d(b), e = e(a): a and b wait while c, the largest, is computed."""
    return written("a 4", "b 4", "c 5", "d 1 b", "e 1 a")


def early_recomputation(number):
    """State one of two problems in which a small tensor must be recomputed early.

    That is in a stage where nothing uses it, because its large input is in RAM just then, and the
    stages of its uses have no room for that. Recomputation only, every cost is 1 (baseline 5, 6).

    1. budget 21: ``n1`` (2 B) is recomputed once, while ``n0`` (10 B) is in RAM: overhead 1.
    2. budget 23: the same before ``n4`` and ``n5`` fill the RAM: overhead 1.
    """
    if number == 1:
        first = written("n0 10", "n1 2 n0", "n2! 9+2 n0", "n3 9 n2", "n4 1 n1 n3")
        return unit_problem(first, ram=21)
    second = written("n0 10", "n1 2 n0", "n2 9+4 n0", "n3 1", "n4 9 n3", "n5 0 n1 n2 n4")
    return unit_problem(second, ram=23)


def unit_problem(graph, **limits):
    """State a problem without paging in which every computation costs 1."""
    ones = [1.0] * len(graph.nodes)
    costs = costs_of(graph, ones)
    return Problem(graph, costs, **limits)


def comb_problem(teeth=10, ram=13, page=3.0, **limits):
    """State a problem that takes several rounds: a comb, with pages at a middling price."""
    graph = comb_graph(teeth)
    costs = even_costs(graph, page_in=(page, page), page_out=(page, page))
    return Problem(graph, costs, ram=ram, **limits)


def bench_device(
    *,
    idle_power_w=0.0,
    mode=StorageMode.BLOCKING,
    storage=True,
    ram_bytes=2**20,
    aux_bytes=None,
    memory_mapped=False,
):
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


def training_chain(
    sizes, *, reads_own=True, tapes=None, workspaces=(), gradient_bytes=1, loss=True
):
    """Make ``x -> f1 -> ... -> fL [-> loss] [-> gl] -> gL -> ... -> g1``.

    Sizes are bytes of the sample and of what each layer makes. ``gk`` reads what ``fk`` read, and
    what it made, if `reads_own`, or a second output ``fk.tape`` in its place, of the bytes in
    `tapes`. The loss of one byte has a gradient of its own, which reads it and the last layer.
    """
    layers = range(1, len(sizes))
    nodes = [operation("x", output_bytes=sizes[0], phase="input", recomputable=False)]
    for k in layers:
        outputs = [Tensor(name=f"f{k}", bytes=sizes[k])]
        if tapes is not None:
            outputs.append(Tensor(name=f"f{k}.tape", bytes=tapes[k - 1]))
        read = f"f{k - 1}" if k > 1 else "x"
        nodes.append(
            making(
                f"f{k}", (read,), outputs, workspace_bytes=workspaces[k - 1] if workspaces else 0
            )
        )
    own = "f{}" if tapes is None else "f{}.tape"
    before = ()
    if loss:
        nodes.append(operation("loss", output_bytes=1, phase="loss", inputs=(nodes[-1].name,)))
        nodes.append(
            operation(
                "gl",
                output_bytes=gradient_bytes,
                phase="backward",
                inputs=("loss", f"f{len(sizes) - 1}"),
            )
        )
        before = ("gl",)
    for k in reversed(layers):
        inputs = (f"f{k - 1}" if k > 1 else "x", *((own.format(k),) if reads_own else ()))
        node = operation(
            f"g{k}", output_bytes=gradient_bytes, phase="backward", inputs=(*before, *inputs)
        )
        nodes.append(node)
        before = (node.name,)
    return Graph(name="chain", nodes=tuple(nodes))


def chain_costs(graph, *, seconds=None, page_s=1, mode="dma"):
    """Return costs of a graph: a second and a joule per node, or `seconds`; `page_s` per byte."""
    times = [1] * len(graph.nodes) if seconds is None else list(seconds)
    moves = [(page_s * tensor.bytes, page_s * tensor.bytes) for tensor in graph.tensors]
    return costs_of(graph, times, pages=moves, device=bench_device(mode=mode))


def recomputations(problem, pairs):
    """Return how many computations of a schedule are not the first of their node."""
    return len(pairs) - len(problem.graph.nodes)


def state(name, size):
    """Return a node that holds a state tensor of its own name."""
    outputs = (Tensor(name=name, bytes=size),)
    return Node(name=name, op="parameter", phase=Phase.STATE, outputs=outputs)


def update(name, *inputs, **replaced):
    """Return a node that replaces state tensors, given by name with their bytes."""
    outputs = tuple(
        Tensor(name=f"{old}+", bytes=size, replaces=old) for old, size in replaced.items()
    )
    return Node(
        name=name,
        op="sgd",
        phase=Phase.UPDATE,
        inputs=(*inputs, *replaced),
        outputs=outputs,
        recomputable=False,
    )


def in_time_problem():
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
    costs = costs_of(graph, [1, 0, 1, 1, 1, 1], pages=[(9, 9)] * len(graph.tensors))
    return Problem(graph, costs, ram=14)
