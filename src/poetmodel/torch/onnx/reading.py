"""Read ONNX files: the nodes and constants that outputs need, and errors of unsupported files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from poetmodel.errors import InputError, join_names
from poetmodel.torch.errors import require_package

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

_Node = TypeVar("_Node")

OPSETS: Final = (13, 23)
"""The oldest and the newest supported opset."""
_CONTROL_FLOW: Final = frozenset(("If", "Loop", "Scan"))
"""Operators that execute a graph in an attribute."""
_QUANTIZED_PATTERN: Final = re.compile(r"[Qq]uantize|QLinear|Integer")
"""Matches names of operators of quantized networks."""
_DOMAINS: Final = ("", "ai.onnx")
"""Domains of ONNX's own operators."""
_MAX_CHECKED_BYTES: Final = 2**31
"""Size from which a model is too large for ONNX's checker [B]."""
_STRING: Final = 8
"""Number of strings in `onnx.TensorProto.DataType`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node of a file."""

    name: str
    """A unique name without dots: from the file or else an output, with ``_`` where needed."""
    operator: str
    """Name of the operator, with its domain unless the domain is ONNX's own."""
    inputs: tuple[str, ...]
    """Names of the inputs; the name of an omitted input is empty."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    """Values by name, as from `_convert_attribute`, without attributes that are graphs."""
    proto: Any
    """The node's `onnx.NodeProto`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecord:
    """An input of a file."""

    name: str
    shape: tuple[int | str, ...]
    """Sizes; an open dimension has a name instead of a size, see `_read_dimension`."""
    element_type: int
    """Number of the elements' type in `onnx.TensorProto.DataType`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """The inputs of a file, and the nodes and constants that its floating-point outputs need."""

    path: Path
    opset: int
    nodes: tuple[NodeRecord, ...]
    inputs: tuple[InputRecord, ...]
    outputs: tuple[str, ...]
    """Names of the floating-point outputs."""
    initializers: Mapping[str, np.ndarray]
    """Arrays by name, with types as from `read_array`."""


def read_file(path: str | Path, *, is_known: Callable[[str], bool]) -> FileRecord:
    """Read an ONNX file, without nodes and constants that no floating-point output needs.

    `is_known` returns whether an operator is supported, from its name.
    """
    require_package("onnx", "reading ONNX files")
    path = Path(path)
    model = _load_model(path)
    opset = _read_opset(path, model)
    inputs = tuple(_make_input_records(path, model.graph))
    graph = _inline_and_check(path, model).graph
    if len(graph.sparse_initializer):
        raise InputError(f"{path}: its initializers are sparse; expected dense initializers")
    outputs = tuple(_find_floating_outputs(path, graph))
    nodes = _make_node_records(
        find_needed_nodes(graph.node, outputs, lambda proto: (proto.input, proto.output))
    )
    _check_operators(path, nodes, is_known)
    read_names = {name for node in nodes for name in node.inputs} | set(outputs)
    return FileRecord(
        path=path,
        opset=opset,
        nodes=nodes,
        inputs=inputs,
        outputs=outputs,
        initializers={
            tensor.name: read_array(tensor, path)
            for tensor in graph.initializer
            if tensor.name in read_names
        },
    )


def read_array(tensor: Any, path: Path) -> np.ndarray:
    """Return a tensor of a file as an array, with half, bfloat16 and double as float32.

    Unsigned integers of more than one byte become int64: PyTorch has no arithmetic for them.
    """
    import numpy as np
    from onnx import TensorProto, numpy_helper

    try:
        array: np.ndarray = numpy_helper.to_array(tensor, base_dir=str(path.parent))
    except (ValueError, TypeError, OSError) as error:
        raise InputError(f"{path}: the tensor {tensor.name!r} cannot be read: {error}") from error
    is_floating = np.issubdtype(array.dtype, np.floating) or array.dtype.name == "bfloat16"
    if array.dtype.kind == "u" and array.itemsize > 1:
        return array.astype(np.int64)
    if not is_floating and array.dtype.kind not in "biuc":
        raise InputError(
            f"{path}: the tensor {tensor.name!r} is of "
            f"{TensorProto.DataType.Name(tensor.data_type)}; expected integers of 8 bits or more, "
            "or floating-point numbers of 16 bits or more"
        )
    return array.astype(np.float32) if is_floating else array


def read_constant(node: NodeRecord, path: Path) -> np.ndarray:
    """Return the value of a Constant node as an array, with types as from `read_array`."""
    import numpy as np

    ((key, value),) = node.attributes.items()
    if key == "value":
        return read_array(value, path)
    if key in ("value_float", "value_floats", "value_int", "value_ints"):
        return np.asarray(value, np.float32 if "float" in key else np.int64)
    raise InputError(
        f"{path}: node {node.name!r} (Constant): {key} is not supported; expected numbers"
    )


def _load_model(path: Path) -> Any:
    """Load a file and its external weights."""
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except DecodeError as error:
        raise InputError(f"{path}: expected an ONNX file; it cannot be parsed") from error
    if not len(model.graph.node) or not model.ir_version:
        raise InputError(
            f"{path}: expected an ONNX file with a network; it has no nodes or no IR version"
        )
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise InputError(
            f"{path}: its weights are in a separate file, which cannot be read: {reason}"
        ) from error
    return model


def _read_opset(path: Path, model: Any) -> int:
    """Return the opset of a model, the highest of several in ONNX's own domain."""
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
    """Inline the local functions of a model, and check it with ONNX's checker.

    Models of 2 GiB or more are not checked. `_check_operators` reports unknown operators.
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
        # The deprecated group norm of opset 18 is supported; `_check_operators` reports unknown
        # operators.
        if "is deprecated" in reason or "No Op registered" in reason:
            return model
        raise InputError(f"{path}: ONNX's checker rejects the file: {reason}") from error
    return model


def _find_floating_outputs(path: Path, graph: Any) -> Iterable[str]:
    """Return the names of floating-point outputs, the only ones that a loss can read."""
    names = [o.name for o in graph.output if _is_floating(o.type.tensor_type.elem_type)]
    if not names:
        other_names = ", ".join(f"{o.name!r}" for o in graph.output)
        raise InputError(
            f"{path}: expected a floating-point output for the loss; its outputs are {other_names}"
        )
    return names


def _is_floating(element_type: int) -> bool:
    from onnx import TensorProto

    return element_type in (
        TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16
    )  # fmt: skip


def find_needed_nodes(
    nodes: Sequence[_Node],
    outputs: Iterable[str],
    values: Callable[[_Node], tuple[Iterable[str], Iterable[str]]],
) -> list[_Node]:
    """Return the nodes on which `outputs` depend; `values` returns inputs and outputs of a node."""
    needed_names, needed_nodes = set(outputs), []
    for node in reversed(nodes):
        node_inputs, node_outputs = values(node)
        if needed_names.intersection(node_outputs):
            needed_names.update(filter(None, node_inputs))
            needed_nodes.append(node)
    return needed_nodes[::-1]


def append_underscores(name: str, is_taken: Callable[[str], bool]) -> str:
    """Return a name with ``_`` appended until it is not taken."""
    while is_taken(name):
        name += "_"
    return name


def _make_node_records(protos: Iterable[Any]) -> tuple[NodeRecord, ...]:
    """Return records of nodes, with unique names that a `torch.nn.ModuleDict` accepts."""
    from onnx import helper
    from torch import nn

    records: list[NodeRecord] = []
    names = set(dir(nn.ModuleDict()))  # reserved by the container
    for proto in protos:
        first_name = (proto.name or next(filter(None, proto.output))).replace(".", "_")
        name = append_underscores(first_name, names.__contains__)
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
                    a.name: _convert_attribute(helper.get_attribute_value(a)) for a in values
                },
                proto=proto,
            )
        )
    return tuple(records)


def _convert_attribute(value: Any) -> Any:
    """Return an attribute's value: bytes as text, lists as tuples, floats by `shorten_float`."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float):
        return shorten_float(value)
    if isinstance(value, list | tuple) or type(value).__name__.startswith("Repeated"):
        return tuple(map(_convert_attribute, value))
    return value


