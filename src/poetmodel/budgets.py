"""The meaning of ``--ram`` and ``--tile``, in every command and function alike.

A percentage of RAM is a share of the *keep-all peak*: the peak of the tensors and workspaces that
the budget counts when everything is kept, for a step in tiles that of the whole step. What else
takes RAM beside them, such as the stack of exported C, comes on top of the share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from poetmodel.errors import InputError
from poetmodel.units import parse_share, parse_size

if TYPE_CHECKING:
    from fractions import Fraction

_NONE: Final = "none"
_AUTO: Final = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A RAM budget as stated: a size, or a share of the keep-all peak."""

    stated: str | int
    """The text or number."""
    share: Fraction | None
    """The fraction of the keep-all peak; None for a size."""
    field: str
    """Name of the budget in errors."""

    @classmethod
    def parse(cls, value: str | int | Budget, *, field: str = "ram") -> Budget:
        """Return the budget that a text or a number of bytes states.

        Raises
        ------
        BudgetError
            If `value` is no size, such as ``256KiB``, 262144 or ``50%``.
        """
        if isinstance(value, Budget):
            return value
        parse_size(value, field=field, whole_bytes=1)
        return cls(stated=value, share=parse_share(value), field=field)

    @classmethod
    def of_bytes(cls, size_bytes: int) -> Budget:
        """Return the budget of a size [B]."""
        return cls(stated=f"{size_bytes}B", share=None, field="ram")

    def __str__(self) -> str:
        return str(self.stated)

    @property
    def keeps_all(self) -> bool:
        """Whether it is a share of at least 100 %: there is room to keep everything."""
        return self.share is not None and self.share >= 1

    @property
    def size_bytes(self) -> int | None:
        """The size [B]; None for a share."""
        return None if self.share is not None else self.resolve(0)

    def in_bytes(self, keep_all_bytes: int) -> Budget:
        """Return the same budget as a size; a share is one of the keep-all peak [B]."""
        return self if self.share is None else Budget.of_bytes(self.resolve(keep_all_bytes))

    def resolve(self, keep_all_bytes: int) -> int:
        """Return the budget rounded down [B]; a share is one of the keep-all peak [B]."""
        return parse_size(self.stated, field=self.field, whole_bytes=keep_all_bytes)

    def tensor_bytes(self, keep_all_bytes: int, *, reserved_bytes: int) -> int:
        """Return the RAM for what the keep-all peak counts [B], below 0 if there is none.

        `reserved_bytes` are for what it does not count [B]: a size has them in it, a share has not.
        """
        beside = 0 if self.share is not None else reserved_bytes
        return self.resolve(keep_all_bytes) - beside


@dataclass(frozen=True, slots=True, kw_only=True)
class TileChoice:
    """The tiles of a step as stated: of a size, of the best size that fits a device, or none."""

    size_bytes: int | None = None
    """The largest tile [B]; None for another choice."""
    is_auto: bool = False
    """Whether the size is chosen for the RAM of a device."""

    WHOLE: ClassVar[TileChoice]
    """No tiles."""
    AUTO: ClassVar[TileChoice]
    """Tiles of a size that fits a device."""

    @classmethod
    def parse(cls, value: str | int | TileChoice | None) -> TileChoice:
        """Return the choice that a text or a number of bytes states; None is ``none``.

        Raises
        ------
        InputError
            If `value` is neither ``auto``, ``none`` nor a size above 0.
        """
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
        """Return the size [B], None without tiles; raise `InputError` for ``auto``."""
        if self.is_auto:
            raise InputError(
                "tile: auto is chosen for the RAM of a device; give the size that 'poetmodel "
                "export' prints, such as 32KiB"
            )
        return self.size_bytes


TileChoice.WHOLE = TileChoice()
TileChoice.AUTO = TileChoice(is_auto=True)
