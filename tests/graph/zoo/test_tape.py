"""Whole graphs worked out by hand, and the tape's settings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from poetmodel.errors import InputError
from poetmodel.graph import checkpoint_all_profile, floor
from poetmodel.graph.zoo import Tape, mlp
from poetmodel.graph.zoo.norms import batch_norm
from poetmodel.graph.zoo.operators import (
    activation,
    conv2d,
    cross_entropy,
    linear,
    max_pool,
)

if TYPE_CHECKING:
    from kit.messages import Told
    from poetmodel.graph.structure import Graph, Node


def row(node: Node) -> tuple[object, ...]:
    """Return what a hand-made table says of a node."""
    sizes = tuple(tensor.bytes for tensor in node.outputs)
    return (node.name, node.op, node.phase, node.inputs, sizes, node.flops, node.bytes_moved)


@pytest.fixture
def tiny_mlp() -> Graph:
    """Return a perceptron 4-3-2 with ReLU, batch 1."""
    return mlp(image_size=2, hidden=(3,), classes=2)


def test_tiny_mlp_nodes(tiny_mlp: Graph) -> None:
    """Every node of a perceptron 4-3-2 has the edges, bytes, FLOP and traffic found by hand."""
    # Weights: fc1 12 + 3 = 15 (60 B), fc2 6 + 2 = 8 (32 B; 24 B without bias).
    top, down = "loss.grad_input", "fc2.grad_input"
    assert [row(node) for node in tiny_mlp.nodes] == [
        ("input", "input", "input", (), (16,), 0, None),
        ("fc1", "linear", "forward", ("input",), (12,), 2 * 12, 16 + 12 + 60),
        ("relu1", "relu", "forward", ("fc1",), (12,), 3, 24),
        ("fc2", "linear", "forward", ("relu1",), (8,), 2 * 6, 12 + 8 + 32),
        ("labels", "input", "input", (), (4,), 0, None),
        ("loss", "cross_entropy", "loss", ("fc2", "labels"), (4, 8), 11, 8 + 4 + 4 + 8),
        (top, "cross_entropy_backward_input", "backward",
         ("loss.log_probabilities", "labels"), (8,), 5, 8 + 4 + 8),
        ("fc2.grad_weight", "linear_backward_weight", "backward",
         (top, "relu1"), (0,), 2 * 6 + 2, 8 + 12 + 32),
        (down, "linear_backward_input", "backward", (top,), (12,), 2 * 6, 8 + 12 + 24),
        ("relu1.grad_input", "relu_backward_input", "backward", (down, "relu1"), (12,), 3, 36),
        ("fc1.grad_weight", "linear_backward_weight", "backward",
         ("relu1.grad_input", "input"), (0,), 2 * 12 + 3, 12 + 16 + 60),
    ]  # fmt: skip


def test_tiny_mlp_totals(tiny_mlp: Graph) -> None:
    """Parameters, MACs, resident bytes, peak and floor are those worked out by hand."""
    assert (tiny_mlp.parameters, tiny_mlp.forward_macs) == (23, 18)
    assert dict(tiny_mlp.resident_bytes) == {"parameters": 92, "gradients": 92, "optimizer": 0}
    assert checkpoint_all_profile(tiny_mlp) == (16, 28, 40, 36, 40, 52, 48, 36, 48, 52, 28)
    smallest = floor(tiny_mlp)
    assert (smallest.bytes, tiny_mlp.nodes[smallest.node].name) == (36, "relu1.grad_input")


def test_tiny_convolutional_network_nodes() -> None:
    """Convolution, batch norm, pooling, flatten and linear read and make what they should."""
    tape = Tape("tiny")
    x = tape.input("input", 1, 1, 4, 4)
    x = tape.record(conv2d("conv", x, channels=2, kernel=3, padding=1))
    x = tape.record(batch_norm("bn", x))
    x = tape.record(max_pool("pool", x, kernel=2))
    x = tape.record(linear("fc", x.flatten(), features=2))
    graph = tape.differentiate(cross_entropy("loss", x, tape.indices("labels", 1)))
    statistics = ("bn.mean", "bn.inverse_deviation")
    # Elements: conv and bn 2*4*4 = 32, pool 8. Weights: conv 18 (72 B), bn 4 (16 B), fc 18 (72 B).
    assert [row(node)[:-1] for node in graph.nodes] == [
        ("input", "input", "input", (), (64,), 0),
        ("conv", "conv2d", "forward", ("input",), (128,), 2 * 32 * 9),
        ("bn", "batch_norm", "forward", ("conv",), (128, 8, 8), 8 * 32),
        ("pool", "max_pool", "forward", ("bn",), (32, 8), 3 * 8),
        ("fc", "linear", "forward", ("pool",), (8,), 2 * 16),
        ("labels", "input", "input", (), (4,), 0),
        ("loss", "cross_entropy", "loss", ("fc", "labels"), (4, 8), 11),
        ("loss.grad_input", "cross_entropy_backward_input", "backward",
         ("loss.log_probabilities", "labels"), (8,), 5),
        ("fc.grad_weight", "linear_backward_weight", "backward",
         ("loss.grad_input", "pool"), (0,), 2 * 16 + 2),
        ("fc.grad_input", "linear_backward_input", "backward", ("loss.grad_input",), (32,), 2 * 16),
        ("pool.grad_input", "max_pool_backward_input", "backward",
         ("fc.grad_input", "pool.indices"), (128,), 8),
        ("bn.grad_weight", "batch_norm_backward_weight", "backward",
         ("pool.grad_input", "conv", *statistics), (0,), 4 * 32),
        ("bn.grad_input", "batch_norm_backward_input", "backward",
         ("pool.grad_input", "conv", *statistics), (128,), 9 * 32),
        ("conv.grad_weight", "conv2d_backward_weight", "backward",
         ("bn.grad_input", "input"), (0,), 2 * 32 * 9),
    ]  # fmt: skip
    assert graph.parameters == 18 + 4 + 18
    assert graph.forward_macs == 288 + 16
    assert [node.bytes_moved for node in graph.nodes if node.name.startswith("conv")] == [
        64 + 128 + 72,
        128 + 64 + 72,
    ]


def test_fused_tiny_mlp_has_one_backward_node_per_layer() -> None:
    """Fused, a layer's backward is one node: it reads what both parts did and costs their sum."""
    graph = mlp(image_size=2, hidden=(3,), classes=2, fused_backward=True)
    assert [row(node) for node in graph.nodes[6:]] == [
        ("loss.backward", "cross_entropy_backward", "backward",
         ("loss.log_probabilities", "labels"), (8,), 5, 20),
        ("fc2.backward", "linear_backward", "backward",
         ("loss.backward", "relu1"), (12,), 14 + 12, 8 + 12 + 12 + 32 + 24),
        ("relu1.backward", "relu_backward", "backward", ("fc2.backward", "relu1"), (12,), 3, 36),
        ("fc1.backward", "linear_backward", "backward",
         ("relu1.backward", "input"), (0,), 27, 88),
    ]  # fmt: skip


