"""Guards on values: what Python code of the model read, computed again before each step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from poetmodel.torch.errors import RAISED
from poetmodel.torch.known_values import Call, Given, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.torch.known_values import Read


@dataclass(frozen=True)
class ValueGuards:
    """The values that a capture read from inputs and buffers."""

    reads: tuple[Read, ...]

    @cached_property
    def sources(self) -> tuple[Given, ...]:
        """The inputs and buffers that the values follow from."""
        calls = _in_order([read.expression for read in self.reads])
        leaves = (leaf for call in calls for leaf in call.leaves)
        return tuple(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Given)))

    @cached_property
    def _expected(self) -> tuple[str, ...]:
        return tuple(repr(read.value) for read in self.reads)

    @cached_property
    def _function(self) -> Callable[..., tuple[Any, ...]]:
        return _compiled([read.expression for read in self.reads], self.sources)

    def hold(self, sources: Sequence[torch.Tensor]) -> bool:
        """Return whether the values are what they were, for inputs and buffers as they are now."""
        return not self.reads or self._now(sources) == self._expected

    def differences(self, sources: Sequence[torch.Tensor]) -> Iterator[str]:
        """Yield in words what values are not what they were."""
        now = self._now(sources)
        for place, read in enumerate(self.reads):
            where = f" at {read.place}" if read.place else ""
            if now is None:
                yield f"the {read.what}{where} was {read.value}, and cannot be had now"
                return
            if now[place] != self._expected[place]:
                yield f"the {read.what}{where} was {read.value} and is {now[place]}"

    def _now(self, sources: Sequence[torch.Tensor]) -> tuple[str, ...] | None:
        """Return the values as text, of which NaN is equal to itself; None where one fails."""
        try:
            with torch.no_grad():
                return tuple(map(repr, self._function(*sources)))
        except RAISED:
            return None


def _in_order(expressions: Sequence[Call]) -> list[Call]:
    """Return all calls that expressions are made of, each after those that it needs."""
    found: dict[Call, None] = {}
    pending = list(reversed(expressions))
    while pending:
        call = pending[-1]
        missing = [leaf for leaf in call.leaves if isinstance(leaf, Call) and leaf not in found]
        if missing:
            pending += missing
        else:
            found[pending.pop()] = None
    return list(found)


def _compiled(expressions: Sequence[Call], sources: Sequence[Given]) -> Callable[..., Any]:
    """Return a function from inputs and buffers to the values of expressions, as Python."""
    names: dict[Any, str] = {source: f"s{k}" for k, source in enumerate(sources)}
    known: dict[str, Any] = {}

    def named(leaf: Any) -> str:
        if leaf in (None, True, False) or type(leaf) in (int, str):
            return repr(leaf)
        if isinstance(leaf, Call | Given):
            return names[leaf]
        name = f"c{len(known)}"
        known[name] = leaf.value if isinstance(leaf, Literal) else leaf
        return name

    lines = []
    for number, call in enumerate(_in_order(expressions)):
        words = [_Word(named(leaf)) for leaf in call.leaves]
        arguments, keywords = _pytree.tree_unflatten(words, call.form)
        known[f"f{number}"] = call.function
        given = [*map(repr, arguments), *(f"{key}={value!r}" for key, value in keywords.items())]
        names[call] = f"v{number}"
        lines.append(f"    v{number} = f{number}({', '.join(given)})")
    values = "".join(f"{names[expression]}, " for expression in expressions)
    source = "\n".join((f"def values({', '.join(names[s] for s in sources)}):", *lines))
    exec(f"{source}\n    return ({values})\n", known)  # noqa: S102 - no text of a user's is in it
    found: Callable[..., Any] = known["values"]
    return found


class _Word(str):
    """A word of a program: shown as it is, also inside of a list."""

    __slots__ = ()
    __repr__ = str.__str__
