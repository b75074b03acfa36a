"""Step files, ``*.step.json``: captured steps with weights, for export without PyTorch."""

from __future__ import annotations

import base64
import binascii
import json
import math
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import numpy as np
from pydantic import ConfigDict, Field, PlainValidator, TypeAdapter
from pydantic_core import PydanticCustomError

from poetmodel.errors import InputError, convert_errors
from poetmodel.files import read_text, write_text
from poetmodel.graph import Graph
from poetmodel.graph.io import STEP_FORMAT, graph_of_step
from poetmodel.headers import THIS_VERSION, WRITTEN_BY
from poetmodel.lowered.calls import (
    WORKSPACE,
    Argument,
    Buffer,
    Call,
    Condition,
    DataType,
    NamedTensor,
    Ref,
    ScaledLearningRate,
)
from poetmodel.lowered.catalogue import CATALOGUE
from poetmodel.lowered.kernels import find_kernel, kernel_names
from poetmodel.lowered.step import LoweredStep
from poetmodel.schedule.io import JsonFile, Strict, log_notes, parse_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

VERSION: Final = 1
"""Format version of step files."""
_OBJECTS: Final = TypeAdapter[Any](Ref | Condition | Buffer | NamedTensor)
"""Dataclasses that files contain as objects."""


def _parse_argument(value: Any) -> Argument:
    """Convert an argument of a call in a step file, such as ``{"buffer": "x", "offset": 2}``."""
    match value:
        case int() | float() if not isinstance(value, bool):
            return value
        case list() if all(type(number) is int for number in value):
            return tuple(value)
        case {"learning_rate": int() | float() as factor, **others} if not others:
            return ScaledLearningRate(float(factor))
        case {"real": "inf" | "-inf" | "nan" as number, **others} if not others:
            return float(number)
        case {"buffer": str(buffer), **others} if others.keys() <= {"offset"}:
            offset = others.get("offset", 0)
            if type(offset) is int and offset >= 0:
                return Ref(buffer, offset)
            raise PydanticCustomError("argument", "offset: expected a number of elements")
    raise PydanticCustomError(
        "argument", "expected a number, a list of integers, a buffer or a learning rate"
    )


class _CallEntry(Strict):
    kernel: str
    arguments: tuple[Annotated[Any, PlainValidator(_parse_argument)], ...]
    where: Condition | None = None
    within: tuple[int, int] | None = None


class _StepFile(JsonFile):
    """Content of a step file."""

    format: Literal["poetmodel-step"]
    graph: dict[str, Any]
    calls: list[list[_CallEntry]]
    buffers: dict[str, Buffer]
    inputs: tuple[NamedTensor, ...]
    states: tuple[NamedTensor, ...]
    gradients: tuple[NamedTensor, ...]
    loss: Ref
    values: dict[str, str]
    learning_rate: float | None = None
    accumulate: Annotated[int, Field(ge=1)] = 1
    versions: dict[str, str] = Field(default_factory=dict)
    output: NamedTensor | None = None
    inference: _PassEntry | None = None
    evaluation: _PassEntry | None = None


class _PassEntry(_StepFile):
    """A forward pass in a step file: inference or evaluation."""

    model_config = ConfigDict(extra="forbid")


def save_step(step: LoweredStep, path: str | Path) -> None:
    """Write a step to a ``*.step.json`` file, with values in base64; replace an existing file."""
    header = {"format": STEP_FORMAT, "version": VERSION, WRITTEN_BY: THIS_VERSION}
    document = header | _make_document(step)
    write_text(path, json.dumps(document, allow_nan=False) + "\n")


