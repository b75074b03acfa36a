"""What the code of a model keeps of a capture outside of its modules: found, and taken away.

A table that a function keeps (``functools.lru_cache``, a dictionary, a name of a Python module)
would hold a tensor of the capture, which is no number: eager PyTorch fails that reads it later.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections import deque
from functools import lru_cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from poetmodel.torch.errors import chain
from poetmodel.torch.module_state import fill, is_of_a_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_Cached: Final = type(lru_cache(lambda: None))
_LEVELS: Final = 4
"""How deep in tuples a tensor is looked for."""


class Leftovers:
    """Tensors of a capture that outlive it, and what the names of Python's modules were before."""

    def __init__(self) -> None:
        modules = [module for module in list(sys.modules.values()) if type(module) is ModuleType]
        self._names = {id(vars(module)): dict(vars(module)) for module in modules}
        """Of each Python module its names, by the identity of their dictionary."""
        self._collections = _old_collections()
        self._known: list[Callable[[], object]] = []
        """What empties all that is known to keep tensors."""
        self.kept_by: set[str] = set()
        """The names and keys that held such tensors the last time."""

    def learn(self, error: BaseException) -> bool:
        """Take away what a failed capture has left; return whether it should be tried again.

        PyTorch runs the model several times, and fails where the code keeps what the first run
        made: so from now on `forget` takes it away before the next run.
        """
        for link in chain(error):
            traceback.clear_frames(link.__traceback__)  # their variables are kept by no code
        gc.collect()  # nor is what only holds itself
        found = self.take_away()
        new = bool(found) and not self._known
        self._known += found
        return new

    def forget(self) -> None:
        """Empty all that is known to keep tensors of a forward pass."""
        for empty in self._known:
            empty()

    def take_away(self) -> list[Callable[[], object]]:
        """Take tensors of a capture from all that keeps them; return what does it again."""
        self.kept_by.clear()
        level: Sequence[Any] = [each for each in self._young() if type(each) is FunctionalTensor]
        found: list[Callable[[], object]] = []
        for _ in range(_LEVELS):
            if level:
                ways, level = self._holders(level)
                found += ways
        for empty in found:
            empty()
        return found

    def _holders(self, kept: Sequence[Any]) -> tuple[list[Callable[[], object]], Sequence[Any]]:
        """Return what empties those that hold some objects, and those that cannot be emptied."""
        ids = {id(each) for each in kept}
        holders = [each for each in gc.get_referrers(*kept) if each is not kept]
        found = [empty for each in holders for empty in self._ways(each, ids)]
        return found, [each for each in holders if isinstance(each, tuple | frozenset)]

    def _young(self) -> Sequence[Any]:
        """Return the objects that may have been made since."""
        if sys.version_info >= (3, 14) or _old_collections() != self._collections:
            return gc.get_objects()
        return gc.get_objects(generation=0) + gc.get_objects(generation=1)

    def _ways(self, holder: Any, ids: set[int]) -> Iterator[Callable[[], object]]:
        """Yield what takes objects out of what holds them."""
        if isinstance(holder, _Cached):
            yield holder.cache_clear
        elif isinstance(holder, dict):
            keys = [
                key
                for key, value in holder.items()
                # PyTorch's own tables, which the frames of a failure hold, have fake keys.
                if (id(value) in ids or id(key) in ids) and not isinstance(key, FakeTensor)
            ]
            yield from (self._way(holder, key) for key in keys)
        elif isinstance(holder, list | set | deque):
            content = [each for each in holder if id(each) not in ids]
            yield partial(fill, holder, content)
        elif is_of_a_user(holder):
            for key in [key for key, value in vars(holder).items() if id(value) in ids]:
                self.kept_by.add(key)
                yield partial(setattr, holder, key, None)

    def _way(self, holder: dict[Any, Any], key: Any) -> Callable[[], object]:
        """Return what takes a key out of a dictionary: a name is what it was, or is None."""
        before = self._names.get(id(holder), {})
        owners = gc.get_referrers(holder)
        if not any(isinstance(each, _Cached) for each in owners):
            self.kept_by.add(str(key))
        if key in before:
            return partial(holder.__setitem__, key, before[key])
        for each in owners:
            if isinstance(each, type):
                return partial(setattr, each, key, None)
            if not isinstance(each, ModuleType) and getattr(each, "__dict__", None) is holder:
                return partial(holder.__setitem__, key, None)
        return partial(holder.pop, key, None)


def _old_collections() -> int:
    """Return how often Python has collected, and so made oldest objects of others."""
    return sum(int(each["collections"]) for each in gc.get_stats()[1:])
