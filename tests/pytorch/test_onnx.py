"""ONNX files as modules: numbers of ONNX's reference, gradients of PyTorch."""

import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.parser import parse_node  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import poetmodel.torch as pmt  # noqa: E402
from kit.commands import invoke, invoke_refused  # noqa: E402
from kit.eager_steps import check_both_doors  # noqa: E402
from kit.export_agreement import (  # noqa: E402
    OPTIMIZERS,
    Exported,
    lower_training,
    make_batches_like,
    train_in_torch,
)
from kit.onnx_networks import MODELS, export_onnx, make_training  # noqa: E402
from kit.onnx_operators import CASES, make_model, normal, whole  # noqa: E402
from kit.rotation import mark_seeds_except  # noqa: E402
from poetmodel.errors import InputError  # noqa: E402
from poetmodel.lowered.io import load_step as load_step_file  # noqa: E402
from poetmodel.torch.onnx.module import OPERATORS  # noqa: E402
from poetmodel.torch.target import OnnxStep, load_step  # noqa: E402

pytestmark = pytest.mark.torch
VERSIONS = [(name, opset) for name, case in CASES.items() for opset in case.versions()]
LATEST = {(name, case.versions()[-1]) for name, case in CASES.items()}
"""Versions that are always tried; the others are in a share of the slow runs."""


def close(mine, its, tolerance=1e-05):
    """Fail unless arrays of one shape are equal but for rounding, over their largest element."""
    mine, its = np.asarray(mine), np.asarray(its)
    assert mine.shape == its.shape
    scale = max(1.0, float(np.abs(np.nan_to_num(its)).max(initial=0.0)))
    np.testing.assert_allclose(mine, its, rtol=0, atol=tolerance * scale)


def outputs(module, *inputs):
    """Return a module's results for arrays in evaluation mode, as arrays."""
    with torch.no_grad():
        found = module.eval()(*(torch.from_numpy(np.array(x)) for x in inputs))
    return [x.numpy() for x in (found if isinstance(found, tuple) else (found,))]


# -- operators ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "opset"),
    mark_seeds_except(VERSIONS, LATEST),
    ids=[f"{n}, {v}" for n, v in VERSIONS],
)
def test_operator_is_that_of_the_reference(name, opset, tmp_path):
    """Each operator, in each version from opset 13 on, has the results of ONNX's reference."""
    case = CASES[name]
    model = case.model(opset)
    onnx.save(model, tmp_path / "case.onnx")
    arrays = case.arrays()
    mine = outputs(pmt.from_onnx(tmp_path / "case.onnx"), *arrays.values())
    its = ReferenceEvaluator(model).run(None, arrays)
    for found, expected in zip(mine, its, strict=True):
        close(found, expected)


LENGTHS = {
    ("NOTSET", 10): [2, 3, 0, 10, 20, 30], ("SAME_UPPER", 10): [1, 2, 3, 0, 10, 20],
    ("SAME_LOWER", 10): [2, 3, 0, 10, 20, 30], ("SAME_UPPER", 12): [1, 2, 3, 0, 10, 20, 30, 0],
}  # fmt: skip
"""What ONNX Runtime 1.32 computes; zeros in between count once."""


@pytest.mark.parametrize(("auto_pad", "length"), LENGTHS)
def test_transposed_convolution_has_the_length_asked_for(auto_pad, length, tmp_path):
    """Padding is halved; `auto_pad` states where an odd element is cropped or added."""
    node = parse_node("[up] y = ConvTranspose <strides = [2]>(x, w)")
    more = {"auto_pad": auto_pad, "output_shape": [length]}
    node.attribute.extend(helper.make_attribute(*item) for item in more.items())
    held = {"w": np.array([[[1, 2, 3]]], np.float32)}
    mine = pmt.from_onnx(saved(tmp_path, linear(nodes=[node], held=held, shape=(1, 1, 5))))
    (y,) = outputs(mine, np.array([[[1, 0, 0, 0, 10]]], np.float32))
    zeros = length - len(LENGTHS[auto_pad, length])
    expected = list(LENGTHS[auto_pad, length])
    at = expected.index(0)
    close(y[0, 0], expected[:at] + [0] * zeros + expected[at:])


@pytest.mark.parametrize("index", [4, -5, [1, 4]], ids=str)
def test_indices_outside_of_an_axis_are_refused(index, tmp_path):
    """As the operator is defined: an index is no remainder."""
    node = parse_node("[pick] y = Gather <axis = 1>(x, i)")
    model = pmt.from_onnx(saved(tmp_path, linear(nodes=[node], held={"i": np.array(index)})))
    with pytest.raises(InputError, match=r"'pick' \(Gather\): expected indices from -4 to 3"):
        model(torch.randn(2, 4))


