"""Small graphs whose schedules can be worked out by hand, and problems over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poetmodel.device import Costs
from poetmodel.graph import Graph, Node, Tensor, operation
from poetmodel.problem import Problem

if TYPE_CHECKING:
    from poetmodel.device import Device


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
