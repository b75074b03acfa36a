"""Byte inputs, which a step converts by tables to real numbers, or at once to int8."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.errors import InputError, join_names
from poetmodel.graph import Node, Phase, Tensor
from poetmodel.lowered.calls import Buffer, Call, DataType, NamedTensor, Ref
from poetmodel.lowered.forms import ELEMENTWISE
from poetmodel.lowered.loops import join_rows, merge_dimensions
from poetmodel.lowered.step import LoweredNode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from poetmodel.lowered.loops import Numbers
    from poetmodel.lowered.step import LoweredStep

BYTE_VALUES: Final = 256
"""Number of values of a byte: the entries of a table row."""
LOOKUP_KERNEL: Final = "pm_lookup"
"""The kernel that converts bytes to real numbers by a table."""
INT8_LOOKUP_KERNEL: Final = "pm_q8_lookup"
"""The kernel that converts bytes to int8 by a table."""
QUANTIZE_KERNEL: Final = "pm_q8_quantize"
"""The kernel that quantizes real numbers to int8."""
_MIN_INT8, _MAX_INT8 = -128, 127
_IMAGE_RANK: Final = 3
"""Number of dimensions of a single image, whose first dimension is the channels."""
_MAX_PARAMETERS: Final = 2
"""Maximum number of parameters of a byte input: a scale and an offset."""
_TYPES: Final = {str(kind): kind for kind in (DataType.UINT8, DataType.INT8)}
"""Possible types of byte inputs."""


def find_tables(step: LoweredStep, tensor: NamedTensor) -> tuple[str, ...]:
    """Return the buffers of tables that convert an input, by first use, not in forward passes."""
    tables: dict[str, None] = {}
    for call in (call for calls in step.calls for call in calls):
        if call.kernel in (LOOKUP_KERNEL, INT8_LOOKUP_KERNEL):
            is_of_tensor = call["x"].buffer == tensor.pieces[0].buffer
            tables.update({call["table"].buffer: None} if is_of_tensor else {})
    return tuple(tables)


@dataclass(frozen=True, slots=True)
class ByteInput:
    """Conversion of an input of bytes to real numbers.

    Each byte, as an integer, is multiplied by a scale, and an offset is added, in single precision.
    """

    type: DataType
    scale: tuple[float, ...] = (1.0,)
    """One value for all channels, or one for each."""
    offset: tuple[float, ...] = (0.0,)
    """One value for all channels, or one for each."""

    @classmethod
    def parse(cls, text: str, *, field: str) -> ByteInput:
        """Parse ``TYPE[:SCALE[:OFFSET]]``; `field` is the prefix of errors.

        TYPE is ``uint8`` or ``int8``. SCALE (1) and OFFSET (0) are each one finite number, or one
        for each channel: ``uint8:0.01,0.02,0.01:-1.5``.
        """
        type_name, *parameter_texts = str(text).split(":")
        try:
            parameters = [
                tuple(map(float, channel_values.split(","))) for channel_values in parameter_texts
            ]
        except ValueError:
            parameters = [(math.nan,)]
        is_finite = all(
            math.isfinite(number) for channel_values in parameters for number in channel_values
        )
        channel_counts = {len(channel_values) for channel_values in parameters} - {1}
        if (
            type_name not in _TYPES
            or len(parameter_texts) > _MAX_PARAMETERS
            or len(channel_counts) > 1
            or not is_finite
        ):
            raise InputError(
                f"{field}: expected {' or '.join(_TYPES)}, a scale and an offset, each one number "
                f"or one a channel, such as uint8:0.0039 or uint8:0.01,0.02,0.01:-1.5, got {text!r}"
            )
        return cls(_TYPES[type_name], *parameters)

    def make_table(self) -> np.ndarray:
        """Return ``byte * scale + offset`` for each byte, as float32 of shape (1 or channels, 256).

        Columns are bytes as unsigned integers, also if their type is int8.
        """
        integers = np.arange(BYTE_VALUES, dtype="u1").view(self.type.file_dtype).astype(np.float32)
        scale, offset = (
            np.array(numbers, np.float32)[:, None] for numbers in (self.scale, self.offset)
        )
        table_rows: np.ndarray = integers * scale + offset
        return table_rows


def parse_byte_inputs(texts: Mapping[str, str]) -> dict[str, ByteInput]:
    """Parse the text of each byte input, by name; raise `InputError` for an invalid one."""
    if not isinstance(texts, Mapping):
        raise InputError(f"byte_inputs: expected texts by the names of inputs, got {texts!r}")
    return {
        name: ByteInput.parse(text, field=f"byte_inputs: {name}") for name, text in texts.items()
    }


def with_byte_inputs(step: LoweredStep, texts: Mapping[str, str]) -> LoweredStep:
    """Return a step in which the inputs named in `texts` are bytes, also in its forward passes.

    A node in front of the first reader converts each input, by a table that is a new constant of
    the step: to int8 if the reader only quantizes (`fuse_byte_quantization`), else to real numbers.
    Raises `InputError` for a text that is invalid or does not fit its input.
    """
    for name, byte_input in parse_byte_inputs(texts).items():
        field = f"byte_inputs: {name}"
        real_names = [tensor.name for tensor in step.inputs if tensor.type is DataType.REAL]
        if name not in real_names:
            raise InputError(
                f"{field}: expected one of the inputs of real numbers: {join_names(real_names)}"
            )
        table_rows = byte_input.make_table()
        table = _unused_name(f"{name} table", step.buffers)
        add_lookup = partial(
            _add_lookup, name=name, byte_type=byte_input.type, table=table, channels=len(table_rows)
        )
        converted_step = step.map_passes(add_lookup)
        values = {**step.values, table: table_rows.flatten()}
        step = replace(converted_step, values=values)
    return fuse_byte_quantization(step)


def _unused_name(name: str, used_names: Collection[str]) -> str:
    """Return the first of `name`, ``name#2``, ``name#3``, ... that is not in `used_names`."""
    names = chain([name], (f"{name}#{number}" for number in count(2)))
    return next(candidate for candidate in names if candidate not in used_names)