@pytest.mark.parametrize("name", ["GRU", "LSTM"])
@pytest.mark.parametrize("constant", [True, False])
def test_sequences_end_where_their_lengths_say(name, constant, tmp_path):
    """Outputs after the end are zero, states are those at the end; as PyTorch's packed ones."""
    lengths = torch.tensor([5, 2, 3])
    model = getattr(nn, name)(4, 3, bidirectional=True)
    x = torch.randn(5, 3, 4)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    y, ends = model(packed)
    y, _ = nn.utils.rnn.pad_packed_sequence(y)
    order = {"GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}[name]  # PyTorch's gates in ONNX's order

    def held(*names):
        """Return the weights of both directions, their gates in the order of ONNX."""
        gates = [[getattr(model, n).detach().chunk(len(order)) for n in ns] for ns in names]
        return np.stack([torch.cat([p[k] for p in ps for k in order]).numpy() for ps in gates])

    weights = {
        "w": held(["weight_ih_l0"], ["weight_ih_l0_reverse"]),
        "r": held(["weight_hh_l0"], ["weight_hh_l0_reverse"]),
        "b": held(["bias_ih_l0", "bias_hh_l0"], ["bias_ih_l0_reverse", "bias_hh_l0_reverse"]),
    }
    node = parse_node(f"y, ends = {name} <hidden_size = 3>(x, w, r, b, n)")
    node.attribute.append(helper.make_attribute("direction", "bidirectional"))
    if name == "GRU":
        node.attribute.append(helper.make_attribute("linear_before_reset", 1))
    if constant:
        weights["n"] = lengths.numpy().astype(np.int32)
    file = linear(nodes=[node], held=weights, shape=(5, 3, 4))
    file.graph.output[0].type.tensor_type.shape.ClearField("dim")
    file.graph.output.append(helper.make_tensor_value_info("ends", TensorProto.FLOAT, None))
    given = [x]
    if not constant:
        file.graph.input.append(helper.make_tensor_value_info("n", TensorProto.INT32, (3,)))
        given.append(lengths.to(torch.int32))
    mine = pmt.from_onnx(saved(tmp_path, file))
    found, last = outputs(mine, *(value.numpy() for value in given))
    close(found, y.detach().unflatten(2, (2, 3)).transpose(1, 2))
    close(last, (ends if name == "GRU" else ends[0]).detach())


RESIZED = {
    **{
        f"{mode}, {how}": {"mode": mode, "coordinate_transformation_mode": how}
        for mode in ("linear", "cubic", "nearest")
        for how in ("asymmetric", "half_pixel")
    },
    **{
        f"{mode}, crop": {
            "mode": mode,
            "coordinate_transformation_mode": "tf_crop_and_resize",
            "extrapolation_value": 7.0,
        }
        for mode in ("linear", "nearest")
    },
}


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int32, np.int64], ids=lambda k: k.__name__)
@pytest.mark.parametrize("name", RESIZED)
def test_integers_are_resized_as_by_the_reference(name, kind, tmp_path):
    """Interpolated values are rounded, and limited to the type where a cubic exceeds it."""
    nodes = [
        helper.make_node("Resize", ["x", "roi", "scales"], ["r"], **RESIZED[name]),
        "y = Cast <to = 1>(r)",
    ]
    held = {
        "roi": np.array([0, 0, 0.25, -0.25, 1, 1, 1.25, 0.75], np.float32),
        "scales": np.array([1, 1, 2, 2], np.float32),
    }
    x = np.array([[10, 20, 12], [30, 127, 127], [2, 0, 127]], kind)[None, None]
    if kind == np.uint8:
        x *= 2
    element = helper.np_dtype_to_tensor_dtype(x.dtype)
    file = linear(nodes=nodes, held=held, kind=element, shape=x.shape)
    file.graph.output[0].type.tensor_type.shape.ClearField("dim")
    mine = pmt.from_onnx(saved(tmp_path, file))
    (expected,) = ReferenceEvaluator(file).run(None, {"x": x})
    close(outputs(mine, x)[0], expected)


@pytest.mark.parametrize("kind", [np.uint8, np.int8], ids=lambda k: k.__name__)
def test_integers_are_padded_by_their_minimum_for_maxima(kind, tmp_path):
    """The padding is asymmetric: only at the ends of the axes."""
    pool = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 1, 1]}
    nodes = [helper.make_node("MaxPool", ["x"], ["r"], **pool), "y = Cast <to = 1>(r)"]
    x = np.arange(9).reshape(1, 1, 3, 3).astype(kind)
    if kind == np.int8:
        x -= 100
    element = helper.np_dtype_to_tensor_dtype(x.dtype)
    file = linear(nodes=nodes, held={}, kind=element, shape=x.shape)
    file.graph.output[0].type.tensor_type.shape.ClearField("dim")
    mine = pmt.from_onnx(saved(tmp_path, file))
    expected = np.array([[4, 5], [7, 8]], np.float32) - (100 if kind == np.int8 else 0)
    close(outputs(mine, x)[0], expected[None, None])


FLAT = {
    "LpPool <kernel_shape = [2, 2]>": (1, 1, 3, 4), "LpNormalization": (3, 4),
    "MeanVarianceNormalization": (2, 2, 3, 4),
}  # fmt: skip


