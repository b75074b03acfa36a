"""Graph files, the canonical form that is hashed, and graphs of networkx."""

import copy
import hashlib
import json
import pickle
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given

from kit.strategies import graphs, rich_graphs
from poetmodel.errors import GraphError
from poetmodel.graph import Graph, Node, Tensor, operation
from poetmodel.graph.io import (
    canonical_json,
)

HEAD = '{"format": "poetmodel-graph", "version": 1, "name": "g", '


def node(name="a", **changes):
    """Return a node as in a file; a change to None removes the key."""
    item = {"name": name, "op": "op", "phase": "forward", "inputs": [], "output_bytes": 4}
    return {key: value for key, value in (item | changes).items() if value is not None}


def document(*nodes, **changes):
    """Return a graph as a file holds it."""
    return {
        "format": "poetmodel-graph",
        "version": 1,
        "name": "g",
        "nodes": list(nodes or [node()]),
        **changes,
    }


def faults_of(content):
    """Return the faults of a document, less its name in front."""
    with pytest.raises(GraphError) as caught:
        Graph.from_dict(content, source="g.json")
    assert all(fault.startswith("g.json: ") for fault in caught.value.faults)
    return [fault.removeprefix("g.json: ") for fault in caught.value.faults]


def test_the_example_of_the_format_is_read(tmp_path):
    """A file with all keys is read as its graph."""
    text = """
    {"format": "poetmodel-graph", "version": 1, "name": "two", "batch_size": 3, "dtype": "int8",
     "resident_bytes": {"parameters": 7, "gradients": 6, "optimizer": 0}, "parameters": 5,
     "forward_macs": 9,
     "nodes": [{"name": "x", "op": "input", "phase": "input", "inputs": [], "output_bytes": 8,
                "workspace_bytes": 0, "flops": 0, "recomputable": false, "on_aux": true},
               {"name": "bn", "op": "batch_norm", "phase": "forward", "inputs": ["x", "x"],
                "outputs": [{"name": "y", "bytes": 8}, {"name": "bn.mean", "bytes": 2}],
                "workspace_bytes": 1, "flops": 12, "bytes_moved": 18}]}
    """
    path = tmp_path / "two.graph.json"
    path.write_text(text)
    assert Graph.load(path) == Graph(
        name="two",
        batch_size=3,
        dtype="int8",
        resident_bytes={"parameters": 7, "gradients": 6, "optimizer": 0},
        parameters=5,
        forward_macs=9,
        nodes=(
            operation(
                "x", op="input", phase="input", output_bytes=8, recomputable=False, on_aux=True
            ),
            Node(
                name="bn",
                op="batch_norm",
                phase="forward",
                inputs=("x", "x"),
                outputs=(Tensor(name="y", bytes=8), Tensor(name="bn.mean", bytes=2)),
                workspace_bytes=1,
                flops=12,
                bytes_moved=18,
            ),
        ),
    )
    assert Graph.load(path) == Graph.load(str(path))


def test_what_may_be_left_out_has_its_default():
    """Only name and nodes, and five keys of a node, are required; no object is shared."""
    graph = Graph.from_dict(document(node(), node("b", output_bytes=None, outputs=[])))
    assert (graph.batch_size, graph.dtype, graph.resident_bytes) == (1, "float32", {})
    assert (graph.parameters, graph.forward_macs) == (None, None)
    first, second = graph.nodes
    assert (first.workspace_bytes, first.flops, first.bytes_moved) == (0, 0, None)
    assert (first.recomputable, first.on_aux) == (True, False)
    assert second.outputs == ()
    graph = Graph.from_dict(document(resident_bytes={"optimizer": 1}))
    content = graph.to_dict(defaults=True)
    content["resident_bytes"]["optimizer"] = 2
    content["nodes"][0]["inputs"].append("x")
    assert graph.resident_bytes == {"optimizer": 1}
    assert graph.nodes[0].inputs == ()


