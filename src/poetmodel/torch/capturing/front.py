"""Captures of a training step by TorchDynamo, and calls under their guards.

TorchDynamo traces a function of its own code object, so that its captures belong to one step. It
guards what the trace depends on, and replays side effects of the model after a call. The function
that a capture calls raises while the step is only captured or selected: then nothing is executed,
no side effect occurs, and the next call uses the capture again.
"""

from __future__ import annotations

import linecache
import logging
import re
import warnings
import weakref
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import fx

from poetmodel.clock import infrequent_gc
from poetmodel.torch.capturing.front_private import (
    DYNAMO_ERROR,
    LOGGERS,
    MAX_CAPTURES,
    ValidCode,
    capture_settings,
    changes_objects,
    example_value,
    explain,
    failed_guards,
    frames_in,
    has_captures,
    kept_validation,
    known_refusal,
    omit_guards,
    raise_on_recompile,
    traced_code,
    wants_gradient,
)
from poetmodel.torch.capturing.front_readings import (
    Reading,
    ReadingCheck,
    Readings,
    empty_readings,
    find_readings,
    mark_reading,
)
from poetmodel.torch.capturing.inputs import find_loss, follow
from poetmodel.torch.capturing.process_state import temporary_setting
from poetmodel.torch.errors import (
    FOREIGN_ERRORS,
    CaptureError,
    CodeOrigin,
    at_line,
    code_origin,
    exception_chain,
    format_source_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from poetmodel.torch.capturing.front_readings import Values
    from poetmodel.torch.capturing.inputs import Access

    Execute = Callable[["Capture", Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    """Executes a step on the tensors of a call; returns a value for each output of the graph."""

_STANCE: Final = "fail_on_recompile"
_GONE: Final = "the front of this capture no longer exists"


class Changed(Exception):  # noqa: N818 - a state, which callers convert
    """No capture is valid for a call; `reasons` has a text for each failed guard."""

    def __init__(self, reasons: Sequence[str] = (), *, captured: Capture | None = None) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)
        self.captured = captured
        """A capture that is valid, but not compiled yet; otherwise None."""


class Refusal(CaptureError):  # noqa: N818 - a kind of error
    """A step that Dynamo does not trace: `reason` without names, `line` of the code or ""."""

    def __init__(self, faults: str | Iterable[str], *, reason: str = "", line: str = "") -> None:
        super().__init__(faults)
        self.reason, self.line = reason, line


class Unreplayable(Refusal):
    """A step that cannot be captured, whatever earlier passes have set."""


class _Selected(Exception):  # noqa: N818 - ends a call without effect
    """Ends the call of a capture before anything is executed."""

    def __init__(self, capture: Capture, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.capture, self.tensors = capture, tensors


class _Traced(Exception):  # noqa: N818 - ends a capture without guards
    """Ends Dynamo's work on a capture before it builds guards, which no call needs."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.capture = capture


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator, unused-ignore]
def mark_result(result: torch.Tensor, index: int) -> torch.Tensor:  # noqa: ARG001
    """Return `result` itself; its node in a graph of Dynamo has the index: 0 for the loss."""
    return result


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Capture:
    """A graph of Dynamo for one set of shapes and Python values."""

    graph_module: fx.GraphModule
    tensors: tuple[torch.Tensor, ...]
    """The inputs of the graph at its capture: parameters, buffers, inputs, and other tensors."""
    result_positions: tuple[int, ...]
    """Position among the outputs of the graph of the loss, then of further outputs of the model."""
    stored_positions: tuple[int, ...]
    """Positions of the outputs that forward stores in attributes, dicts or globals."""
    readings: tuple[Reading, ...]
    """Values that Python read of inputs, buffers and, at the end of a step, parameters."""
    check: ReadingCheck
    is_guarded: bool
    """Whether calls under guards are possible."""
    code: frozenset[CodeType]
    """Code of functions that is part of the graph."""
    classes: frozenset[type]
    """Classes of the Python objects that this code uses."""

    @property
    def n_outputs(self) -> int:
        """Number of outputs of the graph."""
        return len(self.graph_module.graph.output_node().args[0])

    def fresh_inputs(self, tensors: Sequence[torch.Tensor]) -> list[fx.Node]:
        """Return the placeholders whose tensor in `tensors`, of a later call, is another object."""
        placeholders = self.graph_module.graph.find_nodes(op="placeholder")
        return [
            node
            for node, old, new in zip(placeholders, self.tensors, tensors, strict=True)
            if old is not new
        ]


class StepFront:
    """Captures a step for sets of shapes and values, and calls it under the guards of these.

    `uses_keywords`: the model gets the items of its only argument, a mapping, by name. `accesses`
    lead to each further output of the model, returned detached. The value of each of
    `assigned_buffers` (module, name), to which forward assigns a new tensor, is copied into the old
    one. Unless `needs_guards`, a capture has none if forward changes no Python object.
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor] | None,
        *,
        uses_keywords: bool = False,
        accesses: Sequence[Access] = (),
        assigned_buffers: Sequence[tuple[torch.nn.Module, str]] = (),
        needs_guards: bool = True,
    ) -> None:
        self.name, self.model, self.loss_fn = name, model, loss_fn
        self.needs_guards = needs_guards
        self.values: Values | None = None
        """Values that Python reads of tensors, by kind; None as long as nothing is read."""
        self.captures: list[Capture] = []
        """All captures, oldest first."""
        self._execute: Execute | None = None
        """Called by a capture whose guards hold; None to end the call without effect."""
        self._stance: Any = None
        self._uses_keywords, self._accesses = uses_keywords, tuple(accesses)
        self._assigned_buffers = tuple(assigned_buffers)
        self._make_function()

    def _make_function(self) -> None:
        """Make the function that Dynamo traces, with readings if there are any."""
        self._function = _make_step_function(self)
        self._valid_code = ValidCode(self._function)
        # Dynamo's cache, which no garbage collector looks through, would keep a front alive.
        find_self = weakref.ref(self)

        def backend(graph_module: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> Any:
            front = find_self()
            if front is None:
                raise RuntimeError(_GONE)
            omit_guards()
            return front._add_capture(graph_module, tensors)  # noqa: SLF001 - its own

        with kept_validation():
            self._compiled = torch.compile(
                self._function, backend=backend, fullgraph=True, dynamic=False
            )

    def execute_eagerly(self, batch: Sequence[Any]) -> None:
        """Execute forward pass and loss in eager mode."""
        _make_step_function(self, with_readings=False)(*batch)

    def record_readings(self, batch: Sequence[Any]) -> None:
        """Record what Python reads in an eager forward pass, whose effects the caller undoes.

        Later captures and calls are for these values; captures without readings are invalid.
        """
        recorded: Values = empty_readings()
        old_values, self.values = self.values, recorded
        try:
            _make_step_function(self)(*batch)
        finally:
            self.values = old_values
        if old_values is not None:  # the function that Dynamo traces refers to these lists
            for kind, values in recorded.items():
                old_values[kind][:] = values
        else:
            self.values = recorded
            self._make_function()

    def capture(self, batch: Sequence[Any]) -> Capture:
        """Return the valid capture for a batch, or make one; executes nothing, changes no state."""
        self._execute = None
        try:
            # An error that is raised need not be logged with its traceback too.
            with (
                capture_settings(),
                _quiet_loggers(),
                infrequent_gc(),
                warnings.catch_warnings(action="ignore"),
            ):
                self._compiled(*batch)
        except _Selected as selected:
            return selected.capture
        except FOREIGN_ERRORS as error:
            for link in exception_chain(error):
                if isinstance(link, _Traced):
                    return link.capture
            self._refuse(error)
        raise CaptureError(f"{self.name}: the step has no operation of PyTorch, so no graph")

    def find(self, batch: Sequence[Any]) -> tuple[Capture, Sequence[torch.Tensor]]:
        """Return (valid capture, current inputs of its graph), or raise `Changed`; runs no step."""
        try:
            self._call(batch, None)
        except _Selected as selected:
            if change := selected.capture.check.find_change(selected.tensors):
                raise Changed([change]) from None
            return selected.capture, selected.tensors
        raise CaptureError(f"{self.name}: the step has no operation of PyTorch, so no graph")

    def call(self, batch: Sequence[Any], execute: Execute) -> tuple[torch.Tensor, ...]:
        """Execute a step by `execute` on the capture whose guards hold; return loss and outputs.

        Afterwards Dynamo replays the side effects of the model. Raises `Changed` if no capture is
        valid.
        """
        results: tuple[torch.Tensor, ...] = self._call(batch, execute)[0]
        return results

    def _call(self, batch: Sequence[Any], execute: Execute | None) -> Any:
        """Call the traced function; a valid call without `execute` ends by `_Selected`."""
        self._execute = execute
        try:
            if (valid := self._valid_code.find(batch)) is not None:
                return valid(*batch)
            self._stance = torch.compiler.set_stance(_STANCE)
            return self._compiled(*batch)
        except (RuntimeError, DYNAMO_ERROR) as error:
            if _STANCE not in str(error):
                raise
            raise Changed(self._describe_guards(str(error), batch)) from None
        finally:
            self._release_stance()
            self._execute = None

    def _release_stance(self) -> None:
        """End the stance, which holds for all threads, as soon as the guards are evaluated."""
        stance, self._stance = self._stance, None
        if stance is not None:
            stance.__exit__(None, None, None)

    def _add_capture(
        self, graph_module: fx.GraphModule, tensors: Sequence[torch.Tensor]
    ) -> Callable[..., Sequence[torch.Tensor]]:
        """Add a capture or refuse it; Dynamo's back end. Return the function that its calls run."""
        if len(self.captures) >= MAX_CAPTURES:
            raise CaptureError(
                f"{self.name}: the step was captured {MAX_CAPTURES} times; Python values that "
                "decide it change too often"
            )
        results = _take_results(self.name, graph_module)
        graph_module.recompile()
        returned = list(graph_module.graph.output_node().args[0])
        readings = find_readings(
            self.name, graph_module, tensors, self.values or {}, innermost_line
        )
        reading_nodes = [n for n in graph_module.graph.nodes if n.target is mark_reading]
        stored = [
            position
            for position, node in enumerate(returned)
            if node not in results and node not in reading_nodes
        ]
        for position in stored:
            if wants_gradient(returned[position]):
                line = find_line(returned[position])
                raise CaptureError(
                    f"{self.name}: forward stores a tensor, made at {line}, whose requires_grad it "
                    "sets, and a compiled step computes no gradient of it"
                )
        code, classes = traced_code()
        capture = Capture(
            graph_module=graph_module,
            tensors=tuple(tensors),
            result_positions=tuple(returned.index(node) for node in results),
            stored_positions=tuple(stored),
            readings=readings,
            check=ReadingCheck(graph_module, readings),
            is_guarded=self.needs_guards or changes_objects(),
            code=code,
            classes=classes,
        )
        if not capture.is_guarded:
            raise _Traced(capture)
        self.captures.append(capture)

        find_self, index = weakref.ref(self), len(self.captures) - 1

        def execute(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            front = find_self()
            if front is None:
                raise RuntimeError(_GONE)
            return front._execute_capture(front.captures[index], tensors)  # noqa: SLF001 - its own

        return execute

    def _execute_capture(
        self, capture: Capture, tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Execute a capture whose guards hold, by the function of the current call."""
        self._release_stance()
        if self._execute is None:
            raise _Selected(capture, tensors)
        if change := capture.check.find_change(tensors):
            raise Changed([change])
        return self._execute(capture, tensors)

    def _refuse(self, error: BaseException) -> NoReturn:
        """Raise the error of a capture as `CaptureError`, with its reason and the user's line."""
        for link in exception_chain(error):
            if isinstance(link, CaptureError):
                raise link from None
        inner = getattr(error, "inner_exception", None) or error
        frames = frames_in(str(error).partition("from user code")[2])
        line = innermost_line(frames)
        where = at_line(line)
        if known := known_refusal(inner):
            reason, advice, is_final = known
            kind = Unreplayable if is_final else Refusal
            text = f"{self.name}: {reason}{where}; {advice}"
            raise kind(text, reason=reason, line=line) from error
        reason = explain(inner)
        raise Refusal(f"{self.name}: {reason}{where}", reason=reason, line=line) from error

    def _describe_guards(self, text: str, batch: Sequence[Any]) -> list[str]:
        """Return a text for each failed guard in Dynamo's message about a call on `batch`."""
        if not has_captures(self._function):
            return ["torch.compiler.reset() has discarded the captures of the step"]
        guards = failed_guards(text)
        if not guards:  # PyTorch 2.9 does not name them
            guards = failed_guards(self._recompile_message(batch))
        frames = frames_in(text)
        scope: dict[str, Any] = {"model": self.model, "loss_fn": self.loss_fn}
        scope |= {"batch": tuple(batch), "values": self.values}
        scope |= {"G": self._function.__globals__, "L": dict(scope)}
        return [
            _describe_guard(guard, _guard_line(file, line, frames), scope)
            for guard, file, line in guards
        ]

    def _recompile_message(self, batch: Sequence[Any]) -> str:
        """Return Dynamo's message for a call without a valid capture; "" if it raises no error."""
        self._release_stance()
        with (
            torch.compiler.set_stance("default"),
            raise_on_recompile(),
        ):
            try:
                self._compiled(*batch)
            except FOREIGN_ERRORS as error:
                return str(error)
        return ""


def _take_results(name: str, graph_module: fx.GraphModule) -> list[fx.Node]:
    """Remove the marks of results from a graph of Dynamo; return loss and outputs.

    Refuses a loss that is no tensor, and a number, read from a tensor, that the graph computes.
    """
    graph = graph_module.graph
    marks = {node.args[1]: node for node in graph.nodes if node.target is mark_result}
    results = [marks[index].args[0] for index in range(len(marks))]
    if not isinstance(results[0], fx.Node):
        kind = type(results[0]).__name__
        raise CaptureError(f"{name}: expected a loss that is a tensor, got a {kind}")
    for node in marks.values():
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    symbolic_types = (torch.SymInt, torch.SymFloat, torch.SymBool)
    for node in reversed(list(graph.nodes)):  # numbers that are only logged
        if not node.users and node.target == "item":
            graph.erase_node(node)
    for node in graph.nodes:
        if isinstance(example_value(node), symbolic_types):
            line = find_line(node)
            raise _Unread(
                f"{name}: a number that is read from a tensor{at_line(line)} decides "
                "shapes or values; select with torch.where, or compute it outside of the step"
            )
    return results


class _Unread(CaptureError):  # noqa: N818 - internal
    """A value that Python reads is not recorded yet."""


def _make_step_function(front: StepFront, *, with_readings: bool = True) -> FunctionType:
    """Return the function that Dynamo traces: batch -> (loss and outputs, tensors read by kind).

    Without readings, no tensors are recorded. Guards display the names of its closure variables.
    """
    name, model, loss_fn, values = front.name, front.model, front.loss_fn, front.values
    uses_keywords, accesses = front._uses_keywords, front._accesses  # noqa: SLF001
    buffers = front._assigned_buffers  # noqa: SLF001

    def execute(model: Any, loss_fn: Any, buffers: Any, batch: Any) -> tuple[torch.Tensor, ...]:
        """Return loss and outputs, marked by index; guards display the names of the parameters."""
        old_buffers = [getattr(module, key) for module, key in buffers]
        for (module, key), buffer in zip(buffers, old_buffers, strict=True):
            setattr(module, key, buffer.detach().clone())
        arguments = batch if loss_fn is None else batch[:-1]
        output = model(**arguments[0]) if uses_keywords else model(*arguments)
        loss = find_loss(name, output if loss_fn is None else loss_fn(output, batch[-1]))
        for (module, key), buffer in zip(buffers, old_buffers, strict=True):
            with torch.no_grad():
                buffer.copy_(getattr(module, key))
            setattr(module, key, buffer)
        outputs = [follow(output, access).detach() for access in accesses]
        return tuple([mark_result(result, index) for index, result in enumerate([loss, *outputs])])

    def step(*batch: Any) -> Any:
        return execute(model, loss_fn, buffers, batch), {}

    def step_with_readings(*batch: Any) -> Any:
        tensors = empty_readings()
        with Readings(values or {}, tensors):
            results = execute(model, loss_fn, buffers, batch)
        return results, tensors

    function = step if values is None or not with_readings else step_with_readings
    # A code object of its own: Dynamo stores captures and counts them by code. Names of its own:
    # Dynamo adds one for each file, and another file may have the name of an earlier one.
    names = dict(globals())
    execute = FunctionType(execute.__code__, names, None, None, execute.__closure__)
    code = function.__code__.replace(co_name=f"step_of_{type(model).__name__}")
    return FunctionType(code, names, None, None, function.__closure__)


@contextmanager
def _quiet_loggers() -> Iterator[None]:
    silent = logging.CRITICAL + 1
    with ExitStack() as stack:
        for logger in map(logging.getLogger, LOGGERS):
            stack.enter_context(temporary_setting(logger.setLevel, silent, logger.level))
        yield


# -- lines and values in messages ----------------------------------------------------------------


def innermost_line(frames: Sequence[tuple[str, int]]) -> str:
    """Return the innermost line of the user's or a library's code; "" if there is none."""
    for path, line in reversed(frames):
        if code_origin(path) in (CodeOrigin.USER, CodeOrigin.LIBRARY):
            return format_source_line(path, line)
    return ""


def find_line(node: fx.Node) -> str:
    """Return the line of the user's or a library's code that made a node; "" if unknown."""
    return innermost_line(frames_in(node.meta.get("stack_trace")))


def _guard_line(file: str, line: int, frames: Sequence[tuple[str, int]]) -> str:
    """Return the line of a guard as text; `file` is the end of its path, or "" for no line."""
    paths = dict.fromkeys(path for path, _ in reversed(frames) if path.endswith(file))
    path = next(iter(paths), None) or next(
        (path for path in linecache.cache if file and path.endswith(file)), file
    )
    is_named = file and code_origin(path) is not CodeOrigin.OWN
    return format_source_line(path, line) if is_named else ""


_REPLACEMENTS: Final = (
    (re.compile(r"^G\['__import_(\w+)'\]\."), r"\1."),
    (re.compile(r"^G\['(\w+)'\]"), r"\1"),
    (re.compile(r"\._(?:modules|buffers|parameters)\['(\w+)'\]"), r".\1"),
    (re.compile(r"\.__dict__\['(\w+)'\]"), r".\1"),
    (re.compile(r"^model\."), ""),
    (re.compile(r"^batch\["), "inputs["),
)


def _display_name(expression: str) -> str:
    """Return an expression of a guard as its user would write it, below the model."""
    for pattern, replacement in _REPLACEMENTS:
        expression = pattern.sub(replacement, expression)
    return expression


def _describe_guard(guard: str, line: str, scope: dict[str, Any]) -> str:
    """Return a text for a failed guard: its test, the old value, the new one in `scope`, line."""
    text = f"Dynamo's guard {guard} fails"
    for pattern, old_format in _GUARD_FORMS:
        match = pattern.fullmatch(guard)
        if match is None:
            continue
        with suppress(*FOREIGN_ERRORS):
            now = _brief(eval(match["path"], scope))  # noqa: S307 - an expression of Dynamo
            old = old_format.format(**match.groupdict())
            text = f"{_display_name(match['path'])} was {old} and is {now}"
        break
    same = re.fullmatch(r"(\S+) is ((?!not )(?!None)\S+)", guard)
    if same is not None:
        names = (_display_name(same[2]), _display_name(same[1]))
        text = "{} was the same object as {} and is not".format(*names)
    missing = re.fullmatch(r"(?:KeyError|getattr failed) on (?:source )?(.*)", guard)
    if missing is not None:
        text = f"{_display_name(missing[1])} is missing now"
    return text + (f", read at {line}" if line else "")


_GUARD_FORMS: Final = (
    (
        re.compile(r"___check_type_id\((?P<path>.*), \d+\), type=<class '(?P<old>[^']+)'>.*"),
        "a {old}",
    ),
    (re.compile(r"___check_type_id\((?P<path>.*), \d+\)"), "of another type"),  # PyTorch 2.9
    (re.compile(r"___check_obj_id\((?P<path>.*), \d+\).*"), "another object"),
    (re.compile(r"(?P<path>.*) is None"), "None"),
    (re.compile(r"(?P<path>.*) is not None"), "not None"),
    (re.compile(r"(?P<path>.*) (?:==|!=) (?P<old>.*)"), "{old}"),
    (re.compile(r"not (?P<path>[\w.\[\]']+)"), "empty or false"),
    (re.compile(r"(?P<path>[\w.\[\]']+)"), "not empty or true"),
)
"""Forms of guards: pattern with the expression that is tested, and text for the old value."""


def _brief(value: Any) -> str:
    """Return a value as text of one line, shortened."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."  # noqa: PLR2004 - about one line
