"""Questions of a forward pass whether its numbers are finite: taken for yes, and checked later.

Many detectors and translators clamp what overflows: ``if not torch.isfinite(x).all()``. What is
asked follows from parameters, so that no guard can answer it before a step. A captured step goes
on as if all is finite, and has the true answer as one more result: if it is no, the step is undone.
The same holds for arguments of distributions, which must be in their range, and for what
``torch.linalg`` checks: whether a matrix could be inverted.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from poetmodel.torch.errors import user_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

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
_ATTRIBUTE: Final = "poetmodel_expected"
"""Under which a tensor of answers holds what they are where all is well."""


class FiniteChecks:
    """What the forward pass of a capture asks about finite numbers; off until it is turned on."""

    def __init__(self) -> None:
        self.on = self.of_matrices = False
        """Whether what is asked of numbers is noted, and what torch.linalg asks of matrices."""
        self.places: dict[str, None] = {}
        """The lines that asked."""
        self._answers: list[torch.Tensor] = []

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Note what a forward pass asks inside."""
        self.places.clear()
        self._answers.clear()
        with ExitStack() as stack:
            if self.on:
                stack.enter_context(_Watch(self))
            if self.of_matrices:
                stack.enter_context(_MatrixWatch(self))
            yield

    def learn(self, graph_module: fx.GraphModule) -> bool:
        """Watch matrices from now on if a captured step checks some; return whether that is new."""
        descriptors = [n.meta.get("desc") for n in graph_module.graph.find_nodes(op="placeholder")]
        found = any("Token" in type(each).__name__ for each in descriptors)
        new = found and not self.of_matrices
        self.of_matrices = self.of_matrices or found
        return new

    def results(self) -> tuple[torch.Tensor, ...]:
        """Return whether all was finite: one tensor, or none where nothing was asked."""
        if not self._answers:
            return ()
        found = torch.stack([answer.detach().reshape(()) for answer in self._answers]).all()
        self._answers.clear()
        return (found,)

    def note(self, answer: torch.Tensor, *, expected: bool) -> None:
        """Take an answer that nobody can know yet."""
        self._answers.append(answer if expected else answer.logical_not())
        place = user_line(sys._getframe(1))  # noqa: SLF001 - there is no traceback
        self.places[place or "an unknown line"] = None


class _Watch(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Follows answers from where they are asked for to where Python reads them."""

    def __init__(self, checks: FiniteChecks) -> None:
        super().__init__()
        self._checks = checks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        expected = {getattr(tensor, _ATTRIBUTE, None) for tensor in tensors}
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
            setattr(value, _ATTRIBUTE, known)
        return value


class _MatrixWatch(TorchDispatchMode):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Takes down what ``torch.linalg`` checks after an operation, such as whether it could invert.

    The check is an operation that raises, which a step cannot repeat.
    """

    def __init__(self, checks: FiniteChecks) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._checks = checks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        checks = func is torch.ops.aten._linalg_check_errors.default  # noqa: SLF001 - its only name
        if checks and isinstance(args[0], FunctionalTensor):
            self._checks.note(args[0].eq(0).all(), expected=True)
            return None
        return func(*args, **(kwargs or {}))


def is_unknown(error: BaseException) -> bool:
    """Return whether a capture has ended because a value was read that it does not know."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, DataDependentOutputException):
        link = link.__cause__ or link.__context__
    return link is not None
