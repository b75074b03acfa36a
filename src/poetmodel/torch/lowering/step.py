"""A PyTorch model becomes a step that can be exported: captured, rewritten, lowered to kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from operator import getitem
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from poetmodel.errors import InputError, shown
from poetmodel.export.codes import with_codes
from poetmodel.export.masks import masked
from poetmodel.export.unrolled import unrolled
from poetmodel.export.values import check_finite
from poetmodel.graph import Graph, Node, Phase, Tensor
from poetmodel.lowered.calls import Buffer, DataType, NamedTensor
from poetmodel.lowered.fusing import fused
from poetmodel.lowered.step import LoweredStep
from poetmodel.torch.capturing.inputs import copy_inputs, empty_input_errors, refuse
from poetmodel.torch.capturing.joint import capture
from poetmodel.torch.capturing.joint_graph import InputKind, Joint, OutputKind, location_suffix
from poetmodel.torch.capturing.replay import call, replay
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.lowering.operands import (
    Lowering,
    StridedView,
    contiguous_strides,
    data_type,
    lowering_of,
)
from poetmodel.torch.lowering.tables import with_tables
from poetmodel.torch.step.optimizers import OptimizerSlot
from poetmodel.torch.step.training import TrainingGraph
from poetmodel.torch.step.updates import extend_with_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from torch import fx

    from poetmodel.torch.capturing.joint_graph import InputSpec
    from poetmodel.torch.graph.step_graph import Operation, TensorStorage

_TANGENT = "@tangent"
"""The buffer of the gradient that the backward pass starts from: a constant 1."""
_BIAS: Final = 2
"""Which result of a convolution's backward is the gradient of its bias."""


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
    if type(accumulate) is not int or accumulate < 1:
        fault = f"expected a number of batches from 1, got {shown(accumulate)}"
        raise InputError(f"accumulate: {fault}")
    if accumulate > 1 and optimizer is None:
        raise InputError(
            "accumulate: there is no optimizer to wait for; give one, or sum the gradients that "
            "the step hands out"
        )
    if isinstance(inputs, list | tuple | Mapping):
        refuse(name or type(model).__name__, empty_input_errors(inputs))
    with sdpa_kernel(SDPBackend.MATH):
        joint = capture(model, loss_fn, copy_inputs(inputs), name=name)
    refuse(joint.name, _unguarded(joint))
    joint = with_tables(joint)
    _split_convolutions(joint)
    if accumulate > 1:
        _divide_loss(joint, accumulate)
    if optimizer is not None:
        joint = extend_with_optimizer(
            joint, optimizer, clip_grad_norm=clip_grad_norm, accumulate=accumulate
        )
    step = replace(StepLowering(joint).step(), accumulate=accumulate)
    return with_codes(masked(unrolled(step)) if masks else step)


