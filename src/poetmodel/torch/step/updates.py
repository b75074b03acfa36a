"""Updates: the optimizer's step as operations of a captured graph, one for each parameter.

Each reads the state that it replaces, the gradients and the learning rate, and returns the new
state. As part of the graph it makes new tensors; a program writes them where the old ones are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.errors import shown
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
from poetmodel.torch.graph.tensors import storage_key
from poetmodel.torch.int8.front import stood_for
from poetmodel.torch.int8.training import (
    ROUNDINGS,
    QuantizedSGD,
    TrainedLayer,
    subtract_gradient,
    trained_layers,
)
from poetmodel.torch.step.optimizers import (
    FirstValue,
    LearningRate,
    Optimizers,
    OptimizerSlot,
    Rule,
    Sgd,
    optimizer_faults,
    owner_of,
    rules_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx

    from poetmodel.torch.int8.gradients import RoundingDraws

CLIPPED: Final = 1e-6
"""Term that ``torch.nn.utils.clip_grad_norm_`` adds to the norm, lest it divides by 0."""

GRADIENT: Final = "grad"
"""Name of the sum of a parameter's gradients, after the parameter."""
BATCHES: Final = "accumulated_batches"
"""Name of the number of batches in such sums."""


def copies(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the same values in memory of their own."""
    return tuple(torch.empty_like(tensor, requires_grad=False).copy_(tensor) for tensor in tensors)


class CustomOperation:
    """An operation of a captured graph that PyTorch has none for, with its name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __repr__(self) -> str:
        return self.__name__

    def form(self) -> dict[str, Any]:
        """Return the attributes on which its results depend, by name."""
        return vars(self)


class GradientNorm(CustomOperation):
    """Factor of all gradients so that their norm together is at most a number.

    It is the arithmetic of ``torch.nn.utils.clip_grad_norm_``. Gradients are read in the order and
    the memory format of their `parameters`, whose values nobody needs for that.
    """

    def __init__(self, max_norm: float, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__("clip_grad_norm")
        self.max_norm = max_norm
        self._formats = [
            torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
            for p in parameters
        ]

    def __call__(self, gradients: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Return the factor; a parameter may have several gradients, which are summed."""
        pairs = zip(gradients, self._formats, strict=True)
        norm = torch.nn.utils.get_total_norm([summed(terms, like) for terms, like in pairs])
        return torch.clamp(self.max_norm / (norm + CLIPPED), max=1.0)


def summed(gradients: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the sum of gradients of one parameter, in its memory format."""
    total, *more = gradients
    for gradient in more:
        total = total + gradient
    if total.stride() != like.stride():
        total = torch.empty_like(like, device=total.device).copy_(total)
    return total


class Update(CustomOperation, ABC):
    """Gives state new values: a parameter and its moments, or buffers."""

    rule: Rule | None = None

    def __call__(self, state: Sequence[torch.Tensor], *others: Any) -> tuple[torch.Tensor, ...]:
        """Return the new values in new memory."""
        new = copies(state)
        self.replace(new, *others)
        return new

    @abstractmethod
    def replace(self, state: Sequence[torch.Tensor], *others: Any, **options: bool) -> None:
        """Write the new values in the memory of the old ones."""


class BufferUpdate(Update):
    """Copies new values, such as running statistics, into the buffers of a module."""

    def __init__(self) -> None:
        super().__init__("copy_")

    def replace(self, state: Sequence[torch.Tensor], *others: Any, **options: bool) -> None:
        """Copy the new values into the buffers."""
        del options
        (values,) = others
        torch._foreach_copy_(list(state), list(values))


class ParameterUpdate(Update):
    """The optimizer's step of one parameter."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule.op)
        self.rule: Rule = rule

    def writes_gradient(self, others: Sequence[Any]) -> bool:
        """Whether it needs memory of the size of the gradient; `others` as for `replace`."""
        gradients, _, *factors = others
        return bool(len(gradients) > 1 or factors or self.rule.writes_gradient)

    def replace(self, state: Sequence[torch.Tensor], *others: Any, **options: bool) -> None:
        """Update parameter and moments.

        `others` are the gradients, the learning rate, and the factor of the gradients where they
        are clipped. With ``owned`` the memory of the first gradient may be written over; ``first``
        says that the moments have no value yet.
        """
        gradients, rate, *factors = others
        parameter = state[0]
        gradient, *more = gradients
        owned = options.get("owned", False) or not self.writes_gradient(others)
        if not owned or gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        for other in more:
            gradient.add_(other)
        for factor in factors:
            gradient.mul_(factor)
        self.rule.update(state, gradient, rate.item(), first=options.get("first", False))


class AccumulatingUpdate(ParameterUpdate):
    """The optimizer's step of one parameter by the sum of its gradients over some batches.

    The last tensor of its state is the sum so far. Another argument, after the learning rate, is
    how many batches that is: with the last one come the update, and a sum of 0.
    """

    def __init__(self, rule: Rule, batches: int) -> None:
        super().__init__(rule)
        self.batches = batches

    def replace(self, state: Sequence[torch.Tensor], *others: Any, **options: bool) -> None:
        """Add the gradients, and update where the batch is the last one; `others` as above."""
        gradients, rate, count, *factors = others
        *kept, total = state
        for gradient in gradients:
            total.add_(gradient)
        if count.item() == self.batches - 1:
            super().replace(kept, (total,), rate, *factors, **{**options, "owned": False})
            total.zero_()


class QuantizedUpdate(Update):
    """The step of gradient descent of the int8 weights of a layer.

    Its state is the weight, the residual if weights have 16 bits, and the sum of gradients if
    several batches are summed.

    Parameters
    ----------
    rule : Sgd
        Without momentum.
    site : int
        Number of the layer, of stochastic rounding: see `RoundingDraws`.
    draws : callable, optional
        Returns the random numbers of the next update, for weights without residuals.
    batches : int, optional
        Batches whose gradients are summed before each step.
    """

    def __init__(
        self,
        rule: Sgd,
        *,
        site: int,
        draws: Callable[[int], RoundingDraws] | None = None,
        batches: int = 1,
    ) -> None:
        super().__init__("quantized_sgd")
        self.settings = rule
        self.site = site
        self.is_stochastic = draws is not None
        self.batches = batches
        self._draws = draws

    def form(self) -> dict[str, Any]:
        """Return the attributes on which its results depend but the count of updates, by name."""
        return {name: value for name, value in vars(self).items() if name != "_draws"}

    def replace(self, state: Sequence[torch.Tensor], *others: Any, **options: bool) -> None:
        """Update the weights, and the sum of gradients if several batches are summed.

        `others` are the gradients of the real weights, the scales of the results, the learning
        rate, the number of batches so far if they are summed, and the factor of the gradients if
        they are clipped.
        """
        del options
        gradients, scale, rate, *more = others
        like = torch.empty_like(state[0], dtype=torch.float32, device="meta")
        gradient = summed(gradients, like)
        if self.batches > 1:
            *state, total = state
            count, *more = more
            total.add_(gradient)
            if count.item() != self.batches - 1:
                return
            gradient = total.clone()
            total.zero_()
        for factor in more:
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
        return None if self._draws is None else self._draws(self.site)


class BatchCount(Update):
    """Counts batches, from 0 again after the last one before an update."""

    def __init__(self, batches: int) -> None:
        super().__init__("count")
        self.batches = batches

    def replace(self, state: Sequence[torch.Tensor], *others: Any, **options: bool) -> None:
        """Count one."""
        del others, options
        (count,) = state
        count.add_(1).remainder_(self.batches)


# -- in a captured graph -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """A parameter with its gradients."""

    parameter: torch.Tensor
    arguments: list[InputSpec] = field(default_factory=list)
    """Its names in the graph, mostly one."""
    gradients: list[fx.Node] = field(default_factory=list)
    """In the order of the graph."""


def with_optimizer(
    joint: Joint,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
) -> Joint:
    """Return a captured step that ends with the step of an optimizer; the loss is its only result.

    With `accumulate` it sums gradients of so many batches before the optimizer's step.

    Raises `CaptureError` if PyTorch would do what updates of the parameters do not.
    """
    own = Optimizers.of(optimizer)
    refuse(joint.name, (f"optimizer: {fault}" for fault in optimizer_faults(own)))
    refuse(
        joint.name,
        (
            f"optimizer: {line} checks numbers, and updates do not wait for the answer; leave "
            "the optimizer out, and call its step() yourself"
            for line in joint.checked
        ),
    )
    parameters = _trained(joint)
    refuse(joint.name, _faults(joint, own, parameters, clip_grad_norm))
    return _Extension(joint, own, parameters, accumulate).extended(clip_grad_norm)


def _trained(joint: Joint) -> dict[int, _Trained]:
    """Return the parameters that have gradients, by identity, in the order of the model."""
    parameters: dict[int, _Trained] = {}
    for argument in joint.of(InputKind.PARAMETER):
        value = joint.value(argument)
        parameters.setdefault(id(value), _Trained(parameter=value)).arguments.append(argument)
    order = {node: k for k, node in enumerate(joint.graph_module.graph.nodes)}
    results = [r for r in joint.results if r.kind is OutputKind.GRADIENT]
    for result in sorted(results, key=lambda result: order[result.node]):
        if result.target is not None and result.target.kind is InputKind.PARAMETER:
            parameters[id(joint.value(result.target))].gradients.append(result.node)
    return {key: trained for key, trained in parameters.items() if trained.gradients}


def _faults(
    joint: Joint,
    optimizer: torch.optim.Optimizer,
    parameters: dict[int, _Trained],
    clip_grad_norm: float | None,
) -> Iterator[str]:
    norm: object = clip_grad_norm
    is_norm = isinstance(norm, int | float) and not isinstance(norm, bool) and norm > 0
    if norm is not None and not is_norm:
        yield f"clip_grad_norm: expected a number above 0, got {shown(clip_grad_norm)}"
    ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, trained in parameters.items():
        name = trained.arguments[0].name
        if key not in ours:
            yield (
                f"optimizer: parameter {name} requires a gradient, and the optimizer does not have "
                "it; give it to the optimizer, or freeze it (requires_grad_(False))"
            )
        if trained.parameter.is_complex():
            yield f"optimizer: parameter {name} is complex, and its update cannot be traced"
    yield from _quantized_faults(joint, own=optimizer)
    known = {id(joint.value(a)) for a in joint.of(InputKind.PARAMETER)}
    known |= {id(p) for p in joint.module.parameters()} | stood_for(joint.module)
    if ours - known:
        yield (
            f"optimizer: {len(ours - known)} of its parameters are none of the model or the loss; "
            "make it of model.parameters()"
        )
    for result in joint.results:
        target = result.target
        if target is None:
            continue
        given = result.kind is OutputKind.GRADIENT
        if given and not joint.value(target).requires_grad:
            continue  # on the meta device there may be such; nobody wants them
        if target.kind is not (InputKind.PARAMETER if given else InputKind.BUFFER):
            what = "requires a gradient" if given else "is changed in forward"
            yield f"optimizer: {target.name} {what}, which a step with its updates does not do"
    yield from _shared_memory(joint)


def _quantized_faults(joint: Joint, own: Any) -> Iterator[str]:
    """Yield why an optimizer does not train the int8 layers of a step."""
    layers = trained_layers(joint.module)
    for rule, parameters in rules_of(own):
        for layer in (layers[id(p)] for p in parameters if id(p) in layers):
            if not isinstance(rule, Sgd) or rule.momentum:
                got = f"{rule.op} with momentum" if isinstance(rule, Sgd) else rule.op
                yield f"optimizer: int8 weights are trained by SGD without momentum, got {got}"
                return
            if layer.rounding != ROUNDINGS[0] and not _counts(own, layer):
                yield (
                    f"optimizer: int8 weights with {layer.rounding} rounding need one that counts "
                    "updates: pmt.QuantizedSGD of the model that has them"
                )
                return


def _counts(optimizer: Any, layer: TrainedLayer) -> bool:
    """Whether an optimizer has the number of the next update of an int8 layer."""
    owner = owner_of(optimizer, layer.weight_gradient)
    return isinstance(owner, QuantizedSGD) and id(layer.weight_gradient) in owner.sites()


def _shared_memory(joint: Joint) -> Iterator[str]:
    """Yield where tensors share memory that are not the same: one would change with the other."""
    there: dict[int, tuple[int, str]] = {}
    values = list(map(joint.value, joint.arguments))
    for argument, value in zip(joint.arguments, values, strict=True):
        if not isinstance(value, torch.Tensor) or argument.kind is InputKind.TANGENT:
            continue
        identity = id(value) if argument.kind is not InputKind.USER_INPUT else storage_key(value)
        other, name = there.setdefault(storage_key(value), (identity, argument.name))
        if other != identity:
            yield f"optimizer: {name} and {argument.name} share memory; give each its own"


class _Extension:
    """A captured graph on its way to one with updates."""

    def __init__(
        self,
        joint: Joint,
        optimizer: torch.optim.Optimizer,
        parameters: dict[int, _Trained],
        accumulate: int,
    ) -> None:
        self.joint = joint
        self.graph = joint.graph_module.graph
        self.optimizer = optimizer
        self.parameters = parameters
        self.batches = accumulate
        self.new: list[InputSpec] = []
        self.totals: dict[int, tuple[fx.Node, ...]] = {}
        """The sum of the gradients of a parameter so far, by its identity."""
        self.quantized = trained_layers(joint.module)
        """Int8 layers by the identity of the parameter that stands for their weights."""
        self.buffers = {id(joint.value(a)): a for a in joint.of(InputKind.BUFFER)}

    def extended(self, clip_grad_norm: float | None) -> Joint:
        """Put the operations in front of the graph's output."""
        count = self._accumulate() if self.batches > 1 else None
        factors = () if clip_grad_norm is None else (self._norm(float(clip_grad_norm)),)
        self._update_buffers()
        groups = rules_of(self.optimizer)
        for number, (rule, parameters) in enumerate(groups):
            keys = [id(p) for p in parameters if id(p) in self.parameters]
            if keys:
                name = f"lr[{number}]" if len(groups) > 1 else "lr"
                rate = self._argument(name, LearningRate(self.optimizer, number))
                for key in keys:
                    self._update(self.parameters[key], rule, rate, factors, count)
        if count is not None:
            self._operation(BODY, BatchCount(self.batches), [count])
        returned = (OutputKind.LOSS, OutputKind.OUTPUT)
        results = tuple(r for r in self.joint.results if r.kind in returned)
        self.graph.output_node().args = (tuple(result.node for result in results),)
        self._erase_unread()
        arguments = (*self.joint.arguments, *self.new)
        return replace(
            self.joint,
            arguments=arguments,
            results=results,
            optimizer=self.optimizer,
            clip_grad_norm=clip_grad_norm,
        )

    def _erase_unread(self) -> None:
        """Take out what nothing reads now that the loss is the only result."""
        for node in reversed(self.graph.nodes):
            own = node.op != "call_function" or isinstance(node.target, Update)
            draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if not (own or draws or node.users):
                self.graph.erase_node(node)

    def _argument(self, name: str, held: LearningRate | OptimizerSlot | FirstValue) -> fx.Node:
        """Add an input of the graph that the optimizer holds, or the step beside it."""
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            node = self.graph.placeholder(f"optimizer_{len(self.new)}")
        is_rate = isinstance(held, LearningRate)
        kind = InputKind.LEARNING_RATE if is_rate else InputKind.MOMENT
        self.new.append(InputSpec(kind=kind, node=node, target="", name=name, held=held))
        return node

    def _operation(self, path: str, operation: CustomOperation, *arguments: Any) -> fx.Node:
        with self.graph.inserting_before(self.graph.output_node()):
            node = self.graph.call_function(operation, arguments)
        node.meta["custom"] = {ANNOTATION: path}
        return node

    def _norm(self, max_norm: float) -> fx.Node:
        gradients = [
            [*self.totals.get(key, ()), *trained.gradients]
            for key, trained in self.parameters.items()
        ]
        norm = GradientNorm(max_norm, [trained.parameter for trained in self.parameters.values()])
        return self._operation(BODY, norm, gradients)

    def _accumulate(self) -> fx.Node:
        """Add the sums of gradients so far; return how many batches they are of."""
        for key, trained in self.parameters.items():
            zero = torch.zeros_like(trained.parameter, requires_grad=False)
            name = f"{self._shown(trained).name}.{GRADIENT}"
            self.totals[key] = (self._argument(name, FirstValue(zero)),)
        return self._argument(BATCHES, FirstValue(torch.tensor(0)))

    def _shown(self, trained: _Trained) -> InputSpec:
        """Return the argument whose name nodes and state of an update have: the weight itself."""
        layer = self.quantized.get(id(trained.parameter))
        return trained.arguments[0] if layer is None else self.buffers[id(layer.weight)]

    def _update(
        self,
        trained: _Trained,
        rule: Rule,
        rate: fx.Node,
        factors: tuple[fx.Node, ...],
        count: fx.Node | None,
    ) -> None:
        layer = self.quantized.get(id(trained.parameter))
        if layer is not None:
            self._update_quantized(
                layer, trained, rule, (rate, *([count] if count else ()), *factors)
            )
            return
        argument = trained.arguments[0]
        owner = owner_of(self.optimizer, trained.parameter)
        moments = [
            self._argument(f"{argument.name}.{key}", OptimizerSlot(owner, trained.parameter, key))
            for key in rule.moments
        ]
        state = [argument.node, *moments, *self.totals.get(id(trained.parameter), ())]
        update = ParameterUpdate(rule)
        others = (rate, *factors)
        if count is not None:
            update = AccumulatingUpdate(rule, self.batches)
            others = (rate, count, *factors)
        self._operation(argument.target, update, state, trained.gradients, *others)

    def _update_quantized(
        self, layer: TrainedLayer, trained: _Trained, rule: Any, others: tuple[fx.Node, ...]
    ) -> None:
        """Add the update of the int8 weights that a parameter stands for."""
        *weights, scale = (
            self.buffers[id(buffer)].node for buffer in (*layer.state, layer.weight_scale)
        )
        owner = owner_of(self.optimizer, trained.parameter)
        draws = None
        if layer.rounding != ROUNDINGS[0]:
            group = next(
                k
                for k, each in enumerate(owner.param_groups)
                if any(p is trained.parameter for p in each["params"])
            )
            draws = partial(owner.draws, group)
        sites = owner.sites() if isinstance(owner, QuantizedSGD) else {}
        update = QuantizedUpdate(
            rule,
            site=sites.get(id(trained.parameter), 0),
            draws=draws,
            batches=self.batches,
        )
        state = [*weights, *self.totals.get(id(trained.parameter), ())]
        path = self._shown(trained).target
        self._operation(path, update, state, trained.gradients, scale, *others)

    def _update_buffers(self) -> None:
        """Add an operation for each module whose buffers change."""
        changed: dict[str, list[tuple[fx.Node, fx.Node]]] = {}
        seen: set[int] = set()
        for result in self.joint.results:
            target = result.target
            if result.kind is not OutputKind.MUTATION or target is None:
                continue
            key = id(self.joint.value(target))
            if key in seen:
                raise CaptureError(
                    f"{self.joint.name}: optimizer: buffer {target.name} has several names and "
                    "changes; give each module its own"
                )
            seen.add(key)
            owner = target.target.rpartition(".")[0] or BODY
            changed.setdefault(owner, []).append((target.node, result.node))
        for owner, pairs in changed.items():
            state, values = zip(*pairs, strict=True)
            self._operation(owner, BufferUpdate(), list(state), list(values))