def _make_document(step: LoweredStep) -> dict[str, object]:
    """Return the JSON object of a step file, forward passes included."""
    document: dict[str, object] = {
        "format": STEP_FORMAT,
        "version": VERSION,
        "graph": step.graph.to_dict(),
        "calls": [list(map(_call_to_json, calls)) for calls in step.calls],
        "buffers": {name: _to_json(buffer) for name, buffer in step.buffers.items()},
        **{key: [_to_json(tensor) for tensor in getattr(step, key)] for key in _TENSOR_LISTS},
        "loss": _to_json(step.loss),
        "values": {
            name: base64.b64encode(
                values.astype(step.buffers[name].type.file_dtype).tobytes()
            ).decode()
            for name, values in step.values.items()
        },
        "learning_rate": step.learning_rate,
        "versions": dict(step.versions),
    }
    if step.accumulate > 1:
        document["accumulate"] = step.accumulate
    if step.output is not None:
        document["output"] = _to_json(step.output)
    for key, forward_pass in (("inference", step.inference), ("evaluation", step.evaluation)):
        if forward_pass is not None:
            document[key] = _make_document(forward_pass)
    return document


_TENSOR_LISTS: Final = ("inputs", "states", "gradients")
"""Keys of lists of tensors in a step file, and attributes of a step."""


def _to_json(value: Ref | Condition | Buffer | NamedTensor) -> object:
    """Return an object of JSON, without fields that are None."""
    return _OBJECTS.dump_python(value, mode="json", exclude_none=True)


def _call_to_json(call: Call) -> dict[str, object]:
    """Return the JSON object of a call, which `_CallEntry` parses."""
    entry: dict[str, object] = {
        "kernel": call.kernel,
        "arguments": [_argument_to_json(argument) for argument in call.arguments],
    }
    if call.index_range is not None:
        entry["within"] = list(call.index_range)
    if call.condition is not None:
        entry["where"] = _to_json(call.condition)
    return entry


def _argument_to_json(argument: Argument) -> object:
    if isinstance(argument, ScaledLearningRate):
        return {"learning_rate": argument.factor}
    if isinstance(argument, float):
        return argument if math.isfinite(argument) else {"real": str(argument)}
    return _to_json(argument) if isinstance(argument, Ref) else argument


def load_step(path: str | Path) -> LoweredStep:
    """Read a ``*.step.json`` file; raise `InputError` if it cannot be read or is not valid.

    The instructions of nodes are estimated again, and updates are deferred as by `defer_updates`.
    """
    text = read_text(path)
    with convert_errors(InputError, str(path)):
        file = parse_file(_StepFile, text, kind="step", as_json=True)
        log_notes(file, path)
        file.graph = cast("dict[str, Any]", graph_of_step(vars(file)))
        return _step_from_json(file)


def _step_from_json(document: _StepFile, outer_values: Collection[str] = ()) -> LoweredStep:
    """Convert a document; `outer_values` are the buffers with values in enclosing steps."""
    step = LoweredStep(
        graph=Graph.from_dict(document.graph, source="graph"),
        calls=tuple(
            tuple(
                Call(entry.kernel, entry.arguments, entry.where, entry.within) for entry in entries
            )
            for entries in document.calls
        ),
        buffers=document.buffers,
        inputs=document.inputs,
        states=document.states,
        gradients=document.gradients,
        loss=document.loss,
        values={},
        learning_rate=document.learning_rate,
        accumulate=document.accumulate,
        versions=document.versions,
        output=document.output,
    )
    errors = list(_find_step_errors(step, document.values, outer_values))
    if errors:
        raise InputError(errors)
    values = {
        name: _decode_values(step, name, base64_text)
        for name, base64_text in document.values.items()
    }
    forward_passes: dict[str, LoweredStep] = {}
    values_so_far = dict(document.values)
    for key, forward_document in (
        ("inference", document.inference),
        ("evaluation", document.evaluation),
    ):
        if forward_document is not None:
            with convert_errors(InputError, key):
                forward_passes[key] = _step_from_json(forward_document, values_so_far)
            values_so_far |= forward_document.values
    return step.edit({}, values=values, **forward_passes)


