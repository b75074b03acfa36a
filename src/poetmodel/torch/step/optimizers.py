"""Optimizers: the update of one parameter and its moments, in their memory.

The operations and their order are those of ``torch.optim``, so that every bit is the same. Some
rules overwrite the gradient where eager PyTorch allocates. If a later operation reads the gradient,
they must be called with a copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor

from poetmodel.errors import quote
from poetmodel.graph.zoo.state import UPDATE_RULES
from poetmodel.torch.capturing.inputs import refuse
from poetmodel.torch.capturing.joint_graph import InputKind, Joint
from poetmodel.torch.int8.training import QuantizedSGD, trained_layers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    Tensors = Sequence[Tensor]

NADAM_DECAY: Final = 0.96
"""Base of the rate at which NAdam's momentum approaches its final value. The exponent is the number
of the update times a setting: see Dozat, Incorporating Nesterov Momentum into Adam (2016)."""

RADAM_MIN_LENGTH: Final = 5.0
"""Number of averaged steps above which RAdam divides by the average of squares: see Liu et al., On
the Variance of the Adaptive Learning Rate and Beyond (2020)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """The update rule of an optimizer for one parameter, with the settings of a parameter group."""

    weight_decay: float
    maximize: bool = False
    decoupled_weight_decay: bool = False
    """Whether weight decay scales the parameter instead of being added to the gradient."""
    fused: bool | None = None
    """Whether PyTorch's fused kernel computes the update; its bits differ. None means False."""

    op: ClassVar[str]
    """Name of the operator in graphs, and of the optimizer for `make_optimizer`."""
    base_keys: ClassVar[tuple[str, ...]] = ("step", "exp_avg", "exp_avg_sq")
    """Keys of the moments in ``optimizer.state``, without keys that settings add."""
    flops: ClassVar[int]
    """FLOP per element of the parameter, without those that settings add."""
    needs_scratch: ClassVar[bool] = True
    """Whether an update needs memory of the parameter's size in addition to the gradient, unless it
    is fused."""
    reuses_gradient: ClassVar[bool] = False
    """Whether an update may overwrite the gradient with any settings, unless it is fused."""
    has_fused: ClassVar[bool] = False
    """Whether PyTorch has a fused kernel for this optimizer."""

    @property
    def moment_keys(self) -> tuple[str, ...]:
        """Keys of a parameter's moments in ``optimizer.state``."""
        return (*self.base_keys, *self._optional_keys_and_flops()[0])

    def flops_of(self, parameter: Tensor) -> int:
        """Return the FLOP of an update of a parameter, which may be a meta tensor."""
        decay_flops = (1 if self.decoupled_weight_decay else 2) if self.weight_decay else 0
        return (self.flops + self._optional_keys_and_flops()[1] + decay_flops) * int(
            parameter.numel()
        )

    def scratch_bytes(self, parameter: Tensor) -> int:
        """Return the memory that an update needs in addition to the gradient [B].

        A fused kernel needs it only to copy a gradient that is not contiguous. The gradient is
        assumed to have the layout of the parameter.
        """
        copies_gradient = not torch.empty_like(parameter).is_contiguous()
        is_needed = copies_gradient if self.fused else self.needs_scratch
        return int(parameter.nbytes) if is_needed else 0

    def _optional_keys_and_flops(self) -> tuple[tuple[str, ...], int]:
        """Return the state keys that settings add, and the FLOP per element that they add."""
        return (), 0

    @property
    def writes_gradient(self) -> bool:
        """Whether an update may overwrite the gradient."""
        decays = bool(self.weight_decay and not self.decoupled_weight_decay)
        return not self.fused and (self.reuses_gradient or self.maximize or decays)

    def update(self, state: Tensors, gradient: Tensor, lr: float, *, is_first: bool) -> None:
        """Overwrite `state`, a parameter and its moments, by one update; maybe also `gradient`.

        `is_first` states that the moments have no value yet: the momentum buffer of `Sgd` then
        becomes the gradient; other rules use initial values.
        """
        parameter, *_ = state
        if self.fused:
            self._update_fused(state, gradient, lr, is_first=is_first)
            return
        if self.maximize:
            gradient.neg_()
        if self.weight_decay and self.decoupled_weight_decay:
            parameter.mul_(1 - lr * self.weight_decay)
        elif self.weight_decay:
            gradient.add_(parameter, alpha=self.weight_decay)
        self._update(state, gradient, lr, is_first=is_first)

    @abstractmethod
    def _update(self, state: Tensors, gradient: Tensor, lr: float, *, is_first: bool) -> None:
        """Overwrite parameter and moments; `update` has done weight decay and maximization."""

    def _update_fused(self, state: Tensors, gradient: Tensor, lr: float, *, is_first: bool) -> None:
        """Overwrite parameter and moments by the fused kernel, which includes all settings."""
        raise NotImplementedError(self.op)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd(Rule):
    """The update of ``torch.optim.SGD``."""

    momentum: float
    dampening: float
    nesterov: bool

    op: ClassVar[str] = "sgd"
    base_keys: ClassVar[tuple[str, ...]] = ()
    flops: ClassVar[int] = UPDATE_RULES["sgd"].flops
    needs_scratch: ClassVar[bool] = False
    has_fused: ClassVar[bool] = True

    @property
    def writes_gradient(self) -> bool:
        """Whether an update may overwrite the gradient."""
        is_overwritten = self.maximize or self.weight_decay or (self.momentum and self.nesterov)
        return bool(is_overwritten and not self.fused)

    def _optional_keys_and_flops(self) -> tuple[tuple[str, ...], int]:
        extra_flops = UPDATE_RULES["momentum"].flops - self.flops + 2 * self.nesterov
        return (("momentum_buffer",), extra_flops) if self.momentum else ((), 0)

    def _update(self, state: Tensors, gradient: Tensor, lr: float, *, is_first: bool) -> None:
        """Overwrite parameter and any momentum buffer; with `nesterov`, also the gradient."""
        parameter, *moments = state
        direction = gradient
        for buffer in moments:
            if is_first:
                buffer.copy_(gradient)
            else:
                buffer.mul_(self.momentum).add_(gradient, alpha=1 - self.dampening)
            direction = gradient.add_(buffer, alpha=self.momentum) if self.nesterov else buffer
        parameter.add_(direction, alpha=-lr)

    def _update_fused(self, state: Tensors, gradient: Tensor, lr: float, *, is_first: bool) -> None:
        """Overwrite parameter and any momentum buffer by the fused kernel."""
        parameter, *moments = state
        torch._fused_sgd_(
            [parameter],
            [gradient],
            moments,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=self.dampening,
            nesterov=self.nesterov,
            maximize=self.maximize,
            is_first_step=is_first and bool(moments),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingRule(Rule):
    """A rule that counts its updates. Moments start from initial values: `is_first` is ignored."""

    def _update(self, state: Tensors, gradient: Tensor, lr: float, *, is_first: bool) -> None:
        """Add 1 to the count of updates, ``state[1]``, and call `_apply` with its new value."""
        del is_first
        parameter, count, *moments = state
        count.add_(1)
        # A meta tensor has no value; any number is valid.
        step = 1.0 if count.is_meta else count.item()
        self._apply(parameter, gradient, moments, lr, step)

    @abstractmethod
    def _apply(self, w: Tensor, gradient: Tensor, moments: Tensors, lr: float, step: float) -> None:
        """Overwrite the parameter `w` and its moments, without the count; `step` is from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(CountingRule):
    """The update of ``torch.optim.Adam``."""

    betas: tuple[float, float]
    eps: float
    amsgrad: bool

    op: ClassVar[str] = "adam"
    flops: ClassVar[int] = UPDATE_RULES["adam"].flops
    reuses_gradient: ClassVar[bool] = True
    needs_scratch: ClassVar[bool] = False
    has_fused: ClassVar[bool] = True

    def _optional_keys_and_flops(self) -> tuple[tuple[str, ...], int]:
        return (("max_exp_avg_sq",), 1) if self.amsgrad else ((), 0)

    def _update_fused(self, state: Tensors, gradient: Tensor, lr: float, *, is_first: bool) -> None:
        """Add 1 to the count, and overwrite parameter and moments by the fused kernel."""
        del is_first
        parameter, count, mean, square, *max_squares = state
        kernel = torch._fused_adamw_ if self.decoupled_weight_decay else torch._fused_adam_
        kernel(
            [parameter],
            [gradient],
            [mean],
            [square],
            max_squares,
            [count.add_(1)],
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
        )

    def _apply(self, w: Tensor, gradient: Tensor, moments: Tensors, lr: float, step: float) -> None:
        """Overwrite `w`, moments and gradient by Adam; `update` has done weight decay."""
        mean, square, *max_squares = moments
        beta1, beta2 = self.betas
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        for max_square in max_squares:
            torch.maximum(max_square, square, out=max_square)
            square = max_square
        step_size = lr / (1 - beta1**step)
        root = (1 - beta2**step) ** 0.5
        denominator = torch.sqrt(square, out=gradient).div_(root).add_(self.eps)
        w.addcdiv_(mean, denominator, value=-step_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Adam):
    """The update of ``torch.optim.AdamW``."""

    op: ClassVar[str] = "adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class NAdam(CountingRule):
    """The update of ``torch.optim.NAdam``: Adam with Nesterov's momentum."""

    betas: tuple[float, float]
    eps: float
    momentum_decay: float
    foreach: bool | None

    op: ClassVar[str] = "nadam"
    base_keys: ClassVar[tuple[str, ...]] = ("step", "mu_product", "exp_avg", "exp_avg_sq")
    flops: ClassVar[int] = 15

    def _apply(self, w: Tensor, gradient: Tensor, moments: Tensors, lr: float, step: float) -> None:
        """Overwrite parameter `w` and moments by NAdam; `update` has done weight decay."""
        momentum_product, mean, square = moments
        beta1, beta2 = self.betas
        momentum, next_momentum = (
            beta1 * (1.0 - 0.5 * NADAM_DECAY ** (step_number * self.momentum_decay))
            for step_number in (step, step + 1)
        )
        momentum_product.mul_(momentum)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if self.foreach:  # PyTorch's foreach variant has different bits
            denominator = square.sqrt().div_((1 - beta2**step) ** 0.5)
        else:
            denominator = square.div(1 - beta2**step).sqrt_()
        denominator.add_(self.eps)
        # A meta tensor has no value; any number below 1 is valid.
        product_value = 0.5 if momentum_product.is_meta else momentum_product.item()
        w.addcdiv_(gradient, denominator, value=-lr * (1.0 - momentum) / (1.0 - product_value))
        w.addcdiv_(
            mean, denominator, value=-lr * next_momentum / (1.0 - product_value * next_momentum)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsProp(CountingRule):
    """The update of ``torch.optim.RMSprop``."""

    alpha: float
    eps: float
    momentum: float
    centered: bool

    op: ClassVar[str] = "rmsprop"
    base_keys: ClassVar[tuple[str, ...]] = ("step", "square_avg")
    flops: ClassVar[int] = 9

    def _optional_keys_and_flops(self) -> tuple[tuple[str, ...], int]:
        has_momentum = self.momentum > 0
        keys = ("momentum_buffer",) * has_momentum + ("grad_avg",) * self.centered
        return keys, 2 * has_momentum + 5 * self.centered

    def _apply(self, w: Tensor, gradient: Tensor, moments: Tensors, lr: float, step: float) -> None:
        """Overwrite parameter `w` and moments by RMSprop; `update` has done weight decay."""
        del step
        square, *other_moments = moments
        square.mul_(self.alpha).addcmul_(gradient, gradient, value=1 - self.alpha)
        if self.centered:
            mean = other_moments.pop()
            mean.lerp_(gradient, 1 - self.alpha)
            denominator = square.addcmul(mean, mean, value=-1).sqrt_()
        else:
            denominator = square.sqrt()
        denominator.add_(self.eps)
        for buffer in other_moments:
            buffer.mul_(self.momentum).addcdiv_(gradient, denominator)
            w.add_(buffer, alpha=-lr)
        if not other_moments:
            w.addcdiv_(gradient, denominator, value=-lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(CountingRule):
    """The update of ``torch.optim.Adagrad``."""

    lr_decay: float
    eps: float

    op: ClassVar[str] = "adagrad"
    base_keys: ClassVar[tuple[str, ...]] = ("step", "sum")
    flops: ClassVar[int] = 7
    has_fused: ClassVar[bool] = True

    def _apply(self, w: Tensor, gradient: Tensor, moments: Tensors, lr: float, step: float) -> None:
        """Overwrite parameter `w` and sum of squares by Adagrad; `update` has done weight decay."""
        (total,) = moments
        total.addcmul_(gradient, gradient, value=1)
        rate = lr / (1 + (step - 1) * self.lr_decay)
        w.addcdiv_(gradient, total.sqrt().add_(self.eps), value=-rate)

    def _update_fused(self, state: Tensors, gradient: Tensor, lr: float, *, is_first: bool) -> None:
        """Add 1 to the count; overwrite parameter and sum of squares by the fused kernel."""
        del is_first
        parameter, count, total = state
        torch._fused_adagrad_(
            [parameter],
            [gradient],
            [total],
            [count.add_(1)],
            lr=lr,
            lr_decay=self.lr_decay,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=self.maximize,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adamax(CountingRule):
    """The update of ``torch.optim.Adamax``: Adam with a decayed maximum instead of squares."""

    betas: tuple[float, float]
    eps: float

    op: ClassVar[str] = "adamax"
    base_keys: ClassVar[tuple[str, ...]] = ("step", "exp_avg", "exp_inf")
    flops: ClassVar[int] = UPDATE_RULES["adamax"].flops
    reuses_gradient: ClassVar[bool] = True
    needs_scratch: ClassVar[bool] = False

    def _apply(self, w: Tensor, gradient: Tensor, moments: Tensors, lr: float, step: float) -> None:
        """Overwrite `w`, moments and gradient by Adamax; `update` has done weight decay."""
        mean, infinity_norm = moments
        beta1, beta2 = self.betas
        mean.lerp_(gradient, 1 - beta1)
        torch.maximum(infinity_norm.mul_(beta2), gradient.abs_().add_(self.eps), out=infinity_norm)
        w.addcdiv_(mean, infinity_norm, value=-(lr / (1 - beta1**step)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RAdam(CountingRule):
    """The update of ``torch.optim.RAdam``: the first few updates do not divide by squares."""

    betas: tuple[float, float]
    eps: float
    foreach: bool | None

    op: ClassVar[str] = "radam"
    flops: ClassVar[int] = UPDATE_RULES["radam"].flops
    reuses_gradient: ClassVar[bool] = True

    def _apply(self, w: Tensor, gradient: Tensor, moments: Tensors, lr: float, step: float) -> None:
        """Overwrite parameter `w` and moments; without `foreach`, also the gradient."""
        mean, square = moments
        beta1, beta2 = self.betas
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        mean_correction, square_correction = 1 - beta1**step, 1 - beta2**step
        max_length = 2 / (1 - beta2) - 1
        length = max_length - 2 * step * (beta2**step) / square_correction
        rectification = 0.0
        if length > RADAM_MIN_LENGTH:
            ratio = (
                (length - 4)
                * (length - 2)
                * max_length
                / ((max_length - 4) * (max_length - 2) * length)
            )
            rectification = ratio**0.5
        if self.foreach:  # PyTorch's foreach variant has different bits
            rate = square.sqrt().add_(self.eps)
            rate.div_(
                (square_correction**0.5) * (lr * rectification / mean_correction) * -1
            ).reciprocal_()
            w.addcmul_(mean, rate.add_((lr * (0 if rectification else 1.0) / mean_correction) * -1))
            return
        change = torch.div(mean, mean_correction, out=gradient).mul_(lr)
        if rectification:
            rate = square.sqrt().add_(self.eps).reciprocal_().mul_(square_correction**0.5)
            change.mul_(rate).mul_(rectification)
        w.add_(change, alpha=-1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(Rule):
    """The update of ``torch.optim.Muon``: the momentum, with singular values moved close to 1.

    Newton-Schulz iterations in ``bfloat16``; parameters are matrices. See Jordan et al., Muon: An
    optimizer for hidden layers in neural networks (2024).
    """

    decoupled_weight_decay: bool = True
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None

    op: ClassVar[str] = "muon"
    base_keys: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    flops: ClassVar[int] = 7

    @property
    def writes_gradient(self) -> bool:
        """Whether an update may overwrite the gradient."""
        return self.nesterov

    def flops_of(self, parameter: Tensor) -> int:
        """Return the FLOP of an update of a matrix, with the Newton-Schulz iterations."""
        min_size, max_size = sorted(parameter.shape)
        product_flops: int = self.ns_steps * 2 * min_size * min_size * (2 * max_size + min_size)
        return super(Muon, self).flops_of(parameter) + product_flops

    def scratch_bytes(self, parameter: Tensor) -> int:
        """Return the memory that an update needs in addition to the gradient [B]."""
        half_bytes, min_size = 2 * int(parameter.numel()), int(min(parameter.shape))
        # The update and a square matrix in half precision; a second update, or one in the
        # parameter's type.
        return half_bytes + 2 * min_size**2 + max(half_bytes, int(parameter.nbytes))

    def _update(self, state: Tensors, gradient: Tensor, lr: float, *, is_first: bool) -> None:
        """Overwrite parameter and momentum; with `nesterov`, also the gradient."""
        del is_first
        parameter, buffer = state
        buffer.lerp_(gradient, 1 - self.momentum)
        update = gradient.lerp_(buffer, self.momentum) if self.nesterov else buffer
        rows, columns = parameter.shape
        update = update.bfloat16() if rows <= columns else update.bfloat16().T
        update.div_(update.norm().clamp(min=self.eps))
        first_power, third_power, fifth_power = self.ns_coefficients
        for _ in range(self.ns_steps):
            gram = update @ update.T
            gram = torch.addmm(gram, gram, gram, beta=third_power, alpha=fifth_power)
            update = torch.addmm(update, gram, update, beta=first_power)
        ratio = 1.0
        if self.adjust_lr_fn in (None, "original"):
            ratio = max(1, rows / columns) ** 0.5
        elif self.adjust_lr_fn == "match_rms_adamw":
            ratio = 0.2 * max(rows, columns) ** 0.5
        parameter.add_(update if rows <= columns else update.T, alpha=-lr * ratio)


TRACED_RULES: Final[Mapping[type[torch.optim.Optimizer], type[Rule]]] = {
    torch.optim.SGD: Sgd,
    QuantizedSGD: Sgd,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
    torch.optim.NAdam: NAdam,
    torch.optim.RMSprop: RmsProp,
    torch.optim.Adagrad: Adagrad,
    torch.optim.Adamax: Adamax,
    torch.optim.RAdam: RAdam,
    torch.optim.Muon: Muon,
}
"""The rules of optimizers whose updates can be traced, by exact class: subclasses have none."""


class Optimizers:
    """Several optimizers of disjoint parameters, as one: for example one for matrices."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members = tuple(members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all members, in a new list."""
        return [group for member in self.members for group in member.param_groups]

    def step(self) -> None:
        """Call ``step`` of each member, in order."""
        for member in self.members:
            member.step()

    def zero_grad(self) -> None:
        """Set the gradients of all parameters to None."""
        for member in self.members:
            member.zero_grad()

    @classmethod
    def combine(cls, optimizers: Any) -> Any:
        """Return `Optimizers` for a list or tuple, and a single optimizer unchanged."""
        return cls(optimizers) if isinstance(optimizers, list | tuple) else optimizers


def optimizer_members(optimizer: Any) -> tuple[Any, ...]:
    """Return the members of `Optimizers`; for any other value, a tuple of that value."""
    return optimizer.members if isinstance(optimizer, Optimizers) else (optimizer,)


def find_owner(optimizer: Any, parameter: torch.Tensor) -> Any:
    """Return the optimizer or member that updates a parameter; the first member if none does."""
    members = optimizer_members(optimizer)
    owners = (
        member
        for member in members
        if any(p is parameter for group in member.param_groups for p in group["params"])
    )
    return next(owners, members[0])


def group_rules(optimizer: Any) -> list[tuple[Rule, list[torch.Tensor]]]:
    """Return (rule, parameters) of each parameter group; omits optimizers without a rule."""
    if isinstance(optimizer, Optimizers):
        return [pair for member in optimizer.members for pair in group_rules(member)]
    rule_class = TRACED_RULES.get(type(optimizer))
    if rule_class is None:
        return []
    names = [field.name for field in fields(rule_class)]
    pairs = []
    for group in optimizer.param_groups:
        settings = {name: group[name] for name in names if name in group}
        for name in {"betas", "ns_coefficients"} & settings.keys():
            settings[name] = tuple(settings[name])
        pairs.append((rule_class(**settings), list(group["params"])))
    return pairs


def make_optimizer(name: str, *modules: object) -> torch.optim.Optimizer | None:
    """Create an optimizer of all parameters, frozen ones too; None if there are none.

    `name` is a `Rule.op`, or ``momentum`` for SGD with momentum 0.9; ``sgd`` is a `QuantizedSGD` of
    the trained parameters if int8 layers train.
    """
    actual_modules = [module for module in modules if isinstance(module, torch.nn.Module)]
    parameters = list(dict.fromkeys(p for module in actual_modules for p in module.parameters()))
    if not parameters:
        return None
    if name == "momentum":
        return torch.optim.SGD(parameters, momentum=0.9)
    container = torch.nn.ModuleList(actual_modules)
    is_trainable = any(parameter.requires_grad for parameter in parameters)
    if name == Sgd.op and is_trainable and trained_layers(container):
        return QuantizedSGD(container)
    class_of_name: dict[str, Any] = {
        rule.op: optimizer_class
        for optimizer_class, rule in TRACED_RULES.items()
        if optimizer_class is not QuantizedSGD
    }
    optimizer: torch.optim.Optimizer = class_of_name[name](parameters)
    return optimizer


def optimizer_errors(optimizer: object) -> Iterator[str]:
    """Yield each reason why the updates of an optimizer cannot be traced, for any model."""
    if isinstance(optimizer, Optimizers):
        for member in optimizer.members:
            yield from optimizer_errors(member)
        parameter_ids = [id(p) for _, parameters in group_rules(optimizer) for p in parameters]
        if len(set(parameter_ids)) < len(parameter_ids):
            yield "a parameter belongs to two optimizers; pass it to one"
        return
    found_class = type(optimizer)
    if found_class is torch.optim.LBFGS:
        yield (
            "LBFGS computes the loss a varying number of times, and a step computes it once; "
            "compile without an optimizer, and call the step in its closure"
        )
        return
    if found_class not in TRACED_RULES:
        # The class may be a user's, with the same name.
        class_text = (
            f"{found_class.__module__}.{found_class.__qualname__}"
            if found_class.__module__ != "builtins"
            else ""
        )
        *names, last_name = (
            optimizer_class.__name__
            for optimizer_class in TRACED_RULES
            if optimizer_class is not QuantizedSGD
        )
        expected = f"{', '.join(names)} or {last_name} of torch.optim"
        yield f"expected {expected}, got {class_text or quote(optimizer)}"
        return
    supported_optimizer: Any = optimizer
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(getattr(supported_optimizer, name) for name in hooks):
        yield "it has hooks on its steps, which a traced update does not run; remove them"
    for group_index, group in enumerate(supported_optimizer.param_groups):
        for error in _group_errors(group, has_fused=TRACED_RULES[found_class].has_fused):
            yield f"group {group_index}: {error}"


def _group_errors(group: Mapping[str, Any], *, has_fused: bool) -> Iterator[str]:
    """Yield an error for each setting of a parameter group that cannot be traced."""
    for key in ("fused", "capturable", "differentiable"):
        if group.get(key) and not (key == "fused" and has_fused):
            yield f"{key}=True cannot be traced; leave it out"
    for key, value in group.items():
        values = value if key == "betas" else (value,)
        if key != "params" and any(isinstance(item, torch.Tensor) for item in values):
            yield f"{key} is a tensor; expected a number, such as {key}={_to_numbers(value)}"
        elif key == "lr" and not isinstance(value, Real):
            yield f"lr: expected a number, got {quote(value)}"


def _to_numbers(value: Any) -> object:
    """Return a setting with tensors converted to numbers, also within a tuple."""
    if isinstance(value, tuple):
        return tuple(map(_to_numbers, value))
    return value.item() if isinstance(value, torch.Tensor) else value


def _counting_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups that count updates: those of each `QuantizedSGD`."""
    members = optimizer_members(optimizer)
    counting_members = [member for member in members if isinstance(member, QuantizedSGD)]
    return [group for member in counting_members for group in member.param_groups]


def read_update_counts(optimizer: Any) -> tuple[int, ...]:
    """Return the ``updates`` of each parameter group that counts them."""
    return tuple(group["updates"] for group in _counting_groups(optimizer))


def set_update_counts(optimizer: Any, counts: Sequence[int]) -> None:
    """Set the counts that `read_update_counts` returned for an optimizer of as many groups."""
    for group, count in zip(_counting_groups(optimizer), counts, strict=True):
        group["updates"] = count


@dataclass(frozen=True, slots=True, eq=False)
class LearningRate:
    """The learning rate of one parameter group, an input of each step."""

    optimizer: torch.optim.Optimizer
    group: int
    """Index of the parameter group."""

    def value(self) -> torch.Tensor:
        """Return the current rate as a double without dimensions, with all digits of the number."""
        rate = float(self.optimizer.param_groups[self.group]["lr"])
        return torch.tensor(rate, dtype=torch.float64, device="cpu")


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerMoment:
    """A value in an optimizer's state: a moment of one parameter, under one key."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    key: str

    @property
    def is_new(self) -> bool:
        """Whether the optimizer has no value yet, as before its first step."""
        return self.optimizer.state.get(self.parameter, {}).get(self.key) is None

    @property
    def starts_with_gradient(self) -> bool:
        """Whether this is a new momentum buffer with dampening: its first value is the gradient."""
        if self.key != "momentum_buffer" or not self.is_new:
            return False
        groups = self.optimizer.param_groups
        group = next(g for g in groups if any(p is self.parameter for p in g["params"]))
        return bool(group.get("dampening"))

    def value(self) -> torch.Tensor:
        """Return the current value itself, or that of a new moment in new memory."""
        if not self.is_new:
            value: torch.Tensor = self.optimizer.state[self.parameter][self.key]
            return value
        if self.key in ("step", "mu_product"):
            fused = self.optimizer.defaults.get("fused")
            is_double = torch.get_default_dtype() == torch.float64 and not fused
            dtype = torch.float64 if is_double else torch.float32
            return torch.tensor(float(self.key == "mu_product"), dtype=dtype, device="cpu")
        fill_value = (
            self.optimizer.defaults["initial_accumulator_value"] if self.key == "sum" else 0.0
        )
        return torch.full_like(self.parameter, fill_value, requires_grad=False)

    def store(self, value: torch.Tensor) -> None:
        """Store a value in the optimizer's state."""
        self.optimizer.state[self.parameter][self.key] = value

    def remove(self) -> None:
        """Delete the value from the optimizer's state; delete the parameter's entry if empty."""
        entries = self.optimizer.state.get(self.parameter, {})
        entries.pop(self.key, None)
        if not entries:
            self.optimizer.state.pop(self.parameter, None)


@dataclass(frozen=True, slots=True, eq=False)
class InitialValue:
    """The initial value of state that only an exported step has, such as a gradient sum."""

    initial: torch.Tensor

    def value(self) -> torch.Tensor:
        """Return the initial value."""
        return self.initial


# -- the optimizer's values as arguments of a step ----------------------------------------------


class OptimizerState:
    """Passes rates and moments from an optimizer to a captured step, and stores new moments.

    `positions_on_storage` are those of the arguments with their home on storage.
    """

    def __init__(self, joint: Joint, positions_on_storage: Collection[int] = ()) -> None:
        self._positions_on_storage = frozenset(positions_on_storage)
        self._joint = joint
        self._optimizer: Any = joint.optimizer
        positions = joint.argument_positions
        self._sources = [
            (positions[a.node], a.optimizer_value)
            for a in joint.arguments
            if a.optimizer_value is not None
        ]
        self._parameters = [
            (positions[a.node], a.name, joint.value(a))
            for a in joint.arguments_of(InputKind.PARAMETER)
        ]
        self._groups = self._current_groups()

    def _current_groups(self) -> list[tuple[Any, list[int]]]:
        """Return (rule, parameter ids) of each parameter group, with its current settings."""
        return [
            (rule, list(map(id, parameters))) for rule, parameters in group_rules(self._optimizer)
        ]

    def fill_arguments(self, values: list[Any]) -> frozenset[int]:
        """Write rates and moments into the arguments `values`; return the positions of new moments.

        New moments with their home on storage are not written. Raises `CaptureError` if optimizer
        or parameters have changed since the capture, or if a parameter has a gradient.
        """
        refuse(self._joint.name, self._errors(values))
        new_positions = set()
        for position, source in self._sources:
            is_new = isinstance(source, OptimizerMoment) and source.is_new
            if not (is_new and position in self._positions_on_storage):
                values[position] = source.value()
            if is_new:
                new_positions.add(position)
        return frozenset(new_positions)

    def store_first_moments(self, values: list[Any]) -> None:
        """Store moments that are new in the optimizer's state, except those on storage.

        Also counts the update of each `QuantizedSGD`, and marks the optimizers as stepped, so that
        learning-rate schedulers do not warn.
        """
        for position, source in self._sources:
            if (
                isinstance(source, OptimizerMoment)
                and source.is_new
                and position not in self._positions_on_storage
            ):
                source.store(values[position])
        for member in optimizer_members(self._optimizer):
            if isinstance(member, QuantizedSGD):
                member.count_update()
        for member in optimizer_members(self._optimizer):
            member._opt_called = True  # noqa: SLF001 - no other way

    def _errors(self, values: list[Any]) -> Iterator[str]:
        """Yield errors for changes since the capture, and for each parameter with a gradient."""
        yield from (f"optimizer: {error}" for error in optimizer_errors(self._optimizer))
        if self._current_groups() != self._groups:
            yield "optimizer: its groups or their settings have changed; compile again"
        for position, name, parameter in self._parameters:
            if values[position] is not parameter:
                yield f"parameter {name} is another tensor now; compile again"
            if parameter.grad is not None:
                yield (
                    f"parameter {name} already has a gradient, and updates use only the gradient "
                    "of their step; call optimizer.zero_grad() first"
                )


class MomentSnapshot:
    """A snapshot of the moments of a step's optimizer, for `reset`; empty without an optimizer."""

    def __init__(self, joint: Joint) -> None:
        self.has_optimizer = joint.optimizer is not None
        """Whether the step has an optimizer."""
        self._moments = {
            a.name: a.optimizer_value
            for a in joint.arguments
            if isinstance(a.optimizer_value, OptimizerMoment)
        }
        self._original_values = self._reset_values = self._copy_values()
        self._optimizer = joint.optimizer
        self._update_counts = read_update_counts(joint.optimizer)

    def read_moments(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's current moments by name; omits moments that have no value yet."""
        return {name: moment.value() for name, moment in self._moments.items() if not moment.is_new}

    def _copy_values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.read_moments().items()}

    def create_missing(self) -> None:
        """Store initial values of missing moments in the optimizer; later resets retain them."""
        for moment in self._moments.values():
            if moment.is_new:
                moment.store(moment.value())
        self._reset_values = self._copy_values()

    def discard_created(self) -> None:
        """Make later resets restore the original moments, and delete those of `create_missing`."""
        self._reset_values = self._original_values

    def reset(self) -> None:
        """Restore moments in place, and counts of updates; delete moments created since."""
        for name, moment in self._moments.items():
            if name not in self._reset_values:
                moment.remove()
            elif moment.is_new:
                moment.store(self._reset_values[name].clone())
            else:
                moment.value().copy_(self._reset_values[name])
        set_update_counts(self._optimizer, self._update_counts)
