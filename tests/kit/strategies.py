"""Hypothesis strategies: random graphs, and costs for them."""

from dataclasses import replace

from hypothesis import strategies as st

from poetmodel.device import Costs
from poetmodel.graph import Graph, Node, Phase, Tensor

SMALL = st.integers(min_value=0, max_value=5).map(float)
"""A time or an energy: a small whole number, zero included, so that sums are exact."""

NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6)
"""Names that a file permits: also with commas, quotes, line ends, letters of every script."""


@st.composite
def graphs(
    draw,
    *,
    min_nodes=1,
    max_nodes=8,
    multi_output=True,
    workspace=True,
    on_aux=False,
    non_recomputable=True,
    max_bytes=8,
):
    """Draw a graph whose nodes ``n0, n1, ...`` read up to three earlier tensors each.

    If `multi_output`, they have none to three outputs; else exactly one, of the node's name. If
    `on_aux`, nodes without inputs may have their tensors on storage.
    """
    size = st.integers(min_value=0, max_value=max_bytes)
    nodes = []
    tensors = []
    for k in range(draw(st.integers(min_value=min_nodes, max_value=max_nodes))):
        inputs = []
        if tensors:
            inputs = draw(st.lists(st.sampled_from(tensors), max_size=3, unique=True))
        count = draw(st.sampled_from((1, 1, 1, 2, 3, 0))) if multi_output else 1
        names = [f"n{k}", f"n{k}.1", f"n{k}.2"][:count]
        node = Node(
            name=f"n{k}",
            op="op",
            phase="forward",
            inputs=tuple(inputs),
            outputs=tuple(Tensor(name=name, bytes=draw(size)) for name in names),
            workspace_bytes=draw(size) if workspace and draw(st.booleans()) else 0,
            flops=draw(st.integers(min_value=0, max_value=10)),
            recomputable=not (non_recomputable and draw(st.integers(0, 3)) == 0),
            on_aux=on_aux and not inputs and draw(st.booleans()),
        )
        nodes.append(node)
        tensors += names
    return Graph(name="random", nodes=tuple(nodes))


@st.composite
def rich_graphs(draw, **options):
    """Draw a graph of `graphs` with random permitted names and attributes of nodes and graph."""
    plain = draw(graphs(on_aux=True, **options))
    count = st.integers(min_value=0, max_value=2**53)
    number = {name: i for i, name in enumerate(plain.tensor_index)}
    new = draw(st.lists(NAMES, min_size=len(number), max_size=len(number), unique=True))
    node_names = draw(
        st.lists(NAMES, min_size=len(plain.nodes), max_size=len(plain.nodes), unique=True)
    )
    own = draw(st.booleans())  # whether a node has the name of its first output, the usual case
    nodes = []
    for k, node in enumerate(plain.nodes):
        inputs = [new[number[name]] for name in node.inputs]
        if inputs and draw(st.booleans()):
            inputs.append(draw(st.sampled_from(inputs)))
        outputs = tuple(replace(t, name=new[number[t.name]]) for t in node.outputs)
        name = outputs[0].name if own and outputs else f"{node_names[k]}/" if own else node_names[k]
        nodes.append(
            replace(
                node,
                name=name,
                op=draw(NAMES),
                phase=draw(st.sampled_from([phase for phase in Phase if phase != Phase.STATE])),
                inputs=tuple(inputs),
                outputs=outputs,
                flops=draw(count),
                bytes_moved=draw(st.none() | count),
            )
        )
    if len({node.name for node in nodes}) < len(nodes):
        nodes = [replace(node, name=f"{k}:{node.name}") for k, node in enumerate(nodes)]
    resident = st.dictionaries(st.sampled_from(("parameters", "gradients", "optimizer")), count)
    return Graph(
        name=draw(NAMES),
        nodes=tuple(nodes),
        batch_size=draw(st.integers(min_value=1, max_value=2**53)),
        dtype=draw(NAMES),
        resident_bytes=draw(resident),
        parameters=draw(st.none() | count),
        forward_macs=draw(st.none() | count),
    )


@st.composite
def costs_for(draw, graph, *, storage=True):
    """Draw costs for a graph: small whole times and energies, also 0; transfers if `storage`."""
    n, m = len(graph.nodes), len(graph.tensors)
    pair = st.tuples(SMALL, SMALL)
    pages = st.lists(pair, min_size=m, max_size=m)
    return Costs.from_arrays(
        graph,
        compute_time_s=draw(st.lists(SMALL, min_size=n, max_size=n)),
        compute_energy_j=draw(st.lists(SMALL, min_size=n, max_size=n)),
        page_in=draw(pages) if storage else None,
        page_out=draw(pages) if storage else None,
    )