@pytest.mark.parametrize("node", FLAT)
def test_norm_of_nothing_has_a_gradient(node, tmp_path):
    """A window, row or channel of zeros, such as a ReLU leaves, makes no gradient NaN."""
    mine = pmt.from_onnx(
        saved(tmp_path, linear(nodes=[f"y = {node}(x)"], held=[], shape=FLAT[node]))
    )
    x = torch.zeros(FLAT[node], requires_grad=True)
    mine(x).sum().backward()
    assert x.grad.isfinite().all()


def test_every_operator_has_a_case():
    """None is registered without one, but sequences (a split of PyTorch's exporter) and fronts."""
    sequences = {"SplitToSequence", "SequenceAt", "SequenceConstruct", "ConcatFromSequence"}
    fronts = {"QuantizeLinear", "DequantizeLinear"}  # test_quantized.py
    assert OPERATORS.keys() - {case.operator for case in CASES.values()} == sequences | fronts
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
    if name
    not in ("Reshape, to zero", "GRU, batch first", "LSTM, batch first")  # no contiguous tensors
]


class Scaled(nn.Module):
    """A network behind a parameter, so that there is one to train."""

    def __init__(self, inner, shape):
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(shape))

    def forward(self, x, *more):
        """Return the sum of squares of all outputs, and of the scale."""
        found = self.inner(x * self.scale, *more)
        found = found if isinstance(found, tuple) else (found,)
        return sum((y * y).sum() for y in (*found, self.scale))


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_seeds_except(REAL, ("Conv, uneven pads", "Resize, linear")))
def test_operator_has_kernels(name, tmp_path):
    """Operators that are not listed as PyTorch only become C, forward and backward."""
    case = CASES[name]
    onnx.save(case.model(case.versions()[-1]), tmp_path / "case.onnx")
    inputs = tuple(torch.from_numpy(np.array(x)) for x in case.arrays().values())
    model = Scaled(pmt.from_onnx(tmp_path / "case.onnx"), tuple(inputs[0].shape))
    if name in NO_KERNEL:
        with pytest.raises(pmt.CaptureError, match="no kernel"):
            lower_training((model, None, inputs))
    else:
        assert lower_training((model, None, inputs)).graph.nodes


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
def test_random_graphs_are_those_of_the_reference(drawn, opset, tmp_path_factory):
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
    model = make_model(nodes, given_, [values[-1]], held, opset=opset)
    path = tmp_path_factory.mktemp("random") / "graph.onnx"
    onnx.save(model, path)
    x = normal(3, 4)
    (mine,) = outputs(pmt.from_onnx(path), x)
    close(mine, ReferenceEvaluator(model).run(None, {"x": x})[0])


# -- networks ----------------------------------------------------------------------------------
def compare(model, loss, inputs, mine):
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


@pytest.mark.parametrize(
    "name",
    mark_seeds_except(
        MODELS, {*MODELS} - {"mobilenetv2-035", "resnet8", "unet", "GRU, two ways"}, MODELS
    ),
)
def test_network_trains_as_in_pytorch(name, tmp_path):
    """Loss, gradients and running statistics are those of the model, under its names.

    In evaluation mode, its results are those of ONNX's reference for the file.
    """
    model, loss, inputs = make_training(name)
    export_onnx(model, inputs[:-1], tmp_path / "network.onnx")
    if name in ("autoencoder", "ds-cnn", "encoder", "GRU", "LSTM"):
        x = inputs[0].numpy()
        (mine,) = outputs(pmt.from_onnx(tmp_path / "network.onnx"), x)
        its = ReferenceEvaluator(str(tmp_path / "network.onnx")).run(None, {"x0": x})
        close(mine, its[0])
    compare(model, loss, inputs, pmt.from_onnx(tmp_path / "network.onnx"))


SIZES = (
    {"scale_factor": 1.7, "mode": "nearest"},
    {"scale_factor": (2.5, 0.6), "mode": "bilinear"},
    {"size": (5, 13), "mode": "bilinear", "align_corners": True},
    {"scale_factor": 1.3, "mode": "bicubic"},
)


@pytest.mark.parametrize("how", SIZES, ids=lambda how: " ".join(map(str, how.values())))
def test_exported_interpolation_is_that_of_pytorch(how, tmp_path):
    """Also where no factor is whole, and the sizes follow from those of the input."""

    class Resized(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(2, 1, 1))

        def forward(self, x):
            return functional.interpolate(x * self.scale, **how)

    model, x = Resized(), torch.randn(1, 2, 7, 9)
    export_onnx(model, (x,), tmp_path / "resized.onnx")
    mine = pmt.from_onnx(tmp_path / "resized.onnx")
    compare(model, functional.mse_loss, (x, torch.randn(model(x).shape)), mine)


@pytest.mark.large
@pytest.mark.parametrize(
    "name", mark_seeds_except(["ds-cnn", "encoder", "bert-block", "GRU"], ["ds-cnn"])
)
def test_newer_exporter_writes_what_trains(name, tmp_path):
    """A file of PyTorch's newer exporter trains, too, if it keeps batch norms."""
    pytest.importorskip("onnxscript")
    model, loss, inputs = make_training(name)
    export_onnx(model, inputs[:-1], tmp_path / "network.onnx", dynamo=True, optimize=False)
    mine = pmt.from_onnx(tmp_path / "network.onnx")
    if name != "GRU":  # whose weights it writes anew
        compare(model, loss, inputs, mine)
    close(mine.eval()(*inputs[:-1]).detach(), model.eval()(*inputs[:-1]).detach())


