"""The registry of lowerings, one function per ATen operator, and operands of kernel calls."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import fx

from poetmodel.lowered.calls import (
    WORKSPACE,
    Argument,
    Call,
    Condition,
    DataType,
    Ref,
    ScaledLearningRate,
)
from poetmodel.lowered.kernels import find_kernel, kernel_names
from poetmodel.lowered.loops import MAX_RANK, merge_dimensions
from poetmodel.torch.capturing.joint_graph import location_suffix
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.graph.operators import arguments_with_defaults, is_random, register_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from poetmodel.lowered.kernels import Parameter

    Lower = Callable[["Lowering"], None]

_DATA_TYPES: Final = {
    torch.float32: DataType.REAL,
    torch.int64: DataType.INT32,
    torch.int32: DataType.INT32,
    torch.bool: DataType.UINT8,
    torch.uint8: DataType.UINT8,
    torch.int8: DataType.INT8,
}

NO_KERNEL: Final = "has no kernel for elements of this type"
"""Reason why an operator is refused."""
_LOWERINGS: Final[dict[Any, Lower]] = {}
"""The function that lowers each operator or custom operation."""
lowers: Final = register_in(_LOWERINGS)
"""Decorator that registers, or replaces, the lowering of operators."""


def find_lowering(target: Any) -> Lower | None:
    """Return the lowering of an operator or of a custom operation; None if none is registered."""
    return _LOWERINGS.get(target) or _LOWERINGS.get(type(target))


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedView:
    """A tensor or a view of one: its elements in a buffer, by shape and strides."""

    buffer: str
    """Name of the buffer."""
    offset: int
    """Index of the first element in the buffer."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides of the dimensions [elements]."""
    type: DataType

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ref(self) -> Ref:
        """Pointer to the first element."""
        return Ref(self.buffer, self.offset)

    @property
    def is_contiguous(self) -> bool:
        """Whether strides are those of a contiguous row-major tensor, except for sizes of 1."""
        return self.strides == contiguous_strides(self.shape) or all(
            size == 1 or stride == contiguous_stride
            for size, stride, contiguous_stride in zip(
                self.shape, self.strides, contiguous_strides(self.shape), strict=True
            )
        )

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill a contiguous range of memory, in any order of dimensions.

        True without elements. Valid only if elements do not overlap.
        """
        if not self.elements:
            return True
        return sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        ) == self.elements - 1 and 0 not in (
            stride for size, stride in zip(self.shape, self.strides, strict=True) if size > 1
        )

    def has_layout_of(self, other: StridedView) -> bool:
        """Return whether two views have the same shape and, for sizes other than 1, strides."""
        return self.shape == other.shape and all(
            size == 1 or stride == other_stride
            for size, stride, other_stride in zip(
                self.shape, self.strides, other.strides, strict=True
            )
        )

    def broadcast(self, shape: tuple[int, ...]) -> StridedView:
        """Return the view broadcast to a shape, by strides of 0; PyTorch must permit it."""
        new_rank = len(shape) - len(self.shape)
        dimensions = zip(shape[new_rank:], self.shape, self.strides, strict=True)
        strides = (
            *[0] * new_rank,
            *(0 if size != new_size else stride for new_size, size, stride in dimensions),
        )
        return StridedView(
            buffer=self.buffer, offset=self.offset, shape=shape, strides=strides, type=self.type
        )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major strides of a contiguous tensor [elements]."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))[: len(shape)] if shape else ()


def data_type(dtype: torch.dtype) -> DataType | None:
    """Return the type of elements in exported code; None if the type is not supported."""
    return _DATA_TYPES.get(dtype)


class Lowering:
    """An operation that is lowered: its operands, and the calls added so far.

    `get_view` returns the view of an operand from its node, `outputs` has those of the outputs, by
    position. `relative_rates` are learning rates as multiples of the first parameter group's.
    """

    def __init__(
        self,
        node: fx.Node,
        get_view: Callable[[fx.Node], StridedView],
        outputs: Mapping[int, StridedView],
        *,
        relative_rates: Mapping[fx.Node, float] | None = None,
    ) -> None:
        self.node = node
        self.args: tuple[Any, ...] = arguments_with_defaults(node)
        """The arguments in the order of the schema, with defaults."""
        self.calls: list[Call] = []
        self.condition: Condition | None = None
        """Condition of the calls added next; None if they are unconditional."""
        self.workspace_bytes = 0
        """Bytes of workspace that tensors of the lowering occupy so far."""
        self.can_overwrite_operand = False
        """Whether the first output may overwrite an operand of its layout: the kernels then read
        each element of the operand before they overwrite it."""
        self._get_view = get_view
        self._outputs = outputs
        self._relative_rates = relative_rates or {}

    def value(self, argument: Any) -> StridedView:
        """Return the view of an operand that is a tensor, not a number."""
        return self._get_view(argument)

    def learning_rate(self, argument: Any) -> ScaledLearningRate:
        """Return the rate of an update as a multiple, 1 by default, of the first group's."""
        return ScaledLearningRate(self._relative_rates.get(argument, 1.0))

    def output(self, position: int = 0) -> StridedView:
        """Return the view of an output; a single output has position 0 (see `has_output`)."""
        return self._outputs[position]

    def has_output(self, position: int) -> bool:
        """Return whether the operation allocates an output there; new state, in place, does not."""
        return position in self._outputs

    @property
    def returns_bytes(self) -> bool:
        """Whether the result has type uint8, which is stored like booleans."""
        return getattr(self.node.meta.get("val"), "dtype", None) is torch.uint8

    def call(
        self,
        kernel: str,
        *arguments: Argument | StridedView,
        index_range: tuple[int, int] | None = None,
    ) -> None:
        """Add a call under `condition`; a view becomes the pointer to its first element.

        `index_range` is (minimum, maximum + 1) of valid numbers in the kernel's index tensors.
        """
        if kernel not in kernel_names():
            self.refuse(NO_KERNEL)
        for argument, (_, c_type) in zip(arguments, find_kernel(kernel).parameters, strict=True):
            if isinstance(argument, StridedView) and argument.type.c_name not in c_type:
                type_texts = (kind.text for kind in DataType if kind.c_name in c_type)
                self.refuse(f"expected {next(type_texts, c_type)}, got {argument.type.text}")
        values = tuple(
            argument.ref if isinstance(argument, StridedView) else argument
            for argument in arguments
        )
        self.calls.append(Call(kernel, values, self.condition, index_range))

    def refuse(self, reason: str) -> NoReturn:
        """Raise `CaptureError` with the operator, its location in the model, and the reason."""
        raise CaptureError(f"{self.node.target}{location_suffix(self.node)}: {reason}")