def _find_step_errors(
    step: LoweredStep, values: Collection[str], outer_values: Collection[str]
) -> Iterator[str]:
    """Yield an error for each contradiction in a step, but not in its forward passes.

    `values` are the buffers with values; `outer_values` of the enclosing step and earlier passes.
    """
    for tensor in step.graph.tensors:
        name = tensor.replaces or tensor.name
        if name not in step.buffers:
            yield f"buffers: tensor {name!r} of the graph is missing"
        elif step.buffers[name].bytes != tensor.bytes:
            yield f"buffers: {name!r} has {step.buffers[name].bytes} B, its tensor {tensor.bytes} B"
    for name, buffer in step.buffers.items():
        if buffer.elements < 0:
            yield f"buffers: {name!r} has {buffer.elements} elements"
    yield from _find_tensor_errors(step)
    state_buffers = {ref.buffer for value in step.states for ref in value.pieces}
    state_buffers.update(
        tensor.name for node in step.graph.nodes if node.is_state for tensor in node.outputs
    )
    for name in sorted(state_buffers - set(values)):
        yield f"values: state {name!r} has no values"
    for name in sorted(set(values) - step.buffers.keys()):
        yield f"values: {name!r} is no buffer"
    constant_names = {ref.buffer for tensor in step.inputs for ref in tensor.pieces}
    constant_names |= {*values, *outer_values}
    constant_names.difference_update(tensor.name for tensor in step.graph.tensors)
    yield from _find_call_errors(step, constant_names)


def _find_call_errors(step: LoweredStep, constant_names: Collection[str]) -> Iterator[str]:
    """Yield an error if `calls` has not one list for each node, then the errors of all calls."""
    if len(step.calls) != len(step.graph.nodes):
        yield f"calls: expected {len(step.graph.nodes)} lists, one a node, got {len(step.calls)}"
    for node, calls in step.operations:
        writable_names = {tensor.replaces or tensor.name for tensor in node.outputs}
        writable_names.update(ref.buffer for ref in (step.output.pieces if step.output else ()))
        for call in calls:
            for error in _find_argument_errors(
                step, call, writable_names, {*constant_names, *writable_names, *node.inputs}
            ):
                yield f"calls: {node.name}: {call.kernel}: {error}"


def _find_tensor_errors(step: LoweredStep) -> Iterator[str]:
    """Yield errors of inputs, states, gradients, output and loss, each with its key in front."""
    tensors = [(key, value) for key in _TENSOR_LISTS for value in getattr(step, key)]
    for key, value in [*tensors, *([] if step.output is None else [("output", step.output)])]:
        for error in _find_named_tensor_errors(step, value):
            yield f"{key}: {value.name!r}: {error}"
    for error in _find_ref_errors(step, step.loss):
        yield f"loss: {error}"


def _find_named_tensor_errors(step: LoweredStep, tensor: NamedTensor) -> Iterator[str]:
    """Yield contradictions between a named tensor and its buffers in pieces, type, strides or size.

    A buffer's size counts from the offset of the piece. A single buffer may be larger than the
    tensor; several must add up to its size.
    """
    if not tensor.pieces or min((*tensor.shape, *(tensor.strides or ())), default=0) < 0:
        yield "expected pieces, and no negative sizes"
        return
    errors = [error for ref in tensor.pieces for error in _find_ref_errors(step, ref)]
    yield from errors
    if errors:
        return
    types = {step.buffers[ref.buffer].type for ref in tensor.pieces}
    if types != {tensor.type}:
        yield f"is of type {tensor.type}, its buffer of {', '.join(sorted(types))}"
    available_elements = [step.buffers[ref.buffer].elements - ref.offset for ref in tensor.pieces]
    if tensor.strides is not None:
        if len(tensor.strides) != len(tensor.shape) or len(tensor.pieces) > 1:
            yield f"expected {len(tensor.shape)} strides in one piece, got {len(tensor.strides)}"
        elif (
            n_elements := _count_span_elements(tensor.shape, tensor.strides)
        ) > available_elements[0]:
            yield f"reaches {n_elements} elements, its buffer has {available_elements[0]}"
    elif (n_elements := math.prod(tensor.shape)) > sum(available_elements):
        yield f"has {n_elements} elements, its buffers {sum(available_elements)}"
    elif len(tensor.pieces) > 1 and n_elements != sum(available_elements):
        yield f"has {n_elements} elements, its pieces {sum(available_elements)}"


