"""Numbering and invariants of the training graph, and its memory."""

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given

from kit.strategies import graphs
from poetmodel.errors import GraphError
from poetmodel.graph import (
    Graph,
    Node,
    Phase,
    Tensor,
    articulation_points,
    checkpoint_all_peak_bytes,
    checkpoint_all_profile,
    floor,
    inference_profile,
    operation,
)


@pytest.fixture
def fork():
    """Return a norm with three outputs, two of them read later, and a node without readers.

    Tensors: 0 x, 1 y, 2 mean, 3 deviation, 4 loss.
    """
    norm = Node(
        name="norm",
        op="batch_norm",
        phase="forward",
        inputs=("x",),
        outputs=(
            Tensor(name="y", bytes=8),
            Tensor(name="mean", bytes=2),
            Tensor(name="dev", bytes=1),
        ),
        flops=3,
    )
    return Graph(
        name="fork",
        nodes=(
            operation("x", output_bytes=8, phase="input"),
            norm,
            operation("loss", output_bytes=4, inputs=("y", "mean", "y"), phase="loss", flops=5),
            Node(name="update", op="sgd", phase="update", inputs=("loss",)),
        ),
        resident_bytes={"parameters": 10, "optimizer": 5},
    )


def faults_of(*nodes, **attributes):
    """Return the faults that such a graph has."""
    with pytest.raises(GraphError) as caught:
        Graph(**{"name": "bad", "nodes": nodes, **attributes})
    return caught.value.faults


def test_tensors_are_numbered_by_node_then_output(fork):
    """node(i), out(k), in(k) and the users follow the order of nodes, then outputs."""
    assert [tensor.name for tensor in fork.tensors] == ["x", "y", "mean", "dev", "loss"]
    assert fork.tensor_bytes == (8, 8, 2, 1, 4)
    assert fork.node_of == (0, 1, 1, 1, 2)
    assert fork.outputs_of == ((0,), (1, 2, 3), (4,), ())
    assert fork.users_of == ((1,), (2,), (2,), (), (3,))
    assert (fork.node_index["update"], fork.tensor_index["dev"]) == (3, 3)
    # A tensor that a node names twice is one input and one edge, but the naming is kept.
    assert fork.inputs_of == ((), (0,), (1, 2), (4,))
    assert (fork.n_edges, fork.nodes[2].inputs) == (4, ("y", "mean", "y"))
    assert (fork.flops, fork.total_resident_bytes) == (8, 15)
    assert [node.output_bytes for node in fork.nodes] == [8, 11, 4, 0]


@given(graphs())
def test_numbering_is_consistent(graph):
    """Makers precede readers; readers and inputs are consistent."""
    for i, users in enumerate(graph.users_of):
        assert i in graph.outputs_of[graph.node_of[i]]
        assert all(graph.node_of[i] < user for user in users)
        assert list(users) == [k for k, inputs in enumerate(graph.inputs_of) if i in inputs]
    assert graph.n_edges == sum(map(len, graph.users_of))


def test_graphs_are_frozen_values(fork):
    """A graph is immutable, equals graphs with the same content, and differs from others.

    Nodes may be any sequence; a phase a member or its text. The largest sizes and counts, and
    none, are valid.
    """
    with pytest.raises(FrozenInstanceError):
        fork.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        fork.resident_bytes["parameters"] = 0  # type: ignore[index]
    same = replace(fork)
    assert same == fork
    assert hash(same) == hash(fork)
    assert replace(fork, resident_bytes={}) != fork
    assert replace(fork, nodes=fork.nodes[:-1]) != fork
    first = Graph(name="g", nodes=[operation("a", output_bytes=1, phase=Phase.LOSS)])  # type: ignore[arg-type]
    assert first == Graph(name="g", nodes=(operation("a", output_bytes=1, phase="loss"),))
    assert hash(first) == hash(
        Graph(name="g", nodes=(operation("a", output_bytes=1, phase="loss"),))
    )
    node = operation("a", output_bytes=2**53, workspace_bytes=2**53, flops=10**18, bytes_moved=0)
    assert Graph(name="g", nodes=(node,), batch_size=2**53, parameters=0).nodes == (node,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "nodes[0].name: expected a non-empty string, got ''"),
        ({"name": "\ud800"}, "nodes[0].name: expected characters that UTF-8 can encode"),
        ({"op": 5}, "nodes[0].op: expected a non-empty string, got 5"),
        ({"phase": "forwards"}, "nodes[0].phase: expected one of input, forward, loss, backward"),
        ({"inputs": "ab"}, "nodes[0].inputs: expected a list of tensor names, got 'ab'"),
        ({"inputs": (1,)}, "nodes[0].inputs: expected a list of tensor names, got [1]"),
        ({"outputs": None}, "nodes[0].outputs: expected a list of tensors, got nothing"),
        ({"outputs": ("a",)}, "nodes[0].outputs[0]: expected a Tensor, got 'a'"),
        ({"outputs": [Tensor(name="a", bytes=1)]}, "nodes[0].outputs: expected a list of tensors"),
        (
            {"outputs": ({"name": "a", "bytes": 1},)},
            "nodes[0].outputs[0]: expected a Tensor, got an object",
        ),
        ({"inputs": []}, "nodes[0].inputs: expected a list of tensor names, got a list"),
        ({"workspace_bytes": -1}, "nodes[0].workspace_bytes: expected a whole number of bytes"),
        ({"workspace_bytes": 2**53 + 1}, "from 0 to 2^53, got 9007199254740993"),
        ({"flops": 1.0}, "nodes[0].flops: expected an integer from 0 to 10^18, got 1.0"),
        ({"flops": 10**19}, "nodes[0].flops: expected an integer from 0 to 10^18"),
        ({"bytes_moved": True}, "nodes[0].bytes_moved: expected a whole number of bytes"),
        ({"recomputable": 1}, "nodes[0].recomputable: expected true or false, got 1"),
        ({"on_aux": "no"}, "nodes[0].on_aux: expected true or false, got 'no'"),
        ({"in_place": "no"}, "nodes[0].in_place: expected an object that maps names of outputs"),
        ({"in_place": (("t", "a"), ("t", "b"))}, "nodes[0].in_place: expected an object that maps"),
    ],
)
def test_each_attribute_of_a_node_is_checked(changes, message):
    """One wrong attribute is one fault that names the node and the accepted values."""
    node = Node(name="a", op="op", phase="forward", outputs=(Tensor(name="t", bytes=1),))
    (fault,) = faults_of(replace(node, **changes))
    # The node's name stands in brackets where it has one.
    assert message in fault.replace(" ('a')", "").replace(" ('')", "").replace(" ('\\ud800')", "")


