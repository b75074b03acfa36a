"""A training step of an ONNX file: a named loss, example inputs, and a target."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.nn import functional

from poetmodel.errors import InputError, PoetModelError, quote
from poetmodel.torch.onnx.module import OnnxModule, from_onnx

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.torch.onnx.operators import OnnxNode

    Loss: TypeAlias = Callable[..., torch.Tensor]

_ENDINGS: Final = {
    "cross-entropy": ("Softmax", "LogSoftmax"),
    "bce": ("Sigmoid",),
}
"""Operators that each loss contains, and replaces at the end of a file."""
_LOSS_OF_ENDING: Final = {
    operator: loss for loss, operators in _ENDINGS.items() for operator in operators
}
"""The loss that contains each operator at the end of a file."""


def make_onnx_step(
    path: str,
    loss: str | None,
    *,
    load_function: Callable[[str], Any],
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> tuple[OnnxModule, Loss, tuple[torch.Tensor, ...]]:
    """Return model, loss and example inputs of a training step; the last input is the target.

    `loss` is ``cross-entropy``, ``bce``, ``nll``, ``mse``, ``l1`` or ``module:function``, which
    `load_function` loads. In training mode, ``cross-entropy`` replaces a Softmax or LogSoftmax at
    the end of the file, ``bce`` a Sigmoid. `batch` and `dims` are as for `from_onnx`. If `loss` is
    None, the `InputError` asks for ``--loss``.
    """
    if loss is None:
        raise InputError(f"{path}: --loss is missing; expected {_format_loss_names()}")
    if loss not in _LOSSES and ":" not in loss:
        raise InputError(f"--loss {quote(loss)}: expected {_format_loss_names()}")
    model = from_onnx(path, batch=batch, dims=dims)
    inputs = model.example_inputs()
    outputs = _compute_outputs(path, model, inputs)
    if loss not in _LOSSES:
        user_loss = load_function(loss)
        return model, user_loss, (*inputs, _make_user_target(loss, user_loss, outputs))
    if not isinstance(outputs, torch.Tensor):
        names = ", ".join(map(repr, model.outputs))
        raise InputError(
            f"{path}: --loss {loss} reads one output, and the file has {names}; use a function of "
            "all outputs as module:function"
        )
    _check_ending(path, loss, model.ending)
    model.logits = model.ending is not None and model.ending.operator in _ENDINGS.get(loss, ())
    make_loss, make_target = _LOSSES[loss]
    output = _ExampleOutput(path, loss, outputs, None if model.reshapes_ending else model.ending)
    return model, make_loss(output), (*inputs, make_target(output))


def _compute_outputs(path: str, model: OnnxModule, inputs: tuple[torch.Tensor, ...]) -> Any:
    """Return the outputs for example inputs in evaluation mode; sets training mode afterwards."""
    try:
        with torch.no_grad():
            return model.eval()(*inputs)
    except PoetModelError:
        raise
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        shapes = ", ".join(
            f"{record.name} {list(x.shape)}" for record, x in zip(model.inputs, inputs, strict=True)
        )
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(
            f"{path}: it does not accept inputs of these sizes ({shapes}): {reason}; set other "
            "sizes with --batch and --dim"
        ) from error
    finally:
        model.train()


def _format_loss_names() -> str:
    return f"{', '.join(_LOSSES)}, or a function as module:function"


def _check_ending(path: str, loss: str, ending: OnnxNode | None) -> None:
    """Raise `InputError` if the loss cannot follow the operator at the end of the file."""
    operator = None if ending is None else ending.operator
    node_text = "" if ending is None else f" ({ending.name!r})"
    if loss == "nll" and operator != "LogSoftmax":
        ending_text = f"ends in {operator}{node_text}" if operator else "does not end in one"
        raise InputError(
            f"{path}: --loss nll needs the log-probabilities of a LogSoftmax, and the file "
            f"{ending_text}; use --loss {_LOSS_OF_ENDING.get(operator or '', 'cross-entropy')}"
        )
    if loss in _ENDINGS and operator is not None and operator not in _ENDINGS[loss]:
        raise InputError(
            f"{path}: --loss {loss} does not match the {operator} at the end of the file"
            f"{node_text}; use --loss {_LOSS_OF_ENDING[operator]}"
        )


class _ExampleOutput:
    """An example output, and the losses and targets of its shape; refuses unclear class dimensions.

    Classes are in the ``axis`` of a final Softmax or LogSoftmax (`ending`), else the second
    dimension.
    """

    def __init__(self, path: str, loss: str, output: torch.Tensor, ending: OnnxNode | None) -> None:
        self.output = output
        self.has_classes_last = False
        """Whether classes are in the last of three or more dimensions."""
        if loss not in ("cross-entropy", "nll"):
            return
        rank = output.ndim
        axis = None if ending is None or rank == 0 else ending.get("axis", -1) % rank
        if rank < 2 or (axis is None and rank == 3) or axis not in (None, 1, rank - 1):  # noqa: PLR2004
            raise InputError(
                f"{path}: --loss {loss}: the dimension of classes is ambiguous or not supported in "
                f"an output of shape {tuple(output.shape)}; use a function of it as module:function"
            )
        self.has_classes_last = rank > 2 and axis == rank - 1  # noqa: PLR2004

    def make_class_target(self) -> torch.Tensor:
        """Return a target of class indices, all 0, in the output's shape without its classes."""
        shape = list(self.output.shape)
        del shape[-1 if self.has_classes_last else 1]
        return torch.zeros(shape, dtype=torch.int64)

    def make_class_loss(self, function: Loss) -> Loss:
        """Return a loss over class indices that calls `function` on flat tensors if necessary."""
        if not self.has_classes_last:
            return function

        def compute_over_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return function(output.flatten(0, -2), target.flatten())

        return compute_over_rows

    def make_zero_target(self) -> torch.Tensor:
        """Return a target of zeros in the shape of the output."""
        return torch.zeros_like(self.output)


_LOSSES: Final[
    dict[str, tuple[Callable[[_ExampleOutput], Loss], Callable[[_ExampleOutput], torch.Tensor]]]
] = {
    "cross-entropy": (
        lambda output: output.make_class_loss(functional.cross_entropy),
        _ExampleOutput.make_class_target,
    ),
    "mse": (lambda _: functional.mse_loss, _ExampleOutput.make_zero_target),
    "bce": (lambda _: functional.binary_cross_entropy_with_logits, _ExampleOutput.make_zero_target),
    "nll": (
        lambda output: output.make_class_loss(functional.nll_loss),
        _ExampleOutput.make_class_target,
    ),
    "l1": (lambda _: functional.l1_loss, _ExampleOutput.make_zero_target),
}
"""Functions that return the loss and the target of an `_ExampleOutput`, by the name of the loss."""


def _make_user_target(name: str, function: Any, outputs: Any) -> torch.Tensor:
    """Return the tensor that is the second parameter's default, else zeros like the only output."""
    if not callable(function):
        raise InputError(f"--loss {name}: expected a function of an output and its target")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    default = parameters[1].default if len(parameters) > 1 else None
    if isinstance(default, torch.Tensor):
        return default
    if isinstance(outputs, torch.Tensor):
        return torch.zeros_like(outputs)
    raise InputError(
        f"--loss {name}: the file has several outputs, so the shape of the target is unknown; "
        "set a tensor as the default of its second parameter"
    )