@given(graph=rich_graphs())
def test_nothing_is_lost(graph, tmp_path_factory):
    """A graph is unchanged by dictionary, canonical text, file, digraph, pickle and copy."""
    path = tmp_path_factory.mktemp("graph") / "g.graph.json"
    graph.save(path)
    loaded = Graph.load(path)
    assert Graph.from_dict(graph.to_dict()) == graph
    assert Graph.from_dict(graph.to_dict(defaults=True)) == graph
    assert Graph.from_dict(json.loads(canonical_json(graph.to_dict(defaults=True)))) == graph
    assert (loaded, loaded.sha256) == (graph, graph.sha256)
    assert Graph.from_networkx(graph.to_networkx()) == graph
    assert pickle.loads(pickle.dumps(graph)) == graph  # noqa: S301
    assert copy.deepcopy(graph) == graph


def test_saved_files_are_short_and_diffable(tmp_path):
    """One node per line, defaults left out, letters as they are."""
    path = tmp_path / "g.graph.json"
    nodes = (operation("grün", output_bytes=8), operation("b", output_bytes=4, inputs=("grün",)))
    Graph(name="g", nodes=nodes).save(path)
    assert path.read_text(encoding="utf-8") == (
        '{"format": "poetmodel-graph",\n "version": 1,\n "written_by": "poetmodel 0.1.0",\n'
        ' "name": "g",\n "nodes": [\n'
        '  {"name": "grün", "op": "op", "phase": "forward", "inputs": [], "output_bytes": 8},\n'
        '  {"name": "b", "op": "op", "phase": "forward", "inputs": ["grün"], "output_bytes": 4}\n'
        "]}\n"
    )


def test_canonical_text_is_as_specified():
    """Defaults included, keys sorted, no spaces; keys without a default only if set.

    A default in the file changes nothing; any other value does.
    """
    graph = Graph(name="ü", nodes=(operation("a", output_bytes=4),))
    expected = (
        '{"batch_size":1,"dtype":"float32","format":"poetmodel-graph","name":"ü","nodes":['
        '{"flops":0,"inputs":[],"name":"a","on_aux":false,"op":"op","output_bytes":4,'
        '"phase":"forward","recomputable":true,"workspace_bytes":0}],"resident_bytes":{},'
        '"version":1}'
    )
    assert canonical_json(graph.to_dict(defaults=True)) == expected
    assert graph.sha256 == hashlib.sha256(expected.encode()).hexdigest()
    spelled = node(workspace_bytes=0, flops=0, recomputable=True, on_aux=False)
    plain = Graph.from_dict(document()).sha256
    assert Graph.from_dict(document(spelled, batch_size=1, dtype="float32")).sha256 == plain
    assert Graph.from_dict(document(node(flops=1))).sha256 != plain
    assert Graph.from_dict(document(node(bytes_moved=0))).sha256 != plain
    for name in ("a", "t"):  # the one tensor of the node's name may be listed
        listed = node(output_bytes=None, outputs=[{"name": name, "bytes": 4}])
        assert (Graph.from_dict(document(listed)).sha256 == plain) == (name == "a")


@given(graphs(), graphs())
def test_hashes_tell_graphs_apart(first, second):
    """Two graphs hash alike exactly when they are equal."""
    assert (first.sha256 == second.sha256) == (first == second)