def shorten_float(value: float) -> float:
    """Return the shortest decimal of a single-precision number: 0.9 instead of 0.89999998."""
    import numpy as np

    return float(str(np.float32(value)))


def _check_operators(
    path: Path, nodes: Iterable[NodeRecord], is_known: Callable[[str], bool]
) -> None:
    """Raise one `InputError` that lists all unknown operators, each with its first nodes."""
    unknown: dict[str, list[str]] = {}
    for node in nodes:
        if not is_known(node.operator):
            unknown.setdefault(node.operator, []).append(repr(node.name))
    if not unknown:
        return
    operator_list = "; ".join(
        f"{operator} ({join_names(names)})" for operator, names in sorted(unknown.items())
    )
    advice = "export the network without them"
    if _CONTROL_FLOW & unknown.keys():
        advice += "; a network with control flow cannot be scheduled"
    elif any(_QUANTIZED_PATTERN.search(name) for name in unknown):
        advice = "use the file from before quantization"
    raise InputError(f"{path}: operators that are not supported: {operator_list}; {advice}")


def _make_input_records(path: Path, graph: Any) -> Iterable[InputRecord]:
    """Yield the inputs of a graph that are not initializers."""
    initializer_names = {tensor.name for tensor in graph.initializer}
    for value_info in graph.input:
        if value_info.name in initializer_names:
            continue
        value_kind = value_info.type.WhichOneof("value")
        tensor = value_info.type.tensor_type
        if value_kind != "tensor_type" or tensor.elem_type == _STRING:
            type_name = (
                "strings"
                if value_kind == "tensor_type"
                else str(value_kind).removesuffix("_type") + "s"
            )
            raise InputError(
                f"{path}: input {value_info.name!r} is of {type_name}; expected tensors of numbers"
            )
        if not tensor.HasField("shape"):
            raise InputError(
                f"{path}: input {value_info.name!r} has no shape; expected one in the file"
            )
        dimensions = enumerate(tensor.shape.dim)
        shape = tuple(
            _read_dimension(value_info.name, axis, dimension) for axis, dimension in dimensions
        )
        yield InputRecord(name=value_info.name, shape=shape, element_type=tensor.elem_type)


def _read_dimension(name: str, axis: int, dimension: Any) -> int | str:
    """Return the size of a dimension, or its name if it is open: ``x.0`` if it has none."""
    if dimension.dim_value > 0:
        return int(dimension.dim_value)
    return str(dimension.dim_param) or f"{name}.{axis}"