@pytest.mark.parametrize(
    "size", [-1, 1.5, float("nan"), float("inf"), 1e30, 10**30, True, None, "4"]
)
def test_sizes_are_whole_bytes(size):
    """Negative, fractional, endless and huge sizes, and truth values, are faults."""
    (fault,) = faults_of(operation("a", output_bytes=size))  # type: ignore[arg-type]
    assert fault.startswith("nodes[0] ('a').output_bytes: expected a whole number of bytes from 0")
    several = Node(
        name="a",
        op="op",
        phase="loss",
        outputs=(Tensor(name="t", bytes=size),),  # type: ignore[arg-type]
    )
    (fault,) = faults_of(several)
    assert fault.startswith("nodes[0] ('a').outputs[0].bytes: expected a whole number of bytes")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": ""}, "name: expected a non-empty string"),
        ({"dtype": 32}, "dtype: expected a non-empty string, got 32"),
        ({"batch_size": 0}, "batch_size: expected an integer from 1 to 2^53, got 0"),
        ({"batch_size": True}, "batch_size: expected an integer from 1 to 2^53, got true"),
        ({"resident_bytes": {"weights": 1}}, "resident_bytes.weights: unknown key"),
        ({"resident_bytes": {"optimizer": 0.5}}, "resident_bytes.optimizer: expected a whole"),
        ({"parameters": -1}, "parameters: expected an integer from 0"),
        ({"forward_macs": 1e9}, "forward_macs: expected an integer from 0"),
        ({"nodes": ()}, "nodes: expected at least 1 node, got 0"),
        ({"nodes": ("a",)}, "nodes[0]: expected a Node, got 'a'"),
        ({"nodes": ({"name": "a"},)}, "nodes[0]: expected a Node, got an object"),
    ],
)
def test_each_attribute_of_a_graph_is_checked(attributes, message):
    """One wrong attribute is one fault that names it."""
    (fault,) = faults_of(operation("a", output_bytes=1), **attributes)
    assert fault.startswith(message)


def test_inputs_must_exist_and_come_earlier():
    """An input that is made later or by no node is a fault; a tensor is made once.

    A cycle is a fault that names its nodes; a node that reads itself is one too. A tensor whose
    name is unusable may be the one that another node reads.
    """
    (fault,) = faults_of(
        operation("a", output_bytes=1, inputs=["b"]), operation("b", output_bytes=1)
    )
    assert fault.startswith("nodes[0] ('a').inputs: 'b' is made by nodes[1], which does not come")
    silent = Node(name="silent", op="op", phase="forward")  # whose name is no tensor's
    assert faults_of(silent, operation("b", output_bytes=1, inputs=["silent"])) == (
        "nodes[1] ('b').inputs: no node makes a tensor 'silent'",
    )
    other = Node(name="b", op="op", phase="forward", outputs=(Tensor(name="a", bytes=1),))
    assert faults_of(operation("a", output_bytes=1), other) == (
        "nodes[1] ('b'): its output tensor 'a' is already an output of nodes[0]",
    )
    faults = faults_of(
        operation("a", output_bytes=1, inputs=["c"]),
        operation("b", output_bytes=1, inputs=["a"]),
        operation("c", output_bytes=1, inputs=["b"]),
    )
    assert len(faults) == 2
    assert faults[1] == "nodes: the graph has a cycle: c -> a -> b -> c"
    assert faults_of(operation("a", output_bytes=1, inputs=["a"]))[1].endswith("a cycle: a -> a")
    faults = faults_of(operation(5, output_bytes=1), operation("b", output_bytes=1, inputs=["a"]))  # type: ignore[arg-type]
    assert len(faults) == 1
    assert "nodes[0].name" in faults[0]


