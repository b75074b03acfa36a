"""Training graphs of chains, and random training graphs with a backward pass, for small tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.instances import bench_device
from poetmodel.device import Costs
from poetmodel.graph import Graph, Node, Tensor, operation

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from poetmodel.problem import Problem


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


def random_training_graph(rng: random.Random, layers: int, *, reads: float = 0.7) -> Graph:
    """Make a random network with skips and second outputs, and its backward pass.

    A node of the backward pass reads each tensor around its layer with the chance `reads`.
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
