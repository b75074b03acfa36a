"""Private parts of PyTorch that the front uses; a test names those that a release has moved."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import contextmanager, suppress
from functools import partial
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch._decomp  # registers the kernels that `native_operators` removes
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame, symbolic_convert
from torch._dynamo import exc as dynamo_errors
from torch._dynamo import guards as dynamo_guards
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable, TensorVariable, builtin
from torch._dynamo.variables.user_defined import UserDefinedClassVariable
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributions import Distribution, constraints
from torch.nn.modules import module as module_hooks
from torch.optim.lr_scheduler import LRScheduler

from poetmodel.torch.errors import FOREIGN_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx

__all__ = [
    "CHECKPOINT",
    "DYNAMO_ERROR",
    "GLOBAL_HOOKS",
    "LOGGERS",
    "LOGGING_SETTINGS",
    "MAX_CAPTURES",
    "SETTINGS",
    "DispatchKey",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "OpOverload",
    "TracingContext",
    "ValidCode",
    "all_true",
    "aot_export_joint_with_descriptors",
    "calling_modules",
    "capture_settings",
    "changes_objects",
    "descriptors",
    "detect_fake_mode",
    "example_value",
    "explain",
    "failed_guards",
    "frames_in",
    "from_functional",
    "has_captures",
    "kept_validation",
    "known_refusal",
    "omit_guards",
    "raise_on_recompile",
    "retain_random_operations",
    "set_grad_enabled",
    "traced_code",
    "tracing",
    "wants_gradient",
]

MAX_CAPTURES: Final = 64
"""Maximum number of captures of one step, one for each set of shapes and Python values."""

SETTINGS: Final = {
    "accumulated_recompile_limit": 2**16,
    "allow_rnn": True,
    "capture_scalar_outputs": True,
    "recompile_limit": 2 * MAX_CAPTURES,
    "record_runtime_overhead": False,
    "skip_nnmodule_hook_guards": False,
    "specialize_float": True,
    "use_numpy_random_stream": True,
    "use_recursive_dict_tags_for_guards": False,
}
"""Dynamo's settings during a capture: hooks are guarded, recurrent layers and ``.item()`` captured,
floats are constants, draws of NumPy are refused rather than replaced by PyTorch's, no guard is left
out (2.9 would pass by cells of closures), and calls make no records for profiles."""

LOGGING_SETTINGS: Final = ("ignore_logging_functions", "ignore_logger_methods")
"""Names of the setting with logging calls that a capture leaves out, newest release first."""

_LOGGING_METHODS: Final = ("warning_once", "warning", "info", "debug", "error")

CHECKPOINT: Final = torch.ops.higher_order.tag_activation_checkpoint
"""The operator in a graph for a function inside ``torch.utils.checkpoint``."""

DYNAMO_ERROR: Final = dynamo_errors.TorchDynamoException

LOGGERS: Final = ("torch._dynamo", "torch._guards")
"""Loggers of a capture's causes, which refusals state."""

GLOBAL_HOOKS: Final = (
    module_hooks._global_forward_pre_hooks,  # noqa: SLF001
    module_hooks._global_forward_hooks,  # noqa: SLF001
    module_hooks._global_backward_pre_hooks,  # noqa: SLF001
    module_hooks._global_backward_hooks,  # noqa: SLF001
)
"""Hooks that PyTorch calls for all modules."""

DispatchKey: Final = torch._C.DispatchKey  # noqa: SLF001
all_true: Final = torch._is_all_true  # noqa: SLF001
from_functional: Final = torch._from_functional_tensor  # noqa: SLF001
set_grad_enabled: Final = torch._C._set_grad_enabled  # noqa: SLF001
raise_on_recompile: Final = partial(dynamo_config.patch, error_on_recompile=True)
retain_random_operations: Final = partial(inductor_config.patch, fallback_random=True)
"""Context manager that retains random operations without readers, which eager mode executes."""


