"""Updates: the optimizer's step as operations of a captured graph, one per trained parameter.

An update of a parameter reads the state that it replaces, the gradients and the learning rate, and
returns the new state. Changed buffers have updates, too. In the captured graph an update allocates
new tensors; a program overwrites the old tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.errors import quote
from poetmodel.torch.capturing.inputs import refuse
from poetmodel.torch.capturing.joint_graph import (
    ANNOTATION,
    BODY,
    InputKind,
    InputSpec,
    Joint,
    OutputKind,
)
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.graph.operators import is_random
from poetmodel.torch.graph.tensors import storage_key, to_meta
from poetmodel.torch.int8.front import replaced_parameter_ids
from poetmodel.torch.int8.training import (
    ROUNDINGS,
    QuantizedSGD,
    TrainedLayer,
    subtract_gradient,
    trained_layers,
)
from poetmodel.torch.step.optimizers import (
    InitialValue,
    LearningRate,
    OptimizerMoment,
    Optimizers,
    Rule,
    Sgd,
    find_owner,
    group_rules,
    optimizer_errors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import fx

    from poetmodel.torch.int8.gradients import RoundingDraws

NORM_EPS: Final = 1e-6
"""Term that ``torch.nn.utils.clip_grad_norm_`` adds to the norm, against division by 0."""

GRADIENT: Final = "grad"
"""Suffix of a gradient sum's name, after the parameter's name and a dot."""
BATCHES: Final = "accumulated_batches"
"""Name of the state tensor with the number of batches in gradient sums."""


def copy_tensors(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return copies in new memory; call this under ``torch.no_grad``."""
    return tuple(torch.empty_like(tensor, requires_grad=False).copy_(tensor) for tensor in tensors)


class CustomOperation:
    """A named operation of a captured graph that PyTorch has no operator for."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __repr__(self) -> str:
        return self.__name__

    def key_attributes(self) -> dict[str, Any]:
        """Return the attributes that determine the results, for cache keys; not a copy."""
        return vars(self)


class GradientNorm(CustomOperation):
    """Computes the factor of ``clip_grad_norm_``; only the strides of `parameters` are read."""

    def __init__(self, max_norm: float, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__("clip_grad_norm")
        self.max_norm = max_norm
        self._layout_examples = [to_meta(p) for p in parameters]

    def __call__(self, gradients: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Return the factor, at most 1; the gradients of one parameter are summed first."""
        pairs = zip(gradients, self._layout_examples, strict=True)
        norm = torch.nn.utils.get_total_norm(
            [sum_gradients(terms, example) for terms, example in pairs]
        )
        return torch.clamp(self.max_norm / (norm + NORM_EPS), max=1.0)


def sum_gradients(gradients: Sequence[torch.Tensor], layout_example: torch.Tensor) -> torch.Tensor:
    """Return the sum of gradients with the strides of `layout_example`; no input is changed.

    A single gradient that has these strides is returned itself.
    """
    gradient_sum, *further_gradients = gradients
    for gradient in further_gradients:
        gradient_sum = gradient_sum + gradient
    if gradient_sum.stride() != layout_example.stride():
        gradient_sum = torch.empty_like(layout_example, device=gradient_sum.device).copy_(
            gradient_sum
        )
    return gradient_sum


class Update(CustomOperation, ABC):
    """Computes new values of state, such as a parameter and its moments, or buffers."""

    rule: Rule | None = None
    """The optimizer's rule; None unless `Rule.update` computes the new values."""

    def __call__(self, state: Sequence[torch.Tensor], *operands: Any) -> tuple[torch.Tensor, ...]:
        """Return the new values of the state in new memory; `state` is unchanged."""
        new_state = copy_tensors(state)
        self.overwrite_state(new_state, *operands)
        return new_state

    @abstractmethod
    def overwrite_state(
        self, state: Sequence[torch.Tensor], *operands: Any, **options: bool
    ) -> None:
        """Overwrite the state with its new values; `options` depend on the class."""


