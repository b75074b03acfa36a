"""Small graphs whose optimal schedules can be found by hand, and problems with these graphs."""

from dataclasses import replace

from poetmodel.device import Compute, Costs, Device, Storage, StorageMode, Transfer
from poetmodel.graph import Graph, Node, Phase, Tensor, operation
from poetmodel.problem import Problem


def skip_graph(*, mask=False, workspace=False, **attributes_of_a):
    """Return a graph of four nodes in a row; the last one also reads the output of the first.

    ====  ====== ===== ========= =============================
    node  reads  bytes workspace RAM when all is kept
    ====  ====== ===== ========= =============================
    a            4               4
    b     a      6     (1)       4 + 6 = 10
    c     b      5 (4+1)         4 + 6 + 5 = 15, the peak
    d     a, c   3               4 + 5 + 3 = 12, the floor
    ====  ====== ===== ========= =============================

    With `mask`, `c` makes two tensors, of 4 and 1 bytes, both read by `d`. With `workspace`, `b`
    has a workspace of 1 byte. Keywords are attributes of node `a`.
    """
    outputs_of_c = (Tensor(name="c", bytes=4), Tensor(name="c.mask", bytes=1))
    return Graph(
        name="skip",
        nodes=(
            operation("a", output_bytes=4, **attributes_of_a),
            operation("b", output_bytes=6, inputs=("a",), workspace_bytes=int(workspace)),
            make_node("c", ("b",), outputs_of_c if mask else (Tensor(name="c", bytes=5),)),
            operation("d", output_bytes=3, inputs=("a", "c", "c.mask") if mask else ("a", "c")),
        ),
    )


def parse_graph(*lines):
    """Return a graph from lines ``name[!] bytes[+workspace] [inputs] [@phase]``.

    ``!`` marks a node that is not recomputable; the default phase is forward. ``;`` also separates
    lines.
    """
    nodes = []
    for line in "; ".join(lines).split("; "):
        name, size, *words = line.split()
        size_text, _, workspace_text = size.partition("+")
        nodes.append(
            operation(
                name.rstrip("!"),
                output_bytes=int(size_text),
                inputs=tuple(word for word in words if word[0] != "@"),
                workspace_bytes=int(workspace_text or 0),
                phase=next((word[1:] for word in words if word[0] == "@"), "forward"),
                recomputable=not name.endswith("!"),
            )
        )
    return Graph(name="written", nodes=tuple(nodes))


def rename_graph(graph):
    """Return the graph with ``_`` before each name of a node or tensor."""
    nodes = (
        replace(
            node,
            name=f"_{node.name}",
            inputs=tuple(f"_{name}" for name in node.inputs),
            outputs=tuple(replace(tensor, name=f"_{tensor.name}") for tensor in node.outputs),
        )
        for node in graph.nodes
    )
    return replace(graph, name="renamed", nodes=tuple(nodes))


def make_node(name, inputs, outputs, **attributes):
    """Return a forward node with the given inputs and outputs; keywords are further attributes."""
    all_attributes = {"inputs": tuple(inputs), "outputs": tuple(outputs), **attributes}
    return Node(name=name, op="op", phase="forward", **all_attributes)


def costs_of(graph, times_s, energies_j=None, page_ins=None, page_outs=None, *, device=None):
    """Return costs; by default, energies equal times and page-outs equal page-ins."""
    return Costs.from_arrays(
        graph,
        compute_time_s=times_s,
        compute_energy_j=times_s if energies_j is None else energies_j,
        page_in=page_ins,
        page_out=page_ins if page_outs is None else page_outs,
        device=device,
    )


def even_costs(graph, *, page_in=(1.0, 1.0), page_out=(1.0, 1.0), device=None):
    """Return costs of 1 s and 1 J for the first node, 2 s and 2 J for the second, and so on.

    All page-ins cost `page_in`, (time, energy), and all page-outs `page_out`; None for a device
    without storage.
    """
    times = [1.0 + k for k in range(len(graph.nodes))]
    n_tensors = len(graph.tensors)
    return costs_of(
        graph,
        times,
        page_ins=None if page_in is None else [page_in] * n_tensors,
        page_outs=None if page_out is None else [page_out] * n_tensors,
        device=device,
    )


def skip_problem(**limits):
    """Return the problem of `skip_graph` with `even_costs`; by default 13 bytes of RAM.

    While `c` is computed, `a` must not be in RAM. The baseline is 10 J.

    ========================== =========================================== ========
    best schedules             how `a` is restored in stage 3               overhead
    ========================== =========================================== ========
    recomputation and paging   recomputed: 1 J                             1 J
    paging only                paged out and in: 1 J + 1 J                 2 J
    ========================== =========================================== ========
    """
    graph = skip_graph()
    return Problem(graph, even_costs(graph), **{"ram": 13, **limits})


