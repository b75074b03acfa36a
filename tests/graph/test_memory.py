"""The keep-all peak, the minimum RAM and the articulation points."""

import pytest
from hypothesis import given

from kit.strategies import graphs
from poetmodel.graph import (
    Graph,
    Node,
    Tensor,
    articulation_points,
    checkpoint_all_peak_bytes,
    checkpoint_all_profile,
    floor,
    inference_profile,
    operation,
)


@pytest.fixture
def chain4():
    """Give a - b - c - d, where d also reads a.

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
    """The working set of a step is what it reads, makes and works with; the floor the largest.

    Of several steps it names the first. Without the backward node, which alone reads a again, each
    node of the chain is an articulation point.
    """
    assert chain4.step_bytes == (4, 6, 6, 8)
    assert floor(chain4).bytes == 8
    assert floor(chain4).node == 3
    twins = Graph(name="g", nodes=(operation("a", output_bytes=1), operation("b", output_bytes=1)))
    assert floor(twins).node == 0
    assert articulation_points(chain4, phases={"forward"}) == (0, 1, 2)


@given(graphs())
def test_random_graphs_agree_with_the_definitions(graph):
    """No step needs more than everything, and the peak is what some step needs.

    The profile is what one gets by keeping a set of live tensors. Node k is an articulation point
    exactly when no tensor made before it is read after it. Inference takes no more than
    training.
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
    """What only loss and backward pass read is gone after its own step; labels are no part of it.

    By hand: x 8; h 8 + 4 + 2 (mask) + 1 (workspace); y 4 + 3, as x has gone after h. A node that a
    forward node reads through others belongs to the forward pass.
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
    """Without a forward node, or with nothing beside the forward pass, there is no answer."""
    nodes = tuple(operation(f"n{k}", output_bytes=1, phase=phase) for k, phase in enumerate(phases))
    assert inference_profile(Graph(name="g", nodes=nodes)) is None
