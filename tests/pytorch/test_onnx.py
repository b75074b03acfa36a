"""ONNX files as modules: numbers of ONNX's reference, gradients of PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import poetmodel.torch as pmt  # noqa: E402
from kit.commands import invoke  # noqa: E402
from kit.export_agreement import Exported, batches_like, lowered, torch_steps  # noqa: E402
from kit.onnx_networks import MODELS, training, write  # noqa: E402
from kit.onnx_operators import CASES, model_of, normal, whole  # noqa: E402
from kit.rotation import rotating  # noqa: E402
from poetmodel.errors import InputError  # noqa: E402
from poetmodel.export.io import load_step as load_step_file  # noqa: E402
from poetmodel.torch.onnx.module import OPERATORS  # noqa: E402
from poetmodel.torch.target import OnnxStep, load_step  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from kit.messages import Told

pytestmark = pytest.mark.torch
VERSIONS = [(name, opset) for name, case in CASES.items() for opset in case.versions()]


def close(mine: Any, its: Any, tolerance: float = 1e-5) -> None:
    """Fail unless arrays of one shape are equal but for rounding, over their largest element."""
    mine, its = np.asarray(mine), np.asarray(its)
    assert mine.shape == its.shape
    scale = max(1.0, float(np.abs(np.nan_to_num(its)).max(initial=0.0)))
    np.testing.assert_allclose(mine, its, rtol=0, atol=tolerance * scale)


def outputs(module: nn.Module, *inputs: np.ndarray) -> list[np.ndarray]:
    """Return what a module makes of arrays in evaluation mode, as arrays."""
    with torch.no_grad():
        found = module.eval()(*(torch.from_numpy(np.array(x)) for x in inputs))
    return [x.numpy() for x in (found if isinstance(found, tuple) else (found,))]


# -- operators ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "opset"), VERSIONS, ids=[f"{n}, {v}" for n, v in VERSIONS])
def test_operator_is_that_of_the_reference(name: str, opset: int, tmp_path: Path) -> None:
    """Each operator, in each version from opset 13 on, makes what ONNX's reference makes."""
    case = CASES[name]
    model = case.model(opset)
    onnx.save(model, tmp_path / "case.onnx")
    arrays = case.arrays()
    mine = outputs(pmt.from_onnx(tmp_path / "case.onnx"), *arrays.values())
    its = ReferenceEvaluator(model).run(None, arrays)
    for found, expected in zip(mine, its, strict=True):
        close(found, expected)


def test_every_operator_has_a_case() -> None:
    """None is registered without one; sequences are tested by a split of PyTorch's exporter."""
    sequences = {"SplitToSequence", "SequenceAt", "SequenceConstruct", "ConcatFromSequence"}
    assert OPERATORS.keys() - {case.operator for case in CASES.values()} == sequences
    assert len(OPERATORS) >= 60


NO_KERNEL = {
    *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Sinh", "Tan"),
    *("Pow", "Mod, fmod", "Clip, tensors", "ReduceProd", "TopK", "TopK, least"),
    *("ScatterElements, max", "Conv, volumes", "Resize, cubic"),
}
"""Cases that run in PyTorch alone."""
REAL = [
    name
    for name, case in CASES.items()
    if case.arrays() and next(iter(case.arrays().values())).dtype == np.float32
    if name not in ("Reshape, to zero", "GRU, batch first")  # no contiguous tensors
]


