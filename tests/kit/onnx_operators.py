"""Every operator of ONNX that is known, in the forms that matter; needs the package onnx."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DRAW = np.random.default_rng(0)
OLDEST, NEWEST = 13, 23


def normal(*shape: int) -> np.ndarray:
    """Return random numbers around 0, in float32."""
    return _DRAW.standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray:
    """Return random numbers between 0.5 and 1.5, in float32."""
    return (_DRAW.random(shape) + 0.5).astype(np.float32)


def whole(*values: Any) -> np.ndarray:
    """Return whole numbers."""
    return np.array(values, np.int64)


def truth(*shape: int) -> np.ndarray:
    """Return random truth values."""
    return _DRAW.random(shape) > 0.5


@dataclass(frozen=True)
class Case:
    """An operator with its inputs: tensors that the network is given, and constants of the file."""

    operator: str
    inputs: tuple[np.ndarray | None, ...]
    """None is left out."""
    constants: Mapping[int, np.ndarray] = field(default_factory=dict)
    """Further inputs by position, as initializers."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opsets: tuple[int, int] = (OLDEST, NEWEST)
    outputs: int = 1
    axes: tuple[int, ...] | None = None
    """Axes, which are an attribute before opset 18."""

    def versions(self) -> list[int]:
        """Return the opsets at which the operator is another one, of those of the case."""
        schemas = defs.get_all_schemas_with_history()
        since = {s.since_version for s in schemas if s.name == self.operator and not s.domain}
        low, high = self.opsets
        return sorted({low} | {version for version in since if low <= version <= high})

    def model(self, opset: int) -> onnx.ModelProto:
        """Return the file of one node."""
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
        return model_of([node], given, outputs, held, opset=opset)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what the network is given, by name."""
        return {
            f"x{position}": value
            for position, value in enumerate(self.inputs)
            if value is not None and position not in self.constants
        }


def model_of(
    nodes: list[Any], given: list[Any], outputs: list[str], held: list[Any], *, opset: int = 18
) -> onnx.ModelProto:
    """Return a file of some nodes; its outputs are cast to floating numbers."""
    casts = [
        helper.make_node("Cast", [name], [f"{name}_real"], to=TensorProto.FLOAT) for name in outputs
    ]
    results = [
        helper.make_tensor_value_info(f"{name}_real", TensorProto.FLOAT, None) for name in outputs
    ]
    graph = helper.make_graph([*nodes, *casts], "network", given, results, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _pairs(*names: str) -> Iterator[tuple[str, Case]]:
    for name in names:
        yield name, Case(name, (normal(2, 3, 4), normal(3, 1)))


def _plain(*names: str) -> Iterator[tuple[str, Case]]:
    for name in names:
        yield name, Case(name, (normal(3, 4),))


_IMAGE = normal(2, 4, 7, 6)
_SMALL = normal(2, 3, 5, 6)
_ROWS = normal(3, 4)


def _recurrent(
    name: str, gates: int, *, opsets: tuple[int, int] = (OLDEST, NEWEST), **more: Any
) -> Case:
    ways = 2 if more.get("direction") == "bidirectional" else 1
    state: dict[int, np.ndarray] = {
        1: normal(ways, gates * 3, 4), 2: normal(ways, gates * 3, 3), 3: normal(ways, gates * 6)
    }  # fmt: skip
    inputs: list[np.ndarray | None] = [normal(5, 2, 4), None, None, None, None, normal(ways, 2, 3)]
    outputs = 2
    if name == "LSTM":
        inputs.append(normal(ways, 2, 3))
        outputs = 3
        if more.pop("peepholes", False):
            state[7] = normal(ways, 9)
    if more.get("layout"):
        inputs = [x if x is None else x.swapaxes(0, 1) for x in inputs]
    return Case(
        name, tuple(inputs), state, {"hidden_size": 3, **more}, outputs=outputs, opsets=opsets
    )


def _resize(mode: str, how: str, sizes: Any = None, scales: Any = None, **more: Any) -> Case:
    constants = {3: whole(*sizes)} if scales is None else {2: np.array(scales, np.float32)}
    attributes = {"mode": mode, "coordinate_transformation_mode": how, **more}
    return Case("Resize", (normal(1, 2, 4, 5),), constants, attributes)


CASES: dict[str, Case] = {
    **dict(
        _plain(
            "Abs",
            "Asinh",
            "Atan",
            "Ceil",
            "Cos",
            "Cosh",
            "Erf",
            "Exp",
            "Floor",
            "Identity",
            "IsNaN",
            "Neg",
            "Relu",
            "Round",
            "Sigmoid",
            "Sign",
            "Sin",
            "Sinh",
            "Softplus",
            "Softsign",
            "Tan",
            "Tanh",
            "Softmax",
            "LogSoftmax",
            "Elu",
            "Celu",
            "LeakyRelu",
            "Selu",
            "ThresholdedRelu",
            "HardSigmoid",
            "Shrink",
            "Size",
            "Shape",
        )
    ),
    **dict(_pairs("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "PRelu")),
    **{name: Case(name, (positive(3, 4),)) for name in ("Log", "Sqrt", "Reciprocal")},
    **{name: Case(name, (positive(3, 4) / 2,)) for name in ("Acos", "Asin", "Atanh")},
    "Acosh": Case("Acosh", (positive(3) + 1,)),
    "HardSwish": Case("HardSwish", (_ROWS * 3,), opsets=(14, NEWEST)),
    "Mish": Case("Mish", (_ROWS,), opsets=(18, NEWEST)),
    "Gelu": Case("Gelu", (_ROWS,), opsets=(20, NEWEST)),
    "Gelu, tanh": Case("Gelu", (_ROWS,), attributes={"approximate": "tanh"}, opsets=(20, NEWEST)),
    "Pow": Case("Pow", (positive(3, 4), normal(4))),
    "Pow, square": Case("Pow", (_ROWS,), {1: np.array(2.0, np.float32)}),
    "Div, whole": Case("Div", (whole(7, -7, 9), whole(2, 2, -4))),
    "Mod": Case("Mod", (whole(7, -7, 9), whole(3, 3, -4))),
    "Mod, fmod": Case("Mod", (_ROWS, positive(4)), attributes={"fmod": 1}),
    **{
        name: Case(name, (np.round(normal(3, 4)), np.round(normal(4))))
        for name in ("Greater", "Less", "Equal")
    },
    **{
        name: Case(name, (np.round(normal(3, 4)), np.round(normal(4))), opsets=(16, NEWEST))
        for name in ("GreaterOrEqual", "LessOrEqual")
    },
    **{name: Case(name, (truth(3, 4), truth(4))) for name in ("And", "Or", "Xor")},
    "Not": Case("Not", (truth(3, 4),)),
    "Where": Case("Where", (truth(3, 4), normal(4), normal(3, 1))),
    "Where, a number": Case("Where", (truth(3, 4), normal(4)), {2: np.array(-1e9, np.float32)}),
    "Cast, to whole": Case("Cast", (_ROWS * 3,), attributes={"to": TensorProto.INT64}),
    "Cast, to truth": Case("Cast", (np.round(_ROWS),), attributes={"to": TensorProto.BOOL}),
    "Cast, from whole": Case("Cast", (whole(1, 2),), attributes={"to": TensorProto.FLOAT}),
    "CastLike": Case("CastLike", (_ROWS * 3, whole(1)), opsets=(15, NEWEST)),
    "Clip": Case("Clip", (_ROWS,), {1: np.array(-0.5, np.float32), 2: np.array(0.5, np.float32)}),
    "Clip, lists": Case("Clip", (_ROWS,), {1: normal(1) - 1, 2: np.ones(1, np.float32)}),
    "Clip, above": Case("Clip", (_ROWS, None), {2: np.array(0.5, np.float32)}),
    "Clip, tensors": Case(
        "Clip", (_ROWS, np.float32(-0.5).reshape(())), {2: np.array(6, np.float32)}
    ),
    "HardSigmoid, sixths": Case("HardSigmoid", (_ROWS * 3,), attributes={"alpha": 1 / 6}),
    "PRelu, channels": Case("PRelu", (_IMAGE,), {1: normal(4, 1, 1)}),
    "Softmax, axis": Case("Softmax", (_IMAGE,), attributes={"axis": 1}),
    "Dropout": Case("Dropout", (_ROWS,), {1: np.array(0.3, np.float32)}),
    # -- reductions and products
    **{
        name: Case(name, (normal(2, 3, 4),), axes=(-1, 0))
        for name in (
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSumExp",
            "ReduceMax",
            "ReduceMean",
            "ReduceMin",
            "ReduceProd",
            "ReduceSumSquare",
        )
    },
    "ReduceLogSum": Case("ReduceLogSum", (positive(2, 3),), axes=(1,), attributes={"keepdims": 0}),
    "ReduceSum": Case("ReduceSum", (normal(2, 3, 4),), {1: whole(1)}, {"keepdims": 0}),
    "ReduceSum, none": Case("ReduceSum", (normal(2, 3),), attributes={"noop_with_empty_axes": 1}),
    **{
        f"{name}, none": Case(
            name, (positive(2, 3),), attributes={"noop_with_empty_axes": 1}, opsets=(18, NEWEST)
        )
        for name in ("ReduceL1", "ReduceLogSum", "ReduceSumSquare")
    },
    "ReduceMean, all": Case("ReduceMean", (normal(2, 3),)),
    "ReduceMax, truth": Case("ReduceMax", (truth(3, 4),), {1: whole(1)}, opsets=(20, NEWEST)),
    "ArgMax": Case("ArgMax", (_ROWS,), attributes={"axis": 1, "keepdims": 0}),
    "ArgMin, last": Case(
        "ArgMin", (np.round(_ROWS),), attributes={"axis": -1, "select_last_index": 1}
    ),
    "CumSum": Case("CumSum", (_ROWS,), {1: np.array(1)}),
    "CumSum, exclusive": Case(
        "CumSum", (_ROWS,), {1: np.array(-1)}, {"exclusive": 1, "reverse": 1}
    ),
    "TopK": Case("TopK", (_ROWS,), {1: whole(2)}, outputs=2),
    "TopK, least": Case("TopK", (_ROWS,), {1: whole(3)}, {"largest": 0, "axis": 0}, outputs=2),
    "MatMul": Case("MatMul", (normal(2, 3, 4), normal(4, 5))),
    "MatMul, batches": Case("MatMul", (normal(2, 1, 3, 4), normal(2, 4, 5))),
    "MatMul, a vector": Case("MatMul", (normal(2, 3, 4), normal(4))),
    "Gemm": Case("Gemm", (_ROWS,), {1: normal(5, 4), 2: normal(5)}, {"transB": 1}),
    "Gemm, factors": Case(
        "Gemm",
        (normal(4, 3), normal(4, 5), normal(3, 1)),
        attributes={"transA": 1, "alpha": 0.5, "beta": 2.0},
    ),
    "Einsum": Case(
        "Einsum", (normal(2, 3, 4), normal(2, 4, 5)), attributes={"equation": "bij,bjk->bki"}
    ),
    # -- shapes
    "Reshape": Case("Reshape", (normal(2, 3, 4),), {1: whole(0, -1, 2)}),
    "Reshape, to zero": Case(
        "Reshape", (normal(0, 3),), {1: whole(3, 0)}, {"allowzero": 1}, opsets=(14, NEWEST)
    ),
    "Flatten": Case("Flatten", (_IMAGE,)),
    "Flatten, axis": Case("Flatten", (_IMAGE,), attributes={"axis": -1}),
    "Flatten, all": Case("Flatten", (_IMAGE,), attributes={"axis": 0}),
    "Squeeze": Case("Squeeze", (normal(1, 3, 1),), {1: whole(-1)}),
    "Squeeze, all": Case("Squeeze", (normal(1, 3, 1),)),
    "Unsqueeze": Case("Unsqueeze", (_ROWS,), {1: whole(-1, 0)}),
    "Transpose": Case("Transpose", (_IMAGE,), attributes={"perm": (0, 2, 3, 1)}),
    "Transpose, reversed": Case("Transpose", (_IMAGE,)),
    "Expand": Case("Expand", (normal(3, 1),), {1: whole(2, 1, 4)}),
    "Tile": Case("Tile", (_ROWS,), {1: whole(2, 3)}),
    "Concat": Case("Concat", (_ROWS, normal(2, 4)), attributes={"axis": -2}),
    "Split": Case("Split", (normal(2, 6),), {1: whole(1, 5)}, {"axis": -1}, outputs=2),
    "Split, equal": Case(
        "Split", (normal(2, 6),), attributes={"axis": 1}, outputs=3, opsets=(13, 17)
    ),
    "Split, uneven": Case(
        "Split",
        (normal(2, 7),),
        attributes={"axis": 1, "num_outputs": 3},
        outputs=3,
        opsets=(18, NEWEST),
    ),
    "Slice": Case(
        "Slice", (normal(5, 6),), {1: whole(1, 0), 2: whole(4, -1), 4: whole(1, 2), 3: whole(0, 1)}
    ),
    "Slice, backward": Case(
        "Slice",
        (normal(5, 7),),
        {1: whole(-1, 5), 2: whole(-(2**62), 0), 3: whole(0, -1), 4: whole(-1, -2)},
    ),
    "Slice, nothing": Case("Slice", (normal(5, 7),), {1: whole(4), 2: whole(2)}),
    "Slice, first axes": Case("Slice", (normal(5, 7),), {1: whole(1), 2: whole(2**40)}),
    "Trilu": Case("Trilu", (normal(4, 4),), {1: np.array(1)}, {"upper": 0}, opsets=(14, NEWEST)),
    "DepthToSpace": Case("DepthToSpace", (normal(1, 8, 2, 3),), attributes={"blocksize": 2}),
    "DepthToSpace, CRD": Case(
        "DepthToSpace", (normal(1, 8, 2, 3),), attributes={"blocksize": 2, "mode": "CRD"}
    ),
    "SpaceToDepth": Case("SpaceToDepth", (normal(1, 2, 4, 6),), attributes={"blocksize": 2}),
    "Pad": Case("Pad", (_IMAGE,), {1: whole(0, 1, 0, 2, 0, 0, 3, 1), 2: np.array(0.5, np.float32)}),
    "Pad, reflect": Case("Pad", (_IMAGE,), {1: whole(0, 0, 1, 2, 0, 0, 3, 0)}, {"mode": "reflect"}),
    "Pad, reflect rows": Case("Pad", (_ROWS,), {1: whole(1, 2, 0, 1)}, {"mode": "reflect"}),
    "Pad, edge": Case("Pad", (_IMAGE,), {1: whole(0, 1, 1, 2, 0, 0, 3, 0)}, {"mode": "edge"}),
    "Pad, wrap": Case(
        "Pad", (_ROWS,), {1: whole(1, 2, 0, 1)}, {"mode": "wrap"}, opsets=(19, NEWEST)
    ),
    "Pad, axes": Case("Pad", (_ROWS, None), {1: whole(1, 2), 3: whole(-1)}, opsets=(18, NEWEST)),
    "Pad, nothing": Case("Pad", (_ROWS, None), {1: whole(), 3: whole()}, opsets=(18, NEWEST)),
    "Gather": Case("Gather", (normal(5, 4),), {1: np.array([[0, -1], [2, 1]])}),
    "Gather, nothing": Case("Gather", (normal(5, 4),), {1: whole()}),
    "Gather, one": Case("Gather", (normal(5, 4, 2),), {1: np.array(-1)}, {"axis": 1}),
    "Gather, tensors": Case(
        "Gather", (normal(5, 4, 2), np.array([[0, 1], [2, 1]])), attributes={"axis": 1}
    ),
    "Gather, embedding": Case("Gather", (None, np.array([[0, 1], [2, 1]])), {0: normal(5, 4)}),
    "GatherElements": Case(
        "GatherElements", (_ROWS, np.array([[0, 1], [2, -1], [1, 1]])), attributes={"axis": 1}
    ),
    "GatherND": Case("GatherND", (_IMAGE, np.array([[0, 1], [1, -1]]))),
    "ScatterElements": Case("ScatterElements", (_ROWS, np.array([[1, -1, 0, 2]]), normal(1, 4))),
    "ScatterElements, add": Case(
        "ScatterElements",
        (_ROWS, np.array([[1, 1], [0, 0]]), normal(2, 2)),
        attributes={"axis": 1, "reduction": "add"},
        opsets=(16, NEWEST),
    ),
    "ScatterElements, max": Case(
        "ScatterElements",
        (_ROWS, np.array([[1, 1], [0, 0]]), normal(2, 2)),
        attributes={"axis": 1, "reduction": "max"},
        opsets=(18, NEWEST),
    ),
    "ScatterND": Case("ScatterND", (_ROWS, np.array([[2], [0]]), normal(2, 4))),
    "ScatterND, add": Case(
        "ScatterND",
        (_ROWS, np.array([[2, 1], [2, 1]]), normal(2)),
        attributes={"reduction": "add"},
        opsets=(16, NEWEST),
    ),
    "OneHot": Case(
        "OneHot", (whole(0, 2, -1),), {1: np.array(4), 2: np.array([0.0, 2.0], np.float32)}
    ),
    "OneHot, axis": Case(
        "OneHot",
        (np.array([[0, 2], [1, 1]]),),
        {1: np.array(3), 2: np.array([-1.0, 1.0], np.float32)},
        {"axis": 1},
    ),
    "ConstantOfShape": Case(
        "ConstantOfShape",
        (),
        {0: whole(2, 3)},
        {"value": numpy_helper.from_array(np.array([1.5], np.float32))},
    ),
    "ConstantOfShape, large": Case("ConstantOfShape", (), {0: whole(50, 60)}),
    "Range": Case("Range", (), {0: np.array(1), 1: np.array(9), 2: np.array(3)}),
    "Range, large": Case("Range", (), {0: np.array(0), 1: np.array(3000), 2: np.array(2)}),
    "EyeLike": Case("EyeLike", (normal(3, 4),), attributes={"k": 1, "dtype": TensorProto.FLOAT}),
    # -- space
    "Conv": Case(
        "Conv", (_IMAGE,), {1: normal(6, 2, 3, 3), 2: normal(6)}, {"group": 2, "pads": (1, 1, 1, 1)}
    ),
    "Conv, uneven pads": Case(
        "Conv",
        (_IMAGE,),
        {1: normal(3, 4, 3, 2)},
        {"pads": (0, 1, 2, 0), "strides": (2, 1), "dilations": (1, 2)},
    ),
    "Conv, same": Case(
        "Conv", (_IMAGE,), {1: normal(3, 4, 3, 2)}, {"auto_pad": "SAME_UPPER", "strides": (2, 2)}
    ),
    "Conv, same, lower": Case(
        "Conv", (_IMAGE,), {1: normal(3, 4, 2, 4)}, {"auto_pad": "SAME_LOWER"}
    ),
    "Conv, a signal": Case("Conv", (normal(2, 4, 9),), {1: normal(3, 4, 3)}, {"auto_pad": "VALID"}),
    "Conv, volumes": Case("Conv", (normal(1, 2, 4, 5, 4),), {1: normal(3, 2, 2, 2, 2)}),
    "ConvTranspose": Case(
        "ConvTranspose",
        (_SMALL,),
        {1: normal(3, 2, 3, 3), 2: normal(2)},
        {"strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)},
    ),
    "ConvTranspose, uneven": Case(
        "ConvTranspose",
        (_SMALL,),
        {1: normal(3, 2, 3, 3)},
        {"strides": (2, 2), "pads": (0, 1, 1, 2)},
    ),
    "MaxPool": Case("MaxPool", (_IMAGE,), attributes={"kernel_shape": (2, 2), "strides": (2, 2)}),
    "MaxPool, uneven": Case(
        "MaxPool",
        (_IMAGE,),
        attributes={"kernel_shape": (3, 2), "pads": (0, 1, 2, 0), "strides": (2, 1)},
    ),
    "MaxPool, ceil": Case(
        "MaxPool", (_IMAGE,), attributes={"kernel_shape": (2, 2), "strides": (2, 4), "ceil_mode": 1}
    ),
    "MaxPool, same": Case(
        "MaxPool",
        (_IMAGE,),
        attributes={"kernel_shape": (3, 3), "strides": (2, 2), "auto_pad": "SAME_UPPER"},
    ),
    "MaxPool, a signal": Case(
        "MaxPool", (normal(2, 4, 9),), attributes={"kernel_shape": (3,), "dilations": (2,)}
    ),
    "AveragePool": Case(
        "AveragePool",
        (_IMAGE,),
        attributes={"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "strides": (2, 2)},
    ),
    "AveragePool, uneven": Case(
        "AveragePool", (_IMAGE,), attributes={"kernel_shape": (3, 3), "pads": (0, 1, 1, 2)}
    ),
    "AveragePool, counted": Case(
        "AveragePool",
        (_IMAGE,),
        attributes={"kernel_shape": (3, 3), "pads": (0, 1, 1, 2), "count_include_pad": 1},
    ),
    "AveragePool, ceil": Case(
        "AveragePool",
        (_IMAGE,),
        attributes={"kernel_shape": (2, 2), "strides": (2, 2), "ceil_mode": 1},
    ),
    "GlobalAveragePool": Case("GlobalAveragePool", (_IMAGE,)),
    "GlobalMaxPool": Case("GlobalMaxPool", (_IMAGE,)),
    "LpPool": Case(
        "LpPool", (_IMAGE,), attributes={"kernel_shape": (2, 2), "p": 2, "strides": (2, 2)}
    ),
    "Resize, nearest": _resize("nearest", "asymmetric", scales=(1, 1, 2, 2), nearest_mode="floor"),
    "Resize, nearest, by halves": _resize("nearest", "half_pixel", scales=(1, 1, 2, 1.7)),
    "Resize, nearest, up": _resize(
        "nearest", "half_pixel", (1, 2, 7, 3), nearest_mode="round_prefer_ceil"
    ),
    "Resize, nearest, corners": _resize(
        "nearest", "align_corners", (1, 2, 7, 3), nearest_mode="ceil"
    ),
    "Resize, linear": _resize("linear", "half_pixel", scales=(1, 1, 2, 3)),
    "Resize, linear, PyTorch": _resize("linear", "pytorch_half_pixel", (1, 2, 8, 10)),
    "Resize, linear, corners": _resize("linear", "align_corners", (1, 2, 7, 10)),
    "Resize, linear, asymmetric": _resize("linear", "asymmetric", scales=(1, 1, 2, 2)),
    "Resize, linear, cut": _resize("linear", "half_pixel", scales=(1, 1, 1.3, 0.6)),
    "Resize, cubic": _resize("cubic", "half_pixel", (1, 2, 8, 10)),
    # -- norms
    "BatchNormalization": Case(
        "BatchNormalization",
        (_IMAGE,),
        {1: normal(4), 2: normal(4), 3: normal(4), 4: positive(4)},
        opsets=(14, NEWEST),  # the reference of 13 mixes in the statistics of the batch
    ),
    "LayerNormalization": Case(
        "LayerNormalization", (normal(2, 3, 4),), {1: normal(4), 2: normal(4)}, opsets=(17, NEWEST)
    ),
    "LayerNormalization, two axes": Case(
        "LayerNormalization",
        (normal(2, 3, 4),),
        {1: normal(3, 4)},
        {"axis": 1},
        opsets=(17, NEWEST),
    ),
    "LayerNormalization, one scale": Case(
        "LayerNormalization", (normal(2, 3, 4),), {1: normal(4)}, {"axis": 1}, opsets=(17, NEWEST)
    ),
    "RMSNormalization": Case(
        "RMSNormalization", (normal(2, 3, 4),), {1: normal(4)}, opsets=(23, NEWEST)
    ),
    "InstanceNormalization": Case("InstanceNormalization", (_IMAGE,), {1: normal(4), 2: normal(4)}),
    "GroupNormalization, groups": Case(
        "GroupNormalization",
        (_IMAGE,),
        {1: normal(2), 2: normal(2)},
        {"num_groups": 2},
        opsets=(18, 20),
    ),
    "GroupNormalization": Case(
        "GroupNormalization",
        (_IMAGE,),
        {1: normal(4), 2: normal(4)},
        {"num_groups": 2},
        opsets=(21, NEWEST),
    ),
    "MeanVarianceNormalization": Case("MeanVarianceNormalization", (_IMAGE,)),
    "LpNormalization": Case("LpNormalization", (_ROWS,), attributes={"axis": 0}),
    "LRN": Case(
        "LRN", (normal(4, 4, 3, 2),), attributes={"size": 3, "alpha": 0.5, "beta": 0.5, "bias": 1.5}
    ),
    # -- recurrent
    "RNN": _recurrent("RNN", 1),
    "GRU": _recurrent("GRU", 3),
    "GRU, linear first": _recurrent("GRU", 3, linear_before_reset=1),
    "LSTM": _recurrent("LSTM", 4),
    "GRU, two ways": _recurrent("GRU", 3, linear_before_reset=1, direction="bidirectional"),
    "LSTM, two ways": _recurrent("LSTM", 4, direction="bidirectional"),
    "LSTM, peepholes": _recurrent("LSTM", 4, peepholes=True),
    "RNN, backward": _recurrent("RNN", 1, direction="reverse"),
    "GRU, batch first": _recurrent("GRU", 3, layout=1, opsets=(14, NEWEST)),
}
"""By the operator, and what is special of the case."""
