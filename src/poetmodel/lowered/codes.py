"""Fuse byte lookups and int8 quantization into one table, which maps bytes to int8."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.graph import Tensor
from poetmodel.lowered.calls import Buffer, Call, DataType, Ref
from poetmodel.lowered.loops import table_columns
from poetmodel.lowered.step import LoweredNode
from poetmodel.lowered.tables import INT8_LOOKUP_KERNEL, LOOKUP_KERNEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from poetmodel.lowered.step import LoweredStep

QUANTIZE_KERNEL: Final = "pm_q8_quantize"
"""The kernel that quantizes real numbers to int8."""
_MIN_INT8, _MAX_INT8 = -128, 127


def fuse_byte_quantization(step: LoweredStep) -> LoweredStep:
    """Return a step that maps byte inputs to int8 by one lookup if possible, in all its passes.

    Results have the same bits; the tensor of real numbers between lookup and quantization goes.
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
    refs, (sizes, *lookup_strides) = (
        lookup_call.refs,
        table_columns(lookup_call["shape"]),
    )
    elements = int(np.prod([batch, channels, plane]))
    if any(ref.offset for ref in refs) or int(np.prod(sizes)) != elements:
        return None
    grid = np.indices(tuple(sizes)).reshape(len(sizes), -1)
    out, x, table = (np.array(dimension_strides) @ grid for dimension_strides in lookup_strides)
    if not np.array_equal(np.sort(out), np.arange(elements)):
        return None
    order = np.argsort(out)
    positions = [
        element_positions[order].reshape(batch, channels, plane) for element_positions in (x, table)
    ]
    index = np.indices((batch, channels, plane))
    strides_of_tensors = []
    for element_positions in positions:
        if element_positions[0, 0, 0]:
            return None
        strides = [
            int(element_positions[neighbour])
            if all(
                size > step for size, step in zip(element_positions.shape, neighbour, strict=True)
            )
            else 0
            for neighbour in ((1, 0, 0), (0, 1, 0), (0, 0, 1))
        ]
        if not np.array_equal(np.tensordot(strides, index, 1), element_positions):
            return None
        strides_of_tensors.append(strides)
    (
        (image_stride, channel_stride, element_stride),
        (table_image_stride, table_channel_stride, table_element_stride),
    ) = strides_of_tensors
    if table_image_stride or table_element_stride:
        return None
    return {
        "batch": batch,
        "channels": channels,
        "plane": plane,
        "image_step": image_stride,
        "channel_step": channel_stride,
        "element_step": element_stride,
        "table_step": table_channel_stride,
    }


def _fuse_pair(
    step: LoweredStep,
    k: int,
    reader: int,
    fused_arguments: Mapping[str, int],
    tables: Mapping[str, np.ndarray],
    shared_values: Mapping[str, np.ndarray],
) -> LoweredStep:
    """Return a step in which one node with a new table replaces nodes `k` and `reader`.

    The new node has the name and the position of `reader`, and the FLOP of `k`. The old table goes
    if no other call reads it. `tables` and `shared_values` are those of `_fuse_pairs`.
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