class Scaled(nn.Module):
    """A network behind a parameter, so that there is one to train."""

    def __init__(self, inner: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Return the sum of squares of all outputs, and of the scale."""
        found = self.inner(x * self.scale, *more)
        found = found if isinstance(found, tuple) else (found,)
        return sum((y * y).sum() for y in (*found, self.scale))


@pytest.mark.slow
@pytest.mark.parametrize("name", rotating(REAL, ("Conv, uneven pads", "Resize, linear, cut")))
def test_operator_has_kernels(name: str, tmp_path: Path) -> None:
    """What is not said to run in PyTorch alone becomes C, forward and backward."""
    case = CASES[name]
    onnx.save(case.model(case.versions()[-1]), tmp_path / "case.onnx")
    inputs = tuple(torch.from_numpy(np.array(x)) for x in case.arrays().values())
    model = Scaled(pmt.from_onnx(tmp_path / "case.onnx"), tuple(inputs[0].shape))
    if name in NO_KERNEL:
        with pytest.raises(pmt.CaptureError, match="no kernel"):
            lowered((model, None, inputs))
    else:
        assert lowered((model, None, inputs)).graph.nodes


UNARY = ("Relu", "Tanh", "Softmax", "LeakyRelu")
BINARY = ("Add", "Mul", "Sub", "Concat")


@given(
    drawn=st.lists(
        st.tuples(st.sampled_from(UNARY + BINARY), st.integers(0, 9), st.integers(0, 9)),
        min_size=1, max_size=8,
    ),
    opset=st.integers(13, 23),
)  # fmt: skip
@settings(max_examples=30)
def test_random_graphs_are_those_of_the_reference(
    drawn: list[tuple[str, int, int]], opset: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nodes that read each other, inputs and a shared weight, whatever the order."""
    values = ["x", "w"]
    nodes = []
    for k, (name, first, second) in enumerate(drawn):
        read = [values[first % len(values)], values[second % len(values)]]
        read = read[: 1 if name in UNARY else 2]
        more = {"axis": 0} if name == "Concat" else {}
        if name == "Concat":  # the sum over rows keeps all shapes alike
            nodes.append(helper.make_node(name, read, [f"c{k}"], **more))
            nodes.append(helper.make_node("Slice", [f"c{k}", "begin", "end"], [f"v{k}"]))
        else:
            nodes.append(helper.make_node(name, read, [f"v{k}"], **more))
        values.append(f"v{k}")
    given_ = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (3, 4))]
    held = [
        numpy_helper.from_array(normal(3, 4), "w"),
        numpy_helper.from_array(whole(1), "begin"),
        numpy_helper.from_array(whole(4), "end"),
    ]
    model = model_of(nodes, given_, [values[-1]], held, opset=opset)
    path = tmp_path_factory.mktemp("random") / "graph.onnx"
    onnx.save(model, path)
    x = normal(3, 4)
    (mine,) = outputs(pmt.from_onnx(path), x)
    close(mine, ReferenceEvaluator(model).run(None, {"x": x})[0])


# -- networks ----------------------------------------------------------------------------------


def compare(model: nn.Module, loss: Any, inputs: tuple[Any, ...], mine: nn.Module) -> None:
    """Fail unless a module trains as another one with parameters of the same names."""
    *x, y = inputs
    close(mine.eval()(*x).detach(), model.eval()(*x).detach())
    found, expected = loss(mine.train()(*x), y), loss(model.train()(*x), y)
    close(found.detach(), expected.detach())
    found.backward()
    expected.backward()
    its = dict(model.named_parameters())
    largest = max(float(parameter.grad.abs().max()) for parameter in its.values())
    own = dict(mine.named_parameters())
    assert own.keys() == its.keys()
    for name, parameter in its.items():
        close(own[name].grad / largest, parameter.grad / largest)
    counted = {name: x for name, x in model.named_buffers() if "num_batches" not in name}
    held = dict(mine.named_buffers())
    assert held.keys() == counted.keys()
    for name, buffer in counted.items():
        close(held[name], buffer)


@pytest.mark.parametrize("name", MODELS)
def test_network_trains_as_in_pytorch(name: str, tmp_path: Path) -> None:
    """Loss, gradients and running statistics are those of the model, under its names."""
    model, loss, inputs = training(name)
    write(model, inputs[:-1], tmp_path / "network.onnx")
    compare(model, loss, inputs, pmt.from_onnx(tmp_path / "network.onnx"))


@pytest.mark.parametrize("name", ["autoencoder", "ds-cnn", "encoder", "GRU", "LSTM"])
def test_network_is_that_of_the_reference(name: str, tmp_path: Path) -> None:
    """In evaluation mode a whole network makes what ONNX's reference makes of the file."""
    model, _, (x, _) = training(name)
    write(model, (x,), tmp_path / "network.onnx")
    (mine,) = outputs(pmt.from_onnx(tmp_path / "network.onnx"), x.numpy())
    its = ReferenceEvaluator(str(tmp_path / "network.onnx")).run(None, {"x0": x.numpy()})
    close(mine, its[0])


