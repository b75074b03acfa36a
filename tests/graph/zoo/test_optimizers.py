"""The update at the end of a step."""

from __future__ import annotations

import pytest

from poetmodel.graph.structure import Phase
from poetmodel.graph.zoo import mlp
from poetmodel.graph.zoo.state import OPTIMIZERS, update_node


@pytest.mark.parametrize(
    ("optimizer", "flops", "bytes_moved"),
    # SGD: read weight and gradient, write weight. Adam: also read and write two moments of 4 B.
    [("sgd", 2 * 10, 3 * 2 * 10), ("adam", 12 * 10, (3 * 2 + 4 * 4) * 10)],
)
def test_update_node(optimizer: str, flops: int, bytes_moved: int) -> None:
    """Ten half-precision parameters cost what the rule does to each of them."""
    node = update_node(optimizer, ["fc.grad_weight"], parameters=10, item_bytes=2)
    assert (node.op, node.phase) == (f"{optimizer}_update", Phase.UPDATE)
    assert node.inputs == ("fc.grad_weight",)
    assert (node.output_bytes, node.flops, node.bytes_moved) == (0, flops, bytes_moved)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_update_comes_last_and_waits_for_every_layer(optimizer: str, *, fused: bool) -> None:
    """The update reads a 0-byte tensor of each layer and is never computed twice."""
    graph = mlp(hidden=(4, 3), optimizer=optimizer, fused_backward=fused)  # type: ignore[arg-type]
    update = graph.nodes[-1]
    assert update.op == f"{optimizer}_update"
    assert not update.recomputable
    assert len(update.inputs) == 3
    sizes = {tensor.name: tensor.bytes for tensor in graph.tensors}
    assert [sizes[name] for name in update.inputs] == [0, 0, 0]
    makers = {graph.nodes[graph.node_of[graph.tensor_index[name]]].name for name in update.inputs}
    ending = "backward" if fused else "grad_weight"
    assert makers == {f"fc{k}.{ending}" for k in (1, 2, 3)}


@pytest.mark.parametrize(("optimizer", "per_parameter"), [(None, 0), ("sgd", 0), ("adam", 8)])
def test_optimizer_state_is_resident(optimizer: str | None, per_parameter: int) -> None:
    """Adam keeps two single-precision moments per parameter, plain SGD nothing."""
    graph = mlp(hidden=(4,), optimizer=optimizer, dtype="float16")  # type: ignore[arg-type]
    assert graph.parameters is not None
    assert graph.resident_bytes["optimizer"] == per_parameter * graph.parameters
    assert graph.resident_bytes["gradients"] == 2 * graph.parameters