def test_weight_gradient_first_lets_the_input_go() -> None:
    """A layer's weight gradient precedes its input gradient: the other order holds more."""
    tape = Tape("x")
    x = tape.record(linear("fc1", tape.input("input", 1, 4), features=8))
    activated = tape.record(activation("gelu", x, kind="gelu"))
    x = tape.record(linear("fc2", activated, features=16))
    graph = tape.differentiate(cross_entropy("loss", x, tape.indices("labels", 1)))
    k = graph.node_index["fc2.grad_weight"]
    assert graph.nodes[k + 1].name == "fc2.grad_input"
    nodes = list(graph.nodes)
    nodes[k], nodes[k + 1] = nodes[k + 1], nodes[k]
    swapped = checkpoint_all_profile(replace(graph, nodes=tuple(nodes)))
    held = checkpoint_all_profile(graph)
    assert max(swapped[k : k + 2]) - max(held[k : k + 2]) == activated.bytes


def test_samples_come_once_and_may_lie_on_storage() -> None:
    """Input nodes are not recomputable; only with `input_on_aux` are they on storage."""
    for on_aux in (False, True):
        graph = mlp(input_on_aux=on_aux)
        for node in graph.nodes:
            assert node.on_aux is (on_aux and node.phase == "input")
            assert node.recomputable is (node.phase != "input")


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float8"},
        {"optimizer": "lamb"},
        {"batch_size": 0},
    ],
)
def test_settings_that_are_none_are_refused(settings: dict[str, Any], told: Told) -> None:
    """A bad setting is named with what is accepted."""
    with told.raises(InputError):
        Tape("x", **settings)


def test_weight_shared_in_two_shapes_is_refused(told: Told) -> None:
    """Operators that share a weight must agree on its shape."""
    tape = Tape("x")
    x = tape.record(linear("a", tape.input("input", 1, 4), features=4))
    with told.raises(InputError):
        tape.record(linear("b", x, features=3, tied_to="a.weight"))


def test_only_a_loss_is_differentiated(told: Told) -> None:
    """Differentiating an operator that is no loss is refused, not answered with no backward."""
    tape = Tape("x")
    x = tape.input("input", 1, 4)
    with told.raises(InputError):
        tape.differentiate(linear("fc", x, features=4))