@pytest.mark.large
def test_newer_exporter_splits_into_sequences(tmp_path):
    """A split that PyTorch writes as a sequence is supported."""
    pytest.importorskip("onnxscript")

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x):
            a, b, c = self.linear(x).split(2, 1)
            return a * b + torch.stack((b, c)).sum(0)

    model = Parts()
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    export_onnx(model, (x,), tmp_path / "parts.onnx", dynamo=True, optimize=False)
    text = str(onnx.load(tmp_path / "parts.onnx").graph.node)
    assert "SplitToSequence" in text
    compare(model, functional.mse_loss, (x, y), pmt.from_onnx(tmp_path / "parts.onnx"))


def test_symbolic_batch_takes_any(tmp_path):
    """Shapes that are calculated from those of inputs follow the batch; other sizes are refused.

    The first dimension of another input may be another one; two sizes of one are refused.
    """
    model, _, (x, _) = make_training("encoder")
    export_onnx(model, (x,), tmp_path / "encoder.onnx")
    mine = pmt.from_onnx(tmp_path / "encoder.onnx")
    assert "Shape" in {node.operator for node in mine.nodes.values()}
    for batch in (1, 3, 7):
        (given_,) = mine.example_inputs(batch=batch)
        assert given_.shape == (batch, 5, 8)
        close(mine.eval()(given_).detach(), model.eval()(given_).detach())
    with pytest.raises(InputError, match=r"'x0': expected the shape \(batch, 5, 8\), got \(2, 4"):
        mine(torch.zeros(2, 4, 8))
    file = linear()
    more = helper.make_tensor_value_info("table", TensorProto.FLOAT, ("K", 3))
    file.graph.input.append(more)
    mine = pmt.from_onnx(saved(tmp_path, file))
    shapes = [tuple(x.shape) for x in mine.example_inputs(batch=2, dims={"K": 5})]
    assert shapes == [(2, 4), (5, 3)]
    with pytest.raises(InputError, match="leave one of them out"):
        mine.example_inputs(batch=2, dims={"K": 5, "N": 2})
    mine = pmt.from_onnx(tmp_path / "network.onnx", batch=2, dims={"K": 5})
    for sizes, expected in (({}, shapes), ({"batch": 3, "dims": {"K": 1}}, [(3, 4), (1, 3)])):
        assert [tuple(x.shape) for x in mine.example_inputs(**sizes)] == expected
    with pytest.raises(InputError, match=r"no open dimension 'T'; it has 'K', 'N'"):
        pmt.from_onnx(tmp_path / "network.onnx", dims={"T": 5})


@pytest.mark.slow
def test_compile_and_backend_have_eager_bits(tmp_path):
    """A network with shapes to calculate keeps its bits in both, and Dynamo sees one graph."""
    model, loss, (x, y) = make_training("encoder")
    export_onnx(model, (x,), tmp_path / "encoder.onnx")
    mine = pmt.from_onnx(tmp_path / "encoder.onnx")
    check_both_doors(mine, loss, (x, y), ram="80%", gap=0.5)