@contextmanager
def capture_settings() -> Iterator[None]:
    """Context manager with `SETTINGS`, which hold for the whole process."""
    methods = [getattr(logging.Logger, name, None) for name in _LOGGING_METHODS]
    # A tuple: PyTorch 2.11 cannot sort a set of functions for its logs.
    calls = tuple(method for method in methods if method is not None)
    settings: dict[str, Any] = SETTINGS | dict.fromkeys(LOGGING_SETTINGS[:1], calls)
    if not hasattr(dynamo_config, LOGGING_SETTINGS[0]):
        settings[LOGGING_SETTINGS[1]] = settings.pop(LOGGING_SETTINGS[0])
    known_settings = {key: settings[key] for key in settings if hasattr(dynamo_config, key)}
    with suppress(AttributeError):  # another file may have the name of an earlier one
        symbolic_convert._import_module.cache_clear()  # noqa: SLF001 - no public name
    with dynamo_config.patch(known_settings), _traceable_functions(), kept_validation():
        yield


@contextmanager
def kept_validation() -> Iterator[None]:
    """Context manager in which Dynamo does not turn off the checks of distributions."""
    validates = Distribution._validate_args  # noqa: SLF001 - no public name
    try:
        yield
    finally:
        Distribution.set_default_validate_args(validates)


@contextmanager
def _traceable_functions() -> Iterator[None]:
    """Context manager that replaces functions that Dynamo does not trace.

    ``torch.backends.cudnn.flags`` has no effect, as on the CPU; other functions are as the
    originals. ``substitute_in_graph`` refuses functions of PyTorch. Names of functions that
    ``exec`` made are looked up in their own scope.
    """
    old_functions = [(owner, name, getattr(owner, name)) for owner, name in _REPLACED]
    for (owner, name), function in _REPLACED.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, old_function in old_functions:
            setattr(owner, name, old_function)


@contextmanager
def _no_flags(*_: Any, **__: Any) -> Iterator[None]:
    """Context manager without effect."""
    yield


def _is_dependent(constraint: Any) -> bool:
    """Return whether a constraint depends on other values, as the function of PyTorch."""
    return isinstance(constraint, constraints._Dependent)  # noqa: SLF001 - as the original


_find_all_true: Final = torch._is_all_true  # noqa: SLF001 - of the checks of distributions


def _is_all_true(values: Any) -> Any:
    """Return whether all elements are true; `values` may stand for a tensor in `Readings`."""
    # Dynamo passes the function by, and not its last call, when a mode answers readings.
    return _find_all_true(values if isinstance(values, torch.Tensor) else values.tensor).all()


def _no_latency(*_: Any) -> float:
    """Return 0: to log how long guards take, Dynamo flushes caches for 40 ms after each capture."""
    return 0.0


_InlinedCode: Final = symbolic_convert.InliningInstructionTranslator
_find_scope: Final = _InlinedCode.get_globals_source_and_value


def _find_own_scope(translator: Any, name: str) -> Any:
    """Return where Dynamo finds a global name: not in a module that merely has the scope's name."""
    scope = translator.f_globals
    module = scope.get("__name__")
    if module not in sys.modules or vars(sys.modules[module]) is scope:
        return _find_scope(translator, name)
    # Dynamo takes the scope itself, not a module, where it is that of a named tuple.
    scope["__name__"] = f"namedtuple_{module}"
    try:
        return _find_scope(translator, name)
    finally:
        scope["__name__"] = module


_find_in_class: Final[Any] = getattr(UserDefinedClassVariable, "var_getattr", None)


def _find_guarded_in_class(owner: Any, translator: Any, name: str) -> Any:
    """Return what Dynamo finds in a class, with the guard of a number or text that 2.9 omits."""
    found = _find_in_class(owner, translator, name)
    if isinstance(found, ConstantVariable) and found.source is None and owner.source is not None:
        return type(found).build(translator, found.value, AttrSource(owner.source, name))
    return found


_SETATTR: Final = (
    (builtin.SetAttrBuiltinVariable, "_call_setattr")
    if hasattr(builtin, "SetAttrBuiltinVariable")
    else (builtin.BuiltinVariable, "call_setattr")  # PyTorch 2.9
)
_set_attribute: Final = getattr(*_SETATTR)
_WANTS_GRADIENT: Final = "poetmodel_wants_gradient"


def _set_requires_grad(function: Any, translator: Any, owner: Any, name: Any, value: Any) -> Any:
    """Set an attribute; but of a tensor that forward makes, only note that it gets a gradient.

    No gradient of parameters depends on it, and its own is read by none, unless it is stored.
    """
    is_made = isinstance(owner, TensorVariable) and owner.source is None
    values = [part.as_python_constant() for part in (name, value) if part.is_python_constant()]
    if is_made and values == ["requires_grad", True]:
        node = owner.as_proxy().node
        node.meta[_WANTS_GRADIENT] = not example_value(node).requires_grad
        return value
    return _set_attribute(function, translator, owner, name, value)