class BufferUpdate(Update):
    """Copies new values, such as running statistics, into the buffers of a module."""

    def __init__(self) -> None:
        super().__init__("copy_")

    def overwrite_state(
        self, state: Sequence[torch.Tensor], *operands: Any, **options: bool
    ) -> None:
        """Copy the new values into the buffers; ``operands[0]`` has the values."""
        del options
        (values,) = operands
        torch._foreach_copy_(list(state), list(values))


class ParameterUpdate(Update):
    """The optimizer's step for one parameter."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule.op)
        self.rule: Rule = rule

    def writes_gradient(self, operands: Sequence[Any]) -> bool:
        """Return whether `overwrite_state` may overwrite the first gradient, or a copy of it."""
        gradients, _, *factors = operands
        return bool(len(gradients) > 1 or factors or self.rule.writes_gradient)

    def overwrite_state(
        self, state: Sequence[torch.Tensor], *operands: Any, **options: bool
    ) -> None:
        """Overwrite the parameter and its moments with their new values.

        `operands` are the gradients, the learning rate and any clipping factor. Options, False by
        default: ``owns_gradient`` allows overwriting the first gradient instead of a copy;
        ``is_first`` states that the moments have no value yet.
        """
        gradients, rate, *factors = operands
        parameter = state[0]
        gradient, *further_gradients = gradients
        is_owned = options.get("owns_gradient", False) or not self.writes_gradient(operands)
        if not is_owned or gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        for further_gradient in further_gradients:
            gradient.add_(further_gradient)
        for factor in factors:
            gradient.mul_(factor)
        self.rule.update(state, gradient, rate.item(), is_first=options.get("is_first", False))


class AccumulatingUpdate(ParameterUpdate):
    """The optimizer's step for one parameter, by the sum of its gradients over several batches.

    The last state tensor is the sum, which the last batch resets to 0.
    """

    def __init__(self, rule: Rule, batches: int) -> None:
        super().__init__(rule)
        self.batches = batches

    def overwrite_state(
        self, state: Sequence[torch.Tensor], *operands: Any, **options: bool
    ) -> None:
        """Add the gradients to the sum; the last batch updates the parameter and resets the sum.

        `operands` are the gradients, the learning rate, the number of earlier batches in the sum,
        and any clipping factor. The sum is not divided; no gradient is changed.
        """
        gradients, rate, count, *factors = operands
        *updated_state, gradient_sum = state
        for gradient in gradients:
            gradient_sum.add_(gradient)
        if count.item() == self.batches - 1:
            super().overwrite_state(
                updated_state,
                (gradient_sum,),
                rate,
                *factors,
                **{**options, "owns_gradient": False},
            )
            gradient_sum.zero_()


class QuantizedUpdate(Update):
    """The gradient-descent step of the int8 weights of a layer, the `site` of its rounding.

    Its state is the weight, the residual if weights have 16 bits, and the gradient sum if `batches`
    are summed. Without residuals, each update rounds by the numbers of `draw_numbers(site)`.
    """

    def __init__(
        self,
        rule: Sgd,
        *,
        site: int,
        draw_numbers: Callable[[int], RoundingDraws] | None = None,
        batches: int = 1,
    ) -> None:
        super().__init__("quantized_sgd")
        self.settings = rule
        self.site = site
        self.is_stochastic = draw_numbers is not None
        self.batches = batches
        self._draw_numbers = draw_numbers

    def key_attributes(self) -> dict[str, Any]:
        """Return the attributes by name, for cache keys, except the function that draws numbers."""
        return {name: value for name, value in vars(self).items() if name != "_draw_numbers"}

    def overwrite_state(
        self, state: Sequence[torch.Tensor], *operands: Any, **options: bool
    ) -> None:
        """Overwrite weights, residuals if any and, if batches are summed, the gradient sum.

        `operands` are the gradients of the real weights, the scales of the weights, the learning
        rate, the number of earlier batches if batches are summed, and any clipping factor. Batches
        before the last one only change the sum. `options` are ignored.
        """
        del options
        gradients, scale, rate, *optional_operands = operands
        layout_example = torch.empty_like(state[0], dtype=torch.float32, device="meta")
        gradient = sum_gradients(gradients, layout_example)
        if self.batches > 1:
            *state, gradient_sum = state
            count, *optional_operands = optional_operands
            gradient_sum.add_(gradient)
            if count.item() != self.batches - 1:
                return
            gradient = gradient_sum.clone()
            gradient_sum.zero_()
        for factor in optional_operands:
            gradient = gradient * factor
        subtract_gradient(
            state,
            gradient,
            scale,
            rate.item(),
            weight_decay=self.settings.weight_decay,
            maximize=self.settings.maximize,
            draws=self.next_draws(),
        )

    def next_draws(self) -> RoundingDraws | None:
        """Return the random numbers of the next update; None for weights with residuals."""
        return None if self._draw_numbers is None else self._draw_numbers(self.site)


class BatchCount(Update):
    """Counts the batches in the gradient sums; the last batch of a sum resets the count to 0."""

    def __init__(self, batches: int) -> None:
        super().__init__("count")
        self.batches = batches

    def overwrite_state(
        self, state: Sequence[torch.Tensor], *operands: Any, **options: bool
    ) -> None:
        """Increment the count, or reset it to 0 after the last batch."""
        del operands, options
        (count,) = state
        count.add_(1).remainder_(self.batches)


# -- in a captured graph -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainedParameter:
    """A parameter, its graph inputs and its gradients."""

    parameter: torch.Tensor
    arguments: list[InputSpec] = field(default_factory=list)
    """Graph inputs of the parameter; several if several modules share the parameter."""
    gradients: list[fx.Node] = field(default_factory=list)
    """Nodes of the gradients, in graph order."""


def check_optimizer(
    model: object,
    loss_fn: object,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    *,
    name: str | None = None,
    clip_grad_norm: float | None = None,
) -> None:
    """Raise `CaptureError` for untraceable updates or a lone limit, before a capture takes time."""
    label = name or type(model).__name__
    if optimizer is None:
        if clip_grad_norm is not None:
            raise CaptureError(f"{label}: clip_grad_norm: needs an optimizer; give optimizer=")
        return
    combined = Optimizers.combine(optimizer)
    refuse(label, (f"optimizer: {error}" for error in optimizer_errors(combined)))
    modules = [module for module in (model, loss_fn) if isinstance(module, torch.nn.Module)]
    layers = trained_layers(torch.nn.ModuleList(modules))
    refuse(label, _quantized_errors(layers, combined))


def extend_with_optimizer(
    joint: Joint,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
) -> Joint:
    """Return a captured step extended by an optimizer's step, with loss and outputs as results.

    Changes the graph of `joint`, whose optimizer `check_optimizer` accepts. Each execution reads
    one batch; only that for the last of `accumulate` batches updates parameters, by the sum of
    gradients.
    """
    combined = Optimizers.combine(optimizer)
    refuse(
        joint.name,
        (
            f"optimizer: {line} checks numbers, and updates do not wait for the result; leave the "
            "optimizer out, and call its step() yourself"
            for line in joint.finite_check_lines
        ),
    )
    parameters = _trained_parameters(joint)
    refuse(joint.name, _extension_errors(joint, combined, parameters, clip_grad_norm))
    return _OptimizerExtension(joint, combined, parameters, accumulate).extend(clip_grad_norm)


def _trained_parameters(joint: Joint) -> dict[int, _TrainedParameter]:
    """Return the parameters whose gradients are results, by ``id``, in the order of arguments."""
    parameters: dict[int, _TrainedParameter] = {}
    for argument in joint.arguments_of(InputKind.PARAMETER):
        value = joint.value(argument)
        parameters.setdefault(id(value), _TrainedParameter(parameter=value)).arguments.append(
            argument
        )
    node_positions = {
        node: position for position, node in enumerate(joint.graph_module.graph.nodes)
    }
    results = [r for r in joint.results if r.kind is OutputKind.GRADIENT]
    for result in sorted(results, key=lambda result: node_positions[result.node]):
        if result.target is not None and result.target.kind is InputKind.PARAMETER:
            parameters[id(joint.value(result.target))].gradients.append(result.node)
    return {
        key: trained_parameter
        for key, trained_parameter in parameters.items()
        if trained_parameter.gradients
    }


def _extension_errors(
    joint: Joint,
    optimizer: torch.optim.Optimizer,
    parameters: dict[int, _TrainedParameter],
    clip_grad_norm: float | None,
) -> Iterator[str]:
    """Yield an error per unsupported parameter (`parameters` by id), argument, result or option."""
    max_norm: object = clip_grad_norm
    is_valid_norm = (
        isinstance(max_norm, int | float) and not isinstance(max_norm, bool) and max_norm > 0
    )
    if max_norm is not None and not is_valid_norm:
        yield f"clip_grad_norm: expected a number above 0, got {quote(clip_grad_norm)}"
    optimizer_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, trained_parameter in parameters.items():
        name = trained_parameter.arguments[0].name
        if key not in optimizer_ids:
            yield (
                f"optimizer: parameter {name} requires a gradient, but the optimizer does not "
                "contain it; pass it to the optimizer, or freeze it (requires_grad_(False))"
            )
        if trained_parameter.parameter.is_complex():
            yield f"optimizer: parameter {name} is complex, and its update cannot be traced"
    step_ids = {id(joint.value(a)) for a in joint.arguments_of(InputKind.PARAMETER)}
    step_ids |= {id(p) for p in joint.module.parameters()} | replaced_parameter_ids(joint.module)
    if optimizer_ids - step_ids:
        yield (
            f"optimizer: {len(optimizer_ids - step_ids)} of its parameters belong neither to the "
            "model nor to the loss; construct it with model.parameters()"
        )
    for result in joint.results:
        target = result.target
        if target is None:
            continue
        is_gradient = result.kind is OutputKind.GRADIENT
        if is_gradient and not joint.value(target).requires_grad:
            continue  # a gradient of a frozen tensor exists on the meta device only, unused
        if target.kind is not (InputKind.PARAMETER if is_gradient else InputKind.BUFFER):
            reason = "requires a gradient" if is_gradient else "is changed in forward"
            yield f"optimizer: {target.name} {reason}, which a step with updates does not support"
    yield from _shared_memory_errors(joint)


def _quantized_errors(layers: Mapping[int, TrainedLayer], optimizer: Any) -> Iterator[str]:
    """Yield at most one error: of the first of `trained_layers` that an optimizer cannot train."""
    for rule, parameters in group_rules(optimizer):
        for layer in (layers[id(p)] for p in parameters if id(p) in layers):
            if not isinstance(rule, Sgd) or rule.momentum:
                name = f"{rule.op} with momentum" if isinstance(rule, Sgd) else rule.op
                yield f"optimizer: int8 weights are trained by SGD without momentum, got {name}"
                return
            if layer.rounding != ROUNDINGS[0] and not _counts_updates(optimizer, layer):
                yield (
                    f"optimizer: int8 weights with {layer.rounding} rounding need an optimizer "
                    "that counts updates: pmt.QuantizedSGD of the model that contains them"
                )
                return


def _counts_updates(optimizer: Any, layer: TrainedLayer) -> bool:
    """Return whether an optimizer counts the updates of an int8 layer, for stochastic rounding."""
    owner = find_owner(optimizer, layer.weight_gradient)
    return isinstance(owner, QuantizedSGD) and id(layer.weight_gradient) in owner.sites()


def _shared_memory_errors(joint: Joint) -> Iterator[str]:
    """Yield an error per argument that shares a storage with another tensor of an earlier one.

    An update may change both; disjoint views are refused, too. Only inputs of the user may share
    storages with each other.
    """
    first_arguments: dict[int, tuple[int, str]] = {}
    values = list(map(joint.value, joint.arguments))
    for argument, value in zip(joint.arguments, values, strict=True):
        if not isinstance(value, torch.Tensor) or argument.kind is InputKind.TANGENT:
            continue
        identity = id(value) if argument.kind is not InputKind.USER_INPUT else storage_key(value)
        first_identity, name = first_arguments.setdefault(
            storage_key(value), (identity, argument.name)
        )
        if first_identity != identity:
            yield f"optimizer: {name} and {argument.name} share memory; use separate tensors"


class _OptimizerExtension:
    """Adds the updates of an optimizer to a captured graph, in place; `parameters` are by ``id``.

    The gradients of `accumulate` batches are summed.
    """

    def __init__(
        self,
        joint: Joint,
        optimizer: torch.optim.Optimizer,
        parameters: dict[int, _TrainedParameter],
        accumulate: int,
    ) -> None:
        self.joint = joint
        self.graph = joint.graph_module.graph
        self.optimizer = optimizer
        self.parameters = parameters
        self.batches = accumulate
        self.new_arguments: list[InputSpec] = []
        self.gradient_sums: dict[int, tuple[fx.Node, ...]] = {}
        """Graph input of the gradient sum of a parameter, as a tuple, by the parameter's ``id``."""
        self.quantized_layers = trained_layers(joint.module)
        """Int8 layers by the ``id`` of the parameter whose gradients are those of the weights."""
        self.buffers = {id(joint.value(a)): a for a in joint.arguments_of(InputKind.BUFFER)}
        """Graph inputs of buffers by the ``id`` of the buffer."""

    def extend(self, clip_grad_norm: float | None) -> Joint:
        """Return the joint with updates, of results loss and outputs; erase unread operators."""
        count = self._add_gradient_sums() if self.batches > 1 else None
        factors = (
            () if clip_grad_norm is None else (self._add_gradient_norm(float(clip_grad_norm)),)
        )
        self._add_buffer_updates()
        groups = group_rules(self.optimizer)
        for group_index, (rule, parameters) in enumerate(groups):
            keys = [id(p) for p in parameters if id(p) in self.parameters]
            if keys:
                name = f"lr[{group_index}]" if len(groups) > 1 else "lr"
                rate = self._add_argument(name, LearningRate(self.optimizer, group_index))
                for key in keys:
                    self._add_update(self.parameters[key], rule, rate, factors, count)
        if count is not None:
            self._add_operation(BODY, BatchCount(self.batches), [count])
        retained_kinds = (OutputKind.LOSS, OutputKind.OUTPUT, OutputKind.STORED)
        results = tuple(r for r in self.joint.results if r.kind in retained_kinds)
        self.graph.output_node().args = (tuple(result.node for result in results),)
        self._erase_unread_nodes()
        arguments = (*self.joint.arguments, *self.new_arguments)
        return replace(
            self.joint,
            arguments=arguments,
            results=results,
            optimizer=self.optimizer,
            clip_grad_norm=clip_grad_norm,
        )

    def _erase_unread_nodes(self) -> None:
        """Erase operators without readers, except updates and random operators."""
        for node in reversed(self.graph.nodes):
            is_needed = node.op != "call_function" or isinstance(node.target, Update)
            if not (is_needed or is_random(node.target) or node.users):
                self.graph.erase_node(node)

    def _add_argument(
        self, name: str, source: LearningRate | OptimizerMoment | InitialValue
    ) -> fx.Node:
        """Insert a first graph input for a value of the optimizer; append it to `new_arguments`."""
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            node = self.graph.placeholder(f"optimizer_{len(self.new_arguments)}")
        is_rate = isinstance(source, LearningRate)
        kind = InputKind.LEARNING_RATE if is_rate else InputKind.MOMENT
        self.new_arguments.append(
            InputSpec(kind=kind, node=node, target="", name=name, optimizer_value=source)
        )
        return node

    def _add_operation(self, path: str, operation: CustomOperation, *arguments: Any) -> fx.Node:
        """Add a custom operation before the output, annotated with a module's path."""
        with self.graph.inserting_before(self.graph.output_node()):
            node = self.graph.call_function(operation, arguments)
        node.meta["custom"] = {ANNOTATION: path}
        return node

    def _add_gradient_norm(self, max_norm: float) -> fx.Node:
        """Add the operation that computes the clipping factor, also from gradient sums."""
        gradients = [
            [*self.gradient_sums.get(key, ()), *trained_parameter.gradients]
            for key, trained_parameter in self.parameters.items()
        ]
        norm = GradientNorm(
            max_norm,
            [trained_parameter.parameter for trained_parameter in self.parameters.values()],
        )
        return self._add_operation(BODY, norm, gradients)

    def _add_gradient_sums(self) -> fx.Node:
        """Add graph inputs for gradient sums and the batch count; return the node of the count."""
        for key, trained_parameter in self.parameters.items():
            zero = torch.zeros_like(trained_parameter.parameter, requires_grad=False)
            name = f"{self._weight_argument(trained_parameter).name}.{GRADIENT}"
            self.gradient_sums[key] = (self._add_argument(name, InitialValue(zero)),)
        return self._add_argument(BATCHES, InitialValue(torch.tensor(0)))

    def _weight_argument(self, trained_parameter: _TrainedParameter) -> InputSpec:
        """Return the graph input that names an update: the parameter's or the int8 weight's."""
        layer = self.quantized_layers.get(id(trained_parameter.parameter))
        return trained_parameter.arguments[0] if layer is None else self.buffers[id(layer.weight)]

    def _add_update(
        self,
        trained_parameter: _TrainedParameter,
        rule: Rule,
        rate: fx.Node,
        factors: tuple[fx.Node, ...],
        count: fx.Node | None,
    ) -> None:
        """Add a parameter's update, with inputs for moments; `count` is the batch count, if any."""
        layer = self.quantized_layers.get(id(trained_parameter.parameter))
        if layer is not None:
            self._add_quantized_update(
                layer, trained_parameter, rule, (rate, *([count] if count else ()), *factors)
            )
            return
        argument = trained_parameter.arguments[0]
        owner = find_owner(self.optimizer, trained_parameter.parameter)
        moments = [
            self._add_argument(
                f"{argument.name}.{key}", OptimizerMoment(owner, trained_parameter.parameter, key)
            )
            for key in rule.moment_keys
        ]
        state = [
            argument.node,
            *moments,
            *self.gradient_sums.get(id(trained_parameter.parameter), ()),
        ]
        update = ParameterUpdate(rule)
        operands = (rate, *factors)
        if count is not None:
            update = AccumulatingUpdate(rule, self.batches)
            operands = (rate, count, *factors)
        self._add_operation(argument.target, update, state, trained_parameter.gradients, *operands)

    def _add_quantized_update(
        self,
        layer: TrainedLayer,
        trained_parameter: _TrainedParameter,
        rule: Any,
        operands: tuple[fx.Node, ...],
    ) -> None:
        """Add the `QuantizedUpdate` of a layer; `operands` are those after the scales."""
        *weights, scale = (
            self.buffers[id(buffer)].node for buffer in (*layer.state, layer.weight_scale)
        )
        owner = find_owner(self.optimizer, trained_parameter.parameter)
        draw_numbers = None
        if layer.rounding != ROUNDINGS[0]:
            group_index = next(
                index
                for index, param_group in enumerate(owner.param_groups)
                if any(p is trained_parameter.parameter for p in param_group["params"])
            )
            draw_numbers = partial(owner.draws, group_index)
        sites = owner.sites() if isinstance(owner, QuantizedSGD) else {}
        update = QuantizedUpdate(
            rule,
            site=sites.get(id(trained_parameter.parameter), 0),
            draw_numbers=draw_numbers,
            batches=self.batches,
        )
        state = [*weights, *self.gradient_sums.get(id(trained_parameter.parameter), ())]
        path = self._weight_argument(trained_parameter).target
        self._add_operation(path, update, state, trained_parameter.gradients, scale, *operands)

    def _add_buffer_updates(self) -> None:
        """Add one update per module with changed buffers; refuse a buffer changed by two names."""
        updates_of_owner: dict[str, list[tuple[fx.Node, fx.Node]]] = {}
        buffer_ids: set[int] = set()
        for result in self.joint.results:
            target = result.target
            if result.kind is not OutputKind.MUTATION or target is None:
                continue
            key = id(self.joint.value(target))
            if key in buffer_ids:
                raise CaptureError(
                    f"{self.joint.name}: optimizer: buffer {target.name} has several names and "
                    "changes; use a separate buffer in each module"
                )
            buffer_ids.add(key)
            owner = target.target.rpartition(".")[0] or BODY
            updates_of_owner.setdefault(owner, []).append((target.node, result.node))
        for owner, pairs in updates_of_owner.items():
            state, values = zip(*pairs, strict=True)
            self._add_operation(owner, BufferUpdate(), list(state), list(values))