@pytest.mark.large
@pytest.mark.parametrize("name", ["ds-cnn", "encoder", "bert-block", "GRU"])
def test_newer_exporter_writes_what_trains(name: str, tmp_path: Path) -> None:
    """So it does of a file of PyTorch's newer exporter that keeps batch norms."""
    pytest.importorskip("onnxscript")
    model, loss, inputs = training(name)
    write(model, inputs[:-1], tmp_path / "network.onnx", dynamo=True, optimize=False)
    mine = pmt.from_onnx(tmp_path / "network.onnx")
    if name != "GRU":  # whose weights it writes anew
        compare(model, loss, inputs, mine)
    close(mine.eval()(*inputs[:-1]).detach(), model.eval()(*inputs[:-1]).detach())


@pytest.mark.large
def test_newer_exporter_splits_into_sequences(tmp_path: Path) -> None:
    """A split that PyTorch writes as a sequence is one all the same."""
    pytest.importorskip("onnxscript")

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c = self.linear(x).split(2, 1)
            return a * b + torch.stack((b, c)).sum(0)

    model = Parts()
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    write(model, (x,), tmp_path / "parts.onnx", dynamo=True, optimize=False)
    text = str(onnx.load(tmp_path / "parts.onnx").graph.node)
    assert "SplitToSequence" in text
    compare(model, functional.mse_loss, (x, y), pmt.from_onnx(tmp_path / "parts.onnx"))


def test_symbolic_batch_takes_any(tmp_path: Path) -> None:
    """Shapes that are calculated from those of inputs follow the batch; other sizes are refused."""
    model, _, (x, _) = training("encoder")
    write(model, (x,), tmp_path / "encoder.onnx")
    mine = pmt.from_onnx(tmp_path / "encoder.onnx")
    assert "Shape" in {node.operator for node in mine.nodes.values()}
    for batch in (1, 3, 7):
        (given_,) = mine.example_inputs(batch=batch)
        assert given_.shape == (batch, 5, 8)
        close(mine.eval()(given_).detach(), model.eval()(given_).detach())
    with pytest.raises(InputError, match=r"'x0': expected the shape \(batch, 5, 8\), got \(2, 4"):
        mine(torch.zeros(2, 4, 8))


@pytest.mark.slow
def test_compile_and_backend_have_eager_bits(tmp_path: Path) -> None:
    """A network with shapes to calculate keeps its bits in both, and Dynamo sees one graph."""
    model, loss, (x, y) = training("encoder")
    write(model, (x,), tmp_path / "encoder.onnx")
    mine = pmt.from_onnx(tmp_path / "encoder.onnx")
    with pmt.compile(mine, loss, (x, y), ram="80%", device="rpi4b") as step:
        assert step.verify().equal
    loss(mine(x), y).backward()
    eager = [parameter.grad.clone() for parameter in mine.parameters()]
    mine.zero_grad()
    backend = pmt.backend(ram="100%", device="rpi4b")
    run = torch.compile(mine, backend=backend, fullgraph=True, dynamic=False)
    loss(run(x), y).backward()
    assert all(map(torch.equal, eager, (parameter.grad for parameter in mine.parameters())))
    assert len(backend.plans) == 1


# -- what is trained ---------------------------------------------------------------------------


def linear(**more: Any) -> Any:
    """Return a file of ``x w + b`` with a Softmax at the end, whose first node has a name."""
    opset = more.pop("opset", 18)
    nodes = more.pop("nodes", None) or [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], name="fc"),
        helper.make_node(more.pop("ending", "Softmax"), ["h"], ["y"], name="end"),
    ]
    given_ = [
        helper.make_tensor_value_info(
            "x", more.pop("kind", TensorProto.FLOAT), more.pop("shape", ("N", 4))
        )
    ]
    result = [helper.make_tensor_value_info("y", more.pop("made", TensorProto.FLOAT), ("N", 3))]
    held = [numpy_helper.from_array(normal(4, 3), "w"), numpy_helper.from_array(normal(3), "b")]
    graph = helper.make_graph(nodes, "network", given_, result, more.pop("held", held))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def saved(path: Path, model: Any) -> Path:
    """Write a file, and return where it is."""
    onnx.save(model, path / "network.onnx")
    return path / "network.onnx"


