"""The forward pass of a step in evaluation mode, lowered beside it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from poetmodel.graph import Phase
from poetmodel.lowered.calls import Call, DataType, NamedTensor, Ref
from poetmodel.torch.capturing.inputs import apart, flatten
from poetmodel.torch.capturing.joint import capture
from poetmodel.torch.capturing.joint_graph import InputKind, Joint, OutputKind, in_module
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.int8.reading import with_fronts
from poetmodel.torch.lowering.step import StepLowering
from poetmodel.torch.lowering.tables import with_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx

    from poetmodel.lowered.step import LoweredStep

aten: Final = torch.ops.aten


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

    model = with_fronts(model)
    with _evaluating(model), sdpa_kernel(SDPBackend.MATH):
        whole = capture(model, None if loss_fn is None else total, apart(inputs), name=name)
    joint = with_tables(_forward(whole, is_total=loss_fn is not None))
    lowered = StepLowering(joint)
    for operation in lowered.parts.operations:
        if operation.is_random:
            raise CaptureError(
                f"{name}: infer: {operation.node.target}{in_module(operation.node)} draws random "
                "numbers in evaluation mode too; let it depend on self.training"
            )
    inference = _with_output(lowered.step(), len(flatten(given)[0]), joint)
    return replace(step, inference=_sharing(step, inference))


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
    for argument in joint.of(InputKind.TANGENT):
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
    names = {a.name for a in joint.of(InputKind.USER_INPUT) if a.position < given}
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


def _sharing(step: LoweredStep, inference: LoweredStep) -> LoweredStep:
    """Return an inference without the values that the step has; those of one name get another."""
    own, others = {}, {}
    for name, values in inference.values.items():
        known = step.values.get(name)
        if known is None:
            own[name] = values
        elif known.tobytes() != values.tobytes():
            others[name] = f"{name} of the inference"
            own[others[name]] = values

    return replace(
        inference,
        calls=tuple(tuple(call.renamed(others) for call in calls) for calls in inference.calls),
        buffers={others.get(name, name): buffer for name, buffer in inference.buffers.items()},
        values=own,
    )


def _refs(call: Call) -> Iterator[Ref]:
    return (argument for argument in call.arguments if isinstance(argument, Ref))
