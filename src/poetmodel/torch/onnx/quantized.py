"""Quantized fronts in ONNX files: the nodes between QuantizeLinear and DequantizeLinear.

The nodes up to the last quantized value are exported as a PT2E graph, and converted to an int8
front. The nodes after it stay floating-point and train.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators of PT2E

from poetmodel.errors import InputError
from poetmodel.torch.errors import convert_exceptions
from poetmodel.torch.int8.quantizing import check_training, convert_network
from poetmodel.torch.onnx.operators import OnnxNode, register_operator
from poetmodel.torch.onnx.reading import find_needed_nodes, read_constant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np
    from torch import nn

    from poetmodel.torch.int8.front import QuantizedFront
    from poetmodel.torch.onnx.reading import FileRecord, InputRecord, NodeRecord

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
QUANTIZATION_OPERATORS: Final = frozenset((QUANTIZE, DEQUANTIZE))
"""Operators that quantize and dequantize."""

_decomposed: Final = torch.ops.quantized_decomposed


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRecord:
    """The quantized front of a file."""

    front: QuantizedFront
    source: str
    """Name of the file's input that the front reads."""
    result: str
    """Name of the value that the front returns."""


def split_front(
    record: FileRecord,
    make_module: Callable[[FileRecord], nn.Module],
    *,
    train: str | Sequence[str] | None,
    rounding: str,
    headroom: float,
    sizes: Mapping[str, int],
) -> tuple[FrontRecord | None, FileRecord]:
    """Return the quantized front of a file, or None, and the file without the front's nodes.

    The quantized nodes must be one front with one input and one result. `sizes` are of open
    dimensions, by name; the other options are those of `poetmodel.torch.quantized`.
    """
    check_training(rounding, headroom)
    if not any(node.operator in QUANTIZATION_OPERATORS for node in record.nodes):
        if train is not None:
            raise InputError(
                f"{record.path}: train: the file has no int8 layers; leave train out to "
                "train all layers"
            )
        return None, record
    constants = _read_constants(record)
    result_name = _find_front_result(record, constants)
    front_nodes = find_needed_nodes(
        record.nodes, [result_name], lambda node: (node.inputs, node.outputs)
    )
    front_names = {node.name for node in front_nodes if node.operator != "Constant"}
    other_nodes = tuple(node for node in record.nodes if node.name not in front_names)
    front_input = _find_front_input(record, constants, front_nodes, other_nodes, result_name)
    shape = _find_front_shape(record, front_input, sizes)
    _check_scales(front_nodes, constants)
    front_module = make_module(
        replace(record, nodes=tuple(front_nodes), inputs=(front_input,), outputs=(result_name,))
    )
    # No layer depends on the size of the batch.
    example = torch.zeros([size if isinstance(size, int) else 1 for size in shape])
    with convert_exceptions(str(record.path)), torch.no_grad():
        exported_module = torch.export.export(front_module, (example,)).module()
    for node in exported_module.graph.nodes:  # messages and `train` have the names of the file
        for key, (path, kind) in node.meta.get("nn_module_stack", {}).items():
            node.meta["nn_module_stack"][key] = (path.removeprefix("nodes."), kind)
    front = convert_network(
        exported_module, train=train, rounding=rounding, headroom=headroom, label=str(record.path)
    )
    return FrontRecord(front=front, source=front_input.name, result=result_name), replace(
        record, nodes=other_nodes
    )


def _find_front_input(
    record: FileRecord,
    constants: Mapping[str, np.ndarray],
    front_nodes: Sequence[NodeRecord],
    other_nodes: Sequence[NodeRecord],
    result_name: str,
) -> InputRecord:
    """Return the only input of a front; refuse several, and other uses of its values.

    Refuses quantization in `other_nodes`, too.
    """
    inputs = {i.name: i for i in record.inputs}
    front_inputs = {name for node in front_nodes for name in node.inputs if name in inputs}
    front_values = {name for node in front_nodes for name in node.outputs} - constants.keys()
    outside_reads = {name for node in other_nodes for name in node.inputs} | set(record.outputs)
    shared_values = sorted(
        (outside_reads & front_values) - {result_name, ""} | (outside_reads & front_inputs)
    )
    if len(front_inputs) != 1 or shared_values:
        reason = (
            f"{shared_values[0]!r} is also used outside of it"
            if shared_values
            else f"it reads {len(front_inputs)} inputs"
        )
        raise InputError(
            f"{record.path}: expected a quantized front with one input and one result; {reason}"
        )
    outside_node = next((n for n in other_nodes if n.operator in QUANTIZATION_OPERATORS), None)
    if outside_node is not None:
        raise InputError(
            f"{record.path}: node {outside_node.name!r} ({outside_node.operator}) is outside of "
            "the quantized front; dequantize its constant in the file, or quantize the result of "
            "the layer that reads it"
        )
    (name,) = front_inputs
    return inputs[name]


