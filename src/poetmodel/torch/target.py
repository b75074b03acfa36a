"""Targets of the command line: import a user's model, loss and inputs, or read an ONNX file."""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from poetmodel.errors import InputError, quote
from poetmodel.torch.errors import FOREIGN_ERRORS, at_line, require_torch, user_line_of_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    import torch

_LOCATION: Final = "module:function or path/file.py:function"
TARGET_FORMAT: Final = (
    f"{_LOCATION}, a function without arguments that returns (model, loss_fn, inputs)"
)
"""The format of a target, for messages."""
_LOSS_FORMAT: Final = f"{_LOCATION}, a function of an output and its target"
"""The format of a user-defined loss, for messages."""

_BATCH_FORMAT: Final = (
    f"{_LOCATION}, a function without arguments that returns the inputs of a step"
)
"""The format of a function that returns a batch, for messages."""

_RETURNED_COUNT: Final = 3
"""Number of values that a target returns."""

StepArguments: TypeAlias = (
    "tuple[torch.nn.Module, Callable[..., torch.Tensor] | None, tuple[Any, ...]]"
)
"""Model, loss and inputs."""


def is_target(text: str) -> bool:
    """Return whether a string has the format ``module:function`` or ``path/file.py:function``.

    Examples
    --------
    >>> is_target("train:step"), is_target("train.graph.json")
    (True, False)
    """
    head, colon, function = text.rpartition(":")
    return bool(head and colon and function.isidentifier())


def is_onnx(text: str) -> bool:
    """Return whether a string ends with ``.onnx``, in upper or lower case."""
    return text.lower().endswith(".onnx")


def needs_capture(text: str) -> bool:
    """Return whether a string names a step to capture: a function or an ONNX file."""
    return is_onnx(text) or is_target(text) or text.endswith(".py")


def default_name(text: str) -> str | None:
    """Return the default name of a step: that of an ONNX file without ``.onnx``; otherwise None."""
    return Path(text).stem if is_onnx(text) else None


def load_step(target: str, onnx: OnnxStep | None = None) -> StepArguments:
    """Return (model, loss, inputs): call the target's function, or read an ONNX file by `onnx`."""
    require_torch()
    if is_onnx(target):
        from poetmodel.torch.onnx.step import make_onnx_step

        onnx = onnx or OnnxStep()
        return make_onnx_step(
            target, onnx.loss, load_function=_load_loss, batch=onnx.batch, dims=dict(onnx.dims)
        )
    given_options = () if onnx is None else onnx.given_options
    if given_options:
        raise InputError(
            f"{given_options[0]}: only applies to ONNX files; {target} returns model, "
            "loss and inputs"
        )
    if not is_target(target):
        raise InputError(f"{quote(target)}: expected {TARGET_FORMAT}, or an ONNX file, *.onnx")
    with _import_function(target) as function:
        returned = function()
    return _check_returned(target, returned)


