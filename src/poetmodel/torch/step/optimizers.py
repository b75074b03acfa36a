"""Optimizers: what a step of SGD, Adam or AdamW does to one parameter, in the memory of its state.

The operations and their order are those of ``torch.optim``, so that every bit is the same. What
eager PyTorch makes new memory for is written over the gradient, which nobody reads after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import torch

from poetmodel.errors import shown
from poetmodel.torch.capturing.inputs import refuse
from poetmodel.torch.capturing.signature import InputKind, Joint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

ACCEPTED: Final = "torch.optim.SGD, torch.optim.Adam or torch.optim.AdamW"
"""The optimizers whose updates can be traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """A step of ``torch.optim.SGD``."""

    weight_decay: float
    momentum: float
    dampening: float
    nesterov: bool
    maximize: bool

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
    decoupled: bool

    writes_gradient: ClassVar[bool] = True

    @property
    def op(self) -> str:
        """The name of the operator."""
        return "adamw" if self.decoupled else "adam"

    @property
    def moments(self) -> tuple[str, ...]:
        """The state that it keeps for a parameter, by the keys of ``optimizer.state``."""
        return ("step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.amsgrad else []))

    @property
    def flops_per_element(self) -> int:
        """FLOP for each element of the parameter."""
        decay = (1 if self.decoupled else 2) if self.weight_decay else 0
        return 13 + decay + self.amsgrad

    def update(
        self, state: Sequence[torch.Tensor], gradient: torch.Tensor, lr: float, *, first: bool
    ) -> None:
        """Update parameter, count of steps and moments; these are 0 before the first step."""
        del first
        parameter, count, mean, square, *largest = state
        beta1, beta2 = self.betas
        if self.maximize:
            gradient.neg_()
        count.add_(1)
        if self.weight_decay and self.decoupled:
            parameter.mul_(1 - lr * self.weight_decay)
        elif self.weight_decay:
            gradient.add_(parameter, alpha=self.weight_decay)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        for most in largest:
            torch.maximum(most, square, out=most)
            square = most
        # On the meta device there is no number, and any will do.
        steps = 1.0 if count.is_meta else count.item()
        step_size = lr / (1 - beta1**steps)
        root = (1 - beta2**steps) ** 0.5
        denominator = torch.sqrt(square, out=gradient).div_(root).add_(self.eps)
        parameter.addcdiv_(mean, denominator, value=-step_size)


Rule: TypeAlias = Sgd | Adam
"""What an optimizer does to the parameters of one group."""


def rule_of(group: Mapping[str, Any]) -> Rule:
    """Return what an optimizer does to the parameters of a group that has no `group_faults`."""
    if "betas" not in group:
        return Sgd(
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
    return Adam(
        betas=tuple(group["betas"]),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        decoupled=group["decoupled_weight_decay"],
    )


def optimizer_faults(optimizer: object) -> Iterator[str]:
    """Yield why the updates of an optimizer cannot be traced, whatever its model is."""
    kind = type(optimizer)
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        # A class of the same name may be a user's own.
        got = f"{kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else ""
        yield f"expected {ACCEPTED}, got {got or shown(optimizer)}"
        return
    found: Any = optimizer
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(getattr(found, name) for name in hooks):
        yield "it has hooks on its steps, which a traced update does not run; remove them"
    for number, group in enumerate(found.param_groups):
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
    """What an optimizer keeps for a parameter under one key."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    key: str

    @property
    def is_new(self) -> bool:
        """Whether no step of the optimizer has made it yet."""
        return self.optimizer.state.get(self.parameter, {}).get(self.key) is None

    def value(self) -> torch.Tensor:
        """Return it as it is now, or as it is before the first step."""
        if not self.is_new:
            found: torch.Tensor = self.optimizer.state[self.parameter][self.key]
            return found
        if self.key == "step":
            wide = torch.get_default_dtype() == torch.float64
            return torch.tensor(0.0, dtype=torch.float64 if wide else torch.float32, device="cpu")
        return torch.zeros_like(self.parameter, requires_grad=False)

    def keep(self, value: torch.Tensor) -> None:
        """Let the optimizer have what a first step has made."""
        self.optimizer.state[self.parameter][self.key] = value

    def drop(self) -> None:
        """Take it from the optimizer."""
        kept = self.optimizer.state.get(self.parameter, {})
        kept.pop(self.key, None)
        if not kept:
            self.optimizer.state.pop(self.parameter, None)


# -- what an optimizer holds, on its way into a step and back ----------------------------------


class OptimizerState:
    """The learning rates and moments of a captured step that ends with an optimizer's updates.

    `away` are the places of arguments whose home is on storage: a step makes no new ones of them.
    """

    def __init__(self, joint: Joint, away: Collection[int] = ()) -> None:
        self._away = frozenset(away)
        self._joint = joint
        self._optimizer: Any = joint.optimizer
        places = {argument.node: place for place, argument in enumerate(joint.arguments)}
        self._held = [(places[a.node], a.held) for a in joint.arguments if a.held is not None]
        self._parameters = [
            (places[a.node], a.name, joint.value(a)) for a in joint.of(InputKind.PARAMETER)
        ]
        self._groups = self._found()

    def _found(self) -> list[tuple[Any, list[int]]]:
        """Return the rule and the parameters of each group as they are now."""
        groups = self._optimizer.param_groups
        return [(rule_of(group), list(map(id, group["params"]))) for group in groups]

    def fill(self, values: list[Any]) -> frozenset[int]:
        """Put learning rates and moments among the arguments; return the places of new moments.

        Raises `CaptureError` if the updates are not those that were captured.
        """
        refuse(self._joint.name, self._faults(values))
        new = set()
        for place, held in self._held:
            is_new = isinstance(held, OptimizerSlot) and held.is_new
            if not (is_new and place in self._away):
                values[place] = held.value()
            if is_new:
                new.add(place)
        return frozenset(new)

    def keep(self, values: list[Any]) -> None:
        """Let the optimizer have the moments that a first step has made."""
        for place, held in self._held:
            if isinstance(held, OptimizerSlot) and held.is_new and place not in self._away:
                held.keep(values[place])
        # What a scheduler of the learning rate looks at, lest it warns that no step was made.
        self._optimizer._opt_called = True  # noqa: SLF001 - no other way

    def _faults(self, values: list[Any]) -> Iterator[str]:
        yield from (f"optimizer: {fault}" for fault in optimizer_faults(self._optimizer))
        if self._found() != self._groups:
            yield "optimizer: its groups or their settings were changed; compile again"
        for place, name, parameter in self._parameters:
            if values[place] is not parameter:
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
