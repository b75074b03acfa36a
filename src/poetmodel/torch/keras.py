"""``from_keras``: a model of Keras 3 as a module whose tensors are its own."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from poetmodel.errors import InputError
from poetmodel.torch.errors import require_package

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def from_keras(model: Any, *, logits: bool = False) -> KerasModule:
    """Return a model of Keras 3, on its torch back end, as a module that trains.

    Both share their weights: what trains the module trains the model, which can be saved by Keras
    at any time.

    Parameters
    ----------
    model : keras.Model
        A model that is built. Keras must have been imported with ``KERAS_BACKEND=torch``.
    logits : bool
        In training mode leave a softmax, log_softmax or sigmoid at the end to the loss: the module
        then returns its input. In evaluation mode it returns what the model returns.

    Returns
    -------
    KerasModule
        In training mode; its parameters are the trainable variables, under their paths.

    Raises
    ------
    MissingExtraError
        If Keras is not installed.
    InputError
        If Keras runs on another back end, or this is no model, it is not built, or it adds losses;
        or if `logits` finds no such end.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        require_package("keras", "taking over a model of Keras")
    if keras is None or not isinstance(model, keras.Model):
        raise InputError(f"from_keras: expected a keras.Model, got a {type(model).__name__}")
    if keras.config.backend() != "torch":
        raise InputError(
            f"from_keras: Keras runs on its back end {keras.config.backend()}; set the environment "
            "variable KERAS_BACKEND to torch before Python imports keras"
        )
    if not model.built:
        raise InputError(
            f"from_keras: {model.name} has no weights yet; call it once on a batch, or begin it "
            "with keras.Input"
        )
    if model.losses:
        raise _adds_losses(model)
    seeded = [layer.name for layer in model._flatten_layers() if _is_seeded(layer)]  # noqa: SLF001
    if seeded:
        raise InputError(
            f"from_keras: {model.name}: the layer {seeded[0]} has a seed of its own, and would "
            "draw the same in each compiled step; leave its seed out"
        )
    _check_layers(model)
    ending = _ending(model) if logits else None
    if logits and ending is None:
        raise InputError(
            f"from_keras: logits: {model.name} ends in no softmax, log_softmax or sigmoid that "
            "could be left to the loss; leave logits out"
        )
    return KerasModule(model, ending)


def _ending(model: Any) -> Any:
    """Return the layer whose softmax, log_softmax or sigmoid makes the only output, or None."""
    from keras import activations, layers

    functional = getattr(model, "_functional", model)
    if len(getattr(functional, "outputs", None) or ()) != 1:
        return None
    layer = functional.outputs[0]._keras_history.operation  # noqa: SLF001
    # One that is used twice must keep its activation elsewhere.
    nodes = [n for level in functional._nodes_by_depth.values() for n in level]  # noqa: SLF001
    if sum(node.operation is layer for node in nodes) != 1:
        return None
    if hasattr(layer, "_nodes_by_depth") or hasattr(layer, "_functional"):
        return _ending(layer)
    if isinstance(layer, layers.Softmax):
        return layer
    kinds = (
        *(layers.Activation, layers.Dense, layers.EinsumDense),
        *(layers.Conv1D, layers.Conv2D, layers.Conv1DTranspose, layers.Conv2DTranspose),
    )
    left = (activations.softmax, activations.log_softmax, activations.sigmoid)
    return layer if isinstance(layer, kinds) and layer.activation in left else None


@contextmanager
def _left_to_loss(layer: Any) -> Iterator[None]:
    """Call a layer without its activation."""
    from keras import activations

    if not hasattr(layer, "activation"):
        layer.call = lambda inputs, mask=None: inputs  # noqa: ARG005
        try:
            yield
        finally:
            del layer.call
        return
    kept, layer.activation = layer.activation, activations.linear
    try:
        yield
    finally:
        layer.activation = kept


def _check_layers(model: Any) -> None:
    """Raise if a layer does what only Keras' own training would do."""
    for layer in model._flatten_layers():  # noqa: SLF001
        if getattr(layer, "activity_regularizer", None) is not None:
            raise _adds_losses(model)
        if getattr(layer, "stateful", False):
            raise InputError(
                f"from_keras: {model.name}: the layer {layer.name} is stateful, and each step "
                "would begin anew; leave stateful out"
            )
    limited = [v.path for v in model.trainable_variables if v.constraint is not None]
    if limited:
        raise InputError(
            f"from_keras: {model.name}: the variable {limited[0]} has a constraint, which only "
            "optimizers of Keras keep; leave it out"
        )