@pytest.mark.parametrize("name", ["values", "training", "forward"])
def test_nodes_have_any_name(name: str, tmp_path: Path) -> None:
    """Also that of a method of a module, such as outputs of PyTorch have it."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], [name]),
        helper.make_node("Relu", [name], ["y"]),
    ]
    file = linear(nodes=nodes)
    x = normal(2, 4)
    (expected,) = ReferenceEvaluator(file).run(None, {"x": x})
    close(outputs(pmt.from_onnx(saved(tmp_path, file)), x)[0], expected)


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
def test_weights_in_the_code_are_equal_throughout(operator: str, tmp_path: Path) -> None:
    """A convolution takes numbers as its weights, such as those of a mean over neighbours."""
    mean = numpy_helper.from_array(np.full((2, 1, 3, 3), 1 / 9, np.float32))
    nodes = [
        helper.make_node("Constant", [], ["k"], value=mean),
        helper.make_node(operator, ["x", "k"], ["y"], group=2),
    ]
    file = linear(nodes=nodes, held=[], shape=(1, 2, 5, 6))
    x = normal(1, 2, 5, 6)
    (expected,) = ReferenceEvaluator(file).run(None, {"x": x})
    close(outputs(pmt.from_onnx(saved(tmp_path, file)), x)[0], expected)


def test_shared_weights_are_one_parameter(tmp_path: Path) -> None:
    """Two nodes train the same one; what is equal throughout by chance is apart."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Identity", ["w"], ["again"]),
        helper.make_node("MatMul", ["a", "again"], ["c"]),
        helper.make_node("LayerNormalization", ["c", "one", "zero"], ["d"]),
        helper.make_node("LayerNormalization", ["d", "one", "zero"], ["y"]),
    ]
    held = [
        numpy_helper.from_array(normal(4, 4), "w"),
        numpy_helper.from_array(np.ones(4, np.float32), "one"),
        numpy_helper.from_array(np.zeros(4, np.float32), "zero"),
    ]
    mine = pmt.from_onnx(saved(tmp_path, linear(nodes=nodes, held=held)))
    names = [name for name, _ in mine.named_parameters()]
    assert names == ["w", "one", "zero", "one_2", "zero_2"]
    mine(torch.randn(2, 4)).square().sum().backward()
    assert not torch.equal(mine.one.grad, mine.one_2.grad)


def test_constants_are_no_parameters(tmp_path: Path) -> None:
    """Limits, masks, exponents and constants of the code stay as they are; statistics are apart."""
    nodes = [
        helper.make_node("Constant", [], ["mask"], value=numpy_helper.from_array(normal(4))),
        helper.make_node("Add", ["x", "mask"], ["a"]),
        helper.make_node("Clip", ["a", "low"], ["b"]),
        helper.make_node("BatchNormalization", ["b", "g", "s", "mean", "var"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "g", "s", "mean", "var"], ["d"]),
        helper.make_node("Pow", ["d", "two"], ["y"]),
    ]
    arrays = {"low": -1.0, "two": 2.0, "g": normal(4), "s": normal(4)}
    arrays |= {"mean": np.zeros(4), "var": np.ones(4)}
    held = [numpy_helper.from_array(np.float32(x), name) for name, x in arrays.items()]
    mine = pmt.from_onnx(saved(tmp_path, linear(nodes=nodes, held=held)))
    assert [name for name, _ in mine.named_parameters()] == ["g", "s"]
    statistics = {"mean", "var", "mean_2", "var_2"}
    assert {name for name, _ in mine.named_buffers()} == statistics
    mine(torch.randn(5, 4))
    assert not torch.equal(mine.mean, mine.mean_2)