def test_unknown_keys_of_later_versions(tmp_path, caplog):
    """At the top level they are ignored with a note; in nodes they are refused, as later formats.

    The writer is named, and is part of no hash.
    """
    path = tmp_path / "g.graph.json"
    graph = Graph(name="g", nodes=(operation("a", output_bytes=4),))
    graph.save(path)
    document = json.loads(path.read_text()) | {"written_by": "poetmodel 0.3.0"}
    path.write_text(json.dumps(document | {"colour": 1}))
    assert Graph.load(path) == graph == Graph.from_dict(document)
    assert Graph.load(path).sha256 == graph.sha256
    assert f"{path}: unknown key 'colour' ignored: the file was written by poetmodel 0.3.0" in (
        caplog.text
    )
    with pytest.raises(GraphError, match="colour: unknown key"):
        Graph.from_dict(document | {"colour": 1})
    node = document["nodes"][0]
    for change in ({"version": 3, "colour": 1}, {"nodes": [node | {"colour": 1}], "colour": 1}):
        path.write_text(json.dumps(document | change))
        with pytest.raises(GraphError) as caught:
            Graph.load(path)
        (fault,) = caught.value.faults
        assert "the file was written by poetmodel 0.3.0, this is poetmodel" in fault


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"format": }', "line 1, column 12: not valid JSON (Expecting value)"),
        (b'{"format": "poetmodel-graph", "version": 3}', "version: expected 1 or 2, got 3"),
        (b'{"format": "poetmodel-graph", "version": true}', "version: expected 1 or 2, got true"),
        ((HEAD + '"nodes": []}').encode(), "nodes: expected at least 1 node, got 0"),
        ((HEAD + '"nodes": {}}').encode(), "nodes: expected a list, got an object"),
        ((HEAD + '"nodes": [7]}').encode(), "nodes[0]: expected an object, got 7"),
    ],
)
def test_what_is_no_graph_file_is_one_plain_error(tmp_path, content, message):
    """A file of another kind, or half a file, is one fault that starts with the file's name."""
    path = tmp_path / "g.graph.json"
    path.write_bytes(content)
    with pytest.raises(GraphError) as caught:
        Graph.load(path)
    (fault,) = caught.value.faults
    assert fault.startswith(f"{path}: ")
    assert message in fault


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workspace_byte": 1}, "nodes[0] ('a').workspace_byte: unknown key; did you mean workspa"),
        ({"colour": 1}, "nodes[0] ('a').colour: unknown key; accepted are name, op, phase, inputs"),
        ({"outputs": []}, "nodes[0] ('a'): expected output_bytes or outputs, got both"),
        ({"output_bytes": None}, "nodes[0] ('a'): expected output_bytes or outputs, got neither"),
        ({"outputs": 5}, "('a').outputs: expected a list of tensors, got 5"),
        ({"output_bytes": [4]}, "from 0 to 2^53, got a list"),
        ({"op": None}, "nodes[0] ('a').op: expected a non-empty string, got nothing"),
        ({"inputs": [["a"]]}, "nodes[0] ('a').inputs: expected a list of tensor names, got [a l"),
        ({"outputs": [7]}, "nodes[0] ('a').outputs[0]: expected an object, got 7"),
        ({"outputs": [{"name": "t"}]}, "nodes[0] ('a').outputs[0].bytes: expected a whole number"),
        ({"outputs": [{"bytes": 1}]}, "nodes[0] ('a').outputs[0].name: expected a non-empty stri"),
        ({"outputs": [{"name": "t", "bytes": 1, "size": 2}]}, "outputs[0].size: unknown key; acc"),
    ],
)
def test_each_fault_of_a_node_names_its_place(changes, message):
    """One wrong key of a node is one fault that names node, key, and the accepted values."""
    if changes.get("outputs"):
        changes = changes | {"output_bytes": None}
    (fault,) = faults_of(document(node(**changes)))
    assert message in fault


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nams": "g"}, "nams: unknown key; did you mean name?"),
        ({"batch_size": "1"}, "batch_size: expected an integer from 1 to 2^53, got '1'"),
        ({"resident_bytes": 5}, "resident_bytes: expected an object, got 5"),
        ({"parameters": None}, "parameters: expected an integer from 0 to 10^18, got nothing"),
    ],
)
def test_each_fault_of_a_graph_names_its_key(changes, message):
    """One wrong key of the graph is one fault that names it."""
    (fault,) = faults_of(document(**changes))
    assert fault.startswith(message)


def test_a_key_that_comes_twice_is_a_fault(tmp_path):
    """JSON would silently keep the last; each key is named, beside the other faults."""
    path = tmp_path / "g.json"
    path.write_text(
        HEAD
        + '"name": "h", "resident_bytes": {"optimizer": 1, "optimizer": 2}, "nodes": ['
        + '{"name": "a", "op": "o", "phase": "loss", "inputs": [], "op": "p",'
        + '"outputs": [{"name": "t", "bytes": 1, "bytes": 2}], "flops": -1}]}'
    )
    with pytest.raises(GraphError) as caught:
        Graph.load(path)
    assert [fault.removeprefix(f"{path}: ") for fault in caught.value.faults] == [
        *(
            f"{key}: the key comes twice in one object"
            for key in ("optimizer", "bytes", "op", "name")
        ),
        "nodes[0] ('a').flops: expected an integer from 0 to 10^18, got -1",
    ]


