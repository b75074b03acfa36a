"""Forward passes of a step in evaluation mode, lowered beside it: to its result, to its loss."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from poetmodel.export.codes import fuse_byte_quantization
from poetmodel.graph import Phase
from poetmodel.lowered.calls import Call, DataType, NamedTensor, Ref
from poetmodel.torch.capturing.inputs import copy_inputs, flatten
from poetmodel.torch.capturing.joint import capture
from poetmodel.torch.capturing.joint_graph import InputKind, Joint, OutputKind, location_suffix
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.int8.reading import with_fronts
from poetmodel.torch.lowering.step import StepLowering
from poetmodel.torch.lowering.tables import with_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx

    from poetmodel.lowered.step import LoweredStep

aten: Final = torch.ops.aten
_LABELS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Types that labels of classes have."""


def with_inference(
    step: LoweredStep,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Sequence[Any],
) -> LoweredStep:
    """Return a step with the forward pass of its model in evaluation mode.

    Parameters as for `lower`. It writes what the model returns: without a `loss_fn` its loss. What
    the model would change in its buffers on the way is left out.

    Raises
    ------
    CaptureError
        If the model does not return one tensor of floats, or draws random numbers in evaluation
        mode; otherwise as for `lower`.
    """
    name = step.graph.name
    given = inputs if loss_fn is None else inputs[:-1]

    def total(output: Any, _: Any) -> torch.Tensor:
        if not isinstance(output, torch.Tensor) or output.dtype is not torch.float32:
            kind = getattr(output, "dtype", type(output).__name__)
            raise CaptureError(
                f"{name}: infer: expected a model that returns one tensor of torch.float32 in "
                f"evaluation mode, got {kind}; give a module around it that does"
            )
        return output.sum()

    inference = _captured(
        "infer", name, model, None if loss_fn is None else total, inputs, given=given
    )
    return replace(step, inference=_sharing(step, "inference", inference))


def with_evaluation(
    step: LoweredStep,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Sequence[Any],
) -> LoweredStep:
    """Return a step with its loss in evaluation mode, and the number of correct classes.

    Parameters as for `lower`. Where the target is integers, one for each vector of scores that the
    model returns (along dimension 1, of one sample dimension 0), a sample counts as correct if its
    highest score is that of its label.

    Raises
    ------
    CaptureError
        If evaluation mode draws random numbers; otherwise as for `lower`.
    """
    name = step.graph.name
    evaluation = _captured("evaluate", name, model, _counting(loss_fn), inputs, given=inputs)
    return replace(step, evaluation=_sharing(step, "evaluation", evaluation))


def _counting(loss_fn: Callable[..., torch.Tensor] | None) -> Callable[..., torch.Tensor] | None:
    """Return a loss function that makes the sum of loss and number of correct classes.

    The evaluation is what is summed. A loss that is a module keeps the names of its parameters.
    """
    if loss_fn is None:
        return None

    def evaluated(loss: torch.Tensor, output: Any, target: Any) -> torch.Tensor:
        found = [loss.reshape(())]
        dimension = _dimension_of_classes(output, target)
        if dimension is not None:
            found.append((output.argmax(dimension) == target).sum().to(loss.dtype))
        return torch.stack(found).sum()

    if not isinstance(loss_fn, torch.nn.Module):
        return lambda output, target: evaluated(loss_fn(output, target), output, target)
    kind = type(loss_fn)

    def forward(own: Any, output: Any, target: Any) -> torch.Tensor:
        return evaluated(kind.forward(own, output, target), output, target)

    counting: Any = copy(loss_fn)
    counting.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    made: Callable[..., torch.Tensor] = counting
    return made


def _dimension_of_classes(output: Any, target: Any) -> int | None:
    """Return the dimension of a result that has a score for each class; None if there is none."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    if not output.is_floating_point() or target.dtype not in _LABELS or not output.ndim:
        return None
    dimension = min(1, output.ndim - 1)
    labels = (*output.shape[:dimension], *output.shape[dimension + 1 :])
    is_scores = output.shape[dimension] > 1 and target.shape == labels
    return dimension if is_scores else None


def _captured(
    option: str,
    name: str,
    model: torch.nn.Module,
    total: Callable[..., torch.Tensor] | None,
    inputs: Sequence[Any],
    *,
    given: Sequence[Any],
) -> LoweredStep:
    """Return a forward pass in evaluation mode whose output is what `total` sums up.

    Without `total` the output is the loss that the model returns.
    """
    model = with_fronts(model)
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for module in (model, total):
            if isinstance(module, torch.nn.Module):
                stack.enter_context(_evaluating(module))
        whole = capture(model, total, copy_inputs(inputs), name=name)
    joint = with_tables(_forward(whole, is_total=total is not None))
    lowered = StepLowering(joint)
    for operation in lowered.parts.operations:
        if operation.is_random:
            raise CaptureError(
                f"{name}: {option}: {operation.node.target}{location_suffix(operation.node)} draws "
                "random numbers in evaluation mode too; let it depend on self.training"
            )
    return fuse_byte_quantization(_with_output(lowered.step(), len(flatten(given)[0]), joint))


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _forward(joint: Joint, *, is_total: bool) -> Joint:
    """Cut a captured step to what makes its loss, or the tensor that is summed up in it.

    A copy of that comes last.
    """
    loss = next(result for result in joint.results if result.kind is OutputKind.LOSS)
    graph = joint.graph_module.graph
    output: Any = loss.node.args[0] if is_total else loss.node
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
    there = set(graph.nodes)
    return replace(
        joint,
        arguments=tuple(a for a in joint.arguments if a.node in there),
        results=(replace(loss, node=clone),),
    )


def _with_output(step: LoweredStep, given: int, joint: Joint) -> LoweredStep:
    """Return a captured forward pass whose last node writes what belongs to the caller.

    Of the flat inputs the first `given` are those of the model; any others are the target's.
    """
    graph, buffer = step.graph, step.loss.buffer
    last = graph.node_of[graph.tensor_index[buffer]]
    nodes = list(graph.nodes)
    nodes[last] = replace(
        nodes[last], name="output", op="output", phase=Phase.FORWARD, outputs=(), in_place=()
    )
    names = {a.name for a in joint.arguments_of(InputKind.USER_INPUT) if a.position < given}
    example = joint.results[0].node.meta["val"]
    read = {a.buffer for calls in step.calls for call in calls for a in _refs(call)}
    return replace(
        step,
        graph=replace(graph, name=f"{graph.name} in evaluation mode", nodes=tuple(nodes)),
        inputs=tuple(value for value in step.inputs if value.name in names),
        states=(),
        values={name: values for name, values in step.values.items() if name in read},
        output=NamedTensor(
            name="output", shape=tuple(example.shape), type=DataType.REAL, pieces=(Ref(buffer),)
        ),
    )


def _sharing(step: LoweredStep, kind: str, inference: LoweredStep) -> LoweredStep:
    """Return a forward pass without values that the step has; those of one name get another."""
    own, others = {}, {}
    there = dict(step.values)
    for part in step.beside:
        there.update(part.values)
    for name, values in inference.values.items():
        known = there.get(name)
        if known is None:
            own[name] = values
        elif known.tobytes() != values.tobytes():
            others[name] = f"{name} of the {kind}"
            own[others[name]] = values

    return replace(
        inference,
        calls=tuple(tuple(call.renamed(others) for call in calls) for calls in inference.calls),
        buffers={others.get(name, name): buffer for name, buffer in inference.buffers.items()},
        values=own,
    )


def _refs(call: Call) -> Iterator[Ref]:
    return (argument for argument in call.arguments if isinstance(argument, Ref))