def test_dropout_drops_in_training_alone(tmp_path: Path) -> None:
    """Its ratio is that of the file, whose own mode is not for training."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"]),
        helper.make_node("Dropout", ["h", "p"], ["y"]),
    ]
    held = [
        numpy_helper.from_array(normal(4, 3), "w"), numpy_helper.from_array(normal(3), "b"),
        numpy_helper.from_array(np.float32(0.75), "p"),
    ]  # fmt: skip
    mine = pmt.from_onnx(saved(tmp_path, linear(nodes=nodes, held=held)))
    x = torch.randn(500, 4)
    dropped = (mine(x) == 0).float().mean()
    assert 0.7 < dropped < 0.8
    assert not (mine.eval()(x) == 0).any()


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
def test_other_precisions_are_computed_in_float32(kind: int, tmp_path: Path) -> None:
    """Half and double precision become single, exactly where it is half."""
    values = helper.make_tensor("w", kind, (4, 3), [0.5, -0.25, 3.0] * 4)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Cast", ["h"], ["y"], to=TensorProto.FLOAT16),
    ]
    file = linear(nodes=nodes, held=[values], kind=kind, made=TensorProto.FLOAT16)
    mine = pmt.from_onnx(saved(tmp_path, file))
    assert mine.w.dtype is torch.float32
    assert mine.w[0].tolist() == [0.5, -0.25, 3.0]
    assert mine(torch.ones(2, 4)).dtype is torch.float32


def test_outputs_without_a_loss_are_left_out(tmp_path: Path) -> None:
    """Labels, and what only they need, are no part of the module."""
    file = linear()
    file.graph.node.append(helper.make_node("NonZero", ["y"], ["label"]))
    file.graph.output.append(helper.make_tensor_value_info("label", TensorProto.INT64, (2, "K")))
    file.graph.node.append(helper.make_node("SplitToSequence", ["y"], ["table"]))
    table = helper.make_tensor_sequence_value_info("table", TensorProto.FLOAT, None)
    file.graph.output.append(table)
    mine = pmt.from_onnx(saved(tmp_path, file))
    assert mine.outputs == ("y",)
    assert "NonZero" not in {node.operator for node in mine.nodes.values()}


# -- losses, and the command line --------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "ending", "function"),
    [
        ("cross-entropy", "Softmax", functional.cross_entropy),
        ("cross-entropy", "LogSoftmax", functional.cross_entropy),
        ("cross-entropy", "Relu", None),
        ("bce", "Sigmoid", functional.binary_cross_entropy_with_logits),
        ("nll", "LogSoftmax", None),
        ("mse", "Sigmoid", None),
        ("l1", "Softmax", None),
    ],
)
def test_loss_takes_what_the_file_ends_in(
    loss: str, ending: str, function: Any, tmp_path: Path
) -> None:
    """A loss of logits takes the input of the last activation, which evaluation mode has."""
    path = str(saved(tmp_path, linear(ending=ending)))
    model, loss_fn, (x, target) = load_step(path, OnnxStep(loss=loss, batch=5))
    assert target.shape == ((5,) if loss in ("cross-entropy", "nll") else (5, 3))
    plain = pmt.from_onnx(path)
    assert torch.equal(model.eval()(x), plain(x))
    model.train()
    if function is not None:
        logits = torch.addmm(model.b, x, model.w)
        assert torch.equal(loss_fn(model(x), target), function(logits, target))
    else:
        assert torch.equal(model(x), plain(x))


def test_probability_may_lose_its_last_axis(tmp_path: Path) -> None:
    """The loss of a Sigmoid that is squeezed is that of its logits, in the new shape."""
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["h"]),
        helper.make_node("Sigmoid", ["h"], ["p"]),
        helper.make_node("Squeeze", ["p", "last"], ["y"]),
    ]
    held = [numpy_helper.from_array(normal(4, 1), "v"), numpy_helper.from_array(whole(-1), "last")]
    file = linear(nodes=nodes, held=held)
    file.graph.output[0].type.tensor_type.shape.ClearField("dim")
    path = str(saved(tmp_path, file))
    model, loss_fn, (x, target) = load_step(path, OnnxStep(loss="bce", batch=5))
    expected = functional.binary_cross_entropy_with_logits((x @ model.v).squeeze(-1), target)
    close(loss_fn(model(x), target).detach(), expected.detach())


def test_dimensions_count_beside_the_batch(tmp_path: Path) -> None:
    """The first dimension of another input may be another one; two sizes of one are refused."""
    file = linear()
    more = helper.make_tensor_value_info("table", TensorProto.FLOAT, ("K", 3))
    file.graph.input.append(more)
    mine = pmt.from_onnx(saved(tmp_path, file))
    shapes = [tuple(x.shape) for x in mine.example_inputs(batch=2, dims={"K": 5})]
    assert shapes == [(2, 4), (5, 3)]
    with pytest.raises(InputError, match="leave one of them out"):
        mine.example_inputs(batch=2, dims={"K": 5, "N": 2})


@pytest.mark.parametrize("behind", ["Identity", "Cast", "Flatten"])
def test_ending_stands_before_what_changes_nothing(behind: str, tmp_path: Path) -> None:
    """Files in half precision end in a cast, those of TensorFlow in an identity."""
    attributes = {"to": TensorProto.FLOAT} if behind == "Cast" else {}
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"]),
        helper.make_node("Softmax", ["h"], ["p"]),
        helper.make_node(behind, ["p"], ["y"], **attributes),
    ]
    path = str(saved(tmp_path, linear(nodes=nodes)))
    model, loss_fn, (x, target) = load_step(path, OnnxStep(loss="cross-entropy", batch=5))
    expected = functional.cross_entropy(x @ model.w + model.b, target)
    close(loss_fn(model(x), target).detach(), expected.detach())
    assert torch.equal(model.eval()(x), pmt.from_onnx(path)(x))


def test_classes_of_sequences_are_where_the_softmax_is(tmp_path: Path) -> None:
    """Logits of each step are a loss of all steps; without a Softmax it is not clear."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Softmax", ["h"], ["y"]),
    ]
    path = str(saved(tmp_path, linear(nodes=nodes, shape=(2, 5, 4))))
    model, loss_fn, (x, target) = load_step(path, OnnxStep(loss="cross-entropy"))
    assert target.shape == (2, 5)
    expected = functional.cross_entropy((x @ model.w).permute(0, 2, 1), target)
    close(loss_fn(model(x), target).detach(), expected.detach())