def _adds_losses(model: Any) -> InputError:
    return InputError(
        f"from_keras: {model.name} adds losses of its own, such as those of a "
        "kernel_regularizer; leave them out, and give the optimizer weight_decay"
    )


_SEED: Final = "seed_generator_state"
"""Ending of the path of a variable that has the state of random draws."""


def _is_seeded(layer: Any) -> bool:
    """Whether a layer draws random numbers from a seed that its user has chosen."""
    generator = getattr(layer, "seed_generator", None)
    return getattr(generator, "_initial_seed", None) is not None


class KerasModule(nn.Module):  # type: ignore[misc, unused-ignore]
    """A model of Keras whose variables are parameters and buffers. `from_keras` makes it."""

    def __init__(self, model: Any, ending: Any = None) -> None:
        super().__init__()
        # No submodule: its layers read variables, which a capture cannot exchange.
        self._call = _without_state(model, ending)
        self._trained = [
            self._registered(variable, trained=True) for variable in model.trainable_variables
        ]
        # Layers without a seed draw from PyTorch's generator, whatever their own state is.
        self._others = [
            variable.value.data
            if variable.path.endswith(_SEED)
            else self._registered(variable, trained=False)
            for variable in model.non_trainable_variables
        ]

    def _registered(self, variable: Any, *, trained: bool) -> str:
        """Keep the tensor of a variable under its path; return the name."""
        name: str = variable.path.replace(".", "_")
        while hasattr(self, name):
            name += "_"
        if trained:
            self.register_parameter(name, variable.value)
        else:
            self.register_buffer(name, variable.value.data)
        return name

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the model's outputs; several inputs are in the order of ``model.inputs``."""
        trained = [getattr(self, name) for name in self._trained]
        others = [getattr(self, x) if isinstance(x, str) else x for x in self._others]
        output, news = self._call(trained, others, inputs, self.training)
        if self.training:
            for old, new in zip(others, news, strict=True):
                if new is not old and new.is_floating_point():
                    old.copy_(new.detach())
        return output


def _without_state(model: Any, ending: Any) -> Callable[..., tuple[Any, list[torch.Tensor]]]:
    """Return the model as a function of its variables, which Dynamo need not look into.

    While it trains, the layer `ending` leaves its activation to the loss.
    """
    from keras import StatelessScope

    def call(
        trained: list[torch.Tensor],
        others: list[torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        training: bool,  # noqa: FBT001
    ) -> tuple[Any, list[torch.Tensor]]:
        given = _arranged(model, inputs)
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        tensors = [*trained, *others]
        if len(variables) != len(tensors) or len(trained) != len(model.trainable_variables):
            raise InputError(
                f"from_keras: the trainable layers of {model.name} have changed since; call "
                "from_keras again"
            )
        # As Keras calls it: what a layer does not hand on of `training`, its context does.
        state = zip(variables, tensors, strict=True)
        scope = StatelessScope(state_mapping=state, collect_losses=True)
        try:
            with scope, _left_to_loss(ending) if training and ending else nullcontext():
                output = model(*given, training=training)
        finally:
            if training:
                _check_draws(model, scope, zip(variables, tensors, strict=True))
        if training and scope.losses:
            raise _adds_losses(model)
        return output, [scope.get_current_value(v) for v in model.non_trainable_variables]

    traced: Callable[..., Any] = torch._dynamo.nonstrict_trace(call)  # noqa: SLF001
    return traced


def _check_draws(model: Any, scope: Any, given: Iterable[tuple[Any, torch.Tensor]]) -> None:
    """Raise if a layer drew from a seed of Keras', whose state is that of before in each step."""
    seeds = [(v, seed) for v, seed in given if v.path.endswith(_SEED)]
    drawn = [v for v, seed in seeds if scope.get_current_value(v) is not seed]
    if not drawn:
        return
    owners = (
        layer.name
        for layer in model._flatten_layers(include_self=False)  # noqa: SLF001
        if any(v is drawn[0] for v in layer.non_trainable_variables)
    )
    raise InputError(
        f"{model.name}: the layer {next(owners, drawn[0].path)} draws from a seed of Keras' own, "
        "and would draw the same in each step; take Dropout without noise_shape, which draws from "
        "PyTorch's generator, or draw outside of the model"
    ) from None


def _arranged(model: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """Return inputs as a model takes them: a functional one takes several as one structure."""
    structure = getattr(model, "_inputs_struct", None)
    if structure is None:
        return inputs
    from keras import tree

    if len(inputs) != len(tree.flatten(structure)):
        raise InputError(
            f"{model.name}: expected {len(tree.flatten(structure))} inputs, got {len(inputs)}"
        )
    return (tree.pack_sequence_as(structure, list(inputs)),)
