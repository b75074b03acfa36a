"""``from_keras``: a Keras 3 model as a module that shares its tensors."""

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
    """Return a Keras 3 model on the torch back end as a trainable module.

    Module and model share their weights: training the module trains the model, which Keras can save
    at any time.

    Parameters
    ----------
    model : keras.Model
        A model that is built. Keras must have been imported with ``KERAS_BACKEND=torch``.
    logits : bool
        In training mode, skip a softmax, log_softmax or sigmoid at the end and return its input,
        for a loss that contains this operator. Evaluation mode returns the output of the model.

    Returns
    -------
    KerasModule
        In training mode; its parameters are the trainable variables, under their paths.

    Raises
    ------
    MissingExtraError
        If Keras is not installed.
    InputError
        If Keras uses another back end; if the object is no Keras model, is not built, adds losses,
        or has a seed, state or constraint that a step does not support; or if `logits` is set and
        no activation can be skipped. Skipping needs a Sequential or functional model with one
        output, from a supported layer that is called once.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        require_package("keras", "importing a Keras model")
    if keras is None or not isinstance(model, keras.Model):
        raise InputError(f"from_keras: expected a keras.Model, got a {type(model).__name__}")
    if keras.config.backend() != "torch":
        raise InputError(
            f"from_keras: Keras uses its back end {keras.config.backend()}; set the environment "
            "variable KERAS_BACKEND to torch before Python imports keras"
        )
    if not model.built:
        raise InputError(
            f"from_keras: {model.name} has no weights yet; call it once on a batch, or begin it "
            "with keras.Input"
        )
    if model.losses:
        raise _added_losses_error(model)
    seeded_layers = [layer.name for layer in model._flatten_layers() if _is_seeded(layer)]  # noqa: SLF001
    if seeded_layers:
        raise InputError(
            f"from_keras: {model.name}: the layer {seeded_layers[0]} has its own seed, and would "
            "draw the same numbers in each compiled step; leave its seed out"
        )
    _check_layers(model)
    final_layer = _final_activation(model) if logits else None
    if logits and final_layer is None:
        raise InputError(
            "from_keras: logits: found no softmax, log_softmax or sigmoid to skip at the end of "
            f"{model.name} (the only output of a Sequential or functional model, from a layer that "
            "is called once); leave logits out"
        )
    return KerasModule(model, final_layer)


def _final_activation(model: Any) -> Any:
    """Return the layer whose softmax, log_softmax or sigmoid computes the only output, or None.

    None also if the layer or a nested model is called twice.
    """
    from keras import activations, layers

    functional = getattr(model, "_functional", model)
    if len(getattr(functional, "outputs", None) or ()) != 1:
        return None
    layer = functional.outputs[0]._keras_history.operation  # noqa: SLF001
    # A layer that is called twice needs its activation in the first call.
    nodes = [node for level in functional._nodes_by_depth.values() for node in level]  # noqa: SLF001
    if sum(node.operation is layer for node in nodes) != 1:
        return None
    if hasattr(layer, "_nodes_by_depth") or hasattr(layer, "_functional"):
        return _final_activation(layer)
    if isinstance(layer, layers.Softmax):
        return layer
    layer_classes = (
        *(layers.Activation, layers.Dense, layers.EinsumDense),
        *(layers.Conv1D, layers.Conv2D, layers.Conv1DTranspose, layers.Conv2DTranspose),
    )
    skippable_activations = (activations.softmax, activations.log_softmax, activations.sigmoid)
    return (
        layer
        if isinstance(layer, layer_classes) and layer.activation in skippable_activations
        else None
    )


@contextmanager
def _skip_activation(layer: Any) -> Iterator[None]:
    """Replace the activation of a layer by the identity inside the context."""
    from keras import activations

    if not hasattr(layer, "activation"):
        layer.call = lambda inputs, mask=None: inputs  # noqa: ARG005
        try:
            yield
        finally:
            del layer.call
        return
    activation, layer.activation = layer.activation, activations.linear
    try:
        yield
    finally:
        layer.activation = activation


def _check_layers(model: Any) -> None:
    """Refuse an activity regularizer, a stateful layer and a constrained parameter."""
    for layer in model._flatten_layers():  # noqa: SLF001
        if getattr(layer, "activity_regularizer", None) is not None:
            raise _added_losses_error(model)
        if getattr(layer, "stateful", False):
            raise InputError(
                f"from_keras: {model.name}: the layer {layer.name} is stateful, but each step "
                "would reset its state; leave stateful out"
            )
    constrained_paths = [
        variable.path for variable in model.trainable_variables if variable.constraint is not None
    ]
    if constrained_paths:
        raise InputError(
            f"from_keras: {model.name}: the variable {constrained_paths[0]} has a constraint, "
            "which only optimizers of Keras enforce; leave it out"
        )


def _added_losses_error(model: Any) -> InputError:
    return InputError(
        f"from_keras: {model.name} adds its own losses, such as a kernel_regularizer; leave "
        "them out, and set weight_decay of the optimizer"
    )


_SEED_SUFFIX: Final = "seed_generator_state"
"""Suffix of the path of variables with the state of a random generator."""


def _is_seeded(layer: Any) -> bool:
    """Return whether a layer draws random numbers from a seed set by the user."""
    generator = getattr(layer, "seed_generator", None)
    return getattr(generator, "_initial_seed", None) is not None


class KerasModule(nn.Module):  # type: ignore[misc, unused-ignore]
    """A Keras model whose variables are parameters and buffers; `from_keras` creates it.

    States of random generators are no buffers. `final_layer` is the layer whose activation is
    skipped in training mode; None for no layer.
    """

    def __init__(self, model: Any, final_layer: Any = None) -> None:
        super().__init__()
        # The model is no submodule: its layers read variables, which a capture cannot replace.
        self._call = _make_stateless_call(model, final_layer)
        self._trained_names = [
            self._register_variable(variable, is_trained=True)
            for variable in model.trainable_variables
        ]
        # Names, or tensors of generator state, which is unused: layers without a seed draw from
        # PyTorch's generator.
        self._untrained_names_or_tensors = [
            variable.value.data
            if variable.path.endswith(_SEED_SUFFIX)
            else self._register_variable(variable, is_trained=False)
            for variable in model.non_trainable_variables
        ]

    def _register_variable(self, variable: Any, *, is_trained: bool) -> str:
        """Register a variable's tensor, a parameter or buffer, under its path; return the name."""
        name: str = variable.path.replace(".", "_")
        while hasattr(self, name):
            name += "_"
        if is_trained:
            self.register_parameter(name, variable.value)
        else:
            self.register_buffer(name, variable.value.data)
        return name

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the outputs of the model; several inputs are in the order of ``model.inputs``.

        In training mode, skips the activation of `final_layer`, if any, and updates the untrained
        variables of floating-point type. Raises `InputError` if a functional model has another
        number of inputs, or if layers were frozen or unfrozen since `from_keras`; in training mode
        also if layers draw from seeds of Keras, or add losses.
        """
        trained_tensors = [getattr(self, name) for name in self._trained_names]
        untrained_tensors = [
            getattr(self, entry) if isinstance(entry, str) else entry
            for entry in self._untrained_names_or_tensors
        ]
        output, new_values = self._call(trained_tensors, untrained_tensors, inputs, self.training)
        if self.training:
            for tensor, new_value in zip(untrained_tensors, new_values, strict=True):
                if new_value is not tensor and new_value.is_floating_point():
                    tensor.copy_(new_value.detach())
        return output


def _make_stateless_call(
    model: Any, final_layer: Any
) -> Callable[..., tuple[Any, list[torch.Tensor]]]:
    """Return a function (trained, untrained, inputs, training) -> (output, new untrained)."""
    from keras import StatelessScope

    untrained_variables = list(model.non_trainable_variables)
    variables = [*model.trainable_variables, *untrained_variables]

    def variable_ids() -> tuple[list[int], list[int]]:
        """Return the ids of trainable and of other variables, because `==` compares values."""
        return (
            [id(variable) for variable in model.trainable_variables],
            [id(variable) for variable in model.non_trainable_variables],
        )

    initial_ids = variable_ids()

    def call(
        trained_tensors: list[torch.Tensor],
        untrained_tensors: list[torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        training: bool,  # noqa: FBT001
    ) -> tuple[Any, list[torch.Tensor]]:
        """Return the output and the new values of ``model.non_trainable_variables``."""
        model_inputs = _pack_inputs(model, inputs)
        if variable_ids() != initial_ids:
            raise InputError(
                f"from_keras: the trainable layers of {model.name} have changed; call "
                "from_keras again"
            )
        tensors = [*trained_tensors, *untrained_tensors]
        # Keras passes `training` to layers by the call's context.
        state = zip(variables, tensors, strict=True)
        scope = StatelessScope(state_mapping=state, collect_losses=True)
        try:
            with (
                scope,
                _skip_activation(final_layer) if training and final_layer else nullcontext(),
            ):
                output = model(*model_inputs, training=training)
        finally:
            if training:
                _check_draws(model, scope, zip(variables, tensors, strict=True))
        if training and scope.losses:
            raise _added_losses_error(model)
        return output, [scope.get_current_value(variable) for variable in untrained_variables]

    opaque_call: Callable[..., Any] = torch._dynamo.nonstrict_trace(call)  # noqa: SLF001
    return opaque_call


def _check_draws(
    model: Any, scope: Any, variable_tensors: Iterable[tuple[Any, torch.Tensor]]
) -> None:
    """Raise `InputError` if a layer drew from a seed of Keras: the draws would repeat each step."""
    seeds = [
        (variable, seed)
        for variable, seed in variable_tensors
        if variable.path.endswith(_SEED_SUFFIX)
    ]
    changed_seeds = [
        variable for variable, seed in seeds if scope.get_current_value(variable) is not seed
    ]
    if not changed_seeds:
        return
    owner_names = (
        layer.name
        for layer in model._flatten_layers(include_self=False)  # noqa: SLF001
        if any(variable is changed_seeds[0] for variable in layer.non_trainable_variables)
    )
    raise InputError(
        f"{model.name}: the layer {next(owner_names, changed_seeds[0].path)} draws from Keras' own "
        "seed, and would draw the same numbers in each step; use Dropout without noise_shape, "
        "which draws from PyTorch's generator, or draw outside of the model"
    ) from None


def _pack_inputs(model: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """Return inputs in a functional model's structure, in a tuple; otherwise unchanged."""
    structure = getattr(model, "_inputs_struct", None)
    if structure is None:
        return inputs
    from keras import tree

    if len(inputs) != len(tree.flatten(structure)):
        raise InputError(
            f"{model.name}: expected {len(tree.flatten(structure))} inputs, got {len(inputs)}"
        )
    return (tree.pack_sequence_as(structure, list(inputs)),)
