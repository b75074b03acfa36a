"""Reads ONNX files: the nodes and constants needed, and errors for unsupported files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import InputError, listed
from poetmodel.torch.errors import require_package

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

OPSETS: Final = (13, 23)
"""The oldest and the newest supported opset."""
_CONTROL_FLOW: Final = frozenset(("If", "Loop", "Scan"))
_QUANTIZED: Final = re.compile(r"[Qq]uantize|QLinear|Integer")
"""Matches names of operators of quantized networks."""
_DOMAINS: Final = ("", "ai.onnx")
_MAX_CHECKED_BYTES: Final = 2**31
"""Maximum size of a model that ONNX's checker accepts [B]."""
_STRING: Final = 8
"""Number of strings in `onnx.TensorProto.DataType`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node of a file."""

    name: str
    """Unique, without dots; generated if the file has none."""
    operator: str
    """With its domain, unless the domain is ONNX's own."""
    inputs: tuple[str, ...]
    """Names; an omitted input is empty."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    proto: Any
    """The node's `onnx.NodeProto`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecord:
    """An input of a file."""

    name: str
    shape: tuple[int | str, ...]
    """An open dimension has a name instead of a size."""
    elements: int
    """Type of the elements, as in `onnx.TensorProto.DataType`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """The nodes, inputs and constants of a file that its floating-point outputs need."""

    path: Path
    opset: int
    nodes: tuple[NodeRecord, ...]
    inputs: tuple[InputRecord, ...]
    outputs: tuple[str, ...]
    initializers: Mapping[str, np.ndarray]
    """Arrays by name; floating-point ones in float32."""


def read_file(path: str | Path, *, is_known: Callable[[str], bool]) -> FileRecord:
    """Read an ONNX file, without nodes and constants that no floating-point output needs.

    Raises
    ------
    MissingExtraError
        If the package onnx is not installed.
    InputError
        If the file is not ONNX, is damaged, or contains something that cannot be trained; the
        message names it.
    """
    require_package("onnx", "reading ONNX files")
    path = Path(path)
    model = _load(path)
    opset = _opset(path, model)
    inputs = tuple(_input_records(path, model.graph))
    graph = _inline_and_check(path, model).graph
    if len(graph.sparse_initializer):
        raise InputError(f"{path}: its initializers are sparse; expected dense initializers")
    outputs = tuple(_floating_outputs(path, graph))
    nodes = _node_records(_needed_protos(graph.node, outputs))
    _check_operators(path, nodes, is_known)
    read = {name for node in nodes for name in node.inputs} | set(outputs)
    return FileRecord(
        path=path,
        opset=opset,
        nodes=nodes,
        inputs=inputs,
        outputs=outputs,
        initializers={
            tensor.name: read_array(tensor, path)
            for tensor in graph.initializer
            if tensor.name in read
        },
    )


def read_array(tensor: Any, path: Path) -> np.ndarray:
    """Return a tensor of a file as an array: floats as float32, large unsigned integers as int64.

    PyTorch has no arithmetic for unsigned integers of more than one byte.
    """
    import numpy as np
    from onnx import numpy_helper

    try:
        array: np.ndarray = numpy_helper.to_array(tensor, base_dir=str(path.parent))
    except (ValueError, TypeError, OSError) as error:
        raise InputError(f"{path}: the tensor {tensor.name!r} cannot be read: {error}") from error
    is_floating = np.issubdtype(array.dtype, np.floating) or array.dtype.name == "bfloat16"
    if array.dtype.kind == "u" and array.itemsize > 1:
        return array.astype(np.int64)
    return array.astype(np.float32) if is_floating else array


def _load(path: Path) -> Any:
    """Load a file and its external weights; raise `InputError` if either cannot be read."""
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except DecodeError as error:
        raise InputError(f"{path}: expected an ONNX file; it cannot be parsed") from error
    if not len(model.graph.node) or not model.ir_version:
        raise InputError(f"{path}: expected an ONNX file with a network; it has no nodes")
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise InputError(
            f"{path}: its weights are in a separate file, which cannot be read: {reason}"
        ) from error
    return model


def _opset(path: Path, model: Any) -> int:
    """Return the opset of a model; raise `InputError` if it is missing or not supported."""
    versions = [int(opset.version) for opset in model.opset_import if opset.domain in _DOMAINS]
    oldest, newest = OPSETS
    if not versions or not oldest <= max(versions) <= newest:
        opset_text = f"opset {max(versions)}" if versions else "no opset"
        raise InputError(
            f"{path}: it has {opset_text}; expected opset {oldest} to {newest}: export it with "
            "opset_version=18, or convert it with onnx.version_converter"
        )
    return max(versions)


def _inline_and_check(path: Path, model: Any) -> Any:
    """Run ONNX's checker; return the model with its local functions inlined.

    Does not raise for unknown or deprecated operators; `_check_operators` reports all unknown ones.
    """
    from onnx import checker, inliner

    if len(model.functions):
        model = inliner.inline_local_functions(model)
    for output in model.graph.output:  # only the checker needs shapes
        if output.type.WhichOneof("value") in (None, "tensor_type"):
            output.type.tensor_type.shape.SetInParent()
    try:
        if model.ByteSize() < _MAX_CHECKED_BYTES:
            checker.check_model(model)
    except checker.ValidationError as error:
        reason = " ".join(str(error).split("\n\n")[0].split()).rstrip(".")
        # The group norm of opset 18 is deprecated, but supported. Unknown operators follow later.
        if "is deprecated" in reason or "No Op registered" in reason:
            return model
        raise InputError(f"{path}: ONNX's checker rejects the file: {reason}") from error
    return model


def _floating_outputs(path: Path, graph: Any) -> Iterable[str]:
    """Return the names of floating-point outputs; raise `InputError` if there is none.

    Only these can be inputs of a loss. Labels, and sequences of maps, are left out.
    """
    names = [o.name for o in graph.output if _is_floating(o.type.tensor_type.elem_type)]
    if not names:
        other_names = ", ".join(f"{o.name!r}" for o in graph.output)
        raise InputError(
            f"{path}: expected a floating-point output for the loss; its outputs are {other_names}"
        )
    return names


def _is_floating(elements: int) -> bool:
    from onnx import TensorProto

    return elements in (
        TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16
    )  # fmt: skip


def _needed_protos(nodes: Sequence[Any], outputs: Iterable[str]) -> list[Any]:
    """Return the nodes that some outputs depend on, in the order of the file."""
    wanted_names, needed_nodes = set(outputs), []
    for node in reversed(nodes):
        if wanted_names.intersection(node.output):
            wanted_names.update(node.input)
            needed_nodes.append(node)
    return needed_nodes[::-1]


def _node_records(protos: Iterable[Any]) -> tuple[NodeRecord, ...]:
    """Return records of nodes, with unique names that a `torch.nn.ModuleDict` accepts."""
    from onnx import helper
    from torch import nn

    records: list[NodeRecord] = []
    names = set(dir(nn.ModuleDict()))  # reserved by the container
    for proto in protos:
        name = (proto.name or next(filter(None, proto.output))).replace(".", "_")
        while name in names:
            name += "_"
        names.add(name)
        is_standard = proto.domain in _DOMAINS
        graphs = [a for a in proto.attribute if a.type in (a.GRAPH, a.GRAPHS)]
        values = [a for a in proto.attribute if a not in graphs]
        records.append(
            NodeRecord(
                name=name,
                operator=proto.op_type if is_standard else f"{proto.domain}.{proto.op_type}",
                inputs=tuple(proto.input),
                outputs=tuple(proto.output),
                attributes={
                    a.name: _attribute_value(helper.get_attribute_value(a)) for a in values
                },
                proto=proto,
            )
        )
    return tuple(records)


def _attribute_value(value: Any) -> Any:
    """Return an attribute's value: bytes as text, lists as tuples, floats shortened."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float):
        return shortest_float(value)
    if isinstance(value, list | tuple) or type(value).__name__.startswith("Repeated"):
        return tuple(map(_attribute_value, value))
    return value