OWN = """
import torch

def far(output, target=torch.zeros(5, 3)):
    return (output - target).abs().sum()
"""


@pytest.mark.parametrize("name", ["mlp", pytest.param("ds-cnn", marks=pytest.mark.slow)])
def test_file_becomes_c_that_trains_as_pytorch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first losses and the state after them are those of the model that was exported."""
    monkeypatch.chdir(tmp_path)
    model, loss, (x, y) = training(name)
    write(model, (x,), tmp_path / "network.onnx")
    done = invoke(
        "export", "network.onnx", "--loss", "cross-entropy", "--batch", len(x),
        "--optimizer", "sgd", "--target", "step", "--out", "network.step.json",
    )  # fmt: skip
    assert done.status == 0, done.err
    step = load_step_file(tmp_path / "network.step.json")
    assert step.graph.name == "network"
    batches = batches_like((x, y), 2)
    found = Exported(step, tmp_path / "c").outcome(batches, 3)
    rates = {"sgd": lambda p: torch.optim.SGD(p, lr=1e-3)}
    assert step.learning_rate == rates["sgd"](model.parameters()).defaults["lr"]
    monkeypatch.setitem(_optimizers(), "plain", (rates["sgd"], None))
    expected = torch_steps((model, loss, (x, y)), batches, 3, "plain")
    for mine, its in zip(found.losses, expected.losses, strict=True):
        assert mine == pytest.approx(its, rel=1e-9)
    for key, array in found.tensors.items():
        close(array, expected.tensors[key], 1e-9)


def _optimizers() -> dict[str, Any]:
    from kit.export_agreement import OPTIMIZERS

    return OPTIMIZERS


@pytest.mark.usefixtures("own_loss")
def test_commands_take_files(tmp_path: Path) -> None:
    """`trace` and `profile` take a file, and a loss of one's own whose target is its default."""
    saved(tmp_path, linear())
    done = invoke("trace", "network.onnx", "--loss", "own.py:far", "--batch", "5", "--json")
    assert done.json["name"] == "network"
    assert done.json["batch_size"] == 5
    done = invoke(
        "profile", "network.onnx", "--loss", "l1", "--batch", "2", "--device", "nrf52840", "--json"
    )
    assert done.json["graph"]["name"] == "network"


