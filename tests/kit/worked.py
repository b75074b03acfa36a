"""Small graphs whose schedules can be worked out by hand, and problems over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poetmodel.device import Compute, Costs, Device, Storage, StorageMode, Transfer
from poetmodel.graph import Graph, Node, Phase, Tensor, operation
from poetmodel.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence


def skip_graph(*, mask: bool = False, workspace: bool = False, **of_a: Any) -> Graph:
    """Make four nodes in a row and one tensor that skips two of them.

    ====  ====== ===== ========= =============================
    node  reads  bytes workspace RAM when all is kept
    ====  ====== ===== ========= =============================
    a            4               4
    b     a      6     (1)       4 + 6 = 10
    c     b      5 (4+1)         4 + 6 + 5 = 15, the peak
    d     a, c   3               4 + 5 + 3 = 12, the floor
    ====  ====== ===== ========= =============================

    Parameters
    ----------
    mask : bool
        Let `c` make two tensors, of 4 and 1 bytes, both read by `d`, in place of one of 5.
    workspace : bool
        Let `b` need 1 byte of workspace.
    **of_a
        Attributes of the node `a`.
    """
    parts = (Tensor(name="c", bytes=4), Tensor(name="c.mask", bytes=1))
    return Graph(
        name="skip",
        nodes=(
            operation("a", output_bytes=4, **of_a),
            operation("b", output_bytes=6, inputs=("a",), workspace_bytes=int(workspace)),
            Node(
                name="c",
                op="op",
                phase="forward",
                inputs=("b",),
                outputs=parts if mask else (Tensor(name="c", bytes=5),),
            ),
            operation("d", output_bytes=3, inputs=("a", "c", "c.mask") if mask else ("a", "c")),
        ),
    )


def even_costs(
    graph: Graph,
    *,
    page_in: tuple[float, float] | None = (1.0, 1.0),
    page_out: tuple[float, float] | None = (1.0, 1.0),
    device: Device | None = None,
) -> Costs:
    """Make costs of 1 s and 1 J for the first node, 2 and 2 for the second and so on.

    Every page-in and page-out costs the same, (time, energy); None takes the storage away.
    """
    rising = [1.0 + k for k in range(len(graph.nodes))]
    tensors = len(graph.tensors)
    return Costs.from_arrays(
        graph,
        compute_time_s=rising,
        compute_energy_j=rising,
        page_in=None if page_in is None else [page_in] * tensors,
        page_out=None if page_out is None else [page_out] * tensors,
        device=device,
    )


def skip_problem(**limits: Any) -> Problem:
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


def comb_graph(teeth: int = 3) -> Graph:
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


def gap_graph() -> Graph:
    """Return a, b, c, d = d(b), e = e(a): a and b wait while c, the largest, is computed."""
    return Graph(
        name="gaps",
        nodes=(
            operation("a", output_bytes=4),
            operation("b", output_bytes=4),
            operation("c", output_bytes=5),
            operation("d", output_bytes=1, inputs=("b",)),
            operation("e", output_bytes=1, inputs=("a",)),
        ),
    )


def early_recomputation(number: int) -> Problem:
    """State one of two problems in which a small tensor must be recomputed early.

    That is in a stage where nothing uses it, because its large input is in RAM just then, and the
    stages of its uses have no room for that. Recomputation only, every cost is 1 (baseline 5, 6).

    1. budget 21: ``n1`` (2 B) is recomputed once, while ``n0`` (10 B) is in RAM: overhead 1.
    2. budget 23: the same before ``n4`` and ``n5`` fill the RAM: overhead 1.
    """
    if number == 1:
        ram = 21
        nodes = (
            operation("n0", output_bytes=10),
            operation("n1", output_bytes=2, inputs=("n0",)),
            operation("n2", output_bytes=9, inputs=("n0",), workspace_bytes=2, recomputable=False),
            operation("n3", output_bytes=9, inputs=("n2",)),
            operation("n4", output_bytes=1, inputs=("n1", "n3")),
        )
    else:
        ram = 23
        nodes = (
            operation("n0", output_bytes=10),
            operation("n1", output_bytes=2, inputs=("n0",)),
            operation("n2", output_bytes=9, inputs=("n0",), workspace_bytes=4),
            operation("n3", output_bytes=1),
            operation("n4", output_bytes=9, inputs=("n3",)),
            operation("n5", output_bytes=0, inputs=("n1", "n2", "n4")),
        )
    graph = Graph(name=f"early{number}", nodes=nodes)
    ones = [1.0] * len(nodes)
    costs = Costs.from_arrays(graph, compute_time_s=ones, compute_energy_j=ones)
    return Problem(graph, costs, ram=ram)


def comb_problem(teeth: int = 10, ram: int = 13, page: float = 3.0, **limits: Any) -> Problem:
    """State a problem that takes several rounds: a comb, with pages at a middling price."""
    graph = comb_graph(teeth)
    costs = even_costs(graph, page_in=(page, page), page_out=(page, page))
    return Problem(graph, costs, ram=ram, **limits)


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


def training_chain(
    sizes: Sequence[int],
    *,
    reads_own: bool = True,
    tapes: Sequence[int] | None = None,
    workspaces: Sequence[int] = (),
    gradient_bytes: int = 1,
    loss: bool = True,
) -> Graph:
    """Make ``x -> f1 -> ... -> fL [-> loss] [-> gl] -> gL -> ... -> g1``.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of the sample and of what each of the layers makes, ``L + 1`` of them.
    reads_own : bool
        Whether ``gk`` reads what ``fk`` made; it always reads what ``fk`` read.
    tapes : sequence of int, optional
        Bytes of a second output ``fk.tape`` of each layer, which ``gk`` reads in place of ``fk``.
    workspaces : sequence of int, optional
        Workspace of each layer [B].
    gradient_bytes : int
        Bytes of every gradient.
    loss : bool
        Whether there is a loss of one byte; its own gradient reads it and the last layer.
    """
    layers = range(1, len(sizes))
    nodes = [operation("x", output_bytes=sizes[0], phase="input", recomputable=False)]
    for k in layers:
        outputs = [Tensor(name=f"f{k}", bytes=sizes[k])]
        if tapes is not None:
            outputs.append(Tensor(name=f"f{k}.tape", bytes=tapes[k - 1]))
        read = f"f{k - 1}" if k > 1 else "x"
        nodes.append(
            Node(
                name=f"f{k}",
                op="op",
                phase="forward",
                inputs=(read,),
                outputs=tuple(outputs),
                workspace_bytes=workspaces[k - 1] if workspaces else 0,
            )
        )
    own = "f{}" if tapes is None else "f{}.tape"
    before: tuple[str, ...] = ()
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


def chain_costs(
    graph: Graph,
    *,
    seconds: Sequence[int] | None = None,
    page_s: int = 1,
    mode: str = "dma",
) -> Costs:
    """Return costs of a graph: a second and a joule per node, or `seconds`; `page_s` per byte."""
    times = [1] * len(graph.nodes) if seconds is None else list(seconds)
    moves = [(page_s * tensor.bytes, page_s * tensor.bytes) for tensor in graph.tensors]
    return Costs.from_arrays(
        graph,
        compute_time_s=times,
        compute_energy_j=times,
        page_in=moves,
        page_out=moves,
        device=bench_device(mode=mode),
    )


def recomputations(problem: Problem, pairs: Sequence[tuple[int, int]]) -> int:
    """Return how many computations of a schedule are not the first of their node."""
    return len(pairs) - len(problem.graph.nodes)


def state(name: str, size: int) -> Node:
    """Return a node that holds a state tensor of its own name."""
    outputs = (Tensor(name=name, bytes=size),)
    return Node(name=name, op="parameter", phase=Phase.STATE, outputs=outputs)


def update(name: str, *inputs: str, **replaced: int) -> Node:
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