def _count_span_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of buffer elements from the first to the last element; 0 if empty."""
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    return last + 1 if math.prod(shape) else 0


def _find_ref_errors(step: LoweredStep, ref: Ref) -> Iterator[str]:
    """Yield an error if a pointer is outside its buffer, or if the buffer is missing.

    `WORKSPACE` counts as missing. Element 0 of an empty buffer is valid.
    """
    if ref.buffer not in step.buffers:
        yield f"buffer {ref.buffer!r} is missing"
    elif not 0 <= ref.offset <= max(0, step.buffers[ref.buffer].elements - 1):
        n_elements = step.buffers[ref.buffer].elements
        yield f"element {ref.offset} of {ref.buffer!r}, which has {n_elements}"


def _find_argument_errors(
    step: LoweredStep, call: Call, writable_names: Collection[str], readable_names: Collection[str]
) -> Iterator[str]:
    """Yield the errors of a call; its node may write and read the named buffers."""
    if call.kernel not in kernel_names():
        yield "there is no such kernel"
        return
    yield from _find_condition_errors(step, call.condition, readable_names)
    if call.index_range is not None and CATALOGUE[call.kernel].index is None:
        yield "within: the kernel reads no indices"
    expected_types = [parameter.type for parameter in find_kernel(call.kernel).parameters]
    if len(expected_types) != len(call.arguments):
        yield f"expected {len(expected_types)} arguments, got {len(call.arguments)}"
        return
    for position, (parameter_type, argument) in enumerate(
        zip(expected_types, call.arguments, strict=True)
    ):
        if not _is_accepted(step, parameter_type, argument):
            yield (
                f"argument {position}: expected {parameter_type}, got {_format_argument(argument)}"
            )
        elif isinstance(argument, Ref) and argument.buffer != WORKSPACE:
            yield from _find_ref_errors(step, argument)
            if argument.buffer not in readable_names:
                yield f"{argument.buffer!r} is neither read nor made by its node"
            elif "const" not in parameter_type and argument.buffer not in writable_names:
                yield f"{argument.buffer!r} is written, and not made by its node"


def _find_condition_errors(
    step: LoweredStep, condition: Condition | None, readable_names: Collection[str]
) -> Iterator[str]:
    """Yield errors of a condition: its counter is outside the buffer, unreadable or not int32."""
    if condition is None:
        return
    name = condition.counter.buffer
    yield from _find_ref_errors(step, condition.counter)
    if name not in readable_names:
        yield f"where: {name!r} is not read by its node"
    elif name in step.buffers and step.buffers[name].type is not DataType.INT32:
        yield f"where: expected integers in {name!r}"


def _is_accepted(step: LoweredStep, parameter_type: str, argument: Argument) -> bool:
    """Return whether a kernel's parameter accepts an argument.

    Buffers that the step lacks are accepted, because `_find_ref_errors` reports them. The integer 0
    is a null pointer. Integers must be below 2**31 in magnitude.
    """
    is_pointer = parameter_type.endswith("*")
    if isinstance(argument, Ref):
        buffer = step.buffers.get(argument.buffer)
        is_int8_as_uint8 = (
            buffer is not None
            and buffer.type is DataType.INT8
            and parameter_type == "const uint8_t *"
        )
        return is_pointer and (
            buffer is None or buffer.type.c_name in parameter_type.split() or is_int8_as_uint8
        )
    if isinstance(argument, tuple):
        return parameter_type == "const int32_t *" and all(
            abs(number) < 2**31 for number in argument
        )
    if isinstance(argument, int):
        return argument == 0 if is_pointer else abs(argument) < 2**31
    return parameter_type == DataType.REAL.c_name


def _format_argument(argument: Argument) -> str:
    if isinstance(argument, Ref):
        return f"buffer {argument.buffer!r}"
    return f"{len(argument)} numbers" if isinstance(argument, tuple) else str(argument)


def _decode_values(step: LoweredStep, name: str, base64_text: str) -> np.ndarray:
    """Decode the elements of buffer `name` from base64 to a flat, read-only array."""
    buffer = step.buffers[name]
    try:
        content = base64.b64decode(base64_text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"values: {name!r} is not base64") from None
    if len(content) != buffer.bytes:
        raise InputError(f"values: {name!r} has {len(content)} B, its buffer {buffer.bytes} B")
    return np.frombuffer(content, dtype=buffer.type.file_dtype)