@pytest.fixture
def own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be where a file with a loss of one's own is."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def test_inference_has_the_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--infer`` exports probabilities where the loss took logits."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, linear())
    done = invoke(
        "export", "network.onnx", "--loss", "cross-entropy", "--batch", "2", "--infer",
        "--target", "step", "--out", "net.step.json",
    )  # fmt: skip
    assert done.status == 0, done.err
    inference = load_step_file(tmp_path / "net.step.json").inference
    assert inference is not None
    kernels = [call.kernel for calls in inference.calls for call in calls]
    assert "pm_softmax" in kernels


# -- what is refused ---------------------------------------------------------------------------


def _unknown() -> Any:
    nodes = [
        helper.make_node("NonZero", ["x"], ["a"], name="first"),
        helper.make_node("Cast", ["a"], ["b"], to=TensorProto.FLOAT),
        helper.make_node("Det", ["b"], ["c"], name="second"),
        helper.make_node("NonZero", ["c"], ["d"], name="third"),
        helper.make_node("Cast", ["d"], ["y"], to=TensorProto.FLOAT),
    ]
    return linear(nodes=nodes, held=[])


def _quantized() -> Any:
    node = helper.make_node("DequantizeLinear", ["q", "s"], ["w"], name="dequantize")
    held = [
        numpy_helper.from_array(np.ones((4, 3), np.int8), "q"),
        numpy_helper.from_array(np.float32(0.1), "s"),
    ]
    return linear(nodes=[node, helper.make_node("MatMul", ["x", "w"], ["y"])], held=held)


def _branches() -> Any:
    body = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["z"])], "branch", [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )  # fmt: skip
    condition = helper.make_node(
        "Constant", [], ["c"], value=numpy_helper.from_array(np.array(True))
    )
    branch = helper.make_node("If", ["c"], ["y"], "either", then_branch=body, else_branch=body)
    return linear(nodes=[condition, branch])


def _value_shape() -> Any:
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["n"], to=TensorProto.INT64),
        helper.make_node("Unsqueeze", ["n", "zero"], ["shape"]),
        helper.make_node("Reshape", ["x", "shape"], ["y"], name="to the sum"),
    ]
    return linear(nodes=nodes, held=[numpy_helper.from_array(whole(0), "zero")])


def _unregistered() -> Any:
    nodes = [
        helper.make_node("Blur", ["x"], ["a"], name="first"),
        helper.make_node("Det", ["a"], ["b"], name="second"),
        helper.make_node("Blur", ["b"], ["y"], name="third"),
    ]
    return linear(nodes=nodes, held=[])


def _own_domain() -> Any:
    file = linear(nodes=[helper.make_node("FusedGemm", ["x", "w"], ["y"], domain="com.microsoft")])
    file.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return file


def _sequence_input() -> Any:
    file = linear()
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    file.graph.input.append(helper.make_value_info("words", kind))
    return file