def wants_gradient(node: fx.Node) -> bool:
    """Return whether forward sets ``requires_grad`` of the tensor of a node."""
    return bool(node.meta.get(_WANTS_GRADIENT))


def _unflatten(tensor: torch.Tensor, dim: Any, sizes: Any) -> torch.Tensor:
    """Return what the method of a tensor returns, which Dynamo does not trace under a mode."""
    return torch.unflatten(tensor, dim, sizes)


def _get_last_lr(schedule: Any) -> list[Any]:
    """Return the last learning rates of a schedule, as its method."""
    return list(schedule._last_lr)  # noqa: SLF001 - as the original


_REPLACED: Final[dict[tuple[Any, str], Any]] = {
    (LRScheduler, "get_last_lr"): _get_last_lr,
    (_InlinedCode, _find_scope.__name__): _find_own_scope,
    _SETATTR: _set_requires_grad,
    (torch, "_is_all_true"): _is_all_true,
    (torch.Tensor, "unflatten"): _unflatten,
    (torch.backends.cudnn, "flags"): _no_flags,
    (dynamo_guards, "profile_guard_manager"): _no_latency,
    (constraints, "is_dependent"): _is_dependent,
}
if _find_in_class is not None:
    _REPLACED[UserDefinedClassVariable, "var_getattr"] = _find_guarded_in_class


def omit_guards() -> None:
    """Omit the guards of functions that a capture replaces; called while its graph is captured.

    Dynamo's own option for this builds all guards twice, and fails on properties of classes that
    are made anew when they are read, as in distributions.
    """
    context = TracingContext.get().guards_context
    output = symbolic_convert.InstructionTranslator.current_tx().output
    scope = {"L": output.local_scope, "G": output.global_scope}
    context.dynamo_guards.inner -= {
        guard for guard in context.dynamo_guards.inner if _is_replaced(guard.name, scope)
    }


def traced_code() -> tuple[frozenset[CodeType], frozenset[type]]:
    """Return (code that Dynamo traces, classes of objects that it meets); called as `omit_guards`.

    Of classes, Dynamo guards that objects have them, but not the methods that they find.
    """
    output = symbolic_convert.InstructionTranslator.current_tx().output
    met_objects = output.side_effects.keepalive
    return frozenset(TracingContext.get_traced_code() or ()), frozenset(map(type, met_objects))


def changes_objects() -> bool:
    """Return whether forward changes a Python object or name; called as `omit_guards`."""
    output = symbolic_convert.InstructionTranslator.current_tx().output
    return not output.side_effects.is_empty()


def _is_replaced(expression: str, scope: dict[str, Any]) -> bool:
    """Return whether an expression of a guard is a function that stands for another one."""
    if not any(name in expression for _, name in _REPLACED):
        return False
    value = None
    with suppress(*FOREIGN_ERRORS):
        value = eval(expression, scope)  # noqa: S307 - an expression of Dynamo
    functions = [getattr(function, "__wrapped__", function) for function in _REPLACED.values()]
    return any(getattr(value, "__wrapped__", value) is function for function in functions)


def has_captures(function: Any) -> bool:
    """Return whether Dynamo has a capture of a function; it has none after a reset."""
    return bool(_cache_entries(function.__code__))


_cache_entries: Final = eval_frame._debug_get_cache_entry_list  # noqa: SLF001 - no public name


class ValidCode:
    """Finds what Dynamo has made of a function of positional arguments, by its guards alone.

    A call of the compiled function takes longer than the guards of a small step: it sets options
    for the evaluation of frames, which only a capture needs.
    """

    def __init__(self, function: FunctionType) -> None:
        code, cells = function.__code__, function.__closure__ or ()
        self._function, self._batch_name = function, code.co_varnames[code.co_argcount]
        self._scope = {
            name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)
        }
        self._made: list[tuple[CodeType, Callable[..., Any]]] = []
        """(code that Dynamo has made, function with it), last used first."""

    def find(self, batch: Sequence[Any]) -> Callable[..., Any] | None:
        """Return the function to call on a batch in place of the compiled one; None if unknown."""
        scope = {**self._scope, self._batch_name: tuple(batch)}
        entries = _cache_entries(self._function.__code__)
        if len(entries) > 1 and self._made:
            last_code = self._made[0][0]
            entries.sort(key=lambda entry: entry.code is not last_code)
        for entry in entries:
            if entry.guard_manager.root.check(scope):
                return self._make(entry.code)
        return None

    def _make(self, code: CodeType) -> Callable[..., Any]:
        """Return the function with a code of Dynamo."""
        for index, (made_code, made) in enumerate(self._made):
            if made_code is code:
                if index:
                    self._made.insert(0, self._made.pop(index))
                return made
        function = self._function
        made = FunctionType(code, function.__globals__, None, None, function.__closure__)
        self._made.insert(0, (code, made))
        return made


