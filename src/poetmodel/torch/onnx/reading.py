"""Files of ONNX: what of one is needed, and every reason why one cannot be taken."""

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
"""The oldest and the newest version of the operators that is known."""
_CONTROL_FLOW: Final = frozenset(("If", "Loop", "Scan"))
_QUANTIZED: Final = re.compile(r"[Qq]uantize|QLinear|Integer")
"""Parts of the names of operators of quantized networks."""
_DOMAINS: Final = ("", "ai.onnx")
_MOST_CHECKED: Final = 2**31
"""Size of a file from which on ONNX does not check it [B]."""
_STRING: Final = 8
"""The type of texts in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node of a file."""

    name: str
    """Unique, and without a dot; made up where the file has none."""
    operator: str
    """With its domain, where it is not ONNX's own."""
    inputs: tuple[str, ...]
    """Empty for one that is left out."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    proto: Any
    """As the file has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecord:
    """An input of a file."""

    name: str
    shape: tuple[int | str, ...]
    """A dimension that is not fixed has a name."""
    elements: int
    """Type of the elements, as in `onnx.TensorProto.DataType`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Part of a file needed for its floating outputs."""

    path: Path
    opset: int
    nodes: tuple[NodeRecord, ...]
    inputs: tuple[InputRecord, ...]
    outputs: tuple[str, ...]
    initializers: Mapping[str, np.ndarray]
    """In float32 where they are floating."""


def read_file(path: str | Path, *, is_known: Callable[[str], bool]) -> FileRecord:
    """Read a file of ONNX, without what no floating output needs.

    Raises
    ------
    MissingExtraError
        If the package onnx is not installed.
    InputError
        If it is no such file, is damaged, or has something that cannot be trained: says what.
    """
    require_package("onnx", "reading ONNX files")
    path = Path(path)
    model = _load(path)
    opset = _opset(path, model)
    inputs = tuple(_inputs(path, model.graph))
    graph = _checked(path, model).graph
    if len(graph.sparse_initializer):
        raise InputError(f"{path}: its initializers are sparse; expected dense ones")
    outputs = tuple(_floating_outputs(path, graph))
    nodes = _records(_needed(graph.node, outputs))
    _check_operators(path, nodes, is_known)
    read = {name for node in nodes for name in node.inputs} | set(outputs)
    return FileRecord(
        path=path,
        opset=opset,
        nodes=nodes,
        inputs=inputs,
        outputs=outputs,
        initializers={
            tensor.name: array_of(tensor, path)
            for tensor in graph.initializer
            if tensor.name in read
        },
    )


