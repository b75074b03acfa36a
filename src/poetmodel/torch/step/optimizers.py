"""Optimizers: what a step of one does to one parameter, in the memory of its state.

The operations and their order are those of ``torch.optim``, so that every bit is the same. What
eager PyTorch makes new memory for is written over the gradient, which nobody reads after it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import torch

from poetmodel.errors import shown
from poetmodel.torch.capturing.inputs import refuse
from poetmodel.torch.capturing.signature import InputKind, Joint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

ACCEPTED: Final = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)
"""The optimizers whose updates can be traced."""
NADAM_DECAY: Final = 0.96
"""Base of the rate at which NAdam's momentum approaches its full value, to the power of a setting:
see Dozat, Incorporating Nesterov Momentum into Adam (2016)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """A step of ``torch.optim.SGD``."""

    weight_decay: float
    momentum: float
    dampening: float
    nesterov: bool
    maximize: bool

    needs_scratch: ClassVar[bool] = False

    @property
    def op(self) -> str:
        """The name of the operator."""
        return "sgd"

    @property
    def moments(self) -> tuple[str, ...]:
        """The state that it keeps for a parameter, by the keys of ``optimizer.state``."""
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def writes_gradient(self) -> bool:
        """Whether it needs memory of the size of the gradient: that of the gradient."""
        return bool(self.maximize or self.weight_decay or (self.momentum and self.nesterov))

    @property
    def flops_per_element(self) -> int:
        """FLOP for each element of the parameter."""
        averaged = 3 if self.momentum else 0
        return 2 + bool(self.weight_decay) * 2 + averaged + bool(averaged and self.nesterov) * 2

    def update(
        self, state: Sequence[torch.Tensor], gradient: torch.Tensor, lr: float, *, first: bool
    ) -> None:
        """Update parameter and momentum, of which `first` says that it begins with the gradient."""
        parameter, *moments = state
        if self.maximize:
            gradient.neg_()
        if self.weight_decay:
            gradient.add_(parameter, alpha=self.weight_decay)
        direction = gradient
        for buffer in moments:
            if first:
                buffer.copy_(gradient)
            else:
                buffer.mul_(self.momentum).add_(gradient, alpha=1 - self.dampening)
            direction = gradient.add_(buffer, alpha=self.momentum) if self.nesterov else buffer
        parameter.add_(direction, alpha=-lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """A step of ``torch.optim.Adam``, or of ``AdamW`` where the weight decay is decoupled."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    decoupled_weight_decay: bool

    writes_gradient: ClassVar[bool] = True
    needs_scratch: ClassVar[bool] = False

    @property
    def decouples(self) -> bool:
        """Whether the weight decay is none of the gradient."""
        return self.decoupled_weight_decay

    @property
    def op(self) -> str:
        """The name of the operator."""
        return "adamw" if self.decoupled_weight_decay else "adam"

    @property
    def moments(self) -> tuple[str, ...]:
        """The state that it keeps for a parameter, by the keys of ``optimizer.state``."""
        return ("step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.amsgrad else []))

    @property
    def flops_per_element(self) -> int:
        """FLOP for each element of the parameter."""
        return 13 + self.amsgrad + _decay_flops(self)

    def update(
        self, state: Sequence[torch.Tensor], gradient: torch.Tensor, lr: float, *, first: bool
    ) -> None:
        """Update parameter, count of steps and moments; these are 0 before the first step."""
        del first
        parameter, count, mean, square, *largest = state
        beta1, beta2 = self.betas
        count.add_(1)
        _prepare(self, parameter, gradient, lr)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        for most in largest:
            torch.maximum(most, square, out=most)
            square = most
        steps = _number(count)
        step_size = lr / (1 - beta1**steps)
        root = (1 - beta2**steps) ** 0.5
        denominator = torch.sqrt(square, out=gradient).div_(root).add_(self.eps)
        parameter.addcdiv_(mean, denominator, value=-step_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class NAdam:
    """A step of ``torch.optim.NAdam``: Adam with Nesterov's momentum."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    momentum_decay: float
    maximize: bool
    decoupled_weight_decay: bool
    foreach: bool | None

    op: ClassVar[str] = "nadam"
    moments: ClassVar[tuple[str, ...]] = ("step", "mu_product", "exp_avg", "exp_avg_sq")
    needs_scratch: ClassVar[bool] = True

    @property
    def decouples(self) -> bool:
        """Whether the weight decay is none of the gradient."""
        return self.decoupled_weight_decay

    @property
    def writes_gradient(self) -> bool:
        """Whether it changes the gradient."""
        return _changes_gradient(self)

    @property
    def flops_per_element(self) -> int:
        """FLOP for each element of the parameter."""
        return 16 + _decay_flops(self)

    def update(
        self, state: Sequence[torch.Tensor], gradient: torch.Tensor, lr: float, *, first: bool
    ) -> None:
        """Update parameter, count of steps, product of momenta and moments."""
        del first
        parameter, count, product, mean, square = state
        beta1, beta2 = self.betas
        count.add_(1)
        steps = _number(count)
        _prepare(self, parameter, gradient, lr)
        momentum, following = (
            beta1 * (1.0 - 0.5 * NADAM_DECAY ** (number * self.momentum_decay))
            for number in (steps, steps + 1)
        )
        product.mul_(momentum)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if self.foreach:  # PyTorch's other way has other bits
            denominator = square.sqrt().div_((1 - beta2**steps) ** 0.5)
        else:
            denominator = square.div(1 - beta2**steps).sqrt_()
        denominator.add_(self.eps)
        # On the meta device there is no number, and any will do that is no 1.
        so_far = 0.5 if product.is_meta else product.item()
        parameter.addcdiv_(gradient, denominator, value=-lr * (1.0 - momentum) / (1.0 - so_far))
        parameter.addcdiv_(mean, denominator, value=-lr * following / (1.0 - so_far * following))


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsProp:
    """A step of ``torch.optim.RMSprop``."""

    alpha: float
    eps: float
    weight_decay: float
    momentum: float
    centered: bool
    maximize: bool

    op: ClassVar[str] = "rmsprop"
    decouples: ClassVar[bool] = False
    needs_scratch: ClassVar[bool] = True

    @property
    def moments(self) -> tuple[str, ...]:
        """The state that it keeps for a parameter, by the keys of ``optimizer.state``."""
        averaged = ("momentum_buffer",) if self.momentum > 0 else ()
        return ("step", "square_avg", *averaged, *(("grad_avg",) if self.centered else ()))

    @property
    def writes_gradient(self) -> bool:
        """Whether it changes the gradient."""
        return _changes_gradient(self)

    @property
    def flops_per_element(self) -> int:
        """FLOP for each element of the parameter."""
        return 9 + 5 * self.centered + 2 * (self.momentum > 0) + _decay_flops(self)

    def update(
        self, state: Sequence[torch.Tensor], gradient: torch.Tensor, lr: float, *, first: bool
    ) -> None:
        """Update parameter, count of steps and moments; these are 0 before the first step."""
        del first
        parameter, count, square, *others = state
        count.add_(1)
        _prepare(self, parameter, gradient, lr)
        square.mul_(self.alpha).addcmul_(gradient, gradient, value=1 - self.alpha)
        if self.centered:
            mean = others.pop()
            mean.lerp_(gradient, 1 - self.alpha)
            denominator = square.addcmul(mean, mean, value=-1).sqrt_()
        else:
            denominator = square.sqrt()
        denominator.add_(self.eps)
        for buffer in others:
            buffer.mul_(self.momentum).addcdiv_(gradient, denominator)
            parameter.add_(buffer, alpha=-lr)
        if not others:
            parameter.addcdiv_(gradient, denominator, value=-lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    """A step of ``torch.optim.Adagrad``."""

    lr_decay: float
    eps: float
    weight_decay: float
    maximize: bool

    op: ClassVar[str] = "adagrad"
    moments: ClassVar[tuple[str, ...]] = ("step", "sum")
    decouples: ClassVar[bool] = False
    needs_scratch: ClassVar[bool] = True

    @property
    def writes_gradient(self) -> bool:
        """Whether it changes the gradient."""
        return _changes_gradient(self)

    @property
    def flops_per_element(self) -> int:
        """FLOP for each element of the parameter."""
        return 7 + _decay_flops(self)

    def update(
        self, state: Sequence[torch.Tensor], gradient: torch.Tensor, lr: float, *, first: bool
    ) -> None:
        """Update parameter, count of steps and sum of squares."""
        del first
        parameter, count, total = state
        count.add_(1)
        _prepare(self, parameter, gradient, lr)
        rate = lr / (1 + (_number(count) - 1) * self.lr_decay)
        total.addcmul_(gradient, gradient, value=1)
        parameter.addcdiv_(gradient, total.sqrt().add_(self.eps), value=-rate)


def _changes_gradient(rule: NAdam | RmsProp | Adagrad) -> bool:
    return rule.maximize or bool(rule.weight_decay and not rule.decouples)


def _decay_flops(rule: Adam | NAdam | RmsProp | Adagrad) -> int:
    """Return the FLOP of weight decay for each element."""
    return (1 if rule.decouples else 2) if rule.weight_decay else 0


def _prepare(
    rule: Adam | NAdam | RmsProp | Adagrad,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    lr: float,
) -> None:
    """Give the gradient its sign, and let the weights decay."""
    if rule.maximize:
        gradient.neg_()
    if rule.weight_decay and rule.decouples:
        parameter.mul_(1 - lr * rule.weight_decay)
    elif rule.weight_decay:
        gradient.add_(parameter, alpha=rule.weight_decay)


def _number(count: torch.Tensor) -> float:
    """Return a count of steps; on the meta device there is no number, and any will do."""
    return 1.0 if count.is_meta else count.item()


Rule: TypeAlias = Sgd | Adam | NAdam | RmsProp | Adagrad
"""Rule of an optimizer for the parameters of one group."""

_RULES: Final[Mapping[str, type[Rule]]] = {
    "momentum_decay": NAdam,
    "betas": Adam,
    "alpha": RmsProp,
    "lr_decay": Adagrad,
    "dampening": Sgd,
}
"""Rules by a setting; a group's is the first one whose setting it has."""


def rule_of(group: Mapping[str, Any]) -> Rule:
    """Return the rule of an optimizer for the parameters of a group that has no `group_faults`."""
    kind = next(kind for key, kind in _RULES.items() if key in group)
    settings = {field.name: group[field.name] for field in fields(kind)}
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])
    return kind(**settings)


