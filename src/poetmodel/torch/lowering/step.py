"""Convert a PyTorch model to a step for export: capture, rewrite, lower to kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from operator import getitem
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from poetmodel.errors import InputError, quote
from poetmodel.graph import Graph, Node, Phase, Tensor
from poetmodel.lowered.calls import Buffer, DataType, NamedTensor
from poetmodel.lowered.fusing import fuse_updates
from poetmodel.lowered.masks import mask_activations
from poetmodel.lowered.step import LoweredStep
from poetmodel.lowered.tables import fuse_byte_quantization
from poetmodel.lowered.unrolled import unroll_weight_gradients
from poetmodel.lowered.values import require_all_finite
from poetmodel.torch.capturing.inputs import copy_inputs, empty_input_errors, refuse
from poetmodel.torch.capturing.joint import capture
from poetmodel.torch.capturing.joint_graph import InputKind, Joint, OutputKind, location_suffix
from poetmodel.torch.capturing.replay import execute_kernel, replay
from poetmodel.torch.errors import CaptureError, at_line
from poetmodel.torch.lowering.operands import (
    Lowering,
    StridedView,
    contiguous_strides,
    data_type,
    find_lowering,
)
from poetmodel.torch.lowering.tables import replace_byte_conversions
from poetmodel.torch.step.optimizers import OptimizerMoment
from poetmodel.torch.step.reading import read_step
from poetmodel.torch.step.trace import profile_step
from poetmodel.torch.step.updates import check_optimizer, extend_with_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from torch import fx

    from poetmodel.torch.capturing.joint_graph import InputSpec
    from poetmodel.torch.graph.step_graph import Operation, TensorStorage
    from poetmodel.torch.lowering.operands import Lower

_LOSS_GRADIENT = "@tangent"
"""Name of the buffer of the loss's gradient, a constant 1 from which the backward pass begins."""
_BIAS_POSITION: Final = 2
"""Position of the bias gradient in the results of a convolution's backward operator."""


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
    """Capture a training step and lower it to kernel calls; parameters as for `trace`.

    `accumulate` is the number of batches whose gradients are summed before an update; each loss's
    gradient is divided by it. Without `masks`, the backward pass reads the tensors that it does in
    PyTorch, in place of masks and without `unroll_weight_gradients`: for comparisons.

    Raises
    ------
    CaptureError
        If the step cannot be captured or exported, for example because operators have no kernel, or
        if `clip_grad_norm` is given without an optimizer.
    InputError
        If `accumulate` is not above 0, or above 1 without an `optimizer`; if optimizer state is not
        finite; if a module quantized by PT2E cannot be converted.
    """
    if type(accumulate) is not int or accumulate < 1:
        expectation = f"expected a number of batches from 1, got {quote(accumulate)}"
        raise InputError(f"accumulate: {expectation}")
    if accumulate > 1 and optimizer is None:
        raise InputError(
            "accumulate: needs an optimizer; pass one, or sum the gradients that the step returns"
        )
    if isinstance(inputs, list | tuple | Mapping):
        refuse(name or type(model).__name__, empty_input_errors(inputs))
    check_optimizer(model, loss_fn, optimizer, name=name, clip_grad_norm=clip_grad_norm)
    with sdpa_kernel(SDPBackend.MATH):
        joint = capture(model, loss_fn, copy_inputs(inputs), name=name, is_snapshot=True)
    refuse(joint.name, guard_messages(joint))
    joint = replace_byte_conversions(joint)
    _split_convolutions(joint)
    if accumulate > 1:
        _divide_loss_gradient(joint, accumulate)
    if optimizer is not None:
        joint = extend_with_optimizer(
            joint, optimizer, clip_grad_norm=clip_grad_norm, accumulate=accumulate
        )
    step = replace(StepLowering(joint).lower_step(), accumulate=accumulate)
    return fuse_byte_quantization(
        mask_activations(unroll_weight_gradients(step)) if masks else step
    )


