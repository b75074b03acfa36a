"""Inputs of bytes in front of an int8 front: one table from bytes to int8, without real numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.graph import Tensor
from poetmodel.lowered.calls import Buffer, Call, DataType, Ref
from poetmodel.lowered.kernels import parameter_names
from poetmodel.lowered.loops import call_refs, table_columns
from poetmodel.lowered.tables import CODES, LOOKUP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.lowered.step import LoweredStep

QUANTIZE: Final = "pm_q8_quantize"
_LOWEST, _HIGHEST = -128, 127


def with_codes(step: LoweredStep) -> LoweredStep:
    """Return a step in which bytes become int8 at once, and so do those of its forward passes.

    A lookup whose only reader quantizes its real numbers, and that reader, become one node with a
    table of the quantized numbers. It has the bytes of both, and no tensor of real numbers.
    """
    inference, evaluation = (
        None if part is None else with_codes(part) for part in (step.inference, step.evaluation)
    )
    step = replace(step, inference=inference, evaluation=evaluation)
    while (pair := next(_pairs(step), None)) is not None:
        step = _fused(step, *pair)
    return step


def _pairs(step: LoweredStep) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield a node that looks bytes up, the one that quantizes them, and numbers of the kernel."""
    graph = step.graph
    for k, calls in enumerate(step.calls):
        if len(calls) != 1 or calls[0].kernel != LOOKUP:
            continue
        out = call_refs(calls[0])[0].buffer
        readers = [n for n, node in enumerate(graph.nodes) if out in node.inputs]
        if len(readers) != 1 or out in step.returned_buffers:
            continue
        (reader,) = readers
        its = step.calls[reader]
        if len(its) != 1 or its[0].kernel != QUANTIZE or call_refs(its[0])[1] != Ref(out):
            continue
        numbers = _numbers(calls[0], its[0])
        if numbers is not None:
            yield k, reader, numbers


def _given(call: Call) -> dict[str, Any]:
    return dict(zip(parameter_names(call.kernel), call.arguments, strict=True))


def _numbers(lookup: Call, quantize: Call) -> tuple[int, ...] | None:
    """Return the numbers that the kernel takes: images, channels, elements of a plane, and steps.

    None if the bytes of an image do not lie in regular steps.
    """
    given = _given(quantize)
    batch, channels, plane = (given[name] for name in ("batch", "channels", "plane"))
    refs, (sizes, *steps) = call_refs(lookup), table_columns(lookup.arguments[-1])
    elements = int(np.prod([batch, channels, plane]))
    if any(ref.offset for ref in refs) or int(np.prod(sizes)) != elements:
        return None
    grid = np.indices(tuple(sizes)).reshape(len(sizes), -1)
    out, x, table = (np.array(step) @ grid for step in steps)
    if not np.array_equal(np.sort(out), np.arange(elements)):
        return None
    order = np.argsort(out)
    lies = [array[order].reshape(batch, channels, plane) for array in (x, table)]
    index = np.indices((batch, channels, plane))
    rows = []
    for array in lies:
        if array[0, 0, 0]:
            return None
        own = [int(array[p]) if all(n > i for n, i in zip(array.shape, p, strict=True)) else 0
               for p in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]  # fmt: skip
        if not np.array_equal(np.tensordot(own, index, 1), array):
            return None
        rows.append(own)
    (image_step, channel_step, element_step), (own_image, table_step, own_element) = rows
    if own_image or own_element:
        return None
    return batch, channels, plane, image_step, channel_step, element_step, table_step


def _fused(step: LoweredStep, k: int, reader: int, numbers: tuple[int, ...]) -> LoweredStep:
    """Return a step with one node for a lookup and the quantization of its result."""
    graph = step.graph
    (lookup,), (quantize,) = step.calls[k], step.calls[reader]
    real, x, table = call_refs(lookup)
    out, *_ = call_refs(quantize)
    given = _given(quantize)
    inverse, zero = given["inverse"], given["zero"]
    rows = np.float32(step.values[table.buffer]) * np.float32(inverse)
    found = np.nan_to_num(np.rint(rows), nan=0.0, posinf=1024.0, neginf=-1024.0)
    codes = np.clip(np.clip(found, -1024, 1024) + zero, _LOWEST, _HIGHEST).astype("i1")
    name = f"{table.buffer} as int8"
    while name in step.buffers:
        name += "'"
    call = Call(CODES, (out, x, Ref(name), *numbers))
    old, node = graph.nodes[k], graph.nodes[reader]
    own = tuple(i for i in node.inputs if i != real.buffer)
    output = Tensor(name=out.buffer, bytes=step.buffers[out.buffer].bytes)
    merged = replace(
        node, inputs=(*old.inputs, *own), outputs=(output,), flops=old.flops, in_place=()
    )
    nodes = [merged if n == reader else each for n, each in enumerate(graph.nodes) if n != k]
    calls = [(call,) if n == reader else each for n, each in enumerate(step.calls) if n != k]
    read = {name for its in calls for each in its for name in each.buffers}
    gone = {real.buffer} | ({table.buffer} - read)
    buffers = {n: buffer for n, buffer in step.buffers.items() if n not in gone}
    buffers[name] = Buffer(elements=codes.size, type=DataType.INT8)
    values = {n: array for n, array in step.values.items() if n not in gone} | {name: codes}
    return step.with_nodes(nodes, calls, buffers=buffers, values=values)
