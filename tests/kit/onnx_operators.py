"""Cases of every supported operator of ONNX, with its variants; needs the package onnx."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, defs, helper, numpy_helper

_DRAW = np.random.default_rng(0)
OLDEST, NEWEST = 13, 23
"""Supported opset versions."""
_CHANGES = defaultdict(set)
"""The opset versions that define an operator anew, by its name."""
for _schema in defs.get_all_schemas_with_history():
    if not _schema.domain:
        _CHANGES[_schema.name].add(_schema.since_version)


def normal(*shape):
    """Draw numbers of the standard normal distribution, in float32."""
    return _DRAW.standard_normal(shape).astype(np.float32)


def positive(*shape):
    """Draw uniform numbers between 0.5 and 1.5, in float32."""
    return (_DRAW.random(shape) + 0.5).astype(np.float32)


def whole(*values):
    """Return a vector of integers, in int64."""
    return np.array(values, np.int64)


def real(values):
    """Return a number or a list of numbers as an array in float32."""
    return np.array(values, np.float32)


def truth(*shape):
    """Draw truth values."""
    return _DRAW.random(shape) > 0.5


@dataclass(frozen=True)
class Case:
    """An operator with its inputs: inputs of the network, and constants of the file."""

    operator: str
    inputs: tuple[np.ndarray | None, ...]
    """Inputs by position; None is an omitted input."""
    constants: Mapping[int, np.ndarray] = field(default_factory=dict)
    """Further inputs by position, as initializers."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opsets: tuple[int, int] = (OLDEST, NEWEST)
    """First and last opset version of the case."""
    outputs: int = 1
    """Number of outputs."""
    axes: tuple[int, ...] | None = None
    """Axes: an attribute before opset 18, then input 1. None for no axes."""

    def versions(self):
        """Return the first opset of the case, and each that changes the operator's definition."""
        low, high = self.opsets
        return sorted({low} | {since for since in _CHANGES[self.operator] if low <= since <= high})

    def model(self, opset):
        """Return a model of the operator as its only node, in an opset."""
        attributes, constants = dict(self.attributes), dict(self.constants)
        if self.axes is not None and opset < 18:
            attributes["axes"] = self.axes
        elif self.axes is not None:
            constants[1] = whole(*self.axes)
        count = max((len(self.inputs), *(k + 1 for k in constants)))
        names = [""] * count
        given, held = [], []
        for position, value in enumerate(self.inputs):
            if value is not None and position not in constants:
                names[position] = f"x{position}"
                kind = helper.np_dtype_to_tensor_dtype(value.dtype)
                given.append(helper.make_tensor_value_info(names[position], kind, value.shape))
        for position, value in constants.items():
            names[position] = f"c{position}"
            held.append(numpy_helper.from_array(value, names[position]))
        outputs = [f"y{k}" for k in range(self.outputs)]
        node = helper.make_node(self.operator, names, outputs, name="node", **attributes)
        return make_model([node], given, outputs, held, opset=opset)

    def arrays(self):
        """Return the inputs of the network, by name."""
        return {
            f"x{position}": value
            for position, value in enumerate(self.inputs)
            if value is not None and position not in self.constants
        }


