"""The node cases of ONNX's backend tests, for `from_onnx`; needs the package onnx.

A training step needs floating outputs and fixed shapes, which the cases do not always have. So
outputs of other types are cast to float32, and inputs that must be numbers become constants.
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
"""Relative tolerances by type of the expected output, which is rounded to that type."""


class Outcome(NamedTuple):
    """The result of a case: `kind` is "ok", "refused" or "wrong".

    `why` is the message of a refusal, or the difference; otherwise empty.
    """

    kind: str
    why: str = ""


def node_cases(operator=None):
    """Return all node cases of ONNX, or only load and return those of one operator.

    They include the expanded cases of an operator that ONNX defines as a function.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overflows when NumPy computes expected outputs
        if operator is None:
            return list(cases.collect_testcases())
        module = import_module(f"{cases.__name__}.{operator.lower()}")
    names = Path(module.__file__).read_text(encoding="utf-8")
    return [
        case for case in cases._NodeTestCases if f'"{case.name.partition("_expanded")[0]}"' in names
    ]


def list_operators(case):
    """Return the set of operator names in the graph of a case."""
    return {node.op_type for node in case.model.graph.node}


def find_opset(case):
    """Return the opset version of a case, of ONNX's default domain; 0 if it has none."""
    versions = [o.version for o in case.model.opset_import if o.domain in ("", "ai.onnx")]
    return max(versions, default=0)


def run_case(case, folder, *, weights):
    """Write a case as a file in `folder`, read it as a module, and compare the module's outputs.

    With `weights`, all inputs but the first become constants of the file.
    """
    ((given, expected),) = case.data_sets
    arrays = dict(zip((value.name for value in case.model.graph.input), given, strict=True))
    held = _find_constants(case, arrays, weights=weights)
    path = folder / "case.onnx"
    onnx.save(_make_file(case.model, {name: arrays.pop(name) for name in held}), path)
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


def _find_constants(case, arrays, *, weights):
    """Return the names of inputs that become constants: those that must be numbers, or weights."""
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


def _make_file(model, constants):
    """Return a copy of a model in which `constants` replace inputs, and outputs are floating."""
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
    """Return an input as a tensor; half and double precision become float32."""
    value = _array(value)
    halves = value.dtype.name in ("bfloat16", "float16", "float64")
    return torch.from_numpy(np.array(value, np.float32 if halves else None))


def _compare(mine, its, case):
    """Assert that an output has the expected shape and, within the tolerance, its values."""
    assert mine.shape == its.shape
    relative = max(case.rtol, _TOLERANCES.get(its.dtype.name, 0))
    np.testing.assert_allclose(
        mine.astype(np.float32), its.astype(np.float32), rtol=relative, atol=max(case.atol, 1e-6)
    )
