"""Forward passes in evaluation mode, lowered in addition to a step: for inference and loss."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from poetmodel.graph import Phase
from poetmodel.lowered.calls import DataType, NamedTensor, Ref
from poetmodel.lowered.tables import fuse_byte_quantization
from poetmodel.torch.capturing.inputs import copy_inputs, flatten, refuse
from poetmodel.torch.capturing.joint import capture
from poetmodel.torch.capturing.joint_graph import InputKind, Joint, OutputKind, location_suffix
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.int8.reading import with_fronts
from poetmodel.torch.lowering.step import StepLowering, guard_messages
from poetmodel.torch.lowering.tables import replace_byte_conversions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx

    from poetmodel.lowered.step import LoweredStep

aten: Final = torch.ops.aten
_LABEL_TYPES: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Integer types of class labels."""


def with_inference(
    step: LoweredStep,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Sequence[Any],
) -> LoweredStep:
    """Return a step with the forward pass of its model in evaluation mode as `inference`.

    The pass writes only the output of the model, which must be one float32 tensor, or without a
    `loss_fn` (it is not called) the loss. It does not update buffers. Raises `CaptureError` as
    `lower`, and if the pass draws random numbers.
    """
    name = step.graph.name
    model_inputs = inputs if loss_fn is None else inputs[:-1]

    def sum_output(output: Any, _: Any) -> torch.Tensor:
        """Return the sum of the output; raise `CaptureError` unless it is one float32 tensor."""
        if not isinstance(output, torch.Tensor) or output.dtype is not torch.float32:
            type_name = getattr(output, "dtype", type(output).__name__)
            raise CaptureError(
                f"{name}: infer: expected a model that returns one tensor of torch.float32 in "
                f"evaluation mode, got {type_name}; wrap it in such a module"
            )
        return output.sum()

    inference = _capture_forward(
        "infer",
        name,
        model,
        None if loss_fn is None else sum_output,
        inputs,
        model_inputs=model_inputs,
    )
    return replace(step, inference=_remove_shared_values(step, "inference", inference))


def with_evaluation(
    step: LoweredStep,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Sequence[Any],
) -> LoweredStep:
    """Return a step with a forward pass in evaluation mode, `evaluation`, that computes the loss.

    With a `loss_fn`, the output is a vector: the loss and, for a classifier, the number of correct
    labels (of the first highest score). A classifier has several scores along dimension 1, or 0 of
    a single sample. Raises `CaptureError` as `lower`, and if the pass draws random numbers.
    """
    name = step.graph.name
    evaluation = _capture_forward(
        "evaluate", name, model, _make_counting_loss(loss_fn), inputs, model_inputs=inputs
    )
    return replace(step, evaluation=_remove_shared_values(step, "evaluation", evaluation))


def _make_counting_loss(
    loss_fn: Callable[..., torch.Tensor] | None,
) -> Callable[..., torch.Tensor] | None:
    """Return a loss function that sums a stack of the loss and the number of correct labels.

    `_cut_to_output` later cuts the graph before the sum, so that the stack is the output. A loss
    module becomes a shallow copy with the same parameters.
    """
    if loss_fn is None:
        return None

    def add_correct_count(loss: torch.Tensor, output: Any, target: Any) -> torch.Tensor:
        values = [loss.reshape(())]
        dimension = _class_dimension(output, target)
        if dimension is not None:
            values.append((output.argmax(dimension) == target).sum().to(loss.dtype))
        return torch.stack(values).sum()

    if not isinstance(loss_fn, torch.nn.Module):
        return lambda output, target: add_correct_count(loss_fn(output, target), output, target)
    loss_class = type(loss_fn)

    def forward(module: Any, output: Any, target: Any) -> torch.Tensor:
        return add_correct_count(loss_class.forward(module, output, target), output, target)

    counting_loss: Any = copy(loss_fn)
    counting_loss.__class__ = type(loss_class.__name__, (loss_class,), {"forward": forward})
    loss_with_correct: Callable[..., torch.Tensor] = counting_loss
    return loss_with_correct


