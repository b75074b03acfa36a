"""Random numbers that are not PyTorch's: a capture would hold the first ones for good."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from poetmodel.torch.failures import RAISED, CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.torch.attributes import Attributes


@dataclass(frozen=True, slots=True)
class _Source:
    """A random generator that is not PyTorch's."""

    told: str
    state: Callable[[], Any]
    set_state: Callable[[Any], object]


class Draws:
    """Notices draws from ``random`` and ``numpy.random``, and from generators that modules hold.

    Parameters
    ----------
    name : str
        What messages call the step.
    attributes : Attributes
        What modules hold.
    """

    def __init__(self, name: str, attributes: Attributes) -> None:
        self._name = name
        self._sources = tuple(filter(_has_state, _sources(attributes)))
        self._before = [_comparable(source.state()) for source in self._sources]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the states back at the end."""
        states = [source.state() for source in self._sources]
        try:
            yield
        finally:
            for source, state in zip(self._sources, states, strict=True):
                if _comparable(source.state()) != _comparable(state):
                    source.set_state(state)

    def check(self, trail: Sequence[str] = ()) -> None:
        """Raise `CaptureError` if a state is not what it was, and name the innermost module."""
        for source, before in zip(self._sources, self._before, strict=True):
            if _comparable(source.state()) != before:
                where = f" in {trail[-1]}" if trail else ""
                msg = (
                    f"{self._name}: forward draws from {source.told}{where}, and a compiled step "
                    "would repeat what was drawn when it was captured; draw with PyTorch "
                    "(torch.rand, ...), or outside of the step and give it as an input"
                )
                raise CaptureError(msg)


def _has_state(source: _Source) -> bool:
    """Return whether a generator can be put back: one of the operating system has no state."""
    try:
        source.state()
    except RAISED:
        return False
    return True


def _sources(attributes: Attributes) -> Iterator[_Source]:
    yield _Source("Python's random", random.getstate, random.setstate)
    numpy: Any = sys.modules.get("numpy.random")
    for found in {id(own): own for own in attributes.reached((random.Random,))}.values():
        yield _Source("a random.Random", found.getstate, found.setstate)
    if numpy is None:
        return
    yield _Source("numpy.random", numpy.get_state, numpy.set_state)
    for found in attributes.reached((numpy.RandomState,)):
        yield _Source("a numpy.random.RandomState", found.get_state, found.set_state)
    for found in attributes.reached((numpy.Generator, numpy.BitGenerator)):
        bits = getattr(found, "bit_generator", found)
        yield _Source(
            "a generator of numpy.random",
            partial(getattr, bits, "state"),
            partial(setattr, bits, "state"),
        )


_LONG: Final = 16
"""Tuples of so many numbers are compared as they are."""


def _comparable(state: Any) -> Any:
    """Return a state as something that can be compared; arrays as bytes."""
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    if isinstance(state, tuple) and len(state) < _LONG:
        return tuple(map(_comparable, state))
    return state.tobytes() if hasattr(state, "tobytes") else state
