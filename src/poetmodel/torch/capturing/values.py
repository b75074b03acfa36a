"""Values in a capture: constants, values of inputs and buffers, and values that were read.

Every fake tensor whose value follows from the code, the inputs and the buffers alone holds that
value. Python may read it: an ``if``, ``.item()``, a shape that a mask decides. What the read value
follows from inputs and buffers by is kept as an expression, which a guard computes again before
each step.

Whether numbers are finite follows from parameters, so that no guard can answer it before a step.
Many detectors and translators ask, to clamp what overflows: ``if not torch.isfinite(x).all()``. A
captured step goes on as if all is finite, and has the true answer as one more result: if it is no,
the step is undone. The same holds for arguments of distributions, which must be in their range, and
for what ``torch.linalg`` checks: whether a matrix could be inverted.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from poetmodel.torch.errors import RAISED, exception_chain, running_user_line
from poetmodel.torch.graph.tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import fx

# -- expressions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor that is there when a step begins: an input, or a buffer."""

    position: int | None
    """Its place among the flat inputs; None for a buffer."""
    path: str = ""
    """Name of a buffer below the captured module."""


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A tensor that follows from the code alone."""

    value: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CallExpression:
    """Result of an operation; its arguments are expressions, and Python objects otherwise."""

    function: Any
    leaves: tuple[Any, ...]
    form: Any
    """How the leaves are nested: arguments, then keywords."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A value that Python code of the model saw while it was captured."""

    expression: CallExpression
    value: Any
    """Value: a number, or nested shapes."""
    what: str
    """Kind of value, for users."""
    line: str
    """Where the code reads it, for people; empty where no line of it is known."""

    @property
    def is_check(self) -> bool:
        """Whether an operator raises where it is another one, and nothing else follows from it."""
        return self.expression.function is bool


