"""Operators of the zoo: their declarations and the derived values."""

import inspect

import pytest

from poetmodel.errors import InputError
from poetmodel.graph.node import Phase
from poetmodel.graph.zoo import mlp, operators
from poetmodel.graph.zoo.declaration import (
    Declaration,
    Value,
    Weight,
    require_counts,
    window_output_size,
)
from poetmodel.graph.zoo.state import OPTIMIZERS, make_update_node


def value(name, *shape, item_bytes=4):
    """Return a named value."""
    return Value(name=name, shape=shape, item_bytes=item_bytes)


IMAGE = value("x", 2, 6, 5, 5)
ROWS = value("x", 2, 3, 8)

# Declaration, result's shape, FLOP, parameters, and of each backward part: saved tensors, FLOP.
CASES = {
    "conv2d": (
        operators.conv2d("n", IMAGE, channels=4, kernel=3, stride=2, padding=1), (2, 4, 3, 3),
        2 * (2 * 4 * 9) * (6 * 9), 4 * 6 * 9,
        {"weight": (["x"], 2 * 72 * 54), "input": ([], 2 * 72 * 54)},
    ),
    "conv2d grouped, bias": (
        operators.conv2d("n", IMAGE, channels=4, kernel=3, groups=2, bias=True), (2, 4, 3, 3),
        2 * 72 * (3 * 9), 4 * 3 * 9 + 4,
        {"weight": (["x"], 2 * 72 * 27 + 72), "input": ([], 2 * 72 * 27)},
    ),
    "conv2d with two sides, same": (
        operators.conv2d("n", IMAGE, channels=4, kernel=(4, 3), stride=2, padding="same"),
        (2, 4, 3, 3), 2 * 72 * (6 * 12), 4 * 6 * 12,
        {"weight": (["x"], 2 * 72 * 72), "input": ([], 2 * 72 * 72)},
    ),
    "conv2d depthwise": (
        operators.conv2d("n", IMAGE, channels=6, kernel=3, padding=1, groups=6), (2, 6, 5, 5),
        2 * 300 * 9, 6 * 9, {"weight": (["x"], 2 * 300 * 9), "input": ([], 2 * 300 * 9)},
    ),
    "linear": (
        operators.linear("n", ROWS, features=5), (2, 3, 5), 2 * 30 * 8, 8 * 5 + 5,
        {"weight": (["x"], 2 * 30 * 8 + 30), "input": ([], 2 * 30 * 8)},
    ),
    "matmul": (
        operators.matmul("n", ROWS, value("y", 2, 8, 4)), (2, 3, 4), 2 * 24 * 8, 0,
        {"left": (["y"], 2 * 24 * 8), "right": (["x"], 2 * 24 * 8)},
    ),
    "matmul transposed": (
        operators.matmul("n", ROWS, value("y", 2, 4, 8), transpose_right=True), (2, 3, 4),
        2 * 24 * 8, 0, {"left": (["y"], 2 * 24 * 8), "right": (["x"], 2 * 24 * 8)},
    ),
    "batch_norm": (
        operators.batch_norm("n", IMAGE), IMAGE.shape, 8 * 300, 12,
        {"weight": (["x", "n.mean", "n.inverse_deviation"], 4 * 300),
         "input": (["x", "n.mean", "n.inverse_deviation"], 9 * 300)},
    ),
    "layer_norm": (
        operators.layer_norm("n", ROWS), ROWS.shape, 8 * 48, 16,
        {"weight": (["x", "n.mean", "n.inverse_deviation"], 4 * 48),
         "input": (["x", "n.mean", "n.inverse_deviation"], 9 * 48)},
    ),
    "relu": (
        operators.activation("n", ROWS, kind="relu"), ROWS.shape, 48, 0, {"input": (["n"], 48)},
    ),
    "relu6": (
        operators.activation("n", ROWS, kind="relu6"), ROWS.shape, 2 * 48, 0,
        {"input": (["n"], 2 * 48)},
    ),
    "tanh": (
        operators.activation("n", ROWS, kind="tanh"), ROWS.shape, 48, 0, {"input": (["n"], 3 * 48)},
    ),
    "gelu": (
        operators.activation("n", ROWS, kind="gelu"), ROWS.shape, 5 * 48, 0,
        {"input": (["x"], 11 * 48)},
    ),
    "add": (operators.add("n", ROWS, ROWS, ROWS), ROWS.shape, 2 * 48, 0, {}),
    "scale": (operators.scale("n", ROWS), ROWS.shape, 48, 0, {"input": ([], 48)}),
    "dropout_mask": (operators.dropout_mask("n", ROWS), ROWS.shape, 48, 0, {}),
    "dropout": (
        operators.dropout("n", ROWS, value("m", 2, 3, 8, item_bytes=1)), ROWS.shape, 2 * 48, 0,
        {"input": (["m"], 2 * 48)},
    ),
    "max_pool": (
        operators.max_pool("n", IMAGE, kernel=2), (2, 6, 2, 2), 3 * 48, 0,
        {"input": (["n.indices"], 48)},
    ),
    "global_avg_pool": (
        operators.global_avg_pool("n", IMAGE), (2, 6), 300, 0, {"input": ([], 300)},
    ),
    "select": (operators.select("n", ROWS), (2, 8), 0, 0, {"input": ([], 0)}),
    "embedding": (
        operators.embedding("n", value("ids", 2, 3), rows=100, features=8, item_bytes=4), (2, 3, 8),
        0, 800, {"weight": (["ids"], 48)},
    ),
    "softmax": (operators.softmax("n", ROWS), ROWS.shape, 5 * 48, 0, {"input": (["n"], 4 * 48)}),
    "cross_entropy": (
        operators.cross_entropy("n", ROWS, value("labels", 2, 3)), (), 5 * 48 + 6, 0,
        {"input": (["n.log_probabilities", "labels"], 2 * 48 + 6)},
    ),
    "mean_squared_error": (
        operators.mean_squared_error("n", ROWS, value("labels", 2, 3, 8)), (), 3 * 48, 0,
        {"input": (["x", "labels"], 2 * 48)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_operator_declares_what_was_worked_out_by_hand(case):
    """Shape, FLOP, parameters and backward of an operator are those of the table."""
    declared, shape, flops, parameters, backward = CASES[case]
    assert (declared.outputs[0].shape, declared.flops) == (shape, flops)
    assert sum(weight.size for weight in declared.weights) == parameters
    assert {
        part.suffix: ([saved.name for saved in part.saved], part.flops)
        for part in declared.gradients
    } == backward


def test_every_operator_is_in_the_table():
    """Each operator has values that were derived by hand."""
    tested = {case.split()[0] for case in CASES} | {"activation"}
    for name, function in inspect.getmembers(operators, inspect.isfunction):
        if function.__module__ == operators.__name__ and not name.startswith("_"):
            assert name in tested
            assert inspect.get_annotations(function)["return"] == Declaration.__name__


@pytest.mark.parametrize("case", CASES)
def test_gradients_cover_every_input_and_weight(case):
    """Every differentiable operand gets its gradient, by a node or passed on; weights too."""
    declared = CASES[case][0]
    served = {part.target.name for part in declared.gradients if part.target is not None}
    served |= {passed.name for passed in declared.same_gradient_inputs}
    assert {operand.name for operand in declared.inputs} - served <= {"ids", "labels", "m"}
    assert sum(part.target is None for part in declared.gradients) == bool(declared.weights)
    assert not any(part.workspace_bytes for part in (declared, *declared.gradients))


def test_bytes_of_single_operators():
    """A position in a window of 16 x 16 fits one byte, in one of 17 x 17 it does not.

    The traffic of a look-up is that of its rows, not of the table; backward adds to them. The
    traffic of a linear layer's input gradient includes its 8 x 5 weight, not its bias.
    """
    x = value("x", 1, 1, 34, 34)
    for kernel, place_bytes in ((16, 1), (17, 4)):
        y, places = operators.max_pool("n", x, kernel=kernel).outputs
        assert places.bytes == place_bytes * y.size
    declared = CASES["embedding"][0]
    assert declared.weight_bytes_moved == 48 * 4
    assert declared.gradients[0].weight_bytes_moved == 2 * 48 * 4
    weight, x = CASES["linear"][0].gradients
    assert (weight.weight_bytes_moved, x.weight_bytes_moved) == (4 * 45, 4 * 40)


def test_operands_that_do_not_fit_are_refused(told):
    """Shapes that cannot be combined are an error that names the operator."""
    with told.raises(InputError):
        operators.matmul("n", ROWS, ROWS)
    with told.raises(InputError, "second"):
        operators.add("n", ROWS, value("y", 2, 8))
    with told.raises(InputError, "third"):
        operators.mean_squared_error("n", ROWS, value("y", 2, 8))
    with told.raises(InputError, "fourth"):
        operators.conv2d("n", IMAGE, channels=4, kernel=1, groups=4)
    with told.raises(InputError, "fifth"):
        operators.activation("n", ROWS, kind="elu")


# -- declarations --------------------------------------------------------------------------------
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
    assert image.new_value("y", 4).bytes == 8
    assert image.new_value("mask", 4, item_bytes=1).bytes == 4


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
    assert window_output_size("w", image, kernel=kernel, stride=stride, padding=padding) == grid


def test_window_too_large_is_refused(image, told):
    """A window larger than the padded image names the operator, the sizes and the way out."""
    with told.raises(InputError):
        window_output_size("pool", image, kernel=8, stride=1, padding=1)


@pytest.mark.parametrize(
    ("optimizer", "flops", "bytes_moved"),
    # SGD: read weight and gradient, write weight. Adam: also read and write two moments of 4 B.
    [("sgd", 2 * 10, 3 * 2 * 10), ("adam", 12 * 10, (3 * 2 + 4 * 4) * 10)],
)
def test_update_node(optimizer, flops, bytes_moved):
    """The update of ten half-precision parameters costs its rule's operations for each."""
    node = make_update_node(optimizer, ["fc.grad_weight"], parameters=10, item_bytes=2)
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
    """Adam has two single-precision moments per parameter, plain SGD none."""
    graph = mlp(hidden=(4,), optimizer=optimizer, dtype="float16")  # type: ignore[arg-type]
    assert graph.resident_bytes["optimizer"] == per_parameter * graph.parameters
    assert graph.resident_bytes["gradients"] == 2 * graph.parameters
