"""``module:function``: where the command line finds a user's model, loss and inputs."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from poetmodel.errors import InputError, shown
from poetmodel.torch.errors import RAISED, require_torch, user_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    import torch

_PLACE: Final = "module:function or path/file.py:function"
FORM: Final = f"{_PLACE}, a function without arguments that returns (model, loss_fn, inputs)"
"""Form of a target."""
_LOSS: Final = f"{_PLACE}, a function of an output and its target"
"""Form of a loss of one's own."""

_BATCH: Final = f"{_PLACE}, a function without arguments that returns the inputs of a step"
"""Source of a batch."""

_PARTS: Final = 3

Loaded: TypeAlias = "tuple[torch.nn.Module, Callable[..., torch.Tensor] | None, tuple[Any, ...]]"
"""Model, loss and inputs."""


def is_target(text: str) -> bool:
    """Whether a text reads like ``module:function`` and not like a file or a model.

    Examples
    --------
    >>> is_target("train:step"), is_target("train.graph.json")
    (True, False)
    """
    head, colon, function = text.rpartition(":")
    return bool(head and colon and function.isidentifier())


def is_onnx(text: str) -> bool:
    """Whether a text is the name of an ONNX file."""
    return text.lower().endswith(".onnx")


def is_captured(text: str) -> bool:
    """Whether PyTorch captures what a text names: a function, or an ONNX file.

    A file of Python whose function is not named counts, so that its message asks for one.
    """
    return is_onnx(text) or is_target(text) or text.endswith(".py")


def default_name(text: str) -> str | None:
    """Return the name of a step that has none: an ONNX file's own; None for the model's class."""
    return Path(text).stem if is_onnx(text) else None


def load_step(target: str, onnx: OnnxStep | None = None) -> Loaded:
    """Import a module, of the current folder too, and call its function; or read an ONNX file.

    Raises `InputError` if there is no such function, it fails, or it returns something else; or if
    the file cannot be read, or what is said of its step does not fit.
    """
    require_torch()
    if is_onnx(target):
        from poetmodel.torch.onnx.step import onnx_step

        onnx = onnx or OnnxStep()
        return onnx_step(target, onnx.loss, function=_loss, batch=onnx.batch, dims=dict(onnx.dims))
    given = () if onnx is None else onnx.given
    if given:
        raise InputError(
            f"{given[0]}: only applies to ONNX files; {target} gives model, loss and inputs"
        )
    if not is_target(target):
        raise InputError(f"{shown(target)}: expected {FORM}, or an ONNX file, *.onnx")
    with _imported(target) as function:
        returned = function()
    return _step(target, returned)


def trained_weight_bytes(model: object) -> int:
    """Return the size of all numbers of a module that train and are not 0 [B].

    Of parameters in the same memory the largest counts. 0 for anything but a module.
    """
    import torch

    sizes: dict[int, int] = {}
    for parameter in model.parameters() if isinstance(model, torch.nn.Module) else ():
        if parameter.requires_grad and parameter.device.type == "cpu":
            data = parameter.detach()
            size = data.element_size() * int(data.count_nonzero())
            place = data.untyped_storage().data_ptr()
            sizes[place] = max(size, sizes.get(place, 0))
    return sum(sizes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxStep:
    """Facts on a training step that an ONNX file lacks."""

    loss: str | None = None
    batch: int | None = None
    dims: tuple[tuple[str, int], ...] = ()
    """Sizes of other open dimensions, by name."""

    @property
    def given(self) -> tuple[str, ...]:
        """The options that state something."""
        stated = {"--loss": self.loss, "--batch": self.batch, "--dim": self.dims or None}
        return tuple(option for option, value in stated.items() if value is not None)


@contextmanager
def _imported(target: str, form: str = FORM) -> Iterator[Callable[..., Any]]:
    """Import a module, of the current folder too; inside, its function may import as well."""
    head, _, name = target.rpartition(":")
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        with _raise_input_error(target):
            is_file = head.endswith(".py")
            module = _load_file(Path(head), form) if is_file else _load_module(head, form)
            function = getattr(module, name, None)
            if not callable(function):
                raise InputError(f"{target}: {head} has no function {name!r}")
            yield function
    finally:
        sys.path.remove(folder)


def _loss(target: str) -> Callable[..., Any]:
    if not is_target(target):
        raise InputError(f"--loss {shown(target)}: expected {_LOSS}")
    with _imported(target, _LOSS) as function:
        return function


def load_batch(target: str) -> tuple[Any, ...]:
    """Import a module, of the current folder too, and return the inputs that its function gives.

    Raises `InputError` if there is no such function, it fails, or it returns something else.
    """
    if not is_target(target):
        raise InputError(f"--batch-of {shown(target)}: expected {_BATCH}")
    with _imported(target, _BATCH) as function:
        returned = function()
    if not isinstance(returned, tuple | list):
        kind = type(returned).__name__
        raise InputError(f"{target}: expected it to return a tuple of inputs, got a {kind}")
    return tuple(returned)


def _step(target: str, returned: object) -> Loaded:
    if not isinstance(returned, tuple | list) or len(returned) != _PARTS:
        nested = isinstance(returned, tuple | list)
        kind = type(returned).__name__
        got = f"a {kind} of {len(returned)}" if nested else shown(returned)  # type: ignore[arg-type]
        raise InputError(f"{target}: expected it to return (model, loss_fn, inputs), got {got}")
    model, loss_fn, inputs = returned
    if not isinstance(inputs, tuple | list):
        raise InputError(f"{target}: inputs: expected a tuple, got a {type(inputs).__name__}")
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(f"{target}: loss_fn: expected a function or None, got {shown(loss_fn)}")
    return model, loss_fn, tuple(inputs)


def _load_module(name: str, form: str) -> ModuleType:
    try:
        known = find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        known = False
    if not known:
        raise InputError(f"there is no module {name!r} here or installed; expected {form}")
    return import_module(name)


def _load_file(path: Path, form: str) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"{path}: no such file; expected {form}")
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _raise_input_error(target: str) -> Iterator[None]:
    """Turn what a user's code raises into an `InputError` with its place."""
    try:
        yield
    except InputError:
        raise
    except SystemExit as error:
        raise InputError(
            f"{target}: it ended the program (sys.exit({error.code!r})) in place of returning"
        ) from error
    except (*RAISED, SyntaxError) as error:
        line = user_place(error)
        where = f" at {line}" if line else ""
        reason = " ".join(str(error).split())
        raise InputError(
            f"{target}: failed{where} with {type(error).__name__}: {reason}"
        ) from error