# -- memory --------------------------------------------------------------------------------------
@pytest.fixture
def chain4():
    """Return a - b - c - d, where d also reads a.

    Live at a step, with outputs and workspace: a 4; b 4+2; c 4+2+3+1 (workspace); d 4+3+1.
    """
    return Graph(
        name="chain4",
        nodes=(
            operation("a", output_bytes=4),
            operation("b", output_bytes=2, inputs=["a"]),
            operation("c", output_bytes=3, inputs=["b"], workspace_bytes=1),
            operation("d", output_bytes=1, inputs=["c", "a"], phase="backward"),
        ),
    )


def test_working_set_counts_inputs_outputs_and_workspace(chain4):
    """The working set of a step has its inputs, outputs and workspace; the floor is the maximum.

    Of several equal steps, it names the first. Without the backward node, which alone reads a
    again, each node of the chain is an articulation point.
    """
    assert chain4.step_bytes == (4, 6, 6, 8)
    assert floor(chain4).bytes == 8
    assert floor(chain4).node == 3
    twins = Graph(name="g", nodes=(operation("a", output_bytes=1), operation("b", output_bytes=1)))
    assert floor(twins).node == 0
    assert articulation_points(chain4, phases={"forward"}) == (0, 1, 2)


@given(graphs())
def test_random_graphs_agree_with_the_definitions(graph):
    """No step needs more than all tensors, and the peak is the need of one step.

    The profile is that of a set of live tensors. Node k is an articulation point exactly if no
    tensor made before it is read after it. Inference needs at most the RAM of training.
    """
    profile = checkpoint_all_profile(graph)
    assert len(profile) == len(graph.nodes)
    for k, live in enumerate(profile):
        assert graph.step_bytes[k] <= live
    assert floor(graph).bytes <= checkpoint_all_peak_bytes(graph) == max(profile)
    live = set()
    expected = []
    for k, node in enumerate(graph.nodes):
        live |= set(graph.outputs_of[k])
        expected.append(sum(graph.tensor_bytes[i] for i in live) + node.workspace_bytes)
        live = {i for i in live if any(user > k for user in graph.users_of[i])}
    assert list(checkpoint_all_profile(graph)) == expected
    expected = [
        k
        for k in range(len(graph.nodes))
        if not any(
            graph.node_of[i] < k < user for i, users in enumerate(graph.users_of) for user in users
        )
    ]
    assert list(articulation_points(graph)) == expected
    found = inference_profile(graph) or {}
    whole = checkpoint_all_profile(graph)
    assert all(ram_bytes <= whole[k] for k, ram_bytes in found.items())


def test_inference_frees_each_tensor_after_its_last_use_in_the_forward_pass():
    """Tensors that only loss and backward pass read are freed after their step.

    By hand: x 8; h 8 + 4 + 2 (mask) + 1 (workspace); y 4 + 3, because x is freed after h.
    Labels do not count. A node that a forward node reads through others belongs to the forward
    pass.
    """
    made = (Tensor(name="h", bytes=4), Tensor(name="mask", bytes=2))
    graph = Graph(
        name="g",
        nodes=(
            operation("labels", output_bytes=100, phase="input"),
            operation("x", output_bytes=8, phase="input"),
            Node(
                name="h", op="op", phase="forward", inputs=("x",), outputs=made, workspace_bytes=1
            ),
            operation("y", output_bytes=3, inputs=["h"]),
            operation("loss", output_bytes=1, inputs=["y", "labels"], phase="loss"),
            operation("g", output_bytes=9, inputs=["loss", "mask", "x", "h"], phase="backward"),
        ),
    )
    assert inference_profile(graph) == {1: 8, 2: 15, 3: 7}
    nodes = (
        operation("scale", output_bytes=2, phase="update"),
        operation("twice", output_bytes=2, inputs=["scale"], phase="update"),
        operation("y", output_bytes=3, inputs=["twice"]),
        operation("g", output_bytes=1, inputs=["y"], phase="backward"),
    )
    assert inference_profile(Graph(name="g", nodes=nodes)) == {0: 2, 1: 4, 2: 5}


@pytest.mark.parametrize("phases", [("forward", "forward"), ("input", "forward"), ("loss",) * 2])
def test_inference_is_unknown_where_phases_tell_nothing(phases):
    """Without a forward node, or without other nodes, there is no result."""
    nodes = tuple(operation(f"n{k}", output_bytes=1, phase=phase) for k, phase in enumerate(phases))
    assert inference_profile(Graph(name="g", nodes=nodes)) is None
