"""Whole graphs worked out by hand, the tape's settings, and the rules of the backward pass."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from poetmodel.errors import InputError
from poetmodel.graph import checkpoint_all_profile, floor
from poetmodel.graph.zoo import Tape, bert_base, mlp
from poetmodel.graph.zoo.operators import (
    activation,
    add,
    batch_norm,
    conv2d,
    cross_entropy,
    layer_norm,
    linear,
    matmul,
    max_pool,
)


def row(node):
    """Return the row of a node in a hand-made table."""
    sizes = tuple(tensor.bytes for tensor in node.outputs)
    return (node.name, node.op, node.phase, node.inputs, sizes, node.flops, node.bytes_moved)


@pytest.fixture
def tiny_mlp():
    """Return a perceptron 4-3-2 with ReLU, batch 1."""
    return mlp(image_size=2, hidden=(3,), classes=2)


def test_tiny_mlp_nodes(tiny_mlp):
    """Every node of a perceptron 4-3-2 has the edges, bytes, FLOP and traffic found by hand.

    So have parameters, MACs, resident bytes, peak and floor.
    """
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
    assert (tiny_mlp.parameters, tiny_mlp.forward_macs) == (23, 18)
    assert dict(tiny_mlp.resident_bytes) == {"parameters": 92, "gradients": 92, "optimizer": 0}
    assert checkpoint_all_profile(tiny_mlp) == (16, 28, 40, 36, 40, 52, 48, 36, 48, 52, 28)
    smallest = floor(tiny_mlp)
    assert (smallest.bytes, tiny_mlp.nodes[smallest.node].name) == (36, "relu1.grad_input")


def test_tiny_convolutional_network_nodes():
    """Convolution, batch norm, pooling, flatten and linear have the correct inputs and outputs."""
    tape = Tape("tiny")
    x = tape.add_input("input", 1, 1, 4, 4)
    x = tape.record(conv2d("conv", x, channels=2, kernel=3, padding=1))
    x = tape.record(batch_norm("bn", x))
    x = tape.record(max_pool("pool", x, kernel=2))
    x = tape.record(linear("fc", x.flatten(), features=2))
    graph = tape.differentiate(cross_entropy("loss", x, tape.add_indices("labels", 1)))
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


def test_fused_tiny_mlp_has_one_backward_node_per_layer():
    """The backward node of a fused layer reads the inputs of both parts and costs their sum."""
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


def test_weight_gradient_first_lets_the_input_go():
    """A layer's weight gradient precedes its input gradient: the other order holds more."""
    tape = Tape("x")
    x = tape.record(linear("fc1", tape.add_input("input", 1, 4), features=8))
    activated = tape.record(activation("gelu", x, kind="gelu"))
    x = tape.record(linear("fc2", activated, features=16))
    graph = tape.differentiate(cross_entropy("loss", x, tape.add_indices("labels", 1)))
    k = graph.node_index["fc2.grad_weight"]
    assert graph.nodes[k + 1].name == "fc2.grad_input"
    nodes = list(graph.nodes)
    nodes[k], nodes[k + 1] = nodes[k + 1], nodes[k]
    swapped = checkpoint_all_profile(replace(graph, nodes=tuple(nodes)))
    held = checkpoint_all_profile(graph)
    assert max(swapped[k : k + 2]) - max(held[k : k + 2]) == activated.bytes


def test_samples_come_once_and_may_lie_on_storage():
    """Input nodes are not recomputable; only with `input_on_aux` are they on storage."""
    for on_aux in (False, True):
        graph = mlp(input_on_aux=on_aux)
        for node in graph.nodes:
            assert node.on_aux is (on_aux and node.phase == "input")
            assert node.recomputable is (node.phase != "input")


@pytest.mark.parametrize(
    "settings", [{"dtype": "float8"}, {"optimizer": "lamb"}, {"batch_size": 0}]
)
def test_settings_that_are_none_are_refused(settings, told):
    """An invalid setting is refused with the accepted values."""
    with told.raises(InputError):
        Tape("x", **settings)