def _add_lookup(
    step: LoweredStep, name: str, byte_type: DataType, table: str, channels: int
) -> LoweredStep:
    """Return a step in which input `name` has bytes, converted by a node.

    The caller adds the values of buffer `table`. Returns `step` itself without such an input.
    """
    byte_tensor = next((tensor for tensor in step.inputs if tensor.name == name), None)
    if byte_tensor is None:
        return step
    byte_buffer = byte_tensor.pieces[0].buffer
    shape, elements = byte_tensor.shape, step.buffers[byte_buffer].elements
    real_buffer = _unused_name("lookup", {*step.buffers, *(node.name for node in step.graph.nodes)})
    call = Call.by_name(
        LOOKUP_KERNEL,
        out=Ref(real_buffer),
        x=Ref(byte_buffer),
        table=Ref(table),
        shape=_make_lookup_shape(name, shape, channels),
    )
    lookup_node = Node(
        name=real_buffer,
        op="lookup",
        phase=Phase.FORWARD,
        outputs=(Tensor(name=real_buffer, bytes=elements * DataType.REAL.itemsize),),
        flops=elements,
    )
    replacements: dict[int, list[LoweredNode]] = {}
    for k, (node, calls) in enumerate(step.operations):
        if any(byte_buffer in one.buffers for one in calls):
            lookup = [] if replacements else [LoweredNode(lookup_node, (call,))]
            reader = replace(node, inputs=(*node.inputs, real_buffer))
            real_calls = tuple(one.with_buffers({byte_buffer: real_buffer}) for one in calls)
            replacements[k] = [*lookup, LoweredNode(reader, real_calls)]
    buffers = {
        **step.buffers,
        byte_buffer: Buffer(elements=elements, type=byte_type),
        real_buffer: Buffer(elements=elements, type=DataType.REAL),
        table: Buffer(elements=channels * BYTE_VALUES, type=DataType.REAL),
    }
    inputs = tuple(
        replace(tensor, type=byte_type) if tensor is byte_tensor else tensor
        for tensor in step.inputs
    )
    return step.edit(replacements, buffers=buffers, inputs=inputs)