def array_of(tensor: Any, path: Path) -> np.ndarray:
    """Return the elements of a tensor of a file: floating ones in float32, unsigned in int64.

    PyTorch has no arithmetic of unsigned numbers of more than a byte.
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
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except DecodeError as error:
        raise InputError(f"{path}: expected a file of ONNX; it cannot be read as one") from error
    if not len(model.graph.node) or not model.ir_version:
        raise InputError(f"{path}: expected a file of ONNX with a network; it has no nodes")
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise InputError(
            f"{path}: its weights are in a file of their own, which cannot be read: {reason}"
        ) from error
    return model


def _opset(path: Path, model: Any) -> int:
    versions = [int(opset.version) for opset in model.opset_import if opset.domain in _DOMAINS]
    oldest, newest = OPSETS
    if not versions or not oldest <= max(versions) <= newest:
        said = f"opset {max(versions)}" if versions else "no opset"
        raise InputError(
            f"{path}: it has {said}; expected opset {oldest} to {newest}: export it with "
            "opset_version=18, or convert it with onnx.version_converter"
        )
    return max(versions)


def _checked(path: Path, model: Any) -> Any:
    """Return the model with its own functions written out, and checked by ONNX."""
    from onnx import checker, inliner

    if len(model.functions):
        model = inliner.inline_local_functions(model)
    for output in model.graph.output:  # the checker wants shapes, which nothing else needs
        if output.type.WhichOneof("value") in (None, "tensor_type"):
            output.type.tensor_type.shape.SetInParent()
    try:
        if model.ByteSize() < _MOST_CHECKED:
            checker.check_model(model)
    except checker.ValidationError as error:
        reason = " ".join(str(error).split("\n\n")[0].split()).rstrip(".")
        # Such as the group norm of opset 18, which is known; unknown ones are named together.
        if "is deprecated" in reason or "No Op registered" in reason:
            return model
        raise InputError(f"{path}: ONNX's own check refuses the file: {reason}") from error
    return model


def _floating_outputs(path: Path, graph: Any) -> Iterable[str]:
    """Return the outputs that a loss can be of: labels, and tables of them, are none."""
    names = [o.name for o in graph.output if _is_floating(o.type.tensor_type.elem_type)]
    if not names:
        kinds = ", ".join(f"{o.name!r}" for o in graph.output)
        raise InputError(
            f"{path}: expected an output of floating numbers to train for; its outputs ({kinds}) "
            "have none"
        )
    return names


def _is_floating(elements: int) -> bool:
    from onnx import TensorProto

    return elements in (
        TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16
    )  # fmt: skip


def _needed(nodes: Sequence[Any], outputs: Iterable[str]) -> list[Any]:
    """Return the nodes that some outputs need, in their order."""
    wanted, needed = set(outputs), []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            needed.append(node)
    return needed[::-1]


def _records(protos: Iterable[Any]) -> tuple[NodeRecord, ...]:
    from onnx import helper
    from torch import nn

    records: list[NodeRecord] = []
    names = set(dir(nn.ModuleDict()))  # what no module in one can be called
    for proto in protos:
        name = (proto.name or next(filter(None, proto.output))).replace(".", "_")
        while name in names:
            name += "_"
        names.add(name)
        own = proto.domain in _DOMAINS
        graphs = [a for a in proto.attribute if a.type in (a.GRAPH, a.GRAPHS)]
        plain = [a for a in proto.attribute if a not in graphs]
        records.append(
            NodeRecord(
                name=name,
                operator=proto.op_type if own else f"{proto.domain}.{proto.op_type}",
                inputs=tuple(proto.input),
                outputs=tuple(proto.output),
                attributes={a.name: _plain(helper.get_attribute_value(a)) for a in plain},
                proto=proto,
            )
        )
    return tuple(records)


def _plain(value: Any) -> Any:
    """Return the value of an attribute: text as text, a list as a tuple, a float as written."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float):
        return shortest(value)
    if isinstance(value, list | tuple) or type(value).__name__.startswith("Repeated"):
        return tuple(map(_plain, value))
    return value


def shortest(value: float) -> float:
    """Return the shortest number that is this one in single precision: 0.9, not 0.89999998."""
    import numpy as np

    return float(str(np.float32(value)))


def _check_operators(
    path: Path, nodes: Iterable[NodeRecord], is_known: Callable[[str], bool]
) -> None:
    """Raise if there are operators that are not known: one sentence that names all, with nodes."""
    missing: dict[str, list[str]] = {}
    for node in nodes:
        if not is_known(node.operator):
            missing.setdefault(node.operator, []).append(repr(node.name))
    if not missing:
        return
    each = "; ".join(f"{operator} ({listed(names)})" for operator, names in sorted(missing.items()))
    advice = "export the network without them"
    if _CONTROL_FLOW & missing.keys():
        advice += "; a network whose course depends on values cannot be scheduled"
    elif any(_QUANTIZED.search(name) for name in missing):
        advice = "give the file from before it was quantized"
    raise InputError(f"{path}: operators that are not known: {each}; {advice}")


def _inputs(path: Path, graph: Any) -> Iterable[InputRecord]:
    held = {tensor.name for tensor in graph.initializer}
    for given in graph.input:
        if given.name in held:
            continue
        kind = given.type.WhichOneof("value")
        tensor = given.type.tensor_type
        if kind != "tensor_type" or tensor.elem_type == _STRING:
            what = "texts" if kind == "tensor_type" else str(kind).removesuffix("_type") + "s"
            raise InputError(f"{path}: input {given.name!r} is of {what}; expected tensors")
        if not tensor.HasField("shape"):
            raise InputError(f"{path}: input {given.name!r} has no shape; expected one in the file")
        dimensions = enumerate(tensor.shape.dim)
        shape = tuple(_dimension(given.name, axis, dimension) for axis, dimension in dimensions)
        yield InputRecord(name=given.name, shape=shape, elements=tensor.elem_type)


def _dimension(name: str, axis: int, dimension: Any) -> int | str:
    if dimension.dim_value > 0:
        return int(dimension.dim_value)
    return str(dimension.dim_param) or f"{name}.{axis}"