def _class_dimension(output: Any, target: Any) -> int | None:
    """Return the dimension of `output` with class scores, if `target` has labels for these."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    if not output.is_floating_point() or target.dtype not in _LABEL_TYPES or not output.ndim:
        return None
    dimension = min(1, output.ndim - 1)
    label_shape = (*output.shape[:dimension], *output.shape[dimension + 1 :])
    has_scores = output.shape[dimension] > 1 and target.shape == label_shape
    return dimension if has_scores else None


def _capture_forward(
    option: str,
    step_name: str,
    model: torch.nn.Module,
    sum_function: Callable[..., torch.Tensor] | None,
    inputs: Sequence[Any],
    *,
    model_inputs: Sequence[Any],
) -> LoweredStep:
    """Capture and lower a forward pass in evaluation mode, the mode only during the capture.

    The output is the tensor that `sum_function` sums, or without it the loss. The pass has only
    `model_inputs`, the first of `inputs`. `option`, which requested the pass, is for messages.
    """
    model = with_fronts(model)
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for module in (model, sum_function):
            if isinstance(module, torch.nn.Module):
                stack.enter_context(_evaluation_mode(module))
        joint_with_sum = capture(
            model, sum_function, copy_inputs(inputs), name=step_name, is_snapshot=True
        )
    joint = replace_byte_conversions(
        _cut_to_output(joint_with_sum, loss_is_sum=sum_function is not None)
    )
    lowering = StepLowering(joint)
    for operation in lowering.training_graph.operations:
        if operation.is_random:
            raise CaptureError(
                f"{step_name}: {option}: {operation.node.target}"
                f"{location_suffix(operation.node)} draws random numbers in "
                "evaluation mode, too; make that depend on self.training"
            )
    refuse(joint.name, guard_messages(joint))
    return fuse_byte_quantization(
        _write_to_caller(lowering.lower_step(), len(flatten(model_inputs)[0]), joint)
    )


@contextmanager
def _evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode inside the context, then restore the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _cut_to_output(joint: Joint, *, loss_is_sum: bool) -> Joint:
    """Return a joint graph whose only result is a contiguous copy of the loss or its operand.

    With `loss_is_sum`, the result is the summed tensor. Changes the graph of `joint`, which the
    result shares.
    """
    loss = next(result for result in joint.results if result.kind is OutputKind.LOSS)
    graph = joint.graph_module.graph
    output: Any = loss.node.args[0] if loss_is_sum else loss.node
    with graph.inserting_before(graph.output_node()):
        clone: fx.Node = graph.call_function(
            aten.clone.default, (output,), {"memory_format": torch.contiguous_format}
        )
    clone.meta = {key: value for key, value in loss.node.meta.items() if key != "val"}
    clone.meta["val"] = output.meta["val"].contiguous()
    graph.output_node().args = ((clone,),)
    graph.eliminate_dead_code()
    for argument in joint.arguments_of(InputKind.TANGENT):
        graph.erase_node(argument.node)
    remaining_nodes = set(graph.nodes)
    return replace(
        joint,
        arguments=tuple(
            argument for argument in joint.arguments if argument.node in remaining_nodes
        ),
        results=(replace(loss, node=clone),),
    )


def _write_to_caller(step: LoweredStep, model_input_count: int, joint: Joint) -> LoweredStep:
    """Return a lowered forward pass whose last node, ``output``, writes to the caller's output.

    Its output tensor leaves the graph. Of the flat inputs, only the first `model_input_count`
    remain; `states` and unused initial values are removed.
    """
    graph, buffer = step.graph, step.loss.buffer
    last_index = graph.node_of[graph.tensor_index[buffer]]
    nodes = list(graph.nodes)
    nodes[last_index] = replace(
        nodes[last_index], name="output", op="output", phase=Phase.FORWARD, outputs=(), in_place=()
    )
    input_names = {
        argument.name
        for argument in joint.arguments_of(InputKind.USER_INPUT)
        if argument.position < model_input_count
    }
    output_value = joint.results[0].node.meta["val"]
    read_buffers = {ref.buffer for calls in step.calls for call in calls for ref in call.refs}
    return replace(
        step,
        graph=replace(graph, name=f"{graph.name} in evaluation mode", nodes=tuple(nodes)),
        inputs=tuple(value for value in step.inputs if value.name in input_names),
        states=(),
        values={name: values for name, values in step.values.items() if name in read_buffers},
        output=NamedTensor(
            name="output",
            shape=tuple(output_value.shape),
            type=DataType.REAL,
            pieces=(Ref(buffer),),
        ),
    )


def _remove_shared_values(
    step: LoweredStep, pass_name: str, forward_pass: LoweredStep
) -> LoweredStep:
    """Return a forward pass without initial values that the step or its passes already contain.

    A buffer with other values under the same name is renamed: ``NAME of the PASS_NAME``.
    """
    new_values, new_names = {}, {}
    step_values = dict(step.values)
    for other_pass in step.forward_passes:
        step_values.update(other_pass.values)
    for name, values in forward_pass.values.items():
        step_value = step_values.get(name)
        if step_value is None:
            new_values[name] = values
        elif step_value.tobytes() != values.tobytes():
            new_names[name] = f"{name} of the {pass_name}"
            new_values[new_names[name]] = values

    return replace(
        forward_pass,
        calls=tuple(
            tuple(call.with_buffers(new_names) for call in calls) for calls in forward_pass.calls
        ),
        buffers={
            new_names.get(name, name): buffer for name, buffer in forward_pass.buffers.items()
        },
        values=new_values,
    )