def aten_name(op: Lowering) -> str:
    """Return the name of an ATen operator, without its overload."""
    name: str = op.node.target._schema.name
    return name.removeprefix("aten::")


# -- arguments of kernels about tensors --------------------------------------------------------


def shape_table(op: Lowering, *views: StridedView, preserve_order: bool = False) -> tuple[int, ...]:
    """Return the shape table of views of one shape, as defined in ``pm_each.h``.

    It has the number of dimensions, then size and strides of each, the innermost first. Dimensions
    of size 1 are omitted. Unless `preserve_order`, the rest are sorted by the first view's strides,
    the largest outermost; then contiguous neighbours are merged.
    """
    dimensions = [
        (views[0].shape[i], *(view.strides[i] for view in views))
        for i in range(len(views[0].shape))
        if views[0].shape[i] != 1
    ]
    if not preserve_order:
        dimensions.sort(key=lambda dimension: -abs(dimension[1]))
    if any(size == 0 for size, *_ in dimensions):
        return (1, 0, *(0 for _ in views))
    rows = merge_dimensions(list(zip(*reversed(dimensions), strict=True))) or [
        [1, *(0 for _ in views)]
    ]
    if len(rows) > MAX_RANK:
        op.refuse(f"expected at most {MAX_RANK} dimensions that cannot be merged, got {len(rows)}")
    return (len(rows), *(number for row in rows for number in row))


def slice_view(
    view: StridedView, dimension: int, start: int, size: int, step: int = 1
) -> StridedView:
    """Return `size` elements of a view along a dimension, from `start` by `step`; unchecked."""
    stride = view.strides[dimension]
    return replace(
        view,
        offset=view.offset + start * stride,
        shape=_replace_item(view.shape, dimension, size),
        strides=_replace_item(view.strides, dimension, stride * step),
    )


def remove_dimensions(view: StridedView, dimensions: Iterable[int]) -> StridedView:
    """Return a view at the first index of some dimensions, without these dimensions."""
    remaining_dimensions = [i for i in range(len(view.shape)) if i not in set(dimensions)]
    return select_dimensions(view, remaining_dimensions)


def select_dimensions(view: StridedView, dimensions: Sequence[int]) -> StridedView:
    """Return a view with some dimensions, in the given order, at index 0 of all other ones."""
    return replace(
        view,
        shape=tuple(view.shape[i] for i in dimensions),
        strides=tuple(view.strides[i] for i in dimensions),
    )


def repeat_element(view: StridedView, dimension: int) -> StridedView:
    """Return a view that repeats its elements at index 0 of a dimension along this dimension."""
    return replace(view, strides=_replace_item(view.strides, dimension, 0))


def _replace_item(numbers: tuple[int, ...], index: int, number: int) -> tuple[int, ...]:
    return (*numbers[:index], number, *numbers[index + 1 :])


def positive_dimension(dimension: int, rank: int) -> int:
    """Return the index of a dimension, negative from the end; 0 for a tensor without any."""
    return dimension % rank if rank else 0