def _find_front_shape(
    record: FileRecord, front_input: InputRecord, sizes: Mapping[str, int]
) -> list[int | str]:
    """Return the shape of a front's input with `sizes`; only the batch may stay open."""
    shape = [sizes.get(str(size), size) for size in front_input.shape]
    open_names = [size for size in shape[1:] if isinstance(size, str)]
    if open_names:
        options = " ".join(f"--dim {open_name}=N" for open_name in open_names)
        raise InputError(
            f"{record.path}: input {front_input.name!r} has open dimensions "
            f"({', '.join(map(str, shape))}), and the layers of a quantized front need fixed "
            f"sizes; set them by {options}, in Python with dims= of from_onnx"
        )
    return shape


def _check_scales(nodes: Iterable[NodeRecord], constants: Mapping[str, Any]) -> None:
    """Refuse quantization with a scale or zero point that is no constant."""
    for node in nodes:
        computed_names = [n for n in filter(None, node.inputs[1:3]) if n not in constants]
        if node.operator in QUANTIZATION_OPERATORS and computed_names:
            raise InputError(
                f"node {node.name!r} ({node.operator}): expected a constant scale and zero point, "
                f"got {computed_names[0]!r}, which the file computes"
            )


def _read_constants(record: FileRecord) -> dict[str, np.ndarray]:
    """Return the arrays of initializers and Constant nodes, by name."""
    arrays = dict(record.initializers)
    for node in record.nodes:
        if node.operator == "Constant":
            arrays[node.outputs[0]] = read_constant(node, record.path)
    return arrays


def _find_front_result(record: FileRecord, constants: Mapping[str, Any]) -> str:
    """Return the name of the only dequantized activation on which no quantization depends."""
    requantized_names = {
        name
        for node in record.nodes
        if node.operator == QUANTIZE
        for name in filter(None, node.inputs)
    }
    for node in reversed(record.nodes):
        if requantized_names.intersection(node.outputs):
            requantized_names.update(filter(None, node.inputs))
    results = [
        node.outputs[0]
        for node in record.nodes
        if node.operator == DEQUANTIZE
        and node.inputs[0] not in constants
        and node.outputs[0] not in requantized_names
    ]
    if len(results) != 1:
        results_text = ", ".join(map(repr, results)) or "none"
        raise InputError(
            f"{record.path}: expected a quantized front that ends in one {DEQUANTIZE} of an "
            f"activation, got {results_text}; quantize the part of the network that stays frozen"
        )
    return results[0]


@register_operator(*QUANTIZATION_OPERATORS, tensors=(0, 1, 2))
def convert_quantization(
    node: OnnxNode, x: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantize or dequantize by PT2E's operators.

    Constants of other types than int8 and uint8, such as an int32 bias, are dequantized by
    arithmetic. Only these and dequantized int8 values may have several scales.
    """
    if node.get("block_size", 0):
        raise node.unsupported_error(
            "block_size is not supported; quantize with one scale for each tensor or channel"
        )
    is_quantize = node.operator == QUANTIZE
    dtype = x.dtype if zeros is None else zeros.dtype
    if is_quantize and dtype.is_floating_point:
        dtype = _read_output_type(node)
    if not is_quantize and dtype not in _LIMITS and not x.is_floating_point():
        return (x if zeros is None else x - zeros) * scale
    if zeros is None:
        zeros = torch.zeros_like(scale, dtype=torch.int64)
    if not is_quantize and dtype is torch.int8 and scale.numel() > 1:
        result: torch.Tensor = _decomposed.dequantize_per_channel(
            x, scale, zeros, int(node.get("axis", 1)), -128, 127, dtype
        )
        return result
    if scale.numel() > 1 or dtype not in _LIMITS:
        raise node.unsupported_error(
            f"expected one scale, and int8 or uint8, got {scale.numel()} scales and {dtype}"
        )
    convert = _decomposed.quantize_per_tensor if is_quantize else _decomposed.dequantize_per_tensor
    converted_value: torch.Tensor = convert.tensor(x, scale, zeros, *_LIMITS[dtype], dtype)
    return converted_value


def _read_output_type(node: OnnxNode) -> torch.dtype:
    """Return the result type of a QuantizeLinear without a zero point, by default uint8."""
    number = int(node.get("output_dtype", 0))
    if number not in _OUTPUT_TYPES:
        raise node.unsupported_error(
            f"expected the output_dtype INT8 (3) or UINT8 (2), got {number}"
        )
    return _OUTPUT_TYPES[number]


_LIMITS: Final = {torch.int8: (-128, 127), torch.uint8: (0, 255)}
"""Minimum and maximum of each quantized type."""
_OUTPUT_TYPES: Final = {0: torch.uint8, 2: torch.uint8, 3: torch.int8}
"""Quantized types by their numbers in `onnx.TensorProto.DataType`; 0 stands for the default."""