def test_weight_shared_in_two_shapes_is_refused(told):
    """Operators that share a weight must agree on its shape."""
    tape = Tape("x")
    x = tape.record(linear("a", tape.add_input("input", 1, 4), features=4))
    with told.raises(InputError):
        tape.record(linear("b", x, features=3, tied_to="a.weight"))


def test_only_a_loss_is_differentiated(told):
    """Differentiating an operator that is no loss is refused, not answered with no backward."""
    tape = Tape("x")
    x = tape.add_input("input", 1, 4)
    with told.raises(InputError):
        tape.differentiate(linear("fc", x, features=4))


def finish(tape, x):
    """Close a network of shape (rows, features) with its loss."""
    return tape.differentiate(cross_entropy("loss", x, tape.add_indices("labels", x.shape[0])))


def by_name(graph):
    """Return the nodes by name."""
    return {node.name: node for node in graph.nodes}


def residual(*, fused=False):
    """Return fc1, then fc2 and fc3 of it, both and itself added, then the loss."""
    tape = Tape("residual", fused_backward=fused)
    x = tape.record(linear("fc1", tape.add_input("input", 1, 4), features=4))
    terms = [tape.record(linear(f"fc{k}", x, features=4)) for k in (2, 3)]
    return finish(tape, tape.record(add("sum", x, *terms)))


def test_several_users_give_one_accumulation():
    """Three gradients of one tensor are summed by one node after the last of them.

    The backward of a sum is no node: all terms read the incoming gradient. Fused layers still
    need the sum of the gradients of several readers.
    """
    graph = residual()
    node = by_name(graph)["fc1.grad"]
    assert (node.op, node.phase) == ("add", "backward")
    assert node.inputs == ("loss.grad_input", "fc3.grad_input", "fc2.grad_input")
    # 4 elements of 4 B: two additions each, three reads and one write
    assert (node.output_bytes, node.flops, node.bytes_moved) == (16, 2 * 4, 4 * 16)
    assert by_name(graph)["fc1.grad_weight"].inputs == ("fc1.grad", "input")
    assert sum(node.op == "add" and node.phase == "backward" for node in graph.nodes) == 1
    nodes = by_name(residual())
    assert not any(name.startswith("sum.") for name in nodes)
    for reader in ("fc3.grad_weight", "fc3.grad_input", "fc2.grad_weight", "fc2.grad_input"):
        assert nodes[reader].inputs[0] == "loss.grad_input"
    nodes = [node.name for node in residual(fused=True).nodes if node.phase == "backward"]
    assert nodes == ["loss.backward", "fc3.backward", "fc2.backward", "fc1.grad", "fc1.backward"]


def test_repeated_term_has_its_gradient_summed():
    """A term that is repeated over the batch gets the sum over it; the node reads no more.

    Both sides of a product contribute even where they are one tensor.
    """
    tape = Tape("x")
    x = tape.record(linear("fc", tape.add_input("input", 8, 4), features=4))
    row = tape.record(linear("row", tape.add_input("other", 1, 4), features=4)).view(4)
    node = by_name(finish(tape, tape.record(add("sum", x, row))))["sum.grad_input1"]
    assert node.inputs == ("loss.grad_input",)
    assert (node.output_bytes, node.flops) == (16, 32)
    tape = Tape("x")
    x = tape.record(linear("fc", tape.add_input("input", 4, 4), features=4))
    nodes = by_name(finish(tape, tape.record(matmul("square", x, x))))
    assert nodes["fc.grad"].inputs == ("square.grad_left", "square.grad_right")
    assert nodes["square.grad_left"].inputs == ("loss.grad_input", "fc")


