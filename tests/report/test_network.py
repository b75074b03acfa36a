"""The network view: blocks, their order, and what is decided on them."""

import pytest

from poetmodel.graph import Graph, Phase
from poetmodel.graph.catalogue import load_model
from poetmodel.graph.structure import Node, Tensor
from poetmodel.report.network import arranged, blocks_of, network_chart, path_of


def node(name, *inputs, phase=Phase.FORWARD, size=8):
    """Return a node with one tensor of its name."""
    outputs = (Tensor(name=name, bytes=size),)
    return Node(name=name, op="op", phase=phase, inputs=inputs, outputs=outputs)


@pytest.mark.parametrize(
    ("name", "phase", "path"),
    [
        ("layer1.0.conv1", Phase.FORWARD, ("layer1", "0", "conv1")),
        ("layer1.0.conv1.grad_weight", Phase.BACKWARD, ("layer1", "0", "conv1")),
        ("grad.fc1", Phase.BACKWARD, ("fc1",)),
        ("encoder.3/add#2", Phase.FORWARD, ("encoder", "3")),
        ("tanh_backward", Phase.BACKWARD, ("tanh",)),
        ("add#2", Phase.FORWARD, ("add",)),
        ("7.weight/sgd", Phase.UPDATE, ("7", "weight")),
    ],
)
def test_module_is_read_from_a_name(name, phase, path):
    """Backward nodes are of the module whose gradients they make."""
    assert path_of(node(name, phase=phase)) == path


@pytest.mark.parametrize(
    ("names", "blocks"),
    [
        (("in", "layer1.0.a", "layer1.1.a"), ["in", "layer1.0", "layer1.1"]),
        (("model.embed.a", "model.encoder.layer.0.a"), ["model.embed", "model.encoder.layer.0"]),
        (("0.weight", "0", "3", "loss"), ["0", "0", "3", "loss"]),
        (("m.a", "m.b.x", "m.b.y", "m.c"), ["m.a", "m.b", "m.b", "m.c"]),
        (("fc1", "fc1"), ["fc1", "fc1"]),
    ],
)
def test_blocks_are_numbered_modules_or_outermost_ones(names, blocks):
    """What holds blocks is none, and neither is a module around the whole model."""
    assert blocks_of([tuple(name.split(".")) for name in names]) == blocks


def test_things_stand_after_what_they_read():
    """Order follows the links; what nothing separates stands side by side.

    A cycle between blocks shares a layer.
    """
    spots = arranged(range(4), [(0, 2), (1, 2), (2, 3)])
    assert list(spots) == [0, 1, 2, 3]
    assert spots[0] != spots[1]
    assert list(arranged(range(3), [(2, 1), (1, 0)])) == [2, 1, 0]
    spots = arranged(range(3), [(0, 1), (1, 0), (1, 2)])
    assert list(spots) == [0, 1, 2]


def test_forward_and_backward_of_a_module_are_one_row():
    """Forward and backward of a module are one row; bytes are counted by side and decision.

    Of two operators of one module only one of the same name takes a backward node.
    """
    graph = Graph(
        name="pair",
        nodes=(
            node("x", size=4),
            node("b0.fc", "x"),
            node("b1.fc", "b0.fc"),
            node("b1.fc.grad", "b1.fc", phase=Phase.BACKWARD, size=2),
            node("b0.fc.grad", "b1.fc.grad", phase=Phase.BACKWARD),
        ),
    )
    chart = network_chart(graph, ["kept", "paged", "kept", "kept", "never read"])
    assert [block["name"] for block in chart["blocks"]] == ["x", "b0", "b1"]
    block = chart["blocks"][1]
    assert [side["bytes"] for side in block["sides"]] == [8, 8]
    assert [side["parts"] for side in block["sides"]] == [[["paged", 8]], [["never read", 8]]]
    (row,) = block["rows"]
    assert (row["name"], row["nodes"]) == ("fc", [[1], [4]])
    assert (chart["reads"][2], chart["most_bytes"]) == ([1], 8)
    graph = Graph(
        name="traced",
        nodes=(
            node("x"),
            node("b.0/mul", "x"),
            node("b.0/gelu", "b.0/mul"),
            node("b.0/gelu_backward", "b.0/gelu", phase=Phase.BACKWARD),
            node("b.0/sum", "b.0/gelu_backward", phase=Phase.BACKWARD),
        ),
    )
    block = network_chart(graph, ["kept"] * 5)["blocks"][1]
    assert [row["nodes"] for row in block["rows"]] == [[[1], []], [[2], [3]], [[], [4]]]
    assert [row["name"] for row in block["rows"]] == ["mul", "gelu", "sum"]
    assert block["rows"][2]["x"] is None


@pytest.mark.parametrize("model", ["mlp", "resnet50", "bert-base", "paper/linear"])
def test_every_node_is_in_one_row(model):
    """Networks have blocks that a screen can show, and lose no node and no byte."""
    graph = load_model(model)
    chart = network_chart(graph, ["kept"] * len(graph.tensors))
    nodes = [k for b in chart["blocks"] for r in b["rows"] for side in r["nodes"] for k in side]
    assert sorted(nodes) == list(range(len(graph.nodes)))
    assert 4 < len(chart["blocks"]) <= 40
    total = sum(side["bytes"] for block in chart["blocks"] for side in block["sides"])
    assert total == sum(graph.tensor_bytes)