def test_structure_is_checked():
    """Names used twice, inputs that are unknown or later, and cycles are faults of a file too.

    Where one node cannot be read at all, the others still are; their inputs are left alone.
    """
    faults = faults_of(
        document(node("a", inputs=["b"]), node("b", inputs=["a", "c"]), node("a", output_bytes=1))
    )
    assert faults == [
        "nodes[2] ('a'): its name is already used by nodes[0]",
        "nodes[0] ('a').inputs: 'b' is made by nodes[1], which does not come before it; nodes must "
        "be in execution order",
        "nodes[1] ('b').inputs: no node makes a tensor 'c'",
        "nodes: the graph has a cycle: b -> a -> b",
    ]
    faults = faults_of(document(5, node("b", inputs=["a"], flops=-1), batch_size=0))
    assert faults == [
        "batch_size: expected an integer from 1 to 2^53, got 0",
        "nodes[0]: expected an object, got 5",
        "nodes[1] ('b').flops: expected an integer from 0 to 10^18, got -1",
    ]


# -- networkx ------------------------------------------------------------------------------------
@pytest.fixture
def norm():
    """Return x -> norm (three outputs) -> use, which reads two, one twice, the last first."""
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
    """Sizes and kinds are attributes with the names of graph files.

    The index decides, not the order in which nodes and edges were added; no object is shared.
    """
    digraph = norm.to_networkx()
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
    assert Graph.from_networkx(shuffled) == norm
    digraph = norm.to_networkx()
    digraph.graph["resident_bytes"]["optimizer"] = 0
    digraph.nodes["norm"]["outputs"][0]["bytes"] = 0
    assert norm.resident_bytes == {"optimizer": 5}
    assert norm.tensor_bytes == (8, 8, 2, 1)


def test_a_plain_digraph_needs_sizes_only():
    """Nodes with a size and edges are a graph; its order keeps to that of the nodes.

    Keys become names by their text, and NumPy's integers are integers.
    """
    graph = Graph.from_networkx(plain(("c", "a"), ("a", "b")))
    assert graph == Graph(
        name="graph",
        nodes=(
            operation("c", output_bytes=4),
            operation("a", output_bytes=4, inputs=["c"]),
            operation("b", output_bytes=4, inputs=["a"]),
        ),
    )
    assert [n.name for n in Graph.from_networkx(plain(("b", "c"))).nodes] == ["a", "b", "c"]
    # What is read comes in the order in which edges were added.
    assert Graph.from_networkx(plain(("b", "c"), ("a", "c"))).nodes[2].inputs == ("b", "a")
    assert Graph.from_networkx(plain()).n_edges == 0
    digraph = nx.DiGraph(name="mine", batch_size=np.int32(2))
    digraph.add_node(1, output_bytes=np.int64(4), op="conv2d", flops=np.int64(9))
    digraph.add_node((2, "b"), outputs=({"name": "t", "bytes": np.int16(1)},), phase="loss")
    digraph.add_edge(1, (2, "b"))
    graph = Graph.from_networkx(digraph)
    assert (graph.name, graph.batch_size) == ("mine", 2)
    assert graph.nodes[0] == operation("1", output_bytes=4, op="conv2d", flops=9)
    assert (graph.nodes[1].name, graph.nodes[1].inputs) == ("(2, 'b')", ("1",))
    assert {type(size) for size in graph.tensor_bytes} == {int}


def test_edges_say_which_of_several_outputs_is_read():
    """An edge from a node with several outputs names those that are read, else all are."""
    digraph = plain(sizes="c")
    digraph.add_node("n", outputs=[{"name": "y", "bytes": 1}, {"name": "m", "bytes": 1}])
    digraph.add_edge("n", "c", tensors=["m"])
    assert Graph.from_networkx(digraph).nodes[1].inputs == ("m",)
    del digraph.edges["n", "c"]["tensors"]
    assert Graph.from_networkx(digraph).nodes[1].inputs == ("y", "m")