def _make_lookup_shape(name: str, shape: Numbers, channels: int) -> Numbers:
    """Return the shape table of a lookup, with the strides of output, input and lookup table.

    Channels are the first dimension of a vector, the first or else second of three dimensions, and
    otherwise the second dimension.
    """
    candidate_dimensions = {1: (0,), _IMAGE_RANK: (0, 1)}.get(len(shape), (1,))
    fitting_dimensions = (
        candidate
        for candidate in candidate_dimensions
        if candidate < len(shape) and channels in (1, shape[candidate])
    )
    dimension = next(fitting_dimensions, None if channels > 1 else 0)
    if dimension is None:
        raise InputError(
            f"byte_inputs: {name}: expected one number, or one for each channel, the "
            f"{'first' if 0 in candidate_dimensions else 'second'} dimension of "
            f"{list(shape)}; got {channels}"
        )
    inner_size, outer_size = math.prod(shape[dimension + 1 :]), math.prod(shape[:dimension])
    sizes = (inner_size, math.prod(shape[dimension : dimension + 1]), outer_size)
    strides = (1, inner_size, math.prod(shape[dimension:]))
    loops = merge_dimensions((sizes, strides, strides, (0, BYTE_VALUES if channels > 1 else 0, 0)))
    return join_rows(loops or [[1, 0, 0, 0]])


def fuse_byte_quantization(step: LoweredStep) -> LoweredStep:
    """Return a step that maps byte inputs to int8 by one lookup if possible, in all its passes.

    Results have the same bits; the tensor of real numbers between both nodes is removed.
    """
    fused_step = _fuse_pairs(step, step.values, {})
    passes: list[LoweredStep | None] = []
    read_names: set[str] = set()
    for forward_pass in (step.inference, step.evaluation):
        if forward_pass is None:
            passes.append(None)
            continue
        fused_pass = _fuse_pairs(forward_pass, step.values, fused_step.values)
        own_values = {
            name: array
            for name, array in fused_pass.values.items()
            if name not in fused_step.values
        }
        passes.append(replace(fused_pass, values=own_values))
        read_names |= {
            name for calls in fused_pass.calls for call in calls for name in call.buffers
        }
    inference, evaluation = passes
    # Forward passes may read old tables that the fused training step no longer reads.
    kept_names = (step.values.keys() - fused_step.values.keys()) & read_names
    return replace(
        fused_step,
        inference=inference,
        evaluation=evaluation,
        buffers={**fused_step.buffers, **{name: step.buffers[name] for name in kept_names}},
        values={**fused_step.values, **{name: step.values[name] for name in kept_names}},
    )


def _fuse_pairs(
    step: LoweredStep, tables: Mapping[str, np.ndarray], shared_values: Mapping[str, np.ndarray]
) -> LoweredStep:
    """Return the training step, or a forward pass, with all `_find_fusible_pairs` fused."""
    while (pair := next(_find_fusible_pairs(step), None)) is not None:
        step = _fuse_pair(step, *pair, tables, shared_values)
    return step


def _find_fusible_pairs(step: LoweredStep) -> Iterator[tuple[int, int, dict[str, int]]]:
    """Yield (lookup node, quantizing node, `_make_fused_arguments`) of fusible pairs."""
    graph = step.graph
    for k, calls in enumerate(step.calls):
        if len(calls) != 1 or calls[0].kernel != LOOKUP_KERNEL:
            continue
        out = calls[0]["out"].buffer
        readers = [index for index, node in enumerate(graph.nodes) if out in node.inputs]
        if len(readers) != 1 or out in step.returned_buffers:
            continue
        (reader,) = readers
        reader_calls = step.calls[reader]
        if (
            len(reader_calls) != 1
            or reader_calls[0].kernel != QUANTIZE_KERNEL
            or reader_calls[0]["x"] != Ref(out)
        ):
            continue
        fused_arguments = _make_fused_arguments(calls[0], reader_calls[0])
        if fused_arguments is not None:
            yield k, reader, fused_arguments


