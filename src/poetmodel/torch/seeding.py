"""Seeds: a forward pass that sets them cannot be captured, and is told so."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from poetmodel.torch.failures import SeedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@contextmanager
def refused_seeding() -> Iterator[None]:
    """Raise where the random generator is seeded inside; its state is put back afterwards.

    Raises
    ------
    SeedError
        At the call.
    """
    import torch

    generator = torch.default_generator
    with torch.random.fork_rng(devices=[]):
        # What torch.manual_seed and torch.seed call; the functions themselves must stay, because
        # PyTorch keeps tables of them, which it may make inside.
        torch.default_generator = torch.random.default_generator = _Unseedable(generator)
        try:
            yield
        finally:
            torch.default_generator = torch.random.default_generator = generator


class _Unseedable:
    """A random generator that cannot be seeded."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def manual_seed(self, _: int) -> NoReturn:
        raise SeedError

    def seed(self) -> NoReturn:
        raise SeedError
