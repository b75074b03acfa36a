"""Graphs to and from networkx."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given

from kit.strategies import graphs
from poetmodel.errors import GraphError
from poetmodel.graph import Graph, Node, Tensor, operation
from poetmodel.graph.conversion import from_networkx, to_networkx


@pytest.fixture
def norm():
    """Give x -> norm (three outputs) -> use, which reads two of them, one twice, the last first."""
    outputs = tuple(Tensor(name=name, bytes=size) for name, size in (("y", 8), ("m", 2), ("d", 1)))
    return Graph(
        name="norm",
        batch_size=3,
        resident_bytes={"optimizer": 5},
        nodes=(
            operation("x", output_bytes=8, phase="input", on_aux=True),
            Node(name="norm", op="bn", phase="forward", inputs=("x",), outputs=outputs, flops=7),
            Node(name="use", op="use", phase="loss", inputs=("d", "x", "y", "d"), bytes_moved=4),
        ),
    )


def plain(*edges, sizes="abc"):
    """Return a digraph as users make them: nodes with a size, and edges."""
    digraph = nx.DiGraph()
    for name in sizes:
        digraph.add_node(name, output_bytes=4)
    digraph.add_edges_from(edges)
    return digraph


@given(graphs())
def test_edges_are_makers_to_readers(graph):
    """The digraph has an edge for each pair of nodes that share tensors, and names them."""
    digraph = graph.to_networkx()
    assert list(digraph) == [node.name for node in graph.nodes]
    pairs = {
        (graph.nodes[graph.node_of[i]].name, node.name)
        for node, inputs in zip(graph.nodes, graph.inputs_of, strict=True)
        for i in inputs
    }
    assert set(digraph.edges) == pairs
    assert sum(len(tensors) for *_, tensors in digraph.edges(data="tensors")) == graph.n_edges
    assert nx.is_directed_acyclic_graph(digraph)


def test_attributes_are_the_keys_of_the_file(norm):
    """A user finds sizes and kinds under the names that graph files use.

    The index decides, not the order in which nodes and edges were added; nothing is shared.
    """
    digraph = to_networkx(norm)
    assert digraph.graph == {
        "name": "norm",
        "batch_size": 3,
        "dtype": "float32",
        "resident_bytes": {"optimizer": 5},
    }
    assert digraph.nodes["x"]["output_bytes"] == 8
    assert digraph.nodes["x"]["on_aux"] is True
    assert digraph.nodes["norm"]["outputs"][1] == {"name": "m", "bytes": 2}
    assert (digraph.nodes["use"]["index"], digraph.nodes["use"]["bytes_moved"]) == (2, 4)
    assert digraph.edges["norm", "use"]["tensors"] == ("d", "y")
    shuffled = nx.DiGraph(**digraph.graph)
    shuffled.add_nodes_from(reversed(list(digraph.nodes(data=True))))
    shuffled.add_edges_from(reversed(list(digraph.edges(data=True))))
    assert from_networkx(shuffled) == norm
    digraph = norm.to_networkx()
    digraph.graph["resident_bytes"]["optimizer"] = 0
    digraph.nodes["norm"]["outputs"][0]["bytes"] = 0
    assert norm.resident_bytes == {"optimizer": 5}
    assert norm.tensor_bytes == (8, 8, 2, 1)


def test_a_plain_digraph_needs_sizes_only():
    """Nodes with a size and edges are a graph; its order keeps to that of the nodes.

    Keys become names by their text, and NumPy's integers are integers.
    """
    graph = from_networkx(plain(("c", "a"), ("a", "b")))
    assert graph == Graph(
        name="graph",
        nodes=(
            operation("c", output_bytes=4),
            operation("a", output_bytes=4, inputs=["c"]),
            operation("b", output_bytes=4, inputs=["a"]),
        ),
    )
    assert [n.name for n in from_networkx(plain(("b", "c"))).nodes] == ["a", "b", "c"]
    # What is read comes in the order in which edges were added.
    assert from_networkx(plain(("b", "c"), ("a", "c"))).nodes[2].inputs == ("b", "a")
    assert Graph.from_networkx(plain()).n_edges == 0
    digraph = nx.DiGraph(name="mine", batch_size=np.int32(2))
    digraph.add_node(1, output_bytes=np.int64(4), op="conv2d", flops=np.int64(9))
    digraph.add_node((2, "b"), outputs=({"name": "t", "bytes": np.int16(1)},), phase="loss")
    digraph.add_edge(1, (2, "b"))
    graph = from_networkx(digraph)
    assert (graph.name, graph.batch_size) == ("mine", 2)
    assert graph.nodes[0] == operation("1", output_bytes=4, op="conv2d", flops=9)
    assert (graph.nodes[1].name, graph.nodes[1].inputs) == ("(2, 'b')", ("1",))
    assert {type(size) for size in graph.tensor_bytes} == {int}


def test_edges_say_which_of_several_outputs_is_read(told):
    """An edge from a node with several outputs names those that are read."""
    digraph = plain(sizes="c")
    digraph.add_node("n", outputs=[{"name": "y", "bytes": 1}, {"name": "m", "bytes": 1}])
    digraph.add_edge("n", "c", tensors=["m"])
    assert from_networkx(digraph).nodes[1].inputs == ("m",)
    del digraph.edges["n", "c"]["tensors"]
    with told.raises(GraphError):
        from_networkx(digraph)


def test_a_cycle_is_named(told):
    """A cycle is an error that names its nodes, with or without an index."""
    digraph = plain(("a", "b"), ("b", "c"), ("c", "a"))
    with told.raises(GraphError):
        from_networkx(digraph)
    nx.set_node_attributes(digraph, {"a": 0, "b": 1, "c": 2}, "index")
    with told.raises(GraphError, "second"):
        from_networkx(digraph)
    with pytest.raises(GraphError, match="cycle: a -> a"):
        from_networkx(plain(("a", "a")))


@pytest.mark.parametrize(
    "indices",
    [
        {"a": 0, "b": 1},
        {"a": 0, "b": 1, "c": 1},
        {"a": 0, "b": 1, "c": 1.5},
        {"a": 2, "b": 1, "c": 0},
    ],
)
def test_an_index_must_be_an_execution_order(indices, told):
    """All nodes have a different integer, and what is read comes earlier."""
    digraph = plain(("a", "b"))
    nx.set_node_attributes(digraph, indices, "index")
    with told.raises(GraphError):
        from_networkx(digraph)


def test_inputs_and_edges_must_agree(norm, told):
    """Where a digraph says both, an edge added or taken away must be said in the inputs."""
    digraph = norm.to_networkx()
    digraph.remove_edge("x", "use")
    with told.raises(GraphError):
        from_networkx(digraph)
    digraph = norm.to_networkx()
    digraph.edges["norm", "use"]["tensors"] = ("d", "y", "m")
    with told.raises(GraphError, "second"):
        from_networkx(digraph)


@pytest.mark.parametrize(
    "tensors",
    [["q"], "a"],
)
def test_edges_name_what_their_node_makes(tensors, told):
    """An edge cannot bring what its node does not make."""
    digraph = plain()
    digraph.add_edge("a", "b", tensors=tensors)
    with told.raises(GraphError):
        from_networkx(digraph)


def test_what_a_graph_cannot_hold_is_refused(told):
    """Attributes of node, edge and digraph that would be lost are errors that name them."""
    digraph = plain()
    digraph.nodes["a"]["workspace"] = 1
    with pytest.raises(GraphError, match=r"\('a'\)\.workspace: unknown key"):
        from_networkx(digraph)
    digraph = plain()
    digraph.add_edge("a", "b", weight=1)
    with told.raises(GraphError):
        from_networkx(digraph)
    digraph = plain()
    digraph.graph["colour"] = "red"
    with told.raises(GraphError, "second"):
        from_networkx(digraph)
    digraph = plain()
    digraph.add_node("d")
    with told.raises(GraphError, "no size"):
        from_networkx(digraph)


@pytest.mark.parametrize("other", [nx.Graph(), nx.MultiDiGraph(), "a graph", None])
def test_only_a_digraph_is_taken(other, told):
    """Undirected graphs, multigraphs and anything else are refused; an empty one is too small."""
    with told.raises(GraphError):
        from_networkx(other)
    with pytest.raises(GraphError, match="at least 1 node"):
        from_networkx(nx.DiGraph())
