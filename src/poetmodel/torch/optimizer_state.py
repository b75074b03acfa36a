"""What an optimizer holds, on its way into a step and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poetmodel.torch.graph_signature import InputKind, Joint
from poetmodel.torch.inputs import refuse
from poetmodel.torch.optimizers import Moment, optimizer_faults, rule_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch


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
            is_new = isinstance(held, Moment) and held.is_new
            if not (is_new and place in self._away):
                values[place] = held.value()
            if is_new:
                new.add(place)
        return frozenset(new)

    def keep(self, values: list[Any]) -> None:
        """Let the optimizer have the moments that a first step has made."""
        for place, held in self._held:
            if isinstance(held, Moment) and held.is_new and place not in self._away:
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
        self._held = {a.name: a.held for a in joint.arguments if isinstance(a.held, Moment)}
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