def optimizer_faults(optimizer: object) -> Iterator[str]:
    """Yield why the updates of an optimizer cannot be traced, whatever its model is."""
    kind = type(optimizer)
    if kind not in ACCEPTED:
        # A class of the same name may be a user's own.
        got = f"{kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else ""
        *names, last = (known.__name__ for known in ACCEPTED)
        wanted = f"{', '.join(names)} or {last} of torch.optim"
        yield f"expected {wanted}, got {got or shown(optimizer)}"
        return
    accepted: Any = optimizer
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(getattr(accepted, name) for name in hooks):
        yield "it has hooks on its steps, which a traced update does not run; remove them"
    for number, group in enumerate(accepted.param_groups):
        for fault in _group_faults(group):
            yield f"group {number}: {fault}"


def _group_faults(group: Mapping[str, Any]) -> Iterator[str]:
    for key in ("fused", "capturable", "differentiable"):
        if group.get(key):
            yield f"{key}=True cannot be traced; leave it out"
    for key, value in group.items():
        numbers = value if key == "betas" else (value,)
        if key != "params" and any(isinstance(number, torch.Tensor) for number in numbers):
            yield f"{key} is a tensor; expected a number, such as {key}={_plain(value)}"
        elif key == "lr" and not isinstance(value, Real):
            yield f"lr: expected a number, got {shown(value)}"


