"""Byte inputs, which the step converts to real numbers by tables."""

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
from poetmodel.lowered.loops import merge_dimensions
from poetmodel.lowered.step import LoweredNode

if TYPE_CHECKING:
    from collections.abc import Collection

    from poetmodel.lowered.loops import Numbers
    from poetmodel.lowered.step import LoweredStep

BYTE_VALUES: Final = 256
"""Number of values of a byte: the entries of a table row."""
LOOKUP_KERNEL: Final = "pm_lookup"
"""The kernel that converts bytes to real numbers by a table."""
INT8_LOOKUP_KERNEL: Final = "pm_q8_lookup"
"""The kernel that converts bytes to int8 by a table."""
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
            _, x, table = call.refs
            tables.update({table.buffer: None} if x.buffer == tensor.pieces[0].buffer else {})
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

    A node in front of the first reader converts each input to real numbers, by a table that is a
    new constant of the step. Raises `InputError` for a text that is invalid or does not fit its
    input.
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
    return step


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
    call = Call(
        LOOKUP_KERNEL,
        (Ref(real_buffer), Ref(byte_buffer), Ref(table), _make_lookup_shape(name, shape, channels)),
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
    loops = loops or [[1, 0, 0, 0]]
    return (len(loops), *(number for loop in loops for number in loop))