def shapes_of(value: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors in a value."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value))


def leaf_of(value: Any, number: int) -> Any:
    """Return one of the outputs of an operation."""
    return _pytree.tree_leaves(value)[number]


# -- what is known -----------------------------------------------------------------------------

_LARGEST: Final = 2**22
"""Values of more elements are not kept [elements]."""
_COMPARED: Final = 2**16
"""Literals of more elements are not compared with others [elements]."""
_VALUE: Final = "poetmodel_known"
"""Under which a fake tensor holds what is known of it."""
ASSERTS: Final = frozenset(
    getattr(torch.ops.aten._assert_async, name)  # noqa: SLF001 - its only name
    for name in ("default", "msg")
)
"""Operators that raise where a number is 0."""

_FROM_NOTHING: Final = ("arange", "eye", "full", "linspace", "logspace", "ones", "scalar_tensor")
_FROM_A_FORM: Final = ("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")
"""Operators that read nothing of a tensor but its form."""
_LITERAL: Final = ("lift_fresh", "lift_fresh_copy")
"""Operators that take the numbers of ``torch.tensor([1, 2])``."""
_MAKERS: Final = frozenset((*_FROM_NOTHING, "tril_indices", "triu_indices", "zeros"))
_DRAWS: Final = frozenset(
    ("cauchy", "exponential", "geometric", "log_normal", "normal", "rand_like", "randint_like",
     "randn_like", "random", "uniform")
)  # fmt: skip
"""Operators that draw, and read nothing of a tensor but its form."""
_DECIDING: Final = {
    "index": (1, torch.ops.aten.count_nonzero.default),
    "masked_select": (1, torch.ops.aten.count_nonzero.default),
    "_ctc_loss": (3, torch.ops.aten.max.default),
}
"""Operators of whose results one argument decides the shape, which, and what of it does."""


@dataclass(slots=True)
class KnownValue:
    """The value of a fake tensor, or of all outputs of an operation."""

    real: Any
    """None where it is random: then it cannot be read, and that can be told."""
    expression: Given | CallExpression | None = None
    """Expression of inputs and buffers; None for a constant."""
    form_only: bool = False
    """Whether only shape, strides and type are those of the value."""


_RANDOM: Final = KnownValue(None)


@dataclass(frozen=True, slots=True)
class KnownValues:
    """Known values while a step is captured, and the ones that were read."""

    reads: dict[CallExpression, Read] = field(default_factory=dict)
    asserts: list[Any] = field(default_factory=list)
    """Operators that check what is not known; a graph may have lost them."""
    _calls: dict[Any, CallExpression] = field(default_factory=dict)
    _literals: dict[Any, Literal] = field(default_factory=dict)

    def give(self, tensor: torch.Tensor, real: torch.Tensor, source: Given) -> None:
        """Let the tensor that stands for an input or a buffer hold its value."""
        fake = tensor
        if isinstance(fake, FunctionalTensor):
            fake = torch._from_functional_tensor(fake.elem)  # noqa: SLF001 - no other way
        plain = real.layout == torch.strided and real.device.type == "cpu"
        if isinstance(fake, FakeTensor) and plain and real.numel() <= _LARGEST:
            setattr(fake, _VALUE, KnownValue(real, source))

    def of(self, function: Any, arguments: Any, keywords: Any) -> KnownValue | None:
        """Return the result of an operation on known inputs; None if they are not known.

        Constants in place are constants still; what is written with other values is one no more,
        and neither is what follows from inputs.
        """
        inputs = tensors_in((arguments, keywords))
        name = function.overloadpacket.__name__
        seeded = torch.Tag.nondeterministic_seeded in function.tags
        if not inputs and name not in _MAKERS:
            return _RANDOM if seeded else None
        form = name in _FROM_A_FORM
        if form and any(tensor.numel() > _LARGEST for tensor in inputs):
            return None
        values = [_known(tensor, function) for tensor in inputs]
        there = [value for value in values if value is not None]
        known = len(there) == len(values) and all(value.real is not None for value in there)
        varies = any(value.expression is not None for value in there)
        writes = function._schema.is_mutable  # noqa: SLF001 - what is written is known by it alone
        if seeded or not (known or form) or (writes and varies):
            if writes:
                _forget(inputs)
            random = seeded or any(value.real is None for value in there)
            whole = len(there) == len(values) or name in _DRAWS
            return _RANDOM if random and whole else None
        with no_dispatch(), torch.no_grad():
            try:
                own, own_keywords = _pytree.tree_map(
                    lambda leaf: _real(leaf, function), (arguments, keywords)
                )
                real = function(*own, **own_keywords)
            except RAISED:
                return None
            if form or not varies:
                return KnownValue(real)
            return KnownValue(real, self._call(function, arguments, keywords))

    def remember(self, value: Any, known: KnownValue | None) -> None:
        """Let the outputs of an operation hold what is known of them."""
        if known is None or known.form_only:
            return
        fakes = _pytree.tree_leaves(value)
        if known.real is None:
            for fake in tensors_in(fakes):
                setattr(fake, _VALUE, known)
            return
        several = not isinstance(known.real, torch.Tensor)
        pairs = zip(fakes, _pytree.tree_leaves(known.real), strict=False)
        for number, (fake, real) in enumerate(pairs):
            if not isinstance(fake, torch.Tensor) or fake.shape != real.shape:
                continue
            if real.numel() <= _LARGEST:
                expression = known.expression
                if several and expression is not None:
                    expression = self._call(leaf_of, (expression, number))
                setattr(fake, _VALUE, KnownValue(real, expression))

    def forget(self, value: Any) -> None:
        """Let fake tensors hold nothing any more; they may live longer than the capture."""
        for fake in tensors_in(value):
            vars(fake).pop(_VALUE, None)

    def read(self, known: KnownValue, value: Any, *, by: Any = None) -> None:
        """Note that Python saw a value, or what a function makes of it; constants are no news."""
        expression = known.expression
        if by is not None and expression is not None:
            expression = self._call(by, (expression,))
        if isinstance(expression, CallExpression) and expression not in self.reads:
            self.reads[expression] = Read(
                expression=expression,
                value=value,
                what=_WORDS.get(by, "value that is read"),
                line=running_user_line(sys._getframe(1)) or "",  # noqa: SLF001 - there is no traceback
            )

    def check(self, function: Any, tensor: torch.Tensor) -> None:
        """Note that an operator checks a number: it is read where it is known."""
        known = _known(tensor, function)
        if known is None or known.real is None:
            self.asserts.append(function)
        else:
            self.read(known, bool(known.real), by=bool)

    def selected(self, function: Any, arguments: Any, keywords: Any) -> KnownValue | None:
        """Return the result of an operation whose shape depends on values; None if not known.

        Of what a mask selects only the mask needs to be known. Where no more is, only the form of
        the result is.
        """
        known = self.of(function, arguments, keywords)
        there = known is not None and known.real is not None
        position, measure = _DECIDING.get(function.overloadpacket.__name__, (None, None))
        if position is None:
            if known is not None and there:
                self.read(known, shapes_of(known.real), by=shapes_of)
            return known
        deciding = [
            d for d in tensors_in(arguments[position]) if position != 1 or d.dtype in _MASKS
        ]
        for tensor in deciding:
            measured = self.of(measure, (tensor,), {})
            if measured is None or measured.real is None:
                return measured
            self.read(measured, int(measured.real), by=int)
        if there or not deciding:  # numbers of rows have a shape, and decide nothing else
            return known
        with no_dispatch(), torch.no_grad():
            own, own_keywords = _pytree.tree_map(
                lambda leaf: _real(leaf, function), (arguments, keywords)
            )
            return KnownValue(function(*own, **own_keywords), form_only=True)

    def _call(self, function: Any, arguments: Any, keywords: Any = None) -> CallExpression:
        """Return the call of a function; the same one where there is one."""
        leaves, form = _pytree.tree_flatten((tuple(arguments), keywords or {}))
        own = tuple(self._leaf(leaf) for leaf in leaves)
        key = (function, form, tuple(map(_key, own)))
        return self._calls.setdefault(key, CallExpression(function, own, form))

    def _leaf(self, leaf: Any) -> Any:
        """Return an argument as an expression."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        known: KnownValue = getattr(leaf, _VALUE)
        if known.expression is not None:
            return known.expression
        real = known.real
        key: Any = id(real)
        if real.numel() <= _COMPARED:
            content = real.flatten().contiguous().view(torch.uint8).numpy().tobytes()
            key = (real.dtype, real.shape, real.stride(), content)
        return self._literals.setdefault(key, Literal(real))


_MASKS: Final = (torch.bool, torch.uint8)
_WORDS: Final = {
    bool: "number that is checked",
    int: "number that decides a shape",
    shapes_of: "shape of a result",
}


def _key(leaf: Any) -> Any:
    if isinstance(leaf, CallExpression | Literal):
        return id(leaf)
    return (type(leaf), leaf if isinstance(leaf, Given) else repr(leaf))


def _known(tensor: torch.Tensor, function: Any) -> KnownValue | None:
    """Return the known value of a fake tensor."""
    if function.overloadpacket.__name__ in _LITERAL and type(tensor) is torch.Tensor:
        return KnownValue(tensor.clone())
    known: KnownValue | None = getattr(tensor, _VALUE, None)
    if known is None or known.real is None:
        return known
    gone = known.real.numel() and not known.real.untyped_storage().nbytes()
    return None if gone else known


def _real(leaf: Any, function: Any) -> Any:
    """Return the value of a tensor, or zeros of its form."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    known = _known(leaf, function)
    if known is None or known.real is None:
        return torch.zeros(leaf.shape, dtype=leaf.dtype)
    return known.real


def _forget(tensors: Iterable[torch.Tensor]) -> None:
    """Let tensors hold no value, nor those that share memory with them."""
    for tensor in tensors:
        known = getattr(tensor, _VALUE, None)
        if known is None:
            continue
        if known.expression is None and known.real is not None:
            known.real.untyped_storage().resize_(0)
        delattr(tensor, _VALUE)


# -- guards on what Python code read -----------------------------------------------------------


@dataclass(frozen=True)
class ValueGuards:
    """The values that a capture read from inputs and buffers."""

    reads: tuple[Read, ...]

    @cached_property
    def sources(self) -> tuple[Given, ...]:
        """The inputs and buffers that the values follow from."""
        leaves = (leaf for call in self._calls for leaf in call.leaves)
        return tuple(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Given)))

    @cached_property
    def _calls(self) -> list[CallExpression]:
        return _in_order([read.expression for read in self.reads])

    @cached_property
    def _expected(self) -> tuple[str, ...]:
        return tuple(repr(read.value) for read in self.reads)

    def hold(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether the values are what they were, for inputs and buffers as they are now."""
        return not self.reads or self._now(sources) == self._expected

    def differences(self, sources: Sequence[torch.Tensor]) -> Iterator[str]:
        """Yield in words what values are not what they were."""
        now = self._now(sources)
        for number, read in enumerate(self.reads):
            where = f" at {read.line}" if read.line else ""
            if now is None:
                yield f"the {read.what}{where} was {read.value}, and cannot be had now"
                return
            if now[number] != self._expected[number]:
                yield f"the {read.what}{where} was {read.value} and is {now[number]}"

    def _now(self, sources: Sequence[torch.Tensor]) -> tuple[str, ...] | None:
        """Return the values as text, of which NaN is equal to itself; None where one fails."""
        values: dict[Any, Any] = dict(zip(self.sources, sources, strict=True))

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Literal):
                return leaf.value
            return values[leaf] if isinstance(leaf, CallExpression | Given) else leaf

        try:
            with torch.no_grad():
                for call in self._calls:
                    own = list(map(value, call.leaves))
                    arguments, keywords = _pytree.tree_unflatten(own, call.form)
                    values[call] = call.function(*arguments, **keywords)
        except RAISED:
            return None
        return tuple(repr(values[read.expression]) for read in self.reads)


def _in_order(expressions: Sequence[CallExpression]) -> list[CallExpression]:
    """Return all calls that expressions are made of, each after those that it needs."""
    ordered: dict[CallExpression, None] = {}
    pending = list(reversed(expressions))
    while pending:
        call = pending[-1]
        missing = [
            leaf for leaf in call.leaves if isinstance(leaf, CallExpression) and leaf not in ordered
        ]
        if missing:
            pending += missing
        else:
            ordered[pending.pop()] = None
    return list(ordered)


# -- questions whether numbers are finite ------------------------------------------------------

_ASKS: Final = {"isfinite": True, "isnan": False, "isinf": False, "_is_all_true": True}
"""Functions that ask of numbers, and what they say where all is well; the last one is what
``torch.distributions`` validates arguments with."""
_SUMS_UP: Final = frozenset(("all", "any", "max", "min", "amax", "amin"))
_JOINS: Final = frozenset(
    ("__or__", "__ror__", "__and__", "__rand__", "logical_or", "logical_and", "bitwise_or",
     "bitwise_and")
)  # fmt: skip
_NEGATES: Final = frozenset(("__invert__", "logical_not", "bitwise_not"))
_READS: Final = frozenset(("__bool__", "item"))
_EXPECTED: Final = "poetmodel_expected"
"""Under which a tensor of answers holds what they are where all is well."""


class FiniteChecks:
    """Questions about finite numbers in the forward pass of a capture; off by default."""

    def __init__(self) -> None:
        self.on = self.of_operators = False
        """Whether what is asked of numbers is noted, and what operators ask that only check."""
        self.lines: dict[str, None] = {}
        """The lines that asked."""
        self._answers: list[torch.Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what a forward pass asks inside."""
        self.lines.clear()
        self._answers.clear()
        with ExitStack() as stack:
            if self.on:
                stack.enter_context(_ReadWatch(self))
            if self.of_operators:
                stack.enter_context(_CheckWatch(self))
            yield

    def learn(self, graph_module: fx.GraphModule, values: KnownValues) -> bool:
        """Watch operators from now on if a capture has met some that check; return if it is new."""
        descriptors = [n.meta.get("desc") for n in graph_module.graph.find_nodes(op="placeholder")]
        has_checks = any("Token" in type(descriptor).__name__ for descriptor in descriptors)
        has_checks = has_checks or bool(values.asserts)
        new = has_checks and not self.of_operators
        self.of_operators = self.of_operators or has_checks
        return new

    def results(self) -> tuple[torch.Tensor, ...]:
        """Whether all was finite: one tensor, or none where nothing was asked."""
        if not self._answers:
            return ()
        finite = torch.stack([answer.detach().reshape(()) for answer in self._answers]).all()
        self._answers.clear()
        return (finite,)

    def note(self, answer: torch.Tensor, *, expected: bool) -> None:
        """Take an answer that nobody can know yet."""
        self._answers.append(answer if expected else answer.logical_not())
        line = running_user_line(sys._getframe(1))  # noqa: SLF001 - there is no traceback
        self.lines[line or "an unknown line"] = None


class _ReadWatch(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Follows answers from where they are asked for to where Python reads them."""

    def __init__(self, checks: FiniteChecks) -> None:
        super().__init__()
        self._checks = checks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        expected = {getattr(tensor, _EXPECTED, None) for tensor in tensors}
        known = expected.pop() if len(expected) == 1 else None
        if name in _READS and known is not None:
            try:
                return func(*args, **(kwargs or {}))
            except DataDependentOutputException:
                self._checks.note(tensors[0], expected=known)
                return known
        value = func(*args, **(kwargs or {}))
        if name in _ASKS:
            known = _ASKS[name]
        elif name in _NEGATES and known is not None:
            known = not known
        elif name not in _SUMS_UP and name not in _JOINS:
            known = None
        if known is not None and isinstance(value, torch.Tensor):
            setattr(value, _EXPECTED, known)
        return value


class _CheckWatch(TorchDispatchMode):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Takes down what operators check: ``torch._assert_async``, and ``torch.linalg`` after its own.

    The check is an operation that raises, which a step cannot repeat.
    """

    def __init__(self, checks: FiniteChecks) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._checks = checks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], FunctionalTensor):
            if func is torch.ops.aten._linalg_check_errors.default:  # noqa: SLF001 - its only name
                self._checks.note(args[0].eq(0).all(), expected=True)
                return None
            if func in ASSERTS:
                self._checks.note(args[0].ne(0), expected=True)
                return None
        return func(*args, **(kwargs or {}))


def is_unknown(error: BaseException) -> bool:
    """Whether a capture has ended because a value was read that it does not know."""
    return any(isinstance(link, DataDependentOutputException) for link in exception_chain(error))
