"""A PyTorch model becomes a step that can be exported: captured, rewritten, lowered to kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from poetmodel.errors import InputError, shown
from poetmodel.export.fusing import fused
from poetmodel.export.masks import masked
from poetmodel.export.step import Buffer, DataType, LoweredStep, NamedTensor
from poetmodel.export.unrolled import unrolled
from poetmodel.graph import Graph, Node, Phase, Tensor
from poetmodel.torch.capturing.inputs import apart, refuse
from poetmodel.torch.capturing.joint import capture
from poetmodel.torch.capturing.replay import call, replay
from poetmodel.torch.capturing.signature import InputKind, Joint, OutputKind, in_module
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.lowering.operands import (
    Look,
    Lowering,
    contiguous_strides,
    data_type,
    lowering_of,
)
from poetmodel.torch.lowering.rewrites import divide_loss, split_convolutions
from poetmodel.torch.step.optimizers import OptimizerSlot
from poetmodel.torch.step.training_units import TrainingUnits
from poetmodel.torch.step.updates import with_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from torch import fx

    from poetmodel.torch.capturing.signature import InputSpec
    from poetmodel.torch.step.units import TensorStorage, Unit

_TANGENT = "@tangent"
"""The buffer of the gradient that the backward pass starts from: a constant 1."""


def lower(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Sequence[Any],
    *,
    name: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    masks: bool = True,
) -> LoweredStep:
    """Capture a training step and lower it to calls of kernels; parameters as for `trace`.

    With `accumulate` the step sums gradients of so many batches before it updates, each of the loss
    divided by that number. Without `masks` it saves for its backward pass what PyTorch saves, time
    steps of recurrent layers in stacks: for comparisons.

    Raises
    ------
    CaptureError
        If the step cannot be captured, or an operator has no kernel: names each, and its module.
    """
    check_accumulate(accumulate, optimizer)
    with sdpa_kernel(SDPBackend.MATH):
        joint = capture(model, loss_fn, apart(inputs), name=name)
    refuse(joint.name, _unguarded(joint))
    split_convolutions(joint)
    if accumulate > 1:
        divide_loss(joint, accumulate)
    if optimizer is not None:
        joint = with_optimizer(
            joint, optimizer, clip_grad_norm=clip_grad_norm, accumulate=accumulate
        )
    step = replace(Lowered(joint).step(), accumulate=accumulate)
    return masked(unrolled(step)) if masks else step


def check_accumulate(number: object, optimizer: object | None) -> None:
    """Raise `InputError` unless a step can update after so many batches."""
    if type(number) is not int or number < 1:
        raise InputError(f"accumulate: expected a number of batches from 1, got {shown(number)}")
    if number > 1 and optimizer is None:
        raise InputError(
            "accumulate: there is no optimizer to wait for; give one, or sum the gradients that "
            "the step hands out"
        )


class Lowered:
    """A captured step on its way to one that can be exported."""

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.parts = TrainingUnits(joint)
        self.arguments = {argument.node: argument for argument in joint.arguments}
        self.looks: dict[fx.Node, Look] = {}
        """Lowerings of every operation that returns one tensor, and of the step's findings."""
        self.names = {storage.index: storage.name for storage in self.parts.storages}
        self.replaced = {s.replaces for s in self.parts.storages if s.replaces is not None}
        self.unread: dict[str, Buffer] = {}
        """The inputs that nothing reads."""
        self.rates = self._rates()
        self._look_at_arguments()
        replay(joint, self._record)

    def step(self) -> LoweredStep:
        """Return the step; all operators without a kernel are refused at once."""
        units = [unit for unit in self.parts.units if not unit.is_source]
        refuse(self.joint.name, _unguarded(self.joint))
        refuse(self.joint.name, _missing(units))
        lowered = {unit.index: self._lower(unit) for unit in units}
        graph = self._graph(lowered)
        calls = tuple(
            tuple(lowered[unit.index].calls) if unit.index in lowered else ()
            for unit in self.parts.units
            if self._is_node(unit)
        )
        trains = self.joint.optimizer is not None
        kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.MOMENT)
        loss = next(r for r in self.joint.results if r.kind is OutputKind.LOSS)
        captured = LoweredStep(
            graph=graph,
            calls=calls,
            buffers=dict(self._buffers()),
            inputs=tuple(self._seen(self.joint.of(InputKind.USER_INPUT))),
            states=tuple(self._seen(a for kind in kinds for a in self.joint.of(kind))),
            gradients=() if trains else tuple(self._gradients()),
            loss=self.looks[loss.node].ref,
            values=dict(self._values()),
            learning_rate=self._first_rate(),
            versions={"torch": torch.__version__},
        )
        return fused(captured.with_nodes(graph.nodes, calls))

    # -- what tensors are there --------------------------------------------------------------------

    def _rates(self) -> dict[fx.Node, float]:
        """Return the learning rate of each group of parameters, relative to that of the first."""
        rates = {a.node: float(self.joint.value(a)) for a in self.joint.of(InputKind.LEARNING_RATE)}
        first = next(iter(rates.values()), 1.0)
        if len(set(rates.values())) > 1 and first == 0:
            raise CaptureError(
                f"{self.joint.name}: optimizer: expected a learning rate above 0 in its first "
                "group, of which those of the others are multiples"
            )
        return {node: rate / first if rate != first else 1.0 for node, rate in rates.items()}

    def _first_rate(self) -> float | None:
        rates = self.joint.of(InputKind.LEARNING_RATE)
        return float(self.joint.value(rates[0])) if rates else None

    def _look_at_arguments(self) -> None:
        for argument in self.joint.arguments:
            value = self.joint.value(argument)
            if argument.kind is InputKind.LEARNING_RATE or not isinstance(value, torch.Tensor):
                continue
            if argument.kind is InputKind.TANGENT:
                strides = (0,) * value.ndim
                shape = tuple(value.shape)
                self.looks[argument.node] = Look(
                    buffer=_TANGENT, offset=0, shape=shape, strides=strides, type=DataType.REAL
                )
            elif argument.node in self.parts.direct:
                self.looks[argument.node] = self._look(argument.node, value, argument.name)
            elif argument.kind is InputKind.USER_INPUT:
                self.looks[argument.node] = self._unread(argument, value)

    def _unread(self, argument: InputSpec, value: torch.Tensor) -> Look:
        """Return the look of an input that nothing reads: it has its place among them."""
        kind = self._type(value.dtype, argument.name)
        self.unread[argument.name] = Buffer(elements=value.numel(), type=kind)
        shape = tuple(value.shape)
        strides = contiguous_strides(shape)
        return Look(buffer=argument.name, offset=0, shape=shape, strides=strides, type=kind)

    def _record(self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        value = call(node, arguments, keywords)
        if isinstance(value, torch.Tensor):
            self.looks[node] = self._look(node, value, f"{node.target}{in_module(node)}")
        return value

    def _look(self, node: fx.Node, value: torch.Tensor, what: str) -> Look:
        """Return the elements, and their storage, of a value of the captured graph."""
        numbers = self.parts.reading((node,)).storages
        buffer = self.names[numbers[0]] if numbers else _TANGENT
        return Look(
            buffer=buffer,
            offset=value.storage_offset() if numbers else 0,
            shape=tuple(value.shape),
            strides=tuple(value.stride()),
            type=self._type(value.dtype, what),
        )

    def _type(self, dtype: torch.dtype, what: str) -> DataType:
        kind = data_type(dtype)
        if kind is None:
            raise CaptureError(
                f"{self.joint.name}: {what} is of type {dtype}; expected torch.float32, "
                "torch.int64, torch.int32 or torch.bool: exported code has no other types"
            )
        return kind

    def _buffers(self) -> Iterator[tuple[str, Buffer]]:
        for storage in self.parts.storages:
            if storage.replaces is None and not self._is_rate(storage):
                yield storage.name, self._buffer(storage)
        yield from self.unread.items()
        yield _TANGENT, Buffer(elements=1, type=DataType.REAL)

    def _buffer(self, storage: TensorStorage) -> Buffer:
        types = {layout.dtype for layout in storage.layouts}
        if len(types) > 1:
            raise CaptureError(
                f"{self.joint.name}: {storage.name} is read as {len(types)} types, which exported "
                "code does not do; leave view(dtype) out"
            )
        (dtype,) = types
        return Buffer(
            elements=storage.bytes // dtype.itemsize, type=self._type(dtype, storage.name)
        )

    def _is_rate(self, storage: TensorStorage) -> bool:
        return self.parts.units[storage.unit].node in self.rates

    def _seen(self, arguments: Iterator[InputSpec] | Sequence[InputSpec]) -> Iterator[NamedTensor]:
        """Yield what users see by name; tensors with several names have the first one."""
        seen: set[str] = set()
        for argument in arguments:
            look = self.looks.get(argument.node)
            if look is None or look.buffer in seen:
                continue
            seen.add(look.buffer)
            if look.type is DataType.UINT8 and argument.kind is InputKind.USER_INPUT:
                raise CaptureError(
                    f"{self.joint.name}: {argument.name} holds truth values or bytes; expected "
                    "float32 or integers, which a step takes as pm_real and int32_t"
                )
            if not look.is_contiguous:
                raise CaptureError(
                    f"{self.joint.name}: {argument.name} has strides {look.strides}; expected a "
                    "contiguous tensor, such as .contiguous() returns"
                )
            yield NamedTensor(
                name=argument.name, shape=look.shape, type=look.type, pieces=(look.ref,)
            )

    def _gradients(self) -> Iterator[NamedTensor]:
        """Yield the gradients of parameters, in the order of the parameters."""
        order = {a.node: k for k, a in enumerate(self.joint.arguments)}
        gradients = [
            (order[result.target.node], result)
            for result in self.joint.results
            if result.kind is OutputKind.GRADIENT
            and result.target is not None
            and result.target.kind is InputKind.PARAMETER
        ]
        for _, result in sorted(gradients, key=lambda pair: pair[0]):
            look = self.looks[result.node]
            name = "" if result.target is None else result.target.name
            strides = None if look.is_contiguous else look.strides
            yield NamedTensor(
                name=name, shape=look.shape, type=look.type, pieces=(look.ref,), strides=strides
            )

    def _values(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the elements of all that is there before the step, but the inputs."""
        done: set[str] = set()
        for argument in self.joint.arguments:
            look = self.looks.get(argument.node)
            if look is None or look.buffer in done or argument.kind is InputKind.USER_INPUT:
                continue
            done.add(look.buffer)
            if argument.kind is InputKind.TANGENT:
                yield _TANGENT, torch.ones(1).numpy()
                continue
            value = self.joint.value(argument).detach()
            whole = value.as_strided(
                (value.untyped_storage().nbytes() // value.itemsize,), (1,), storage_offset=0
            )
            if isinstance(argument.held, OptimizerSlot) and argument.held.begins_with_gradient:
                whole = torch.full_like(whole, math.nan)
            yield look.buffer, _array(whole, look.type, argument.name)

    # -- the graph ---------------------------------------------------------------------------------

    def _is_node(self, unit: Unit) -> bool:
        """Return whether a unit is a node of the exported graph: no input, and no constant."""
        if unit.phase is Phase.INPUT:
            return False
        return unit.phase is not Phase.STATE or unit.storages[0] in self.replaced

    def _graph(self, lowered: Mapping[int, Lowering]) -> Graph:
        units = [unit for unit in self.parts.units if self._is_node(unit)]
        there = {self.names[number] for unit in units for number in unit.storages}
        first = next((v for v in self.joint.inputs if getattr(v, "ndim", 0)), None)
        return Graph(
            name=self.joint.name,
            nodes=tuple(self._node(unit, lowered.get(unit.index), there) for unit in units),
            batch_size=1 if first is None else max(1, int(first.shape[0])),
            dtype="float32",
            kernels="exported",
        )

    def _node(self, unit: Unit, lowering: Lowering | None, there: set[str]) -> Node:
        read = self._read(lowering)
        outputs = {self.names[number] for number in unit.storages}
        return Node(
            name=unit.name,
            op=unit.op,
            phase=unit.phase,
            inputs=tuple(name for name in read if name in there and name not in outputs),
            outputs=tuple(map(self._tensor, unit.storages)),
            workspace_bytes=0 if lowering is None else lowering.workspace_bytes,
            flops=unit.flops,
            recomputable=unit.phase not in (Phase.STATE, Phase.UPDATE),
            bytes_moved=None if unit.phase is Phase.STATE else unit.moved_bytes,
            in_place=() if lowering is None else self._in_place(unit, lowering, there),
        )

    def _read(self, lowering: Lowering | None) -> tuple[str, ...]:
        """Return the buffers that calls name: a kernel may need less than PyTorch's operator."""
        calls = () if lowering is None else lowering.calls
        return tuple(dict.fromkeys(name for call in calls for name in call.buffers))

    def _tensor(self, number: int) -> Tensor:
        storage = self.parts.storages[number]
        old = None if storage.replaces is None else self.parts.storages[storage.replaces]
        return Tensor(
            name=storage.name,
            bytes=self._buffer(storage if old is None else old).bytes,
            replaces=None if old is None else old.name,
        )

    def _in_place(
        self, unit: Unit, lowering: Lowering, there: set[str]
    ) -> tuple[tuple[str, str], ...]:
        """Return the input that the first output may take over: a whole one of the same layout."""
        if not lowering.elementwise or not lowering.has_output(0):
            return ()
        out = lowering.output()
        state = {self.names[s.index] for s in self.parts.storages if self._is_state(s)}
        read = self._read(lowering)
        looks = [self.looks[node] for node in unit.node.all_input_nodes if node in self.looks]
        looks = [look for look in looks if look.buffer in read]
        for look in looks:
            alone = all(look == other for other in looks if other.buffer == look.buffer)
            whole = look.offset == out.offset == 0 and look.is_dense
            alike = look.lies_like(out) and look.type is out.type
            if alone and whole and alike and look.buffer in there - state:
                return ((out.buffer, look.buffer),)
        return ()

    def _is_state(self, storage: TensorStorage) -> bool:
        return self.parts.units[storage.unit].phase is Phase.STATE

    def _lower(self, unit: Unit) -> Lowering:
        outputs = {}
        for number in unit.storages:
            storage = self.parts.storages[number]
            for layout in storage.layouts if storage.replaces is None else ():
                outputs[layout.position or 0] = Look(
                    buffer=storage.name,
                    offset=layout.offset,
                    shape=layout.shape,
                    strides=layout.stride,
                    type=self._type(layout.dtype, unit.name),
                )
        lowering = Lowering(unit.node, self.looks.__getitem__, outputs, rates=self.rates)
        lower_one = lowering_of(unit.node.target)
        if lower_one is not None:
            lower_one(lowering)
        return lowering


def _unguarded(joint: Joint) -> Iterator[str]:
    """Yield which values the step depends on that C has no guards for."""
    for line in joint.checked:
        yield (
            f"{line} checks numbers, which cannot be exported; leave it out "
            "(validate_args=False for a distribution)"
        )
    for read in joint.read.reads:
        if read.is_check:
            continue
        where = f" at {read.line}" if read.line else ""
        yield (
            f"the {read.what}{where} ({read.value}) would be part of the exported program, which "
            "does not notice another one; compute it outside of the step"
        )


def _missing(units: Sequence[Unit]) -> Iterator[str]:
    """Yield the operators that have no kernel, each with where it is first."""
    seen: set[Any] = set()
    for unit in units:
        if lowering_of(unit.node.target) is None and unit.node.target not in seen:
            seen.add(unit.node.target)
            where = in_module(unit.node)
            yield f"{unit.node.target}{where}: has no kernel in C, so that it cannot be exported"


def _array(value: torch.Tensor, kind: DataType, name: str) -> np.ndarray:
    """Return the elements of a tensor in the type that they have in exported code."""
    if kind is DataType.INT32 and value.numel():
        limits = torch.iinfo(torch.int32)
        if int(value.min()) < limits.min or int(value.max()) > limits.max:
            raise CaptureError(f"{name}: holds integers of more than 32 bits")
    types = {
        DataType.REAL: torch.float32,
        DataType.INT32: torch.int32,
        DataType.UINT8: torch.uint8,
    }
    array: np.ndarray = value.to(types[kind]).cpu().numpy().copy()
    return array
