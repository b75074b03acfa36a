"""A snapshot of module and tensors: whether they are as they were, told in a fraction of a step."""

from __future__ import annotations

from itertools import chain, compress, groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch

# Not promised to stay, and what steps of `torch.compile` themselves check tensors with; the same
# in Python takes five times as long.
from torch._C._dynamo.guards import TensorGuards

from poetmodel.torch.graph_signature import InputKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.torch.graph_signature import InputSpec

HOOKS: Final = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)  # fmt: skip
"""Where a module has its hooks."""

_children: Final = itemgetter("_modules")
_training: Final = itemgetter("training")
_hooks: Final = itemgetter(*HOOKS)
_tensor_hooks: Final = attrgetter("_backward_hooks")
_later_hooks: Final = attrgetter("_post_accumulate_grad_hooks")


class Snapshot:
    """Modules and tensors of a captured step as they are now.

    What is as it was for sure is current. It may take something for changed that is not, such as a
    parameter in the place of an equal one: then `Guards` compares what there is one by one.

    Parameters
    ----------
    owned : sequence of InputSpec
        The parameters and buffers that the step reads.
    modules : sequence of Module
        All modules; the first has the others below it.
    settings : iterable of pairs
        Attributes that must stay: the dictionary of a module, and a key.

    Raises
    ------
    KeyError
        If a tensor or a setting is not where modules have theirs.
    """

    def __init__(
        self,
        owned: Sequence[InputSpec],
        modules: Sequence[torch.nn.Module],
        settings: Iterable[tuple[dict[str, Any], str]],
    ) -> None:
        self._states = [module.__dict__ for module in modules]
        self._parents = [state for state in self._states if _children(state)]
        self._leaves = [state for state in self._states if not _children(state)]
        places = [argument.target.rpartition(".")[::2] for argument in owned]
        kinds = {InputKind.PARAMETER: "_parameters", InputKind.BUFFER: "_buffers"}
        self._owned = [
            (modules[0].get_submodule(owner).__dict__, kinds[argument.kind], name)
            for (owner, name), argument in zip(places, owned, strict=True)
        ]
        by_module = [list(found) for _, found in groupby(settings, key=lambda pair: id(pair[0]))]
        self._settings = [
            (found[0][0], itemgetter(*(key for _, key in found))) for found in by_module
        ]
        values = self._tensors()
        self._trained = [value.requires_grad for value in values]
        self._modules_before = self._modules()
        self._settings_before = self._read_settings()
        # No tensor is held: another one in the place of one that is gone has to look the same.
        self._identities = [*map(id, values)]
        self._looks = TensorGuards(*values, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def is_current(self) -> bool:
        """Return whether all is as it was for sure, and no mode is on that no step runs in."""
        try:
            values = self._tensors()
            settings = self._read_settings()
        except KeyError:
            return False
        trained = [*compress(values, self._trained)]
        return (
            [*map(id, values)] == self._identities
            and self._looks.check(*values)
            and self._modules() == self._modules_before
            and settings == self._settings_before
            and not any(map(_children, self._leaves))
            and not any(map(_tensor_hooks, trained))
            and not any(map(_later_hooks, trained))
            and not torch.is_autocast_enabled("cpu")
            and not torch.is_inference_mode_enabled()
        )

    def _tensors(self) -> list[Any]:
        return [state[kind][name] for state, kind, name in self._owned]

    def _read_settings(self) -> list[Any]:
        return [read(state) for state, read in self._settings]

    def _modules(self) -> tuple[list[Any], ...]:
        """Return modules with their names, their modes, and the keys of their hooks."""
        below = [*map(_children, self._parents)]
        hooks = [*chain.from_iterable(map(_hooks, self._states))]
        return (
            [*map(len, below)],
            [*chain.from_iterable(map(dict.items, below))],
            [*map(_training, self._states)],
            [*map(tuple, hooks)] if any(hooks) else [],
        )