# -- what is trained ---------------------------------------------------------------------------
def linear(**more):
    """Return a file of ``x w + b`` with a Softmax at the end, whose first node has a name."""
    opset, shape = more.pop("opset", 18), more.pop("shape", ("N", 4))
    ending = f"[end] y = {more.pop('ending', 'Softmax')}(h)"
    nodes = more.pop("nodes", ("[fc] h = Gemm(x, w, b)", ending))
    nodes = [parse_node(node) if isinstance(node, str) else node for node in nodes]
    given_ = helper.make_tensor_value_info("x", more.pop("kind", TensorProto.FLOAT), shape)
    result = helper.make_tensor_value_info("y", more.pop("made", TensorProto.FLOAT), ("N", 3))
    held = more.pop("held", {"w": normal(4, 3), "b": normal(3)})
    if isinstance(held, dict):
        held = [numpy_helper.from_array(value, name) for name, value in held.items()]
    graph = helper.make_graph(nodes, "network", [given_], [result], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def saved(path, model):
    """Write a file, and return where it is."""
    onnx.save(model, path / "network.onnx")
    return path / "network.onnx"


MEAN = numpy_helper.from_array(np.full((2, 1, 3, 3), 1 / 9, np.float32))
FILES = {
    # A name such as outputs of PyTorch have it may be that of a method of a module.
    **{
        name: ((2, 4), [("Gemm", ["x", "w", "b"], [name]), ("Relu", [name], ["y"])])
        for name in ("values", "training", "forward")
    },
    # A convolution takes numbers of the code, such as those of a mean over neighbours.
    **{
        name: ((1, 2, 5, 6), [("Constant", [], ["k"], MEAN), (name, ["x", "k"], ["y"])])
        for name in ("Conv", "ConvTranspose")
    },
}


@pytest.mark.parametrize("name", FILES)
def test_names_and_constants_of_files_are_any(name, tmp_path):
    """Outputs are those of ONNX's reference."""
    shape, nodes = FILES[name]
    nodes = [
        helper.make_node(kind, *more[:2], **dict(zip(["value"], more[2:], strict=False)))
        for kind, *more in nodes
    ]
    file = linear(nodes=nodes, shape=shape)
    if "Conv" in name:
        nodes[1].attribute.append(helper.make_attribute("group", 2))
        file = linear(nodes=nodes, held=[], shape=shape)
    x = normal(*shape)
    (expected,) = ReferenceEvaluator(file).run(None, {"x": x})
    close(outputs(pmt.from_onnx(saved(tmp_path, file)), x)[0], expected)


@pytest.mark.parametrize("name", ["logits.weight", "logits", "ending", "reshapes_ending"])
def test_constants_may_have_names_of_attributes(name, tmp_path):
    """A layer of this name trains, and outputs are those of ONNX's reference."""
    nodes = [helper.make_node("Gemm", ["x", name, "b"], ["h"]), "y = Softmax(h)"]
    file = linear(nodes=nodes, held={name: normal(4, 3), "b": normal(3)})
    mine = pmt.from_onnx(saved(tmp_path, file), logits=True)
    x = normal(2, 4)
    close(outputs(mine, x)[0], ReferenceEvaluator(file).run(None, {"x": x})[0])
    assert sorted(p.numel() for p in mine.parameters()) == [3, 12]
    assert mine.logits
    assert mine.ending.operator == "Softmax"


def test_shared_weights_are_one_parameter(tmp_path):
    """Two nodes train the same weight; equal constants without a common name are separate."""
    nodes = [
        "a = MatMul(x, w)", "again = Identity(w)", "c = MatMul(a, again)",
        "d = LayerNormalization(c, one, zero)", "y = LayerNormalization(d, one, zero)",
    ]  # fmt: skip
    held = {"w": normal(4, 4), "one": np.ones(4, np.float32), "zero": np.zeros(4, np.float32)}
    mine = pmt.from_onnx(saved(tmp_path, linear(nodes=nodes, held=held)))
    names = [name for name, _ in mine.named_parameters()]
    assert names == ["w", "one", "zero", "one_2", "zero_2"]
    mine(torch.randn(2, 4)).square().sum().backward()
    assert not torch.equal(mine.one.grad, mine.one_2.grad)


@pytest.mark.parametrize("taken", ["another constant", "an input", "a result"])
def test_copies_of_constants_replace_no_value(taken, tmp_path):
    """A bias of zeros that two nodes read is copied under a name that no other value has."""
    bias, x, result = {
        "another constant": ("b_2", "x", "h"),
        "an input": ("c", "b_2", "h"),
        "a result": ("c", "x", "b_2"),
    }[taken]
    nodes = [
        f"{result} = Gemm({x}, w, b)",
        f"k = Gemm({result}, w, b)",
        f"y = Gemm(k, w, {bias})",
    ]
    held = {"w": normal(4, 4), "b": np.zeros(4, np.float32), bias: normal(4)}
    file = linear(nodes=nodes, held=held)
    file.graph.input[0].name = x
    mine = pmt.from_onnx(saved(tmp_path, file))
    array = normal(2, 4)
    close(outputs(mine, array)[0], ReferenceEvaluator(file).run(None, {x: array})[0])
    assert len(list(mine.parameters())) == 4


def test_constants_are_no_parameters(tmp_path):
    """Limits, masks, exponents and constants of the code stay as they are; statistics are apart."""
    nodes = [
        helper.make_node("Constant", [], ["mask"], value=numpy_helper.from_array(normal(4))),
        "a = Add(x, mask)",
        "b = Clip(a, low)",
        "c = BatchNormalization(b, g, s, mean, var)",
        "d = BatchNormalization(c, g, s, mean, var)",
        "y = Pow(d, two)",
    ]
    arrays = {"low": -1.0, "two": 2.0, "g": normal(4), "s": normal(4)}
    arrays |= {"mean": np.zeros(4), "var": np.ones(4)}
    held = {name: np.float32(x) for name, x in arrays.items()}
    mine = pmt.from_onnx(saved(tmp_path, linear(nodes=nodes, held=held)))
    assert [name for name, _ in mine.named_parameters()] == ["g", "s"]
    statistics = {"mean", "var", "mean_2", "var_2"}
    assert {name for name, _ in mine.named_buffers()} == statistics
    mine(torch.randn(5, 4))
    assert not torch.equal(mine.mean, mine.mean_2)


def test_dropout_drops_in_training_alone(tmp_path):
    """Its ratio is that of the file, whose own mode is not for training."""
    nodes = ["h = Gemm(x, w, b)", "y = Dropout(h, p)"]
    held = {"w": normal(4, 3), "b": normal(3), "p": np.float32(0.75)}  # fmt: skip
    mine = pmt.from_onnx(saved(tmp_path, linear(nodes=nodes, held=held)))
    x = torch.randn(500, 4)
    dropped = (mine(x) == 0).float().mean()
    assert 0.7 < dropped < 0.8
    assert not (mine.eval()(x) == 0).any()


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
def test_other_precisions_are_computed_in_float32(kind, tmp_path):
    """Half and double precision become single, exactly where it is half."""
    values = helper.make_tensor("w", kind, (4, 3), [0.5, -0.25, 3.0] * 4)
    nodes = ["h = MatMul(x, w)", "y = Cast <to = 10>(h)"]
    file = linear(nodes=nodes, held=[values], kind=kind, made=TensorProto.FLOAT16)
    mine = pmt.from_onnx(saved(tmp_path, file))
    assert mine.w.dtype is torch.float32
    assert mine.w[0].tolist() == [0.5, -0.25, 3.0]
    assert mine(torch.ones(2, 4)).dtype is torch.float32


def test_outputs_without_a_loss_are_left_out(tmp_path):
    """Labels, and nodes that only they need, are not in the module."""
    file = linear()
    file.graph.node.append(parse_node("label = NonZero(y)"))
    file.graph.output.append(helper.make_tensor_value_info("label", TensorProto.INT64, (2, "K")))
    file.graph.node.append(parse_node("table = SplitToSequence(y)"))
    table = helper.make_tensor_sequence_value_info("table", TensorProto.FLOAT, None)
    file.graph.output.append(table)
    mine = pmt.from_onnx(saved(tmp_path, file))
    assert mine.outputs == ("y",)
    assert "NonZero" not in {node.operator for node in mine.nodes.values()}


# -- losses, and the command line --------------------------------------------------------------
SOFTMAX = ["h = Gemm(x, w, b)", "p = Softmax(h)"]
SQUEEZED = ["h = MatMul(x, w)", "p = Sigmoid(h)", "y = Squeeze(p, b)"]
CROSS, BCE = functional.cross_entropy, functional.binary_cross_entropy_with_logits
ENDINGS = {
    # A loss of logits takes the input of the last activation; others take what the file makes.
    "softmax": ({}, "cross-entropy", CROSS, lambda h: h),
    "log softmax": ({"ending": "LogSoftmax"}, "cross-entropy", CROSS, lambda h: h),
    "sigmoid": ({"ending": "Sigmoid"}, "bce", BCE, lambda h: h),
    "relu": ({"ending": "Relu"}, "cross-entropy", CROSS, torch.relu),
    "nll": ({"ending": "LogSoftmax"}, "nll", functional.nll_loss, lambda h: h.log_softmax(1)),
    "mse": ({"ending": "Sigmoid"}, "mse", functional.mse_loss, torch.sigmoid),
    "l1": ({}, "l1", functional.l1_loss, lambda h: h.softmax(1)),
    # Files in half precision end in a cast, those of TensorFlow in an identity.
    "identity": ({"nodes": [*SOFTMAX, "y = Identity(p)"]}, "cross-entropy", CROSS, lambda h: h),
    "cast": ({"nodes": [*SOFTMAX, "y = Cast <to = 1>(p)"]}, "cross-entropy", CROSS, lambda h: h),
    "flatten": ({"nodes": [*SOFTMAX, "y = Flatten(p)"]}, "cross-entropy", CROSS, lambda h: h),
    # Logits of each step of a sequence are a loss of all; a probability may lose its last axis.
    "sequences": ({"nodes": ["h = MatMul(x, w)", "y = Softmax(h)"], "shape": ("N", 2, 4)},
     "cross-entropy", CROSS, lambda h: h.permute(0, 2, 1)),
    "last axis": ({"nodes": SQUEEZED, "held": {"w": normal(4, 1), "b": whole(-1)}},
     "bce", BCE, lambda h: h.squeeze(-1)),
    # The axis of a LogSoftmax is the dimension of classes, also if the loss does not replace it.
    **{
        f"nll, axis {axis} of {len(shape)}": (
            {"nodes": ["h = MatMul(x, w)", f"y = LogSoftmax <axis = {axis}>(h)"], "shape": shape},
            "nll", functional.nll_loss, lambda h, axis=axis: h.log_softmax(axis).movedim(axis, 1),
        )
        for shape in (("N", 2, 4), ("N", 2, 6, 4))
        for axis in (-1, 1)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_loss_takes_what_the_file_ends_in(name, tmp_path):
    """Training has logits if the loss takes them, and evaluation mode the output of the file."""
    more, kind, loss, changed = ENDINGS[name]
    file = linear(**more)
    if "nodes" in more:
        file.graph.output[0].type.tensor_type.shape.ClearField("dim")
    path = str(saved(tmp_path, file))
    model, loss_fn, (x, target) = load_step(path, OnnxStep(loss=kind, batch=5))
    has_bias = "nodes" not in more or "Gemm" in more["nodes"][0]
    logits = changed(x @ model.w + (model.b if has_bias else 0))
    classes = kind in ("cross-entropy", "nll")
    assert target.shape == ((5, *logits.shape[2:]) if classes else logits.shape)
    close(loss_fn(model(x), target).detach(), loss(logits, target).detach())
    assert torch.equal(model.eval()(x), pmt.from_onnx(path)(x))


OWN = """
import torch

def far(output, target=torch.zeros(5, 3)):
    return (output - target).abs().sum()
"""


@pytest.mark.parametrize("name", mark_seeds_except(["mlp", "ds-cnn"], (), ["mlp"]))
def test_file_becomes_c_that_trains_as_pytorch(name, tmp_path, monkeypatch):
    """The first losses and the state after them are those of the model that was exported."""
    monkeypatch.chdir(tmp_path)
    model, loss, (x, y) = make_training(name)
    export_onnx(model, (x,), tmp_path / "network.onnx")
    done = invoke(
        "export", "network.onnx", "--loss", "cross-entropy", "--batch", len(x),
        "--optimizer", "sgd", "--target", "step", "--out", "network.step.json",
    )  # fmt: skip
    assert done.status == 0, done.err
    step = load_step_file(tmp_path / "network.step.json")
    assert step.graph.name == "network"
    batches = make_batches_like((x, y), 2)
    found = Exported(step, tmp_path / "c").outcome(batches, 3)
    rates = {"sgd": lambda p: torch.optim.SGD(p, lr=1e-3)}
    assert step.learning_rate == rates["sgd"](model.parameters()).defaults["lr"]
    monkeypatch.setitem(OPTIMIZERS, "plain", (rates["sgd"], None))
    expected = train_in_torch((model, loss, (x, y)), batches, 3, "plain")
    for mine, its in zip(found.losses, expected.losses, strict=True):
        assert mine == pytest.approx(its, rel=1e-9)
    for key, array in found.tensors.items():
        close(array, expected.tensors[key], 1e-9)


def test_commands_take_files(tmp_path, monkeypatch):
    """`trace` and `profile` accept a file, and a user's loss whose target is its default.

    ``--infer`` exports probabilities if the loss has logits.
    """
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, linear())
    done = invoke("trace", "network.onnx", "--loss", "own.py:far", "--batch", "5", "--json")
    assert done.json["name"] == "network"
    assert done.json["batch_size"] == 5
    done = invoke(
        "profile", "network.onnx", "--loss", "l1", "--batch", "2", "--device", "nrf52840", "--json"
    )
    assert done.json["graph"]["name"] == "network"
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
def branches():
    """Return a file with control flow."""
    made = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    body = helper.make_graph([parse_node("z = Identity(x)")], "branch", [], [made])
    value = numpy_helper.from_array(np.array(True))
    condition = helper.make_node("Constant", [], ["c"], value=value)
    branch = helper.make_node("If", ["c"], ["y"], "either", then_branch=body, else_branch=body)
    return linear(nodes=[condition, branch])


def of_domain(domain, node):
    """Return a file with an operator that is not ONNX's own."""
    file = linear(nodes=[node])
    file.opset_import.append(helper.make_opsetid(domain, 1))
    return file


def with_sequence():
    """Return a file with a sequence as an input, too."""
    file = linear()
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    file.graph.input.append(helper.make_value_info("words", kind))
    return file


def external():
    """Return a file whose weights are elsewhere."""
    file = linear()
    onnx.external_data_helper.convert_model_to_external_data(
        file, location="weights.bin", size_threshold=0
    )
    return file


UNKNOWN = (
    "[first] a = NonZero(x)", "b = Cast <to = 1>(a)", "[second] c = Det(b)",
    "[third] d = NonZero(c)", "y = Cast <to = 1>(d)",
)  # fmt: skip
QUANTIZED = ("[dequantize] w = DequantizeLinear(q, s)", "y = MatMul(x, w)")
REFUSED = {
    "all unknown operators": lambda: linear(nodes=UNKNOWN, held={}),
    "operators that ONNX has not": lambda: linear(
        nodes=["[first] a = Blur(x)", "[second] b = Det(a)", "[third] y = Blur(b)"], held={}
    ),
    "quantized": lambda: linear(
        nodes=QUANTIZED, held={"q": np.ones((4, 3), np.int8), "s": np.float32(0.1)}
    ),
    "not quantized": lambda: of_domain("ai.onnx.ml", "[svm] y = ai.onnx.ml.LinearRegressor(x)"),
    "control flow": branches,
    "another domain": lambda: of_domain("com.microsoft", "y = com.microsoft.FusedGemm(x, w)"),
    **{
        f"weights of {kind}": lambda kind=kind: linear(
            nodes=["w = Cast <to = 1>(q)", "y = MatMul(x, w)"], shape=("N", 2000), opset=21,
            held=[helper.make_tensor("q", getattr(TensorProto, kind), [2000, 3], [1] * 6000)],
        )
        for kind in ("INT4", "FLOAT8E4M3FN")
    },
    "old": lambda: linear(opset=12),
    "new": lambda: linear(opset=24),
    "no floating output": lambda: linear(made=TensorProto.INT64),
    "texts": lambda: linear(kind=TensorProto.STRING),
    "a sequence": with_sequence,
    "a further output": lambda: linear(
        nodes=["[drop] a, mask = Dropout(x)", "b = Cast <to = 1>(mask)", "y = Mul(a, b)"]
    ),
    "a missing attribute": lambda: linear(nodes=["y = Concat(x, x)"]),
    "an unknown value": lambda: linear(nodes=["y = Relu(nothing)"]),
    "external data": external,
    "an empty file": lambda: b"",
    "a text": lambda: b"poetmodel",
    "a piece": lambda: b"\x08\x0a",
    "no file": lambda: None,
    # What is known when it runs.
    "a clipped GRU": lambda: linear(
        nodes=["[gru] y = GRU <hidden_size = 3, clip = 1.0>(x, w, r)"],
        held={"w": np.ones((1, 9, 4), np.float32), "r": np.ones((1, 9, 3), np.float32)},
        shape=("N", 2, 4),
    ),
    "unknown coordinates": lambda: linear(
        nodes=["[resize] y = Resize <coordinate_transformation_mode = \"middle\">(x, , scales)"],
        held={"scales": np.array([1, 1, 1.3, 2], np.float32)}, shape=("N", 2, 4, 5),
    ),
    "padding that wraps": lambda: linear(
        nodes=['[pad] y = Pad <mode = "wrap">(x, pads)'], held={"pads": whole(0, 1, 0, 1)},
        shape=("N", 4), opset=19,
    ),
    "a shape of values": lambda: linear(
        nodes=["s = ReduceSum <keepdims = 0>(x)", "n = Cast <to = 7>(s)",
               "shape = Unsqueeze(n, zero)", "[shaped] y = Reshape(x, shape)"],
        held={"zero": whole(0)}, shape=(1, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_cannot_be_taken(case, tmp_path, told, monkeypatch):
    """One sentence has fault, place and remedy; all unknown operators are listed."""
    monkeypatch.chdir(tmp_path)
    content = REFUSED[case]()
    if isinstance(content, onnx.ModelProto):
        content = content.SerializeToString()
    if content is not None:
        (tmp_path / "network.onnx").write_bytes(content)
    with told.raises(InputError):
        mine = pmt.from_onnx("network.onnx")
        mine(*mine.example_inputs(batch=1))


WRONG = {
    "sizes": ("--loss", "mse", "--batch", "2", "--dim", "F=5"),
    "no loss": (), "another loss": ("--loss", "hinge"), "no batch": ("--loss", "mse"),
    "another dimension": ("--loss", "mse", "--batch", "2", "--dim", "T=3"),
    "no dimension": ("--loss", "mse", "--dim", "T"),
    "a dimension twice": ("--loss", "mse", "--dim", "N=2", "--dim", "N=3"),
    "nll of probabilities": ("--loss", "nll", "--batch", "2"),
    "bce of probabilities": ("--loss", "bce", "--batch", "2"),
    "no module": ("--loss", "nowhere:loss", "--batch", "2"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_steps_that_cannot_be_taken(case, tmp_path, told, monkeypatch):
    """The command line names the missing or unsuitable part, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, linear(shape=("N", "F" if case == "sizes" else 4)))
    told(invoke_refused("export", "network.onnx", *WRONG[case], "--out", "c"))
    assert not (tmp_path / "c").exists()


CLASSLESS = {
    # Axis and shape of the input, and whether the output is a mean over all of its dimensions.
    "scalar": (-1, (2, 4), True), "third of four": (2, ("N", 2, 6, 4), False),
}  # fmt: skip


@pytest.mark.parametrize("loss", ["cross-entropy", "nll"])
@pytest.mark.parametrize("case", CLASSLESS)
def test_classes_are_in_the_second_or_last_dimension(case, loss, tmp_path, told, monkeypatch):
    """A loss of classes refuses an output without that dimension, and states its shape."""
    monkeypatch.chdir(tmp_path)
    axis, shape, is_mean = CLASSLESS[case]
    nodes = ["h = MatMul(x, w)", "m = ReduceMean <keepdims = 0>(h)" if is_mean else "m = Relu(h)"]
    nodes.append(f"y = LogSoftmax <axis = {axis}>(m)")
    file = linear(nodes=nodes, shape=shape)
    file.graph.output[0].type.tensor_type.shape.ClearField("dim")
    saved(tmp_path, file)
    with told.raises(InputError):
        load_step("network.onnx", OnnxStep(loss=loss, batch=None if is_mean else 5))


def test_options_of_files_are_for_files(tmp_path, monkeypatch, told):
    """A step that is a function, or was captured, has its loss already; a batch may be fixed."""
    monkeypatch.chdir(tmp_path)
    told(invoke("trace", "train:step", "--loss", "mse").err, "a function")
    told(invoke("export", "net.step.json", "--loss", "mse", "--out", "c").err, "a step file")
    told(invoke("profile", "mlp", "--loss", "mse", "--device", "nrf52840").err, "a network")
    saved(tmp_path, linear(shape=(1, 4)))
    told(invoke("trace", "network.onnx", "--loss", "mse", "--batch", "2").err, "a fixed batch")


def test_missing_package_is_said(monkeypatch, told):
    """One sentence with how to get it."""
    monkeypatch.setattr("poetmodel.torch.errors.find_spec", lambda _: None)
    with told.raises(InputError):
        pmt.from_onnx("network.onnx")