def trained_weight_bytes(model: object) -> int:
    """Return the bytes of elements that are not 0 in trained CPU parameters; 0 for no module."""
    import torch

    sizes: dict[int, int] = {}
    for parameter in model.parameters() if isinstance(model, torch.nn.Module) else ():
        if parameter.requires_grad and parameter.device.type == "cpu":
            data = parameter.detach()
            size = data.element_size() * int(data.count_nonzero())
            address = data.untyped_storage().data_ptr()
            sizes[address] = max(size, sizes.get(address, 0))
    return sum(sizes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxStep:
    """Options of a training step that an ONNX file does not contain; None or empty if not set."""

    loss: str | None = None
    """A loss by name, or ``module:function``."""
    batch: int | None = None
    """Batch size."""
    dims: tuple[tuple[str, int], ...] = ()
    """(name, size) of open dimensions except the batch."""

    @property
    def given_options(self) -> tuple[str, ...]:
        """The names of the command-line options that are set."""
        options = {"--loss": self.loss, "--batch": self.batch, "--dim": self.dims or None}
        return tuple(option for option, value in options.items() if value is not None)


@contextmanager
def _import_function(target: str, format_text: str = TARGET_FORMAT) -> Iterator[Callable[..., Any]]:
    """Import and yield a function, with the current folder on the path; convert errors to ours."""
    head, _, name = target.rpartition(":")
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        with _raise_input_error(target):
            is_file = head.endswith(".py")
            module = (
                _load_file(Path(head), format_text) if is_file else _load_module(head, format_text)
            )
            function = getattr(module, name, None)
            if not callable(function):
                raise InputError(f"{target}: {head} has no function {name!r}")
            yield function
    finally:
        sys.path.remove(folder)


def _load_loss(target: str) -> Callable[..., Any]:
    """Import a user-defined loss; raise `InputError` if that fails."""
    if not is_target(target):
        raise InputError(f"--loss {quote(target)}: expected {_LOSS_FORMAT}")
    with _import_function(target, _LOSS_FORMAT) as function:
        return function


def load_batch(target: str) -> tuple[Any, ...]:
    """Call the function named by `target`, and return the inputs that it returns as a tuple."""
    if not is_target(target):
        raise InputError(f"--batch-of {quote(target)}: expected {_BATCH_FORMAT}")
    with _import_function(target, _BATCH_FORMAT) as function:
        returned = function()
    if not isinstance(returned, tuple | list):
        kind = type(returned).__name__
        raise InputError(f"{target}: expected it to return a tuple of inputs, got a {kind}")
    return tuple(returned)


def _check_returned(target: str, returned: object) -> StepArguments:
    """Return (model, loss, inputs) from a target's return value, or raise `InputError`."""
    if not isinstance(returned, tuple | list) or len(returned) != _RETURNED_COUNT:
        is_sequence = isinstance(returned, tuple | list)
        kind = type(returned).__name__
        value_text = f"a {kind} of {len(returned)}" if is_sequence else quote(returned)  # type: ignore[arg-type]
        raise InputError(
            f"{target}: expected it to return (model, loss_fn, inputs), got {value_text}"
        )
    model, loss_fn, inputs = returned
    if not isinstance(inputs, tuple | list):
        raise InputError(f"{target}: inputs: expected a tuple, got a {type(inputs).__name__}")
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(f"{target}: loss_fn: expected a function or None, got {quote(loss_fn)}")
    return model, loss_fn, tuple(inputs)


def _load_module(name: str, format_text: str) -> ModuleType:
    """Import a module by name; raise `InputError` with `format_text` if it does not exist."""
    package = name.rpartition(".")[0]
    exists = all(map(str.isidentifier, name.split(".")))
    try:
        if exists and package:
            import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise  # the package imports a missing one
        exists = False
    if exists:
        exists = False
        with suppress(ModuleNotFoundError, ValueError):  # no package, or a module without a spec
            exists = find_spec(name) is not None
    if not exists:
        raise InputError(f"there is no module {name!r} here or installed; expected {format_text}")
    return import_module(name)


def _load_file(path: Path, format_text: str) -> ModuleType:
    """Execute a Python file as a new module, registered under the name of the file."""
    spec = spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"{path}: no such file; expected {format_text}")
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _raise_input_error(target: str) -> Iterator[None]:
    """Convert exceptions, also `SystemExit`, to `InputError` with prefix `target` and a line."""
    try:
        yield
    except InputError:
        raise
    except SystemExit as error:
        raise InputError(
            f"{target}: it ended the program (sys.exit({error.code!r})) instead of returning"
        ) from error
    except (*FOREIGN_ERRORS, SyntaxError) as error:
        line = user_line_of_error(error)
        reason = " ".join(str(error).split())
        raise InputError(
            f"{target}: failed{at_line(line)} with {type(error).__name__}: {reason}"
        ) from error
