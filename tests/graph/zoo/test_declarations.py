"""Shapes, sizes and views of operators, and the update at the end of a step."""

import pytest

from poetmodel.errors import InputError
from poetmodel.graph.structure import Phase
from poetmodel.graph.zoo import mlp
from poetmodel.graph.zoo.declaration import Value, Weight, require_counts, window_grid
from poetmodel.graph.zoo.state import OPTIMIZERS, update_node


@pytest.fixture
def image():
    """Return two images of 3 channels, 5 x 7, in half precision."""
    return Value(name="image", shape=(2, 3, 5, 7), item_bytes=2)


def test_flatten_is_the_same_tensor(image):
    """Flattening changes the shape and neither name nor size; results have the element size."""
    flat = image.flatten()
    assert flat.shape == (2, 105)
    assert (flat.name, flat.size, flat.bytes) == ("image", 210, 420)
    assert Weight(name="w", shape=(4, 3), item_bytes=4).bytes == 48
    assert image.made("y", 4).bytes == 8
    assert image.made("mask", 4, item_bytes=1).bytes == 4


def test_view_of_another_size_is_refused(image, told):
    """A view cannot have more elements than its tensor; the error names it."""
    with told.raises(InputError):
        image.view(2, 3, 36)


@pytest.mark.parametrize("bad", [0, 1.0, True, "3", 10**6 + 1])
def test_counts_that_are_none_are_refused(bad, told):
    """Whatever is no whole number from 1 to a million is named with its value."""
    with told.raises(InputError):
        require_counts(image_size=bad, batch_size=-2, classes=5)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "grid"),
    # (side + 2 padding - kernel) // stride + 1 for sides 5 and 7
    [(3, 1, 1, (5, 7)), (3, 2, 1, (3, 4)), (2, 2, 0, (2, 3)), (5, 1, 0, (1, 3))],
)
def test_window_grid(image, kernel, stride, padding, grid):
    """Windows are counted with padding, and a last incomplete step is dropped."""
    assert window_grid("w", image, kernel=kernel, stride=stride, padding=padding) == grid


def test_window_too_large_is_refused(image, told):
    """A window larger than the padded image names the operator, the sizes and the way out."""
    with told.raises(InputError):
        window_grid("pool", image, kernel=8, stride=1, padding=1)


@pytest.mark.parametrize(
    ("optimizer", "flops", "bytes_moved"),
    # SGD: read weight and gradient, write weight. Adam: also read and write two moments of 4 B.
    [("sgd", 2 * 10, 3 * 2 * 10), ("adam", 12 * 10, (3 * 2 + 4 * 4) * 10)],
)
def test_update_node(optimizer, flops, bytes_moved):
    """Ten half-precision parameters cost what the rule does to each of them."""
    node = update_node(optimizer, ["fc.grad_weight"], parameters=10, item_bytes=2)
    assert (node.op, node.phase) == (f"{optimizer}_update", Phase.UPDATE)
    assert node.inputs == ("fc.grad_weight",)
    assert (node.output_bytes, node.flops, node.bytes_moved) == (0, flops, bytes_moved)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_update_comes_last_and_waits_for_every_layer(optimizer, *, fused):
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
def test_optimizer_state_is_resident(optimizer, per_parameter):
    """Adam keeps two single-precision moments per parameter, plain SGD nothing."""
    graph = mlp(hidden=(4,), optimizer=optimizer, dtype="float16")  # type: ignore[arg-type]
    assert graph.resident_bytes["optimizer"] == per_parameter * graph.parameters
    assert graph.resident_bytes["gradients"] == 2 * graph.parameters