def shortest_float(value: float) -> float:
    """Return the shortest decimal that rounds to this number in single precision.

    For example 0.9 instead of 0.89999998.
    """
    import numpy as np

    return float(str(np.float32(value)))


def _check_operators(
    path: Path, nodes: Iterable[NodeRecord], is_known: Callable[[str], bool]
) -> None:
    """Raise one `InputError` that lists all unknown operators with their nodes."""
    unknown: dict[str, list[str]] = {}
    for node in nodes:
        if not is_known(node.operator):
            unknown.setdefault(node.operator, []).append(repr(node.name))
    if not unknown:
        return
    each = "; ".join(f"{operator} ({listed(names)})" for operator, names in sorted(unknown.items()))
    advice = "export the network without them"
    if _CONTROL_FLOW & unknown.keys():
        advice += "; a network with control flow cannot be scheduled"
    elif any(_QUANTIZED.search(name) for name in unknown):
        advice = "use the file from before quantization"
    raise InputError(f"{path}: operators that are not supported: {each}; {advice}")


def _input_records(path: Path, graph: Any) -> Iterable[InputRecord]:
    """Yield the inputs of a graph that are not initializers.

    Raises `InputError` for an input that is no tensor of numbers or has no shape.
    """
    initializer_names = {tensor.name for tensor in graph.initializer}
    for value_info in graph.input:
        if value_info.name in initializer_names:
            continue
        kind = value_info.type.WhichOneof("value")
        tensor = value_info.type.tensor_type
        if kind != "tensor_type" or tensor.elem_type == _STRING:
            type_name = (
                "strings" if kind == "tensor_type" else str(kind).removesuffix("_type") + "s"
            )
            raise InputError(
                f"{path}: input {value_info.name!r} is of {type_name}; expected tensors"
            )
        if not tensor.HasField("shape"):
            raise InputError(
                f"{path}: input {value_info.name!r} has no shape; expected one in the file"
            )
        dimensions = enumerate(tensor.shape.dim)
        shape = tuple(
            _dimension(value_info.name, axis, dimension) for axis, dimension in dimensions
        )
        yield InputRecord(name=value_info.name, shape=shape, elements=tensor.elem_type)


def _dimension(name: str, axis: int, dimension: Any) -> int | str:
    """Return the size of a dimension; if it is open, its name, by default input name and axis."""
    if dimension.dim_value > 0:
        return int(dimension.dim_value)
    return str(dimension.dim_param) or f"{name}.{axis}"