def test_a_cycle_is_named(told):
    """A cycle is an error that names its nodes, with or without an index."""
    digraph = plain(("a", "b"), ("b", "c"), ("c", "a"))
    with told.raises(GraphError):
        Graph.from_networkx(digraph)
    nx.set_node_attributes(digraph, {"a": 0, "b": 1, "c": 2}, "index")
    with told.raises(GraphError, "second"):
        Graph.from_networkx(digraph)
    with pytest.raises(GraphError, match="cycle: a -> a"):
        Graph.from_networkx(plain(("a", "a")))


def test_an_index_is_kept_as_far_as_edges_allow():
    """Inputs come first in any case; an index that some nodes lack is ignored."""
    digraph = plain(("a", "b"))
    for indices, order in (
        ({"a": 2, "b": 1, "c": 0}, "cab"),
        ({"a": 1, "b": 2, "c": 0}, "cab"),
        ({"a": 2, "b": 1}, "abc"),
    ):
        nx.set_node_attributes(digraph, None, "index")
        for key, data in digraph.nodes(data=True):
            data.pop("index")
            data.update({"index": indices[key]} if key in indices else {})
        assert "".join(node.name for node in Graph.from_networkx(digraph).nodes) == order


def test_inputs_and_edges_must_agree(norm, told):
    """If a digraph has inputs and edges, an added or removed edge must be in the inputs."""
    digraph = norm.to_networkx()
    digraph.remove_edge("x", "use")
    with told.raises(GraphError):
        Graph.from_networkx(digraph)
    digraph = norm.to_networkx()
    digraph.edges["norm", "use"]["tensors"] = ("d", "y", "m")
    with told.raises(GraphError, "second"):
        Graph.from_networkx(digraph)


def test_edges_bring_what_a_node_makes(told):
    """An edge cannot name a tensor that no node makes."""
    digraph = plain()
    digraph.add_edge("a", "b", tensors=["q"])
    with told.raises(GraphError):
        Graph.from_networkx(digraph)


def test_what_a_graph_cannot_hold_is_refused(told):
    """Attributes of node and digraph that would be lost are errors that name them."""
    digraph = plain()
    digraph.nodes["a"]["workspace"] = 1
    with pytest.raises(GraphError, match=r"\('a'\)\.workspace: unknown key"):
        Graph.from_networkx(digraph)
    digraph = plain()
    digraph.graph["colour"] = "red"
    with told.raises(GraphError):
        Graph.from_networkx(digraph)
    digraph = plain()
    digraph.add_node("d")
    with told.raises(GraphError, "no size"):
        Graph.from_networkx(digraph)


@pytest.mark.parametrize("other", [nx.Graph(), nx.MultiDiGraph(), "a graph", None])
def test_only_a_digraph_is_taken(other, told):
    """Undirected graphs, multigraphs and anything else are refused; an empty one is too small."""
    with told.raises(GraphError):
        Graph.from_networkx(other)
    with pytest.raises(GraphError, match="at least 1 node"):
        Graph.from_networkx(nx.DiGraph())


@pytest.mark.parametrize(("tensors", "got"), [(1, "1"), ("conv", "'conv'")])
def test_tensors_of_an_edge_are_a_list(tensors, got):
    """A single name, or a number, is an error of the edge."""
    digraph = nx.DiGraph()
    digraph.add_node("a", output_bytes=4)
    digraph.add_node("b", output_bytes=4)
    digraph.add_edge("a", "b", tensors=tensors)
    with pytest.raises(GraphError, match=rf"\('a', 'b'\)\.tensors: expected a list .* got {got}"):
        Graph.from_networkx(digraph)


def test_in_place_pairs_may_not_be_none():
    """A graph with such a node would fail in every simulation."""
    node = replace(operation("x", output_bytes=4), in_place=None)
    with pytest.raises(GraphError, match="in_place: expected an object"):
        Graph(name="g", nodes=(node,))
