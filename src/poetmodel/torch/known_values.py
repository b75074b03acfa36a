"""What a capture knows of values: constants, what follows from inputs and buffers, what was read.

Every fake tensor whose value follows from the code, the inputs and the buffers alone holds that
value. Python may read it: an ``if``, ``.item()``, a shape that a mask decides. What the read value
follows from inputs and buffers by is kept as an expression, which a guard computes again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree
from torch.utils._mode_utils import no_dispatch

from poetmodel.torch.errors import RAISED, user_line
from poetmodel.torch.interpreter import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable

# -- expressions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor that is there when a step begins: an input, or a buffer."""

    position: int | None
    """Its place among the flat inputs; None for a buffer."""
    path: str = ""
    """Of a buffer below the captured module."""


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A tensor that follows from the code alone."""

    value: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What an operation gives; its arguments are expressions, and what Python has otherwise."""

    function: Any
    leaves: tuple[Any, ...]
    form: Any
    """How the leaves are nested: arguments, then keywords."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A value that Python code of the model saw while it was captured."""

    expression: Call
    value: Any
    """What it was: a number, or nested shapes."""
    what: str
    """What kind of value, for people."""
    place: str
    """In which line, for people."""


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
_ATTRIBUTE: Final = "poetmodel_known"
"""Under which a fake tensor holds what is known of it."""

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
class Known:
    """The value of a fake tensor, or of all outputs of an operation."""

    real: Any
    """None where it is random: then it cannot be read, and that can be told."""
    expression: Given | Call | None = None
    """What it follows from inputs and buffers by; None for a constant."""
    form_only: bool = False
    """Whether only shape, strides and type are those of the value."""


_RANDOM: Final = Known(None)


@dataclass(frozen=True, slots=True)
class KnownValues:
    """What is known while a step is captured, and what was read."""

    reads: dict[Call, Read] = field(default_factory=dict)
    _calls: dict[Any, Call] = field(default_factory=dict)
    _literals: dict[Any, Literal] = field(default_factory=dict)

    def give(self, tensor: torch.Tensor, real: torch.Tensor, source: Given) -> None:
        """Let the tensor that stands for an input or a buffer hold its value."""
        fake = tensor
        if isinstance(fake, FunctionalTensor):
            fake = torch._from_functional_tensor(fake.elem)  # noqa: SLF001 - no other way
        plain = real.layout == torch.strided and real.device.type == "cpu"
        if isinstance(fake, FakeTensor) and plain and real.numel() <= _LARGEST:
            setattr(fake, _ATTRIBUTE, Known(real, source))

    def of(self, function: Any, arguments: Any, keywords: Any) -> Known | None:
        """Return what an operation gives if its inputs are known; None where they are not.

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
        found = [_known(tensor, function) for tensor in inputs]
        there = [known for known in found if known is not None]
        known = len(there) == len(found) and all(each.real is not None for each in there)
        varies = any(each.expression is not None for each in there)
        writes = function._schema.is_mutable  # noqa: SLF001 - what is written is known by it alone
        if seeded or not (known or form) or (writes and varies):
            if writes:
                _forget(inputs)
            random = seeded or any(each.real is None for each in there)
            whole = len(there) == len(found) or name in _DRAWS
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
                return Known(real)
            return Known(real, self._call(function, arguments, keywords))

    def remember(self, value: Any, known: Known | None) -> None:
        """Let the outputs of an operation hold what is known of them."""
        if known is None or known.form_only:
            return
        fakes = _pytree.tree_leaves(value)
        if known.real is None:
            for fake in tensors_in(fakes):
                setattr(fake, _ATTRIBUTE, known)
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
                setattr(fake, _ATTRIBUTE, Known(real, expression))

    def forget(self, value: Any) -> None:
        """Let fake tensors hold nothing any more; they may live longer than the capture."""
        for fake in tensors_in(value):
            vars(fake).pop(_ATTRIBUTE, None)

    def read(self, known: Known, value: Any, *, by: Any = None) -> None:
        """Note that Python saw a value, or what a function makes of it; constants are no news."""
        expression = known.expression
        if by is not None and expression is not None:
            expression = self._call(by, (expression,))
        if isinstance(expression, Call) and expression not in self.reads:
            self.reads[expression] = Read(
                expression=expression,
                value=value,
                what=_WORDS.get(by, "value that is read"),
                place=user_line(sys._getframe(1)) or "",  # noqa: SLF001 - there is no traceback
            )

    def selected(self, function: Any, arguments: Any, keywords: Any) -> Known | None:
        """Return what an operation gives whose shape depends on values; None where not known.

        Of what a mask selects only the mask needs to be known. Where no more is, only the form of
        the result is.
        """
        known = self.of(function, arguments, keywords)
        there = known is not None and known.real is not None
        place, measure = _DECIDING.get(function.overloadpacket.__name__, (None, None))
        if place is None:
            if known is not None and there:
                self.read(known, shapes_of(known.real), by=shapes_of)
            return known
        deciding = [d for d in tensors_in(arguments[place]) if place != 1 or d.dtype in _MASKS]
        for tensor in deciding:
            found = self.of(measure, (tensor,), {})
            if found is None or found.real is None:
                return found
            self.read(found, int(found.real), by=int)
        if there or not deciding:  # numbers of rows have a shape, and decide nothing else
            return known
        with no_dispatch(), torch.no_grad():
            own, own_keywords = _pytree.tree_map(
                lambda leaf: _real(leaf, function), (arguments, keywords)
            )
            return Known(function(*own, **own_keywords), form_only=True)

    def _call(self, function: Any, arguments: Any, keywords: Any = None) -> Call:
        """Return the call of a function; the same one where there is one."""
        leaves, form = _pytree.tree_flatten((tuple(arguments), keywords or {}))
        own = tuple(self._leaf(leaf) for leaf in leaves)
        key = (function, form, tuple(map(_key, own)))
        return self._calls.setdefault(key, Call(function, own, form))

    def _leaf(self, leaf: Any) -> Any:
        """Return an argument as an expression."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        known: Known = getattr(leaf, _ATTRIBUTE)
        if known.expression is not None:
            return known.expression
        real = known.real
        key: Any = id(real)
        if real.numel() <= _COMPARED:
            content = real.flatten().contiguous().view(torch.uint8).numpy().tobytes()
            key = (real.dtype, real.shape, real.stride(), content)
        return self._literals.setdefault(key, Literal(real))


_MASKS: Final = (torch.bool, torch.uint8)
_WORDS: Final = {int: "number that decides a shape", shapes_of: "shape of a result"}


def _key(leaf: Any) -> Any:
    if isinstance(leaf, Call | Literal):
        return id(leaf)
    return (type(leaf), leaf if isinstance(leaf, Given) else repr(leaf))


def _known(tensor: torch.Tensor, function: Any) -> Known | None:
    """Return what is known of a fake tensor."""
    if function.overloadpacket.__name__ in _LITERAL and type(tensor) is torch.Tensor:
        return Known(tensor.clone())
    known: Known | None = getattr(tensor, _ATTRIBUTE, None)
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
        known = getattr(tensor, _ATTRIBUTE, None)
        if known is None:
            continue
        if known.expression is None and known.real is not None:
            known.real.untyped_storage().resize_(0)
        delattr(tensor, _ATTRIBUTE)