def test_normalization_shares_its_sums_when_fused():
    """One fused node computes the sums once that two separate nodes compute twice."""
    flops = {}
    for fused in (False, True):
        tape = Tape("x", fused_backward=fused)
        x = tape.record(linear("fc", tape.add_input("input", 1, 8), features=8))
        graph = finish(tape, tape.record(layer_norm("norm", x)))
        flops[fused] = sum(n.flops for n in graph.nodes if n.op.startswith("layer_norm_backward"))
    assert flops == {False: (4 + 9) * 8, True: 9 * 8}


def test_shared_weight_gradients_are_not_recomputable():
    """Gradients of the tied word embedding are added up, so each is computed exactly once."""
    graph = bert_base(head="mlm", seq_len=4)
    once = [node.name for node in graph.nodes if not node.recomputable and node.phase == "backward"]
    assert once == ["mlm.decoder.grad_weight", "embeddings.token.grad_weight"]


def test_dropout_rule():
    """The mask is drawn once; applying it may be repeated; backward reads only the mask."""
    tape = Tape("x", batch_size=2)
    x = tape.record(linear("fc1", tape.add_input("input", 2, 8), features=8))
    assert tape.record_dropout("none", x, rate=0) is x
    x = tape.record_dropout("drop", x, rate=0.5)
    nodes = by_name(finish(tape, tape.record(linear("fc2", x, features=3))))
    mask, applied, gradient = nodes["drop.mask"], nodes["drop"], nodes["drop.grad_input"]
    assert (mask.recomputable, mask.output_bytes, mask.inputs) == (False, 16, ())
    assert (applied.recomputable, applied.output_bytes) == (True, 64)
    assert applied.inputs == ("fc1", "drop.mask")
    assert gradient.inputs == ("fc2.grad_input", "drop.mask")


KINDS = ("linear", "add", "relu", "gelu", "norm", "matmul", "drop")


@st.composite
def networks(draw, kinds=KINDS, **options):
    """Return a random network: each layer reads existing results.

    A ``tied`` layer has the weight of the last.
    """
    tape = Tape("random", fused_backward=draw(st.booleans()), **options)
    values = [tape.add_input("input", 4, 4)]
    for k in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(kinds))
        x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        if kind == "drop":
            values.append(tape.record_dropout(f"n{k}", x, rate=0.5))
            continue
        declared = {
            "linear": lambda name, x, _: linear(name, x, features=4),
            "add": add,
            "relu": lambda name, x, _: activation(name, x, kind="relu"),
            "gelu": lambda name, x, _: activation(name, x, kind="gelu"),
            "tied": lambda name, x, _: linear(name, x, features=4, tied_to="last.weight"),
            "norm": lambda name, x, _: layer_norm(name, x),
            "batch_norm": lambda name, x, _: batch_norm(name, x),
            "matmul": matmul,
        }[kind](f"n{k}", x, y)
        values.append(tape.record(declared))
    last = tape.record(linear("last", values[-1], features=4))
    return finish(tape, last)


@given(networks())
def test_every_gradient_is_wanted_and_made_once(graph):
    """Whatever the network, every gradient made is read, and every used weight gets exactly one."""
    users = {tensor.name: graph.users_of[i] for i, tensor in enumerate(graph.tensors)}
    nodes = by_name(graph)
    reaching = {"loss"}
    for node in reversed(graph.nodes):
        if node.phase in ("forward", "loss") and node.name in reaching:
            reaching.update(node.inputs)
    for node in graph.nodes:
        if node.phase == "backward":
            assert all(users[tensor.name] for tensor in node.outputs if tensor.bytes)
        if node.phase == "forward" and node.op in ("linear", "layer_norm"):
            made = [f"{node.name}.grad_weight", f"{node.name}.backward"]
            assert sum(name in nodes for name in made) == (node.name in reaching)


@pytest.mark.parametrize("rate", [1, -0.1, float("nan"), True, "half"])
def test_dropout_rate_must_be_a_share(rate, told):
    """A rate outside 0..1 is refused in words."""
    tape = Tape("x")
    with told.raises(InputError):
        tape.record_dropout("drop", tape.add_input("input", 1, 4), rate=rate)  # type: ignore[arg-type]