def _second_output() -> Any:
    nodes = [
        helper.make_node("Dropout", ["x"], ["a", "mask"], name="drop"),
        helper.make_node("Cast", ["mask"], ["b"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["a", "b"], ["y"]),
    ]
    return linear(nodes=nodes, held=[])


def _external() -> Any:
    file = linear()
    onnx.external_data_helper.convert_model_to_external_data(
        file, location="weights.bin", size_threshold=0
    )
    return file


REFUSED = {
    "all unknown operators": _unknown,
    "operators that ONNX has not": _unregistered,
    "quantized": _quantized,
    "control flow": _branches,
    "another domain": _own_domain,
    "old": lambda: linear(opset=12),
    "new": lambda: linear(opset=24),
    "no floating output": lambda: linear(made=TensorProto.INT64),
    "texts": lambda: linear(kind=TensorProto.STRING),
    "a sequence": _sequence_input,
    "a further output": _second_output,
    "a missing attribute": lambda: linear(nodes=[helper.make_node("Concat", ["x", "x"], ["y"])]),
    "an unknown value": lambda: linear(nodes=[helper.make_node("Relu", ["nothing"], ["y"])]),
    "external data": _external,
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_cannot_be_taken(
    case: str, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong, where, and what to do, in a sentence; of unknown operators all are named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "network.onnx").write_bytes(REFUSED[case]().SerializeToString())
    with told.raises(InputError):
        pmt.from_onnx("network.onnx")


def test_models_that_are_linear_are_not_called_quantized(tmp_path: Path) -> None:
    """The names of operators of quantized networks have more than that word in them."""
    node = helper.make_node("LinearClassifier", ["x"], ["y"], domain="ai.onnx.ml", name="svm")
    file = linear(nodes=[node], held=[])
    file.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    (tmp_path / "network.onnx").write_bytes(file.SerializeToString())
    with pytest.raises(InputError, match=r"'svm'.*export the network without") as caught:
        pmt.from_onnx(tmp_path / "network.onnx")
    assert "quantized" not in str(caught.value)


def test_dilations_of_pools_are_refused(tmp_path: Path, told: Told) -> None:
    """The node is named when it runs."""
    node = helper.make_node(
        "LpPool", ["x"], ["y"], name="pool", kernel_shape=(2, 2), dilations=(2, 2)
    )
    mine = pmt.from_onnx(saved(tmp_path, linear(nodes=[node], held=[], shape=(1, 2, 5, 6))))
    with told.raises(InputError):
        mine(torch.ones(1, 2, 5, 6))


def test_shapes_that_depend_on_values_are_refused(tmp_path: Path, told: Told) -> None:
    """The node is named when it runs."""
    mine = pmt.from_onnx(saved(tmp_path, _value_shape()))
    with told.raises(InputError):
        mine(torch.ones(1, 4))


@pytest.mark.parametrize("content", [b"", b"poetmodel", b"\x08\x0a"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    """An empty file, a text and a piece of a file are no networks."""
    (tmp_path / "network.onnx").write_bytes(content)
    with pytest.raises(InputError, match="expected a file of ONNX"):
        pmt.from_onnx(tmp_path / "network.onnx")
    with pytest.raises(InputError, match="no such file"):
        pmt.from_onnx(tmp_path / "nothing.onnx")


WRONG = {
    "no loss": (),
    "another loss": ("--loss", "hinge"),
    "no batch": ("--loss", "mse"),
    "another dimension": ("--loss", "mse", "--batch", "2", "--dim", "T=3"),
    "no dimension": ("--loss", "mse", "--dim", "T"),
    "nll of probabilities": ("--loss", "nll", "--batch", "2"),
    "bce of probabilities": ("--loss", "bce", "--batch", "2"),
    "no module": ("--loss", "nowhere:loss", "--batch", "2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_steps_that_cannot_be_taken(
    case: str, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line says what is missing or does not fit, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, linear())
    done = invoke("export", "network.onnx", *WRONG[case], "--out", "c")
    assert done.status == 2
    told(done.err)
    assert not (tmp_path / "c").exists()


def test_sizes_that_a_node_cannot_take_are_refused(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is named, and the sizes that were given."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, linear(shape=("N", "F")))
    done = invoke(
        "export", "network.onnx", "--loss", "mse", "--batch", "2", "--dim", "F=5", "--out", "c"
    )
    assert done.status == 2
    told(done.err)
    assert not (tmp_path / "c").exists()


def test_options_of_files_are_for_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    """A step that is a function, or was captured, has its loss already; a batch may be fixed."""
    monkeypatch.chdir(tmp_path)
    told(invoke("trace", "train:step", "--loss", "mse").err, "a function")
    told(invoke("export", "net.step.json", "--loss", "mse", "--out", "c").err, "a step file")
    told(invoke("profile", "mlp", "--loss", "mse", "--device", "nrf52840").err, "a network")
    saved(tmp_path, linear(shape=(1, 4)))
    told(invoke("trace", "network.onnx", "--loss", "mse", "--batch", "2").err, "a fixed batch")


def test_missing_package_is_said(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    """One sentence with how to get it."""
    monkeypatch.setattr("poetmodel.torch.errors.find_spec", lambda _: None)
    with told.raises(InputError):
        pmt.from_onnx("network.onnx")
