"""Calls of kernels over a range of channels: how those that read or make a weight are split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poetmodel.export.step import Call, LearningRate, Ref

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.export.step import Argument

    Rule = Callable[[list[Argument], int, "Range"], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Some of the output channels of a weight, its first dimension."""

    first: int
    count: int
    channels: int
    """Of the whole weight."""
    row: int
    """Elements of one channel."""


def in_range(call: Call, whole: str, tile: str, part: Range) -> Call | None:
    """Return the part of a call that is about one tile of a weight, or of its gradient.

    The parts of all tiles, in order, do together what the call does. There is none where the kernel
    takes no ranges, or where the call is about something else than the weight as it lies.
    """
    rule = _RULES.get(call.kernel)
    places = [k for k, a in enumerate(call.arguments) if isinstance(a, Ref) and a.buffer == whole]
    if rule is None or len(places) != 1 or call.arguments[places[0]] != Ref(whole):
        return None
    arguments = list(call.arguments)
    if not rule(arguments, places[0], part):
        return None
    arguments[places[0]] = Ref(tile)
    return Call(call.kernel, tuple(arguments))


def by_element(call: Call, tiles: Mapping[str, str], part: Range) -> Call | None:
    """Return the part of an update that is about one tile; `tiles` has its names for the whole.

    Kernels of updates take pointers, then the count of elements, then numbers. All pointers are to
    so many elements, or to single numbers that all parts read.
    """
    refs = [a for a in call.arguments if isinstance(a, Ref)]
    count, *numbers = call.arguments[len(refs) :] or (0,)
    plain = all(isinstance(a, int | float | LearningRate) for a in numbers)
    whole = all(ref.offset == 0 for ref in refs)
    if not plain or not whole or count != part.channels * part.row:
        return None
    renamed = (Ref(tiles.get(ref.buffer, ref.buffer)) for ref in refs)
    return Call(call.kernel, (*renamed, part.count * part.row, *numbers))


def _advance(arguments: list[Argument], place: int, elements: int) -> None:
    """Let a pointer point to a later element; one that is not there is a number, and stays."""
    ref = arguments[place]
    if isinstance(ref, Ref):
        arguments[place] = Ref(ref.buffer, ref.offset + elements)


# -- convolutions --------------------------------------------------------------------------------

_OUT, _OUT_H, _OUT_W, _GROUPS = 3, 4, 5, 14
"""Places in the list of sizes, as in ``pm_conv.h``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolution:
    """Where a kernel has what it takes: three tensors, sizes, batch, first channel and count.

    Strided ones have the steps of the three tensors, four each, after the sizes.
    """

    weight: int
    """The weight, or its gradient."""
    result: int
    """The tensor that has the channels too: the output of the layer, or its gradient."""
    sizes: int
    bias: int | None = None
    strided: bool = False
    sums: bool = False
    """Whether it sums over the channels; the last argument then says that it goes on."""

    def __call__(self, arguments: list[Argument], place: int, part: Range) -> bool:
        """Restrict the arguments to a range; return False where that cannot be."""
        sizes, first = arguments[self.sizes], self.sizes + 2 + self.strided
        all_channels = arguments[first : first + 2] == [0, part.channels]
        if place != self.weight or not isinstance(sizes, tuple) or not all_channels:
            return False
        step = sizes[_OUT_H] * sizes[_OUT_W]
        if self.strided:
            steps = arguments[self.sizes + 1]
            if not isinstance(steps, tuple) or steps[4 * self.weight] != part.row:
                return False
            step = steps[4 * self.result + 1]
        if sizes[_GROUPS] != 1 or sizes[_OUT] != part.channels:
            return False
        _advance(arguments, self.result, part.first * step)
        if self.bias is not None:
            _advance(arguments, self.bias, part.first)
        arguments[first : first + 2] = [part.first, part.count]
        if self.sums and part.first:
            arguments[-1] = 1
        return True


# -- products of matrices ------------------------------------------------------------------------

_M, _K, _N, _OUT_ROW, _A_ROW, _A_COLUMN, _B_ROW, _B_COLUMN, _ACCUMULATE = range(3, 12)
"""Places in the arguments of ``pm_mm``, after out, a and b."""


def _product(arguments: list[Argument], place: int, part: Range) -> bool:
    """Restrict a product, of which the weight is a factor or the result, to a range."""
    given = arguments

    def is_whole(size: int, step: int) -> bool:
        return given[size] == part.channels and given[step] == part.row

    def moved(size: int, other: int, step: Argument) -> bool:
        if isinstance(step, int):
            _advance(given, other, part.first * step)
            given[size] = part.count
        return isinstance(step, int)

    match place:
        case 0 if is_whole(_M, _OUT_ROW):
            return moved(_M, 1, given[_A_ROW])
        case 1 if is_whole(_M, _A_ROW):
            return moved(_M, 0, given[_OUT_ROW])
        case 2 if is_whole(_N, _B_COLUMN):
            return moved(_N, 0, 1)
        case 1 | 2 if is_whole(_K, _A_COLUMN if place == 1 else _B_ROW):
            if part.first:
                given[_ACCUMULATE] = 1
            return moved(_K, 3 - place, given[_B_ROW if place == 1 else _A_COLUMN])
    return False


_RULES: Final[dict[str, Rule]] = {
    "pm_conv2d": _Convolution(weight=2, result=0, sizes=4, bias=3),
    "pm_conv2d_strided": _Convolution(weight=2, result=0, sizes=4, bias=3, strided=True),
    "pm_conv2d_dw": _Convolution(weight=0, result=2, sizes=3),
    "pm_conv2d_dw_strided": _Convolution(weight=0, result=2, sizes=3, strided=True),
    "pm_conv2d_dx": _Convolution(weight=2, result=1, sizes=3, sums=True),
    "pm_conv2d_dx_strided": _Convolution(weight=2, result=1, sizes=3, strided=True, sums=True),
    "pm_mm": _product,
}
"""For each kernel what restricts its arguments, given where the weight is among them."""