class StepLowering:
    """Lowers a captured step to a step for export; creation executes the step twice on its inputs.

    The first execution finds the storages, the second the views of all results.
    """

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        # Workspaces of PyTorch do not count: C kernels have their own.
        profiles = profile_step(joint, measure_workspaces=False)
        self.training_graph = read_step(joint, profiles, has_state=True)
        self.arguments = {argument.node: argument for argument in joint.arguments}
        self.views: dict[fx.Node, StridedView] = {}
        """Views of arguments, see `_add_argument_views`, and of results that are one tensor."""
        self.storage_names = {
            storage.index: storage.name for storage in self.training_graph.storages
        }
        self.replaced_states = {
            s.replaces for s in self.training_graph.storages if s.replaces is not None
        }
        """Indices of the storages of state that the step updates."""
        self.unread_inputs: dict[str, Buffer] = {}
        """Buffers of the inputs that no operation reads, by name."""
        self.relative_rates = self._compute_relative_rates()
        """Learning rates as multiples of the first parameter group's, by the nodes of the rates."""
        self._add_argument_views()
        replay(joint, self._execute_and_view)

    def lower_step(self) -> LoweredStep:
        """Lower all operations, and return the step with estimated instructions.

        Updates follow the node of the loss (`defer_updates`), and compute the gradients that only
        they read (`fuse_updates`), where possible. The field `accumulate` is 1. Unsupported
        operators raise `CaptureError`, and nonfinite optimizer state `InputError`.
        """
        operations = [
            operation for operation in self.training_graph.operations if not operation.is_source
        ]
        functions = _find_lowerings(self.joint.name, operations)
        lowerings = {
            operation.index: self._lower_operation(operation, function)
            for operation, function in zip(operations, functions, strict=True)
        }
        graph = self._make_graph(lowerings)
        calls = tuple(
            tuple(lowerings[operation.index].calls) if operation.index in lowerings else ()
            for operation in self.training_graph.operations
            if self._has_node(operation)
        )
        is_training = self.joint.optimizer is not None
        state_kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.MOMENT)
        loss = next(r for r in self.joint.results if r.kind is OutputKind.LOSS)
        rate = next(iter(self.joint.arguments_of(InputKind.LEARNING_RATE)), None)
        lowered_step = LoweredStep(
            graph=graph,
            calls=calls,
            buffers=dict(self._make_buffers()),
            inputs=tuple(self._name_tensors(self.joint.arguments_of(InputKind.USER_INPUT))),
            states=tuple(
                self._name_tensors(a for kind in state_kinds for a in self.joint.arguments_of(kind))
            ),
            gradients=() if is_training else tuple(self._name_gradients()),
            loss=self.views[loss.node].ref,
            values=dict(self._read_initial_values()),
            learning_rate=None if rate is None else float(self.joint.value(rate)),
            versions={"torch": torch.__version__},
        )
        return fuse_updates(lowered_step.edit({}))

    # -- tensors -----------------------------------------------------------------------------------

    def _compute_relative_rates(self) -> dict[fx.Node, float]:
        """Return learning rates divided by the first, by graph input.

        Refuses a first rate of 0, unless all are 0.
        """
        rates = {
            a.node: float(self.joint.value(a))
            for a in self.joint.arguments_of(InputKind.LEARNING_RATE)
        }
        first_rate = next(iter(rates.values()), 1.0)
        if len(set(rates.values())) > 1 and first_rate == 0:
            raise CaptureError(
                f"{self.joint.name}: optimizer: expected a learning rate above 0 in its first "
                "group: the rates of other groups are exported as multiples of it"
            )
        return {
            node: rate / first_rate if rate != first_rate else 1.0 for node, rate in rates.items()
        }

    def _add_argument_views(self) -> None:
        """Add the views of tensor arguments, and a buffer for each unread input."""
        for argument in self.joint.arguments:
            value = self.joint.value(argument)
            if argument.kind is InputKind.LEARNING_RATE or not isinstance(value, torch.Tensor):
                continue
            if argument.kind is InputKind.TANGENT:
                strides = (0,) * value.ndim
                shape = tuple(value.shape)
                self.views[argument.node] = StridedView(
                    buffer=_LOSS_GRADIENT,
                    offset=0,
                    shape=shape,
                    strides=strides,
                    type=DataType.REAL,
                )
            elif argument.node in self.training_graph.output_keys:
                self.views[argument.node] = self._make_view(argument.node, value, argument.name)
            elif argument.kind is InputKind.USER_INPUT:
                self.views[argument.node] = self._add_unread_input(argument, value)

    def _add_unread_input(self, argument: InputSpec, value: torch.Tensor) -> StridedView:
        """Register a buffer for an input that no operation reads; return its contiguous view."""
        kind = self._exported_type(value.dtype, argument.name)
        self.unread_inputs[argument.name] = Buffer(elements=value.numel(), type=kind)
        shape = tuple(value.shape)
        strides = contiguous_strides(shape)
        return StridedView(buffer=argument.name, offset=0, shape=shape, strides=strides, type=kind)

    def _execute_and_view(
        self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Execute a node, store the view of a result that is one tensor, and return the result."""
        value = execute_kernel(node, arguments, keywords)
        if isinstance(value, torch.Tensor):
            self.views[node] = self._make_view(node, value, f"{node.target}{location_suffix(node)}")
        return value

    def _make_view(self, node: fx.Node, value: torch.Tensor, description: str) -> StridedView:
        """Return the view of the value of a node; messages call the node `description`.

        A value that is in none of the training graph's storages is a view of the loss's gradient.
        """
        kind = self._exported_type(value.dtype, description)
        storage_indices = self.training_graph.find_reads((node,)).storages
        if storage_indices:
            self._element_type(self.training_graph.storages[storage_indices[0]], value.dtype)
        buffer = self.storage_names[storage_indices[0]] if storage_indices else _LOSS_GRADIENT
        return StridedView(
            buffer=buffer,
            offset=value.storage_offset() if storage_indices else 0,
            shape=tuple(value.shape),
            strides=tuple(value.stride()),
            type=kind,
        )

    def _exported_type(self, dtype: torch.dtype, description: str) -> DataType:
        """Return the type of elements in exported code; raise `CaptureError` if there is none."""
        kind = data_type(dtype)
        if kind is None:
            raise CaptureError(
                f"{self.joint.name}: {description} is of type {dtype}; expected torch.float32, "
                "torch.int64, torch.int32, torch.uint8, torch.int8 or torch.bool: exported code "
                "has no other types"
            )
        return kind

    def _make_buffers(self) -> Iterator[tuple[str, Buffer]]:
        """Yield (name, buffer) of storages (not new state, rates), unread inputs, loss gradient."""
        for storage in self.training_graph.storages:
            source = self.training_graph.operations[storage.operation]
            if storage.replaces is None and source.node not in self.relative_rates:
                yield storage.name, self._make_buffer(storage)
        yield from self.unread_inputs.items()
        yield _LOSS_GRADIENT, Buffer(elements=1, type=DataType.REAL)

    def _make_buffer(self, storage: TensorStorage) -> Buffer:
        dtype = self._element_type(storage)
        return Buffer(
            elements=storage.bytes // dtype.itemsize, type=self._exported_type(dtype, storage.name)
        )

    def _element_type(self, storage: TensorStorage, *view_types: torch.dtype) -> torch.dtype:
        """Return the only type of a storage and its views, uint8 for bool; refuse several types."""
        dtypes = (*(layout.dtype for layout in storage.layouts), *view_types)
        types = {torch.uint8 if dtype is torch.bool else dtype for dtype in dtypes}
        if len(types) > 1:
            raise CaptureError(
                f"{self.joint.name}: {storage.name} is read as {len(types)} types, which exported "
                "code does not support; leave view(dtype) out"
            )
        return types.pop()

    def _name_tensors(
        self, arguments: Iterator[InputSpec] | Sequence[InputSpec]
    ) -> Iterator[NamedTensor]:
        """Yield named tensors, one per buffer; refuse boolean inputs and non-contiguous tensors."""
        seen_buffers: set[str] = set()
        for argument in arguments:
            view = self.views.get(argument.node)
            if view is None or view.buffer in seen_buffers:
                continue
            seen_buffers.add(view.buffer)
            is_user_input = argument.kind is InputKind.USER_INPUT
            if is_user_input and self.joint.value(argument).dtype is torch.bool:
                raise CaptureError(
                    f"{self.joint.name}: {argument.name} holds truth values; expected float32, "
                    "integers or bytes, which exported code has as pm_real, int32_t and uint8_t"
                )
            if not view.is_contiguous:
                raise CaptureError(
                    f"{self.joint.name}: {argument.name} has strides {view.strides}; expected a "
                    "contiguous tensor, such as .contiguous() returns"
                )
            yield NamedTensor(
                name=argument.name, shape=view.shape, type=view.type, pieces=(view.ref,)
            )

    def _name_gradients(self) -> Iterator[NamedTensor]:
        """Yield the gradients of parameters that the step returns, in the order of parameters."""
        gradients = [
            (self.joint.argument_positions[result.target.node], result.target.name, result.node)
            for result in self.joint.results
            if result.kind is OutputKind.GRADIENT
            and result.target is not None
            and result.target.kind is InputKind.PARAMETER
        ]
        for _, name, node in sorted(gradients, key=lambda gradient: gradient[0]):
            view = self.views[node]
            strides = None if view.is_contiguous else view.strides
            yield NamedTensor(
                name=name, shape=view.shape, type=view.type, pieces=(view.ref,), strides=strides
            )

    def _read_initial_values(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (buffer, elements) of all tensors that exist before the step, except inputs.

        The gradient of the loss, 1, is one of them. Each buffer is yielded once, with all its
        elements. A moment with `starts_with_gradient` is all NaN; others must be finite.
        """
        seen_buffers: set[str] = set()
        for argument in self.joint.arguments:
            view = self.views.get(argument.node)
            if view is None or view.buffer in seen_buffers or argument.kind is InputKind.USER_INPUT:
                continue
            seen_buffers.add(view.buffer)
            if argument.kind is InputKind.TANGENT:
                yield _LOSS_GRADIENT, torch.ones(1).numpy()
                continue
            value = self.joint.value(argument).detach()
            all_elements = value.as_strided(
                (value.untyped_storage().nbytes() // value.itemsize,), (1,), storage_offset=0
            )
            if isinstance(argument.optimizer_value, OptimizerMoment):
                if argument.optimizer_value.starts_with_gradient:
                    all_elements = torch.full_like(all_elements, math.nan)
                elif not all_elements.isfinite().all():  # all NaN would mean: no value yet
                    require_all_finite(self.joint.name, (argument.name,))
            first_reader = next(iter(argument.node.users), argument.node)
            yield (
                view.buffer,
                _to_exported_array(
                    all_elements, view.type, f"{argument.name}{location_suffix(first_reader)}"
                ),
            )

    # -- the graph ---------------------------------------------------------------------------------

    def _has_node(self, operation: Operation) -> bool:
        """Return whether the exported graph has a node for an operation."""
        if operation.phase is Phase.INPUT:
            return False
        return operation.phase is not Phase.STATE or operation.storages[0] in self.replaced_states

    def _make_graph(self, lowerings: Mapping[int, Lowering]) -> Graph:
        """Return the graph of operations with `_has_node`; `lowerings` are by operation index."""
        operations = [
            operation for operation in self.training_graph.operations if self._has_node(operation)
        ]
        graph_tensors = {
            self.storage_names[number] for operation in operations for number in operation.storages
        }
        first_input = next(
            (value for value in self.joint.inputs if getattr(value, "ndim", 0)), None
        )
        return Graph(
            name=self.joint.name,
            nodes=tuple(
                self._make_node(operation, lowerings.get(operation.index), graph_tensors)
                for operation in operations
            ),
            batch_size=1 if first_input is None else max(1, int(first_input.shape[0])),
            dtype="float32",
            kernels="exported",
        )

    def _make_node(
        self, operation: Operation, lowering: Lowering | None, graph_tensors: set[str]
    ) -> Node:
        """Return the graph's node of an operation.

        Its inputs are the tensors of the graph that its calls use; PyTorch's operator may have
        further inputs. `lowering` is None for state. All nodes except state and updates are
        recomputable.
        """
        buffer_names = self._buffer_names(lowering)
        outputs = {self.storage_names[number] for number in operation.storages}
        return Node(
            name=operation.name,
            op=operation.op,
            phase=operation.phase,
            inputs=tuple(
                name for name in buffer_names if name in graph_tensors and name not in outputs
            ),
            outputs=tuple(map(self._make_tensor, operation.storages)),
            workspace_bytes=0 if lowering is None else lowering.workspace_bytes,
            flops=operation.profile.flops,
            recomputable=operation.phase not in (Phase.STATE, Phase.UPDATE),
            bytes_moved=None if operation.phase is Phase.STATE else operation.profile.moved_bytes,
            in_place=()
            if lowering is None
            else self._in_place_pair(operation, lowering, graph_tensors),
        )

    def _buffer_names(self, lowering: Lowering | None) -> tuple[str, ...]:
        """Return the names of all buffers in an operation's calls, `WORKSPACE` included."""
        calls = () if lowering is None else lowering.calls
        return tuple(dict.fromkeys(name for call in calls for name in call.buffers))

    def _make_tensor(self, index: int) -> Tensor:
        """Return the exported graph's tensor for a storage, as large as its buffer."""
        storage = self.training_graph.storages[index]
        state = None if storage.replaces is None else self.training_graph.storages[storage.replaces]
        return Tensor(
            name=storage.name,
            bytes=self._make_buffer(storage if state is None else state).bytes,
            replaces=None if state is None else state.name,
        )

    def _in_place_pair(
        self, operation: Operation, lowering: Lowering, graph_tensors: set[str]
    ) -> tuple[tuple[str, str], ...]:
        """Return the (output, input) pair if the first output may overwrite an input, else ().

        The input must be dense, a tensor of the graph but no state, match shape, strides and type,
        start its buffer, and be read in no other view. Of several, the first in PyTorch's order.
        """
        if not lowering.can_overwrite_operand or not lowering.has_output(0):
            return ()
        output = lowering.output()
        state_names = {
            self.storage_names[s.index] for s in self.training_graph.storages if self._is_state(s)
        }
        buffer_names = self._buffer_names(lowering)
        views = [self.views[node] for node in operation.node.all_input_nodes if node in self.views]
        views = [view for view in views if view.buffer in buffer_names]
        for view in views:
            is_only_view = all(
                view == other_view for other_view in views if other_view.buffer == view.buffer
            )
            is_dense_from_start = view.offset == output.offset == 0 and view.is_dense
            has_same_layout = view.has_layout_of(output) and view.type is output.type
            if (
                is_only_view
                and is_dense_from_start
                and has_same_layout
                and view.buffer in graph_tensors - state_names
            ):
                return ((output.buffer, view.buffer),)
        return ()

    def _is_state(self, storage: TensorStorage) -> bool:
        return self.training_graph.operations[storage.operation].phase is Phase.STATE

    def _lower_operation(self, operation: Operation, lower_function: Lower) -> Lowering:
        """Return an operation lowered to calls by the lowering of its operator."""
        outputs = {}
        for number in operation.storages:
            storage = self.training_graph.storages[number]
            for layout in storage.layouts if storage.replaces is None else ():
                outputs[layout.position or 0] = StridedView(
                    buffer=storage.name,
                    offset=layout.offset,
                    shape=layout.shape,
                    strides=layout.stride,
                    type=self._exported_type(layout.dtype, operation.name),
                )
        lowering = Lowering(
            operation.node, self.views.__getitem__, outputs, relative_rates=self.relative_rates
        )
        lower_function(lowering)
        return lowering


def guard_messages(joint: Joint) -> Iterator[str]:
    """Yield a message for each line of Python and each value that exported code cannot check.

    The lines test whether numbers are finite or in range, or a matrix is invertible; the values are
    those that Python code has read, except in an assertion.
    """
    for line in joint.finite_check_lines:
        yield (
            f"{line} checks numbers, which cannot be exported; leave it out "
            "(validate_args=False for a distribution)"
        )
    for read in joint.reads:
        if read.is_check:
            continue
        yield (
            f"the {read.description}{at_line(read.line)} ({read.value}) would be part of the "
            "exported program, which does not notice another one; compute it outside of the step"
        )


def _find_lowerings(name: str, operations: Sequence[Operation]) -> list[Lower]:
    """Return the lowerings of all operations of step `name`; refuse operators without one."""
    functions = []
    for operation in operations:
        target = operation.node.target
        function = find_lowering(target)
        if function is None:
            location = location_suffix(operation.node)
            raise CaptureError(
                f"{name}: {target}{location}: has no kernel in C and cannot be exported"
            )
        functions.append(function)
    return functions


def _to_exported_array(value: torch.Tensor, kind: DataType, name: str) -> np.ndarray:
    """Return a copy of a tensor as an array of type `kind`; refuse integers above 32 bits."""
    if kind is DataType.INT32 and value.numel():
        limits = torch.iinfo(torch.int32)
        if int(value.min()) < limits.min or int(value.max()) > limits.max:
            raise CaptureError(f"{name}: holds integers of more than 32 bits")
    array: np.ndarray = value.to(getattr(torch, kind.numpy_name)).cpu().numpy().copy()
    return array


# -- rewrites of the captured graph ------------------------------------------------------------


def _split_convolutions(joint: Joint) -> None:
    """Split the backward operator of each convolution into one operation per gradient that is read.

    Only then a schedule can recompute or free one alone. The gradient of the input is first: an
    update may overwrite the weight that it reads. That of the bias is a sum, because PyTorch's
    kernel would also compute the gradient of the weight.
    """
    aten = torch.ops.aten
    graph = joint.graph_module.graph
    for node in graph.find_nodes(
        op="call_function", target=aten.convolution_backward.default, sort=True
    ):
        for position in (0, 1, _BIAS_POSITION):
            selections = [user for user in node.users if user.target is getitem]
            selections = [user for user in selections if user.args[1] == position]
            if position == _BIAS_POSITION:
                for user in selections:
                    _make_bias_gradient(user, node)
            elif selections:
                gradient_node = _insert_gradient_node(graph, node, position)
                for user in selections:
                    user.args = (gradient_node, position)
        graph.erase_node(node)


def _divide_loss_gradient(joint: Joint, divisor: int) -> None:
    """Insert a division of the loss's gradient by `divisor` into the captured graph."""
    graph = joint.graph_module.graph
    first_call = next(node for node in graph.nodes if node.op == "call_function")
    for argument in joint.arguments_of(InputKind.TANGENT):
        with graph.inserting_before(first_call):
            quotient = graph.call_function(
                torch.ops.aten.div.Scalar, (argument.node, float(divisor))
            )
        quotient.meta = dict(argument.node.meta)
        argument.node.replace_all_uses_with(
            quotient, delete_user_cb=lambda user, quotient_node=quotient: user is not quotient_node
        )


def _make_bias_gradient(selection: fx.Node, node: fx.Node) -> None:
    """Turn `selection`, the bias gradient of `node`, into the sum that computes it."""
    gradient = node.args[0]
    dimensions = gradient.meta["val"].ndim
    selection.target = torch.ops.aten.sum.dim_IntList
    selection.args = (gradient, [0, *range(2, dimensions)])
    selection.meta = {**node.meta, "val": selection.meta["val"]}


def _insert_gradient_node(graph: fx.Graph, node: fx.Node, position: int) -> fx.Node:
    """Insert a copy of a convolution's backward node that computes only the gradient at `position`.

    Return the copy; its value is a tuple with None elsewhere. The original node stays, behind it.
    """
    output_mask = [index == position for index in range(3)]
    arguments: tuple[Any, ...] = (*node.args[:-1], output_mask)
    with graph.inserting_before(node):
        gradient_node = graph.call_function(node.target, arguments)
    gradient_node.meta = {key: value for key, value in node.meta.items() if key != "val"}
    values = node.meta["val"]
    gradient_node.meta["val"] = tuple(
        value if index == position else None for index, value in enumerate(values)
    )
    return gradient_node
