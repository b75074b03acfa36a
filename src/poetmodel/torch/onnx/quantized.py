"""Quantized fronts in ONNX files: the nodes between QuantizeLinear and DequantizeLinear.

The nodes up to the last quantized value are exported as a PT2E graph, and converted to an int8
front. The nodes after it stay floating-point and train.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators of PT2E
from torch import nn

from poetmodel.errors import InputError
from poetmodel.torch.errors import convert_exceptions
from poetmodel.torch.int8.quantizing import check_training, convert_network
from poetmodel.torch.onnx.operators import OPERATORS, OnnxNode, to_numbers
from poetmodel.torch.onnx.reading import append_underscores, find_needed_nodes, read_constant

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

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
    front_module = _FrontModule(
        record, front_nodes, constants, source=front_input.name, result=result_name
    )
    # No layer depends on the size of the batch.
    example = torch.zeros([size if isinstance(size, int) else 1 for size in shape])
    with convert_exceptions(str(record.path)), torch.no_grad():
        exported = torch.export.export(front_module, (example,))
    front = convert_network(
        exported.module(), train=train, rounding=rounding, headroom=headroom, label=str(record.path)
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


class _FrontModule(nn.Module):  # type: ignore[misc, unused-ignore]
    """The nodes of a front, from value `source` to `result`, as a module for PyTorch's exporter."""

    def __init__(
        self,
        record: FileRecord,
        nodes: Iterable[NodeRecord],
        constants: Mapping[str, np.ndarray],
        *,
        source: str,
        result: str,
    ) -> None:
        super().__init__()
        self.source, self.result = source, result
        self.constants = constants
        self.records = [node for node in nodes if node.operator != "Constant"]
        self.buffer_names: dict[str, str] = {}
        """Name of the buffer of each constant, by the name of the constant."""
        self.module_names: dict[str, str] = {}
        """Name of the module of each node that has one, by the name of the node."""
        for index, (name, value) in enumerate(constants.items()):
            self.buffer_names[name] = f"constant_{index}"
            self.register_buffer(self.buffer_names[name], torch.from_numpy(value.copy()))
        for node in self.records:
            if node.operator not in QUANTIZATION_OPERATORS:
                module_name = append_underscores(node.name, partial(hasattr, self))
                self.module_names[node.name] = module_name
                self.add_module(module_name, OnnxNode(node, opset=record.opset))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the result of the front."""
        values: dict[str, Any] = {self.source: x}
        for node in self.records:
            if node.operator in QUANTIZATION_OPERATORS:
                result: Any = self._compute_quantization(node, values)
            else:
                operator = OPERATORS[node.operator]
                operands = [
                    self._read_operand(name, values, is_weight=position in operator.weights)
                    for position, name in enumerate(node.inputs)
                ]
                result = getattr(self, self.module_names[node.name])(*operands)
            if len(node.outputs) == 1:
                values[node.outputs[0]] = result
            else:
                values.update(zip(node.outputs, result, strict=False))
        front_result: torch.Tensor = values[self.result]
        return front_result

    def _read_operand(self, name: str, values: Mapping[str, Any], *, is_weight: bool) -> Any:
        """Return the value `name`, None for ""; constants as numbers, weights as tensors."""
        if not name:
            return None
        if name in values:
            return values[name]
        return (
            getattr(self, self.buffer_names[name])
            if is_weight
            else to_numbers(self.constants[name])
        )

    def _compute_quantization(self, node: NodeRecord, values: Mapping[str, Any]) -> torch.Tensor:
        """Compute a QuantizeLinear or DequantizeLinear with PT2E's operators.

        Constants of other types than int8 and uint8, such as an int32 bias, are dequantized by
        arithmetic. Only these and dequantized int8 values may have several scales.
        """
        if node.attributes.get("block_size", 0):
            raise InputError(
                f"node {node.name!r} ({node.operator}): block_size is not supported; quantize with "
                "one scale for each tensor or channel"
            )
        x, scale, zeros = (
            self._read_operand(operand, values, is_weight=True)
            for operand in (*node.inputs, "")[:3]
        )
        dtype = x.dtype if zeros is None else zeros.dtype
        if node.operator == QUANTIZE and dtype.is_floating_point:
            dtype = self._read_output_type(node)
        if scale.numel() > 1 and dtype is torch.int8 and node.operator == DEQUANTIZE:
            if zeros is None:
                zeros = torch.zeros_like(scale, dtype=torch.int64)
            axis = int(node.attributes.get("axis", 1))
            result: torch.Tensor = _decomposed.dequantize_per_channel(
                x, scale, zeros, axis, -128, 127, dtype
            )
            return result
        if (
            node.operator == DEQUANTIZE
            and node.inputs[0] in self.constants
            and dtype not in _LIMITS
        ):
            # For example an int32 bias.
            return (x if zeros is None else x - zeros) * scale
        if scale.numel() > 1 or dtype not in _LIMITS:
            raise InputError(
                f"node {node.name!r} ({node.operator}): expected one scale, and int8 or uint8, got "
                f"{scale.numel()} scales and {dtype}"
            )
        computed = [name for name in node.inputs[1:3] if name and name not in self.constants]
        if computed:
            raise InputError(
                f"node {node.name!r} ({node.operator}): expected a constant scale and zero point, "
                f"got {computed[0]!r}, which the file computes"
            )
        arguments = (
            float(self.constants[node.inputs[1]]),
            self._read_zero_point(node),
            *_LIMITS[dtype],
            dtype,
        )
        operator_name = (
            "quantize_per_tensor" if node.operator == QUANTIZE else "dequantize_per_tensor"
        )
        converted_value: torch.Tensor = getattr(_decomposed, operator_name)(x, *arguments)
        return converted_value

    def _read_output_type(self, node: NodeRecord) -> torch.dtype:
        """Return the result type of a QuantizeLinear without a zero point, by default uint8."""
        number = int(node.attributes.get("output_dtype", 0))
        if number not in _OUTPUT_TYPES:
            raise InputError(
                f"node {node.name!r} ({node.operator}): expected the output_dtype INT8 (3) or "
                f"UINT8 (2), got {number}"
            )
        return _OUTPUT_TYPES[number]

    def _read_zero_point(self, node: NodeRecord) -> int:
        """Return the zero point of a node; 0 if the node has none, or an empty name for it."""
        name = (*node.inputs, "")[2]
        return int(self.constants[name]) if name else 0


_LIMITS: Final = {torch.int8: (-128, 127), torch.uint8: (0, 255)}
"""Minimum and maximum of each quantized type."""
_OUTPUT_TYPES: Final = {0: torch.uint8, 2: torch.uint8, 3: torch.int8}
"""Quantized types by their numbers in `onnx.TensorProto.DataType`; 0 stands for the default."""