def comb_graph(teeth=3):
    """Return a forward chain of `teeth` nodes and a backward chain that reads it in reverse.

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
    """Return a, b, c, d(b), e(a): a and b are idle while c, the largest, is computed."""
    return parse_graph("a 4", "b 4", "c 5", "d 1 b", "e 1 a")


def early_recomputation_problem(number):
    """Return problem 1 or 2, in which a small tensor must be recomputed before it is used.

    Its large input is in RAM in an earlier stage, and does not fit in the stages of its uses. There
    is no paging, and every computation costs 1 (baselines 5 and 6).

    1. budget 21: ``n1`` (2 B) is recomputed once, while ``n0`` (10 B) is in RAM: overhead 1.
    2. budget 23: the same, before ``n4`` and ``n5`` fill the RAM: overhead 1.
    """
    if number == 1:
        first_graph = parse_graph("n0 10", "n1 2 n0", "n2! 9+2 n0", "n3 9 n2", "n4 1 n1 n3")
        return unit_problem(first_graph, ram=21)
    second_graph = parse_graph("n0 10", "n1 2 n0", "n2 9+4 n0", "n3 1", "n4 9 n3", "n5 0 n1 n2 n4")
    return unit_problem(second_graph, ram=23)


def unit_problem(graph, **limits):
    """Return a problem without paging in which every computation costs 1."""
    ones = [1.0] * len(graph.nodes)
    costs = costs_of(graph, ones)
    return Problem(graph, costs, **limits)


def comb_problem(teeth=10, ram=13, transfer_cost=3.0, **limits):
    """Return a comb problem that takes several rounds of row generation.

    Each page-in and page-out costs `transfer_cost` s and J.
    """
    graph = comb_graph(teeth)
    costs = even_costs(
        graph, page_in=(transfer_cost, transfer_cost), page_out=(transfer_cost, transfer_cost)
    )
    return Problem(graph, costs, ram=ram, **limits)


def bench_device(
    *,
    idle_power_w=0.0,
    mode=StorageMode.BLOCKING,
    has_storage=True,
    ram_bytes=2**20,
    aux_bytes=None,
    memory_mapped=False,
):
    """Return a device with 1 FLOP/s and 1 B/s at 1 W each, without latency."""
    transfer = Transfer(latency_s=0.0, bytes_per_s=1.0, power_w=1.0)
    return Device(
        name="bench",
        ram_bytes=ram_bytes,
        aux_bytes=aux_bytes,
        compute=Compute(flops_per_s=1.0, power_w=1.0),
        storage=Storage(
            mode=StorageMode(mode), page_in=transfer, page_out=transfer, memory_mapped=memory_mapped
        )
        if has_storage
        else None,
        idle_power_w=idle_power_w,
    )


def training_chain(
    sizes, *, reads_own=True, tapes=None, workspaces=(), gradient_bytes=1, loss=True
):
    """Return ``x -> f1 -> ... -> fL [-> loss -> gl] -> gL -> ... -> g1``.

    `sizes` are the bytes of the sample and of the output of each layer. ``gk`` reads the input of
    ``fk`` and, if `reads_own`, the output of ``fk``; with `tapes`, its second output ``fk.tape``
    with these bytes instead. The loss of one byte has a gradient node ``gl``, which reads the loss
    and the output of the last layer.
    """
    layers = range(1, len(sizes))
    nodes = [operation("x", output_bytes=sizes[0], phase="input", recomputable=False)]
    for k in layers:
        outputs = [Tensor(name=f"f{k}", bytes=sizes[k])]
        if tapes is not None:
            outputs.append(Tensor(name=f"f{k}.tape", bytes=tapes[k - 1]))
        input_name = f"f{k - 1}" if k > 1 else "x"
        nodes.append(
            make_node(
                f"f{k}",
                (input_name,),
                outputs,
                workspace_bytes=workspaces[k - 1] if workspaces else 0,
            )
        )
    own_output = "f{}" if tapes is None else "f{}.tape"
    previous_gradient = ()
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
        previous_gradient = ("gl",)
    for k in reversed(layers):
        inputs = (f"f{k - 1}" if k > 1 else "x", *((own_output.format(k),) if reads_own else ()))
        node = operation(
            f"g{k}",
            output_bytes=gradient_bytes,
            phase="backward",
            inputs=(*previous_gradient, *inputs),
        )
        nodes.append(node)
        previous_gradient = (node.name,)
    return Graph(name="chain", nodes=tuple(nodes))


def chain_costs(graph, *, seconds=None, page_s=1, mode="dma"):
    """Return costs of 1 s per node, or `seconds`, and `page_s` per byte of a transfer; 1 W each."""
    times = [1] * len(graph.nodes) if seconds is None else list(seconds)
    transfer_costs = [(page_s * tensor.bytes, page_s * tensor.bytes) for tensor in graph.tensors]
    return costs_of(graph, times, page_ins=transfer_costs, device=bench_device(mode=mode))


def make_state_node(name, size):
    """Return a node with a state tensor of the same name."""
    outputs = (Tensor(name=name, bytes=size),)
    return Node(name=name, op="parameter", phase=Phase.STATE, outputs=outputs)


def make_update_node(name, *inputs, **replaced):
    """Return a node that replaces state tensors; keywords are their names and bytes."""
    outputs = tuple(
        Tensor(name=f"{state_name}+", bytes=size, replaces=state_name)
        for state_name, size in replaced.items()
    )
    return Node(
        name=name,
        op="sgd",
        phase=Phase.UPDATE,
        inputs=(*inputs, *replaced),
        outputs=outputs,
        recomputable=False,
    )


def recompute_before_update_problem():
    """Return a problem in which `a`, read by `d`, must be recomputed before `u` replaces `w`.

    `a` reads `w`, and does not fit beside the workspace of `b`. The best schedule recomputes `a` in
    stage 4, that of `u`, for 1 J; transfers cost more.
    """
    graph = Graph(
        name="in time",
        nodes=(
            operation("c", output_bytes=1, phase="input"),
            make_state_node("w", 1),
            operation("a", output_bytes=10, inputs=("c", "w")),
            operation("b", output_bytes=1, inputs=("c",), workspace_bytes=10),
            make_update_node("u", "b", w=1),
            operation("d", output_bytes=1, inputs=("a",)),
        ),
    )
    costs = costs_of(graph, [1, 0, 1, 1, 1, 1], page_ins=[(9, 9)] * len(graph.tensors))
    return Problem(graph, costs, ram=14)
