"""A training step of an ONNX file: a loss by name, and inputs and a target of its shapes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.nn import functional

from poetmodel.errors import InputError, PoetModelError, shown
from poetmodel.torch.onnx.module import OnnxModule, from_onnx

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.torch.onnx.operators import OnnxNode

    Loss: TypeAlias = Callable[..., torch.Tensor]

_ENDINGS: Final = {
    "cross-entropy": ("Softmax", "LogSoftmax"),
    "bce": ("Sigmoid",),
}
"""By loss, the operators at the end of a file that are a part of it."""
_INSTEAD: Final = {"Softmax": "cross-entropy", "LogSoftmax": "cross-entropy", "Sigmoid": "bce"}
"""By operator, the loss that it is a part of."""


def onnx_step(
    path: str,
    loss: str | None,
    *,
    function: Callable[[str], Any],
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> tuple[OnnxModule, Loss, tuple[torch.Tensor, ...]]:
    """Return model, loss and inputs of a training step; the target is the last input.

    Parameters
    ----------
    path : str
        The file.
    loss : str
        ``cross-entropy``, ``bce``, ``nll``, ``mse``, ``l1``, or ``module:function``. A Softmax or a
        Sigmoid at the end of the file is a part of the first two in training mode.
    function : callable
        Returns the function that ``module:function`` names.
    batch, dims
        As for `OnnxModule.example_inputs`.

    Raises
    ------
    InputError
        If the file, the loss or the dimensions do not fit.
    """
    if loss is None:
        raise InputError(f"{path}: --loss is missing; expected {_named()}")
    if loss not in _LOSSES and ":" not in loss:
        raise InputError(f"--loss {shown(loss)}: expected {_named()}")
    model = from_onnx(path)
    inputs = model.example_inputs(batch=batch, dims=dims)
    outputs = _outputs(path, model, inputs)
    if loss not in _LOSSES:
        own = function(loss)
        return model, own, (*inputs, _own_target(loss, own, outputs))
    if not isinstance(outputs, torch.Tensor):
        names = ", ".join(map(repr, model.outputs))
        raise InputError(
            f"{path}: --loss {loss} takes one output, and the file has {names}; give a function "
            "of them as module:function"
        )
    _check_ending(path, loss, model.ending)
    model.logits = model.ending is not None and model.ending.operator in _ENDINGS.get(loss, ())
    find_loss, target = _LOSSES[loss]
    known = model.logits and not model.moved
    shaped = _Output(path, loss, outputs, model.ending if known else None)
    return model, find_loss(shaped), (*inputs, target(shaped))


def _outputs(path: str, model: OnnxModule, inputs: tuple[torch.Tensor, ...]) -> Any:
    """Return the network's outputs for inputs."""
    try:
        with torch.no_grad():
            return model.eval()(*inputs)
    except PoetModelError:
        raise
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        shapes = ", ".join(
            f"{given.name} {list(x.shape)}" for given, x in zip(model.given, inputs, strict=True)
        )
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(
            f"{path}: it takes no inputs of these sizes ({shapes}): {reason}; give others by "
            "--batch and --dim"
        ) from error
    finally:
        model.train()


def _named() -> str:
    return f"{', '.join(_LOSSES)}, or a function as module:function"


def _check_ending(path: str, loss: str, ending: OnnxNode | None) -> None:
    """Raise if a loss does not take what a file ends in."""
    kind = None if ending is None else ending.operator
    where = "" if ending is None else f" ({ending.name!r})"
    if loss == "nll" and kind != "LogSoftmax":
        said = f"ends in {kind}{where}" if kind else "ends in none"
        raise InputError(
            f"{path}: --loss nll takes log-probabilities, those of a LogSoftmax, and the file "
            f"{said}; give --loss {_INSTEAD.get(kind or '', 'cross-entropy')}"
        )
    if loss in _ENDINGS and kind is not None and kind not in _ENDINGS[loss]:
        raise InputError(
            f"{path}: --loss {loss} does not go with the {kind} that the file ends in{where}; give "
            f"--loss {_INSTEAD[kind]}"
        )


class _Output:
    """Output of a model, by the loss that has a name."""

    def __init__(self, path: str, loss: str, output: torch.Tensor, ending: OnnxNode | None) -> None:
        self.output = output
        self.flat = False
        """Whether classes are in the last of several dimensions."""
        if loss not in ("cross-entropy", "nll"):
            return
        rank = output.ndim
        axis = None if ending is None else ending.get("axis", -1) % rank
        if rank < 2 or (axis is None and rank == 3) or axis not in (None, 1, rank - 1):  # noqa: PLR2004
            raise InputError(
                f"{path}: --loss {loss}: in an output of shape {tuple(output.shape)} it is not "
                "clear where the classes are; give a function of it as module:function"
            )
        self.flat = rank > 2 and axis == rank - 1  # noqa: PLR2004

    def classes(self) -> torch.Tensor:
        """Return a target of classes."""
        shape = list(self.output.shape)
        del shape[-1 if self.flat else 1]
        return torch.zeros(shape, dtype=torch.int64)

    def of_classes(self, function: Loss) -> Loss:
        """Return a loss of classes, wherever they are."""
        if not self.flat:
            return function

        def over_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return function(output.flatten(0, -2), target.flatten())

        return over_rows

    def alike(self) -> torch.Tensor:
        """Return a target of numbers."""
        return torch.zeros_like(self.output)


_LOSSES: Final[dict[str, tuple[Callable[[_Output], Loss], Callable[[_Output], torch.Tensor]]]] = {
    "cross-entropy": (lambda o: o.of_classes(functional.cross_entropy), _Output.classes),
    "mse": (lambda _: functional.mse_loss, _Output.alike),
    "bce": (lambda _: functional.binary_cross_entropy_with_logits, _Output.alike),
    "nll": (lambda o: o.of_classes(functional.nll_loss), _Output.classes),
    "l1": (lambda _: functional.l1_loss, _Output.alike),
}
"""By name, what makes the loss of an output, and what makes a target for it."""


def _own_target(name: str, function: Any, outputs: Any) -> torch.Tensor:
    """Return the target of a user's loss: its default, or a tensor like the output."""
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
        f"--loss {name}: the file has several outputs, so that the shape of the target is not "
        "known; give its second parameter a tensor as the default"
    )
