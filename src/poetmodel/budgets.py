"""Parsing of ``--ram`` and ``--tile``, for all commands and functions.

A percentage of RAM refers to the *keep-all peak*: the peak of the tensors and workspaces that the
budget counts when all tensors are kept; for a step in tiles, the peak of the undivided step. If a
problem counts parameters, resident bytes are added to the peak. Other RAM, such as the stack of
exported C, is not part of the percentage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from poetmodel.errors import InputError
from poetmodel.units import parse_fraction, parse_size

if TYPE_CHECKING:
    from fractions import Fraction

_NONE: Final = "none"
"""Text of ``--tile`` for no tiles."""
_AUTO: Final = "auto"
"""Text of ``--tile`` for tiles of an automatic size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A RAM budget: a size, or a fraction of the keep-all peak."""

    stated_value: str | int
    """The text or number from which the budget was parsed."""
    fraction: Fraction | None
    """Fraction of the keep-all peak; None for a size."""
    field: str
    """Name of the budget in errors."""

    @classmethod
    def parse(cls, value: str | int | Budget, *, field: str = "ram") -> Budget:
        """Parse ``256KiB``, 262144 or ``50%``, up to 2^53 bytes; return a `Budget` unchanged.

        Raises `BudgetError`; the message begins with `field`.
        """
        if isinstance(value, Budget):
            return value
        parse_size(value, field=field, base_bytes=1)
        return cls(stated_value=value, fraction=parse_fraction(value), field=field)

    @classmethod
    def from_bytes(cls, size_bytes: int) -> Budget:
        """Make a budget from a size [B]; errors name it ``ram``."""
        return cls(stated_value=f"{size_bytes}B", fraction=None, field="ram")

    def __str__(self) -> str:
        return str(self.stated_value)

    @property
    def keeps_all(self) -> bool:
        """Whether the budget is a fraction of at least 100 % of the keep-all peak."""
        return self.fraction is not None and self.fraction >= 1

    @property
    def size_bytes(self) -> int | None:
        """The size [B]; None for a fraction."""
        return None if self.fraction is not None else self.resolve(0)

    def to_size(self, keep_all_bytes: int) -> Budget:
        """Return the budget as a size; a fraction is of the keep-all peak [B]."""
        return self if self.fraction is None else Budget.from_bytes(self.resolve(keep_all_bytes))

    def resolve(self, keep_all_bytes: int) -> int:
        """Return the size, rounded down [B]; a fraction is of the keep-all peak [B]."""
        return parse_size(self.stated_value, field=self.field, base_bytes=keep_all_bytes)

    def tensor_bytes(self, keep_all_bytes: int, *, reserved_bytes: int) -> int:
        """Return the RAM for tensors and workspaces, rounded down [B]; it may be negative.

        A fraction is of the keep-all peak, which excludes `reserved_bytes`; so these are subtracted
        only from a size.
        """
        excluded_bytes = 0 if self.fraction is not None else reserved_bytes
        return self.resolve(keep_all_bytes) - excluded_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TileChoice:
    """Choice of the tiles of a step: a given size, an automatic size, or no tiles."""

    size_bytes: int | None = None
    """Given maximum size of a tile [B]; None for `WHOLE` and `AUTO`."""
    is_auto: bool = False
    """Whether the tile size is chosen so that the step fits a device."""

    WHOLE: ClassVar[TileChoice]
    """No tiles."""
    AUTO: ClassVar[TileChoice]
    """Tiles of an automatic size."""

    @classmethod
    def parse(cls, value: str | int | TileChoice | None) -> TileChoice:
        """Parse ``auto``, ``none`` (or None), or a size from 1 to 2^53 bytes; else `InputError`."""
        if isinstance(value, TileChoice):
            return value
        if value is None or value == _NONE:
            return cls.WHOLE
        if value == _AUTO:
            return cls.AUTO
        size_bytes = parse_size(value or 0, field="tile")
        if size_bytes == 0:
            raise InputError("tile: expected a size above 0 bytes, such as 32KiB")
        return cls(size_bytes=size_bytes)

    def __str__(self) -> str:
        if self.is_auto:
            return _AUTO
        return _NONE if self.size_bytes is None else f"{self.size_bytes}B"

    @property
    def is_whole(self) -> bool:
        """Whether there are no tiles."""
        return self == TileChoice.WHOLE

    def require_size(self) -> int | None:
        """Return the size [B], or None without tiles; raise `InputError` for ``auto``."""
        if self.is_auto:
            raise InputError(
                "tile: auto is chosen for the RAM of a device; give the size that 'poetmodel "
                "export' prints, such as 32KiB"
            )
        return self.size_bytes


TileChoice.WHOLE = TileChoice()
TileChoice.AUTO = TileChoice(is_auto=True)
