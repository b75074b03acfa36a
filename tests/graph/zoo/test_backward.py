"""The rules of the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from poetmodel.errors import InputError
from poetmodel.graph.zoo import Tape, bert_base
from poetmodel.graph.zoo.norms import batch_norm, layer_norm
from poetmodel.graph.zoo.operators import (
    activation,
    add,
    cross_entropy,
    linear,
    matmul,
)

if TYPE_CHECKING:
    from kit.messages import Told
    from poetmodel.graph.structure import Graph, Node
    from poetmodel.graph.zoo.declaration import Value


def finish(tape: Tape, x: Value) -> Graph:
    """Close a network of shape (rows, features) with its loss."""
    return tape.differentiate(cross_entropy("loss", x, tape.indices("labels", x.shape[0])))


def by_name(graph: Graph) -> dict[str, Node]:
    """Return the nodes by name."""
    return {node.name: node for node in graph.nodes}


def residual(*, fused: bool = False) -> Graph:
    """Return fc1, then fc2 and fc3 of it, both and itself added, then the loss."""
    tape = Tape("residual", fused_backward=fused)
    x = tape.record(linear("fc1", tape.input("input", 1, 4), features=4))
    terms = [tape.record(linear(f"fc{k}", x, features=4)) for k in (2, 3)]
    return finish(tape, tape.record(add("sum", x, *terms)))


def test_sum_passes_its_gradient_without_a_node() -> None:
    """The backward of a sum is no node: all terms read the gradient that arrives."""
    nodes = by_name(residual())
    assert not any(name.startswith("sum.") for name in nodes)
    for reader in ("fc3.grad_weight", "fc3.grad_input", "fc2.grad_weight", "fc2.grad_input"):
        assert nodes[reader].inputs[0] == "loss.grad_input"


def test_several_users_give_one_accumulation() -> None:
    """Three gradients of one tensor are summed by one node once the last of them is there."""
    graph = residual()
    node = by_name(graph)["fc1.grad"]
    assert (node.op, node.phase) == ("add", "backward")
    assert node.inputs == ("loss.grad_input", "fc3.grad_input", "fc2.grad_input")
    # 4 elements of 4 B: two additions each, three reads and one write
    assert (node.output_bytes, node.flops, node.bytes_moved) == (16, 2 * 4, 4 * 16)
    assert by_name(graph)["fc1.grad_weight"].inputs == ("fc1.grad", "input")
    assert sum(node.op == "add" and node.phase == "backward" for node in graph.nodes) == 1


def test_fused_backward_keeps_accumulations() -> None:
    """Fused layers still need the sum of what several users give."""
    nodes = [node.name for node in residual(fused=True).nodes if node.phase == "backward"]
    assert nodes == ["loss.backward", "fc3.backward", "fc2.backward", "fc1.grad", "fc1.backward"]


def test_repeated_term_has_its_gradient_summed() -> None:
    """A term that is repeated over the batch gets the sum over it, by a node that reads no more."""
    tape = Tape("x")
    x = tape.record(linear("fc", tape.input("input", 8, 4), features=4))
    row = tape.record(linear("row", tape.input("other", 1, 4), features=4)).view(4)
    node = by_name(finish(tape, tape.record(add("sum", x, row))))["sum.grad_input1"]
    assert node.inputs == ("loss.grad_input",)
    assert (node.output_bytes, node.flops) == (16, 32)


def test_samples_get_no_gradient() -> None:
    """Nothing is computed for inputs, nor for what is made of inputs alone."""
    tape = Tape("x")
    x = tape.record(activation("relu", tape.input("input", 1, 4), kind="relu"))
    graph = finish(tape, tape.record(linear("fc", x, features=2)))
    backward = [node.name for node in graph.nodes if node.phase == "backward"]
    assert backward == ["loss.grad_input", "fc.grad_weight"]


def test_gradients_passed_to_samples_are_not_summed() -> None:
    """What is made of inputs alone and added twice gets no gradient, and so no sum of two."""
    tape = Tape("x")
    fixed = tape.record(activation("relu", tape.input("input", 1, 4), kind="relu"))
    x = tape.record(linear("fc1", fixed, features=4))
    x = tape.record(linear("fc2", tape.record(add("sum1", x, fixed)), features=4))
    graph = finish(tape, tape.record(add("sum2", x, fixed)))
    backward = [node.name for node in graph.nodes if node.phase == "backward"]
    gradients = ["fc2.grad_weight", "fc2.grad_input", "fc1.grad_weight"]
    assert backward == ["loss.grad_input", *gradients]


def test_what_does_not_reach_the_loss_gets_no_gradient() -> None:
    """A branch that the loss does not depend on has a forward pass only."""
    tape = Tape("x")
    x = tape.record(linear("fc1", tape.input("input", 1, 4), features=4))
    tape.record(linear("idle", x, features=4))
    names = by_name(finish(tape, x))
    assert "idle" in names
    assert not any(name.startswith("idle.") for name in names)
    assert names["fc1.grad_weight"].inputs == ("loss.grad_input", "input")


def test_product_of_a_tensor_with_itself() -> None:
    """Both sides of a product contribute even where they are one tensor."""
    tape = Tape("x")
    x = tape.record(linear("fc", tape.input("input", 4, 4), features=4))
    nodes = by_name(finish(tape, tape.record(matmul("square", x, x))))
    assert nodes["fc.grad"].inputs == ("square.grad_left", "square.grad_right")
    assert nodes["square.grad_left"].inputs == ("loss.grad_input", "fc")


def test_normalization_shares_its_sums_when_fused() -> None:
    """One fused node computes the sums once that two separate nodes compute twice."""
    flops = {}
    for fused in (False, True):
        tape = Tape("x", fused_backward=fused)
        x = tape.record(linear("fc", tape.input("input", 1, 8), features=8))
        graph = finish(tape, tape.record(layer_norm("norm", x)))
        flops[fused] = sum(n.flops for n in graph.nodes if n.op.startswith("layer_norm_backward"))
    assert flops == {False: (4 + 9) * 8, True: 9 * 8}


def test_shared_weight_gradients_are_not_recomputable() -> None:
    """Gradients of the tied word embedding are added up, so each is computed exactly once."""
    graph = bert_base(head="mlm", seq_len=4)
    once = [node.name for node in graph.nodes if not node.recomputable and node.phase == "backward"]
    assert once == ["mlm.decoder.grad_weight", "embeddings.token.grad_weight"]


def test_dropout_rule() -> None:
    """The mask is drawn once; applying it may be repeated; backward reads only the mask."""
    tape = Tape("x", batch_size=2)
    x = tape.record(linear("fc1", tape.input("input", 2, 8), features=8))
    x = tape.drop("drop", x, rate=0.5)
    nodes = by_name(finish(tape, tape.record(linear("fc2", x, features=3))))
    mask, applied, gradient = nodes["drop.mask"], nodes["drop"], nodes["drop.grad_input"]
    assert (mask.recomputable, mask.output_bytes, mask.inputs) == (False, 16, ())
    assert (applied.recomputable, applied.output_bytes) == (True, 64)
    assert applied.inputs == ("fc1", "drop.mask")
    assert gradient.inputs == ("fc2.grad_input", "drop.mask")


def test_dropout_of_nothing_is_nothing() -> None:
    """A rate of 0 adds no node."""
    tape = Tape("x")
    x = tape.input("input", 1, 4)
    assert tape.drop("drop", x, rate=0) is x


KINDS = ("linear", "add", "relu", "gelu", "norm", "matmul", "drop")


@st.composite
def networks(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, **options: Any) -> Graph:
    """Return a random network: each layer takes results that are there already.

    A ``tied`` layer has the weight of the last.
    """
    tape = Tape("random", fused_backward=draw(st.booleans()), **options)
    values = [tape.input("input", 4, 4)]
    for k in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(kinds))
        x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        if kind == "drop":
            values.append(tape.drop(f"n{k}", x, rate=0.5))
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
def test_every_gradient_is_wanted_and_made_once(graph: Graph) -> None:
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


def test_batch_norm_statistics_feed_both_parts() -> None:
    """Input, mean and inverse deviation are read by the weight and by the input gradient."""
    tape = Tape("x")
    x = tape.record(linear("fc", tape.input("input", 1, 8), features=8)).view(1, 2, 2, 2)
    x = tape.record(batch_norm("bn", x)).flatten()
    nodes = by_name(finish(tape, x))
    for part in ("weight", "input"):
        saved = nodes[f"bn.grad_{part}"].inputs[1:]
        assert saved == ("fc", "bn.mean", "bn.inverse_deviation")


@pytest.mark.parametrize("rate", [1, 1.5, -0.1, float("nan"), True, "half"])
def test_dropout_rate_must_be_a_share(rate: object, told: Told) -> None:
    """A rate outside 0..1 is refused in words."""
    tape = Tape("x")
    with told.raises(InputError):
        tape.drop("drop", tape.input("input", 1, 4), rate=rate)  # type: ignore[arg-type]
