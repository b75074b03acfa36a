"""Finding the tensors of a module by their paths, all of them at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Lookup:
    """Finds what lies below a module at some paths.

    Parameters
    ----------
    paths : sequence of str
        Such as ``layers.0.weight``.

    Notes
    -----
    What is there at the time of the call counts: modules and tensors may be replaced between two
    calls. Modules that several paths go through are fetched once.

    Examples
    --------
    >>> from types import SimpleNamespace as Module
    >>> module = Module(layer=Module(weight=1, bias=2))
    >>> Lookup(["layer.bias", "layer.weight"])(module)
    [2, 1]
    """

    def __init__(self, paths: Sequence[str]) -> None:
        places: dict[str, int] = {"": 0}
        self._owners: list[tuple[int, str]] = []
        """For each module below the first: the place of the one that it is in, and its name."""
        self._tensors: list[tuple[int, str]] = []
        """For each path: the place of its module, and the last name."""
        for path in paths:
            *owners, name = path.split(".")
            place, prefix = 0, ""
            for owner in owners:
                prefix += f".{owner}"
                if prefix not in places:
                    places[prefix] = len(places)
                    self._owners.append((place, owner))
                place = places[prefix]
            self._tensors.append((place, name))

    def __call__(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Return what is there, in the order of the paths."""
        owners = [module]
        for place, name in self._owners:
            owners.append(getattr(owners[place], name))
        return [getattr(owners[place], name) for place, name in self._tensors]