def _plain(value: Any) -> object:
    """Return numbers in place of tensors."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True, slots=True, eq=False)
class LearningRate:
    """The learning rate of one group of an optimizer: an input of each step."""

    optimizer: torch.optim.Optimizer
    group: int

    def value(self) -> torch.Tensor:
        """Return it as it is now, with all digits that Python's number has."""
        rate = float(self.optimizer.param_groups[self.group]["lr"])
        return torch.tensor(rate, dtype=torch.float64, device="cpu")


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerSlot:
    """State of an optimizer for a parameter under one key."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    key: str

    @property
    def is_new(self) -> bool:
        """Whether no step of the optimizer has made it yet."""
        return self.optimizer.state.get(self.parameter, {}).get(self.key) is None

    @property
    def begins_with_gradient(self) -> bool:
        """Whether it has no value yet that could be dampened; exported code has NaN there."""
        if self.key != "momentum_buffer" or not self.is_new:
            return False
        groups = self.optimizer.param_groups
        group = next(g for g in groups if any(p is self.parameter for p in g["params"]))
        return bool(group.get("dampening"))

    @property
    def is_added_to(self) -> bool:
        """Whether a first step begins with a number in it that is not 0: a sum of squares."""
        return self.key == "sum"

    def value(self) -> torch.Tensor:
        """Return it as it is now, or as it is before the first step."""
        if not self.is_new:
            value: torch.Tensor = self.optimizer.state[self.parameter][self.key]
            return value
        if self.key in ("step", "mu_product"):
            wide = torch.get_default_dtype() == torch.float64
            kind = torch.float64 if wide else torch.float32
            return torch.tensor(float(self.key == "mu_product"), dtype=kind, device="cpu")
        first = self.optimizer.defaults["initial_accumulator_value"] if self.key == "sum" else 0.0
        return torch.full_like(self.parameter, first, requires_grad=False)

    def keep(self, value: torch.Tensor) -> None:
        """Let the optimizer have what a first step has made."""
        self.optimizer.state[self.parameter][self.key] = value

    def drop(self) -> None:
        """Take it from the optimizer."""
        kept = self.optimizer.state.get(self.parameter, {})
        kept.pop(self.key, None)
        if not kept:
            self.optimizer.state.pop(self.parameter, None)


@dataclass(frozen=True, slots=True, eq=False)
class FirstValue:
    """State of an exported step beside the optimizer's, before the first step."""

    first: torch.Tensor

    def value(self) -> torch.Tensor:
        """Return it."""
        return self.first