def allocate_workspace(
    op: Lowering, shape: tuple[int, ...], kind: DataType = DataType.REAL
) -> StridedView:
    """Allocate a tensor in the workspace, 4 bytes per element; increase `op.workspace_bytes`."""
    offset = op.workspace_bytes // 4
    op.workspace_bytes += 4 * math.prod(shape)
    return StridedView(
        buffer=WORKSPACE, offset=offset, shape=shape, strides=contiguous_strides(shape), type=kind
    )


def convert_operand(op: Lowering, argument: Any, kind: DataType = DataType.REAL) -> StridedView:
    """Return an operand as a tensor of type `kind`, in workspace if it must be written first."""
    if not isinstance(argument, fx.Node):
        scalar = allocate_workspace(op, (), kind)
        number = float(argument) if kind is DataType.REAL else int(argument)
        op.call(f"pm_fill{kind.suffix}", scalar, 1, number)
        return scalar
    view = op.value(argument)
    if view.type is kind:
        return view
    if kind is DataType.UINT8:
        op.refuse(f"expected truth values, got elements of type {view.type}")
    converted_view = allocate_workspace(op, view.shape, kind)
    copy(op, converted_view, view)
    return converted_view


def _element_type(parameter: Parameter) -> DataType:
    """Return the type of a number, or of the elements of a tensor, that a kernel takes."""
    return next(kind for kind in DataType if kind.c_name in parameter.type.split())


def lower_pointwise(op: Lowering, kernel: str, *arguments: Any) -> None:
    """Add the call of a kernel for all elements of the output; set `op.can_overwrite_operand`.

    Arguments are the kernel's operands, then its constants, of the types that its prototype states;
    operands are broadcast, and further arguments ignored. An output of another type is refused.
    """
    if kernel not in kernel_names():
        op.refuse(NO_KERNEL)
    out, parameters = op.output(), find_kernel(kernel).parameters
    shape_position = find_kernel(kernel).index_of["shape"]
    views = [
        convert_operand(op, argument, _element_type(parameter)).broadcast(out.shape)
        for argument, parameter in zip(arguments, parameters[1:shape_position], strict=False)
    ]
    constants = (
        float(argument) if _element_type(parameter) is DataType.REAL else int(argument)
        for argument, parameter in zip(
            arguments[len(views) :], parameters[shape_position + 1 :], strict=False
        )
    )
    op.call(kernel, out, *views, shape_table(op, out, *views), *constants)
    op.can_overwrite_operand = True


def random_site(node: fx.Node) -> int:
    """Return the index of a node among the random operators of its graph."""
    return [other for other in node.graph.nodes if is_random(other.target)].index(node)


def copy(op: Lowering, out: StridedView, x: StridedView) -> None:
    """Add a call that broadcasts and copies a tensor, and converts its type if necessary."""
    x = x.broadcast(out.shape)
    if out.type is x.type:
        op.call(x.type.copy_kernel, out, x, shape_table(op, out, x))
    elif out.type is DataType.UINT8 and op.returns_bytes:
        op.refuse("expected truth values: there is no kernel that converts numbers to bytes")
    else:
        op.call(f"pm_{x.type.word}_to_{out.type.word}", out, x, shape_table(op, out, x))


def make_contiguous(op: Lowering, view: StridedView) -> StridedView:
    """Return a contiguous tensor: `view` itself, or a copy in workspace, which a call writes."""
    if view.is_contiguous:
        return view
    contiguous_view = allocate_workspace(op, view.shape, view.type)
    copy(op, contiguous_view, view)
    return contiguous_view


def fill(op: Lowering, out: StridedView, number: float) -> None:
    """Add a call that sets all elements of a dense tensor to a number; refuse other tensors.

    Unless the elements are real, the number is truncated to an integer.
    """
    if not out.is_dense:
        op.refuse("expected a dense output")
    value: Argument = float(number) if out.type is DataType.REAL else int(number)
    op.call(f"pm_fill{out.type.suffix}", out, out.elements, value)


def plane_layout(
    *views: StridedView, plane_dimensions: int = 2
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (strides view by view, sizes of the first view): batch, channels, rows, columns.

    The last `plane_dimensions` dimensions, 1 or 2, are the columns, or rows and columns. Missing
    dimensions have size 1 and stride 0.
    """

    def add_dimensions(values: tuple[int, ...], missing_value: int) -> tuple[int, ...]:
        leading_rank = len(values) - plane_dimensions
        missing_leading = (missing_value,) * (2 - leading_rank)
        missing_rows = (missing_value,) * (2 - plane_dimensions)
        return (
            *missing_leading, *values[:leading_rank], *missing_rows, *values[leading_rank:]
        )  # fmt: skip

    strides = (stride for view in views for stride in add_dimensions(view.strides, 0))
    return tuple(strides), add_dimensions(views[0].shape, 1)