class StepLowering:
    """A captured step on its way to one that can be exported."""

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.parts = TrainingGraph(joint, measured=False)  # kernels of C have their own
        self.arguments = {argument.node: argument for argument in joint.arguments}
        self.looks: dict[fx.Node, StridedView] = {}
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
        operations = [operation for operation in self.parts.operations if not operation.is_source]
        refuse(self.joint.name, _unguarded(self.joint))
        refuse(self.joint.name, _missing(operations))
        lowered = {operation.index: self._lower(operation) for operation in operations}
        graph = self._graph(lowered)
        calls = tuple(
            tuple(lowered[operation.index].calls) if operation.index in lowered else ()
            for operation in self.parts.operations
            if self._is_node(operation)
        )
        trains = self.joint.optimizer is not None
        kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.MOMENT)
        loss = next(r for r in self.joint.results if r.kind is OutputKind.LOSS)
        rate = next(iter(self.joint.arguments_of(InputKind.LEARNING_RATE)), None)
        captured = LoweredStep(
            graph=graph,
            calls=calls,
            buffers=dict(self._buffers()),
            inputs=tuple(self._seen(self.joint.arguments_of(InputKind.USER_INPUT))),
            states=tuple(self._seen(a for kind in kinds for a in self.joint.arguments_of(kind))),
            gradients=() if trains else tuple(self._gradients()),
            loss=self.looks[loss.node].ref,
            values=dict(self._values()),
            learning_rate=None if rate is None else float(self.joint.value(rate)),
            versions={"torch": torch.__version__},
        )
        return fused(captured.with_nodes(graph.nodes, calls))

    # -- what tensors are there --------------------------------------------------------------------

    def _rates(self) -> dict[fx.Node, float]:
        """Return the learning rate of each group of parameters, relative to that of the first."""
        rates = {
            a.node: float(self.joint.value(a))
            for a in self.joint.arguments_of(InputKind.LEARNING_RATE)
        }
        first = next(iter(rates.values()), 1.0)
        if len(set(rates.values())) > 1 and first == 0:
            raise CaptureError(
                f"{self.joint.name}: optimizer: expected a learning rate above 0 in its first "
                "group, of which those of the others are multiples"
            )
        return {node: rate / first if rate != first else 1.0 for node, rate in rates.items()}

    def _look_at_arguments(self) -> None:
        for argument in self.joint.arguments:
            value = self.joint.value(argument)
            if argument.kind is InputKind.LEARNING_RATE or not isinstance(value, torch.Tensor):
                continue
            if argument.kind is InputKind.TANGENT:
                strides = (0,) * value.ndim
                shape = tuple(value.shape)
                self.looks[argument.node] = StridedView(
                    buffer=_TANGENT, offset=0, shape=shape, strides=strides, type=DataType.REAL
                )
            elif argument.node in self.parts.output_keys:
                self.looks[argument.node] = self._look(argument.node, value, argument.name)
            elif argument.kind is InputKind.USER_INPUT:
                self.looks[argument.node] = self._unread(argument, value)

    def _unread(self, argument: InputSpec, value: torch.Tensor) -> StridedView:
        """Return the look of an input that nothing reads: it has its place among them."""
        kind = self._type(value.dtype, argument.name)
        self.unread[argument.name] = Buffer(elements=value.numel(), type=kind)
        shape = tuple(value.shape)
        strides = contiguous_strides(shape)
        return StridedView(buffer=argument.name, offset=0, shape=shape, strides=strides, type=kind)

    def _record(self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        value = call(node, arguments, keywords)
        if isinstance(value, torch.Tensor):
            self.looks[node] = self._look(node, value, f"{node.target}{location_suffix(node)}")
        return value

    def _look(self, node: fx.Node, value: torch.Tensor, what: str) -> StridedView:
        """Return the elements, and their storage, of a value of the captured graph."""
        numbers = self.parts.find_reads((node,)).storages
        buffer = self.names[numbers[0]] if numbers else _TANGENT
        return StridedView(
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
                "torch.int64, torch.int32, torch.uint8, torch.int8 or torch.bool: exported code "
                "has no other types"
            )
        return kind

    def _buffers(self) -> Iterator[tuple[str, Buffer]]:
        for storage in self.parts.storages:
            maker = self.parts.operations[storage.operation]
            if storage.replaces is None and maker.node not in self.rates:
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

    def _seen(self, arguments: Iterator[InputSpec] | Sequence[InputSpec]) -> Iterator[NamedTensor]:
        """Yield what users see by name; tensors with several names have the first one."""
        seen: set[str] = set()
        for argument in arguments:
            look = self.looks.get(argument.node)
            if look is None or look.buffer in seen:
                continue
            seen.add(look.buffer)
            given = argument.kind is InputKind.USER_INPUT
            if given and self.joint.value(argument).dtype is torch.bool:
                raise CaptureError(
                    f"{self.joint.name}: {argument.name} holds truth values; expected float32, "
                    "integers or bytes, which a step takes as pm_real, int32_t and uint8_t"
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
            if isinstance(argument.optimizer_value, OptimizerSlot):
                if argument.optimizer_value.begins_with_gradient:
                    whole = torch.full_like(whole, math.nan)
                elif not whole.isfinite().all():  # all NaN would be taken as no value yet
                    check_finite(self.joint.name, (argument.name,))
            user = next(iter(argument.node.users), argument.node)
            yield look.buffer, _array(whole, look.type, f"{argument.name}{location_suffix(user)}")

    # -- the graph ---------------------------------------------------------------------------------

    def _is_node(self, operation: Operation) -> bool:
        """Whether the exported graph has an operation: no input, and no constant."""
        if operation.phase is Phase.INPUT:
            return False
        return operation.phase is not Phase.STATE or operation.storages[0] in self.replaced

    def _graph(self, lowered: Mapping[int, Lowering]) -> Graph:
        operations = [operation for operation in self.parts.operations if self._is_node(operation)]
        there = {self.names[number] for operation in operations for number in operation.storages}
        first = next((v for v in self.joint.inputs if getattr(v, "ndim", 0)), None)
        return Graph(
            name=self.joint.name,
            nodes=tuple(
                self._node(operation, lowered.get(operation.index), there)
                for operation in operations
            ),
            batch_size=1 if first is None else max(1, int(first.shape[0])),
            dtype="float32",
            kernels="exported",
        )

    def _node(self, operation: Operation, lowering: Lowering | None, there: set[str]) -> Node:
        read = self._read(lowering)
        outputs = {self.names[number] for number in operation.storages}
        return Node(
            name=operation.name,
            op=operation.op,
            phase=operation.phase,
            inputs=tuple(name for name in read if name in there and name not in outputs),
            outputs=tuple(map(self._tensor, operation.storages)),
            workspace_bytes=0 if lowering is None else lowering.workspace_bytes,
            flops=operation.profile.flops,
            recomputable=operation.phase not in (Phase.STATE, Phase.UPDATE),
            bytes_moved=None if operation.phase is Phase.STATE else operation.profile.moved_bytes,
            in_place=() if lowering is None else self._in_place(operation, lowering, there),
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
        self, operation: Operation, lowering: Lowering, there: set[str]
    ) -> tuple[tuple[str, str], ...]:
        """Return the input that the first output may take over: a whole one of the same layout."""
        if not lowering.elementwise or not lowering.has_output(0):
            return ()
        out = lowering.output()
        state = {self.names[s.index] for s in self.parts.storages if self._is_state(s)}
        read = self._read(lowering)
        looks = [self.looks[node] for node in operation.node.all_input_nodes if node in self.looks]
        looks = [look for look in looks if look.buffer in read]
        for look in looks:
            alone = all(look == other for other in looks if other.buffer == look.buffer)
            whole = look.offset == out.offset == 0 and look.is_dense
            alike = look.lies_like(out) and look.type is out.type
            if alone and whole and alike and look.buffer in there - state:
                return ((out.buffer, look.buffer),)
        return ()

    def _is_state(self, storage: TensorStorage) -> bool:
        return self.parts.operations[storage.operation].phase is Phase.STATE

    def _lower(self, operation: Operation) -> Lowering:
        outputs = {}
        for number in operation.storages:
            storage = self.parts.storages[number]
            for layout in storage.layouts if storage.replaces is None else ():
                outputs[layout.position or 0] = StridedView(
                    buffer=storage.name,
                    offset=layout.offset,
                    shape=layout.shape,
                    strides=layout.stride,
                    type=self._type(layout.dtype, operation.name),
                )
        lowering = Lowering(operation.node, self.looks.__getitem__, outputs, rates=self.rates)
        lower_one = lowering_of(operation.node.target)
        if lower_one is not None:
            lower_one(lowering)
        return lowering


def _unguarded(joint: Joint) -> Iterator[str]:
    """Yield which values the step depends on that C has no guards for."""
    for line in joint.finite_check_lines:
        yield (
            f"{line} checks numbers, which cannot be exported; leave it out "
            "(validate_args=False for a distribution)"
        )
    for read in joint.value_guards.reads:
        if read.is_check:
            continue
        where = f" at {read.line}" if read.line else ""
        yield (
            f"the {read.description}{where} ({read.value}) would be part of the exported program, "
            "which does not notice another one; compute it outside of the step"
        )


def _missing(operations: Sequence[Operation]) -> Iterator[str]:
    """Yield the operators that have no kernel, each with where it is first."""
    seen: set[Any] = set()
    for operation in operations:
        if lowering_of(operation.node.target) is None and operation.node.target not in seen:
            seen.add(operation.node.target)
            where = location_suffix(operation.node)
            target = operation.node.target
            yield f"{target}{where}: has no kernel in C, so that it cannot be exported"


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
        DataType.INT8: torch.int8,
    }
    array: np.ndarray = value.to(types[kind]).cpu().numpy().copy()
    return array


# -- rewrites of what was captured -------------------------------------------------------------


def _split_convolutions(joint: Joint) -> None:
    """Let the gradients of input, weight and bias of a convolution be operations of their own.

    PyTorch computes all three together; a schedule that recomputes one would compute all, and no
    gradient could go before the others are there. That of the input comes first, so that the
    weight may be updated after the others. That of the bias is a sum: PyTorch's kernel makes that
    of the weight beside it, even where nobody wants it.
    """
    aten = torch.ops.aten
    graph = joint.graph_module.graph
    for node in graph.find_nodes(
        op="call_function", target=aten.convolution_backward.default, sort=True
    ):
        for position in (0, 1, _BIAS):
            picks = [user for user in node.users if user.target is getitem]
            picks = [user for user in picks if user.args[1] == position]
            if position == _BIAS:
                for user in picks:
                    _sum_over_places(user, node)
            elif picks:
                part = _part(graph, node, position)
                for user in picks:
                    user.args = (part, position)
        graph.erase_node(node)


def _divide_loss(joint: Joint, by: int) -> None:
    """Let gradients be those of the loss divided by a number; the loss stays as it is."""
    graph = joint.graph_module.graph
    first = next(node for node in graph.nodes if node.op == "call_function")
    for argument in joint.arguments_of(InputKind.TANGENT):
        with graph.inserting_before(first):
            share = graph.call_function(torch.ops.aten.div.Scalar, (argument.node, float(by)))
        share.meta = dict(argument.node.meta)
        argument.node.replace_all_uses_with(
            share, delete_user_cb=lambda user, own=share: user is not own
        )


def _sum_over_places(user: fx.Node, node: fx.Node) -> None:
    """Let what took the gradient of the bias compute it."""
    gradient = node.args[0]
    dimensions = gradient.meta["val"].ndim
    user.target = torch.ops.aten.sum.dim_IntList
    user.args = (gradient, [0, *range(2, dimensions)])
    user.meta = {**node.meta, "val": user.meta["val"]}


def _part(graph: fx.Graph, node: fx.Node, position: int) -> fx.Node:
    mask = [k == position for k in range(3)]
    arguments: tuple[Any, ...] = (*node.args[:-1], mask)
    with graph.inserting_before(node):
        part = graph.call_function(node.target, arguments)
    part.meta = {key: value for key, value in node.meta.items() if key != "val"}
    values = node.meta["val"]
    part.meta["val"] = tuple(value if k == position else None for k, value in enumerate(values))
    return part