# -- what an optimizer holds, on its way into a step and back ----------------------------------


class OptimizerState:
    """The learning rates and moments of a captured step that ends with an optimizer's updates.

    `away` are the positions of arguments whose home is on storage: a step makes no new ones of
    them.
    """

    def __init__(self, joint: Joint, away: Collection[int] = ()) -> None:
        self._away = frozenset(away)
        self._joint = joint
        self._optimizer: Any = joint.optimizer
        positions = {argument.node: position for position, argument in enumerate(joint.arguments)}
        self._held = [(positions[a.node], a.held) for a in joint.arguments if a.held is not None]
        self._parameters = [
            (positions[a.node], a.name, joint.value(a)) for a in joint.of(InputKind.PARAMETER)
        ]
        self._groups = self._current_groups()

    def _current_groups(self) -> list[tuple[Any, list[int]]]:
        """Return the rule and the parameters of each group as they are now."""
        groups = self._optimizer.param_groups
        return [(rule_of(group), list(map(id, group["params"]))) for group in groups]

    def fill(self, values: list[Any]) -> frozenset[int]:
        """Put learning rates and moments among the arguments; return the positions of new moments.

        Raises `CaptureError` if the updates are not those that were captured.
        """
        refuse(self._joint.name, self._faults(values))
        new = set()
        for position, held in self._held:
            is_new = isinstance(held, OptimizerSlot) and held.is_new
            if not (is_new and position in self._away):
                values[position] = held.value()
            if is_new:
                new.add(position)
        return frozenset(new)

    def keep(self, values: list[Any]) -> None:
        """Let the optimizer have the moments that a first step has made."""
        for position, held in self._held:
            if isinstance(held, OptimizerSlot) and held.is_new and position not in self._away:
                held.keep(values[position])
        # What a scheduler of the learning rate looks at, lest it warns that no step was made.
        self._optimizer._opt_called = True  # noqa: SLF001 - no other way

    def _faults(self, values: list[Any]) -> Iterator[str]:
        yield from (f"optimizer: {fault}" for fault in optimizer_faults(self._optimizer))
        if self._current_groups() != self._groups:
            yield "optimizer: its groups or their settings were changed; compile again"
        for position, name, parameter in self._parameters:
            if values[position] is not parameter:
                yield f"parameter {name} is another tensor now; compile again"
            if parameter.grad is not None:
                yield (
                    f"parameter {name} has a gradient already, and updates use only that of their "
                    "step; call optimizer.zero_grad() first"
                )


class Moments:
    """The moments of the optimizer of a step as they are, to be put back; nothing without one."""

    def __init__(self, joint: Joint) -> None:
        self.is_in_use = joint.optimizer is not None
        """Whether the step has an optimizer."""
        self._held = {a.name: a.held for a in joint.arguments if isinstance(a.held, OptimizerSlot)}
        self._before = self._start = self._copied()

    def values(self) -> dict[str, torch.Tensor]:
        """Return the moments that there are now, by name."""
        return {name: held.value() for name, held in self._held.items() if not held.is_new}

    def _copied(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.values().items()}

    def fill(self) -> None:
        """Make those that no step has made yet; they are there after the next resets too."""
        for held in self._held.values():
            if held.is_new:
                held.keep(held.value())
        self._start = self._copied()

    def forget(self) -> None:
        """Let the next reset put back what was there in the beginning."""
        self._start = self._before

    def reset(self) -> None:
        """Put them back."""
        for name, held in self._held.items():
            if name not in self._start:
                held.drop()
            elif held.is_new:
                held.keep(self._start[name].clone())
            else:
                held.value().copy_(self._start[name])
