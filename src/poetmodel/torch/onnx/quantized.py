"""Quantized fronts in ONNX files: what QuantizeLinear and DequantizeLinear enclose.

The nodes up to the last quantized value become a graph as PT2E writes it, and that a front. What
is behind it stays floating, and trains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators of PT2E
from torch import nn

from poetmodel.errors import InputError
from poetmodel.torch.errors import explained
from poetmodel.torch.int8.quantizing import HEADROOM, check_training, network_of
from poetmodel.torch.int8.training import ROUNDINGS
from poetmodel.torch.onnx.operators import OPERATORS, OnnxNode, plain
from poetmodel.torch.onnx.reading import array_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

    from poetmodel.torch.int8.front import QuantizedFront
    from poetmodel.torch.onnx.reading import FileRecord, NodeRecord

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
QUANTIZING: Final = frozenset((QUANTIZE, DEQUANTIZE))
"""Operators that say what is quantized, and how."""

_decomposed: Final = torch.ops.quantized_decomposed


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRecord:
    """The quantized front of a file."""

    front: QuantizedFront
    reads: str
    """The input of the file that it takes."""
    makes: str
    """The value that it returns."""


def split(
    record: FileRecord,
    *,
    train: str | Sequence[str] | None = None,
    rounding: str = ROUNDINGS[0],
    headroom: float = HEADROOM,
) -> tuple[FrontRecord | None, FileRecord]:
    """Return the quantized front of a file, if any, and the file without its nodes.

    The options are those of `poetmodel.torch.quantized`.

    Raises
    ------
    InputError
        If what is quantized is not one front, from an input of fixed size on, or has an operator
        without a kernel in int8: names it. If `train` matches no layer of it.
    """
    check_training(rounding, headroom)
    if not any(node.operator in QUANTIZING for node in record.nodes):
        if train is not None:
            raise InputError(
                f"{record.path}: train: it has no layers in int8; leave train out, and all trains"
            )
        return None, record
    constants = _constants(record)
    last = _last(record, constants)
    inside = _before(record.nodes, last)
    names = {node.name for node in inside if node.operator != "Constant"}
    rest = tuple(node for node in record.nodes if node.name not in names)
    given = {i.name: i for i in record.inputs}
    read = {name for node in inside for name in node.inputs if name in given}
    made = {name for node in inside for name in node.outputs} - constants.keys()
    outside = {name for node in rest for name in node.inputs} | set(record.outputs)
    shared = sorted((outside & made) - {last} | (outside & read))
    if len(read) != 1 or shared:
        what = f"{shared[0]!r} is read behind it" if shared else f"it reads {len(read)} inputs"
        raise InputError(f"{record.path}: expected a quantized front with one result; {what}")
    (name,) = read
    shape = given[name].shape
    if any(isinstance(size, str) for size in shape[1:]):
        raise InputError(
            f"{record.path}: input {name!r} has open dimensions ({', '.join(map(str, shape))}); "
            "fix all but the first one, which the layers of a quantized front need"
        )
    graph = _Front(record, inside, constants, reads=name, makes=last)
    sizes = [size if isinstance(size, int) else 1 for size in shape]  # no layer asks for the batch
    with explained(str(record.path)), torch.no_grad():
        exported = torch.export.export(graph, (torch.zeros(sizes),))
    front = network_of(
        exported.module(), train=train, rounding=rounding, headroom=headroom, where=str(record.path)
    )
    return FrontRecord(front=front, reads=name, makes=last), replace(record, nodes=rest)


def _constants(record: FileRecord) -> dict[str, np.ndarray]:
    """Return initializers, and what Constant nodes hold, by name."""
    found = dict(record.initializers)
    for node in record.nodes:
        if node.operator == "Constant" and "value" in node.attributes:
            found[node.outputs[0]] = array_of(node.attributes["value"], record.path)
    return found


def _last(record: FileRecord, constants: Mapping[str, Any]) -> str:
    """Return the dequantized value that no quantized one is made of."""
    back = {name for node in record.nodes if node.operator == QUANTIZE for name in node.inputs}
    for node in reversed(record.nodes):
        if back.intersection(node.outputs):
            back.update(node.inputs)
    ends = [
        node.outputs[0]
        for node in record.nodes
        if node.operator == DEQUANTIZE
        and node.inputs[0] not in constants
        and node.outputs[0] not in back
    ]
    if len(ends) != 1:
        where = ", ".join(map(repr, ends)) or "none"
        raise InputError(
            f"{record.path}: expected a quantized front that ends in one {DEQUANTIZE} of an "
            f"activation, got {where}; quantize the part of the network that stays frozen"
        )
    return ends[0]


def _before(nodes: Iterable[NodeRecord], value: str) -> list[NodeRecord]:
    """Return the nodes that a value needs."""
    wanted, needed = {value}, []
    for node in reversed(list(nodes)):
        if wanted.intersection(node.outputs):
            wanted.update(node.inputs)
            needed.append(node)
    return needed[::-1]


class _Front(nn.Module):  # type: ignore[misc, unused-ignore]
    """The nodes of a front, which PyTorch exports as a graph."""

    def __init__(
        self,
        record: FileRecord,
        nodes: Iterable[NodeRecord],
        constants: Mapping[str, np.ndarray],
        *,
        reads: str,
        makes: str,
    ) -> None:
        super().__init__()
        self.reads, self.makes = reads, makes
        self.constants = constants
        self.records = [node for node in nodes if node.operator != "Constant"]
        for node in self.records:
            if node.operator not in QUANTIZING:
                self.add_module(node.name, OnnxNode(node, opset=record.opset))
        self.tensors: dict[str, str] = {}
        for number, (name, value) in enumerate(constants.items()):
            self.tensors[name] = f"constant_{number}"
            self.register_buffer(self.tensors[name], torch.from_numpy(value.copy()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of the front."""
        values: dict[str, Any] = {self.reads: x}
        for node in self.records:
            if node.operator in QUANTIZING:
                result: Any = self._quantizing(node, values)
            else:
                kind = OPERATORS[node.operator]
                given = [
                    self._operand(name, values, is_weight=place in kind.weights)
                    for place, name in enumerate(node.inputs)
                ]
                result = getattr(self, node.name)(*given)
            values[node.outputs[0]] = result[0] if isinstance(result, tuple) else result
        returned: torch.Tensor = values[self.makes]
        return returned

    def _operand(self, name: str, values: Mapping[str, Any], *, is_weight: bool) -> Any:
        if not name:
            return None
        if name in values:
            return values[name]
        return getattr(self, self.tensors[name]) if is_weight else plain(self.constants[name])

    def _quantizing(self, node: NodeRecord, values: Mapping[str, Any]) -> torch.Tensor:
        x, scale, *zero = (self._operand(n, values, is_weight=True) for n in node.inputs)
        kind = zero[0].dtype if zero and zero[0] is not None else x.dtype
        if node.operator == QUANTIZE and kind.is_floating_point:
            kind = torch.uint8  # as ONNX has it where no zero point says another
        if scale.numel() > 1 and kind is torch.int8 and node.operator == DEQUANTIZE:
            zeros = zero[0] if zero else torch.zeros_like(scale, dtype=torch.int64)
            axis = int(node.attributes.get("axis", 1))
            result: torch.Tensor = _decomposed.dequantize_per_channel(
                x, scale, zeros, axis, -128, 127, kind
            )
            return result
        if node.operator == DEQUANTIZE and node.inputs[0] in self.constants and kind not in _LIMITS:
            return (x - zero[0] if zero else x) * scale  # such as a bias of int32
        if scale.numel() > 1 or kind not in _LIMITS:
            raise InputError(
                f"node {node.name!r} ({node.operator}): expected one scale, and int8 or uint8, got "
                f"{scale.numel()} scales and {kind}"
            )
        numbers = (float(self.constants[node.inputs[1]]), self._zero(node), *_LIMITS[kind], kind)
        name = "quantize_per_tensor" if node.operator == QUANTIZE else "dequantize_per_tensor"
        made: torch.Tensor = getattr(_decomposed, name)(x, *numbers)
        return made

    def _zero(self, node: NodeRecord) -> int:
        return int(self.constants[node.inputs[2]]) if len(node.inputs) > 2 else 0  # noqa: PLR2004


_LIMITS: Final = {torch.int8: (-128, 127), torch.uint8: (0, 255)}
"""The least and the largest number of types."""
