"""The node cases of ONNX's backend tests, run through the reader; needs the package onnx.

A training step has floating outputs and fixed shapes, which the cases do not ask for. So outputs of
other types are cast to float32, and inputs that must be numbers are constants of the file.
"""

import warnings
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case import node as cases

import poetmodel.torch as pmt
from poetmodel.errors import InputError
from poetmodel.torch.onnx.operators import OPERATORS

_FLOATING = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
_TOLERANCES = {"float16": 2e-3, "bfloat16": 1e-2}
"""Relative, by the type that an expected output is rounded to: other arithmetic is in float32."""


class Outcome(NamedTuple):
    """The result of a case: "ok", "refused" or "wrong", and the sentence or the difference."""

    kind: str
    why: str = ""


def node_cases(operator=None):
    """Return ONNX's node cases, or those of one operator, of which it loads no others.

    An operator that is a function has cases with the nodes of its body, too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overflow, where NumPy computes what a case expects
        if operator is None:
            return list(cases.collect_testcases())
        module = import_module(f"{cases.__name__}.{operator.lower()}")
    names = Path(module.__file__).read_text(encoding="utf-8")
    return [
        case for case in cases._NodeTestCases if f'"{case.name.partition("_expanded")[0]}"' in names
    ]


def operators_of(case):
    """Return the names of the operators of a case."""
    return {node.op_type for node in case.model.graph.node}


def opset_of(case):
    """Return the version of ONNX's own operators in a case; 0 without any."""
    versions = [o.version for o in case.model.opset_import if o.domain in ("", "ai.onnx")]
    return max(versions, default=0)


def run_case(case, folder, *, weights):
    """Return the outcome of a case; `weights` makes all inputs but the first constants."""
    ((given, expected),) = case.data_sets
    arrays = dict(zip((value.name for value in case.model.graph.input), given, strict=True))
    held = _constants(case, arrays, weights=weights)
    path = folder / "case.onnx"
    onnx.save(_file(case.model, {name: arrays.pop(name) for name in held}), path)
    try:
        module = pmt.from_onnx(path).eval()
        with torch.no_grad():
            found = module(*map(_tensor, arrays.values()))
    except InputError as error:
        return Outcome("refused", str(error))
    found = found if isinstance(found, tuple) else (found,)
    try:
        for mine, its in zip(found, expected, strict=True):
            _compare(mine.numpy(), _array(its), case)
    except (AssertionError, ValueError) as error:
        return Outcome("wrong", str(error))
    return Outcome("ok")


def _constants(case, arrays, *, weights):
    """Return the names of the inputs that a file has as constants."""
    numbers = {
        name
        for node in case.model.graph.node
        for position, name in enumerate(node.input)
        if node.op_type in OPERATORS and position in OPERATORS[node.op_type].numbers
    }
    return [
        name
        for place, (name, value) in enumerate(arrays.items())
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OSU"
        if name in numbers or (weights and place)
    ]


def _file(model, constants):
    """Return a model with some of its inputs as constants, and with floating outputs."""
    file = onnx.ModelProto()
    file.CopyFrom(model)
    graph = file.graph
    inputs = [value for value in graph.input if value.name not in constants]
    del graph.input[:]
    graph.input.extend(inputs)
    for name, value in constants.items():
        graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    for output in graph.output:
        kind = output.type.WhichOneof("value")
        if kind == "tensor_type" and output.type.tensor_type.elem_type not in _FLOATING:
            real = f"{output.name}_real"
            graph.node.append(helper.make_node("Cast", [output.name], [real], to=TensorProto.FLOAT))
            output.CopyFrom(helper.make_tensor_value_info(real, TensorProto.FLOAT, None))
    return file


def _array(value):
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def _tensor(value):
    """Return an input as a tensor; half and double precision in float32."""
    value = _array(value)
    halves = value.dtype.name in ("bfloat16", "float16", "float64")
    return torch.from_numpy(np.array(value, np.float32 if halves else None))


def _compare(mine, its, case):
    """Fail unless an output is the one expected, within the tolerance of its type."""
    assert mine.shape == its.shape
    relative = max(case.rtol, _TOLERANCES.get(its.dtype.name, 0))
    np.testing.assert_allclose(
        mine.astype(np.float32), its.astype(np.float32), rtol=relative, atol=max(case.atol, 1e-6)
    )