def example_value(node: fx.Node) -> Any:
    """Return the fake value of a node in a graph of Dynamo; None if it has none."""
    return node.meta.get("example_value")


def calling_modules(node: fx.Node) -> list[int]:
    """Return the ``id`` of each module being called where a node was made, outermost first."""
    keys = (str(key) for key in node.meta.get("nn_module_stack") or ())
    matches = (re.match(r"\d+", key) for key in keys)
    return [int(match[0]) for match in matches if match is not None]


_GUARD: Final = re.compile(r"- \d+/\d+: (?P<guard>.*)")
_GUARD_LINE: Final = re.compile(r"(?P<guard>.*?)\s+# (?P<code>.*?)\s+# (?P<file>\S+):(?P<line>\d+)")
_FRAME: Final = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in')


def failed_guards(text: str) -> list[tuple[str, str, int]]:
    """Return (guard, end of path or "", line or 0) of each failed guard in Dynamo's message."""
    guards = []
    for match in _GUARD.finditer(text):
        guard = match["guard"].strip()
        located = _GUARD_LINE.match(guard)
        if located is None:
            guards.append((guard, "", 0))
        else:
            guards.append((located["guard"].strip(), located["file"], int(located["line"])))
    return [guard for guard in guards if not guard[0].startswith(("User stack trace", "File "))]


def frames_in(text: str | None) -> list[tuple[str, int]]:
    """Return (path, line) of each frame in the text of a traceback, outermost first."""
    return [(match["path"], int(match["line"])) for match in _FRAME.finditer(text or "")]


def explain(error: BaseException) -> str:
    """Return a sentence of Dynamo's explanation of an error; without one, its first line."""
    text = str(error)
    explanation = re.search(r"Explanation: (.*)", text)
    has_reason = explanation is not None and explanation[1].strip()
    reason = explanation[1] if explanation and has_reason else text.strip().split("\n")[0]
    return re.split(r"(?<=\w)\. ", reason.replace("`", ""))[0].strip().rstrip(".")


_KNOWN: Final = (
    (
        r"VariableTracker\(Generator\)|UserDefinedObjectVariable\(Generator\)",
        "an operation takes a Generator, which cannot be replayed",
        "leave it out (random numbers come from the default generator)",
        True,
    ),
    (
        "outside the scope of this HOP|inside a higher-order op subgraph|not in the current scope",
        "forward sets an attribute inside of a checkpoint, which eager mode does twice",
        "leave the checkpoint out, because a compiled step decides itself what it recomputes",
        False,
    ),
    (
        r"setattr\(\) on Tensor\.requires_grad",
        "forward sets requires_grad of a tensor, which TorchDynamo does not trace",
        "set it before the step",
        False,
    ),
    (
        "InternalTorchDynamoError.*Boolean value of Tensor|^RuntimeError: Boolean value of Tensor",
        "forward reads a NumPy array, or parts of it, which TorchDynamo cannot guard",
        "make it a tensor, or a tuple of numbers",
        False,
    ),
    (
        r"RecursionError: maximum recursion depth|"
        r"argument types \['Decimal'\]|'Decimal' implements",
        "forward reads a Python object (such as a Decimal) that TorchDynamo cannot guard",
        "keep it as a number",
        False,
    ),
    (
        "Could not guard on data-dependent expression|Could not extract specialized integer|"
        "output shape depends on input Tensor data",
        "the value of a tensor decides what the code does",
        "select with torch.where, or compute the value outside of the step",
        False,
    ),
)
"""Pattern of an error, reason, advice, and whether Dynamo refuses the step in any state."""


def known_refusal(error: BaseException) -> tuple[str, str, bool] | None:
    """Return (reason, advice, whether it holds in any state) of a common error; otherwise None."""
    return next((known[1:] for known in _KNOWN if re.search(known[0], str(error))), None)