def _make_fused_arguments(lookup_call: Call, quantize_call: Call) -> dict[str, int] | None:
    """Return the arguments of the fused kernel, strides in elements; None if it cannot do both."""
    batch, channels, plane = (quantize_call[name] for name in ("batch", "channels", "plane"))
    loops = ELEMENTWISE.read(lookup_call)
    elements = math.prod((batch, channels, plane))
    if any(ref.offset for ref in loops.refs) or math.prod(loops.sizes) != elements:
        return None
    grid = np.indices(loops.sizes).reshape(len(loops.sizes), -1)
    out, x, table = (np.array(loops.strides_of(name)) @ grid for name in ("out", "x", "table"))
    if not np.array_equal(np.sort(out), np.arange(elements)):
        return None
    order = np.argsort(out)
    x_strides, table_strides = (
        _find_strides(positions[order].reshape(batch, channels, plane)) for positions in (x, table)
    )
    if x_strides is None or table_strides is None or table_strides[0] or table_strides[2]:
        return None
    names = ("image_step", "channel_step", "element_step")
    return {
        "batch": batch,
        "channels": channels,
        "plane": plane,
        **dict(zip(names, x_strides, strict=True)),
        "table_step": table_strides[1],
    }


def _find_strides(positions: np.ndarray) -> list[int] | None:
    """Return the strides that reach positions from 0 on; None if no constant strides do."""
    strides = [
        int(np.diff(positions, axis=axis).flat[0]) if size > 1 else 0
        for axis, size in enumerate(positions.shape)
    ]
    reached = np.tensordot(strides, np.indices(positions.shape), 1)
    return strides if np.array_equal(reached, positions) else None


def _fuse_pair(
    step: LoweredStep,
    k: int,
    reader: int,
    fused_arguments: Mapping[str, int],
    tables: Mapping[str, np.ndarray],
    shared_values: Mapping[str, np.ndarray],
) -> LoweredStep:
    """Return a step in which one node with a new table replaces nodes `k` and `reader`.

    The new node has the name and the position of `reader`, and the FLOP of `k`. The old table is
    removed if no other call reads it. `tables` and `shared_values` are those of `_fuse_pairs`.
    """
    graph = step.graph
    (lookup_call,), (quantize_call,) = step.calls[k], step.calls[reader]
    real_ref, byte_ref, table_ref = (lookup_call[name] for name in ("out", "x", "table"))
    int8_ref = quantize_call["out"]
    inverse_scale, zero_point = quantize_call["inverse"], quantize_call["zero"]
    rows = np.float32({**tables, **step.values}[table_ref.buffer]) * np.float32(inverse_scale)
    # The portable ``pm_q8_rint`` in C limits the magnitude to 1024, too, and rounds NaN to 0.
    rounded_rows = np.nan_to_num(np.rint(rows), nan=0.0, posinf=1024.0, neginf=-1024.0)
    int8_rows = np.clip(
        np.clip(rounded_rows, -1024, 1024) + zero_point, _MIN_INT8, _MAX_INT8
    ).astype("i1")
    name = f"{table_ref.buffer} as int8"
    while name in step.buffers or not np.array_equal(shared_values.get(name, int8_rows), int8_rows):
        name += "'"
    call = Call.by_name(
        INT8_LOOKUP_KERNEL, out=int8_ref, x=byte_ref, table=Ref(name), **fused_arguments
    )
    lookup_node, quantize_node = graph.nodes[k], graph.nodes[reader]
    other_inputs = tuple(i for i in quantize_node.inputs if i != real_ref.buffer)
    output = Tensor(name=int8_ref.buffer, bytes=step.buffers[int8_ref.buffer].bytes)
    fused_node = replace(
        quantize_node,
        inputs=(*lookup_node.inputs, *other_inputs),
        outputs=(output,),
        flops=lookup_node.flops,
        in_place=(),
    )
    read_names = {
        name
        for index, calls in enumerate(step.calls)
        if index not in (k, reader)
        for other in calls
        for name in other.buffers
    }
    removed_names = {real_ref.buffer} | ({table_ref.buffer} - read_names)
    buffers = {
        buffer_name: buffer
        for buffer_name, buffer in step.buffers.items()
        if buffer_name not in removed_names
    }
    buffers[name] = Buffer(elements=int8_rows.size, type=DataType.INT8)
    values = {
        buffer_name: array
        for buffer_name, array in step.values.items()
        if buffer_name not in removed_names
    } | {name: int8_rows}
    replacements = {k: [], reader: [LoweredNode(fused_node, (call,))]}
    return step.edit(replacements, buffers=buffers, values=values)