def make_model(nodes, given, outputs, held, *, opset=18):
    """Return a model of nodes, whose `outputs` it casts to float32.

    `given` are descriptions of inputs, `held` constants.
    """
    casts = [
        helper.make_node("Cast", [name], [f"{name}_real"], to=TensorProto.FLOAT) for name in outputs
    ]
    results = [
        helper.make_tensor_value_info(f"{name}_real", TensorProto.FLOAT, None) for name in outputs
    ]
    graph = helper.make_graph([*nodes, *casts], "network", given, results, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _pairs(*names):
    for name in names:
        yield name, Case(name, (normal(2, 3, 4), normal(3, 1)))


_IMAGE = normal(2, 4, 7, 6)
_SMALL = normal(2, 3, 5, 6)
_ROWS = normal(3, 4)


def _recurrent(name, gates, *, since=OLDEST, **more):
    ways = 2 if more.get("direction") == "bidirectional" else 1
    state = {
        1: normal(ways, gates * 3, 4), 2: normal(ways, gates * 3, 3), 3: normal(ways, gates * 6)
    }  # fmt: skip
    inputs = [normal(5, 2, 4), None, None, None, None, normal(ways, 2, 3)]
    outputs = 2
    if name == "LSTM":
        inputs.append(normal(ways, 2, 3))
        outputs = 3
        if more.pop("peepholes", False):
            state[7] = normal(ways, 9)
    if more.get("layout"):
        inputs = [x if x is None else x.swapaxes(0, 1) for x in inputs]
    attributes = {"hidden_size": 3, **more}
    return Case(name, tuple(inputs), state, attributes, (since, NEWEST), outputs)


def _resize(mode, how, sizes=None, scales=None, **more):
    constants = {3: whole(*sizes)} if scales is None else {2: np.array(scales, np.float32)}
    attributes = {"mode": mode, "coordinate_transformation_mode": how, **more}
    return Case("Resize", (normal(1, 2, 4, 5),), constants, attributes)


def _case(name, *inputs, held=None, since=OLDEST, until=NEWEST, outputs=1, axes=None, **more):
    """Return a name, which begins with an operator, and its case.

    `held` are constants by position, `more` are attributes.
    """
    operator = name.partition(",")[0]
    return name, Case(operator, inputs, held or {}, more, (since, until), outputs, axes)


_PLAIN = (
    "Abs", "Asinh", "Atan", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "Identity", "IsNaN",
    "Neg", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Tan",
    "Tanh", "Softmax", "LogSoftmax", "Elu", "Celu", "LeakyRelu", "Selu", "ThresholdedRelu",
    "HardSigmoid", "Shrink", "Size", "Shape",
)  # fmt: skip
_REDUCED = (
    "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceProd", "ReduceSumSquare",
)  # fmt: skip


_NAMED = (
    *(_case(name, normal(3, 4)) for name in _PLAIN),
    *_pairs("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "PRelu"),
    *(_case(name, positive(3, 4)) for name in ("Log", "Sqrt", "Reciprocal")),
    *(_case(name, positive(3, 4) / 2) for name in ("Acos", "Asin", "Atanh")),
    _case("Acosh", positive(3) + 1),
    _case("HardSwish", _ROWS * 3, since=14),
    _case("Mish", _ROWS, since=18),
    _case("Gelu", _ROWS, since=20),
    _case("Gelu, tanh", _ROWS, since=20, approximate="tanh"),
    _case("Pow", positive(3, 4), normal(4)),
    _case("Pow, square", _ROWS, held={1: real(2.0)}),
    _case("Pow, whole", whole(7, 9, 15), held={1: real(0.5)}),
    _case("Pow, whole to a tensor", whole(7, 9, 15), real([0.5, 1.5, -1.0])),
    _case("Div, whole", whole(7, -7, 9), whole(2, 2, -4)),
    _case("Mod", whole(7, -7, 9), whole(3, 3, -4)),
    _case("Mod, fmod", _ROWS, positive(4), fmod=1),
    *(
        _case(name, np.round(normal(3, 4)), np.round(normal(4)))
        for name in ("Greater", "Less", "Equal")
    ),
    *(
        _case(name, np.round(normal(3, 4)), np.round(normal(4)), since=16)
        for name in ("GreaterOrEqual", "LessOrEqual")
    ),
    *(_case(name, truth(3, 4), truth(4)) for name in ("And", "Or", "Xor")),
    _case("Not", truth(3, 4)),
    _case("Where", truth(3, 4), normal(4), normal(3, 1)),
    _case("Where, a number", truth(3, 4), normal(4), held={2: real(-1e9)}),
    _case("Cast, to whole", _ROWS * 3, to=TensorProto.INT64),
    _case("Cast, to truth", np.round(_ROWS), to=TensorProto.BOOL),
    _case("Cast, from whole", whole(1, 2), to=TensorProto.FLOAT),
    _case("CastLike", _ROWS * 3, whole(1), since=15),
    _case("Clip", _ROWS, held={1: real(-0.5), 2: real(0.5)}),
    _case("Clip, lists", _ROWS, held={1: normal(1) - 1, 2: np.ones(1, np.float32)}),
    _case("Clip, above", _ROWS, None, held={2: real(0.5)}),
    _case("Clip, tensors", _ROWS, np.float32(-0.5).reshape(()), held={2: real(6)}),
    _case("HardSigmoid, sixths", _ROWS * 3, alpha=1 / 6),
    _case("PRelu, channels", _IMAGE, held={1: normal(4, 1, 1)}),
    _case("Softmax, axis", _IMAGE, axis=1),
    _case("Dropout", _ROWS, held={1: real(0.3)}),
    # -- reductions and products
    *(_case(name, normal(2, 3, 4), axes=(-1, 0)) for name in _REDUCED),
    _case("ReduceLogSum", positive(2, 3), axes=(1,), keepdims=0),
    _case("ReduceSum", normal(2, 3, 4), held={1: whole(1)}, keepdims=0),
    _case("ReduceSum, none", normal(2, 3), noop_with_empty_axes=1),
    *(
        _case(f"{name}, none", positive(2, 3), since=18, noop_with_empty_axes=1)
        for name in ("ReduceL1", "ReduceLogSum", "ReduceSumSquare")
    ),
    _case("ReduceMean, all", normal(2, 3)),
    _case("ReduceMax, truth", truth(3, 4), held={1: whole(1)}, since=20),
    _case("ArgMax", _ROWS, axis=1, keepdims=0),
    _case("ArgMin", _ROWS, axis=-1),
    _case("ArgMin, last", np.round(_ROWS), axis=-1, select_last_index=1),
    _case("CumSum", _ROWS, held={1: np.array(1)}),
    _case("CumSum, exclusive", _ROWS, held={1: np.array(0)}, exclusive=1),
    _case("CumSum, reverse", _ROWS, held={1: np.array(-1)}, exclusive=1, reverse=1),
    _case("TopK", _ROWS, held={1: whole(2)}, outputs=2),
    _case("TopK, least", _ROWS, held={1: whole(3)}, outputs=2, largest=0, axis=0),
    _case("MatMul", normal(2, 3, 4), normal(4, 5)),
    _case("MatMul, batches", normal(2, 1, 3, 4), normal(2, 4, 5)),
    _case("MatMul, a vector", normal(2, 3, 4), normal(4)),
    _case("Gemm", _ROWS, held={1: normal(5, 4), 2: normal(5)}, transB=1),
    _case("Gemm, factors", normal(4, 3), normal(4, 5), normal(3, 1), transA=1, alpha=0.5, beta=2.0),
    _case("Einsum", normal(2, 3, 4), normal(2, 4, 5), equation="bij,bjk->bki"),
    # -- shapes
    _case("Reshape", normal(2, 3, 4), held={1: whole(0, -1, 2)}),
    _case("Reshape, to zero", normal(0, 3), held={1: whole(3, 0)}, since=14, allowzero=1),
    _case("Flatten", _IMAGE),
    _case("Flatten, axis", _IMAGE, axis=-1),
    _case("Flatten, all", _IMAGE, axis=0),
    _case("Squeeze", normal(1, 3, 1), held={1: whole(-1)}),
    _case("Squeeze, all", normal(1, 3, 1)),
    _case("Unsqueeze", _ROWS, held={1: whole(-1, 0)}),
    _case("Transpose", _IMAGE, perm=(0, 2, 3, 1)),
    _case("Transpose, reversed", _IMAGE),
    _case("Expand", normal(3, 1), held={1: whole(2, 1, 4)}),
    _case("Tile", _ROWS, held={1: whole(2, 3)}),
    _case("Concat", _ROWS, normal(2, 4), axis=-2),
    _case("Split", normal(2, 6), held={1: whole(1, 5)}, outputs=2, axis=-1),
    _case("Split, equal", normal(2, 6), outputs=3, until=17, axis=1),
    _case("Split, uneven", normal(2, 7), outputs=3, since=18, axis=1, num_outputs=3),
    _case(
        "Slice",
        normal(5, 6),
        held={1: whole(1, 0), 2: whole(4, -1), 4: whole(1, 2), 3: whole(0, 1)},
    ),
    _case(
        "Slice, backward",
        normal(5, 7),
        held={1: whole(-1, 5), 2: whole(-(2**62), 0), 3: whole(0, -1), 4: whole(-1, -2)},
    ),
    _case("Slice, nothing", normal(5, 7), held={1: whole(4), 2: whole(2)}),
    _case("Slice, first axes", normal(5, 7), held={1: whole(1), 2: whole(2**40)}),
    _case("Trilu", normal(4, 4), held={1: np.array(1)}, since=14, upper=0),
    _case("DepthToSpace", normal(1, 8, 2, 3), blocksize=2),
    _case("DepthToSpace, CRD", normal(1, 8, 2, 3), blocksize=2, mode="CRD"),
    _case("SpaceToDepth", normal(1, 2, 4, 6), blocksize=2),
    _case("Pad", _IMAGE, held={1: whole(0, 1, 0, 2, 0, 0, 3, 1), 2: real(0.5)}),
    _case("Pad, reflect", _IMAGE, held={1: whole(0, 0, 1, 2, 0, 0, 3, 0)}, mode="reflect"),
    _case("Pad, edge", _IMAGE, held={1: whole(0, 0, 1, 2, 0, 0, 3, 0)}, mode="edge"),
    *(
        _case(f"Pad, {mode}, {axis}", _IMAGE, held={1: whole(*pads)}, mode=mode)
        for mode in ("reflect", "edge")
        for axis, pads in (
            ("width", (0, 0, 0, 2, 0, 0, 0, 1)),
            ("height", (0, 0, 2, 0, 0, 0, 1, 0)),
        )
    ),
    _case("Pad, axes", _ROWS, None, held={1: whole(1, 2), 3: whole(-1)}, since=18),
    _case("Pad, nothing", _ROWS, None, held={1: whole(), 3: whole()}, since=18),
    _case("Gather", normal(5, 4), held={1: np.array([[0, -1], [2, 1]])}),
    _case("Gather, nothing", normal(5, 4), held={1: whole()}),
    _case("Gather, one", normal(5, 4, 2), held={1: np.array(-1)}, axis=1),
    _case("Gather, tensors", normal(5, 4, 2), np.array([[0, 1], [2, 1]]), axis=1),
    _case("Gather, embedding", None, np.array([[0, 1], [2, 1]]), held={0: normal(5, 4)}),
    _case("GatherElements", _ROWS, np.array([[0, 1], [2, -1], [1, 1]]), axis=1),
    _case("GatherND", _IMAGE, np.array([[0, 1], [1, -1]])),
    _case("ScatterElements", _ROWS, np.array([[1, -1, 0, 2]]), normal(1, 4)),
    _case(
        "ScatterElements, add",
        _ROWS,
        np.array([[1, 1], [0, 0]]),
        normal(2, 2),
        since=16,
        axis=1,
        reduction="add",
    ),
    _case(
        "ScatterElements, max",
        _ROWS,
        np.array([[1, 1], [0, 0]]),
        normal(2, 2),
        since=18,
        axis=1,
        reduction="max",
    ),
    _case("ScatterND", _ROWS, np.array([[2], [0]]), normal(2, 4)),
    _case(
        "ScatterND, add", _ROWS, np.array([[2, 1], [2, 1]]), normal(2), since=16, reduction="add"
    ),
    _case("OneHot", whole(0, 2, -1), held={1: np.array(4), 2: real([0.0, 2.0])}),
    _case(
        "OneHot, axis",
        np.array([[0, 2], [1, 1]]),
        held={1: np.array(3), 2: real([-1.0, 1.0])},
        axis=1,
    ),
    _case("ConstantOfShape", held={0: whole(2, 3)}, value=numpy_helper.from_array(real([1.5]))),
    _case("ConstantOfShape, large", held={0: whole(50, 60)}),
    _case("Range", held={0: np.array(1), 1: np.array(9), 2: np.array(3)}),
    _case("Range, large", held={0: np.array(0), 1: np.array(3000), 2: np.array(2)}),
    # -- space
    _case("Conv", _IMAGE, held={1: normal(6, 2, 3, 3), 2: normal(6)}, group=2, pads=(1, 1, 1, 1)),
    _case(
        "Conv, uneven pads",
        _IMAGE,
        held={1: normal(3, 4, 3, 2)},
        pads=(0, 1, 2, 0),
        strides=(2, 1),
        dilations=(1, 2),
    ),
    _case(
        "Conv, same", _IMAGE, held={1: normal(3, 4, 3, 2)}, auto_pad="SAME_UPPER", strides=(2, 2)
    ),
    _case("Conv, same, lower", _IMAGE, held={1: normal(3, 4, 2, 4)}, auto_pad="SAME_LOWER"),
    _case("Conv, a signal", normal(2, 4, 9), held={1: normal(3, 4, 3)}, auto_pad="VALID"),
    _case("Conv, volumes", normal(1, 2, 4, 5, 4), held={1: normal(3, 2, 2, 2, 2)}),
    _case(
        "ConvTranspose",
        _SMALL,
        held={1: normal(3, 2, 3, 3), 2: normal(2)},
        strides=(2, 2),
        pads=(1, 1, 1, 1),
        output_padding=(1, 1),
    ),
    _case(
        "ConvTranspose, uneven",
        _SMALL,
        held={1: normal(3, 2, 3, 3)},
        strides=(2, 2),
        pads=(0, 1, 1, 2),
    ),
    _case(
        "ConvTranspose, same",
        _SMALL,
        held={1: normal(3, 2, 3, 2), 2: normal(2)},
        strides=(2, 1),
        auto_pad="SAME_UPPER",
    ),
    _case(
        "ConvTranspose, a length",
        _SMALL,
        held={1: normal(3, 2, 3, 3), 2: normal(2)},
        strides=(3, 2),
        output_shape=(16, 14),
    ),
    _case("MaxPool", _IMAGE, kernel_shape=(2, 2), strides=(2, 2)),
    _case("MaxPool, uneven", _IMAGE, kernel_shape=(3, 2), pads=(0, 1, 2, 0), strides=(2, 1)),
    _case("MaxPool, ceil", _IMAGE, kernel_shape=(2, 2), strides=(2, 4), ceil_mode=1),
    _case("MaxPool, same", _IMAGE, kernel_shape=(3, 3), strides=(2, 2), auto_pad="SAME_UPPER"),
    _case("MaxPool, a signal", normal(2, 4, 9), kernel_shape=(3,), dilations=(2,)),
    _case("AveragePool", _IMAGE, kernel_shape=(3, 3), pads=(1, 1, 1, 1), strides=(2, 2)),
    _case("AveragePool, uneven", _IMAGE, kernel_shape=(3, 3), pads=(0, 1, 1, 2)),
    _case(
        "AveragePool, counted", _IMAGE, kernel_shape=(3, 3), pads=(0, 1, 1, 2), count_include_pad=1
    ),
    _case("AveragePool, ceil", _IMAGE, kernel_shape=(2, 2), strides=(2, 2), ceil_mode=1),
    _case(
        "AveragePool, ceil after padding",
        real([[[6, 12, 18, 24, 30]]]),
        kernel_shape=(3,),
        strides=(2,),
        pads=(1, 0),
        ceil_mode=1,
        count_include_pad=1,
    ),
    _case(
        "AveragePool, dilations",
        _IMAGE,
        kernel_shape=(2, 2),
        dilations=(2, 3),
        since=19,
        pads=(0, 1, 1, 0),
        count_include_pad=1,
    ),
    _case("LpPool", _IMAGE, kernel_shape=(2, 2), p=2, strides=(2, 2)),
    _case("LpPool, cubes", _IMAGE, kernel_shape=(2, 3), p=3, dilations=(1, 2), since=18),
    _case("GlobalAveragePool", _IMAGE),
    _case("GlobalMaxPool", _IMAGE),
    (
        "Resize, nearest",
        _resize("nearest", "asymmetric", scales=(1, 1, 2, 2), nearest_mode="floor"),
    ),
    ("Resize, nearest, by halves", _resize("nearest", "half_pixel", scales=(1, 1, 2, 3))),
    ("Resize, nearest, cut", _resize("nearest", "half_pixel", scales=(1, 1, 2, 1.7))),
    (
        "Resize, nearest, up",
        _resize("nearest", "half_pixel", (1, 2, 7, 3), nearest_mode="round_prefer_ceil"),
    ),
    (
        "Resize, nearest, corners",
        _resize("nearest", "align_corners", (1, 2, 7, 3), nearest_mode="ceil"),
    ),
    ("Resize, linear", _resize("linear", "half_pixel", scales=(1, 1, 2, 3))),
    ("Resize, linear, asymmetric", _resize("linear", "asymmetric", scales=(1, 1, 2, 2))),
    ("Resize, linear, cut", _resize("linear", "half_pixel", scales=(1, 1, 1.3, 0.6))),
    ("Resize, cubic, cut", _resize("cubic", "asymmetric", scales=(1, 1, 0.8, 0.8))),
    ("Resize, linear, PyTorch", _resize("linear", "pytorch_half_pixel", (1, 2, 8, 10))),
    ("Resize, linear, corners", _resize("linear", "align_corners", (1, 2, 7, 10))),
    ("Resize, cubic", _resize("cubic", "half_pixel", (1, 2, 8, 10))),
    # -- norms
    _case(
        "BatchNormalization",
        _IMAGE,
        held={1: normal(4), 2: normal(4), 3: normal(4), 4: positive(4)},
        since=14,
    ),
    _case("LayerNormalization", normal(2, 3, 4), held={1: normal(4), 2: normal(4)}, since=17),
    _case(
        "LayerNormalization, two axes", normal(2, 3, 4), held={1: normal(3, 4)}, since=17, axis=1
    ),
    _case("LayerNormalization, one scale", normal(2, 3, 4), held={1: normal(4)}, since=17, axis=1),
    _case("RMSNormalization", normal(2, 3, 4), held={1: normal(4)}, since=23),
    _case("InstanceNormalization", _IMAGE, held={1: normal(4), 2: normal(4)}),
    _case(
        "GroupNormalization, groups",
        _IMAGE,
        held={1: normal(2), 2: normal(2)},
        since=18,
        until=20,
        num_groups=2,
    ),
    _case("GroupNormalization", _IMAGE, held={1: normal(4), 2: normal(4)}, since=21, num_groups=2),
    _case("MeanVarianceNormalization", _IMAGE),
    _case("LpNormalization", _ROWS, axis=0),
    _case("LpNormalization, sums", positive(3, 4), p=1),
    _case("LRN", normal(4, 4, 3, 2), size=3, alpha=0.5, beta=0.5, bias=1.5),
    # -- recurrent
    ("RNN", _recurrent("RNN", 1)),
    ("GRU", _recurrent("GRU", 3)),
    ("GRU, linear first", _recurrent("GRU", 3, linear_before_reset=1)),
    ("GRU, batch first", _recurrent("GRU", 3, layout=1, since=14)),
    ("LSTM", _recurrent("LSTM", 4)),
    ("GRU, two ways", _recurrent("GRU", 3, linear_before_reset=1, direction="bidirectional")),
    ("LSTM, two ways", _recurrent("LSTM", 4, direction="bidirectional")),
    ("LSTM, peepholes", _recurrent("LSTM", 4, peepholes=True)),
    ("LSTM, batch first", _recurrent("LSTM", 4, layout=1, since=14, direction="bidirectional")),
    ("RNN, backward", _recurrent("RNN", 1, direction="reverse")),
)
CASES = dict(_NAMED)
"""Cases by name: the operator, then its variant."""
